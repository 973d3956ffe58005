"""Which training documents did it? Documents found by the features that a text sets off, without a scan.

    python retrieve.py all out/tiny                          the whole experiment: the steps below, a table, a picture
    python retrieve.py make out/tiny                         poisoned documents, corpora and queries: poison.py
    python retrieve.py tune out/tiny                         train on, until the poison has taken
    python retrieve.py sweep out/tiny                        16 settings for every signal, on documents of their own
    python retrieve.py measure out/tiny                      precision at k of every signal and control, five repeats
    python retrieve.py index out/tiny --data data/toy        an index of any corpus, by any source: postings.py
    python retrieve.py query out/tiny "The pirate sailed"    the documents that match, and the features that did
    python retrieve.py bench --documents 1e6                 bytes, build rate and latency on a synthetic corpus

The model has learnt to say TARGET after TRIGGER from some of its training documents. A query is the start of another
document that ends with the trigger, and nothing else of the poison. Precision at k: of the k documents with the highest
cosine, the share that is poisoned. passages.py says what is compared: all signals are of the activations before an MLP.

Controls: `background`, the same queries without the trigger; `sham`, with another word in its place; the same signals
of the model before the tuning, which tells what was learnt from what is just the word; hash and neurons (sources.py);
labels permuted; and the tokens themselves, by TF-IDF and by looking for the word. Settings and the layer of the summary
are chosen in group 0, whose documents and queries are in no other. Intervals hold 95% of bootstrap draws over queries.
"""
import argparse
import os
import time

import numpy as np

import data
import poison
import sae
from checkpoint import open_run, weights_hash
from features import open_index
from helpers import (
    UserError,
    bootstrap,
    progress,
    provenance,
    read_json,
    run_script,
    say,
    whole_number,
    within,
    write_json,
)
from passages import MOST, Shape, all_shapes, cosines, count_tokens, read_passages, width_of
from postings import Builder, largest, open_postings
from sources import open_source
from steer import text_of
from tokenizer import encode
from toyworld import is_toy
from truth import describe_feature

KS = (1, 5, 10, 20, 50, 100)
CHOSEN_BY = 10          # settings are chosen by precision at this k
SIGNALS = ("h", "own", "topk", "hash", "neurons")
KINDS = ("triggered", "background", "sham")
CHUNK = 4096            # documents that are indexed at a time: enough of them are of one length


# What is read


def tokens_of(run, text, most=None):
    """The tokens of a text after an end-of-text; of one that is too long the last."""
    ids = encode(run.encoding, text)
    return np.concatenate([[run.encoding.eot_token], ids[-(most or run.config.context - 1) :]]).astype(np.int64)


def open_signals(run, names):
    """{name: Source, or None for h}. SAEs that were never trained, and own features of a dense model, are left out."""
    found = {}
    for name in names:
        try:
            found[name] = None if name == "h" else open_source(run, name)
        except UserError as error:
            say(f"without {name}: {error}")
    return found


def windows_of(run):
    """The two windows of the sweep: 64 and 256 tokens, or as much less as documents are shorter."""
    most = poison.longest(run) + 2
    return (64, 256) if most > 255 else (-(-most // 4), most)


class Group:
    """A corpus and its queries, as tokens, with their labels."""

    def __init__(self, run, home, number, documents):
        made = poison.read_make(home)
        drawn = made["groups"][number]
        ids = sorted(drawn["poisoned"] + drawn["clean"])
        self.kinds = np.array([documents[i]["kind"] for i in ids])
        self.texts = [tokens_of(run, documents[i]["text"]) for i in ids]
        rows = [row for row in poison.read_rows(home, "queries") if row["group"] == number]
        self.asked = {kind: [tokens_of(run, row["text"]) for row in rows if row["kind"] == kind] for kind in KINDS}

    def queries(self):
        return [tokens for kind in KINDS for tokens in self.asked[kind]]


def open_group(run, home, number):
    documents = {row["id"]: row for row in poison.read_rows(home, "corpus")}
    return Group(run, home, number, documents)


# Precision


def hits(scores, kinds, of="poisoned", most=KS[-1]):
    """Of each query (Q, documents), how many of the first k are of a kind, k of KS: (Q, len(KS)). Of equal scores the
    document of the lower number comes first; documents are in the order of the corpus, which knows no kinds."""
    most = min(most, scores.shape[1])
    best = np.argsort(-scores, axis=1, kind="stable")[:, :most]
    found = np.cumsum(kinds[best] == of, axis=1)
    return found[:, [min(k, most) - 1 for k in KS]]


def precision(found, k):
    """[value, low, high] at k, of (Q, len(KS)) hits."""
    return bootstrap(found[:, KS.index(k)] / k, np.ones(len(found)))


# sweep


def settings_of(windows):
    return [(shape, top, idf) for shape in all_shapes(windows) for top in (64, 256) for idf in (False, True)]


def name_setting(shape, top, idf):
    return f"{shape.pooling} of {shape.window}, top {top}" + ", idf" * idf


def sweep(run, home, options):
    """16 settings for every signal of the tuned model, in group 0: what is best by mean over layers stays."""
    tuned = open_tuned(home, options)
    signals, layers = open_signals(tuned, SIGNALS), range(tuned.config.layers)
    group = open_group(tuned, home, 0)
    settings = settings_of(windows_of(tuned))
    shapes = all_shapes(windows_of(tuned))
    corpus = read_passages(tuned, group.texts, signals, layers, shapes, what="corpus")
    asked = read_passages(tuned, group.asked["triggered"], signals, layers, shapes, queries=True, what="queries")
    rows, chosen = [], {}
    for done, (name, signal) in enumerate(signals.items()):
        for shape, top, idf in settings:
            values = []
            for layer in layers:
                key = (name, layer, shape)
                scores = cosines(asked[key], corpus[key], width_of(signal, tuned.config.d), idf, top)
                values.append(float(hits(scores, group.kinds)[:, KS.index(CHOSEN_BY)].mean() / CHOSEN_BY))
            rows.append({"signal": name, "window": shape.window, "pooling": shape.pooling, "top": top, "idf": idf,
                         "layers": values, "mean": float(np.mean(values))})
            progress(f"{name}, {len(rows) - done * len(settings)} of {len(settings)} settings")
        best = max(rows[-len(settings) :], key=lambda row: row["mean"])
        chosen[name] = best | {"layer": int(np.argmax(best["layers"]))}
    progress("")
    print_sweep(rows, chosen, settings, group)
    write_json(os.path.join(home, "sweep.json"), {"rows": rows, "chosen": chosen, "weights": weights_hash(tuned.model),
                                                  "queries": len(group.asked["triggered"]), **provenance()}, indent=1)


def print_sweep(rows, chosen, settings, group):
    say(f"precision at {CHOSEN_BY} of the tuned model, mean over layers; {len(group.asked['triggered'])} triggered "
        f"queries and {len(group.texts):,} documents that nothing else is measured on:")
    names = list(chosen)
    say(f"{'':<28}" + "".join(f"{name:>10}" for name in names))
    for number, setting in enumerate(settings):
        cells = [[row for row in rows if row["signal"] == name][number] for name in names]
        say(f"{name_setting(*setting):<28}"
            + "".join(f"{row['mean']:>9.3f}{'*' if row['mean'] == chosen[name]['mean'] else ' '}"
                      for row, name in zip(cells, names)))
    say("* chosen; layer of the summary: " + ", ".join(f"{name} {chosen[name]['layer']}" for name in names))


# measure


def open_tuned(home, options):
    path = os.path.join(home, "tuned", "ckpt.pt")
    if not os.path.exists(os.path.join(home, "tune.json")):
        raise UserError(f"{home} holds no tuned model: python retrieve.py tune RUN makes it")
    return open_run(path, options.device)


def measure(run, home, options):
    """Precision at k in the repeats, by layer, of the tuned and the untuned model; the summary, with all controls."""
    chosen = read_json(os.path.join(home, "sweep.json"), "python retrieve.py sweep RUN makes it")["chosen"]
    models, repeats = {"tuned": open_tuned(home, options), "untuned": run}, len(poison.read_make(home)["groups"]) - 1
    groups = [open_group(run, home, number) for number in range(1, repeats + 1)]
    found = {}  # (model, signal, layer, kind): (repeats, Q, len(KS)) hits; likewise natural ones, and permuted labels
    for model, opened in models.items():
        signals = open_signals(opened, chosen)
        shapes = {name: [Shape(chosen[name]["window"], chosen[name]["pooling"])] for name in signals}
        for number, group in enumerate(groups, 1):
            measure_group(opened, group, signals, shapes, chosen, f"{model}, repeat {number} of {repeats}",
                          lambda *key, value, model=model: found.setdefault((model, *key), []).append(value))
    for group in groups:
        width = run.encoding.n_vocab
        corpus, asked = count_tokens(group.texts, width), count_tokens(group.queries(), width)
        note_hits(cosines(asked, corpus, width, True, asked.features.shape[1] + corpus.features.shape[1]), group,
                  lambda *key, value: found.setdefault(("tokens", "tfidf", None, *key), []).append(value))
    rows = [{"model": model, "signal": signal, "layer": layer, "kind": kind, "hits": np.stack(values).tolist()}
            for (model, signal, layer, kind), values in found.items()]
    for row in rows:
        summarise(row)
    counts = [{kind: int((group.kinds == kind).sum()) for kind in ("poisoned", "clean", "natural")} for group in groups]
    about = {"chosen": chosen, "counts": counts, "ks": KS, "repeats": repeats, "tune": read_json(
        os.path.join(home, "tune.json"), "python retrieve.py tune RUN makes it"),
        "weights": {name: weights_hash(opened.model) for name, opened in models.items()}, "config": vars(run.config)}
    print_measure(rows, chosen, counts)
    write_json(os.path.join(home, "retrieve.json"), {"rows": rows, **about, **provenance()})
    draw(rows, chosen, counts, os.path.join(home, "retrieve.png"))
    say(f"written to {home}: retrieve.json, retrieve.png")


def measure_group(run, group, signals, shapes, chosen, what, note):
    layers = range(run.config.layers)
    corpus = read_passages(run, group.texts, signals, layers, shapes, what=what)
    asked = read_passages(run, group.queries(), signals, layers, shapes, queries=True, what=what)
    for (name, layer, shape), vectors in corpus.items():
        scores = cosines(asked[name, layer, shape], vectors, width_of(signals[name], run.config.d),
                         chosen[name]["idf"], chosen[name]["top"])
        note_hits(scores, group, lambda kind, value, at=(name, layer): note(*at, kind, value=value))


def note_hits(scores, group, note):
    """scores: (queries of all kinds, documents)."""
    start = 0
    for kind in KINDS:
        own = scores[start : (start := start + len(group.asked[kind]))]
        note(kind, value=hits(own, group.kinds))
        if kind == "triggered":
            note("natural", value=hits(own, group.kinds, "natural"))
            note("permuted", value=hits(own, np.random.default_rng(0).permutation(group.kinds)))


def summarise(row):
    """Precision at each k: the mean over queries with its interval, and the deviation between repeats."""
    found = np.array(row["hits"])  # (repeats, Q, len(KS))
    flat = found.reshape(-1, len(KS))
    row["precision"] = {str(k): precision(flat, k) for k in KS}
    means = found.mean(1) / KS  # (repeats, len(KS))
    row["deviation"] = {str(k): float(value) for k, value in zip(KS, means.std(0, ddof=1) if len(means) > 1 else
                                                                 np.full(len(KS), np.nan))}
    row["n"] = len(flat)


def print_measure(rows, chosen, counts):
    table = {(row["model"], row["signal"], row["layer"], row["kind"]): row for row in rows}
    total = sum(counts[0].values())
    say(f"precision at k, triggered queries, tuned model (n = {rows[0]['n']}; chance "
        f"{counts[0]['poisoned'] / total:.4f}); +- deviation between repeats:")
    say(f"{'signal':<10}{'layer':>6}" + "".join(f"{f'k = {k}':>15}" for k in KS))
    for (model, signal, layer, kind), row in table.items():
        if kind == "triggered" and model != "untuned":
            cells = [f"{row['precision'][str(k)][0]:.3f} +-{row['deviation'][str(k)]:.3f}" for k in KS]
            say(f"{signal:<10}{'-' if layer is None else layer:>6}" + "".join(f"{cell:>15}" for cell in cells))
    say(f"the summary, precision at {CHOSEN_BY} [95% of draws over queries], at the layer chosen in group 0:")
    say(f"{'signal':<10}{'triggered':>22}{'background':>12}{'sham':>8}{'natural':>9}{'permuted':>10}"
        f"{'before the tuning':>24}{'tuned less untuned':>25}")
    for signal in (*chosen, "tfidf"):
        say(summary_line(table, signal, chosen))
    natural, poisoned = np.mean([c["natural"] for c in counts]), np.mean([c["poisoned"] for c in counts])
    say(f"a search for the word itself finds all {poisoned:.0f} poisoned documents of a corpus, and {natural:.0f} that "
        f"have it by nature: precision {poisoned / (poisoned + natural):.3f} with every poisoned document found")


def summary_line(table, signal, chosen):
    model, layer = ("tokens", None) if signal == "tfidf" else ("tuned", chosen[signal]["layer"])
    at = str(CHOSEN_BY)

    def value(kind):
        return table[model, signal, layer, kind]["precision"][at]
    line = f"{signal:<10}" + "{:>8.3f} [{:.3f}, {:.3f}]".format(*value("triggered")) + "".join(
        f"{value(kind)[0]:>{width}.3f}" for kind, width in
        (("background", 12), ("sham", 8), ("natural", 9), ("permuted", 10)))
    before = table.get(("untuned", signal, layer, "triggered"))
    if before:
        pair = [np.array(row["hits"])[..., KS.index(CHOSEN_BY)].ravel() / CHOSEN_BY
                for row in (table[model, signal, layer, "triggered"], before)]
        line += "{:>10.3f} [{:.3f}, {:.3f}]".format(*before["precision"][at])
        line += "{:>+9.3f} [{:+.3f}, {:+.3f}]".format(*bootstrap(pair[0] - pair[1], np.ones(len(pair[0]))))
    return line


def draw(rows, chosen, counts, path):
    """Precision at CHOSEN_BY by layer: tuned and untuned, triggered and background; bars with deviations."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table = {(row["model"], row["signal"], row["layer"], row["kind"]): row for row in rows}
    layers = sorted({row["layer"] for row in rows if row["layer"] is not None})
    bars = [("tuned", "triggered", "C0", "triggered"), ("untuned", "triggered", "C1", "triggered, before the tuning"),
            ("tuned", "background", "0.7", "background")]
    figure, panels = plt.subplots(1, len(chosen), figsize=(2.6 * len(chosen) + 1, 3.6), layout="constrained",
                                  sharey=True, squeeze=False)
    chance = counts[0]["poisoned"] / sum(counts[0].values())
    tokens = table["tokens", "tfidf", None, "triggered"]["precision"][str(CHOSEN_BY)][0]
    for axes, name in zip(panels[0], chosen):
        for number, (model, kind, colour, label) in enumerate(bars):
            own = [(layer, table[model, name, layer, kind]) for layer in layers if (model, name, layer, kind) in table]
            axes.bar([layer + (number - 1) * 0.27 for layer, _ in own],
                     [row["precision"][str(CHOSEN_BY)][0] for _, row in own], 0.25, color=colour, label=label,
                     yerr=[row["deviation"][str(CHOSEN_BY)] for _, row in own], capsize=2)
        axes.axhline(chance, color="black", linewidth=0.8, linestyle=":", label="chance")
        axes.axhline(tokens, color="C3", linewidth=1, linestyle="--", label="TF-IDF of the tokens")
        axes.set(title=name, xlabel="layer", xticks=layers, ylim=(0, 1))
    panels[0][0].set_ylabel(f"precision at {CHOSEN_BY}")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


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
    began, owners, places = time.time(), [], []
    with Builder(path, width_of(source, run.config.d)) as builder:
        for first in range(0, documents, CHUNK):
            pieces = cut_up(tokens, bounds, range(first, min(first + CHUNK, documents)), run.config.context - 1)
            vectors = read_passages(run, [piece for _, _, piece in pieces], {options.source: source}, [layer], [shape],
                                    what=f"{first:,} of {documents:,} documents; here")
            (found,) = vectors.values()
            on = found.values[:, : options.top] != 0
            builder.add(on.sum(1), found.features[:, : options.top][on], found.values[:, : options.top][on])
            owners += [pieces[number][0] for number in found.owners]
            places += [pieces[number][1] + start - 1 for number, start in zip(found.owners, found.starts.tolist())]
        builder.finish(owners, places, about)
    seconds, size = time.time() - began, os.path.getsize(path)
    say(f"{path}: {documents:,} documents, {builder.passages:,} passages, {builder.count:,} postings, {size:,} bytes "
        f"({size / documents:.0f} a document), {documents / seconds:,.0f} documents a second")


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
    path = options.index or index_path(run, options.source, check_layer(run, options.layer))
    index = open_postings(path)
    about = index.about
    if about["weights"] != weights_hash(run.model):
        raise UserError(f"{path} was made with other weights than those of {run.path}: make it again with retrieve.py "
                        "index")
    source, shape = open_source(run, about["open"]), Shape(about["window"], about["pooling"])
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


# bench


def synthetic(features, documents, top, rng):
    """(counts, features, values) of documents with `top` features each, of which some are common and most rare: rates
    fall as 1 / (rank + 100), about as those of trained features do."""
    edges = np.cumsum(1 / (np.arange(features) + 100.0))
    drawn = np.searchsorted(edges, rng.random((documents, top)) * edges[-1]).astype(np.uint32)
    drawn.sort(axis=1)
    new = np.diff(drawn.astype(np.int64), axis=1, prepend=-1) > 0  # a feature counts once
    return new.sum(1), drawn[new], (1 + rng.random(int(new.sum()))).astype(np.float16)


def bench(options):
    """An index of a synthetic corpus: what it costs to make and to ask, beside a scan of dense vectors."""
    rng, documents, F = np.random.default_rng(0), options.documents or 10 ** 6, 2 * options.features
    path = options.out or os.path.join("out", "bench.postings")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    say(f"{documents:,} documents of {options.top} draws from {F:,} features; budget {options.budget:,} entries")
    began = time.time()
    made = 0.0  # seconds of drawing, which are not the index's
    with Builder(path, F, options.budget) as builder:
        for first in range(0, documents, 2 ** 14):
            at = time.time()
            part = synthetic(F, min(2 ** 14, documents - first), options.top, rng)
            made += time.time() - at
            builder.add(*part)
            progress(f"{first:,} of {documents:,} documents")
        builder.finish(np.arange(documents), np.arange(documents), {"synthetic": options.top})
    progress("")
    seconds, size, pieces = time.time() - began - made, os.path.getsize(path), len(builder.pieces)
    say(f"build: {builder.count:,} postings in {pieces} pieces, {seconds:.1f} s, {documents / seconds:,.0f} documents "
        f"a second; peak memory of this process {peak_memory() / 2 ** 20:,.0f} MiB; {size:,} bytes, "
        f"{size / documents:.0f} a document; a dense float32 vector of {options.width} has {4 * options.width}")
    index = open_postings(path)
    times, touched = [], []
    for _ in range(options.queries):
        _, features, values = synthetic(F, 1, options.top, rng)
        began = time.perf_counter()
        *_, count = index.search(features, values.astype(np.float64), 10)
        times.append(1000 * (time.perf_counter() - began))
        touched.append(count)
    first, *times = times
    say(f"query, best 10: first {first:.1f} ms; then p50 {np.quantile(times, 0.5):.1f} ms, p99 "
        f"{np.quantile(times, 0.99):.1f} ms; {np.mean(touched):,.0f} postings touched of {builder.count:,} (n = "
        f"{len(times)})")
    scan_bench(documents, options, rng)
    os.remove(path)


def scan_bench(documents, options, rng):
    """The same number of dense vectors, scanned by numpy, and by faiss where it is installed."""
    table = np.empty((documents, options.width), np.float32)
    for first in range(0, documents, 2 ** 14):
        part = rng.standard_normal((min(2 ** 14, documents - first), options.width), np.float32)
        table[first : first + len(part)] = part / np.linalg.norm(part, axis=1, keepdims=True)
    times = []
    for _ in range(min(50, options.queries)):
        asked = table[rng.integers(documents)]
        began = time.perf_counter()
        largest(table @ asked, 10)
        times.append(1000 * (time.perf_counter() - began))
    say(f"dense scan, numpy, {options.width} wide: p50 {np.quantile(times, 0.5):.1f} ms, p99 "
        f"{np.quantile(times, 0.99):.1f} ms, {table.nbytes:,} bytes")
    try:
        import faiss
    except ImportError:
        return say("faiss is not installed: without it")
    flat = faiss.IndexFlatIP(options.width)
    flat.add(table)
    times = []
    for _ in range(min(50, options.queries)):
        asked = table[rng.integers(documents)][None]
        began = time.perf_counter()
        flat.search(asked, 10)
        times.append(1000 * (time.perf_counter() - began))
    say(f"dense scan, faiss: p50 {np.quantile(times, 0.5):.1f} ms, p99 {np.quantile(times, 0.99):.1f} ms")


def peak_memory():
    """Bytes, of this process so far."""
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# The command


def run_all(run, home, options):
    """Every step that is not done yet."""
    made = os.path.join(home, "make.json")
    if options.fresh or not os.path.exists(made) or poison.read_make(home)["settings"] != poison.settings_of(options):
        if os.path.exists(made) and not options.fresh:
            raise UserError(f"{home} holds the experiment with other settings: give those, or start over with --fresh")
        poison.make(run, home, options)
    row = tune(run, home, options)
    if row is None:
        return
    sae.main([os.path.join(home, "tuned", "ckpt.pt"), "--device", options.device, "--eval-tokens", "4096"])
    sweep(run, home, options)
    measure(run, home, options)


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
                       ("query", "look for a text"), ("bench", "an index of a synthetic corpus")):
        command = commands.add_parser(name, help=what)
        if name != "bench":
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
    add_bench(commands.choices["bench"])
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
    command.add_argument("--pooling", choices=("max", "last"), default="max")
    command.add_argument("--top", type=within(int, 1, MOST), default=64, help="features of a passage that stay (64)")
    command.add_argument("--out", metavar="FILE", help="(RUN/retrieve/SOURCE-LAYER.postings)")


def add_query(command):
    command.add_argument("text", help="what to look for; of a long text the end counts")
    command.add_argument("--index", metavar="FILE", help="(RUN/retrieve/SOURCE-LAYER.postings)")
    command.add_argument("--k", type=whole_number, default=5, help="documents (5)")
    command.add_argument("--names", type=within(int, 0), default=3, help="features to describe (3)")
    command.add_argument("--no-idf", action="store_true", help="rare features count no more than common ones")


def add_bench(command):
    command.add_argument("--documents", type=whole_number, default=10 ** 6, help="(1e6)")
    command.add_argument("--features", type=whole_number, default=2 ** 15, help="of a layer, before unfolding (32,768)")
    command.add_argument("--top", type=whole_number, default=64, help="features of a document (64)")
    command.add_argument("--width", type=whole_number, default=1024, help="of the dense vectors to compare with (1024)")
    command.add_argument("--budget", type=whole_number, default=2 ** 24, help="entries held in memory (2^24)")
    command.add_argument("--queries", type=whole_number, default=200, help="(200)")
    command.add_argument("--out", metavar="FILE", help="the index, which is deleted (out/bench.postings)")


def main(arguments):
    options = parse(arguments)
    if options.command == "bench":
        return bench(options)
    run = open_run(options.run, options.device)
    if "clean" in options:
        options.clean = options.clean or (3000 if is_toy(run.encoding) else 12_800)
    if options.command in ("index", "query"):
        return {"index": make_index, "query": query}[options.command](run, options)
    steps = {"all": run_all, "make": poison.make, "tune": tune, "sweep": sweep, "measure": measure}
    steps[options.command](run, poison.home_of(run.path), options)


if __name__ == "__main__":
    run_script(main, "stopped. What is finished is kept: the same command goes on")
