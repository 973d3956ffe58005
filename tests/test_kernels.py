"""Every path of every operation against its reference; gradients; bad input; machine code for GPUs.

The Triton kernels run in Triton's interpreter here (conftest.py sets TRITON_INTERPRET).
"""
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import kernels
import kernels_cpu
import ops
from conftest import force_path
from dpb import DeepParityBottleneck
from kloosterman import sign_vectors

PATHS = ["reference", "c", "triton"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
needs_triton = pytest.mark.skipif(ops.triton is None, reason="triton is not installed (Linux only)")


@pytest.fixture
def use(monkeypatch):
    return lambda path: force_path(path, monkeypatch)


def dense_dictionary(d, m, dtype=torch.float64):
    """phi, all m rows, from kloosterman.py alone."""
    phi = torch.from_numpy(sign_vectors(np.arange(m), d)).to(dtype) / d ** 0.5
    phi[:d] = torch.eye(d)
    return phi


def assert_as_exact_as_torch(got, plain, exact, size=0.0):
    """The largest error is at most twice the one that plain torch makes at the same precision, or the last bit.

    size: of the terms, where they may cancel.
    """
    allowed = 2 * (plain.double() - exact).abs().max() + 2 * torch.finfo(got.dtype).eps * max(exact.abs().max(), size)
    assert (got.double() - exact).abs().max() <= allowed


def level(d, m, N, P, D, seed=0, low=None, dtype=torch.float32):
    """A level with random parents, generators and moments, and an input."""
    rng = torch.Generator().manual_seed(seed)
    low = low or d
    x = torch.randn(N, d, generator=rng).to(dtype)
    parents = (torch.stack([torch.randperm(low, generator=rng)[:P] for _ in range(N)])
               if N else torch.zeros(0, P, dtype=torch.int64))
    high = torch.randint(1, m // low, (D,), generator=rng) * low
    generators = (high | torch.randint(0, low, (D,), generator=rng)).unique()
    mean, rstd = torch.randn(m - low, generator=rng) / 4, 0.5 + torch.rand(m - low, generator=rng)
    return x, parents, generators, mean, rstd, low


def brute_select(z, parents, generators, k):
    """In words: of the distinct children, the k with the largest |z|; among equals, the one of lower index."""
    rows = []
    for n in range(len(z)):
        score = {}
        for p, parent in enumerate(parents[n].tolist()):
            for j, g in enumerate(generators.tolist()):
                score[parent ^ g] = z[n, p * len(generators) + j].item()
        rows.append(sorted(score.items(), key=lambda item: (-abs(item[1]), item[0]))[:k])
    return torch.tensor([[i for i, _ in row] for row in rows]), torch.tensor([[v for _, v in row] for row in rows])


DECODE_SHAPES = [  # N, d, m, K
    (1, 8, 64, 1), (5, 16, 256, 7), (4, 32, 1024, 6), (3, 64, 64, 5), (7, 128, 4096, 24), (33, 256, 2 ** 12, 3),
    (2, 1024, 2 ** 15, 48), (3, 2048, 2 ** 17, 112), (2, 4096, 2 ** 22, 256), (0, 128, 4096, 24),
]


@pytest.mark.parametrize("path", ["c", "triton"])
@pytest.mark.parametrize("N, d, m, K", DECODE_SHAPES)
def test_decode_and_dot_equal_reference(use, path, N, d, m, K):
    torch.manual_seed(N + d)
    indices = torch.randint(0, m, (N, K))
    indices[:, : K // 3] %= d  # basis features too
    coefs, x = torch.randn(N, K), torch.randn(N, d)
    use(path)
    y, s = ops.parity_decode(indices, coefs, d, m), ops.parity_dot(indices, x, m)
    assert y.shape == (N, d) and s.shape == (N, K) and y.dtype == s.dtype == torch.float32
    if N:
        assert_as_exact_as_torch(y, kernels.decode_reference(indices, coefs, d),
                                 kernels.decode_reference(indices, coefs.double(), d))
        assert_as_exact_as_torch(s, kernels.dot_reference(indices, x), kernels.dot_reference(indices, x.double()),
                                 size=x.abs().max() / d ** 0.5)


@needs_triton
@pytest.mark.parametrize("K", [33, 65])
def test_dot_of_features_in_any_order(use, K):
    """Basis vectors between sign vectors, repeats, and more features than lanes but not a multiple of them."""
    torch.manual_seed(K)
    indices, x = torch.randint(0, 4096, (3, K)), torch.randn(3, 128)
    indices[:, ::5] %= 128
    indices[:, 7] = indices[:, 6]
    indices[1, :] %= 128                  # basis vectors only
    indices[2, : K - 1] %= 128            # one sign vector, the last
    indices[2, K - 1] = 4095
    use("triton")
    assert_as_exact_as_torch(ops.parity_dot(indices, x, 4096), kernels.dot_reference(indices, x),
                             kernels.dot_reference(indices, x.double()))


def rescaled(indices, coefs, x):
    """y |x| / |y| with y = decode(indices, coefs), or zero where one is zero."""
    y = kernels.decode_reference(indices, coefs, x.shape[1])
    of_y, of_x = (v.norm(dim=1, keepdim=True) for v in (y, x))
    return y * (of_x / torch.where(of_y == 0, 1, of_y))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("N, d, m, K, dtype", [(*shape, torch.float32) for shape in DECODE_SHAPES] +
                         [(*shape, dtype) for shape in DECODE_SHAPES[1:7:2] for dtype in DTYPES[1:]])
def test_decode_to_the_norm_of_x(use, path, N, d, m, K, dtype):
    """Forward and backward against autograd through the reference in float64."""
    use(path)
    rng = torch.Generator().manual_seed(d)
    indices = torch.randint(0, m, (N, K), generator=rng)
    indices[:, : K // 3] %= d
    coefs, x = (torch.randn(N, K, generator=rng).requires_grad_(),
                torch.randn(N, d, generator=rng).to(dtype).requires_grad_())
    grad = torch.randn(N, d, generator=rng).to(dtype)
    y = ops.parity_decode(indices, coefs, d, m, like=x)
    got = y, *torch.autograd.grad(y, (coefs, x), grad)
    assert ([v.dtype for v in got] == [dtype, torch.float32, dtype]
            and [v.shape for v in got] == [x.shape, coefs.shape, x.shape])
    plain, exact = [], []
    for results, kind in (plain, torch.float32), (exact, torch.float64):
        c, v = (t.detach().to(kind).requires_grad_() for t in (coefs, x))
        out = rescaled(indices, c, v)
        results += [out, *torch.autograd.grad(out, (c, v), grad.to(kind))]
    if N:  # the interpreter cuts bfloat16 off where a GPU rounds: within the last bit
        of_y, of_x, of_grad = (v.detach().double().norm(dim=1)
                               for v in (kernels.decode_reference(indices, coefs, d), x, grad))
        sizes = 0.0, (of_grad * of_x / of_y).max(), 0.0  # if K = 1 the coefficient's gradient is a difference of equals
        for value, one, two, size in zip(got, plain, exact, sizes):
            assert_as_exact_as_torch(value, one.to(value.dtype), two, size)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scale", [2.0 ** 100, 2.0 ** -100])
def test_norms_of_huge_and_tiny_rows(use, path, scale):
    use(path)
    indices, coefs, x = torch.randint(0, 1024, (4, 9)), torch.randn(4, 9), torch.randn(4, 64)
    y = ops.parity_decode(indices, coefs, 64, 1024, like=x)
    assert torch.equal(ops.parity_decode(indices, coefs, 64, 1024, like=x * scale), y * scale)
    assert torch.equal(ops.parity_decode(indices, coefs * scale, 64, 1024, like=x), y)
    x[1], coefs[2] = 0, 0
    big, c = (x * scale).requires_grad_(), coefs.clone().requires_grad_()
    y = ops.parity_decode(indices, c, 64, 1024, like=big)
    assert not y[1:3].any() and all(torch.isfinite(g).all() for g in torch.autograd.grad(y.sum(), (c, big)))


@needs_triton
def test_wrong_values_stay_in_their_token(use):
    use("triton")
    indices, coefs, x, grad = torch.full((3, 2), 70), torch.ones(3, 2), torch.ones(3, 64), torch.ones(3, 64)
    for change in (lambda i, c, v: i[1].fill_(-1),
                   lambda i, c, v: c[1].fill_(float("nan")),
                   lambda i, c, v: v[1].fill_(float("inf"))):
        arguments = indices.clone(), coefs.clone(), x.clone()
        change(*arguments)
        y, *saved = kernels.decode_like_triton(*arguments, 1024)
        of_c, of_x = kernels.decode_like_backward_triton(arguments[0], grad, saved[0], arguments[2], saved[1], 1024)
        for v in y, of_c, of_x:
            assert not torch.isfinite(v[1]).any() and torch.isfinite(v[[0, 2]]).all()


@pytest.mark.parametrize("path", PATHS)
def test_decode_reads_the_dictionary_exactly(use, path):
    """One feature with coefficient 1 gives its dictionary row, to the last bit, for all 4096 features."""
    d, m = 64, 4096
    use(path)
    indices = torch.arange(m)[:: 1 if path != "triton" else 61, None]
    y = ops.parity_decode(indices, torch.ones(len(indices), 1), d)
    assert torch.equal(y, dense_dictionary(d, m, torch.float32)[indices[:, 0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", PATHS)
def test_half_precision_in_float32_sums(use, path, dtype):
    torch.manual_seed(0)
    indices, coefs, x = torch.randint(0, 4096, (5, 40)), torch.randn(5, 40).to(dtype), torch.randn(5, 128).to(dtype)
    use(path)
    y, s = ops.parity_decode(indices, coefs, 128), ops.parity_dot(indices, x)
    assert y.dtype == dtype and s.dtype == torch.float32
    exact = kernels.decode_reference(indices, coefs.double(), 128)
    assert_as_exact_as_torch(y, exact.to(dtype), exact)  # one rounding, at the end
    assert_as_exact_as_torch(s, kernels.dot_reference(indices, x.float()), kernels.dot_reference(indices, x.double()))


@pytest.mark.parametrize("path", ["reference", "c"])
def test_work_in_many_chunks_gives_the_same(use, monkeypatch, path):
    arguments, rows = level(64, 1024, 37, 4, 16), torch.tensor([30, 0, 17])
    use(path)
    results = []
    for size in 2 ** 24, 1024:  # all at once, or one or a few tokens at a time
        monkeypatch.setattr(ops, "chunks",
                            lambda N, elements, most=None, size=size: kernels_cpu.chunks(N, elements, size))
        monkeypatch.setattr(kernels_cpu, "CHUNK", size)
        indices, coefs, z = ops.search_children(*arguments, 7, "gemm", rows)
        results.append([indices, coefs, z, ops.score_children(*arguments, "gemm"),
                        ops.parity_dot(indices, arguments[0], 1024), ops.parity_decode(indices, coefs, 64, 1024)])
    assert len(kernels_cpu.chunks(37, 4 * 64)) > 5
    for whole, cut in zip(*results):
        torch.testing.assert_close(cut, whole, rtol=1e-6, atol=1e-6)


def test_many_tokens(use):
    torch.manual_seed(0)
    indices, coefs = torch.randint(0, 4096, (5001, 24)), torch.randn(5001, 24)
    use("c")
    y = ops.parity_decode(indices, coefs, 128, 4096)
    exact = (coefs.double()[:, :, None] * dense_dictionary(128, 4096)[indices]).sum(1)
    assert_as_exact_as_torch(y, exact.float(), exact)


SCORE_SHAPES = [  # d, m, N, P, D, low
    (8, 64, 3, 4, 6, 8), (16, 256, 1, 1, 1, 16), (32, 1024, 3, 4, 9, 32), (64, 1024, 7, 3, 33, 64),
    (128, 4096, 5, 8, 64, 128), (128, 4096, 0, 8, 64, 128),
    (128, 2 ** 14, 9, 16, 40, 2 ** 12), (256, 2 ** 13, 2, 3, 20, 2 ** 11), (512, 2 ** 13, 3, 5, 20, 512),
    (1024, 2 ** 15, 2, 16, 256, 1024), (2048, 2 ** 13, 2, 3, 17, 2048), (4096, 2 ** 13, 1, 3, 17, 4096),
]


@pytest.mark.parametrize("path, method", [("c", "gemm"), ("c", "transform"), ("triton", "gemm")])
@pytest.mark.parametrize("d, m, N, P, D, low", SCORE_SHAPES)
def test_scores_equal_reference(use, path, method, d, m, N, P, D, low):
    x, *rest = arguments = level(d, m, N, P, D, low=low)
    use(path)
    z = ops.score_children(*arguments, method)
    assert z.shape == (N, P * len(rest[1])) and z.dtype == torch.float32
    if N:
        exact = kernels.score_reference(
            x.double(), *(t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in rest))
        assert_as_exact_as_torch(z, kernels.score_reference(x, *rest), exact)


def test_transform_of_a_million_features(use):
    """More than 512 patterns: the second block of their words."""
    x, *rest = arguments = level(1024, 2 ** 20, 2, 2, 40, low=2 ** 19)
    use("c")
    exact = kernels.score_reference(
        x.double(), *(t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in rest))
    assert_as_exact_as_torch(ops.score_children(*arguments, "transform"), kernels.score_reference(x, *rest), exact)


@pytest.mark.parametrize("path, method", [("c", "gemm"), ("c", "transform"), ("triton", "gemm")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_of_half_precision_inputs(use, path, method, dtype):
    x, *rest = level(64, 1024, 5, 3, 20, dtype=dtype)
    use(path)
    z = ops.score_children(x, *rest, method)
    exact = kernels.score_reference(
        x.double(), *(t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in rest))
    assert_as_exact_as_torch(z, kernels.score_reference(x.float(), *rest), exact)


@needs_triton
@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("d, m, N, P, D", [
    (8, 64, 2, 2, 6), (32, 1024, 2, 3, 9), (256, 2 ** 13, 2, 3, 70), (1024, 2 ** 13, 2, 2, 17),
    (2048, 2 ** 13, 2, 1, 33), (4096, 2 ** 13, 2, 1, 5), (64, 1024, 65, 2, 40), (64, 1024, 3, 50, 9),
    (64, 1024, 4, 16, 201)])
def test_scores_from_bits_of_the_generators(monkeypatch, d, m, N, P, D, dtype, arch):
    """Every way to pack them: few bits to a word, 32, 64 words; an odd number of generators. And tiles of rows that are
    cut off, or that parents do not fill; of 128 columns on Hopper, of 256 on Blackwell."""
    monkeypatch.setattr(kernels, "arch_of", lambda device: arch)
    x, *rest = level(d, m, N, P, D, dtype=dtype)
    exact = kernels.score_reference(
        x.double(), *(t.double() if torch.is_tensor(t) and t.is_floating_point() else t for t in rest))
    assert_as_exact_as_torch(kernels.score_triton(x, *rest), kernels.score_reference(x.float(), *rest), exact)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("d, m, N, P, D, k", [(8, 64, 5, 4, 9, 3), (64, 1024, 6, 5, 33, 20), (128, 4096, 4, 8, 64, 16),
                                              (128, 2048, 3, 16, 300, 100), (64, 4096, 2, 3, 5, 1),
                                              (16, 256, 2, 16, 200, 12)])
def test_selection_equals_brute_force(use, path, d, m, N, P, D, k):
    _, parents, generators, *_ = level(d, m, N, P, D, seed=k)
    children = (parents[:, :, None] ^ generators).flatten(1)
    torch.manual_seed(k)
    use(path)
    for values in (torch.randn(N, m), torch.randint(-3, 4, (N, m)).float(),
                   torch.zeros(N, m), torch.full((N, m), -2.0)):
        z = values.gather(1, children)  # equal children have equal scores; small integers and constants tie
        indices, coefs = ops.select_distinct(z, parents, generators, k)
        expected = brute_select(z, parents, generators, k)
        assert torch.equal(indices, expected[0]) and torch.equal(coefs, expected[1])


@pytest.mark.parametrize("path", PATHS)
def test_selection_with_repeats_everywhere(use, path):
    """Generators closed under XOR: every child is reached from every parent, and k is all there are."""
    parents, generators = torch.arange(8).repeat(3, 1), 64 + torch.arange(8)
    values = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    z = values.gather(1, (parents[:, :, None] ^ generators).flatten(1))
    use(path)
    indices, coefs = ops.select_distinct(z, parents, generators, 8)
    expected = brute_select(z, parents, generators, 8)
    assert torch.equal(indices, expected[0]) and torch.equal(coefs, expected[1])
    indices, coefs = ops.select_distinct(z, parents, generators, 11)  # more than there are
    assert torch.equal(indices[:, :8], expected[0]) and torch.equal(coefs[:, 8:], torch.zeros(3, 3))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N, d, k", [(3, 8, 3), (5, 64, 64), (4, 128, 16), (1, 1024, 16), (1, 2048, 40), (0, 64, 4)])
def test_level_0_selects_the_largest_standardised_coordinates(use, path, N, d, k, dtype):
    use(path)
    rng = torch.Generator().manual_seed(d)
    mean, rstd = torch.randn(d, generator=rng) / 4, 0.5 + torch.rand(d, generator=rng)
    for x, moments in ((torch.randn(N, d, generator=rng), (mean, rstd)),
                       (torch.randint(-2, 3, (N, d), generator=rng), (mean * 0, rstd * 0 + 1)),
                       (torch.zeros(N, d), (mean * 0, rstd)),
                       (torch.randn(N, d, generator=rng).where(torch.arange(d) != 5, float("nan")), (mean, rstd))):
        x = x.to(dtype)
        z = (x.float() - moments[0]) * moments[1]
        expected = kernels.select_reference(z, torch.zeros(N, 1, dtype=torch.int64), torch.arange(d), k)
        for got, want in zip(ops.search_basis(x, *moments, k), expected):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("path", PATHS)
def test_sums_count_a_child_of_two_parents_once(use, path):
    _, parents, generators, *_ = level(64, 512, 9, 6, 40)
    values = torch.randn(9, 512, generator=torch.Generator().manual_seed(0))
    children = (parents[:, :, None] ^ generators).flatten(1)
    expected = torch.ones(512, 3, dtype=torch.float64)  # sums are added to what is there
    for n, row in enumerate(children.tolist()):
        for child in set(row):
            z = values[n, child].double()
            expected[child] += torch.stack([torch.ones_like(z), z, z * z])
    assert any(len(set(row)) < len(row) for row in children.tolist())
    use(path)
    sums = torch.ones(512, 3)
    ops.collect_sums(values.gather(1, children), parents, generators, sums)
    torch.testing.assert_close(sums, expected.float())


@pytest.mark.parametrize("path, method", [("reference", "gemm"), ("c", "gemm"), ("c", "transform"), ("triton", "gemm")])
def test_search_is_score_and_select_in_one(use, path, method):
    arguments = level(64, 1024, 11, 5, 20)
    use(path)
    z = ops.score_children(*arguments, method)
    expected = ops.select_distinct(z, *arguments[1:3], 7)
    for got, want in zip(ops.search_children(*arguments, 7, method), expected):
        assert torch.equal(got, want)
    rows = torch.tensor([0, 3, len(z) - 1])
    assert torch.equal(ops.search_children(*arguments, 7, method, rows)[2], z[rows])


def group_maxima(z, D):
    return torch.nn.functional.pad(z.view(len(z), -1, D), (0, -D % 16)).unflatten(2, (-1, 16)).abs().amax(3).flatten(1)


@needs_triton
@pytest.mark.parametrize("d, m, P, D, columns", [
    (64, 1024, 3, 64, 4096), (64, 4096, 2, 75, 4096), (32, 1024, 4, 9, 4096), (64, 4096, 1, 600, 128),
    (128, 4096, 2, 256, 4096)])
def test_the_score_kernel_knows_the_largest_of_every_16_children(monkeypatch, d, m, P, D, columns):
    """Whatever the number of generators; a NaN is the largest, of a wrong parent all are."""
    monkeypatch.setattr(kernels, "COLUMNS", columns)
    x, parents, generators, mean, rstd, low = level(d, m, 4, P, D)
    x[0, 3], x[1], mean[:], parents[2, -1] = float("inf"), -0.0, mean * (torch.arange(len(mean)) % 3 > 0), low + 7
    z, D = kernels.score_triton(x, parents, generators, mean, rstd, low), len(generators)
    again, tops = torch.empty_like(z), torch.empty(4, P * -(-D // 16))
    kernels.scorer(x, P, generators, mean, rstd, low)(x, parents, again, tops)
    torch.testing.assert_close(again, z, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(tops, group_maxima(z, D), rtol=0, atol=0, equal_nan=True)
    assert not tops[~tops.isnan()].signbit().any() and tops[2, -1].isnan() and tops[0].isfinite().sum() == 0


def test_signs_of_generators_are_made_once_and_follow_them():
    generators = level(64, 1024, 2, 3, 20)[2]
    first = kernels.kept_signs(generators, 64, 1024)
    assert kernels.kept_signs(generators, 64, 1024) is first
    assert torch.equal(first, kernels.sign_pairs(generators, 64, 1024))
    generators.copy_(generators.flip(0))
    second = kernels.kept_signs(generators, 64, 1024)
    assert torch.equal(second, kernels.sign_pairs(generators, 64, 1024)) and not torch.equal(first, second)
    assert kernels.kept_signs(generators, 64, 2048).data_ptr() != second.data_ptr()
    key = id(generators)
    assert key in kernels.SIGNS
    del generators
    assert key not in kernels.SIGNS
    with torch.inference_mode():
        assert torch.equal(kernels.kept_signs(torch.tensor([70, 99]), 64, 1024),
                           kernels.sign_pairs(torch.tensor([70, 99]), 64, 1024))


@needs_triton
@pytest.mark.parametrize("m, P, D, k", [(4096, 16, 64, 4), (4096, 12, 75, 4), (2048, 16, 256, 32), (4096, 1, 3000, 20)])
def test_selection_by_group_maxima_equals_the_reference(m, P, D, k):
    """Also where all tie, where a NaN or an infinity is in a group, where few groups reach, and where repeats are many:
    the slow path."""
    _, parents, generators, *_ = level(64, m, 3, P, D, seed=k)
    D, rng = len(generators), torch.Generator().manual_seed(k)
    parents[2] = parents[2, 0] if P > 1 else parents[2]  # every child P times
    children = (parents[:, :, None] ^ generators).flatten(1)
    special = torch.randn(3, m, generator=rng)
    special[:, ::97], special[:, 5::89], special[:, 7::83] = float("inf"), -float("inf"), float("nan")
    few = torch.zeros(3, m) * -1
    few[:, ::50] = torch.randn(3, len(few[0, ::50]), generator=rng)
    for values in (torch.randn(3, m, generator=rng), torch.randint(-3, 4, (3, m), generator=rng).float(),
                   torch.full((3, m), -2.0), torch.full((3, m), -0.0), special, few):
        z = values.gather(1, children)
        indices, coefs = torch.empty(3, k, dtype=torch.int64), torch.empty(3, k)
        kernels.run(kernels.select_launch(z, parents, generators, indices, coefs, tops=group_maxima(z, D)))
        expected = kernels.select_reference(z, parents, generators, k)
        assert torch.equal(indices, expected[0])
        torch.testing.assert_close(coefs, expected[1], rtol=0, atol=0, equal_nan=True)


@needs_triton
@pytest.mark.parametrize("d, m, P, D, k", [(64, 1024, 8, 64, 16), (128, 4096, 9, 75, 4), (64, 1024, 2, 20, 7)])
def test_search_in_chunks_with_and_without_group_maxima(d, m, P, D, k):
    arguments, rows = level(d, m, 5, P, D), torch.tensor([4, 0, 3])
    z = kernels.score_triton(*arguments)
    expected = *kernels.select_reference(z, *arguments[1:3], k), z[rows]
    for most in 1, 2 * z.shape[1], 2 ** 26:
        whole = 0.5 + torch.rand(m)
        found = kernels.result(5, k, "cpu", scales=True)
        sampled = kernels.search_triton(*arguments, found, rows, whole, most)
        for got, want in zip((*found, sampled), (*expected[:2], whole[expected[0]], expected[2])):
            assert torch.equal(got, want)


@pytest.mark.parametrize("path", PATHS)
def test_gradients_equal_autograd_through_the_dense_dictionary(use, path):
    torch.manual_seed(0)
    d, m, N, K = 64, 1024, 5, 9
    indices = torch.randint(0, m, (N, K))
    indices[:, :3] %= d
    coefs, x = torch.randn(N, K, requires_grad=True), torch.randn(N, d, requires_grad=True)
    g_y, g_s = torch.randn(N, d), torch.randn(N, K)
    phi = dense_dictionary(d, m, torch.float32)[indices]
    use(path)
    got = torch.autograd.grad(ops.parity_decode(indices, coefs, d, m), coefs, g_y)[0]
    torch.testing.assert_close(got, torch.autograd.grad((coefs[:, :, None] * phi).sum(1), coefs, g_y)[0])
    got = torch.autograd.grad(ops.parity_dot(indices, x, m), x, g_s)[0]
    torch.testing.assert_close(got, torch.autograd.grad((phi * x[:, None]).sum(2), x, g_s)[0])


@pytest.mark.parametrize("path, method", [("reference", "gemm"), ("c", "gemm"), ("c", "transform"), ("triton", "gemm")])
def test_gradient_of_scores_equals_autograd_through_the_reference(use, path, method):
    x, *rest = level(64, 1024, 5, 3, 20)
    x.requires_grad_()
    use(path)
    z = ops.score_children(x, *rest, method)
    grad = torch.randn(z.shape)
    expected = torch.autograd.grad(kernels.score_reference(x, *rest), x, grad)[0]
    torch.testing.assert_close(torch.autograd.grad(z, x, grad)[0], expected)


def test_gradcheck_in_float64():
    torch.manual_seed(0)
    indices = torch.tensor([[0, 5, 9, 63], [7, 8, 20, 21]])
    coefs, x = (torch.randn(2, 4, dtype=torch.float64, requires_grad=True),
                torch.randn(2, 8, dtype=torch.float64, requires_grad=True))
    assert torch.autograd.gradcheck(lambda c: ops.parity_decode(indices, c, 8), coefs)
    assert torch.autograd.gradgradcheck(lambda v: ops.parity_dot(indices, v).square(), x)
    _, *rest = level(8, 64, 2, 3, 5)
    assert torch.autograd.gradcheck(lambda v: ops.score_children(v, *rest), x)


def test_operators_pass_opcheck():
    x, parents, generators, mean, rstd, low = level(64, 1024, 4, 3, 20)
    indices, coefs = torch.randint(0, 1024, (4, 6)), torch.randn(4, 6, requires_grad=True)
    z = ops.score_children(x, parents, generators, mean, rstd, low)
    x.requires_grad_()
    levels = torch.randn(1024), 0.5 + torch.rand(1024), [generators], [64, 1024], [3, 5]
    for operator, arguments in [
        (ops.decode_op, (indices, coefs, 64, 1024)),
        (ops.decode_op, (indices, coefs, 64, 1024, torch.bfloat16)),
        (ops.decode_like_op, (indices, coefs, x, 1024)),
        (ops.decode_like_op, (indices, coefs, torch.randn(64, 4).t(), 1024)),
        (ops.decode_like_backward_op, (indices, *torch.randn(3, 4, 64), torch.rand(4, 2), 1024)),
        (ops.dot_op, (indices, x.detach().bfloat16(), 1024)),
        (ops.dot_op, (indices, x, 1024)),
        (ops.basis_op, (x.detach(), mean[:64], rstd[:64], 5)),
        (ops.collect_op, (z, parents, generators, torch.zeros(1024, 3))),
        (ops.score_op, (x, parents, generators, mean, rstd, low, "gemm")),
        (ops.score_op, (x, parents, generators, mean, rstd, low, "transform")),
        (ops.select_op, (z, parents, generators, 5)),
        (ops.search_op, (x.detach(), parents, generators, mean, rstd, low, 5, torch.tensor([0, 2]), "transform")),
        (ops.attach_op, (torch.randn(4, 6), indices, x, torch.rand(4, 6), 1024)),
        (ops.encode_op, (x.detach(), *levels, torch.tensor([0, 2]), "transform")),
        (ops.encode_op, (x.detach(), *levels, torch.tensor([3]), "gemm")),
        (ops.narrow_op, (x, *levels, torch.tensor([0, 2]), "transform", True)),
        (ops.narrow_op, (x, *levels, torch.tensor([], dtype=torch.int64), "gemm", False)),
        (ops.narrow_op, (torch.randn(64, 4).t(), *levels, torch.tensor([1]), "transform", True)),
        (ops.narrow_backward_op, (torch.randn(4, 64), torch.randn(4, 6), None, indices, *torch.randn(2, 4, 64),
                                  torch.rand(4, 2), torch.rand(4, 6), 1024)),
    ]:
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("path, method", [("reference", "gemm"), ("c", "gemm"), ("c", "transform"), ("triton", "gemm")])
def test_a_token_that_is_not_finite_does_not_touch_its_neighbours(use, path, method, bad):
    x, *rest = level(64, 1024, 5, 3, 20)
    use(path)
    clean = ops.search_children(x, *rest, 7, method)
    x[2, 17] = bad
    indices, coefs = ops.search_children(x, *rest, 7, method)
    others = [0, 1, 3, 4]
    assert torch.equal(indices[others], clean[0][others]) and torch.equal(coefs[others], clean[1][others])
    assert not torch.isfinite(coefs[2]).any()
    assert (indices[2] >= 64).all() and (indices[2] < 1024).all()
    weights = torch.ones(5, 7)
    weights[2, 0] = bad
    y = ops.parity_decode(clean[0], weights, 64)
    assert not torch.isfinite(y[2]).any() and torch.isfinite(y[others]).all()
    basis = torch.full((5, 1), 3)  # e_3 touches one coordinate, and only x[:, 3] touches its score
    y, s = ops.parity_decode(basis, weights[:, :1], 64), ops.parity_dot(basis, x)
    assert (~torch.isfinite(y)).nonzero().tolist() == [[2, 3]] and torch.equal(s, x[:, 3:4])


@pytest.mark.parametrize("path", ["reference", "c"])
@pytest.mark.parametrize("wrong", [-1, 4096])
def test_an_index_out_of_range_is_an_error_on_a_cpu(use, path, wrong):
    use(path)
    with pytest.raises(IndexError, match="must lie in 0..4095"):
        ops.parity_decode(torch.tensor([[wrong]]), torch.ones(1, 1), 64)
    with pytest.raises(IndexError, match="must lie in 0..4095"):
        ops.parity_dot(torch.tensor([[wrong]]), torch.ones(1, 64))
    x, parents, *rest = level(64, 1024, 5, 3, 20)
    parents[0, 0] = wrong
    with pytest.raises(IndexError, match="parents must lie in 0..63"):
        ops.search_children(x, parents, *rest, 4)
    x, parents, generators, *rest = level(64, 1024, 5, 3, 20)
    with pytest.raises(IndexError, match="generators must lie in 0..15"):
        ops.collect_sums(torch.ones(1, 3), torch.zeros(1, 1, dtype=torch.int64),
                         torch.tensor([1, wrong, 2]), torch.zeros(16, 3))
    generators[3] = 5 if wrong < 0 else 2000
    with pytest.raises(IndexError, match="generators must lie in 64..1023"):
        ops.score_children(x, parents, generators, *rest)


@needs_triton
@pytest.mark.parametrize("wrong", [-1, 1024, 2 ** 30, 2 ** 32 + 5, -2 ** 31])
def test_an_index_out_of_range_is_nan_for_its_token_in_the_kernels(wrong):
    """On a GPU nobody looks at the indices before the kernel does."""
    indices, coefs, x = torch.full((3, 2), 70), torch.ones(3, 2), torch.ones(3, 64)
    indices[1, 0] = wrong
    y, s = kernels.decode_triton(indices, coefs, 64, 1024), kernels.dot_triton(indices, x, 1024)
    assert torch.isnan(y[1]).all() and torch.isfinite(y[[0, 2]]).all()
    assert torch.isnan(s[1, 0]) and torch.isfinite(s[[0, 2]]).all()
    x, parents, *rest = level(64, 1024, 3, 3, 20)
    parents[1, 2] = wrong
    z = kernels.score_triton(x, parents, *rest).view(3, 3, -1)
    assert torch.isnan(z[1, 2]).all() and torch.isnan(z).sum() == z.shape[2]
    x, parents, generators, *rest = level(64, 1024, 3, 3, 20)
    generators[4] = wrong
    z = kernels.score_triton(x, parents, generators, *rest).view(3, 3, -1)
    assert torch.isnan(z[:, :, 4]).all() and torch.isnan(z).sum() == 9


@needs_triton
def test_all_features_as_children_of_feature_0(use, monkeypatch):
    """Flat selection: more generators than are held at a time, and no row of moments for every parent."""
    monkeypatch.setattr(kernels, "COLUMNS", 128)
    d, m, k = 64, 512, 40
    x, _, _, mean, rstd, low = level(d, m, 3, 1, 5)
    parents, generators = torch.zeros(3, 1, dtype=torch.int64), torch.arange(d, m)
    use("triton")
    z = ops.score_children(x, parents, generators, mean, rstd, low, "gemm")
    exact = kernels.score_reference(*(v.double() if torch.is_tensor(v) and v.is_floating_point() else v for v in (
        x, parents, generators, mean, rstd, low)))
    assert_as_exact_as_torch(z, kernels.score_reference(x, parents, generators, mean, rstd, low), exact)
    for got, want in zip(ops.select_distinct(z, parents, generators, k),
                         kernels.select_reference(z, parents, generators, k)):
        assert torch.equal(got, want)


@pytest.mark.parametrize("path", PATHS)
def test_every_bit_pattern_of_nan_is_a_nan(use, path):
    """A GPU's own NaN is 0x7FFFFFFF. The first k candidates of such a token are its NaNs, lowest index first."""
    parents, generators = torch.zeros(3, 1, dtype=torch.int64), torch.arange(600)
    bits = torch.randn(3, 600, generator=torch.Generator().manual_seed(0)).view(torch.int32)
    bits[0, 7], bits[1, [0, 9]], bits[2, 599] = 0x7FFFFFFF, -1, 0x7F800001
    use(path)
    indices, coefs = ops.select_distinct(bits.view(torch.float32), parents, generators, 5)
    assert indices[0, 0] == 7 and indices[1, :2].tolist() == [0, 9] and indices[2, 0] == 599
    assert torch.isnan(coefs).sum(1).tolist() == [1, 2, 1]


def run_everything():
    x, *rest = arguments = level(64, 1024, 50, 5, 33)
    x.requires_grad_()
    indices, coefs = ops.search_children(*arguments, 9, "transform")
    y = ops.parity_decode(indices, coefs, 64, 1024, like=x)
    return (indices, coefs, y, *torch.autograd.grad(y.square().sum() + y[:, 3].sum(), x),
            *ops.search_basis(x, torch.zeros(64), torch.ones(64), 5), ops.parity_dot(indices, x, 1024))


def test_the_number_of_threads_changes_nothing(use):
    use("c")
    before, results = torch.get_num_threads(), []
    try:
        for threads in 1, 2, 5:
            torch.set_num_threads(threads)
            results.append(run_everything())
    finally:
        torch.set_num_threads(before)
    for one, two, five in zip(*results):
        assert torch.equal(one, two) and torch.equal(one, five)


@pytest.mark.parametrize("problem", ["no compiler", "a compiler that fails", "no place to write"])
def test_without_a_compiler_the_same_comes_out_and_it_is_said(monkeypatch, tmp_path, problem):
    expected = run_everything()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if problem == "no compiler":
        monkeypatch.setattr(kernels_cpu.shutil, "which", lambda name: None)
    elif problem == "a compiler that fails":
        monkeypatch.setattr(kernels_cpu.shutil, "which", lambda name: "/bin/false")
    else:
        (tmp_path / "paritytransformer").write_text("a file where the folder should be")
    kernels_cpu.library.cache_clear()
    try:
        if problem == "no place to write":
            got = run_everything()
            assert kernels_cpu.library() is not None
        else:
            with pytest.warns(UserWarning, match="plain torch, many times slower"):
                got = run_everything()
            assert kernels_cpu.library() is None
    finally:
        kernels_cpu.library.cache_clear()
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_any_layout_in_memory_gives_the_same():
    x, parents, generators, mean, rstd, low = level(64, 1024, 6, 4, 24)
    def apart(v):  # the same values, not side by side
        return torch.stack([v, v * 0], -1)[..., 0]
    for method in "gemm", "transform":
        for got, expected in zip(ops.search_children(*map(apart, (x, parents, generators, mean, rstd)), low, 7, method),
                                 ops.search_children(x, parents, generators, mean, rstd, low, 7, method)):
            assert torch.equal(got, expected)
    for got, expected in zip(ops.search_basis(*map(apart, (x, mean[:64], rstd[:64])), 7),
                             ops.search_basis(x, mean[:64], rstd[:64], 7)):
        assert torch.equal(got, expected)


def test_wrong_arguments_are_answered():
    indices, coefs, x = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3), torch.ones(2, 64)
    arguments = dict(zip(("x", "parents", "generators", "mean", "rstd", "low"), level(64, 1024, 2, 3, 20)))
    for call, words in [
        (lambda: ops.parity_decode(indices, coefs, 60), "power of two from 8 to 32768"),
        (lambda: ops.parity_decode(indices.float(), coefs, 64), "indices must be integers"),
        (lambda: ops.parity_decode(indices, coefs.int(), 64), "coefs must be float32"),
        (lambda: ops.parity_decode(indices[0], coefs, 64), "indices must have shape"),
        (lambda: ops.parity_decode(indices, coefs[:, :2], 64), "must have one shape"),
        (lambda: ops.parity_decode(indices, coefs, 64, m=3000), "3000 is no number of features for d=64"),
        (lambda: ops.parity_decode(indices, coefs, 64, m=2 ** 20), "power of two from 64 to 4096"),
        (lambda: ops.parity_decode(indices, coefs, 64, like=x[:1]), r"like must have shape \(2, 64\)"),
        (lambda: ops.parity_dot(indices, x[0]), "x must have 2 dimensions"),
        (lambda: ops.search_basis(x, x[0], x[0, :3], 2), "mean and rstd must have the length 64"),
        (lambda: ops.search_basis(x, x[0], x[0], 65), "k=65 features cannot be selected from 64"),
        (lambda: ops.select_distinct(x[0], indices, torch.arange(4), 3), "z must have 2 dimensions"),
        (lambda: ops.select_distinct(x, indices, torch.rand(4), 3), "generators must be integers"),
        (lambda: ops.score_children(**arguments | {"parents": indices[:, :0]}), "parents are empty"),
        (lambda: ops.score_children(**arguments | {"method": "fft"}), "'gemm' or 'transform'"),
        (lambda: ops.score_children(**arguments | {"low": 192}), "192 is no number of features"),
        (lambda: ops.score_children(**arguments | {"parents": indices[:1]}), r"parents must have shape \(2, K\)"),
        (lambda: ops.select_distinct(x, indices, torch.arange(4), 3), "3 parents x 4 generators"),
        (lambda: ops.search_children(**arguments, k=1000), "k=1000 features cannot be selected"),
        (lambda: ops.collect_sums(x, indices, torch.arange(4), torch.zeros(8, 3)), "3 parents x 4 generators"),
        (lambda: ops.collect_sums(x[:, :12], indices, torch.arange(4), torch.zeros(8, 2)), r"shape \(m, 3\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


def test_autocast_does_not_reach_into_the_operations():
    arguments = level(64, 1024, 5, 3, 20)
    indices, coefs = torch.randint(0, 4096, (5, 40)), torch.randn(5, 40)
    for operation in (lambda: ops.score_children(*arguments, "gemm"),
                      lambda: ops.score_children(*arguments, "transform"),
                      lambda: ops.parity_decode(indices, coefs, 64),
                      lambda: ops.parity_dot(indices, arguments[0])):
        expected = operation()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(operation(), expected)


@needs_triton
def test_kernels_compile_for_real_gpus_without_stack():
    """`python kernels.py`: real machine code for compute capability 80, 90, 100 and 120, at the paper's shapes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "kernels.py"], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [line.split() for line in run.stdout.splitlines() if "_kernel" in line]
    assert {row[0] for row in rows} == {"decode_kernel", "dot_kernel", "moments_kernel",
                                        "score_kernel", "select_kernel"}
    assert ({target for row in rows for target in row if target.startswith("sm_")}
            == {"sm_80", "sm_90", "sm_100", "sm_120"})


def test_what_c_is_given_is_checked(use):
    """Each of these wrote outside of a tensor, or returned memory that nobody had written."""
    use("c")
    z, parents, generators = torch.zeros(2, 6), torch.zeros(2, 2, dtype=torch.int64), torch.tensor([8, 9, 10])
    for m in 11, 12, 1000:
        with pytest.raises(ValueError, match=f"sums has {m} rows, but the number of features m must be a power of two"):
            ops.collect_sums(z, parents, generators, torch.zeros(m, 3))
    arguments = level(64, 1024, 4, 3, 33)
    for method in "gemm", "transform":
        for wrong in [7], [-1], [0, 4]:
            with pytest.raises(IndexError, match="rows must lie in 0..3"):
                ops.search_children(*arguments, 5, method, torch.tensor(wrong))


def test_forward_mode_is_refused_instead_of_zero():
    indices, x = torch.randint(64, 4096, (3, 4)), torch.randn(3, 64)
    for function, value in ((lambda v: ops.parity_dot(indices, v), x),
                            (lambda v: ops.parity_decode(indices, v, 64), torch.randn(3, 4)),
                            (DeepParityBottleneck(64, (6, 10), (4, 6), (16,)).eval(), x)):
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.func.jvp(function, (value,), (torch.ones_like(value),))


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped"])
def test_a_damaged_library_in_the_cache_is_made_anew(tmp_path, damage):
    if kernels_cpu.find_compiler() is None:
        pytest.skip("there is no C compiler")
    script = "import torch, ops; print(ops.parity_dot(torch.tensor([[100, 3]]), torch.arange(64.)[None]).tolist())"

    def go():
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                              env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": ROOT})
    first = go()
    path, = tmp_path.glob("paritytransformer/kernels-*.so")
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "flipped": content}[damage])
    assert (go().returncode, go().stdout) == (0, first.stdout)
    assert len(list(tmp_path.glob("paritytransformer/*"))) == 1 and path.read_bytes() != content
