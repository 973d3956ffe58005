"""How the page of view.py does with many features: a synthetic index, its build, and a real browser.

    python tests/view_scale.py [--layers 12] [--firings 10e6] [--keep DIR]

32,768 features a layer with two signs each, 1,024 of level 0 and their children; 16 + 32 active on a token, those of
level 0 by a law of Zipf; 50,257 tokens; labels and effects drawn at random. Prints the time, memory and size of the
build, and what Chromium takes to the first view and to others: the median and the worst. A view is there when it is in
the document and the next frame was drawn; pieces are read from the disk, or from the system's cache of it.
"""
import argparse
import os
import resource
import sys
import tempfile
import time
from types import SimpleNamespace

import numpy as np

sys.path[:0] = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))), os.path.dirname(os.path.abspath(__file__))]

from browser import Browser  # noqa: E402

from catalog import Family  # noqa: E402
from features import Index  # noqa: E402
from helpers import provenance, run_script, whole_number  # noqa: E402
from labels import Group  # noqa: E402
from page import Facts, write_all  # noqa: E402

M, LOW, ACTIVE, CHILDREN, CONTEXT, VOCABULARY = 32768, 1024, (16, 32), 256, 1024, 50257
DRAWN = """new Promise(resolve => { const look = () => document.getElementById("main")?.dataset.shown === location.hash
    ? requestAnimationFrame(() => setTimeout(() => resolve(performance.now()))) : setTimeout(look, 1); look(); })"""


def synthetic(layers, firings, rng):
    """An Index of at least as many firings, and the families of its layers. Of two draws of a feature for a token one
    counts, so that there are about a tenth fewer than draws."""
    tokens = -(-int(1.1 * firings / layers / sum(ACTIVE)) // CONTEXT) * CONTEXT
    counts, positions, coefs, families = [], [], [], {}
    for layer in range(layers):
        words = LOW + rng.permutation(M - LOW)[:CHILDREN]
        families[layer] = Family([0, LOW, M], {1: words})
        weights = 1 / np.arange(1, LOW + 1)
        parents = rng.permutation(LOW)[rng.choice(LOW, (tokens, ACTIVE[0]), p=weights / weights.sum())]
        steps = words[rng.integers(0, CHILDREN, (tokens, ACTIVE[1]))]
        children = parents[:, rng.integers(0, ACTIVE[0], ACTIVE[1])] ^ steps
        ids = np.concatenate([parents, children], 1) + M * rng.integers(0, 2, (tokens, sum(ACTIVE)))
        at = np.broadcast_to(np.arange(tokens)[:, None], ids.shape)
        pairs = np.unique(ids.astype(np.int64) * tokens + at)  # a feature is active once on a token
        counts.append(np.bincount(pairs // tokens, minlength=2 * M))
        positions.append((pairs % tokens).astype(np.uint32))
        coefs.append((2 + rng.gamma(2, 1, len(pairs))).astype(np.float16))
    arrays = {"offsets": np.r_[0, np.cumsum(np.concatenate(counts))], "positions": np.concatenate(positions),
              "coefs": np.concatenate(coefs), "tokens": np.array(tokens)}
    return Index(arrays, SimpleNamespace(m=M, layers=dict.fromkeys(range(layers)))), families


def describe(index, rng):
    """What a run would say of itself."""
    layers = index.layers
    rows = [{"code": 3.0, "h": 2.9, "zero": 5.0}] * (len(layers) + 1)
    names = [f"synthetic {number}" for number in range(100)]
    return {"name": "synthetic", "title": "a synthetic index", "checkpoint": "best.pt", "step": 0, "source": "own",
            "kind": "own", "command": "python tests/view_scale.py", "toy": False, "data": "nothing", "parameters": 0,
            "shape": {"layers": len(layers), "d": LOW, "bottleneck": "parity"},
            "m": M, "layers": layers, "tokens": index.tokens, "context": CONTEXT, "firings": len(index.positions),
            "end": VOCABULARY - 1, "effect_at": 5, "made": provenance(), "key": "synthetic", "labels": names,
            "vocabulary": [f" word{number:x}" for number in range(VOCABULARY)],
            "losses": {"loss": 3.0, "rows": rows, "explained": None, "what": "nothing was measured"},
            "ranking": {"tokens": index.tokens, "rows": []},
            "control": {layer: rng.random(len(names)).round(2).tolist() for layer in layers}}


def facts_of(index, families, rng):
    corpus = np.minimum(rng.zipf(1.2, index.tokens), VOCABULARY) - 1
    group = Group("synthetic", tuple(map(str, range(100))), rng.integers(-1, 100, index.tokens),
                  np.zeros(index.tokens, np.int64), np.zeros(1))

    def effects(layer, features):
        shape = (len(features), 8)
        return {"kl": rng.random(len(features), np.float32), "ups": rng.integers(0, VOCABULARY, shape),
                "up_values": rng.random(shape, np.float32), "downs": rng.integers(0, VOCABULARY, shape),
                "down_values": rng.random(shape, np.float32)}
    return Facts(index, corpus, CONTEXT, families, (group,), effects)


def size_of(path):
    folder = path.removesuffix(".html")
    files = [entry.stat().st_size for entry in os.scandir(folder)]
    return os.path.getsize(path) + sum(files), len(files), max(files)


def name_of(feature):
    layer, id = divmod(int(feature), 2 * M)
    return f"#{layer}:{id % M}{'+-'[id // M]}"


def measure(path, index, rng):
    """{view: milliseconds of every try}"""
    found, counts = {}, np.diff(index.offsets)
    some, commonest = rng.permutation(np.flatnonzero(counts)), (-counts).argsort()[:20]
    with Browser() as browser:
        def visit(what, hash):
            began = browser.run("performance.now()")
            browser.run(f"location.hash = {hash!r}")
            found.setdefault(what, []).append(browser.run(DRAWN) - began)

        def load(what, hash):
            browser.open("about:blank")
            browser.open(f"file://{path}{hash}")
            browser.wait("document.getElementById('main')?.dataset.shown")
            found.setdefault(f"{what}, the page opened there", []).append(browser.run(DRAWN))

        for feature in some[:10]:
            load("a feature", name_of(feature))
        for _ in range(10):
            load("the overview", "#overview")
        for feature in some[10:60]:
            visit("a feature, any that fires", name_of(feature))
        for feature in commonest:
            visit("a feature, one of the commonest", name_of(feature))
        for number in range(10):
            load("the table of a layer", "#features?layer=0&sort=rate")
            visit("the table of a layer, sorted anew", "#features?layer=0&sort=f1")
            visit("a search by token in a layer", f"#features?layer=0&q=word1{number}")
            visit("a search in the contexts of a layer", f"#features?layer=0&in=text&q=%2Fword1{number}.*word2%2F")
            visit("a text", f"#text/{number}")
        for _ in range(5):
            load("the table of all layers", "#features?layer=all&sort=rate")
            visit("the table of all layers, sorted anew", "#features?layer=all&sort=effect")
        assert not browser.problems, browser.problems
    return found


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=whole_number, default=12)
    parser.add_argument("--firings", type=whole_number, default=10_000_000)
    parser.add_argument("--keep", metavar="DIR", help="build it there, and leave it there")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as temporary:
        path = os.path.join(os.path.abspath(options.keep or temporary), "features.html")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        index, families = synthetic(options.layers, options.firings, rng)
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        write_all(path, describe(index, rng), facts_of(index, families, rng))
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        size, files, largest = size_of(path)
        print(f"{options.layers} layers of {M:,} features, of which with their signs "
              f"{np.count_nonzero(np.diff(index.offsets)):,} fire, {len(index.positions):,} times on {index.tokens:,} "
              f"tokens\nbuilt in {time.monotonic() - began:.0f} s: {size / 1e6:,.0f} MB in {files:,} pieces, the "
              f"largest {largest / 1e6:.1f} MB; memory {after / 1e3:,.0f} MB at most, {before / 1e3:,.0f} MB before")
        for what, times in measure(path, index, rng).items():
            print(f"{what:<50}{np.median(times):>8,.0f} ms{max(times):>8,.0f} ms, {len(times)} tries")


if __name__ == "__main__":
    run_script(main)
