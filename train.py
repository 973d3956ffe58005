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
import itertools
import json
import math
import os
import signal
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import config as configs
import data
import plot
from checkpoint import checkpoint_path, load, load_newest, save
from dpb import DeepParityBottleneck, update_moments
from features import FeatureCounts
from helpers import UserError, progress, provenance, run_script, say, whole_file, write_json
from model import GPT
from optim import MuonAdam, schedule, split_parameters
from ranks import all_reduce, barrier, leave_ranks, start_ranks
from tokenizer import load_tokenizer, pack_tokenizer

PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "4090": 165e12}  # dense bfloat16, per second


def micro_steps(config, ranks):
    """Accumulation steps of one optimiser step on each rank: the fewest whose passes hold at most micro_batch sequences."""
    sequences, left = divmod(config.batch_tokens // config.context, ranks)
    if left or not sequences:
        raise UserError(f"batch_tokens={config.batch_tokens} is {config.batch_tokens // config.context} sequences, which {ranks} ranks "
                         f"cannot share evenly: use a multiple of {ranks * config.context}")
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
        row["dead_fraction"] = [1 - alive[:, low:high].mean().item() for low, high in itertools.pairwise(features.layers[0].lows)]
        row["l0"] = features.fired.sum().item() / count / len(features.layers)
        row["variance_explained"] = features.explained[:, -1].mean().item()
    return row


@torch.no_grad()
def ask_toy_questions(model, encoding, device, count=256):
    """The share of the toy world's questions that the model answers right: more mass on right answers than on wrong ones."""
    import random

    import toyworld

    model.eval()
    shares = {}
    for kind in toyworld.QUESTIONS:
        rng = random.Random(1)
        questions = [toyworld.ask(kind, rng) for _ in range(count)]
        prompts = [torch.tensor([encoding.eot_token, *encoding.encode_ordinary(question.prompt)]) for question in questions]
        padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(device)  # no token sees what follows it
        ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        mass = model(padded)[torch.arange(count, device=device), ends].float().softmax(-1).cpu()  # (count, V)

        def of(answers, row):
            return sum(row[encoding.encode_single_token(answer)].item() for answer in answers)
        shares[kind] = sum(of(question.right, row) > of(question.wrong, row) for question, row in zip(questions, mass)) / count
    model.train()
    return shares


# The run


def write_config(config, model, ranks, device):
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    about = provenance() | {"ranks": ranks, "device": where, "parameters": model.count_parameters()}
    write_json(os.path.join(config.out, "config.json"), dataclasses.asdict(config) | {"about": about}, indent=2)


class Metrics:
    """metrics.jsonl, and the optional loggers. A continued run first drops the rows that its checkpoint does not know."""

    def __init__(self, config, step):
        self.path = os.path.join(config.out, "metrics.jsonl")
        rows = [row for row in read_metrics(config.out) if row["step"] <= step] if step else []
        with whole_file(self.path) as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        self.loggers = []
        if config.wandb:
            wandb = optional("wandb")
            run = wandb.init(project="parity-transformer", name=os.path.basename(config.out), config=dataclasses.asdict(config), resume="allow")
            self.loggers.append(lambda row: run.log(row, step=row["step"]))
        if config.tensorboard:
            writer = optional("torch.utils.tensorboard", "tensorboard").SummaryWriter(config.out)
            self.loggers.append(lambda row: [writer.add_scalar(key, value, row["step"]) for key, value in row.items()
                                             if isinstance(value, (int, float))])

    def write(self, row):
        with open(self.path, "a") as file:
            file.write(json.dumps(row) + "\n")
        for log in self.loggers:
            log(row)


def optional(module, package=None):
    try:
        return __import__(module, fromlist=["_"])
    except ImportError:
        raise UserError(f"{package or module} is not installed: pip install {package or module}, or leave it off") from None


def read_metrics(out):
    """The rows of a run's metrics.jsonl; a last line that was cut off is left out."""
    rows = []
    with contextlib.suppress(FileNotFoundError), open(os.path.join(out, "metrics.jsonl")) as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def is_toy(config):
    return os.path.basename(os.path.normpath(config.data)) == "toy"


def open_data(config, rank):
    """(training tokens, validation tokens, tokenizer); makes the toy corpus where it is asked for and missing."""
    state = data.read_state(config.data, must=False)
    if rank == 0 and is_toy(config) and not (state and state["done"]):
        data.prepare_toy(config.data)
    barrier()
    splits = [data.Tokens(config.data, split, verify=rank == 0) for split in ("train", "val")]
    data.check_vocabulary(splits[0], config.vocab_size)
    splits[0].count(config.context), splits[1].count(config.context)
    return *splits, load_tokenizer(config.data)


def flops_per_token(model):
    """Forward and backward: 6 per weight of a matrix product, and the attention scores."""
    config = model.config
    weights = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2) + model.embedding.weight.numel()
    return 6 * weights + 12 * config.layers * config.d * config.context


def train(config):
    rank, ranks, device = start_ranks(config.device)
    torch.manual_seed(config.seed)
    torch.set_float32_matmul_precision("high")  # what is left in float32 on a GPU may use TF32
    micros = micro_steps(config, ranks)
    train_tokens, val_tokens, encoding = open_data(config, rank)
    os.makedirs(config.out, exist_ok=True)

    model = GPT(config).to(device)
    for module in model.modules():
        if isinstance(module, DeepParityBottleneck):
            module.passes = ranks * micros
    optimizer = MuonAdam(*split_parameters(model), config.muon_lr, config.adam_lr, weight_decay=config.weight_decay)
    step, best = 0, math.inf
    checkpoint = None if config.fresh else load_newest(config.out, say)
    if checkpoint:
        changed = configs.differences(config, checkpoint["config"])
        if changed:
            listed = ", ".join(f"{key} (was {checkpoint['config'][key]}, now {getattr(config, key)})" for key in changed)
            raise UserError(f"{config.out} holds a run with another config: {listed}. Restore it, choose another --out, or "
                             "start over with --fresh=true")
        if checkpoint["tokenizer"]["id"] != train_tokens.tokenizer_id:
            raise UserError(f"{config.out} was trained on data of another tokenizer than {config.data}'s: give its own --data, "
                             "or start over with --fresh=true")
        model.load_state_dict(checkpoint["model"])
        if checkpoint["step"] >= config.max_steps or checkpoint["stopped"]:
            say(f"{config.out} is finished, at step {checkpoint['step']}. --fresh=true starts over")
            return
        optimizer.load_state_dict(checkpoint["optimizer"])
        step, best = checkpoint["step"], checkpoint["best"]
        say(f"continuing {config.out} from step {step}")
    elif config.init_from:
        path = checkpoint_path(config.init_from)
        try:
            model.load_state_dict(load(path)["model"])
        except RuntimeError as error:
            raise UserError(f"{path} holds another model than this config: {error}") from error
        say(f"starting from the weights of {path}")
    del checkpoint

    compiled = model
    if config.compile == "yes" or config.compile == "auto" and device.type == "cuda":
        compiled = torch.compile(model)
    if ranks > 1:
        compiled = DistributedDataParallel(compiled, broadcast_buffers=False, gradient_as_bucket_view=True)

    def autocast():
        return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()

    metrics = None
    if rank == 0:
        if not step:
            for name in ("ckpt.pt", "ckpt.prev.pt", "best.pt", "metrics.jsonl"):
                with contextlib.suppress(FileNotFoundError):
                    os.remove(os.path.join(config.out, name))
        metrics = Metrics(config, step)
        write_config(config, model, ranks, device)
    say(f"{config.out}: {model.count_parameters():,} parameters, bottleneck {config.bottleneck}, {ranks} rank(s) on {device.type}, "
        f"{micros} pass(es) of {config.batch_tokens // config.context // ranks // micros} x {config.context} tokens a step")

    def contents(whole=True):
        found = {"config": dataclasses.asdict(config) | {"bits": list(config.bits), "active": list(config.active),
                                                         "children": list(config.children)},
                 "step": step, "best": best, "stopped": stopped, "tokenizer": pack_tokenizer(encoding), "model": model.state_dict()}
        return found | {"optimizer": optimizer.state_dict()} if whole else found

    def save_run(must=False):
        content = contents()  # all ranks: the optimiser's state is gathered
        if rank == 0:
            try:
                save(os.path.join(config.out, "ckpt.pt"), content, keep=True)
            except UserError as error:
                if must:
                    raise
                say(f"{error}. Going on; the last good checkpoint is older")

    def run_batches():
        keys = itertools.product(range(step, config.max_steps), range(micros))
        return data.prefetch(lambda key: train_tokens.batch(config.seed, key[0], config.batch_tokens // config.context, config.context,
                                                            rank, ranks, key[1], micros), keys, device)

    asked_to_stop = []
    handlers = {name: signal.signal(name, lambda number, frame: stop_soon(number, asked_to_stop))
                for name in (signal.SIGTERM, signal.SIGINT)}
    peak = next((flops for name, flops in PEAK.items() if device.type == "cuda" and name in torch.cuda.get_device_name(device)), None)
    warmup = min(config.warmup_steps, config.max_steps - round(config.decay_fraction * config.max_steps))
    stopped, began, first, since = False, time.perf_counter(), step, time.perf_counter()
    batches = run_batches()
    try:
        while step < config.max_steps and not stopped:
            rate = schedule(step, config.max_steps, warmup, config.decay_fraction)
            optimizer.scale_lr(rate)
            seen = torch.zeros(2, dtype=torch.float64, device=device)  # lm loss; a signal to stop
            for micro in range(micros):
                batch = next(batches)
                last = contextlib.nullcontext() if ranks == 1 or micro == micros - 1 else compiled.no_sync()
                with last, autocast():
                    losses = compiled(batch[:, :-1], batch[:, 1:])
                    (model.total_loss(losses) / micros).backward()
                seen[0] += losses["lm"].detach().double() / micros / ranks
            seen[1] = len(asked_to_stop)
            loss, leave = all_reduce(seen).tolist()
            grad_norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise UserError(diverged(config, step, loss, grad_norm))
            optimizer.step()
            optimizer.zero_grad()
            update_moments(model)
            step += 1

            now = time.perf_counter()
            row = {"step": step, "tokens": step * config.batch_tokens, "loss": loss, "lr": config.muon_lr * rate, "grad_norm": grad_norm}
            final = step == config.max_steps
            if step % config.eval_every == 0 or final:
                row |= evaluate(model, val_tokens, config, rank, ranks, device, autocast)
                if is_toy(config):
                    row |= ask_toy_questions(model, encoding, device)
                target = config.stop_at_val_loss
                stopped = target is not None and row["val_loss"] <= target * (1 + config.stop_tolerance)
                if row["val_loss"] < best:
                    best = row["val_loss"]
                    if rank == 0:
                        save_best(config, contents(whole=False))
                say(describe(row, config))
            if step % config.log_every == 0 or "val_loss" in row:
                row["tokens_per_second"] = round(config.batch_tokens * (step - first) / (now - began))
                if metrics:
                    metrics.write(row)
            show_progress(config, step, loss, now - since, (now - began) / (step - first), model, peak, ranks)
            since = time.perf_counter()
            if step % config.save_every == 0 or final or stopped or leave:
                save_run(must=final or stopped or leave)
            if leave and not final:
                say(f"stopped at step {step}, saved: the same command goes on from there")
                return
    finally:
        batches.close()
        for name, handler in handlers.items():
            signal.signal(name, handler)
    if rank == 0:
        finish(config)
    barrier()


def stop_soon(number, asked):
    """A signal's handler: the loop looks at `asked` after each step. A second Ctrl-C leaves at once."""
    if number == signal.SIGINT and number in asked:
        raise KeyboardInterrupt
    asked.append(number)


def save_best(config, content):
    try:
        save(os.path.join(config.out, "best.pt"), content)
    except UserError as error:
        say(error)


def diverged(config, step, loss, grad_norm):
    windows = config.batch_tokens // config.context
    path = os.path.join(config.out, "ckpt.pt")
    good = f"the last good checkpoint is {path}" if os.path.exists(path) else "there is no checkpoint yet"
    return (f"the loss is {loss} and the gradient's norm {grad_norm} at step {step}, on windows {step * windows}..{(step + 1) * windows - 1} "
            f"of the order of seed {config.seed}; {good}. Lower muon_lr or adam_lr, or look at the data there")


def describe(row, config):
    text = f"step {row['step']:>6}  loss {row['loss']:.4f}  val_loss {row['val_loss']:.4f}"
    if "dead_fraction" in row:
        text += f"  dead {' '.join(f'{share:.2%}' for share in row['dead_fraction'])}  explained {row['variance_explained']:.3f}"
    return text + "".join(f"  {kind} {row[kind]:.2f}" for kind in ("ioi", "pronoun", "greater_than") if kind in row)


def show_progress(config, step, loss, seconds, mean_seconds, model, peak, ranks):
    rate = config.batch_tokens / seconds
    left = int((config.max_steps - step) * mean_seconds)
    use = f"  MFU {rate * flops_per_token(model) / peak / ranks:.1%}" if peak else ""
    progress(f"step {step}/{config.max_steps}  loss {loss:.4f}  {rate:,.0f} tokens/s{use}  {left // 60}:{left % 60:02d} left")


def finish(config):
    """The picture, and what to do next."""
    rows = [row for row in read_metrics(config.out) if "val_loss" in row]
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
    try:
        train(configs.load(arguments))
    finally:
        leave_ranks()


if __name__ == "__main__":
    run_script(main, "left at once; the last checkpoint is kept")
