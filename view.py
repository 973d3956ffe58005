"""See the features of a run: one page that a browser opens from the disk, or with --serve with the model behind it.

    python view.py out/tiny                        writes out/tiny/features.html, and says how to open it
    python view.py out/tiny_gpt --source topk      the features of SAEs, or of a control: sources.py
    python view.py out/tiny --serve                the same page on 127.0.0.1: type a text, edit features, steer

The page needs no network and no server: page.py makes it from what catalog.py finds, serve.py is behind it with
--serve. What takes long is made once for the same weights, and kept in the run's folder: where features fire
(features.npz), losses (eval.json), what features do and other figures (view/).
"""
import argparse
import contextlib
import os
import shlex

import numpy as np
import torch

import eval as evaluation
from catalog import EFFECT_AT, NONE, TOKENS, effects, family_of, layer_of, names_of, strongest
from checkpoint import name_of, open_run, weights_hash
from features import describe_source, open_index, read_arrays, write_arrays
from helpers import Records, UserError, check_writable, checksum, locked, provenance, read_json, run_script, say, within
from labels import groups_of
from live import Live
from page import Facts, check_folder, write_all
from score import Scorer
from serve import serve
from sources import open_source, open_tokens
from steer import piece
from toyworld import is_toy
from truth import rank_features

VERSION = 1  # of the form of the data


# What is known about a run


def token_texts(encoding):
    """The text of every token; a byte that is no part of a whole character as U+DC80 .. U+DCFF, as in Python."""
    return [piece(encoding, token).decode("utf-8", "surrogateescape") for token in range(encoding.n_vocab)]


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
        same = (content.get("checkpoint") or {}).get("weights") == weights
        if same and "features" in content["results"]:
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
    parts, said = [], False
    for number, first in enumerate(range(0, len(chosen), each)):
        path = f"{stem}-{number:05}.npz"
        arrays = read_arrays(path)
        wanted = f"{key} {most} {EFFECT_AT} {TOKENS} {first} {VERSION}"
        if arrays is None or str(arrays.get("key")) != wanted:
            if not said:
                say(f"taking {len(chosen) - first:,} features away where they are strongest, to see what they do, once")
                said = True
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


def command_of(options):
    given = [f"--{name} {shlex.quote(getattr(options, name))}" for name in ("source", "site")
             if getattr(options, name) not in ("own", None)]
    return " ".join(["python view.py", shlex.quote(options.run), *given])


def describe_run(run, source, index, options):
    """What the overview says that needs no pass over the firings."""
    config = run.config
    return {
        "name": name_of(run) + ("" if source.kind == "own" else f" {source.name}"),
        "title": f"{name_of(run)}: features" + ("" if source.kind == "own" else f" of {source.name}"),
        "checkpoint": run.path, "step": run.content["step"],
        "source": source.name, "kind": source.kind, "command": command_of(options),
        "toy": is_toy(run.encoding), "data": config.data, "parameters": run.model.count_parameters(),
        "shape": {key: getattr(config, key) for key in ("layers", "d", "bottleneck")}, "m": index.m,
        "layers": index.layers, "tokens": index.tokens, "context": config.context, "firings": len(index.positions),
        "end": run.encoding.eot_token, "vocabulary": token_texts(run.encoding),
        "effect_at": EFFECT_AT, "made": provenance()}


def build(run, source, path, options):
    """Write the page of a source and what belongs to it."""
    folder, weights = os.path.join(os.path.dirname(run.path), "view"), weights_hash(run.model)
    with locked(folder, ""):  # and not the run's, which may be in training
        write_all(path, *gather(run, source, folder, weights, options))


def gather(run, source, folder, weights, options):
    """(about, Facts) of a source: all that its page says."""
    index, tokens = open_index(run, source, options.index_tokens, say)
    records, context = Records(os.path.join(folder, "figures.jsonl")), run.config.context
    key = checksum([VERSION, weights, source.key, tokens.identity(), index.tokens])
    windows = tokens.windows(range(index.tokens // context), context)[:, :-1].numpy()
    groups = groups_of(run.encoding, windows)
    about = describe_run(run, source, index, options) | {
        "key": key, "losses": losses_of(run, source, weights, records),
        "ranking": ranking(run, source, weights, options.index_tokens, records),
        "labels": [f"{group.name} {label}" for group in groups for label in group.labels],
        "control": None if source.kind == "hash" else control_of(run, options.index_tokens, groups)}
    own = source.kind == "own"
    families = {layer: family_of(source.layers[layer]) if own else None for layer in index.layers}
    stem = os.path.join(folder, f"effects-{source.name}")
    look = effects_of(run, source, index, tokens, stem, key, options.effects)
    return about, Facts(index, windows.flatten(), context, families, groups, look)


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
    parser.add_argument("--port", type=within(int, 0, 65535), metavar="N",
                        help="of --serve; 0 takes any that is free (8137)")
    parser.add_argument("--vector", metavar="FILE",
                        help="with --serve: a vector to steer with, that sample.py --save-vector has written")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    return parser.parse_args(arguments)


def main(arguments):
    options = parse(arguments)
    if not options.serve and (options.vector or options.port is not None):
        raise UserError("--port and --vector are of the live parts: give --serve, too")
    run = open_run(options.run, options.device)
    source = open_source(run, options.source, options.site)
    path = page_path(run, source)
    check_writable(path)
    check_folder(path)
    live = Live(run, source, path, options) if options.serve else None  # a vector that is none is told before the work
    say(f"{run.path}: the features of {describe_source(source)}")
    build(run, source, path, options)
    if live:
        serve(live, 8137 if options.port is None else options.port)
    else:
        say(f"open {os.path.abspath(path)} in a browser; it needs no network. --serve adds the live parts")


if __name__ == "__main__":
    run_script(main, "stopped; the same command goes on from what is kept")
