"""A run as a Hugging Face folder, and back.

    python export.py out/tiny --to hf/tiny                  weights, code, tokenizer and model card
    python export.py out/tiny --to hf/tiny --push me/tiny   and onto the hub, as the user that huggingface_hub knows:
                                                            public, unless --private is given, too
    python export.py --from hf/tiny --out out/tiny2         a run again, for sample.py, eval.py and train.py --init_from

The folder is all that is needed: AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True) computes what we do,
with the same code. Our files are copied into it with three changes (`portable`): they import each other as parts of a
package; custom operators bear their module's name, since torch does not survive two of one name, and two models may be
loaded at once; and what makes a script of them is left out. kernels.c goes into a Python file, since transformers
copies no others to where it runs them: modeling_parity.py takes it out again.

The way back reads the weights, never the code, and only if everything is as it was written: checksums.json has the
SHA-256 of every file. It also says which folders are exports: only there files are replaced, and only as they were
written. The tokenizer is written as `tokenizers` has it and rebuilt from that.
"""
import argparse
import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import re

import safetensors
import safetensors.torch
import torch

import config as configs
from checkpoint import load_weights, name_of, open_run, save, weights_hash
from helpers import UserError, first_line, provenance, read_json, read_lines, run_script, say, write_json
from model import GPT
from sae_files import write_bytes
from tokenizer import END, unpack_tokenizer

CODE = ("kloosterman", "kernels", "kernels_cpu", "ops", "dpb", "model", "modeling_parity")
READ = ("config.json", "model.safetensors", "tokenizer.json")  # what the way back reads
MODEL = ("layers", "d", "heads", "context", "vocab_size", "bottleneck", "site", "bits", "active", "children",
         "standardise", "selection", "seed", "variance_weight", "reconstruction_weight", "n_min")  # what GPT reads
AGAIN = "Get the folder again, or export the run to a new one: python export.py RUN --to NEW"


# The code


def portable(text):
    """A file of ours as a module of a package."""
    ours = "|".join((*CODE, "kernels_c"))
    text = text.partition('\n\n\nif __name__ == "__main__":')[0].rstrip("\n") + "\n"
    text = re.sub(rf"^from ({ours}) import", r"from .\1 import", text, flags=re.M)
    text = re.sub(rf"^import ({ours})$", r"from . import \1", text, flags=re.M)
    return re.sub(r'custom_op\("parity::', 'custom_op("parity_" + __name__.encode().hex() + "::', text)


def code_files():
    """{name: text} of the modelling code, and its licence, which must go with it."""
    def read(name):
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), name), encoding="utf-8") as file:
            return file.read()
    held = f'"""kernels.c: transformers copies Python files only."""\nSOURCE = r"""{read("kernels.c")}"""\n'
    return {f"{name}.py": portable(read(f"{name}.py")) for name in CODE} | {
        "kernels_c.py": held, "LICENSE": read("LICENSE")}


# The tokenizer


def letters():
    """Bytes as `tokenizers` spells them: printable ones as they are, the others as letters from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def tokenizer_file(encoding):
    """tokenizer.json, as `tokenizers` reads it. tiktoken merges two neighbours if together they are a token, the lowest
    first: here, every way to halve a token is a merge, in the order of the tokens."""
    alphabet, ranks = letters(), encoding._mergeable_ranks

    def spell(token):
        return "".join(alphabet[byte] for byte in token)
    tokens = sorted(ranks, key=ranks.get)
    merges = [[spell(token[:at]), spell(token[at:])] for token in tokens
              for at in range(1, len(token)) if token[:at] in ranks and token[at:] in ranks]
    special = [{"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True} for text, number in encoding._special_tokens.items()]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": encoding._pat_str}, "behavior": "Isolated", "invert": False}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}, "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": True,
                      "vocab": {spell(token): ranks[token] for token in tokens}, "merges": merges}}


def packed_tokenizer(content, about):
    """The tokenizer of tokenizer.json as a checkpoint holds it, but not yet checked. about: its name and id."""
    if about["name"] == "gpt2":
        return about
    byte = {letter: number for number, letter in enumerate(letters())}
    vocab = sorted(content["model"]["vocab"].items(), key=lambda item: item[1])
    return about | {
        "pattern": content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"],
        "special": {token["content"]: token["id"] for token in content["added_tokens"]},
        "ranks": [base64.b64encode(bytes(byte[letter] for letter in token)).decode() for token, _ in vocab]}


# Out


def settings(run):
    """config.json: what GPT reads by the names of config.py, and in `run` all else that the way back needs."""
    values = {key: configs.plain(value) for key, value in dataclasses.asdict(run.config).items()}
    end = run.encoding.eot_token
    return {"architectures": ["ParityForCausalLM"], "model_type": "parity_transformer",
            "auto_map": {"AutoConfig": "modeling_parity.ParityConfig",
                         "AutoModelForCausalLM": "modeling_parity.ParityForCausalLM"},
            "dtype": "float32", "bos_token_id": end, "eos_token_id": end, "pad_token_id": end,
            "tie_word_embeddings": False,  # it is tied in the code: there is one weight
            **{key: values.pop(key) for key in MODEL},
            "run": {"config": values, "step": run.content["step"], "best": run.content.get("best"),
                    "best_step": run.content.get("best_step"), "weights": weights_hash(run.model),
                    "tokenizer": {key: run.content["tokenizer"][key] for key in ("name", "id")}}}


def figures(run):
    """[(what, figure)]: of the training's own evaluation at this step, and of eval.py for these weights."""
    folder = os.path.dirname(run.path)
    rows, _ = read_lines(os.path.join(folder, "metrics.jsonl"))
    found = [(f"{key}, in training", value) for row in rows
             if row.get("step") == run.content["step"] and "val_loss" in row for key, value in row.items()
             if key not in ("step", "loss", "lr", "grad_norm", "tokens_per_second") and isinstance(value, (int, float))]
    with contextlib.suppress(UserError):  # no eval.json, or a damaged one: eval.py says so
        content = read_json(os.path.join(folder, "eval.json"), "")
        if (content.get("checkpoint") or {}).get("weights") == weights_hash(run.model):
            found += [(f"{key}: {task}, {result['what']}", value) for task, result in content["results"].items()
                      for key, value in result.items() if isinstance(value, float)]
    return found


def card(run, name):
    """README.md: what it is, how to use it, the run's figures."""
    config, made = run.config, provenance()
    kind = "a dense twin, without a bottleneck" if config.bottleneck == "none" else \
        f"every MLP reads {sum(config.active)} of {2 ** config.bits[-1]:,} features"
    rows = "\n".join(f"| {what} | {value:,.6g} |" for what, value in figures(run)) or "| none was kept | |"
    return f"""---
license: mit
library_name: transformers
pipeline_tag: text-generation
tags: [parity-transformer, interpretability]
---
# {name}

A ParityTransformer: {config.layers} layers of width {config.d}, {run.model.count_parameters():,} parameters; {kind}.
Trained for {run.content["step"]:,} steps of {config.batch_tokens:,} tokens on {config.data}, seed {config.seed}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)  # transformers 5
tokenizer = AutoTokenizer.from_pretrained(DIR, trust_remote_code=True)
inputs = tokenizer("{END}", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
logits = model(**inputs, edit=lambda layer, code: code).logits     # each layer's sparse code, read or replaced
logits = model(**inputs, patch=lambda site, layer, x: x).logits    # activations, read or replaced
```

A text starts with {END}. The context is {config.context} tokens. On a CPU the bottleneck is C, compiled on first
use: without a C compiler it is many times slower, and says so.

| figure | value |
|---|---|
{rows}

Exported at commit {made["commit"]}, with torch {made["torch"]}. `python export.py --from DIR` makes a run of it again.
"""


def contents(run, name):
    """{file: bytes} of the folder."""
    end, weights = run.encoding.eot_token, {f"model.{key}": tensor.detach().cpu().contiguous()
                                            for key, tensor in run.model.state_dict().items()}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END, "pad_token": END,
             "model_max_length": run.config.context, "clean_up_tokenization_spaces": False,
             "model_input_names": ["input_ids", "attention_mask"]}
    jsons = {"config.json": settings(run), "tokenizer.json": tokenizer_file(run.encoding),
             "tokenizer_config.json": about,
             "generation_config.json": {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}}
    texts = code_files() | {"README.md": card(run, name)}
    texts |= {file: json.dumps(content, indent=1) for file, content in jsons.items()}
    return {"model.safetensors": safetensors.torch.save(weights, {"format": "pt"}),
            **{file: text.encode() for file, text in texts.items()}}


def earlier_export(folder):
    """{file: its possible SHA-256s} of the export that a folder holds, or {} for an empty one. Else a sentence: nothing
    is overwritten that others wrote or changed."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"{folder} is a file: choose a folder to export to")
    held = set(os.listdir(folder)) - {"checksums.json", "checksums.json.tmp"} if os.path.exists(folder) else set()
    if not held:
        return {}
    known, mark = {}, os.path.join(folder, "checksums.json")
    if os.path.exists(mark):
        known = read_json(mark, "Choose a new folder to export to")
        known = {name: value if isinstance(value, list) else [value] for name, value in known.items()}
    for name in sorted(held):
        if name.removesuffix(".tmp") not in known:  # .tmp: of an export that was killed
            raise UserError(f"{folder} holds {name}, which no export has written: choose a new folder to export to")
        if name in known and sha256(read_bytes(os.path.join(folder, name))) not in known[name]:
            raise UserError(f"{os.path.join(folder, name)} was changed since it was exported: move it elsewhere if you "
                            "need it, delete it if not, or choose a new folder to export to")
    return known


def write_folder(run, folder):
    """Write the run to the folder. While files change, checksums.json has a list for each: what it may be."""
    before, files = earlier_export(folder), contents(run, name_of(run))
    hashes, mark = {name: sha256(content) for name, content in files.items()}, os.path.join(folder, "checksums.json")
    os.makedirs(folder, exist_ok=True)
    write_json(mark, {name: [*before.get(name, []), *filter(None, [hashes.get(name)])] for name in before | hashes})
    for name, content in files.items():
        write_bytes(os.path.join(folder, name), content)
    for name in before.keys() - files.keys():  # of an older export.py
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, name))
    write_json(mark, hashes, indent=1)
    return sum(map(len, files.values()))


def read_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def push(folder, repo, private):
    """Onto the hub; the address of it, and who can read it."""
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise UserError(f"--push needs huggingface_hub: pip install huggingface_hub; {folder} is written, and git can "
                        "push it, too") from None
    try:
        hub = HfApi()
        hub.create_repo(repo, exist_ok=True, private=private or None)
        public = not hub.model_info(repo).private  # one that was there stays what it is
        if not (private and public):
            address = hub.upload_folder(repo_id=repo, folder_path=folder)
            return f"{address}, {'public: everyone can read it' if public else 'private'}"
    except Exception as error:  # whatever the network, the hub or the name make of it
        raise UserError(f"{folder} is written, but {repo} could not be pushed ({type(error).__name__}: "
                        f"{first_line(error)}). `hf auth login` says who you are; the same command again tries again") \
            from error
    raise UserError(f"{folder} is written, but not pushed: {repo} is there and public. Make it private on the hub, or "
                    "give another name")


# Back


def read_folder(folder):
    """{file: bytes} of what the way back reads, as it was written."""
    known = read_json(os.path.join(folder, "checksums.json"), "A folder that export.py has written has one")
    files = {}
    for name in READ:
        path = os.path.join(folder, name)
        if isinstance(known.get(name), list):
            raise UserError(f"{folder} is not whole: the export to it was interrupted. {AGAIN}")
        try:
            files[name] = read_bytes(path)
        except FileNotFoundError:
            raise UserError(f"{path} is missing. {AGAIN}") from None
        if sha256(files[name]) != known.get(name):
            raise UserError(f"{path} is damaged, or was changed since it was exported: its checksum is wrong. {AGAIN}")
    return files


def check_size(values, weights):
    """Settings must not ask for more layers and generators than there are weights: to make them takes memory and time,
    even on the meta device."""
    drawn, held = values["layers"] * max(0, *map(abs, values["children"])), sum(map(torch.numel, weights.values()))
    if values["layers"] > len(weights) or drawn > held:
        raise ValueError(f"layers={values['layers']} with children={values['children']} are another model's")


def parts_of(folder, out):
    """(config, progress, packed tokenizer, weights, their hash) as a folder's files have them, not yet compared."""
    files = read_folder(folder)
    try:
        content, tokenizer = (json.loads(files[name]) for name in ("config.json", "tokenizer.json"))
        values, about = {key: content[key] for key in MODEL} | content["run"]["config"], content["run"]
        packed = packed_tokenizer(tokenizer, about["tokenizer"])
        weights = {key.removeprefix("model."): tensor
                   for key, tensor in safetensors.torch.load(files["model.safetensors"]).items()}
        check_size(values, weights)
        with torch.device("meta"):  # a layer is made there, to see whether it can be
            config = configs.from_dict(values | {"out": out, "fresh": False})
        progress = {key: about[key] for key in ("step", "best", "best_step")}
        return config, progress, packed, weights, about["weights"]
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, safetensors.SafetensorError) as error:
        raise UserError(f"{folder} is no folder of this version of export.py ({type(error).__name__}: "
                        f"{first_line(error)}). {AGAIN}") from error


def check_shapes(config, weights, path):
    """Before any memory is taken for the model: are these its weights?"""
    with torch.device("meta"):
        asked = {name: list(tensor.shape) for name, tensor in GPT(config).state_dict().items()}
    found = {name: list(tensor.shape) for name, tensor in weights.items()}
    for name in asked | found:
        if asked.get(name) != found.get(name):
            raise UserError(f"the weights in {path} are another model's: {name} has the shape {found.get(name)}, but "
                            f"by config.json {asked.get(name)}. {AGAIN}")


def check_progress(step, best, best_step, most, folder):
    """As a run has them, of at most so many steps: best may be infinite, and it and best_step may be missing."""
    def whole(value, most):
        return type(value) is int and 0 <= value <= most
    if not (whole(step, most) and (best is None or type(best) in (int, float) and best >= 0)
            and (best_step is None or whole(best_step, step))):
        said = f"step {step!r}, best {best!r}, best_step {best_step!r}"
        raise UserError(f"{folder} is of no run of {most:,} steps: its config.json says {said[:200]}. {AGAIN}")


def checkpoint_of(folder, out):
    """The checkpoint that a folder holds, checked as a whole: settings, progress, shapes, numbers, tokenizer; and the
    hash of its weights."""
    path = os.path.join(folder, "model.safetensors")
    config, progress, packed, weights, hashed = parts_of(folder, out)
    check_progress(**progress, most=config.max_steps, folder=folder)
    unpack_tokenizer(packed, os.path.join(folder, "tokenizer.json"))
    check_shapes(config, weights, path)
    model = GPT(config)
    load_weights(model, weights, path)
    if weights_hash(model) != hashed:
        raise UserError(f"the weights in {path} are not those that config.json was written with. {AGAIN}")
    plain = {key: configs.plain(value) for key, value in dataclasses.asdict(config).items()}
    return {"config": plain, **progress, "tokenizer": packed, "model": model.state_dict()}, hashed


def make_run(folder, out):
    """config.json and best.pt in a new folder `out`, or in one where this was interrupted, or done, before."""
    content, weights = checkpoint_of(folder, out)
    unfinished = {"config.json", "config.json.tmp", "best.pt.tmp"}
    held = set(os.listdir(out)) - unfinished if os.path.isdir(out) else {out} if os.path.exists(out) else set()
    if held and (held != {"best.pt"} or weights_hash(open_run(out).model) != weights):
        raise UserError(f"{out} exists and is not empty: choose a new folder, --out out/NAME")
    os.makedirs(out, exist_ok=True)
    about = provenance() | {"from": folder}
    write_json(os.path.join(out, "config.json"), content["config"] | {"about": about}, indent=2)
    save(os.path.join(out, "best.pt"), content)
    return content


# The command line


def parse(arguments):
    parser = argparse.ArgumentParser(prog="export.py", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n")[2])
    parser.add_argument("run", nargs="?", help="a run's folder, such as out/tiny, of which best.pt is taken; "
                                               "or a checkpoint")
    parser.add_argument("--to", metavar="DIR", help="folder to write: a new one, or one of an earlier export")
    parser.add_argument("--push", metavar="REPO", help="upload the folder to this repository of the Hugging Face hub; "
                                                       "a new one is public: everyone can read it")
    parser.add_argument("--private", action="store_true", help="--push makes a private repository")
    parser.add_argument("--from", dest="back", metavar="DIR", help="a folder that export.py has written: the way back")
    parser.add_argument("--out", metavar="DIR", help="the run that --from makes (default: out/ and the folder's name)")
    return parser.parse_args(arguments)


def check_given(given):
    """Either a run and --to, or --from; and what goes with each."""
    if given.back is not None:
        if given.run is not None or given.to is not None or given.push is not None or given.private:
            raise UserError("--from DIR makes a run of a folder: it goes with --out only")
        return
    if given.out is not None:
        raise UserError("--out is the run that --from makes: python export.py --from hf/tiny --out out/NAME. The other "
                        "way takes --to only")
    if not given.run or not given.to:
        raise UserError("give a run and a folder: python export.py out/tiny --to hf/tiny; "
                        "or for the way back: python export.py --from hf/tiny --out out/NAME")
    if given.private and given.push is None:
        raise UserError("--private is of the repository that --push makes: add --push REPO, or leave it out")


def main(arguments):
    given = parse(arguments)
    check_given(given)
    if given.back is not None:
        out = given.out or os.path.join("out", os.path.basename(os.path.abspath(given.back)))
        content = make_run(given.back, out)
        return say(f"wrote {os.path.join(out, 'best.pt')}, step {content['step']:,}: python eval.py {out}")
    size = write_folder(open_run(given.run), given.to)
    say(f"wrote {given.to}, {size / 2 ** 20:.1f} MiB: AutoModelForCausalLM.from_pretrained({given.to!r}, "
        "trust_remote_code=True)")
    if given.push is not None:
        say(f"pushed: {push(given.to, given.push, given.private)}")


if __name__ == "__main__":
    run_script(main, "stopped; the same command again starts over")
