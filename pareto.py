"""Steering, judged: how much of a concept can be had for how much fluency.

    python pareto.py out/tiny --against out/tiny_gpt                          the toy world, all of it
    python pareto.py out/small_2l --against out/gpt_small --prefixes FILE --judge openai:gpt-4o-mini --dry-run
    python pareto.py out/text --against out/text_gpt --judge run:out/other    offline: likelihood under another model

For each concept a vector of features is made from texts with it and texts without it (steer.py), in two ways: contrast,
the paper's (difference of mean activations, the k largest, unit length), and fitted (the same features, with weights
that make the first texts likely). Texts that go on from the same prefixes are written at growing alpha, and judged for
the concept and for fluency (judge.py). Lines, each at all layers and at the middle one:

    parity model     own features
    dense model      features of SAEs; stream, the difference of means in the residual stream after the layer

and the controls: hash, an untrained bottleneck on rotated activations, and random, as many of the features, or a
direction of the stream, drawn by lot. Features that are drawn are fitted, too: what these reach is due to the fit.

alpha is given as a ratio, the same for all lines: the norm of what is added over the mean norm of what it is added to,
the mean over layers. For own features that is the code, decoded, before it gets the norm of the input.

The table has the most of a concept that a line reaches within the allowance of fluency: at most a tenth less than
unsteered texts, of the scale (0.2 of 0 to 2) or, for run:RUN, of their fluency. One alpha for all concepts is chosen on
every other prefix, and its scores are those of the rest, which chose nothing; then the same with an alpha for each
concept. Intervals hold 95% of bootstrap draws over concepts, and differences are paired. Beside them stand alpha = 0
with another seed, and the question about another concept. Texts are kept as they are written: the same command goes on
after an interruption.
"""
import argparse
import itertools
import json
import os
import re
import shutil
import sys
from typing import NamedTuple

import numpy as np

from autoencoder import VARIANTS
from checkpoint import name_of, open_run, open_runs, weights_hash
from concepts import PREFIX_WORDS, text_concepts, text_prefixes, toy_concepts, toy_prefixes
from helpers import UserError, bootstrap, provenance, run_script, say, suggest, whole_file, within, write_json
from judge import Asked, Grammar, Likelihood, cost_of, least_fluency, open_judge, share_of_sentences, share_of_words
from lines import Line, Writer, lines_of, open_sources, write_all
from sample import columns, numbers
from steer import HELD_OUT
from tokenizer import END, encode
from toyworld import is_toy

RATIOS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0)  # from no effect to ruin, for most lines
HUNDRED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "concepts.txt")


# Scores


def mean(values, axis=None):
    """Of those that are there; NaN where none is."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.where(there, values, 0).sum(axis) / there.sum(axis)


def interval(values):
    """[mean, low, high] over concepts, missing ones left out."""
    values = np.asarray(values)[~np.isnan(values)]
    return bootstrap(values, np.ones(len(values))) if len(values) else [float("nan")] * 3


def frontier(points):
    """The numbers of the points (n, 2) that no other beats, being as good in both and better in one; by the first
    coordinate, the largest first. Missing ones are left out."""
    kept, best, there = [], -np.inf, [number for number, point in enumerate(points) if not np.isnan(point).any()]
    for number in sorted(there, key=lambda number: (-points[number][0], -points[number][1])):
        x, y = points[number]
        if y > best or kept and (x, y) == tuple(points[kept[-1]]):
            kept.append(number)
            best = y
    return kept


def ellipse(values):
    """(center, S) of the mean of values (n, 2): (x - center)' S^-1 (x - center) <= 1 holds it with 95%. None for n < 4.

    Hotelling's: for two coordinates n (x - center)' C^-1 (x - center) <= (n - 1) (0.05^(-2 / (n - 2)) - 1), C their
    covariance.
    """
    values = values[~np.isnan(values).any(1)]
    n = len(values)
    return (values.mean(0), np.cov(values.T) / n * (n - 1) * (0.05 ** (-2 / (n - 2)) - 1)) if n >= 4 else None


def choose(scores, least):
    """The number of the alpha with most of the concept among those that are fluent enough; -1 if none is. scores:
    (ratios, 2); what is missing is not chosen."""
    allowed = [number for number, (concept, fluency) in enumerate(scores)
               if fluency >= least and not np.isnan(concept)]
    return max(allowed, key=lambda number: scores[number][0], default=-1)


def best_of(judge, scores, base):
    """((number, (concepts, 2)), (numbers, (concepts, 2))): the alpha chosen on every other prefix, one for all concepts
    and one for each, and the scores on the other prefixes. scores: (concepts, ratios, prefixes, 2); base: (concepts,
    prefixes, 2), unsteered, which -1 stands for."""
    half, rest, every = slice(0, None, 2), slice(1, None, 2), range(len(scores))
    least = [least_fluency(judge, mean(base[concept, half, 1])) for concept in every]
    one = choose(mean(scores[:, :, half], (0, 2)), mean(np.array(least)))
    each = [choose(mean(scores[concept][:, half], 1), least[concept]) for concept in every]

    def tested(chosen):
        return np.stack([mean(base[concept, rest] if number < 0 else scores[concept, number, rest], 0)
                         for concept, number in enumerate(chosen)])
    return (one, tested([one] * len(scores))), (each, tested(each))


class Scores(NamedTuple):
    lines: dict   # {line: (concepts, ratios, prefixes, 2)} concept and fluency, NaN where missing
    base: dict    # {(run, seed): (concepts, repeats, prefixes, 2)} without steering

    def unsteered(self, run):
        """(concepts, prefixes, 2)."""
        return mean(self.base[run, 0], 1)


def score_all(judge, concepts, prefixes, found, base):
    def score(concept, texts):
        return np.array(judge.score(concept, list(zip(prefixes, texts))), float)

    return Scores({line: np.stack([np.stack([score(concept, texts) for texts in record["texts"]])
                                   for concept, record in zip(concepts, records)]) for line, records in found.items()},
                  {key: np.stack([np.stack([score(concept, texts) for texts in repeats]) for concept in concepts])
                   for key, repeats in base.items()})


def ask_all(judge, concepts, prefixes, found, base):
    """Put all questions to a judge that costs something at once; score_all finds the answers in its cache."""
    questions = [question for records in found.values() for concept, record in zip(concepts, records)
                 for texts in record["texts"] for question in judge.questions(concept, list(zip(prefixes, texts)))]
    questions += [question for repeats, concept in itertools.product(base.values(), concepts) for texts in repeats
                  for question in judge.questions(concept, list(zip(prefixes, texts)))]
    more = len(found) * len(concepts) * (len(prefixes) // 2)
    say(f"asking {judge.name} at {judge.judge.url}: {judge.judge.cost(questions)}; then up to {more:,} more, about "
        "another concept")
    judge.try_out(questions)
    judge.judge.ask(questions)


def edge_of(lines):
    """{(line, number of a ratio)} on the frontier of all lines."""
    points = {(line, number): mean(values[:, number], (0, 1)) for line, values in lines.items()
              for number in range(values.shape[1])}
    return {list(points)[place] for place in frontier([tuple(point) for point in points.values()])}


def curve_of(values, records, ratios):
    """A row for each ratio. values: (concepts, ratios, prefixes, 2); records: of each concept."""
    return [{"ratio": ratio, "alpha": float(np.mean([record["alphas"][number] for record in records])),
             "concept": interval(mean(values[:, number, :, 0], 1)),
             "fluency": interval(mean(values[:, number, :, 1], 1)),
             "missing": int(np.isnan(values[:, number]).sum())} for number, ratio in enumerate(ratios)]


def about_another(judge, concepts, prefixes, texts):
    """How much there is of the next concept in the texts for each, on the prefixes that chose nothing: (concepts,)."""
    asked = [list(zip(prefixes, of_concept))[1::2] for of_concept in texts]
    return [mean(np.array(judge.score(other, pairs), float)[:, 0])
            for other, pairs in zip(concepts[1:] + concepts[:1], asked)] if len(concepts) > 1 else []


def differences_of(tested):
    """Each line less the controls of its run, and own features less other lines. tested: {line: (concepts,)}."""
    return [{"one": str(one), "other": str(two), "concept": interval(tested[one] - tested[two])}
            for one, two in itertools.permutations(tested, 2) if one.is_beside(two) and not one.is_control()
            and (one.run == two.run and two.is_control() or one.source == "own" and not two.is_control())]


def summarise(judge, concepts, prefixes, found, base, scores, ratios):
    """A row for each line, with its curve and what it reaches within the allowance; and differences between lines."""
    edge, rows, tested = edge_of(scores.lines), [], {}
    for line, of_line in scores.lines.items():
        (one, values), (each, values_each) = best_of(judge, of_line, scores.unsteered(line.run))
        curve = curve_of(of_line, found[line], ratios)
        for number, point in enumerate(curve):
            point["frontier"] = (line, number) in edge
        texts = [base[line.run, 0][0] if one < 0 else record["texts"][one] for record in found[line]]
        rows.append({**line._asdict(), "curve": curve, "chosen": one, "ratio": 0.0 if one < 0 else ratios[one],
                     "end": {-1: "none is fluent enough", len(ratios) - 1: "the last ratio"}.get(one),
                     "alpha": 0.0 if one < 0 else curve[one]["alpha"], "n": len(concepts) * (len(prefixes) // 2),
                     "concept": interval(values[:, 0]), "fluency": interval(values[:, 1]),
                     "other": interval(about_another(judge, concepts, prefixes, texts)),
                     "each": {"ratios": [0.0 if number < 0 else ratios[number] for number in each],
                              "concept": interval(values_each[:, 0]), "fluency": interval(values_each[:, 1])}})
        tested[line] = values[:, 0]
    return rows, differences_of(tested)


def unsteered_rows(scores):
    return [{"run": run, "seed": seed, "concept": interval(mean(values[..., 0], (1, 2))),
             "fluency": float(mean(values[..., 1]))} for (run, seed), values in scores.base.items()]


# On the screen and on paper


def line_of(row):
    return Line(row["run"], row["source"], tuple(row["layers"]), row["way"])


def natural_share(judge, concepts):
    """[mean, low, high] of the concept's share in the texts that vectors are made from; None where none is counted."""
    if isinstance(judge, Asked):
        return None
    return interval([np.mean([share_of_words(concept.words, text) for text in concept.positive])
                     for concept in concepts])


def print_rows(judge, rows, unsteered, concepts, natural):
    def show(values, width=24):
        return "{:.3f} [{:.3f}, {:.3f}]".format(*values).rjust(width)

    def another(row):
        return f"{row['other'][0]:.3f}" if len(concepts) > 1 else "-"

    say(f"judge: {judge.name}. Concept: {judge.scales[0]}; fluency: {judge.scales[1]}. {len(concepts)} concepts, "
        f"n = {rows[0]['n']} texts a line; [95% of draws over concepts]")
    if natural:
        say(f"the texts that vectors are made from: concept {show(natural, 0)}")
    for row in unsteered:
        say(f"{row['run']}, unsteered{', another seed' * row['seed']}: concept {show(row['concept'], 0)}, fluency "
            f"{row['fluency']:.3f}")
    say(f"{'':<48}{'ratio':>6}{'alpha':>8}{'concept':>24}{'fluency':>24}{'another':>9}{'an alpha each: concept':>25}"
        f"{'fluency':>9}")
    for row in rows:
        say(f"{str(line_of(row)):<48}{row['ratio']:>6g}{row['alpha']:>8.3g}{show(row['concept'])}{show(row['fluency'])}"
            f"{another(row):>9}{show(row['each']['concept'], 25)}{row['each']['fluency'][0]:>9.3f}"
            + f"  {row['end']}" * bool(row["end"]) + "  on the frontier" * any(
                point["frontier"] for point in row["curve"]))


def print_differences(differences):
    say("one line less another, each at its one alpha: concept, paired")
    for row in differences:
        say(f"  {row['one']:<38} less {row['other']:<46}" + "{:+.3f} [{:+.3f}, {:+.3f}]".format(*row["concept"]))


def side_by_side(rows, found, base, concepts, prefixes):
    """For each concept the first of the prefixes that chose nothing, unsteered and steered: by the line of each run, no
    control, that had most of the concept at its alpha; nothing of a run of which none is fluent enough.
    [(concept, [(title, text), ...])]"""
    best = {}
    for row in rows:
        if not line_of(row).is_control() and row["chosen"] >= 0:
            score = row["curve"][row["chosen"]]["concept"][0]
            best[row["run"]] = max(best.get(row["run"], (-1.0, None)), (score, row), key=lambda pair: pair[0])
    if not best:
        say("no line is fluent enough at any alpha: there are no texts to show side by side")
        return
    for number, concept in enumerate(concepts):
        texts = []
        for run, (_, row) in best.items():
            line = line_of(row)
            texts += [(f"{run}, unsteered", base[run, 0][0][1]),
                      (f"{line}, ratio {row['ratio']:g}", found[line][number]["texts"][row["chosen"]][1])]
        yield concept, [(title, prefixes[1] + text.partition(END)[0]) for title, text in texts]


def print_texts(shown, width, colour):
    """Lines: unsteered and steered beside each other, the concept's words marked."""
    for concept, texts in shown:
        yield f"\n{concept.name}"
        for (left, one), (right, two) in zip(texts[::2], texts[1::2]):
            yield from columns(left, right, (), width, colour)
            yield from columns(one, two, [re.escape(word) for word in concept.words], width, colour)


def draw(judge, scores, ratios, natural, path):
    """Fluency against concept, a panel for each way and place; controls are grey. A point is labelled with its ratio
    where it is away from the unsteered one, and no other label is in its place."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = list(dict.fromkeys(line.run for line in scores.lines))
    names = list(dict.fromkeys((line.run, line.source) for line in scores.lines if not line.is_control()))
    colours = {name: f"C{(0, 1, 2, 3, 4, 5, 6, 8, 9)[number % 9]}" for number, name in enumerate(names)}
    figure, panels = plt.subplots(2, 2, figsize=(13, 10), layout="constrained", sharex=True, sharey=True)
    handles, labels = {}, []
    for axes, (wide, way) in zip(panels.flat, itertools.product((True, False), ("contrast", "fitted"))):
        points = []
        for line, values in scores.lines.items():
            if (len(line.layers) > 1, line.way.endswith("fitted")) != (wide, way == "fitted"):
                continue
            control = line.is_control()
            curve = [mean(scores.base[line.run, 0], (0, 1, 2)), *mean(values, (0, 2))]  # (1 + ratios, 2)
            points += [tuple(point) for point in curve]
            colour = "0.6" if control else colours[line.run, line.source]
            handles[f"{line.run}: {'random, ' * line.way.startswith('random')}{line.source}"], = axes.plot(
                *zip(*curve), color=colour, marker="os^Dv"[runs.index(line.run) % 5], markersize=4, linewidth=1.4,
                linestyle="--" if line.source == "hash" else ":" if control else "-", zorder=2 if control else 3)
            for number, ratio in enumerate(() if control else ratios):
                if curve[1 + number][0] > curve[0][0] + 0.01 or curve[1 + number][1] < curve[0][1] - 0.05:
                    labels.append((axes, tuple(curve[1 + number]), f"{ratio:g}", colour))
                draw_ellipse(axes, ellipse(mean(values[:, number], 1)), colour)
        edge = [points[number] for number in frontier(points)]
        if edge:
            handles["frontier"], = axes.plot(*zip(*edge), color="0.85", linewidth=6, zorder=1)
        for run in runs:
            least = least_fluency(judge, mean(scores.base[run, 0][..., 1]))
            handles["least fluency allowed"] = axes.axhline(least, color="0.3", linewidth=0.8, linestyle=(0, (1, 3)))
        if natural:
            handles["texts on the concept"] = axes.axvline(natural[0], color="C8", linewidth=1)
            axes.set_xscale("symlog", linthresh=0.05)  # most shares are small
            axes.set_xlim(-0.015, 1.1)
        axes.set_title(f"{way}, {'all layers' if wide else 'the middle layer'}")
        axes.grid(alpha=0.3)
    for axes in panels[1]:
        axes.set_xlabel(judge.scales[0])
    for axes in panels[:, 0]:
        axes.set_ylabel(judge.scales[1])
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=9, title_fontsize=9,
                  title="at the points: the ratio of what is added to what it is added to; shaded: 95% over concepts")
    figure.draw_without_rendering()  # axes have their size and range only now
    draw_labels(labels)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_labels(labels, width=18, height=10):
    """[(axes, point, text, colour)], but for those that an earlier one would be covered by: so many pixels."""
    taken = []
    for axes, point, text, colour in labels:
        x, y = axes.transData.transform(point)
        if not any(other is axes and abs(x - left) < width and abs(y - low) < height for other, left, low in taken):
            taken.append((axes, x, y))
            axes.annotate(text, point, fontsize=7, color=colour, xytext=(3, 3), textcoords="offset points")


def draw_ellipse(axes, shape, colour):
    from matplotlib.patches import Ellipse
    if shape is not None:
        (small, large), directions = np.linalg.eigh(shape[1])
        angle = np.degrees(np.arctan2(directions[1, 1], directions[0, 1]))  # of the larger axis
        axes.add_patch(Ellipse(shape[0], 2 * max(large, 0) ** 0.5, 2 * max(small, 0) ** 0.5, angle=angle, alpha=0.08,
                               facecolor=colour, linewidth=0))


# The command


def pick_judge(options, runs, home):
    toy, name = is_toy(runs[0].encoding), options.judge
    if toy and name in (None, "toy"):
        return Grammar()
    if name is None:
        raise UserError("texts of other than the toy world need a judge: --judge openai:MODEL, or offline --judge "
                        "run:RUN, a model that is not compared here")
    if name.startswith("run:"):
        run = open_run(name.removeprefix("run:"), options.device)
        if weights_hash(run.model) in {weights_hash(other.model) for other in runs}:
            say(f"{run.path} judges its own texts here: one that is not compared would be fairer")
        return Likelihood(run)
    if name.startswith("openai:"):
        return Asked(open_judge(name, os.path.join(home, "judge.jsonl"), temperature=options.judge_temperature,
                                needs_key=not options.dry_run))
    raise UserError(f"there is no judge {name!r}: the judges are openai:MODEL, run:RUN" + " and toy" * toy)


def tell_cost(judge, lines, runs, concepts, options):
    """What a judge would be asked, at most, before a text is written."""
    texts, unsteered = len(lines) * len(concepts) * len(options.ratios) * options.prefix_count, (
        2 * len(runs) * len(options.ratios) * options.prefix_count)
    again = len(lines) * len(concepts) * (options.prefix_count // 2)  # about another concept, at the chosen alpha
    calls = 2 * texts + again + unsteered * (len(concepts) + 1) + 1  # the first is to try the key
    example = cost_of(judge.questions(concepts[0], [("", "x" * 6 * (options.tokens + PREFIX_WORDS))]))  # two questions
    say(f"{judge.name} at {judge.judge.url} would get {calls:,} questions on {texts + unsteered:,} texts, about "
        f"{example.tokens_in * calls // 2:,} tokens in and at most {example.tokens_out * calls // 2:,} out; answers in "
        f"{judge.judge.records.path} cost nothing. Nothing was asked")


def rows_of_texts(found, base, concepts, prefixes, scores, ratios):
    """A row for each text."""
    for line, records in found.items():
        for (concept, record), values in zip(zip(concepts, records), scores.lines[line]):
            for ratio, alpha, texts, of_texts in zip(ratios, record["alphas"], record["texts"], values):
                for place, (prefix, text) in enumerate(zip(prefixes, texts)):
                    yield {**line._asdict(), "concept": concept.name, "ratio": ratio, "alpha": alpha, "prefix": prefix,
                           "text": text, "scores": clean(of_texts[place]), "sentences with the concept":
                           share_of_sentences(concept.words, text) if concept.words else None}
    for (run, seed), repeats in base.items():
        for repeat, texts in enumerate(repeats):
            for place, (prefix, text) in enumerate(zip(prefixes, texts)):
                yield {"run": run, "unsteered": seed, "prefix": prefix, "text": text, "scores": {
                    concept.name: clean(values[repeat, place])
                    for concept, values in zip(concepts, scores.base[run, seed])}}


def clean(values):
    return [None if np.isnan(value) else round(float(value), 4) for value in values]


def parse(arguments):
    parser = argparse.ArgumentParser(prog="pareto.py", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n")[2])
    parser.add_argument("run", help="a run's folder or checkpoint")
    parser.add_argument("--against", nargs="+", default=[], metavar="RUN", help="other runs, such as the dense twin")
    parser.add_argument("--sae", default="topk", metavar="A,B",
                        help=f"SAEs of dense runs: some of {','.join(VARIANTS)}, or none (topk)")
    parser.add_argument("--concepts", metavar="FILE", help="CONCEPT: WORD WORD ... a line, or a .jsonl with concept, "
                        "and words or positive, a list of texts; toy world: topics, as in sea,war (ten that nothing "
                        "was tuned on; else the hundred of concepts.txt)")
    parser.add_argument("--prefixes", metavar="FILE", help="texts that are gone on from, one a line, of tab-separated "
                        "columns the last (documents of the toy world, or of the validation data)")
    parser.add_argument("--prefix-words", type=within(int, 1), metavar="N",
                        help=f"the first N words of these ({PREFIX_WORDS}; toy world: all before the first that tells "
                             "the topic)")
    parser.add_argument("--prefix-count", type=within(int, 2), default=24, metavar="N",
                        help="so many of these; alpha is chosen on half (24)")
    parser.add_argument("--judge", metavar="NAME", help="openai:MODEL, run:RUN, toy (toy, for its models)")
    parser.add_argument("--judge-temperature", type=temperature, default=0.0, metavar="T",
                        help="of openai:MODEL; none leaves it to the model (0)")
    parser.add_argument("--dry-run", action="store_true", help="say what the judge would be asked, and stop")
    parser.add_argument("--ratios", type=numbers, default=RATIOS, metavar="A,B,...",
                        help=f"alphas, as ratios of norms ({','.join(map(str, RATIOS))})")
    parser.add_argument("--k", type=within(int, 1), default=256, metavar="N", help="features of each layer (256)")
    parser.add_argument("--fit", type=within(int, 1), default=100, metavar="STEPS", help="of fitted weights (100)")
    parser.add_argument("--tokens", type=within(int, 1), default=64, metavar="N", help="of a text (64)")
    parser.add_argument("--temperature", type=within(float, 0), default=0.8, metavar="T", help="of texts (0.8)")
    parser.add_argument("--top-p", type=within(float, 0, 1, open_low=True), default=0.9, metavar="P", help="(0.9)")
    parser.add_argument("--batch", type=within(int, 1), default=512, metavar="N", help="texts at a time (512)")
    parser.add_argument("--seed", type=within(int, 0, 2 ** 40), default=0, metavar="N")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    options = parser.parse_args(arguments)
    options.sae = [] if options.sae == "none" else options.sae.split(",")
    for name in options.sae:
        if name not in VARIANTS:
            raise UserError(f"there is no SAE {name!r}{suggest(name, VARIANTS)}")
    if sorted(set(options.ratios)) != list(options.ratios) or options.ratios[0] <= 0:
        raise UserError("--ratios must grow, from above 0: texts without steering are always there")
    options.ratios = list(options.ratios)
    return options


def temperature(text):
    return None if text == "none" else within(float, 0, 2)(text)


def prepare(runs, options):
    """(concepts, prefixes)."""
    run, toy = runs[0], is_toy(runs[0].encoding)
    if toy and (options.concepts is None or not os.path.exists(options.concepts)):
        concepts = toy_concepts(HELD_OUT if options.concepts is None else options.concepts.split(","))
    else:
        concepts = text_concepts(run, HUNDRED if options.concepts is None else options.concepts)
    if toy and options.prefixes is None:
        prefixes = toy_prefixes(options.prefix_count, options.prefix_words, concepts)
    else:
        prefixes = text_prefixes(run, options.prefixes, options.prefix_count, options.prefix_words or PREFIX_WORDS)
    longest = max(len(encode(run.encoding, prefix)) for prefix in prefixes) + 1 + options.tokens
    if longest > min(run.config.context for run in runs):
        raise UserError(f"prefix and text are up to {longest} tokens, more than the context of a model here: give "
                        "fewer --tokens")
    return concepts, prefixes


def main(arguments):
    options = parse(arguments)
    runs = open_runs((options.run, *options.against), options.device)
    home = os.path.dirname(runs[0].path)
    judge = pick_judge(options, runs, home)
    concepts, prefixes = prepare(runs, options)
    without = [concept.name for concept in concepts if not concept.words]
    if without and not isinstance(judge, Asked):
        raise UserError(f"{without[0]} has texts but no words, and {judge.name} counts words: add some, or let --judge "
                        "openai:MODEL judge")
    runs = {name_of(run): run for run in runs}
    sources = {name: open_sources(run, options.sae) for name, run in runs.items()}
    lines = [line for name, run in runs.items() for line in lines_of(run, sources[name])]
    if options.dry_run:
        if not isinstance(judge, Asked):
            raise UserError(f"{judge.name} costs nothing: --dry-run is for --judge openai:MODEL")
        return tell_cost(judge, lines, runs, concepts, options)
    say(f"{len(lines)} lines, {len(concepts)} concepts, {len(options.ratios)} alphas, {len(prefixes)} prefixes: "
        f"{len(lines) * len(concepts) * len(options.ratios) * len(prefixes):,} texts of {options.tokens} tokens")
    if isinstance(judge, Asked):
        judge.try_key(prefixes[0])
    writer = Writer(runs, sources, prefixes, options, os.path.join(home, "pareto_texts.jsonl"))
    found, base = write_all(writer, lines, concepts)
    if isinstance(judge, Asked):
        ask_all(judge, concepts, prefixes, found, base)
    scores = score_all(judge, concepts, prefixes, found, base)
    rows, differences = summarise(judge, concepts, prefixes, found, base, scores, options.ratios)
    unsteered, natural = unsteered_rows(scores), natural_share(judge, concepts)
    print_rows(judge, rows, unsteered, concepts, natural)
    print_differences(differences)
    shown = list(side_by_side(rows, found, base, concepts, prefixes))
    for text in print_texts(shown[:1], min(150, shutil.get_terminal_size((130, 24)).columns), sys.stdout.isatty()):
        say(text)
    with whole_file(os.path.join(home, "pareto.txt")) as file:
        file.writelines(f"{text}\n" for text in print_texts(shown, 130, False))
    with whole_file(os.path.join(home, "pareto.jsonl")) as file:
        for row in rows_of_texts(found, base, concepts, prefixes, scores, options.ratios):
            print(json.dumps(row), file=file)
    write_json(os.path.join(home, "pareto.json"), {
        "rows": rows, "unsteered": unsteered, "natural": natural, "differences": differences,
        "weights": writer.weights, "configs": {name: vars(run.config) for name, run in runs.items()},
        "options": vars(options), "judge": judge.name, "prefixes": prefixes,
        "concepts": [concept.name for concept in concepts], **provenance()}, indent=1)
    draw(judge, scores, options.ratios, natural, os.path.join(home, "pareto.png"))
    say(f"written to {home}: pareto.json, pareto.jsonl (a row a text), pareto.txt (side by side), pareto.png")


if __name__ == "__main__":
    run_script(main, stopped="stopped; what is written or answered is kept, and the same command goes on")
