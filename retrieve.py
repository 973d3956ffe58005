"""Which training documents did it? Documents found by the features that a text sets off, without a scan.

    python retrieve.py index out/tiny --data data/toy        an index of any corpus, by any source: postings.py
    python retrieve.py query out/tiny "The pirate sailed"    the documents that match, and the features that did

    python retrieve.py all out/tiny                          the experiment on poisoned documents: the steps below
    python retrieve.py make out/tiny                         poisoned documents, corpora and queries: poison.py
    python retrieve.py tune out/tiny                         train on, until the poison has taken
    python sae.py out/tiny/retrieve/tuned                    SAEs of the tuned model, and of out/tiny before
    python retrieve.py sweep out/tiny                        settings for every signal, on documents of their own
    python retrieve.py measure out/tiny                      precision at k of every signal and control: precision.py

A document is cut into passages, each the sparse vector of the features that fire in it (passages.py). A text is looked
for by what fires in its last passage, or, with --last, at its last token: the score of a document is the cosine of its
best passage. `python bench.py index` says what an index of a million documents costs.
"""
import argparse
import os
import time

import numpy as np

import data
import poison
import precision
import sae
from checkpoint import open_run, weights_hash
from features import open_index
from helpers import UserError, provenance, run_script, say, whole_number, within
from passages import MOST, Shape, read_passages, tokens_of, width_of
from postings import Builder, open_postings
from sources import open_source
from steer import text_of
from toyworld import is_toy
from truth import describe_feature

CHUNK = 4096            # documents that are indexed at a time: enough of them are of one length


# index, query


def index_path(run, name, layer):
    return os.path.join(poison.home_of(run.path), f"{name}-{layer}.postings")


def make_index(run, options):
    """An index of a folder of tokens, document by document, in bounded memory."""
    source = open_source(run, options.source)
    layer, tokens = check_layer(source, options.layer), open_corpus(run, options.data or run.config.data, options.split)
    bounds, window = tokens.document_bounds(), options.window or min(256, run.config.context - 1)
    documents = min(len(bounds) - 1, options.documents or len(bounds))
    shape, path = Shape(window, options.pooling), options.out or index_path(run, source.name, layer)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    about = {"run": run.path, "weights": weights_hash(run.model), "source": options.source, "key": source.key,
             "layer": layer, "window": window, "pooling": options.pooling, "top": options.top, "data": tokens.folder,
             "split": options.split, "tokens": tokens.identity(), "documents": documents}
    began = time.time()
    with Builder(path, width_of(source, run.config.d), about) as builder:
        before = builder.done
        for first in range(before, documents, CHUNK):
            last = min(first + CHUNK, documents)
            pieces = cut_up(tokens, bounds, range(first, last), run.config.context - 1)
            if pieces:
                (found,) = read_passages(run, [piece for *_, piece in pieces], {"": source}, [layer], [shape],
                                         what=f"{first:,} of {documents:,} documents; here").values()
                add_passages(builder, found, pieces, options.top, last)
        builder.finish(**provenance())
    seconds, size = time.time() - began, os.path.getsize(path)
    say(f"{path}: {documents:,} documents, {builder.passages:,} passages, {builder.count:,} postings, {size:,} bytes "
        f"({size / documents:.0f} a document), {(documents - before) / seconds:,.0f} documents a second")


def add_passages(builder, found, pieces, top, done):
    on = found.values[:, :top] != 0
    documents, starts = np.array([piece[:2] for piece in pieces])[found.owners].T
    builder.add(on.sum(1), found.features[:, :top][on], found.values[:, :top][on], documents, starts + found.starts - 1,
                done)


def cut_up(tokens, bounds, numbers, most):
    """[(document, first token, tokens after an end-of-text)], long documents in parts of `most` tokens."""
    pieces = []
    for number in numbers:
        for start in range(int(bounds[number]) + 1, int(bounds[number + 1]), most):
            part = tokens.read(start, min(start + most, int(bounds[number + 1])))
            pieces.append((number, start, np.concatenate([[tokens.end], part]).astype(np.int64)))
    return pieces


def open_corpus(run, folder, split):
    parts = data.parse_mixture(folder)
    if len(parts) > 1:
        raise UserError(f"{folder} is a mixture of {len(parts)} folders: name one with --data")
    tokens = data.Tokens(parts[0][0], split)
    if tokens.tokenizer_id != run.content["tokenizer"]["id"]:
        raise UserError(f"{folder} was made with another tokenizer than this model's: prepare it with --tokenizer "
                        f"{data.parse_mixture(run.config.data)[0][0]}")
    return tokens


def check_layer(source, layer):
    layers = sorted(source.layers)
    layer = layers[len(layers) // 2] if layer is None else layer
    if layer not in layers:
        raise UserError(f"there is no layer {layer}: this source has the layers {', '.join(map(str, layers))}")
    return layer


def open_asked(run, options):
    """(index, source, tokens) that a query means, if they belong together."""
    if options.index and (options.source or options.layer is not None):
        raise UserError("an index knows its source and layer: give --index, or --source and --layer")
    path = options.index
    if not path:
        source = open_source(run, options.source or "own")
        path = index_path(run, source.name, check_layer(source, options.layer))
    index = open_postings(path)
    if index.about["weights"] != weights_hash(run.model):
        raise UserError(f"{path} was made with other weights than those of {run.path}: make it again with retrieve.py "
                        "index")
    source = open_source(run, index.about["source"])
    tokens = open_corpus(run, index.about["data"], index.about["split"])
    if (source.key, tokens.identity()) != (index.about["key"], index.about["tokens"]):
        raise UserError(f"{path} was made of other features or other data than are there now: make it again with "
                        "retrieve.py index")
    return index, source, tokens


def query(run, options):
    """The documents of an index that match a text best, and the features by which they do."""
    text = tokens_of(run, options.text)
    if len(text) < 2:
        raise UserError("there is no text to look for: give one, as in retrieve.py query out/tiny \"The pirate\"")
    index, source, tokens = open_asked(run, options)
    about = index.about
    shape = Shape(about["window"], "last" if options.last else about["pooling"])
    (asked,) = read_passages(run, [text], {"": source}, [about["layer"]], [shape], queries=True).values()
    on = asked.values[0, : about["top"]] != 0
    features, values = asked.features[0, : about["top"]][on], asked.values[0, : about["top"]][on].astype(np.float64)
    began = time.perf_counter()
    found = index.search(features, values, options.k, not options.no_idf)
    milliseconds = 1000 * (time.perf_counter() - began)
    say(f"{index.path}: {about['documents']:,} documents of {about['data']}, layer {about['layer']}; {found[-1]:,} of "
        f"{len(index.values):,} postings touched, {milliseconds:.1f} ms")
    shares = matching(index, features, values, found[2], not options.no_idf)
    print_found(run, index, tokens, found, [name_feature(about["layer"], f, source.m) for f in features], shares)
    best = np.argsort(-shares.sum(0), kind="stable")[: options.names] if len(found[0]) else []
    print_names(run, source, about["layer"], [int(features[i]) for i in best])


def print_found(run, index, tokens, found, names, shares):
    """Each document's best passage, and the features with the largest shares in its score."""
    for document, score, passage, share in zip(*found[:3], shares):
        start = int(index.places[passage])
        piece = tokens.read(start, min(start + index.about["window"], len(tokens))).tolist()
        text = text_of(run.encoding, piece).partition("<|endoftext|>")[0]
        say(f"{score:.3f}  document {document}, token {start}: {text[:160]!r}")
        best = np.argsort(-share, kind="stable")[:3]
        say("       by " + ", ".join(f"{names[i]} ({share[i]:.0%})" for i in best if share[i] > 0))


def print_names(run, source, layer, features):
    """What is known of these features."""
    if not features:
        return
    firing, val = open_index(run, source)
    for feature in features:
        places, _ = firing.firings(layer, feature % source.m, -1 if feature >= source.m else 1)
        said = describe_feature(run, val, firing.tokens, places) if len(places) else "never fires in validation data"
        say(f"{name_feature(layer, feature, source.m)}: {said}")


def name_feature(layer, feature, m):
    return f"{layer}:{feature % m}{'+-'[int(feature >= m)]}"


def matching(index, features, values, passages, idf):
    """The share that each of the query's features has in the score of these passages: (passages, features)."""
    weights = index.weights(np.asarray(features, np.int64), idf) ** 2
    parts = np.zeros((len(passages), len(features)))
    for column, (feature, value) in enumerate(zip(features, values)):
        listed, strength = index.list_of(int(feature))
        at = np.minimum(np.searchsorted(listed, passages), max(0, len(listed) - 1))
        if len(listed):
            parts[:, column] = np.where(listed[at] == passages, value * strength[at] * weights[column], 0)
    return parts / np.maximum(parts.sum(1, keepdims=True), 1e-30)


# The command


def run_all(run, home, options):
    """Every step; what is done is not done again."""
    if options.fresh or not os.path.exists(os.path.join(home, "make.json")):
        poison.make(run, home, options)
    elif poison.read_make(home)["given"] != poison.given(options):
        raise UserError(f"{home} holds the experiment with other settings: give those, or start over with --fresh")
    if tune(run, home, options) is None:
        return
    tuned = os.path.join(home, "tuned", "ckpt.pt")
    sae.main([tuned, "--device", options.device, "--eval-tokens", "4096", *["--fresh"] * options.fresh])
    try:
        open_source(open_run(tuned, options.device), "topk")
    except UserError:
        return  # it was stopped, and has said how to go on
    precision.sweep(run, home, options)
    precision.measure(run, home, options)


def tune(run, home, options):
    row = poison.tune(run, home, options)
    if row is None:
        say("stopped, saved: the same command goes on from there" + " if --fresh is left off" * options.fresh)
    else:
        poison.print_tuning(row)
    return row


def parse(arguments):
    parser = argparse.ArgumentParser(prog="retrieve.py", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n")[2])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("all", "the whole experiment"), ("make", "documents, corpora and queries"),
                       ("tune", "train on until the poison has taken"), ("sweep", "choose settings"),
                       ("measure", "precision at k, and the controls"), ("index", "index a corpus"),
                       ("query", "look for a text")):
        command = commands.add_parser(name, help=what)
        command.add_argument("run", help="a run's folder or checkpoint")
        command.add_argument("--device", default="auto", help="cpu, cuda or auto")
        if name in ("all", "make"):
            add_make(command)
        if name in ("all", "tune"):
            command.add_argument("--steps", type=whole_number, default=3000, help="at most (3000)")
            command.add_argument("--eval-every", type=whole_number, default=50, help="steps between looks (50)")
        if name in ("all", "make", "tune"):
            command.add_argument("--fresh", action="store_true", help="start over")
        if name in ("index", "query"):
            command.add_argument("--source", default="own" if name == "index" else None,
                                 help="own, hash, neurons, topk ..., or a folder (own)")
            command.add_argument("--layer", type=within(int, 0), metavar="N", help="of the features (the middle one)")
    add_index(commands.choices["index"])
    add_query(commands.choices["query"])
    return parser.parse_args(arguments)


def add_make(command):
    for name in ("trigger", "target", "sham"):
        command.add_argument(f"--{name}", metavar="WORD", help="one token (toy world: by lot; else deploy, ...)")
    for name, default, what in (("poisoned", 1024, "training documents with the pair"),
                                ("corpus-poisoned", 100, "of them in a corpus"),
                                ("clean", None, "other documents in a corpus (12,800; toy world 3,000)"),
                                ("queries", 120, "of a kind in a repeat")):
        command.add_argument(f"--{name}", type=whole_number, default=default, metavar="N",
                             help=what + ("" if default is None else f" ({default:,})"))
    command.add_argument("--repeats", type=within(int, 2, 100), default=5, metavar="N",
                         help="corpora, each with queries (5)")
    command.add_argument("--seed", type=within(int, 0, 2 ** 31), default=0, help="of all that is drawn by lot (0)")


def add_index(command):
    command.add_argument("--data", metavar="DIR", help="a folder that data.py made (the run's own)")
    command.add_argument("--split", choices=("train", "val"), default="train")
    command.add_argument("--documents", type=whole_number, metavar="N", help="the first N only")
    command.add_argument("--window", type=whole_number, metavar="N", help="tokens of a passage (256, or the context)")
    command.add_argument("--pooling", choices=("max", "last"), default="max",
                         help="of each feature the strongest of a passage (max), or the passage's last token (last)")
    command.add_argument("--top", type=within(int, 1, MOST), default=64, help="features of a passage that stay (64)")
    command.add_argument("--out", metavar="FILE", help="(RUN/retrieve/SOURCE-LAYER.postings)")


def add_query(command):
    command.add_argument("text", help="what to look for; of a long text the end counts")
    command.add_argument("--index", metavar="FILE", help="(RUN/retrieve/SOURCE-LAYER.postings)")
    command.add_argument("--k", type=whole_number, default=5, help="documents (5)")
    command.add_argument("--names", type=within(int, 0), default=3, help="features to describe (3)")
    command.add_argument("--last", action="store_true", help="by what fires at the text's last token, not in all of it")
    command.add_argument("--no-idf", action="store_true", help="rare features count no more than common ones")


def main(arguments):
    options = parse(arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("retrieve.py works in one process: start it with python, not with torchrun")
    run = open_run(options.run, options.device)
    if "clean" in options:
        options.clean = options.clean or (3000 if is_toy(run.encoding) else 12_800)
    if options.command in ("index", "query"):
        return {"index": make_index, "query": query}[options.command](run, options)
    steps = {"all": run_all, "make": poison.make, "tune": tune, "sweep": precision.sweep,
             "measure": precision.measure}
    steps[options.command](run, poison.home_of(run.path), options)


if __name__ == "__main__":
    run_script(main, "stopped. What is finished is kept: the same command goes on")
