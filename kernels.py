"""The four operations of the bottleneck, each as a plain torch reference, a fast path for CPUs and a Triton kernel.

    parity_decode(indices, coefs, d)      y[n]    = sum_k coefs[n, k] phi_{indices[n, k]}        (N, K) -> (N, d)
    parity_dot(indices, x)                s[n, k] = <phi_{indices[n, k]}, x[n]>                  (N, d) -> (N, K)
    score_children(x, parents, ...)       z of every child i ^ g of every parent i               (N, d) -> (N, P*D)
    select_distinct(z, ...)               the k distinct children with the largest |z|           (N, P*D) -> (N, k)

phi_i is a row of the dictionary of kloosterman.py: a sign vector over sqrt(d), or e_i below d. Decode and dot are
each other's gradient. `search_children` is score and select in one, without the (N, P*D) scores ever existing
for all tokens. The references are the specification: every other path is tested against them.

Letters: N tokens, d width, K features per token, P parents, D generators, m = features in all, and a level's
features are low .. low + len(mean) - 1.

    python kernels.py        compiles every kernel for real GPUs, without one, and prints what each needs
"""
import contextlib
import ctypes
import functools
import hashlib
import math
import os
import platform
import re
import shutil
import subprocess
import tempfile
import warnings
from typing import Optional

import numpy as np
import torch
import torch.nn.functional as F

from kloosterman import log2_width, seed_matrix

try:  # Linux only; everything but the kernels themselves works without it
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BACKEND = None  # None picks by device; "reference", "c" or "triton" forces one path (tests do)


# References


@functools.lru_cache(maxsize=None)
def seed(d, device):
    """The seed matrix M as a tensor: d words of 2t bits."""
    return torch.from_numpy(seed_matrix(d).astype(np.int64)).to(device)


def sign_rows(indices, d, dtype=torch.float32):
    """sqrt(d) * h_i for every index: (...) -> (..., d)."""
    bits = indices.long()[..., None] & seed(d, indices.device)
    for shift in (16, 8, 4, 2, 1):
        bits = bits ^ bits >> shift
    return (1 - 2 * (bits & 1)).to(dtype)


def decode_reference(indices, coefs, d):
    h = sign_rows(indices, d, coefs.dtype) / math.sqrt(d)  # (N, K, d)
    y = torch.einsum("nkd,nk->nd", h, coefs.masked_fill(indices < d, 0))
    return y.scatter_add(1, indices.clamp(max=d - 1), coefs.masked_fill(indices >= d, 0))


def dot_reference(indices, x):
    d = x.shape[1]
    h = sign_rows(indices, d, x.dtype) / math.sqrt(d)  # (N, K, d)
    return torch.where(indices < d, x.gather(1, indices.clamp(max=d - 1)), torch.einsum("nkd,nd->nk", h, x))


def score_reference(x, parents, generators, mean, rstd, low):
    children = (parents[:, :, None] ^ generators).flatten(1)  # (N, P*D)
    return (dot_reference(children, x) - mean[children - low]) * rstd[children - low]


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
    return select_reference(z, torch.zeros(len(x), 1, dtype=torch.int64, device=x.device), torch.arange(d, device=x.device), k)


def collect_reference(z, parents, generators, sums):
    """Sort by index, so that repeats are neighbours: the first of them counts. Its cost does not depend on m."""
    children, order = (parents[:, :, None] ^ generators).flatten(1).sort(dim=1, stable=True)
    first = F.pad(children[:, 1:] != children[:, :-1], (1, 0), value=True)
    z = z.gather(1, order).masked_fill(~first, 0)
    sums.index_add_(1, children.flatten(), torch.stack([first.to(z.dtype), z, z * z]).flatten(1))


class Rescale(torch.autograd.Function):
    """y with the norm and the type of x, row by row: y |x| / |y|; zero where either is zero.

    With u = y / |y|, the gradients of g are |x| / |y| (g - u <u, g>) to y and <u, g> x / |x| to x. Only y, x and the norms
    are kept for them. Norms are taken in float64, where no float32 overflows or vanishes.
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
        return torch.addcmul(grad, u, -along).mul_(Rescale.ratio(of_x, of_y, y)), (x * (along * Rescale.ratio(one, of_x, y))).to(x.dtype)

    @staticmethod
    def ratio(above, below, like):
        """above / below, or above / 1 where below is zero."""
        return (above / torch.where(below == 0, 1, below)).to(like.dtype)


rescale = Rescale.apply


def magnitude(z):
    """|z| as an integer of the same order. Every NaN is the same and above infinity, so that a token with NaN shows it."""
    if z.dtype == torch.float64:
        return z.abs().view(torch.int64).clamp(max=0x7FF8 << 48)
    return z.abs().view(torch.int32).clamp(max=0x7FC00000)


# Signs travel packed: bit b of word w belongs to coordinate b*W + w, so that a tile of W neighbouring coordinates takes one
# bit from each word and is read and written in one piece.


def packing(d):
    """(BITS, W): a row is W words of BITS bits. At least 16 words, the least that tl.dot multiplies."""
    bits = min(32, max(1, d // 16))
    return bits, max(16, d // bits)


@functools.lru_cache(maxsize=None)
def packed_signs(d, m, device):
    """Rows 0..d-1: the Hadamard rows H[u1]; then the patterns s[u2]. The XOR of two rows is h_i, so these few say all.

    There is always a pattern 1: the kernels point a wrong index at it, with a coefficient of NaN.
    """
    bits, W = packing(d)
    indices = torch.cat([torch.arange(d), torch.arange(max(2, m // d)) * d])
    negative = F.pad(sign_rows(indices, d, torch.int64) < 0, (0, bits * W - d)).view(-1, bits, W)
    words = (negative.long() << torch.arange(bits)[:, None]).sum(1)
    return torch.where(words < 2 ** 31, words, words - 2 ** 32).int().to(device)


@functools.lru_cache(maxsize=None)
def pattern_words(d, m):
    """The patterns s[u2] for transforms of 16 at a time: bit b of word (k, lane) is the sign of s[16 b + lane] at k; then 512 more."""
    count = m // d
    negative = F.pad(sign_rows(torch.arange(count) * d, d, torch.int64) < 0, (0, 0, 0, -count % 512)).view(-1, 32, 16, d)
    words = (negative.long() << torch.arange(32)[:, None, None]).sum(1).transpose(1, 2)  # (count / 512, d, 16)
    return torch.where(words < 2 ** 31, words, words - 2 ** 32).int().contiguous()


# For CPUs: kernels.c, compiled on first use


@functools.lru_cache(maxsize=None)
def library():
    """kernels.c as a loaded library, compiled for this very processor and kept in a cache; None without a C compiler."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        warnings.warn("there is no C compiler, so the bottleneck runs in plain torch, many times slower: install gcc or clang")
        return None
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "kernels.c")
    with open(source, "rb") as file:
        key = hashlib.sha256(file.read() + compiler.encode() + processor().encode()).hexdigest()[:16]
    folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "paritytransformer")
    path = os.path.join(folder, f"kernels-{key}.so")
    if os.path.exists(path):
        return ctypes.CDLL(path)
    with tempfile.TemporaryDirectory() as build:
        made = os.path.join(build, "kernels.so")
        command = [compiler, "-O3", "-march=native", "-fPIC", "-shared", "-Wno-psabi", source, "-o", made, "-lm"]
        run = subprocess.run([*command, "-fopenmp"], capture_output=True, text=True)
        if run.returncode:
            run = subprocess.run(command, capture_output=True, text=True)
            warnings.warn(f"{compiler} has no OpenMP, so the bottleneck uses one thread: install gcc" if run.returncode == 0 else
                          f"kernels.c could not be compiled, so the bottleneck runs in plain torch, many times slower: {' '.join(command)}\n"
                          f"{run.stderr[:2000]}")
            if run.returncode:
                return None
        with contextlib.suppress(OSError):  # a cache that cannot be written is no reason to stop
            os.makedirs(folder, exist_ok=True)
            shutil.copy(made, f"{path}.{os.getpid()}")
            os.replace(f"{path}.{os.getpid()}", path)  # other processes see all of it or nothing
        return ctypes.CDLL(made)


@torch.compiler.assume_constant_result  # not to be traced
def has_library():
    return library() is not None


def processor():
    """What -march=native depends on: a home folder may be shared by machines of several kinds."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        return next(line for line in file if line.startswith(("flags", "Features")))
    return platform.platform() + platform.processor()


def call(name, *arguments):
    """A function of kernels.c: tensors go by address, None is no tensor, numbers are int64."""
    def convert(value):
        if isinstance(value, torch.Tensor):
            assert value.is_contiguous() and value.dtype in (torch.float32, torch.float64, torch.int32, torch.int64), value
            return ctypes.c_void_p(value.data_ptr())
        return ctypes.c_void_p(None) if value is None else ctypes.c_int64(value)
    getattr(library(), name)(*map(convert, arguments))


def threads(N):
    """Of the processor, for N tokens: a thread is worth its waking for some tokens only."""
    return max(1, min(torch.get_num_threads(), N // 8))


def decode_c(indices, coefs, d, m):
    (N, K), y = indices.shape, coefs.new_empty(len(indices), d)
    call("decode", indices, coefs, None, packed_signs(d, m, coefs.device), y, None, N, K, d, *packing(d), threads(N))
    return y


def decode_like_c(indices, coefs, like, m):
    """decode_c scaled to the norms of `like`; then nothing; and (N, 2): the scale of each row, and its norm in `like`."""
    (N, d), K = like.shape, indices.shape[1]
    y, norms = torch.empty_like(like), like.new_empty(N, 2, dtype=torch.float64)
    call("decode", indices, coefs, like, packed_signs(d, m, like.device), y, norms, N, K, d, *packing(d), threads(N))
    return y, like.new_empty(0, d), norms


def dot_c(indices, x, m):
    (N, d), K = x.shape, indices.shape[1]
    out = x.new_empty(N, K)
    call("dot", indices, x, None, None, None, packed_signs(d, m, x.device), out, None, N, K, d, *packing(d), threads(N))
    return out


def decode_like_backward_c(indices, grad, y, like, norms, m):
    """The gradients of decode_like_c's coefs and `like`, from the gradient of what it gave, y."""
    (N, d), K = grad.shape, indices.shape[1]
    to_coefs, to_like = grad.new_empty(N, K), torch.empty_like(like)
    call("dot", indices, grad, y, like, norms, packed_signs(d, m, grad.device), to_coefs, to_like, N, K, d, *packing(d),
         threads(N))
    return to_coefs, to_like


def basis_c(x, mean, rstd, k):
    N, d = x.shape
    indices, coefs = torch.empty(N, k, dtype=torch.int64), x.new_empty(N, k)
    call("basis", x, mean, rstd, indices, coefs, N, d, k, threads(N))
    return indices, coefs


def score_product_c(x, parents, generators, mean, rstd, low):
    """<h_{i ^ g}, x> = <Gamma_g, h_i * x>: one matrix Gamma for all parents, one product."""
    (N, d), P, D = x.shape, parents.shape[1], len(generators)
    packed = packed_signs(d, low + len(mean), x.device)
    gamma = x.new_empty(D, d)
    call("sign_flips", x.new_ones(1, d), generators, packed, gamma, 1, D, d, *packing(d), threads(D))
    z = x.new_empty(N, P * D)
    flipped = x.new_empty(min(N, max(1, CHUNK // (P * d))), P, d)  # all chunks share it: fresh memory is slow
    for rows in chunks(N, P * d):
        hx = flipped[: rows.stop - rows.start]
        call("sign_flips", x[rows], parents[rows], packed, hx, len(hx), P, d, *packing(d), threads(P * len(hx)))
        torch.matmul(hx, gamma.t(), out=z[rows].view(-1, P, D))
    call("standardise", z, parents, generators, mean, rstd, N, P, D, d, low, threads(N))
    return z


def search_transform_c(x, parents, generators, mean, rstd, low, k, rows):
    """Every feature of the level by Walsh-Hadamard transforms of x * s[u2], one for each u2; then the children are picked."""
    (N, d), P, D = x.shape, parents.shape[1], len(generators)
    place = torch.full((N,), -1).index_put_((rows,), torch.arange(len(rows)))
    indices, coefs, sampled = torch.empty(N, k, dtype=torch.int64), x.new_empty(N, k), x.new_empty(len(rows), P * D)
    call("search", x, parents, generators, mean, rstd, pattern_words(d, low + len(mean)), place, indices, coefs, sampled, N, d, P, D, low,
         len(mean), k, threads(N))
    return indices, coefs, sampled


def select_c(z, parents, generators, k):
    N, (P, D) = len(z), (parents.shape[1], len(generators))
    indices, coefs = torch.empty(N, k, dtype=torch.int64), z.new_empty(N, k)
    call("choose", z, parents, generators, indices, coefs, N, P, D, k, threads(N))
    return indices, coefs


CHUNK = 2 ** 19  # elements of a piece of work that stays in a processor's cache


def chunks(N, elements, most=None):
    """Slices of the tokens 0..N-1, each of at most `most` elements altogether: CHUNK by default."""
    size = max(1, (most or CHUNK) // elements)
    return [slice(start, min(start + size, N)) for start in range(0, N, size)]


def scoring_method(device, d, parents, generators, features):
    """The faster of the two for a shape. On a GPU the product runs on tensor cores; on a CPU a feature costs the transform as much
    as 14 multiply-adds cost the product (measured from d=64 to 2048 on 2 cores)."""
    return "transform" if torch.device(device).type == "cpu" and 14 * features < parents * generators * d else "gemm"


# Triton kernels


if triton:

    @triton.jit
    def sign_words(packed, i, w, d: tl.constexpr, W: tl.constexpr):
        """The packed signs of h_i, words w: H[u1] ^ s[u2]. Shapes of i and w broadcast."""
        i = i.to(tl.uint32)
        return tl.load(packed + i % d * W + w) ^ tl.load(packed + (d + i // d) * W + w)

    @triton.jit
    def hashed(indices, coefs, k, K, m, d: tl.constexpr):
        """Index and coefficient k of a token, as decode adds up sign vectors: nothing for a basis vector, NaN for a wrong index."""
        i = tl.load(indices + k, mask=k < K, other=0)
        known = i.to(tl.uint64) < m
        c = tl.load(coefs + k, mask=k < K, other=0.0)
        return tl.where(known, i, d).to(tl.int32), tl.where(known, tl.where(i < d, 0.0, c), float("nan"))

    @triton.jit
    def flip(c, lane, bit: tl.constexpr):
        """c, negative in the lanes that have this bit set."""
        return (c.to(tl.int32, bitcast=True) ^ ((lane << (31 - bit)) & -2147483648)).to(tl.float32, bitcast=True)

    @triton.jit
    def interleave(a, b, mask: tl.constexpr, by: tl.constexpr):
        """Fields of a (mask, and those `by` bits higher) in turn with fields of b: first the lower ones, then the higher."""
        return (a & mask) | ((b & mask) << by), ((a >> by) & mask) | (b & ~mask)

    @triton.jit
    def scaled(row):
        """row / 2**e with its largest |element| near 1, the norm of that, and 2**e: no square overflows or vanishes."""
        power = tl.max(tl.abs(row)).to(tl.int32, bitcast=True) & 0x7F800000
        power = tl.minimum(tl.maximum(power, 1 << 23), 253 << 23)
        row *= ((254 << 23) - power).to(tl.float32, bitcast=True)
        return row, tl.sqrt(tl.sum(row * row)), power.to(tl.float32, bitcast=True)

    @triton.jit
    def nonzero(size):
        return tl.where(size == 0.0, 1.0, size)

    @triton.jit(do_not_specialize=["K", "m"])
    def decode_kernel(indices, coefs, packed, y, x, out, sizes, K, m, scale, d: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr,
                      SLOTS: tl.constexpr):
        """y[n] = sum_k coefs[n, k] phi_{indices[n, k]}: one token a program, the row kept in registers.

        Four features at a time: lane v of the table has their sum with the signs of the bits of v. Four bits, one of each
        feature's signs, say in which lane a coordinate finds what it has to add: one addition and a shuffle for four features.

        Sign vectors first, basis vectors last: a small term added to a large one would lose its last bits. A basis vector
        touches one coordinate, so it is added where the row already lies in memory; only in float32 (SLOTS > 0), as adding to
        bfloat16 there would round twice. SLOTS is at least K.

        out, if given, is y in another type; if x is given too, y |x| / |y|, and sizes[n] = |y|, |x|.
        """
        n = tl.program_id(0).to(tl.int64)
        indices += n * K
        coefs += n * K
        y += n * d
        q = 4 * tl.arange(0, max(1, BITS // 4))[:, None]
        w = tl.max_contiguous(tl.arange(0, W)[None, :], [1, 1])  # one at a time, so that a thread has the signs of its own y
        lane = tl.arange(0, 32)[None, :]
        row0 = tl.zeros([max(1, BITS // 4), W], tl.float32)  # coordinates q*W + w
        row1 = row0
        row2 = row0
        row3 = row0
        for k in range(0, K, 4):
            i0, c0 = hashed(indices, coefs, k, K, m, d)
            i1, c1 = hashed(indices, coefs, k + 1, K, m, d)
            i2, c2 = hashed(indices, coefs, k + 2, K, m, d)
            i3, c3 = hashed(indices, coefs, k + 3, K, m, d)
            if tl.maximum(tl.maximum(i0, i1), tl.maximum(i2, i3)) >= d:
                table = (flip(c0, lane, 0) + flip(c1, lane, 1)) + (flip(c2, lane, 2) + flip(c3, lane, 3))
                table = tl.broadcast_to(table, [max(1, BITS // 4), 32])
                even, odd = interleave(sign_words(packed, i0, w, d, W), sign_words(packed, i1, w, d, W), 0x55555555, 1)
                even2, odd2 = interleave(sign_words(packed, i2, w, d, W), sign_words(packed, i3, w, d, W), 0x55555555, 1)
                bits0, bits2 = interleave(even, even2, 0x33333333, 2)
                bits1, bits3 = interleave(odd, odd2, 0x33333333, 2)
                row0 += tl.gather(table, (bits0 >> q) & 31, 1)  # bit 4 is the next coordinate's: both halves of the table are alike
                row1 += tl.gather(table, (bits1 >> q) & 31, 1)
                row2 += tl.gather(table, (bits2 >> q) & 31, 1)
                row3 += tl.gather(table, (bits3 >> q) & 31, 1)
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
                tl.atomic_add(y + to, tl.load(coefs + slot, mask=basis), mask=basis, sem="relaxed")
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
            tl.store(out + n * d + c, row.to(out.dtype.element_ty))

    @triton.jit(do_not_specialize=["K", "m"])
    def dot_kernel(indices, g, packed, out, y, x, sizes, grad, K, m, scale, d: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr):
        """out[n, k] = <phi_{indices[n, k]}, g[n]>: one token a program, g[n] kept in registers.

        If y, x and their sizes are given, g is the gradient of y |x| / |y|: with u = y / |y| its gradient |x| / |y| (g - u <u, g>)
        to y takes the place of g, and grad[n] = <u, g> x / |x| is that to x.
        """
        n = tl.program_id(0).to(tl.int64)
        indices += n * K
        out += n * K
        g += n * d
        b = tl.arange(0, BITS)[:, None]
        w = tl.max_contiguous(tl.arange(0, W)[None, :], [1, 1])  # one at a time, so that a thread has the signs of its own g
        at = tl.max_contiguous(b * W + w, [1, 1])
        row = tl.load(g + at, mask=at < d, other=0.0).to(tl.float32)
        if y is not None:
            y += n * d
            of_y = nonzero(tl.load(sizes + 2 * n))
            of_x = tl.load(sizes + 2 * n + 1)
            u = tl.load(y + at, mask=at < d, other=0.0) * (1.0 / of_y)
            along = tl.sum(u * row)
            row -= u * along
            ratio = of_x / of_y
            c = tl.arange(0, d)
            to_x = tl.load(x + n * d + c).to(tl.float32) * (along / nonzero(of_x))
            tl.store(grad + n * d + c, to_x.to(grad.dtype.element_ty))
        for k in tl.range(K, loop_unroll_factor=4):
            i = tl.load(indices + k)
            known = i.to(tl.uint64) < m
            i = tl.where(known, i, d).to(tl.int32)
            if i < d:
                s = tl.load(g + i).to(tl.float32)
                if y is not None:
                    s = s - tl.load(y + i) * (1.0 / of_y) * along
            else:
                sign = (sign_words(packed, i, w, d, W) << (31 - b)) & -2147483648
                s = tl.sum((row.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)) * scale
            if y is not None:
                s *= ratio
            tl.store(out + k, tl.where(known, s, float("nan")))

    @triton.jit(do_not_specialize=["rows", "low", "high"])
    def moments_kernel(parents, generators, pairs, moments, rows, low, high, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
        """moments[r] = mean and rstd, (2, D), of the children of parents[r]. In `pairs` the two lie side by side: one load.

        A child outside of low .. high - 1, of a wrong parent or generator, gets NaN.
        """
        r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
        j = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
        real = (r < rows) & (j < D)
        i = tl.load(parents + r, mask=r < rows, other=-1)
        child = i ^ tl.load(generators + j, mask=j < D, other=0)
        known = real & (i >= 0) & (i < low) & (child >= low) & (child < high)
        pair = tl.load(pairs + (child - low), mask=known, other=0x7FC000007FC00000)
        moments += r * (2 * D) + j
        tl.store(moments, pair.to(tl.int32).to(tl.float32, bitcast=True), mask=real)
        tl.store(moments + D, (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), mask=real)

    @triton.jit
    def standardise(score, i, r, rows, j, generators, moments, z, low, high, D: tl.constexpr, ROW: tl.constexpr):
        """Store (score - mean) * rstd of the children of parents i. NaN for a wrong parent or child.

        moments is a table with a row (2, D) for each parent; or, if there are generators, a pair for each feature.
        """
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
        tl.store(z + r[:, None] * ROW + j[None, :], (score - mean) * rstd, mask=(r[:, None] < rows) & (j[None, :] < D))

    @triton.jit
    def halves(tile, M: tl.constexpr, N: tl.constexpr):
        """The left and the right half of an (M, N) tile."""
        return tile.reshape(M, 2, N // 2).permute(0, 2, 1).split()

    @triton.jit(do_not_specialize=["rows", "low", "high"])
    def score_kernel(x, parents, packed, gamma, generators, moments, z, rows, low, high, scale,
                     P: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, d: tl.constexpr, BITS: tl.constexpr, W: tl.constexpr,
                     BM: tl.constexpr, BN: tl.constexpr, UPCAST: tl.constexpr):
        """z[n, p, j] = (<Gamma_j, h_i * x[n]> - mean) * rstd with i = parents[n, p], mean and rstd of feature i ^ g_j.

        A matrix product whose left side never exists: its row (n, p) is x[n] with the sign bits flipped by h_i, in
        registers. D generators of a row of z, ROW long. For generators and moments see standardise.
        """
        r = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)  # row = token * P + parent
        j = tl.program_id(1) * BN + tl.arange(0, BN)
        w = tl.arange(0, W)
        i = tl.load(parents + r, mask=r < rows, other=0)
        i = tl.where((i >= 0) & (i < low), i, 0).to(tl.int32)
        words = sign_words(packed, i[:, None], w[None, :], d, W)  # (BM, W)
        x += (r // P)[:, None] * d
        total = tl.zeros([BM, BN], tl.float32)
        for b in range(BITS):
            k = b * W + w
            piece = tl.load(x + k[None, :], mask=(r[:, None] < rows) & (k[None, :] < d), other=0.0)
            if x.dtype.element_ty == tl.float32:
                flip = (words << (31 - b)) & -2147483648
                piece = (piece.to(tl.int32, bitcast=True) ^ flip).to(tl.float32, bitcast=True)
            else:
                flip = (((words >> b) & 1) << 15).to(tl.int16)
                piece = (piece.to(tl.int16, bitcast=True) ^ flip).to(x.dtype.element_ty, bitcast=True)
            right = tl.load(gamma + k[:, None] * D + j[None, :], mask=(k[:, None] < d) & (j[None, :] < D), other=0.0)
            if UPCAST:  # Triton's interpreter multiplies the bit patterns of bfloat16
                piece, right = piece.to(tl.float32), right.to(tl.float32)
            total = tl.dot(piece, right, total, input_precision="ieee")
        # The parents again, and by quarters: what is not needed at a time must not take registers.
        i = tl.load(parents + r, mask=r < rows, other=-1)
        left, right = halves(total * scale, BM, BN)
        j = tl.program_id(1) * BN + tl.arange(0, BN // 4)
        for half in tl.static_range(2):
            one, two = halves(right if half else left, BM, BN // 2)
            standardise(one, i, r, rows, j, generators, moments, z, low, high, D, ROW)
            standardise(two, i, r, rows, j + BN // 4, generators, moments, z, low, high, D, ROW)
            j += BN // 2

    @triton.jit
    def magnitude_bits(z):
        """|z| as an integer of the same order, every NaN alike and largest."""
        return tl.minimum(z.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FC00000)

    @triton.jit
    def candidate_scores(z, mean, rstd, c, live):
        """z of candidates c; if moments are given, z is the input and its coordinates are standardised here."""
        value = tl.load(z + c, mask=live, other=0.0).to(tl.float32)
        if mean is not None:
            value = (value - tl.load(mean + c, mask=live, other=0.0)) * tl.load(rstd + c, mask=live, other=0.0)
        return value

    @triton.jit
    def sort_keys(value, parents, generators, c, live, D: tl.constexpr):
        """(|z|, lower index first, sign) of candidates c in one sortable integer: -1 where not live."""
        i = c
        if parents is not None:
            i = tl.load(parents + c // D, mask=live, other=0).to(tl.int32)
            i ^= tl.load(generators + c % D, mask=live, other=0).to(tl.int32)
        key = (magnitude_bits(value).to(tl.int64) << 32) | ((0x7FFFFFFF - i).to(tl.int64) << 1)
        return tl.where(live, key | ((value.to(tl.int32, bitcast=True) >> 31) & 1), -1)

    @triton.jit
    def key_index(key):
        return 0x7FFFFFFF - ((key >> 1) & 0x7FFFFFFF)

    @triton.jit
    def key_value(key):
        return ((key >> 32) | ((key & 1) << 31)).to(tl.int32).to(tl.float32, bitcast=True)

    @triton.jit(do_not_specialize=["k", "keep"])
    def select_kernel(z, mean, rstd, parents, generators, indices, coefs, scratch, k, keep,
                      P: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, THREADS: tl.constexpr):
        """The k distinct candidates of a token with the largest |z|, largest first, ties to the lower index.

        The candidates are dealt to BLOCK groups. A threshold that `keep` group maxima reach is reached by at least
        `keep` candidates and hardly more: those are listed in scratch, sorted, and freed of repeats. Where that
        leaves fewer than k, or more than S were listed (many ties), the next largest is looked for k times over.
        Without parents candidate c is feature c.
        """
        C: tl.constexpr = P * D
        n = tl.program_id(0).to(tl.int64)
        z += n * C
        if parents is not None:
            parents += n * P
        scratch += n * S
        lane = tl.max_contiguous(tl.arange(0, BLOCK), 1)  # one at a time: a list is then written by the threads that read z
        slot = tl.arange(0, S)

        top = tl.zeros([BLOCK], tl.uint32)  # |z| without its sign bit, shifted: one instruction that the multiplier may take
        for start in range(0, C, BLOCK):
            c = start + lane
            size = candidate_scores(z, mean, rstd, c, c < C).to(tl.uint32, bitcast=True) << 1
            top = tl.maximum(top, size)
        top = tl.where(lane < C, tl.minimum((top >> 1).to(tl.int32), 0x7FC00000), -1)  # as magnitude_bits
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
        for first in range(0, C, 16 * BLOCK):
            hits = tl.zeros([BLOCK], tl.int32)  # of a group's next 16: which reach the threshold, and above bit 16 how many
            for turn in range(min(16, (C + BLOCK - 1) // BLOCK)):
                c = first + turn * BLOCK + lane
                size = candidate_scores(z, mean, rstd, c, c < C).to(tl.uint32, bitcast=True) << 1
                hits += tl.where((size >= threshold.to(tl.uint32) << 1) & (c < C), (1 << turn) + 65536, 0)
            many = (hits >> 16).reshape(BLOCK // THREADS, THREADS)  # a column is a thread's own: added up there, then over threads
            column = tl.sum(many, 0)
            to = (listed + (tl.cumsum(column, 0) - column)[None, :] + tl.cumsum(many, 0) - many).reshape(BLOCK)
            listed += tl.sum(column, 0)
            hits &= 65535
            while tl.max(hits, 0) > 0:  # a group seldom has more than two
                bit = hits & -hits
                c = first + ((bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127) * BLOCK + lane
                tl.store(places + to, c, mask=(hits > 0) & (to < S))
                to += 1
                hits ^= bit
        tl.debug_barrier()  # scratch is written and read by different threads
        live = slot < listed
        chosen = tl.load(places + slot, mask=live, other=0)
        key = sort_keys(candidate_scores(z, mean, rstd, chosen, live), parents, generators, chosen, live, D)
        key = tl.sort(key, descending=True)
        tl.debug_barrier()  # all have read the list before the keys overwrite it
        tl.store(scratch + slot, key)
        tl.debug_barrier()
        before = tl.load(scratch + slot - 1, mask=slot > 0, other=-1)
        fresh = (live & (key != before)).to(tl.int32)
        rank = tl.cumsum(fresh, 0) - 1
        found = tl.sum(fresh, 0)
        if (listed <= S) & (found >= k):
            tl.store(indices + n * k + rank, key_index(key).to(tl.int64), mask=(fresh > 0) & (rank < k))
            tl.store(coefs + n * k + rank, key_value(key), mask=(fresh > 0) & (rank < k))
        else:
            last = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
            for place in range(k):
                best = tl.full([], -1, tl.int64)
                for start in range(0, C, BLOCK):
                    c = start + lane
                    keys = sort_keys(candidate_scores(z, mean, rstd, c, c < C), parents, generators, c, c < C, D)
                    best = tl.maximum(best, tl.max(tl.where(keys < last, keys, -1), 0))
                value = tl.where(best < 0, 0.0, key_value(best))  # fewer than k distinct: repeat the last, at zero
                last = tl.where(best < 0, last, best)
                tl.store(indices + n * k + place, key_index(last).to(tl.int64))
                tl.store(coefs + n * k + place, value)


# What each launch is: the kernel, the grid, its arguments. One place for running here and for compiling elsewhere.


def decode_launch(indices, coefs, y, m, scale, out=None, x=None, sizes=None):
    d = y.shape[1]
    bits, W = packing(d)
    return decode_kernel, (len(indices),), dict(
        indices=indices, coefs=coefs, packed=packed_signs(d, m, y.device), y=y, x=x, out=out, sizes=sizes, K=indices.shape[1], m=m,
        scale=scale, d=d, BITS=bits, W=W, num_warps=max(1, d // 2048),
        SLOTS=triton.next_power_of_2(indices.shape[1]) if y.dtype == torch.float32 else 0)


def dot_launch(indices, g, out, m, y=None, x=None, sizes=None, grad=None):
    d = g.shape[1]
    bits, W = packing(d)
    return dot_kernel, (len(indices),), dict(
        indices=indices, g=g, packed=packed_signs(d, m, g.device), out=out, y=y, x=x, sizes=sizes, grad=grad, K=indices.shape[1], m=m,
        scale=d ** -0.5, d=d, BITS=bits, W=W, num_warps=max(1, d // 2048))


def moments_launch(parents, generators, pairs, moments, low):
    D, BM = len(generators), 16
    BN = min(256, triton.next_power_of_2(D))
    return moments_kernel, (triton.cdiv(len(parents), BM), triton.cdiv(D, BN)), dict(
        parents=parents, generators=generators, pairs=pairs, moments=moments, rows=len(parents), low=low, high=low + len(pairs),
        D=D, BM=BM, BN=BN, num_warps=4)


def score_launch(x, parents, gamma, generators, moments, z, low, high):
    """z (N*P, D), all columns of a longer row or some. With generators, moments is a pair for each feature, else a table."""
    (N, d), P, D = x.shape, parents.shape[1], gamma.shape[1]
    bits, W = packing(d)
    # All generators in one tile where registers allow it: the signs are flipped once, and gamma is read once in 128 rows.
    BM, BN, warps = (128, 256, 8) if W <= 64 else (32, 128, 4)
    if x.dtype == torch.float32:
        BM, BN, warps = 32, 64, 4  # no tensor cores for exact float32: a small tile, as the products stay in registers
    if generators is not None:
        BN = min(BN, 128)  # a pair for each product takes more registers than a row for all of a parent
    BN = min(BN, max(32, triton.next_power_of_2(D)))
    return score_kernel, (triton.cdiv(N * P, BM), triton.cdiv(D, BN)), dict(
        x=x, parents=parents, packed=packed_signs(d, low, x.device), gamma=gamma, generators=generators, moments=moments, z=z,
        rows=N * P, low=low, high=high, scale=d ** -0.5, P=P, D=D, ROW=z.stride(0), d=d, BITS=bits, W=W, BM=BM, BN=BN,
        num_warps=warps, num_stages=3 if W <= 32 else 2, UPCAST=triton.knobs.runtime.interpret and x.dtype == torch.bfloat16)


def select_launch(z, parents, generators, indices, coefs, mean=None, rstd=None):
    N, k = indices.shape
    P, D = (1, z.shape[1]) if parents is None else (parents.shape[1], len(generators))
    check(k <= 1024, f"the kernel selects at most 1024 features of a level, not {k}")
    keep = k + max(16, k // 4)
    BLOCK = max(256, triton.next_power_of_2(4 * keep))
    S = triton.next_power_of_2(3 * keep // 2)
    warps = 1 if BLOCK <= 512 else BLOCK // 256
    scratch = torch.empty(N, S, dtype=torch.int64, device=z.device)
    return select_kernel, (N,), dict(
        z=z, mean=mean, rstd=rstd, parents=parents, generators=generators, indices=indices, coefs=coefs, scratch=scratch, k=k, keep=keep,
        P=P, D=D, BLOCK=BLOCK, S=S, THREADS=32 * warps, num_warps=warps)


def run(launch):
    kernel, grid, arguments = launch
    device = next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))
    if 0 not in grid:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            kernel[grid](**arguments)


def decode_triton(indices, coefs, d, m, dtype=torch.float32):
    y = coefs.new_empty(len(indices), d)
    out = None if dtype == y.dtype else torch.empty_like(y, dtype=dtype)
    run(decode_launch(indices, coefs, y, m, d ** -0.5, out))
    return y if out is None else out


def dot_triton(indices, x, m):
    out = torch.empty(indices.shape, dtype=torch.float32, device=x.device)
    run(dot_launch(indices, x, out, m))
    return out


def decode_like_triton(indices, coefs, x, m):
    """y |x| / |y| in the type of x, with y = decode(indices, coefs); and for the gradient y (N, d) and |y|, |x| (N, 2)."""
    y, out = torch.empty_like(x, dtype=torch.float32), torch.empty_like(x)
    sizes = torch.empty(len(x), 2, device=x.device)
    run(decode_launch(indices, coefs, y, m, x.shape[1] ** -0.5, out, x, sizes))
    return out, y, sizes


def decode_like_backward_triton(indices, grad, y, x, sizes, m):
    """The gradients of decode_like_triton to coefs (N, K) and to x (N, d)."""
    of_coefs, of_x = torch.empty(indices.shape, dtype=torch.float32, device=x.device), torch.empty_like(x)
    run(dot_launch(indices, grad, of_coefs, m, y, x, sizes, of_x))
    return of_coefs, of_x


COLUMNS = 4096  # generators whose sign rows are held at a time


def score_triton(x, parents, generators, mean, rstd, low):
    (N, d), P, D = x.shape, parents.shape[1], len(generators)
    high = low + len(mean)
    z = torch.empty(N, P * D, dtype=torch.float32, device=x.device)
    moments = torch.stack([mean, rstd], 1).view(torch.int64)
    shared = low <= N * P and low * D <= 2 ** 24  # parents recur: a row of moments for each, up to 128 MB
    if shared:
        pairs, moments = moments, torch.empty(low, 2, D, device=x.device)
        run(moments_launch(torch.arange(low, device=x.device), generators, pairs, moments, low))
    for start in range(0, D, D if shared else COLUMNS):
        part = generators[start : start + (D if shared else COLUMNS)]
        gamma = torch.empty(len(part), d, dtype=x.dtype, device=x.device)
        ones = torch.ones(len(part), 1, device=x.device)
        run(decode_launch(part[:, None], ones, gamma, high, 1.0))  # the sign rows of the generators
        columns = z.view(N * P, D)[:, start : start + len(part)]
        run(score_launch(x, parents, gamma.t().contiguous(), None if shared else part, moments, columns, low, high))
    return z


def select_triton(z, parents, generators, k):
    indices = torch.empty(len(z), k, dtype=torch.int64, device=z.device)
    coefs = torch.empty(len(z), k, dtype=torch.float32, device=z.device)
    run(select_launch(z, parents, generators, indices, coefs))
    return indices, coefs


def basis_triton(x, mean, rstd, k):
    """Level 0: the k coordinates of x with the largest |z|, z = (x - mean) * rstd, and their z. z is never in memory."""
    indices = torch.empty(len(x), k, dtype=torch.int64, device=x.device)
    coefs = torch.empty(len(x), k, dtype=torch.float32, device=x.device)
    run(select_launch(x, None, None, indices, coefs, mean, rstd))
    return indices, coefs


# Custom operators: opaque to torch.compile, with shapes for tracing and gradients for autograd.


def backend(x):
    """Which path serves this tensor. All give the same result; only their speed differs."""
    if x.dtype == torch.float64:
        return "reference"
    if BACKEND:
        return BACKEND
    if x.device.type == "cuda":
        if triton:
            return "triton"
        warn_once("triton is not installed, so the bottleneck runs in plain torch, many times slower: pip install triton")
    return "c" if x.device.type == "cpu" and has_library() else "reference"


@functools.lru_cache(maxsize=None)
def warn_once(text):
    warnings.warn(text, stacklevel=3)


def wide(x):
    """The type sums are taken in: float32, or float64 for float64 (checks only)."""
    return x if x.dtype == torch.float64 else x.float()


def exact(operation):
    """Without autocast, which would round the products inside to bfloat16."""
    @functools.wraps(operation)
    def run_exact(*arguments):
        with torch.autocast(arguments[0].device.type, enabled=False):
            return operation(*arguments)
    return run_exact


def check_range(name, indices, low, high):
    """Raise for a wrong index where that costs nothing; on a GPU, where looking would stall it, the token gets NaN."""
    if indices.device.type == "cpu" and indices.numel():
        least, most = (int(v) for v in indices.aminmax())
        if least < low or most >= high:
            raise IndexError(f"{name} must lie in {low}..{high - 1}, but these go from {least} to {most}")


def by_chunks(reference, tokens, elements, *others):
    """A reference for some tokens at a time: it makes `elements` integers of 64 bits for each."""
    rows = chunks(len(tokens[0]), elements, 2 ** 24) or [slice(0, 0)]
    parts = [reference(*(tensor[part] for tensor in tokens), *others) for part in rows]
    return torch.cat(parts) if torch.is_tensor(parts[0]) else tuple(map(torch.cat, zip(*parts)))


@torch.library.custom_op("parity::decode", mutates_args=())
@exact
def decode_op(indices: torch.Tensor, coefs: torch.Tensor, d: int, m: int, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
    check_range("feature indices", indices, 0, m)
    path, dtype = backend(coefs), dtype or coefs.dtype
    if path == "triton":
        return decode_triton(indices.contiguous(), coefs.contiguous(), d, m, dtype)
    if path == "c":
        return decode_c(indices.contiguous(), coefs.contiguous(), d, m).to(dtype)
    return by_chunks(decode_reference, (indices, coefs), indices.shape[1] * d, d).to(dtype)


@torch.library.custom_op("parity::decode_like", mutates_args=())
def decode_like_op(indices: torch.Tensor, coefs: torch.Tensor, like: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result; what it was before it was scaled (no rows in C, whose gradient needs the result only); norms."""
    check_range("feature indices", indices, 0, m)
    way = decode_like_c if backend(like) == "c" else decode_like_triton
    return way(indices.contiguous(), coefs.contiguous(), like.contiguous(), m)


@torch.library.custom_op("parity::decode_like_backward", mutates_args=())
def decode_like_backward_op(indices: torch.Tensor, grad: torch.Tensor, y: torch.Tensor, like: torch.Tensor, norms: torch.Tensor,
                            m: int) -> tuple[torch.Tensor, torch.Tensor]:
    way = decode_like_backward_c if backend(like) == "c" else decode_like_backward_triton
    return way(indices.contiguous(), grad.contiguous(), y, like.contiguous(), norms, m)


@torch.library.custom_op("parity::dot", mutates_args=())
@exact
def dot_op(indices: torch.Tensor, x: torch.Tensor, m: int) -> torch.Tensor:
    check_range("feature indices", indices, 0, m)
    path = backend(x)
    if path == "reference":
        return by_chunks(dot_reference, (indices, wide(x)), indices.shape[1] * x.shape[1])
    return dot_c(indices.contiguous(), wide(x).contiguous(), m) if path == "c" else dot_triton(indices.contiguous(), x.contiguous(), m)


@torch.library.custom_op("parity::score", mutates_args=())
@exact
def score_op(x: torch.Tensor, parents: torch.Tensor, generators: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
             low: int, method: str) -> torch.Tensor:
    check_range("parents", parents, 0, low)
    check_range("generators", generators, low, low + len(mean))
    if backend(x) == "c" and method == "transform":
        return search_transform_c(wide(x).contiguous(), parents.contiguous(), generators, mean, rstd, low, 1, torch.arange(len(x)))[2]
    return score(x, parents, generators, mean, rstd, low)


def score(x, parents, generators, mean, rstd, low):
    level = generators, mean, rstd, low
    path = backend(x)
    if path == "reference":
        return by_chunks(score_reference, (wide(x), parents), parents.shape[1] * len(generators) * x.shape[1], *level)
    if path == "c":
        return score_product_c(wide(x).contiguous(), parents.contiguous(), *level)
    return score_triton(x.contiguous(), parents.contiguous(), *level)


@torch.library.custom_op("parity::select", mutates_args=())
def select_op(z: torch.Tensor, parents: torch.Tensor, generators: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return select(z, parents, generators, k)


def select(z, parents, generators, k):
    way = {"reference": select_reference, "c": select_c, "triton": select_triton}[backend(z)]
    return way(z.contiguous(), parents.contiguous(), generators, k)


@torch.library.custom_op("parity::basis", mutates_args=())
def basis_op(x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    path = backend(x)
    if path == "triton":
        return basis_triton(x.contiguous(), mean, rstd, k)
    return (basis_c if path == "c" else basis_reference)(wide(x).contiguous(), mean.contiguous(), rstd.contiguous(), k)


@torch.library.custom_op("parity::search", mutates_args=())
@exact
def search_op(x: torch.Tensor, parents: torch.Tensor, generators: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
              low: int, k: int, rows: torch.Tensor, method: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_range("parents", parents, 0, low)
    check_range("generators", generators, low, low + len(mean))
    if backend(x) == "c" and method == "transform":
        return search_transform_c(wide(x).contiguous(), parents.contiguous(), generators, mean, rstd, low, k, rows)
    C = parents.shape[1] * len(generators)
    indices = torch.empty(len(x), k, dtype=torch.int64, device=x.device)
    coefs = torch.empty(len(x), k, dtype=wide(x[:0]).dtype, device=x.device)
    sampled = torch.empty(len(rows), C, dtype=coefs.dtype, device=x.device)
    most = 2 * CHUNK if x.device.type == "cpu" else 2 ** 26  # scores held at a time: 4 MB, or 256 MB on a GPU
    for part in chunks(len(x), C, most):
        z = score(x[part], parents[part], generators, mean, rstd, low)
        indices[part], coefs[part] = select(z, parents[part], generators, k)
        here = (rows >= part.start) & (rows < part.stop)
        sampled = torch.where(here[:, None], z[(rows - part.start).clamp(0, len(z) - 1)], sampled)
    return indices, coefs, sampled


@torch.library.custom_op("parity::collect", mutates_args=("sums",))
def collect_op(z: torch.Tensor, parents: torch.Tensor, generators: torch.Tensor, sums: torch.Tensor) -> None:
    if backend(z) == "c":
        call("collect", z, parents.contiguous(), generators, sums, *parents.shape, len(generators), sums.shape[1])
    else:
        collect_reference(z, parents, generators, sums)


@torch.library.custom_op("parity::attach", mutates_args=())
def attach_op(values: torch.Tensor, indices: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, m: int) -> torch.Tensor:
    return values.clone()


@decode_op.register_fake
def _(indices, coefs, d, m, dtype=None):
    return coefs.new_empty(indices.shape[0], d, dtype=dtype or coefs.dtype)


@decode_like_op.register_fake
def _(indices, coefs, like, m):
    in_c = backend(like) == "c"
    before = like.new_empty(0 if in_c else like.shape[0], like.shape[1], dtype=torch.float32)
    return torch.empty_like(like), before, like.new_empty(like.shape[0], 2, dtype=torch.float64 if in_c else torch.float32)


@decode_like_backward_op.register_fake
def _(indices, grad, y, like, norms, m):
    return like.new_empty(indices.shape, dtype=torch.float32), torch.empty_like(like)


@dot_op.register_fake
def _(indices, x, m):
    return wide(x).new_empty(indices.shape)


@score_op.register_fake
def _(x, parents, generators, mean, rstd, low, method):
    return wide(x).new_empty(x.shape[0], parents.shape[1] * generators.shape[0])


@select_op.register_fake
def _(z, parents, generators, k):
    return parents.new_empty(z.shape[0], k), z.new_empty(z.shape[0], k)


@basis_op.register_fake
def _(x, mean, rstd, k):
    return x.new_empty(x.shape[0], k, dtype=torch.int64), wide(x).new_empty(x.shape[0], k)


@search_op.register_fake
def _(x, parents, generators, mean, rstd, low, k, rows, method):
    C = parents.shape[1] * generators.shape[0]
    return parents.new_empty(x.shape[0], k), wide(x).new_empty(x.shape[0], k), wide(x).new_empty(rows.shape[0], C)


@collect_op.register_fake
def _(z, parents, generators, sums):
    return None


@attach_op.register_fake
def _(values, indices, x, scale, m):
    return torch.empty_like(values)


def save_decode(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.m = inputs[3]


def decode_backward(ctx, grad):
    return None, dot_op(ctx.saved_tensors[0], grad, ctx.m), None, None, None


def save_decode_like(ctx, inputs, output):
    indices, _, like, ctx.m = inputs
    result, before, norms = output
    ctx.save_for_backward(indices, result if backend(like) == "c" else before, like, norms)
    ctx.mark_non_differentiable(before, norms)


def decode_like_backward(ctx, grad, *_):
    return None, *decode_like_backward_op(ctx.saved_tensors[0], grad, *ctx.saved_tensors[1:], ctx.m), None


def save_dot(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])
    ctx.d, ctx.dtype, ctx.m = inputs[1].shape[1], inputs[1].dtype, inputs[2]


def dot_backward(ctx, grad):
    return None, decode_op(ctx.saved_tensors[0], grad, ctx.d, ctx.m, ctx.dtype), None


def save_score(ctx, inputs, output):
    x, parents, generators, mean, rstd, low, _ = inputs
    ctx.save_for_backward(parents, generators, rstd)
    ctx.d, ctx.dtype, ctx.low = x.shape[1], x.dtype, low


def score_backward(ctx, grad):
    parents, generators, rstd = ctx.saved_tensors
    children = (parents[:, :, None] ^ generators).flatten(1)
    grad = decode_op(children, grad * rstd[children - ctx.low], ctx.d, ctx.low + len(rstd), ctx.dtype)
    return grad, None, None, None, None, None, None


def save_attach(ctx, inputs, output):
    _, indices, x, scale, m = inputs
    ctx.save_for_backward(indices, scale)
    ctx.d, ctx.dtype, ctx.m = x.shape[1], x.dtype, m


def attach_backward(ctx, grad):
    indices, scale = ctx.saved_tensors
    return None, None, decode_op(indices, grad * scale, ctx.d, ctx.m, ctx.dtype), None, None


decode_op.register_autograd(decode_backward, setup_context=save_decode)
decode_like_op.register_autograd(decode_like_backward, setup_context=save_decode_like)
dot_op.register_autograd(dot_backward, setup_context=save_dot)
score_op.register_autograd(score_backward, setup_context=save_score)
attach_op.register_autograd(attach_backward, setup_context=save_attach)


# Public functions: they check what they are given, then call the operators.

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check(condition, text):
    if not condition:
        raise ValueError(text)


def check_floats(name, tensor, dims=2):
    check(tensor.dtype in FLOATS, f"{name} must be float32, bfloat16 or float16 (float64 for checks), not {tensor.dtype}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, not the shape {tuple(tensor.shape)}")


def check_indices(name, indices, rows=None):
    """As int64. The text is made only when it is needed: under torch.compile it would fix the number of tokens."""
    check(indices.dtype in (torch.int32, torch.int64), f"{name} must be integers (int64), not {indices.dtype}")
    if rows is None and indices.dim() != 1 or rows is not None and (indices.dim() != 2 or indices.shape[0] != rows):
        raise ValueError(f"{name} must have shape {'(D,)' if rows is None else f'({rows}, K), a row a token'}, not {tuple(indices.shape)}")
    if indices.shape[-1] == 0:
        raise ValueError(f"{name} are empty")
    return indices.long()


def check_features(d, *counts):
    """Tables and levels end at powers of two, and there are no more than d*d features."""
    log2_width(d)
    for m in counts:
        check(d <= m <= d * d and m & m - 1 == 0, f"{m} is no number of features for d={d}: take a power of two from {d} to {d * d}")


def parity_decode(indices, coefs, d, m=None, like=None):
    """sum_k coefs[n, k] * phi_{indices[n, k]}: indices and coefs (N, K) -> (N, d). Differentiable in coefs.

    m: the number of features in use, all d*d if not given; a smaller one makes a smaller table.
    like (N, d): the result gets its norms, row by row, and its type. Differentiable in it, too.
    """
    m = m or d * d
    check_features(d, m)
    check_floats("coefs", coefs)
    indices = check_indices("indices", indices, coefs.shape[0])
    if coefs.shape != indices.shape:
        raise ValueError(f"coefs {tuple(coefs.shape)} and indices {tuple(indices.shape)} must have one shape")
    if like is None:
        return decode_op(indices, wide(coefs), d, m).to(coefs.dtype)
    check_floats("like", like)
    if like.shape[0] != coefs.shape[0] or like.shape[1] != d:
        raise ValueError(f"like must have shape ({coefs.shape[0]}, {d}), not {tuple(like.shape)}")
    path = backend(like)
    if path == backend(coefs) != "reference":
        return decode_like_op(indices, wide(coefs), like if path == "triton" else wide(like), m)[0].to(like.dtype)
    return rescale(decode_op(indices, wide(coefs), d, m), like)


def parity_dot(indices, x, m=None):
    """<phi_{indices[n, k]}, x[n]>: indices (N, K), x (N, d) -> (N, K), float32 at least. Differentiable in x."""
    check_floats("x", x)
    d = x.shape[1]
    m = m or d * d
    check_features(d, m)
    return dot_op(check_indices("indices", indices, x.shape[0]), x, m)


def attach_scores(values, indices, x, scale, m):
    """values, known to be scale * parity_dot(indices, x) plus a constant: returns them with that gradient to x."""
    return attach_op(values, indices, x, scale, m)


def collect_sums(z, parents, generators, sums):
    """Add to sums (3, m), by feature: tokens on which it was a candidate, its z there, its z squared.

    z (R, P*D) of the children of parents (R, P); a child of two parents counts once.
    """
    collect_op(z, parents, generators, sums)


def check_level(x, parents, generators, mean, rstd, low, method):
    """The arguments of score_children as the operators take them."""
    check_floats("x", x)
    check_floats("mean", mean, 1)
    check_floats("rstd", rstd, 1)
    d = x.shape[1]
    parents, generators = check_indices("parents", parents, x.shape[0]), check_indices("generators", generators)
    check(len(mean) == len(rstd), f"mean and rstd must have one length, not {len(mean)} and {len(rstd)}")
    check_features(d, low, low + len(mean))
    if method == "auto":
        method = scoring_method(x.device, d, parents.shape[1], len(generators), len(mean))
    check(method in ("gemm", "transform"), f"method must be 'auto', 'gemm' or 'transform', not {method!r}")
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x, parents, generators, mean.to(kind), rstd.to(kind), low, method


def score_children(x, parents, generators, mean, rstd, low, method="auto"):
    """Standardised scores of all children of a level, repeats included.

    x (N, d); parents (N, P), features below `low`; generators (D,), each taking any parent to a feature from `low` to
    low + F - 1; mean, rstd (F,) of those features -> z (N, P*D), parent by parent. Differentiable in x.
    method: "gemm" or "transform", two exact ways of which "auto" takes the faster.
    """
    return score_op(*check_level(x, parents, generators, mean, rstd, low, method))


def select_distinct(z, parents, generators, k):
    """The k distinct children with the largest |z|, largest first, ties to the lower index: (indices, coefs), (N, k).

    z (N, P*D) from score_children; a child reached from two parents has one z and counts once. With fewer than k
    distinct children an index is repeated with coefficient zero. No gradient: selection has none.
    """
    check_floats("z", z)
    parents, generators = check_indices("parents", parents, z.shape[0]), check_indices("generators", generators)
    check_count(z.shape[1], parents, generators, k)
    return select_op(wide(z.detach()), parents, generators, k)


def check_count(candidates, parents, generators, k):
    P, D = parents.shape[1], len(generators)
    check(candidates == P * D, f"z has {candidates} candidates a token, but {P} parents x {D} generators were given")
    check(1 <= k <= candidates, f"k={k} features cannot be selected from {candidates} candidates")


def search_basis(x, mean, rstd, k):
    """Level 0, whose scores are the coordinates: the k largest |z| of z = (x - mean) * rstd as (indices, coefs), (N, k).

    x (N, d); mean, rstd (d,). Ties go to the lower index. No gradient: see attach_scores.
    """
    check_floats("x", x)
    check(len(mean) == len(rstd) == x.shape[1], f"mean and rstd must have the length {x.shape[1]}, not {len(mean)} and {len(rstd)}")
    check(1 <= k <= x.shape[1], f"k={k} features cannot be selected from {x.shape[1]} coordinates")
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    return basis_op(x.detach(), mean.to(kind), rstd.to(kind), k)


def search_children(x, parents, generators, mean, rstd, low, k, method="auto", rows=None):
    """select_distinct(score_children(...), ..., k), some tokens at a time. No gradient: see attach_scores.

    rows (R,): tokens whose scores to return too, (R, P*D), as a third value.
    """
    *level, method = check_level(x.detach(), parents, generators, mean, rstd, low, method)
    check_count(parents.shape[1] * len(generators), parents, generators, k)
    none = torch.empty(0, dtype=torch.int64, device=x.device)
    found = search_op(*level, k, none if rows is None else rows, method)
    return found[:2] if rows is None else found


# python kernels.py: compile for GPUs that are not here.

SHARED_LIMIT = {80: 163, 90: 227, 100: 227, 120: 99}  # KiB of shared memory that one program may use
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int32: "*i32", torch.int64: "*i64"}


def paper_launches(dtype=torch.bfloat16, tokens=2):
    """Every kernel at every shape of the paper's models: (shape, launch)."""
    for d, t in (1024, 10), (2048, 11):
        x, y, sizes = torch.empty(tokens, d, dtype=dtype), torch.empty(tokens, d), torch.empty(tokens, 2)
        bits, active, D = (t, 15, 17), (16, 32, 64), 256
        for levels in 2, 3:
            K, m = sum(active[:levels]), 2 ** bits[levels - 1]
            indices, coefs = torch.empty(tokens, K, dtype=torch.int64), torch.empty(tokens, K)
            yield f"d={d} K={K} like x", decode_launch(indices, coefs, y, m, 1.0, x, x, sizes)
            yield f"d={d} K={K}", decode_launch(indices, coefs, y, m, 1.0, x)
            yield f"d={d} K={K}", dot_launch(indices, x, coefs, m)
            yield f"d={d} K={K} like x", dot_launch(indices, x, coefs, m, y, x, sizes, x)
        for level, k in enumerate(active):
            indices, coefs = torch.empty(tokens, k, dtype=torch.int64), torch.empty(tokens, k)
            if level == 0:
                yield f"d={d} C={d} k={k}", select_launch(x, None, None, indices, coefs, torch.empty(d), torch.empty(d))
                continue
            P, low = active[level - 1], 2 ** bits[level - 1]
            parents, generators = torch.empty(tokens, P, dtype=torch.int64), torch.empty(D, dtype=torch.int64)
            gamma, pairs = torch.empty(d, D, dtype=dtype), torch.empty(2 * low, dtype=torch.int64)
            z, moments = torch.empty(tokens, P * D), torch.empty(low, 2, D)
            yield f"d={d} D={D}", moments_launch(parents.flatten(), generators, pairs, moments, low)
            yield f"d={d} P={P} D={D}", score_launch(x, parents, gamma, None, moments, z.view(-1, D), low, 2 * low)
            yield f"d={d} C={P * D} k={k}", select_launch(z, parents, generators, indices, coefs)
        for m, k in (2 ** 15, 48), (2 ** 17, 112):  # flat: all features are children of feature 0
            parents, generators = torch.empty(tokens, 1, dtype=torch.int64), torch.empty(m - d, dtype=torch.int64)
            z, pairs, gamma = torch.empty(tokens, m - d), torch.empty(m - d, dtype=torch.int64), torch.empty(d, COLUMNS, dtype=dtype)
            yield f"d={d} flat m={m}", score_launch(x, parents, gamma, generators[:COLUMNS], pairs, z[:, :COLUMNS], d, m)
            yield f"d={d} flat m={m} k={k}", select_launch(
                z, parents, generators, torch.empty(tokens, k, dtype=torch.int64), torch.empty(tokens, k))


def machine_code(launch, capability):
    """A launch compiled for a compute capability, without such a GPU: (the binary, its bytes of shared memory)."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, _, arguments = launch
    options = {name: arguments[name] for name in ("num_warps", "num_stages") if name in arguments}
    signature, constants, aligned = {}, {}, {}
    for position, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            aligned[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    source = ASTSource(kernel, signature, constants, aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return binary.asm["cubin"], binary.metadata.shared


def cuobjdump(cubin, option):
    """What NVIDIA's tool, which comes with Triton, says about a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
        return subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True).stdout


def compile_for(launch, capability):
    """What a launch needs on a compute capability: (registers, stack, local, shared bytes)."""
    cubin, shared = machine_code(launch, capability)
    text = cuobjdump(cubin, "--dump-resource-usage")
    registers, stack, local = (int(re.search(rf"{word}:(\d+)", text[text.index("Function"):])[1])
                               for word in ("REG", "STACK", "LOCAL"))
    return registers, stack, local, shared


def main():
    if triton is None:
        raise SystemExit("kernels.py: triton is not installed (it exists for Linux only): pip install triton==3.7.1")
    print(f"{'kernel':14} {'shape':22} {'target':>7} {'warps':>5} {'registers':>9} {'stack':>5} {'local':>5} {'shared':>9}")
    wrong = 0
    for shape, launch in paper_launches():
        for capability, limit in SHARED_LIMIT.items():
            registers, stack, local, shared = compile_for(launch, capability)
            bad = stack or local or shared > limit * 1024
            wrong += bool(bad)
            print(f"{launch[0].__name__:14} {shape:22} {'sm_' + str(capability):>7} {launch[2]['num_warps']:5} {registers:9} "
                  f"{stack:5} {local:5} {shared / 1024:5.1f} KiB{'  <- too much' if bad else ''}", flush=True)
    print(f"{wrong} of these use stack, local memory or more shared memory than the card has" if wrong else
          "no stack, no local memory, shared memory within each card's limit")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
