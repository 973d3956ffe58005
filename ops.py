"""The bottleneck's operations as torch operators, differentiable and checked, on the path fastest where they run.

    parity_decode(indices, coefs, d)      sum of coefficient times dictionary row                (N, K) -> (N, d)
    parity_dot(indices, x)                inner products with dictionary rows                    (N, d) -> (N, K)
    score_children(x, parents, ...)       z of every child of every parent                       (N, d) -> (N, P*D)
    select_distinct(z, ...)               the k distinct children with the largest |z|           (N, P*D) -> (N, k)
    search_children(x, parents, ...)      both in one: the (N, P*D) scores never exist for all tokens
    search_basis(x, ...)                  the same for level 0, whose scores are the coordinates
    encode_features(x, ...)               all levels in one                                      (N, d) -> (N, K)
    narrow_features(x, ...)               all levels, then decode, in one: a whole bottleneck    (N, d) -> (N, d)

Each has a plain torch reference and a Triton kernel in kernels.py, which has the equations and the letters, and a
function in C in kernels_cpu.py. All give the same result: `backend` picks.
"""
import functools
import math
import warnings

import torch
from torch.autograd import forward_ad

import kernels
import kernels_cpu
from kernels import rescale, triton, wide
from kernels_cpu import check_range, chunks, has_library
from kloosterman import log2_width

BACKEND = None  # None picks by device; "reference", "c" or "triton" forces one path (tests do)


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
        warn_once("triton is not installed, so the bottleneck runs in plain torch, many times slower: "
                  "pip install triton")
    return "c" if x.device.type == "cpu" and has_library() else "reference"


@functools.cache
def warn_once(text):
    warnings.warn(text, stacklevel=3)


def exact(operation):
    """Without autocast, which would round the products inside to bfloat16."""
    @functools.wraps(operation)
    def run_exact(*arguments):
        device = arguments[0].device.type
        if not torch.is_autocast_enabled(device):
            return operation(*arguments)
        with torch.autocast(device, enabled=False):
            return operation(*arguments)
    return run_exact


def by_chunks(reference, tokens, elements, *others):
    """A reference for some tokens at a time: it makes `elements` integers of 64 bits for each."""
    rows = chunks(len(tokens[0]), elements, 2 ** 24) or [slice(0, 0)]
    parts = [reference(*(tensor[part] for tensor in tokens), *others) for part in rows]
    return torch.cat(parts) if torch.is_tensor(parts[0]) else tuple(map(torch.cat, zip(*parts)))


@torch.library.custom_op("parity::decode", mutates_args=())
@exact
def decode_op(indices: torch.Tensor, coefs: torch.Tensor, d: int, m: int,
              dtype: torch.dtype | None = None) -> torch.Tensor:
    check_range("feature indices", indices, 0, m)
    path, dtype = backend(coefs), dtype or coefs.dtype
    if path == "triton":
        return kernels.decode_triton(indices.contiguous(), coefs.contiguous(), d, m, dtype)
    if path == "c":
        return kernels_cpu.decode_c(indices.contiguous(), coefs.contiguous(), d, m).to(dtype)
    return by_chunks(kernels.decode_reference, (indices, coefs), indices.shape[1] * d, d).to(dtype)


@torch.library.custom_op("parity::decode_like", mutates_args=())
def decode_like_op(indices: torch.Tensor, coefs: torch.Tensor, like: torch.Tensor,
                   m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result; what it was before it was scaled (no rows in C, whose gradient needs the result only);
    the norms of that and of `like`."""
    check_range("feature indices", indices, 0, m)
    return decode_like(indices, coefs, like, m)


def decode_like(indices, coefs, like, m):
    way = kernels_cpu.decode_like_c if backend(like) == "c" else kernels.decode_like_triton
    return way(indices.contiguous(), coefs.contiguous(), like.contiguous(), m)


@torch.library.custom_op("parity::decode_like_backward", mutates_args=())
def decode_like_backward_op(indices: torch.Tensor, grad: torch.Tensor, y: torch.Tensor, like: torch.Tensor,
                            norms: torch.Tensor, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    way = kernels_cpu.decode_like_backward_c if backend(like) == "c" else kernels.decode_like_backward_triton
    return way(indices.contiguous(), grad.contiguous(), y, like.contiguous(), norms, m)


@torch.library.custom_op("parity::dot", mutates_args=())
@exact
def dot_op(indices: torch.Tensor, x: torch.Tensor, m: int) -> torch.Tensor:
    check_range("feature indices", indices, 0, m)
    path = backend(x)
    if path == "reference":
        return by_chunks(kernels.dot_reference, (indices, wide(x)), indices.shape[1] * x.shape[1])
    return (kernels_cpu.dot_c(indices.contiguous(), wide(x).contiguous(), m) if path == "c" else
            kernels.dot_triton(indices.contiguous(), x.contiguous(), m))


@torch.library.custom_op("parity::score", mutates_args=())
@exact
def score_op(x: torch.Tensor, parents: torch.Tensor, generators: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
             low: int, method: str) -> torch.Tensor:
    check_range("parents", parents, 0, low)
    check_range("generators", generators, low, low + len(mean))
    if backend(x) == "c" and method == "transform":
        return kernels_cpu.search_transform_c(wide(x).contiguous(), parents.contiguous(), generators, mean, rstd, low,
                                              1, torch.arange(len(x)))[2]
    return score(x, parents, generators, mean, rstd, low)


def score(x, parents, generators, mean, rstd, low):
    level = generators, mean, rstd, low
    path = backend(x)
    if path == "reference":
        return by_chunks(kernels.score_product, (wide(x), parents),
                         parents.shape[1] * (len(generators) + x.shape[1]), *level)
    if path == "c":
        return kernels_cpu.score_product_c(wide(x).contiguous(), parents.contiguous(), *level)
    return kernels.score_triton(x.contiguous(), parents.contiguous(), *level)


@torch.library.custom_op("parity::select", mutates_args=())
def select_op(z: torch.Tensor, parents: torch.Tensor, generators: torch.Tensor,
              k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return select(z, parents, generators, k)


def select(z, parents, generators, k):
    way = {"reference": kernels.select_reference, "c": kernels_cpu.select_c,
           "triton": kernels.select_triton}[backend(z)]
    return way(z.contiguous(), parents.contiguous(), generators, k)


@torch.library.custom_op("parity::basis", mutates_args=())
def basis_op(x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return basis(x, mean, rstd, k)


def basis(x, mean, rstd, k):
    path = backend(x)
    if path == "triton":
        return tuple(kernels.basis_triton(x.contiguous(), mean, rstd, kernels.result(len(x), k, x.device)))
    return (kernels_cpu.basis_c if path == "c" else kernels.basis_reference)(wide(x).contiguous(), mean, rstd, k)


@torch.library.custom_op("parity::search", mutates_args=())
@exact
def search_op(x: torch.Tensor, parents: torch.Tensor, generators: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor,
              low: int, k: int, rows: torch.Tensor, method: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_range("parents", parents, 0, low)
    check_range("generators", generators, low, low + len(mean))
    check_range("rows", rows, 0, len(x))
    return search(x, parents, generators, mean, rstd, low, k, rows, method)


def search(x, parents, generators, mean, rstd, low, k, rows, method):
    if backend(x) == "c" and method == "transform":
        return kernels_cpu.search_transform_c(wide(x).contiguous(), parents.contiguous(), generators, mean, rstd, low,
                                              k, rows)
    if backend(x) == "triton":
        found = kernels.result(len(x), k, x.device)
        return *found, kernels.search_triton(x.contiguous(), parents.contiguous(), generators, mean, rstd, low, found,
                                             rows)
    C = parents.shape[1] * len(generators)
    indices = torch.empty(len(x), k, dtype=torch.int64, device=x.device)
    coefs = torch.empty(len(x), k, dtype=wide(x[:0]).dtype, device=x.device)
    sampled = torch.empty(len(rows), C, dtype=coefs.dtype, device=x.device)
    for part in chunks(len(x), C):  # 2 MB of scores at a time
        z = score(x[part], parents[part], generators, mean, rstd, low)
        indices[part], coefs[part] = select(z, parents[part], generators, k)
        if len(rows):
            here = (rows >= part.start) & (rows < part.stop)
            sampled[here] = z[rows[here] - part.start]
    return indices, coefs, sampled


@torch.library.custom_op("parity::encode", mutates_args=())
def encode_op(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, generators: list[torch.Tensor], lows: list[int],
              active: list[int], rows: torch.Tensor,
              method: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return encode(x, mean, var, generators, lows, active, rows, method)


@exact
def encode(x, mean, var, generators, lows, active, rows, method):
    """The indices and z of the active features, levels in order, (N, K) both;
    and z of all candidates of the tokens `rows`, (R, sum of P*D), or of none."""
    if in_one(x, generators, lows, active, method):
        return kernels_cpu.narrow_c(wide(x).contiguous(), mean, var, generators, lows, active, rows, False)[2:]
    rows = no_rows(x) if rows is None else rows
    if backend(x) == "triton":
        found, sampled = kernels.encode_triton(x.contiguous(), mean, var, generators, lows, active, rows)
        return *found, sampled
    rstd = var.rsqrt()
    found, sampled = [basis(x, mean[: lows[0]], rstd[: lows[0]], active[0])], []
    for words, low, high, P, k in zip(generators, lows, lows[1:], active, active[1:]):
        check_range("generators", words, low, high)
        way = choose_method(method, x.device, lows[0], P, len(words), high - low)
        *level, scores = search(x, found[-1][0], words, mean[low:high], rstd[low:high], low, k, rows, way)
        found.append(level)
        sampled.append(scores)
    parts = (*zip(*found), sampled or [mean.new_empty(len(rows), 0)])
    return tuple(torch.cat(part, dim=1) for part in parts)


def no_rows(x):
    return torch.empty(0, dtype=torch.int64, device=x.device)


def in_one(x, generators, lows, active, method):
    """Whether kernels.c has all of it in one call: on a CPU, if every level is scored by transform."""
    return backend(x) == "c" and all_by_transform(method, lows[0], tuple([len(words) for words in generators]), *lows,
                                                  *active)


@functools.cache
def all_by_transform(method, d, fans, *levels):
    lows, active = levels[: len(fans) + 1], levels[len(fans) + 1 :]
    return all(choose_method(method, "cpu", d, P, D, high - low) == "transform"
               for D, low, high, P in zip(fans, lows, lows[1:], active))


@torch.library.custom_op("parity::narrow", mutates_args=())
def narrow_op(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, generators: list[torch.Tensor], lows: list[int],
              active: list[int], rows: torch.Tensor, method: str,
              again: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
                                    torch.Tensor, torch.Tensor, torch.Tensor]:
    """encode, then decode_like: y; indices; coefs; the scores of `rows`; before and norms of decode_like; 1/std of the
    active features; and x, if `again`: what else the loss makes of x then meets the gradient of y in one sum."""
    return narrow_whole(x, mean, var, generators, lows, active, rows, method, again)


def narrow_whole(x, mean, var, generators, lows, active, rows, method, again):
    (y, before, norms), indices, *code, scales = narrow(x, mean, var, generators, lows, active, rows, method, True)
    before = norms.new_empty(0, lows[0]) if before is None else before
    same = x.clone(memory_format=torch.contiguous_format) if again else x.new_empty(0)
    return y, indices, *code, before, norms, scales, same


@exact
def narrow(x, mean, var, generators, lows, active, rows, method, scales=False):
    """(what decode_like gives); indices; coefs; the scores of `rows`; 1/std of the active features, if `scales`."""
    level = mean, var, generators, lows, active
    if in_one(x, generators, lows, active, method):
        y, norms, indices, *code = kernels_cpu.narrow_c(x.contiguous(), *level, rows)
        y = y, None, norms
    elif backend(x) == "triton":
        found, sampled = kernels.encode_triton(x.contiguous(), *level, no_rows(x) if rows is None else rows, scales)
        return decode_like(*found[:2], x, lows[-1]), *found[:2], sampled, found[-1]
    else:
        indices, *code = encode(x, *level, rows, method)
        y = decode_like(indices, code[0], x, lows[-1])
    return y, indices, *code, var[indices].rsqrt() if scales else None


@torch.library.custom_op("parity::narrow_backward", mutates_args=())
@exact
def narrow_backward_op(grad: torch.Tensor, of_coefs: torch.Tensor | None, others: torch.Tensor | None,
                       indices: torch.Tensor, y: torch.Tensor, x: torch.Tensor, norms: torch.Tensor,
                       scales: torch.Tensor, m: int) -> torch.Tensor:
    """The gradient to x of all that narrow_op gives: y, coefs, and x again."""
    if backend(x) == "c":
        given = [None if tensor is None else tensor.contiguous() for tensor in (of_coefs, others)]
        return kernels_cpu.narrow_backward_c(indices, grad.contiguous(), *given, y, x.contiguous(), norms, scales, m)
    of_coefs = None if of_coefs is None else of_coefs.contiguous()
    to_coefs, to_x = kernels.decode_like_backward_triton(indices, grad.contiguous(), y, x.contiguous(), norms, m,
                                                         of_coefs, scales)
    to_x = to_x if others is None else others.contiguous() + to_x  # a kernel reads it
    return kernels.decode_triton(indices, to_coefs, x.shape[1], m, x.dtype, to_x)


@torch.library.custom_op("parity::collect", mutates_args=("sums",))
def collect_op(z: torch.Tensor, parents: torch.Tensor, generators: torch.Tensor, sums: torch.Tensor) -> None:
    m = len(sums)
    check_range("parents", parents, 0, m)
    check_range("generators", generators, 0, m)  # m is a power of two, so that children lie below it, too
    if backend(z) == "c":
        kernels_cpu.collect_c(z, parents, generators, sums)
    else:
        kernels.collect_reference(z, parents, generators, sums)


@torch.library.custom_op("parity::attach", mutates_args=())
def attach_op(values: torch.Tensor, indices: torch.Tensor, x: torch.Tensor, scale: torch.Tensor,
              m: int) -> torch.Tensor:
    return values.clone()


@decode_op.register_fake
def _(indices, coefs, d, m, dtype=None):
    return coefs.new_empty(indices.shape[0], d, dtype=dtype or coefs.dtype)


@decode_like_op.register_fake
def _(indices, coefs, like, m):
    before = coefs.new_empty(0 if backend(like) == "c" else like.shape[0], like.shape[1])
    return like.new_empty(like.shape), before, coefs.new_empty(like.shape[0], 2)


@decode_like_backward_op.register_fake
def _(indices, grad, y, like, norms, m):
    return norms.new_empty(indices.shape), like.new_empty(like.shape)


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


@encode_op.register_fake
def _(x, mean, var, generators, lows, active, rows, method):
    C = sum(P * words.shape[0] for words, P in zip(generators, active))
    coefs = wide(x).new_empty(x.shape[0], sum(active))
    return torch.empty_like(coefs, dtype=torch.int64), coefs, coefs.new_empty(rows.shape[0], C)


@narrow_op.register_fake
def _(x, mean, var, generators, lows, active, rows, method, again):
    C = sum(P * words.shape[0] for words, P in zip(generators, active))
    coefs = wide(x).new_empty(x.shape[0], sum(active))
    before = coefs.new_empty(0 if backend(x) == "c" else x.shape[0], lows[0])
    return (x.new_empty(x.shape), torch.empty_like(coefs, dtype=torch.int64), coefs, coefs.new_empty(rows.shape[0], C),
            before, coefs.new_empty(x.shape[0], 2), torch.empty_like(coefs), x.new_empty(x.shape if again else 0))


@narrow_backward_op.register_fake
def _(grad, of_coefs, others, indices, y, x, norms, scales, m):
    return x.new_empty(x.shape)


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
    ctx.set_materialize_grads(False)


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


def save_narrow(ctx, inputs, output):
    x, lows = inputs[0], inputs[4]
    y, indices, _, sampled, before, norms, scales, _ = output  # the moments may have moved when the gradient comes
    ctx.save_for_backward(indices, y if backend(x) == "c" else before, x, norms, scales)
    ctx.m, ctx.levels = lows[-1], len(lows) - 1
    ctx.mark_non_differentiable(indices, sampled, before, norms, scales)
    ctx.set_materialize_grads(False)


def narrow_backward(ctx, grad, _, of_coefs, *others):
    grad = torch.zeros_like(ctx.saved_tensors[2]) if grad is None else grad
    to_x = narrow_backward_op(grad, of_coefs, others[-1], *ctx.saved_tensors, ctx.m)
    return to_x, None, None, [None] * ctx.levels, None, None, None, None, None


class Narrow(torch.autograd.Function):
    """narrow_op where nothing traces: the way of an operator through torch takes most of a millisecond, as it has lists
    among its arguments."""
    forward, setup_context = staticmethod(narrow_whole), staticmethod(save_narrow)

    @staticmethod
    def backward(ctx, *grads):
        to_x, *_ = narrow_backward(ctx, *grads)
        return to_x, *[None] * 8


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
narrow_op.register_autograd(narrow_backward, setup_context=save_narrow)
attach_op.register_autograd(attach_backward, setup_context=save_attach)


# Public functions: they check what they are given, then call the operators.

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check(condition, text):
    if not condition:
        raise ValueError(text)


def check_floats(name, tensor, dims=2):
    check_forward_mode(name, tensor)
    check(tensor.dtype in FLOATS,
          f"{name} must be float32, bfloat16 or float16 (float64 for checks), not {tensor.dtype}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, not the shape {tuple(tensor.shape)}")


def check_forward_mode(name, tensor):
    """Forward-mode derivatives would come out as zero, without a word."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise NotImplementedError(f"{name} has a tangent, but the bottleneck has no forward-mode derivative: use "
                                  "backward()")


def check_indices(name, indices, rows=None):
    """As int64. The text is made only when it is needed: under torch.compile it would fix the number of tokens."""
    check(indices.dtype in (torch.int32, torch.int64), f"{name} must be integers (int64), not {indices.dtype}")
    if rows is None and indices.dim() != 1 or rows is not None and (indices.dim() != 2 or indices.shape[0] != rows):
        raise ValueError(f"{name} must have shape {'(D,)' if rows is None else f'({rows}, K), a row a token'}, "
                         f"not {tuple(indices.shape)}")
    if indices.shape[-1] == 0:
        raise ValueError(f"{name} are empty")
    return indices.long().contiguous()


def check_features(d, *counts):
    """Tables and levels end at powers of two, and there are no more than d*d features."""
    log2_width(d)
    for m in counts:
        check(d <= m <= d * d and m & m - 1 == 0,
              f"{m} is no number of features for d={d}: take a power of two from {d} to {d * d}")


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
    check_forward_mode("x", x)
    return attach_op(values, indices, x, scale, m)


def collect_sums(z, parents, generators, sums):
    """Add to sums (m, 3), by feature: tokens on which it was a candidate, its z there, its z squared.

    z (R, P*D) of the children of parents (R, P); a child of two parents counts once. sums must be contiguous.
    """
    check_floats("z", z)
    check_floats("sums", sums)
    parents, generators = check_indices("parents", parents, z.shape[0]), check_indices("generators", generators)
    check_count(z.shape[1], parents, generators, 1)
    check(sums.shape[1] == 3 and sums.is_contiguous(), "sums must be a contiguous tensor of shape (m, 3)")
    m = len(sums)
    check(m > 0 and m & m - 1 == 0, f"sums has {m} rows, but the number of features m must be a power of two")
    collect_op(z.to(sums.dtype).contiguous(), parents, generators, sums)


def scoring_method(device, d, parents, generators, features):
    """The faster of the two for a shape. On a GPU the product runs on tensor cores; on a CPU a feature costs
    the transform as much as about sqrt(d) / 2 multiply-adds cost the product
    (measured from d=64 to 2048 on 2 cores: docs/log.md)."""
    transform = features * math.sqrt(d) / 2
    return "transform" if torch.device(device).type == "cpu" and transform < parents * generators * d else "gemm"


def choose_method(method, device, *shape):
    return scoring_method(device, *shape) if method == "auto" else method


def check_level(x, parents, generators, mean, rstd, low, method):
    """The arguments of score_children as the operators take them."""
    check_floats("x", x)
    check_floats("mean", mean, 1)
    check_floats("rstd", rstd, 1)
    d = x.shape[1]
    parents, generators = check_indices("parents", parents, x.shape[0]), check_indices("generators", generators)
    check(len(mean) == len(rstd), f"mean and rstd must have one length, not {len(mean)} and {len(rstd)}")
    check_features(d, low, low + len(mean))
    method = choose_method(method, x.device, d, parents.shape[1], len(generators), len(mean))
    check(method in ("gemm", "transform"), f"method must be 'auto', 'gemm' or 'transform', not {method!r}")
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x, parents, generators, mean.to(kind).contiguous(), rstd.to(kind).contiguous(), low, method


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
    """Level 0, whose scores are the coordinates: the k largest |z|, z = (x - mean) * rstd, as (indices, coefs), (N, k).

    x (N, d); mean, rstd (d,). Ties go to the lower index. No gradient: see attach_scores.
    """
    check_floats("x", x)
    check(len(mean) == len(rstd) == x.shape[1],
          f"mean and rstd must have the length {x.shape[1]}, not {len(mean)} and {len(rstd)}")
    check(1 <= k <= x.shape[1], f"k={k} features cannot be selected from {x.shape[1]} coordinates")
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    return basis_op(x.detach(), mean.to(kind).contiguous(), rstd.to(kind).contiguous(), k)


def search_children(x, parents, generators, mean, rstd, low, k, method="auto", rows=None):
    """select_distinct(score_children(...), ..., k), some tokens at a time. No gradient: see attach_scores.

    rows (R,): distinct tokens whose scores to return too, (R, P*D), as a third value.
    """
    *level, method = check_level(x.detach(), parents, generators, mean, rstd, low, method)
    check_count(parents.shape[1] * len(generators), parents, generators, k)
    if rows is None:
        wanted = no_rows(x)
    else:
        check(rows.dim() == 1 and rows.dtype == torch.int64, "rows must be numbers of tokens, one dimension of int64")
        wanted = rows
    found = search_op(*level, k, wanted, method)
    return found[:2] if rows is None else found


def eager(x):
    """Whether functions may be called as they are: nothing traces, and no gradient is wanted. An operator's way through
    torch takes longer than a token of a small model."""
    return untraced(x) and not (x.requires_grad and torch.is_grad_enabled())


def untraced(x):
    return (type(x) is torch.Tensor and not torch.compiler.is_compiling() and not torch.jit.is_tracing()
            and not torch._C._len_torch_dispatch_stack() and torch._C._functorch.maybe_current_level() is None)


def moments_like(x, mean, var):
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (mean, var) if mean.dtype == kind else (mean.to(kind), var.to(kind))


def check_shapes(x, mean, var, lows):
    if x.shape[-1] != lows[0] or not len(mean) == len(var) == lows[-1]:
        raise ValueError(f"x must have {lows[0]} coordinates, mean and var the length {lows[-1]}, but they have the "
                         f"shapes {tuple(x.shape)}, {tuple(mean.shape)} and {tuple(var.shape)}")


def encode_features(x, mean, var, generators, lows, active, method="auto", rows=None):
    """The active features of a bottleneck: search_basis, then search_children of each level by level.

    x (N, d); mean, var (m,) of all features; generators of the levels >= 1; lows: the first feature of each of these,
    then m; active: of every level. -> indices and z, (N, K) both; and the z of all candidates of the distinct tokens
    `rows`, a level after another, (R, sum of P*D). No gradient: see attach_scores.
    """
    check_floats("x", x)
    check_shapes(x, mean, var, lows)
    levels = x.detach(), *moments_like(x, mean, var), generators, lows, active
    if eager(levels[0]):
        return encode(*levels, rows, method)
    return encode_op(*levels, no_rows(x) if rows is None else rows, method)


def narrow_features(x, mean, var, generators, lows, active, method="auto", rows=None, again=False):
    """encode_features, then parity_decode with like=x, in one: (y, indices, coefs, scores of `rows`, x).

    x (..., d), and so are y, indices and coefs; y and coefs are differentiable in x. The x that is returned is the one
    to go on with, if `again`.
    """
    check_shapes(x, mean, var, lows)
    if eager(x) and x.dtype == mean.dtype == torch.float32 and in_one(x, generators, lows, active, method):
        check_forward_mode("x", x)
        y, _, *code = kernels_cpu.narrow_c(x.contiguous(), mean, var, generators, lows, active, rows)
        return y, *code, x  # a token of a small model takes no longer than the way through what follows
    flat = x.reshape(-1, lows[0])
    check_floats("x", flat)
    check(backend(flat) != "reference", "the plain torch references have no bottleneck in one: encode_features, then "
          "parity_decode")
    given = flat if backend(x) == "triton" else wide(flat)
    levels = *moments_like(x, mean, var), generators, lows, active
    if eager(x):
        (y, _, _), *code, _ = narrow(given, *levels, rows, method)
        same = x
    else:
        way = Narrow.apply if untraced(x) else narrow_op
        y, *code, _, _, _, same = way(given, *levels, no_rows(x) if rows is None else rows, method, again)
        same = same.to(x.dtype).view(x.shape) if again else x
    indices, coefs, scores = code
    shape = *x.shape[:-1], indices.shape[1]
    return y.to(x.dtype).view(x.shape), indices.view(shape), coefs.view(shape), scores, same
