"""Texts as sparse vectors: what a model makes of the tokens of a passage, pooled.

    vectors = read_passages(run, documents, signals, layers, shapes)      {(signal, layer, Shape): Vectors}
    scores = cosines(queries, corpus, width, idf=True, top=64)            (Q, documents), the best passage of each

A signal is what of the activations before an MLP counts: `h`, the activations themselves, or the unfolded features of a
source (own, an SAE, hash, neurons). All signals are taken of one pass over the model, which sees a document from its
start. A document is cut into passages of `window` tokens; a query is its last one. A passage is pooled to one vector:
`last`, its last token; `max`, of each feature the strongest there is (of h by |h|, with its sign); or `token`, a query
as `last` and a document's passage as `max`, since what is asked about is at the end of a query and anywhere in a
document. The strongest `top` entries stay. Then, with idf, rare features count more (postings.py has the formula), and
the score is the cosine.

Documents of equal length are read together, so there is no padding.
"""
import contextlib
import itertools
import os
import tempfile
from typing import NamedTuple

import numpy as np
import torch

from dpb import unfold
from helpers import UserError, progress
from postings import Builder, idf_of, open_postings
from probing import device_of
from sources import read_activations
from tokenizer import encode

MOST = 256     # entries of a passage that are ever kept, of wide activations, too
BATCH = 2 ** 13  # tokens of a forward pass
NARROW = 1024  # features up to which vectors are multiplied as dense ones


class Shape(NamedTuple):
    window: int
    pooling: str   # "last", "max" or "token"


class Vectors(NamedTuple):
    """The passages of some texts, text by text, and in a text from its start to its end."""
    owners: np.ndarray    # (P,) the number of the text
    starts: np.ndarray    # (P,) the passage's first token, in its text
    features: np.ndarray  # (P, MOST or fewer) int32, the strongest first
    values: np.ndarray    # (P, MOST or fewer) float16; 0 is no entry

    def of_texts(self, texts):
        """Only these texts (numbers, ascending), numbered anew."""
        kept = np.isin(self.owners, texts)
        return Vectors(np.searchsorted(texts, self.owners[kept]), *(part[kept] for part in self[1:]))


def width_of(signal, d):
    """How many features a signal has. signal: a Source, or None for the activations themselves."""
    return d if signal is None else 2 * signal.m


def tokens_of(run, text):
    """The tokens of a text after an end-of-text; of one that is too long the last."""
    ids = encode(run.encoding, text)[-(run.config.context - 1) :]
    return np.concatenate([[run.encoding.eot_token], ids]).astype(np.int64)


# Reading


@torch.no_grad()
def fire(signal, layer, x):
    """What a signal makes of activations x (B, T, d): features and strengths (B, T, K) each; of h no features."""
    if signal is None:
        return None, x
    part = signal.layers[layer]
    code = part.encode(x.flatten(0, 1).to(device_of(part)))
    return [found.view(*x.shape[:2], -1) for found in unfold(code, signal.m)]


def pool(ids, strength, passages, n, width, top=MOST):
    """(features, values), (n, top), of passages 0 .. n - 1. ids (None: of h), strength: (N, K), a row a token; passages
    (N,), each token's own."""
    if ids is not None:
        return strongest(passages[:, None].expand(ids.shape), ids, strength.float(), n, width, top)
    table = torch.zeros(2, n, width, device=strength.device)
    where = passages[:, None].expand(strength.shape)
    table[0].scatter_reduce_(0, where, strength, "amax", include_self=False)
    table[1].scatter_reduce_(0, where, strength, "amin", include_self=False)
    table = torch.where(table[0] >= -table[1], table[0], table[1])
    features = table.abs().topk(min(top, width)).indices
    return features.int().cpu().numpy(), as_half(table.gather(1, features))


def strongest(passages, ids, strength, n, width, top):
    """The largest strength of each feature of a passage, the `top` of these, the strongest first. No dense table."""
    live = strength > 0
    keys, order = (passages[live] * width + ids[live]).sort()
    strength, new = strength[live][order], torch.diff(keys, prepend=keys.new_tensor([-1])) != 0
    largest = torch.zeros(int(new.sum()), device=keys.device).scatter_reduce_(0, new.cumsum(0) - 1, strength, "amax")
    keys = keys[new]
    order = largest.argsort(descending=True, stable=True)
    order = order[(keys[order] // width).argsort(stable=True)]
    rows, keys, largest = keys[order] // width, keys[order] % width, largest[order]
    rank = torch.arange(len(rows), device=rows.device)
    rank -= torch.searchsorted(rows, torch.arange(n, device=rows.device))[rows]
    kept, columns = rank < top, min(top, int(rank.max()) + 1 if len(rank) else 1)
    features, values = torch.zeros(n, columns, dtype=torch.int32), torch.zeros(n, columns)
    where = rows[kept].cpu(), rank[kept].cpu()
    features[where], values[where] = keys[kept].int().cpu(), largest[kept].cpu()
    return features.numpy(), as_half(values)


def as_half(values):
    return values.clamp(-65504, 65504).half().cpu().numpy()


def cut(length, shape, query):
    """The tokens of a text that count: (places in it, numbers of its passages); and the passages' starts.

    Token 0, the end-of-text before it, does not count.
    """
    starts = np.array([max(1, length - shape.window)]) if query else np.arange(1, length, shape.window)
    stops = np.append(starts[1:], length)
    if shape.pooling == "last" or query and shape.pooling == "token":
        return stops - 1, np.arange(len(starts)), starts
    return np.arange(starts[0], length), np.repeat(np.arange(len(starts)), stops - starts), starts


def read_passages(run, texts, signals, layers, shapes, queries=False, what="reading"):
    """{(signal, layer, shape): Vectors} of texts, arrays of tokens that each begin with an end-of-text.

    signals: {name: Source, or None for h}, all of one site.  shapes: a list of Shape, or of each
    signal, {name: [Shape]}.
    """
    device = run.model.embedding.weight.device
    by_length = {}
    for number, tokens in enumerate(texts):
        by_length.setdefault(len(tokens), []).append(number)
    wanted = shapes if isinstance(shapes, dict) else dict.fromkeys(signals, shapes)
    found = {(name, layer, shape): [] for name in signals for layer in layers for shape in wanted[name]}
    sites = {signal.site for signal in signals.values() if signal} or {"mlp_in"}
    if len(sites) > 1:
        raise UserError(f"these features are of several sites, {', '.join(sorted(sites))}: compare those of one")
    (site,), done = sites, 0
    for length, numbers in sorted(by_length.items()):
        size = max(1, BATCH // length)
        for group in (numbers[i : i + size] for i in range(0, len(numbers), size)):
            rows = torch.from_numpy(np.stack([texts[number] for number in group]).astype(np.int64)).to(device)
            for layer, x in read_activations(run.model, rows, site, layers).items():
                for name, signal in signals.items():
                    for shape, vectors in pooled(signal, layer, x.float(), group, wanted[name], queries):
                        found[name, layer, shape].append(vectors)
            done += len(group)
            progress(f"{what}: {done:,} of {len(texts):,} texts")
    progress("")
    return {key: in_order(parts) for key, parts in found.items()}


def pooled(signal, layer, x, numbers, shapes, queries):
    """(shape, Vectors), of texts of one length with activations x (B, T, d). Only tokens that count are encoded."""
    cuts = {shape: cut(x.shape[1], shape, queries) for shape in shapes}
    used = np.unique(np.concatenate([places for places, *_ in cuts.values()]))
    ids, strength = fire(signal, layer, x[:, torch.from_numpy(used).to(x.device)])
    for shape, (places, owners, starts) in cuts.items():
        at = torch.from_numpy(np.searchsorted(used, places)).to(strength.device)
        passages = torch.arange(len(x))[:, None] * len(starts) + torch.from_numpy(owners)  # (B, t)
        features, values = pool(None if ids is None else ids[:, at].flatten(0, 1), strength[:, at].flatten(0, 1),
                                passages.flatten().to(strength.device), len(x) * len(starts),
                                width_of(signal, x.shape[2]))
        yield shape, Vectors(np.repeat(numbers, len(starts)), np.tile(starts, len(x)), features, values)


def in_order(parts):
    width = max(part.features.shape[1] for part in parts)
    owners, starts = (np.concatenate([part[column] for part in parts]) for column in (0, 1))
    features, values = (np.concatenate([np.pad(part[column], ((0, 0), (0, width - part[column].shape[1])))
                                        for part in parts]) for column in (2, 3))
    order = np.lexsort((starts, owners))
    return Vectors(owners[order], starts[order], features[order], values[order])


def count_tokens(texts):
    """The tokens themselves as a signal, with how often they occur: Vectors of one passage a text."""
    rows = [np.unique(tokens[1:], return_counts=True) for tokens in texts]
    width = max(len(ids) for ids, _ in rows)
    features, values = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.float16)
    for row, (ids, counts) in enumerate(rows):
        features[row, : len(ids)], values[row, : len(ids)] = ids, counts
    return Vectors(np.arange(len(rows)), np.ones(len(rows), int), features, values)


# Scores


def cosines(queries, corpus, width, idf=True, top=None):
    """The cosine of each query (a passage each) with the best passage of each document: (Q, documents) float32."""
    features, values = corpus.features[:, :top], corpus.values[:, :top].astype(np.float32)
    counts = np.bincount(features[values != 0], minlength=width)
    weights = (idf_of(len(features), counts) if idf else np.ones(width)).astype(np.float32)
    values, asked = (unit(part, weights[own]) for part, own in (
        (values, features), (queries.values[:, :top].astype(np.float32), queries.features[:, :top])))
    products = dense_products if width <= NARROW else sparse_products
    scores = products(features, values, queries.features[:, :top], asked, width)  # (Q, P)
    return np.maximum.reduceat(scores, np.flatnonzero(np.diff(corpus.owners, prepend=-1)), axis=1)


def unit(values, weights):
    """Rows times their weights, of length 1."""
    values = values * weights
    return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-30)


def dense_products(features, values, asked, asked_values, width):
    """(Q, P), for signals that have most of their features at every token."""
    tables = []
    for own, part in ((asked, asked_values), (features, values)):
        tables.append(np.zeros((len(own), width), np.float32))
        np.add.at(tables[-1], (np.arange(len(own))[:, None], own), part)
    return tables[0] @ tables[1].T


def sparse_products(features, values, asked, asked_values, width):
    """(Q, P), by lists of the passages that have a feature, as an index has them: only pairs that share one cost."""
    rows, columns = np.nonzero(values)
    flat, values = features[rows, columns], values[rows, columns]
    order = np.argsort(flat.astype(np.uint16) if width <= 2 ** 16 else flat, kind="stable")  # of 16 bits: by radix
    passages, values = rows[order], values[order]
    starts = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=width))])
    scores = np.empty((len(asked), len(features)), np.float32)
    for row, (own, part) in enumerate(zip(asked, asked_values)):
        own, part = own[part != 0], part[part != 0]
        lengths = starts[own + 1] - starts[own]
        places = np.arange(lengths.sum()) + np.repeat(starts[own] - np.cumsum(lengths) + lengths, lengths)
        scores[row] = np.bincount(passages[places], np.repeat(part, lengths) * values[places], len(features))
    return scores


@contextlib.contextmanager
def as_index(corpus, width, top):
    """The same as an index (postings.py), for as long as it is needed."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "index")
        on = corpus.values[:, :top] != 0
        with Builder(path, width, {}) as builder:
            builder.add(on.sum(1), corpus.features[:, :top][on], corpus.values[:, :top][on], corpus.owners,
                        corpus.starts, 0)
            builder.finish()
        yield open_postings(path)


def all_shapes(windows, poolings=("max", "last")):
    return [Shape(*pair) for pair in itertools.product(windows, poolings)]

