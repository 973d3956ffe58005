"""`python bench.py verify` covers every kernel, passes where they are right, and finds what is wrong.

The kernels run in Triton's interpreter here (conftest.py sets TRITON_INTERPRET).
"""
import json

import pytest
import torch

import bench
import data
import kernels
import kernels_cpu
import model
import ops
import verify

needs_triton = pytest.mark.skipif(ops.triton is None, reason="triton is not installed (Linux only)")


def check(path, shape, dtype, *only):
    return verify.check_shape(path, shape, dtype, "cpu", True, only or list(verify.OPERATIONS))


@needs_triton
def test_every_kernel_is_verified_and_passes(monkeypatch):
    launched, run = set(), kernels.run
    monkeypatch.setattr(kernels, "run", lambda launch: (launched.add(launch[0].__name__), run(launch)))
    lines = check("triton", "quick_2l", "float32")
    lines += check("triton", "quick_3l", "bfloat16", "decode_like", "dot", "score", "search_basis", "bottleneck")
    assert all(line.passed for line in lines), [line for line in lines if not line.passed]
    assert launched == {name for name in vars(kernels) if name.endswith("_kernel")}
    assert {line.operation for line in lines if line.dtype == "float32"} == {
        "decode", "gradient of decode", "decode to the norm of x", "its gradient to coefs", "its gradient to x",
        "dot", "gradient of dot", "score few (pairs)", "score many (table)", "score flat", "gradient of score",
        "select level", "select flat", "search_basis (select level 0)", "search_children", "search_children flat",
        "collect", "bottleneck: indices", "bottleneck: coefs", "bottleneck: forward", "bottleneck: backward"}


def spoil(change):
    """A path whose result, or the first of its results, is changed."""
    def around(function):
        def spoilt(*arguments):
            result = function(*arguments)
            change(result if torch.is_tensor(result) else result[0], *arguments)
            return result
        return spoilt
    return around


def flip_feature(y, indices, coefs, d, m, *_):
    y -= 2 * coefs[:, -1:] * kernels.decode_reference(indices[:, -1:], torch.ones_like(coefs[:, -1:]), d).to(y.dtype)


def last_token(result, *_):
    result[-1] = result[-1] * (1 + 1e-4)


def unwritten(result, *_):
    result.view(-1)[-1] = float("nan")


def off_by_one_in_ties(indices, z, *_):
    """The upper of two neighbours with equal |z| comes first."""
    ties = z.abs().sort(dim=1, descending=True).values[:, : indices.shape[1]].diff(dim=1) == 0
    for n, k in ties.nonzero()[:1].tolist():
        indices[n, [k, k + 1]] = indices[n, [k + 1, k]]


def forget_a_parent(function):
    return lambda z, parents, generators, sums: function(z[:-1], parents[:-1], generators, sums)


@needs_triton
@pytest.mark.parametrize("only, name, fault", [
    ("decode", "decode_triton", spoil(flip_feature)), ("decode", "decode_triton", spoil(last_token)),
    ("decode", "decode_triton", spoil(unwritten)), ("decode_like", "decode_like_triton", spoil(last_token)),
    ("dot", "dot_triton", spoil(last_token)), ("dot", "dot_triton", spoil(unwritten)),
    ("score", "score_triton", spoil(last_token)), ("score", "score_triton", spoil(unwritten)),
    ("select", "select_triton", spoil(off_by_one_in_ties)), ("search_basis", "basis_triton", spoil(off_by_one_in_ties)),
    ("collect", "collect_reference", forget_a_parent)])
def test_a_fault_is_found(monkeypatch, only, name, fault):
    monkeypatch.setattr(verify, "TOKENS", {True: (3,)})
    monkeypatch.setattr(kernels, name, fault(getattr(kernels, name)))
    assert any(not line.passed and not line.problem for line in check("triton", "quick_3l", "float32", only))


@needs_triton
def test_a_kernel_that_does_not_run_is_a_line_that_fails(monkeypatch):
    monkeypatch.setattr(kernels, "dot_triton", lambda *_: 1 / 0)
    line, = check("triton", "quick_3l", "float32", "dot")
    assert not line.passed and "ZeroDivisionError" in line.problem


def test_the_table_and_its_file(monkeypatch, tmp_path, capsys):
    """On the C path alone, as without TRITON_INTERPRET."""
    if not ops.has_library():
        pytest.skip("there is no C compiler")
    monkeypatch.setattr(verify, "find_paths", lambda device: ["c"])
    path, only = tmp_path / "verify.json", ",".join(verify.OPERATIONS)
    for spoilt in False, True:
        if spoilt:
            monkeypatch.setattr(kernels_cpu, "dot_c", lambda indices, x, m: torch.zeros(indices.shape))
        with pytest.raises(SystemExit) as left:
            bench.main(["verify", "--device", "cpu", "--json", str(path), "--only", only])
        content, out = json.loads(path.read_text()), capsys.readouterr().out
        assert left.value.code == spoilt and "on a CPU --quick is implied" in out
        assert {line["shape"] for line in content["lines"]} == set(verify.QUICK)
        assert {line["dtype"] for line in content["lines"]} == set(verify.DTYPES)
        wrong = {line["operation"] for line in content["lines"] if not line["passed"]}
        assert ("FAIL" in out) == spoilt and ("dot" in wrong) == spoilt and "search_children" not in wrong


def test_steps_that_part_from_the_cpu_fail(monkeypatch):
    losses = [7.6 - 0.04 * step for step in range(100)]
    for step, change, right in ((0, 0, True), (0, 1e-3, False), (1, 3e-2, False), (99, 1e-2, True), (99, 1.0, False),
                                (5, float("nan"), False)):
        runs = iter([[*losses[:step], losses[step] + change, *losses[step + 1:]], losses])
        monkeypatch.setattr(verify, "losses_of", lambda *_, runs=runs: next(runs))
        assert verify.check_training("triton", "cpu", False, None)[0].passed == right


def test_a_wrong_name_is_answered():
    with pytest.raises(ValueError, match="there is no decoed for --only: the names are decode, "):
        verify.main(["--only", "decoed"])


def test_steps_of_training_find_what_is_wrong_in_them(monkeypatch, tmp_path):
    """A path that leaves out every other feature."""
    if not ops.has_library():
        pytest.skip("there is no C compiler")
    data.prepare_toy(str(tmp_path / "toy"), tokens=20_000)
    line, = verify.check_training("c", "cpu", True, str(tmp_path / "toy"))
    assert line.passed and line.cases == 10
    whole = kernels_cpu.narrow_c

    def spoilt(x, *others):
        _, _, indices, coefs, sampled = whole(x, *others)
        m = others[3][-1]
        y, _, norms = kernels_cpu.decode_like_c(indices, coefs * (indices % 2), x, m)
        return y, norms, indices, coefs, sampled
    monkeypatch.setattr(kernels_cpu, "narrow_c", spoilt)
    line, = verify.check_training("c", "cpu", True, str(tmp_path / "toy"))
    assert not line.passed and not line.problem


def test_a_replayed_step_that_parts_from_plain_passes_fails(monkeypatch):
    """In place of a CUDA graph: the same memory, without one."""
    def captured(step, device):
        result = step()
        return lambda: result.copy_(step())
    monkeypatch.setattr(model, "captured", captured)
    for line in verify.check_replay("reference", "cpu"):
        assert line.passed and line.cases == 30
    monkeypatch.setattr(model.Fixed, "seen", lambda self, T, device: torch.ones(1, 40, dtype=torch.bool))
    for line in verify.check_replay("reference", "cpu"):
        assert not line.passed and not line.problem
    assert ("replay", "triton", "cuda") in list(verify.list_jobs(["triton"], "cuda", False, ["replay"], None))
