"""Texts as sparse vectors: what a model makes of the tokens of a passage, pooled.

    vectors = read_passages(run, documents, signals, layers, shapes)      {(signal, layer, Shape): Vectors}
    scores = cosines(queries, corpus, idf=True, top=64)                   (Q, documents), the best passage of each

A signal is what of the activations before an MLP counts: `h`, the activations themselves, or the unfolded features of a
source (own, an SAE, hash, neurons). All signals are taken of one pass over the model, which sees a document from its
start. A document is cut into passages of `window` tokens; a query is its last one. A passage is pooled to one vector:
`last`, its last token; or `max`, of each feature the strongest there is (of h by |h|, with its sign). The strongest
`top` entries stay. Then, with idf, rare features count more (postings.py has the formula), and the score is the cosine.

Documents of equal length are read together, so there is no padding.
"""
import itertools
from typing import NamedTuple

import numpy as np
import torch

from dpb import unfold
from helpers import progress
from postings import idf_of
from probing import device_of
from sources import read_activations

MOST = 256     # entries of a passage that are ever kept
BATCH = 2 ** 13  # tokens of a forward pass
ROOM = 2 ** 23   # numbers of a dense table of passages and features, made for a few passages at a time


class Shape(NamedTuple):
    window: int
    pooling: str   # "last" or "max"


class Vectors(NamedTuple):
    """The passages of some texts, text by text, and in a text from its start to its end."""
    owners: np.ndarray    # (P,) the number of the text
    starts: np.ndarray    # (P,) the passage's first token, in its text
    features: np.ndarray  # (P, MOST or fewer) int32, the strongest first
    values: np.ndarray    # (P, MOST or fewer) float16; 0 is no entry

    def of_texts(self, texts):
        """Only these texts (numbers, ascending), numbered anew."""
        at = np.searchsorted(texts, self.owners)
        kept = np.flatnonzero((at < len(texts)) & (np.take(texts, np.minimum(at, len(texts) - 1)) == self.owners))
        return Vectors(at[kept], self.starts[kept], self.features[kept], self.values[kept])


def width_of(signal, d):
    """How many features a signal has. signal: a Source, or None for the activations themselves."""
    return d if signal is None else 2 * signal.m


# Reading


@torch.no_grad()
def pool(signal, layer, x, passages, n, top):
    """(features, values), (n, top), of passages 0 .. n - 1. x: tokens (N, d); passages (N,) of each token its own."""
    if signal is None:
        table = torch.zeros(2, n, x.shape[1], device=x.device)
        where = passages[:, None].expand(x.shape)
        table[0].scatter_reduce_(0, where, x, "amax", include_self=False)
        table[1].scatter_reduce_(0, where, x, "amin", include_self=False)
        table = torch.where(table[0] >= -table[1], table[0], table[1])
    else:
        part, F = signal.layers[layer], width_of(signal, x.shape[1])
        ids, strength = unfold(part.encode(x.to(device_of(part))), signal.m)  # (N, K)
        table = torch.zeros(n * F, device=ids.device)
        table.scatter_reduce_(0, (passages[:, None].to(ids.device) * F + ids).flatten(), strength.float().flatten(),
                              "amax")
        table = table.view(n, F)
    features = table.abs().topk(min(top, table.shape[1])).indices
    return features.to(torch.int32).cpu().numpy(), table.gather(1, features).clamp(-65504, 65504).half().cpu().numpy()


def cut(lengths, shape, query):
    """The tokens of each text that count: (places in it, numbers of its passages); and the passages' starts.

    All texts here have one length, and token 0, the end-of-text before it, does not count.
    """
    starts = np.arange(1, lengths, shape.window)
    if query:
        starts = np.array([max(1, lengths - shape.window)])
    stops = np.minimum(np.append(starts[1:], lengths), lengths)
    if shape.pooling == "last":
        return stops - 1, np.arange(len(starts)), starts
    return np.arange(starts[0], lengths), np.repeat(np.arange(len(starts)), stops - starts), starts


def read_passages(run, texts, signals, layers, shapes, queries=False, what="reading"):
    """{(signal, layer, shape): Vectors} of texts, arrays of tokens that each begin with an end-of-text.

    signals: {name: Source, or None for h}, all at the site of the first source.  shapes: a list of Shape, or of each
    signal, {name: [Shape]}.
    """
    device = run.model.embedding.weight.device
    by_length = {}
    for number, tokens in enumerate(texts):
        by_length.setdefault(len(tokens), []).append(number)
    wanted = shapes if isinstance(shapes, dict) else dict.fromkeys(signals, shapes)
    found = {(name, layer, shape): [] for name in signals for layer in layers for shape in wanted[name]}
    site = next((signal.site for signal in signals.values() if signal), "mlp_in")
    done = 0
    for length, numbers in sorted(by_length.items()):
        size = max(1, BATCH // length)
        for group in (numbers[i : i + size] for i in range(0, len(numbers), size)):
            rows = torch.from_numpy(np.stack([texts[number] for number in group]).astype(np.int64)).to(device)
            for layer, x in read_activations(run.model, rows, site, layers).items():
                for name, signal in signals.items():
                    for shape in wanted[name]:
                        found[name, layer, shape] += pooled(signal, layer, x.float(), group, length, shape, queries)
            done += len(group)
            progress(f"{what}: {done:,} of {len(texts):,} texts")
    progress("")
    return {key: in_order(parts) for key, parts in found.items()}


def pooled(signal, layer, x, numbers, length, shape, queries):
    """Vectors of texts of one length with activations x (B, T, d), a few at a time."""
    places, owners, starts = cut(length, shape, queries)
    places, passages = torch.from_numpy(places).to(x.device), torch.from_numpy(owners).to(x.device)
    many = max(1, ROOM // (width_of(signal, x.shape[-1]) * len(starts)))
    for first in range(0, len(numbers), many):
        part = x[first : first + many, places]  # (b, t, d)
        own = (torch.arange(len(part), device=x.device)[:, None] * len(starts) + passages).flatten()
        features, values = pool(signal, layer, part.flatten(0, 1), own, len(part) * len(starts), MOST)
        yield Vectors(np.repeat(numbers[first : first + many], len(starts)), np.tile(starts, len(part)), features,
                      values)


def in_order(parts):
    owners, starts, features, values = (np.concatenate(arrays) for arrays in zip(*parts))
    order = np.lexsort((starts, owners))
    return Vectors(owners[order], starts[order], features[order], values[order])


def count_tokens(texts, vocabulary):
    """The tokens themselves as a signal, with how often they occur: Vectors of one passage a text."""
    rows = [np.unique(tokens[1:], return_counts=True) for tokens in texts]
    width = max(len(ids) for ids, _ in rows)
    features, values = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.float16)
    for row, (ids, counts) in enumerate(rows):
        features[row, : len(ids)], values[row, : len(ids)] = ids, counts
    return Vectors(np.arange(len(rows)), np.ones(len(rows), int), features, values)


# Scores


def cosines(queries, corpus, width, idf=True, top=MOST):
    """The cosine of each query (a passage each) with the best passage of each document: (Q, documents) float32."""
    features, values = corpus.features[:, :top], corpus.values[:, :top].astype(np.float32)
    counts = np.bincount(features[values != 0], minlength=width)
    weights = (idf_of(len(features), counts) if idf else np.ones(width)).astype(np.float32)
    values = values * weights[features]
    values /= np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-30)
    table = np.zeros((width, len(queries.features)), np.float32)  # a column a query
    asked = queries.values[:, :top].astype(np.float32) * weights[queries.features[:, :top]]
    asked /= np.maximum(np.linalg.norm(asked, axis=1, keepdims=True), 1e-30)
    np.add.at(table, (queries.features[:, :top], np.arange(len(asked))[:, None]), asked)
    scores = torch.nn.functional.embedding_bag(
        torch.from_numpy(np.ascontiguousarray(features)), torch.from_numpy(table), mode="sum",
        per_sample_weights=torch.from_numpy(values)).numpy()  # (P, Q)
    return np.maximum.reduceat(scores, np.flatnonzero(np.diff(corpus.owners, prepend=-1))).T


def all_shapes(windows):
    return [Shape(*pair) for pair in itertools.product(windows, ("max", "last"))]

