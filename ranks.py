"""Ranks: the processes that torchrun starts. Without torchrun there is one, and nothing is communicated.

    rank, ranks, device = start_ranks("auto")
"""
import contextlib
import itertools
import json
import os
import secrets
import socket
import time

import torch
import torch.distributed as dist

from helpers import UserError

STORE = None                # where ranks leave each other notes, once there are several
ROUNDS = itertools.count()  # of share: its calls are the same on all ranks
PATIENCE = 2 * 60 * 60      # seconds that share waits for a rank: enough to read 40 GB at 6 MB a second


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
        device = pick_device(f"cuda:{os.environ['LOCAL_RANK']}")
        torch.cuda.set_device(device)
    global STORE
    store, rank, ranks = next(dist.rendezvous("env://"))
    STORE = store_of_this_attempt(store, rank, ranks)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=STORE, rank=rank, world_size=ranks)
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


def is_first_of_node():
    return os.environ.get("LOCAL_RANK", "0") == "0"


def share(value):
    """The values of all ranks, in their order: plain values that JSON keeps.

    They go through the store, not through a collective, which gives up after its timeout if a rank is busy for long,
    with the checksums of its data, say. Rank 0 leaves last, for its process may be the one that keeps the store.
    """
    if not STORE:
        return [value]
    number, rank, ranks = next(ROUNDS), dist.get_rank(), range(dist.get_world_size())
    values, seen = ([f"{what}/{number}/{other}" for other in ranks] for what in ("value", "seen"))
    STORE.set(values[rank], json.dumps(value))
    if not wait_for(values, PATIENCE):
        missing = [other for other in ranks if not STORE.check([values[other]])]
        raise UserError(f"ranks {missing} did not answer within {PATIENCE / 3600:g} hours: see what their nodes say")
    told = [json.loads(STORE.get(key)) for key in values]
    STORE.set(seen[rank], "")
    if rank == 0:
        wait_for(seen, 30)
    return told


def wait_for(keys, seconds):
    """Whether all these keys were in the store before the time was over."""
    deadline = time.monotonic() + seconds
    while not (there := STORE.check(keys)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return there


@contextlib.contextmanager
def all_or_none():
    """What fails on one rank fails on all of them, with the same words: none is left to wait for one that is gone."""
    problem = None
    try:
        yield
    except Exception as error:
        problem = error
    told = share(problem and f"rank {os.environ.get('RANK')} on {socket.gethostname()}: {problem}")
    if problem:
        raise problem
    for text in filter(None, told):
        raise UserError(text)


def agree(values, way_out):
    """An error on all ranks if {name: value} of one is another than rank 0's."""
    told = share([socket.gethostname(), values])
    first_host, first = told[0]
    for rank, (host, other) in enumerate(told):
        for name in first:
            if other[name] != first[name]:
                raise UserError(f"rank {rank} on {host} has {name}={other[name]}, but rank 0 on {first_host} has "
                                f"{first[name]}: {way_out}")


def all_reduce(tensor, op=dist.ReduceOp.SUM):
    if dist.is_initialized():
        dist.all_reduce(tensor, op)
    return tensor


def count_ranks():
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier():
    share(None)


def leave_ranks():
    global STORE
    STORE = None
    if dist.is_initialized():
        dist.destroy_process_group()
