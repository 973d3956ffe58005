"""The bottleneck against a brute-force model of its definition: every feature, every candidate, one token at a time."""
import copy
import gc
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.fx.experimental.proxy_tensor import make_fx

import dpb
import kernels_cpu
import ops
from conftest import force_path
from dpb import Code, DeepParityBottleneck, update_moments

PATHS = [("reference", "gemm"), ("c", "gemm"), ("c", "transform"), ("triton", "gemm")]
TWO = dict(d=64, bits=(6, 10), active=(5, 9), children=(31,))
THREE = dict(d=64, bits=(6, 9, 11), active=(4, 6, 10), children=(14, 12))


def brute_dictionary(d, m):
    """Row i is phi_i: parities of the bits of i that M selects, by schoolbook field arithmetic."""
    t = d.bit_length() - 1
    polynomial = {3: 0b1011, 4: 0b10011, 6: 0b1000011, 7: 0b10000011}[t]

    def mul(a, b):
        product = 0
        while b:
            product ^= a * (b & 1)
            a, b = a << 1, b >> 1
            a ^= polynomial * (a >> t)
        return product

    inverse = [0] + [next(y for y in range(1, d) if mul(x, y) == 1) for x in range(1, d)]
    M = [k + (inverse[k] << t) for k in range(d)]
    h = np.array([[(-1) ** bin(M[k] & i).count("1") for k in range(d)] for i in range(m)]) / np.sqrt(d)
    phi = h.copy()
    phi[:d] = np.eye(d)
    return phi


def brute_code(x, bits, active, generators, mean, std, phi):
    """Indices and coefficients of one token, in float64, level by level."""
    z = (phi @ x - mean) / std
    indices, chosen, candidates = [], [], range(2 ** bits[0])
    for level, k in enumerate(active):
        if level:
            candidates = {i ^ g for i in chosen for g in generators[level - 1]}
        chosen = sorted(candidates, key=lambda i: (-abs(z[i]), i))[:k]
        indices += chosen
    return indices, z[indices]


def make(path, method, monkeypatch, moments=True, **shape):
    """A bottleneck on a path, with its brute-force twin as a function of one token."""
    force_path(path, monkeypatch)
    layer = DeepParityBottleneck(**shape, seed=3, method=method).eval()
    if moments:
        layer.mean.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
        layer.var.uniform_(0.5, 2, generator=torch.Generator().manual_seed(2))
    generators = [words.tolist() for name, words in layer.named_buffers() if name.startswith("generators_")]
    phi = brute_dictionary(shape["d"], layer.m)
    mean, std = layer.mean.double().numpy(), layer.var.double().sqrt().numpy()

    def brute(x):
        return brute_code(x.double().numpy(), shape["bits"], shape["active"], generators, mean, std, phi)
    return layer, brute, phi


def adversarial(d):
    x = torch.zeros(9, d)
    x[1] = 1                                         # all coordinates equal
    x[2, 5] = 3                                      # one-hot
    x[3] = torch.arange(d) % 2 * 2 - 1               # a Hadamard row
    x[4] = torch.arange(d) % 5 - 2                   # many ties
    x[5] = (torch.arange(d) % 7 - 3) * 2.0 ** 100    # huge
    x[6] = (torch.arange(d) % 7 - 3) * 2.0 ** -100   # tiny
    x[7, :3] = torch.tensor([1.0, -1.0, 1.0])
    x[8] = -1
    return x


@pytest.mark.parametrize("shape", [TWO, THREE], ids=["2 levels", "3 levels"])
@pytest.mark.parametrize("path, method", PATHS)
def test_code_of_random_inputs_equals_brute_force(path, method, shape, monkeypatch):
    layer, brute, phi = make(path, method, monkeypatch, **shape)
    x = torch.randn(13, shape["d"], generator=torch.Generator().manual_seed(0))
    code, y = layer.encode(x), layer(x)
    for n in range(len(x)):
        indices, z = brute(x[n])
        assert code.indices[n].tolist() == indices
        np.testing.assert_allclose(code.coefs[n].numpy(), z, rtol=1e-4, atol=1e-5)
        y_hat = z @ phi[indices]
        expected = y_hat * np.linalg.norm(x[n].double().numpy()) / np.linalg.norm(y_hat)
        np.testing.assert_allclose(y[n].numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [TWO, THREE], ids=["2 levels", "3 levels"])
@pytest.mark.parametrize("path, method", PATHS)
def test_code_of_adversarial_inputs_equals_brute_force(path, method, shape, monkeypatch):
    """At mean 0, std 1 these scores are exact in float32 (sums of small integers times powers of two), ties and all."""
    layer, brute, _ = make(path, method, monkeypatch, moments=False, **shape)
    x = adversarial(shape["d"])
    code = layer.encode(x)
    for n in range(len(x)):
        indices, z = brute(x[n])
        assert code.indices[n].tolist() == indices, n
        assert code.coefs[n].tolist() == z.tolist(), n


@pytest.mark.parametrize("kind", ["random", "adversarial"])
@pytest.mark.parametrize("shape", [TWO, dict(TWO, active=(64, 20))], ids=["K < d", "K > d"])
@pytest.mark.parametrize("path, method", PATHS)
def test_flat_selection_takes_the_best_of_all_features(path, method, shape, kind, monkeypatch):
    layer, _, phi = make(path, method, monkeypatch, moments=kind == "random", selection="flat", **shape)
    x = torch.randn(13, 64, generator=torch.Generator().manual_seed(0)) if kind == "random" else adversarial(64)
    x = x[:5] if path == "triton" else x  # its interpreter is slow
    code, K = layer.encode(x), sum(layer.active)
    z = (x.double().numpy() @ phi.T - layer.mean.double().numpy()) / layer.var.double().sqrt().numpy()  # (N, m)
    for n in range(len(x)):
        best = sorted(range(layer.m), key=lambda i: (-abs(z[n, i]), i))[:K]
        assert code.indices[n].tolist() == best
        np.testing.assert_allclose(code.coefs[n].numpy(), z[n, best], rtol=1e-4, atol=1e-5)


def test_flat_selection_learns_its_moments_compiles_and_has_the_gradient():
    torch.manual_seed(0)
    layer = DeepParityBottleneck(**TWO, selection="flat", decay=0.9)
    x, phi = torch.randn(64, 64) * 2 + 0.5, torch.from_numpy(brute_dictionary(64, 1024)).float()
    v = x.clone().requires_grad_()
    code = layer.encode(v)
    expected = torch.autograd.grad((v @ phi.T).gather(1, code.indices).square().sum(), v)[0]  # mean 0, std 1
    torch.testing.assert_close(torch.autograd.grad(code.coefs.square().sum(), v)[0], expected, rtol=1e-4, atol=1e-4)
    update_moments(layer)
    scores = x @ phi.T  # all features were candidates on all 64 tokens
    torch.testing.assert_close(layer.mean, 0.1 * scores.mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.var, 1 + 0.1 * (scores.var(0, correction=0) - 1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("path, method", PATHS)
def test_norm_is_preserved(path, method, monkeypatch):
    layer, *_ = make(path, method, monkeypatch, **TWO)
    x = torch.cat([torch.randn(5, 64, generator=torch.Generator().manual_seed(0)), adversarial(64)])
    y = layer(x)
    assert torch.equal(y[5], torch.zeros(64))  # zero in, zero out
    torch.testing.assert_close(y.double().norm(dim=-1), x.double().norm(dim=-1), rtol=1e-5, atol=0)


def test_structure_of_the_code():
    torch.manual_seed(0)
    layer = DeepParityBottleneck(d=128, bits=(7, 12, 14), active=(8, 16, 24), children=(64, 48), seed=5)
    code = layer.encode(torch.randn(4, 50, 128))
    assert code.indices.shape == code.coefs.shape == (4, 50, 48) and code.indices.dtype == torch.int64
    parents, start = None, 0
    for level, k in enumerate(layer.active):
        own = code.indices[..., start : start + k].reshape(-1, k)
        size = code.coefs[..., start : start + k].abs()
        assert (own >= layer.lows[level]).all() and (own < layer.lows[level + 1]).all()
        assert (own.sort(1).values.diff(dim=1) > 0).all()  # distinct
        assert (size.diff(dim=-1) <= 0).all()              # largest first
        if level:
            generators = layer.get_buffer(f"generators_{level}")
            children = (parents[:, :, None] ^ generators).flatten(1)
            assert (own[:, :, None] == children[:, None]).any(2).all()
        parents, start = own, start + k


@pytest.mark.parametrize("bits, children", [
    ((7, 12), (31,)), ((7, 12), (64,)), ((7, 10, 14), (7, 30)), ((7, 9, 11, 13), (6, 6, 6)),
])
def test_every_feature_is_reachable(bits, children):
    for seed in range(5):
        layer = DeepParityBottleneck(128, bits, (4,) * len(bits), children, seed=seed)
        parents = range(128)
        for level in range(1, len(bits)):
            generators = layer.get_buffer(f"generators_{level}").tolist()
            assert len(set(generators)) == children[level - 1]
            assert all(2 ** bits[level - 1] <= g < 2 ** bits[level] for g in generators)
            parts = np.bincount([g >> bits[level - 1] for g in generators])[1:]
            assert parts.max() - parts.min() <= 1  # spread evenly
            parents = {i ^ g for i in parents for g in generators}
            assert parents == set(range(2 ** bits[level - 1], 2 ** bits[level]))


def test_unreachable_features_are_counted_exactly_and_announced():
    with pytest.warns(UserWarning, match="features can never be active") as caught:
        layer = DeepParityBottleneck(64, (6, 9, 12), (4, 4, 4), (7, 5))
    reached = {i ^ g for i in range(64, 512) for g in layer.generators_2.tolist()}
    assert f"level 2: {4096 - 512 - len(reached)} of 3584" in str(caught[0].message)


@pytest.mark.parametrize("path, method", PATHS)
def test_gradient_equals_autograd_through_the_dense_dictionary(path, method, monkeypatch):
    layer, _, phi = make(path, method, monkeypatch, **THREE)
    x = torch.randn(7, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    grad_y, grad_c = (torch.randn(7, n, generator=torch.Generator().manual_seed(n)) for n in (64, 20))
    code = layer.encode(x)
    y = layer.decode(code, like=x)
    got, = torch.autograd.grad((y * grad_y).sum() + (code.coefs * grad_c).sum(), x)

    wide = x.detach().double().requires_grad_()
    rows = torch.from_numpy(phi)[code.indices]  # (N, K, d), the choice of features held fixed
    z = ((rows * wide[:, None]).sum(2) - layer.mean[code.indices]) / layer.var[code.indices].sqrt()
    y_hat = (z[:, :, None] * rows).sum(1)
    y = y_hat * wide.norm(dim=1, keepdim=True) / y_hat.norm(dim=1, keepdim=True)
    expected, = torch.autograd.grad((y * grad_y).sum() + (z * grad_c).sum(), wide)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [TWO, THREE], ids=["2 levels", "3 levels"])
@pytest.mark.parametrize("path, method", PATHS)
def test_narrow_is_encode_and_decode_with_the_same_gradients_and_sums(path, method, shape, monkeypatch):
    one, _, _ = make(path, method, monkeypatch, **shape, samples=4)  # every second token
    two = copy.deepcopy(one)
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(4))
    of_y, of_x, of_coefs = torch.randn_like(x), torch.randn_like(x), torch.randn(*x.shape[:-1], sum(one.active))
    for training in (False, True):
        one.train(training), two.train(training)
        with torch.no_grad():
            plain = one.narrow(x)
        whole, parts = x.clone().requires_grad_(), x.clone().requires_grad_()
        code, y, same = one.narrow(whole, again=True)
        with torch.no_grad():
            two.encode(parts)  # as often as the other, for the sums
        expected = two.encode(parts)
        y_expected = two.decode(expected, like=parts)
        for got, also, want in zip((*code, y), (*plain[0], plain[1]), (*expected, y_expected)):
            assert torch.equal(got, want) and torch.equal(also, want)
        for out, coefs, again in (y, code.coefs, same), (y_expected, expected.coefs, parts):
            ((out * of_y).sum() + (again * of_x).sum() + (coefs * of_coefs).sum()).backward()
        torch.testing.assert_close(whole.grad, parts.grad, rtol=1e-6, atol=1e-6)
        assert torch.equal(one.sums, two.sums) and bool(one.sums.any()) == training


@pytest.mark.parametrize("path, method", PATHS)
def test_a_gradient_may_lie_in_any_order(path, method, monkeypatch):
    layer, _, _ = make(path, method, monkeypatch, **TWO)
    x, of_y, of_x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(4)).unbind()
    grads = []
    for again in of_x, of_x.t().contiguous().t():
        v = x.clone().requires_grad_()
        _, y, same = layer.narrow(v, again=True)
        torch.autograd.backward([y, same], [of_y, again])
        grads.append(v.grad)
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("path, method", PATHS)
def test_generators_and_moments_of_another_layer_are_refused(path, method, monkeypatch):
    """They come with a checkpoint, and a path that reads where they point would read what is not its own. On a GPU,
    where looking would stall it, their features get NaN."""
    layer, _, _ = make(path, method, monkeypatch, **TWO)
    x, state = torch.randn(5, 64), layer.state_dict()
    mean, var, *rest = layer.levels()
    if path != "reference":
        with pytest.raises(ValueError, match="mean and var the length"):
            ops.narrow_features(x, mean[:100].clone(), var[:100].clone(), *rest, method)
        with pytest.raises(ValueError, match="x must have 64 coordinates"):
            ops.narrow_features(torch.randn(6, 32), mean, var, *rest, method)
    layer.load_state_dict(state | {"generators_1": state["generators_1"] * 8})
    if path == "triton":
        assert torch.isnan(layer(x)).any(1).all()
        return
    for run in layer, layer.encode:
        with pytest.raises(IndexError, match="generators must lie in"):
            run(x)


@pytest.mark.parametrize("path, method", [("c", "transform"), ("c", "gemm"), ("reference", "gemm")])
def test_narrow_of_other_types_of_no_tokens_and_traced(path, method, monkeypatch):
    layer, _, _ = make(path, method, monkeypatch, **TWO)
    half = torch.randn(2, 3, 64).bfloat16().requires_grad_()
    code, y, same = layer.narrow(half, again=True)
    assert y.dtype == same.dtype == torch.bfloat16 and code.coefs.shape == (2, 3, sum(TWO["active"]))
    for shape in (0, 64), (0, 5, 64), (2, 0, 64):
        code, y, same = layer.narrow(torch.zeros(shape, requires_grad=True), again=True)
        assert y.shape == same.shape == shape and code.indices.shape == (*shape[:-1], sum(TWO["active"]))
    x = torch.randn(5, 64)
    torch.testing.assert_close(make_fx(layer)(x)(x), layer(x))
    v = x.clone().requires_grad_()
    y = layer(v)
    rows = torch.randn(3, 5, 64)
    several, = torch.autograd.grad(y, v, rows, retain_graph=True, is_grads_batched=True)
    for row, got in zip(rows, several):
        torch.testing.assert_close(got, torch.autograd.grad(y, v, row, retain_graph=True)[0])
    torch.set_default_dtype(torch.float64)
    try:
        torch.testing.assert_close(layer(x), y.detach())
    finally:
        torch.set_default_dtype(torch.float32)


def test_threads_that_find_the_moments_changed_all_get_the_right_result(monkeypatch):
    layer, _, _ = make("c", "transform", monkeypatch, **TWO)
    x = torch.randn(4, 64)
    with ThreadPoolExecutor(4) as pool:
        for turn in range(20):
            layer.mean.fill_(turn / 20)
            results = list(pool.map(lambda _: layer(x), range(8)))
            assert all(torch.equal(result, layer(x)) for result in results)


def test_what_is_kept_of_the_moments_follows_them_however_they_change(monkeypatch):
    layer, _, _ = make("c", "transform", monkeypatch, **TWO)
    other, x = DeepParityBottleneck(**TWO, seed=5, method="transform").eval(), torch.randn(20, 64)
    first = layer(x)

    def expected():
        code = layer.encode(x)
        fresh = copy.deepcopy(layer)
        monkeypatch.setattr(ops, "BACKEND", "reference")
        want = fresh.encode(x)
        monkeypatch.setattr(ops, "BACKEND", "c")
        assert torch.equal(code.indices, want.indices)
        torch.testing.assert_close(code.coefs, want.coefs, equal_nan=True)
        return fresh(x)
    changes = [lambda: layer.mean.data.add_(0.5), lambda: layer.var.data.numpy().fill(3),
               lambda: layer.load_state_dict(other.state_dict()), lambda: layer.mean.fill_(float("nan")),
               lambda: setattr(layer, "mean", torch.ones_like(layer.mean))]
    for change in changes:
        change()
        y = layer(x)
        assert not torch.equal(y, first)
        assert torch.equal(y, expected()) or torch.isnan(y).all()
        first = y


def test_tables_live_as_long_as_their_layer(monkeypatch):
    layer, _, _ = make("c", "transform", monkeypatch, **TWO)
    gc.collect()
    before = len(kernels_cpu.TABLES)
    layer(torch.randn(2, 64))
    assert len(kernels_cpu.TABLES) == before + 1
    del layer
    gc.collect()
    assert len(kernels_cpu.TABLES) == before


def test_gradcheck_in_float64():
    layer = DeepParityBottleneck(8, (3, 5), (2, 3), (6,)).double().eval()
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradcheck(lambda v: layer.encode(v).coefs, x)


def test_gradient_of_zero_and_huge_inputs_is_finite():
    layer = DeepParityBottleneck(**TWO).eval()
    x = adversarial(64).requires_grad_()
    layer(x).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_token_is_nan_alone_and_moves_no_moments(bad):
    torch.manual_seed(0)
    layer = DeepParityBottleneck(**TWO)
    x = torch.randn(64, 64)
    clean = layer.eval()(x)
    x[7, 3] = bad
    y = layer.train()(x)
    assert torch.isnan(y[7]).all()
    others = torch.arange(64) != 7
    assert torch.equal(y[others], clean[others])
    update_moments(layer)
    assert torch.isfinite(layer.mean).all() and torch.isfinite(layer.var).all()


def brute_moments(layer, x, mean, var):
    """One update in words, float64: every token sampled.

    The moments of each feature are over the tokens that had it as a candidate.
    """
    generators = layer.generators_1.tolist()
    phi = brute_dictionary(layer.d, layer.m)
    scores = {i: [] for i in range(layer.m)}
    for row in x.double().numpy():
        s = phi @ row
        z = (s - mean) / np.sqrt(var)
        parents = sorted(range(layer.d), key=lambda i: (-abs(z[i]), i))[: layer.active[0]]
        for i in {*range(layer.d), *(p ^ g for p in parents for g in generators)}:
            scores[i].append(s[i])
    mean, var = mean.copy(), var.copy()
    for i, seen in scores.items():
        if seen:
            mean[i] += (1 - layer.decay) * (np.mean(seen) - mean[i])
            var[i] = max(var[i] + (1 - layer.decay) * (np.var(seen) - var[i]), layer.floor)
    return mean, var


def test_moments_move_as_defined():
    torch.manual_seed(0)
    layer = DeepParityBottleneck(**TWO, decay=0.9, samples=32)
    layer.passes = 2  # of 16 tokens each: every token is a sample
    mean, var = np.zeros(layer.m), np.ones(layer.m)
    for _ in range(3):
        x = torch.randn(32, 64) * 2 + 0.5
        layer.eval()(x)  # evaluation never moves them
        layer.train()(x[:16])
        layer(x[16:])
        np.testing.assert_allclose(layer.mean.numpy(), mean, atol=1e-5)  # only the update does
        update_moments(layer)
        mean, var = brute_moments(layer, x, mean, var)
        np.testing.assert_allclose(layer.mean.numpy(), mean, atol=1e-5)
        np.testing.assert_allclose(layer.var.numpy(), var, atol=1e-5)
    layer.eval()(x)
    update_moments(layer)
    np.testing.assert_allclose(layer.mean.numpy(), mean, atol=1e-5)  # nothing was seen: all stay


def test_moments_come_from_evenly_spaced_tokens_that_change_with_the_step():
    """512 tokens and 64 samples: level-1 counts are those of every 8th token, from an offset that moves."""
    torch.manual_seed(0)
    layer = DeepParityBottleneck(**TWO)
    x = torch.randn(512, 64)
    offsets = []
    for _ in range(8):
        layer.sums.zero_()
        parents = layer.encode(x).indices[:, :5]
        counts = layer.sums[64:, 0]
        for offset in range(8):
            children = (parents[offset::8, :, None] ^ layer.generators_1).flatten(1)
            expected = torch.zeros(64, layer.m).scatter_(1, children, 1.0).sum(0)[64:]
            if torch.equal(counts, expected):
                offsets.append(offset)
        layer.updates += 1
    assert sorted(offsets) == list(range(8))


def test_moments_converge_to_the_true_candidate_moments():
    """On a fixed distribution: 256 tokens, all sampled, shown again until nothing moves."""
    torch.manual_seed(0)
    layer = DeepParityBottleneck(**TWO, decay=0.8, samples=256)
    x = torch.randn(256, 64) + torch.linspace(-1, 1, 64)
    for _ in range(150):
        layer(x)
        update_moments(layer)
    mean, var = layer.mean.double().numpy(), layer.var.double().numpy()
    # One more step by brute force changes nothing that a selection does not flip
    again = brute_moments(layer, x, mean, var)
    assert np.mean(np.abs(again[0] - mean) < 1e-3) > 0.95
    assert np.mean(np.abs(again[1] - var) < 1e-2) > 0.95
    true = (x.double() @ torch.from_numpy(brute_dictionary(64, 64)).T).numpy()  # level 0: every token is a candidate
    np.testing.assert_allclose(mean[:64], true.mean(0), atol=1e-4)
    np.testing.assert_allclose(var[:64], true.var(0), atol=1e-3)


def test_without_standardisation_plain_scores_are_compared():
    torch.manual_seed(0)
    layer = DeepParityBottleneck(**TWO, standardise=False)
    x = torch.randn(40, 64) * 3 + 1
    layer(x)
    update_moments(layer)
    code = layer.encode(x)
    assert torch.equal(layer.mean, torch.zeros(layer.m)) and torch.equal(layer.var, torch.ones(layer.m))
    assert torch.equal(code.coefs[:, :5], x.gather(1, code.indices[:, :5]))


def two_layers():
    torch.manual_seed(0)
    model = torch.nn.Sequential(DeepParityBottleneck(**TWO, seed=0), DeepParityBottleneck(**THREE, seed=1))
    return model, torch.randn(3, 2, 128, 64)  # 3 steps of 2 passes of 128 tokens


def rank_worker(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, x = two_layers()
    for layer in model:
        layer.passes = 2
    calls, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda tensor: (calls.append(tensor.shape), all_reduce(tensor))
    for step in x:
        model(step[rank])
        update_moments(model)
    assert len(calls) == len(x)  # one flat call a step for both layers
    torch.save(model.state_dict(), os.path.join(folder, f"rank{rank}.pt"))
    dist.destroy_process_group()


def test_two_ranks_end_with_the_moments_of_one_that_saw_all(tmp_path):
    mp.spawn(rank_worker, args=(str(tmp_path),), nprocs=2)
    model, x = two_layers()
    for step in x:
        model(step.flatten(0, 1))
        update_moments(model)
    expected = model.state_dict()
    assert (expected["0.mean"] != 0).float().mean() > 0.9
    for rank in range(2):
        state = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        assert state.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(state[name], expected[name], rtol=1e-4, atol=1e-6)


def test_state_is_moments_and_generators_and_is_small():
    layer = DeepParityBottleneck(1024)  # small_2l
    state = layer.state_dict()
    assert set(state) == {"mean", "var", "updates", "generators_1"}
    assert sum(tensor.numel() * tensor.itemsize for tensor in state.values()) < 1e6
    assert not list(layer.parameters())


def test_a_checkpoint_brings_its_generators_and_gives_the_same_code():
    torch.manual_seed(0)
    one, other = DeepParityBottleneck(**TWO, seed=1), DeepParityBottleneck(**TWO, seed=2)
    x = torch.randn(64, 64)
    one(x)
    update_moments(one)
    assert not torch.equal(one.generators_1, other.generators_1)
    other.load_state_dict(one.state_dict())
    for got, want in zip(other.eval().encode(x), one.eval().encode(x)):
        assert torch.equal(got, want)


def test_same_seed_same_generators():
    for level in 1, 2:
        one, two = (DeepParityBottleneck(**THREE, seed=7).get_buffer(f"generators_{level}") for _ in range(2))
        assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_in_its_type(dtype):
    layer = DeepParityBottleneck(**TWO).eval()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    code = layer.encode(x)
    assert code.coefs.dtype == torch.float32 and layer(x).dtype == dtype
    assert torch.equal(code.indices, layer.encode(x.float()).indices)


def test_one_compiled_graph_serves_any_number_of_tokens():
    layer = DeepParityBottleneck(**TWO).eval()
    graphs = []
    def count(graph, inputs):
        graphs.append(graph)
        return graph
    run = torch.compile(layer, fullgraph=True, backend=count)
    with torch.no_grad():
        for N in range(5, 20):
            x = torch.randn(N, 64)
            assert torch.equal(run(x), layer(x))
    assert len(graphs) <= 2  # one for the first size, one for all


def test_an_empty_batch_and_a_single_vector_work():
    layer = DeepParityBottleneck(**TWO)
    assert layer(torch.zeros(0, 64)).shape == (0, 64)
    assert layer.encode(torch.zeros(2, 0, 64)).indices.shape == (2, 0, 14)
    assert layer.eval()(torch.ones(64)).shape == (64,)


def test_meta_device_then_checkpoint_gives_the_same_layer():
    torch.manual_seed(0)
    layer = DeepParityBottleneck(**TWO)
    x = torch.randn(64, 64)
    layer(x)
    update_moments(layer)
    with torch.device("meta"):
        other = DeepParityBottleneck(**TWO)
    other = other.to_empty(device="cpu")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x)) and torch.equal(other.sums, layer.sums)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moments_stay_in_float32_when_a_model_is_narrowed(dtype):
    layer = DeepParityBottleneck(**TWO)
    layer.mean += 1e-5
    layer.to(dtype)
    assert layer.mean.dtype == layer.var.dtype == layer.sums.dtype == torch.float32
    assert torch.equal(layer.mean, torch.full_like(layer.mean, 1e-5))


def test_compiles_without_a_break():
    torch.manual_seed(0)
    layer = DeepParityBottleneck(**THREE)
    x, grad = torch.randn(2, 64, 64), torch.randn(2, 64, 64)
    results = []
    for run in layer, torch.compile(layer, fullgraph=True):
        layer.sums.zero_()
        v = x.clone().requires_grad_()
        y = run(v)
        y.backward(grad)
        results.append((y.detach(), v.grad, layer.sums.clone()))
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


def test_unfolding_separates_signs_and_folds_back():
    code = Code(torch.tensor([[3, 5, 9]]), torch.tensor([[1.5, -2.0, 0.0]]))
    ids, values = dpb.unfold(code, 16)
    assert ids.tolist() == [[3, 21, 9]] and values.tolist() == [[1.5, 2.0, 0.0]]
    for got, want in zip(dpb.fold(ids, values, 16), code):
        assert torch.equal(got, want)


def test_variance_loss_equals_its_definition():
    torch.manual_seed(0)
    code = Code(torch.randint(0, 12, (40, 3)), torch.randn(40, 3, requires_grad=True))
    values = {i: code.coefs[code.indices == i] for i in range(12)}
    expected = -torch.stack([v.var(unbiased=False) for v in values.values() if len(v) >= 9]).mean()
    assert 0 < sum(len(v) >= 9 for v in values.values()) < 12
    got = dpb.variance_loss(code, 12, n_min=9)
    torch.testing.assert_close(got, expected)
    for a, b in zip(torch.autograd.grad(got, code.coefs), torch.autograd.grad(expected, code.coefs)):
        torch.testing.assert_close(a, b)
    assert dpb.variance_loss(code, 12, n_min=1000) == 0


def test_reconstruction_loss_equals_its_definition():
    y, x = torch.randn(4, 8), torch.randn(4, 8)
    torch.testing.assert_close(dpb.reconstruction_loss(y, x), ((y - x) ** 2).mean())


def test_editing_a_coefficient_moves_the_output_by_that_row():
    torch.manual_seed(0)
    layer = DeepParityBottleneck(**TWO).eval()
    code = layer.encode(torch.randn(3, 64))
    coefs = code.coefs.clone()
    coefs[1, 7] += 2
    change = layer.decode(Code(code.indices, coefs)) - layer.decode(code)
    expected = 2 * torch.from_numpy(brute_dictionary(64, layer.m))[code.indices[1, 7]]
    torch.testing.assert_close(change[1].double(), expected, rtol=0, atol=1e-5)
    assert torch.equal(change[[0, 2]], torch.zeros(2, 64))


@pytest.mark.parametrize("change, words", [
    (dict(d=60), "power of two from 8 to 32768"),
    (dict(bits=(7, 10)), "must start with log2 d = 6"),
    (dict(bits=(6, 13)), "at most 2 log2 d = 12"),
    (dict(bits=(6, 6)), "must rise"),
    (dict(active=(5, 9, 3)), "an entry for each level"),
    (dict(children=()), "one for each level but the first"),
    (dict(active=(65, 9)), "active.0.=65 must lie in 1..64"),
    (dict(active=(5, 0)), "active.1.=0 must lie in 1.."),
    (dict(active=(5, 200)), "active.1.=200 must lie in 1..75"),  # 15 high parts, 5 parents
    (dict(children=(1000,)), "only 960 different generators"),
    (dict(decay=1.0), "decay=1.0 must lie in"),
])
def test_impossible_shapes_are_answered(change, words):
    with pytest.raises(ValueError, match=words):
        DeepParityBottleneck(**{**TWO, **change})


@pytest.mark.parametrize("of_layer, of_input", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_moments_of_another_precision_than_the_input(of_layer, of_input):
    layers = [DeepParityBottleneck(**TWO) for _ in range(2)]
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    layers[0](x)
    layers[1].to(of_layer)(x.to(of_input))
    torch.testing.assert_close(layers[1].sums.float(), layers[0].sums, rtol=1e-4, atol=1e-3)


def test_wrong_input_width_is_answered():
    with pytest.raises(ValueError, match=r"width d=64, but the input has shape \(3, 32\)"):
        DeepParityBottleneck(**TWO)(torch.ones(3, 32))


def test_the_rule_takes_the_transform_on_a_cpu_unless_there_are_very_many_features():
    assert ops.scoring_method("cpu", 1024, 16, 256, 2 ** 15 - 2 ** 10) == "transform"  # small_2l
    assert ops.scoring_method("cpu", 1024, 16, 256, 2 ** 20 - 2 ** 10) == "gemm"       # a million features
    assert ops.scoring_method("cuda", 1024, 16, 256, 2 ** 15 - 2 ** 10) == "gemm"


@pytest.mark.parametrize("settings, words", [
    (dict(floor=float("nan")), "floor=nan above 0"), (dict(floor=float("inf")), "floor=inf above 0"),
    (dict(decay=float("nan")), "decay=nan must lie in"), (dict(active=(8.5, 16)), "must be whole numbers"),
    (dict(bits=(6, 10.0)), "must be whole numbers"), (dict(method="foo"), "method='foo' must be one of 'auto', 'gemm'"),
])
def test_a_bottleneck_that_cannot_be_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        DeepParityBottleneck(64, **{"bits": (6, 10), "active": (8, 16), "children": (64,)} | settings)
