"""The dictionary: d*d nearly orthogonal sign vectors of length d = 2**t, computed from the bits of their index.

    h_i[k] = (-1)**parity(M[k] & i) / sqrt(d)        M[k] = k + (1/k << t)

Row k of the seed matrix M holds a field element k of GF(2^t) and its inverse. The inner product of two such
vectors is a Kloosterman sum plus one, over d, so for i != j (Weil's bound)

    |<h_i, h_j>| <= 2/sqrt(d) + 1/d

and this file computes the largest one exactly. Features below d are replaced by the standard basis vectors
(phi_i = e_i), which meet every hash vector at 1/sqrt(d). Everything here is exact integer arithmetic.

    python kloosterman.py 1024
"""
import argparse
import functools

import numpy as np

# An irreducible polynomial of degree t over GF(2) for each width, as a bit mask: bit j is the coefficient of z^j.
POLYNOMIALS = {
    3: 0b1011, 4: 0b10011, 5: 0b100101, 6: 0b1000011, 7: 0b10000011, 8: 0x11D, 9: 0x211, 10: 0x409,
    11: 0x805, 12: 0x1053, 13: 0x201B, 14: 0x4443, 15: 0x8003,
}


def log2_width(d):
    """t for d = 2**t, or an error that says which widths there are."""
    t = int(d).bit_length() - 1
    if t not in POLYNOMIALS or d != 1 << t:
        raise ValueError(f"width d={d} is not available: it must be a power of two from 8 to 32768")
    return t


def gf_mul(a, b, t):
    """Product in GF(2^t) of integers or arrays of integers below 2**t, element by element."""
    a, b = np.broadcast_arrays(np.asarray(a, np.int64), np.asarray(b, np.int64))
    product = np.zeros_like(a)
    for bit in reversed(range(t)):  # Horner's rule: multiply by z, reduce, add a where b has the bit
        product = product << 1
        product ^= (product >> t) * POLYNOMIALS[t]
        product ^= a * (b >> bit & 1)
    return product


def gf_inverse(t):
    """The inverses of all 2**t field elements, by x**(2**t - 2); zero maps to zero."""
    power = np.arange(1 << t)
    inverse = np.ones_like(power)
    for _ in range(t - 1):  # 2**t - 2 = 2 + 4 + ... + 2**(t-1)
        power = gf_mul(power, power, t)
        inverse = gf_mul(inverse, power, t)
    return inverse


@functools.cache
def seed_matrix(d):
    """M: d rows of 2t bits, each packed into a word; low half k, high half the inverse of k."""
    t = log2_width(d)
    return (np.arange(d) | gf_inverse(t) << t).astype(np.uint32)


def sign_vectors(indices, d):
    """sqrt(d) * h_i for each index: an (n, d) int8 array of +1 and -1."""
    indices = np.atleast_1d(np.asarray(indices, np.int64))
    if indices.size and not 0 <= indices.min() <= indices.max() < d * d:
        raise ValueError(f"feature indices must lie in 0..{d * d - 1} for d={d}, "
                         f"but these go from {indices.min()} to {indices.max()}")
    words = indices.astype(np.uint32)[:, None] & seed_matrix(d)  # (n, d)
    return 1 - 2 * (np.bitwise_count(words) & 1).astype(np.int8)


# Signs as bits, 1 for minus, in the two layouts that the kernels read. i = u1 + (u2 << t) has the signs H[u1] ^ s[u2].


def packing(d):
    """(BITS, W): a row of signs is W words of BITS bits.

    At least 16 words, the least that a GPU's matrix product takes.
    """
    bits = min(32, max(1, d // 16))
    return bits, max(16, d // bits)


@functools.cache
def packed_signs(d, m):
    """Rows 0..d-1: the Hadamard rows H[u1]; then the patterns s[u2] of m features. (rows, W) words.

    Bit b of word w belongs to coordinate b*W + w, so that a tile of W neighbouring coordinates takes one bit from each
    word. There is always a pattern 1: kernels on a GPU point a wrong index at it, with a coefficient of NaN.
    """
    bits, W = packing(d)
    indices = np.concatenate([np.arange(d), np.arange(max(2, m // d)) * d])
    words = np.zeros((len(indices), W), np.uint32)
    for rows in np.array_split(np.arange(len(indices)), max(1, len(indices) * d >> 24)):  # 16 MB of signs at a time
        negative = np.zeros((len(rows), bits * W), np.uint32)
        negative[:, :d] = sign_vectors(indices[rows], d) < 0
        words[rows] = (negative.reshape(-1, bits, W)
                       << np.arange(bits, dtype=np.uint32)[:, None]).sum(1, dtype=np.uint32)
    return words


@functools.cache
def pattern_words(d, m):
    """The patterns s[u2] of m features, 16 side by side:
    bit b of word (k, lane) is the sign of s[16 b + lane] at k; then 512 more."""
    words = np.zeros((-(-m // d // 512), d, 16), np.uint32)
    for u2 in range(m // d):
        words[u2 // 512, :, u2 % 16] |= (sign_vectors(u2 * d, d)[0] < 0).astype(np.uint32) << np.uint32(u2 // 16 % 32)
    return words


def walsh_hadamard(a):
    """In-place Walsh-Hadamard transform of every row of an (n, d) integer array:
    out[u] = sum_k (-1)**parity(u & k) a[k]."""
    n, d = a.shape
    step = 1
    while step < d:
        pairs = a.reshape(n, d // (2 * step), 2, step)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        low += high          # a + b
        high *= -2
        high += low          # a - b
        step *= 2
    return a


@functools.cache
def kloosterman_sums(d):
    """The distinct values of sum over x != 0 of (-1)**Tr(a x + b/x), over all (a, b) != (0, 0), in order.

    The sum over *all* coordinates of the hash vector u is one more (x = 0 contributes +1). For u = u1 + (u2 << t)
    these are d transforms of length d: row u2 of signs, transformed, holds every u1.
    """
    t = log2_width(d)
    inverse = gf_inverse(t)
    dtype = np.int16 if t < 15 else np.int32  # no partial sum of a transform leaves [-d, d]
    rows = max(1, (1 << 18) // d)             # blocks that stay in the processor's cache
    taken = np.zeros(2 * d + 1, bool)         # taken[s + d]: some codeword has the sum s
    taken[d] = True                           # u2 = 0: the rows of a Hadamard matrix sum to zero
    for start in range(1, d, rows):
        u2 = np.arange(start, min(start + rows, d))[:, None]
        signs = 1 - 2 * (np.bitwise_count(u2 & inverse) & 1).astype(dtype)
        taken[walsh_hadamard(signs).astype(np.int64) + d] = True
    return np.flatnonzero(taken) - d - 1


def coherence(d):
    """The largest |<phi_i, phi_j>| over i != j, exactly, over the whole dictionary of d*d features."""
    return float(max(np.abs(kloosterman_sums(d) + 1).max() / d, d ** -0.5))


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("d", nargs="?", default="", help="a width: a power of two from 8 to 32768")
    given, more = parser.parse_known_args(arguments)
    if more or not given.d.isascii() or not given.d.isdecimal() or len(given.d) > 9:
        raise ValueError("give one width: python kloosterman.py 1024 (a power of two from 8 to 32768)")
    d = int(given.d)
    log2_width(d)
    sums = kloosterman_sums(d)
    print(f"width d            {d}")
    print(f"features           {d * d:,}")
    print(f"exact coherence    {coherence(d):.6f}")
    print(f"bound              {2 / d ** 0.5 + 1 / d:.6f}    2/sqrt(d) + 1/d")
    print(f"Kloosterman sums   {sums.min()} to {sums.max()}, {len(sums)} values    "
          f"within +-2 sqrt(d) = {2 * d ** 0.5:.2f}")


if __name__ == "__main__":
    from helpers import run_script
    run_script(main, told=ValueError)
