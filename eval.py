"""Evaluate a checkpoint: losses, perplexity, HellaSwag, LAMBADA, and what its features do.

    python eval.py out/tiny                                              val, features; of the toy world answers, too
    python eval.py out/tiny --tasks ppl --text book.txt 'news/*.jsonl'   perplexity of any text
    python eval.py out/tiny --tasks hellaswag,lambada [--data DIR]       from the Hugging Face hub, or from local files
    python eval.py out/tiny --harness hellaswag,lambada_openai           the same, asked by lm-evaluation-harness
    torchrun --nproc_per_node=8 eval.py out/small_2l --tasks val,ppl,hellaswag,lambada,features

val        cross-entropy of the validation split, in whole windows: nats per token, and bits per byte. The end of a
           document costs bits to predict, as any token does, but is 0 bytes long.
ppl        each document by itself, after an end-of-text token that is not scored: perplexity per token and per byte and
           bits per byte, the last two as lm-evaluation-harness has them, and the spread over documents.
hellaswag, lambada   as lm-evaluation-harness defines them, question by question: see tasks.py.
features   of each layer and level: the features that ever fired, how often, L0, the fraction of variance explained; of
           each layer and of all: the loss with the bottleneck's output y replaced by its input h (what the sparse code
           costs), or by zero.
answers    the toy world's questions: the share answered right, and the nats of right answers, as the model is and with
           all MLPs silenced: what it has by its attention alone.

Windows are disjoint, or slide with --stride S, so that a token sees at least context - S others; each token is scored
once. Accuracies come with the standard error of a mean. A finished task is written to eval.json in the run's folder
at once, an unfinished one never, and what eval.json holds of other weights is dropped.
"""
import argparse
import collections
import contextlib
import hashlib
import itertools
import json
import math
import os
import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist

import tasks
from checkpoint import checkpoint_path, open_run, weights_hash
from data import open_split, text_source
from dpb import Code
from features import FeatureCounts
from helpers import UserError, provenance, read_json, run_script, say, standard_error, suggest, whole_number, write_json
from ranks import leave_ranks, start_ranks
from score import Request, Scorer, fit, score_documents, windows
from tokenizer import END, encode, well_formed
from toyworld import is_toy

TASKS = ("val", "ppl", "hellaswag", "lambada", "features", "answers")
EDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # of the histogram of firing frequencies; "never" is a class before the first

# Layers, width, bottleneck, index bits, auxiliary losses: name, validation loss, Pile perplexity, HellaSwag, LAMBADA.
PAPER = {
    (24, 2048, "parity", (11, 15), False): ("PT-Large-2L", 2.808, 17.65, 0.385, 0.311),
    (24, 2048, "parity", (11, 15), True): ("PT-Large-2L-Aux", 2.842, 18.56, 0.376, 0.264),
    (24, 2048, "none", (), False): ("GPT-Large", 2.828, 18.23, 0.370, 0.293),
    (12, 1024, "parity", (10, 15, 17), False): ("PT-Small-3L", 3.133, 25.89, 0.360, 0.233),
    (12, 1024, "parity", (10, 15), False): ("PT-Small-2L", 3.158, 24.57, 0.350, 0.219),
    (12, 1024, "none", (), False): ("GPT-Small", 3.135, 26.43, 0.346, 0.229),
}


# The tasks. Each gives a dict for eval.json; its `what` is a phrase on what was measured.


def val_requests(scorer, tokens, count, stride):
    spans = windows(count * scorer.context, scorer.context, stride)
    return [Request(tokens.read(start, stop), scored) for start, stop, scored in spans]


def val(scorer, run, tokens, limit, stride):
    """limit: of windows, or of as much text where they slide."""
    requests = val_requests(scorer, tokens, min(tokens.count(scorer.context), limit or math.inf), stride)
    log_probs, _ = scorer.score(requests, "val")
    scored = np.concatenate([request.tokens[-request.count :] for request in requests])
    ranks = run.encoding._mergeable_ranks
    lengths = np.zeros(run.encoding.n_vocab, np.int64)  # in bytes; end-of-text stays 0
    lengths[list(ranks.values())] = [len(token) for token in ranks]
    return {**measures(-log_probs.sum(), len(scored), int(lengths[scored].sum())),
            "nats": [round(-value, 4) for value in log_probs.tolist()],  # of each window
            "what": f"{len(scored):,} tokens of the validation split of {tokens.folder}, "
                    f"{describe_windows(scorer, stride)}",
            "data": {"source": tokens.folder, "tokenizer": tokens.tokenizer_id, "sha256": digest(scored)}}


def exp(nats):
    """Infinite where a float ends: a word that no model could foresee."""
    return math.exp(nats) if nats < 700 else math.inf


def measures(nats, tokens, size):
    """Of a text that costs so many nats, in so many tokens and bytes."""
    return {"loss": nats / tokens, "perplexity": exp(nats / tokens), "byte_perplexity": exp(nats / size),
            "bits_per_byte": nats / math.log(2) / size, "tokens": tokens, "bytes": size}


def describe_windows(scorer, stride):
    text = f"windows of {scorer.context} tokens"
    return f"disjoint {text}" if stride == scorer.context else f"{text} that slide by {stride}"


def digest(*arrays):
    content = hashlib.sha256()
    for array in arrays:
        content.update(np.ascontiguousarray(array))
    return content.hexdigest()


def documents(files, limit):
    """The texts of the files, or of the Pile's validation split. A document that was read in parts is put together."""
    if not files:
        return (record["text"] for record in tasks.records("pile", limit=limit) if record["text"])

    def whole(pieces):
        parts = []
        for piece in pieces:
            if parts and not piece.continues:
                yield "".join(parts)
                parts = []
            parts.append(piece.text)
        yield "".join(parts)
    return itertools.islice(whole(text_source(files).open(None)[0]), limit)


def ppl(scorer, run, files, limit, stride):
    """limit: of documents."""
    found, sizes = [], []
    for text in documents(files, limit):
        found.append(encode(run.encoding, text))
        sizes.append(len(well_formed(text).encode()))
    count, source = sum(map(len, found)), ", ".join(files) if files else tasks.source("pile")
    if count < scorer.context:
        raise UserError(f"the text of {source} has {count} tokens, fewer than one context of {scorer.context}: "
                        "give more text, or take a shorter --context")
    nats = -score_documents(scorer, found, run.encoding.eot_token, stride, "ppl")
    quantiles = np.quantile(nats / math.log(2) / sizes, [0, 0.25, 0.5, 0.75, 1])
    return {**measures(nats.sum(), count, sum(sizes)),
            "documents": len(sizes), "bits_per_byte_quantiles": quantiles.tolist(),
            "what": f"{len(sizes):,} documents, {count:,} tokens, of {source}, {describe_windows(scorer, stride)}",
            "data": {"source": source, "sha256": digest(*found)}}


def ask(scorer, run, name, folder, limit):
    """HellaSwag or LAMBADA. limit: of questions."""
    questions, source = tasks.questions(name, folder, limit)
    pairs = [tasks.encode_pair(run.encoding, question.context, answer)
             for question in questions for answer in question.answers]
    log_probs, greedy = scorer.score([fit(*pair, scorer.context) for pair in pairs], name)
    marks = tasks.mark_choice(questions, log_probs) if name == "hellaswag" else {"acc": greedy.tolist()}
    result = {key: float(np.mean(right)) for key, right in marks.items()}
    result |= {f"{key}_stderr": standard_error(right) for key, right in marks.items()}
    if name == "lambada":
        result["perplexity"] = exp(-log_probs.mean())
    cut = sum(len(before) + len(answer) > scorer.context + 1 for before, answer in pairs)
    return {**result, "questions": len(questions), "cut": cut,
            "right": {key: bits(right) for key, right in marks.items()},
            "what": f"{len(questions):,} questions of {source}"
                    + (f"; {cut:,} of {len(pairs):,} texts were cut on the left to fit {scorer.context} tokens"
                       if cut else ""),
            "data": {"source": source, "sha256": digest(np.frombuffer(repr(questions).encode(), np.uint8))}}


def bits(right):
    """Which questions were answered right, a 0 or 1 each: to test one model against another on the same questions."""
    return "".join("1" if value else "0" for value in right)


def through_input(model, layers):
    """Arguments of a forward pass in which the bottlenecks of these layers let all of their input h through: y = h."""
    reader, newest = model.config.site, collections.deque(maxlen=1)  # of what record gets: h of the layer at hand

    def patch(site, layer, x):
        if site == f"{reader}_out" and layer in layers:
            return getattr(model.blocks[layer], reader)(newest[0][2])
        return x
    return {"patch": patch, "record": newest}


def through_nothing(layers):
    """Arguments of a forward pass in which the bottlenecks of these layers let nothing through: y = 0."""
    def edit(layer, code):
        return Code(code.indices, torch.zeros_like(code.coefs)) if layer in layers else code
    return {"edit": edit}


def features(scorer, run, tokens, limit):
    """limit: of windows; without one, as many as an evaluation in training has."""
    blocks = [block for block in run.model.blocks if block.bottleneck is not None]
    if not blocks:
        return {"layers": [], "what": f"none, {run.path} is a dense model, which has no bottleneck"}
    count = min(tokens.count(scorer.context), limit or max(1, run.config.eval_tokens // scorer.context))
    requests = val_requests(scorer, tokens, count, scorer.context)
    counts, step = FeatureCounts(run.model), max(1, scorer.batch_tokens // scorer.context)
    with torch.no_grad():
        for start in range(scorer.rank * step, count, scorer.ranks * step):
            record = []
            scorer.hidden(np.stack([request.tokens[:-1] for request in requests[start : start + step]]), record=record)
            counts.add(record)
    counts.reduce()

    def loss(what, **arguments):
        return -scorer.score(requests, f"features, {what}", **arguments)[0].mean() / scorer.context

    def losses(layers, what):
        return {"loss_input": loss(what, **through_input(run.model, layers)),
                "loss_zero": loss(what, **through_nothing(layers))}

    layers = [{"levels": level_results(counts, layer), **losses([layer], f"layer {layer}")}
              for layer in range(len(blocks))]
    return {"loss": loss("as it is"), **losses(range(len(blocks)), "all layers"), "layers": layers, "edges": EDGES,
            "what": f"{count * scorer.context:,} tokens of the validation split of {tokens.folder}, "
                    + describe_windows(scorer, scorer.context),
            "data": {"source": tokens.folder, "tokenizer": tokens.tokenizer_id,
                     "sha256": digest(*(r.tokens for r in requests))}}


def answers(run, limit):
    if not is_toy(run.encoding):
        raise UserError(f"{run.path} was not trained on the toy world, whose questions the task answers asks: "
                        "leave it off")

    def silent(site, layer, x):
        return torch.zeros_like(x) if site == "mlp_out" else x
    count = limit or 256
    asked, without = (tasks.toy_answers(run.model, run.encoding, count, patch=patch) for patch in (None, silent))
    return {"what": f"{count} questions of each kind", **{kind: {
        "right": right.mean(), "right_stderr": standard_error(right), "nats": nats.mean(),
        "nats_stderr": standard_error(nats), "right_silent": without[kind][0].mean(),
        "nats_silent": without[kind][1].mean()} for kind, (right, nats) in asked.items()}}


def level_results(counts, layer):
    results = []
    for level, (low, high) in enumerate(itertools.pairwise(counts.layers[layer].lows)):
        frequency = (counts.fired[layer, low:high] / counts.tokens[layer]).cpu().numpy()
        classes = np.where(frequency > 0, 1 + np.digitize(frequency, EDGES), 0)
        results.append({"features": high - low, "fired": float((frequency > 0).mean()), "l0": float(frequency.sum()),
                        "explained": counts.explained[layer, level].item(),
                        "histogram": np.bincount(classes, minlength=len(EDGES) + 2).tolist()})
    return results


# lm-evaluation-harness

LOCAL = {  # its tasks that can read a local file: our name of the data set, the harness's own description of the task
    "hellaswag": ("hellaswag", "hellaswag/hellaswag.yaml"),
    "lambada_openai": ("lambada", "lambada/lambada_openai.yaml"),
}


def adapter(scorer, run):
    """Our model as the harness wants it. It asks every rank for everything; the scorer shares out the work."""
    from lm_eval.api.model import TemplateLM

    class Adapter(TemplateLM):
        eot_token_id = run.encoding.eot_token

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            return encode(run.encoding, string).tolist()

        def _loglikelihood_tokens(self, requests, **kwargs):
            log_probs, greedy = scorer.score([fit(before, answer, scorer.context) for _, before, answer in requests],
                                             "harness")
            return list(zip(log_probs.tolist(), greedy.tolist()))

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            found = [encode(run.encoding, request.args[0]) for request in requests]
            return score_documents(scorer, found, self.eot_token_id, scorer.context, "harness").tolist()

        def generate_until(self, requests, disable_tqdm=False):
            return [self.generate(*request.args) for request in requests]

        def generate(self, prompt, options):
            if options.get("do_sample"):
                raise UserError("a task of the harness asks for random samples, but here generation is greedy: "
                                "leave that task out")
            stops = options.get("until") or []
            stops = [stops] if isinstance(stops, str) else stops
            prompt = torch.tensor([self.tok_encode(prompt) or [self.eot_token_id]], device=scorer.device)
            tokens, text = [], ""
            for token in run.model.generate(prompt, options.get("max_gen_toks", 256), temperature=0):
                tokens.append(token.item())
                text = run.encoding.decode(tokens)
                ends = [text.index(stop) for stop in [*stops, END] if stop in text]
                if ends:
                    return text[: min(ends)]
            return text

    return Adapter()


def harness(scorer, run, names, folder, limit):
    """(name, result) of the harness's own tasks, as they are finished.
    With a folder, those of LOCAL read their file in it."""
    try:
        import lm_eval
        import lm_eval.tasks
    except ImportError:
        raise UserError("--harness needs lm-evaluation-harness: pip install lm_eval, "
                        "or use --tasks hellaswag,lambada, which give the same figures") from None
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # its bootstrap would fork this process, perhaps with a GPU
    with tempfile.TemporaryDirectory() as configs, open(os.devnull, "w") as nowhere:
        bars = sys.stderr if sys.stderr.isatty() else nowhere  # it prints many
        for name in LOCAL.keys() & names if folder is not None else ():
            write_local_task(name, os.path.dirname(lm_eval.tasks.__file__), folder, configs)
        all_local = folder is not None and set(names) <= LOCAL.keys()
        manager = lm_eval.tasks.TaskManager(include_path=configs, include_defaults=not all_local)
        for name in names:
            check_name(name, manager.all_tasks, "task of lm-evaluation-harness")
        for name in names:  # one by one: the batches, and so the last digits, are those of our own tasks
            try:
                with contextlib.redirect_stdout(bars), contextlib.redirect_stderr(bars):
                    found = lm_eval.simple_evaluate(adapter(scorer, run), tasks=[name], limit=limit,
                                                    task_manager=manager, bootstrap_iters=100)
            except OSError as error:  # what `datasets` raises without a network
                raise UserError(f"the harness could not read the data of {name} ({type(error).__name__}: {error}). "
                                "Two ways out: a network, "
                                f"or for {' and '.join(LOCAL)} local files, --data DIR") from error
            for task in found["results"] if found else ():  # several of a group; on other ranks than the first, none
                yield f"harness {task}", harness_result(found["results"][task], found["samples"].get(task, []),
                                                        lm_eval.__version__)


def harness_result(values, samples, version):
    marks = {key: bits(sample[key] for sample in samples)
             for key in ("acc", "acc_norm") if samples and key in samples[0]}
    asked = repr([sample["arguments"] for sample in samples]).encode()
    return {**{key.removesuffix(",none"): value for key, value in values.items() if isinstance(value, float)},
            "right": marks,
            "what": f"{len(samples):,} questions, asked by lm-evaluation-harness {version}",
            "data": {"sha256": digest(np.frombuffer(asked, np.uint8))}}


def write_local_task(name, home, folder, out):
    """The harness's own description of a task, but for the place of its data."""
    ours, description = LOCAL[name]
    _, _, split, file = tasks.SETS[ours]
    path = os.path.abspath(os.path.join(folder, file))
    if not os.path.exists(path):
        raise UserError(f"{path} is missing: give the folder that has it with --data DIR, or leave --data off")
    content = {"include": os.path.join(home, description), "task": name, "dataset_path": "json", "dataset_name": None,
               "dataset_kwargs": {"data_files": {split: path}}, "training_split": None}
    with open(os.path.join(out, f"{name}.yaml"), "w") as file:
        json.dump(content, file)  # JSON is YAML


# Results

ROWS = {  # of a task: what to print, its key, its place in PAPER
    "val": (("loss, nats per token", "loss", 1), ("perplexity", "perplexity", 0),
            ("bits per byte", "bits_per_byte", 0)),
    "ppl": (("perplexity of a token", "perplexity", 2), ("perplexity of a byte", "byte_perplexity", 0),
            ("bits per byte", "bits_per_byte", 0)),
    "hellaswag": (("accuracy", "acc", 0), ("accuracy, per character", "acc_norm", 3)),
    "lambada": (("accuracy", "acc", 4), ("perplexity of a word", "perplexity", 0)),
}


def open_checked(path, device):
    """(run, hash of its weights), the same on every rank, though a run in training may replace the file at any time."""
    path = checkpoint_path(path)
    changed = os.path.exists(path) and os.path.getmtime(path)
    run = open_run(path, device)
    hashes = [weights_hash(run.model)]
    if dist.is_initialized():
        hashes *= dist.get_world_size()
        dist.all_gather_object(hashes, hashes[0])
    if len(set(hashes)) > 1 or os.path.getmtime(path) != changed:
        raise UserError(f"{path} was replaced while it was being read, perhaps by a run that is still training: "
                        "try again")
    return run, hashes[0]


def save_result(folder, about, name, result):
    """Add a finished result to eval.json, from which those of other weights are dropped."""
    path = os.path.join(folder, "eval.json")
    content = read_json(path, "Delete it, and evaluate again") if os.path.exists(path) else {}
    same = (content.get("checkpoint") or {}).get("weights") == about["checkpoint"]["weights"]
    earlier = content["results"] if same else {}
    write_json(path, {**about, "results": earlier | {name: result | {"commit": about["commit"]}}}, indent=1)


def paper_figures(config):
    """The paper's, for a model of this shape; or None."""
    bits = () if config.bottleneck == "none" else config.bits
    return PAPER.get((config.layers, config.d, config.bottleneck, bits, config.variance_weight > 0))


def describe(name, result, paper):
    """The lines of the table for one task."""
    lines = [f"{name}: {result['what']}"]
    if name == "features":
        return lines + describe_features(result)
    if name == "answers":
        return lines + describe_answers(result)
    if name == "ppl" and result["data"]["source"] != tasks.source("pile"):
        paper = None
    shown = ROWS.get(name) or [(key, key, 0) for key in result
                               if isinstance(result[key], float) and "_stderr" not in key]
    for label, key, place in shown:
        error = result.get(f"{key}_stderr")
        theirs = figure(paper[place]) if paper and place else ""
        lines.append(f"  {label:<26}{figure(result[key]):>12}{'' if error is None else figure(error):>12}"
                     f"{theirs:>12}".rstrip())
    if name == "ppl":
        lines.append("  bits per byte of a document: least {:.4f}, quartiles {:.4f}, {:.4f}, {:.4f}, most {:.4f}"
                     .format(*result["bits_per_byte_quantiles"]))
    return lines


def figure(value):
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"


def describe_features(result):
    if not result["layers"]:
        return []
    classes = ["never", *(f"<1e{round(math.log10(edge))}" for edge in EDGES), "<=1"]
    lines = [f"{'':49}{'loss with':^16}  share of the features, by how often they fire",
             f"{'layer':>7}{'level':>6}{'features':>10}{'fired':>9}{'L0':>7}{'explained':>10}{'y = h':>8}{'y = 0':>8}"
             + "".join(f"{name:>8}" for name in classes)]
    for layer, found in enumerate(result["layers"]):
        for level, values in enumerate(found["levels"]):
            last = level == len(found["levels"]) - 1
            losses = f"{found['loss_input']:8.4f}{found['loss_zero']:8.4f}" if last else f"{'':16}"
            lines.append(f"{layer:>7}{level:>6}{values['features']:>10,}{values['fired']:>9.2%}{values['l0']:>7.2f}"
                         f"{values['explained']:>10.3f}{losses}"
                         + "".join(f"{count / values['features']:>8.2%}" for count in values["histogram"]))
    return lines + [
        f"{'all':>7}{'':42}{result['loss_input']:8.4f}{result['loss_zero']:8.4f}",
        f"  The loss is {result['loss']:.4f} as the model is; y = h and y = 0: with the bottleneck's output replaced",
        "  by its input or by zero, in this layer alone. Variance is explained by a level and those before it."]


def describe_answers(result):
    lines = [f"{'':14}{'right':>8}{'std. error':>12}{'nats':>8}{'std. error':>12}{'silent: right':>15}{'nats':>8}"]
    for kind, found in result.items():
        if kind != "what":
            errors = ["-" if found[key] is None else f"{found[key]:.3f}" for key in ("right_stderr", "nats_stderr")]
            lines.append(f"  {kind:<12}{found['right']:>8.3f}{errors[0]:>12}{found['nats']:>8.3f}{errors[1]:>12}"
                         f"{found['right_silent']:>15.3f}{found['nats_silent']:>8.3f}")
    return lines + ["  Nats of the right answers (less is better), as the model is and with all MLPs silenced."]


# The command line


def check_name(name, known, kind):
    if name not in known:
        raise UserError(f"there is no {kind} {name!r}{suggest(name, known)}")


def parse(arguments):
    parser = argparse.ArgumentParser(prog="eval.py", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n")[2])
    parser.add_argument("run", help="a run's folder, such as out/tiny, of which best.pt is taken; or a checkpoint")
    parser.add_argument("--tasks", metavar="A,B",
                        help=f"some of {','.join(TASKS)} (default val,features, on the toy world answers, too; "
                             "and ppl with --text)")
    parser.add_argument("--limit", type=whole_number, metavar="N",
                        help="windows of val and features, documents of ppl, questions else")
    parser.add_argument("--text", nargs="+", metavar="FILE",
                        help="ppl: .txt, .jsonl, .parquet, .gz of these (default: the Pile)")
    parser.add_argument("--data", metavar="DIR",
                        help="folder with hellaswag_val.jsonl and lambada_test.jsonl (default: the hub)")
    parser.add_argument("--val", metavar="DIR",
                        help="folder made by data.py, for val and features (default: that of the run)")
    parser.add_argument("--context", type=whole_number, metavar="T",
                        help="tokens that the model may see (default: all it can)")
    parser.add_argument("--stride", type=whole_number, metavar="S",
                        help="val and ppl: windows slide by S tokens (default: disjoint)")
    parser.add_argument("--harness", metavar="A,B",
                        help="tasks of lm-evaluation-harness, such as hellaswag,lambada_openai")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--batch_tokens", type=whole_number, metavar="N",
                        help="tokens of a forward pass (default 4096; on a GPU 16384)")
    return parser.parse_args(arguments)


def choose_tasks(args):
    names = args.tasks.split(",") if args.tasks else [] if args.harness else ["val", "features"]
    if args.text and not args.tasks:
        names.append("ppl")
    for name in names:
        check_name(name, TASKS, "task")
    if args.text and "ppl" not in names:
        raise UserError("--text is for the task ppl: add it to --tasks, or leave --text off")
    return names


def check_inputs(names, args):
    """What a later task would miss is said before the first one runs."""
    if args.text:
        text_source(args.text)
    for name in names:
        if args.data is not None and name in ("hellaswag", "lambada"):
            next(tasks.records(name, args.data), None)


def open_val(run, folder, rank):
    tokens = open_split(folder, "val", verify=rank == 0)
    if tokens.tokenizer_id != run.content["tokenizer"]["id"]:
        raise UserError(f"{run.path} has another vocabulary than {folder}: "
                        f"the model's tokenizer is {run.encoding.name} of {run.encoding.n_vocab:,} tokens, "
                        f"the data's another of {tokens.vocab_size:,}. Give data of its own with --val DIR")
    return tokens


def evaluate(args):
    names = choose_tasks(args)
    check_inputs(names, args)
    rank, ranks, device = start_ranks(args.device)
    run, weights = open_checked(args.run, device)
    context = args.context or run.config.context
    stride = args.stride or context
    if context > run.config.context:
        raise UserError(f"--context {context} is longer than the model's, {run.config.context}: take at most that")
    if stride > context:
        raise UserError(f"--stride {stride} is longer than the context, {context}: "
                        "the tokens between would not be scored")
    batch_tokens = args.batch_tokens or (16384 if device.type == "cuda" else 4096)
    scorer = Scorer(run.model, context, batch_tokens, rank, ranks)
    tokens = open_val(run, args.val or run.config.data, rank) if {"val", "features"} & set(names) else None
    about = {"checkpoint": {"path": run.path, "step": run.content["step"], "weights": weights}, **provenance(),
             "seed": run.config.seed, "config": vars(run.config), "device": device.type}
    paper = paper_figures(run.config)
    if is_toy(run.encoding) and not (args.tasks or args.harness):
        names.append("answers")
    say(f"{run.path}, step {run.content['step']}: {run.model.count_parameters():,} parameters, "
        f"bottleneck {run.config.bottleneck}, seed {run.config.seed}")
    say(f"{'':28}{'value':>12}{'std. error':>12}{f'  paper, {paper[0]}' if paper else ''}")

    def finish(name, result):
        for line in describe(name, result, paper):
            say(line)
        if rank == 0:
            save_result(os.path.dirname(run.path), about, name, result)

    work = {"val": lambda: val(scorer, run, tokens, args.limit, stride),
            "ppl": lambda: ppl(scorer, run, args.text, args.limit, stride),
            "hellaswag": lambda: ask(scorer, run, "hellaswag", args.data, args.limit),
            "lambada": lambda: ask(scorer, run, "lambada", args.data, args.limit),
            "features": lambda: features(scorer, run, tokens, args.limit),
            "answers": lambda: answers(run, args.limit)}
    for name in names:
        finish(name, work[name]())
    if args.harness:
        for name, result in harness(scorer, run, args.harness.split(","), args.data, args.limit):
            finish(name, result)
    say(f"written to {os.path.join(os.path.dirname(run.path), 'eval.json')}")
    if not (args.tasks or args.harness):
        say(f"other tasks: {', '.join(name for name in TASKS if name not in names)}; python eval.py --help")


def main(arguments):
    try:
        evaluate(parse(arguments))
    finally:
        leave_ranks()


if __name__ == "__main__":
    run_script(main, "stopped; the results of finished tasks are kept")
