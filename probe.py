"""How good are features? SAEBench's measures on any source: a model's own, SAEs, and the controls.

    python probe.py out/tiny --against out/tiny_gpt              the table, with intervals; probe.json, probe.png
    python probe.py out/web --texts ../shared/data               real text: AG News, sae-probes where it is installed
    python probe.py out/web --positive DIR --negative DIR        your own texts
    python probe.py out/tiny --saebench                          SAEBench itself, beside these figures: saebench.py
    python probe.py geometry                                     how much of absorption is geometry: geometry.py
    python probe.py truth out/tiny                               single features against what is known: truth.py

measures.py defines what is measured, probing.py applies it, probe_tasks.py has the tasks, interpret.py explains:
  probe k     accuracy of a logistic regression on k features, the mean over tasks (guessing: .50); more is better;
              "all" with every feature, at the middle layer
  interpret   share of 14 contexts for which an explanation says rightly whether the feature fires (guessing: .71)
  scr, tpp    how well 20 features remove one thing that a probe knows and nothing else
  absorption  the fraction of a class that other features than its own stand for, on words that nothing was chosen on
              (less is better); "scaled" with the cosine of an absorber at least 3.2 / sqrt(d), not 0.1

The activations of a model are read once; features stay sparse throughout. An activation is what the feature adds to its
source's reconstruction; those of a parity code are scaled by the norm that it gives its output. Positive and negative
coefficients are two features (dpb.unfold).

Differences from SAEBench, so that nothing is chosen on what it reports: probes of SCR and TPP are converged logistic
regressions, not the best of 20 epochs on test texts; the direction of SCR and the number of main features are chosen on
training texts. SCR is the ratio of the pairs' sums, not the mean of their ratios, which is noise where there is little
to win.

+- is half of the interval that holds 95% of bootstrap draws: over test texts (probing, SCR, TPP), over words
(absorption), over features (interpret); the same draws for every source, so that differences are paired. Tasks are
fixed: they are all that the toy world has, and the interval is no statement about other worlds.
"""
import argparse
import concurrent.futures
import contextlib
import functools
import glob
import hashlib
import os
import time

import numpy as np
import torch

import probe_tasks
import probing
import truth
from autoencoder import VARIANTS
from checkpoint import name_of, open_runs, weights_hash
from helpers import (
    Records,
    UserError,
    check_writable,
    checksum,
    progress,
    provenance,
    run_script,
    say,
    suggest,
    whole_number,
    within,
    write_json,
)
from judge import cost_of, open_judge
from labels import groups_of
from model import PATCH_SITES
from probe_tasks import Text
from sources import open_tokens
from steer import text_of
from toyworld import is_toy

COLUMNS = ("probe 1", "probe 5", "interpret", "scr", "tpp", "absorption kind", "absorption kind scaled",
           "absorption topic", "absorption topic scaled", "absorption letter", "absorption letter scaled")
KNOWN = ("own", "hash", "neurons", "random", *VARIANTS)
TITLES = {"own": "parity", "topk": "TopK", "batchtopk": "BatchTopK", "jumprelu": "JumpReLU", "matryoshka": "Matryoshka"}
WINDOW_TOKENS = 2 ** 15  # of the validation split, that features are explained on


# The work


def make_tasks(run, options):
    """What is asked of a run with this tokenizer: Tasks that are read one after another."""
    if bool(options.positive) != bool(options.negative):
        raise UserError("two classes of text need both --positive DIR and --negative DIR")
    if options.positive:
        texts = [probe_tasks.folder_task(options.positive, options.negative)]
        return probe_tasks.text_tasks(run.encoding, run.config.context, texts, options.seed, words=False)
    if is_toy(run.encoding) and not options.texts:
        return [probe_tasks.toy_tasks(run.encoding, run.config.context, options.seed, correlation=options.correlation)]
    texts = list(probe_tasks.sae_probes())
    if options.texts:
        texts.insert(0, probe_tasks.ag_news(options.texts))
    if not texts:
        raise UserError(f"{run.path} is no model of the toy world: give --texts DIR, a folder with "
                        "agnews_test_prefixes.tsv, or --positive DIR --negative DIR, or install sae-probes")
    return probe_tasks.text_tasks(run.encoding, run.config.context, texts, options.seed)


def explainer(run, windows, site, layers, options, judge):
    """A function (source, layer) -> Found: features explained on windows of tokens, which are read here."""
    views = probing.read_texts(run, [Text(tuple(row), 0) for row in windows.tolist()], site, layers)
    groups = groups_of(run.encoding, windows)
    names = [text_of(run.encoding, [token]).strip() for token in range(run.encoding.n_vocab)]

    def explain(source, layer):
        return probing.measure_interpret(source, layer, views, windows, groups, names, options.features, judge,
                                         run.encoding)
    return explain


def measurer(run, tasks, site, layers, middle):
    """A function (source, layer) -> {measure: Found}. The activations of the texts are read here, once."""
    read = probing.read_texts(run, tasks.texts, site, layers)
    probes = {layer: probing.fit_probes(read.means[layer], tasks) for layer in layers}
    folds = {layer: [list(probing.fold_words(read.means[layer], words)) for words in tasks.words] for layer in layers}

    def measure(source, layer):
        X = probing.mean_features(source, layer, read)
        found = dict(probing.measure_probing(X, tasks.sets))
        if layer == middle:
            found["probe all"] = probing.measure_all(X, tasks.sets)
        if tasks.pairs:
            found |= probing.measure_scr(X, source, layer, tasks, probes[layer])
        if probes[layer].tpp:
            found |= probing.measure_tpp(X, source, layer, tasks, probes[layer])
        for fold in folds[layer]:
            found |= probing.measure_absorption(X, source, layer, fold)
        return found
    return measure


def measure_part(run, pairs, tasks, windows, options, judge, records):
    """{measure: Found} of each pair of source and layer, in order: as it was kept, or measured now, and kept.
    windows: what features are explained on, or None."""
    seen = hash_of([tasks.texts, None if windows is None else windows.tolist()])
    made = [code_hash(), weights_hash(run.model), seen, options.seed, options.correlation, options.features,
            options.judge, options.layers]  # with the source, all that determines what is found
    keys = [checksum([*made, source.name, source.key, layer]) for source, layer in pairs]
    missing = [number for number, key in enumerate(keys) if key not in records]
    if missing:
        site, layers = pairs[0][0].site, sorted({pairs[number][1] for number in missing})
        measure = measurer(run, tasks, site, layers, middle_of(options.layers))
        explain = None if windows is None else explainer(run, windows, site, layers, options, judge)

    def work(number):
        found = measure(*pairs[number])
        if explain:
            found["interpret"] = explain(*pairs[number])
        records.add(keys[number], {name: one._replace(draws=one.draws.tolist()) for name, one in found.items()})
        return found
    with contextlib.closing(in_parallel(work, missing, alone=judge is not None)) as fresh:
        for number, key in enumerate(keys):
            yield next(fresh) if number in missing else {
                name: probing.Found(value, np.array(draws), n, detail)
                for name, (value, draws, n, detail) in records[key].items()}


def measure_run(run, sources, parts, windows, options, judge, records):
    """(source, layer, {measure: Found}) for all of them. parts: Tasks; features are explained with the first."""
    pairs = [(source, layer) for source in sources for layer in sorted(source.layers) if layer in options.layers]
    found = [{} for _ in pairs]
    for number, tasks in enumerate(parts):
        made = measure_part(run, pairs, tasks, None if number else windows, options, judge, records)
        for new, pair, own in zip(made, pairs, found):
            for name, one in new.items():
                own.setdefault(name, []).append(one)
            if number + 1 == len(parts):
                yield *pair, {name: probing.merged(several) for name, several in own.items()}
        progress(f"{number + 1} of {len(parts)} tasks")


def middle_of(layers):
    return sorted(layers)[len(layers) // 2]


def in_parallel(work, items, alone=False):
    """As map, on all cores: much of the work is numpy's, which takes one. alone: one after another, as a judge is
    asked, who answers several questions at once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads if alone else 1)
    try:
        with concurrent.futures.ThreadPoolExecutor(1 if alone else threads) as pool:
            yield from pool.map(work, items)
    finally:
        torch.set_num_threads(threads)


def hash_of(value):
    """Of all of a list, whose text is all of it."""
    return hashlib.sha256(str(value).encode()).hexdigest()


@functools.cache
def code_hash():
    """Of this program, as it is now: what another version measured is measured again."""
    digest = hashlib.sha256()
    for path in sorted(glob.glob(os.path.join(os.path.dirname(os.path.abspath(__file__)), "*.py"))):
        with open(path, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


class Counting:
    """A judge that only counts what it would be asked."""

    def __init__(self):
        self.questions = []

    def ask(self, questions):
        self.questions += questions
        return ["It fires on " + "a few words " * 4] * len(questions)


def tell_cost(runs, windows, options):
    """What a judge would be asked."""
    judge = Counting()
    for run in runs:
        for model_run, sources in sources_of(run, options, run is runs[0]):
            explain = explainer(model_run, windows, sources[0].site, options.layers, options, judge)
            for source in sources:
                for layer in set(source.layers) & set(options.layers):
                    explain(source, layer)
    say(f"{options.judge or 'a judge'} would be asked {cost_of(judge.questions)}")


def sources_of(run, options, first):
    """[(run that is read, its sources)]: trained, then with random weights for the first run."""
    wanted = None if options.sources is None else options.sources.split(",")
    for name in wanted or ():
        if name not in KNOWN:
            raise UserError(f"there is no source {name!r}{suggest(name, KNOWN)}")
    found = list(truth.sources_of(run, wanted, options.site))
    out = [(run, found)] if found else []
    if first and (wanted is None or "random" in wanted):
        untrained, source = truth.random_weights(run, options.site)
        out.append((untrained, [source]))
    return out


def measure_runs(runs, parts, windows, options, judge, records):
    """({(run, source, layer, measure): Found}, columns of the table), a row printed for each source and layer."""
    drawn, columns = {}, None
    for run in runs:
        for model_run, sources in sources_of(run, options, run is runs[0]):
            for source, layer, found in measure_run(model_run, sources, parts, windows, options, judge, records):
                columns = columns or print_head(found)
                new = {(name_of(run), source.name, layer, measure): one for measure, one in found.items()}
                print_row(rows_of(new), columns)
                drawn |= new
    if not drawn:
        raise UserError(f"no run here has the source {options.sources}: python sae.py {options.run} trains SAEs")
    return drawn, columns


def rows_of(drawn):
    """What is written and shown of what was found."""
    rows = []
    for (run, source, layer, measure), (value, draws, n, detail) in drawn.items():
        low, high = (None, None) if value is None else map(float, np.quantile(draws, [0.025, 0.975]))
        rows.append({"run": run, "source": source, "layer": layer, "measure": measure, "low": low, "high": high,
                     "value": value, "n": n, "detail": detail})
    return rows


def table(options):
    began = time.time()
    runs = open_runs((options.run, *options.against), options.device)
    options.layers = check_layers(options.layers, runs)
    context, path = min(run.config.context for run in runs), os.path.join(os.path.dirname(runs[0].path), "probe.json")
    check_writable(path)
    tokens = open_tokens(runs[0], "val")
    count = min(tokens.count(context), max(1, WINDOW_TOKENS // context))
    windows = tokens.windows(range(count), context)[:, :-1].numpy()
    if options.dry_run:
        return tell_cost(runs, windows, options)
    parts, judge = make_tasks(min(runs, key=lambda run: run.config.context), options), None
    if options.judge is not None:
        judge = open_judge(options.judge, cache=os.path.join(os.path.dirname(path), "judge.jsonl"))
    sets, texts = [task for tasks in parts for task in tasks.sets], sum(len(tasks.texts) for tasks in parts)
    say(f"{texts:,} texts, {sum(len(task.train) for task in sets)} tasks in {len(sets)} sets, "
        f"{sum(len(tasks.pairs) for tasks in parts)} pairs for scr; {windows.size:,} validation tokens to explain "
        f"{options.features} features a layer; +- half of the interval of 95%")
    records = Records(path.removesuffix(".json") + "_unfinished.jsonl")
    drawn, columns = measure_runs(runs, parts, windows, options, judge, records)
    rows, seconds = rows_of(drawn), time.time() - began
    middle = middle_of({row["layer"] for row in rows})
    print_middle(rows, middle, [*columns[:2], "probe all", *columns[2:]])
    print_differences(drawn, columns)
    about = {"weights": {run.path: weights_hash(run.model) for run in runs}, "middle": middle, "seed": options.seed,
             "configs": {run.path: vars(run.config) for run in runs}, "seconds": seconds, "texts": texts,
             "judge": options.judge, "correlation": options.correlation, "site": options.site, **provenance()}
    write_json(path, {"rows": rows, **about}, indent=1)
    with contextlib.suppress(FileNotFoundError):
        os.remove(records.path)
    picture = path.removesuffix(".json") + ".png"
    draw(rows, middle, columns, picture)
    say(f"written to {path} and {picture}, after {seconds:.0f} s")


def check_layers(wanted, runs):
    layers = min(run.config.layers for run in runs)
    if wanted is None:
        return list(range(layers))
    try:
        found = [int(text) for text in wanted.split(",")]
    except ValueError:
        found = [-1]
    if not found or min(found) < 0 or max(found) >= layers:
        raise UserError(f"--layers {wanted}: give numbers from 0 to {layers - 1}, such as 0,{layers - 1}")
    return found


# What is shown


def cell(row):
    if row is None or row["value"] is None:
        return "-"
    return f"{row['value']:.3f} +-{(row['high'] - row['low']) / 2:.3f}"


def short(measure):
    return measure.replace("absorption", "abs.")


def print_head(found):
    columns = [name for name in COLUMNS if name in found]
    say(f"{'run':<10}{'source':<20}{'layer':>5}" + "".join(f"{short(name):>19}" for name in columns))
    return columns


def print_row(rows, columns):
    cells = {row["measure"]: row for row in rows}
    say(f"{rows[0]['run']:<10}{rows[0]['source']:<20}{rows[0]['layer']:>5}"
        + "".join(f"{cell(cells.get(name)):>19}" for name in columns))


def title(run, source):
    return TITLES.get(source.partition("-")[0], source.partition("-")[0]), run


def print_middle(rows, middle, columns):
    """The paper's way round: a line for each measure, a column for each source."""
    own = [row for row in rows if row["layer"] == middle]
    names = list(dict.fromkeys((row["run"], row["source"]) for row in own))
    say(f"layer {middle}, the middle one:")
    for line in (0, 1):
        say(" " * 24 + "".join(f"{title(*name)[line]:>15}" for name in names))
    for measure in columns:
        cells = {(row["run"], row["source"]): row for row in own if row["measure"] == measure}
        counts = [row["n"] for row in cells.values()]
        say(f"{short(measure):<24}" + "".join(f"{cell(cells.get(name)):>15}" for name in names)
            + f"   n {' to '.join(f'{n:,}' for n in sorted({min(counts), max(counts)}))}")


def print_differences(drawn, columns):
    """What sources have over the hash of the same activations: the mean over layers, paired."""
    say("less the hash of the same activations, the mean over layers, with the interval of paired draws:")
    for run, source in dict.fromkeys((run, source) for run, source, _, _ in drawn):
        control = next((name for of, name, _, _ in drawn if of == run and name.startswith("hash")), None)
        if control is None or source.startswith(("hash", "random")):
            continue
        cells = []
        for measure in columns:
            pairs = [(drawn[run, source, layer, measure], drawn[run, control, layer, measure])
                     for of, name, layer, what in drawn if (of, name, what) == (run, source, measure)
                     and (run, control, layer, measure) in drawn]
            pairs = [(one, two) for one, two in pairs if one.value is not None and two.value is not None]
            if not pairs:
                cells.append("-")
                continue
            value = np.mean([one.value - two.value for one, two in pairs])
            low, high = np.quantile(np.mean([one.draws - two.draws for one, two in pairs], axis=0), [0.025, 0.975])
            cells.append(f"{value:+.2f} [{low:+.2f}, {high:+.2f}]")
        say(f"{run:<10}{source:<20}" + "".join(f"{text:>23}" for text in cells))


def draw(rows, middle, columns, path):
    """A panel for each measure: bars of the middle layer, marks for the others; controls are grey."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys((row["run"], row["source"]) for row in rows))
    shown = [name for name in columns if any(row["measure"] == name and row["value"] is not None for row in rows)]
    figure, panels = plt.subplots(1, len(shown), figsize=(2.1 * len(shown) + 2, 0.36 * len(names) + 1.4),
                                  layout="constrained", sharey=True, squeeze=False)
    for axes, measure in zip(panels[0], shown):
        for number, name in enumerate(names):
            own = {row["layer"]: row for row in rows if (row["run"], row["source"]) == name
                   and row["measure"] == measure and row["value"] is not None}
            control = name[1].startswith(("hash", "neurons", "random"))
            if middle in own:
                row = own[middle]
                error = [[max(0, row["value"] - row["low"])], [max(0, row["high"] - row["value"])]]
                axes.barh(number, row["value"], xerr=error, color="0.75" if control else "C0", capsize=2)
            axes.plot([row["value"] for layer, row in own.items() if layer != middle],
                      [number] * (len(own) - (middle in own)), "|", color="k", markersize=6)
        axes.set_title(short(measure), fontsize=9)
        axes.grid(alpha=0.3, axis="x")
    panels[0][0].set_yticks(range(len(names)), [f"{' '.join(title(*name)[::-1])}" for name in names], fontsize=8)
    panels[0][0].invert_yaxis()
    figure.supxlabel(f"bars: layer {middle}, with intervals of 95%; marks: the other layers", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


# The command


def parser_of(name):
    return argparse.ArgumentParser(prog=name, formatter_class=argparse.RawDescriptionHelpFormatter,
                                   description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n")[2])


def common(parser):
    parser.add_argument("run", help="a run's folder or checkpoint")
    parser.add_argument("--against", nargs="+", default=[], metavar="RUN", help="other runs, such as the dense twin")
    parser.add_argument("--sources", metavar="A,B", help="only these: own, hash, neurons, random, kinds of SAE (all)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")


def parse_truth(arguments):
    parser = parser_of("probe.py truth")
    common(parser)
    parser.add_argument("--tokens", type=whole_number, default=2 ** 16, metavar="N", help="validation tokens (65536)")
    return parser.parse_args(arguments)


def parse(arguments):
    parser = parser_of("probe.py")
    common(parser)
    parser.add_argument("--layers", metavar="A,B", help="only these layers (all)")
    parser.add_argument("--site", default="mlp_in", choices=PATCH_SITES, help="where sources read (mlp_in)")
    parser.add_argument("--texts", metavar="DIR", help="a folder with agnews_test_prefixes.tsv")
    parser.add_argument("--positive", metavar="DIR", help="texts of a class: .txt files, or a file with a text a line")
    parser.add_argument("--negative", metavar="DIR", help="texts without it")
    parser.add_argument("--features", type=whole_number, default=600, metavar="N", help="to explain, a layer (600)")
    parser.add_argument("--judge", metavar="openai:MODEL", help="explain features by this judge (the known labels)")
    parser.add_argument("--dry-run", action="store_true", help="say what a judge would be asked, and do nothing else")
    parser.add_argument("--correlation", type=within(float, 0.5, 1), default=1.0, metavar="C",
                        help="of gender and profession, where scr's biased probe learns (1)")
    parser.add_argument("--seed", type=within(int, 0, 2 ** 31), default=0, help="of texts and their order (0)")
    parser.add_argument("--saebench", action="store_true", help="run SAEBench's own evaluations, beside these")
    return parser.parse_args(arguments)


def main(arguments):
    if arguments[:1] == ["truth"]:
        return truth.truth(parse_truth(arguments[1:]))
    if arguments[:1] == ["geometry"]:
        import geometry
        return geometry.main(arguments[1:])
    options = parse(arguments)
    if options.saebench:
        import saebench
        return saebench.compare(options)
    table(options)


if __name__ == "__main__":
    run_script(main, stopped="stopped; what the table has so far is kept, and the same command goes on")
