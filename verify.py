"""Is every kernel right on this machine? One table of pass and FAIL, and the exit code 1 if anything fails.

    python bench.py verify                          on a GPU: the Triton kernels at the paper's shapes
    TRITON_INTERPRET=1 python bench.py verify       without one: the C path, and the kernels in Triton's interpreter
    python bench.py verify --only decode,score      some operations

An operation runs on N tokens, N from 1 to 16,384, in memory that was filled with NaN before. Among them are only a few
distinct ones in random order, so that every row of a large launch meets its reference:

    error = max |got - exact| / (max |plain - exact| + eps |exact|)     at most 2

where exact is the reference in float64, plain the same in float32 and eps that of the result's type. What is chosen
must be equal: the reference chooses from the very scores that the kernel made. A line of the table is the worst of all
N. Then tiny is trained for a hundred steps here and on the CPU from one seed, both in float32; and on a GPU the CUDA
graph that generation replays is compared with plain passes.

OPERATIONS is the table of what is checked; SHAPES of where.
"""
import argparse
import contextlib
import dataclasses
import functools
import math
import multiprocessing
import os
import time
import warnings
from concurrent.futures import ProcessPoolExecutor

import torch

import config as configs
import data
import ops
from dpb import DeepParityBottleneck, update_moments
from helpers import UserError, check_writable, first_line, print_row, provenance, run_script, write_json
from kernels import basis_reference, select_reference
from model import GPT, Cache, Replay
from optim import MuonAdam, schedule, split_parameters
from ranks import pick_device

DISTINCT = 16  # tokens that differ
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = {  # d, bits, active, children; level: the last one
    "small_2l": (1024, (10, 15), (16, 32), (256,)),
    "small_3l": (1024, (10, 15, 17), (16, 32, 64), (256, 256)),
    "large_2l": (2048, (11, 15), (16, 32), (256,)),
    "large_3l": (2048, (11, 15, 17), (16, 32, 64), (256, 256)),
}
QUICK = {  # the interpreter takes 60 ms for a program, and flat scores need one for each feature
    "quick_2l": (32, (5, 6), (12, 8), (8,)),
    "quick_3l": (8, (3, 4, 5), (4, 4, 6), (6, 6)),
}
TOKENS = {False: (1, 7, 64, 1000, 16384), True: (1, 3)}  # True: --quick
MOST = 2 ** 27  # scores of a launch: N is cut to what this allows (only where all scores of all tokens are held)
# (up to which step, by how much its loss may differ). Rounding grows, since the last bit of a score may decide which
# feature wins. Measured on a CPU between the C path and the reference (seed 0), and after the first weights changed
# by one rounding (seeds 0 to 2), at most: 4.8e-7 in ten steps, 9.1e-4 in twenty, 3.6e-2 in a hundred. Allowed is three
# times that, and more at the start, where a choice may fall the other way sooner than in those runs; with the small
# batches of --quick one did at the third step, and after ten it was 3.7e-3.
DRIFT = {False: ((1, 1e-5), (10, 1e-3), (20, 3e-3), (100, 0.11)), True: ((1, 1e-5), (10, 0.011))}


@contextlib.contextmanager
def using(path):
    before, ops.BACKEND = ops.BACKEND, path
    try:
        yield
    finally:
        ops.BACKEND = before


# What the operations are given


class Sample:
    """Distinct tokens of a shape, and all that its operations take. `of(tokens, dtype)` is a batch of them."""

    def __init__(self, shape, dtype, device):
        d, bits, active, children = shape
        rng = torch.Generator().manual_seed(d + len(bits))
        self.module = DeepParityBottleneck(d, bits, active, children)
        self.d, self.m, self.K, self.dtype, self.device = d, self.module.m, sum(active), dtype, device
        self.module.mean.normal_(0, 0.25, generator=rng)
        self.module.var.uniform_(0.3, 3.0, generator=rng)
        T, last = DISTINCT, len(active) - 1
        low, self.k = self.module.lows[last], active[last]
        indices = torch.randint(d, self.m, (T, self.K), generator=rng)
        indices[:, : active[0]] = torch.stack([torch.randperm(d, generator=rng)[: active[0]] for _ in range(T)])
        first, P = self.module.lows[last - 1], active[last - 1]
        parents = torch.stack([first + torch.randperm(low - first, generator=rng)[:P] for _ in range(T)])
        self.tensors = {"indices": indices, "parents": parents,
                        "root": torch.zeros(T, 1, dtype=torch.int64)}  # flat: all features are children of feature 0
        for name, width in ("x", d), ("grad", d), ("coefs", self.K), ("dot_grad", self.K):
            self.tensors[name] = torch.randn(T, width, generator=rng).to(dtype)
        self.tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        self.module.to(device)
        mean, rstd = self.module.mean, self.module.var.rsqrt()
        self.basis = mean[:d], rstd[:d]
        self.levels = {"parents": self.module.level(last),
                       "root": (torch.arange(d, self.m, device=device), mean[d:], rstd[d:], d)}
        self.cache = {}

    def of(self, tokens, dtype=None):
        """name -> tensor of these tokens; floats as leaves in another type, if given."""
        taken = {name: tensor[tokens] for name, tensor in self.tensors.items()}
        return {name: tensor.to(dtype or tensor.dtype).requires_grad_() if tensor.is_floating_point() else tensor
                for name, tensor in taken.items()}

    def exact(self, name, function):
        """(plain, exact): what function gives for the distinct tokens in float32 and in float64."""
        if name not in self.cache:
            with using("reference"):
                self.cache[name] = [function(self, self.of(slice(None), kind))
                                    for kind in (torch.float32, torch.float64)]
        return self.cache[name]


# How results are judged


def error_of(got, plain, exact, tokens):
    """The largest error of got (N, ...), token n being the distinct token tokens[n] of plain and exact."""
    if got.shape != (len(tokens), *exact.shape[1:]):
        return math.inf
    rounding = torch.finfo(got.dtype).eps
    unit = ((plain.double() - exact).abs().max() + rounding * exact.abs()).clamp(min=1e-300)
    worst = 0.0
    for rows, here in zip(got.split(size := max(1, 2 ** 24 // got[0].numel())), tokens.split(size)):
        ratio = (rows.double() - exact[here]).abs() / unit[here]
        worst = max(worst, ratio.nan_to_num(nan=math.inf).max().item())
    return worst


def differing(got, wanted):
    """How many elements differ; NaN is equal to NaN."""
    return ((got != wanted) & ~((got != got) & (wanted != wanted))).sum().item()


# The operations: each yields (line of the table, got, plain, exact, tokens), or (line, got, wanted) for what is exact


def approximately(name, function):
    """A check of what `function(sample, tensors)` returns, {line: result}, against itself in plain torch."""
    def check(s, tokens):
        got, (plain, exact) = function(s, s.of(tokens)), s.exact(name, function)
        for line in got:
            yield line, got[line], plain[line], exact[line], tokens
    return check


def decode(s, t):
    y = ops.parity_decode(t["indices"], t["coefs"], s.d, s.m)
    return {"decode": y, "gradient of decode": torch.autograd.grad(y, t["coefs"], t["grad"].to(y.dtype))[0]}


def decode_like(s, t):
    coefs = ops.wide(t["coefs"]).detach().requires_grad_()  # as the model has them
    y = ops.parity_decode(t["indices"], coefs, s.d, s.m, like=t["x"])
    to_coefs, to_x = torch.autograd.grad(y, (coefs, t["x"]), t["grad"])
    return {"decode to the norm of x": y, "its gradient to coefs": to_coefs, "its gradient to x": to_x}


def dot(s, t):
    out = ops.parity_dot(t["indices"], t["x"], s.m)
    return {"dot": out, "gradient of dot": torch.autograd.grad(out, t["x"], t["dot_grad"].to(out.dtype))[0]}


def dictionary(s, tokens):
    """One feature with coefficient 1 is its row of the dictionary; its inner product with e_j is one entry: exactly."""
    if len(tokens) > 1:
        return
    features = torch.arange(s.m, device=s.device)
    if s.d < 1024:
        features = features[::3]
    for part in features.split(4096):
        ones, wide = torch.ones(len(part), 1, device=s.device), torch.float32
        with using("reference"):
            rows = ops.parity_decode(part[:, None], ones, s.d, s.m)
        yield "decode", ops.parity_decode(part[:, None], ones, s.d, s.m), rows
        at = part * 7919 % s.d
        basis = torch.zeros(len(part), s.d, device=s.device, dtype=s.dtype).scatter_(1, at[:, None], 1.0)
        yield "dot", ops.parity_dot(part[:, None], basis, s.m), rows.gather(1, at[:, None]).to(wide)


def children_of(t, kind, generators):
    return (t[kind][:, :, None] ^ generators).flatten(1)


def scores_by_dot(kind):
    """score_reference, some children at a time."""
    def function(s, t):
        generators, mean, rstd, low = s.levels[kind]
        children = children_of(t, kind, generators)
        dots = torch.cat([ops.parity_dot(part, t["x"], s.m) for part in children.split(4096, 1)], 1).detach()
        return (dots - mean[children - low].to(dots)) * rstd[children - low].to(dots)
    return function


def methods():
    return ("gemm", "transform") if ops.BACKEND == "c" else ("gemm",)


def score(kind):
    def check(s, tokens):
        generators, mean, rstd, low = s.levels[kind]
        tokens = tokens[: max(1, MOST // (s.tensors[kind].shape[1] * len(generators)))]
        t, plain_exact = s.of(tokens), s.exact(f"score {kind}", scores_by_dot(kind))
        few = t[kind].numel() < low  # the kernel then reads a pair of moments for each child, else a table by parent
        line = "score flat" if kind == "root" else "score few (pairs)" if few else "score many (table)"
        order = children_of(t, kind, generators)[:1000].sort(dim=1, stable=True)
        for method in methods():
            z = ops.score_children(t["x"].detach(), t[kind], *s.levels[kind], method)
            yield line, z, *plain_exact, tokens
            # Copies of a child have one score to the last bit, or the selection could not tell that they are copies.
            z, again = z[:1000].gather(1, order.indices), order.values[:, 1:] == order.values[:, :-1]
            yield line, z[:, 1:][again], z[:, :-1][again]
    return check


def score_gradient(s, t):
    """No model needs it: the bottleneck attaches the gradient of what it chose."""
    generators, mean, rstd, low = s.levels["parents"]
    weights = torch.linspace(-1, 1, t["parents"].shape[1] * len(generators), device=s.device)
    level = generators, *((mean, rstd) if t["x"].dtype != torch.float64 else (mean.double(), rstd.double())), low
    z = ops.score_children(t["x"], t["parents"], *level)
    return {"gradient of score": torch.autograd.grad(z, t["x"], weights.to(z.dtype).expand_as(z))[0]}


def score_backward(s, tokens):
    if len(tokens) <= 64:
        yield from approximately("gradient of score", score_gradient)(s, tokens)


def select(kind):
    """From the path's own scores, and where many are equal, and NaN."""
    def check(s, tokens):
        generators, k = s.levels[kind][0], s.K if kind == "root" else s.k
        tokens = tokens[: max(1, MOST // (s.tensors[kind].shape[1] * len(generators)))]
        t = s.of(slice(0, int(tokens.max()) + 1))
        z = ops.score_children(t["x"].detach(), t[kind], *s.levels[kind])
        ties = z.round()
        ties[0] = -2.0
        ties[len(z) // 2] = math.nan
        for scores in z, ties:
            found = ops.select_distinct(scores[tokens], t[kind][tokens], generators, k)
            for got, wanted in zip(found, select_reference(scores, t[kind], generators, k)):
                yield f"select {'flat' if kind == 'root' else 'level'}", got, wanted[tokens]
    return check


def search_basis(s, tokens):
    x, k, distinct = s.of(tokens)["x"].detach(), s.module.active[0], int(tokens.max()) + 1
    zero, one = torch.zeros(s.d, device=s.device), torch.ones(s.d, device=s.device)
    for values, moments in (x, s.basis), (x.round(), (zero, one)):  # and with ties
        for got, wanted in zip(ops.search_basis(values, *moments, k), basis_reference(values[:distinct], *moments, k)):
            yield "search_basis (select level 0)", got, wanted[tokens]


def search_children(kind):
    def check(s, tokens):
        t, distinct = s.of(tokens), int(tokens.max()) + 1
        rows, k = torch.arange(distinct, device=s.device), s.K if kind == "root" else s.k
        if len(tokens) > distinct:
            rows = torch.cat([rows, rows.new_tensor([len(tokens) - 1])])
        for method in methods():
            *found, z = ops.search_children(t["x"], t[kind], *s.levels[kind], k, method, rows)
            line = f"search_children{' flat' * (kind == 'root')}"
            for got, wanted in zip(found, select_reference(z[:distinct], t[kind][:distinct], s.levels[kind][0], k)):
                yield line, got, wanted[tokens]
            yield line, z, *s.exact(f"score {kind}", scores_by_dot(kind)), tokens[rows]
    return check


def collect(s, tokens):
    """Against a dense table of every token's scores, added up token by token."""
    generators = s.levels["parents"][0]
    tokens = tokens[:1000]  # it is for a sample of the tokens
    t = s.of(slice(None))
    children = children_of(t, "parents", generators)
    values = torch.randn(DISTINCT, s.m, generator=torch.Generator().manual_seed(0)).to(s.device)
    z, sums = values.gather(1, children), torch.ones(s.m, 3, device=s.device)  # sums are added to what is there
    ops.collect_sums(z[tokens], t["parents"][tokens], generators, sums)
    seen = torch.zeros(DISTINCT, s.m, device=s.device).scatter_(1, children, 1.0)
    terms = torch.stack([seen, seen * values, seen * values.double() ** 2], 2)  # (T, m, 3)
    plain, exact = torch.ones_like(sums), torch.ones_like(sums).double()
    for n in tokens.tolist():
        plain += terms[n].float()
        exact += terms[n]
    yield "collect", sums[None], plain[None], exact[None], tokens[:1] * 0
    yield "collect", sums[:, 0], exact[:, 0].float()


def bottleneck(s, tokens):
    """Forward and backward as in training; the reference is given the features that were chosen."""
    t, distinct = s.of(tokens), int(tokens.max()) + 1
    s.module.train()
    code, y, _ = s.module.narrow(t["x"])
    got = code.coefs, y, torch.autograd.grad(y, t["x"], t["grad"])[0]
    chosen = code.indices[:distinct]
    yield "bottleneck: indices", code.indices, chosen[tokens]
    results = []
    for kind in s.dtype, torch.float64:
        wide = torch.float64 if kind == torch.float64 else torch.float32
        mean, rstd = s.module.mean.to(wide)[chosen], s.module.var.to(wide).rsqrt()[chosen]
        r = s.of(slice(0, distinct), kind)
        with using("reference"):
            coefs = (ops.parity_dot(chosen, r["x"], s.m) - mean) * rstd
            out = ops.parity_decode(chosen, coefs, s.d, s.m, like=r["x"])
            results.append((coefs, out, torch.autograd.grad(out, r["x"], r["grad"])[0]))
    for line, value, plain, exact in zip(("coefs", "forward", "backward"), got, *results):
        yield f"bottleneck: {line}", value, plain, exact, tokens


OPERATIONS = {  # name for --only: the check, and whether the type of x matters
    "decode": (approximately("decode", decode), True),
    "decode_like": (approximately("decode_like", decode_like), True),
    "dot": (approximately("dot", dot), True),
    "dictionary": (dictionary, False),
    "score": (score("parents"), True),
    "score_flat": (score("root"), True),
    "score_gradient": (score_backward, True),
    "select": (select("parents"), False),
    "select_flat": (select("root"), False),
    "search_basis": (search_basis, True),
    "search": (search_children("parents"), True),
    "search_flat": (search_children("root"), True),
    "collect": (collect, False),
    "bottleneck": (bottleneck, True),
}

NAMES = *OPERATIONS, "train", "replay"


# The table


@dataclasses.dataclass
class Line:
    path: str
    operation: str
    shape: str
    dtype: str
    cases: int = 0
    error: float = 0.0   # the largest; at most `allowed`
    differ: int = 0      # elements that should be equal and are not
    allowed: float = 2.0
    problem: str = ""    # an exception

    @property
    def passed(self):
        return self.cases > 0 and self.error <= self.allowed and not self.differ and not self.problem


def check_shape(path, name, dtype, device, quick, only):
    """The lines of one shape and type. Operations to which the type of x is nothing run with float32 alone."""
    poison_memory(True)
    sample, lines = Sample((QUICK if quick else SHAPES)[name], DTYPES[dtype], torch.device(device)), {}
    rng = torch.Generator().manual_seed(0)
    for operation in only:
        check, typed = OPERATIONS[operation]
        for N in TOKENS[quick] if typed or dtype == "float32" else ():
            distinct = min(N, DISTINCT)
            tokens = torch.cat([torch.arange(distinct), torch.randint(distinct, (N - distinct,), generator=rng)])
            try:
                with using(path):
                    for title, *values in check(sample, tokens.to(device)):
                        line = lines.setdefault(title, Line(path, title, name, dtype))
                        line.cases += 1
                        if len(values) == 2:
                            line.differ += differing(*values)
                        else:
                            line.error = max(line.error, error_of(*values))
            except Exception as error:  # the others shall run: one table says all that is wrong
                line = lines.setdefault(operation, Line(path, operation, name, dtype))
                line.problem = f"N={N}: {type(error).__name__}: {first_line(error)}"
    poison_memory(False)
    return list(lines.values())


def poison_memory(on):
    """torch.empty then gives NaN, or the largest integer, so that a place nobody writes shows."""
    warnings.filterwarnings("ignore", ".*deterministic.*")  # nothing here depends on an order of additions
    torch.use_deterministic_algorithms(on, warn_only=True)


# A hundred steps of tiny


def losses_of(path, device, steps, changes, folder):
    """The losses of the first steps of tiny, in float32 throughout."""
    torch.set_float32_matmul_precision("highest")
    here = os.path.dirname(os.path.abspath(__file__))
    config = configs.load([os.path.join(here, "configs", "tiny_plain.py"), *changes])
    tokens, model = data.Tokens(folder, "train"), GPT(config).to(device)
    rule, losses = MuonAdam(*split_parameters(model), config.muon_lr, config.adam_lr), []
    rule.dtype = torch.float32  # a GPU's updates are bfloat16 otherwise
    with using(path):
        for step in range(steps):
            rule.scale_lr(schedule(step, config.max_steps, config.warmup_steps, config.decay_fraction))
            batch = tokens.batch(config.seed, step, config.batch_tokens // config.context, config.context).to(device)
            loss = model(batch[:, :-1], batch[:, 1:])["lm"]
            loss.backward()
            rule.step()
            rule.zero_grad()
            update_moments(model)
            losses.append(loss.item())
    return losses


def check_training(path, device, quick, folder):
    """Here against the CPU; on a CPU, for a few steps of fewer tokens, against the reference."""
    steps, changes = 100, []
    if quick:
        steps, changes = ((10, ["--layers=2", "--batch_tokens=256"]) if path == "c" else
                          (3, ["--layers=1", "--context=8", "--batch_tokens=8"]))
    line = Line(path, f"{steps} steps of tiny", "tiny" if steps == 100 else "cut down", "float32", steps)
    try:
        mine = losses_of(path, device, steps, changes, folder)
        theirs = losses_of("reference" if quick or not ops.has_library() else "c", "cpu", steps, changes, folder)
    except Exception as error:
        line.problem = f"{type(error).__name__}: {first_line(error)}"
        return [line]
    first = 0
    for last, allowed in DRIFT[quick]:  # the line shows what comes nearest to what is allowed, or exceeds it most
        differences = [abs(a - b) if math.isfinite(a) else math.inf
                       for a, b in zip(mine[first:last], theirs[first:last])]
        if differences and (first == 0 or max(differences) / allowed > line.error / line.allowed):
            line.error, line.allowed = max(differences), allowed
        first = last
    return [line]


@torch.no_grad()
def check_replay(path, device):
    """Generation's step, replayed at place after place, against plain passes over all tokens so far. In bfloat16 by a
    dense model, since rounding changes which features are chosen; autocast ends between the steps, as in generation."""
    torch.set_float32_matmul_precision("highest")
    lines = [Line(path, "generation by CUDA graph", "tiny", "float32", allowed=1e-3),
             Line(path, "generation by CUDA graph", "tiny_gpt", "bfloat16", allowed=5e-2)]
    for line in lines:
        mixed = functools.partial(torch.autocast, torch.device(device).type, torch.bfloat16,
                                  enabled=line.dtype == "bfloat16")
        try:
            here = os.path.dirname(os.path.abspath(__file__))
            model = GPT(configs.load([os.path.join(here, "configs", f"{line.shape}.py")])).to(device).eval()
            tokens, cache = torch.randint(0, 2048, (4, 40), generator=torch.Generator().manual_seed(0)), Cache()
            tokens = tokens.to(device)
            with using(path):
                with mixed():
                    model(tokens[:, :10], cache=cache)
                    replay = Replay(model, tokens[:, 10:11], cache, 40)
                for place in range(10, 40):
                    with mixed():
                        got = replay(tokens[:, place : place + 1])
                    with mixed():
                        plain = model(tokens[:, : place + 1])[:, -1]
                    line.error = max(line.error, ((got - plain).abs().max() / plain.abs().max()).item())
                    line.cases += 1
        except Exception as error:
            line.problem = f"{type(error).__name__}: {first_line(error)}"
    return lines


def run_job(arguments):
    return {"train": check_training, "replay": check_replay, "shape": check_shape}[arguments[0]](*arguments[1:])


def list_jobs(paths, device, quick, only, folder):
    """Independent pieces of work, each giving lines of the table."""
    for path in paths:
        if "train" in only:
            yield "train", path, device, quick, folder
        if "replay" in only and torch.device(device).type == "cuda":
            yield "replay", path, device
        for name in QUICK if quick else SHAPES:
            for dtype in DTYPES:
                yield "shape", path, name, dtype, device, quick, [name for name in only if name in OPERATIONS]


def find_paths(device):
    """The paths that can be verified on a device."""
    interpreted = ops.triton and ops.triton.knobs.runtime.interpret
    if device.type == "cuda":
        if not ops.triton:
            raise UserError("triton is not installed, so there are no kernels to verify: pip install triton==3.7.1")
        if interpreted:
            raise UserError("TRITON_INTERPRET is set, so that the kernels would not run on the GPU: unset it")
        return ["triton"]
    paths = ["c"] * ops.has_library() + ["triton"] * bool(interpreted)
    if not paths:
        raise UserError("there is nothing to verify: no GPU, no C compiler, and TRITON_INTERPRET=1 is not set")
    return paths


def verify(paths, device, quick, only, folder, workers=0):
    """All lines, as they come. With workers each piece of work has a process of its own: an error that leaves a GPU
    unusable, such as an address out of bounds, fails that piece only, and kernels are compiled at the same time."""
    jobs = list(list_jobs(paths, str(device), quick, only, folder))
    if not workers:
        for job in jobs:
            yield from run_job(job)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for job, future in [(job, pool.submit(run_job, job)) for job in jobs]:
            try:
                yield from future.result()
            except Exception as error:  # the process died
                yield Line(job[1], *(("all", *job[2:4]) if job[0] == "shape" else (job[0], "tiny", "float32")),
                           problem=f"{type(error).__name__}: {first_line(error)}")


def say_what(paths, device, quick):
    what = {"c": "the C path against the references",
            "triton": "the Triton kernels " + ("in the interpreter" if device.type == "cpu" else
                                               f"on {torch.cuda.get_device_name(device)}")}
    print(f"verifying {' and '.join(what[path] for path in paths)}, "
          f"{'at small shapes (--quick)' if quick else 'at the shapes of the paper'}")
    if device.type == "cpu":
        print("on a CPU --quick is implied" + ("" if "triton" in paths else
              "; TRITON_INTERPRET=1 verifies the Triton kernels too, in the interpreter"))


WIDTHS = -9, -30, -9, -9, 6, 9, 8, 7, -6


def show(line):
    print_row(WIDTHS, line.path, line.operation, line.shape, line.dtype, line.cases, f"{line.error:.2g}",
              f"{line.allowed:.2g}", line.differ, "pass" if line.passed else "FAIL  " + line.problem)


def main(arguments):
    parser = argparse.ArgumentParser(prog="bench.py verify", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 or auto")
    parser.add_argument("--quick", action="store_true", help="small shapes, few tokens")
    parser.add_argument("--only", default=",".join(NAMES), help="of %(default)s")
    parser.add_argument("--json", metavar="FILE", help="a file for the lines of the table")
    options = parser.parse_args(arguments)
    only = options.only.split(",")
    unknown = [name for name in only if name not in NAMES]
    if unknown:
        raise UserError(f"there is no {unknown[0]} for --only: the names are {', '.join(NAMES)}")
    device = pick_device(options.device)
    if options.json:
        check_writable(options.json)
    paths, quick = find_paths(device), options.quick or device.type == "cpu"
    began, folder = time.perf_counter(), toy_folder() if "train" in only else None
    say_what(paths, device, quick)
    print_row(WIDTHS, "path", "operation", "shape", "type", "cases", "error", "allowed", "differ", "result")
    lines = []
    for line in verify(paths, device, quick, only, folder, 0 if device.type == "cpu" else 4):
        show(line)
        lines.append(line)
    failed = sum(not line.passed for line in lines)
    seconds = time.perf_counter() - began
    print(f"{f'{failed} of {len(lines)} lines FAIL' if failed else f'all {len(lines)} lines pass'}, {seconds:.0f} s")
    if options.json:
        write_json(options.json, provenance() | {"device": str(device), "quick": quick, "seconds": seconds, "lines": [
            dataclasses.asdict(line) | {"passed": line.passed} for line in lines]}, indent=1)
    raise SystemExit(failed > 0)


def toy_folder():
    """The toy corpus, made as train.py does where it is missing."""
    folder = os.path.join("data", "toy")
    state = data.read_state(folder, must=False)
    if not (state and state["done"]):
        data.prepare_toy(folder)
    return folder


if __name__ == "__main__":
    run_script(main)
