"""The operations of the bottleneck on a CPU: kernels.c, compiled on first use,
and the functions in it as functions of tensors.

The functions `..._c` compute what the references in kernels.py say, for contiguous float32 tensors and int64 indices.
"""
import contextlib
import ctypes
import functools
import glob
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
import weakref

import torch

from kloosterman import packed_signs, packing, pattern_words

CHUNK = 2 ** 19  # elements of a piece of work that stays in a processor's cache


def chunks(N, elements, most=None):
    """Slices of the tokens 0..N-1, each of at most `most` elements altogether: CHUNK by default."""
    size = max(1, (most or CHUNK) // elements)
    return [slice(start, min(start + size, N)) for start in range(0, N, size)]


def find_compiler():
    return next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)


@functools.cache
def library():
    """kernels.c as a loaded library, compiled for this processor and kept in ~/.cache; None without a C compiler."""
    compiler = find_compiler()
    if compiler is None:
        return unavailable("there is no C compiler: install gcc or clang")
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "kernels.c")
    command = [compiler, "-O3", "-march=native", "-fPIC", "-shared", "-Wno-psabi", source, "-lm"]
    with open(source, "rb") as file:
        key = hashlib.sha256(file.read() + " ".join(command).encode() + processor().encode()).hexdigest()[:16]
    folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "paritytransformer")
    kept = find_kept(folder, key)
    if kept:
        with contextlib.suppress(OSError):  # of another system that shares the home folder: make it anew
            return ctypes.CDLL(kept)
    with tempfile.TemporaryDirectory() as build:
        made = os.path.join(build, "kernels.so")
        command += ["-o", made]
        run = subprocess.run([*command, "-fopenmp"], capture_output=True, text=True)
        parallel = run.returncode == 0
        if not parallel:
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                return unavailable(f"kernels.c could not be compiled: {' '.join(command)}\n{run.stderr[:2000]}")
            warnings.warn(f"{compiler} has no OpenMP, so the bottleneck uses one thread: install gcc", stacklevel=2)
        try:
            loaded = ctypes.CDLL(made)
        except OSError as error:
            return unavailable(f"kernels.c was compiled but cannot be loaded: {error}")
        if parallel:
            with contextlib.suppress(OSError):  # a cache that cannot be written is no reason to stop
                keep(made, folder, key)
        return loaded


def find_kept(folder, key):
    """A library compiled before, whose name ends in the hash of its bytes: one that was cut short would kill us."""
    for path in glob.glob(os.path.join(glob.escape(folder), f"kernels-{key}-*.so")):
        with contextlib.suppress(OSError):
            if path.endswith(f"-{hash_of_file(path)}.so"):
                return path
            os.remove(path)
    return None


def keep(made, folder, key):
    """Other processes see all of it or nothing."""
    os.makedirs(folder, exist_ok=True)
    with open(made, "rb") as file, tempfile.NamedTemporaryFile(dir=folder, delete=False) as copy:
        shutil.copyfileobj(file, copy)
        copy.flush()
        os.fsync(copy.fileno())
    os.replace(copy.name, os.path.join(folder, f"kernels-{key}-{hash_of_file(made)}.so"))


def hash_of_file(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def unavailable(reason):
    warnings.warn(f"the bottleneck runs in plain torch, many times slower, since {reason}", stacklevel=3)


@torch.compiler.assume_constant_result  # not to be traced
def has_library():
    return library() is not None


def processor():
    """What -march=native depends on: a home folder may be shared by machines of several kinds."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        return next(line for line in file if line.startswith(("flags", "Features")))
    return platform.platform() + platform.processor()


def call(name, *arguments):
    """A function of kernels.c: tensors, arrays and structures go by address, None is no address, numbers are int64."""
    if library() is None:
        raise RuntimeError("BACKEND = 'c' needs a C compiler: install gcc or clang")
    function = getattr(library(), name)
    if function.argtypes is None:
        function.argtypes = [ctypes.c_int64] * len(arguments)  # addresses, too: they are as wide
        function.restype = ctypes.c_int64
    return function(*[value if type(value) is int else address(value, name) for value in arguments])


def address(value, name):
    if value is None:
        return 0
    if isinstance(value, torch.Tensor):
        if (value.dtype not in (torch.float32, torch.int64, torch.int32) or not value.is_contiguous()
                or value.device.type != "cpu"):
            raise TypeError("kernels.c takes contiguous float32, int64 and int32 of the CPU: "
                            f"{name} got {value.dtype}, strides {value.stride()}, on {value.device}")
        return value.data_ptr()
    return ctypes.addressof(value) if isinstance(value, (ctypes.Structure, ctypes.Array)) else value.ctypes.data


def threads(N):
    """How many to use for N tokens: torch's number,
    but one for a few tokens, which are done before a second has woken."""
    return max(1, min(torch.get_num_threads(), N // 8))


def decode_c(indices, coefs, d, m):
    (N, K), y = indices.shape, coefs.new_empty(len(indices), d)
    call("decode", indices, coefs, None, packed_signs(d, m), y, None, N, K, d, *packing(d), threads(N))
    return y


def decode_like_c(indices, coefs, like, m):
    """decode_c scaled to the norms of `like`; an empty tensor; and the norms of both, (N, 2)."""
    (N, d), K = like.shape, indices.shape[1]
    y, norms = torch.empty_like(like), like.new_empty(N, 2)
    call("decode", indices, coefs, like, packed_signs(d, m), y, norms, N, K, d, *packing(d), threads(N))
    return y, like.new_empty(0, d), norms


def dot_c(indices, x, m):
    (N, d), K = x.shape, indices.shape[1]
    out = x.new_empty(N, K)
    call("dot", indices, x, None, None, None, packed_signs(d, m), out, None, N, K, d, *packing(d), threads(N))
    return out


def decode_like_backward_c(indices, grad, y, like, norms, m):
    """The gradients of decode_like_c's coefs and `like`, from the gradient of what it gave, y."""
    (N, d), K = grad.shape, indices.shape[1]
    if not (y.shape == like.shape == grad.shape and norms.shape == (N, 2)):
        raise ValueError("shapes that do not belong together: "
                         f"{tuple(y.shape)}, {tuple(like.shape)}, {tuple(norms.shape)}")
    to_coefs, to_like = grad.new_empty(N, K), torch.empty_like(like)
    call("dot", indices, grad, y, like, norms, packed_signs(d, m), to_coefs, to_like, N, K, d, *packing(d), threads(N))
    return to_coefs, to_like


def basis_c(x, mean, rstd, k):
    N, d = x.shape
    indices, coefs = torch.empty(N, k, dtype=torch.int64), x.new_empty(N, k)
    call("basis", x, mean, rstd, indices, coefs, N, d, k, threads(N))
    return indices, coefs


def score_product_c(x, parents, generators, mean, rstd, low):
    """<h_{i ^ g}, x> = <Gamma_g, h_i * x>: one matrix Gamma for all parents, one product."""
    (N, d), P, D = x.shape, parents.shape[1], len(generators)
    packed = packed_signs(d, low + len(mean))
    gamma = x.new_empty(D, d)
    call("sign_flips", x.new_ones(1, d), generators, packed, gamma, 1, D, d, *packing(d), threads(D))
    z = x.new_empty(N, P * D)
    flipped = x.new_empty(min(N, max(1, CHUNK // (P * d))), P, d)  # all chunks share it: fresh memory is slow
    for rows in chunks(N, P * d):
        hx = flipped[: rows.stop - rows.start]
        call("sign_flips", x[rows], parents[rows], packed, hx, len(hx), P, d, *packing(d), threads(P * len(hx)))
        torch.matmul(hx, gamma.t(), out=z[rows].view(-1, P, D))
    call("standardise", z, parents, generators, mean, rstd, N, P, D, d, low, threads(N))
    return z


class Level(ctypes.Structure):
    """As in kernels.c."""
    _fields_ = [*((name, ctypes.c_int64) for name in ("P", "D", "k", "low", "features")),
                *((name, ctypes.c_void_p) for name in ("words", "moved", "means", "rstds"))]


class Bottleneck(ctypes.Structure):
    """As in kernels.c."""
    _fields_ = [*((name, ctypes.c_void_p) for name in ("levels", "patterns", "packed", "mean", "var")),
                *((name, ctypes.c_int64) for name in ("count", "K", "d", "m", "BITS", "W"))]


def make_level(P, generators, mean, rstd, low, k, d):
    """A Level, and the tensors that it points to."""
    D, features = len(generators), len(mean)
    blocks = -(-(low + features) // d // 16) - low // d // 16
    words, moments = torch.zeros(2, D, dtype=torch.int32), mean.new_zeros(2, blocks * d * 16)
    call("level_tables", generators, mean, rstd, words[0], words[1], moments[0], moments[1], D, low, features, d)
    return Level(P, D, k, low, features, *(row.data_ptr() for row in (*words, *moments))), (words, moments)


def places(rows, N):
    """keep of kernels.c: which of `rows` each token is, or -1."""
    return torch.full((N,), -1).index_put_((rows,), torch.arange(len(rows)))


def search_transform_c(x, parents, generators, mean, rstd, low, k, rows):
    """Every feature of the level by Walsh-Hadamard transforms of x * s[u2], one for each u2;
    then the children are picked."""
    (N, d), P, D = x.shape, parents.shape[1], len(generators)
    level, tensors = make_level(P, generators, mean, rstd, low, k, d)
    indices, coefs, sampled = torch.empty(N, k, dtype=torch.int64), x.new_empty(N, k), x.new_empty(len(rows), P * D)
    call("search", x, parents, level, pattern_words(d, low + len(mean)), places(rows, N), indices, coefs, sampled,
         N, d, threads(N))
    return indices, coefs, sampled


def check_range(name, indices, low, high):
    """Raise for a wrong index where that costs nothing; on a GPU, where looking would stall it, the token gets NaN."""
    if indices.device.type == "cpu" and indices.numel():
        least, most = (int(v) for v in indices.aminmax())
        if least < low or most >= high:
            raise IndexError(f"{name} must lie in {low}..{high - 1}, but these go from {least} to {most}")


class Tables:
    """A bottleneck as narrow_tokens reads it, made of moments and generators that are copied, to be compared with."""

    def __init__(self, mean, var, generators, lows, active):
        self.shape, self.generators = (tuple(lows), tuple(active)), [words.clone() for words in generators]
        for words, low, high in zip(generators, lows, lows[1:]):  # C reads what they point at
            check_range("generators", words, low, high)
        d, m, mean, var, rstd = lows[0], lows[-1], mean.clone(), var.clone(), var.rsqrt()
        coordinates = torch.arange(d, dtype=torch.int32)
        first = Level(0, d, active[0], 0, d, coordinates.data_ptr(), None, mean.data_ptr(), rstd.data_ptr())
        made = [make_level(P, words, mean[low:high], rstd[low:high], low, k, d)
                for P, words, low, high, k in zip(active, generators, lows, lows[1:], active[1:])]
        levels = (Level * len(active))(first, *(level for level, _ in made))
        signs = pattern_words(d, m), packed_signs(d, m)
        self.bottleneck = Bottleneck(ctypes.addressof(levels), *(table.ctypes.data for table in signs), mean.data_ptr(),
                                     var.data_ptr(), len(active), sum(active), d, m, *packing(d))
        self.address = ctypes.addressof(self.bottleneck)
        self.pointed_to = levels, signs, mean, var, rstd, coordinates, [tensors for _, tensors in made]
        self.candidates = sum(P * len(words) for P, words in zip(active, generators))


TABLES = {}  # by the identity of the means: (a weak reference to them, their Tables)


def tables(mean, var, generators, lows, active, fresh=False):
    """The Tables of these tensors, kept from call to call. Whether the moments are the same, C looks itself."""
    of, kept = TABLES.get(id(mean), (None, None))
    if fresh or of is None or of() is not mean or kept.shape != (tuple(lows), tuple(active)) or not all(
            map(torch.equal, kept.generators, generators)):
        key, kept = id(mean), Tables(mean, var, generators, lows, active)
        TABLES[key] = weakref.ref(mean, lambda _: TABLES.pop(key, None)), kept
    return kept


def narrow_c(x, mean, var, generators, lows, active, rows=None, decoded=True):
    """The whole bottleneck: y and the norms that decode_like_c gives, or None if not `decoded`; indices and coefs;
    the scores of all candidates of the tokens `rows`, (R, sum of P*D), or None. x (..., d), and so is the rest."""
    N, shape, levels = x.numel() // lows[0], (*x.shape[:-1], sum(active)), (mean, var, generators, lows, active)
    kept = tables(*levels)
    indices, coefs = torch.empty(shape, dtype=torch.int64), x.new_empty(shape)
    y = norms = keep = sampled = None
    if decoded:
        y, norms = torch.empty_like(x), x.new_empty(N, 2)
    if rows is not None:
        keep, sampled = places(rows, N), x.new_empty(len(rows), kept.candidates)
    result = mean, var, x, keep, indices, coefs, sampled, y, norms, N, threads(N)
    while not call("narrow_tokens", kept.address, *result):  # the moments have changed
        kept = tables(*levels, fresh=True)
    return y, norms, indices, coefs, sampled


def narrow_backward_c(indices, grad, of_coefs, others, y, x, norms, scales, m):
    """The gradient of narrow_c to x, from those of y, of the coefficients, and of others to x."""
    (N, d), K, to_x = x.shape, indices.shape[1], torch.empty_like(x)
    if not (y.shape == grad.shape == x.shape and norms.shape == (N, 2) and scales.shape == indices.shape):
        raise ValueError(f"shapes that do not belong together: {tuple(y.shape)}, {tuple(x.shape)}, "
                         f"{tuple(norms.shape)}, {tuple(scales.shape)}, {tuple(indices.shape)}")
    call("narrow_backward", indices, grad, of_coefs, others, y, x, norms, scales, packed_signs(d, m), to_x,
         N, K, d, *packing(d), threads(N))
    return to_x


def select_c(z, parents, generators, k):
    N, (P, D) = len(z), (parents.shape[1], len(generators))
    indices, coefs = torch.empty(N, k, dtype=torch.int64), z.new_empty(N, k)
    call("choose", z, parents, generators, indices, coefs, N, P, D, k, threads(N))
    return indices, coefs


def collect_c(z, parents, generators, sums):
    call("collect", z, parents, generators, sums, *parents.shape, len(generators), len(sums), threads(len(z)))
