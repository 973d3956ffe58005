"""Train a model, on one CPU or many GPUs.

    python train.py configs/tiny.py [--key=value ...]
    torchrun --nproc_per_node=8 train.py configs/small_2l.py

The same command again continues an interrupted run; --fresh=true starts over. Everything goes to out/NAME: config.json,
metrics.jsonl (a row per log), ckpt.pt and the one before it, best.pt (the weights of lowest validation loss), loss.png.

A run is a function of its config and data alone. The batch of a step does not depend on the number of ranks or on
interruptions, so on a CPU a run that was killed and continued writes the same numbers as one that was not.
"""
import contextlib
import dataclasses
import functools
import glob
import itertools
import math
import os
import secrets
import time
from collections.abc import Callable

import tiktoken
import torch
from torch.nn.parallel import DistributedDataParallel

import config as configs
import data
import plot
import toyworld
from checkpoint import Writer, checkpoint_path, copied, load, load_newest, load_weights, save, send
from dpb import DeepParityBottleneck, update_moments
from features import FeatureCounts
from helpers import (
    UserError,
    checked_line,
    link_file,
    locked,
    progress,
    provenance,
    run_script,
    say,
    stop_signals,
    whole_file,
    write_json,
)
from model import GPT
from optim import MuonAdam, schedule, split_parameters
from ranks import agree, all_or_none, all_reduce, barrier, is_first_of_node, leave_ranks, start_ranks
from tasks import toy_answers
from tokenizer import load_tokenizer, pack_tokenizer
from toyworld import is_toy

OF_A_NODE = {"data", "out"}  # settings that may differ between nodes: the data is compared, out/ is rank 0's alone
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "4090": 165e12}  # dense bfloat16, per second


def micro_steps(config, ranks):
    """Accumulation steps of an optimiser step on each rank: the fewest with passes of at most micro_batch sequences."""
    sequences, left = divmod(config.batch_tokens // config.context, ranks)
    if left or not sequences:
        raise UserError(f"batch_tokens={config.batch_tokens} is {config.batch_tokens // config.context} sequences, "
                        f"which {ranks} ranks cannot share evenly: use a multiple of {ranks * config.context}")
    most = config.micro_batch or max(1, 16384 // config.context)
    return next(n for n in range(1, sequences + 1) if sequences % n == 0 and sequences // n <= most)


# Evaluation


@torch.no_grad()
def evaluate(model, tokens, config, rank, ranks, device, autocast):
    """Validation loss, and of a bottleneck what its features do: averages over layers, the same on any number of ranks.

    dead_fraction: of each level, the features that were never active here; l0: active features of a token;
    variance_explained: how much of its input the bottleneck's output keeps.
    """
    model.eval()
    context = config.context
    windows = min(tokens.count(context), max(1, config.eval_tokens // context))
    size = config.micro_batch or max(1, 16384 // context)
    total = torch.zeros(2, dtype=torch.float64, device=device)  # loss, tokens
    features = FeatureCounts(model)
    for start in range(rank * size, windows, ranks * size):
        batch = tokens.windows(range(start, min(start + size, windows)), context).to(device)
        record = []
        with autocast():
            loss = model(batch[:, :-1], batch[:, 1:], record=record)["lm"]
        total += torch.tensor([loss.item(), 1.0], dtype=torch.float64, device=device) * batch[:, 1:].numel()
        features.add(record)
    all_reduce(total)
    features.reduce()
    model.train()
    loss, count = total.tolist()
    row = {"val_loss": loss / count}
    if features.layers:
        alive = (features.fired > 0).double()
        row["dead_fraction"] = [1 - alive[:, low:high].mean().item()
                                for low, high in itertools.pairwise(features.layers[0].lows)]
        row["l0"] = features.fired.sum().item() / count / len(features.layers)
        row["variance_explained"] = features.explained[:, -1].mean().item()
    return row


# The run


@dataclasses.dataclass
class Run:
    """A run while it trains: what its parts share."""
    config: configs.Config
    rank: int
    ranks: int
    device: torch.device
    micros: int                # accumulation steps of one optimiser step
    tokens: data.Tokens | data.Mixture
    val_tokens: data.Tokens
    encoding: tiktoken.Encoding
    model: GPT
    optimizer: MuonAdam
    step: int = 0
    best: float = math.inf     # lowest validation loss
    best_step: int = 0
    stopped: bool = False      # at the validation loss, or whatever else, that was asked for
    saved: bool = False        # a checkpoint of this run was made, or tried: the same on all ranks
    # a name for what is being made anew beside an older run, until that is replaced, when this one is saved
    fresh: str = ""
    wandb_id: str = ""         # by which Weights & Biases knows the run when it goes on
    also: Callable | None = None  # also(run) -> dict: more that an evaluation measures; it may set run.stopped
    writer: Writer = dataclasses.field(default_factory=Writer)

    def path(self, name):
        return os.path.join(self.config.out, name)

    def autocast(self):
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else contextlib.nullcontext()


def train(config, also=None):
    """also(run) -> dict, on every rank alike: more to measure at each evaluation, where it may end the run."""
    run = set_up(config, *start_ranks(config.device))
    run.also = also
    with contextlib.ExitStack() as held:
        with all_or_none():
            if run.rank == 0:
                held.enter_context(locked(config.out))
            checkpoint = find_checkpoint(run) if run.rank == 0 else None
        if resume(run, send(checkpoint, run.device)):
            if not loop(run):
                note = " (if torchrun shows a SignalException now, it is its own, and no harm)" * (run.ranks > 1)
                return say(f"stopped at step {run.step}, saved: the same command goes on from there{note}")
            if run.rank == 0:
                finish(config)
    barrier()


def set_up(config, rank, ranks, device):
    """Everything that a run needs, checked before anything on disk is touched."""
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")  # what is left in float32 on a GPU may use TF32
    settings = {key: value for key, value in dataclasses.asdict(config).items() if key not in OF_A_NODE}
    agree(settings, "give the same command on every node")
    micros = micro_steps(config, ranks)
    with all_or_none():
        if rank == 0:
            find_loggers(config)
    tokens, val_tokens, encoding = open_data(config, rank)
    model = GPT(config).to(device)
    for module in model.modules():
        if isinstance(module, DeepParityBottleneck):
            module.passes = ranks * micros
    optimizer = MuonAdam(*split_parameters(model), config.muon_lr, config.adam_lr, weight_decay=config.weight_decay)
    return Run(config, rank, ranks, device, micros, tokens, val_tokens, encoding, model, optimizer)


def open_data(config, rank):
    """(training tokens, validation tokens, tokenizer); makes the toy corpus where it is asked for and missing."""
    with all_or_none():
        folders = [folder for folder, _ in data.parse_mixture(config.data)]
        for folder in folders if rank == 0 else ():
            state = data.read_state(folder, must=False)
            if os.path.basename(os.path.normpath(folder)) == "toy" and not (state and state["done"]):
                data.prepare_toy(folder)
    with all_or_none():
        splits = [data.open_split(config.data, split, verify=is_first_of_node()) for split in ("train", "val")]
        data.check_vocabulary(splits[0], config.vocab_size)
        for split in splits:
            split.count(config.context)  # at least one window, or a sentence
        encoding = load_tokenizer(folders[0])
    agree({f"tokens of {split.split}": split.identity() for split in splits}, "copy the same data to every node")
    return *splits, encoding


# Resume: from the run's own checkpoint, from the weights of another, or from nothing


def find_checkpoint(run):
    """What rank 0 goes on from, and with it all ranks: theirs may be a folder without it, or with an older one."""
    config = run.config
    checkpoint = None if config.fresh else load_newest(config.out, say)
    if not checkpoint:
        held = [name for name in ("ckpt.pt", "best.pt") if os.path.exists(run.path(name))]
        evaluations = sum("val_loss" in row for row in plot.read_metrics(config.out))
        held += ["metrics.jsonl"] if evaluations > 1 else []  # killed at its first, a run has no checkpoint yet
        if held and not config.fresh:
            raise UserError(f"{config.out} holds {' and '.join(held)} of a run, but no checkpoint to go on from: "
                            "choose another --out, or start over with --fresh=true")
        run.fresh = secrets.token_hex(4) if held else ""
    return checkpoint


def resume(run, checkpoint):
    """Whether there is anything left to do."""
    config = run.config
    if checkpoint:
        restore(run, checkpoint)
        if run.step >= config.max_steps or run.stopped:
            say(f"{config.out} is finished, at step {run.step}. --fresh=true starts over")
            if run.rank == 0 and not os.path.exists(run.path("loss.png")):
                finish(config)
            return False
        say(f"continuing {config.out} from step {run.step}")
        return True
    if config.init_from:
        with all_or_none():
            content = load(checkpoint_path(config.init_from)) if run.rank == 0 else None
        needed = content and {key: content[key] for key in ("tokenizer", "model", "config")}
        take_weights(run, send(needed, run.device), config.init_from)
    return True


def restore(run, checkpoint):
    config = run.config
    changed = configs.differences(config, checkpoint["config"])
    if changed:
        listed = ", ".join(f"{key} (was {checkpoint['config'][key]}, now {getattr(config, key)})" for key in changed)
        raise UserError(f"{config.out} holds a run with another config: {listed}. Restore it, choose another --out, or "
                        "start over with --fresh=true")
    if checkpoint["tokenizer"]["id"] != run.tokens.tokenizer_id:
        raise UserError(f"{config.out} was trained on data of another tokenizer than {config.data}'s: give its own "
                        "--data, or start over with --fresh=true")
    if "optimizer" not in checkpoint:
        raise UserError(f"{config.out} holds a checkpoint without the optimiser's state, which cannot go on: start "
                        "over with --fresh=true, or use it with --init_from from another --out")
    load_weights(run.model, checkpoint["model"], config.out)
    run.optimizer.load_state_dict(checkpoint["optimizer"])
    run.saved = True
    for name in ("step", "best", "best_step", "stopped", "fresh", "wandb_id"):
        setattr(run, name, checkpoint.get(name, getattr(run, name)))
    with all_or_none():
        if run.rank == 0:
            if run.fresh and os.path.exists(run.path(f"metrics.{run.fresh}.jsonl")):
                replace_older(run)  # it was killed before it had
            run.fresh = ""
            if run.best_step == run.step and not has_best(run):
                save_best(run, contents(run))  # it was killed before it had


def has_best(run):
    with contextlib.suppress(UserError):
        return load(run.path("best.pt"))["step"] == run.best_step
    return False


def take_weights(run, content, path):
    if content["tokenizer"]["id"] != run.tokens.tokenizer_id:
        raise UserError(f"{path} was trained on data of another tokenizer than {run.config.data}'s: "
                        "prepare the data with its tokenizer (data.py text --tokenizer DIR)")
    weights, dense = content["model"], content["config"].get("bottleneck") == "none"
    if dense and run.config.bottleneck == "parity":  # which has no weights, but moments and generators of its own
        weights = {name: value for name, value in run.model.state_dict().items() if ".parity." in name} | weights
    load_weights(run.model, weights, path)
    say(f"starting from the weights of {path}" + ", a dense model" * (dense and run.config.bottleneck == "parity"))


# The loop


def loop(run):
    """Train to the end, which gives True, or until a signal asks to stop."""
    config, model = run.config, run.model
    forward = parallel(run)
    with all_or_none():
        metrics = Metrics(run) if run.rank == 0 else None
        if run.rank == 0 and not run.fresh:
            write_config(run)
    say(f"{config.out}: {model.count_parameters():,} parameters, bottleneck {config.bottleneck}, "
        f"{run.ranks} rank(s) on {run.device.type}, {run.micros} pass(es) of "
        f"{config.batch_tokens // config.context // run.ranks // run.micros} x {config.context} tokens a step")
    warmup = min(config.warmup_steps, config.max_steps - round(config.decay_fraction * config.max_steps))
    peak = peak_flops(run.device)
    began, first, since, worked = time.perf_counter(), run.step, time.perf_counter(), 0.0
    with stop_signals() as asked, contextlib.closing(batches(run)) as source, run.writer:
        while run.step < config.max_steps and not run.stopped:
            rate = schedule(run.step, config.max_steps, warmup, config.decay_fraction)
            loss, grad_norm, leave = train_step(run, forward, source, rate, asked)
            now, steps = time.perf_counter(), run.step - first
            # Seconds of steps alone. The first compiles, and is left out as soon as there is another.
            worked = now - since + (worked if steps > 2 else 0)
            row = {"step": run.step, "tokens": run.step * config.batch_tokens,
                   "loss": loss, "lr": config.muon_lr * rate, "grad_norm": grad_norm}
            final = run.step == config.max_steps
            if run.step % config.eval_every == 0 or final:
                row |= examine(run)
                say(describe(row, config))
            if metrics and (run.step % config.log_every == 0 or "val_loss" in row):
                row["tokens_per_second"] = round(config.batch_tokens * max(1, steps - 1) / worked)
                metrics.write(row)
            show_progress(config, run.step, loss, now - since, (now - began) / steps, model, peak, run.ranks)
            is_best, must = run.best_step == run.step, final or run.stopped or leave
            whole = must or run.step % config.save_every == 0 or is_best and not run.saved
            if whole or is_best:
                save_run(run, whole, must)
            since = time.perf_counter()
            if leave and not final:
                return False
    return True


def auxiliary_share(step, config):
    """Of the weights of the auxiliary losses at step 0, 1, ...: 0 up to their start, then rising to 1."""
    since = step + 1 - config.auxiliary_start * config.max_steps
    return min(1.0, max(0.0, since / max(1.0, config.auxiliary_ramp * config.max_steps)))


def train_step(run, forward, source, rate, asked):
    """One optimiser step: (loss, norm of the gradient, whether a signal asked any rank to stop)."""
    run.optimizer.scale_lr(rate)
    share = auxiliary_share(run.step, run.config)
    run.model.fade_in(min(1.0, (run.step + 1) / max(1.0, run.config.fade * run.config.max_steps)))
    seen = torch.zeros(2, dtype=torch.float64, device=run.device)  # lm loss; a signal to stop
    for micro in range(run.micros):
        batch = next(source)
        last = contextlib.nullcontext() if run.ranks == 1 or micro == run.micros - 1 else forward.no_sync()
        with last, run.autocast():
            losses = forward(batch[:, :-1], batch[:, 1:], auxiliary=share > 0)
            (run.model.total_loss(losses, share) / run.micros).backward()
        seen[0] += losses["lm"].detach().double() / run.micros / run.ranks
    seen[1] = len(asked)
    loss, leave = all_reduce(seen).tolist()
    grad_norm = torch.nn.utils.get_total_norm([p.grad for p in run.model.parameters() if p.grad is not None]).item()
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        run.writer.wait()
        raise UserError(diverged(run.config, run.step, loss, grad_norm, run.saved))
    run.optimizer.step()
    run.optimizer.zero_grad()
    update_moments(run.model)
    run.step += 1
    return loss, grad_norm, leave > 0


def parallel(run):
    """The model as it is called in training: compiled on a GPU, its gradients averaged over the ranks."""
    forward, config = run.model, run.config
    if config.compile == "yes" or config.compile == "auto" and run.device.type == "cuda":
        forward = torch.compile(forward)
    if run.ranks > 1:
        # Once, here, rank 0's weights and buffers go to all; then the buffers move alike on every rank.
        forward = DistributedDataParallel(forward, forward_sync_buffers=False, gradient_as_bucket_view=True)
    return forward


def batches(run):
    """This rank's batches of every step that is left, one for each pass."""
    config = run.config
    keys = ((step, micro) for step in range(run.step, config.max_steps) for micro in range(run.micros))

    def make(key):
        return run.tokens.batch(config.seed, key[0], config.batch_tokens // config.context, config.context, run.rank,
                                run.ranks, key[1], run.micros)
    return data.prefetch(make, keys, run.device)


def examine(run):
    """The evaluation of a step, and what follows from it."""
    config = run.config
    row = evaluate(run.model, run.val_tokens, config, run.rank, run.ranks, run.device, run.autocast)
    if is_toy(run.encoding):
        row |= {kind: right.mean().item() for kind, (right, _) in toy_answers(run.model, run.encoding).items()}
    target = config.stop_at_val_loss
    run.stopped = target is not None and row["val_loss"] <= target * (1 + config.stop_tolerance)
    if row["val_loss"] < run.best:
        run.best, run.best_step = row["val_loss"], run.step
    return row | (run.also(run) if run.also else {})


# What a run leaves on disk


def contents(run):
    """A checkpoint but for the optimiser's state."""
    lists = {key: list(getattr(run.config, key)) for key in ("bits", "active", "children")}
    return {"config": dataclasses.asdict(run.config) | lists,
            "step": run.step, "best": run.best, "best_step": run.best_step,
            "stopped": run.stopped, "fresh": run.fresh, "wandb_id": run.wandb_id,
            "tokenizer": pack_tokenizer(run.encoding), "model": run.model.state_dict()}


def save_run(run, whole, must=False):
    """A copy of this step, for a thread to write: ckpt.pt if whole, and best.pt if it is the best.

    What must be saved is waited for, and so is the first checkpoint, which a run of --fresh=true needs to take an
    older one's place. All ranks wait, through the store: a collective would give up on a slow disk.
    """
    wait = must or not run.saved
    with all_or_none():
        run.writer.wait()  # before the copy, so that there is one at a time
    state = {"optimizer": run.optimizer.state_dict()} if whole else {}  # all ranks: it is gathered
    run.saved = run.saved or whole
    if run.rank == 0:
        run.writer.start(write_run, run, copied(contents(run) | state, run.device), must)
    if wait:
        with all_or_none():
            run.writer.wait()


def write_run(run, content, must):
    """In the writer's thread, while the run is steps ahead: what it writes is the content's, not the run's.

    ckpt.pt comes first, then the end of an older run, then best.pt: restore does what a kill left undone of these.
    What cannot be written is said, or raised if it must be.
    """
    saved = "optimizer" in content
    if saved:
        try:
            save(run.path("ckpt.pt"), content, keep=not run.fresh)
        except UserError as error:
            if must:
                raise
            say(f"{error}. Going on; the last good checkpoint is older")
            saved = False
    if saved and run.fresh:
        replace_older(run)
    if content["best_step"] == content["step"] and not run.fresh:  # a best.pt of an older run stays while it does
        save_best(run, content, saved)


def save_best(run, content, saved=False):
    """best.pt: a second name for a ckpt.pt that was saved with this content, so that no weight is written twice."""
    path = run.path("best.pt")
    if not (saved and link_file(run.path("ckpt.pt"), path)):
        try:
            save(path, {key: value for key, value in content.items() if key != "optimizer"})
        except UserError as error:
            say(error)


def replace_older(run):
    """A run of --fresh=true has its first checkpoint: what else there is of the older run goes."""
    for name in ("ckpt.prev.pt", "best.pt", "loss.png"):
        with contextlib.suppress(FileNotFoundError):
            os.remove(run.path(name))
    write_config(run)
    os.replace(run.path(f"metrics.{run.fresh}.jsonl"), run.path("metrics.jsonl"))
    for left in glob.glob(os.path.join(glob.escape(run.config.out), f"metrics.{'[0-9a-f]' * 8}.jsonl")):
        os.remove(left)  # of others that did not come so far
    run.fresh = ""


def write_config(run):
    on_gpu = run.device.type == "cuda"
    where = torch.cuda.get_device_name(run.device) if on_gpu else f"cpu, {torch.get_num_threads()} threads"
    about = provenance() | {"ranks": run.ranks, "device": where, "parameters": run.model.count_parameters()}
    write_json(run.path("config.json"), dataclasses.asdict(run.config) | {"about": about}, indent=2)


class Metrics:
    """metrics.jsonl, and the optional loggers. A continued run first drops the rows that its checkpoint does not know.

    A row that cannot be written, on a full disk, waits for the next one.
    """

    def __init__(self, run):
        self.run, self.waiting = run, []
        known = plot.read_metrics(run.config.out, say) if run.step else []
        rows = [row for row in known if row["step"] <= run.step]
        last = max((row["step"] for row in rows), default=0)
        if run.step - last >= run.config.log_every:
            say(f"{self.path()} has no row between steps {last} and {run.step}: they were lost, or logged less often")
        with whole_file(self.path()) as file:
            file.writelines(map(checked_line, rows))
        self.size = os.path.getsize(self.path())
        self.loggers = [start(run) for start in find_loggers(run.config)]

    def path(self):
        run = self.run
        return run.path(f"metrics.{run.fresh}.jsonl" if run.fresh else "metrics.jsonl")

    def write(self, row):
        self.waiting.append(checked_line(row))
        try:
            with open(self.path(), "r+") as file:
                file.truncate(self.size)  # half a row may be there
                file.seek(self.size)
                file.writelines(self.waiting)
            self.size, self.waiting = os.path.getsize(self.path()), []
        except OSError as error:
            say(f"{self.path()} could not be written ({error.strerror}). Going on; the row is kept for later")
        for log in self.loggers:
            log(row)


def find_loggers(config):
    """The functions that start the loggers asked for, which must be installed."""
    found = []
    if config.wandb:
        found.append(functools.partial(start_wandb, optional("wandb")))
    if config.tensorboard:
        found.append(functools.partial(start_tensorboard, optional("torch.utils.tensorboard", "tensorboard")))
    return found


def start_wandb(wandb, run):
    run.wandb_id = run.wandb_id or secrets.token_hex(8)
    logger = wandb.init(project="parity-transformer", name=os.path.basename(run.config.out), id=run.wandb_id,
                        config=dataclasses.asdict(run.config), resume="allow")
    return lambda row: logger.log(row, step=row["step"])


def start_tensorboard(tensorboard, run):
    writer = tensorboard.SummaryWriter(run.config.out)
    return lambda row: [writer.add_scalar(key, value, row["step"]) for key, value in row.items()
                        if isinstance(value, (int, float))]


def optional(module, package=None):
    try:
        return __import__(module, fromlist=["_"])
    except ImportError:
        raise UserError(f"{package or module} is not installed: "
                        f"pip install {package or module}, or leave it off") from None


# What it says


def peak_flops(device):
    """Of a GPU that is known; else None."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for part, flops in PEAK.items() if part in name), None)


def flops_per_token(model):
    """Forward and backward: 6 per weight of a matrix product, and the attention scores."""
    config = model.config
    weights = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2) + model.embedding.weight.numel()
    return 6 * weights + 12 * config.layers * config.d * config.context


def diverged(config, step, loss, grad_norm, saved):
    windows = config.batch_tokens // config.context
    path = os.path.join(config.out, "ckpt.pt")
    good = f"the last good checkpoint is {path}" if saved else "there is no checkpoint yet"
    return (f"the loss is {loss} and the gradient's norm {grad_norm} at step {step}, "
            f"on windows {step * windows}..{(step + 1) * windows - 1} of the order of seed {config.seed}; {good}. "
            "Lower muon_lr or adam_lr, or look at the data there")


def describe(row, config):
    text = f"step {row['step']:>6}  loss {row['loss']:.4f}  val_loss {row['val_loss']:.4f}"
    if "dead_fraction" in row:
        text += (f"  dead {' '.join(f'{share:.2%}' for share in row['dead_fraction'])}"
                 f"  explained {row['variance_explained']:.3f}")
    return text + "".join(f"  {kind} {row[kind]:.2f}" for kind in toyworld.QUESTIONS if kind in row)


def show_progress(config, step, loss, seconds, mean_seconds, model, peak, ranks):
    rate = config.batch_tokens / seconds
    left = int((config.max_steps - step) * mean_seconds)
    use = f"  MFU {rate * flops_per_token(model) / peak / ranks:.1%}" if peak else ""
    progress(f"step {step}/{config.max_steps}  loss {loss:.4f}  {rate:,.0f} tokens/s{use}"
             f"  {left // 60}:{left % 60:02d} left")


def finish(config):
    """The picture, and what to do next."""
    rows = [row for row in plot.read_metrics(config.out) if "val_loss" in row]
    if not rows:
        return say(f"{config.out} has no metrics.jsonl any more, and so no picture")
    picture = os.path.join(config.out, "loss.png")
    plot.losses([config.out], picture)
    lowest = min(rows, key=lambda row: row["val_loss"])
    say(f"done: validation loss {rows[-1]['val_loss']:.4f} (lowest {lowest['val_loss']:.4f}, at step {lowest['step']})")
    say(f"in {config.out}: best.pt, ckpt.pt, config.json, metrics.jsonl, loss.png")
    here = os.path.dirname(os.path.abspath(__file__))
    for script in ("sample.py", "eval.py"):
        if os.path.exists(os.path.join(here, script)):
            say(f"next: python {script} {config.out}")


def main(arguments):
    if {"-h", "--help"} & set(arguments):
        title = "Settings of a config file or --key=value, with their defaults:"
        return print(f"{__doc__}\n{title}\n\n{configs.describe()}")
    try:
        train(configs.load(arguments))
    finally:
        leave_ranks()


if __name__ == "__main__":
    run_script(main, "left at once; the last checkpoint is kept")
