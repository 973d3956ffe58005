"""Sparse autoencoders, trained on the activations of a finished model: what parity features are compared with.

    z = (x - b_dec) W_enc^T + b_enc,    f = those of relu(z) that are active,    x_hat = f W_dec + b_dec

    code = sae.encode(x)        x (..., d)  ->  Code(indices, coefs), both (..., K); coefficient 0 is not active
    x_hat = sae.decode(code)

topk         the k largest of a token are active.
batchtopk    the k N largest of a batch of N tokens; afterwards those above a threshold, the running mean of the
             smallest that was kept.
matryoshka   batchtopk whose first m/32, 3m/32, 7m/32, 15m/32 features must each do without those after them.
jumprelu     those above a threshold that each feature learns, so that k are active on average; x is not centred.

With e = x - x_hat the loss is the mean of |e|^2 over tokens (of all prefixes, for matryoshka), and
  topk, batchtopk, matryoshka   1/32 of how badly the features that have not fired for long reconstruct e:
                                |e - f_dead W_dec|^2 / |e - mean e|^2, f_dead the d/2 largest of theirs;
  jumprelu                      (L0 / k - 1)^2, whose gradient, as that of f, reaches a threshold through the values
                                within half a bandwidth of it.
These are the losses of dictionary_learning 0.1.0, and tests/test_compare.py holds them to it.

Of N m scores some N k are active, and only these have a gradient. Scores (N, m) are made forward only; the decoder, and
all gradients, work on a list of the active entries. (Not while a jumprelu starts, when half of all are active.)
Letters: N tokens, d width, m features, E entries.
"""
import functools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from dpb import Code
from ops import search_basis
from ranks import all_reduce, count_ranks

VARIANTS = ("topk", "batchtopk", "jumprelu", "matryoshka")
GROUPS = (1 / 32, 1 / 16, 1 / 8, 1 / 4)  # of matryoshka's features; the rest are the last group
SCORES = 2 ** 23                         # of a part of the tokens, held at once while they are encoded: 32 MiB
AUXILIARY = 1 / 32                       # weight of the loss of dead features
BANDWIDTH = 0.001                        # of jumprelu, its first threshold too; for x with a mean |x|^2 of 1


# Sparse matrices and their gradients


class Entries:
    """Some entries of an (N, m) matrix: (rows[e], columns[e]), sorted by rows, (E,) each.

    Where they are more than one in sixteen, as when a jumprelu starts, products are faster with the whole matrix.
    """

    def __init__(self, rows, columns, N, m):
        self.rows, self.columns, self.shape = rows, columns, (N, m)
        self.starts = torch.searchsorted(rows, torch.arange(N, device=rows.device))
        self.many = len(rows) > N * m / 16

    @functools.cached_property
    def by_columns(self):
        """(order, rows in that order, where each column starts): the transpose, for gradients of weights."""
        order = self.columns.argsort(stable=True)
        every = torch.arange(self.shape[1], device=order.device)
        return order, self.rows[order], torch.searchsorted(self.columns[order], every)

    def select(self, mask):
        return Entries(self.rows[mask], self.columns[mask], *self.shape)

    def whole(self, values):
        """The matrix with zeros."""
        return values.new_zeros(self.shape).index_put_((self.rows, self.columns), values)

    def times(self, values, table):
        """The sparse matrix times table (m, d): (N, d)."""
        if self.many:
            return self.whole(values) @ table
        return F.embedding_bag(self.columns, table, self.starts, per_sample_weights=values, mode="sum")

    def transposed_times(self, values, table):
        """Its transpose times table (N, d): (m, d)."""
        if self.many:
            return self.whole(values).T @ table
        order, rows, starts = self.by_columns
        return F.embedding_bag(rows, table, starts, per_sample_weights=values[order], mode="sum")

    def dots(self, left, right):
        """<left[row], right[column]> of each entry: (E,)."""
        if self.many:
            return (left @ right.T)[self.rows, self.columns]
        return torch.ops.aten._embedding_bag_per_sample_weights_backward(
            left.contiguous(), right, self.columns, self.starts, self.rows, 0)


class Scores(torch.autograd.Function):
    """z at the entries, (E,), as given; its gradients to W, b and the centre of z = (x - centre) W^T + b."""

    @staticmethod
    def forward(ctx, values, x, W, b, centre, entries):
        ctx.save_for_backward(x, W)  # x is centred already
        ctx.entries = entries
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        x, W = ctx.saved_tensors
        to_b = torch.zeros(len(W), dtype=grad.dtype, device=grad.device).index_add_(0, ctx.entries.columns, grad)
        to_centre = -(to_b @ W) if ctx.needs_input_grad[4] else None
        return None, None, ctx.entries.transposed_times(grad, x), to_b, to_centre, None


class Decoded(torch.autograd.Function):
    """The sparse matrix of values (E,) times W (m, d): (N, d)."""

    @staticmethod
    def forward(ctx, values, W, entries):
        ctx.save_for_backward(values, W)
        ctx.entries = entries
        return entries.times(values, W)

    @staticmethod
    def backward(ctx, grad):
        values, W = ctx.saved_tensors
        return ctx.entries.dots(grad, W), ctx.entries.transposed_times(values, grad.contiguous()), None


class Jump(torch.autograd.Function):
    """z where it is above its threshold, else 0; with `step`, 1 there. Elementwise.

    The threshold's gradient is -height / bandwidth wherever |z - threshold| < bandwidth / 2, height that of the jump.
    """

    @staticmethod
    def forward(ctx, z, threshold, bandwidth, step):
        ctx.save_for_backward(z, threshold)
        ctx.bandwidth, ctx.step = bandwidth, step
        return (z > threshold).to(z.dtype) * (1 if step else z)

    @staticmethod
    def backward(ctx, grad):
        z, threshold = ctx.saved_tensors
        near = (z - threshold).abs() < ctx.bandwidth / 2
        height = 1 if ctx.step else threshold
        return None if ctx.step else grad * (z > threshold), -height / ctx.bandwidth * near * grad, None, None


# Which entries are active


def top_rows(f, k):
    """The k largest of each row of f (N, m) >= 0, the largest first: (values, columns), (N, k)."""
    if f.device.type != "cpu" or k > 256:
        return f.topk(k)
    columns, values = search_basis(f, f.new_zeros(f.shape[1]), f.new_ones(f.shape[1]), k)  # in C: a fifth of the time
    return values, columns


def largest(z, count):
    """The `count` largest positive entries of the z (N, m) of all ranks, those of this rank: (Entries, values, least).

    Ties with the smallest stay, all of them. Exact: a guess from a sample only says which entries are looked at.
    """
    flat = z.flatten()
    sample = flat[:: flat.numel() // 2 ** 16 | 1]  # an odd step visits all columns
    guess = sample.topk(min(len(sample), 8 + int(1.2 * count / count_ranks() / flat.numel() * len(sample)))).values[-1]
    guess = all_reduce(guess, dist.ReduceOp.MIN).clamp(min=0)
    while True:
        found = (flat > guess).nonzero()[:, 0]
        if guess == 0 or all_reduce(torch.tensor(len(found), device=z.device)) >= count:
            break
        guess = torch.where(guess > 1e-6, guess / 2, 0)
    values = flat[found]
    least = kth_largest(values, count)
    kept = values >= least
    found, values = found[kept], values[kept]
    rows = found // z.shape[1]
    return Entries(rows, found - rows * z.shape[1], *z.shape), values, least


def kth_largest(values, count):
    """The count-th largest of the positive float32 values of all ranks; 0 if there are fewer."""
    if count_ranks() == 1:
        return values.kthvalue(len(values) - count + 1).values if len(values) >= count else values.new_zeros(())
    keys, low, high = values.view(torch.int32), 0, 2 ** 31 - 1  # positive floats are ordered as their bits are
    while low < high:  # the largest key that `count` of them reach
        middle = (low + high + 1) // 2
        enough = all_reduce((keys >= middle).sum()) >= count
        low, high = (middle, high) if enough else (low, middle - 1)
    return torch.tensor(low, dtype=torch.int32, device=values.device).view(torch.float32)


class SAE(nn.Module):
    """
    variant: one of VARIANTS.  d: width of x.  m: features.  k: how many are active (jumprelu: on average).
    groups: sizes of matryoshka's groups; by default GROUPS.
    centred: whether b_dec is subtracted before encoding; by default but for jumprelu.
    """

    def __init__(self, variant, d, m, k, groups=None, centred=None, seed=0):
        super().__init__()
        if variant not in VARIANTS:
            raise ValueError(f"variant={variant!r} must be one of {', '.join(VARIANTS)}")
        if not 1 <= k <= m:
            raise ValueError(f"k={k} features cannot be active out of m={m}: choose k from 1 to {m}")
        self.variant, self.d, self.m, self.k = variant, d, m, k
        self.centred = variant != "jumprelu" if centred is None else centred
        if variant == "matryoshka":
            sizes = [max(1, int(part * m)) for part in GROUPS]
            self.groups = tuple(groups) if groups else (*sizes, m - sum(sizes))
            if sum(self.groups) != m or min(self.groups) < 1:
                raise ValueError(f"groups={self.groups} must be positive and add up to m={m}")
        rng = torch.Generator().manual_seed(seed)
        self.W_dec = nn.Parameter(F.normalize(torch.randn(m, d, generator=rng), dim=1))
        self.W_enc = nn.Parameter(self.W_dec.detach().clone())
        self.b_enc, self.b_dec = nn.Parameter(torch.zeros(m)), nn.Parameter(torch.zeros(d))
        if variant == "jumprelu":
            self.threshold = nn.Parameter(torch.full((m,), BANDWIDTH))
        elif variant != "topk":
            self.register_buffer("threshold", torch.tensor(-1.0))  # not known yet
        self.register_buffer("unfired", torch.zeros(m, dtype=torch.int64), persistent=False)  # tokens since it fired

    def extra_repr(self):
        return f"{self.variant}, d={self.d}, m={self.m}, k={self.k}"

    def scores(self, x):
        """z, (..., d) -> (..., m)."""
        return F.linear(x - self.b_dec if self.centred else x, self.W_enc, self.b_enc)

    def encode(self, x):
        """The Code of x as the finished SAE has it; the largest coefficient comes first."""
        if x.shape[-1] != self.d:
            raise ValueError(f"the SAE has width d={self.d}, but the input has shape {tuple(x.shape)}")
        flat = x.reshape(-1, self.d).to(self.W_enc.dtype)
        found = [self.encode_part(part) for part in flat.split(max(1, SCORES // self.m))]
        K = max(indices.shape[1] for indices, _ in found)
        indices, coefs = (torch.cat([F.pad(part, (0, K - part.shape[1])) for part in parts]) for parts in zip(*found))
        return Code(indices.view(*x.shape[:-1], K), coefs.view(*x.shape[:-1], K))

    def encode_part(self, x):
        """(indices, coefs), (N, K) both, with K as small as these tokens allow."""
        f = self.scores(x).relu()
        K = self.k
        if self.variant != "topk":
            f = f * (f > self.threshold)
            K = max(1, int((f > 0).sum(1).amax())) if len(f) else 1
        indices = top_rows(f.detach(), K)[1]
        return indices, f.gather(1, indices)

    def decode(self, code, like=None):
        """x_hat, (..., d). like: not used; a parity bottleneck gives its output the norm of this."""
        K = code.indices.shape[-1]
        x = F.embedding_bag(code.indices.reshape(-1, K), self.W_dec, mode="sum",
                            per_sample_weights=code.coefs.reshape(-1, K).to(self.W_dec.dtype))
        return (x + self.b_dec).view(*code.indices.shape[:-1], self.d)

    # Training

    def loss(self, x, dead_after=math.inf, penalty=1.0, beta=0.999, step_on="f", divided=False):
        """(loss, error, L0) of a batch (N, d) of this rank: their means over its tokens; error is that of x_hat.

        dead_after: tokens without firing that make a feature dead.  penalty: of jumprelu, its weight in the warm-up.
        beta: decay of the running threshold.  step_on: jumprelu's L0 has its gradient at "f", as dictionary_learning
        has it, or at "z", as SAELens.  divided: matryoshka's loss by the square of the number of prefixes, likewise.
        """
        with torch.no_grad():
            z = self.scores(x)  # (N, m)
            entries, values = self.pick(z, beta)
        given = x - self.b_dec.detach() if self.centred else x

        def attached(values, entries):
            centre = self.b_dec if self.centred else torch.zeros_like(self.b_dec)
            return Scores.apply(values, given, self.W_enc, self.b_enc, centre, entries)

        f = attached(values, entries)
        if self.variant == "jumprelu":
            own = self.threshold.index_select(0, entries.columns)  # indexing has a gradient that depends on threads
            z_active, f = f, Jump.apply(f, own, BANDWIDTH, False)
        else:
            f = f.relu()
        error, total = self.errors(x, f, entries)
        if divided:
            total = total / len(self.groups) ** 2
        if self.variant == "jumprelu":
            l0 = self.mean_active(f.detach() if step_on == "f" else z_active, own, entries, step_on)
            total = total + penalty * (l0 / self.k - 1).square()
        on = f.detach() > 0
        self.count_fired(entries.columns[on], len(x))
        if self.variant != "jumprelu" and dead_after < math.inf:
            total = total + AUXILIARY * self.auxiliary(z, error.detach(), attached, dead_after)
        return total, error.detach().square().sum(1).mean(), on.sum() / len(x)

    def pick(self, z, beta):
        """The entries of z (N, m) that may have a gradient, and z there; the running threshold moves."""
        N = len(z)
        if self.variant == "topk":
            values, columns = top_rows(z.relu(), self.k)
            rows = torch.arange(N, device=z.device).repeat_interleave(self.k)
            return Entries(rows, columns.flatten(), *z.shape), values.flatten()
        if self.variant == "jumprelu":
            rows, columns = (z > self.threshold - BANDWIDTH / 2).nonzero().unbind(1)
            return Entries(rows, columns, *z.shape), z[rows, columns]
        entries, values, least = largest(z, self.k * N * count_ranks())
        if least == 0:  # fewer than that are positive: the smallest of them
            least = all_reduce(values.amin() if len(values) else z.new_tensor(math.inf), dist.ReduceOp.MIN)
        if torch.isfinite(least):
            self.threshold.copy_(torch.where(self.threshold < 0, least, beta * self.threshold + (1 - beta) * least))
        return entries, values

    def errors(self, x, f, entries):
        """(e, the sum over prefixes of the mean of |e|^2); the prefix of all but matryoshka is the whole."""
        groups, x_hat, total, start = getattr(self, "groups", (self.m,)), self.b_dec, 0, 0
        for size in groups:
            own = (entries.columns >= start) & (entries.columns < start + size) if len(groups) > 1 else None
            part = (f, entries) if own is None else (f[own], entries.select(own))
            x_hat, start = x_hat + Decoded.apply(part[0], self.W_dec, part[1]), start + size
            total = total + (x - x_hat).square().sum(1).mean()
        return x - x_hat, total

    def mean_active(self, values, own, entries, step_on):
        """jumprelu's L0 over the tokens of all ranks, with this rank's gradient."""
        l0 = Jump.apply(values, own, BANDWIDTH, True).sum()
        if step_on == "f":  # f is 0 in all other entries, which is near a threshold below half a bandwidth
            others = entries.shape[0] - torch.bincount(entries.columns, minlength=self.m)
            l0 = l0 + (Jump.apply(torch.zeros_like(self.threshold), self.threshold, BANDWIDTH, True) * others).sum()
        l0 = l0 / entries.shape[0]
        return l0 + all_reduce(l0.detach().clone()) / count_ranks() - l0.detach()

    def count_fired(self, columns, N):
        fired = torch.zeros(self.m, dtype=torch.int32, device=columns.device)
        fired[columns] = 1
        self.unfired += N * count_ranks()
        self.unfired[all_reduce(fired, dist.ReduceOp.MAX) > 0] = 0

    def auxiliary(self, z, error, attached, dead_after):
        dead = (self.unfired >= dead_after).nonzero()[:, 0]
        if not len(dead):
            return 0.0
        N, k = len(z), min(max(1, self.d // 2), len(dead))
        with torch.no_grad():
            values, columns = top_rows(z[:, dead].relu(), k)
            rows = torch.arange(N, device=z.device).repeat_interleave(k)
            entries = Entries(rows, dead[columns.flatten()], *z.shape)
            mean = all_reduce(error.mean(0)) / count_ranks()
            spread = all_reduce((error - mean).square().sum(1).mean()) / count_ranks()
        f = attached(values.flatten(), entries).relu()
        return ((error - Decoded.apply(f, self.W_dec, entries)).square().sum(1).mean() / spread).nan_to_num(0.0)

    @torch.no_grad()
    def constrain_gradient(self, most=1.0):
        """What would only change the length of decoder rows goes; then a norm of at most `most`."""
        grad, W = self.W_dec.grad, self.W_dec
        grad -= (grad * W).sum(1, keepdim=True) * W
        nn.utils.clip_grad_norm_(self.parameters(), most)

    @torch.no_grad()
    def constrain_weights(self):
        self.W_dec /= self.W_dec.norm(dim=1, keepdim=True) + torch.finfo(self.W_dec.dtype).eps

    @torch.no_grad()
    def scale(self, factor):
        """The SAE of activations `factor` times as large, with codes as much larger."""
        self.b_enc *= factor
        self.b_dec *= factor
        if self.variant != "topk":
            self.threshold *= factor


@torch.no_grad()
def geometric_median(x, most=100, tolerance=1e-5):
    """The point with the least sum of distances to the rows of x (N, d) of all ranks, by Weiszfeld's iteration."""
    def mean(weights):
        return all_reduce((weights[:, None] * x).sum(0)) / all_reduce(weights.sum())
    median = mean(torch.ones_like(x[:, 0]))
    for _ in range(most):
        before, median = median, mean(1 / (x - median).norm(dim=1).clamp(min=1e-12))
        if (median - before).norm() < tolerance:
            break
    return median
