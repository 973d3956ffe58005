"""The features of a source: where in a corpus each one fires, and what it does there.

    source = open_source(run)                                           of the model's own features, or others
    codes = read_codes(run.model, prompt_tokens(run, "The sailor"), source)          {layer: Code}, (1, T, K) each
    index, tokens = open_index(run, source)                             where each feature fires in the validation data
    positions, coefs = index.firings(layer=2, index=1234, sign=1)       e.g. tokens.read(position - 9, position + 1)

A feature of a layer is an index with a sign, since positive and negative coefficients mean unrelated things:
dpb.unfold. The index holds, for each feature, the tokens on which it was active and its coefficients there: one sorted
list with offsets into it, 6 bytes an entry. It lies beside the checkpoint as features.npz, that of another source than
the model's own as features-SOURCE.npz, with a hash of what it was made from, and is made anew when that has changed.
"""
import hashlib
import os
import re

import numpy as np
import torch

from checkpoint import weights_hash
from dpb import Code, unfold
from helpers import Progress, UserError, first_line, whole_file
from ranks import all_reduce
from sources import open_tokens, read_codes
from tokenizer import encode


def prompt_tokens(run, text):
    """The tokens (1, T) of a text, after the end-of-text token that starts every document."""
    ids = [run.encoding.eot_token, *encode(run.encoding, text).tolist()]
    if len(ids) > run.config.context:
        raise UserError(f"the prompt has {len(ids):,} tokens, but the context of this model is {run.config.context:,}: "
                        "shorten it")
    return torch.tensor([ids], device=run.model.embedding.weight.device)


def parse_feature(text, source):
    """(layer, index, sign) of what a user writes: LAYER:INDEX, LAYER:INDEX+ or LAYER:INDEX-."""
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})([+-]?)", text)
    if not found:
        raise UserError(f"{text!r} is no feature: write LAYER:INDEX with + or - after it, as in 2:1234-")
    layer, index, sign = int(found[1]), int(found[2]), -1 if found[3] == "-" else 1
    if layer not in source.layers:
        layers = sorted(source.layers)
        there = f"the layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]} only"
        raise UserError(f"there is no layer {layer}: {describe_source(source)} has {there}")
    if index >= source.m:
        raise UserError(f"there is no feature {index}: "
                        f"a layer of {describe_source(source)} has the features 0 to {source.m - 1}")
    return layer, index, sign


def describe_source(source):
    return "this model" if source.kind == "own" else f"the source {source.name}"


def level_of(bottleneck, index):
    return next(level for level, high in enumerate(bottleneck.lows[1:]) if index < high)


def find_parents(bottleneck, code):
    """For each active feature the active parent from which it was reached, the strongest if several; (..., K).

    -1 where there is none: in level 0, and wherever selection is flat.
    """
    parents = torch.full_like(code.indices, -1)
    start = 0
    for level in range(1, len(bottleneck.active)) if hasattr(bottleneck, "generators_1") else ():
        above = slice(start, start := start + bottleneck.active[level - 1])
        own = slice(start, start + bottleneck.active[level])
        steps = code.indices[..., own, None] ^ code.indices[..., None, above]  # (..., K_l, K_{l-1})
        strength = code.coefs[..., None, above].abs().expand(steps.shape)
        reached = torch.isin(steps, bottleneck.get_buffer(f"generators_{level}"))
        best = torch.where(reached, strength, -1).argmax(-1)
        parents[..., own] = code.indices[..., above].gather(-1, best)
    return parents


class Index:
    """Where each feature fires: its entries are offsets[f] .. offsets[f + 1] - 1, f = 2 m n + unfolded id, n the
    number of its layer among those of the source."""

    def __init__(self, arrays, source):
        self.offsets, self.positions, self.coefs = arrays["offsets"], arrays["positions"], arrays["coefs"]
        self.tokens, self.m, self.layers = int(arrays["tokens"]), source.m, sorted(source.layers)

    def firings(self, layer, index, sign):
        """The positions in the validation data where a feature fires, in order, and its |coefficient| there."""
        feature = 2 * self.m * self.layers.index(layer) + index + self.m * (sign < 0)
        own = slice(self.offsets[feature], self.offsets[feature + 1])
        return self.positions[own], self.coefs[own].astype(np.float32)

    def cofiring(self, layer, positions, relatives):
        """How often each relative, of either sign, is active on tokens at `positions`: [(count, index)], most first."""
        counts = []
        for relative in relatives:
            other = np.concatenate([self.firings(layer, relative, sign)[0] for sign in (1, -1)])
            counts.append((int(np.isin(positions, other).sum()), int(relative)))
        return sorted(counts, key=lambda pair: (-pair[0], pair[1]))


def gather(model, source, tokens, windows, batch=16):
    """The arrays of an Index over the first windows of the validation data."""
    context, m, layers = model.config.context, source.m, sorted(source.layers)
    progress = Progress(windows * context, 0)
    found = {layer: [] for layer in layers}  # (unfolded ids, positions, coefficients), (E,) each, of every batch
    for start in range(0, windows, batch):
        rows = tokens.windows(range(start, min(start + batch, windows)), context)[:, :-1]
        for layer, code in read_codes(model, rows.to(model.embedding.weight.device), source).items():
            ids, strength = (part.flatten(0, 1).cpu() for part in unfold(code, m))  # (N, K)
            strength = strength.float().clamp(max=65504).half()
            places, slots = (strength > 0).nonzero().unbind(1)
            found[layer].append((ids[places, slots].to(torch.int32).numpy(),
                                 (places + start * context).numpy().astype(np.uint32), strength[places, slots].numpy()))
        progress.show(min(start + batch, windows) * context)
    progress.show(windows * context, last=True)
    counts, positions, coefs = [], [], []
    for layer in layers:  # one at a time, and forgotten at once: a sort needs room
        ids, places, strength = (np.concatenate(parts) for parts in zip(*found.pop(layer)))
        order = np.argsort(ids, kind="stable")  # by feature, then by position
        counts.append(np.bincount(ids, minlength=2 * m))
        positions.append(places[order])
        coefs.append(strength[order])
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
    return {"offsets": offsets, "positions": np.concatenate(positions), "coefs": np.concatenate(coefs)}


def open_index(run, source, most=2 ** 16, say=print):
    """The Index of a source over at most `most` tokens of validation data: the stored one if it is of these weights."""
    tokens = open_tokens(run, "val")
    windows = min(tokens.count(run.config.context), max(1, most // run.config.context))
    key = f"{weights_hash(run.model)} {source.key} {len(tokens)} {windows * run.config.context}"
    name = "features.npz" if source.kind == "own" else f"features-{source.name}.npz"
    path = os.path.join(os.path.dirname(run.path), name)
    arrays = read_arrays(path, say)
    if arrays is None or str(arrays.get("key")) != key:
        why = f"{path} is of another checkpoint or another piece of data: gathering" if arrays else "gathering"
        say(f"{why} where each feature fires in {windows * run.config.context:,} tokens of {run.config.data}, once")
        arrays = gather(run.model, source, tokens, windows)
        arrays |= {"key": np.array(key), "tokens": np.array(windows * run.config.context)}
        write_arrays(path, arrays)
        say(f"wrote {path}, {os.path.getsize(path) / 1e6:.1f} MB, {len(arrays['positions']):,} firings")
    return Index(arrays, source), tokens


def read_arrays(path, say=print):
    """The arrays of an .npz file, or None if there is none or it is damaged, which is said.

    Nothing in it is ever executed.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if str(arrays.pop("checksum", "")) != array_checksum(arrays):
            raise ValueError("its checksum is wrong")
        return arrays
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever zipfile and numpy make of it
        say(f"{path} is damaged ({first_line(error)})")
        return None


def array_checksum(arrays):
    """Of names, types, shapes and bytes: a zip file's own checksums leave out its directory."""
    content = hashlib.sha256()
    for name in sorted(arrays):
        value = np.ascontiguousarray(arrays[name])
        content.update(f"{name} {value.dtype.str} {value.shape} ".encode() + value.tobytes())
    return content.hexdigest()[:16]


def write_arrays(path, arrays):
    """Write an .npz file whole or not at all."""
    try:
        with whole_file(path, "wb") as file:
            np.savez(file, **arrays, checksum=np.array(array_checksum(arrays)))
    except OSError as error:
        raise UserError(f"{path} could not be written ({error.strerror})") from error


@torch.no_grad()
def effect(model, source, tokens, layer, index, positions):
    """How much the feature raises the logit of each next token above the mean of all: with it, less without it,
    the mean over positions. (V,)

    Without it means that its coefficient is zero at that token and layer, and everything after runs on: the feature
    acts through an MLP, so its direction alone would not say what it does.
    """
    context = model.config.context
    device = model.embedding.weight.device
    rows = tokens.windows(positions // context, context)[:, :-1].to(device)
    at = (torch.arange(len(positions), device=device),
          torch.from_numpy((positions % context).astype(np.int64)).to(device))

    def remove(number, code):
        if number != layer:
            return code
        coefs = code.coefs.clone()
        coefs[at] = torch.where(code.indices[at] == index, 0, coefs[at])
        return Code(code.indices, coefs)

    with_it, without = (model(rows, **arguments)[at].float() for arguments in ({}, source.edited(remove)))
    change = (with_it - without).mean(0)
    return change - change.mean()


class FeatureCounts:
    """What the features of every bottleneck do, summed over batches and, with `reduce`, over ranks.

    fired (layers, m): on how many tokens each feature was active.  explained (layers, levels): the fraction of variance
    explained, 1 - |h - y|^2 / |h - mean h|^2, of the input h by the output y, without the features of higher levels.
    """

    def __init__(self, model):
        self.layers = [block.bottleneck for block in model.blocks if block.bottleneck is not None]
        m, levels = (self.layers[0].m, len(self.layers[0].active)) if self.layers else (0, 0)

        def zeros(*shape, dtype=torch.float64):
            return torch.zeros(len(self.layers), *shape, dtype=dtype, device=model.embedding.weight.device)
        self.fired, self.tokens = zeros(m, dtype=torch.int64), zeros(1)
        self.total, self.squares, self.errors = zeros(model.config.d), zeros(1), zeros(levels)  # h, |h|^2, |h - y|^2

    def add(self, record):
        """The (code, output, input) of every layer on one batch."""
        for number, (layer, (code, y, h)) in enumerate(zip(self.layers, record)):
            outputs = [layer.decode(Code(code.indices, code.coefs.masked_fill(code.indices >= high, 0)), like=h)
                       for high in layer.lows[1:-1]] + [y]
            h = h.double().flatten(0, 1)  # (N, d)
            self.fired[number] += torch.bincount(code.indices[code.coefs != 0], minlength=layer.m)
            self.tokens[number] += len(h)
            self.total[number] += h.sum(0)
            self.squares[number] += h.square().sum()
            self.errors[number] += torch.stack([(h - output.double().flatten(0, 1)).square().sum()
                                                for output in outputs])

    def reduce(self):
        for tensor in (self.fired, self.tokens, self.total, self.squares, self.errors) if self.layers else ():
            all_reduce(tensor)
        self.explained = 1 - self.errors / (self.squares - self.total.square().sum(1, keepdim=True) / self.tokens)
