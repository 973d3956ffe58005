"""What the bottleneck will cost on real GPUs, predicted by compiling for them and by arithmetic: nothing is measured.

    python bench.py predict [--gpu H100|H200|B200|all] [--row small_2l ...] [--share 0.6] [--kernels] [--json FILE]

Every kernel of a training step is compiled for the card, disassembled, and its instructions counted, each as often as
the loops around it turn. With p the peak rate of a resource, e the share of the peak that we expect to reach, and w
the work of a token:

    time of a kernel = max over resources of w / (p e)          resources: issue slots, pipes, tensor cores, L2, memory;
                                                                of a kernel with tensor cores also "in turn"
    overhead = 1 + (sum over kernels + element-wise bytes) / (time of the dense model at a given share of peak FLOPs)

A maximum means that a kernel uses all resources at once. A program whose warps all wait for their products does not:
what it issues between a product and the wait for it runs beside the product, all else before or after it. So

    turn    = max(tensor cores, pipes of what is issued beside products) + pipes of all else
    in turn = largest resource + (turn - largest resource) / k           k: programs that share an SM

A program alone on its SM takes its turn. Of several one may issue while another's product flies; how well they fall in
with each other is not known. The formula is what k programs take at most that meet at random (balanced job bounds).

Counted as stated, not known: which branch a token takes (the code has active[0] basis features, never the slow path of
the selection), turns of loops that depend on the data (for normally distributed scores), and tables: one that fits into
half of L2 stays there, of a larger one as much as fits, as if all of it were read equally often.
Left out: launches, latency that other warps do not hide (of reads that only one program of an SM could wait for, too),
bank conflicts, cache misses, the last wave of programs, the optimiser.
"""
import argparse
import math
import os
import re
from collections import Counter
from typing import NamedTuple

import torch

import aot
import kernels
from config import load
from helpers import check_writable, provenance, run_script, within, write_json
from kloosterman import packing

# Public figures: SMs; sustained clock; dense bfloat16 FLOP/s; bytes/s of memory and of L2 (5,120 a clock on Hopper; of
# Blackwell's no figure is published: taken per SM as Hopper's); bytes of L2; warp instructions a clock and SM on the
# integer and logic pipe.
GPUS = {
    "H100": dict(capability=90, sms=132, clock=1.755e9, tensor=989e12,
                 memory=3.35e12, l2=5120 * 1.755e9, cache=50e6, alu=2),
    "H200": dict(capability=90, sms=132, clock=1.755e9, tensor=989e12,
                 memory=4.8e12, l2=5120 * 1.755e9, cache=50e6, alu=2),
    "B200": dict(capability=100, sms=148, clock=1.85e9, tensor=2250e12,
                 memory=8e12, l2=5740 * 1.85e9, cache=126e6, alu=4),
}
# Warp instructions a clock and SM: 4 schedulers; float32 and integer multiply-adds share a pipe, the latter at half
# rate; a load or store moves 128 bytes a clock; conversions and population counts.
PIPES = {"issue": 4, "fma": 4, "imad": 2, "load/store": 1, "convert": 0.5}
SHARE = {"tensor": 0.7, "L2": 0.7, "memory": 0.85}  # of a peak that a kernel reaches; of issue slots and pipes:
PIPE_SHARE = 0.6
# Of the dense model, in FLOPs: a faster dense model makes the same bottleneck dearer.
UTILISATION = (0.35, 0.45, 0.55)
PAPER = {"small_2l": 1.47, "small_3l": 2.06, "large_2l": 1.22, "large_3l": 1.55}  # measured there on 4 H200
PASS = 16384                             # tokens of one forward pass: what is made once a pass is shared by these
TOKENS = 64                              # of the launches that are compiled: a multiple of what one program takes
# Turns of the selection's searching loops: halvings; the most that a lane, or a thread in the groups, has to list.
# test_predict.py has where from.
BISECTIONS, REPEATS, HITS = 5.5, 1.7, 2.9
ANALYSED = {}                            # H100 and H200 run the same machine code


# Counting instructions


class Loop(NamedTuple):
    """How often a loop turns: `turns` of its source, each with `each` instructions called `marker`.

    The compiler may unroll: the markers found inside say how many turns of the source one turn of the machine code is,
    and a second loop with fewer of them does the rest.
    With each=0, markers outside are turns that were moved out of the loop.
    """
    marker: str
    each: float
    turns: float


def executions(code, loops):
    """How often each instruction is executed, and the turns of each loop found.

    Counted is what comes before the first EXIT: behind it compilers put what is seldom needed (waiting, the slow path).
    A loop is a branch backwards; one that only waits (NANOSLEEP) turns once.
    """
    stop = next(n for n, i in enumerate(code) if i.name.startswith("EXIT") and not i.conditional or i.target == n)
    times = [float(n <= stop) for n in range(len(code))]
    found, unrolled = [], {}
    for end in (n for n in range(stop) if code[n].target is not None and code[n].target < n):
        body = range(code[end].target, end + 1)
        if any(code[n].name == "NANOSLEEP" for n in body):
            continue
        loop, inside = next(((loop, inside) for loop in loops
                             if (inside := sum(bool(re.match(loop.marker, code[n].name)) for n in body))), (None, 0))
        if loop is None:
            raise ValueError(f"a loop of {len(body)} instructions has none of {[loop.marker for loop in loops]}: "
                             "say in predict.py how often it turns")
        if loop.each:
            step = max(1, round(inside / loop.each))
            turns = (loop.turns % unrolled[loop] if unrolled.get(loop, 1) > step else
                     loop.turns // step if step > 1 else loop.turns)
            unrolled[loop] = max(step, unrolled.get(loop, 1))
        else:
            turns = loop.turns - (sum(bool(re.match(loop.marker, i.name)) for i in code[:stop]) - inside) / inside
        found.append((loop.marker, turns))
        for n in body:
            times[n] *= turns
    return times, found


def pipe(name):
    """(pipe, how much of it an instruction takes)."""
    base = name.split(".")[0]
    if base in ("FADD", "FMUL", "FFMA", "FADD2", "FMUL2", "FFMA2"):
        return "fma", 2 if base[-1] == "2" else 1  # two to a lane: one slot, twice the work
    if base.startswith("IMAD"):
        return "imad", 1
    if base in ("LDG", "STG", "LDS", "STS", "LDSM", "STSM", "LDGSTS", "LDTM", "STTM",
                "RED", "REDG", "ATOM", "ATOMG", "SHFL"):
        return "load/store", 4 if ".128" in name or name.endswith("88.4") else 2 if ".64" in name else 1
    if base in ("POPC", "FLO", "MUFU", "I2F", "I2FP", "F2I", "F2F"):
        return "convert", 1
    if base.endswith("MMA"):
        return "mma", 1
    if base.startswith("U") or base in ("BRA", "EXIT", "NOP", "BAR", "WARPSYNC", "WARPGROUP", "DEPBAR", "LDGDEPBAR",
                                        "MEMBAR", "FENCE", "SYNCS", "BSSY", "BSYNC", "S2R", "S2UR", "R2UR", "CS2R",
                                        "LDC", "LDCU", "REDUX", "CREDUX"):
        return "other", 1  # these take an issue slot only, as far as this model knows
    return "alu", 1


def count(code, times):
    """Warp instructions by pipe, and all of them as "issue"."""
    total = Counter()
    for instruction, n in zip(code, times):
        name, weight = pipe(instruction.name)
        total[name] += weight * n
        total["issue"] += n
    total["fma"] += total["imad"]  # they share the pipe
    return total


def occupancy(registers, shared, warps, columns=0):
    """Warps that an SM of Hopper or Blackwell holds: 65,536 registers, 228 KiB shared memory, 64 warps, 32 programs;
    of Blackwell's memory for products 512 columns."""
    per_warp = math.ceil(registers / 8) * 8 * 32
    return warps * min(65536 // (per_warp * warps), 228 * 1024 // (shared + 1024), 64 // warps, 32,
                       512 // columns if columns else 32)


# What a training step runs


class Kernel(NamedTuple):
    name: str
    launch: tuple
    loops: list
    tokens: float      # that the launch serves
    memory: float      # bytes of a token that no cache can spare
    l2: float          # bytes of a token that pass through L2
    flops: float = 0   # of a token, on tensor cores


def step_kernels(config, gpu):
    """Every kernel of one layer's forward and backward pass, with what a token needs.

    bfloat16 activations, float32 sums.
    """
    d, active, m = config.d, config.active, 2 ** config.bits[-1]
    K, W = sum(active), packing(d)[1]
    x, y = torch.empty(TOKENS, d, dtype=torch.bfloat16), torch.empty(TOKENS, d)
    indices, coefs = torch.empty(TOKENS, K, dtype=torch.int64), torch.empty(TOKENS, K)
    hashed, sizes = K - active[0], torch.empty(TOKENS, 2)
    signs = 8 * W * hashed  # two rows of packed signs of every sign vector
    warps = kernels.decode_launch(indices, coefs, y, m, 1.0)[2]["num_warps"]
    lists, fours = math.ceil(K / 32), math.ceil(hashed / 4)  # of 32 features, and of four of them that are no basis
    adding = dict(loops=[Loop("C?REDUX", 1, lists), Loop("SHFL", d / 32 / warps + 8, fours / lists)], tokens=TOKENS)
    # Index and coefficient of a feature; y, and once more as bfloat16.
    moved = 12 * K + 4 * d + 2 * d
    # y is read back; an addition in memory takes 32 bytes of L2.
    again = signs + 4 * d + 32 * active[0]
    yield Kernel("decode", kernels.decode_launch(indices, coefs, y, m, 1.0, x, x, sizes), memory=moved + 2 * d + 8,
                 l2=moved + 2 * d + 8 + again, **adding)          # reads x, for its norm
    yield Kernel("decode back", kernels.decode_launch(indices, coefs, y, m, 1.0, x, plus=x), memory=moved + 2 * d,
                 l2=moved + 2 * d + again, **adding)              # reads the gradient of the norm, and adds to it
    moved = 16 * K + 4 * d + 3 * 2 * d + 8                        # 1/std; y; the gradient, x and its gradient
    launch = kernels.dot_launch(indices, x, coefs, m, y, x, sizes, x, scales=coefs)
    looked_up = 8 * launch[2]["WORDS"] / launch[2]["num_warps"]   # eight groups of four signs in a word
    yield Kernel("dot back", launch, [Loop("SHFL", looked_up, math.ceil(hashed / 32))], TOKENS, moved, moved + signs)
    for level, k in enumerate(active):
        found = [tensor[:, :k] for tensor in (indices, coefs)]
        if level:
            P, D, low = active[level - 1], config.children[level - 1], 2 ** config.bits[level - 1]
            C = P * D
            parents, generators, z = (torch.empty(TOKENS, P, dtype=torch.int64), torch.empty(D, dtype=torch.int64),
                                      torch.empty(TOKENS, C))
            gamma, moments = aot.gamma_like(d, D, torch.bfloat16, gpu["capability"]), torch.empty(low, 2, D)
            pairs = torch.empty(2 ** config.bits[level] - low, dtype=torch.int64)
            # Entries of the table of moments, made once a pass: 16 parents together read whole sectors of L2.
            made = low * D / PASS
            yield Kernel(f"moments {level}",
                         kernels.moments_launch(torch.empty(low, dtype=torch.int64), generators, pairs, moments, low),
                         [], PASS, 8 * made, 16 * made)
            tops = torch.empty(TOKENS, P * math.ceil(D / kernels.GROUP))
            launch = kernels.score_launch(x, parents, gamma, None, moments, z.view(-1, D), low, 2 ** config.bits[level],
                                          gpu["capability"], tops=tops.view(TOKENS * P, -1))
            tile = launch[2]
            moved = 2 * d + 8 * P + 4 * C + 4 * tops.shape[1]
            yield Kernel(f"score {level}", launch, [Loop("HGMMA|UTCHMMA", 0, tile["BITS"])], TOKENS,
                         # The table of moments, as far as half of the cache cannot hold it.
                         moved + 8 * C * max(0, 1 - gpu["cache"] / 2 / moments.nbytes),
                         # The parents of a token find its x in L1; other columns ask for x and signs of parents again.
                         moved + 8 * C + gamma.nbytes * P / tile["BM"]
                         + launch[1][1] * (2 * d + 8 * P + 8 * W * P) - 2 * d - 8 * P, flops=2 * C * d)
            launch = kernels.select_launch(z, parents, generators, *found, rstd=torch.empty(m), tops=tops,
                                           scales=found[1])
            tile = launch[2]
            groups = tile["keep"] + tile["keep"] // 8  # the most that reach the threshold, but for ties
            moved = 4 * tops.shape[1] + 4 * groups * tile["G"] + 8 * P + 16 * k
            again = 4 * tops.shape[1] + 8 * groups  # two scans of the maxima; the list of groups
            items = tops.shape[1]
            loops = [Loop("LDG.E.128", 4, math.ceil(groups * tile["G"] / 16 / tile["THREADS"])), Loop("LDG", 1, HITS)]
        else:
            moved = 2 * d + 16 * k
            again = 8 * d  # mean and 1/std; the second scan finds them and x in L1
            launch = kernels.select_launch(x, None, None, *found, torch.empty(d), torch.empty(d), scales=found[1])
            tile, items, loops = launch[2], d, []
        lanes = tile["BLOCK"] / 32 / tile["num_warps"]
        loops += [Loop("I2F", lanes, min(REPEATS, items / tile["BLOCK"])),
                  Loop("LDG", 3 * lanes, items / tile["BLOCK"]), Loop("C?REDUX", 1, BISECTIONS)]
        yield Kernel(f"select {level}", launch, loops, TOKENS, moved,
                     moved + again + 16 * tile["S"] + 32 * k)  # the list; 1/std


def other_bytes(config):
    """Bytes of a token in plain torch around the kernels.

    A coordinate, 2: read x for the sums of level 0.
    A candidate of the 64 to 127 sampled tokens of a step, 450: sorted and added up.
    Once a pass: mean and 1/std of every feature side by side (24).
    """
    candidates = sum(P * D for P, D in zip(config.active, config.children))
    return 2 * config.d + 450 * candidates * 127 / config.batch_tokens + 24 * 2 ** config.bits[-1] / PASS


def dense_flops(config):
    """Forward and backward of a token in one layer:
    36 d^2 multiply-adds, causal attention, and the layer's share of the head."""
    return 72 * config.d ** 2 + 6 * config.d * config.context + 6 * config.d * config.vocab_size / config.layers


# Time


def analyse(kernel, capability):
    """What a kernel takes of an SM, and the warp instructions of a token."""
    target, (_, grid, arguments) = f"sm_{capability}", kernel.launch
    registers, _, _, shared, _ = aot.needs(kernel.launch, target)
    binary, warps = aot.compiled(kernel.launch, target), arguments["num_warps"]
    code = aot.parse(aot.cuobjdump(binary.asm["cubin"], "-sass"))
    times, loops = executions(code, kernel.loops)
    each = math.prod(grid) * warps / kernel.tokens  # warps a token
    resident = occupancy(registers, shared, warps, getattr(binary.metadata, "tmem_size", 0))
    flying = {n for n, products in aot.flights(code) if products}

    def of_token(wanted):
        counted = count(code, [turns * (n in wanted) for n, turns in enumerate(times)])
        return {name: each * n for name, n in counted.items()}
    everything = set(range(len(code)))
    return dict(registers=registers, shared=shared, warps_per_sm=resident, programs=resident // warps, loops=loops,
                instructions=of_token(everything), beside=of_token(flying), alone=of_token(everything - flying))


def pipe_times(instructions, gpu, share):
    """Microseconds of 1,024 tokens on issue slots and pipes."""
    rates = PIPES | {"alu": gpu["alu"]}
    return {name: 1024e6 * instructions.get(name, 0) / (rate * gpu["sms"] * gpu["clock"] * share)
            for name, rate in rates.items()}


def predict_kernel(kernel, gpu, pipe_share=PIPE_SHARE):
    """Microseconds of one layer and 1,024 tokens on each resource; the largest is the prediction."""
    key = kernel.name, gpu["capability"], tuple(kernel.launch[2][name] for name in kernel.launch[0].arg_names
                                                if not isinstance(kernel.launch[2][name], torch.Tensor))
    found = ANALYSED[key] if key in ANALYSED else ANALYSED.setdefault(key, analyse(kernel, gpu["capability"]))
    work = {"tensor": kernel.flops / gpu["tensor"], "L2": kernel.l2 / gpu["l2"],
            "memory": kernel.memory / gpu["memory"]}
    resources = pipe_times(found["instructions"], gpu, pipe_share)
    resources |= {name: 1024e6 * seconds / SHARE[name] for name, seconds in work.items()}
    if kernel.flops:
        beside, alone = (max(pipe_times(found[part], gpu, pipe_share).values()) for part in ("beside", "alone"))
        turn, largest = max(resources["tensor"], beside) + alone, max(resources.values())
        resources["in turn"] = largest + (turn - largest) / found["programs"]
    bound = max(resources, key=resources.get)
    return dict(kernel=kernel.name, microseconds=resources[bound], bound=bound, resources=resources) | found


def predict(row, name, pipe_share=PIPE_SHARE):
    """One row on one GPU: microseconds of one layer and 1,024 tokens, forward and backward."""
    config, gpu = load([os.path.join(os.path.dirname(__file__), "configs", row + ".py")]), GPUS[name]
    parts = [predict_kernel(kernel, gpu, pipe_share) for kernel in step_kernels(config, gpu)]
    other = 1024e6 * other_bytes(config) / (gpu["memory"] * SHARE["memory"])
    total = other + sum(part["microseconds"] for part in parts)
    dense = {u: 1024e6 * dense_flops(config) / (gpu["tensor"] * u) for u in UTILISATION}
    return dict(row=row, gpu=name, kernels=parts, elementwise=other, bottleneck=total, dense=dense,
                overhead={u: 1 + total / dense[u] for u in UTILISATION}, paper=PAPER[row])


def show(results, details):
    print("PREDICTED by compilation and arithmetic, not measured. "
          "Microseconds of one layer and 1,024 tokens, forward and backward;\n"
          "overhead against a dense model at a share of its peak FLOPs; the paper's was measured, on 4 H200.\n")
    groups = ("decode", "dot", "score", "select", "moments")
    print(f"{'GPU':5} {'row':9}" + "".join(f"{g:>8}" for g in groups) + f"{'other':>7}{'sum':>8}{'dense':>8}   "
          + "".join(f"{f'at {u:.0%}':>8}" for u in UTILISATION) + f"{'paper':>8}")
    for result in results:
        sums = [sum(k["microseconds"] for k in result["kernels"] if k["kernel"].split()[0] == g) for g in groups]
        print(f"{result['gpu']:5} {result['row']:9}" + "".join(f"{s:8.1f}" for s in sums)
              + f"{result['elementwise']:7.1f}{result['bottleneck']:8.1f}{result['dense'][UTILISATION[1]]:8.1f}   "
              + "".join(f"{o:7.2f}x" for o in result["overhead"].values()) + f"{result['paper']:7.2f}x")
        if details:
            show_kernels(result["kernels"])


def show_kernels(parts):
    print(f"\n      {'kernel':13}{'us':>7}    {'bound by':12}{'next':18}"
          f"{'registers':>9}{'shared':>8}{'warps/SM':>9}   instructions")
    for part in parts:
        first, second = sorted(part["resources"], key=part["resources"].get)[:-3:-1]
        mix = ", ".join(f"{name} {n:.0f}" for name, n in part["instructions"].items() if name != "issue" and n >= 1)
        print(f"      {part['kernel']:13}{part['microseconds']:7.1f}    "
              f"{first:12}{second:11}{part['resources'][second]:5.1f}  "
              f"{part['registers']:9}{part['shared']:8}{part['warps_per_sm']:9}   "
              f"{part['instructions']['issue']:.0f}: {mix}")
    print()


def main(arguments):
    parser = argparse.ArgumentParser(prog="bench.py predict", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=[*GPUS, "all"], default="all")
    parser.add_argument("--row", choices=PAPER, nargs="+", default=list(PAPER))
    parser.add_argument("--share", type=within(float, 0, 1, open_low=True), default=PIPE_SHARE,
                        help="of issue slots and pipes that a kernel reaches (%(default)s)")
    parser.add_argument("--kernels", action="store_true",
                        help="every kernel: what binds it, registers, occupancy, instructions")
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file")
    options = parser.parse_args(arguments)
    aot.check_compiler()
    if options.json:
        check_writable(options.json)
    results = [predict(row, gpu, options.share)
               for gpu in (GPUS if options.gpu == "all" else [options.gpu]) for row in options.row]
    show(results, options.kernels)
    if options.json:
        write_json(options.json, provenance() | {"predicted": True, "rows": results}, indent=1)


if __name__ == "__main__":
    run_script(main)
