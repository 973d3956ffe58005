"""Loss curves of one or more runs in one picture.

    python plot.py out/tiny out/tiny_gpt out/tiny_topk [--out losses.png]
"""
import argparse
import os

from helpers import UserError, read_lines, run_script


def read_metrics(folder, say=None):
    """The rows of a run's metrics.jsonl. A line that was cut off, damaged, or is not ours is left out and said."""
    path = os.path.join(folder, "metrics.jsonl")
    rows, lines = read_lines(path)
    rows = [row for row in rows if is_number(row.get("step"), int) and is_number(row.get("loss"))]
    if say and lines > len(rows):
        say(f"{path}: {lines - len(rows)} damaged line(s) of {lines} are left out")
    return rows


def is_number(value, kind=(int, float)):
    return isinstance(value, kind) and not isinstance(value, bool)


def losses(folders, path):
    """Training and validation loss by step of each run, to a PNG file."""
    import matplotlib
    matplotlib.use("Agg")  # no screen needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for folder in folders:
        rows = read_metrics(folder)
        name = os.path.basename(os.path.normpath(folder))
        checked = [(row["step"], row["val_loss"]) for row in rows if is_number(row.get("val_loss"))]
        line, = axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], linewidth=0.8, alpha=0.4)
        if checked:
            label = f"{name}: validation {checked[-1][1]:.3f}"
            axes.plot(*zip(*checked), color=line.get_color(), marker="o", markersize=3, label=label)
    axes.set(xlabel="step", ylabel="loss, nats per token", yscale="log")  # the first steps would flatten the rest
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3, which="both")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="folders of runs, such as out/tiny")
    parser.add_argument("--out", default="losses.png", help="the picture to write, .png")
    options = parser.parse_args(arguments)
    empty = [folder for folder in options.runs if not read_metrics(folder, print)]
    if empty:
        raise UserError(f"{empty[0]} has no metrics.jsonl with a row in it: give folders that train.py wrote, such as "
                        "out/tiny")
    path = options.out if options.out.endswith(".png") else f"{options.out}.png"
    losses(options.runs, path)
    print(path)


if __name__ == "__main__":
    run_script(main)
