"""Kernels compiled for GPUs that are not here: what each launch needs, and its machine code.

    python kernels.py        every kernel at the paper's shapes for compute capability 80, 90, 100 and 120: registers,
                             stack, local and shared memory. Fails if one spills or does not fit.

predict.py counts the instructions of the same machine code.
"""
import argparse
import os
import re
import subprocess
import tempfile

import torch

from helpers import UserError, print_row, run_script
from kernels import COLUMNS, decode_launch, dot_launch, moments_launch, score_launch, select_launch, triton

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
            z, pairs, gamma = (torch.empty(tokens, m - d), torch.empty(m - d, dtype=torch.int64),
                               torch.empty(d, COLUMNS, dtype=dtype))
            yield f"d={d} flat m={m}", score_launch(
                x, parents, gamma, generators[:COLUMNS], pairs, z[:, :COLUMNS], d, m)
            yield f"d={d} flat m={m} k={k}", select_launch(
                z, parents, generators, torch.empty(tokens, k, dtype=torch.int64), torch.empty(tokens, k))


def check_compiler():
    if triton is None:
        raise UserError("triton, which compiles the kernels, is not installed (Linux only): pip install triton==3.7.1")
    if triton.knobs.runtime.interpret:
        raise UserError("TRITON_INTERPRET is set, so that kernels are interpreted and cannot be compiled: unset it")


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


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    check_compiler()
    widths = -14, -22, 7, 5, 9, 5, 5, 9
    print_row(widths, "kernel", "shape", "target", "warps", "registers", "stack", "local", "shared")
    wrong = 0
    for shape, launch in paper_launches():
        for capability, limit in SHARED_LIMIT.items():
            registers, stack, local, shared = compile_for(launch, capability)
            bad = stack or local or shared > limit * 1024
            wrong += bool(bad)
            print_row(widths, launch[0].__name__, shape, f"sm_{capability}", launch[2]["num_warps"], registers, stack,
                      local, f"{shared / 1024:.1f} KiB" + "  <- too much" * bool(bad))
    print(f"{wrong} of these use stack, local memory or more shared memory than the card has" if wrong else
          "no stack, no local memory, shared memory within each card's limit")
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    run_script(main)
