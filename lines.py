"""Ways to steer a run, and the texts that each of them writes: what pareto.py compares.

    lines = list(lines_of(run, open_sources(run, ["topk"])))
    writer = Writer({name: run}, {name: sources}, prefixes, options, "texts.jsonl")
    record = writer.steered(lines[0], concept)                 {alphas, texts}, written or as they were kept

A line is a source of features (own, hash, SAEs, or the residual stream itself), the layers that it is used at, and how
the vector is made: contrast, fitted, or either of features drawn by lot. alpha is chosen so that what is added has a
given ratio to what it is added to: the norm of the first over the mean norm of the second, the mean over layers.
"""
import itertools
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple

import torch

from checkpoint import name_of, weights_hash
from helpers import Records, checksum, progress, say
from sources import open_source, open_tokens, read_activations, read_codes
from steer import contrast, fit, steered, stream_source, text_of
from tokenizer import encode


class Line(NamedTuple):
    """A way to steer a run."""
    run: str
    source: str      # own, hash, stream, or a kind of SAE
    layers: tuple    # all of the source, or one
    way: str         # contrast, fitted, random, random fitted

    def place(self):
        return "all layers" if len(self.layers) > 1 else f"layer {self.layers[0]}"

    def __str__(self):
        return f"{self.run}: {self.source}, {self.place()}, {self.way}"

    def is_control(self):
        return self.source == "hash" or self.way.startswith("random")

    def is_beside(self, other):
        """Whether two lines may be compared: both at all layers or at one, both fitted or not."""
        return (len(self.layers) > 1, self.way.endswith("fitted")) == (
            len(other.layers) > 1, other.way.endswith("fitted"))


# Vectors


def open_sources(run, saes):
    """{name: source} that a run can be steered with."""
    if run.config.bottleneck != "none":
        return {"own": open_source(run), "hash": open_source(run, "hash")}
    weights = weights_hash(run.model)
    return {**{name: open_source(run, name, weights=weights) for name in saes},
            "stream": stream_source(run, range(run.config.layers)), "hash": open_source(run, "hash")}


def lines_of(run, sources):
    """Every way to steer a run. All coordinates of the stream are fitted, so that there none can be drawn for it."""
    middle = (run.config.layers // 2,)
    every = tuple(range(run.config.layers))
    for name, source in sources.items():
        ways = {"hash": ("contrast", "fitted"), "stream": ("contrast", "fitted", "random")}.get(
            name, ("contrast", "fitted", "random", "random fitted"))
        for layers in dict.fromkeys((every, middle)):
            if set(layers) <= set(source.layers):
                yield from (Line(name_of(run), name, layers, way) for way in ways)
            else:
                say(f"{name_of(run)}: {name} has only the layers {', '.join(map(str, sorted(source.layers)))}, so that "
                    f"it is left out where {'all layers are' if layers == every else f'layer {middle[0]} is'} steered")


def random_vector(source, vector, seed):
    """As many features as the vector has, drawn by lot, with its weights in another order and any sign."""
    rng, (layers, k) = torch.Generator().manual_seed(seed), vector.weights.shape
    if source.kind == "stream":
        return vector._replace(weights=torch.randn(layers, k, generator=rng))
    order, indices = (torch.stack([torch.randperm(n, generator=rng)[:k] for _ in range(layers)])
                      for n in (k, 2 * source.m))  # of the unfolded features, as contrast takes them
    signs = torch.randint(0, 2, (layers, k), generator=rng) * 2 - 1
    return vector._replace(indices=indices % source.m, weights=vector.weights.gather(1, order) * signs)


def vector_of(run, source, line, vector, concept, seed, options):
    """(source, vector) of a line, from the contrast at all layers. seed: of what is drawn by lot."""
    rows = [vector.layers.tolist().index(layer) for layer in line.layers]
    source = source._replace(layers={layer: source.layers[layer] for layer in line.layers})
    vector = vector._replace(layers=vector.layers[rows], indices=vector.indices[rows], weights=vector.weights[rows])
    if line.way.startswith("random"):
        vector = random_vector(source, vector, seed)
    return source, fit(run, source, vector, concept.positive, options.fit) if line.way.endswith("fitted") else vector


@torch.no_grad()
def norms_of(run, source, windows=32):
    """{layer: the mean norm of what vectors are added to}, over tokens of the validation data."""
    tokens, context = open_tokens(run, "val", verify=False), run.config.context
    rows = tokens.windows(range(min(windows, tokens.count(context))), context)[:, :-1]
    rows = rows.to(run.model.embedding.weight.device)
    if source.kind == "own":
        codes = read_codes(run.model, rows, source)
        found = {layer: part.decode(codes[layer]) for layer, part in source.layers.items()}
    else:
        found = read_activations(run.model, rows, source.site, source.layers)
    return {layer: x.float().norm(dim=-1).mean().item() for layer, x in found.items()}


@torch.no_grad()
def strength(run, source, vector, norms):
    """The ratio at alpha = 1."""
    device = run.model.embedding.weight.device
    added = [source.added(layer, indices.to(device), weights.to(device)).norm().item() / norms[layer]
             for layer, indices, weights in zip(vector.layers.tolist(), vector.indices, vector.weights)]
    return sum(added) / len(added)


# Texts


def ragged(prompts):
    """Prompts, lists of tokens, as (tokens (B, shortest), forced (B, longest - shortest)) for model.generate."""
    short, long = min(map(len, prompts)), max(map(len, prompts))
    forced = [prompt[short:] + [-1] * (long - len(prompt)) for prompt in prompts]
    return torch.tensor([prompt[:short] for prompt in prompts]), torch.tensor(forced).view(len(prompts), long - short)


def write_texts(run, prefixes, options, seed, source=None, vector=None, alphas=(0.0,)):
    """[[a text for each prefix] for each alpha]: all in one batch, or as many at a time as --batch allows."""
    device = run.model.embedding.weight.device
    prompts = [[run.encoding.eot_token, *encode(run.encoding, prefix).tolist()] for prefix in prefixes]
    rows, texts = list(itertools.product(alphas, prompts)), []
    for start in range(0, len(rows), options.batch):
        alpha, part = zip(*rows[start : start + options.batch])
        tokens, forced = (values.to(device) for values in ragged(part))
        steering = steered(source, vector, torch.tensor(alpha, device=device)[:, None, None])
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            steps = list(run.model.generate(tokens, options.tokens + forced.shape[1], options.temperature,
                                            top_p=options.top_p, seed=seed * 1000 + start, forced=forced, **steering))
        for row, known in zip(torch.stack(steps, 1).tolist(), (forced >= 0).sum(1).tolist()):
            texts.append(text_of(run.encoding, row[known : known + options.tokens]))
    return [texts[start : start + len(prefixes)] for start in range(0, len(texts), len(prefixes))]


class Writer:
    """Texts of lines and concepts, written or, where the same was written before, as they were kept."""

    def __init__(self, runs, sources, prefixes, options, path):
        self.runs, self.sources, self.prefixes, self.options = runs, sources, prefixes, options
        self.records, self.contrasts, self.norms = Records(path), {}, {}
        self.weights = {name: weights_hash(run.model) for name, run in runs.items()}
        kept = ("tokens", "temperature", "top_p", "seed", "k", "fit", "ratios", "batch")
        self.settings = {name: getattr(options, name) for name in kept} | {
            "prefixes": prefixes, "device": next(iter(runs.values())).model.embedding.weight.device.type, "version": 2}
        self.data = {name: open_tokens(run, "val", verify=False).identity() for name, run in runs.items()}

    def seed(self, *what):
        """Of the texts for this: the same for all lines, so that they differ by nothing else."""
        return int(checksum([self.options.seed, *what])[:10], 16)

    def known(self, what, make):
        """What was made of this before, or is now. `what` and the settings are all that determines it."""
        key = checksum([self.settings, *what])
        if key not in self.records:
            self.records.add(key, make())
        return self.records[key]

    def unsteered(self, name, seed):
        """[[a text for each prefix], ...]: as many as a line has for a concept, since all are held against these."""
        return self.known([self.weights[name], "unsteered texts", seed], lambda: write_texts(
            self.runs[name], self.prefixes, self.options, self.seed("unsteered", seed),
            alphas=[0.0] * len(self.options.ratios)))

    def steered(self, line, concept):
        """{alphas, texts}: texts for each alpha and prefix."""
        what = [self.weights[line.run], self.data[line.run], self.sources[line.run][line.source].key, line, *concept]
        return self.known(what, lambda: self.steer(line, concept))

    def steer(self, line, concept):
        run, source, of = self.runs[line.run], self.sources[line.run][line.source], (line.run, line.source)
        if (*of, concept.name) not in self.contrasts:
            self.contrasts[*of, concept.name] = contrast(run, source, concept.name, concept.positive,
                                                         concept.negative, k=self.options.k, steps=0)
        if of not in self.norms:
            self.norms[of] = norms_of(run, source)
        seed = self.seed(concept.name)
        at, vector = vector_of(run, source, line, self.contrasts[*of, concept.name], concept, seed, self.options)
        unit = max(strength(run, at, vector, self.norms[of]), 1e-9)
        alphas = [ratio / unit for ratio in self.options.ratios]
        return {"alphas": alphas, "texts": write_texts(run, self.prefixes, self.options, seed, at, vector, alphas)}


def write_all(writer, lines, concepts):
    """({line: a record for each concept}, {(run, seed): texts without steering}).

    On a CPU each core works on a line of its own: the operations of a small model are too short to be shared out.
    """
    base = {(name, seed): writer.unsteered(name, seed) for name in writer.runs for seed in (0, 1)}
    tasks = list(itertools.product(lines, concepts))
    device, before = next(iter(writer.runs.values())).model.embedding.weight.device, len(writer.records.known)
    workers = torch.get_num_threads() if device.type == "cpu" else 1
    pool, began = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)), time.monotonic()
    try:
        work = [pool.submit(writer.steered, *task) for task in tasks]
        for done, task in enumerate(as_completed(work), 1):
            task.result()
            fresh = len(writer.records.known) - before
            left = int((time.monotonic() - began) / max(1, fresh) * (len(tasks) - done))
            progress(f"{done} of {len(tasks)} lines and concepts, {left // 60}:{left % 60:02} left")
    finally:
        pool.shutdown(cancel_futures=True)  # what is under way is finished, and kept
        progress("")
    found = {line: [] for line in lines}
    for (line, _), task in zip(tasks, work):
        found[line].append(task.result())
    return found, base
