"""See the features of a run: one page that a browser opens from the disk, or with --serve with the model behind it.

    python view.py out/tiny                        writes out/tiny/features.html, and says how to open it
    python view.py out/tiny_gpt --source topk      the features of SAEs, or of a control: sources.py
    python view.py out/tiny --serve                the same page on 127.0.0.1: type a text, edit features, steer

The page needs no network and no server. It is one file while all fits into 10 MB; past that, the data lie beside it in
pieces that it loads as it needs them, in a folder of the page's name. Pieces are scripts that call chunk(): a page from
the disk may not read files, but may load scripts. All texts in them are JSON with < escaped, and are only ever shown as
text. What takes long is kept in the run's folder, and made once for the same weights: where features fire
(features.npz), what they do (features-effects-*.npz), losses (eval.json) and other figures (view.jsonl).
"""
import argparse
import base64
import contextlib
import hashlib
import html
import json
import os
import shutil
from typing import NamedTuple

import numpy as np
import torch

import eval as evaluation
from catalog import BLOCK, NONE, blocks_of, by_token, effects, family_of, layer_of, names_of, strongest, table_of
from checkpoint import name_of, open_run, weights_hash
from features import describe_source, open_index, read_arrays, write_arrays
from helpers import (Records, UserError, check_writable, checksum, locked, progress, provenance, read_json, run_script,
                     say, whole_file, within)
from labels import groups_of
from score import Scorer
from sources import open_source, open_tokens
from steer import piece
from toyworld import is_toy
from truth import rank_features

HERE = os.path.dirname(os.path.abspath(__file__))
MOST = 10_000_000         # bytes of a page with all of its data in it
EFFECT_AT, TOKENS = 5, 8  # strongest firings that an effect is the mean over; tokens raised, and lowered
PIECE = 2 ** 18           # bytes of a piece with the codes of some windows, about
VERSION = 1               # of the form of the data


# Pieces of data


def pack(array):
    """An array as JSON: whole numbers in as few bytes as they need, others in 16 bits of the greatest."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind == "f":
        scale = float(np.max(array, initial=0)) or 1.0
        kind, content = f"q{scale!r}", np.rint(array / scale * 65535).astype("<u2")
    else:
        size = next(size for size in (1, 2, 4) if np.max(array, initial=0) < 1 << 8 * size)
        kind, content = f"u{size}", array.astype(f"<u{size}")
    return {"kind": kind, "data": base64.b64encode(content.tobytes()).decode()}


def pack_exact(array):
    """Of floats that may be negative, or no number."""
    return {"kind": "f4", "data": base64.b64encode(np.asarray(array, "<f4").tobytes()).decode()}


def as_json(content):
    """JSON in ASCII that may stand in a script, and in HTML."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


class Chunks:
    """Pieces of a page's data by name: in memory while all fit into the page, from then on in files of a folder.

    The folder is filled under another name and takes the place of the old one when it is whole: `finish`.
    """

    def __init__(self, folder, key, most=MOST):
        self.folder, self.key, self.most, self.size, self.inside = folder, key, most, 0, {}
        self.fresh = f"{folder}.tmp"
        shutil.rmtree(self.fresh, ignore_errors=True)

    def add(self, name, content):
        text = as_json({key: pack(value) if isinstance(value, np.ndarray) else value for key, value in content.items()})
        self.size += len(text)
        if self.inside is None:
            self.write(name, text)
            return
        self.inside[name] = text
        if self.size > self.most:
            os.makedirs(self.fresh)
            for earlier in self.inside.items():
                self.write(*earlier)
            self.inside = None

    def write(self, name, text):
        with open(os.path.join(self.fresh, f"{name}.js"), "w", encoding="ascii") as file:
            file.write(f"chunk({as_json(self.key)},{as_json(name)},{text});\n")

    def finish(self):
        """Put the folder in its place; the pieces that belong into the page, as JSON."""
        old = f"{self.folder}.old"
        shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.folder, old)
        if self.inside is None:
            os.replace(self.fresh, self.folder)
        shutil.rmtree(old, ignore_errors=True)
        return "{" + ",".join(f"{as_json(name)}:{text}" for name, text in (self.inside or {}).items()) + "}"


class Facts(NamedTuple):
    """All that the pieces are made of."""
    index: object            # features.Index
    corpus: np.ndarray       # (tokens,) that it is about
    context: int
    families: dict           # {layer: catalog.Family, or None}
    groups: tuple = ()       # of labels
    control: dict = {}       # {layer: the hash's F1 of every label}
    effects: object = None   # function of (layer, features): {ups, up_values, downs, down_values, kl}


def write_chunks(chunks, facts):
    """Every piece, layer by layer; yields what the overview says of a layer."""
    index, context = facts.index, facts.context
    chunks.add("corpus", {"tokens": facts.corpus})
    for number in index.layers:
        progress(f"layer {number}: sorting")
        layer = layer_of(index, number)
        tokens = by_token(layer, index.tokens)
        table = table_of(layer)
        live = table["ids"]
        if facts.groups:
            names, _ = names_of(layer, facts.groups, context)
            table |= {"label": names["label"][live] + 1}  # 0 is none
            table |= {key: whole_share(names[key][live]) for key in ("f1", "precision", "recall", "purity")}
        done = facts.effects(number, live) if facts.effects else None
        if done:
            table["kl"] = pack_exact(done["kl"])
        chunks.add(f"table-{number}", table)
        for features, content in blocks_of(layer, facts.families[number], tokens, context):
            progress(f"layer {number}: features {features.stop:,} of {2 * layer.m:,}, {chunks.size / 1e6:,.0f} MB")
            rows = np.flatnonzero((live >= features.start) & (live < features.stop))
            if done:
                content |= {"effect_of": live[rows] - features.start} | {
                    key: pack_exact(done[key][rows]) if key.endswith("values") else done[key][rows]
                    for key in ("ups", "up_values", "downs", "down_values")}
            chunks.add(f"block-{number}-{features.start // BLOCK}", content)
        for first, content in windows_of(tokens, context):
            chunks.add(f"text-{number}-{first}", content)
        progress("")
        yield level_figures(layer, facts.families[number], index.tokens)


def whole_share(values):
    """Shares as whole numbers: 1 for 0, 10001 for 1, and 0 for none."""
    return np.where(np.isnan(values), 0, np.rint(np.nan_to_num(values) * 10000) + 1).astype(np.uint16)


def windows_each(entries, tokens, context):
    """How many windows go into a piece."""
    return max(1, int(PIECE // (6 * context * max(1, entries / tokens))))


def windows_of(tokens, context):
    """(number, content) of pieces with the codes of some windows."""
    count = len(tokens.starts) - 1
    each = windows_each(len(tokens.ids), count, context) * context
    for number, first in enumerate(range(0, count, each)):
        starts = tokens.starts[first : first + each + 1]
        own = slice(starts[0], starts[-1])
        yield number, {"starts": starts - starts[0], "ids": tokens.ids[own], "strength": tokens.strength[own],
                       "windows": each // context}


def level_figures(layer, family, tokens):
    """Of every level of a layer: features, the share that never fires with either sign, and how often the others do."""
    counts = layer.counts()
    either = counts[: layer.m] + counts[layer.m :]
    lows = [0, layer.m] if family is None else family.lows
    figures = []
    for low, high in zip(lows[:-1], lows[1:]):
        rate = either[low:high] / tokens
        classes = np.where(rate > 0, 1 + np.digitize(rate, evaluation.EDGES), 0)
        figures.append({"features": int(high - low), "dead": float((rate == 0).mean()), "l0": float(rate.sum()),
                        "signed": int((counts[low:high] > 0).sum() + (counts[layer.m + low : layer.m + high] > 0).sum()),
                        "histogram": np.bincount(classes, minlength=len(evaluation.EDGES) + 2).tolist()})
    return figures


# The page


def write_page(path, about, inside):
    """The HTML file: view.html with its style, its script and the data in it, and a policy that allows nothing else."""
    parts = {}
    for name in ("view.html", "view.css", "view.js", "live.js"):
        with open(os.path.join(HERE, name), encoding="utf-8") as file:
            parts[name] = file.read()
    script = "\n" + parts["view.js"] + parts["live.js"]
    style = "\n" + parts["view.css"]
    policy = (f"default-src 'none'; script-src 'self' file: {sri(script)}; style-src {sri(style)}; connect-src 'self'; "
              "img-src data:; base-uri 'none'; form-action 'none'")
    data = f'{{"about":{as_json(about)},"chunks":{inside}}}'
    page = parts["view.html"].replace("{{title}}", html.escape(about["title"])).replace("{{policy}}", policy)
    page = page.replace("{{style}}", style).replace("{{script}}", script).replace("{{data}}", data)
    with whole_file(path) as file:
        file.write(page)


def sri(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def token_texts(encoding):
    """The text of every token; a byte that is no part of a whole character as U+DC80 .. U+DCFF, as in Python."""
    return [piece(encoding, token).decode("utf-8", "surrogateescape") for token in range(encoding.n_vocab)]


# What is known about a run


def losses_of(run, source, weights, records):
    """{code, h, zero} of all layers and of each: the loss with what the MLP reads, as the source has it, made from its
    code (y), let through whole (y = h), or zero. The model as it is has y for its own features, h for others."""
    tokens, config = open_tokens(run, "val", verify=False), run.config
    scorer = Scorer(run.model, config.context)
    if source.kind == "own":
        found = own_losses(run, scorer, tokens, weights)
        return {"loss": found["loss"], "what": found["what"], "explained": [
                    [level["explained"] for level in layer["levels"]] for layer in found["layers"]],
                "rows": [{"code": found["loss"], "h": row["loss_input"], "zero": row["loss_zero"]}
                         for row in (*found["layers"], found)]}
    key = checksum([VERSION, weights, source.key, tokens.identity(), "losses"])
    if key not in records:
        records.add(key, other_losses(run, source, scorer, tokens))
    return records[key]


def own_losses(run, scorer, tokens, weights):
    """The task features of eval.py, as it left it in eval.json, or done now and left there."""
    folder = os.path.dirname(run.path)
    with contextlib.suppress(UserError):
        content = read_json(os.path.join(folder, "eval.json"), "")
        if content["checkpoint"]["weights"] == weights and "features" in content["results"]:
            return content["results"]["features"]
    say("measuring the loss with y = h and with y = 0, once")
    result = evaluation.features(scorer, run, tokens, None)
    about = {"checkpoint": {"path": run.path, "step": run.content["step"], "weights": weights}, **provenance(),
             "seed": run.config.seed, "config": vars(run.config), "device": scorer.device.type}
    with contextlib.suppress(UserError):  # a damaged eval.json is not ours to replace
        evaluation.save_result(folder, about, "features", result)
    return result


def other_losses(run, source, scorer, tokens):
    say("measuring the loss with what the source makes of it and with y = 0, once")
    count = min(tokens.count(scorer.context), max(1, run.config.eval_tokens // scorer.context))
    requests = evaluation.val_requests(scorer, tokens, count, scorer.context)

    def loss(what, **arguments):
        return float(-scorer.score(requests, what, **arguments)[0].mean() / scorer.context)

    plain, rows = loss("as it is"), []
    for layers in (*([layer] for layer in sorted(source.layers)), sorted(source.layers)):
        part = source._replace(layers={layer: source.layers[layer] for layer in layers})
        zero = part.patched(lambda layer, x: torch.zeros_like(x))
        rows.append({"code": loss("through the code", **part.spliced()), "h": plain, "zero": loss("y = 0", **zero)})
    return {"loss": plain, "rows": rows, "explained": None,
            "what": f"{count * scorer.context:,} tokens of the validation split of {tokens.folder}"}


def effects_of(run, source, index, tokens, stem, key, most):
    """A function of (layer, features): what each does, NaN and 0 where it was not among the `most` that fire most.

    Made in parts, each of which is kept as soon as it is done.
    """
    counts, each = np.diff(index.offsets), max(64, 2 ** 24 // run.config.vocab_size)
    live = np.flatnonzero(counts)
    chosen = np.sort(live[np.argsort(-counts[live], kind="stable")[:most]])
    parts = []
    for number, first in enumerate(range(0, len(chosen), each)):
        path = f"{stem}-effects-{number:05}.npz"
        arrays = read_arrays(path)
        wanted = f"{key} {most} {EFFECT_AT} {TOKENS} {first} {VERSION}"
        if arrays is None or str(arrays.get("key")) != wanted:
            if number == 0 or not parts:
                say(f"taking {len(chosen):,} features away where they are strongest, to see what they do, once")
            arrays = some_effects(run, source, index, tokens, chosen[first : first + each])
            write_arrays(path, arrays | {"key": np.array(wanted)})
        parts.append(arrays)
    every = {name: np.concatenate([part[name] for part in parts])
             for name in ("features", "kl", "ups", "up_values", "downs", "down_values")} if parts else None

    def look(layer, features):
        if every is None:
            return None
        wanted = 2 * index.m * index.layers.index(layer) + features
        place = np.minimum(np.searchsorted(every["features"], wanted), len(every["features"]) - 1)
        there = every["features"][place] == wanted
        return {name: np.where(there.reshape(-1, *[1] * (values.ndim - 1)), values[place],
                               np.nan if values.dtype.kind == "f" else 0).astype(values.dtype)
                for name, values in every.items() if name != "features"}
    return look


def some_effects(run, source, index, tokens, chosen):
    layers = np.array(index.layers)[chosen // (2 * index.m)]
    positions = np.full((len(chosen), EFFECT_AT), NONE, np.uint32)
    for layer in np.unique(layers):
        own = layers == layer
        positions[own] = strongest(layer_of(index, layer), chosen[own] % (2 * index.m), EFFECT_AT)
    change, kl = effects(run, source, tokens, np.stack([layers, chosen % index.m], 1), positions)
    (ups, up), (downs, down) = change.topk(TOKENS), (-change).topk(TOKENS)
    return {"features": chosen, "kl": kl.numpy(), "ups": up.numpy().astype(np.uint32), "up_values": ups.numpy(),
            "downs": down.numpy().astype(np.uint32), "down_values": downs.numpy()}


def ranking(run, source, weights, count, records):
    """The rows of sample.py --top-features, made once."""
    tokens = open_tokens(run, "val", verify=False)
    key = checksum([VERSION, weights, source.key, tokens.identity(), count, "ranking"])
    if key not in records:
        say("choosing the features that stand best for something, and testing them on unseen words, once")
        size, ranked = rank_features(run, source, count)
        records.add(key, {"tokens": size, "rows": ranked})
    return records[key]


def control_of(run, count, groups):
    """{layer: of every label the F1 of the hash's best feature}: chosen and tested as the labels of the source are."""
    control = open_source(run, "hash")
    index, _ = open_index(run, control, count, say)
    return {layer: names_of(layer_of(index, layer), groups, run.config.context)[1].tolist() for layer in index.layers}


def describe_run(run, source, index, tokens, options):
    """What the overview says that needs no pass over the firings."""
    config = run.config
    return {
        "title": f"{name_of(run)}: features" + ("" if source.kind == "own" else f" of {source.name}"),
        "run": os.path.dirname(run.path), "checkpoint": os.path.basename(run.path), "step": run.content["step"],
        "source": source.name, "kind": source.kind, "site": source.site, "option": options.source,
        "toy": is_toy(run.encoding), "data": config.data, "parameters": run.model.count_parameters(),
        "shape": {key: getattr(config, key) for key in ("layers", "d", "heads", "context", "bottleneck")},
        "active": list(config.active) if source.kind == "own" else None, "m": index.m, "layers": index.layers,
        "tokens": index.tokens, "context": config.context, "firings": len(index.positions),
        "end": run.encoding.eot_token, "vocabulary": token_texts(run.encoding), "edges": list(evaluation.EDGES),
        "effect_at": EFFECT_AT, "made": provenance()}


def build(run, source, path, options):
    """Write the page of a source and what belongs to it."""
    folder, weights = os.path.dirname(run.path), weights_hash(run.model)
    index, tokens = open_index(run, source, options.index_tokens, say)
    records, context = Records(os.path.join(folder, "view.jsonl")), run.config.context
    key = checksum([VERSION, weights, source.key, tokens.identity(), index.tokens])
    windows = tokens.windows(range(index.tokens // context), context)[:, :-1].numpy()
    groups = groups_of(run.encoding, windows)
    about = describe_run(run, source, index, tokens, options) | {
        "key": key, "losses": losses_of(run, source, weights, records),
        "ranking": ranking(run, source, weights, options.index_tokens, records),
        "labels": [f"{group.name} {label}" for group in groups for label in group.labels],
        "control": None if source.kind == "hash" else control_of(run, options.index_tokens, groups)}
    own = source.kind == "own"
    families = {layer: family_of(source.layers[layer]) if own else None for layer in index.layers}
    stem = path.removesuffix(".html")
    look = effects_of(run, source, index, tokens, stem, key, options.effects)
    facts = Facts(index, windows.flatten(), context, families, groups, about["control"], look)
    write_all(path, about, facts)


def write_all(path, about, facts, most=MOST):
    """The pieces, then the page."""
    chunks = Chunks(path.removesuffix(".html"), about["key"], most)
    levels = list(write_chunks(chunks, facts))
    each = [windows_each(np.diff(facts.index.offsets[[2 * facts.index.m * n, 2 * facts.index.m * (n + 1)]])[0],
                         facts.index.tokens, facts.context) for n in range(len(facts.index.layers))]
    family = facts.families[facts.index.layers[0]]
    about |= {"levels": levels, "text_windows": each, "block": BLOCK, "folder": os.path.basename(chunks.folder),
              "lows": [0, facts.index.m] if family is None else [int(low) for low in family.lows]}
    inside = chunks.finish()
    write_page(path, about, inside)
    more = f", and {chunks.size / 1e6:,.0f} MB in {chunks.folder}/" if inside == "{}" else ""
    say(f"wrote {path}, {os.path.getsize(path) / 1e6:,.1f} MB{more}")


# The command


def page_path(run, source):
    name = "features" if source.kind == "own" else f"features-{source.name}"
    return os.path.join(os.path.dirname(run.path), f"{name}.html")


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run's folder, such as out/tiny, or a checkpoint in it")
    parser.add_argument("--source", metavar="NAME", default="own",
                        help="whose features: own, hash, neurons, a variant of SAE that sae.py has trained, or its "
                             "folder (own)")
    parser.add_argument("--site", metavar="SITE",
                        help="of hash, neurons and SAEs: attention_out, mlp_in, mlp_out or block_out (mlp_in)")
    parser.add_argument("--index-tokens", type=within(int, 1, 2 ** 22), default=2 ** 16, metavar="N",
                        help="validation tokens to look at (65536)")
    parser.add_argument("--effects", type=within(int, 0), default=2 ** 16, metavar="N",
                        help="of so many features, those that fire most, see what they do: it takes most of the time "
                             "(65536)")
    parser.add_argument("--serve", action="store_true", help="show the page on 127.0.0.1, with the model behind it")
    parser.add_argument("--port", type=within(int, 0, 65535), default=8137, metavar="N",
                        help="of --serve; 0 takes any that is free (8137)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    return parser.parse_args(arguments)


def main(arguments):
    options = parse(arguments)
    run = open_run(options.run, options.device)
    source = open_source(run, options.source, options.site)
    path = page_path(run, source)
    check_writable(path)
    say(f"{run.path}: the features of {describe_source(source)}")
    with locked(f"{path.removesuffix('.html')}.lock", ""):  # the run itself may be in training
        build(run, source, path, options)
    if options.serve:
        from serve import serve
        serve(run, source, path, options.port)
    else:
        say(f"open {os.path.abspath(path)} in a browser; it needs no network. --serve adds the live parts")


if __name__ == "__main__":
    run_script(main, "stopped; the same command goes on from what is kept")
