"""How many tokens does a dense model need for the loss of a parity model? The price of the bottleneck, in tokens.

    python budget.py                                          configs/tiny.py against tiny_gpt.py, three seeds
    python budget.py --budgets 1000,1400,1800 --seeds 3       what it trains: dense twins at these numbers of steps

The paper's parity models see 9.4 times (small) and 6.7 times (large) the tokens of the dense ones that they are
compared with, which stop at a loss within 1% of theirs. Here each dense twin has a whole schedule of its own, laid out
for its number of steps, since the loss falls most while the rate does. Between two budgets the loss is a power of the
steps, fitted to both: with parity's loss L after S steps,

    n = the steps at which dense has the loss L (1 + tolerance)        price = S / n

for each seed by itself: both models see the same data in the same order. The interval is Student's over the logarithms
of the seeds' prices, 95%. Where a seed's target lies outside of the budgets, only a bound is known, and its side said.
A finished run is not trained again; one of --reuse is taken as it is where it has the same settings and data and was
trained from scratch.
"""
import argparse
import math
import os
import subprocess
import sys

import config as configs
from data import parse_mixture
from helpers import (
    UserError,
    check_writable,
    provenance,
    read_json,
    run_script,
    say,
    student,
    whole_number,
    within,
    write_json,
)
from plot import read_metrics

PAPER = {"small": 9.4, "large": 6.7}
TOLERANCES = (0.0, 0.01)  # the second is the paper's
HERE = os.path.dirname(os.path.abspath(__file__))


# The price


def steps_needed(curve, target):
    """(steps, bound): where a curve [(steps, loss)] has a loss; the bound is "" or, outside of it, "more" or "fewer",
    and the steps are then those of its end."""
    curve = sorted(curve)
    if target < min(loss for _, loss in curve):
        return curve[-1][0], "more"
    if target > curve[0][1]:
        return curve[0][0], "fewer"
    (low, above), (high, below) = next((one, two) for one, two in zip(curve, curve[1:]) if two[1] <= target <= one[1])
    share = math.log(above / target) / math.log(above / below) if above > below else 0.0
    return low * (high / low) ** share, ""


def price(parity, dense, tolerance):
    """parity: {seed: (steps, loss)}; dense: {seed: [(steps, loss)]}."""
    rows = []
    for seed, (steps, loss) in parity.items():
        target = loss * (1 + tolerance)
        needed, bound = steps_needed(dense[seed], target)
        rows.append({"seed": seed, "target": target, "steps": needed, "bound": bound, "price": steps / needed})
    value, *between = interval([row["price"] for row in rows])
    bounds = sorted({row["bound"] for row in rows} - {""})
    return {"tolerance": tolerance, "seeds": rows, "bounds": bounds,
            "price": [value, *([None, None] if bounds else between)]}  # bounds have no interval


def interval(prices):
    """[mean, low, high] by their logarithms; without an interval for one."""
    return [None if value is None else math.exp(value) for value in student([math.log(price) for price in prices])]


def side(bounds):
    """What a price is of which some seeds know only a bound: where dense needs fewer steps than the least that were
    tried, it is at least what was found; where it needs more, at most; None where both occur: it is no bound."""
    return {(): "", ("fewer",): "at least", ("more",): "at most"}.get(tuple(bounds))


def reason(bounds):
    """Why a price is only a bound, or none; to follow what is said of it."""
    text = " and for others ".join(f"{word} steps than were tried" for word in bounds)
    return f"; for some seeds dense needs {text}" if bounds else ""


# The runs


def last_loss(folder, config):
    """The validation loss of a run that is finished, with these settings, from scratch and on this data; else None."""
    path = os.path.join(folder, "config.json")
    if not os.path.exists(path):
        return None
    saved = read_json(path, "Delete the folder, and train again")
    rows = [row for row in read_metrics(folder) if "val_loss" in row]
    done = rows and rows[-1]["step"] == config.max_steps and not configs.differences(config, saved)
    return rows[-1]["val_loss"] if done and is_comparable(config, saved) else None


def is_comparable(config, saved):
    """Whether a run's loss may stand beside another's: settings that may change when a run goes on are not among its
    differences, but these two change the loss."""
    return not saved.get("init_from") and places(saved.get("data", "")) == places(config.data)


def places(text):
    """What a setting `data` stands for, however its folders are written."""
    return [(os.path.realpath(folder), weight) for folder, weight in parse_mixture(text)]


def finished(path, words, folder, reuse, fresh):
    """(folder, validation loss) of a run, trained if there is none."""
    config = configs.load([path, *words])
    for other in (*reuse, *([] if fresh else [folder])):
        loss = last_loss(other, config)
        if loss is not None:
            return other, loss
    say(f"training {folder}: {path} {' '.join(words)}")
    command = [sys.executable, os.path.join(HERE, "train.py"), path, *words, f"--out={folder}",
               f"--eval_every={config.max_steps}", f"--fresh={fresh}"]
    code = subprocess.run(command).returncode
    loss = last_loss(folder, config)
    if loss is None and code == 0:
        raise UserError(f"{folder} is finished, but on other data or from other weights: --fresh trains it anew")
    if loss is None:
        raise UserError(f"{folder} was not finished (exit code {code}): the same command goes on")
    return folder, loss


def measure(options):
    """(rows of runs, {seed: (steps, loss)} of parity, {seed: [(steps, loss)]} of dense)."""
    rows, parity, dense = [], {}, {}
    for seed in range(options.seeds):
        jobs = [("parity", options.parity, options.steps)]
        jobs += [("dense", options.dense, steps) for steps in options.budgets]
        for kind, path, steps in jobs:
            words = [f"--seed={seed}", f"--max_steps={steps}"]
            folder = os.path.join(options.out, f"{kind}-{steps}-{seed}")
            folder, loss = finished(path, words, folder, options.reuse, options.fresh)
            tokens = steps * configs.load([path]).batch_tokens
            rows.append({"kind": kind, "config": path, "seed": seed, "steps": steps, "tokens": tokens, "loss": loss,
                         "run": folder})
            say(f"{kind:<7} seed {seed} {steps:>6,} steps {tokens:>12,} tokens   loss {loss:.4f}")
            if kind == "parity":
                parity[seed] = steps, loss
            else:
                dense.setdefault(seed, []).append((steps, loss))
    return rows, parity, dense


def describe(row):
    value, low, high = row["price"]
    if side(row["bounds"]) is None:
        return "not known" + reason(row["bounds"])
    text = f"{side(row['bounds'])} {value:.2f} times".lstrip()
    return text + (f" [{low:.2f}, {high:.2f}]" if low is not None else "") + reason(row["bounds"])


def draw(rows, results, path):
    import matplotlib
    matplotlib.use("Agg")  # no screen needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for seed in sorted({row["seed"] for row in rows}):
        dense = sorted((row["tokens"], row["loss"]) for row in rows if (row["kind"], row["seed"]) == ("dense", seed))
        axes.plot(*zip(*dense), color=f"C{seed}", marker="o", markersize=4, label=f"dense, seed {seed}")
        (own,) = [row for row in rows if (row["kind"], row["seed"]) == ("parity", seed)]
        axes.plot(own["tokens"], own["loss"], color=f"C{seed}", marker="D", markersize=6, linestyle="",
                  label=f"parity, seed {seed}")
        axes.axhline(own["loss"], color=f"C{seed}", linewidth=0.8, linestyle=":")
    axes.set(xlabel="tokens, each run with a whole schedule", ylabel="validation loss, nats per token", xscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    axes.set_title(f"price of parity: {describe(results[0])}", fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def numbers(text):
    values = sorted({whole_number(part) for part in text.split(",")})
    if len(values) < 2:
        raise argparse.ArgumentTypeError("two budgets at least: a curve is drawn through them")
    return values


def main(arguments):
    parser = argparse.ArgumentParser(prog="budget.py", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n")[2])
    parser.add_argument("--parity", default="configs/tiny.py", metavar="CONFIG", help="(configs/tiny.py)")
    parser.add_argument("--dense", default="configs/tiny_gpt.py", metavar="CONFIG", help="(configs/tiny_gpt.py)")
    parser.add_argument("--steps", type=whole_number, metavar="N", help="of the parity model (as its config has it)")
    parser.add_argument("--budgets", type=numbers, default=[1000, 1400, 1800], metavar="A,B",
                        help="steps of the dense ones (1000,1400,1800)")
    parser.add_argument("--seeds", type=within(int, 1, 10), default=3, metavar="N", help="0 to N - 1 (3)")
    parser.add_argument("--reuse", nargs="+", default=[], metavar="RUN", help="finished runs to take where they fit")
    parser.add_argument("--fresh", action="store_true", help="train all but these anew")
    parser.add_argument("--out", default="out/budget", metavar="DIR", help="(out/budget)")
    options = parser.parse_args(arguments)
    if os.path.isfile(options.out):
        raise UserError(f"{options.out} is a file: choose a folder for --out")
    options.steps = options.steps or configs.load([options.parity]).max_steps
    configs.load([options.dense])
    for folder in options.reuse:
        if not os.path.exists(os.path.join(folder, "config.json")):
            raise UserError(f"--reuse {folder} is no folder of a run, which has config.json in it: leave it off, or "
                            "give one that train.py wrote, such as out/tiny")
    os.makedirs(options.out, exist_ok=True)
    path = os.path.join(options.out, "budget.json")
    check_writable(path)
    rows, parity, dense = measure(options)
    results = [price(parity, dense, tolerance) for tolerance in TOLERANCES]
    for row in results:
        say(f"tokens of parity over those of dense, for a loss within {row['tolerance']:.0%} of parity's: "
            f"{describe(row)}; the paper's: {PAPER['small']} (small), {PAPER['large']} (large), within 1%")
    write_json(path, {"rows": rows, "results": results, "paper": PAPER, "options": vars(options), **provenance()},
               indent=1)
    draw(rows, results, path.removesuffix(".json") + ".png")
    say(f"written to {options.out}: budget.json, budget.png")


if __name__ == "__main__":
    run_script(main, stopped="stopped; finished runs are kept, and the same command goes on")
