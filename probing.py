"""The measures of measures.py applied to a source of features: a model read once, then each source and layer.

    read = read_texts(run, tasks.texts, "mlp_in", layers)            the activations that count, {layer: (N, d)}
    X = mean_features(source, layer, read)                           sparse: Columns (texts, 2 m)
    probes = fit_probes(read.means[layer], tasks)                    on the activations: the same for every source
    for name, found in measure_tpp(X, source, layer, tasks, probes): ...       Found(value, draws, n, detail)

probe.py says what each measure means, and where it differs from SAEBench's.
"""
import functools
import math
from typing import NamedTuple

import numpy as np
import torch

import interpret
import measures
import probe_tasks
from dpb import Code, unfold
from helpers import progress
from measures import Columns, Split
from sources import read_activations
from truth import Firings

KS = (1, 2, 5, 20)
NS = (2, 5, 10, 20, 50)  # features that SCR and TPP ablate; COUNTS are what the table shows
COUNTS = 20
TPP = ("topic", "job", "town", "agnews")  # sets of several classes that exclude each other
DRAWS = 400
FOLDS = 5
PART = 2 ** 10  # tokens at a time: what an SAE makes of more is so large that memory is fetched anew for each


# Reading


class Read(NamedTuple):
    """The activations of texts at a site: of each layer the tokens that count, (N, d), and each text's mean."""
    tokens: dict
    means: dict         # {layer: (texts, d)}
    owner: np.ndarray   # (N,) the text of each token
    count: np.ndarray   # (texts,) its tokens


@torch.no_grad()
def read_texts(run, texts, site, layers, batch_tokens=2 ** 13):
    """All texts, once. Batches are of one length, so that there is no padding."""
    device, shapes = run.model.embedding.weight.device, {}
    for row, text in enumerate(texts):
        shapes.setdefault((len(text.tokens), text.start), []).append(row)
    found, owner, done = {layer: [] for layer in layers}, [], 0
    means = {layer: np.zeros((len(texts), run.config.d)) for layer in layers}
    for (length, start), rows in sorted(shapes.items()):
        size = max(1, batch_tokens // length)
        for part in (rows[i : i + size] for i in range(0, len(rows), size)):
            tokens = torch.tensor([texts[row].tokens for row in part], device=device)
            for layer, x in read_activations(run.model, tokens, site, layers).items():
                x = x[:, start:].float().cpu()
                found[layer].append(x.flatten(0, 1))
                means[layer][part] = x.double().mean(1).numpy()
            owner.append(np.repeat(part, length - start))
            done += len(part)
            progress(f"reading {done:,} of {len(texts):,} texts")
    progress("")
    owner = np.concatenate([*owner, np.zeros(0, int)])
    return Read({layer: torch.cat(parts) if parts else torch.zeros(0, run.config.d) for layer, parts in found.items()},
                means, owner,
                np.bincount(owner, minlength=len(texts)))


def device_of(part):
    """Where a source's part lives; neurons live anywhere."""
    return next((value.device for value in part.buffers()), "cpu") if isinstance(part, torch.nn.Module) else "cpu"


@torch.no_grad()
def activations(source, layer, x):
    """The unfolded features of x (N, d): (ids, values), (N, K) each; a value is what the feature adds to x_hat."""
    part = source.layers[layer]
    x = x.to(device_of(part))
    code = part.encode(x)
    if source.kind in ("own", "hash"):  # standardised scores, decoded with the norm of x
        norm = part.decode(code).float().norm(dim=-1, keepdim=True)
        code = Code(code.indices, code.coefs * x.norm(dim=-1, keepdim=True) / norm.clamp(min=1e-12))
    return [value.cpu().numpy() for value in unfold(code, source.m)]


def mean_features(source, layer, read, part_tokens=PART):
    """The mean activations of a source's unfolded features on the texts: Columns (texts, 2 m)."""
    found = []
    for start in range(0, len(read.owner), part_tokens):
        ids, values = activations(source, layer, read.tokens[layer][start : start + part_tokens])
        texts = np.broadcast_to(read.owner[start : start + part_tokens, None], ids.shape)
        on = values > 0
        found.append((texts[on], ids[on], values[on] / read.count[texts[on]]))
    return Columns.of(*(np.concatenate(parts) for parts in zip(*found)), len(read.count), 2 * source.m)


@torch.no_grad()
def decoder_dots(source, layer, vectors, part=2 ** 12):
    """W_dec of the unfolded features times vectors (d, c): (2 m, c); and the norms of its rows, (2 m,)."""
    layer, vectors, dots, norms = source.layers[layer], torch.from_numpy(np.asarray(vectors, float)), [], []
    device = device_of(layer)
    for start in range(0, source.m, part):
        indices = torch.arange(start, min(source.m, start + part), device=device)[:, None]
        one = torch.ones(indices.shape, device=device)
        rows = (layer.decode(Code(indices, one)) - layer.decode(Code(indices, 0 * one))).double().cpu()
        dots.append(rows @ vectors)
        norms.append(rows.norm(dim=1))
    dots, norms = torch.cat(dots).numpy(), torch.cat(norms).numpy()
    return np.concatenate([dots, -dots]), np.concatenate([norms, norms])


# Measuring


@functools.cache
def draws_of(n):
    """Weights of n items, (DRAWS, n): the same for every source."""
    return np.random.default_rng(n).multinomial(n, np.full(n, 1 / n), DRAWS) / n


@functools.cache
def text_draws(n):
    """The same by items, (n, DRAWS), to take some of them fast."""
    return np.ascontiguousarray(draws_of(n).T, np.float32)


def draw_texts(values, rows, texts):
    """The mean over tasks of values (..., c, n) on test texts, rows (c, n), in every draw of all texts: (..., DRAWS).
    A text that several tasks ask about is drawn for all of them or for none; the positives of a task, and its
    negatives, keep their shares."""
    total = 0.0
    for number, own in enumerate(rows):
        drawn = text_draws(texts)[own].reshape(2, -1, DRAWS)
        drawn /= np.maximum(drawn.sum(1, keepdims=True), 1e-12)
        total = total + np.asarray(values[..., number, :], np.float32) @ drawn.reshape(-1, DRAWS)
    return total.astype(float) / (2 * len(rows))


class Found(NamedTuple):
    value: float | None
    draws: np.ndarray  # (DRAWS,)
    n: int             # decisions, words or features
    detail: dict


def averaged(parts, n, names):
    """The mean of several means, [(value, draws)], which have these names."""
    values, draws = zip(*parts)
    return Found(float(np.mean(values)), np.mean(draws, axis=0), n, dict(zip(names, map(float, values))))


def merged(several):
    """One Found of those of several Tasks, each the mean over the sets that its detail names."""
    if len(several) == 1:
        return several[0]
    weights = np.array([len(found.detail) for found in several]) / sum(len(found.detail) for found in several)
    return Found(float(weights @ [found.value for found in several]), weights @ np.stack([f.draws for f in several]),
                 sum(found.n for found in several), {k: v for found in several for k, v in found.detail.items()})


def narrow(X, *rows):
    """The part of X with these rows only, and their places in it: what follows need not look at the rest."""
    every = np.unique(np.concatenate([part.flatten() for part in rows]))
    return X.take(every), *(np.searchsorted(every, part) for part in rows)


def measure_probing(X, sets):
    """{"probe k": Found}: the mean over tasks, and over sets of them."""
    found = {k: [] for k in KS}
    for task in sets:
        part, train, test = narrow(X, task.train, task.test)
        right, _ = measures.sparse_probing(part, Split(train, test), KS)
        for k, draws in zip(KS, draw_texts(np.stack([right[k] for k in KS]), task.test, X.n)):
            found[k].append((right[k].mean(), draws))
    for k, parts in found.items():
        yield f"probe {k}", averaged(parts, sum(task.test.size for task in sets), [task.name for task in sets])


def measure_all(X, sets):
    """The same with all features at once, as sparse as they are."""
    found = []
    for task in sets:
        rights, (part, train, test) = [], narrow(X, task.train, task.test)
        for rows, tested in zip(train, test):
            w, b = measures.logistic_sparse(part.take(rows), np.arange(len(rows)) < len(rows) // 2)
            rights.append(right(part.times(w) + b, tested))
        found.append((np.mean(rights), draw_texts(np.array(rights), task.test, X.n)))
    return averaged(found, sum(task.test.size for task in sets), [task.name for task in sets])


class Probes(NamedTuple):
    """Probes on the model's own activations, of one layer: the same for every source."""
    tpp: dict     # {set: (weights (d, c), scores (texts, c))}
    scr: list     # of each pair {"job", "gender", "both": (w (d,), scores (texts,))}
    asked: list   # of each pair what is asked of the biased probe: "job" or "gender"


def fit_probes(mean, tasks):
    tpp, scr, asked = {}, [], []
    for task in tasks.sets:
        if task.name in TPP and len(task.classes) > 2:
            w, b = measures.logistic(mean[task.train], Split.labels(task.train))
            tpp[task.name] = w.T, mean @ w.T + b
    for pair in tasks.pairs:
        w, b = measures.logistic(*(np.stack(part) for part in zip(
            *((mean[rows], np.arange(len(rows)) < len(rows) // 2) for rows in pair.train.values()))))
        scr.append({name: (w[i], mean @ w[i] + b[i]) for i, name in enumerate(pair.train)})
        # of the two things that it knows the one that it knows less, on training texts
        known = {name: right(scr[-1]["both"][1], pair.train[name]).mean() for name in ("job", "gender")}
        asked.append(min(known, key=known.get))
    return Probes(tpp, scr, asked)


def right(scores, rows):
    """Which of the texts a probe gets right; the first half are positive."""
    return (scores[rows] > 0) == (np.arange(len(rows)) < len(rows) // 2)


def measure_scr(X, source, layer, tasks, probes):
    """The ratio of the pairs' mean differences; the mean of their ratios, which is SAEBench's, is in the detail: of a
    pair that leaves little room to improve, a ratio says little."""
    vectors = np.stack([of[name][0] for of in probes.scr for name in ("job", "gender", "both")], 1)
    dots = decoder_dots(source, layer, vectors)[0].reshape(2 * source.m, len(tasks.pairs), 3)
    tests = np.stack([pair.test[asked] for pair, asked in zip(tasks.pairs, probes.asked)])
    removed = ["gender" if asked == "job" else "job" for asked in probes.asked]
    learnt, train = narrow(X, np.stack([pair.train[name] for pair, name in zip(tasks.pairs, removed)]))
    part, place = narrow(X, tests)
    arrays = {n: [] for n in NS}  # of each pair which texts are right: original, changed, clean
    for number, (of, asked, test) in enumerate(zip(probes.scr, probes.asked, tests)):
        difference = measures.differences(learnt, *np.split(train[number], 2))
        effect = measures.effects(difference, dots[:, number, ("job", "gender").index(removed[number])], scr=True)
        features = measures.top_effects(effect, max(NS))
        taken = part.dense(features)[place[number]] * dots[features, number, 2]  # (texts, features)
        label = np.arange(len(test)) < len(test) // 2
        for n in NS:
            changed = (of["both"][1][test] - taken[:, :n].sum(1) > 0) == label
            arrays[n].append([right(of["both"][1], test), changed, right(of[asked][1], test)])
    every = np.array([arrays[n] for n in NS], float).swapaxes(1, 2)  # (n, 3, pairs, texts)
    for n, found, drawn in zip(NS, every, draw_texts(every, tests, X.n)):
        pairs = measures.scr_score(*found.mean(2))
        detail = {"mean of ratios": float(pairs.mean()), "pairs": pairs.tolist(),
                  "accuracies": found.mean((1, 2)).tolist(), "asked": probes.asked}
        yield ("scr" if n == COUNTS else f"scr {n}"), Found(
            float(measures.scr_score(*found.mean((1, 2)))), measures.scr_score(*drawn), tests.size, detail)


def measure_tpp(X, source, layer, tasks, probes):
    sets, found = [task for task in tasks.sets if task.name in probes.tpp], {n: [] for n in NS}
    for task in sets:
        w, scores = probes.tpp[task.name]
        dots = decoder_dots(source, layer, w)[0]
        rows = np.unique(task.test)
        (part, place), (learnt, train) = narrow(X, task.test), narrow(X, task.train)
        clean = patched_right(scores[rows], place)
        half = task.train.shape[1] // 2
        patched = {n: [] for n in NS}
        for number in range(len(task.classes)):
            difference = measures.differences(learnt, train[number, :half], train[number, half:])
            features = measures.top_effects(measures.effects(difference, dots[:, number], scr=False), max(NS))
            dense = part.dense(features)
            for n in NS:
                patched[n].append(patched_right(scores[rows] - dense[:, :n] @ dots[features[:n]], place))
        clean = clean.astype(float)
        lost = np.stack([measures.tpp_parts(clean, np.array(patched[n], float)) for n in NS])  # (n, c, texts)
        for n, own, draws in zip(NS, lost, draw_texts(lost, task.test, X.n)):
            found[n].append((own.mean(), draws))
    for n in NS:
        yield ("tpp" if n == COUNTS else f"tpp {n}"), averaged(
            found[n], sum(task.test.size for task in sets), [task.name for task in sets])


def patched_right(scores, place):
    """Of every class which of its test texts its probe gets right, (c, n). scores: (texts, c); place: (c, n)."""
    z = np.take_along_axis(scores.T, place, 1)
    return (z > 0) == Split.labels(place)


class Fold(NamedTuple):
    """Of some words to learn from and others to test on: what absorption needs and no source changes."""
    words: probe_tasks.Words
    known: np.ndarray        # (n,) places in words.rows to learn from
    other: np.ndarray        # (n,) to test on
    Y: np.ndarray            # (n, c) labels of the known
    units: np.ndarray        # (c, d) unit probes
    projections: np.ndarray  # (n, c) of the others
    found: np.ndarray        # (n, c) others of the class that its probe knows
    f1: np.ndarray           # (c,) of the probes, on the others


def fold_words(mean, words, folds=FOLDS):
    """The Folds of one kind of label: words are tested once each. mean: (texts, d)."""
    x, c = mean[words.rows], len(words.classes)
    side = np.random.default_rng(0).permutation(words.word.max() + 1)[words.word] % folds
    for number in range(folds):
        known, other = np.flatnonzero(side != number), np.flatnonzero(side == number)
        Y, asked = (np.eye(c)[words.label[rows]] for rows in (known, other))
        w, b = measures.logistic(np.broadcast_to(x[known], (c, len(known), x.shape[1])), Y.T,
                                 weights=measures.balanced(Y.T))
        z, units = x[other] @ w.T + b, w / np.linalg.norm(w, axis=1, keepdims=True)
        yield Fold(words, known, other, Y, units, x[other] @ units.T, (z > 0) & (asked > 0),
                   measures.f1_score(z.T > 0, asked.T > 0))


def measure_absorption(X, source, layer, folds):
    """folds: of one kind of label. A class counts whose probes know it: F1 of at least 0.6, the mean over folds."""
    words, c = folds[0].words, len(folds[0].words.classes)
    f1 = np.mean([fold.f1 for fold in folds], axis=0)
    classes = np.flatnonzero(f1 > measures.PROBE_F1)
    thresholds = {"": measures.COSINE, " scaled": 3.2 / math.sqrt(folds[0].units.shape[1])}
    kept = {(kind, place): [] for kind in thresholds for place in classes}
    part, counts = X.take(words.rows), []
    for fold in folds if len(classes) else ():
        dots, norms = decoder_dots(source, layer, fold.units.T)
        known, other = part.take(fold.known), part.take(fold.other)
        main = measures.main_features(known, fold.Y, measures.l1_probe(known, fold.Y))
        for place in classes:
            rows = np.flatnonzero(fold.found[:, place])
            counts.append(len(main[place]))
            for kind, threshold in thresholds.items():
                result = measures.absorption(other.take(rows), fold.projections[rows, place], dots[:, place] / norms,
                                             main[place], threshold)
                kept[kind, place].append((words.word[fold.other[rows]], *result))
    weights = draws_of(words.word.max() + 1)
    for kind in thresholds:
        detail = {"known classes": len(classes), "of": c, "probe F1": float(f1.mean())}
        parts, fulls, n = [], [], 0
        for place in classes:
            word, fraction, full = (np.concatenate(values) for values in zip(*kept[kind, place]))
            own = weights[:, word]
            parts.append((fraction.mean(), own @ fraction / np.maximum(own.sum(1), 1e-12)))
            fulls, n = fulls + [full.mean()], n + len(word)
        title = f"absorption {words.name}{kind}"
        if not parts:
            yield title, Found(None, np.full(DRAWS, np.nan), 0, detail)
        else:
            detail |= {"full": float(np.mean(fulls)), "main features": float(np.mean(counts))}
            found = averaged(parts, n, [words.classes[place] for place in classes])
            yield title, found._replace(detail=detail | {"classes": found.detail})


# Explaining


def fire(source, layer, x, part_tokens=PART):
    """The Firings of a source on tokens (N, d)."""
    found = []
    for start in range(0, len(x), part_tokens):
        ids, values = activations(source, layer, x[start : start + part_tokens])
        tokens, slots = (values > 0).nonzero()
        found.append((ids[tokens, slots], tokens + start, values[tokens, slots]))
    ids, tokens, strength = (np.concatenate(parts) for parts in zip(*found))
    order = np.lexsort((-strength, ids))
    return Firings(ids[order], tokens[order], strength[order])


def measure_interpret(source, layer, read, windows, groups, names, features, judge=None, encoding=None):
    """read: of the windows (n, T) of tokens, each a text. groups: what is known about their tokens."""
    given, tokens = fire(source, layer, read.tokens[layer]), windows.flatten()
    found = list(interpret.gather(given, windows.shape, features))
    if judge is None:
        said = [interpret.explain_by_labels(one, tokens, groups, names) for one in found]
    else:
        said = interpret.explain_by_judge(found, tokens, encoding, judge)
    rows = [interpret.scored(one, *answer) for one, answer in zip(found, said)]
    scores = np.array([row["score"] for row in rows if row["score"] is not None])
    detail = {"missing": len(rows) - len(scores), "features": rows}
    if not len(scores):
        return Found(None, np.full(DRAWS, np.nan), 0, detail)
    detail["true"] = float(np.mean([row["true"] for row in rows if row["true"] is not None]))
    return Found(float(scores.mean()), draws_of(len(scores)) @ scores, len(scores), detail)
