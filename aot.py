"""Kernels compiled for GPUs that are not here: what each launch needs, and its machine code.

    python kernels.py        every kernel at the paper's shapes, for NVIDIA's compute capability 80, 90, 100 and 120 and
                             for AMD's gfx942: registers, stack, spills, shared memory and hazards. Fails if one
                             spills, does not fit, or has a hazard.

A hazard is an instruction that overwrites what an asynchronous product may still read, or that reads memory before an
addition to it is known to be done. Looked for are, on NVIDIA's Hopper (90), writes to registers; on Blackwell (100),
writes to shared memory; on AMD, reads of memory; on 80 and 120, whose products are not asynchronous, nothing. Triton
3.7.1 makes the first two kinds by mistake: of products whose left side comes from registers (its issue 9433), and of
two products that share a side, of which it waits for the first only.

predict.py counts the instructions of the same machine code.
"""
import argparse
import itertools
import multiprocessing
import os
import re
import subprocess
import tempfile
from typing import NamedTuple

import torch

from helpers import UserError, print_row, run_script
from kernels import (
    COLUMNS,
    GROUP,
    decode_launch,
    dot_launch,
    moments_launch,
    score_launch,
    select_launch,
    takes_pairs,
    triton,
)
from kloosterman import packing

# What to compile for: Triton's backend, the architecture, lanes of a warp, KiB of shared memory that a program may use.
TARGETS = {"sm_80": ("cuda", 80, 32, 163), "sm_90": ("cuda", 90, 32, 227), "sm_100": ("cuda", 100, 32, 227),
           "sm_120": ("cuda", 120, 32, 99), "gfx942": ("hip", "gfx942", 64, 64)}
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32",
         torch.int64: "*i64"}


def gamma_like(d, D, dtype, arch):
    """Room for the sign rows of D generators as the score kernel takes them."""
    bits, W = packing(d)
    return (torch.empty(bits, W // 16, (D + 1) // 2, dtype=torch.int32) if takes_pairs(d, dtype, arch) else
            torch.empty(d, D, dtype=dtype))


def paper_launches(arch=90, dtype=torch.bfloat16, tokens=2):
    """Every kernel at every shape of the paper's models: (shape, launch)."""
    for d, t in (1024, 10), (2048, 11):
        x, y, sizes = torch.empty(tokens, d, dtype=dtype), torch.empty(tokens, d), torch.empty(tokens, 2)
        bits, active, D = (t, 15, 17), (16, 32, 64), 256
        for levels in 2, 3:
            K, m = sum(active[:levels]), 2 ** bits[levels - 1]
            indices, coefs = torch.empty(tokens, K, dtype=torch.int64), torch.empty(tokens, K)
            yield f"d={d} K={K} like x", decode_launch(indices, coefs, y, m, 1.0, x, x, sizes, arch=arch)
            yield f"d={d} K={K}", decode_launch(indices, coefs, y, m, 1.0, x, plus=x, arch=arch)
            yield f"d={d} K={K}", dot_launch(indices, x, coefs, m)
            yield f"d={d} K={K} like x", dot_launch(indices, x, coefs, m, y, x, sizes, x, coefs, coefs)
        for level, k in enumerate(active):
            indices, coefs = torch.empty(tokens, k, dtype=torch.int64), torch.empty(tokens, k)
            if level == 0:
                mean, rstd = torch.empty(2, d)
                yield f"d={d} C={d} k={k}", select_launch(x, None, None, indices, coefs, mean, rstd)
                yield f"d={d} C={d} k={k} scales", select_launch(  # as training runs it
                    x, None, None, indices, coefs, mean, rstd, scales=coefs)
                continue
            P, low = active[level - 1], 2 ** bits[level - 1]
            parents, generators = torch.empty(tokens, P, dtype=torch.int64), torch.empty(D, dtype=torch.int64)
            gamma, pairs = gamma_like(d, D, dtype, arch), torch.empty(2 * low, dtype=torch.int64)
            z, moments = torch.empty(tokens, P * D), torch.empty(low, 2, D)
            yield f"d={d} D={D}", moments_launch(parents.flatten(), generators, pairs, moments, low)
            columns, tops = z.view(-1, D), torch.empty(tokens, P * D // GROUP)
            rows = tops.view(-1, D // GROUP)
            yield f"d={d} P={P} D={D}", score_launch(
                x, parents, gamma, None, moments, columns, low, 2 * low, arch, rows)
            # Few tokens, as in generation: pairs of moments, not a table of them.
            yield f"d={d} P={P} D={D} few", score_launch(
                x, parents, gamma, generators, pairs, columns, low, 2 * low, arch, rows)
            yield f"d={d} C={P * D} k={k}", select_launch(
                z, parents, generators, indices, coefs, rstd=moments, tops=tops, scales=coefs)
        # The operators apart, with all scores in memory: no maxima.
        yield f"d={d} P={P} D={D} alone", score_launch(x, parents, gamma, None, moments, columns, low, 2 * low, arch)
        yield f"d={d} C={P * D} k={k} alone", select_launch(z, parents, generators, indices, coefs)
        for m, k in (2 ** 15, 48), (2 ** 17, 112):  # flat: all features are children of feature 0
            parents, generators = torch.empty(tokens, 1, dtype=torch.int64), torch.empty(m - d, dtype=torch.int64)
            z, pairs, gamma = (torch.empty(tokens, m - d), torch.empty(m - d, dtype=torch.int64),
                               gamma_like(d, COLUMNS, dtype, arch))
            tops = torch.empty(tokens, (m - d) // GROUP)
            yield f"d={d} flat m={m}", score_launch(
                x, parents, gamma, generators[:COLUMNS], pairs, z[:, :COLUMNS], d, m, arch, tops)
            yield f"d={d} flat m={m} k={k}", select_launch(
                z, parents, generators, torch.empty(tokens, k, dtype=torch.int64), torch.empty(tokens, k), tops=tops)


def width_launches(d, arch=90, dtype=torch.bfloat16):
    """Every kernel at another width, a small shape: (name, launch)."""
    t, K, P, D = d.bit_length() - 1, 12, 4, 32
    low, m = d, 2 ** (t + 2)
    x, y, sizes = torch.empty(2, d, dtype=dtype), torch.empty(2, d), torch.empty(2, 2)
    indices, coefs = torch.empty(2, K, dtype=torch.int64), torch.empty(2, K)
    parents, generators = torch.empty(2, P, dtype=torch.int64), torch.empty(D, dtype=torch.int64)
    gamma, moments, z = gamma_like(d, D, dtype, arch), torch.empty(low, 2, D), torch.empty(2 * P, D)
    pairs, chosen = torch.empty(m - low, dtype=torch.int64), (indices[:, :4], coefs[:, :4])
    yield "decode", decode_launch(indices, coefs, y, m, 1.0, x, x, sizes, arch=arch)
    yield "dot", dot_launch(indices, x, coefs, m, y, x, sizes, x)
    tops = torch.empty(2 * P, D // GROUP)
    yield "score", score_launch(x, parents, gamma, None, moments, z, low, m, arch, tops)
    yield "score few", score_launch(x, parents, gamma, generators, pairs, z, low, m, arch, tops)
    yield "select", select_launch(x, None, None, *chosen, torch.empty(d), torch.empty(d))
    yield "select children", select_launch(z.view(2, -1), parents, generators, *chosen, tops=tops)


def check_compiler():
    if triton is None:
        raise UserError("triton, which compiles the kernels, is not installed (Linux only): pip install triton==3.7.1")
    if triton.knobs.runtime.interpret:
        raise UserError("TRITON_INTERPRET is set, so that kernels are interpreted and cannot be compiled: unset it")


def compiled(launch, target):
    """A launch compiled for a target, without such a GPU: Triton's object, with the code and what it needs."""
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
    return triton.compile(source, target=GPUTarget(*TARGETS[target][:3]), options=options)


def cuobjdump(cubin, option):
    """What NVIDIA's tool, which comes with Triton, says about a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
        return subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True).stdout


class Instruction(NamedTuple):
    name: str            # as LDG.E.128
    operands: str        # as R4, [R2.64]
    conditional: bool
    target: int | None   # of a branch: number of an instruction


def parse(text):
    """The instructions of a disassembly of NVIDIA's."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][^;]*?)\s*;", text)
    number = {int(address, 16): n for n, (address, _, _) in enumerate(found)}
    code = []
    for _, predicate, words in found:
        name, _, operands = words.partition(" ")
        name = "NOP" if predicate == "!PT" else name  # never done: takes an issue slot only
        target = number.get(int(operands.split()[-1].strip("`()"), 16)) if name.startswith("BRA") else None
        conditional = bool(predicate) or name.startswith("BRA") and "," in operands
        code.append(Instruction(name, operands, conditional, target))
    return code


# Instructions whose first register is read, not written, or that write none.
READERS = ("ST", "RED", "BRA", "EXIT", "BAR", "NOP", "ISETP", "FSETP", "HSETP", "DSETP", "PLOP3", "R2P", "R2UR",
           "DEPBAR", "WARP", "LDGSTS", "LDGDEPBAR", "BSSY", "BSYNC", "SYNCS", "NANOSLEEP", "HGMMA", "MEMBAR", "FENCE",
           "CCTL")


def written(instruction):
    """The numbers of the registers that an instruction writes."""
    name, operands, _, _ = instruction
    first = next((part.strip() for part in operands.split(",") if not re.fullmatch(r"!?U?P[\dTR]", part.strip())), "")
    found = re.fullmatch(r"R(\d+)", first.split(".")[0])
    if name.startswith(READERS) and not name.startswith("REDUX") or not found:
        return frozenset()
    wide = name.startswith("CS2R") and ".32" not in name
    many = (4 if ".128" in name or re.match(r"LDSM.*\.4", name) else
            2 if ".64" in name or ".WIDE" in name or wide or re.match(r"LDSM.*\.2", name) else 1)
    return frozenset(range(int(found[1]), int(found[1]) + many))


def flights(code):
    """Every way through the code: (number of an instruction, the asynchronous products in flight when it is issued).

    A product is (registers that it reads, whether its group is complete). HGMMA reads its left side from four
    registers, or from shared memory, long after it was issued; those up to one with a barrier (gsb0) are a group, and
    WARPGROUP.DEPBAR.LE gsb0, n waits until at most n groups are left. UTCHMMA, Blackwell's, reads no registers; a wait
    at a barrier in memory is for all of them. Ways are followed until nothing new is met: each loop at least twice.
    """
    met, ways = set(), [(0, ())]
    while ways:
        n, flying = way = ways.pop()
        if way in met or n >= len(code):
            continue
        met.add(way)
        yield way
        name, operands, conditional, target = code[n]
        if name.startswith("HGMMA"):
            left = re.fullmatch(r"R(\d+)", operands.split(",")[1].strip())
            reads = frozenset(range(int(left[1]), int(left[1]) + 4)) if left else frozenset()
            if flying and not flying[-1][1]:  # the group is still open
                reads |= flying[-1][0]
                flying = flying[:-1]
            flying = (*flying, (reads, "gsb" in operands))[-8:]
        elif name.startswith("UTCHMMA"):
            flying = ((frozenset(), True),)
        elif name.startswith("WARPGROUP.DEPBAR"):
            left = int(operands.split(",")[-1], 16)
            flying = flying[len(flying) - left:] if left < len(flying) else flying
        elif name.startswith("SYNCS.PHASECHK"):
            flying = ()
        if target is not None:
            ways.append((target, flying))
        if not (name.startswith(("EXIT", "BRA")) and not conditional):
            ways.append((n + 1, flying))


def hazards(code):
    """The numbers of instructions that overwrite a register which a product of Hopper's in flight may still read."""
    return {n for n, flying in flights(code) if any(written(code[n]) & reads for reads, _ in flying)}


def overtaken(text):
    """The lines of Triton's code for Blackwell that write shared memory which a product in flight may still read.

    A wait is for the oldest product with a side that it names, and for those before. Each loop is gone through twice.
    """
    lines, found, flying = text.splitlines(), set(), []
    for begin in [n for n, line in enumerate(lines) if "scf.for" in line][::-1]:
        indent = len(lines[begin]) - len(lines[begin].lstrip())
        end = next(n for n in range(begin, len(lines)) if lines[n].startswith(" " * indent + "}"))
        lines[begin : end + 1] = lines[begin : end + 1] * 2
    for line in lines:
        operation, operands = (re.findall(r"\bttn?g\.(\w+) (.*?) : ", line) or [("", "")])[0]
        named = re.findall(r"%[\w#]+", operands)
        if operation == "tc_gen5_mma" and "{is_async" in line:
            flying.append(set(named[:2]))
        elif operation == "wait_barrier":
            done = next((n for n, sides in enumerate(flying) if sides & set(named)), -1)
            flying = flying[done + 1 :]
        elif operation == "local_store" and any(named[-1] in sides for sides in flying):
            found.add(line)
    return found


def unordered(text):
    """The lines of AMD's assembly that read memory, or add to it, while an addition or a store is not known to be done.

    One wave has no barrier to wait at: s_waitcnt vmcnt(0) is what orders its memory accesses.
    """
    found, adding, storing = [], False, False
    for line in text.splitlines():
        word = line.split()[0] if line.split() else ""
        if word == "s_waitcnt" and "vmcnt(0)" in line:
            adding = storing = False
        elif re.match(r"(global|buffer|flat)_atomic", word):
            found += [line] * storing
            adding = True
        elif re.match(r"(global|buffer|flat)_store", word):
            storing = True
        elif re.match(r"(global|buffer|flat)_load", word):
            found += [line] * adding
    return found


class Needs(NamedTuple):
    registers: int
    stack: int     # bytes
    spills: int    # bytes of local memory; of AMD's, registers
    shared: int    # bytes
    hazards: int


def needs(launch, target):
    """What a launch needs on a target."""
    binary = compiled(launch, target)
    if TARGETS[target][0] == "hip":
        text = binary.asm["amdgcn"]
        words = ("vgpr_count", "private_segment_fixed_size", "vgpr_spill_count")
        found = (int(re.search(rf"\.{word}:\s+(\d+)", text)[1]) for word in words)
        return Needs(*found, binary.metadata.shared, len(unordered(text)))
    usage = cuobjdump(binary.asm["cubin"], "--dump-resource-usage").partition("Function")[2]
    found = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK", "LOCAL"))
    wrong = (overtaken(binary.asm["ttgir"]) if TARGETS[target][1] in (100, 103) else
             hazards(parse(cuobjdump(binary.asm["cubin"], "-sass"))))
    return Needs(*found, binary.metadata.shared, len(wrong))


def row(job):
    """Of launch number n for a target: the kernel's name, the shape, warps, what it needs."""
    n, target = job
    kind, arch, _, _ = TARGETS[target]
    shape, launch = next(itertools.islice(paper_launches("hip" if kind == "hip" else arch), n, None))
    return launch[0].__name__, shape, launch[2]["num_warps"], needs(launch, target)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    check_compiler()
    widths = -14, -24, 7, 5, 9, 5, 6, 9, 7
    print_row(widths, "kernel", "shape", "target", "warps", "registers", "stack", "spills", "shared", "hazards")
    wrong = 0
    jobs = list(itertools.product(range(len(list(paper_launches()))), TARGETS))
    with multiprocessing.get_context("fork").Pool() as pool:
        for (_, target), (name, shape, warps, found) in zip(jobs, pool.imap(row, jobs)):
            bad = found.stack or found.spills or found.hazards or found.shared > TARGETS[target][3] * 1024
            wrong += bool(bad)
            print_row(widths, name, shape, target, warps, found.registers, found.stack, found.spills,
                      f"{found.shared / 1024:.1f} KiB", str(found.hazards) + "  <- wrong" * bool(bad))
    if wrong:
        raise UserError(f"{wrong} of these spill, have a hazard, or use more shared memory than the card has")
    print("no stack, no spills, none of the hazards that are looked for, shared memory within each card's limit")


if __name__ == "__main__":
    run_script(main)
