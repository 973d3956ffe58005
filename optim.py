"""Muon for the matrices inside the blocks, AdamW for everything else, the work of Muon shared out over the ranks.

    optimizer = MuonAdam(*split_parameters(model), muon_lr=0.02, adam_lr=3e-3)
    ...
    optimizer.scale_lr(schedule(step, max_steps, warmup=100, decay_fraction=0.6))
    optimizer.step()

Muon keeps a running mean of a matrix's gradient G and takes a step of fixed size in its direction:

    M <- mu M + (1 - mu) G,    U = (1 - mu) G + mu M,    W <- (1 - lr decay) W - lr ratio orthogonal(U)

where orthogonal(U) has the singular vectors of U and singular values near 1, by Newton-Schulz. It is the update of
`torch.optim.Muon`, which orthogonalises one matrix at a time, in bf16, all of them on every rank. Here it is float32 on
a CPU and bf16 on a GPU; matrices of one shape go through as one batch; and a rank keeps the momentum of, and
orthogonalises, its own share alone. One all-gather a step then brings every update to every rank, so the
parameters stay equal bit by bit if the gradients were: average them before the step, as DDP does.
"""
import itertools
import math

import torch
import torch.distributed as dist

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the quintic: steepest at zero, so that small singular values rise fast
NS_STEPS = 5
EPS = 1e-7
BATCH = 2 ** 26  # most elements that go through Newton-Schulz at once: bounds the memory of large models
ADJUST = {  # the factor on the learning rate, by (rows, columns) of the matrix
    "original": lambda rows, cols: math.sqrt(max(1, rows / cols)),
    "match_rms_adamw": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),  # an entry moves as far as under AdamW
}


def schedule(step, max_steps, warmup, decay_fraction):
    """The factor in [0, 1] on the learning rate of step 0, 1, ...: linear warm-up, flat, linear to zero.

    It rises for `warmup` steps, the last of which has factor 1, and falls over the last `decay_fraction` of max_steps,
    the planned budget (rounded to whole steps), to reach zero at max_steps itself. A run meant to stop early still
    gives the planned number.
    """
    if max_steps < 1 or not 0 <= step <= max_steps:
        raise ValueError(f"step={step} must lie in 0..max_steps and max_steps={max_steps} be at least 1")
    if warmup < 0 or not 0 <= decay_fraction <= 1:
        raise ValueError(f"warmup={warmup} must be a number of steps from 0, "
                         f"decay_fraction={decay_fraction} lie in 0..1")
    decay = round(decay_fraction * max_steps)
    if warmup + decay > max_steps:
        raise ValueError(f"warmup={warmup} and the last {decay} steps (decay_fraction={decay_fraction}) "
                         f"do not fit into max_steps={max_steps}; "
                         f"make warmup at most {max_steps - decay}, or decay_fraction smaller")
    if step < warmup:
        return (step + 1) / warmup
    return min(1.0, (max_steps - step) / decay) if decay else 1.0


def split_parameters(model):
    """({name: parameter} for Muon, the same for Adam). Muon has the 2-D parameters named "blocks. ...".

    Adam has embeddings, positions and gains, and what is named "topk.": a learned encoder or decoder has a row for each
    feature, like an embedding, and an orthogonal update would move the rows of rare features as far as the others.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    muon = {name for name, p in named.items() if name.startswith("blocks.") and p.ndim == 2 and "topk." not in name}
    if not muon:
        raise ValueError(f"{type(model).__name__} has no matrix for Muon, a 2-D parameter whose name starts with "
                         "\"blocks.\"; give the model itself, not what DDP or torch.compile made of it")
    return {n: named[n] for n in named if n in muon}, {n: named[n] for n in named if n not in muon}


def wide(matrix):
    """The matrix or its transpose, whichever has no more rows than columns."""
    return matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix


def orthogonalise(x):
    """A batch of wide matrices (n, rows, columns) with all singular values brought near 1. Overwrites x."""
    a, b, c = COEFFICIENTS
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS))  # now none exceeds 1
    for _ in range(NS_STEPS):
        gram = x @ x.mT  # (n, rows, rows)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def deal(matrices, ranks):
    """The names of each rank's matrices, those of one shape adjacent. The largest first, each to the least loaded."""
    shares, load = [[] for _ in range(ranks)], [0] * ranks
    for name, p in sorted(matrices.items(), key=lambda item: (item[1].numel(), wide(item[1]).shape), reverse=True):
        rank = load.index(min(load))
        shares[rank].append(name)
        load[rank] += p.numel()
    return shares


class MuonAdam:
    """
    matrices, others: {name: parameter} for Muon and for Adam, as split_parameters gives. Under torch.distributed, first
        call init_process_group: the matrices are shared out here.
    muon_lr, adam_lr: peak learning rates; scale_lr(factor) sets the ones in use.
    momentum: mu above.  weight_decay: of the matrices only, times the learning rate.  betas, eps: Adam's.
    adjust: "original" or "match_rms_adamw", the factor `ratio` above (see ADJUST).
    """

    def __init__(self, matrices, others, muon_lr=0.02, adam_lr=3e-3, momentum=0.95, weight_decay=0.0, adjust="original",
                 betas=(0.9, 0.95), eps=1e-8):
        for name, p in matrices.items():
            if p.ndim != 2:
                raise ValueError(f"Muon is for matrices, but {name} has shape {tuple(p.shape)}; give it to Adam")
        if len({(p.dtype, p.device) for p in matrices.values()}) > 1:
            raise ValueError("the matrices for Muon must be of one dtype and on one device: they share one all-gather")
        if muon_lr < 0 or weight_decay < 0 or not 0 <= momentum < 1:
            raise ValueError(f"muon_lr={muon_lr} and weight_decay={weight_decay} must be at least 0, and "
                             f"momentum={momentum} lie in [0, 1)")
        if adjust not in ADJUST:
            raise ValueError(f"adjust={adjust!r} must be one of {', '.join(ADJUST)}")
        self.matrices, self.others, self.mu, self.ratio = dict(matrices), dict(others), momentum, ADJUST[adjust]
        shared = dist.is_available() and dist.is_initialized()
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if shared else (0, 1)
        first = next(iter(self.matrices.values()), torch.empty(0))
        self.device = first.device
        self.dtype = torch.bfloat16 if first.is_cuda else torch.promote_types(first.dtype, torch.float32)  # of updates
        self.shares = deal(self.matrices, self.ranks)
        self.momentum = {name: torch.zeros_like(self.matrices[name]) for name in self.shares[self.rank]}
        self.group = dict(params=list(self.matrices.values()), lr=muon_lr, peak_lr=muon_lr, weight_decay=weight_decay)
        self.adam = None
        if others:  # AdamW refuses an empty list
            group = dict(params=list(others.values()), lr=adam_lr, peak_lr=adam_lr)
            fused = all(p.is_cuda for p in others.values()) or None  # None: as torch sees fit
            self.adam = torch.optim.AdamW([group], betas=betas, eps=eps, weight_decay=0.0, fused=fused)

    @property
    def param_groups(self):
        """Muon's group and Adam's, each with its "params", "lr" (in use) and "peak_lr"."""
        return [self.group] + (self.adam.param_groups if self.adam else [])

    def scale_lr(self, factor):
        for group in self.param_groups:
            group["lr"] = factor * group["peak_lr"]

    def zero_grad(self):
        for p in itertools.chain(self.matrices.values(), self.others.values()):
            p.grad = None

    @torch.no_grad()
    def step(self):
        """Move every parameter that has a gradient. On all ranks the same parameters must have one."""
        if self.adam:
            self.adam.step()
        ready = [[name for name in share if self.matrices[name].grad is not None] for share in self.shares]
        updates = self.directions(ready[self.rank])
        if self.ranks > 1 and any(ready):
            updates = self.gather(updates, ready)
        lr, decay = self.group["lr"], self.group["weight_decay"]
        for name, update in updates.items():
            p = self.matrices[name]
            p.mul_(1 - lr * decay).add_(update, alpha=-lr * self.ratio(*p.shape))

    def directions(self, names):
        """{name: orthogonal(U)} of matrices of this rank, those of one shape adjacent. Moves their momentum."""
        found = {}
        for shape, alike in itertools.groupby(names, key=lambda name: wide(self.matrices[name]).shape):
            alike = list(alike)
            size = max(1, BATCH // shape.numel())
            for batch in (alike[i : i + size] for i in range(0, len(alike), size)):
                x = torch.empty(len(batch), *shape, dtype=self.dtype, device=self.device)
                for slot, name in zip(x, batch):
                    grad = self.matrices[name].grad
                    average = self.momentum[name].lerp_(grad, 1 - self.mu)
                    slot.copy_(wide(grad.lerp(average, self.mu)))
                for update, name in zip(orthogonalise(x), batch):
                    found[name] = update if update.shape == self.matrices[name].shape else update.mT
        return found

    def gather(self, updates, ready):
        """The updates of all ranks, from those of this one.

        Shares are padded to the longest for one flat all-gather.
        """
        sizes = [[self.matrices[name].numel() for name in share] for share in ready]
        mine = torch.zeros(max(map(sum, sizes)), dtype=self.dtype, device=self.device)
        for name, part in zip(ready[self.rank], mine[: sum(sizes[self.rank])].split(sizes[self.rank])):
            part.view(self.matrices[name].shape).copy_(updates[name])
        gathered = mine.new_empty(self.ranks, len(mine))
        dist.all_gather_single(gathered.view(-1), mine)
        return {name: part.view(self.matrices[name].shape)
                for share, parts, flat in zip(ready, sizes, gathered)
                for name, part in zip(share, flat[: sum(parts)].split(parts))}

    def state_dict(self):
        """{"muon": {name: momentum}, "adam": {name: AdamW's own state}} on rank 0, None on others; all must call it.

        It does not depend on the number of ranks, and holds no setting: those come from the constructor. The tensors
        come to the CPU one at a time; those of a CPU run are the living ones, so save them before the next step.
        """
        owner = {name: rank for rank, share in enumerate(self.shares) for name in share}
        muon = {}
        for name, p in self.matrices.items():
            momentum = self.momentum[name] if owner[name] == self.rank else torch.empty_like(p)
            if self.ranks > 1:
                dist.broadcast(momentum, src=owner[name])
            if self.rank == 0:
                muon[name] = momentum.detach().cpu()
        if self.rank:
            return None
        adam = {name: {key: value.cpu() for key, value in self.adam.state[p].items()} if p in self.adam.state else {}
                for name, p in self.others.items()}
        return {"muon": muon, "adam": adam}

    @torch.no_grad()
    def load_state_dict(self, state):
        """Continue from a state_dict of any number of ranks: every rank is given all of it and copies its own share."""
        for part, named in ("muon", self.matrices), ("adam", self.others):
            for name in sorted(named.keys() ^ state[part].keys()):
                raise ValueError(f"the {part} state belongs to another model: {name} is only in "
                                 f"{'the state' if name in state[part] else 'the model'}")
            for name, p in named.items():
                saved = state[part][name] if part == "muon" else state[part][name].get("exp_avg", p)
                if saved.shape != p.shape:
                    raise ValueError(f"the {part} state belongs to another model: {name} has shape "
                                     f"{tuple(saved.shape)} in the state, {tuple(p.shape)} in the model")
        for name, momentum in self.momentum.items():
            momentum.copy_(state["muon"][name])
        if self.adam:
            saved = [{key: value.clone() for key, value in state["adam"][name].items()} for name in self.others]
            self.adam.load_state_dict({"state": {i: s for i, s in enumerate(saved) if s},
                                       "param_groups": self.adam.state_dict()["param_groups"]})
