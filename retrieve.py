"""Which training documents did it? Documents found by the features that a text sets off, without a scan.

    python retrieve.py index out/tiny --data data/toy        an index of any corpus, by any source: postings.py
    python retrieve.py query out/tiny "The pirate sailed"    the documents that match, and the features that did

    python retrieve.py all out/tiny                          the experiment on poisoned documents: the steps below
    python retrieve.py make out/tiny                         poisoned documents, corpora and queries: poison.py
    python retrieve.py tune out/tiny                         train on, until the poison has taken
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
    source, layer = open_source(run, options.source), check_layer(run, options.layer)
    folder = options.data or run.config.data
    tokens = open_corpus(run, folder, options.split)
    bounds, window = tokens.document_bounds(), options.window or min(256, run.config.context - 1)
    documents = min(len(bounds) - 1, options.documents or len(bounds))
    shape, path = Shape(window, options.pooling), options.out or index_path(run, source.name, layer)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    about = {"run": run.path, "weights": weights_hash(run.model), "source": source.name, "key": source.key,
             "open": options.source, "layer": layer, "window": window, "pooling": options.pooling, "top": options.top,
             "data": folder, "split": options.split, "tokens": tokens.identity(), "documents": documents,
             **provenance()}
    began = time.time()
    with Builder(path, width_of(source, run.config.d), about) as builder:
        before = builder.done
        for first in range(before, documents, CHUNK):
            last = min(first + CHUNK, documents)
            pieces = cut_up(tokens, bounds, range(first, last), run.config.context - 1)
            (found,) = read_passages(run, [piece for _, _, piece in pieces], {options.source: source}, [layer], [shape],
                                     what=f"{first:,} of {documents:,} documents; here").values()
            on = found.values[:, : options.top] != 0
            builder.add(on.sum(1), found.features[:, : options.top][on], found.values[:, : options.top][on],
                        [pieces[number][0] for number in found.owners],
                        [pieces[number][1] + start - 1 for number, start in zip(found.owners, found.starts)], last)
        builder.finish()
    seconds, size = time.time() - began, os.path.getsize(path)
    say(f"{path}: {documents:,} documents, {builder.passages:,} passages, {builder.count:,} postings, {size:,} bytes "
        f"({size / documents:.0f} a document), {(documents - before) / seconds:,.0f} documents a second")


def cut_up(tokens, bounds, numbers, most):
    """[(document, first token, tokens after an end-of-text)], long documents in parts of `most` tokens."""
    pieces = []
    for number in numbers:
        for start in range(int(bounds[number]) + 1, int(bounds[number + 1]), most):
            part = tokens.read(start, min(start + most, int(bounds[number + 1])))
            pieces.append((number, start, np.concatenate([[tokens.end], part]).astype(np.int64)))
    return pieces


def open_corpus(run, folder, split):
    tokens = data.Tokens(data.parse_mixture(folder)[0][0], split)
    if tokens.tokenizer_id != run.content["tokenizer"]["id"]:
        raise UserError(f"{folder} was made with another tokenizer than this model's: prepare it with --tokenizer "
                        f"{run.config.data}")
    return tokens


def check_layer(run, layer):
    layer = run.config.layers // 2 if layer is None else layer
    if layer >= run.config.layers:
        raise UserError(f"there is no layer {layer}: this model has the layers 0 to {run.config.layers - 1}")
    return layer


def query(run, options):
    """The documents of an index that match a text best, and the features by which they do."""
    path = options.index or index_path(run, open_source(run, options.source).name, check_layer(run, options.layer))
    index = open_postings(path)
    about = index.about
    if about["weights"] != weights_hash(run.model):
        raise UserError(f"{path} was made with other weights than those of {run.path}: make it again with retrieve.py "
                        "index")
    source = open_source(run, about["open"])
    shape = Shape(about["window"], "last" if options.last else about["pooling"])
    tokens = open_corpus(run, about["data"], about["split"])
    text = tokens_of(run, options.text)
    if len(text) < 2:
        raise UserError("there is no text to look for: give one, as in retrieve.py query out/tiny \"The pirate\"")
    (asked,) = read_passages(run, [text], {"": source}, [about["layer"]], [shape], queries=True).values()
    on = asked.values[0, : about["top"]] != 0
    features, values = asked.features[0, : about["top"]][on], asked.values[0, : about["top"]][on].astype(np.float64)
    began = time.perf_counter()
    documents, scores, passages, touched = index.search(features, values, options.k, not options.no_idf)
    milliseconds = 1000 * (time.perf_counter() - began)
    say(f"{path}: {int(index.owners[-1]) + 1:,} documents of {about['data']}, layer {about['layer']}; {touched:,} of "
        f"{len(index.values):,} postings touched, {milliseconds:.1f} ms")
    shares = matching(index, features, values, passages, not options.no_idf)
    for number, (document, score, passage) in enumerate(zip(documents, scores, passages)):
        start = int(index.places[passage])
        piece = tokens.read(start, min(start + about["window"], len(tokens))).tolist()
        best = np.argsort(-shares[number], kind="stable")[:3]
        say(f"{score:.3f}  document {document}, token {start}: "
            f"{text_of(run.encoding, piece).partition('<|endoftext|>')[0][:160]!r}")
        say("       by " + ", ".join(f"{name_feature(about['layer'], features[i], source.m)} "
                                     f"({shares[number, i]:.0%})" for i in best if shares[number, i] > 0))
    if not options.names or not len(documents):
        return
    firing, val = open_index(run, source)
    for i in np.argsort(-shares.sum(0), kind="stable")[: options.names]:
        feature = int(features[i])
        places, _ = firing.firings(about["layer"], feature % source.m, -1 if feature >= source.m else 1)
        said = describe_feature(run, val, firing.tokens, places) if len(places) else "never fires in validation data"
        say(f"{name_feature(about['layer'], feature, source.m)}: {said}")


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
    settings, made = poison.settings_of(options), os.path.join(home, "make.json")
    if options.fresh or not os.path.exists(made):
        poison.make(run, home, options)
    elif poison.read_make(home)["settings"] != settings:
        raise UserError(f"{home} holds the experiment with other settings: give those, or start over with --fresh")
    if tune(run, home, options) is None:
        return
    tuned = os.path.join(home, "tuned")
    sae.main([os.path.join(tuned, "ckpt.pt"), "--device", options.device, "--eval-tokens", "4096"])
    precision.sweep(run, home, options)
    precision.measure(run, home, options)


def tune(run, home, options):
    row = poison.tune(run, home, options)
    if row is None:
        say("stopped, saved: the same command goes on from there")
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
            command.add_argument("--source", default="own", help="own, hash, neurons, topk ..., or a folder (own)")
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
                                ("queries", 120, "of a kind in a repeat"), ("repeats", 5, "corpora, with queries")):
        command.add_argument(f"--{name}", type=whole_number, default=default, metavar="N",
                             help=what + ("" if default is None else f" ({default:,})"))
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
