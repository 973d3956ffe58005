"""How fast training is, as a ratio to the dense model of the same shape, and where the bottleneck's time goes.

    python bench.py                     training passes of dense, parity and learned TopK models: the paper's table
    python bench.py dpb                 the bottleneck's parts, beside what they cannot avoid
    python bench.py scale               its cost as m, K, D and d grow
    python bench.py generate            tokens per second of generation
    python bench.py predict             the cost on GPUs that are not here, predicted from machine code (predict.py)
    python bench.py verify              every kernel against its reference on this machine: pass or FAIL (verify.py)
    python bench.py index               an inverted index of a million documents beside dense scans (index_bench.py)

All that is compared runs in turn, again and again, and the least times are compared: other processes only ever add to
a time. Beside a ratio stands how far the choice of passes moves it, and a line says when other processes took much of
the machine.

The table: each variant lives in a process of its own, which runs one pass when told to, so that peak memory is its own
and one that does not fit dies alone. A pass is forward and backward of one micro-batch. The optimiser runs once in
batch_tokens of a config, 512 such passes on a CPU, and is left out; --optimiser times it and adds its share. The tiny
models, whose batch is one pass, always have it.
"""
import argparse
import contextlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import config as configs
import index_bench
import ops
import predict
import verify
from dpb import DeepParityBottleneck, update_moments
from helpers import check_writable, progress, provenance, run_script, within, write_json
from kloosterman import log2_width
from model import GPT, parts
from optim import MuonAdam, split_parameters

# variants of a row, and the paper's overhead on 4 H200
ROWS = {"small_2l": {"parity": 1.47, "flat": None, "topk": 4.62},
        "small_3l": {"parity": 2.06, "flat": None, "topk": 16.4},
        "large_2l": {"parity": 1.22, "topk": 3.15}, "large_3l": {"parity": 1.55, "topk": None},
        "tiny": {"parity": None, "flat": None, "topk": None}}
SETTINGS = {"dense": {"bottleneck": "none"}, "parity": {}, "flat": {"selection": "flat"},
            "topk": {"bottleneck": "topk"}}
HERE = os.path.dirname(os.path.abspath(__file__))
GIB = 2 ** 30
BUSY = 0.15  # cores that others take, from which on it is worth a word; a quiet machine shows 0.02


# What is compared


def overhead(dense, other):
    """(estimate, low, high) of the time of `other` against `dense`, seconds of passes that ran in turn.

    The estimate is the ratio of the least times. Between low and high lies 95% of what it would be had the turns been
    drawn anew from those that ran (a bootstrap): it knows the noise within a run, not that from one run to the next.
    """
    turns = list(zip(dense, other))  # one that lost patience has fewer: the same turns for both

    def ratio(turns):
        return min(o for _, o in turns) / min(d for d, _ in turns)
    draw = random.Random(0)  # the same passes, the same interval
    drawn = sorted(ratio(draw.choices(turns, k=len(turns))) for _ in range(1000))
    return ratio(turns), drawn[25], drawn[-26]


def interval(low, high):
    return f"{low:.3f}-{high:.3f}"


def taken(processes=()):
    """(seconds by the clock, CPU seconds of all but this process and `processes`) so far; what the host of a virtual
    machine gave to others counts too. None where /proc does not say."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
        ours = 0
        for process in ("self", *(process.pid for process in processes)):
            with open(f"/proc/{process}/stat") as file:
                ours += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))  # user and system time
        return time.perf_counter(), (user + nice + system + irq + softirq + steal - ours) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def busy(before, after):
    """Cores that others kept busy between two answers of taken(); None where it does not say."""
    if before is None or after is None or after[0] <= before[0]:
        return None
    return max(0.0, (after[1] - before[1]) / (after[0] - before[0]))


def busy_line(others):
    """What to print of busy()'s answer: nothing if the machine was quiet."""
    if others is None or others < BUSY:
        return ""
    return (f"the machine was busy: other processes took {others:.1f} of {os.cpu_count()} cores during these passes; "
            "ratios are of least times")


# The table


def settings(row, variant, layers):
    config = configs.load([os.path.join(HERE, "configs", f"{row}.py")])
    plain = {"variance_weight": 0.0, "reconstruction_weight": 0.0}  # a pass is that of the language model's loss
    for key, value in (plain | SETTINGS[variant] | ({"layers": layers} if layers else {})).items():
        setattr(config, key, value)
    return configs.check(config)


def work(row, variant, layers, batch, optimiser):
    """A worker: builds the model, then runs a pass for every line it reads and answers with its seconds."""
    config, device = settings(row, variant, layers), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    base = memory(device)
    model = GPT(config).to(device)
    run = torch.compile(model) if device == "cuda" else model
    rule = MuonAdam(*split_parameters(model), config.muon_lr, config.adam_lr) if optimiser else None
    tokens = torch.randint(0, min(config.vocab_size, 50257), (batch, config.context + 1), device=device)

    def one_pass(tokens):
        with torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext():
            model.total_loss(run(tokens[:, :-1], tokens[:, 1:])).backward()
        if device == "cuda":
            torch.cuda.synchronize()

    def timed(function, *arguments):
        start = time.perf_counter()
        function(*arguments)
        return time.perf_counter() - start

    one_pass(tokens if device == "cuda" else tokens[:, : config.context // 8])  # tables, kernels
    update_moments(model)
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds = timed(one_pass, tokens)
        if optimiser:
            share = batch * config.context / config.batch_tokens
            seconds += share * (timed(rule.step) + timed(update_moments, model))
            if device == "cuda":
                torch.cuda.synchronize()
        model.zero_grad()
        print(json.dumps({"seconds": seconds, "memory": memory(device) - base}), flush=True)


def memory(device):
    """Peak bytes so far."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def room():
    """Bytes that can still be had: of the GPU, or of the machine's memory."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    try:
        with open("/proc/meminfo") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def start(row, variant, options):
    """A worker that is ready, or the reason why there is none."""
    config = settings(row, variant, options.layers_of(row))
    with torch.device("meta"):
        weights = GPT(config).count_parameters()
    optimiser = options.optimiser or row == "tiny"
    tokens = options.batch * config.context
    logits = parts(tokens, config.vocab_size)[0].stop * config.vocab_size  # that a loss holds at once
    need = weights * 4 * (4 if optimiser else 2) + 3 * (logits * 4 + tokens * 40 * config.d * config.layers)
    if need > room():
        return f"does not fit: needs about {need / GIB:.0f} GiB, {room() / GIB:.0f} are free"
    arguments = [row, variant, options.layers_of(row), 8 if row == "tiny" else options.batch, optimiser]
    worker = subprocess.Popen([sys.executable, os.path.join(HERE, "bench.py"), "worker", json.dumps(arguments)],
                              text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    if worker.stdout.readline() == "ready\n":
        return worker
    return "does not fit: its process was killed" if worker.wait() else "failed"


def ask(worker):
    """One pass of a worker."""
    with contextlib.suppress(BrokenPipeError, ValueError):
        worker.stdin.write("go\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())
    return None


def measure(row, options):
    """({variant: result or reason}, what others took) of one row, all variants in turn."""
    variants = [name for name in ("dense", *ROWS[row]) if name in options.variants]
    workers = {}
    for variant in variants:
        progress(f"{row}: starting {variant}")
        workers[variant] = start(row, variant, options)
    results = {variant: worker if isinstance(worker, str) else [] for variant, worker in workers.items()}
    turns = options.repeats * (10 if row == "tiny" else 1)
    running = [worker for worker in workers.values() if not isinstance(worker, str)]
    before = taken(running)
    for turn in range(turns):
        for variant, worker in workers.items():
            passes = results[variant]
            if isinstance(passes, str) or sum(pass_["seconds"] for pass_ in passes) > options.patience:
                continue
            progress(f"{row}: {variant}, pass {turn + 1} of {turns}")
            answer = ask(worker)
            results[variant] = "does not fit: its process was killed" if answer is None else passes + [answer]
    others = busy(before, taken(running))
    for worker in running:
        worker.stdin.close()
        worker.wait()
    return results, others


def table(options):
    device = f"cpu, {torch.get_num_threads()} threads, float32"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    print(f"{device}; {options.batch} x 1024 tokens a pass (tiny: 8 x 128); "
          "overhead: least time against dense's, in the same run")
    print(f"{'row':10} {'variant':8} {'layers':>6} {'tokens/s':>9} {'least s':>8} {'median':>7} "
          f"{'overhead':>9} {'95% of draws':>13} {'paper':>6} {'peak GiB':>9} {'of dense':>9}")
    rows = []
    for row in options.rows:
        results, others = measure(row, options)
        progress("")
        dense = results.get("dense")
        for variant, passes in results.items():
            config = settings(row, variant, options.layers_of(row))
            paper = ROWS[row].get(variant)
            paper = f"{paper:.2f}x" if paper else ""
            if isinstance(passes, str):
                print(f"{row:10} {variant:8} {config.layers:6} {passes}{f' (paper: {paper})' if paper else ''}")
                rows.append({"row": row, "variant": variant, "layers": config.layers, "problem": passes})
                continue
            seconds = [pass_["seconds"] for pass_ in passes]
            least, peak = min(seconds), passes[-1]["memory"]
            tokens = (8 if row == "tiny" else options.batch) * config.context
            compared, ratio, between, share = isinstance(dense, list), None, None, None
            if compared:
                ratio, *between = overhead([pass_["seconds"] for pass_ in dense], seconds)
                share = peak / dense[-1]["memory"]
            print(f"{row:10} {variant:8} {config.layers:6} {tokens / least:9,.0f} {least:8.3f} "
                  f"{statistics.median(seconds):7.3f} {f'{ratio:8.3f}x' if compared else '':>9} "
                  f"{interval(*between) if compared and variant != 'dense' else '':>13} {paper:>6} "
                  f"{peak / GIB:9.2f} {f'{share:8.3f}x' if compared else '':>9}")
            rows.append({"row": row, "variant": variant, "layers": config.layers, "tokens_per_second": tokens / least,
                         "ratio": ratio, "ratio_between": between, "peak_memory": peak, "seconds": seconds,
                         "cores_taken_by_others": others})
            whole = settings(row, variant, None)
            if compared and variant != "dense" and whole.layers > config.layers:  # its head is shared by fewer layers
                full = 1 + (ratio - 1) * predict.dense_flops(config) / predict.dense_flops(whole)
                rows[-1]["ratio_full_depth"] = full
                print(f"{'':20} with all {whole.layers} layers, by operation counts: {full:.3f}x")
        if busy_line(others):
            print(busy_line(others))
    if options.json:
        write_json(options.json, provenance() | {"device": device, "rows": rows}, indent=2)


# One layer and its parts


class DenseBlock(nn.Module):
    """What a bottleneck is added to: the work it is measured against."""

    def __init__(self, d):
        super().__init__()
        self.heads = max(1, d // 128)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)

    def forward(self, x):  # (B, T, d)
        B, T, d = x.shape
        q, k, v = self.qkv(F.rms_norm(x, (d,))).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, T, d))
        return x + self.down(F.gelu(self.up(F.rms_norm(x, (d,)))))


def interleaved(runs, repeats):
    """Seconds of each function, all run in turn `repeats` times after a warm-up. Says if the machine was busy."""
    times, before = {name: [] for name in runs}, taken()
    for turn in range(repeats + 1):
        for name, run in runs.items():
            progress(f"turn {turn} of {repeats}: {name}")
            begin = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - begin)
    progress("")
    if line := busy_line(busy(before, taken())):
        print(line)
    return times


def there_and_back(module, x):
    grad = torch.randn_like(x)

    def run():
        v = x.clone().requires_grad_()
        module(v).backward(grad)
    return run


def bench_dpb(d, levels, tokens, repeats):
    t = log2_width(d)
    bits = (t, min(15, 2 * t)) if levels == 2 else (t, min(15, 2 * t - 1), min(17, 2 * t))
    shape = dict(bits=bits, active=(16, 32, 64)[:levels], children=(256, 256)[: levels - 1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    block = DenseBlock(d).to(device, dtype)
    x = torch.randn(1, tokens, d, device=device, dtype=dtype)
    ways = {method: DeepParityBottleneck(d, **shape, method=method).to(device)
            for method in ("auto", "gemm", "transform")}
    ways["flat"] = DeepParityBottleneck(d, **shape, selection="flat").to(device)
    layer, flat = ways["auto"], x[0]
    with torch.no_grad():
        code = layer.encode(x)
        indices, coefs = code.indices[0], code.coefs[0]
    # name: (run, operations, bytes): multiply-adds or additions, and bytes of memory, that the part cannot do without
    size, K, row = dtype.itemsize, sum(layer.active), tokens * d
    runs = {"dense block, forward + backward": (there_and_back(block, x), 36 * d * row + 6 * tokens * row // 2, 0)}
    runs |= {f"bottleneck ({name}), forward + backward": (there_and_back(way, x), 0, 0) for name, way in ways.items()}
    runs["  copy of the input"] = (lambda: flat.clone(), 0, 2 * row * size)
    mean, rstd = layer.mean[:d], layer.var[:d].rsqrt()
    runs["  select level 0"] = (lambda: ops.search_basis(flat, mean, rstd, layer.active[0]), 0, row * size)
    parents = indices[:, : layer.active[0]].contiguous()
    for level in range(1, levels):
        arguments = (flat, parents, *layer.level(level))
        features, C = layer.lows[level + 1] - layer.lows[level], parents.shape[1] * 256
        for method, operations in ("gemm", C * row), ("transform", features * t * tokens):
            runs[f"  score level {level} by {method}"] = (
                lambda a=arguments, m=method: ops.score_children(*a, m), operations, row * size + 4 * tokens * C)
        z = ops.score_children(*arguments)
        runs[f"  select level {level}"] = (
            lambda z=z, a=arguments, k=layer.active[level]: ops.select_distinct(z, *a[1:3], k), 0, 4 * tokens * C)
        begin = sum(layer.active[:level])
        parents = indices[:, begin : begin + layer.active[level]].contiguous()
    hashed = (K - layer.active[0]) * row
    runs["  decode (also the backward of the scores)"] = (
        lambda: ops.parity_decode(indices, coefs, d, layer.m), hashed, row * 4)
    runs["  decode to the norm of the input"] = (
        lambda: ops.parity_decode(indices, coefs, d, layer.m, flat), hashed, row * (4 + size))
    runs["  dot (the backward of decode)"] = (lambda: ops.parity_dot(indices, flat, layer.m), hashed, row * size)

    chosen = [ops.scoring_method(device, d, layer.active[n - 1], layer.fan_out[n - 1],
                                     layer.lows[n + 1] - layer.lows[n]) for n in range(1, levels)]
    print(f"d={d}, levels {shape['bits']} / {shape['active']} / {shape['children']}, {tokens} tokens, {device}, "
          f"{torch.get_num_threads()} threads, {str(dtype)[6:]}; auto is {', '.join(chosen)}")
    results = interleaved({name: run for name, (run, _, _) in runs.items()}, repeats)
    print(f"{'':44} {'least ms':>9} {'median':>8} {'of dense':>9} {'95% of draws':>13} {'Gop/s':>7} {'GB/s':>6}")
    dense = results["dense block, forward + backward"]
    for name, seconds in results.items():
        _, operations, moved = runs[name]
        least, (ratio, *between) = min(seconds), overhead(dense, seconds)
        print(f"{name:44} {least * 1e3:9.1f} {statistics.median(seconds) * 1e3:8.1f} {ratio:9.3f} "
              f"{interval(*between) if seconds is not dense else '':>13} "
              f"{f'{operations / least / 1e9:7.1f}' if operations else '':>7} "
              f"{f'{moved / least / 1e9:6.1f}' if moved else '':>6}")
    print("Gop/s: multiply-adds (of a transform and a decode, additions) that the part cannot do without, by its time; "
          "GB/s: bytes likewise")


def bench_scale(tokens, repeats):
    """One layer, forward and backward, as one thing grows and the others stay."""
    base = dict(d=1024, n=15, K=(16, 32), D=256)
    sweeps = {"m": [dict(n=n) for n in (12, 14, 16, 18, 20)], "K": [dict(K=(k, 2 * k)) for k in (4, 8, 16, 32)],
              "D": [dict(D=D) for D in (64, 128, 256, 512)], "d": [dict(d=d) for d in (256, 512, 1024, 2048)]}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"d=1024, m=2^15, K=16+32, D=256 but for what is named; {tokens} tokens, forward + backward, {device}; "
          "least ms, of the first, 95% of draws")
    print(f"{'':16} {'gemm':>29} {'transform':>29}")
    for swept, values in sweeps.items():
        runs = {}
        for change in values:
            shape = base | change
            d, n = shape["d"], min(shape["n"], 2 * (shape["d"].bit_length() - 1))
            for method in "gemm", "transform":
                if method == "transform" and n > 16:
                    continue  # all 2^n features at once: its cost is their number
                D = 1024 if swept == "m" else max(shape["D"], 2 ** max(0, n - 10))
                layer = DeepParityBottleneck(d, (d.bit_length() - 1, n), shape["K"], (D,), method=method)
                x = torch.randn(tokens, d, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
                name = {"m": f"m = 2^{n}, D=1024", "K": f"K = {shape['K'][0]}+{shape['K'][1]}",
                        "D": f"D = {shape['D']}", "d": f"d = {d}"}[swept]
                runs[name, method] = there_and_back(layer.to(device), x)
        results = interleaved(runs, repeats)
        for name in dict.fromkeys(name for name, _ in runs):
            cells = []
            for method in "gemm", "transform":
                if (name, method) in results:
                    seconds, first = results[name, method], next(t for key, t in results.items() if key[1] == method)
                    ratio, *between = overhead(first, seconds)
                    cells.append(f"{min(seconds) * 1e3:8.1f} {ratio:6.2f}x "
                                 f"{interval(*between) if seconds is not first else '':>12}")
                else:
                    cells.append("")
            print(f"{name:16} {cells[0]:>29} {cells[1]:>29}")


def bench_generate(options):
    """Tokens per second of generation with the KV cache, dense and parity in turn."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{'row':10} {'batch':>5} {'dense tokens/s':>15} {'parity tokens/s':>16} {'overhead':>9} "
          f"{'95% of draws':>13}    {options.tokens} tokens after a prompt of 16; {device}")
    for row in options.rows:
        models = {variant: GPT(settings(row, variant, options.layers_of(row))).to(device).eval()
                  for variant in ("dense", "parity")}
        for batch in (1, 16, 256) if row == "tiny" else (1, 16):
            prompt = torch.randint(0, 1500, (batch, 16), device=device)
            runs = {name: lambda m=m, p=prompt: list(m.generate(p, options.tokens, temperature=0))
                    for name, m in models.items()}
            results = interleaved(runs, options.repeats)
            dense, parity = (batch * options.tokens / min(results[name]) for name in ("dense", "parity"))
            ratio, *between = overhead(results["dense"], results["parity"])
            print(f"{row:10} {batch:5} {dense:15,.1f} {parity:16,.1f} {ratio:8.3f}x {interval(*between):>13}")


def parse(arguments):
    count = within(int, 1, 10 ** 9)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="table",
                        choices=["table", "dpb", "scale", "generate", "predict", "verify"])
    parser.add_argument("--rows", help="of the table and of generate, as in small_2l,tiny")
    parser.add_argument("--variants", default="dense,parity,flat,topk")
    parser.add_argument("--layers", type=count,
                        help="of the paper's models; by default all, but on a CPU 4 of large_2l and 2 of large_3l")
    parser.add_argument("--batch", type=count, help="sequences a pass; 1 on a CPU, 16 on a GPU",
                        default=16 if torch.cuda.is_available() else 1)
    parser.add_argument("--optimiser", action="store_true",
                        help="add the optimiser's share to a pass of the paper's models")
    parser.add_argument("--patience", type=within(float, 0), default=60,
                        help="seconds after which a variant gets no further pass")
    parser.add_argument("--json", metavar="FILE", help="a file for the results")
    parser.add_argument("--repeats", type=count, help="3 for the table, 7 else")
    parser.add_argument("--d", type=within(int, 128, 8192), default=1024, help="of dpb: width, a power of two")
    parser.add_argument("--levels", type=int, default=2, choices=[2, 3], help="of dpb")
    parser.add_argument("--tokens", type=count, help="1024 for dpb, 256 for scale, 32 for generate")
    options = parser.parse_args(arguments)
    default = {"generate": "tiny,small_2l"}.get(options.what, ",".join(ROWS))
    options.rows = (options.rows or default).split(",")
    options.variants = options.variants.split(",")
    unknown = [name for name in options.rows if name not in ROWS]
    unknown += [name for name in options.variants if name not in SETTINGS]
    if unknown:
        parser.error(f"there is no {unknown[0]}: rows are {', '.join(ROWS)}, variants {', '.join(SETTINGS)}")
    if options.json:
        check_writable(options.json)

    def layers_of(row):
        on_cpu = {} if torch.cuda.is_available() else {"large_2l": 4, "large_3l": 2}
        return None if row == "tiny" else options.layers or on_cpu.get(row)
    options.layers_of = layers_of
    options.repeats = options.repeats or (3 if options.what == "table" else 7)
    options.tokens = options.tokens or {"scale": 256, "generate": 32}.get(options.what, 1024)
    return options


def main(arguments):
    if arguments[:1] == ["worker"]:
        return work(*json.loads(arguments[1]))
    if arguments[:1] == ["predict"]:
        return predict.main(arguments[1:])
    if arguments[:1] == ["verify"]:
        return verify.main(arguments[1:])
    if arguments[:1] == ["index"]:
        return index_bench.main(arguments[1:])
    options = parse(arguments)
    {"table": lambda: table(options), "generate": lambda: bench_generate(options),
     "scale": lambda: bench_scale(options.tokens, options.repeats),
     "dpb": lambda: bench_dpb(options.d, options.levels, options.tokens, options.repeats)}[options.what]()


if __name__ == "__main__":
    run_script(main, told=ValueError)
