"""Every setting of a run: its type, its default, what it means. Config files hold only what differs.

    config = load(["configs/tiny.py", "--max_steps=10"])

A config file is plain `key = value` lines: numbers, strings, tuples, True, False, None, arithmetic, names set above.
`base = "tiny.py"` on the first line takes all settings of that file, beside it: what follows is what differs.
It is read, never executed. A wrong key, type or combination is answered, before any work starts, with the nearest
right one.
"""
import ast
import dataclasses
import inspect
import operator
import os
import re
import types
import typing
from dataclasses import dataclass

from dpb import SELECTIONS, DeepParityBottleneck
from helpers import UserError, suggest
from model import BOTTLENECKS, SITES


@dataclass
class Config:
    # The model
    layers: int = 12                        # transformer blocks
    d: int = 1024                           # residual width, a power of two
    heads: int = 8                          # attention heads; the paper's are 128 wide
    context: int = 1024                     # tokens of a sequence
    vocab_size: int = 50304                 # at least the tokenizer's; GPT-2's 50,257 rounded up for speed
    bottleneck: str = "parity"              # "none" (dense), "parity", or "topk" (learned dictionaries)
    site: str = "mlp"                       # the bottleneck stands before the "mlp" or before "attention"
    bits: tuple[int, ...] = (10, 15)        # n_l: index bits of each level, the first log2 d; 2**bits[-1] features
    active: tuple[int, ...] = (16, 32)      # K_l: active features of each level
    children: tuple[int, ...] = (256,)      # D_l: children scored per parent, levels 1, 2, ...
    standardise: bool = True                # scores by their running mean and variance; False is an ablation
    selection: str = "hierarchical"         # or "flat": the best of all features, without parents and children
    fade: float = 0.0                       # fraction of max_steps over which the bottleneck fades in; 0: at once
    variance_weight: float = 0.0            # weight of the variance loss (the paper's: 0.05)
    reconstruction_weight: float = 0.0      # weight of the reconstruction loss (the paper's: 0.1)
    n_min: int = 8                          # the variance loss counts features active on at least so many tokens
    auxiliary_start: float = 0.0            # fraction of max_steps after which the two auxiliary losses begin
    auxiliary_ramp: float = 0.0             # fraction of max_steps over which they then grow to their weights

    # The data
    data: str = "data/fineweb-edu"          # a folder made by data.py (data/toy is, if missing), or several: "a:12,b:3"
    batch_tokens: int = 512 * 1024          # tokens of one optimiser step, over all ranks
    micro_batch: int = 0                    # sequences of one forward pass; 0: as many as fit 16,384 tokens

    # The optimiser
    max_steps: int = 38_147                 # the planned budget, which the schedule is laid out for (20B tokens)
    warmup_steps: int = 250                 # linear warm-up; at most what decay_fraction leaves of max_steps
    decay_fraction: float = 0.9             # w_f: the last fraction of the budget over which the rate falls to zero
    muon_lr: float = 1.2e-2                 # peak rate of the matrices inside blocks
    adam_lr: float = 1.2e-2                 # peak rate of embeddings, positions, gains and learned dictionaries
    weight_decay: float = 0.0
    seed: int = 0                           # of weights, generators and the order of the data

    # The run
    out: str = ""                           # folder of results; out/NAME for configs/NAME.py if empty
    fresh: bool = False                     # start over, even if there is a checkpoint
    init_from: str = ""                     # a run's folder or checkpoint whose weights to start from (fine-tuning)
    device: str = "auto"                    # "cpu", "cuda", or "auto"
    compile: str = "auto"                   # "yes", "no", or "auto": on a GPU
    eval_every: int = 250                   # steps between evaluations
    eval_tokens: int = 1_048_576            # validation tokens of an evaluation, or all there are
    save_every: int = 500                   # steps between checkpoints
    log_every: int = 10                     # steps between rows of metrics.jsonl
    stop_at_val_loss: float | None = None   # stop once the validation loss is this, within stop_tolerance
    stop_tolerance: float = 0.01            # as a fraction: 0.01 stops within 1% above
    wandb: bool = False                     # also log to Weights & Biases, if installed
    tensorboard: bool = False               # also log to TensorBoard, if installed


KEYS = {field.name: field for field in dataclasses.fields(Config)}
# Keys that may change when a run goes on from its checkpoint; all others must match it.
FREE = {"out", "fresh", "init_from", "device", "compile", "data", "micro_batch",
        "eval_every", "save_every", "log_every", "stop_at_val_loss", "stop_tolerance", "wandb", "tensorboard"}


def describe():
    """Every setting with its default and what it means, as the lines above have it."""
    found = re.findall(r"^    (?:# (.*)|(\w+): .* = (.*?)\s+# (.*)|(\w+): .* = (.*))$", inspect.getsource(Config), re.M)
    lines = [f"\n{title}" if title else f"  --{key or plain_key}={default or plain_default}".ljust(40) + comment
             for title, key, default, comment, plain_key, plain_default in found]
    return "\n".join(lines).strip("\n")


def load(arguments):
    """The Config of command-line arguments: one config file, then --key=value."""
    files = [a for a in arguments if not a.startswith("--")]
    if len(files) != 1:
        raise UserError(f"give one config file, such as configs/tiny.py, not {len(files)}: "
                        "python train.py configs/tiny.py [--key=value ...]")
    values = read_file(files[0])
    for argument in arguments:
        if argument.startswith("--"):
            key, equals, text = argument[2:].partition("=")
            if not equals:
                raise UserError(f"{argument} has no value: write --{key or 'key'}=value")
            is_text = typing.get_type_hints(Config)[known(key)] is str
            values[key] = convert(key, text if is_text else literal(text))
    config = Config(**values)
    config.out = config.out or os.path.join("out", os.path.splitext(os.path.basename(files[0]))[0])
    return check(config)


def read_file(path, above=()):
    """The assignments of a config file, checked one by one, after those of its base.
    above: the files that lead here."""
    if path in above:
        raise UserError(f"{' -> '.join((*above, path))}: a config cannot be its own base")
    values = {}
    for number, node in enumerate(statements(path)):
        where = f"{path}, line {node.lineno}: "
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            raise UserError(where + "a config file holds only lines of the form key = value")
        key = node.targets[0].id
        try:
            if key == "base":
                values = read_file(base_path(path, number, evaluate(node.value, {})), (*above, path))
            else:
                values[key] = convert(known(key), evaluate(node.value, values))
        except UserError as error:
            raise UserError(where + str(error)) from None
    return values


def statements(path):
    """What stands in a config file, but for its docstring."""
    try:
        with open(path, encoding="utf-8") as file:
            body = ast.parse(file.read(), path).body
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}){suggest(path, config_files(), 0.3)}") from None
    except SyntaxError as error:
        raise UserError(f"{path}, line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # no UTF-8, zero bytes, thousands of brackets
        raise UserError(f"{path} is no config file ({error}): it should hold lines of the form key = value") from None
    documented = body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return body[1:] if documented and isinstance(body[0].value.value, str) else body


def base_path(path, number, name):
    if number:
        raise UserError("base comes first: what stands above it would be lost")
    if not isinstance(name, str):
        raise UserError(f"base must be the name of a config file, as in base = \"tiny.py\", not {name!r}")
    return os.path.join(os.path.dirname(path), name)


def config_files():
    return [os.path.join("configs", name) for name in sorted(os.listdir("configs"))] if os.path.isdir("configs") else []


def known(key):
    if key not in KEYS:
        raise UserError(f"there is no setting {key!r}{suggest(key, KEYS)}")
    return key


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow}


def evaluate(node, names):
    """The value of a literal, or of arithmetic on literals and names set above."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(evaluate(item, names) for item in node.elts)
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = evaluate(node.operand, names)
        if isinstance(value, (int, float)):
            return -value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = evaluate(node.left, names), evaluate(node.right, names)
        if all(isinstance(v, (int, float)) and abs(v) < 1e12 for v in (left, right)) and not (
                isinstance(node.op, ast.Pow) and right > 64):
            try:
                return OPERATORS[type(node.op)](left, right)
            except ArithmeticError as error:
                raise UserError(f"{ast.unparse(node)}: {error}") from None
    raise UserError(f"{ast.unparse(node)} is not a plain value: write a number, a string, a tuple, True, False or None")


def literal(text):
    """A value as typed on the command line; what is no literal is a string."""
    try:
        return evaluate(ast.parse({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text),
                                  mode="eval").body, {})
    except (UserError, SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def convert(key, value):
    """The value in the type of its key, if it can be; 1e3 is an integer, 15 is a tuple of one."""
    kind = typing.get_type_hints(Config)[key]
    if isinstance(kind, types.UnionType):
        if value is None:
            return None
        kind = typing.get_args(kind)[0]
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300  # no nan, no inf
    if kind is bool and isinstance(value, bool) or kind is str and isinstance(value, str):
        return value
    if kind is int and number and abs(value) < 2 ** 63 and value == int(value):
        return int(value)
    if kind is float and number:
        return float(value)
    if typing.get_origin(kind) is tuple:
        values = value if isinstance(value, tuple) else (value,)
        if all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            return values
    name = {bool: "True or False", str: "a string", int: "a whole number", float: "a number"}.get(
        kind, "whole numbers, as in (10, 15)")
    raise UserError(f"{key} must be {name}, not {value!r}")


def check(config):
    """The config, if it can be run; else the sentence that says what to change."""
    for key in ("layers", "d", "heads", "context", "vocab_size", "batch_tokens", "max_steps",
                "eval_every", "eval_tokens", "save_every", "log_every", "n_min"):
        require(getattr(config, key) >= 1, f"{key}={getattr(config, key)} must be at least 1")
    for key in ("warmup_steps", "muon_lr", "adam_lr", "weight_decay", "variance_weight", "reconstruction_weight",
                "stop_tolerance", "micro_batch", "seed"):
        require(getattr(config, key) >= 0, f"{key}={getattr(config, key)} must not be negative")
    for key, choices in (("bottleneck", BOTTLENECKS), ("site", SITES), ("selection", SELECTIONS),
                         ("compile", ("auto", "yes", "no"))):
        value = getattr(config, key)
        require(value in choices,
                f"{key}={value!r} must be one of {', '.join(map(repr, choices))}{suggest(value, choices, 0)}")
    for key, most in (("layers", 10 ** 4), ("context", 2 ** 24), ("vocab_size", 2 ** 24), ("batch_tokens", 2 ** 40)):
        require(getattr(config, key) <= most, f"{key}={getattr(config, key)} must be at most {most:,}")
    for key in ("decay_fraction", "fade", "auxiliary_start", "auxiliary_ramp"):
        require(0 <= getattr(config, key) <= 1, f"{key}={getattr(config, key)} must lie in [0, 1]")
    nearest = min((2 ** t for t in range(3, 16)), key=lambda width: abs(width - config.d))
    require(config.d == nearest, f"d={config.d} must be a power of two from 8 to 32768: the nearest is {nearest}")
    divisor = min((h for h in range(1, config.d + 1) if config.d % h == 0), key=lambda h: abs(h - config.heads))
    require(config.heads == divisor, f"heads={config.heads} must divide d={config.d}: the nearest is {divisor}")
    whole = max(1, round(config.batch_tokens / config.context)) * config.context
    require(config.batch_tokens == whole,
            f"batch_tokens={config.batch_tokens} must be a multiple of context={config.context}: "
            f"the nearest is {whole}")
    require(config.bottleneck != "none" or not (config.variance_weight or config.reconstruction_weight),
            "variance_weight and reconstruction_weight need a bottleneck: set them to 0 for bottleneck='none'")
    if config.bottleneck != "none":
        try:  # the layer knows best what it can be
            DeepParityBottleneck(config.d, config.bits, config.active, config.children, selection=config.selection)
        except ValueError as error:
            raise UserError(str(error)) from None
    return config


def require(condition, text):
    if not condition:
        raise UserError(text)


def differences(config, saved):
    """The keys in which a run's saved settings (a dict) differ from this config, of those that must not."""
    free = FREE | ({"bits", "active", "children", "selection", "standardise", "n_min"}
                   if config.bottleneck == "none" else set())
    return [key for key in KEYS
            if key not in free and key in saved and plain(getattr(config, key)) != plain(saved[key])]


def plain(value):
    return list(value) if isinstance(value, tuple) else value


def from_dict(saved):
    """The Config of a run's config.json or checkpoint."""
    return check(Config(**{key: convert(key, tuple(value) if isinstance(value, list) else value)
                           for key, value in saved.items() if key in KEYS}))
