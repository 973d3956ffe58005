"""Which component carries an answer, and how few edits of features flip it.

    python circuits.py out/tiny --against out/tiny_gpt                      the toy world, all of it
    python circuits.py out/small_2l --against out/gpt_small --data DIR      English text: word lists in DIR/circuits

Tasks: ioi (to whom was it given?), pronoun (which does the job take?), greater_than (which years are later?) and, of
the toy world, fact (what is the town's flag like?). A pair is two prompts of equal length that differ in one word, and
so in the answer. Only pairs count that every model here answers right before anything is changed.

Mediation. The output of an attention, of an MLP or of a block is replaced in the source prompt by that in the target
prompt, at all positions or at the last. With d = log p(source's answers) - log p(target's answers),
e = mean(d_clean - d_patched) / mean(d_clean - d_target): 1 if the component carries all of it, 0 if nothing.

Edits, at the last position, of the features that one layer's MLP reads (SAEs of other sites: --site). Greedily, each
edit the one that brings what the next computation reads nearest to what it reads in the target prompt. The model's own
code is edited by slot: set to zero, or taken by a feature of the target's code, so that K of these make it the
target's. SAEs and controls: f_j becomes the target's f_j, for features active in either; own (union) is edited so, too,
and taking a slot is then two edits. Edits are chosen for the first of the ways below.

Where an edit goes in:  own: mlp      the MLP reads the edited code, decoded: model(edit=...)
                             literal  the block's output is the edited code, decoded
                             delta    the block's output, plus what the edit changes of the decoded code
                        SAEs: add     what the edit changes is added, and what they do not reconstruct stays
                             replace  the activation is the edited code, decoded

The layer is the one whose edited component (the MLP; for literal and delta the block) has the largest e at the last
position (edited) or at all positions (paper), on pairs that are not tested; of blocks, whose e grows to 1, the first
with 90% of the largest.

Success: the target's answer is above the source's, and above all that is near and wrong: the giver's name (ioi), other
values (fact). The paper's rule asks for a name above the giver's only. Rows: edits 0, 1, 2, 4, 8, K; all, the target's
whole code; patch, the activation itself taken from the target, the ceiling; and for each number of edits, as many
random ones, and a random direction of the same norm. Intervals of shares are Wilson's, 95%; of differences between two
sources on the same pairs, by bootstrap over pairs.
"""
import argparse
import itertools
import json
import os
from typing import NamedTuple

import torch
import torch.nn.functional as F

import toyworld
from checkpoint import name_of, open_runs, weights_hash
from dpb import Code
from edits import code_of, distance, make_space, same_width, search
from helpers import (
    UserError,
    bootstrap,
    progress,
    provenance,
    run_script,
    say,
    suggest,
    whole_file,
    whole_number,
    wilson,
    write_json,
)
from model import PATCH_SITES, Cache
from sae import all_sources
from toyworld import is_toy
from word_pairs import text_pairs

TASKS = ("ioi", "pronoun", "greater_than", "fact")
COMPONENTS = ("attention_out", "mlp_out", "block_out")
SPANS = ("last", "all")       # positions that are patched
COUNTS = (0, 1, 2, 4, 8)      # of edits, as far as they are below K, which comes to them
BATCH = 64                    # pairs at a time


class Batch(NamedTuple):
    """Pairs of one length: n prompts of T tokens, and which of V tokens answer them."""
    numbers: list         # of the pairs
    source: torch.Tensor  # (n, T)
    target: torch.Tensor
    before: torch.Tensor  # (n, V), bool
    after: torch.Tensor
    subject: torch.Tensor


# Pairs


def draw_pairs(run, task, options):
    """(pairs to choose layers on, pairs to test on, words of the lists that are no tokens): all of them different."""
    toy, count = is_toy(run.encoding), options.choose + options.pairs
    drawn, unknown = (toy_pairs(task, 0), 0) if toy else text_pairs(task, options.data, run.encoding, seed=0)
    found, tries = {}, 0
    for pair in drawn:
        tries += 1
        if options.answer == "digit" and task == "greater_than":
            pair = by_digit(pair)
        if pair is not None:
            found.setdefault(frozenset(pair[:2]), pair)
        if len(found) == count:
            break
        if tries == 100 * count:
            raise UserError(f"{task} has no {count} different pairs, but {len(found)}: ask for fewer with --pairs and "
                            "--choose")
    found = list(found.values())
    return found[: options.choose], found[options.choose :], unknown


def toy_pairs(kind, seed):
    """As many as are asked for."""
    rng = toyworld.Random(seed)
    while True:
        yield toyworld.ask_pair(kind, rng)


def by_digit(pair):
    """A pair of years whose answers are whole decades: those up to the later year's, and those after; or None."""
    low, high = sorted((pair.before, pair.after))
    early, late = int(low[0]) - 1, int(low[-1])
    decades = [tuple(f"{year:02}" for year in range(100) if start < year // 10 <= end)
               for start, end in ((early // 10, late // 10), (late // 10, 9))]
    if not all(decades):
        return None
    return pair._replace(before=decades[pair.before != low], after=decades[pair.before == low])


def make_batches(run, pairs, context=None):
    """(batches, how many pairs were left out: their answers are no tokens, or their lengths differ or are too long)."""
    encoding, device, context = run.encoding, run.model.embedding.weight.device, context or run.config.context
    by_length, out = {}, 0
    for number, pair in enumerate(pairs):
        try:
            answers = [[encoding.encode_single_token(answer) for answer in part] for part in pair[2:]]
        except KeyError:
            out += 1
            continue
        prompts = [[encoding.eot_token, *encoding.encode_ordinary(prompt)] for prompt in pair[:2]]
        if len(prompts[0]) != len(prompts[1]) or len(prompts[0]) > context:
            out += 1
            continue
        by_length.setdefault(len(prompts[0]), []).append((number, *prompts, *answers))
    found = []
    for rows in by_length.values():
        for start in range(0, len(rows), BATCH):
            numbers, source, target, *answers = zip(*rows[start : start + BATCH])
            masks = [torch.zeros(len(numbers), run.config.vocab_size, dtype=torch.bool) for _ in answers]
            for mask, part in zip(masks, answers):
                for row, ids in zip(mask, part):
                    row[ids] = True
            found.append(Batch(list(numbers), *(torch.tensor(part).to(device) for part in (source, target)),
                               *(mask.to(device) for mask in masks)))
    return found, out


def pick_batch(batch, keep):
    """The rows of a batch whose pairs are kept, or None."""
    rows = [row for row, number in enumerate(batch.numbers) if number in keep]
    return Batch([batch.numbers[row] for row in rows], *(part[rows] for part in batch[1:])) if rows else None


def mass(logits, mask):
    """log of the mass on some tokens, up to a constant of the row; -inf for none."""
    return logits.float().masked_fill(~mask, -torch.inf).logsumexp(-1)


def margin(logits, batch):
    """d: how far the source's answers are above the target's."""
    return mass(logits, batch.before) - mass(logits, batch.after)


def flipped(logits, batch):
    """(n,) by our rule and by the paper's, which is another where there is one wrong name."""
    before, after = (mass(logits, mask) for mask in (batch.before, batch.after))
    above = after > logits.float().masked_fill(~batch.subject, -torch.inf).amax(-1)
    ours = (after > before) & above
    return ours, torch.where(batch.subject.sum(1) == 1, above, ours)


@torch.no_grad()
def answered(run, batch):
    """(n,) whether both prompts are answered right: above the other's answer, and the subject."""
    source, target = (last_logits(run.model, tokens) for tokens in (batch.source, batch.target))
    swapped = batch._replace(before=batch.after, after=batch.before)
    return flipped(source, swapped)[0] & flipped(target, batch)[0]


# Mediation


def last_logits(model, tokens, **arguments):
    return F.linear(model.hidden(tokens, **arguments)[:, -1], model.embedding.weight)


def read(model, tokens):
    """All activations {(site, layer): (n, T, d)}."""
    found = {}

    def look(site, layer, x):
        found[site, layer] = x
        return x
    model.hidden(tokens, patch=look)
    return found


@torch.no_grad()
def mediate(model, batches):
    """[e, low, high] of every component, layer and span: {(site, layer, span): e}, with an interval over pairs."""
    clean, target, patched = [], [], {}
    for batch in batches:
        theirs = read(model, batch.target)
        clean.append(margin(last_logits(model, batch.source), batch))
        target.append(margin(last_logits(model, batch.target), batch))
        for site, layer, span in itertools.product(COMPONENTS, range(model.config.layers), SPANS):
            logits = last_logits(model, batch.source, patch=replacing(site, layer, span, theirs[site, layer]))
            patched.setdefault((site, layer, span), []).append(margin(logits, batch))
    clean = torch.cat(clean).cpu()
    whole = clean - torch.cat(target).cpu()
    return {key: bootstrap(clean - torch.cat(parts).cpu(), whole) for key, parts in patched.items()}


def replacing(site, layer, span, new):
    """A patch that puts `new` (n, T, d) in the place of an activation, at all positions or at the last."""
    def patch(at, number, x):
        if (at, number) != (site, layer):
            return x
        return new if span == "all" else torch.cat([x[:, :-1], new[:, -1:]], 1)
    return patch


def component_of(source, way):
    """What an edit changes."""
    if way in ("literal", "delta"):
        return "block_out"
    return source.site if source.site in COMPONENTS else "mlp_out"


def choose_layer(effects, component, span):
    """The layer of the largest effect; of blocks, the first that has 90% of it. effects: {(site, layer, span): e}."""
    of = {layer: e for (name, layer, where), e in effects.items() if (name, where) == (component, span)}
    best = max(of, key=of.get)
    if component != "block_out" or of[best] <= 0:
        return best
    return min(layer for layer, e in of.items() if e >= 0.9 * of[best])


# What edits do


class Prompt:
    """Prompts up to their last token, which is then run again and again with this or that changed."""

    def __init__(self, model, tokens):
        self.model, self.last, self.cache = model, tokens[:, -1:], Cache()
        model.hidden(tokens[:, :-1], cache=self.cache)
        self.past = self.cache.length

    def logits(self, edit=None, patch=None):
        self.cache.length = self.past
        return F.linear(self.model.hidden(self.last, edit, patch, self.cache)[:, -1], self.model.embedding.weight)

    def read(self):
        """{(site, layer): (n, d)} at the last position."""
        found = {}

        def look(site, layer, x):
            found[site, layer] = x[:, -1]
            return x
        self.logits(patch=look)
        return found


def at_site(site, layer, new):
    """A patch of the last token: new (n, d) -> the activation."""
    return lambda at, number, x: new[:, None].to(x.dtype) if (at, number) == (site, layer) else x


def ways_of(source):
    return ("mlp", "literal", "delta") if source.kind == "own" else ("add", "replace")


def is_scaled(source):
    """Whether coefficients are standardised scores, so that decoding needs the norm of what it stands for."""
    return source.kind in ("own", "hash")


def edited(way, source, layer, here, space, weights):
    """(site, activation) that an edit makes; of the way mlp, what the MLP reads. here: activations, unedited."""
    part, x, code = source.layers[layer], here[source.site, layer], code_of(space, weights)
    if way in ("mlp", "literal", "replace"):
        return {"mlp": "reads", "literal": "block_out"}.get(way, source.site), part.decode(code, like=x)
    if is_scaled(source):
        change = part.decode(code, like=x) - part.decode(space.source, like=x)
    else:
        change = ((weights - space.start())[:, None] @ space.rows)[:, 0].to(x.dtype)
    site = "block_out" if way == "delta" else source.site
    return site, here[site, layer] + change


def put_in(way, source, layer, here, space, weights):
    """Arguments of the last token's pass in which the edit is made."""
    if way == "mlp":
        code = Code(*(value[:, None] for value in code_of(space, weights)))
        return {"edit": lambda number, old: code if number == layer else old}
    site, new = edited(way, source, layer, here, space, weights)
    return {"patch": at_site(site, layer, new)}


def put_direction(way, model, source, layer, here, space, weights, rng):
    """The same for a random direction, as long as what the edit changes."""
    site, new = edited(way, source, layer, here, space, weights)
    old = edited(way, source, layer, here, space, space.start())[1]
    noise = torch.randn(new.shape, generator=rng).to(new)
    new = old + noise * ((new - old).norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True))
    if site == "reads":
        site, new = "mlp_out", model.blocks[layer].mlp(new)
    return {"patch": at_site(site, layer, new)}


@torch.no_grad()
def edit_batch(run, source, layer, ways, batch, union, rng):
    """{(way, row): (n, 2) flipped by both rules}, and {row: (n,)} what is left of the way to the target's code, or
    activation, as a share of what it was."""
    model, part, K = run.model, source.layers[layer], sum(run.config.active)
    prompt = Prompt(model, batch.source)
    here, there = prompt.read(), Prompt(model, batch.target).read()
    x, goal = here[source.site, layer], there[source.site, layer]
    codes = same_width(*(part.encode(value.float()) for value in (x, goal)))
    space = make_space(part, *codes, union, None if is_scaled(source) else (goal - x).float())
    found, left = {}, {}

    def note(way, row, arguments):
        found[way, row] = torch.stack(flipped(prompt.logits(**arguments), batch), 1).cpu()

    def steps(**arguments):
        return {"K" if k == K else str(k): weights for k, weights in enumerate(search(space, K, **arguments))
                if k in (*COUNTS, K)}

    greedy, drawn = steps(), steps(rng=rng)
    for row, weights in [*greedy.items(), ("all", space.end())]:
        left[row] = distance(part, space, weights, x, goal).cpu()
        for way in ways:
            note(way, row, put_in(way, source, layer, here, space, weights))
            if row not in ("0", "all"):
                note(way, f"random {row}", put_in(way, source, layer, here, space, drawn[row]))
                note(way, f"direction {row}", put_direction(way, model, source, layer, here, space, weights, rng))
    for way in ways:
        site = "block_out" if way in ("literal", "delta") else source.site
        note(way, "patch", {"patch": at_site(site, layer, there[site, layer])})
    return found, left


# The command


def prepare(runs, options):
    """{task: (batches to choose layers on, batches to test on, pairs to test on)}, and counts for each task."""
    tasks, counts, context = {}, {}, min(run.config.context for run in runs)
    for task in options.tasks:
        *parts, unknown = draw_pairs(runs[0], task, options)
        kept, known = [], {"words of the lists that are no tokens": unknown}
        for what, pairs in zip(("chosen on", "tested on"), parts):
            batches, out = make_batches(runs[0], pairs, context)
            right = {number for batch in batches for number, *flags in zip(
                batch.numbers, *(answered(run, batch).tolist() for run in runs)) if all(flags)}
            kept.append([part for batch in batches if (part := pick_batch(batch, right)) is not None])
            known[what] = {"pairs": len(pairs), "left out": out, "right": len(right)}
        tasks[task], counts[task] = (*kept, parts[1]), known
        out = known["chosen on"]["left out"] + known["tested on"]["left out"]
        say(f"{task}: of {len(parts[1])} pairs {known['tested on']['right']} are answered right by every model"
            + f"; {out} left out, whose answers are not one token each or whose lengths differ" * bool(out)
            + f"; {unknown} words of the lists are not one token each" * bool(unknown))
    return tasks, counts


def merge_layers(sources):
    """Sources of one layer each, with the same name, as one."""
    found = {}
    for source in sources:
        if source.name in found:
            source = found[source.name]._replace(layers=found[source.name].layers | source.layers)
        found[source.name] = source
    return list(found.values())


def sources_of(run, options):
    """(label, source, union) of all that can be edited in a run."""
    for site in options.site:
        for source in merge_layers(all_sources(run, site, weights_hash(run.model))):
            missing = run.config.layers - len(source.layers)
            if missing:
                say(f"{name_of(run)}: {source.name} is missing at {missing} layers, so its layer is chosen of the rest")
            yield source.name, source, source.kind != "own"
            if source.kind == "own":
                yield "own (union)", source, True


def test_source(run, source, layer, ways, batches, union):
    """{(way, row): (n, 2)}, and {row: mean of what is left}."""
    rng = torch.Generator().manual_seed(0)
    parts = [edit_batch(run, source, layer, ways, batch, union, rng) for batch in batches]
    found = {key: torch.cat([flags[key] for flags, _ in parts]) for key in parts[0][0]}
    return found, {key: torch.cat([values[key] for _, values in parts]).mean().item() for key in parts[0][1]}


def work(runs, options, file):
    """(effects, results, counts): rows for the summary; a row a pair goes to the file."""
    tasks, counts = prepare(runs, options)
    effects, results, opened = [], [], {}
    for task, (chosen_on, tested_on, pairs) in tasks.items():
        if not chosen_on or not tested_on:
            say(f"{task}: no pair is answered right by every model, so there is nothing to flip")
            continue
        numbers = [number for batch in tested_on for number in batch.numbers]
        for run in runs:
            progress(f"{task}, {name_of(run)}, mediation")
            chosen = {key: e for key, (e, _, _) in mediate(run.model, chosen_on).items()}
            effects += [{"task": task, "run": name_of(run), "site": site, "layer": layer, "span": span, "e": e,
                         "n": len(numbers)} for (site, layer, span), e in mediate(run.model, tested_on).items()]
            if run.path not in opened:
                opened[run.path] = list(sources_of(run, options))
            for label, source, union in opened[run.path]:
                there = {key: e for key, e in chosen.items() if key[1] in source.layers}
                selected = {}  # layer: {way: the ways of choosing a layer that chose this one}
                for way, (select, span) in itertools.product(ways_of(source), (("edited", "last"), ("paper", "all"))):
                    layer = choose_layer(there, component_of(source, way), span)
                    selected.setdefault(layer, {}).setdefault(way, []).append(select)
                for layer, ways in sorted(selected.items()):
                    progress(f"{task}, {name_of(run)}, {label}, layer {layer}")
                    flags, left = test_source(run, source, layer, ways, tested_on, union)
                    for way, selects in ways.items():
                        about = {"task": task, "run": name_of(run), "source": label, "key": source.key,
                                 "site": source.site, "layer": layer, "way": way, "select": selects}
                        own = {row: values for (name, row), values in flags.items() if name == way}
                        shares = {row: {rule: wilson(hits, len(numbers))
                                        for rule, hits in zip(("ours", "paper"), values.sum(0).tolist())}
                                  for row, values in own.items()}
                        results.append({**about, "n": len(numbers), "rows": shares, "flags": own,
                                        "left": left if way == ways_of(source)[0] else None})
                        for place, number in enumerate(numbers):
                            line = {**about, "pair": number, "prompts": pairs[number][:2],
                                    "flipped": {row: values[place].tolist() for row, values in own.items()}}
                            print(json.dumps(line), file=file)
    progress("")
    return effects, results, counts


def compare(results):
    """Own features less each other source on the same pairs, where both edit the same place, layers chosen by the
    edited component: rows with [difference, low, high] for each number of edits."""
    shown = [row for row in results if "edited" in row["select"] and row["way"] in ("mlp", "literal", "add")]
    own, others = ([row for row in shown if row["source"].startswith("own") == mine] for mine in (True, False))
    rows = []
    for one, two in itertools.product(own, others):
        if one["task"] == two["task"] and place_of(one) == place_of(two):
            differences = {}
            for k in [k for k in (*map(str, COUNTS), "K") if k in one["flags"] and k in two["flags"]]:
                difference = one["flags"][k][:, 0].float() - two["flags"][k][:, 0].float()
                differences[k] = bootstrap(difference, torch.ones_like(difference))
            rows.append({"task": one["task"], "own": f"{one['source']}, {one['way']}", "run": two["run"],
                         "source": two["source"], "differences": differences})
    return rows


def print_effects(effects):
    say("what a component carries: e, all positions / the last one (intervals are in circuits.json)")
    for task, run in dict.fromkeys((row["task"], row["run"]) for row in effects):
        own = {(row["site"], row["layer"], row["span"]): row["e"][0] for row in effects
               if (row["task"], row["run"]) == (task, run)}
        layers = sorted({key[1] for key in own})
        say(f"{task:<14}{run:<14}" + "".join(f"{f'layer {layer}':>14}" for layer in layers))
        for site in COMPONENTS:
            say(f"  {site:<26}" + "".join(f"{own[site, layer, 'all']:.2f} / {own[site, layer, 'last']:.2f}".rjust(14)
                                          for layer in layers))


def print_results(results, select, rule):
    counts = [*map(str, COUNTS), "K"]
    shown = [row for row in results if select in row["select"]]
    for task in dict.fromkeys(row["task"] for row in shown):
        n = next(row["n"] for row in shown if row["task"] == task)
        say(f"{task}: share flipped by {'our rule' if rule == 'ours' else 'the rule of the paper'}, n = {n}, layers by "
            f"{select}; the interval is that at K; random edits and direction at 8 and K")
        say(f"  {'run':<12}{'source':<20}{'way':<8}{'layer':>5}" + "".join(f"{name:>6}" for name in (
            *counts, "all", "patch")) + f"{'95%':>14}{'random':>13}{'direction':>13}")
        for row in [row for row in shown if row["task"] == task]:
            cells = {name: f"{value[rule][0]:.2f}" for name, value in row["rows"].items()}
            _, low, high = row["rows"]["K"][rule]
            controls = [f"{cells.get(f'{name} 8', '')} {cells[f'{name} K']}" for name in ("random", "direction")]
            say(f"  {row['run']:<12}{row['source']:<20}{row['way']:<8}{row['layer']:>5}"
                + "".join(f"{cells.get(name, ''):>6}" for name in (*counts, "all", "patch"))
                + f"{low:.2f} to {high:.2f}".rjust(14) + "".join(f"{control:>13}" for control in controls))


def print_differences(rows):
    say("own less another source on the same pairs, share flipped, with 95% of bootstrap draws over pairs")
    for row in rows:
        cells = [f"{k}: {value:+.2f} [{low:+.2f}, {high:+.2f}]" for k, (value, low, high) in row["differences"].items()
                 if k in ("1", "8", "K")]
        say(f"  {row['task']:<14}{row['own']:<21} less {row['run']}: {row['source']:<20}" + "  ".join(cells))


def draw_effects(effects, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(dict.fromkeys((row["run"], row["span"]) for row in effects))
    tasks = list(dict.fromkeys(row["task"] for row in effects))
    figure, panels = plt.subplots(len(rows), len(tasks), figsize=(3 * len(tasks) + 1, 1.5 * len(rows) + 1),
                                  layout="constrained", squeeze=False)
    for number, (line, (run, span)) in enumerate(zip(panels, rows)):
        for axes, task in zip(line, tasks):
            own = {(row["site"], row["layer"]): row["e"][0] for row in effects
                   if (row["run"], row["span"], row["task"]) == (run, span, task)}
            layers = sorted({layer for _, layer in own})
            grid = [[own[site, layer] for layer in layers] for site in COMPONENTS]
            image = axes.imshow(grid, vmin=-1, vmax=1, cmap="RdBu_r", aspect="auto")
            for y, values in enumerate(grid):
                for x, value in enumerate(values):
                    axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8,
                              color="white" if abs(value) > 0.7 else "black")
            axes.set_xticks(range(len(layers)), layers)
            axes.set_yticks(range(len(COMPONENTS)), COMPONENTS if axes is line[0] else [""] * len(COMPONENTS))
            if number == 0:
                axes.set_title(task)
        line[0].set_ylabel(f"{run}\n{'all positions' if span == 'all' else 'last position'}")
    figure.colorbar(image, ax=panels, shrink=0.6, label="e")
    figure.supxlabel("layer")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_edits(results, path):
    """Success against the number of edits, by where they go in; dotted the ceiling, grey the controls."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in results if "edited" in row["select"] and row["way"] in ("mlp", "add", "literal")]
    tasks = list(dict.fromkeys(row["task"] for row in shown))
    places = [place for place in dict.fromkeys(place_of(row) for row in shown)]
    figure, panels = plt.subplots(len(places), len(tasks), figsize=(3.4 * len(tasks), 2.7 * len(places) + 1.2),
                                  layout="constrained", sharey=True, squeeze=False)
    names = dict.fromkeys((row["run"], row["source"]) for row in shown
                          if not row["source"].startswith(("hash", "neurons")))
    palette = [f"C{number}" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9)]  # C7 is grey
    colours = {name: palette[number % len(palette)] for number, name in enumerate(names)}
    positions = {name: number for number, name in enumerate((*map(str, COUNTS), "K"))}
    for number, (line, place) in enumerate(zip(panels, places)):
        for axes, task in zip(line, tasks):
            for row in [row for row in shown if row["task"] == task and place_of(row) == place]:
                name = row["run"], row["source"]
                at = [count for count in positions if count in row["rows"]]
                values, low, high = zip(*(row["rows"][count]["ours"] for count in at))
                errors = [[value - least for value, least in zip(values, low)],
                          [most - value for value, most in zip(values, high)]]
                style = {"color": colours.get(name, "0.6"), "linewidth": 1.5 if name in colours else 0.8}
                axes.errorbar([positions[count] for count in at], values, yerr=errors, capsize=2,
                              linestyle="--" if name[1].startswith("neurons") else "-", label=": ".join(name), **style)
                axes.axhline(row["rows"]["patch"]["ours"][0], linestyle=":", **style)
            axes.set_xticks(list(positions.values()), positions)
            axes.set_ylim(-0.03, 1.03)
            axes.grid(alpha=0.3)
            if number == 0:
                axes.set_title(task)
            if number == len(places) - 1:
                axes.set_xlabel("edits")
        line[0].set_ylabel(f"flipped, {place}")
    handles = {label: handle for line in panels for axes in line
               for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(3, len(tasks)), fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def place_of(row):
    return "block_out" if row["way"] == "literal" else row["site"]


def parse(arguments):
    parser = argparse.ArgumentParser(prog="circuits.py", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n")[2])
    parser.add_argument("run", help="a run's folder or checkpoint")
    parser.add_argument("--against", nargs="+", default=[], metavar="RUN", help="other runs, such as the dense twin")
    parser.add_argument("--tasks", default=None, metavar="A,B", help=f"some of {','.join(TASKS)} (all there are)")
    parser.add_argument("--pairs", type=whole_number, default=200, metavar="N", help="pairs to test on (200)")
    parser.add_argument("--choose", type=whole_number, default=100, metavar="N", help="pairs to choose layers on (100)")
    parser.add_argument("--site", nargs="+", default=["mlp_in"], metavar="SITE",
                        help="where SAEs and controls are edited: mlp_in, block_out ... (mlp_in)")
    parser.add_argument("--answer", choices=("set", "digit"), default="set",
                        help="greater_than: years after either start, or whole decades of them (set)")
    parser.add_argument("--data", metavar="DIR", help="folder with circuits/, the word lists for other than toy models")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    return parser.parse_args(arguments)


def main(arguments):
    options = parse(arguments)
    runs = open_runs((options.run, *options.against), options.device)
    toy = is_toy(runs[0].encoding)
    known = TASKS if toy else TASKS[:3]
    options.tasks = known if options.tasks is None else options.tasks.split(",")
    for task in options.tasks:
        if task not in known:
            raise UserError(f"there is no task {task!r}{suggest(task, known)}")
    for site in options.site:
        if site not in PATCH_SITES:
            raise UserError(f"there is no site {site!r}{suggest(site, PATCH_SITES)}")
    for run in runs:
        if run.config.site != "mlp":
            raise UserError(f"{run.path} has its bottleneck before attention, where edits are not made here: give a "
                            "run with site = 'mlp'")
    if not toy and options.data is None:
        raise UserError("a model of other text than the toy world needs the word lists: --data DIR, a folder with "
                        "circuits/ioi_names.json, winogender_occupations.tsv and greater_than_nouns.txt in it")
    home = os.path.dirname(runs[0].path)
    with whole_file(os.path.join(home, "circuits.jsonl")) as file:
        effects, results, counts = work(runs, options, file)
        if not results:
            raise UserError("no task has a pair that every model answers right: train longer, or compare other models")
    differences = compare(results)
    print_effects(effects)
    for select, rule in (("edited", "ours"), ("paper", "ours"), ("edited", "paper")):
        print_results(results, select, rule)
    print_differences(differences)
    about = {"weights": {run.path: weights_hash(run.model) for run in runs},
             "configs": {run.path: vars(run.config) for run in runs}, "options": vars(options), **provenance()}
    rows = [{key: value for key, value in row.items() if key != "flags"} for row in results]
    write_json(os.path.join(home, "circuits.json"),
               {"effects": effects, "results": rows, "differences": differences, "pairs": counts, **about}, indent=1)
    draw_effects(effects, os.path.join(home, "effects.png"))
    draw_edits(results, os.path.join(home, "edits.png"))
    say(f"written to {home}: circuits.json, circuits.jsonl (a row a pair), effects.png, edits.png")


if __name__ == "__main__":
    run_script(main)
