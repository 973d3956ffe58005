"""What a feature stands for: the best single feature of each thing that is known, tested on unseen words.

    python probe.py truth out/tiny                             own features, SAEs where there are some, the controls
    python probe.py truth out/tiny --against out/tiny_gpt      and the SAEs of the dense twin, with its controls

A feature stands for a class if, chosen on some of its members, it fires on the others. The words are split into two
halves. For each label the feature (an index with a sign) and the threshold with the best F1 on the tokens of
one half are chosen, and its F1 on the tokens of the other half counts; then the halves change places, and the mean of
both is reported. A random hash of well-separated clusters passes any test whose members it has seen; this one it can
pass only by what the words of a class have in common.

Labels come in groups, which labels.py defines: for the toy world topics, kinds and classes of word, the pronoun of a
job, first letters, opinions, traits and towns of facts; for English text the form of a token, classes of word that need
no tagger, and the first word of a sentence.

Of two labels a feature that always fires finds one with F1 0.67, and a model that knows nothing has features that fire
nearly always. So `always on`, what a feature that fires on every token gets on the same unseen tokens, is a control
like the others; what counts is the distance to the larger of it and the hash. F1 is the mean over the labels of a
group; +- is half of the interval that holds 95% of bootstrap draws over words, the same draws for all sources, so that
differences between two of them are paired; each draw has its own larger control. Purity: of features that fire on at
least 20 tokens, the share of the commonest label among the 20 strongest, the mean over features.
"""
import functools
import itertools
import os
from typing import NamedTuple

import numpy as np

from autoencoder import VARIANTS
from checkpoint import name_of, open_runs, weights_hash
from dpb import unfold
from helpers import UserError, progress, provenance, say, suggest, write_json
from labels import groups_of
from model import GPT
from sae import all_sources
from sources import open_source, open_tokens, read_codes
from steer import text_of
from toyworld import is_toy

TOP = 20      # of a feature, the tokens that its purity is about
DRAWS = 400   # of the bootstrap
ALWAYS = "always on"  # the source of the control whose feature fires on every token


# Features against labels


class Firings(NamedTuple):
    """The active features of tokens, by feature, the strongest first: (E,) each."""
    ids: np.ndarray
    tokens: np.ndarray
    strength: np.ndarray

    def select(self, mask):
        return Firings(*(part[mask] for part in self))

    def starts(self):
        """Of each entry, where its feature starts."""
        first = np.r_[True, self.ids[1:] != self.ids[:-1]]
        return np.maximum.accumulate(np.where(first, np.arange(len(first)), 0))


def firings(run, source, windows, batch=64):
    """{layer: Firings} of a source on tokens (windows, T)."""
    import torch
    found = {layer: [] for layer in source.layers}
    for start in range(0, len(windows), batch):
        rows = torch.from_numpy(windows[start : start + batch]).to(run.model.embedding.weight.device)
        for layer, code in read_codes(run.model, rows, source).items():
            ids, strength = (part.flatten(0, 1).cpu().numpy() for part in unfold(code, source.m))
            tokens, slots = (strength > 0).nonzero()
            found[layer].append((ids[tokens, slots], tokens + start * windows.shape[1], strength[tokens, slots]))
        progress(f"{source.name} {start + len(rows)}/{len(windows)}")
    progress("")
    result = {}
    for layer in list(found):
        ids, tokens, strength = (np.concatenate(parts) for parts in zip(*found.pop(layer)))
        order = np.lexsort((-strength, ids))
        result[layer] = Firings(ids[order], tokens[order], strength[order])
    return result


def choose(given, label, positives):
    """(feature, threshold, F1): the best for a label. label: (E,) whether each entry's token has it."""
    if not len(given.ids) or not positives:
        return -1, np.inf, 0.0
    starts, hits = given.starts(), np.cumsum(label)
    right = hits - (hits - label)[starts]
    score = 2 * right / (np.arange(1, len(hits) + 1) - starts + positives)
    best = int(score.argmax())
    return int(given.ids[best]), float(given.strength[best]), float(score[best])


def test(given, group, half):
    """For each label, chosen on one half and tested on the other: a dict, with counts of the test by unit, (units, 3):
    found, wrongly found, missed."""
    side = np.where(group.unit >= 0, group.half[group.unit], -1)  # (N,)
    inside = given.select(side[given.tokens] == half)
    others = given.select(side[given.tokens] == 1 - half)
    units = len(group.half)
    for number, name in enumerate(group.labels):
        known, unseen = ((group.label == number) & (side == part) for part in (half, 1 - half))
        feature, threshold, score = choose(inside, (group.label[inside.tokens] == number).astype(np.int64), known.sum())
        fires = others.tokens[(others.ids == feature) & (others.strength >= threshold)]
        found, wrong = (np.bincount(group.unit[fires[(group.label[fires] == number) == right]], minlength=units)
                        for right in (True, False))
        missed = np.bincount(group.unit[unseen], minlength=units) - found
        yield {"label": name, "feature": feature, "threshold": threshold, "chosen": score,
               "known": int(known.sum()), "unseen": int(unseen.sum())}, np.stack([found, wrong, missed], 1)


def always(group):
    """Of a feature that fires on every token, what test() counts: (labels of both halves, units, 3)."""
    labels, units = len(group.labels), len(group.half)
    labelled = group.label >= 0
    found = np.bincount(group.label[labelled] * units + group.unit[labelled], minlength=labels * units)
    found = found.reshape(labels, units)
    every = np.bincount(group.unit[group.unit >= 0], minlength=units)
    counts = np.stack([found, every - found, np.zeros_like(found)], 2)
    return np.concatenate([counts * (group.half == 1 - half)[:, None] for half in (0, 1)])


def f1(counts):
    """Of (..., 3) found, wrongly found, missed; NaN where there is nothing to find."""
    found, wrong, missed = np.moveaxis(np.asarray(counts, float), -1, 0)
    with np.errstate(invalid="ignore"):
        return np.where(found + missed > 0, 2 * found / (2 * found + wrong + missed), np.nan)


def mean(scores):
    """Over the last axis, of those that are numbers; 0 where none is."""
    there = ~np.isnan(scores)
    return np.where(there, scores, 0).sum(-1) / np.maximum(1, there.sum(-1))


@functools.cache
def draws_of(units):
    """Weights of words, (DRAWS, units): the same for every source."""
    return np.random.default_rng(1).multinomial(units, np.full(units, 1 / units), DRAWS)


def purity(given, group):
    """The mean over features of the share of the commonest label among the TOP strongest tokens; and of how many."""
    given = given.select(group.unit[given.tokens] >= 0)
    if not len(given.ids):
        return None, 0
    starts = np.flatnonzero(np.r_[True, given.ids[1:] != given.ids[:-1]])
    sizes = np.diff(np.r_[starts, len(given.ids)])
    starts = starts[sizes >= TOP]
    if not len(starts):
        return None, 0
    labels = group.label[given.tokens[starts[:, None] + np.arange(TOP)]]  # (features, TOP)
    most = np.max([(labels == number).sum(1) for number in range(len(group.labels))], axis=0)
    return float(most.mean() / TOP), len(starts)


def scored(counts):
    """What is said of counts (labels of both halves, units, 3): of each of these labels its F1, or None; the mean with
    its interval; and the draws of the mean, (DRAWS,)."""
    counts = counts.astype(float)
    scores, drawn = f1(counts.sum(1)), mean(f1(np.einsum("du,luc->dlc", draws_of(counts.shape[1]), counts)))
    low, high = np.quantile(drawn, [0.025, 0.975])
    each = [None if np.isnan(score) else float(score) for score in scores]
    return each, {"f1": float(mean(scores)), "low": float(low), "high": float(high)}, drawn


def always_on(groups):
    """Of each group the row of a feature that always fires, and its draws. `words`: with a label, in either half."""
    for group in groups:
        counts = always(group)
        each, about, drawn = scored(counts)
        words = (counts[:, :, 0] > 0).sum(1).reshape(2, -1)[::-1]  # (half, labels): what half 0 chose, half 1 tests
        details = [{"label": name, "f1": value, "words": [int(known), int(unseen)]} for name, value, known, unseen in
                   zip(2 * group.labels, each, words.flatten(), words[::-1].flatten())]
        both = [int(((counts[:, :, 0] > 0).any(0) & (group.half == half)).sum()) for half in (0, 1)]
        yield {"source": ALWAYS, "layer": None, "group": group.name, **about, "always": about["f1"], "words": both,
               "labels": len(group.labels), "n": int((group.label >= 0).sum()), "purity": None, "features": 0,
               "details": details}, drawn


def measure(run, source, windows, groups, floor):
    """Of each layer and group a row, and the bootstrap draws of its F1, (DRAWS,). floor: {group: row of always_on}."""
    for layer, given in sorted(firings(run, source, windows).items()):
        for group in groups:
            base = floor[group.name]
            details, counts = zip(*(pair for half in (0, 1) for pair in test(given, group, half)))
            each, about, drawn = scored(np.stack(counts))
            for detail, score, least in zip(details, each, base["details"]):
                detail |= {"f1": score, "always": least["f1"], "words": least["words"]}
            pure, of = purity(given, group)
            yield {**base, "source": source.name, "layer": layer, **about, "purity": pure, "features": of,
                   "details": details}, drawn


# Names for features


def describe_feature(run, tokens, count, positions):
    """A line on what a feature stands for that fires at these of the first `count` validation tokens.

    On the toy world, the label with the best F1 in every other window, and how well it does in the rest; elsewhere, the
    tokens that it is most specific to: those whose odds, of all where it fires, exceed by most their odds elsewhere.
    """
    context = run.config.context
    windows = tokens.windows(range(count // context), context)[:, :-1].numpy()
    fires = np.zeros(windows.size, bool)
    fires[positions.astype(np.int64)] = True
    if not is_toy(run.encoding):
        return specific_tokens(run.encoding, windows.flatten(), fires)
    odd = np.arange(windows.size) // context % 2 == 1
    groups = groups_of(run.encoding, windows)

    def counts(group, number, part):
        label, inside = group.label == number, part & (group.unit >= 0)
        return [int((inside & mask).sum()) for mask in (fires & label, fires & ~label, ~fires & label)]

    scored = [(f1(counts(group, number, ~odd)), group, number)
              for group in groups for number in range(len(group.labels))]
    _, group, number = max(scored, key=lambda item: np.nan_to_num(item[0]))
    found, wrong, missed = counts(group, number, odd)
    return (f"best label: {group.name} {group.labels[number]}, precision {found / max(1, found + wrong):.2f}, recall "
            f"{found / max(1, found + missed):.2f} (chosen in every other window, tested in the rest: "
            f"{found + wrong:,} firings, {found + missed:,} tokens with the label)")


def specific_tokens(encoding, tokens, fires, top=5):
    there, everywhere = (np.bincount(part, minlength=encoding.n_vocab) for part in (tokens[fires], tokens))
    elsewhere = everywhere - there
    odds = [np.log((part + 0.5) / (part.sum() - part + 0.5)) for part in (there, elsewhere)]
    best = np.argsort(-(odds[0] - odds[1]) * (there > 0), kind="stable")[:top]
    return "most specific to: " + ", ".join(
        f"{text_of(encoding, [token])!r} ({there[token]:,} of {everywhere[token]:,})" for token in best if there[token])


def rank_features(run, source, count):
    """(tokens, [(feature, label, F1 where chosen, F1 on unseen words, that of the hash)]): of each label the feature
    that is best on half of its words, the best first. top_features prints the rule."""
    context = run.config.context
    tokens = open_tokens(run, "val")
    windows = tokens.windows(range(min(tokens.count(context), max(1, count // context))), context)[:, :-1].numpy()
    groups = groups_of(run.encoding, windows)
    best = {}  # of each source: (layer, group, label, half): (F1 where chosen, F1 on unseen words, feature)
    for name, given_source in (("own", source), ("hash", open_source(run, "hash"))):
        best[name] = {(layer, group.name, detail["label"], half):
                      (detail["chosen"], float(np.nan_to_num(f1(counts.sum(0)))), detail["feature"])
                      for layer, given in sorted(firings(run, given_source, windows).items())
                      for group in groups for half in (0, 1) for detail, counts in test(given, group, half)
                      if min(detail["known"], detail["unseen"]) >= 100}  # fewer tokens fit some feature by chance
    ranked, seen = [], set()
    for key, (chosen, unseen, feature) in sorted(best["own"].items(), key=lambda item: -item[1][0]):
        layer, group, label, _ = key
        if (layer, feature) not in seen and feature >= 0:
            seen.add((layer, feature))
            name = f"{layer}:{feature % source.m}{'+-'[feature // source.m]}"
            ranked.append((name, f"{group} {label}", chosen, unseen, best["hash"].get(key, (0, 0))[1]))
    return windows.size, ranked


def top_features(run, source, count, top):
    """The features that stand best for some label: see the lines it prints for the rule."""
    size, ranked = rank_features(run, source, count)
    good = sum(unseen >= 0.5 for _, _, _, unseen, _ in ranked)
    print(f"{source.name}, {size:,} tokens of the validation split. For each label of the toy world with at "
          "least 100 tokens in each half\nof its words, the feature with the best F1 on one half; of these the best by "
          "that F1. Beside it F1 on the other half, which\nchose nothing, and that of the feature of the hash control "
          "that is chosen in the same way.")
    print(f"{'feature':<12}{'label':<20}{'F1, chosen':>12}{'unseen words':>14}{'hash':>8}")
    for name, label, chosen, unseen, control in ranked[:top]:
        print(f"{name:<12}{label:<20}{chosen:>12.2f}{unseen:>14.2f}{control:>8.2f}")
    every = source.m * len(source.layers) * (1 if source.kind == "sae" else 2)
    print(f"{good:,} features of {every:,} are such a choice with F1 of at least 0.5 on "
          "unseen words: most stand for nothing that has a name here")


# The command


def sources_of(run, wanted, site="mlp_in"):
    """The sources of a run at a site, by name."""
    for source in all_sources(run, site, weights_hash(run.model)):
        if wanted is None or source.name.partition("-")[0] in wanted:
            yield source


def random_weights(run, site="mlp_in"):
    """The hash of an untrained model's activations."""
    config = run.config
    untrained = run._replace(model=GPT(config).to(run.model.embedding.weight.device).eval())
    return untrained, open_source(untrained, "hash", site)._replace(name="random weights")


def truth(options):
    runs = open_runs((options.run, *options.against), options.device)
    wanted = None if options.sources is None else options.sources.split(",")
    known = ("own", "hash", "neurons", "random", *VARIANTS)
    for name in wanted or ():
        if name not in known:
            raise UserError(f"there is no source {name!r}{suggest(name, known)}")
    context = min(run.config.context for run in runs)
    tokens = open_tokens(runs[0], "val")
    count = min(tokens.count(context), max(1, options.tokens // context))
    windows = tokens.windows(range(count), context)[:, :-1].numpy()
    groups = groups_of(runs[0].encoding, windows)
    say(f"{count * context:,} tokens of the validation split of {runs[0].config.data}; F1 on unseen words, +- half of "
        "the interval that holds 95% of draws")
    say(f"{'run':<14}{'source':<20}{'layer':>5}" + "".join(f"{group.name:>12}" for group in groups)
        + f"{'purity: ' + ', '.join(group.name for group in groups[:3]):>30}")
    rows, drawn = measure_runs(runs, wanted, windows, groups)
    if not rows:
        raise UserError(f"no run here has the source {options.sources}: python sae.py {options.run} trains SAEs")
    differences = differences_of(drawn, groups, name_of(runs[0]))
    print_differences(differences)
    about = {"weights": {run.path: weights_hash(run.model) for run in runs}, "tokens": count * context,
             "configs": {run.path: vars(run.config) for run in runs}, **provenance()}
    path = os.path.join(os.path.dirname(runs[0].path), "truth.json")
    write_json(path, {"rows": rows, "differences": differences, **about}, indent=1)
    picture = path.removesuffix(".json") + ".png"
    draw(rows, picture)
    say(f"written to {path} and {picture}")


def measure_runs(runs, wanted, windows, groups):
    """(rows, {(run, source, layer, group): (F1, its draws)}), a line printed for each source and layer."""
    rows, drawn, floor = [], {}, list(always_on(groups))
    by_group = {row["group"]: row for row, _ in floor}
    for run in runs:
        found = [(run, source) for source in sources_of(run, wanted)]
        if run is runs[0] and (wanted is None or "random" in wanted):
            found.append(random_weights(run))
        parts = [measure(*pair, windows, groups, by_group) for pair in found]
        for row, draws in itertools.chain(*parts, floor if found else ()):
            rows.append({**row, "run": name_of(run)})
            drawn[name_of(run), row["source"], row["layer"], row["group"]] = row["f1"], draws
            if row["group"] == groups[-1].name:
                print_layer(rows[-len(groups):])
    return rows, drawn


def print_layer(rows):
    cells = "".join(f"{row['f1']:.2f} +-{(row['high'] - row['low']) / 2:.2f}".rjust(12) for row in rows)
    pure = " ".join(f"{row['purity']:.2f}" if row["purity"] is not None else "-" for row in rows[:3])
    layer = "" if rows[0]["layer"] is None else rows[0]["layer"]
    say(f"{rows[0]['run']:<14}{rows[0]['source']:<20}{layer:>5}{cells}{pure:>30}")


def differences_of(drawn, groups, name):
    """What a run's own features have over the hash of the same activations (difference), over a feature that always
    fires (less_always), and over the larger of both (above): rows with [value, low, high], the mean over layers,
    paired."""
    layers = sorted({layer for run, source, layer, _ in drawn if (run, source) == (name, "own")})
    if not layers or not any(source.startswith("hash") and run == name for run, source, _, _ in drawn):
        return []
    rows = []
    for group in groups:
        own, hashed = (averaged([drawn[name, source, layer, group.name] for layer in layers])
                       for source in ("own", "hash-mlp_in"))
        fires = drawn[name, ALWAYS, None, group.name]
        larger = [np.maximum(*pair) for pair in zip(hashed, fires)]
        rows.append({"run": name, "group": group.name, "difference": less(own, hashed), "less_always": less(own, fires),
                     "above": less(own, larger), "larger": "hash" if hashed[0] >= fires[0] else ALWAYS})
    return rows


def averaged(pairs):
    """(F1, its draws): the mean over layers."""
    return [np.mean(part, axis=0) for part in zip(*pairs)]


def less(one, two):
    """[difference, low, high] of two (F1, draws)."""
    return [float(one[0] - two[0]), *map(float, np.quantile(one[1] - two[1], [0.025, 0.975]))]


def print_differences(rows):
    if rows:
        say("the mean over layers, with the interval of paired draws: own less hash, less always on, less the larger:")
    for row in rows:
        cells = ["{:+.3f} [{:+.3f}, {:+.3f}]".format(*row[key]) for key in ("difference", "less_always", "above")]
        say(f"  {row['group']:<10}" + "   ".join(cells) + f"   ({row['larger']})")


def draw(rows, path):
    """A row for each source, a column for each group of labels, a bar for each layer; dotted, what a feature gets that
    always fires."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys((row["run"], row["source"]) for row in rows if row["source"] != ALWAYS))
    groups = list(dict.fromkeys(row["group"] for row in rows))
    figure, panels = plt.subplots(len(names), len(groups), figsize=(1.7 * len(groups) + 2, 0.9 * len(names) + 1),
                                  layout="constrained", sharex="col", sharey=True, squeeze=False)
    for line, name in zip(panels, names):
        control = name[1].startswith(("hash", "neurons", "random"))
        for axes, group in zip(line, groups):
            own = [row for row in rows if (row["run"], row["source"]) == name and row["group"] == group]
            value = np.array([row["f1"] for row in own])
            error = np.abs(np.array([[row["low"], row["high"]] for row in own]).T - value)
            axes.bar([str(row["layer"]) for row in own], value, yerr=error, color="0.7" if control else "C0", capsize=2)
            axes.axhline(own[0]["always"], color="0.3", linewidth=0.8, linestyle=":")
            axes.set_ylim(0, 1)
            axes.grid(alpha=0.3, axis="y")
        line[0].set_ylabel(f"{name[0]}\n{name[1]}", rotation=0, ha="right", va="center")
    for axes, group in zip(panels[0], groups):
        axes.set_title(group)
    figure.supxlabel("layer")
    figure.savefig(path, dpi=110)
    plt.close(figure)
