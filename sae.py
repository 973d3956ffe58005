"""Train sparse autoencoders on the activations of a run, and say how good they are.

    python sae.py out/tiny_gpt                                             topk, before the MLP of every layer
    python sae.py out/tiny_gpt --variant all --layers 0,2                  topk, batchtopk, jumprelu, matryoshka
    python sae.py out/tiny_gpt --report --against out/tiny                 the table and the picture of all there are
    python sae.py out/tiny_gpt/sae/topk-mlp_in-0 --export saelens:FOLDER   or dictionary_learning, sparsify
    python sae.py out/tiny_gpt --import FOLDER --layers 2                  an SAE of one of these, of this run's layer 2
    torchrun --nproc_per_node=8 sae.py out/gpt_small --variant all

Results go to RUN/sae/VARIANT-SITE-LAYER (sae_files.py), and are sources of features for whatever looks at features:
`python sample.py out/tiny_gpt --feature 0:12+ --source topk`. The losses are in autoencoder.py.

All layers and variants are trained side by side on one pass over the model. A buffer holds the activations of a block
of windows, and each of the steps that it lasts takes an equal share of every window's tokens, in random order. What a
step sees is a function of the seed and the step alone, on any number of ranks: the same command again continues an
interrupted training, on a CPU bit for bit.
"""
import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import time

import numpy as np
import torch

from autoencoder import SAE, VARIANTS, geometric_median
from checkpoint import Run, load_file, open_run, save, send, weights_hash
from helpers import (
    UserError,
    bootstrap,
    locked,
    progress,
    provenance,
    run_script,
    say,
    stop_signals,
    suggest,
    whole_number,
    within,
    write_json,
)
from model import PATCH_SITES
from optim import schedule
from ranks import all_or_none, all_reduce, barrier, is_first_of_node, leave_ranks, start_ranks
from sae_files import FORMATS, export_sae, import_sae, is_sae, load_sae, save_sae, variant_folder
from score import Request, Scorer
from sources import check_sae, open_source, open_tokens, read_activations
from toyworld import is_toy

LONG = 20_000   # steps of the paper's trainings; a shorter one has as much shorter warm-ups and averages
PASS = 2 ** 14  # tokens of a forward pass


def default_rate(variant, m, steps):
    """Of Adam. The thresholds of a jumprelu have a way to go, which a short training must go faster."""
    return min(1e-3, 7e-5 * max(1, LONG / steps)) if variant == "jumprelu" else 2e-4 / math.sqrt(m / 2 ** 14)


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that a training depends on but the model, the data, the site and the layer."""
    variant: str
    m: int
    k: int
    steps: int
    batch_tokens: int
    lr: float
    seed: int
    step_on: str       # jumprelu: where L0 has its gradient, "f" or "z"
    divided: bool      # matryoshka: the loss by the square of the number of prefixes

    def share(self, steps):
        """So many steps of a training of LONG ones, scaled to this one."""
        return max(1, round(steps * min(1, self.steps / LONG)))

    def dead_after(self):
        """Tokens without firing that make a feature dead: 10 million, or an eighth of a shorter training."""
        return min(10 ** 7, max(1, self.steps * self.batch_tokens // 8))


class Training:
    """An SAE that is being trained."""

    def __init__(self, settings, d, layer, folder, device):
        self.settings, self.layer, self.folder, self.step, self.scale = settings, layer, folder, 0, None
        self.sae = SAE(settings.variant, d, settings.m, settings.k, seed=settings.seed).to(device)
        betas = (0.0, 0.999) if settings.variant == "jumprelu" else (0.9, 0.999)
        self.optimizer = torch.optim.Adam(self.sae.parameters(), settings.lr, betas, fused=True)
        self.seen = torch.zeros(4, dtype=torch.float64, device=device)  # error, variance, L0, steps since the last word

    def update(self, x):
        """One step on activations x (N, d), as they are."""
        sae, settings = self.sae, self.settings
        if self.scale is None:  # the first step
            self.scale = all_reduce(torch.stack([x.square().sum(), x.new_tensor(float(len(x)))])).tolist()
            self.scale = math.sqrt(self.scale[0] / self.scale[1]) or 1.0
            if settings.variant != "jumprelu":
                with torch.no_grad():
                    sae.b_dec.copy_(geometric_median(x / self.scale))
        x = x / self.scale
        loss, error, l0 = sae.loss(x, settings.dead_after(), min(1, self.step / settings.share(2000)),
                                   1 - 1 / settings.share(1000), settings.step_on, settings.divided)
        loss.backward()
        average_gradients(sae)
        sae.constrain_gradient()
        rate = schedule(self.step, settings.steps, settings.share(1000), 0.2)
        self.optimizer.param_groups[0]["lr"] = settings.lr * rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        sae.constrain_weights()
        self.step += 1
        self.seen += torch.stack([error, (x - x.mean(0)).square().sum(1).mean(), l0, torch.ones_like(error)])

    def word(self):
        """(FVU, L0, dead share) since the last word; None if there was no step."""
        error, variance, l0, steps = all_reduce(self.seen.clone()).tolist()
        self.seen.zero_()
        dead = (self.sae.unfired >= self.settings.dead_after()).float().mean().item()
        return (error / max(variance, 1e-30), l0 / steps, dead) if steps else None

    def state(self, of):
        """A checkpoint. of: the hashes of the model and the data."""
        return {"settings": dataclasses.asdict(self.settings), "of": of, "step": self.step, "scale": self.scale,
                "sae": self.sae.state_dict(), "unfired": self.sae.unfired, "optimizer": self.optimizer.state_dict()}

    def restore(self, content):
        try:
            self.sae.load_state_dict(content["sae"])
            self.sae.unfired.copy_(content["unfired"])
            self.optimizer.load_state_dict(content["optimizer"])
            self.step, self.scale = content["step"], content["scale"]
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"{self.folder} holds no checkpoint of sae.py: start over with --fresh") from error


def average_gradients(sae):
    """Over the ranks."""
    if torch.distributed.is_initialized():
        grads = [weight.grad for weight in sae.parameters()]
        flat = all_reduce(torch.cat([grad.flatten() for grad in grads])) / torch.distributed.get_world_size()
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))


def check_settings(folder, settings, of, saved):
    """A sentence if what is in a folder is of other settings, another model or other data."""
    if not saved.get("settings"):
        raise UserError(f"{folder} holds an SAE that was imported: --fresh replaces it")
    before = {**saved["settings"], **saved["of"]}
    changed = [f"{key} (was {before.get(key)}, now {value})"
               for key, value in {**of, **dataclasses.asdict(settings)}.items() if before.get(key) != value]
    if changed:
        raise UserError(f"{folder} holds an SAE with other settings: {', '.join(changed)}. Give those it has, or start "
                        "over with --fresh")


class Activations:
    """The activations of a site at some layers, step by step: batch(step) -> {layer: (N, d)}, this rank's."""

    def __init__(self, run, tokens, site, layers, batch_tokens, seed, rank, ranks):
        self.run, self.tokens, self.site, self.layers, self.seed = run, tokens, site, layers, seed
        self.rank, self.ranks, self.number, context = rank, ranks, None, run.config.context
        self.span = math.gcd(context, 16)        # steps that a buffer lasts
        self.share = context // self.span        # tokens of a window in each of them
        self.windows, left = divmod(batch_tokens, self.share)
        if left or not self.windows or self.windows % ranks:
            raise UserError(f"--batch-tokens {batch_tokens:,} cannot be shared out evenly: choose a multiple of "
                            f"{self.share * ranks}")
        tokens.count(context)  # at least one window, or a sentence

    def fill(self, number):
        """The buffer of this number: the activations of its windows, (windows of this rank, context, d) a layer."""
        config, device = self.run.config, self.run.model.embedding.weight.device
        rows = self.tokens.batch(self.seed, number, self.windows, config.context, self.rank, self.ranks)[:, :-1]
        found = {layer: [] for layer in self.layers}
        for part in rows.split(max(1, PASS // config.context)):
            for layer, x in read_activations(self.run.model, part.to(device), self.site, self.layers).items():
                found[layer].append(x.float())
        self.number, self.found = number, {layer: torch.cat(parts) for layer, parts in found.items()}
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        order = torch.rand(self.windows, config.context, generator=rng).argsort(1)
        own = self.windows // self.ranks
        self.order = order[self.rank * own : (self.rank + 1) * own].to(device)

    def batch(self, step):
        number, turn = divmod(step, self.span)
        if number != self.number:
            self.fill(number)
        at = self.order[:, turn * self.share : (turn + 1) * self.share, None]  # (windows, share, 1)
        return {layer: x.gather(1, at.expand(-1, -1, x.shape[2])).flatten(0, 1) for layer, x in self.found.items()}


# The training


def train(run, of, trainings, source, options, rank):
    """Train all of them to the end, which gives True, or until a signal asks to stop."""
    first, steps = min(training.step for training in trainings), options.steps
    say(f"{len(trainings)} SAEs of {options.width:,} features, {options.k} active, at {options.site} of "
        f"{len(source.layers)} layer(s) of {run.path}: {steps:,} steps of {options.batch_tokens:,} tokens"
        + (f", continuing from step {first:,}" if first else ""))
    began = saved = time.monotonic()
    cost = 0.0  # seconds that the last saving took
    with stop_signals() as asked:
        for step in range(first, steps):
            x = source.batch(step)
            for training in trainings:
                if training.step == step:
                    training.update(x[training.layer])
            left = int((time.monotonic() - began) / (step + 1 - first) * (steps - step - 1))
            progress(f"step {step + 1}/{steps}  {left // 60}:{left % 60:02d} left")
            if (step + 1) % max(1, steps // 10) == 0 or step + 1 == steps:
                tell(step + 1, trainings, left)
            due = rank == 0 and time.monotonic() - saved > max(30, 20 * cost)  # saving takes at most 5%
            leave, due = (all_reduce(torch.tensor([len(asked), due]).to(source.order)) > 0).tolist()
            if leave or due:
                start = time.monotonic()
                with all_or_none():
                    for training in trainings if rank == 0 else ():
                        write_state(training, of)
                saved = time.monotonic()
                cost = saved - start
            if leave and step + 1 < steps:
                return False
    return True


def write_state(training, of):
    """ckpt.pt; what an older training left goes: it would be taken for this one's."""
    os.makedirs(training.folder, exist_ok=True)
    save(os.path.join(training.folder, "ckpt.pt"), training.state(of))
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(training.folder, "config.json"))


def tell(step, trainings, left):
    """A line for each variant, with a figure a layer."""
    say(f"step {step:,}, {left // 60}:{left % 60:02d} left")
    for variant in dict.fromkeys(training.settings.variant for training in trainings):
        words = [training.word() for training in trainings if training.settings.variant == variant]
        columns = [[form.format(value) if word else "-" for word, value in zip(words, values)] for form, values in zip(
            ("{:.3f}", "{:.1f}", "{:.1%}"), zip(*(word or (0, 0, 0) for word in words)))]
        fvu, l0, dead = map(" ".join, columns)
        say(f"  {variant:<11} FVU {fvu}   L0 {l0}   dead {dead}")


def plan(run, of, options):
    """(settings, layer, folder) of what is left to do, and by folder the checkpoints to go on from. For rank 0: what
    lies on the disks of others does not count."""
    wanted, found = [], {}
    for variant, layer in itertools.product(options.variant, options.layers):
        lr = options.lr or default_rate(variant, options.width, options.steps)
        settings = Settings(variant, options.width, options.k, options.steps, options.batch_tokens, lr, options.seed,
                            options.step_on, options.divided)
        folder = variant_folder(os.path.dirname(run.path), variant, options.site, layer)
        checkpoint = os.path.join(folder, "ckpt.pt")
        if options.fresh:
            pass
        elif os.path.exists(checkpoint):
            content = load_file(checkpoint)
            if not isinstance(content, dict) or not isinstance(content.get("of"), dict):
                raise UserError(f"{checkpoint} is no checkpoint of sae.py: start over with --fresh")
            check_settings(folder, settings, of, content)
            found[folder] = content
        elif is_sae(folder):
            check_settings(folder, settings, of, load_sae(folder)[1])
            say(f"{folder} is finished. --fresh starts over")
            continue
        wanted.append((dataclasses.asdict(settings), layer, folder))
    return {"wanted": wanted, "found": found}


def finish(run, of, training, options):
    """The SAE of the activations as they are, with all that is known of it."""
    training.sae.scale(training.scale)
    about = {"run": os.path.dirname(run.path), "site": options.site, "layer": training.layer,
             "settings": dataclasses.asdict(training.settings), "of": of, **provenance()}
    save_sae(training.folder, training.sae, about)
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(training.folder, "ckpt.pt"))


# How good they are


def measure(run, source, requests, base, zero):
    """A row for each layer of a source: see `report`. base, zero: the log-probability of each window, as the model is,
    and for every layer with 0 in place of x."""
    context, model = run.config.context, run.model
    scorer = Scorer(model, context, PASS)
    count, layers = len(requests), sorted(source.layers)
    sums = {layer: np.zeros((count, 3)) for layer in layers}   # of each window: |x - x_hat|^2, |x|^2, active features
    means = {layer: np.zeros((count, run.config.d)) for layer in layers}
    fired = {layer: torch.zeros(source.m, dtype=torch.bool) for layer in layers}
    step = max(1, PASS // context)
    for start in range(0, count, step):
        windows = np.stack([request.tokens[:-1] for request in requests[start : start + step]]).astype(np.int64)
        own = slice(start, start + len(windows))
        rows = torch.from_numpy(windows).to(scorer.device)
        for layer, x in read_activations(model, rows, source.site, layers).items():
            x, part = x.float(), source.layers[layer]
            with torch.no_grad():
                code = part.encode(x)
                error = (x - part.decode(code, like=x).float()).double().square().sum((1, 2))
            on = code.coefs != 0
            sums[layer][own] = torch.stack([error, x.double().square().sum((1, 2)), on.sum((1, 2))], 1).cpu()
            means[layer][own] = x.double().sum(1).cpu()
            fired[layer][code.indices[on].cpu()] = True
    rows = []
    for layer in layers:
        only = source._replace(layers={layer: source.layers[layer]})
        own = source.kind == "own"  # the model reads nothing else: there is nothing to recover
        spliced = base if own else scorer.score(requests, f"{source.name} {layer}", **only.spliced())[0]
        error, square, active = sums[layer].T
        mean = means[layer].sum(0) / (count * context)
        variance = square - 2 * means[layer] @ mean + context * mean @ mean
        rows.append({"source": source.name, "site": source.site, "layer": layer, "features": source.m,
                     "tokens": count * context, "fvu": bootstrap(error, variance),
                     "l0": float(active.sum() / (count * context)), "dead": 1 - fired[layer].float().mean().item(),
                     "loss": -base.mean() / context, "loss_spliced": -spliced.mean() / context,
                     "loss_zero": -zero[layer].mean() / context,
                     "recovered": None if own else bootstrap(spliced - zero[layer], base - zero[layer])})
    return rows


def remove(site, layer, at, number, x):
    return torch.zeros_like(x) if (at, number) == (site, layer) else x


def report(runs, options):
    """The table of every SAE of the runs at a site, of their own features, and of the controls.

    FVU is |x - x_hat|^2 / |x - mean x|^2; a feature is dead that fired on none of the tokens; the model's loss with
    x_hat in place of x at one layer, and with 0, say which part of the difference that x makes is recovered. A model
    with a bottleneck never reads x, and so there is no such part for its own features.
    """
    table = []
    for run in runs:
        tokens, context, weights = open_tokens(run, "val"), run.config.context, weights_hash(run.model)
        count = min(tokens.count(context), max(1, options.eval_tokens // context))
        requests = [Request(tokens.read(i * context, (i + 1) * context + 1), context) for i in range(count)]
        scorer = Scorer(run.model, context, PASS)
        base = scorer.score(requests, "as it is")[0]
        zero = [scorer.score(requests, f"0 at layer {layer}", patch=functools.partial(remove, options.site, layer))[0]
                for layer in range(run.config.layers)]
        for number, source in enumerate(all_sources(run, options.site, weights)):
            rows = measure(run, source, requests, base, zero)
            for row in rows:
                row["run"], row["model"] = os.path.basename(os.path.dirname(os.path.abspath(run.path))), weights
            print_rows(run, rows, first=number == 0)
            table += rows
    folder = os.path.join(os.path.dirname(runs[0].path), "sae")
    os.makedirs(folder, exist_ok=True)
    about = {"site": options.site, "configs": {run.path: vars(run.config) for run in runs}, **provenance()}
    write_json(os.path.join(folder, f"report-{options.site}.json"), {"rows": table, **about}, indent=1)
    picture = os.path.join(folder, f"explained-{options.site}.png")
    draw(table, picture)
    say(f"written to {folder}: report-{options.site}.json, explained-{options.site}.png")


def all_sources(run, site, weights):
    """The sources of a run at a site: its own features, its SAEs, the controls. What cannot be opened is said."""
    home = os.path.dirname(run.path)
    if run.config.bottleneck != "none" and site == f"{run.config.site}_in":
        yield open_source(run, "own")
    for variant, layer in itertools.product(VARIANTS, range(run.config.layers)):
        folder = variant_folder(home, variant, site, layer)
        try:
            if is_sae(folder):
                yield open_source(run, folder, weights=weights)._replace(name=f"{variant}-{site}")
        except UserError as error:
            say(f"left out: {error}")
    for control in ("hash", "neurons"):
        try:
            yield open_source(run, control, site)
        except UserError as error:
            say(f"left out: {error}")


def print_rows(run, rows, first):
    if first:
        say(f"{run.path}: {rows[0]['tokens']:,} tokens of the validation split, loss {rows[0]['loss']:.4f}; "
            "in brackets 95% of bootstrap draws over windows")
        say(f"{'source':<20}{'layer':>6}{'FVU':>25}{'L0':>8}{'dead':>8}{'loss recovered':>27}{'with x_hat':>12}"
            f"{'with 0':>9}")
    for row in rows:
        fvu, recovered = ("{:.4f} [{:.4f}, {:.4f}]".format(*row[key]) if row[key] else "-"
                          for key in ("fvu", "recovered"))
        say(f"{row['source']:<20}{row['layer']:>6}{fvu:>25}{row['l0']:>8.1f}{row['dead']:>8.1%}{recovered:>27}"
            f"{row['loss_spliced']:>12.4f}{row['loss_zero']:>9.4f}")


def draw(table, path):
    """Explained variance by layer: a panel for each run, in it a line for each source; the controls are grey."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = list(dict.fromkeys(row["run"] for row in table))
    figure, panels = plt.subplots(1, len(runs), figsize=(2 + 5 * len(runs), 4.5), layout="constrained", sharey=True,
                                  squeeze=False)
    for run, axes in zip(runs, panels[0]):
        for source in dict.fromkeys(row["source"] for row in table if row["run"] == run):
            rows = [row for row in table if (row["run"], row["source"]) == (run, source)]
            value, low, high = (1 - np.array([row["fvu"] for row in rows])).T
            control = source.startswith(("hash", "neurons"))
            below = f" (down to {value.min():.2f})" if value.min() < 0 else ""
            axes.errorbar([row["layer"] for row in rows], value, (value - high, low - value), marker="o", markersize=4,
                          capsize=3, label=source + below, color="0.6" if control else None,
                          linestyle=("--" if source.startswith("hash") else ":") if control else "-")
        axes.set(title=run, xlabel="layer", ylim=(0, 1))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    panels[0, 0].set_ylabel("explained variance")
    figure.savefig(path, dpi=120)
    plt.close(figure)


# The command line


def parse(arguments):
    parser = argparse.ArgumentParser(prog="sae.py", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n")[2])
    parser.add_argument("run", help="a run's folder or checkpoint; for --export the folder of an SAE")
    parser.add_argument("--variant", default="topk", metavar="A,B", help=f"some of {','.join(VARIANTS)}, or all (topk)")
    parser.add_argument("--site", default="mlp_in", help=f"one of {', '.join(PATCH_SITES)} (mlp_in)")
    parser.add_argument("--layers", default="all", metavar="0,1", help="some layers, or all (all)")
    parser.add_argument("--width", type=whole_number, metavar="M", help="features (as many as the run's config says)")
    parser.add_argument("--k", type=whole_number, metavar="K", help="active features (likewise)")
    parser.add_argument("--steps", type=whole_number, metavar="N", help="steps (20,000; toy world 1,500)")
    parser.add_argument("--batch-tokens", type=whole_number, metavar="N",
                        help="tokens of a step, over all ranks (4,096; toy world 1,024)")
    parser.add_argument("--lr", type=within(float, 0, 1, open_low=True), metavar="R",
                        help="peak rate of Adam (2e-4 / sqrt(M / 2^14); jumprelu 7e-5, more if it is short)")
    parser.add_argument("--seed", type=within(int, 0, 2 ** 31), default=0, metavar="N",
                        help="of the first weights and the order of the data (0)")
    parser.add_argument("--step-on", choices=("f", "z"), default="f",
                        help="jumprelu: where L0 has its gradient, as in dictionary_learning or in SAELens (f)")
    parser.add_argument("--divided", action="store_true",
                        help="matryoshka: the loss by the square of the number of prefixes, as in dictionary_learning")
    parser.add_argument("--fresh", action="store_true", help="start over, even if there are such SAEs")
    parser.add_argument("--eval-tokens", type=whole_number, default=2 ** 15, metavar="N",
                        help="validation tokens of the report (32768)")
    parser.add_argument("--report", action="store_true", help="train nothing: the table and the picture only")
    parser.add_argument("--against", nargs="+", default=[], metavar="RUN", help="other runs to put into the report")
    parser.add_argument("--export", metavar="FORMAT:FOLDER", help=f"write an SAE for {', '.join(FORMATS)}")
    parser.add_argument("--import", dest="bring", metavar="FOLDER", help="take an SAE of one of these as this run's")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    return parser.parse_args(arguments)


def complete(options, run: Run):
    """Check what was asked for, and fill in what follows from the run."""
    config = run.config
    variants = VARIANTS if options.variant == "all" else tuple(dict.fromkeys(options.variant.split(",")))
    for variant in variants:
        if variant not in VARIANTS:
            raise UserError(f"there is no variant {variant!r}{suggest(variant, VARIANTS)}")
    if options.site not in PATCH_SITES:
        raise UserError(f"there is no site {options.site!r}{suggest(options.site, PATCH_SITES)}")
    every = [str(layer) for layer in range(config.layers)]
    layers = every if options.layers == "all" else list(dict.fromkeys(options.layers.split(",")))
    wrong = [layer for layer in layers if layer not in every]
    if wrong:
        raise UserError(f"there is no layer {wrong[0]!r}: this model has the layers 0 to {config.layers - 1}")
    options.variant, options.layers = variants, sorted(map(int, layers))
    options.width = options.width or 2 ** config.bits[-1]
    options.k = options.k or min(sum(config.active), options.width)
    if options.k > options.width:
        raise UserError(f"--k {options.k:,} features cannot be active out of --width {options.width:,}: take fewer")
    if "matryoshka" in variants and options.width < 32:
        raise UserError(f"--width {options.width} is too small for the groups of matryoshka: take at least 32")
    toy = is_toy(run.encoding)
    options.steps = options.steps or (1500 if toy else LONG)
    options.batch_tokens = options.batch_tokens or (1024 if toy else 4096)


def bring(run, options):
    if len(options.layers) != 1:
        raise UserError("an imported SAE is of one layer: say which, --layers N")
    sae = import_sae(options.bring)
    folder = variant_folder(os.path.dirname(run.path), sae.variant, options.site, options.layers[0])
    if is_sae(folder) and not options.fresh:
        raise UserError(f"{folder} holds an SAE already: --fresh replaces it")
    about = {"run": os.path.dirname(run.path), "of": {"model": weights_hash(run.model)}, "site": options.site,
             "layer": options.layers[0], "imported": options.bring, **provenance()}
    check_sae(run, options.bring, sae, about, about["of"]["model"])
    save_sae(folder, sae, about)
    say(f"wrote {folder}; it is taken at its word that it is of this model: --report says how well it fits")


def make(run, options, rank, ranks):
    """Train what is left to do; False if a signal stopped it."""
    device = run.model.embedding.weight.device
    with contextlib.ExitStack() as held:
        with all_or_none():
            tokens = open_tokens(run, "train", is_first_of_node())
            of = {"model": weights_hash(run.model), "tokens": tokens.identity()}
            if rank == 0:
                held.enter_context(locked(os.path.join(os.path.dirname(run.path), "sae"), ""))
            content = plan(run, of, options) if rank == 0 else None
        content = send(content, device)
        trainings = [Training(Settings(**settings), run.config.d, layer, folder, device)
                     for settings, layer, folder in content["wanted"]]
        for training in trainings:
            if training.folder in content["found"]:
                training.restore(content["found"].pop(training.folder))
        if not trainings:
            return True
        layers = sorted({training.layer for training in trainings})
        source = Activations(run, tokens, options.site, layers, options.batch_tokens, options.seed, rank, ranks)
        if not train(run, of, trainings, source, options, rank):
            return False
        with all_or_none():
            for training in trainings if rank == 0 else ():
                finish(run, of, training, options)
    return True


def work(options):
    if options.export:
        form, _, folder = options.export.partition(":")
        if not folder:
            raise UserError(f"--export {options.export} has no folder: write --export saelens:FOLDER")
        export_sae(*load_sae(options.run), form, folder)
        return say(f"wrote {folder}")
    rank, ranks, device = start_ranks(options.device)
    run = open_run(options.run, device)
    run.model.requires_grad_(False)
    others = [open_run(other, device) for other in options.against]
    complete(options, run)
    if options.bring:
        return bring(run, options) if rank == 0 else None
    if not options.report and not make(run, options, rank, ranks):
        return say("stopped, saved: the same command goes on from there" + " if --fresh is left off" * options.fresh)
    barrier()
    leave_ranks()  # what is left is one process's work
    if rank == 0:
        report([run, *others], options)


def main(arguments):
    try:
        work(parse(arguments))
    finally:
        leave_ranks()


if __name__ == "__main__":
    run_script(main, "left at once; the same command goes on from the last checkpoint")
