"""Ranks: the processes that torchrun starts. Without torchrun there is one, and nothing is communicated.

    rank, ranks, device = start_ranks("auto")
"""
import os
import secrets
import time

import torch
import torch.distributed as dist

from helpers import UserError


def pick_device(name):
    """The torch.device of a user's word: auto, cpu, cuda or cuda:1."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or number and not number.isdecimal():
        raise UserError(f"there is no device {name!r}: the names are auto, cpu, cuda and cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name!r}, but torch finds no GPU: use cpu, or install a CUDA build of torch")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name!r}, but there are only {torch.cuda.device_count()} GPUs, the first cuda:0")
    return torch.device(kind if kind == "cpu" else name)


def start_ranks(device):
    """(rank, ranks, device); joins the process group that torchrun describes."""
    device = pick_device(device)
    if "RANK" not in os.environ:
        return 0, 1, device
    numbers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    wrong = [name for name in numbers if not os.environ.get(name, "").isdecimal()]
    wrong += [] if os.environ.get("MASTER_ADDR") else ["MASTER_ADDR"]
    if wrong:
        raise UserError(f"RANK is set, but missing or wrong: {', '.join(wrong)}. Start several ranks with torchrun, or "
                        "unset RANK")
    if device == torch.device("cuda"):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    store, rank, ranks = next(dist.rendezvous("env://"))
    store = store_of_this_attempt(store, rank, ranks)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=ranks)
    return rank, ranks, device


def store_of_this_attempt(store, rank, ranks):
    """
    A store without the keys of earlier attempts. torchrun keeps one store over its restarts, and a rank that reads
    the address of a process that is gone can't connect. Nor do nodes agree on the number of restarts: each counts its
    own. So rank 0 draws a name for the attempt and tells it to every rank that can answer.
    """
    name = secrets.token_hex(8)
    if rank:
        store.set(f"hello/{rank}", name)
        attempt = store.get(f"attempt of {name}").decode()  # waits for rank 0
        store.set(f"{attempt}/answer/{rank}", "")
        return dist.PrefixStore(attempt, store)
    deadline = time.monotonic() + store.timeout.total_seconds()
    waiting = set(range(1, ranks))
    while waiting:
        for other in sorted(waiting):
            if store.check([f"{name}/answer/{other}"]):
                waiting.remove(other)
            elif store.check([f"hello/{other}"]):  # perhaps of a process that is gone: the living one will overwrite it
                store.set(f"attempt of {store.get(f'hello/{other}').decode()}", name)
        if time.monotonic() > deadline:
            raise UserError(f"ranks {sorted(waiting)} did not come within {store.timeout}: "
                            "is the command running on every node?")
        time.sleep(0.02)
    return dist.PrefixStore(name, store)


def all_reduce(tensor, op=dist.ReduceOp.SUM):
    if dist.is_initialized():
        dist.all_reduce(tensor, op)
    return tensor


def barrier():
    if dist.is_initialized():
        dist.barrier()


def leave_ranks():
    if dist.is_initialized():
        dist.destroy_process_group()
