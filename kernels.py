"""The operations of the bottleneck: each as a plain torch reference, and beside it as a Triton kernel with its launch.

    decode    y[n]    = sum_k coefs[n, k] phi_{indices[n, k]}                                   (N, K) -> (N, d)
    dot       s[n, k] = <phi_{indices[n, k]}, x[n]>                                             (N, d) -> (N, K)
    score     z of every child i ^ g of every parent i: (<phi_{i ^ g}, x> - mean) / std         (N, d) -> (N, P*D)
    select    the k distinct children with the largest |z|                                      (N, P*D) -> (N, k)

phi_i is a row of the dictionary of kloosterman.py: a sign vector over sqrt(d), or e_i below d. Decode and dot are each
other's gradient. The references are the specification: every other path is tested against them. ops.py makes
operators of all this and picks the path; kernels_cpu.py is the same in C.

Letters: N tokens, d width, K features per token, P parents, D generators, m = features in all, and a level's
features are low .. low + len(mean) - 1.

    python kernels.py        compiles every kernel for real GPUs, without one, and prints what each needs (aot.py)
"""
from __future__ import annotations  # `tl.constexpr` stays a word where Triton is missing

import contextlib
import functools
import math
import weakref

import numpy as np
import torch
import torch.nn.functional as F

import kloosterman
from kloosterman import packing, seed_matrix

try:  # Linux only; everything but the kernels themselves works without it
    import triton
    import triton.language as tl
    from triton import jit
except ImportError:
    triton = None

    def jit(function=None, **options):
        """In place of Triton's, for reading only: without it no kernel is ever launched."""
        return function or jit


# Signs: rows of them for the references, bits of them for the kernels


@functools.cache
def seed(d, device):
    """The seed matrix M as a tensor: d words of 2t bits."""
    return torch.from_numpy(seed_matrix(d).astype(np.int64)).to(device)


def sign_rows(indices, d, dtype=torch.float32):
    """sqrt(d) * h_i for every index: (...) -> (..., d)."""
    bits = indices.long()[..., None] & seed(d, indices.device)
    for shift in (16, 8, 4, 2, 1):
        bits = bits ^ bits >> shift
    return (1 - 2 * (bits & 1)).to(dtype)


@functools.cache
def packed_signs(d, m, device):
    return torch.from_numpy(kloosterman.packed_signs(d, m).view(np.int32)).to(device)


@jit
def sign_words(packed, i, w, d: tl.constexpr, W: tl.constexpr):
    """The packed signs of h_i, words w: H[u1] ^ s[u2]. Shapes of i and w broadcast."""
    i = i.to(tl.uint32)
    return tl.load(packed + w + i % d * W) ^ tl.load(packed + d * W + w + i // d * W)

# What a launch is: the kernel, the grid, its arguments. Made apart from running,
# so that aot.py can compile it for absent GPUs.


@functools.cache
def arch_of(device):
    """What a launch is made for: 90 for an H100, also without a GPU, in the interpreter; "hip" for AMD."""
    if torch.version.hip:
        return "hip"
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor


def run(launch):
    kernel, grid, arguments = launch
    device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
    if 0 not in grid:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            kernel[grid](**arguments)

# Decode


def decode_reference(indices, coefs, d):
    h = sign_rows(indices, d, coefs.dtype) / math.sqrt(d)  # (N, K, d)
    y = torch.einsum("nkd,nk->nd", h, coefs.masked_fill(indices < d, 0))
    return y.scatter_add(1, indices.clamp(max=d - 1), coefs.masked_fill(indices >= d, 0))


class Rescale(torch.autograd.Function):
    """y with the norm and the type of x, row by row: y |x| / |y|; zero where either is zero.

    With u = y / |y|, the gradients of g are |x| / |y| (g - u <u, g>) to y and <u, g> x / |x| to x.
    Only y, x and the norms are kept for them. Norms are taken in float64, where no float32 overflows or vanishes.
    """

    @staticmethod
    def forward(ctx, y, x):
        sizes = [torch.linalg.vector_norm(v, dim=-1, keepdim=True, dtype=torch.float64) for v in (y, x)]  # (..., 1)
        ctx.save_for_backward(y, x, *sizes)
        return (y * Rescale.ratio(*reversed(sizes), y)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        y, x, of_y, of_x = ctx.saved_tensors
        grad, one = grad.to(y.dtype), torch.ones_like(of_y)
        u = y * Rescale.ratio(one, of_y, y)
        along = (u * grad).sum(-1, keepdim=True)
        return (torch.addcmul(grad, u, -along).mul_(Rescale.ratio(of_x, of_y, y)),
                (x * (along * Rescale.ratio(one, of_x, y))).to(x.dtype))

    @staticmethod
    def ratio(above, below, like):
        """above / below, or above / 1 where below is zero."""
        return (above / torch.where(below == 0, 1, below)).to(like.dtype)


rescale = Rescale.apply


@jit
def hashed(indices, coefs, k, K, m, d: tl.constexpr):
    """Indices and coefficients k of a token, as decode adds up sign vectors:
    nothing for a basis vector, or behind the last; NaN for a wrong index."""
    i = tl.load(indices + k, mask=k < K, other=0)
    known = i.to(tl.uint64) < m
    c = tl.load(coefs + k, mask=k < K, other=0.0)
    i = tl.where(known, i, d).to(tl.int32)  # before it is compared again: in 64 bits that takes twice as much
    return i, tl.where(known, tl.where(i < d, 0.0, c), float("nan"))


@jit
def taken(values, k):
    """Element k, a number, of a list that lies in the lanes of a warp: to all of them, by a shuffle."""
    return tl.gather(values, k + tl.zeros([1], tl.int32), 0)[:, None]


@jit
def flip(c, lane, bit: tl.constexpr):
    """c, negative in the lanes that have this bit set."""
    return (c.to(tl.int32, bitcast=True) ^ ((lane << (31 - bit)) & -2147483648)).to(tl.float32, bitcast=True)


@jit
def interleave(a, b, mask: tl.constexpr, by: tl.constexpr):
    """Fields of a (mask, and those `by` bits higher) in turn with fields of b: first the lower, then the higher."""
    swapped = ((a >> by) ^ b) & mask
    return a ^ (swapped << by), b ^ swapped


@jit
def scaled(row):
    """row / 2**e with its largest |element| near 1, the norm of that, and 2**e: no square overflows or vanishes."""
    power = tl.max(tl.abs(row)).to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.minimum(tl.maximum(power, 1 << 23), 253 << 23)
    row *= ((254 << 23) - power).to(tl.float32, bitcast=True)
    return row, tl.sqrt(tl.sum(row * row)), power.to(tl.float32, bitcast=True)


@jit
def nonzero(size):
    return tl.where(size == 0.0, 1.0, size)


@jit(do_not_specialize=["K", "m"])
def decode_kernel(indices, coefs, packed, y, x, out, sizes, plus, K, m, scale,
                  d: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr, SLOTS: tl.constexpr, ORDER: tl.constexpr):
    """y[n] = sum_k coefs[n, k] phi_{indices[n, k]}: one token a program, the row kept in registers.

    Four features at a time: lane v of the table has their sum with the signs of the bits of v.
    Four bits, one of each feature's signs, say in which lane a coordinate finds what it has to add:
    one addition and a shuffle for four features. Indices and coefficients are read and checked by 32, one to a lane.

    Sign vectors first, basis vectors last: a small term added to a large one would lose its last bits. A basis vector
    touches one coordinate, so it is added where the row already lies in memory; only in float32 (SLOTS > 0), as
    adding to bfloat16 there would round twice. SLOTS is at least K. ORDER is what these additions need so that what
    is read after them has them: on NVIDIA the barrier sees to it, while one wave of AMD's has no barrier.

    out, if given, is y in another type, with `plus` added to it; if x is given, y |x| / |y|, and sizes[n] = |y|, |x|.
    """
    n = tl.program_id(0).to(tl.int64)
    indices += n * K
    coefs += n * K
    y += n * d
    q = 4 * tl.arange(0, max(1, BITS // 4))[:, None]
    # One at a time, so that a thread has the signs of its own y.
    w = tl.max_contiguous(tl.arange(0, W)[None, :], [1, 1])
    lane = tl.arange(0, 32)[None, :]
    row0 = tl.zeros([max(1, BITS // 4), W], tl.float32)  # coordinates q*W + w
    row1 = row0
    row2 = row0
    row3 = row0
    for first in range(0, K, 32):
        i, c = hashed(indices, coefs, first + tl.arange(0, 32), K, m, d)
        start = tl.min(tl.where(i < d, 32, tl.arange(0, 32)), 0) // 4 * 4  # a search lists basis vectors first
        for k in range(start, tl.minimum(K - first, 32), 4):
            i0, i1, i2, i3 = taken(i, k), taken(i, k + 1), taken(i, k + 2), taken(i, k + 3)
            table = ((flip(taken(c, k), lane, 0) + flip(taken(c, k + 1), lane, 1))
                     + (flip(taken(c, k + 2), lane, 2) + flip(taken(c, k + 3), lane, 3)))
            table = tl.broadcast_to(table, [max(1, BITS // 4), 32])
            even, odd = interleave(sign_words(packed, i0, w, d, W), sign_words(packed, i1, w, d, W), 0x55555555, 1)
            even2, odd2 = interleave(sign_words(packed, i2, w, d, W), sign_words(packed, i3, w, d, W), 0x55555555, 1)
            bits0, bits2 = interleave(even, even2, 0x33333333, 2)
            bits1, bits3 = interleave(odd, odd2, 0x33333333, 2)
            # Bit 4 is the next coordinate's: both halves of the table are alike.
            row0 += tl.gather(table, (bits0.to(tl.uint32) >> q) & 31, 1)
            row1 += tl.gather(table, (bits1.to(tl.uint32) >> q) & 31, 1)
            row2 += tl.gather(table, (bits2.to(tl.uint32) >> q) & 31, 1)
            row3 += tl.gather(table, (bits3.to(tl.uint32) >> q) & 31, 1)
    at = tl.max_contiguous(q * W + w, [1, 1])
    tl.store(y + at, (row0 * scale).to(y.dtype.element_ty), mask=at < d)
    tl.store(y + at + W, (row1 * scale).to(y.dtype.element_ty), mask=at + W < d)
    tl.store(y + at + 2 * W, (row2 * scale).to(y.dtype.element_ty), mask=at + 2 * W < d)
    tl.store(y + at + 3 * W, (row3 * scale).to(y.dtype.element_ty), mask=at + 3 * W < d)
    if SLOTS:
        tl.debug_barrier()
        for turn in tl.static_range((SLOTS + 255) // 256):
            slot = turn * 256 + tl.arange(0, min(SLOTS, 256))
            to = tl.load(indices + slot, mask=slot < K, other=d)
            basis = (to >= 0) & (to < d)
            tl.atomic_add(y + to, tl.load(coefs + slot, mask=basis), mask=basis, sem=ORDER)
    if out is not None:
        tl.debug_barrier()  # the additions are other threads'
        c = tl.arange(0, d)
        row = tl.load(y + c)
        if x is not None:
            row, of_y, up_y = scaled(row)
            _, of_x, up_x = scaled(tl.load(x + n * d + c).to(tl.float32))
            row = row * (of_x / nonzero(of_y)) * up_x
            tl.store(sizes + 2 * n, of_y * up_y)
            tl.store(sizes + 2 * n + 1, of_x * up_x)
        if plus is not None:
            row += tl.load(plus + n * d + c).to(tl.float32)
        tl.store(out + n * d + c, row.to(out.dtype.element_ty))


def decode_launch(indices, coefs, y, m, scale, out=None, x=None, sizes=None, plus=None, arch=None):
    d, arch = y.shape[1], arch or arch_of(y.device)
    bits, W = packing(d)
    assert all(tensor is None or tensor.is_contiguous() for tensor in (indices, coefs, y, out, x, plus))
    return decode_kernel, (len(indices),), dict(
        indices=indices, coefs=coefs, packed=packed_signs(d, m, y.device), y=y, x=x, out=out, sizes=sizes,
        plus=plus, K=indices.shape[1], m=m, scale=scale, d=d, BITS=bits, W=W,
        num_warps=min(4 if arch == "hip" else 8, max(1, d // 2048)),  # 8 of AMD's do not compile
        SLOTS=triton.next_power_of_2(indices.shape[1]) if y.dtype == torch.float32 else 0,
        ORDER="acq_rel" if arch == "hip" else "relaxed")


def decode_triton(indices, coefs, d, m, dtype=torch.float32, plus=None):
    """In the type asked for, or, of that type, added to `plus`."""
    y = coefs.new_empty(len(indices), d)
    out = None if dtype == y.dtype and plus is None else torch.empty_like(y, dtype=dtype)
    run(decode_launch(indices, coefs, y, m, d ** -0.5, out, plus=plus))
    return y if out is None else out


def decode_like_triton(indices, coefs, x, m):
    """y |x| / |y| in the type of x, with y = decode(indices, coefs);
    and for the gradient y (N, d) and |y|, |x| (N, 2)."""
    y, out = torch.empty_like(x, dtype=torch.float32), torch.empty_like(x)
    sizes = torch.empty(len(x), 2, device=x.device)
    run(decode_launch(indices, coefs, y, m, x.shape[1] ** -0.5, out, x, sizes))
    return out, y, sizes

# Dot


def dot_reference(indices, x):
    d = x.shape[1]
    h = sign_rows(indices, d, x.dtype) / math.sqrt(d)  # (N, K, d)
    return torch.where(indices < d, x.gather(1, indices.clamp(max=d - 1)), torch.einsum("nkd,nd->nk", h, x))


@jit
def quarters(row, at, d: tl.constexpr, W: tl.constexpr):
    """Elements at, at + W, at + 2 W and at + 3 W of a row; zeros behind its end."""
    return (tl.load(row + at, mask=at < d, other=0.0).to(tl.float32),
            tl.load(row + at + W, mask=at + W < d, other=0.0).to(tl.float32),
            tl.load(row + at + 2 * W, mask=at + 2 * W < d, other=0.0).to(tl.float32),
            tl.load(row + at + 3 * W, mask=at + 3 * W < d, other=0.0).to(tl.float32))


@jit
def plus_minus(sums, term):
    """sums + term and sums - term, along a new last axis."""
    return tl.join(sums + term, sums - term)


@jit
def add_and_scale(s, plus, scales, k, mask):
    if plus is not None:
        s = tl.load(plus + k, mask=mask, other=0.0) + s
    if scales is not None:
        s *= tl.load(scales + k, mask=mask, other=0.0)
    return s


@jit(do_not_specialize=["K", "m"])
def dot_kernel(indices, g, packed, out, y, x, sizes, grad, plus, scales, K, m, scale,
               d: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr, SLOTS: tl.constexpr):
    """out[n, k] = <phi_{indices[n, k]}, g[n]>: one token a program.

    Four coordinates at a time: a table has their sum with any signs, 16 entries, one to a lane, two tables side by
    side. A feature, one to a lane too, looks its four signs up: one addition and a shuffle for four coordinates of 32
    features. The tables of WORDS words of signs are made once for all features and kept in registers.

    Basis vectors, which a search lists first, are looked up apart; one that comes later takes a lane, for nothing.
    SLOTS is at least K.

    If y, x and their sizes are given, g is the gradient of y |x| / |y|: with u = y / |y| its gradient
    |x| / |y| (g - u <u, g>) to y takes the place of g, and grad[n] = <u, g> x / |x| is that to x.

    If plus is given, it is added to out; then, if scales are, out is multiplied by them.
    """
    n = tl.program_id(0).to(tl.int64)
    indices += n * K
    out += n * K
    if plus is not None:
        plus += n * K
    if scales is not None:
        scales += n * K
    g += n * d
    w = tl.arange(0, WORDS)[None, :]
    # Words by eights, groups of four bits, words: warps share the first, so that a table stays in its warp.
    at = (8 * tl.arange(0, WORDS // 8)[:, None, None] + 4 * W * tl.arange(0, 8)[None, :, None]
          + tl.arange(0, 8)[None, None, :])
    ratio = 1.0
    if y is not None:
        y += n * d
        of_y = nonzero(tl.load(sizes + 2 * n))
        of_x = tl.load(sizes + 2 * n + 1)
        ratio = of_x / of_y
        along = 0.0
        for start in tl.static_range(0, W, WORDS):
            g0, g1, g2, g3 = quarters(g, start + at, d, W)
            u0, u1, u2, u3 = quarters(y, start + at, d, W)
            u0, u1, u2, u3 = u0 * (1.0 / of_y), u1 * (1.0 / of_y), u2 * (1.0 / of_y), u3 * (1.0 / of_y)
            along += tl.sum((u0 * g0 + u1 * g1) + (u2 * g2 + u3 * g3))
        c = tl.arange(0, d)
        to_x = tl.load(x + n * d + c).to(tl.float32) * (along / nonzero(of_x))
        tl.store(grad + n * d + c, to_x.to(grad.dtype.element_ty))
    first = K
    for turn in tl.static_range((SLOTS + 255) // 256):
        slot = turn * 256 + tl.arange(0, min(SLOTS, 256))
        i = tl.load(indices + slot, mask=slot < K, other=0)
        basis = (i >= 0) & (i < d)
        first = tl.minimum(first, tl.min(tl.where(basis, K, slot), 0))
        s = tl.load(g + i, mask=basis, other=0.0).to(tl.float32)
        if y is not None:
            s -= tl.load(y + i, mask=basis, other=0.0) * (1.0 / of_y) * along
        s = add_and_scale(s * ratio, plus, scales, slot, basis & (slot < K))
        tl.store(out + slot, s, mask=basis & (slot < K))
    byte = 8 * tl.arange(0, 4)[None, None, :]
    for start in tl.static_range(0, W, WORDS):
        if (W > WORDS) or (y is None):
            g0, g1, g2, g3 = quarters(g, start + at, d, W)
        if y is not None:
            if W > WORDS:
                u0, u1, u2, u3 = quarters(y, start + at, d, W)
                u0, u1, u2, u3 = u0 * (1.0 / of_y), u1 * (1.0 / of_y), u2 * (1.0 / of_y), u3 * (1.0 / of_y)
            g0, g1, g2, g3 = g0 - u0 * along, g1 - u1 * along, g2 - u2 * along, g3 - u3 * along
        table = plus_minus(tl.join(g0, -g0), g1[:, :, :, None])  # a new axis for each sign
        table = plus_minus(plus_minus(table, g2[:, :, :, None, None]), g3[:, :, :, None, None, None])
        # Words; the two groups of a byte with their signs, which go to lanes; bytes.
        table = table.reshape(WORDS // 8, 4, 2, 8, 2, 2, 2, 2).permute(0, 3, 2, 7, 6, 5, 4, 1).reshape(WORDS, 32, 4)
        if start > 0:
            tl.debug_barrier()  # sums so far are read by other threads than wrote them
        for k in range(first, K, 32):
            to = k + tl.arange(0, 32)
            feature = tl.load(indices + to, mask=to < K, other=0)
            known = feature.to(tl.uint64) < m
            words = sign_words(packed, tl.where(known, feature, d).to(tl.int32)[:, None], start + w, d, W)
            words = words.permute(1, 0)[:, :, None]
            even = words & 0x0F0F0F0F
            odd = ((words >> 4) & 0x0F0F0F0F) | 0x10101010
            total = tl.gather(table, (even >> byte) & 31, 1) + tl.gather(table, (odd >> byte) & 31, 1)
            total = tl.sum(tl.sum(total, 2), 0) * (scale * ratio)
            mine = (to < K) & ((feature < 0) | (feature >= d))
            if start > 0:
                total += tl.load(out + to, mask=mine, other=0.0)
            if start + WORDS >= W:
                total = add_and_scale(total, plus, scales, to, mine)
            tl.store(out + to, tl.where(known, total, float("nan")), mask=mine)


def dot_launch(indices, g, out, m, y=None, x=None, sizes=None, grad=None, plus=None, scales=None):
    d = g.shape[1]
    W = packing(d)[1]
    words = min(W, 64)
    return dot_kernel, (len(indices),), dict(
        indices=indices, g=g, packed=packed_signs(d, m, g.device), out=out, y=y, x=x, sizes=sizes, grad=grad,
        plus=plus, scales=scales, K=indices.shape[1], m=m, scale=d ** -0.5, d=d, W=W, WORDS=words,
        SLOTS=triton.next_power_of_2(indices.shape[1]), num_warps=words // 8)


def dot_triton(indices, x, m):
    out = torch.empty(indices.shape, dtype=torch.float32, device=x.device)
    run(dot_launch(indices, x, out, m))
    return out


def decode_like_backward_triton(indices, grad, y, x, sizes, m, plus=None, scales=None):
    """The gradients of decode_like_triton to coefs (N, K), plus `plus`, times `scales`, and to x (N, d)."""
    to_coefs, to_x = torch.empty(indices.shape, dtype=torch.float32, device=x.device), torch.empty_like(x)
    run(dot_launch(indices, grad, to_coefs, m, y, x, sizes, to_x, plus, scales))
    return to_coefs, to_x

# Score


def score_reference(x, parents, generators, mean, rstd, low):
    children = (parents[:, :, None] ^ generators).flatten(1)  # (N, P*D)
    return (dot_reference(children, x) - mean[children - low]) * rstd[children - low]


def score_product(x, parents, generators, mean, rstd, low):
    """The same, faster: <h_{i ^ g}, x> = <Gamma_g, h_i * x>, one matrix Gamma for all parents."""
    d, children = x.shape[1], (parents[:, :, None] ^ generators) - low  # (N, P, D)
    scores = sign_rows(parents, d, x.dtype).mul_(x[:, None]) @ sign_rows(generators, d, x.dtype).t() / math.sqrt(d)
    return ((scores - mean[children]) * rstd[children]).flatten(1)


@jit(do_not_specialize=["rows", "low", "high"])
def moments_kernel(parents, generators, pairs, moments, rows, low, high,
                   D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """moments[r] = mean and rstd, (2, D), of the children of parents[r]. In `pairs` the two lie side by side: one load.

    A child outside of low .. high - 1, of a wrong parent or generator, gets NaN. Children of neighbouring parents are
    neighbours, though in another order: lanes that read go by parents, and those that write by generators.
    """
    r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    i = tl.load(parents + r, mask=r < rows, other=-1)[None, :]
    child = i ^ tl.load(generators + j, mask=j < D, other=0)[:, None]
    known = (i >= 0) & (i < low) & (child >= low) & (child < high)
    pair = tl.load(pairs + (child - low), mask=known, other=0x7FC000007FC00000).trans()
    moments += r[:, None] * (2 * D) + j[None, :]
    real = (r < rows)[:, None] & (j < D)[None, :]
    tl.store(moments, pair.to(tl.int32).to(tl.float32, bitcast=True), mask=real)
    tl.store(moments + D, (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), mask=real)


def moments_launch(parents, generators, pairs, moments, low):
    D, BM = len(generators), 16
    BN = min(256, triton.next_power_of_2(D))
    return moments_kernel, (triton.cdiv(len(parents), BM), triton.cdiv(D, BN)), dict(
        parents=parents, generators=generators, pairs=pairs, moments=moments, rows=len(parents),
        low=low, high=low + len(pairs), D=D, BM=BM, BN=BN, num_warps=4)


@jit
def standardise(score, i, r, rows, first, generators, moments, z, tops, low, high,
                D: tl.constexpr, ROW: tl.constexpr, TOPS: tl.constexpr, G: tl.constexpr):
    """Store (score - mean) * rstd of children first, first + 1 ... of parents i. NaN for a wrong parent or child.

    moments is a table with a row (2, D) for each parent; or, if there are generators, a pair for each feature.
    tops, if given, takes the largest |z| of every G children of a parent, or NaN if one of them is.
    """
    M: tl.constexpr = score.shape[0]
    N: tl.constexpr = score.shape[1]
    j = first + tl.arange(0, N)
    real = (i >= 0)[:, None] & (i < low)[:, None] & (j < D)[None, :]
    if generators is None:
        moments += i[:, None] * (2 * D) + j[None, :]
        mean = tl.load(moments, mask=real, other=float("nan"))
        rstd = tl.load(moments + D, mask=real, other=float("nan"))
    else:
        child = i[:, None] ^ tl.load(generators + j, mask=j < D, other=0)[None, :]
        pair = tl.load(moments + (child - low), mask=real & (child >= low) & (child < high), other=0x7FC000007FC00000)
        mean = pair.to(tl.int32).to(tl.float32, bitcast=True)
        rstd = (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    value = (score - mean) * rstd
    tl.store(z + r[:, None] * ROW + j[None, :], value, mask=(r[:, None] < rows) & (j[None, :] < D))
    if tops is not None:
        size = tl.where(j[None, :] < D, value.to(tl.uint32, bitcast=True) << 1, 0)  # |z|, in the order of integers
        top = (tl.max(size.reshape(M, N // G, G), 2) >> 1).to(tl.float32, bitcast=True)
        q = first // G + tl.arange(0, N // G)
        tl.store(tops + r[:, None] * TOPS + q[None, :], top, mask=(r[:, None] < rows) & (q[None, :] * G < D))


@jit
def halves(tile, M: tl.constexpr, N: tl.constexpr):
    """The left and the right half of an (M, N) tile."""
    return tile.reshape(M, 2, N // 2).permute(0, 2, 1).split()


@jit
def finish(total, first, i, r, rows, generators, moments, z, tops, low, high, scale,
           D: tl.constexpr, ROW: tl.constexpr, TOPS: tl.constexpr, G: tl.constexpr, PIECE: tl.constexpr):
    """standardise scaled products PIECE columns at a time, so that no more of them, and of moments, take registers."""
    M: tl.constexpr = total.shape[0]
    N: tl.constexpr = total.shape[1]
    if N > PIECE:
        left, right = halves(total, M, N)
        finish(left, first, i, r, rows, generators, moments, z, tops, low, high, scale, D, ROW, TOPS, G, PIECE)
        finish(right, first + N // 2, i, r, rows, generators, moments, z, tops, low, high, scale, D, ROW, TOPS, G,
               PIECE)
    else:
        standardise(total.to(tl.float32) * scale, i, r, rows, first, generators, moments, z, tops, low, high, D, ROW,
                    TOPS, G)


@jit
def for_rows(piece, rows: tl.constexpr):
    """A row for each token of a tile -> one for each row of the tile, as tile_rows has them."""
    tokens: tl.constexpr = piece.shape[0]
    width: tl.constexpr = piece.shape[1]
    return piece[None, :, :].broadcast_to(rows // tokens, tokens, width).reshape(rows, width)


@jit
def flip_signs(x, words, b, w, live, d: tl.constexpr, W: tl.constexpr):
    """Coordinates b*W + w of x with the sign bits flipped by bit b of `words`: of h_i * x, but for a factor."""
    k = b * W + w
    piece = for_rows(tl.load(x + k[None, :], mask=live & (k[None, :] < d), other=0.0), words.shape[0])
    if x.dtype.element_ty == tl.float32:
        sign = (words << (31 - b)) & -2147483648
        piece = (piece.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    else:
        sign = (((words >> b) & 1) << 15).to(tl.int16)
        piece = (piece.to(tl.int16, bitcast=True) ^ sign).to(x.dtype.element_ty, bitcast=True)
    return piece


@jit
def tile_rows(start, BM: tl.constexpr, TOKENS: tl.constexpr):
    """The rows token * P + parent of a tile: its tokens in turn, so that a thread has several parents of one token."""
    place = tl.arange(0, BM)
    return start + place % TOKENS * (BM // TOKENS) + place // TOKENS


@jit
def tile_input(x, start, rows, P: tl.constexpr, BM: tl.constexpr, TOKENS: tl.constexpr, d: tl.constexpr):
    """x of the tokens of a tile, and which of these there are."""
    token = ((start + tl.arange(0, TOKENS) * (BM // TOKENS)) // P)[:, None]
    return x + token * d, token * P < rows


@jit
def row_parents(parents, r, rows, low, parent_row, P: tl.constexpr):
    """The parent of each row, token * P + place; 0 for a wrong one."""
    i = tl.load(parents + r // P * parent_row + r % P, mask=r < rows, other=0)
    return tl.where((i >= 0) & (i < low), i, 0).to(tl.int32)


@jit
def pair_words(packed, i, d: tl.constexpr, W: tl.constexpr):
    """The packed signs of h_i, two neighbours in one word: bits 0..15 of the words of both, and the rest."""
    pair = tl.arange(0, W // 2)[None, :]
    even = sign_words(packed, i[:, None], 2 * pair, d, W)
    odd = sign_words(packed, i[:, None], 2 * pair + 1, d, W)
    return (even & 65535) | (odd << 16), ((even >> 16) & 65535) | (odd & -65536)


@jit
def flip_pairs(x, lower, upper, b, live, d: tl.constexpr, W: tl.constexpr):
    """flip_signs for 16 bits, two neighbours at a time: `lower` and `upper` are pair_words."""
    pair = tl.arange(0, W // 2)[None, :]
    piece = tl.load(x.to(tl.pointer_type(tl.int32)) + b * (W // 2) + pair, mask=live & (b * W + 2 * pair < d), other=0)
    both = for_rows(piece, lower.shape[0]) ^ ((tl.where(b < 16, lower, upper) << (15 - b % 16)) & -2147450880)
    both = tl.join(both.to(tl.int16), (both >> 16).to(tl.int16)).reshape(lower.shape[0], W)
    return both.to(x.dtype.element_ty, bitcast=True)


@jit
def expand_signs(gamma, b, like, D: tl.constexpr, W: tl.constexpr, BN: tl.constexpr):
    """Coordinates b*W .. b*W + W - 1 of Gamma, 1 or -1 in 16 bits, from sign_pairs. Two neighbours in one word, too."""
    half = b * (W // 16) + tl.arange(0, W // 16)[:, None, None]
    pair = tl.program_id(1) * (BN // 2) + tl.arange(0, BN // 2)[None, None, :]
    word = tl.load(gamma + half * ((D + 1) // 2) + pair, mask=2 * pair < D, other=0)
    one: tl.constexpr = 0x3F803F80 if like == tl.bfloat16 else 0x3C003C00
    both = ((word << (15 - tl.arange(0, 16)[None, :, None])) & -2147450880) | one
    both = both.reshape(W, BN // 2)
    both = tl.join(both.to(tl.int16), (both >> 16).to(tl.int16)).reshape(W, BN)
    return both.to(like, bitcast=True)


@jit
def multiply(left, right, total, UPCAST: tl.constexpr):
    if UPCAST:
        return tl.dot(left.to(tl.float64), right.to(tl.float64), total, out_dtype=total.dtype)
    return tl.dot(left, right, total, input_precision="ieee")


@jit(do_not_specialize=["rows", "low", "high", "parent_row"])
def score_kernel(x, parents, packed, gamma, generators, moments, z, tops, rows, low, high, parent_row, scale,
                 P: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, TOPS: tl.constexpr, G: tl.constexpr,
                 d: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr,
                 BM: tl.constexpr, BN: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, UPCAST: tl.constexpr):
    """z[n, p, j] = (<Gamma_j, h_i * x[n]> - mean) * rstd with i = parents[n, p], mean and rstd of feature i ^ g_j.

    A matrix product whose left side never exists in memory: its row (n, p) is x[n] with the sign bits flipped by h_i.
    D generators of a row of z, ROW long. For generators, moments, and tops with rows of TOPS, see standardise.

    A tile has TOKENS tokens with all of their parents, if P divides it, and x is read once for them; else a row has its
    own.

    Each turn of the loop multiplies the piece that the last one flipped: a value carried by the loop, it is multiplied
    from shared memory. From registers it must not be: Triton 3.7.1 lets the next turn overwrite them while a product of
    Hopper's still reads (aot.py looks for that).

    With PAIRS Gamma comes as bits, a sixteenth of what L2 would have to give, and is made anew for every tile, a turn
    ahead like the left side. Both are then made two numbers at a time, after the product in the source: so the compiler
    may make some while it flies. Both are stored before the next one, when no product of this program flies: what hides
    that is another program of the SM, for which score_launch leaves room, and predict.py says how well.

    A GPU adds up all products of a tile in one order, so that copies of a child, of several parents, are equal to the
    bit: select_kernel needs that. In Triton's interpreter numpy's order depends on the CPU and the place in the tile,
    and bfloat16 is multiplied by its bit patterns: so UPCAST, there, multiplies in float64.
    """
    start = tl.program_id(0).to(tl.int64) * BM
    r = tile_rows(start, BM, TOKENS)
    j = tl.program_id(1) * BN + tl.arange(0, BN)
    w = tl.arange(0, W)
    i = row_parents(parents, r, rows, low, parent_row, P)
    of_token, live = tile_input(x, start, rows, P, BM, TOKENS, d)
    total = tl.zeros([BM, BN], tl.float64 if UPCAST else tl.float32)
    if PAIRS:
        lower, upper = pair_words(packed, i, d, W)
        flipped = flip_pairs(of_token, lower, upper, 0, live, d, W)
        right = expand_signs(gamma, 0, x.dtype.element_ty, D, W, BN)
        for b in range(BITS):
            total = multiply(flipped, right, total, UPCAST)
            flipped = flip_pairs(of_token, lower, upper, (b + 1) % BITS, live, d, W)
            right = expand_signs(gamma, (b + 1) % BITS, x.dtype.element_ty, D, W, BN)
    else:
        words = sign_words(packed, i[:, None], w[None, :], d, W)  # (BM, W)
        flipped = flip_signs(of_token, words, 0, w, live, d, W)
        for b in range(BITS):
            k = b * W + w
            right = tl.load(gamma + k[:, None] * D + j[None, :], mask=(k[:, None] < d) & (j[None, :] < D), other=0.0)
            following = flip_signs(of_token, words, (b + 1) % BITS, w, live, d, W)
            total = multiply(flipped, right, total, UPCAST)
            flipped = following
    # The parents again: what is not needed at a time must not take registers.
    i = tl.load(parents + r // P * parent_row + r % P, mask=r < rows, other=-1)
    finish(total, tl.program_id(1) * BN, i, r, rows, generators, moments, z, tops, low, high, scale, D, ROW, TOPS, G,
           min(BN // 4, 32))


GROUP = 16  # children, neighbours in memory, of which the largest |z| is kept for the selection: two sectors of memory


def score_launch(x, parents, gamma, generators, moments, z, low, high, arch=None, tops=None):
    """z (N*P, D), all columns of a longer row or some. tops (N*P, D / GROUP rounded up), too.

    gamma: the sign rows of the generators, (d, D); or sign_pairs of them, where takes_pairs says so.
    With generators, moments is a pair for each feature, else a table.
    """
    (N, d), P, D = x.shape, parents.shape[1], z.shape[1]
    bits, W = packing(d)
    # All generators in one tile where registers allow it: the signs are flipped once, gamma is read once in 128 rows.
    arch = arch or arch_of(x.device)
    BM, BN, warps = (128, 256, 8) if W <= 64 else (32, 128, 4) if W <= 256 else (16, 128, 8)
    if W == 64 and arch not in (90, 100, 103):  # these have no room for it beside the products
        BM, BN, warps = (64, 128, 4) if arch == "hip" else (128, 128, 8)
    if x.dtype == torch.float32:
        BM, BN, warps = 32, 64, 4  # no tensor cores for exact float32: a small tile, as the products stay in registers
    if generators is not None:
        BN = min(BN, 128)  # a pair for each product takes more registers than a row for all of a parent
    BN = min(BN, max(4 * GROUP, triton.next_power_of_2(D)))  # a quarter of a tile, at least, has a whole group
    tokens, pairs = BM if BM % P else BM // P, gamma.dtype == torch.int32
    if pairs and (arch == 90 or BN <= 128) and (W < 64 or tokens < BM):  # at 64, x for each row would spill
        BN, warps = min(BN, 128), 4  # two programs to an SM: one makes pieces while the other's product flies
    return score_kernel, (triton.cdiv(N * P, BM), triton.cdiv(D, BN)), dict(
        x=x, parents=parents, packed=packed_signs(d, low, x.device), gamma=gamma, generators=generators,
        moments=moments, z=z, tops=tops, rows=N * P, low=low, high=high,
        parent_row=parents.stride(0), scale=d ** -0.5, P=P, D=D, ROW=z.stride(0),
        TOPS=0 if tops is None else tops.stride(0), G=GROUP,
        d=d, BITS=bits, W=W, BM=BM, BN=BN, num_warps=warps, num_stages=3 if W <= 32 else 2,
        TOKENS=tokens, PAIRS=pairs, UPCAST=triton.knobs.runtime.interpret)


def takes_pairs(d, dtype, arch):
    """Whether the score kernel makes Gamma from bits: where registers have room for it beside the products."""
    return dtype != torch.float32 and packing(d)[1] <= 64 and arch in (90, 100, 103)


def sign_pairs(generators, d, m):
    """Signs of generators (D,) as bits, (BITS, W / 16, D / 2) words of 32: at (b, h, j) those of coordinates
    b*W + 16 h + 0..15 of generator 2j in the lower half, of 2j + 1 in the upper. A wrong generator gets any."""
    (bits, W), packed = packing(d), packed_signs(d, m, generators.device)
    known = F.pad(generators.clamp(0, m - 1), (0, len(generators) % 2))
    words = packed[known % d] ^ packed[d + known // d]  # (D, W)
    signs = (words[:, :, None] >> torch.arange(bits, dtype=torch.int32, device=words.device)).bitwise_and_(1)
    places = torch.arange(32, dtype=torch.int32, device=words.device).view(2, 1, 16, 1)
    signs = signs.view(-1, 2, W // 16, 16, bits).bitwise_left_shift_(places)
    return signs.sum((1, 3), dtype=torch.int32).permute(2, 1, 0).contiguous()


SIGNS = {}  # by the identity of generators: (a weak reference to them; d, m and their version; sign_pairs)


def kept_signs(generators, d, m):
    """sign_pairs of generators that stay from pass to pass, as those of a layer do: made once, and when they change by
    an operation that torch counts, as load_state_dict's; .data and torch.distributed go round that."""
    if generators.is_inference():  # these have no version
        return sign_pairs(generators, d, m)
    key, state = id(generators), (d, m, generators._version)
    of, known, kept = SIGNS.get(key, (None, None, None))
    if of is None or of() is not generators or known != state:
        kept = sign_pairs(generators, d, m)
        SIGNS[key] = weakref.ref(generators, lambda _: SIGNS.pop(key, None)), state, kept
    return kept


COLUMNS = 4096  # generators whose sign rows are held at a time


def scorer(x, P, generators, mean, rstd, low):
    """score(x, parents, z, tops) for some of the tokens x at a time: what all of them need is made once."""
    (N, d), D, high = x.shape, len(generators), low + len(mean)
    moments = torch.stack([mean, rstd], 1).view(torch.int64)
    shared = low <= N * P and low * D <= 2 ** 24  # parents recur: a row of moments for each, up to 128 MB
    if shared:
        pairs, moments = moments, torch.empty(low, 2, D, device=x.device)
        run(moments_launch(torch.arange(low, device=x.device), generators, pairs, moments, low))

    def signs(part):
        """The sign rows of generators, as the kernel takes them: with pairs it reads x by pairs, too."""
        if takes_pairs(d, x.dtype, arch_of(x.device)) and x.data_ptr() % 4 == 0:
            return (kept_signs if part is generators else sign_pairs)(part, d, high)
        gamma = torch.empty(len(part), d, dtype=x.dtype, device=x.device)
        ones = torch.ones(len(part), 1, device=x.device)
        run(decode_launch(part[:, None], ones, gamma, high, 1.0))
        return gamma.t().contiguous()

    whole = signs(generators) if shared or D <= COLUMNS else None

    def score(x, parents, z, tops=None):
        for start in range(0, D, D if whole is not None else COLUMNS):
            part = generators if whole is not None else generators[start : start + COLUMNS]
            columns = z.view(-1, D)[:, start : start + len(part)]
            some = None if tops is None else tops.view(len(columns), -1)[:, start // GROUP :]
            run(score_launch(x, parents, signs(part) if whole is None else whole, None if shared else part, moments,
                             columns, low, high, tops=some))
    return score


def score_triton(x, parents, generators, mean, rstd, low):
    z = torch.empty(len(x), parents.shape[1] * len(generators), dtype=torch.float32, device=x.device)
    scorer(x, parents.shape[1], generators, mean, rstd, low)(x, parents, z)
    return z

# Select


def wide(x):
    """The type sums are taken in: float32, or float64 for float64 (checks only)."""
    return x if x.dtype == torch.float64 else x.float()


def magnitude(z):
    """|z| as an integer of the same order.

    Every NaN is the same and above infinity, so that a token with NaN shows it.
    """
    if z.dtype == torch.float64:
        return z.abs().view(torch.int64).clamp(max=0x7FF8 << 48)
    return z.abs().view(torch.int32).clamp(max=0x7FC00000)


def select_reference(z, parents, generators, k):
    """Sort by index, drop repeats, then sort by |z|: both sorts stable, so ties go to the lower index."""
    children, size = (parents[:, :, None] ^ generators).flatten(1), magnitude(z)
    order = size.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, children.gather(1, order).argsort(dim=1, stable=True))
    children, size = children.gather(1, order), size.gather(1, order)  # by index, the largest copy first
    size[:, 1:].masked_fill_(children[:, 1:] == children[:, :-1], -1)
    best = size.argsort(dim=1, descending=True, stable=True)[:, :k]
    order, children, size = order.gather(1, best), children.gather(1, best), size.gather(1, best)
    return children, z.gather(1, order).masked_fill(size < 0, 0)


def basis_reference(x, mean, rstd, k):
    z, d = (wide(x) - mean) * rstd, x.shape[1]
    return select_reference(z, torch.zeros(len(x), 1, dtype=torch.int64, device=x.device),
                            torch.arange(d, device=x.device), k)


@jit
def magnitude_bits(z):
    """|z| as an integer of the same order, every NaN alike and largest."""
    return tl.minimum(z.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FC00000)


@jit
def candidate_scores(z, mean, rstd, c, live):
    """z of candidates c; if moments are given, z is the input and its coordinates are standardised here."""
    value = tl.load(z + c, mask=live, other=0.0).to(tl.float32)
    if mean is not None:
        value = (value - tl.load(mean + c, mask=live, other=0.0)) * tl.load(rstd + c, mask=live, other=0.0)
    return value


@jit
def sort_keys(value, parents, generators, c, live, D: tl.constexpr):
    """(|z|, lower index first, sign) of candidates c in one sortable integer: -1 where not live."""
    i = c
    if parents is not None:
        i = tl.load(parents + c // D, mask=live, other=0).to(tl.int32)
        i ^= tl.load(generators + c % D, mask=live, other=0).to(tl.int32)
    key = (magnitude_bits(value).to(tl.int64) << 32) | ((0x7FFFFFFF - i).to(tl.int64) << 1)
    return tl.where(live, key | ((value.to(tl.int32, bitcast=True) >> 31) & 1), -1)


@jit
def key_index(key):
    return 0x7FFFFFFF - ((key >> 1) & 0x7FFFFFFF)


@jit
def key_value(key):
    return ((key >> 32) | ((key & 1) << 31)).to(tl.int32).to(tl.float32, bitcast=True)


@jit
def bit_place(bit):
    """The number of the only bit that is set, of the lower 24."""
    return (bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@jit
def group_column(q, D: tl.constexpr, G: tl.constexpr):
    """The generator that group q of a token starts with: every parent has D / G groups, rounded up."""
    return q % ((D + G - 1) // G) * G


@jit
def group_start(q, D: tl.constexpr, G: tl.constexpr):
    """The first candidate of group q of a token."""
    return q * G if D % G == 0 else q // ((D + G - 1) // G) * D + group_column(q, D, G)


@jit
def store_found(indices, coefs, scales, rstd, m, place, i, value, mask):
    tl.store(indices + place, i, mask=mask)
    tl.store(coefs + place, value, mask=mask)
    if scales is not None:
        tl.store(scales + place, tl.load(rstd + i, mask=mask & (i < m), other=float("nan")), mask=mask)


@jit
def best_of_list(z, mean, rstd, parents, generators, scratch, indices, coefs, scales, m, listed, k,
                 D: tl.constexpr, S: tl.constexpr):
    """Of the candidates listed in scratch, at most S, the k best distinct ones are the result, if so many there are:
    -> their number."""
    slot = tl.arange(0, S)
    live = slot < listed
    chosen = tl.load(scratch.to(tl.pointer_type(tl.int32)) + slot, mask=live, other=0)
    key = sort_keys(candidate_scores(z, mean, rstd, chosen, live), parents, generators, chosen, live, D)
    key = tl.sort(key, descending=True)
    tl.debug_barrier()  # all have read the list before the keys overwrite it
    tl.store(scratch + slot, key)
    tl.debug_barrier()
    before = tl.load(scratch + slot - 1, mask=slot > 0, other=-1)
    fresh = (live & (key != before)).to(tl.int32)
    rank = tl.cumsum(fresh, 0) - 1
    found = tl.sum(fresh, 0)
    keep = (fresh > 0) & (rank < k) & (found >= k)
    store_found(indices, coefs, scales, rstd, m, rank, key_index(key).to(tl.int64), key_value(key), keep)
    return found


@jit(do_not_specialize=["m", "k", "keep", "found_row", "parent_row"])
def select_kernel(z, tops, mean, rstd, parents, generators, indices, coefs, scales, scratch, m, k, keep,
                  found_row, parent_row, P: tl.constexpr, D: tl.constexpr, G: tl.constexpr, BLOCK: tl.constexpr,
                  S: tl.constexpr, THREADS: tl.constexpr):
    """The k distinct candidates of a token with the largest |z|, largest first, ties to the lower index.

    The candidates are dealt to BLOCK groups. A threshold that `keep` group maxima reach is reached by at least
    `keep` candidates and hardly more: those are listed in scratch, sorted, and freed of repeats. Where that
    leaves fewer than k, or more than 2 S were listed (many ties), the next largest is looked for k times over.
    Without parents candidate c is feature c, and z the input, with the mean and rstd of its coordinates.

    The result is k columns of rows of found_row elements, the parents are columns of rows of parent_row. scales, if
    given, takes 1/std of the features found; rstd then has it of all m.

    tops, if given, has the largest |z| of every G candidates of a parent. These are then dealt and listed in place of
    the candidates, and z is read only where they reach the threshold.
    """
    C: tl.constexpr = P * D
    ITEMS: tl.constexpr = C if tops is None else P * ((D + G - 1) // G)
    n = tl.program_id(0).to(tl.int64)
    z += n * C
    items = z
    if tops is not None:
        items = tops + n * ITEMS
    if parents is not None:
        parents += n * parent_row
    scratch += n * (2 * S)
    indices += n * found_row
    coefs += n * found_row
    if scales is not None:
        scales += n * found_row
    lane = tl.max_contiguous(tl.arange(0, BLOCK), 1)  # one at a time: a list is then written by the threads that read z

    # |z| without its sign bit, shifted: one instruction that the multiplier may take.
    top = tl.zeros([BLOCK], tl.uint32)
    for start in range(0, ITEMS, BLOCK):
        c = start + lane
        size = candidate_scores(items, mean, rstd, c, c < ITEMS).to(tl.uint32, bitcast=True) << 1
        top = tl.maximum(top, size)
    top = tl.where(lane < ITEMS, tl.minimum((top >> 1).to(tl.int32), 0x7FC00000), -1)  # as magnitude_bits
    below = tl.max(top, 0) + 1  # no group reaches this; at least `keep`, or all there are, reach the threshold
    threshold = below * 0
    reached = threshold + BLOCK
    stride = threshold + (1 << 23)  # the threshold is seldom below half of the largest: look there first
    while (below - threshold > 1) & (reached > keep + keep // 8):
        middle = tl.maximum(threshold + (below - threshold) // 2, below - stride)
        count = tl.sum((top >= middle).to(tl.int32), 0)
        stride = tl.where(count >= keep, stride, 2 * tl.minimum(stride, 1 << 29))
        below = tl.where(count >= keep, below, middle)
        threshold = tl.where(count >= keep, middle, threshold)
        reached = tl.where(count >= keep, count, reached)

    listed = threshold * 0
    places = scratch.to(tl.pointer_type(tl.int32))
    listing = places if tops is None else places + 2 * S  # groups lie behind the candidates
    for first in range(0, ITEMS, 16 * BLOCK):
        hits = tl.zeros([BLOCK], tl.int32)  # of a lane's next 16: which reach the threshold, and above bit 16 how many
        for turn in range(min(16, (ITEMS + BLOCK - 1) // BLOCK)):
            c = first + turn * BLOCK + lane
            size = candidate_scores(items, mean, rstd, c, c < ITEMS).to(tl.uint32, bitcast=True) << 1
            hits += tl.where((size >= threshold.to(tl.uint32) << 1) & (c < ITEMS), (1 << turn) + 65536, 0)
        # A column is a thread's own: added up there, then over threads.
        many = (hits >> 16).reshape(BLOCK // THREADS, THREADS)
        column = tl.sum(many, 0)
        to = (listed + (tl.cumsum(column, 0) - column)[None, :] + tl.cumsum(many, 0) - many).reshape(BLOCK)
        listed += tl.sum(column, 0)
        hits &= 65535
        while tl.max(hits, 0) > 0:  # a lane seldom has more than two
            bit = hits & -hits
            c = first + bit_place(bit) * BLOCK + lane
            tl.store(listing + to, c, mask=(hits > 0) & (to < 2 * S))
            to += 1
            hits ^= bit
    if tops is not None:
        tl.debug_barrier()  # scratch is written and read by different threads
        groups = tl.minimum(listed, 2 * S)
        listed = tl.where(listed > 2 * S, 2 * S + 1, 0)
        ROWS: tl.constexpr = 16 * THREADS // G
        row = tl.arange(0, ROWS)
        element = tl.arange(0, G)[None, :]
        thread = tl.arange(0, THREADS)
        # Of a group a thread has four neighbours, of ROWS groups four times four: a bit for each, and how many.
        mark = (65536 + (1 << (row // (ROWS // 4) * 4)[:, None] + element % 4))
        for first in range(0, groups, ROWS):
            q = tl.load(listing + first + row, mask=first + row < groups, other=0)
            live = (first + row < groups)[:, None] & (group_column(q, D, G)[:, None] + element < D)
            value = tl.load(z + group_start(q, D, G)[:, None] + element, mask=live, other=0.0)
            hits = (value.to(tl.uint32, bitcast=True) << 1 >= threshold.to(tl.uint32) << 1) & live
            hits = tl.sum(tl.where(hits, mark, 0).reshape(4, ROWS // 4, G // 4, 4), 3)
            hits = tl.sum(hits, 0).reshape(THREADS)
            many = hits >> 16
            to = listed + tl.cumsum(many, 0) - many
            listed += tl.sum(many, 0)
            hits &= 65535
            while tl.max(hits, 0) > 0:
                bit = hits & -hits
                place = bit_place(bit)
                q = tl.load(listing + first + place // 4 * (ROWS // 4) + thread // (G // 4), mask=hits > 0, other=0)
                c = group_start(q, D, G) + thread % (G // 4) * 4 + place % 4
                tl.store(places + to, c, mask=(hits > 0) & (to < 2 * S))
                to += 1
                hits ^= bit
    tl.debug_barrier()  # scratch is written and read by different threads
    # Mostly half of the list is empty, and to sort it takes less than half as long.
    if listed <= S:
        if best_of_list(z, mean, rstd, parents, generators, scratch, indices, coefs, scales, m, listed, k, D,
                        S) >= k:
            return
    if (listed > S) & (listed <= 2 * S):
        if best_of_list(z, mean, rstd, parents, generators, scratch, indices, coefs, scales, m, listed, k, D,
                        2 * S) >= k:
            return
    last = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    for place in range(k):
        best = tl.full([], -1, tl.int64)
        for start in range(0, C, BLOCK):
            c = start + lane
            keys = sort_keys(candidate_scores(z, mean, rstd, c, c < C), parents, generators, c, c < C, D)
            best = tl.maximum(best, tl.max(tl.where(keys < last, keys, -1), 0))
        value = tl.where(best < 0, 0.0, key_value(best))  # fewer than k distinct: repeat the last, at zero
        last = tl.where(best < 0, last, best)
        store_found(indices, coefs, scales, rstd, m, place, key_index(last).to(tl.int64), value, True)


def spare(k):
    """How many children to look at for k: repeats drop out."""
    return k + max(8, k // 4)


def select_launch(z, parents, generators, indices, coefs, mean=None, rstd=None, tops=None, scales=None):
    """indices, coefs, scales (N, k): some columns of one shape. With scales, rstd is that of all features."""
    N, k = indices.shape
    P, D = (1, z.shape[1]) if parents is None else (parents.shape[1], len(generators))
    if k > 1024:
        raise ValueError(f"the kernel selects at most 1024 features of a level, not {k}: lower `active`")
    keep = k if parents is None else spare(k)
    BLOCK = max(128 if parents is None else 256, triton.next_power_of_2(4 * keep))
    S = triton.next_power_of_2(5 * keep // 4)  # of normally distributed scores hardly more reach the threshold
    warps = 1 if BLOCK <= 512 else BLOCK // 256
    scratch = torch.empty(N, 2 * S, dtype=torch.int64, device=z.device)
    return select_kernel, (N,), dict(
        z=z, tops=tops, mean=mean, rstd=rstd, parents=parents, generators=generators, indices=indices, coefs=coefs,
        scales=scales, scratch=scratch, m=0 if rstd is None else len(rstd), k=k, keep=keep,
        found_row=indices.stride(0), parent_row=0 if parents is None else parents.stride(0),
        P=P, D=D, G=GROUP, BLOCK=BLOCK, S=S, THREADS=32 * warps, num_warps=warps)


def result(N, k, device, scales=False):
    """Room for the indices, coefficients and, if wanted, 1/std of k features a token: what a selection fills."""
    kinds = (torch.int64, torch.float32, torch.float32)[: 3 if scales else 2]
    return [torch.empty(N, k, dtype=kind, device=device) for kind in kinds]


def select_triton(z, parents, generators, k):
    found = result(len(z), k, z.device)
    run(select_launch(z, parents, generators, *found))
    return tuple(found)


def basis_triton(x, mean, rstd, found):
    """Level 0: the coordinates of x with the largest |z| fill `found`; z = (x - mean) * rstd is never in memory."""
    indices, coefs, *scales = found
    run(select_launch(x, None, None, indices, coefs, mean, rstd, scales=scales[0] if scales else None))
    return found


def search_triton(x, parents, generators, mean, rstd, low, found, rows, whole=None, most=2 ** 26):
    """Score and select in one: the best children fill `found`; z of the tokens `rows` is the result. Of at most `most`
    scores at a time (256 MB). whole: 1/std of all features, if `found` has room for it."""
    (N, P), D, k = parents.shape, len(generators), found[0].shape[1]
    sampled = torch.empty(len(rows), P * D, dtype=torch.float32, device=x.device)
    score, groups = scorer(x, P, generators, mean, rstd, low), P * triton.cdiv(D, GROUP)
    size = max(1, min(N, most // (P * D)))
    z = torch.empty(size, P * D, dtype=torch.float32, device=x.device)
    # Few groups would hold more candidates above the threshold than they are worth.
    tops = torch.empty(size, groups, dtype=torch.float32, device=x.device) if groups >= 4 * spare(k) else None
    for start in range(0, N, size):
        part = slice(start, min(start + size, N))
        here, some = z[: part.stop - start], None if tops is None else tops[: part.stop - start]
        score(x[part], parents[part], here, some)
        indices, coefs, *scales = (tensor[part] for tensor in found)
        run(select_launch(here, parents[part], generators, indices, coefs, rstd=whole, tops=some,
                          scales=scales[0] if scales else None))
        if len(rows):
            inside = (rows >= start) & (rows < part.stop)
            sampled = torch.where(inside[:, None], here[(rows - start).clamp(0, len(here) - 1)], sampled)
    return sampled


def encode_triton(x, mean, var, generators, lows, active, rows, scales=False):
    """All levels: (indices, z and, if wanted, 1/std of the active features, (N, K) each), and z of the candidates of
    the tokens `rows`, (R, sum of P*D)."""
    rstd, d = var.rsqrt(), lows[0]
    found = result(len(x), sum(active), x.device, scales)
    first, *others = zip(*(tensor.split(active, 1) for tensor in found))
    basis_triton(x, mean[:d], rstd[:d], first)
    sampled, parents = [], first[0]
    for words, low, high, columns in zip(generators, lows, lows[1:], others):
        sampled.append(search_triton(x, parents, words, mean[low:high], rstd[low:high], low, columns, rows, rstd))
        parents = columns[0]
    return found, torch.cat(sampled, 1) if len(sampled) > 1 else (*sampled, mean.new_empty(len(rows), 0))[0]

# Collect: the sums that the running moments are made of. Its tokens are few, so plain torch serves a GPU too.


def collect_reference(z, parents, generators, sums):
    """Sort by index, so that repeats are neighbours: the first of them counts. Its cost does not depend on m.

    A GPU adds up in any order, and in a fixed one under torch.use_deterministic_algorithms.
    """
    children, order = (parents[:, :, None] ^ generators).flatten(1).sort(dim=1, stable=True)
    first = F.pad(children[:, 1:] != children[:, :-1], (1, 0), value=True)
    z = z.gather(1, order).masked_fill(~first, 0)
    sums.index_add_(0, children.flatten(), torch.stack([first.to(z.dtype), z, z * z], -1).flatten(0, 1))


if __name__ == "__main__":
    import aot
    from helpers import run_script
    run_script(aot.main)
