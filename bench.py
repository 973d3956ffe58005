"""How fast the bottleneck is, as a ratio to the dense transformer block around it.

    python bench.py dpb [--d 1024] [--levels 2] [--tokens 1024] [--repeats 7]

All variants run in turn, again and again, in one process, so that a busy machine slows them alike; the medians are
compared. The block is one layer of a GPT-2-style model of width d: attention with heads of 128 and an MLP of 4d.
"""
import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

import kernels
from dpb import DeepParityBottleneck


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
    """Median seconds of each function, all of them run in turn `repeats` times after a warm-up."""
    times = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: (statistics.median(t), min(t), max(t)) for name, t in times.items()}


def bench_dpb(d, levels, tokens, repeats):
    t = d.bit_length() - 1
    shape = dict(bits=(t, 15, 17)[:levels], active=(16, 32, 64)[:levels], children=(256, 256)[: levels - 1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    block = DenseBlock(d).to(device, dtype)
    x, grad = torch.randn(2, 1, tokens, d, device=device, dtype=dtype)

    def there_and_back(module):
        def run():
            v = x.clone().requires_grad_()
            module(v).backward(grad)
        return run

    ways = {method: DeepParityBottleneck(d, **shape, method=method).to(device) for method in ("auto", "gemm", "transform")}
    layer, flat = ways["auto"], x[0]
    with torch.no_grad():
        code = layer.encode(x)
        indices, coefs = code.indices[0], code.coefs[0]
    runs = {"dense block, forward + backward": there_and_back(block)}
    runs |= {f"bottleneck ({name}), forward + backward": there_and_back(way) for name, way in ways.items()}
    parents = indices[:, : layer.active[0]].contiguous()
    for level in range(1, levels):
        arguments = (flat, parents, *layer.level(level))
        for method in "gemm", "transform":
            runs[f"  score level {level} by {method}"] = lambda a=arguments, m=method: kernels.score_children(*a, m)
        z = kernels.score_children(*arguments)
        runs[f"  select level {level}"] = lambda z=z, a=arguments, k=layer.active[level]: kernels.select_distinct(z, *a[1:3], k)
        start = sum(layer.active[:level])
        parents = indices[:, start : start + layer.active[level]].contiguous()
    runs["  decode (also the backward of the scores)"] = lambda: kernels.parity_decode(indices, coefs, d, layer.m)
    runs["  dot (the backward of decode)"] = lambda: kernels.parity_dot(indices, flat, layer.m)

    chosen = [kernels.scoring_method(device, d, layer.active[n - 1], layer.fan_out[n - 1], layer.lows[n + 1] - layer.lows[n])
              for n in range(1, levels)]
    print(f"d={d}, levels {shape['bits']} / {shape['active']} / {shape['children']}, {tokens} tokens, {device}, "
          f"{torch.get_num_threads()} threads, {str(dtype)[6:]}; auto is {', '.join(chosen)}")
    print(f"{'':44} {'median ms':>10} {'least':>8} {'most':>8} {'of dense':>9}")
    results = interleaved(runs, repeats)
    dense = results["dense block, forward + backward"][0]
    for name, (median, least, most) in results.items():
        print(f"{name:44} {median * 1e3:10.1f} {least * 1e3:8.1f} {most * 1e3:8.1f} {median / dense:9.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["dpb"])
    parser.add_argument("--d", type=int, default=1024, help="width, a power of two from 128 to 8192")
    parser.add_argument("--levels", type=int, default=2, choices=[2, 3])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    try:
        bench_dpb(options.d, options.levels, options.tokens, options.repeats)
    except ValueError as error:
        raise SystemExit(f"bench.py: {error}")


if __name__ == "__main__":
    main()
