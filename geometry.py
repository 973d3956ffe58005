"""How much of absorption is geometry? Random weights of growing width, with a truth that is put in.

    python probe.py geometry                      d = 32 to 1024; out/geometry.json, out/geometry.png

An absorber is a feature whose cosine with a class's probe is at least 0.1 (measures.py). Of directions at random the
share that passes is that of a normal tail, Q(0.1 sqrt d): 29% at d = 32, 0.07% at d = 1024. So at the width of a large
model hardly any feature of a fixed dictionary may absorb, whatever it means, and at that of a small one very many may.

Here nothing is trained. A model of width d has random weights; 480 words have random embeddings, to which the direction
of one of 8 classes is added, with 0.35 or 0.5 of an embedding's length, so that a probe knows the classes. Features are
those of the hash control: an untrained parity bottleneck, 32 d features of which 24 are active, moments fitted on these
activations. No feature stands for a class by learning: what absorption is found is what the definition makes of a
random dictionary, with the cosine at least 0.1, as SAEBench has it, and with 3.2 / sqrt(d), which is 0.1 at d = 1024
and always lets 0.07% pass.
"""
import argparse
import itertools
import math
import os

import numpy as np
import torch

import probing
from config import Config
from helpers import UserError, check_writable, provenance, say, write_json
from measures import COSINE
from model import GPT
from probe_tasks import Text, Words
from sources import Rotated, Source
from truth import DRAWS

WIDTHS = (32, 64, 128, 256, 512, 1024)
WORDS, CLASSES, TEXTS = 480, 8, 2
STRENGTHS = (0.35, 0.5)  # of a class's direction, in lengths of an embedding
ACTIVE = (8, 16)


def random_world(d, strength, seed):
    """(the activations of words as Read, Words): a model of random weights with classes put into its embedding."""
    rng = np.random.default_rng([seed, d])
    config = Config(layers=1, d=d, heads=max(1, d // 32), context=16, vocab_size=1024, bottleneck="none", seed=seed)
    model = GPT(config).eval()
    label = rng.permutation(np.arange(WORDS) % CLASSES)
    with torch.no_grad():
        weight = model.embedding.weight
        direction = torch.from_numpy(rng.standard_normal((CLASSES, d))).float()
        direction *= strength * weight.norm(dim=1).mean() / direction.norm(dim=1, keepdim=True)
        weight[:WORDS] += direction[label]
    texts = [Text((*rng.integers(WORDS, 1024, 7).tolist(), word), 7) for word in range(WORDS) for _ in range(TEXTS)]
    numbers = np.repeat(np.arange(WORDS), TEXTS)
    words = Words("class", tuple(map(str, range(CLASSES))), np.arange(len(texts)), numbers, label[numbers])
    run = argparse.Namespace(model=model, config=config)
    return probing.read_texts(run, texts, "mlp_in", [0]), words


def hash_of(read, d, seed):
    t = int(math.log2(d))
    part = Rotated(d, (t, t + 5), ACTIVE, (min(64, 2 ** t),), seed=2 ** 61 + seed).fit(read.tokens[0])
    return Source("hash", "hash-mlp_in", "", "mlp_in", 2 ** (t + 5), {0: part})


def measure(d, strength, seed):
    """One world: {figure: (value, draws)}."""
    read, words = random_world(d, strength, seed)
    source = hash_of(read, d, seed)
    folds = list(probing.fold_words(read.means[0], words, folds=2))
    X = probing.mean_features(source, 0, read)
    dots, norms = probing.decoder_dots(source, 0, folds[0].units.T)
    found = dict(probing.measure_absorption(X, source, 0, folds))
    plain, scaled = found["absorption class"], found["absorption class scaled"]
    return {"probe F1": plain.detail["probe F1"], "pass": float((dots / norms[:, None] >= COSINE).mean()),
            "main features": plain.detail.get("main features"), "plain": plain, "scaled": scaled}


def row_of(d, strength, seeds):
    """The mean over worlds, with intervals of 95% of draws over words."""
    worlds = [measure(d, strength, seed) for seed in range(seeds)]
    row = {"d": d, "strength": strength, "words": WORDS, "worlds": seeds,
           "normal tail": 0.5 * math.erfc(COSINE * math.sqrt(d / 2))}
    for name in ("probe F1", "pass"):
        row[name] = float(np.mean([world[name] for world in worlds]))
    for name in ("plain", "scaled"):
        known = [world[name] for world in worlds if world[name].value is not None]
        if not known:
            row[name] = None
            continue
        drawn = np.mean([found.draws for found in known], axis=0)
        row[name] = [float(np.mean([found.value for found in known])), *map(float, np.quantile(drawn, [0.025, 0.975]))]
    return row


def print_row(row):
    cells = ["-" if row[name] is None else f"{row[name][0]:.3f} +-{(row[name][2] - row[name][1]) / 2:.3f}"
             for name in ("plain", "scaled")]
    say(f"{row['d']:>6}{row['strength']:>10.2f}{row['probe F1']:>10.2f}{row['pass']:>12.4f}{row['normal tail']:>11.4f}"
        + "".join(f"{text:>18}" for text in cells))


def draw(rows, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
    for (name, label, color), (strength, line) in itertools.product(
            (("plain", "absorption, cosine at least 0.1", "C0"),
             ("scaled", "absorption, cosine at least 3.2 / sqrt(d)", "C1")), zip(STRENGTHS, ("-", "--"))):
        known = [row for row in rows if row[name] and row["strength"] == strength]
        if not known:
            continue
        value, low, high = np.array([row[name] for row in known]).T
        axes.errorbar([row["d"] for row in known], value, [np.maximum(0, value - low), np.maximum(0, high - value)],
                      fmt=f"o{line}", color=color, capsize=3, label=f"{label}; classes of strength {strength}")
    rows = [row for row in rows if row["strength"] == STRENGTHS[0]]
    axes.plot([row["d"] for row in rows], [row["pass"] for row in rows], "s:", color="0.6",
              label="features whose cosine with a probe is at least 0.1")
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["d"] for row in rows], [str(row["d"]) for row in rows])
    axes.set_xlabel("width d of a model with random weights")
    axes.set_ylabel("share: absorbed, or of features")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments):
    parser = argparse.ArgumentParser(prog="probe.py geometry", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n")[2])
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)), metavar="A,B", help="powers of two, 32 to 1024")
    parser.add_argument("--worlds", type=int, default=3, metavar="N", help="seeds of weights and words (3)")
    parser.add_argument("--out", default="out", metavar="DIR", help="a folder for geometry.json and .png (out)")
    options = parser.parse_args(arguments)
    try:
        widths = [int(text) for text in options.widths.split(",")]
    except ValueError:
        widths = [0]
    if not all(d in WIDTHS for d in widths) or options.worlds < 1:
        raise UserError(f"--widths {options.widths} --worlds {options.worlds}: widths are some of "
                        f"{', '.join(map(str, WIDTHS))}, and there must be at least one world")
    path = os.path.join(options.out, "geometry.json")
    check_writable(path)
    say(f"{WORDS} words of {CLASSES} classes, {options.worlds} models with random weights for each width; +- half of "
        f"the interval of 95% of {DRAWS} draws over words")
    say(f"{'d':>6}{'strength':>10}{'probe F1':>10}{'cos >= 0.1':>12}{'by chance':>11}{'absorption':>18}{'scaled':>18}")
    rows = []
    for d, strength in itertools.product(widths, STRENGTHS):
        rows.append(row_of(d, strength, options.worlds))
        print_row(rows[-1])
    write_json(path, {"rows": rows, **provenance()}, indent=1)
    draw(rows, path.removesuffix(".json") + ".png")
    say(f"written to {path} and {path.removesuffix('.json')}.png")
