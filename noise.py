"""Does a bottleneck remove what does not belong into the stream? What later layers leave of an added vector.

    python noise.py out/tiny --against out/tiny_gpt

The paper's reason why steered text stays fluent: whatever is added to the residual stream, the MLPs after it read only
a sparse code, and what is no feature is lost. So a vector e is added to the stream x after one block, at every token,
with a norm of r |x|: noise, drawn by lot, or real, towards the activation of another token, which is what belongs into
the stream. If the bottleneck cleans, less is left of noise than of the real, and less than in a dense model. With the
pass without e beside the one with it, for each later layer:

    left      <x' - x, e> / |e|^2      how much of e itself is left after the block: 1 if nothing acts against it
    change    |x' - x| / |e|           what e has become, with all that it set off
    passed    (|y' - y| / |y|) / (|h' - h| / |h|)    h: what the bottleneck is given, y: what the MLP reads; dense: 1
    kept      of the active features, the share that stays active

and at the end kl, nats per token from the predictions without e to those with it. Norms are summed over tokens before
they are divided; intervals hold 95% of bootstrap draws over windows of text. The control is the same model untrained.
"""
import argparse
import os

import torch
import torch.nn.functional as F

from checkpoint import name_of, open_runs, weights_hash
from helpers import UserError, bootstrap, progress, provenance, run_script, say, whole_number, within, write_json
from model import GPT
from sources import open_tokens

RATIOS = (0.03, 0.1, 0.3, 1.0)
KINDS = ("noise", "real")
BATCH = 2 ** 11  # tokens at a time: their predictions are all held


def observe(model, tokens, layer=None, added=None):
    """(stream, reads, codes, log-probabilities) of a pass, lists by layer of (B, T, ...); codes are None for a dense
    model. With `added` (B, T, d) put into the stream after `layer`."""
    stream, inputs, record = [], [], []

    def look(site, number, x):
        if site == "block_out":
            x = x + added if number == layer and added is not None else x
            stream.append(x)
        elif site == "mlp_in":
            inputs.append(x)
        return x
    logits = model(tokens, patch=look, record=record)
    reads = [(h, y) for _, y, h in record] or [(h, h) for h in inputs]
    return stream, reads, [code for code, _, _ in record] or [None] * len(inputs), F.log_softmax(logits.float(), -1)


def make_vectors(x, kind, ratio, rng):
    """e (B, T, d) for the stream x, with norm ratio |x|."""
    if kind == "noise":
        e = torch.randn(x.shape, generator=rng).to(x)
    else:
        other = torch.randint(0, x.shape[0] * x.shape[1], x.shape[:2], generator=rng).to(x.device)
        e = x.flatten(0, 1)[other] - x  # the same token now and then, and then there is nothing to add
    return e * (ratio * x.norm(dim=-1, keepdim=True) / e.norm(dim=-1, keepdim=True).clamp(min=1e-12))


def sums(values):
    """Of (B, T, ...), the norms over the last axis, by window: (B,)."""
    return values.float().norm(dim=-1).sum(1).double().cpu()


def kept_share(code, new):
    """Of the active features of each token, the share that is active in the other code: by window, (B,)."""
    same = (code.indices[..., :, None] == new.indices[..., None, :]).any(-1)
    return same.float().mean(-1).mean(1).double().cpu()


@torch.no_grad()
def measure(model, windows, layer, ratios):
    """{(kind, ratio, measure, layer): [value, low, high]}; of kl the layer is None."""
    found, rng = {}, torch.Generator().manual_seed(0)

    def note(key, top, bottom):
        tops, bottoms = found.setdefault(key, ([], []))
        tops.append(top)
        bottoms.append(bottom)

    step = max(1, BATCH // windows.shape[1])
    for start in range(0, len(windows), step):
        tokens = windows[start : start + step].to(model.embedding.weight.device)
        clean = observe(model, tokens)
        for kind in KINDS:
            for ratio in ratios:
                e = make_vectors(clean[0][layer], kind, ratio, rng)
                stream, reads, codes, logs = observe(model, tokens, layer, e)
                for number in range(layer, len(stream)):
                    change = stream[number] - clean[0][number]
                    note((kind, ratio, "left", number), (change * e).sum((1, 2)).double().cpu(),
                         e.square().sum((1, 2)).double().cpu())
                    note((kind, ratio, "change", number), sums(change), sums(e))
                    if number == layer:
                        continue
                    (h, y), (new_h, new_y) = clean[1][number], reads[number]
                    of_y, of_h = (sums(new - old) / sums(old) for new, old in ((new_y, y), (new_h, h)))
                    note((kind, ratio, "passed", number), of_y, of_h)
                    if codes[number] is not None:
                        share = kept_share(clean[2][number], codes[number])
                        note((kind, ratio, "kept", number), share, torch.ones_like(share))
                kl = F.kl_div(logs, clean[3], log_target=True, reduction="none").sum(-1).mean(1).double().cpu()
                note((kind, ratio, "kl", None), kl, torch.ones_like(kl))
        progress(f"{start + len(tokens)} of {len(windows)} windows")
    progress("")
    return {key: bootstrap(torch.cat(tops), torch.cat(bottoms)) for key, (tops, bottoms) in found.items()}


def print_rows(rows, ratios):
    say(f"{'':<26}{'':<7}{'r':>6}{'left at the end':>24}{'change at the end':>25}{'passed, mean':>14}{'kept, mean':>12}"
        f"{'kl':>25}")
    for name in dict.fromkeys(row["run"] for row in rows):
        for kind in KINDS:
            for ratio in ratios:
                own = {(row["measure"], row["layer"]): row["value"] for row in rows
                       if (row["run"], row["kind"], row["ratio"]) == (name, kind, ratio)}
                last = max(number for measure, number in own if measure == "left")

                def average(what, own=own):
                    values = [value[0] for (measure, _), value in own.items() if measure == what]
                    return f"{sum(values) / len(values):.2f}" if values else "-"
                cells = ["{:.2f} [{:.2f}, {:.2f}]".format(*own[what]) for what in (
                    ("left", last), ("change", last))]
                kl = "{:.3f} [{:.3f}, {:.3f}]".format(*own["kl", None])
                say(f"{name:<26}{kind:<7}{ratio:>6g}{cells[0]:>24}{cells[1]:>25}{average('passed'):>14}"
                    f"{average('kept'):>12}{kl:>25}")


def draw(rows, layer, ratios, path):
    """What is left and what it has become, by layer; what bottlenecks pass on, and predictions, by ratio."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 4, figsize=(16, 4), layout="constrained")
    left, change, passed, kl = panels
    names, middle = list(dict.fromkeys(row["run"] for row in rows)), ratios[len(ratios) // 2]

    def plot(axes, x, values, name, kind):
        value, low, high = zip(*values)
        errors = [[a - b for a, b in zip(value, low)], [b - a for a, b in zip(value, high)]]
        axes.errorbar(x, value, yerr=errors, color=f"C{names.index(name)}", marker="o", markersize=4, capsize=2,
                      linestyle="-" if kind == "noise" else "--", label=f"{name}: {kind}")
    for name in names:
        for kind in KINDS:
            own = {(row["measure"], row["ratio"], row["layer"]): row["value"] for row in rows
                   if (row["run"], row["kind"]) == (name, kind)}
            layers = sorted(number for measure, ratio, number in own if (measure, ratio) == ("change", middle))
            plot(left, layers, [own["left", middle, number] for number in layers], name, kind)
            plot(change, layers, [own["change", middle, number] for number in layers], name, kind)
            plot(passed, ratios, [own["passed", ratio, layer + 1] for ratio in ratios], name, kind)
            plot(kl, ratios, [own["kl", ratio, None] for ratio in ratios], name, kind)
    left.set(title=f"left of e, r = {middle:g}", xlabel="after layer", ylabel="<x' - x, e> / |e|²", xticks=layers)
    change.set(title=f"change of the stream, r = {middle:g}", xlabel="after layer", ylabel="|x' - x| / |e|",
               xticks=layers)
    passed.set(title=f"passed on to the MLP of layer {layer + 1}", xlabel="r", xscale="log",
               ylabel="change of y over change of h")
    kl.set(title="change of predictions", xlabel="r", ylabel="nats per token", xscale="log", yscale="log")
    for axes in panels:
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(arguments):
    parser = argparse.ArgumentParser(prog="noise.py", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n")[2])
    parser.add_argument("run", help="a run's folder or checkpoint")
    parser.add_argument("--against", nargs="+", default=[], metavar="RUN", help="other runs, such as the dense twin")
    parser.add_argument("--layer", type=within(int, 0), default=0, metavar="N", help="add it after this layer (0)")
    parser.add_argument("--tokens", type=whole_number, default=2 ** 13, metavar="N", help="validation tokens (8192)")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    options = parser.parse_args(arguments)
    runs = open_runs((options.run, *options.against), options.device)
    for run in runs:
        if options.layer + 1 >= run.config.layers:
            raise UserError(f"there is no layer after layer {options.layer} in {run.path}: give a smaller --layer")
        if run.config.site != "mlp":
            raise UserError(f"{run.path} has its bottleneck before attention: give a run with site = 'mlp'")
    context = min(run.config.context for run in runs)
    tokens = open_tokens(runs[0], "val")
    windows = tokens.windows(range(min(tokens.count(context), max(2, options.tokens // context))), context)[:, :-1]
    models = {name_of(run): run.model for run in runs}
    untrained = GPT(runs[0].config).to(runs[0].model.embedding.weight.device).eval()
    models[f"{name_of(runs[0])}, untrained"] = untrained
    say(f"{windows.numel():,} tokens of the validation split, n = {len(windows)} windows; added after layer "
        f"{options.layer}; [95% of draws over windows]")
    rows = [{"run": name, "kind": kind, "ratio": ratio, "measure": what, "layer": number, "value": value}
            for name, model in models.items()
            for (kind, ratio, what, number), value in measure(model, windows, options.layer, RATIOS).items()]
    print_rows(rows, RATIOS)
    home = os.path.dirname(runs[0].path)
    write_json(os.path.join(home, "noise.json"), {
        "rows": rows, "n": len(windows), "tokens": windows.numel(), "options": vars(options),
        "weights": {name_of(run): weights_hash(run.model) for run in runs},
        "configs": {name_of(run): vars(run.config) for run in runs}, **provenance()}, indent=1)
    draw(rows, options.layer, RATIOS, os.path.join(home, "noise.png"))
    say(f"written to {home}: noise.json, noise.png")


if __name__ == "__main__":
    run_script(main)
