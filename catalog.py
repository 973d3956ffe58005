"""What a page says of every feature of a source, made for all of them at once from an Index of where they fire.

    layer = layer_of(index, 2)                              its firings, by feature, then by position
    table_of(layer)                                         how often and how strongly, and where most strongly
    names_of(layer, groups, context)                        the label that a feature fits best, and how well
    for block in blocks_of(layer, family, tokens, context)  histogram, contexts, and who fires with it: 128 at a time
    effects(run, source, tokens, features, positions)       what the next token would be without it

Everything is an array over unfolded features (dpb.unfold: id i with coefficient above 0, i + m below), so that a layer
of 32,768 features takes seconds; memory is that of the index and a few times that of one layer.

Labels are those of labels.py, as far as they have 100 tokens in either half of the windows. A feature's is the one with
the best F1 in every other window of the text, and what counts is its F1 in the rest; beside it stands that of the
feature of the hash control which is best for that label, chosen and tested in the same way. (truth.py has the sharper
test, on unseen words, of the features that are best for some label.) Purity is the share of a feature's label among the
20 strongest of its tokens that could have one of its group.
"""
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from dpb import Code
from helpers import Progress
from model import Cache
from truth import TOP as PURE

BLOCK = 128                   # features of a piece of data: what a page loads to show one of them
BINS = 24                     # of a histogram of strengths
BEFORE, AFTER = 12, 5         # tokens of a context
STRONGEST, BANDS, EACH = 10, 5, 2  # contexts: the strongest, then some from each fifth of the firings
ALLIES, RELATIVES = 10, 8     # features that fire with it; parents, and children
EFFECT_AT, TOKENS = 5, 8      # strongest firings that an effect is the mean over; tokens raised, and lowered
NONE = 2 ** 32 - 1            # no position
FEW = 100                     # tokens with a label, in either half of the windows: fewer fit some feature by chance


class Layer(NamedTuple):
    """The firings of a layer, by feature, then by position."""
    number: int
    m: int                  # features, each with two signs
    starts: np.ndarray      # (2m + 1,)
    positions: np.ndarray   # (E,)
    strength: np.ndarray    # (E,) |coefficient|
    order: np.ndarray       # (E,) of the entries by feature, then the strongest first, of equals the earlier

    def counts(self):
        return np.diff(self.starts)

    def ids(self):
        return np.repeat(np.arange(2 * self.m, dtype=np.int32), self.counts())


def layer_of(index, number):
    first = 2 * index.m * index.layers.index(number)
    offsets = index.offsets[first : first + 2 * index.m + 1]
    own = slice(offsets[0], offsets[-1])
    starts, strength = offsets - offsets[0], index.coefs[own].astype(np.float32)
    ids = np.repeat(np.arange(2 * index.m, dtype=np.int32), np.diff(starts))
    return Layer(number, index.m, starts, index.positions[own], strength, np.lexsort((-strength, ids)))


def strongest(layer, features, count):
    """The positions of the strongest firings of each of these features: (n, count), NONE where it has no more."""
    places = layer.starts[features][:, None] + np.arange(count)
    there = places < layer.starts[features + 1][:, None]
    found = np.full(places.shape, NONE, np.uint32)
    found[there] = layer.positions[layer.order[places[there]]]
    return found


def table_of(layer, top=4):
    """Of every feature that fires: its id, firings, greatest and mean strength, and where it is strongest."""
    live, counts = np.flatnonzero(layer.counts()), layer.counts()
    first = layer.starts[:-1][live]
    sums = np.add.reduceat(layer.strength, first, dtype=np.float64) if len(live) else np.zeros(0)
    return {"ids": live, "count": counts[live], "peak": layer.strength[layer.order[first]],
            "mean": (sums / counts[live]).astype(np.float32), "top": strongest(layer, live, top)}


# What a feature stands for


def fits(layer, ids, group, part):
    """(found (2m, labels), fires (2m,), positives (labels,)) on the tokens of a part that a group is about."""
    inside = part & (group.unit >= 0)
    own, n = inside[layer.positions], len(group.labels)
    label = group.label[layer.positions[own]]
    pairs = (ids[own].astype(np.int64) * n + label)[label >= 0]
    return (np.bincount(pairs, minlength=2 * layer.m * n).reshape(-1, n), np.bincount(ids[own], minlength=2 * layer.m),
            np.bincount(group.label[inside & (group.label >= 0)], minlength=n))


def f1(found, fires, positives):
    return 2 * found / np.maximum(fires + positives, 1) * (positives > 0)


def names_of(layer, groups, context, few=FEW):
    """Of every feature, (2m,) each: the number of its label among all of the groups', -1 for none; its F1, precision
    and recall in the windows that did not choose it; its purity. And of every label the best feature's F1, (labels,):
    chosen in the even windows, tested in the odd ones."""
    ids, size, tokens = layer.ids(), 2 * layer.m, len(groups[0].label)
    odd = np.arange(tokens) // context % 2 == 1
    best, label = np.zeros(size), np.full(size, -1)
    score, precision, recall, purity = (np.full(size, np.nan, np.float32) for _ in range(4))
    control, base = [], 0
    for group in groups:
        found, fires, positives = fits(layer, ids, group, ~odd)
        tested, fired, there = fits(layer, ids, group, odd)
        enough = np.minimum(positives, there) >= few
        chosen = f1(found, fires[:, None], positives) * enough  # (2m, labels)
        champion, every = chosen.argmax(0), np.arange(len(group.labels))
        control.append(f1(tested[champion, every], fired[champion], there))
        number = chosen.argmax(1)
        better = np.flatnonzero(chosen.max(1) > best)
        best[better], label[better] = chosen.max(1)[better], base + number[better]
        hits = tested[better, number[better]]
        score[better] = f1(hits, fired[better], there[number[better]])
        precision[better] = hits / np.maximum(1, fired[better])
        recall[better] = hits / np.maximum(1, there[number[better]])
        purity[better] = purities(layer, ids, group, number)[better]
        base += len(group.labels)
    return {"label": label, "f1": score, "precision": precision, "recall": recall,
            "purity": purity}, np.concatenate(control)


def purities(layer, ids, group, number):
    """The share of label number[f] among the PURE strongest tokens of feature f within the group; NaN with fewer."""
    entries = layer.order[group.unit[layer.positions[layer.order]] >= 0]
    own = ids[entries]
    starts = np.searchsorted(own, np.arange(2 * layer.m + 1))
    top = np.arange(len(own)) - starts[own] < PURE
    right = group.label[layer.positions[entries[top]]] == number[own[top]]
    hits = np.bincount(own[top], weights=right, minlength=2 * layer.m)
    return np.where(np.diff(starts) >= PURE, hits / PURE, np.nan)


# Who fires with whom


class Family:
    """Parents and children of the features of a bottleneck: i and j are related if i ^ j is a generator."""

    def __init__(self, lows, generators):
        """lows: where levels start, and the end of the last.  generators: {level: words}, of levels above 0."""
        self.lows, self.size = np.asarray(lows), int(lows[-1])
        self.steps = np.zeros((len(lows) + 1, 1 << max(1, (self.size - 1).bit_length())), bool)
        for level, words in generators.items():
            self.steps[level, words] = True

    def level(self, index):
        return np.searchsorted(self.lows, index, side="right") - 1

    def relation(self, own, other):
        """Of pairs of indices: 1 where the other is a parent, 2 where it is a child, 0 elsewhere."""
        mine, theirs, step = self.level(own), self.level(other), own ^ other
        parent, child = (mine == theirs + 1) & self.steps[mine, step], (theirs == mine + 1) & self.steps[theirs, step]
        return np.where(parent, 1, np.where(child, 2, 0))


def family_of(bottleneck):
    """Of a layer of a model's own features; without a hierarchy there are levels, but no relatives."""
    levels = range(1, len(bottleneck.lows) - 1)
    return Family(bottleneck.lows, {level: bottleneck.get_buffer(f"generators_{level}").cpu().numpy()
                                    for level in levels if hasattr(bottleneck, f"generators_{level}")})


class ByToken(NamedTuple):
    """The features of a layer by token."""
    starts: np.ndarray    # (tokens + 1,)
    ids: np.ndarray       # (E,)
    strength: np.ndarray

    def pairs(self, layer, entries):
        """(entry, other feature) of every feature that is active where an entry is, itself among them."""
        at = layer.positions[entries].astype(np.int64)
        first, sizes = self.starts[at], self.starts[at + 1] - self.starts[at]
        place = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return np.repeat(entries, sizes), self.ids[np.repeat(first, sizes) + place]


def by_token(layer, tokens):
    order = np.argsort(layer.positions, kind="stable")
    counts = np.bincount(layer.positions, minlength=tokens)
    return ByToken(np.r_[0, np.cumsum(counts)], layer.ids()[order], layer.strength[order])


def cofiring(layer, tokens, first, last, most=2 ** 22):
    """(feature, other, count) of features first .. last - 1 and those that are active on the same tokens."""
    size, found, at = 2 * layer.m, [], first
    room = max(1, most * (len(tokens.starts) - 1) // max(1, len(tokens.ids)))  # entries at a time
    while at < last:
        end = max(at + 1, int(np.searchsorted(layer.starts, layer.starts[at] + room, side="right")) - 1)
        end = min(end, last)
        entries, others = tokens.pairs(layer, np.arange(layer.starts[at], layer.starts[end]))
        own = np.searchsorted(layer.starts, entries, side="right") - 1
        keys, counts = np.unique(own * size + others, return_counts=True)
        found.append((keys // size, keys % size, counts))
        at = end
    own, other, count = (np.concatenate(parts) for parts in zip(*found))
    return own[own != other], other[own != other], count[own != other]


def first_of_each(own, score, count, features):
    """Of pairs, the places of the `count` with the best score for each of `features`: sorted; and where each starts."""
    order = np.lexsort((-score, own))
    starts = np.searchsorted(own[order], np.arange(features.start, features.stop + 1))
    rank = np.arange(len(order)) - np.repeat(starts[:-1], np.diff(starts))
    kept = order[rank < count]
    return kept, np.r_[0, np.cumsum(np.minimum(np.diff(starts), count))]


def allies_of(layer, family, tokens, features):
    """Who fires with each of a range of features: the nearest by cosine, count / sqrt(n n'), parents and children by
    count. {name: starts, ids, counts}"""
    own, other, count = cofiring(layer, tokens, features.start, features.stop)
    rates = layer.counts()
    kinds = family.relation(own % layer.m, other % layer.m) if family else np.zeros(len(own), int)
    cosine = count / np.sqrt(rates[own] * rates[other].astype(float))
    found = {}
    for name, mask, score, most in (("allies", kinds >= 0, cosine, ALLIES), ("parents", kinds == 1, count, RELATIVES),
                                    ("children", kinds == 2, count, RELATIVES)):
        kept, starts = first_of_each(own[mask], score[mask], most, features)
        found |= {f"{name}_starts": starts, f"{name}_ids": other[mask][kept], f"{name}_counts": count[mask][kept]}
    return found


# What a feature's page shows


def contexts_of(layer, features, tokens, context):
    """The contexts of a range of features: the strongest, and EACH from every fifth of the firings by strength; and
    the feature's own strength on every token of each.

    starts: of a feature, its contexts. at: the token that a context is about. band: 0 for the strongest, else the
    number of the fifth, 1 the strongest. left: tokens before `at`. fire_starts, fire_at, fire_value: where it is
    active, as a place in the context, and how strongly.
    """
    ranks, bands, owners = [], [], []
    counts = layer.counts()[features.start : features.stop]
    places = np.minimum(STRONGEST, counts)
    for rank in range(STRONGEST):
        owner = np.flatnonzero(places > rank)
        owners.append(owner), ranks.append(np.full(len(owner), rank)), bands.append(np.zeros(len(owner), int))
    many = np.flatnonzero(counts >= 2 * STRONGEST)
    for band in range(BANDS):
        for number in range(EACH):  # evenly spaced within the band
            owners.append(many), bands.append(np.full(len(many), band + 1))
            ranks.append(((band + (number + 0.5) / EACH) / BANDS * counts[many]).astype(np.int64))
    owner, rank, band = (np.concatenate(parts).astype(np.int64) for parts in (owners, ranks, bands))
    order = np.lexsort((rank, band, owner))
    owner, rank, band = owner[order], rank[order], band[order]
    at = layer.positions[layer.order[layer.starts[features.start + owner] + rank]].astype(np.int64)
    left = np.minimum(BEFORE, at % context)  # what the model saw of it
    end = np.minimum(at + 1 + AFTER, tokens)
    entries = slice(layer.starts[features.start], layer.starts[features.stop])
    local = np.repeat(np.arange(len(features)), counts)
    keys = local * tokens + layer.positions[entries]  # sorted
    low, high = (np.searchsorted(keys, owner * tokens + edge) for edge in (at - left, end))
    sizes = high - low
    picked = np.repeat(low, sizes) + np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return {"starts": np.searchsorted(owner, np.arange(len(features) + 1)), "at": at, "band": band, "left": left,
            "fire_starts": np.r_[0, np.cumsum(sizes)],
            "fire_at": layer.positions[entries][picked] - np.repeat(at - left, sizes),
            "fire_value": layer.strength[entries][picked]}


def histograms(layer, features):
    """Firings by strength, in BINS equal parts from 0 to the feature's greatest: (n, BINS)."""
    entries = slice(layer.starts[features.start], layer.starts[features.stop])
    counts = layer.counts()[features.start : features.stop]
    local, strength = np.repeat(np.arange(len(features)), counts), layer.strength[entries]
    peak = np.zeros(len(features), np.float32)
    np.maximum.at(peak, local, strength)
    part = np.minimum(strength / peak[local] * BINS, BINS - 1).astype(np.int64)
    return np.bincount(local * BINS + part, minlength=len(features) * BINS).reshape(-1, BINS)


def blocks_of(layer, family, tokens, context):
    """(features, content) of every block of features with one that fires.  tokens: a ByToken."""
    count = len(tokens.starts) - 1
    for first in range(0, 2 * layer.m, BLOCK):
        features = range(first, min(first + BLOCK, 2 * layer.m))
        if layer.starts[features.stop] > layer.starts[first]:
            yield features, {"histogram": histograms(layer, features), **contexts_of(layer, features, count, context),
                             **allies_of(layer, family, tokens, features)}


# What a feature does


class Past(Cache):
    """Keys and values of the first `length` tokens of some rows of a Cache."""

    def __init__(self, cache, rows, length):
        self.cache, self.rows, self.length = cache, rows, length

    def extend(self, layer, k, v):
        past = self.cache.store[layer][:, self.rows, :, : self.length]
        return torch.cat([past, torch.stack([k, v])], dim=3)


def next_logits(model, tokens, past, arguments):
    """After tokens (n,) with their pasts: (n, V)."""
    x = model.hidden(tokens[:, None], cache=past, **arguments)[:, 0]
    return F.linear(x, model.embedding.weight).float().cpu()


@torch.no_grad()
def effects(run, source, tokens, features, positions, windows=32):
    """What `features.effect` says, of many features: how much each raises the logit of every next token where it is
    strongest, (n, V), and the KL divergence, in nats, of the next token's distribution without it, (n,).

    features: (n, 2) layers and indices.  positions: (n, k), NONE where there are fewer.  Only the token in question is
    computed anew, after the keys and values of those before it; tokens at the same place of their window share a pass.
    """
    model, context = run.model, run.config.context
    device, size = model.embedding.weight.device, run.encoding.n_vocab
    feature, slot = np.nonzero(positions != NONE)
    at = positions[feature, slot].astype(np.int64)
    change, divergence = torch.zeros(len(features), len(model.embedding.weight)), torch.zeros(len(features))
    progress, done = Progress(len(at), 0), 0
    for first in range(0, int(at.max(initial=0)) // context + 1, windows):
        inside = np.flatnonzero((at >= first * context) & (at < (first + windows) * context))
        if not len(inside):
            continue
        rows, cache = tokens.windows(range(first, at[inside].max() // context + 1), context)[:, :-1].to(device), Cache()
        model.hidden(rows, cache=cache)
        for place in np.unique(at[inside] % context):
            pairs = inside[at[inside] % context == place]
            row = torch.from_numpy(at[pairs] // context - first).to(device)
            known = torch.from_numpy(features[feature[pairs]]).to(device)

            with_it, without = (next_logits(model, rows[row, place], Past(cache, row, int(place)), arguments)
                                for arguments in ({}, source.edited(without_feature(known))))
            owner = torch.from_numpy(feature[pairs])
            change.index_add_(0, owner, with_it - without)
            p, q = (part[:, :size].log_softmax(-1) for part in (with_it, without))
            divergence.index_add_(0, owner, (p.exp() * (p - q)).sum(-1))
            done += len(pairs)
            progress.show(done)
    counts = torch.from_numpy(np.bincount(feature, minlength=len(features))).clamp(min=1)
    change /= counts[:, None]
    return (change - change.mean(1, keepdim=True))[:, :size], divergence / counts


def without_feature(known):
    """An edit that takes from row n of a batch the feature known[n] = (layer, index)."""
    layers, indices = known[:, 0, None, None], known[:, 1, None, None]

    def edit(layer, code):
        return Code(code.indices, code.coefs.masked_fill((layers == layer) & (code.indices == indices), 0))
    return edit
