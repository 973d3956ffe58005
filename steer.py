"""Steering: make a model speak of something by adding features to its codes.

    vector = contrast(run, "sea", *toy_texts("sea"))                   from texts with the concept and texts without it
    for token in generate(run.model, tokens, 100, vector, alpha=1): ...

Which features: in each layer, the k whose mean activation (unfolded: dpb.py) on the positive texts exceeds that on the
negative ones by most. How much of each: the weights under which the steered model finds the positive texts likeliest,
or nearly, after some steps of gradient descent from zero; alpha multiplies them. With steps=0 the weights are the
differences themselves, scaled to length 1. These steer too, but a feature that reads a concept is not always one that
makes the model speak of it: docs/log.md has the figures of both.

Parity and TopK models are steered at every layer and token, by entries added to the code. Decoding is a sum, so that
adds to the coefficient of a feature that is active and makes active one that is not. A dense model has no features:
its vector lives in the residual stream after one layer, d coordinates with their weights, made and fitted likewise.
"""
import contextlib
import functools
import math
import re
from random import Random
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

import toyworld
from dpb import Code, unfold
from features import read_arrays, read_codes, weights_hash, write_arrays
from helpers import UserError
from tokenizer import END, encode

TOY_SEED = 2  # of the documents that vectors are made from: training has those of seed 0, validation those of seed 1
# k, steps, the rate, the dense layer and the kind of toy text were chosen on other concepts than these ten.
HELD_OUT = tuple(toyworld.TOPICS)[1::3][:10]


class Vector(NamedTuple):
    concept: str
    model: str                # weights_hash of the model that it is for
    layers: torch.Tensor      # (n,) all layers, or the one of a dense model
    indices: torch.Tensor     # (n, k) features; of a dense model, coordinates of the residual stream
    weights: torch.Tensor     # (n, k) signed

    def save(self, path):
        write_arrays(path, {name: np.asarray(value) for name, value in self._asdict().items()})

    @classmethod
    def load(cls, path, model):
        """The vector in a file, if it is one and was made for this model."""
        arrays = read_arrays(path, say=lambda problem: None)
        if arrays is None or set(arrays) != set(cls._fields):
            raise UserError(f"{path} is missing, damaged, or no vector that --save-vector has written")
        concept, made_for = str(arrays["concept"]), str(arrays["model"])
        if made_for != weights_hash(model):
            raise UserError(f"{path} is a vector of another model, whose features mean other things: "
                            f"make one for this model with --steer {concept} --save-vector FILE")
        return cls(concept, made_for, *(torch.from_numpy(arrays[name]) for name in cls._fields[2:]))


def add_features(vector, alpha, layer, code):
    """The code (..., K) with the vector's features of this layer, alpha times their weights: (..., K + k)."""
    shape = *code.indices.shape[:-1], vector.indices.shape[1]
    more = Code(vector.indices[layer].to(code.indices).expand(shape),
                (alpha * vector.weights[layer]).to(code.coefs).expand(shape))
    return Code(*(torch.cat(pair, dim=-1) for pair in zip(code, more)))


@contextlib.contextmanager
def steered(model, vector, alpha):
    """Inside, a forward pass with edit= what this gives is steered."""
    if vector is None or model.blocks[0].bottleneck is not None:
        yield vector and functools.partial(add_features, vector, alpha)
        return
    block = model.blocks[vector.layers.item()]
    hook = block.register_forward_hook(lambda block, inputs, x: x + (alpha * vector.weights[0]).to(x))
    try:
        yield None
    finally:
        hook.remove()


def generate(model, tokens, count, vector=None, alpha=1.0, **settings):
    """GPT.generate, steered. Between two tokens the model is as it was."""
    steps = None
    while True:
        with steered(model, vector, alpha) as edit:
            steps = steps or model.generate(tokens, count, edit=edit, **settings)
            token = next(steps, None)
        if token is None:
            return
        yield token


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


def mean_features(run, texts):
    """The mean activation of every unfolded feature over the tokens of the texts: (layers, 2m)."""
    m = run.model.blocks[0].bottleneck.m
    total, count = torch.zeros(run.config.layers, 2 * m), 0
    for tokens, real in batches(run, texts):
        for sums, code in zip(total, read_codes(run.model, tokens)):
            ids, values = unfold(code, m)
            sums.index_add_(0, ids[real].flatten().cpu(), values[real].flatten().float().cpu())
        count += real.sum().item()
    return total / count


@torch.no_grad()
def mean_stream(run, texts, layer):
    """The mean residual stream after a layer: (1, d)."""
    found = []
    hook = run.model.blocks[layer].register_forward_hook(lambda block, inputs, x: found.append(x))
    try:
        for tokens, real in batches(run, texts):
            run.model(tokens)
            found[-1] = found[-1][real].float().cpu()
    finally:
        hook.remove()
    return torch.cat(found).mean(0, keepdim=True)


def contrast(run, concept, positive, negative, k=256, layer=0, steps=100):
    """The Vector of a concept from texts that have it and texts that do not. layer: of a dense model."""
    for name, texts in (("positive", positive), ("negative", negative)):
        if not any(text.strip() for text in texts):
            raise UserError(f"there is no {name} text: the contrast needs some of both")
    if run.model.blocks[0].bottleneck is None:
        layers, indices = torch.tensor([layer]), torch.arange(run.config.d)[None]
        weights = mean_stream(run, positive, layer) - mean_stream(run, negative, layer)
    else:
        m = run.model.blocks[0].bottleneck.m
        layers, difference = (torch.arange(run.config.layers),
                              mean_features(run, positive) - mean_features(run, negative))
        values, ids = difference.topk(min(k, 2 * m))  # (layers, k)
        indices, weights = ids % m, values.clamp(min=0) * torch.where(ids < m, 1, -1)
    vector = Vector(concept, weights_hash(run.model), layers, indices, F.normalize(weights, dim=1))
    return fit(run, vector, positive, steps) if steps else vector


def fit(run, vector, texts, steps, rate=0.1):
    """The vector with weights that make the texts likely: `steps` of Adam from zero, on all texts in turn."""
    rows = list(batches(run, texts))
    weights = torch.zeros_like(vector.weights, requires_grad=True)
    optimizer = torch.optim.Adam([weights], rate)
    for step in range(steps):
        tokens, real = rows[step % len(rows)]
        with steered(run.model, vector._replace(weights=weights), 1.0) as edit:
            logits = run.model(tokens[:, :-1], edit=edit)
        loss = F.cross_entropy(logits[real[:, 1:]].float(), tokens[:, 1:][real[:, 1:]])
        weights.grad, = torch.autograd.grad(loss, [weights])
        optimizer.step()
    return vector._replace(weights=weights.detach())


def toy_texts(concept, n=64):
    """n texts of the toy world on a concept and n on others: the first three sentences of documents with one topic."""
    others = Random(0).choices([topic for topic in toyworld.TOPICS if topic != concept], k=n)
    wanted = [concept] * n + others
    found = {topic: [] for topic in wanted}
    for text, labels in toyworld.documents(TOY_SEED, 10 ** 9):
        if len(labels["topics"]) == 1 and labels["topics"][0] in found:
            found[labels["topics"][0]].append(" ".join(toyworld.sentences(text)[:3]))
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
    *whole, last = text.split(END)
    found = ([sentence for part in whole for sentence in toyworld.sentences(part)]
             + toyworld.sentences(last[: last.rfind(".") + 1]))
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
