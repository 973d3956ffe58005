"""SAEBench itself on our models and features, beside our own figures: the judge of measures.py's definitions.

    pip install -r requirements-saebench.txt                   in an environment of its own: see there
    JAXTYPING_DISABLE=1 python probe.py out/tiny --saebench    every source at the middle layer; saebench.json

SAEBench 0.6.0 runs its own code from texts to scores: tokens, activations, probes, features, ablations. Two things
stand between it and us:
  Hooked      a HookedTransformer whose one hook point of a layer, blocks.N.hook_resid_post, is the site that is asked
              for. (SAEBench's absorption knows no other name.)
  Unfolded    a source as a dense autoencoder of 2 m features: encode, decode, W_dec. Tokens that SAEBench has masked,
              by setting them to zero, have no features, or it would ablate what the source makes of a zero.
Its data sets come from a hub; some of probe_tasks.py's are put in their place. Then measures.py gets the same texts,
and what SAEBench draws or fits at random: which texts are negatives (the state of torch's generator is noted whenever
it draws, and the draw is done again), and the probes of SCR and TPP. All else is computed twice. Accuracies are counts,
so figures agree to rounding, unless a text lies so near to a boundary that scikit-learn's solver, which stops early,
puts it on the other side. Of absorption it is the calculator that runs, with our probes and main features: SAEBench's
search for those wants letters, which a toy model does not know.
"""
import contextlib
import importlib
import io
import math
import os
import tempfile
import types

import numpy as np
import torch

import measures
import probe_tasks
import probing
import toyworld
from checkpoint import checkpoint_path, open_run, weights_hash
from dpb import Code
from helpers import UserError, provenance, say, write_json
from sources import Enough
from tokenizer import encode
from truth import sources_of

CLASSES, TEXTS, PAIRS = 5, 48, 2   # topics, texts of each to train on and to test on, pairs for SCR
KS, NS = (1, 2, 5), (2, 5, 20)


MODULES = {"absorption": "evals.absorption.feature_absorption_calculator", "scr": "evals.scr_and_tpp.main",
           "creation": "evals.scr_and_tpp.dataset_creation", "scr_config": "evals.scr_and_tpp.eval_config",
           "probing_config": "evals.sparse_probing.eval_config", "probing_main": "evals.sparse_probing.main",
           "training": "evals.sparse_probing.probe_training", "info": "sae_bench_utils.dataset_info",
           "data": "sae_bench_utils.dataset_utils"}


def import_saebench():
    """SAEBench's modules, by our short names."""
    os.environ.setdefault("JAXTYPING_DISABLE", "1")
    try:
        return types.SimpleNamespace(**{short: importlib.import_module(f"sae_bench.{name}")
                                        for short, name in MODULES.items()})
    except ImportError as error:
        raise UserError(f"SAEBench is not installed here ({error}): make an environment for it, pip install -r "
                        "requirements-saebench.txt, and run this command there") from None


# The adapters


class Tokenizer:
    """As much of a Hugging Face tokenizer as SAEBench calls: texts after an end-of-text, filled up with such."""

    def __init__(self, encoding):
        self.encoding = encoding
        self.pad_token_id = self.eos_token_id = self.bos_token_id = encoding.eot_token

    def __call__(self, texts, max_length, **others):
        rows = [[self.eos_token_id, *encode(self.encoding, text).tolist()][:max_length] for text in texts]
        filled = torch.tensor([row + [self.eos_token_id] * (max_length - len(row)) for row in rows])
        found = types.SimpleNamespace(data={"input_ids": filled, "attention_mask": filled != self.eos_token_id})
        found.to = lambda device: found
        return found


def hooked(run, site):
    """The model of a run as a HookedTransformer."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.hook_points import HookPoint

    class Hooked(HookedTransformer):
        def __init__(self):
            super(HookedTransformer, self).__init__()  # none of its own weights
            config = run.config
            self.cfg = HookedTransformerConfig(
                n_layers=config.layers, d_model=config.d, n_ctx=config.context, d_head=config.d // config.heads,
                n_heads=config.heads, d_vocab=config.vocab_size, act_fn="gelu", model_name="ours")
            self.tokenizer, self.inner = Tokenizer(run.encoding), run.model
            self.blocks = torch.nn.ModuleList(torch.nn.Module() for _ in range(config.layers))
            for block in self.blocks:
                block.hook_resid_post = HookPoint()
            self.setup()

        def to_tokens(self, texts, **others):
            texts = [texts] if isinstance(texts, str) else texts
            rows = [[self.tokenizer.eos_token_id, *encode(run.encoding, text).tolist()] for text in texts]
            longest = max(map(len, rows))
            return torch.tensor([row + [self.tokenizer.eos_token_id] * (longest - len(row)) for row in rows])

        def forward(self, tokens, stop_at_layer=None, **others):
            tokens = tokens if isinstance(tokens, torch.Tensor) else self.to_tokens(tokens)

            def look(at, layer, x):
                if at == site:
                    x = self.blocks[layer].hook_resid_post(x)
                    if stop_at_layer is not None and layer + 1 >= stop_at_layer:
                        raise Enough
                return x
            with contextlib.suppress(Enough):
                self.inner.hidden(tokens, patch=look)
    return Hooked()


class Unfolded:
    """A source at a layer as a dense autoencoder of its 2 m unfolded features."""

    def __init__(self, source, layer):
        self.source, self.layer, self.m = source, layer, source.m
        self.device, self.dtype = torch.device("cpu"), torch.float32
        part = source.layers[layer]
        d = part.decode(Code(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1))).shape[-1]
        dots, _ = probing.decoder_dots(source, layer, np.eye(d))
        self.W_dec = torch.from_numpy(dots).float()
        self.W_enc = self.W_dec.T
        self.b_dec = part.decode(Code(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1)))[0].detach()
        self.cfg = types.SimpleNamespace(hook_layer=layer, hook_name=f"blocks.{layer}.hook_resid_post",
                                         d_sae=2 * self.m, to_dict=dict)

    @torch.no_grad()
    def encode(self, x):
        flat = x.reshape(-1, x.shape[-1])
        ids, values = (torch.from_numpy(part) for part in probing.activations(self.source, self.layer, flat))
        out = torch.zeros(len(flat), 2 * self.m).scatter_add_(1, ids.long(), values.float())
        return (out * (flat != 0).any(-1, keepdim=True)).view(*x.shape[:-1], 2 * self.m)

    @torch.no_grad()
    def decode(self, f):
        return f @ self.W_dec + self.b_dec


# What is asked


class Asked:
    """Texts of a few topics, and of pairs of professions and genders, as SAEBench wants them: {class: texts}."""

    def __init__(self, run, seed=0):
        tasks = probe_tasks.toy_tasks(run.encoding, run.config.context, seed)
        self.texts, self.words = tasks.texts, tasks.words

        def text(row):
            return run.encoding.decode(list(tasks.texts[row].tokens[1:]))
        topics = tasks.sets[0]
        half = topics.train.shape[1] // 2
        self.topics = [{name: [text(row) for row in rows[:half][:TEXTS]]
                        for name, rows in zip(topics.classes[:CLASSES], part)} for part in (topics.train, topics.test)]
        self.pairs = {}
        for pair in tasks.pairs[:PAIRS]:
            cells = []
            for part in (pair.train, pair.test):
                both = part.get("both", part["job"])  # only probes that are fitted need the biased texts
                names = "professor / nurse", "male / female", "male_professor / female_nurse"
                found = {}
                for name, rows in zip(names, (part["job"], part["gender"], both)):
                    positive, negative = np.split(rows[: len(rows) // 2 * 2], 2)
                    found[name] = [text(row) for row in positive]
                    found[self.other(name)] = [text(row) for row in negative]
                cells.append(found)
            self.pairs[tuple(pair.name.split(", "))] = cells
        self.length = 1 + max(len(encode(run.encoding, item)) for part in (*self.topics, *sum(self.pairs.values(), []))
                              for items in part.values() for item in items)

    @staticmethod
    def other(name):
        return {"male / female": "female_data_only", "professor / nurse": "nurse_data_only",
                "male_professor / female_nurse": "female_nurse_data_only"}[name]


class Noted:
    """SAEBench's prepare_probe_data, which draws negatives and an order; keeps the generator's state before a call."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, activations, name, perform_scr=False):
        self.calls.append((name, torch.get_rng_state(), {key: len(value) for key, value in activations.items()}))
        return self.function(activations, name, perform_scr)


def draw_again(call, scr):
    """(class, place) of the texts that a noted call drew, and which are positive; the order does not matter."""
    name, state, sizes = call
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    others = [Asked.other(name)] if scr else [key for key in sizes if key != name]
    n, rows = sizes[name], []
    for key in others:
        places = range(sizes[key]) if scr else torch.randperm(sizes[key])[: math.ceil(n / len(others))].tolist()
        rows += [(key, place) for place in places]
    rows = [rows[i] for i in torch.randperm(len(rows))[:n].tolist()]
    torch.set_rng_state(before)
    return [(name, place) for place in range(n)], rows


class Ours:
    """Texts of SAEBench's data as rows of one matrix of features."""

    def __init__(self, run, site, source, layer, parts, length):
        self.rows, texts = {}, []
        for split, classes in zip(("train", "test"), parts):
            for name, items in classes.items():
                for place, item in enumerate(items):
                    self.rows[split, name, place] = len(texts)
                    tokens = (run.encoding.eot_token, *encode(run.encoding, item).tolist())
                    texts.append(probe_tasks.Text(tokens[:length], 1))
        read = probing.read_texts(run, texts, site, [layer])
        self.mean, self.X = read.means[layer], probing.mean_features(source, layer, read)

    def drawn(self, call, split, scr=False):
        return [np.array([self.rows[split, *key] for key in part]) for part in draw_again(call, scr)]


def right_share(scores, positive, negative):
    """Accuracy of a probe with scores (texts,)."""
    return ((scores[positive] > 0).sum() + (scores[negative] <= 0).sum()) / (len(positive) + len(negative))


def compare_probing(theirs, run, site, source, layer, asked):
    """[(figure, SAEBench's, ours)]"""
    name = "toy topics"
    theirs.info.chosen_classes_per_dataset[name] = list(asked.topics[0])
    config = theirs.probing_config.SparseProbingEvalConfig(
        model_name="ours", dataset_names=[name], context_length=asked.length, k_values=list(KS), llm_batch_size=64,
        llm_dtype="float32", sae_batch_size=32, lower_vram_usage=True)
    noted = Noted(theirs.training.prepare_probe_data)
    with replaced(theirs.data, get_multi_label_train_test_data=lambda *_: [dict(part) for part in asked.topics]), \
            replaced(theirs.training, prepare_probe_data=noted), quiet(), tempfile.TemporaryDirectory() as folder:
        found, _ = theirs.probing_main.run_eval_single_sae(config, Unfolded(source, layer), hooked(run, site), "cpu",
                                                           folder, save_activations=False)
    ours = Ours(run, site, source, layer, asked.topics, asked.length)
    calls = noted.calls[-2 * CLASSES * len(KS):]
    for k in KS:
        shares = []
        for _ in range(CLASSES):
            (p, n), (p2, n2) = ours.drawn(calls[0], "train"), ours.drawn(calls[1], "test")
            calls = calls[2:]
            chosen = measures.top_by_difference(ours.X, p, n, k)
            dense = ours.X.dense(chosen)
            w, b = measures.logistic(dense[np.r_[p, n]], np.arange(len(p) + len(n)) < len(p))
            shares.append(right_share(dense @ w + b, p2, n2))
        yield f"probe {k}", found[f"sae_top_{k}_test_accuracy"], float(np.mean(shares))


def run_scr(theirs, run, site, source, layer, asked, scr):
    """SAEBench's evaluation: (its results, its probes by data set, noted calls)."""
    name, probes = "LabHC/bias_in_bios_class_set1", []
    theirs.info.chosen_classes_per_dataset[name] = list(asked.topics[0])
    config = theirs.scr_config.ScrAndTppEvalConfig(
        model_name="ours", dataset_names=[name], perform_scr=scr, context_length=asked.length, n_values=list(NS),
        llm_batch_size=64, llm_dtype="float32", sae_batch_size=32,
        column1_vals_lookup={name: list(asked.pairs)})
    noted, fit = Noted(theirs.training.prepare_probe_data), theirs.training.train_probe_on_activations

    def keep(*arguments, **others):
        found = fit(*arguments, **others)
        probes.append(found[0])
        return found

    def data(dataset, spurious, train, test, seed, columns=None, _=None):
        return [dict(part) for part in (asked.pairs[tuple(columns)] if spurious else asked.topics)]
    with replaced(theirs.creation, get_train_test_data=data), quiet(), tempfile.TemporaryDirectory() as folder, \
            replaced(theirs.training, prepare_probe_data=noted, train_probe_on_activations=keep):
        found, _ = theirs.scr.run_eval_single_sae(config, Unfolded(source, layer), hooked(run, site), "cpu", folder,
                                                  save_activations=False)
    weights = [{name: (probe.net.weight[0].detach().double().numpy(), probe.net.bias.item())
                for name, probe in of.items()} for of in probes]
    return found, weights, noted.calls


def compare_tpp(theirs, run, site, source, layer, asked):
    found, (probes,), calls = run_scr(theirs, run, site, source, layer, asked, scr=False)
    ours, names = Ours(run, site, source, layer, asked.topics, asked.length), list(asked.topics[0])
    w, b = np.stack([probes[name][0] for name in names], 1), np.array([probes[name][1] for name in names])
    dots, scores = probing.decoder_dots(source, layer, w)[0], ours.mean @ w + b
    calls = iter(calls[2 * CLASSES:])

    def shares(scores):
        return [right_share(scores[:, number], *ours.drawn(next(calls), "test")) for number in range(CLASSES)]
    clean = np.array(shares(scores))
    effects = [measures.effects(measures.differences(ours.X, *ours.drawn(next(calls), "train")), dots[:, number], False)
               for number in range(CLASSES)]
    patched = np.array([[shares(measures.ablated(scores, ours.X, measures.top_effects(effect, n), dots)) for n in NS]
                        for effect in effects])  # (ablated, n, c)
    for place, n in enumerate(NS):
        yield f"tpp {n}", found[f"tpp_threshold_{n}_total_metric"], float(measures.tpp_score(clean, patched[:, place]))


def compare_scr(theirs, run, site, source, layer, asked):
    found, probes, _ = run_scr(theirs, run, site, source, layer, asked, scr=True)
    job, gender, both = "professor / nurse", "male / female", "male_professor / female_nurse"
    scores = {n: {1: [], 2: []} for n in NS}
    for of, parts in zip(probes, asked.pairs.values()):
        ours = Ours(run, site, source, layer, parts, asked.length)
        w, b = (np.stack([of[name][part] for name in (job, gender, both)], -1) for part in (0, 1))
        dots, z = probing.decoder_dots(source, layer, w)[0], ours.mean @ w + b

        def rows(name, split, parts=parts, ours=ours):
            return [np.array([ours.rows[split, key, place] for place in range(len(parts[split == "test"][key]))])
                    for key in (name, Asked.other(name))]
        for direction, (removed, asked_for) in enumerate(((gender, job), (job, gender)), 1):
            at = (job, gender, both).index
            effect = measures.effects(measures.differences(ours.X, *rows(removed, "train")), dots[:, at(removed)], True)
            test = rows(asked_for, "test")
            original, clean = right_share(z[:, 2], *test), right_share(z[:, at(asked_for)], *test)
            for n in NS:
                changed = measures.ablated(z, ours.X, measures.top_effects(effect, n), dots)[:, 2]
                scores[n][direction].append(float(measures.scr_score(original, right_share(changed, *test), clean)))
    for n in NS:
        for direction in (1, 2):
            yield f"scr {n}, direction {direction}", found[f"scr_dir{direction}_threshold_{n}"], float(
                np.mean(scores[n][direction]))


def compare_absorption(theirs, run, site, source, layer, asked):
    """SAEBench's calculator on the kinds of words, with our probes and main features."""
    words = next(words for words in asked.words if words.name == "kind")
    texts = [asked.texts[row] for row in words.rows]
    read = probing.read_texts(run, texts, site, [layer])
    X, mean = probing.mean_features(source, layer, read), read.means[layer]
    fold = next(probing.fold_words(mean, words._replace(rows=np.arange(len(texts)))))
    known, other = X.take(fold.known), X.take(fold.other)
    main = measures.main_features(known, fold.Y, measures.l1_probe(known, fold.Y))
    dots, norms = probing.decoder_dots(source, layer, fold.units.T)
    calculator = theirs.absorption.FeatureAbsorptionCalculator(hooked(run, site), [], word_token_pos=-1, batch_size=1)
    calculator._build_prompts = lambda words: [types.SimpleNamespace(base=word, word=word) for word in words]
    calculator._validate_prompts_are_same_length = lambda prompts: None
    dense, both = Unfolded(source, layer), []
    for place in range(len(words.classes)):
        rows = np.flatnonzero(fold.found[:, place])
        prompts = [run.encoding.decode(list(texts[fold.other[row]].tokens[1:])) for row in rows]
        with quiet():
            found = calculator.calculate_absorption(dense, prompts, torch.from_numpy(fold.units[place]).float(),
                                                    main[place].tolist(), layer, show_progress=False)
        result = measures.absorption(other.take(rows), fold.projections[rows, place], dots[:, place] / norms,
                                     main[place])
        both.append([np.mean([word.absorption_fraction for word in found.word_results]), result.fraction.mean(),
                     np.mean([word.is_full_absorption for word in found.word_results]), result.full.mean()])
    mean = np.mean(both, axis=0)
    yield "absorption kind", float(mean[0]), float(mean[1])
    yield "full absorption kind", float(mean[2]), float(mean[3])


# The command


@contextlib.contextmanager
def replaced(module, **functions):
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


@contextlib.contextmanager
def quiet():
    """Without SAEBench's lines and progress bars."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def compare(options):
    theirs, rows, weights = import_saebench(), [], {}
    for path in (options.run, *options.against):
        run = open_run(path, "cpu")
        if not toyworld.is_toy(run.encoding):
            raise UserError(f"{path} is no model of the toy world, whose texts SAEBench is given here")
        weights[path] = weights_hash(run.model)
        asked, layer = Asked(run, options.seed), run.config.layers // 2
        wanted = None if options.sources is None else options.sources.split(",")
        say(f"{path}, layer {layer}: SAEBench 0.6.0, ours, the difference")
        for source in sources_of(run, wanted, options.site):
            if layer not in source.layers:
                continue
            for function in (compare_probing, compare_tpp, compare_scr, compare_absorption):
                for figure, its, ours in function(theirs, run, options.site, source, layer, asked):
                    rows.append({"run": path, "source": source.name, "layer": layer, "figure": figure, "saebench": its,
                                 "ours": ours})
                    say(f"{source.name:<20}{figure:<24}{its:>10.5f}{ours:>10.5f}{ours - its:>+10.1e}")
    if not rows:
        raise UserError(f"no run here has the source {options.sources} at its middle layer")
    worst = max(rows, key=lambda row: abs(row["ours"] - row["saebench"]))
    same = sum(abs(row["ours"] - row["saebench"]) < 1e-5 for row in rows)  # its are float32
    say(f"{same} of {len(rows)} figures are the same to 1e-5; the largest difference is "
        f"{worst['ours'] - worst['saebench']:+.1e} ({worst['source']}, {worst['figure']})")
    path = os.path.join(os.path.dirname(checkpoint_path(options.run)), "saebench.json")
    write_json(path, {"rows": rows, "weights": weights, "seed": options.seed, **provenance()}, indent=1)
    say(f"written to {path}")
