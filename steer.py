"""Steering: make a model speak of something by adding features to its codes.

    source = steering_source(run)                                      the model's own features, or any other source
    vector = contrast(run, source, "sea", *toy_texts("sea"))           from texts with the concept and texts without it
    for token in run.model.generate(tokens, 100, **steered(source, vector, alpha=1)): ...

Which features: in each layer, the k whose mean activation (unfolded: dpb.py) on the positive texts exceeds that on the
negative ones by most. How much of each: the weights under which the steered model finds the positive texts likeliest,
or nearly, after some steps of gradient descent from zero; alpha multiplies them. With steps=0 the weights are the
differences themselves, scaled to length 1. These steer too, but a feature that reads a concept is not always one that
makes the model speak of it: docs/log.md has the figures of both.

A model is steered by its own features at every layer and token, by entries added to the code. Decoding is a sum, so
that adds to the coefficient of a feature that is active and makes active one that is not. The features of another
source, such as SAEs, are added to the activations that it reads, at its layers. A dense model has no features of its
own: without SAEs its vector lives in the residual stream after one layer, `stream`, d coordinates with their weights,
made and fitted likewise.
"""
import functools
import itertools
import math
import re
from random import Random
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import toyworld
from checkpoint import weights_hash
from dpb import Code, unfold
from features import read_arrays, write_arrays
from helpers import UserError
from sources import Neurons, Source, open_source, read_activations, read_codes
from tokenizer import END, encode

TOY_SEED = 2  # of the documents that vectors are made from: training has those of seed 0, validation those of seed 1
# k, steps, the rate, the dense layer and the kind of toy text were chosen on other concepts than these ten.
HELD_OUT = tuple(toyworld.TOPICS)[1::3][:10]


class Vector(NamedTuple):
    concept: str
    model: str                # weights_hash of the model that it is for
    source: str               # key of the source whose features these are
    layers: torch.Tensor      # (n,) of the source
    indices: torch.Tensor     # (n, k) features
    weights: torch.Tensor     # (n, k) signed

    def save(self, path):
        write_arrays(path, {name: np.asarray(value) for name, value in self._asdict().items()})

    @classmethod
    def load(cls, path, model, source):
        """The vector in a file, if it is one and was made for this model and source."""
        arrays = read_arrays(path, say=lambda problem: None)
        if arrays is None or set(arrays) != set(cls._fields):
            raise UserError(f"{path} is missing, damaged, or no vector that --save-vector of this version has written")
        concept, made_for, key = (str(arrays[name]) for name in cls._fields[:3])
        if made_for != weights_hash(model):
            raise UserError(f"{path} is a vector of another model, whose features mean other things: "
                            f"make one for this model with --steer {concept} --save-vector FILE")
        if key != source.key:
            raise UserError(f"{path} is a vector of the source {key!r}, not of {source.key!r}: give its own --source "
                            "(and --site, or --layer of a dense model)")
        return cls(concept, made_for, key, *(torch.from_numpy(arrays[name]) for name in cls._fields[3:]))


def steering_source(run, name=None, site=None, layer=0):
    """The source that a model is steered with: the one named; else its own, or the stream after a layer."""
    if name is None and run.config.bottleneck == "none":
        return stream_source(run, [layer])
    return open_source(run, "own" if name is None else name, site)


def stream_source(run, layers):
    """All coordinates of the residual stream after some layers."""
    d = run.config.d
    return Source("stream", "stream", f"stream {' '.join(map(str, layers))}", "block_out", d,
                  {layer: Neurons(d, d) for layer in layers})


def add_features(vector, alpha, layer, code):
    """The code (..., K) with the vector's features of this layer, alpha times their weights: (..., K + k).

    alpha: a number, or a tensor that broadcasts with the weights, such as (B, 1, 1), one for each text.
    """
    if layer not in vector.layers:
        return code
    row = vector.layers.tolist().index(layer)
    shape = *code.indices.shape[:-1], vector.indices.shape[1]
    more = Code(vector.indices[row].to(code.indices).expand(shape),
                (alpha * vector.weights[row].to(code.coefs)).to(code.coefs).expand(shape))
    return Code(*(torch.cat(pair, dim=-1) for pair in zip(code, more)))


class Change(NamedTuple):
    """Of one feature at some layers, on every token: where it is active with its sign, its coefficient times `scale`;
    and everywhere `add` more of it."""
    layers: tuple
    index: int
    sign: int
    scale: float = 1.0
    add: float = 0.0


def change_features(changes, layer, code):
    """The code (..., K) after each of the Changes: (..., K + those that add). A feature that is added may be in it
    twice, which is the same to a decoder."""
    for change in changes:
        if layer not in change.layers:
            continue
        own = (code.indices == change.index) & (code.coefs * change.sign > 0)
        code = Code(code.indices, torch.where(own, code.coefs * change.scale, code.coefs))
        if change.add:
            more = Code(torch.full_like(code.indices[..., :1], change.index),
                        torch.full_like(code.coefs[..., :1], change.sign * change.add))
            code = Code(*(torch.cat(pair, dim=-1) for pair in zip(code, more)))
    return code


def steered(source, vector, alpha=1.0):
    """Arguments of a forward pass, or of generation, that is steered."""
    if vector is None:
        return {}
    if source.kind == "own":
        return source.edited(functools.partial(add_features, vector, alpha))
    rows, added = {layer: row for row, layer in enumerate(vector.layers.tolist())}, {}

    def add(layer, x):
        if layer not in rows:
            return x
        if layer not in added:  # once, not for every token of a text
            indices, weights = vector.indices[rows[layer]].to(x.device), vector.weights[rows[layer]].to(x.device)
            added[layer] = source.added(layer, indices, weights)
        return x + (alpha * added[layer]).to(x.dtype)
    return source.patched(add)


# Vectors from texts


def batches(run, texts, size=16):
    """Texts as tokens (B, T), each after an end-of-text and cut at the context, and which are no padding (B, T)."""
    context, end = run.config.context, run.encoding.eot_token
    rows = [row[i : i + context] for row in ([end, *encode(run.encoding, text).tolist()] for text in texts)
            for i in range(0, len(row), context)]
    for part in (rows[i : i + size] for i in range(0, len(rows), size)):
        longest, device = max(map(len, part)), run.model.embedding.weight.device
        yield (torch.tensor([row + [end] * (longest - len(row)) for row in part], device=device),
               torch.tensor([[i < len(row) for i in range(longest)] for row in part], device=device))


def mean_features(run, source, texts):
    """The mean activation of every unfolded feature over the tokens of the texts: (layers, 2m)."""
    layers, count = sorted(source.layers), 0
    total = torch.zeros(len(layers), 2 * source.m)
    for tokens, real in batches(run, texts):
        codes = read_codes(run.model, tokens, source)
        for sums, layer in zip(total, layers):
            ids, values = unfold(codes[layer], source.m)
            sums.index_add_(0, ids[real].flatten().cpu(), values[real].flatten().float().cpu())
        count += real.sum().item()
    return total / count


def mean_stream(run, source, texts):
    """The mean of the activations themselves: (layers, d)."""
    layers, found = sorted(source.layers), []
    for tokens, real in batches(run, texts):
        read = read_activations(run.model, tokens, source.site, layers)
        found.append(torch.stack([read[layer][real].float().cpu() for layer in layers]))  # (layers, N, d)
    return torch.cat(found, dim=1).mean(1)


def contrast(run, source, concept, positive, negative, k=256, steps=100):
    """The Vector of a concept from texts that have it and texts that do not."""
    for name, texts in (("positive", positive), ("negative", negative)):
        if not any(text.strip() for text in texts):
            raise UserError(f"there is no {name} text: the contrast needs some of both")
    if source.kind == "stream":
        indices = torch.arange(source.m).repeat(len(source.layers), 1)
        weights = mean_stream(run, source, positive) - mean_stream(run, source, negative)
    else:
        difference = mean_features(run, source, positive) - mean_features(run, source, negative)
        values, ids = difference.topk(min(k, 2 * source.m))  # (layers, k)
        indices, weights = ids % source.m, values.clamp(min=0) * torch.where(ids < source.m, 1, -1)
    vector = Vector(concept, weights_hash(run.model), source.key, torch.tensor(sorted(source.layers)), indices,
                    F.normalize(weights, dim=1))
    return fit(run, source, vector, positive, steps) if steps else vector


def fit(run, source, vector, texts, steps, rate=0.1):
    """The vector with weights that make the texts likely: `steps` of Adam from zero, on all texts in turn."""
    rows = list(batches(run, texts))
    weights = torch.zeros_like(vector.weights, requires_grad=True)
    optimizer = torch.optim.Adam([weights], rate)
    for step in range(steps):
        tokens, real = rows[step % len(rows)]
        logits = run.model(tokens[:, :-1], **steered(source, vector._replace(weights=weights)))
        loss = F.cross_entropy(logits[real[:, 1:]].float(), tokens[:, 1:][real[:, 1:]])
        weights.grad, = torch.autograd.grad(loss, [weights])
        optimizer.step()
    return vector._replace(weights=weights.detach())


@functools.cache
def toy_start(number):
    """Of a document that is for vectors only: its first three sentences, and its topics."""
    text, labels = toyworld.document(TOY_SEED, number)
    return " ".join(toyworld.sentences(text)[:3]), labels["topics"]


def toy_texts(concept, n=64):
    """n texts of the toy world on a concept and n on others: the first three sentences of documents with one topic."""
    others = Random(0).choices([topic for topic in toyworld.TOPICS if topic != concept], k=n)
    wanted = [concept] * n + others
    found = {topic: [] for topic in wanted}
    for text, topics in map(toy_start, itertools.count()):
        if len(topics) == 1 and topics[0] in found:
            found[topics[0]].append(text)
            if all(len(found[topic]) >= wanted.count(topic) for topic in found):
                texts = [found[topic].pop() for topic in wanted]
                return texts[:n], texts[n:]


# What steering did


def text_of(encoding, tokens):
    """The text of some tokens. A model's vocabulary may be rounded up: what no tokenizer entry spells is U+FFFD."""
    return b"".join(piece(encoding, token) for token in tokens).decode("utf-8", "replace")


def piece(encoding, token):
    return encoding.decode_single_token_bytes(int(token)) if token < encoding.n_vocab else "\ufffd".encode()


def count_toy_words(text, concept):
    """Of a text of the toy world: words of the concept, all words, well-formed sentences, all sentences.

    A sentence that the end of the text cuts short is not counted.
    """
    words, known = re.findall(r"\w+", text.replace(END, " ")), set(toyworld.concept_words(concept))
    found = toyworld.whole_sentences(text.split(END))
    return sum(word in known for word in words), len(words), sum(map(toyworld.well_formed, found)), len(found)


@torch.no_grad()
def perplexity(model, tokens, start):
    """The unsteered model's perplexity of tokens (B, T) from `start` on: how fluent it finds them."""
    context, losses = model.config.context, []
    for first in range(0, tokens.shape[1] - 1, context):
        window = tokens[:, first : first + context + 1]
        logits = model(window[:, :-1]).float()
        losses.append(F.cross_entropy(logits.transpose(1, 2), window[:, 1:], reduction="none"))
    return math.exp(torch.cat(losses, dim=1)[:, start - 1 :].mean().item())
