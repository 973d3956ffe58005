"""What an inverted index costs to make and to ask, on a synthetic corpus, beside a scan of dense vectors: postings.py.

    python bench.py index --documents 1e6                        bytes, build rate, peak memory, latency; dense scans
    python bench.py index --documents 1.6e6 --top 256 --budget 4e6 --no-scan       larger than what memory may hold

A document has `top` features drawn at rates that fall as 1 / (rank + 100), so some lists are long and most are short.
The dense vectors, of `width` numbers in float32, are scanned by numpy, and by faiss where it is installed.
"""
import argparse
import os
import shutil
import time

import numpy as np

from helpers import progress, say, whole_number, within
from postings import Builder, largest, open_postings

PART = 2 ** 14  # documents drawn at a time


def synthetic(features, documents, top, rng):
    """(counts, features, values) of documents with `top` draws each, the same feature once."""
    edges = np.cumsum(1 / (np.arange(features) + 100.0))
    drawn = np.searchsorted(edges, rng.random((documents, top)) * edges[-1]).astype(np.uint32)
    drawn.sort(axis=1)
    new = np.diff(drawn.astype(np.int64), axis=1, prepend=-1) > 0
    return new.sum(1), drawn[new], (1 + rng.random(int(new.sum()))).astype(np.float16)


def build(path, options, rng):
    """The seconds it took, without those of drawing, and the builder."""
    documents, drawing, began = options.documents, 0.0, time.time()
    shutil.rmtree(f"{path}.parts", ignore_errors=True)  # a measurement does not go on from half of another
    with Builder(path, 2 * options.features, {"synthetic": options.top}, options.budget) as builder:
        for first in range(0, documents, PART):
            at = time.time()
            numbers = np.arange(first, min(first + PART, documents))
            part = synthetic(2 * options.features, len(numbers), options.top, rng)
            drawing += time.time() - at
            builder.add(*part, numbers, numbers, int(numbers[-1]) + 1)
            progress(f"{first:,} of {documents:,} documents")
        progress("merging")
        builder.finish()
    progress("")
    return time.time() - began - drawing, builder


def clocked(ask, times):
    """Milliseconds of each call but the first, which warms up, and of that one."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        ask()
        taken.append(1000 * (time.perf_counter() - began))
    first, *rest = taken
    middle, worst = np.quantile(rest, [0.5, 0.99])
    return f"p50 {middle:.1f} ms, p99 {worst:.1f} ms (n = {times}; the first {first:.1f} ms)"


def scans(options, rng):
    """Scans of as many dense vectors."""
    table = np.empty((options.documents, options.width), np.float32)
    for first in range(0, options.documents, PART):
        part = rng.standard_normal((min(PART, options.documents - first), options.width), np.float32)
        table[first : first + len(part)] = part / np.linalg.norm(part, axis=1, keepdims=True)

    def asked():
        return table[rng.integers(len(table))]
    times = options.queries // 10 + 1
    say(f"dense scan, numpy: {clocked(lambda: largest(table @ asked(), 10), times)}; {table.nbytes:,} bytes, "
        f"{4 * options.width:,} a document")
    try:
        import faiss
    except ImportError:
        return say("dense scan, faiss: not installed")
    flat = faiss.IndexFlatIP(options.width)
    flat.add(table)
    say(f"dense scan, faiss {faiss.__version__}, flat: {clocked(lambda: flat.search(asked()[None], 10), times)}")


def peak_memory():
    """Bytes, of this process so far."""
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(arguments):
    options = parse(arguments)
    rng = np.random.default_rng(0)
    os.makedirs(os.path.dirname(os.path.abspath(options.out)), exist_ok=True)
    say(f"{options.documents:,} documents of {options.top} draws from {2 * options.features:,} features; at most "
        f"{options.budget:,} entries held in memory; before, this process had {peak_memory() / 2 ** 20:,.0f} MiB")
    seconds, builder = build(options.out, options, rng)
    size = os.path.getsize(options.out)
    say(f"build: {builder.count:,} postings in {len(builder.pieces)} pieces, {seconds:.1f} s, "
        f"{options.documents / seconds:,.0f} documents and {builder.count / seconds:,.0f} postings a second; peak "
        f"memory {peak_memory() / 2 ** 20:,.0f} MiB; {size:,} bytes, {size / options.documents:.0f} a document")
    began = time.perf_counter()
    index = open_postings(options.out)
    say(f"opened, all tables checked, in {1000 * (time.perf_counter() - began):.0f} ms")
    touched = []

    queries = [synthetic(2 * options.features, 1, options.top, rng)[1:] for _ in range(options.queries + 1)]

    def ask():
        features, values = queries[len(touched)]
        touched.append(index.search(features, values.astype(np.float64), 10)[-1])
    say(f"query, the best 10: {clocked(ask, options.queries)}; {np.mean(touched):,.0f} postings touched of "
        f"{builder.count:,}")
    os.remove(options.out)
    if not options.no_scan:
        scans(options, rng)


def parse(arguments):
    parser = argparse.ArgumentParser(prog="bench.py index", description=__doc__.partition("\n")[0])
    parser.add_argument("--documents", type=whole_number, default=10 ** 6, help="(1e6)")
    parser.add_argument("--features", type=whole_number, default=2 ** 15, help="of a layer, before unfolding (32,768)")
    parser.add_argument("--top", type=whole_number, default=64, help="features of a document (64)")
    parser.add_argument("--width", type=whole_number, default=1024, help="of the dense vectors to compare with (1024)")
    parser.add_argument("--budget", type=whole_number, default=2 ** 24, help="entries held in memory (2^24)")
    parser.add_argument("--queries", type=within(int, 1), default=200, help="(200; a tenth of them for scans)")
    parser.add_argument("--no-scan", action="store_true", help="without the dense scans, which need memory")
    parser.add_argument("--out", metavar="FILE", default=os.path.join("out", "bench.postings"),
                        help="the index, deleted when measured (out/bench.postings)")
    return parser.parse_args(arguments)
