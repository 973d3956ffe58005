"""The dictionary against arithmetic done by hand, and against the theorems it rests on."""
import subprocess
import sys
import time

import numpy as np
import pytest

import kloosterman as kl


def slow_mul(a, b, t):
    """Schoolbook: multiply the polynomials, then divide by POLYNOMIALS[t] and keep the rest."""
    product = 0
    for bit in range(t):
        product ^= (a << bit) * (b >> bit & 1)
    for bit in reversed(range(t, 2 * t)):
        product ^= (kl.POLYNOMIALS[t] << bit - t) * (product >> bit & 1)
    return product


def trace(x, t):
    """Tr(x) = x + x^2 + x^4 + ... + x^(2^(t-1)), which is 0 or 1."""
    total = x
    for _ in range(t - 1):
        x = kl.gf_mul(x, x, t)
        total = total ^ x
    return total


@pytest.mark.parametrize("t", [3, 4, 5, 6])
def test_field_equals_schoolbook(t):
    a = np.arange(1 << t)
    expected = [[slow_mul(int(i), int(j), t) for j in a] for i in a]
    assert np.array_equal(kl.gf_mul(a[:, None], a, t), expected)
    inverse = kl.gf_inverse(t)
    assert inverse[0] == 0
    assert all(slow_mul(int(x), int(inverse[x]), t) == 1 for x in a[1:])


@pytest.mark.parametrize("t", kl.POLYNOMIALS)
def test_every_nonzero_element_has_its_inverse(t):
    """True for all elements only if the polynomial is irreducible."""
    x = np.arange(1, 1 << t)
    assert (kl.gf_mul(x, kl.gf_inverse(t)[1:], t) == 1).all()


@pytest.mark.parametrize("t", [3, 8, 10, 11])
def test_field_equals_galois_package(t):
    galois = pytest.importorskip("galois")
    field = galois.GF(2 ** t, irreducible_poly=galois.Poly.Int(kl.POLYNOMIALS[t]))
    rng = np.random.default_rng(0)
    a, b = rng.integers(1 << t, size=(2, 1000))
    assert np.array_equal(kl.gf_mul(a, b, t), np.array(field(a) * field(b)))
    assert np.array_equal(kl.gf_inverse(t)[1:], np.array(field(np.arange(1, 1 << t)) ** -1))


def test_all_polynomials_are_irreducible_says_galois():
    galois = pytest.importorskip("galois")
    assert all(galois.Poly.Int(p).is_irreducible() and galois.Poly.Int(p).degree == t
               for t, p in kl.POLYNOMIALS.items())


@pytest.mark.parametrize("d", [8, 64])
def test_signs_are_parities_of_index_bits(d):
    t = d.bit_length() - 1
    inverse = kl.gf_inverse(t)
    signs = kl.sign_vectors(np.arange(d * d), d)
    assert signs.dtype == np.int8
    for i in range(0, d * d, 7):
        for k in range(d):
            word = k + (int(inverse[k]) << t)
            assert signs[i, k] == (-1) ** bin(word & i).count("1")


def test_each_codeword_is_a_trace():
    """The codeword of index u is Tr(a x + b / x), for the (a, b) that tau maps to u: bit j of tau(a) is Tr(a z^j)."""
    t, d = 6, 64
    x = np.arange(d)

    def tau(a):
        return sum(int(trace(kl.gf_mul(a, 1 << j, t), t)) << j for j in range(t))

    seen = set()
    for a in range(d):
        for b in range(0, d, 5):
            u = tau(a) | tau(b) << t
            seen.add(u)
            codeword = trace(kl.gf_mul(a, x, t) ^ kl.gf_mul(b, kl.gf_inverse(t), t), t)
            assert np.array_equal(kl.sign_vectors(u, d)[0], 1 - 2 * codeword)
    assert len(seen) == d * len(range(0, d, 5))  # tau is one to one


@pytest.mark.parametrize("d", [8, 16, 32])
def test_coherence_equals_all_pairs(d):
    phi = kl.sign_vectors(np.arange(d * d), d) / np.sqrt(d)
    phi[:d] = np.eye(d)
    gram = np.abs(phi @ phi.T)
    np.fill_diagonal(gram, 0)
    assert np.isclose(kl.coherence(d), gram.max(), rtol=0, atol=1e-12)


def test_coherence_at_the_papers_widths():
    assert kl.coherence(1024) == 64 / 1024
    start = time.perf_counter()
    coherence = kl.coherence(2048)
    assert time.perf_counter() - start < 5
    assert 1 / np.sqrt(2048) < coherence <= 2 / np.sqrt(2048) + 1 / 2048


@pytest.mark.parametrize("d", [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096])
def test_kloosterman_sums_are_those_of_lachaud_and_wolfmann(d):
    """Every integer = 3 mod 4 within the Weil bound is taken, and no other."""
    bound = 2 * np.sqrt(d)
    expected = [s for s in range(-d, d) if s % 4 == 3 and abs(s) <= bound]
    assert kl.kloosterman_sums(d).tolist() == expected


@pytest.mark.parametrize("d", [8, 32])
def test_kloosterman_sums_equal_sums_over_the_field(d):
    t = d.bit_length() - 1
    x = np.arange(1, d)
    inverse = kl.gf_inverse(t)[1:]
    sums = {int((1 - 2 * trace(kl.gf_mul(a, x, t) ^ kl.gf_mul(b, inverse, t), t)).sum())
            for a in range(d) for b in range(d) if (a, b) != (0, 0)}
    assert kl.kloosterman_sums(d).tolist() == sorted(sums)


def test_command_line_prints_the_table():
    out = subprocess.run([sys.executable, "kloosterman.py", "1024"], capture_output=True, text=True, check=True).stdout
    for fact in ("1024", "1,048,576", "0.062500", "0.063477", "-61 to 63"):
        assert fact in out


@pytest.mark.parametrize("width", ["1000", "4", "65536", "-8", "many", ""])
def test_command_line_answers_a_wrong_width(width):
    run = subprocess.run([sys.executable, "kloosterman.py", *width.split()], capture_output=True, text=True)
    assert run.returncode == 1
    assert "power of two from 8 to 32768" in run.stderr and "Traceback" not in run.stderr


def test_wrong_arguments_are_answered():
    with pytest.raises(ValueError, match="power of two from 8 to 32768"):
        kl.seed_matrix(24)
    with pytest.raises(ValueError, match="0..63"):
        kl.sign_vectors([64], 8)


@pytest.mark.parametrize("d, m", [(8, 64), (16, 32), (64, 4096), (1024, 2 ** 20)])
def test_packed_signs_are_the_sign_vectors(d, m):
    bits, W = kl.packing(d)
    rng = np.random.default_rng(0)
    i, k = rng.integers(0, m, 500), rng.integers(0, d, 500)
    packed = kl.packed_signs(d, m)
    words = packed[i % d, k % W] ^ packed[d + i // d, k % W]
    signs = kl.sign_vectors(i, d)[np.arange(500), k]
    assert ((words >> (k // W).astype(np.uint32) & 1) == (signs < 0)).all()
    u2 = i // d
    words = kl.pattern_words(d, m)[u2 // 512, k, u2 % 16]
    signs = kl.sign_vectors(u2 * d, d)[np.arange(500), k]
    assert ((words >> (u2 // 16 % 32).astype(np.uint32) & 1) == (signs < 0)).all()
