"""The prediction counts what it says it counts.

Machine code is made in another process: here the kernels are interpreted.
"""
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import aot
import kernels
import ops
import predict
from config import load

pytestmark = pytest.mark.skipif(
    ops.triton is None, reason="triton, which compiles for GPUs, is not installed (Linux only)")

SCRIPT = """
import json, sys
sys.path.insert(0, {folder!r})
import torch, triton, triton.language as tl
import ops, predict
from config import load

@triton.jit
def toy(x, y, N):
    at = tl.arange(0, 1024)
    total = tl.zeros([1024], tl.float32)
    for n in range(N):
        total += tl.load(x + n * 1024 + at)
    tl.store(y + at, total)

def analyse_toy(N):
    launch = toy, (1,), dict(x=torch.empty(4), y=torch.empty(4), N=N, num_warps=1)
    return predict.analyse(predict.Kernel("toy", launch, [predict.Loop("LDG", 8, N)], 1, 0, 0), 90)

config = load([{config!r}])
config.active = (16, 64)
more = [predict.predict_kernel(kernel, predict.GPUS["H100"])
        for kernel, _ in zip(predict.step_kernels(config, predict.GPUS["H100"]), range(3))]
print(json.dumps(dict(toy=[analyse_toy(N) for N in (1, 11, 100)], row=predict.predict("small_2l", "H100"), more=more)))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = os.path.dirname(os.path.abspath(predict.__file__))
    script = tmp_path_factory.mktemp("predict") / "script.py"
    script.write_text(SCRIPT.format(folder=folder, config=os.path.join(folder, "configs", "small_2l.py")))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_instructions_of_a_kernel_known_by_hand(compiled):
    """N times 1024 additions of 32 lanes each, and 4 kB read by 8 loads of 4 clocks, however unrolled; 4 kB written."""
    for N, toy in zip((1, 11, 100), compiled["toy"]):
        assert toy["instructions"]["fma"] - toy["instructions"].get("imad", 0) == 32 * N
        assert toy["instructions"]["load/store"] == 32 * N + 32


def test_loops_and_branches_of_a_listing():
    code = aot.parse("""
        /*0000*/                   MOV R1, R2 ;
        /*0010*/                   LDG.E R3, desc[UR4][R2.64] ;
        /*0020*/              @!P1 BRA 0x50 ;
        /*0030*/                   FADD R4, R4, R3 ;
        /*0040*/                   IMAD R5, R5, R5, R5 ;
        /*0050*/               @P0 BRA 0x10 ;
        /*0060*/              @!PT LDS RZ, [RZ] ;
        /*0070*/               @P2 BRA 0x90 ;
        /*0080*/                   EXIT ;
        /*0090*/                   FADD R4, R4, R4 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   BRA 0xb0 ;""")
    times, loops = predict.executions(code, [predict.Loop("LDG", 1, 7)])
    assert loops == [("LDG", 7)] and times == [1, 7, 7, 7, 7, 7, 1, 1, 1, 0, 0, 0]
    assert predict.count(code, times) == {"alu": 1, "load/store": 7, "other": 17, "fma": 14, "imad": 7, "issue": 39}
    with pytest.raises(ValueError, match="a loop of 5 instructions has none of"):
        predict.executions(code, [predict.Loop("HGMMA", 1, 7)])


def test_every_loop_is_found_and_turns_as_the_source_says(compiled):
    loops = {k["kernel"]: k["loops"] for k in compiled["row"]["kernels"]}
    # 48 features, 32 at a time, of which 32 are sign vectors, by fours.
    assert sorted(loops["decode"]) == sorted(loops["decode back"]) == [["C?REDUX", 2], ["SHFL", 4]]
    assert loops["dot back"] == [["SHFL", 1]]                  # 32 sign vectors, a lane each
    assert loops["score 1"] == [["HGMMA|UTCHMMA", 32]] and loops["moments 1"] == []
    kinds = dict(loops["select 0"])
    assert kinds.pop("LDG", 8) == 8  # or unrolled altogether
    assert kinds == {"C?REDUX": predict.BISECTIONS, "I2F": predict.REPEATS}
    # 256 maxima, one to a lane; 45 groups, 32 at a time.
    assert dict(loops["select 1"]) == {"C?REDUX": predict.BISECTIONS, "I2F": 1, "LDG.E.128": 2, "LDG": predict.HITS}


def test_tensor_cores_do_what_the_product_needs(compiled):
    score = next(k for k in compiled["row"]["kernels"] if k["kernel"] == "score 1")
    assert score["instructions"]["mma"] * 64 * 128 * 16 == 4 * 16 * 256 * 1024  # four warps share one of 64x128x16


def test_what_a_program_issues_before_a_product_is_not_beside_it(compiled):
    score = next(k for k in compiled["row"]["kernels"] if k["kernel"] == "score 1")
    for name, n in score["instructions"].items():
        assert score["beside"].get(name, 0) + score["alone"].get(name, 0) == pytest.approx(n)
    stored = 4096 * 1024 * 2 // 128 * (1 / 128 + 1 / 128)  # both sides, before a product, for 128 x 128 children
    assert score["alone"]["load/store"] > stored
    assert 0 < score["beside"]["issue"] < score["instructions"]["issue"] / 2
    times = score["resources"]
    assert score["programs"] == 2  # so half of what loads and stores do not hide is left
    assert times["in turn"] == pytest.approx(times["load/store"] + times["tensor"] / 2, rel=0.01)
    assert score["bound"] == "in turn"
    assert "in turn" not in next(k for k in compiled["row"]["kernels"] if k["kernel"] == "decode")["resources"]


@pytest.mark.parametrize("programs, expected", [(1, 4 + 3), (2, 4 + 3 / 2), (3, 4 + 3 / 3)])
def test_what_is_in_turn_by_hand(monkeypatch, programs, expected):
    """Tensor cores 4 us, 1 us of issue slots beside products, and alone 2 us of those, 3 us of loads and stores."""
    gpu, share = predict.GPUS["H100"], 0.5
    slot = gpu["sms"] * gpu["clock"] * share / 1024e6  # warp instructions of a token that take 1 us at one a clock
    monkeypatch.setattr(predict, "ANALYSED", {})
    monkeypatch.setattr(predict, "analyse", lambda kernel, capability: dict(
        programs=programs, instructions={"issue": 12 * slot, "load/store": 3 * slot},
        beside={"issue": 4 * slot}, alone={"issue": 8 * slot, "load/store": 3 * slot}))
    launch = kernels.moments_kernel, (1,), dict.fromkeys(kernels.moments_kernel.arg_names)
    flops = 4 * gpu["tensor"] * predict.SHARE["tensor"] / 1024e6
    found = predict.predict_kernel(predict.Kernel("toy", launch, [], 1, 0, 0, flops), gpu, share)
    assert found["bound"] == "in turn" and found["microseconds"] == pytest.approx(expected)


def test_more_features_cost_more(compiled):
    for few, many in zip(compiled["row"]["kernels"], compiled["more"]):
        assert (few["kernel"] == many["kernel"]
                and 1.5 * few["microseconds"] < many["microseconds"] < 2.5 * few["microseconds"])


def test_the_sum_is_of_its_parts_and_dense_time_falls_with_utilisation(compiled):
    row = compiled["row"]
    total = row["elementwise"] + sum(max(k["resources"].values()) for k in row["kernels"])
    assert row["bottleneck"] == pytest.approx(total)
    overhead = list(row["overhead"].values())
    assert (overhead == sorted(overhead)
            and overhead[1] == pytest.approx(1 + total / (1024e6 * 107_544_576 / (0.45 * 989e12)), rel=1e-6))


def test_bytes_of_small_2l_by_hand():
    config = load(["configs/small_2l.py"])
    kernel = {k.name: k for k in predict.step_kernels(config, predict.GPUS["H100"])}
    assert kernel["decode back"].memory == 48 * (8 + 4) + 1024 * (4 + 2 + 2)  # y in float32; what it adds to; the sum
    assert kernel["decode"].memory == kernel["decode back"].memory + 2 * 4     # y in both types, x; |y|, |x|
    assert kernel["decode"].l2 - kernel["decode"].memory == 32 * 2 * 1024 / 8 + 1024 * 4 + 16 * 32
    # Gradient, y, x and its gradient; 1/std.
    assert kernel["dot back"].memory == 48 * (8 + 4) + 1024 * (2 + 4 + 2 + 2) + 2 * 4 + 48 * 4
    once = 2 ** 15 * 24  # moments
    assert predict.other_bytes(config) == pytest.approx(1024 * 2 + 4096 * 450 * 127 / 2 ** 19 + once / 16384)
    assert kernel["score 1"].memory == 1024 * 2 + 16 * 8 + 4096 * 4 + 256 * 4  # x, parents, z, the maxima
    # Gamma's bits once for 8 tokens; for both halves of the children x, which its parents find in L1, the parents, and
    # two rows of signs of each.
    assert kernel["score 1"].l2 == (kernel["score 1"].memory + 4096 * 8 + 1024 * 256 // 8 // 8
                                    + (1024 * 2 + 16 * 8) + 2 * 16 * 2 * 1024 // 8)
    assert kernel["score 1"].flops == 2 * 4096 * 1024
    large = {k.name: k for k in predict.step_kernels(load(["configs/small_3l.py"]), predict.GPUS["H100"])}
    missed = 1 - 25e6 / (2 ** 15 * 256 * 8)  # of a table of 67 MB, half of 50 MB stay in L2
    assert large["score 2"].memory == pytest.approx(1024 * 2 + 32 * 8 + 8192 * 4 + 512 * 4 + 8192 * 8 * missed)
    assert kernel["select 1"].memory == 256 * 4 + 45 * 64 + 16 * 8 + 32 * 16  # z of 40 + 5 groups
    assert kernel["select 1"].l2 == kernel["select 1"].memory + 256 * 4 + 45 * 8 + 64 * 16 + 32 * 32
    assert kernel["select 0"].memory == 1024 * 2 + 16 * 16
    assert predict.dense_flops(config) == pytest.approx(72 * 2 ** 20 + 6 * 2 ** 20 + 6 * 1024 * 50304 / 12)


@pytest.mark.parametrize("registers, shared, warps, columns, expected", [
    (64, 512, 1, 0, 32), (96, 0, 2, 0, 20), (244, 73728, 8, 0, 8), (32, 0, 4, 0, 64), (32, 0, 4, 256, 8),
])
def test_occupancy(registers, shared, warps, columns, expected):
    assert predict.occupancy(registers, shared, warps, columns) == expected


def search_threshold(top, keep):
    """The search of select_kernel in numpy: the threshold, and how often it halves."""
    threshold, below, reached, stride, turns = 0, top.max() + 1, len(top), 1 << 23, 0
    while below - threshold > 1 and reached > keep + keep // 8:
        middle, turns = max(threshold + (below - threshold) // 2, below - stride), turns + 1
        if (count := (top >= middle).sum()) >= keep:
            threshold, reached = middle, count
        else:
            below, stride = middle, 2 * min(stride, 1 << 29)
    return threshold, turns


def normal_sizes(C, seed=0, tokens=200):
    rng = np.random.default_rng(seed)
    for _ in range(tokens):
        yield np.abs(rng.standard_normal(C)).astype(np.float32).view(np.int32).astype(np.int64)


def test_turns_of_the_selection_of_level_0_for_normal_scores():
    """How often the search halves, and the most one lane has above the threshold; half of the list is enough."""
    halvings, most = [], []
    for size in normal_sizes(1024):
        size = size.reshape(-1, 128)
        threshold, turns = search_threshold(size.max(0), 16)
        halvings.append(turns)
        most.append((size >= threshold).sum(0).max())
        assert 16 <= (size >= threshold).sum() <= 32
    assert np.mean(halvings) <= predict.BISECTIONS + 0.3 and np.mean(most) <= predict.REPEATS + 0.3


@pytest.mark.parametrize("C, k, half", [(4096, 32, 64), (8192, 64, 128)])
def test_turns_of_the_selection_among_groups_for_normal_scores(C, k, half):
    """How often the search halves; of 32 groups, the most that one of 32 threads, with 4 times 4 of them, has to list.
    Groups and candidates that are listed fit into half of the list, nearly always."""
    keep, halvings, most, listed = kernels.spare(k), [], [], []
    for size in normal_sizes(C):
        size = size.reshape(-1, 16)
        threshold, turns = search_threshold(size.max(1), keep)
        hits = (size >= threshold)[size.max(1) >= threshold]
        assert keep <= len(hits) <= keep + keep // 8 <= half
        listed.append(hits.sum())
        halvings.append(turns)
        for first in range(0, len(hits), 32):
            some = np.zeros((32, 16), int)
            some[: len(hits) - first] = hits[first : first + 32]
            most.append(some.reshape(4, 8, 4, 4).sum((0, 3)).max())
    assert np.mean(halvings) <= predict.BISECTIONS + 0.3 and np.mean(most) <= predict.HITS + 0.3
    assert np.mean(np.array(listed) > half) <= 0.01


def test_command_line_answers(capsys):
    with pytest.raises(SystemExit):
        predict.main(["--gpu", "H300"])
    assert "invalid choice: 'H300'" in capsys.readouterr().err
