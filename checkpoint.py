"""Checkpoints: written whole or not at all, read only if undamaged, opened as a model with its tokenizer.

    run = open_run("out/tiny")      Run(model, config, encoding, content, path): best.pt of a run, ready for evaluation

A checkpoint is a dict of plain values and tensors, loadable with weights_only=True: the config, the step, the
tokenizer, the model's state, and in ckpt.pt the optimiser's. torch.save writes a zip file with a checksum for each
tensor, so zipfile can tell whether it is whole.
"""
import concurrent.futures
import glob
import hashlib
import os
import pickle
import zipfile
from typing import NamedTuple

import tiktoken
import torch
import torch.distributed as dist

import config as configs
from helpers import UserError, first_line, is_out_of_memory, whole_file
from model import GPT
from ranks import pick_device
from tokenizer import unpack_tokenizer


def save(path, content, keep=False):
    """Write, flush to disk, rename: the file is whole or the old one. keep: the old one stays as PATH with .prev."""
    try:
        with whole_file(path, "wb", previous(path) if keep else None) as file:
            torch.save(content, file)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path} could not be written ({error}); what was there before is kept") from error


class Writer:
    """A thread that does one thing at a time. What goes wrong in it is raised where it is waited for.

    Leaving its `with` waits, too: however a run ends, no file is left half written.
    """

    def __init__(self):
        self.pool, self.work = concurrent.futures.ThreadPoolExecutor(1), None

    def start(self, function, *arguments):
        self.wait()
        self.work = self.pool.submit(function, *arguments)

    def wait(self):
        if self.work:
            concurrent.futures.wait([self.work])  # may be interrupted: the work is not done before this returns
            work, self.work = self.work, None
            work.result()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.wait()


def copied(content, device):
    """The content as it is now, for a thread to write while the run on this device goes on.

    A GPU copies to pinned memory several times as fast as to other memory, of which torch keeps what it has pinned.
    """
    def copy(tensor):
        if tensor.is_cuda:
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        return tensor.clone() if device.type == "cpu" else tensor  # of a GPU's run: the optimiser's, copies already
    content = map_tensors(copy, content)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return content


def previous(path):
    return path.removesuffix(".pt") + ".prev.pt"


def load_file(path):
    """What torch.save wrote, whole and harmless."""
    try:
        with zipfile.ZipFile(path) as file:
            if file.testzip() is not None:
                raise zipfile.BadZipFile("its checksum is wrong")
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"there is no checkpoint {path}") from None
    except pickle.UnpicklingError:  # its own text advises to open it all the same
        raise UserError(f"{path} is no checkpoint of train.py: it holds more than tensors and plain values, and could "
                        "run code when it is opened") from None
    except (IsADirectoryError, NotADirectoryError):
        raise UserError(f"{path} is no checkpoint, but a folder or in none") from None
    except OSError:  # a disk or network that fails for a moment is no damage
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"{path} is damaged or no checkpoint ({first_line(error)})") from error


def load(path):
    """The content of a checkpoint of train.py, or an error that says what is wrong with it."""
    content = load_file(path)
    kinds = {"config": dict, "tokenizer": dict, "model": dict, "step": int}
    content = content if isinstance(content, dict) else {}
    wrong = [key for key, kind in kinds.items() if not isinstance(content.get(key), kind)]
    if wrong or not isinstance(content["tokenizer"].get("id"), str):
        raise UserError(f"{path} is no checkpoint of train.py: {', '.join(wrong or ['tokenizer'])} missing or of "
                        "another kind")
    try:
        configs.from_dict(content["config"])
    except UserError as error:
        raise UserError(f"{path} is no checkpoint of this version of train.py: {error}") from None
    return content


def load_newest(out, say=print):
    """The newest whole checkpoint of a run, or None; says so where it had to take the previous one."""
    path = os.path.join(out, "ckpt.pt")
    problems = []
    for candidate in (path, previous(path)):
        if os.path.exists(candidate):
            try:
                content = load(candidate)
                for problem in problems:
                    say(f"{problem}; going on from {candidate}, step {content['step']}")
                    os.replace(path, f"{path}.damaged")  # or the next checkpoint would keep it in place of this one
                return content
            except UserError as error:
                problems.append(error)
    if problems:
        raise UserError(f"{'; '.join(map(str, problems))}. --fresh=true starts over")
    return None


def map_tensors(function, content):
    """The content with function(tensor) in place of each tensor in it."""
    if isinstance(content, dict):
        return {key: map_tensors(function, value) for key, value in content.items()}
    return function(content) if isinstance(content, torch.Tensor) else content


def send(content, device):
    """Rank 0's content, on every rank: its tensors one at a time, by way of the device that the ranks speak through."""
    if not dist.is_initialized():
        return content
    first = dist.get_rank() == 0
    outline = [map_tensors(lambda tensor: tensor.to("meta"), content)]
    dist.broadcast_object_list(outline, src=0, device=device)

    def receive(tensor):
        moved = tensor.to(device) if first else torch.empty_like(tensor, device=device)
        dist.broadcast(moved, src=0)
        return moved.cpu()
    return map_tensors(receive, content if first else outline[0])


class Run(NamedTuple):
    model: GPT                   # in evaluation mode
    config: configs.Config
    encoding: tiktoken.Encoding
    content: dict                # the checkpoint without its model: step, best, ...
    path: str


def checkpoint_path(path):
    """The file that a user means by a run's folder (its best.pt, or ckpt.pt if there is none yet) or a file."""
    if path.endswith(".pt") and not os.path.isdir(path):
        return path
    for name in ("best.pt", "ckpt.pt"):
        if os.path.exists(os.path.join(path, name)):
            return os.path.join(path, name)
    raise UserError(f"{path} holds no checkpoint: python train.py configs/tiny.py makes one in out/tiny")


def newest_run(folder="out"):
    """The run's folder in `folder` whose checkpoint is the newest."""
    found = glob.glob(os.path.join(folder, "*", "best.pt"))
    if not found:
        raise UserError(f"there is no checkpoint in {folder}/ yet: python train.py configs/tiny.py makes one in about "
                        "6 minutes")
    return os.path.dirname(max(found, key=os.path.getmtime))


def open_run(path, device="cpu"):
    """The model of a checkpoint, with the config and the tokenizer that it was trained with."""
    path = checkpoint_path(path)
    content = load(path)
    config = configs.from_dict(content["config"])
    model = GPT(config)
    load_weights(model, content.pop("model"), path)
    content.pop("optimizer", None)
    encoding = unpack_tokenizer(content["tokenizer"], path)
    return Run(model.to(pick_device(str(device))).eval(), config, encoding, content, path)


def open_runs(paths, device="cpu"):
    """Runs to compare: with one tokenizer, and folders of different names, by which they are told apart."""
    runs = [open_run(path, device) for path in paths]
    for run in runs:
        if run.content["tokenizer"]["id"] != runs[0].content["tokenizer"]["id"]:
            raise UserError(f"{run.path} has another tokenizer than {runs[0].path}: train both on the same data")
    if len({name_of(run) for run in runs}) < len(runs):
        raise UserError("two runs have folders of one name, so that their rows could not be told apart: rename one")
    return runs


def name_of(run):
    return os.path.basename(os.path.dirname(os.path.abspath(run.path)))


def load_weights(model, weights, path):
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise UserError(f"the weights in {path} are another model's: {first_line(error)}") from error
    broken = [name for name, value in model.state_dict().items()
              if value.is_floating_point() and not torch.isfinite(value).all()]
    if broken:
        raise UserError(f"{path} holds weights that are no finite numbers ({broken[0]}): its training diverged, or it "
                        "is damaged")


def weights_hash(model):
    """32 hex digits that tell a model from every other, by its weights and moments."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
