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
code is edited by slot: set to zero, or taken by a feature of the target's code, so that K edits make it the target's.
SAEs and controls: f_j becomes the target's f_j, for features active in either; own (union) is edited so, too, and
taking a slot is then two edits. The layer is the one whose MLP has the largest e at the last position (edited) or at
all positions (paper), on pairs that are not tested.

Where an edit goes in:  own: mlp      the MLP reads the edited code, decoded: model(edit=...)
                             literal  the block's output is the edited code, decoded
                             delta    the block's output, plus what the edit changes of the decoded code
                        SAEs: add     what the edit changes is added, and what they do not reconstruct stays
                             replace  the activation is the edited code, decoded

Success: the target's answer is above the source's, and above the giver's name (ioi). The paper's rule leaves the first
out where there is a giver. Rows: edits 0, 1, 2, 4, 8, K; all (the target's whole code); patch, the activation itself
taken from the target, the ceiling; random edits and a random direction of the same norm, at K edits. Intervals are
Wilson's, 95%.
"""
import argparse
import itertools
import json
import os
from typing import NamedTuple

import torch
import torch.nn.functional as F

import toyworld
from checkpoint import open_run, weights_hash
from dpb import Code
from helpers import UserError, progress, provenance, run_script, say, suggest, whole_number, wilson, write_json
from model import Cache
from sae import all_sources
from toyworld import is_toy
from word_pairs import text_pairs

TASKS = ("ioi", "pronoun", "greater_than", "fact")
COMPONENTS = ("attention_out", "mlp_out", "block_out")
SPANS = ("last", "all")       # positions that are patched
COUNTS = (0, 1, 2, 4, 8)      # of edits; K comes to it
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


def toy_pairs(kind, count, seed):
    rng = toyworld.Random(seed)
    return [toyworld.ask_pair(kind, rng) for _ in range(count)]


def make_batches(run, pairs):
    """(batches, how many pairs were left out: their answers are no tokens, or their lengths differ)."""
    encoding, device = run.encoding, run.model.embedding.weight.device
    by_length, out = {}, 0
    for number, pair in enumerate(pairs):
        try:
            answers = [[encoding.encode_single_token(answer) for answer in part] for part in pair[2:]]
        except KeyError:
            out += 1
            continue
        prompts = [[encoding.eot_token, *encoding.encode_ordinary(prompt)] for prompt in pair[:2]]
        if len(prompts[0]) != len(prompts[1]) or len(prompts[0]) > run.config.context:
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
    """(n,) by our rule and by the paper's."""
    before, after, subject = (mass(logits, mask) for mask in (batch.before, batch.after, batch.subject))
    above = after > subject
    return (after > before) & above, torch.where(batch.subject.any(1), above, after > before)


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
    """e of every component, layer and span: {(site, layer, span): e}."""
    clean, target, patched = [], [], {}
    for batch in batches:
        theirs = read(model, batch.target)
        clean.append(margin(last_logits(model, batch.source), batch))
        target.append(margin(last_logits(model, batch.target), batch))
        for site, layer, span in itertools.product(COMPONENTS, range(model.config.layers), SPANS):
            logits = last_logits(model, batch.source, patch=replacing(site, layer, span, theirs[site, layer]))
            patched.setdefault((site, layer, span), []).append(margin(logits, batch))
    clean = torch.cat(clean)
    whole = (clean - torch.cat(target)).mean()
    return {key: ((clean - torch.cat(parts)).mean() / whole).item() for key, parts in patched.items()}


def replacing(site, layer, span, new):
    """A patch that puts `new` (n, T, d) in the place of an activation, at all positions or at the last."""
    def patch(at, number, x):
        if (at, number) != (site, layer):
            return x
        return new if span == "all" else torch.cat([x[:, :-1], new[:, -1:]], 1)
    return patch


def choose_layer(effects, site, span):
    """The layer whose component at the site has the largest effect; of a block's output the first with 90% of it."""
    component = "block_out" if site == "block_out" else "attention_out" if site == "attention_in" else "mlp_out"
    of = {layer: e for (name, layer, where), e in effects.items() if (name, where) == (component, span)}
    if component == "block_out":
        return min(layer for layer, e in of.items() if e >= 0.9 * max(of.values()))
    return max(of, key=of.get)


# Edits


class Space(NamedTuple):
    """What edits are made of, for n pairs at one layer: the features of the source's code, then of the target's."""
    source: Code          # (n, K) each
    target: Code
    rows: torch.Tensor    # (n, 2K, d) the vectors of both
    gram: torch.Tensor    # (n, 2K, 2K) of the rows
    pull: torch.Tensor    # (n, 2K) products of the rows with what is to be reached
    scaled: bool          # whether what is decoded gets a given norm, so that only its direction counts
    allowed: torch.Tensor  # (n, K + 1, K + 1): may feature k of the source go, j of the target come? Number K is none.

    def start(self):
        """Weights of the rows, (n, 2K)."""
        return torch.cat([self.source.coefs, torch.zeros_like(self.target.coefs)], 1)

    def end(self):
        return torch.cat([torch.zeros_like(self.source.coefs), self.target.coefs], 1)


def same_width(*codes):
    """Codes with as many slots as the widest: what is added is not active."""
    width = max(code.indices.shape[1] for code in codes)
    return [Code(*(F.pad(part, (0, width - part.shape[1])) for part in code)) for code in codes]


def make_space(part, source, target, union, change=None):
    """part: encode, decode of a layer.  source, target: Codes (n, K).  change: (n, d), what edits are to add up to;
    None: they are to give the direction of the target's code, decoded."""
    indices = torch.cat([source.indices, target.indices], 1)[..., None]
    ones = torch.ones_like(indices, dtype=torch.float32)
    rows = part.decode(Code(indices, ones)) - part.decode(Code(indices, 0 * ones))
    n, K = source.indices.shape
    gram = rows @ rows.transpose(1, 2)
    here, there = source.coefs != 0, target.coefs != 0
    same = (source.indices[:, :, None] == target.indices[:, None]) & here[:, :, None] & there[:, None]  # (n, K, K)
    allowed = torch.zeros(n, K + 1, K + 1, dtype=torch.bool, device=rows.device)
    alone, new = here & ~same.any(2), there & ~same.any(1)  # active in the source only, in the target only
    if union:
        allowed[:, :K, :K] = same
        allowed[:, :K, K], allowed[:, K, :K] = alone, new
    else:  # a feature that both have comes to its own slot only
        allowed[:, :K, :K] = same | new[:, None] & alone[:, :, None]
        allowed[:, :K, K] = here
    space = Space(source, target, rows, gram, None, change is None, allowed)
    pull = gram @ space.end()[..., None] if change is None else rows @ change[..., None]
    return space._replace(pull=pull[..., 0])


def search(space, most, rng=None):
    """Yield weights (n, 2K) after 0, 1, ... `most` edits: the best at each, or with rng any. A pair that no edit brings
    nearer stays. Nothing is decoded: what an edit does follows from the products of the rows."""
    K = space.source.indices.shape[1]
    weights, allowed = space.start(), space.allowed.clone()
    n, rows = len(weights), torch.arange(len(weights), device=weights.device)
    own = F.pad(space.source.coefs, (0, 1))      # (n, K + 1): what goes
    come = F.pad(space.target.coefs, (0, 1))     # what comes
    square = space.gram.diagonal(dim1=1, dim2=2)
    quadratic = ((F.pad(square[:, :K], (0, 1)) * own ** 2)[:, :, None]
                 + (F.pad(square[:, K:], (0, 1)) * come ** 2)[:, None]
                 - 2 * own[:, :, None] * come[:, None] * F.pad(space.gram[:, :K, K:], (0, 1, 0, 1)))

    def linear(values):
        """<values, edit> of every edit: values (n, 2K) of the rows -> (n, K + 1, K + 1)."""
        return (F.pad(values[:, K:], (0, 1)) * come)[:, None] - (F.pad(values[:, :K], (0, 1)) * own)[:, :, None]

    yield weights
    for _ in range(most):
        now = (space.gram @ (weights if space.scaled else weights - space.start())[..., None])[..., 0]
        if space.scaled:  # the cosine with the target's, but for its norm
            norm = (weights * now).sum(1)
            before = (weights * space.pull).sum(1) / norm.clamp(min=1e-12).sqrt()
            size = norm[:, None, None] + 2 * linear(now) + quadratic
            value = ((weights * space.pull).sum(1)[:, None, None] + linear(space.pull)) / size.clamp(min=1e-12).sqrt()
        else:  # the squared distance, negative
            before = torch.zeros(n, device=weights.device)
            value = 2 * linear(space.pull - now) - quadratic
        value = value.masked_fill(~allowed, -torch.inf)
        if rng is None:
            best, at = value.flatten(1).max(1)
            moves = best > before + 1e-9
        else:
            drawn = torch.rand(allowed.shape, generator=rng).to(value.device)
            at = torch.where(allowed, drawn, -1.0).flatten(1).argmax(1)
            moves = allowed.flatten(1).any(1)
        k, j = at // (K + 1), at % (K + 1)
        weights = weights.clone()
        gone, came = moves & (k < K), moves & (j < K)
        weights[rows[gone], k[gone]] = 0
        weights[rows[came], K + j[came]] = space.target.coefs[rows[came], j[came]]
        allowed[rows[gone], k[gone]] = False
        allowed[rows[came], :, j[came]] = False
        yield weights


def code_of(space, weights):
    """The edited Code; where nothing or everything is edited, the source's or the target's itself, with their slots."""
    for code, weighted in ((space.source, space.start()), (space.target, space.end())):
        if torch.equal(weights, weighted):
            return code
    return Code(torch.cat([space.source.indices, space.target.indices], 1), weights)


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


def put_in(way, source, layer, here, space, weights):
    """Arguments of the last token's pass in which the edit is made. here: its activations, unedited."""
    part, x = source.layers[layer], here[source.site, layer]
    code = code_of(space, weights)
    if way == "mlp":
        return {"edit": lambda number, old: Code(*(value[:, None] for value in code)) if number == layer else old}
    if way == "literal":
        return {"patch": at_site("block_out", layer, part.decode(code, like=x))}
    if way == "delta":
        change = part.decode(code, like=x) - part.decode(space.source, like=x)
        return {"patch": at_site("block_out", layer, here["block_out", layer] + change)}
    if way == "add":
        change = ((weights - space.start())[:, None] @ space.rows)[:, 0]
        return {"patch": at_site(source.site, layer, x + change)}
    return {"patch": at_site(source.site, layer, part.decode(code, like=x))}


def random_direction(source, layer, here, space, weights, rng, model):
    """The same for a random direction, as long as what the edit changes."""
    part, x = source.layers[layer], here[source.site, layer]
    if source.kind != "own":
        change = ((weights - space.start())[:, None] @ space.rows)[:, 0]
        return {"patch": at_site(source.site, layer, x + rotated(change, rng))}
    y = part.decode(space.source, like=x)
    noise = rotated(part.decode(code_of(space, weights), like=x) - y, rng)
    reader = getattr(model.blocks[layer], model.config.site)
    return {"patch": lambda at, number, x: reader((y + noise)[:, None]) if (at, number) == (
        f"{model.config.site}_out", layer) else x}


def rotated(x, rng):
    other = torch.randn(x.shape, generator=rng).to(x)
    return other * (x.norm(dim=-1, keepdim=True) / other.norm(dim=-1, keepdim=True))


@torch.no_grad()
def edit_batch(run, source, layer, batch, union):
    """{(way, row): (n, 2) flipped by both rules} and {k: distance left, as a share of that before any edit}, (n,)."""
    model, part, own = run.model, source.layers[layer], source.kind == "own"
    prompt, rng = Prompt(model, batch.source), torch.Generator().manual_seed(0)
    here, there = prompt.read(), Prompt(model, batch.target).read()
    x, goal = here[source.site, layer], there[source.site, layer]
    codes = same_width(*(part.encode(value.float()) for value in (x, goal)))
    space = make_space(part, *codes, union or not own, None if own else (goal - x).float())
    found, left = {}, {}

    def note(way, row, arguments):
        found[way, row] = torch.stack(flipped(prompt.logits(**arguments), batch), 1)

    K = sum(run.config.active)
    edited = {str(k) if k < K else "K": weights
              for k, weights in enumerate(search(space, K)) if k in (*COUNTS, K)} | {"all": space.end()}
    for row, weights in edited.items():
        for way in ways_of(source):
            note(way, row, put_in(way, source, layer, here, space, weights))
        left[row] = distance(part, space, weights, x, goal, own)
    default = ways_of(source)[0]
    note(default, "random direction", random_direction(source, layer, here, space, edited["K"], rng, model))
    *_, weights = search(space, K, rng)
    note(default, "random edits", put_in(default, source, layer, here, space, weights))
    for way in ways_of(source):
        site = "block_out" if way in ("literal", "delta") else source.site
        note(way, "patch", {"patch": at_site(site, layer, there[site, layer])})
    return found, left


def distance(part, space, weights, x, goal, own):
    """What is left of the way to what the target's next computation reads."""
    if own:
        y, start, end = (part.decode(code, like=like) for code, like in (
            (code_of(space, weights), x), (space.source, x), (space.target, goal)))
        return (y - end).norm(dim=1) / (start - end).norm(dim=1)
    change = ((weights - space.start())[:, None] @ space.rows)[:, 0]
    return (goal - x - change).norm(dim=1) / (goal - x).norm(dim=1)


# The command


def prepare(runs, options):
    """{task: (batches to choose layers on, batches to test on)}, and a row of counts for each task."""
    tasks, counts = {}, {}
    for task in options.tasks:
        parts = []
        for seed, count in ((1, options.choose), (2, options.pairs)):
            if is_toy(runs[0].encoding):
                pairs, unknown = toy_pairs(task, count, seed), 0
            else:
                pairs, unknown = text_pairs(task, options.data, runs[0].encoding, count, seed)
            batches, out = make_batches(runs[0], pairs)
            right = {number: all(flags) for batch in batches for number, *flags in zip(
                batch.numbers, *(answered(run, batch).tolist() for run in runs))}
            keep = {number for number, yes in right.items() if yes}
            parts.append([kept for batch in batches if (kept := pick_batch(batch, keep)) is not None])
            counts[task] = {"pairs": count, "left_out": out, "unknown_words": unknown, "right": len(keep)}
        tasks[task] = parts
        known = counts[task]
        say(f"{task}: {known['pairs']} pairs, {known['right']} of them answered right by every model"
            + f"; {known['left_out']} left out, whose words are not one token each" * bool(known["left_out"])
            + f"; {known['unknown_words']} words of the lists are no single tokens" * bool(known["unknown_words"]))
    return tasks, counts


def name_of(run):
    return os.path.basename(os.path.dirname(os.path.abspath(run.path)))


def merge_layers(sources):
    """Sources of one layer each, with the same name, as one."""
    found = {}
    for source in sources:
        if source.name in found:
            source = found[source.name]._replace(layers=found[source.name].layers | source.layers)
        found[source.name] = source
    return list(found.values())


def sources_of(run, options, task):
    """(label, source, union) of all that can be edited in a run."""
    for site in options.site:
        for source in merge_layers(all_sources(run, site, weights_hash(run.model))):
            yield source.name, source, False
            if source.kind == "own":
                yield "own (union)", source, True


def test_source(run, source, layer, batches, union):
    """{(way, row): (n, 2)}, {row: mean distance left}, and the numbers of the pairs."""
    parts = [edit_batch(run, source, layer, batch, union) for batch in batches]
    found = {key: torch.cat([flags[key] for flags, _ in parts]).cpu() for key in parts[0][0]}
    left = {key: torch.cat([values[key] for _, values in parts]).mean().item() for key in parts[0][1]}
    return found, left, [number for batch in batches for number in batch.numbers]


def work(runs, options, file):
    """(effects, results): rows for the summary; a row a pair goes to the file."""
    tasks, counts = prepare(runs, options)
    effects, results, opened = [], [], {}
    for task, (chosen_on, tested_on) in tasks.items():
        if not chosen_on or not tested_on:
            say(f"{task}: no pair is answered right by every model, so there is nothing to flip")
            continue
        for run in runs:
            found = mediate(run.model, chosen_on)
            effects += [{"task": task, "run": name_of(run), "site": site, "layer": layer, "span": span, "e": e}
                        for (site, layer, span), e in found.items()]
            if run.path not in opened:
                opened[run.path] = list(sources_of(run, options, task))
            for label, source, union in opened[run.path]:
                there = {key: e for key, e in found.items() if key[1] in source.layers}
                layers = {select: choose_layer(there, source.site, span)
                          for select, span in (("edited", "last"), ("paper", "all"))}
                for layer in sorted(set(layers.values())):
                    progress(f"{task}, {name_of(run)}, {label}, layer {layer}")
                    flags, left, numbers = test_source(run, source, layer, tested_on, union)
                    about = {"task": task, "run": name_of(run), "source": label, "site": source.site, "layer": layer,
                             "select": [select for select in layers if layers[select] == layer]}
                    for way in ways_of(source):
                        own = {row: values for (name, row), values in flags.items() if name == way}
                        shares = {row: {rule: wilson(hits, len(numbers))
                                        for rule, hits in zip(("ours", "paper"), values.sum(0).tolist())}
                                  for row, values in own.items()}
                        results.append({**about, "way": way, "n": len(numbers), "left": left, "rows": shares})
                        for place, number in enumerate(numbers):
                            print(json.dumps({**about, "way": way, "pair": number, "flipped": {
                                row: values[place].tolist() for row, values in own.items()}}), file=file)
    progress("")
    return effects, results, counts


def print_effects(effects):
    say("what a component carries: e, all positions / the last one")
    for task, run in dict.fromkeys((row["task"], row["run"]) for row in effects):
        own = {(row["site"], row["layer"], row["span"]): row["e"] for row in effects
               if (row["task"], row["run"]) == (task, run)}
        say(f"{task:<14}{run:<14}" + "".join(f"{f'layer {layer}':>14}" for layer in sorted({key[1] for key in own})))
        for site in COMPONENTS:
            say(f"  {site:<26}" + "".join(f"{own[site, layer, 'all']:.2f} / {own[site, layer, 'last']:.2f}".rjust(14)
                                          for layer in sorted({key[1] for key in own})))


def print_results(results, select, rule):
    rows = [*map(str, COUNTS), "K", "all", "patch", "random edits", "random direction"]
    shown = [row for row in results if select in row["select"]]
    for task in dict.fromkeys(row["task"] for row in shown):
        n = next(row["n"] for row in shown if row["task"] == task)
        say(f"{task}: share flipped ({'ours' if rule == 'ours' else 'the rule of the paper'}), n = {n}, layers by "
            f"{select}; +- half of the interval at K")
        say(f"  {'run':<12}{'source':<22}{'way':<9}{'layer':>5}" + "".join(f"{row:>7}" for row in rows[:8])
            + f"{'+-':>7}{'random':>9}{'direction':>11}")
        for row in [row for row in shown if row["task"] == task]:
            cells = [f"{row['rows'][name][rule][0]:.2f}" if name in row["rows"] else "" for name in rows]
            value, low, high = row["rows"]["K"][rule]
            say(f"  {row['run']:<12}{row['source']:<22}{row['way']:<9}{row['layer']:>5}"
                + "".join(f"{cell:>7}" for cell in cells[:8]) + f"{(high - low) / 2:>7.2f}{cells[8]:>9}{cells[9]:>11}")


def draw_effects(effects, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(dict.fromkeys((row["run"], row["span"]) for row in effects))
    tasks = list(dict.fromkeys(row["task"] for row in effects))
    figure, panels = plt.subplots(len(rows), len(tasks), figsize=(3 * len(tasks) + 1, 1.5 * len(rows) + 1),
                                  layout="constrained", squeeze=False)
    for line, (run, span) in zip(panels, rows):
        for axes, task in zip(line, tasks):
            own = {(row["site"], row["layer"]): row["e"] for row in effects
                   if (row["run"], row["span"], row["task"]) == (run, span, task)}
            layers = sorted({layer for _, layer in own})
            grid = [[own[site, layer] for layer in layers] for site in COMPONENTS]
            image = axes.imshow(grid, vmin=-1, vmax=1, cmap="RdBu_r", aspect="auto")
            for y, values in enumerate(grid):
                for x, value in enumerate(values):
                    axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8)
            axes.set_xticks(range(len(layers)), layers)
            axes.set_yticks(range(len(COMPONENTS)), COMPONENTS if axes is line[0] else [""] * len(COMPONENTS))
            if line is panels[0]:
                axes.set_title(task)
        line[0].set_ylabel(f"{run}\n{'all positions' if span == 'all' else 'last position'}")
    figure.colorbar(image, ax=panels, shrink=0.6, label="e")
    figure.supxlabel("layer")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_edits(results, path):
    """Success against the number of edits, each source with its default way; ceilings dotted, controls grey."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [row for row in results if "edited" in row["select"]]
    tasks, ways = list(dict.fromkeys(row["task"] for row in shown)), (("mlp", "add"), ("literal", "replace"))
    figure, panels = plt.subplots(len(ways), len(tasks), figsize=(3.4 * len(tasks), 6), layout="constrained",
                                  sharey=True, squeeze=False)
    names = list(dict.fromkeys((row["run"], row["source"]) for row in shown))
    colours = {name: f"C{place}" for place, name in enumerate(
        name for name in names if not name[1].startswith(("hash", "neurons")))}
    for line, way in zip(panels, ways):
        for axes, task in zip(line, tasks):
            for row in [row for row in shown if row["task"] == task and row["way"] in way]:
                name, counts = (row["run"], row["source"]), [*map(str, COUNTS), "K"]
                value = [row["rows"][k]["ours"] for k in counts]
                control = name not in colours
                axes.errorbar(range(len(counts)), [v[0] for v in value], color=colours.get(name, "0.6"),
                              yerr=[[v[0] - v[1] for v in value], [v[2] - v[0] for v in value]], capsize=2,
                              linestyle={True: "--", False: "-"}[row["source"].startswith("neurons")],
                              linewidth=0.8 if control else 1.5, label=f"{name[0]}: {name[1]}")
                axes.plot([0, len(counts) - 1], [row["rows"]["patch"]["ours"][0]] * 2, color=colours.get(name, "0.6"),
                          linestyle=":", linewidth=0.8)
            axes.set_xticks(range(len(counts)), counts)
            axes.set_ylim(-0.03, 1.03)
            axes.grid(alpha=0.3)
            if line is panels[0]:
                axes.set_title(task)
        line[0].set_ylabel(f"flipped; {way[0]} or {way[1]}")
    handles = {label: handle for line in panels for axes in line
               for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    figure.supxlabel("edits (dotted: the whole activation of the target)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def parse(arguments):
    parser = argparse.ArgumentParser(prog="circuits.py", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n")[2])
    parser.add_argument("run", help="a run's folder or checkpoint")
    parser.add_argument("--against", nargs="+", default=[], metavar="RUN", help="other runs, such as the dense twin")
    parser.add_argument("--tasks", default=None, metavar="A,B", help=f"some of {','.join(TASKS)} (all there are)")
    parser.add_argument("--pairs", type=whole_number, default=200, metavar="N", help="pairs to test on (200)")
    parser.add_argument("--choose", type=whole_number, default=100, metavar="N", help="pairs to choose layers on (100)")
    parser.add_argument("--site", nargs="+", default=["mlp_in"], metavar="SITE",
                        help="of SAEs and controls: mlp_in, block_out ... (mlp_in)")
    parser.add_argument("--data", metavar="DIR", help="folder with circuits/, the word lists for other than toy models")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    return parser.parse_args(arguments)


def main(arguments):
    options = parse(arguments)
    runs = [open_run(path, options.device) for path in (options.run, *options.against)]
    toy = is_toy(runs[0].encoding)
    known = TASKS if toy else TASKS[:3]
    options.tasks = known if options.tasks is None else options.tasks.split(",")
    for task in options.tasks:
        if task not in known:
            raise UserError(f"there is no task {task!r}{suggest(task, known)}")
    for run in runs[1:]:
        if run.content["tokenizer"]["id"] != runs[0].content["tokenizer"]["id"]:
            raise UserError(f"{run.path} has another tokenizer than {runs[0].path}: train both on the same data")
    if not toy and options.data is None:
        raise UserError("a model of other text than the toy world needs the word lists: --data DIR, a folder with "
                        "circuits/ioi_names.json, winogender_occupations.tsv and greater_than_nouns.txt in it")
    home = os.path.dirname(runs[0].path)
    rows = os.path.join(home, "circuits.jsonl")
    with open(rows + ".part", "w", encoding="utf-8") as file:
        effects, results, counts = work(runs, options, file)
    os.replace(rows + ".part", rows)
    if not results:
        raise UserError("no task has a pair that every model answers right: train longer, or compare other models")
    print_effects(effects)
    for select, rule in (("edited", "ours"), ("paper", "ours"), ("edited", "paper")):
        print_results(results, select, rule)
    write_json(os.path.join(home, "circuits.json"), {
        "effects": effects, "results": results, "pairs": counts, **provenance(),
        "weights": {run.path: weights_hash(run.model) for run in runs}}, indent=1)
    draw_effects(effects, os.path.join(home, "effects.png"))
    draw_edits(results, os.path.join(home, "edits.png"))
    say(f"written to {home}: circuits.json, circuits.jsonl (a row a pair), effects.png, edits.png")


if __name__ == "__main__":
    run_script(main)
