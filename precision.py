"""How many of the documents that a signal finds are poisoned: the experiment's settings, and its measure.

    retrieve.py sweep RUN       settings for every signal, on a corpus and queries of their own: sweep.json
    retrieve.py measure RUN     precision at k of every signal and control, by layer: retrieve.json, retrieve.png

The model has learnt to say TARGET after TRIGGER from some of its training documents (poison.py). A query is the start
of another document that ends with the trigger, and has nothing else of the poison. Precision at k: of the k documents
with the highest cosine, the share that is poisoned. All signals are of the activations before an MLP (passages.py).

Two ways to ask. `pooled`, the paper's: queries and documents are pooled alike, to the strongest features of a window or
to its last token, which is 16 settings of window, pooling, truncation and idf. `token`, 8 settings: a query is what
fires at its last token, a document's passage the strongest of each feature. For pooled to its last token, a poisoned
document is found only if a window happens to end with its trigger.

Controls: `background`, the same queries without the trigger; `sham`, with another word in its place; the same signals
of the model before the tuning, which tells what was learnt from what is just the word; hash and neurons (sources.py);
labels permuted; and the tokens themselves, by TF-IDF and by looking for the word. Settings and the layer of the summary
are chosen for each model and signal in group 0, whose documents and queries are in no other. All queries of a corpus
search the same documents, so intervals, 95% by Student's t, are over the repeats: for one model and one pair of words.
"""
import contextlib
import itertools
import os
import time
from typing import NamedTuple

import numpy as np

import poison
from checkpoint import open_run, weights_hash
from helpers import Records, UserError, checksum, progress, provenance, say, student, write_json
from passages import MOST, Shape, all_shapes, as_index, cosines, count_tokens, read_passages, tokens_of, width_of
from postings import largest
from sources import open_source
from tokenizer import encode

KS = (1, 5, 10, 20, 50, 100)
AT = KS.index(10)       # settings are chosen by precision at 10
SIGNALS = ("h", "own", "topk", "hash", "neurons")
KINDS = ("triggered", "background", "sham")
WAYS = {"pooled": ("max", "last"), "token": ("token",)}
ROOM = 4 * 10 ** 9      # bytes of vectors held at a time: of as many layers as fit
PERMUTED = 100          # permutations of the labels


class Group(NamedTuple):
    """A corpus and its queries."""
    texts: np.ndarray   # which of all documents, ascending
    kinds: np.ndarray   # "poisoned", "clean" or "natural"
    asked: dict         # {kind of query: tokens of each}

    def queries(self):
        return [tokens for kind in KINDS for tokens in self.asked[kind]]


def open_groups(run, home, numbers):
    """The tokens of all documents that these groups search, and the groups."""
    corpus, rows = {row["id"]: row for row in poison.read_rows(home, "corpus")}, poison.read_rows(home, "queries")
    drawn = [poison.read_make(home)["groups"][number] for number in numbers]
    drawn = [sorted(group["poisoned"] + group["clean"]) for group in drawn]
    union, groups = sorted(set().union(*drawn)), []
    for number, ids in zip(numbers, drawn):
        own = [row for row in rows if row["group"] == number]
        groups.append(Group(
            np.searchsorted(union, ids), np.array([corpus[i]["kind"] for i in ids]),
            {kind: [tokens_of(run, row["text"]) for row in own if row["kind"] == kind] for kind in KINDS}))
    return [tokens_of(run, corpus[i]["text"]) for i in union], groups


def open_signals(run, names):
    """{name: Source, or None for h}. SAEs that were never trained, and own features of a dense model, are left out."""
    found = {}
    for name in names:
        try:
            found[name] = None if name == "h" else open_source(run, name)
        except UserError as error:
            say(f"without {name}: {error}")
            continue
        if found[name] and len(found[name].layers) < run.config.layers:
            say(f"without {name}: it has only the layers {', '.join(map(str, found.pop(name).layers))}")
    return found


def open_models(run, home, options):
    """The tuned model, and the one before."""
    poison.read_step(home, "tune")
    return {"tuned": open_run(os.path.join(home, "tuned", "ckpt.pt"), options.device), "untuned": run}


def identity(home, models):
    """What tells this experiment's models and documents from others."""
    return {"make": checksum(poison.read_make(home)),
            "weights": {name: weights_hash(opened.model) for name, opened in models.items()}}


def layer_parts(config, texts, shapes):
    """The layers, a few at a time. shapes: {signal: [Shape]}."""
    bytes_of_layer = 6 * MOST * sum(-(-len(tokens) // shape.window) for own in shapes.values() for shape in own
                                    for tokens in texts)
    many = max(1, min(config.layers, ROOM // max(1, bytes_of_layer)))
    return [range(first, min(first + many, config.layers)) for first in range(0, config.layers, many)]


def rank(scores):
    """The best documents of each query: (Q, documents) to (Q, 100 or fewer). Of equal scores the document of the lower
    number comes first; documents are in the order of the corpus, which knows no kinds."""
    return np.stack([largest(row, min(KS[-1], len(row))) for row in scores])


def hits(best, kinds, of="poisoned"):
    """Of each query's best documents, how many of the first k are of a kind, k of KS: (Q, len(KS))."""
    found = np.cumsum(kinds[best] == of, axis=1)
    return found[:, [min(k, best.shape[1]) - 1 for k in KS]]


# sweep


def windows_of(run):
    """The two windows of the sweep: 64 and 256 tokens, or as much less as documents are shorter."""
    most = poison.longest(run) + 2
    return (64, 256) if most > 255 else (-(-most // 4), most)


def all_settings(windows, way):
    return [(shape, top, idf) for shape in all_shapes(windows, WAYS[way]) for top in (64, 256) for idf in (False, True)]


def name_setting(row):
    return f"{row['pooling']} of {row['window']}, top {row['top']}" + ", idf" * row["idf"]


def sweep(run, home, options):
    """All settings for every signal of both models, in group 0: what is best by the mean over layers stays."""
    models, (texts, (group,)) = open_models(run, home, options), open_groups(run, home, [0])
    about = identity(home, models)
    with contextlib.suppress(UserError):
        if all(poison.read_step(home, "sweep").get(key) == value for key, value in about.items()):
            return say(f"{home}/sweep.json has the settings for these documents and models already")
    rows = [row for name, opened in models.items() for row in sweep_model(opened, name, texts, group)]
    kinds = dict.fromkeys((row["model"], row["way"], row["signal"]) for row in rows)
    chosen = [choose([row for row in rows if (row["model"], row["way"], row["signal"]) == kind]) for kind in kinds]
    print_sweep(rows, chosen, group)
    write_json(os.path.join(home, "sweep.json"), {
        "rows": rows, "chosen": chosen, "queries": len(group.asked["triggered"]), "documents": len(texts), **about,
        **provenance()}, indent=1)


def sweep_model(run, model, texts, group):
    """Rows: precision at 10 by layer, and its mean."""
    signals, windows, d = open_signals(run, SIGNALS), windows_of(run), run.config.d
    shapes = dict.fromkeys(signals, [shape for poolings in WAYS.values() for shape in all_shapes(windows, poolings)])
    found = {(way, name, setting): [] for way in WAYS for name in signals for setting in all_settings(windows, way)}
    for part in layer_parts(run.config, texts, shapes):
        corpus = read_passages(run, texts, signals, part, shapes, what=f"{model} model, corpus")
        asked = read_passages(run, group.asked["triggered"], signals, part, shapes, queries=True, what="queries")
        for done, ((_, name, (shape, top, idf)), values) in enumerate(found.items(), 1):
            for key in ((name, layer, shape) for layer in part):
                scores = cosines(asked[key], corpus[key], width_of(signals[name], d), idf, top)
                values.append(float(hits(rank(scores), group.kinds)[:, AT].mean() / KS[AT]))
            progress(f"{model} model, layers {part[0]} to {part[-1]}: {done} of {len(found)} settings")
    progress("")
    return [{"model": model, "way": way, "signal": name, "window": shape.window, "pooling": shape.pooling, "top": top,
             "idf": idf, "layers": values, "mean": float(np.mean(values))}
            for (way, name, (shape, top, idf)), values in found.items()]


def choose(rows):
    """The best of a signal's settings, the first of equal ones, and the layer that was best with it."""
    best = max(rows, key=lambda row: row["mean"])
    return best | {"layer": int(np.argmax(best["layers"]))}


def print_sweep(rows, chosen, group):
    say(f"precision at {KS[AT]}, mean over layers; {len(group.asked['triggered'])} triggered queries and "
        f"{len(group.texts):,} documents that nothing else is measured on; * chosen, with the best layer behind it")
    best = {(row["model"], row["way"], row["signal"]): row for row in chosen}
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        say(f"{f'{model} model':<28}" + "".join(f"{name:>10}" for name in dict.fromkeys(row["signal"] for row in own)))
        for setting in dict.fromkeys(map(name_setting, own)):
            say(f"{setting:<28}" + "".join(
                f"{row['mean']:>8.3f}{mark(row, best[model, row['way'], row['signal']]):<2}" for row in own
                if name_setting(row) == setting))


def mark(row, best):
    return f"*{best['layer']}" if name_setting(row) == name_setting(best) else ""


# measure


def measure(run, home, options):
    """Precision at k in the repeats, by layer, of the tuned and the untuned model; the summary, with all controls."""
    models, made = open_models(run, home, options), poison.read_make(home)
    about, swept = identity(home, models), poison.read_step(home, "sweep")
    if swept["weights"] != about["weights"]:
        raise UserError(f"{home} has settings for other models: python retrieve.py sweep RUN chooses them anew")
    chosen, repeats = swept["chosen"], len(made["groups"]) - 1
    texts, groups = open_groups(run, home, range(1, repeats + 1))
    known = Records(os.path.join(home, "measured.jsonl"))
    found = [row for name, opened in models.items()
             for row in measure_model(opened, name, texts, groups, chosen, known, checksum([about, chosen]))]
    found += measure_tokens(run.encoding.n_vocab, texts, groups)
    rows = [{**row, "n": len(row["hits"][0]), **summary([np.array(part) for part in row["hits"]])} for row in found]
    (trigger,) = encode(run.encoding, made["trigger"]).tolist()
    result = {"rows": rows, "chosen": chosen, "ks": KS, "repeats": repeats, "tune": poison.read_step(home, "tune"),
              "costs": costs(models["tuned"], texts, groups[0], [row for row in chosen if row["model"] == "tuned"]),
              "counts": [count_kinds(texts, group, trigger) for group in groups],
              "words": [made[key] for key in ("trigger", "target", "sham")], "given": made["given"],
              "shared": made["shared"], **about}
    print_measure(result)
    write_json(os.path.join(home, "retrieve.json"), {**result, "config": vars(run.config), **provenance()})
    draw(result, os.path.join(home, "retrieve.png"))
    say(f"written to {home}: retrieve.json, retrieve.png")


def count_kinds(texts, group, trigger):
    """How many documents are of a kind, and what a search for the trigger among the tokens finds."""
    found = np.array([trigger in texts[number][1:] for number in group.texts])
    return {kind: int((group.kinds == kind).sum()) for kind in ("poisoned", "clean", "natural")} | {
        "searched": int(found.sum()), "searched_poisoned": int((found & (group.kinds == "poisoned")).sum())}


def measure_model(run, model, texts, groups, chosen, known, about):
    """Rows {model, way, signal, layer, kind, hits: of each group} of its chosen settings, at every layer."""
    chosen = [row for row in chosen if row["model"] == model]
    signals = open_signals(run, dict.fromkeys(row["signal"] for row in chosen))
    shapes = {name: list(dict.fromkeys(shape_of(row) for row in chosen if row["signal"] == name)) for name in signals}
    rows = []
    for part in layer_parts(run.config, texts, shapes):
        key = f"{about} {model} {part[0]}-{part[-1]}"
        if key not in known:
            known.add(key, measure_layers(run, model, texts, groups, signals, shapes, chosen, part))
        rows += known[key]
    return rows


def measure_layers(run, model, texts, groups, signals, shapes, chosen, part):
    corpus = read_passages(run, texts, signals, part, shapes, what=f"{model} model, corpora")
    asked = [read_passages(run, group.queries(), signals, part, shapes, queries=True, what=f"{model} model, queries")
             for group in groups]
    found = {}
    for row, layer, (number, group) in itertools.product(chosen, part, enumerate(groups)):
        key = row["signal"], layer, shape_of(row)
        scores = cosines(asked[number][key], corpus[key].of_texts(group.texts),
                         width_of(signals[row["signal"]], run.config.d), row["idf"], row["top"])
        for kind, value in hits_by_kind(scores, group):
            found.setdefault((row["way"], row["signal"], layer, kind), []).append(value.tolist())
    return [{"model": model, "way": way, "signal": signal, "layer": layer, "kind": kind, "hits": values}
            for (way, signal, layer, kind), values in found.items()]


def measure_tokens(vocabulary, texts, groups):
    """TF-IDF of the tokens themselves, of all of a query, and of its last token alone."""
    found = {}
    for way, group in itertools.product(WAYS, groups):
        corpus = count_tokens([texts[number] for number in group.texts])
        asked = count_tokens([tokens if way == "pooled" else tokens[[0, -1]] for tokens in group.queries()])
        for kind, value in hits_by_kind(cosines(asked, corpus, vocabulary, idf=True, top=None), group):
            found.setdefault((way, kind), []).append(value.tolist())
    return [{"model": "tokens", "way": way, "signal": "tfidf", "layer": None, "kind": kind, "hits": values}
            for (way, kind), values in found.items()]


def shape_of(row):
    return Shape(row["window"], row["pooling"])


def hits_by_kind(scores, group):
    """(kind, hits); natural documents and permuted labels count for triggered queries. scores: (queries, documents)."""
    ends = np.cumsum([len(group.asked[kind]) for kind in KINDS])[:-1]
    for kind, own in zip(KINDS, np.split(scores, ends)):
        best = rank(own)
        yield kind, hits(best, group.kinds)
        if kind == "triggered":
            rng = np.random.default_rng(0)
            yield "natural", hits(best, group.kinds, "natural")
            yield "permuted", np.mean([hits(best, rng.permutation(group.kinds)) for _ in range(PERMUTED)], axis=0)


def summary(values):
    """Precision at each k: the mean with its interval, and the deviation between repeats. values: [(Q, len(KS))]."""
    means = np.stack([found.mean(0) / KS for found in values])  # (repeats, len(KS))
    return {"precision": [np.clip(student(column), 0, 1).tolist() for column in means.T],
            "deviation": means.std(0, ddof=1).tolist()}


def difference(one, two):
    """[mean, low, high] of the difference of two rows' precision at 10, repeat by repeat."""
    return student([np.mean(a, 0)[AT] / KS[AT] - np.mean(b, 0)[AT] / KS[AT] for a, b in zip(one["hits"], two["hits"])])


# What an index costs


def costs(run, texts, group, chosen):
    """Of a corpus at the chosen settings: bytes, postings touched and milliseconds a query. Features by an index; h,
    whose vectors are dense, by one product with all of them."""
    rows, signals = [], open_signals(run, dict.fromkeys(row["signal"] for row in chosen))
    texts = [texts[number] for number in group.texts]
    for row in chosen:
        name, shape, width = row["signal"], shape_of(row), width_of(signals[row["signal"]], run.config.d)
        corpus, asked = (read_passages(run, texts, {name: signals[name]}, [row["layer"]], [shape], queries, "costs")[
            name, row["layer"], shape] for texts, queries in ((texts, False), (group.queries(), True)))
        cost = scan_cost(corpus, asked, width) if signals[name] is None else index_cost(corpus, asked, width, row)
        rows.append({"way": row["way"], "signal": name, "documents": len(texts), "passages": len(corpus.owners),
                     **cost})
    return rows


def index_cost(corpus, asked, width, row):
    with as_index(corpus, width, row["top"]) as index:
        size, times, touched = os.path.getsize(index.path), [], []
        for features, values in zip(asked.features[:, : row["top"]], asked.values[:, : row["top"]].astype(np.float64)):
            began = time.perf_counter()
            touched.append(index.search(features[values != 0], values[values != 0], 10, row["idf"])[-1])
            times.append(1000 * (time.perf_counter() - began))
        return {"bytes": size, "postings": len(index.values), "touched": float(np.mean(touched)),
                "milliseconds": float(np.median(times))}


def scan_cost(corpus, asked, width):
    """Dense vectors: a product with all of them, then the best passage of each document. On disk they would have two
    bytes a number, as the index has."""
    table, queries = (np.zeros((len(part.features), width), np.float32) for part in (corpus, asked))
    for dense, part in ((table, corpus), (queries, asked)):
        np.add.at(dense, (np.arange(len(dense))[:, None], part.features), part.values)
    table /= np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-30)
    starts, times = np.flatnonzero(np.diff(corpus.owners, prepend=-1)), []
    for query in queries:
        began = time.perf_counter()
        largest(np.maximum.reduceat(table @ query, starts), 10)
        times.append(1000 * (time.perf_counter() - began))
    return {"bytes": table.nbytes // 2, "postings": None, "touched": None, "milliseconds": float(np.median(times))}


# On the screen


def table_of(result):
    return {(row["model"], row["way"], row["signal"], row["layer"], row["kind"]): row for row in result["rows"]}


def chance_of(result):
    kinds = [result["counts"][0][kind] for kind in ("poisoned", "clean", "natural")]
    return kinds[0] / sum(kinds)


def print_measure(result):
    table, counts = table_of(result), result["counts"]
    chance = chance_of(result)
    for way in WAYS:
        say(f"{way}: precision at k, triggered queries, tuned model ({result['repeats']} repeats of "
            f"{result['rows'][0]['n']} queries; chance {chance:.4f}); +- deviation between repeats")
        say(f"{'signal':<10}{'layer':>6}" + "".join(f"{f'k = {k}':>15}" for k in KS))
        for (model, of, signal, layer, kind), row in table.items():
            if kind == "triggered" and model != "untuned" and of == way:
                cells = [f"{value[0]:.3f} +-{dev:.3f}" for value, dev in zip(row["precision"], row["deviation"])]
                say(f"{signal:<10}{'-' if layer is None else layer:>6}" + "".join(f"{cell:>15}" for cell in cells))
    say(f"precision at {KS[AT]} [95% over repeats], at the layer chosen in group 0:")
    say(f"{'':<8}{'signal':<10}{'triggered':>22}{'background':>12}{'sham':>8}{'natural':>9}{'permuted':>10}"
        f"{'before the tuning':>24}{'learnt':>25}{'less hash':>25}")
    for way in WAYS:
        for signal in (*dict.fromkeys(row["signal"] for row in result["chosen"]), "tfidf"):
            say(summary_line(table, way, signal, result["chosen"]))
    found, true = (np.sum([c[key] for c in counts]) for key in ("searched", "searched_poisoned"))
    say(f"a search for the trigger among the tokens finds {true / np.sum([c['poisoned'] for c in counts]):.1%} of the "
        f"poisoned documents, with precision {true / found:.3f}: the others have the word by nature")
    print_costs(result["costs"])


def at_chosen(table, model, way, signal, chosen, kind="triggered"):
    """A signal's row at the layer that was chosen for it and this model, or None."""
    if signal == "tfidf":
        return table.get(("tokens", way, signal, None, kind)) if model == "tuned" else None
    layers = [row["layer"] for row in chosen if (row["model"], row["way"], row["signal"]) == (model, way, signal)]
    return table.get((model, way, signal, *layers, kind))


def summary_line(table, way, signal, chosen):
    def row(kind="triggered", model="tuned", name=signal):
        return at_chosen(table, model, way, name, chosen, kind)
    line = f"{way:<8}{signal:<10}" + "{:>8.3f} [{:.3f}, {:.3f}]".format(*row()["precision"][AT]) + "".join(
        f"{row(kind)['precision'][AT][0]:>{width}.3f}" for kind, width in
        (("background", 12), ("sham", 8), ("natural", 9), ("permuted", 10)))
    before, other = row(model="untuned"), row(name="hash")
    line += "{:>10.3f} [{:.3f}, {:.3f}]".format(*before["precision"][AT]) if before else f"{'-':>24}"
    line += "{:>+9.3f} [{:+.3f}, {:+.3f}]".format(*difference(row(), before)) if before else f"{'-':>25}"
    if other and signal not in ("hash", "tfidf"):
        line += "{:>+9.3f} [{:+.3f}, {:+.3f}]".format(*difference(row(), other))
    return line


def print_costs(rows):
    say(f"what it costs to search one corpus of {rows[0]['documents']:,} documents (median of queries; h is scanned):")
    say(f"{'':<8}{'signal':<10}{'passages':>10}{'bytes':>12}{'a document':>12}{'postings':>12}{'touched':>10}{'ms':>8}")
    for row in rows:
        listed = "".join(f"{'-' if value is None else f'{value:,.0f}':>{width}}" for value, width in
                         ((row["postings"], 12), (row["touched"], 10)))
        say(f"{row['way']:<8}{row['signal']:<10}{row['passages']:>10,}{row['bytes']:>12,}"
            f"{row['bytes'] / row['documents']:>12,.0f}{listed}{row['milliseconds']:>8.3f}")


def draw(result, path):
    """Precision at 10 by layer: tuned and untuned, triggered and background; bars with deviations."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    table, names = table_of(result), list(dict.fromkeys(row["signal"] for row in result["chosen"]))
    figure, panels = plt.subplots(len(WAYS), len(names), figsize=(2.3 * len(names) + 1, 5.2), layout="constrained",
                                  sharex=True, sharey=True, squeeze=False)
    chance = chance_of(result)
    for line, way in zip(panels, WAYS):
        tokens = table["tokens", way, "tfidf", None, "triggered"]["precision"][AT][0]
        for axes, name in zip(line, names):
            draw_bars(axes, table, way, name)
            axes.axhline(chance, color="black", linewidth=0.8, linestyle=":", label="chance")
            axes.axhline(tokens, color="C3", linewidth=1, linestyle="--", label="TF-IDF of the tokens")
        line[0].set_ylabel(f"{way}: precision at {KS[AT]}")
    for axes, name in zip(panels[0], names):
        axes.set_title(name)
    for axes in panels[-1]:
        axes.set(xlabel="layer", ylim=(0, 1.05))
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_bars(axes, table, way, name):
    bars = [("tuned", "triggered", "C0", "triggered"), ("untuned", "triggered", "C1", "triggered, before the tuning"),
            ("tuned", "background", "0.7", "background")]
    for number, (model, kind, colour, label) in enumerate(bars):
        own = {key[3]: row for key, row in table.items() if (*key[:3], key[4]) == (model, way, name, kind)}
        axes.bar([layer + (number - 1) * 0.27 for layer in own], [row["precision"][AT][0] for row in own.values()],
                 0.25, color=colour, label=label, yerr=[row["deviation"][AT] for row in own.values()], capsize=2)
        axes.set_xticks(list(own))
