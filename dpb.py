"""The deep parity bottleneck: a sparse code over 2**n features whose dictionary is computed, not stored.

    code = bottleneck.encode(x)              x (..., d)  ->  Code(indices, coefs), both (..., K)
    y = bottleneck.decode(code, like=x)      y = y_hat |x| / |y_hat|,   y_hat = sum_k coefs[k] phi_{indices[k]}

Features lie in levels: level 0 is the standard basis, 0 .. 2^n_0 - 1 with n_0 = log2 d, level l is
2^n_{l-1} .. 2^n_l - 1. A token's K_0 active features of level 0 are parents; parent i has the children i ^ g for
D_1 fixed generators g, and the K_1 best of those are the parents of level 2. Only children of active features are
ever scored, so the cost does not grow with the number of features.

A feature is chosen by |z|, where z = (<phi_i, x> - mean_i) / std_i is also its coefficient. mean and std are running
moments of the feature's own scores, over the tokens where it was a candidate; without them most features die.
The forward pass in training mode collects sums; call `update_moments(model)` once per optimiser step.

selection="flat" leaves the hierarchy out: all m features are candidates of every token, and the K largest |z| win. The
transform scores them all exactly, at m log d additions; a learned dictionary would need m d.

Letters as in kernels.py; K = sum of K_l, m = 2^n_{L-1} features in all. There are no parameters.
"""
import math
import warnings
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from kernels import magnitude
from kloosterman import log2_width
from ops import (
    attach_scores,
    backend,
    collect_sums,
    encode_features,
    narrow_features,
    parity_decode,
    search_basis,
    search_children,
)

SELECTIONS = ("hierarchical", "flat")
METHODS = ("auto", "gemm", "transform")


class Code(NamedTuple):
    """A sparse code: feature indices (..., K), int64, and their signed coefficients (..., K), levels in order.

    Within a level the largest |coefficient| comes first; flat selection puts the largest of all first. The two are all
    that a decoder needs, so whatever reads or edits features works on this.
    """
    indices: torch.Tensor
    coefs: torch.Tensor


def unfold(code, m):
    """Signed features as 2m unsigned ones:
    ids `i` where the coefficient is positive, `i + m` where negative; and |coef|."""
    return code.indices + m * (code.coefs < 0), code.coefs.abs()


def fold(ids, values, m):
    """The Code of unfolded features: the inverse of unfold."""
    return Code(ids % m, torch.where(ids < m, values, -values))


def draw_generators(low_bits, bits, children, seed, parent_low=0):
    """`children` distinct words of `bits` bits, spread evenly over the non-zero values of the bits from low_bits up.

    The spread makes every feature reachable: child c has the parent c ^ g for any generator g of its high part. If the
    parents start at parent_low > 0, c ^ g may lie below, so the generators of a high part must not all agree in
    the bits from parent_low up.
    """
    parts = 2 ** (bits - low_bits) - 1  # the non-zero values of the high bits
    if children > parts << low_bits:
        raise ValueError(f"there are only {parts << low_bits} different generators of {bits} bits, not {children}")
    rng = np.random.default_rng(seed)
    high = 1 + np.resize(rng.permutation(parts), children)
    words = high << low_bits | rng.integers(1 << low_bits, size=children)
    while True:
        again = np.setdiff1d(np.arange(children), np.unique(words, return_index=True)[1])  # repeats
        if parent_low and children >= 2 * parts:
            again = np.union1d(again, np.flatnonzero(np.isin(high, one_sided(words, low_bits, parent_low))))
        if not len(again):
            return words
        words[again] = high[again] << low_bits | rng.integers(1 << low_bits, size=len(again))


def one_sided(words, low_bits, parent_low):
    """The high parts whose generators all agree in the bits between parent_low and 2^low_bits."""
    high = words >> low_bits
    middle = words % (1 << low_bits) // parent_low
    return [part for part in np.unique(high) if len(np.unique(middle[high == part])) == 1]


def unreachable(words, low_bits, bits, parent_low):
    """How many features of a level no parent from parent_low up to 2^low_bits - 1 can reach."""
    absent = 2 ** (bits - low_bits) - 1 - len(np.unique(words >> low_bits))
    return absent * 2 ** low_bits + (parent_low and len(one_sided(words, low_bits, parent_low)) * parent_low)


class DeepParityBottleneck(nn.Module):
    """
    d: width, a power of two from 8 to 32768.
    bits: n_l, the index bits of each level, rising; the first is log2 d, the last at most 2 log2 d.
    active: K_l, features active in each level.  children: D_l, children scored per parent, for levels 1, 2, ...
    seed: of the generators. Give each layer its own.
    standardise: False leaves mean 0 and std 1, so that plain scores are compared (an ablation: features die).
    decay, floor: of the running moments, and the least variance.
    samples: least number of tokens per optimiser step from which the moments of levels >= 1 are taken
        (below twice as many).
    method: "gemm", "transform" or "auto": how children are scored. The result is the same.
    selection: "hierarchical", or "flat": the sum of `active` largest of all features; `children` then has no effect.
    """

    def __init__(self, d, bits=(10, 15), active=(16, 32), children=(256,), seed=0, standardise=True, decay=0.99,
                 floor=1e-6, samples=64, method="auto", selection="hierarchical"):
        super().__init__()
        t, bits, active, children = log2_width(d), tuple(bits), tuple(active), tuple(children)
        if not all(isinstance(n, int) for n in (*bits, *active, *children)):
            raise ValueError(f"bits={bits}, active={active} and children={children} must be whole numbers")
        if not len(bits) == len(active) == len(children) + 1:
            raise ValueError(f"bits={bits} and active={active} need an entry for each level, "
                             f"children={children} one for each level but the first")
        if bits[0] != t:
            raise ValueError(f"bits={bits} must start with log2 d = {t} for d={d}: level 0 is the standard basis")
        if any(a >= b for a, b in zip(bits, bits[1:])) or bits[-1] > 2 * t:
            raise ValueError(f"bits={bits} must rise from level to level to at most 2 log2 d = {2 * t} for d={d}")
        if not 1 <= active[0] <= d:
            raise ValueError(f"active[0]={active[0]} must lie in 1..{d}: level 0 has d features")
        if not (0 <= decay < 1 and 0 < floor < math.inf and samples >= 1):
            raise ValueError(f"decay={decay} must lie in [0, 1), floor={floor} above 0 and samples={samples} above 0")
        if method not in METHODS:
            raise ValueError(f"method={method!r} must be one of {', '.join(map(repr, METHODS))}")
        if selection not in SELECTIONS:
            raise ValueError(f"selection={selection!r} must be one of {', '.join(map(repr, SELECTIONS))}")
        self.d, self.m, self.active, self.fan_out = d, 2 ** bits[-1], active, children
        self.lows = (0, *(2 ** n for n in bits))  # level l holds features lows[l] .. lows[l + 1] - 1
        self.standardise, self.decay, self.floor, self.samples, self.method = standardise, decay, floor, samples, method
        self.selection = selection
        self.passes = 1  # forward passes that make up one optimiser step: ranks x gradient accumulation

        self.words = [f"generators_{level}" for level in range(1, len(bits))]
        self.register_buffer("mean", torch.zeros(self.m))
        self.register_buffer("var", torch.ones(self.m))
        # Updates of the moments: says which tokens are sampled.
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        for level in range(1, len(bits)) if selection == "hierarchical" else ():
            words = draw_generators(bits[level - 1], bits[level], children[level - 1], [seed, level],
                                    self.lows[level - 1])
            lost = unreachable(words, bits[level - 1], bits[level], self.lows[level - 1])
            if lost:
                warnings.warn(f"level {level}: {lost} of {self.lows[level + 1] - self.lows[level]} features can never "
                              f"be active, since {children[level - 1]} generators are too few for "
                              f"{bits[level] - bits[level - 1]} more bits; raise children or add a level between",
                              stacklevel=2)
            # However the parents lie, children of one high part number at least max(parents, generators of that part).
            per_part = np.bincount(words >> bits[level - 1])
            least = int(np.maximum(per_part, active[level - 1])[per_part > 0].sum())
            if not 1 <= active[level] <= least:
                raise ValueError(f"active[{level}]={active[level]} must lie in 1..{least}: {active[level - 1]} parents "
                                 f"with {children[level - 1]} children each are sure to have no more distinct ones")
            self.register_buffer(f"generators_{level}", torch.tensor(words.tolist()))
        # Sums of this step, by feature: tokens on which it was a candidate, z, z squared.
        self.register_buffer("sums", torch.zeros(self.m, 3), persistent=False)

    def extra_repr(self):
        return f"d={self.d}, m={self.m}, active={self.active}, children={self.fan_out}"

    def level(self, number):
        """Everything about a level >= 1: generators, mean and 1/std of its features, index of its first feature."""
        own = slice(self.lows[number], self.lows[number + 1])
        return self.get_buffer(f"generators_{number}"), self.mean[own], self.var[own].rsqrt(), own.start

    def encode(self, x):
        """x (..., d) -> Code. The gradient flows from the coefficients to x, never through the choice of features."""
        self.check_width(x)
        flat = x.reshape(-1, self.d)  # (N, d)
        with torch.no_grad():
            # Both (N, K).
            indices, z = (self.search_levels if self.selection == "hierarchical" else self.search_all)(flat.detach())
        coefs = attach_scores(z, indices, flat, self.var[indices].rsqrt(), self.m) if flat.requires_grad else z
        shape = *x.shape[:-1], sum(self.active)
        return Code(indices.view(shape), coefs.view(shape))

    def check_width(self, x):
        if x.shape[-1] != self.d:
            raise ValueError(f"the bottleneck has width d={self.d}, but the input has shape {tuple(x.shape)}")

    def narrow(self, x, again=False):
        """(code, y, x) with code = encode(x), y = decode(code, like=x): the same in one operator, with one backward.

        The x that is returned, if `again`, is the one to go on with: its gradient then meets that of y in the operator.
        """
        if self.selection == "flat" or backend(x) == "reference":
            code = self.encode(x)
            return code, self.decode(code, like=x), x
        self.check_width(x)
        rows = self.sampled_tokens(x.numel() // self.d)
        y, indices, coefs, scores, same = narrow_features(x, *self.levels(), self.method, rows, again)
        if rows is not None:
            self.collect(x.reshape(-1, self.d), indices.view(-1, sum(self.active)), scores, rows)
        return Code(indices, coefs), y, same

    def levels(self):
        """Moments, generators, first features and active features of the levels, as the operators take them."""
        kept = self._buffers  # Module's own search for an attribute takes a good part of a token's time
        return kept["mean"], kept["var"], [kept[name] for name in self.words], self.lows[1:], self.active

    def search_levels(self, x):
        """The active features of every token and their z:
        of level 0, then of each level among the children of the one before."""
        rows = self.sampled_tokens(len(x))
        indices, z, scores = encode_features(x, *self.levels(), self.method, rows)
        if rows is not None:
            self.collect(x, indices, scores, rows)
        return indices, z

    @torch.no_grad()
    def collect(self, x, indices, scores, rows):
        """The sums of a training pass go to the moments: of level 0 those of all tokens, of the others those of the
        sampled ones, `rows`, with the scores (R, sum of P*D) of their candidates."""
        self.collect_basis(x.detach())
        sizes = [P * D for P, D in zip(self.active, self.fan_out)]
        parents = indices[rows].split(self.active, dim=1)
        for level, part in enumerate(scores.detach().split(sizes, dim=1), 1):
            collect_sums(part, parents[level - 1], self.get_buffer(f"generators_{level}"), self.sums)

    def collect_basis(self, x):
        z = (x.to(self.mean.dtype) - self.mean[: self.d]) * self.var[: self.d].rsqrt()  # (N, d)
        self.sums[: self.d] += torch.stack([z.new_full((self.d,), len(z)), z.sum(0), (z * z).sum(0)], 1)

    def search_all(self, x):
        """As if every feature above level 0 were a child of feature 0; then the best of those and of level 0."""
        K, low, rows, rstd = sum(self.active), self.d, self.sampled_tokens(len(x)), self.var.rsqrt()
        if rows is not None:
            self.collect_basis(x)
        basis = search_basis(x, self.mean[:low], rstd[:low], min(K, low))
        if self.m == low:
            return basis
        root = torch.zeros(len(x), 1, dtype=torch.int64, device=x.device)
        words = torch.arange(low, self.m, device=x.device)
        *others, = search_children(x, root, words, self.mean[low:], rstd[low:], low, min(K, self.m - low), self.method,
                                   rows)
        if rows is not None:
            collect_sums(others.pop(), root[rows], words, self.sums)
        indices, z = (torch.cat(parts, dim=1) for parts in zip(basis, others))
        best = magnitude(z).sort(dim=1, descending=True, stable=True).indices[:, :K]  # stable: ties to the lower index
        return indices.gather(1, best), z.gather(1, best)

    def decode(self, code, like=None):
        """sum of coefficient times dictionary row, (..., d); with `like`, an input x, scaled to its norm and type."""
        K = code.indices.shape[-1]
        flat = None if like is None else like.reshape(-1, self.d)
        y = parity_decode(code.indices.reshape(-1, K), code.coefs.reshape(-1, K), self.d, self.m, flat)
        return y.view(*code.indices.shape[:-1], self.d)

    def forward(self, x):
        return self.narrow(x)[1]

    def sampled_tokens(self, N):
        """Those of N tokens from which the sums of levels >= 1 are taken: evenly spaced; None in evaluation.

        The spacing is a power of two, so that it divides the batch alike however it is cut into passes, and the offset
        moves with every update.
        """
        if not (self.training and self.standardise):
            return None
        spacing = 1 << max(1, min(N, N * self.passes // self.samples)).bit_length() - 1
        return (self.updates * 0x9E3779B1 % spacing
                + torch.arange(0, N // spacing * spacing, spacing, device=self.mean.device))

    def _apply(self, fn, recurse=True):
        """Moments stay in float32 where the rest of a model is made bfloat16 or float16."""
        before = {name: getattr(self, name) for name in ("mean", "var", "sums")}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            if getattr(self, name).dtype in (torch.bfloat16, torch.float16):
                setattr(self, name, tensor.to(getattr(self, name).device))
        return self

    def _load_from_state_dict(self, *arguments):
        super()._load_from_state_dict(*arguments)
        self.sums.zero_()  # a checkpoint is the end of a step


@torch.no_grad()
def update_moments(model):
    """Once per optimiser step: move the running moments of every bottleneck in `model`
    toward those of the step's tokens.

    The sums of all layers and ranks are added in one all-reduce; they are each rank's own until then, so build
    DistributedDataParallel with forward_sync_buffers=False. A feature that was not seen stays, and so does one with a
    score that was not finite.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, DeepParityBottleneck) and layer.standardise]
    if not layers:
        return
    flat = torch.cat([layer.sums.flatten() for layer in layers])
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(flat)
    for layer, sums in zip(layers, flat.split([layer.sums.numel() for layer in layers])):
        count, total, squares = sums.view(-1, 3).unbind(1)
        shift = total / count  # batch mean and variance in units of the running ones; 0/0 where not seen
        spread = squares / count - shift * shift
        step = torch.where(torch.isfinite(shift) & torch.isfinite(spread), 1 - layer.decay, 0.0)
        layer.mean += step * torch.nan_to_num(shift) * layer.var.sqrt()
        layer.var.add_(step * torch.nan_to_num(spread - 1) * layer.var).clamp_(min=layer.floor)
        layer.updates += 1
        layer.sums.zero_()


def variance_loss(code, m, n_min=8):
    """-(mean over features active on at least n_min tokens of the variance of their coefficient); 0 if none are."""
    indices, coefs = code.indices.flatten(), code.coefs.flatten()
    count = torch.zeros(m, dtype=coefs.dtype, device=coefs.device).index_add(0, indices, torch.ones_like(coefs))
    mean = torch.zeros_like(count).index_add(0, indices, coefs) / count.clamp(min=1)
    var = torch.zeros_like(count).index_add(0, indices, (coefs - mean[indices]).square()) / count.clamp(min=1)
    often = count >= n_min
    return -(var * often).sum() / often.sum().clamp(min=1)


def reconstruction_loss(y, x):
    """Mean squared difference of the bottleneck's output and its input."""
    return F.mse_loss(y.float(), x.float())
