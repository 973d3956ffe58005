"""Machine code for absent GPUs: what is looked for in it is found where it is, and the kernels have none of it.

Kernels are compiled in another process: here they are interpreted.
"""
import json
import os
import subprocess
import sys

import pytest

import aot
import kernels

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
needs_triton = pytest.mark.skipif(kernels.triton is None, reason="triton is not installed (Linux only)")

# The score kernel as it was: the left side is flipped in the turn that multiplies it, and so stays in registers. And
# two products that share a side: the second may still read it when the next turn writes it.
SCRIPT = """
import json, torch, triton, triton.language as tl
import aot, kernels

@triton.jit
def from_registers(x, words, gamma, z, d: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr):
    r, j, w = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, W)
    signs = tl.load(words + r[:, None] * W + w[None, :])
    total = tl.zeros([BM, BN], tl.float32)
    for b in range(d // W):
        k = b * W + w
        piece = tl.load(x + r[:, None] * d + k[None, :])
        sign = (((signs >> b) & 1) << 15).to(tl.int16)
        piece = (piece.to(tl.int16, bitcast=True) ^ sign).to(tl.bfloat16, bitcast=True)
        total = tl.dot(piece, tl.load(gamma + k[:, None] * BN + j[None, :]), total)
    tl.store(z + r[:, None] * BN + j[None, :], total)

@triton.jit
def one_right_side(x, gamma, z, d: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, W: tl.constexpr):
    r, j, w = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :], tl.arange(0, W)
    total = tl.zeros([BM, BN], tl.float32)
    other = tl.zeros([BM, BN], tl.float32)
    right = tl.load(gamma + w[:, None] * BN + j)
    for b in range(1, d // W):
        coming = tl.load(gamma + (b * W + w)[:, None] * BN + j) + 1.0
        total = tl.dot(tl.load(x + r * d + w[None, :]), right, total)
        other = tl.dot(tl.load(x + (r + BM) * d + w[None, :]), right, other)
        right = coming.to(tl.bfloat16)
    tl.store(z + r * BN + j, total)
    tl.store(z + (r + BM) * BN + j, other)

bf16 = torch.empty(1, dtype=torch.bfloat16)
two = one_right_side, (1,), dict(x=bf16, gamma=bf16, z=torch.empty(1), d=1024, BM=128, BN=256, W=32, num_warps=8,
                                 num_stages=3)
old = from_registers, (1,), dict(x=bf16, words=torch.empty(1, dtype=torch.int32), gamma=bf16, z=torch.empty(1), d=1024,
                                 BM=128, BN=256, W=32, num_warps=8, num_stages=3)
relaxed = next(launch for shape, launch in aot.paper_launches("hip") if "like x" in shape)
relaxed = (*relaxed[:2], relaxed[2] | {"ORDER": "relaxed"})
widths = {d: {name: aot.needs(launch, "sm_90") for name, launch in aot.width_launches(d)} for d in WIDTHS}
print(json.dumps(dict(old=aot.needs(old, "sm_90"), two=aot.needs(two, "sm_100"), relaxed=aot.needs(relaxed, "gfx942"),
                      widths=widths)))
"""


def compile_in_another_process(script, widths):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = ROOT
    script.write_text(SCRIPT.replace("WIDTHS", repr(widths)))  # a file: Triton reads a kernel's source
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@needs_triton
def test_the_old_kernels_hazards_are_found_and_every_width_compiles(tmp_path):
    found = compile_in_another_process(tmp_path / "script.py", [8, 64, 512, 4096, 32768])  # all of them take minutes
    assert aot.Needs(*found["old"]).hazards >= 10      # 19 in the score kernel that had it
    assert aot.Needs(*found["two"]).hazards >= 1
    assert aot.Needs(*found["relaxed"]).hazards >= 1   # one wave of AMD's reads y while it is still added to
    for d, launches in found["widths"].items():
        assert set(launches) == {"decode", "dot", "score", "score few", "select", "select children"}
        for name, needs in launches.items():
            needs = aot.Needs(*needs)
            assert needs.hazards == needs.spills == 0 and needs.shared <= 227 * 1024, (d, name, needs)
            assert needs.stack <= (100 if d == "32768" else 0), (d, name, needs)


def listing(*lines):
    return aot.parse("".join(f"/*{16 * n:04x}*/ {line} ;\n" for n, line in enumerate(lines)))


def test_hazards_of_listings_known_by_hand():
    product, wait = "HGMMA.64x256x16.F32.BF16 R24, R152, gdesc[UR4].tnspB, R24, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
    assert aot.hazards(listing(product, "MOV R153, R1", wait, "EXIT")) == {1}
    assert aot.hazards(listing(product, wait, "MOV R153, R1", "EXIT")) == set()
    assert aot.hazards(listing(product, "MOV R156, R1", "STG.E [R152.64], R152", "ISETP.NE.AND P0, PT, R152, RZ, PT",
                               "EXIT")) == set()  # beside it; read only
    assert aot.hazards(listing(product, "LDG.E.128 R150, desc[UR4][R2.64]", "EXIT")) == {1}  # R150 to R153
    assert aot.hazards(listing(product.replace("R152", "gdesc[UR8]"), "MOV R152, R1", "EXIT")) == set()  # shared memory
    # Around a loop: what is written before the product is written again while the last one flies.
    assert aot.hazards(listing("MOV R152, R1", product, "@P0 BRA 0x0", wait, "EXIT")) == {0}
    assert aot.hazards(listing("MOV R152, R1", product, wait, "@P0 BRA 0x0", "EXIT")) == set()
    # At most one group is left: that of the second product.
    two = ("HGMMA.64x256x16.F32.BF16 R24, R160, gdesc[UR4], R24, gsb0", product, "WARPGROUP.DEPBAR.LE gsb0, 0x1")
    assert aot.hazards(listing(*two, "MOV R160, R1", "MOV R152, R1", "EXIT")) == {4}
    # Without a barrier of its own the first is of the second one's group.
    open_group = ("HGMMA.64x256x16.F32.BF16 R24, R160, gdesc[UR4], R24", *two[1:])
    assert aot.hazards(listing(*open_group, "MOV R160, R1", "MOV R152, R1", "EXIT")) == {3, 4}


def test_what_is_issued_while_a_product_flies():
    def beside(*lines):
        return {n for n, flying in aot.flights(listing(*lines)) if flying}
    hopper = "HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4].tnspB, R24, gsb0"
    wait, one_left = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"
    assert beside("MOV R1, R2", hopper, "MOV R1, R2", wait, "MOV R1, R2", "@P0 BRA 0x0", "EXIT") == {2, 3}
    assert beside(hopper, one_left, hopper, one_left, "MOV R1, R2", wait, "EXIT") == {1, 2, 3, 4, 5}
    blackwell, wait = "UTCHMMA gdesc[UR6], gdesc[UR8], tmem[UR5], tmem[UR30], idesc[UR31]", "SYNCS.PHASECHK.TRANS64"
    # A product is waited for in the next turn; a warp that does not issue it waits, too.
    assert beside(f"{wait} P6, [UR16], R0", "MOV R1, R2", "@UP1 BRA 0x40", blackwell, "MOV R1, R2", "@P0 BRA 0x0",
                  f"{wait} P6, [UR16], R0", "EXIT") == {0, 4, 5, 6}


def test_shared_memory_that_is_written_too_early():
    product, other = ("ttng.tc_gen5_mma %left, %right, %t, %a[%true] {is_async} : x",
                      "ttng.tc_gen5_mma %left2, %right, %t2, %b[%true] {is_async} : x")
    wait, wait_other = (f"ttng.wait_barrier %{barrier}, %p deps %{left}, %right : x"
                        for barrier, left in (("a", "left"), ("b", "left2")))
    store, begin, end = "ttg.local_store %v, %right : x", "  %r = scf.for %i = %c0 to %c31 {", "  } loc(#loc)"

    def wrong(*lines):
        return aot.overtaken("\n".join(lines))
    assert wrong(product, store) == {store} and not wrong(product, wait, store) and not wrong(store, product)
    assert wrong(product, other, wait, store) == {store} and not wrong(product, other, wait, wait_other, store)
    assert not wrong(product, "ttg.local_store %right, %else : x")  # it is read
    assert wrong(begin, store, product, end) == {store}             # in the next turn
    assert not wrong(begin, store, product, wait, end) and not wrong(begin, wait, store, product, end)
    assert wrong(begin, wait, store, product, other, end) == {store}
    assert not wrong(product.replace("{is_async}", ""), store)


def test_accesses_of_one_wave_that_nothing_orders():
    add, load, store, wait = ("global_atomic_add_f32 v[2:3], v6, off", "buffer_load_dword v1, v2, s[4:7], 0 offen",
                              "global_store_dword v1, v2, s[0:1]", "s_waitcnt vmcnt(0)")
    assert aot.unordered("\n".join([add, load])) == [load]
    assert aot.unordered("\n".join([add, wait, load, store, wait, add])) == []
    assert aot.unordered("\n".join([store, load, add])) == [add]
