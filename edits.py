"""The few edits of a sparse code that bring it nearest to another: a greedy search that decodes nothing.

    space = make_space(part, *same_width(source, target), union=False)
    for weights in search(space, 8): ...                   after 0, 1, ... 8 edits
    code = code_of(space, weights)

An edit takes a feature of the source's code away (k), or brings one of the target's (j), or both. What is decoded is a
sum of features, so what an edit does to a distance follows from the inner products of the 2K features, made once.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dpb import Code


class Space(NamedTuple):
    """What edits are made of, for n pairs at one layer: the features of the source's code, then of the target's. In
    float64: what one edit changes of a cosine is less than float32 can tell."""
    source: Code          # (n, K) each
    target: Code
    rows: torch.Tensor    # (n, 2K, d) the vectors of both
    gram: torch.Tensor    # (n, 2K, 2K) of the rows
    pull: torch.Tensor    # (n, 2K) products of the rows with what is to be reached
    scaled: bool          # whether what is decoded gets a given norm, so that only its direction counts
    allowed: torch.Tensor  # (n, K + 1, K + 1): may feature k of the source go, j of the target come? Number K is none.

    def start(self):
        """Weights of the rows, (n, 2K)."""
        return torch.cat([self.source.coefs, torch.zeros_like(self.target.coefs)], 1).double()

    def end(self):
        return torch.cat([torch.zeros_like(self.source.coefs), self.target.coefs], 1).double()


def same_width(*codes):
    """Codes with as many slots as the widest: what is added is not active."""
    width = max(code.indices.shape[1] for code in codes)
    return [Code(*(F.pad(part, (0, width - part.shape[1])) for part in code)) for code in codes]


def make_space(part, source, target, union, change=None):
    """part: encode, decode of a layer.  source, target: Codes (n, K).  change: (n, d), what edits are to add up to;
    None: they are to give the direction of the target's code, decoded."""
    indices = torch.cat([source.indices, target.indices], 1)[..., None]
    ones = torch.ones_like(indices, dtype=torch.float32)
    rows = (part.decode(Code(indices, ones)) - part.decode(Code(indices, 0 * ones))).double()
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
    pull = gram @ space.end()[..., None] if change is None else rows @ change[..., None].double()
    return space._replace(pull=pull[..., 0])


def search(space, most, rng=None):
    """Yield weights (n, 2K) after 0, 1, ... `most` edits: the best at each, or with rng any. A pair that no edit brings
    nearer stays. Nothing is decoded: what an edit does follows from the products of the rows."""
    K = space.source.indices.shape[1]
    weights, allowed = space.start(), space.allowed.clone()
    n, rows = len(weights), torch.arange(len(weights), device=weights.device)
    own = F.pad(space.source.coefs.double(), (0, 1))   # (n, K + 1): what goes
    come = F.pad(space.target.coefs.double(), (0, 1))  # what comes
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
            before = torch.zeros(n, device=weights.device, dtype=weights.dtype)
            value = 2 * linear(space.pull - now) - quadratic
        value = value.masked_fill(~allowed, -torch.inf)
        if rng is None:
            best, at = value.flatten(1).max(1)
            moves = best > before + 1e-12 * before.abs()
        else:
            drawn = torch.rand(allowed.shape, generator=rng).to(value.device)
            at = torch.where(allowed, drawn, -1.0).flatten(1).argmax(1)
            moves = allowed.flatten(1).any(1)
        k, j = at // (K + 1), at % (K + 1)
        weights = weights.clone()
        gone, came = moves & (k < K), moves & (j < K)
        weights[rows[gone], k[gone]] = 0
        weights[rows[came], K + j[came]] = come[rows[came], j[came]]
        allowed[rows[gone], k[gone]] = False
        allowed[rows[came], :, j[came]] = False
        yield weights


def code_of(space, weights):
    """The edited Code; where nothing or everything is edited, the source's or the target's itself, with their slots."""
    for code, weighted in ((space.source, space.start()), (space.target, space.end())):
        if torch.equal(weights, weighted):
            return code
    return Code(torch.cat([space.source.indices, space.target.indices], 1), weights.float())


def distance(part, space, weights, x, goal):
    """What is left of the way to what the target's next computation reads."""
    if space.scaled:
        y, start, end = (part.decode(code, like=like) for code, like in (
            (code_of(space, weights), x), (space.source, x), (space.target, goal)))
        return (y - end).norm(dim=1) / (start - end).norm(dim=1).clamp(min=1e-12)
    change = ((weights - space.start())[:, None] @ space.rows)[:, 0]
    return (goal - x - change).norm(dim=1) / (goal - x).norm(dim=1).clamp(min=1e-12)
