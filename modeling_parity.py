"""model.py as transformers wants it: export.py puts this file, and those that it imports, beside the weights of a run.

    model = AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)
    logits = model(input_ids, attention_mask).logits          (B, T) -> (B, T, vocabulary)
    logits = model(input_ids, edit=f, patch=g).logits         as in model.py
    tokens = model.generate(input_ids, max_new_tokens=50, edit=f)

Without padding and cache the computation is model.py's own, bit for bit. Padding, on any side, is not looked at and
takes no position, but it does get a code, which `edit` sees. Keys and values are kept in the cache that `generate`
makes. When a text fills the context, generation goes on from its second half, as model.py's does; in a batch each text
does so at its own time, and the others are read again as they are.

The modules here are for inference: `python export.py --from DIR` makes a run of them, which train.py can go on from.
"""
import functools
import hashlib
import os
import tempfile

import torch
import torch.nn.functional as F
from kernels_c import SOURCE
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

import kernels_cpu
from dpb import DeepParityBottleneck
from model import GPT, Block, Cache


@functools.cache
def place_kernels():
    """transformers copies Python files only, to a folder of its own: put kernels.c beside them, for kernels_cpu.py.

    Where that folder cannot be written, kernels.c goes to the user's cache, or if that cannot be written either, to a
    temporary folder, which stays as long as what is returned here.
    """
    cache = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "paritytransformer")
    named = os.path.join(cache, f"source-{hashlib.sha256(SOURCE.encode()).hexdigest()[:16]}")
    for folder in os.path.dirname(os.path.abspath(__file__)), named:
        try:
            return write_kernels(folder)
        except OSError:
            continue
    temporary = tempfile.TemporaryDirectory()
    write_kernels(temporary.name)
    return temporary


def write_kernels(folder):
    path = os.path.join(folder, "kernels.c")
    if not holds_kernels(path):
        os.makedirs(folder, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8", newline="") as file:
            file.write(SOURCE)
        os.chmod(file.name, 0o644)  # the folder may be shared by users
        os.replace(file.name, path)  # others see all of it or nothing
    kernels_cpu.__file__ = os.path.join(folder, "kernels_cpu.py")  # it looks for kernels.c beside itself


def holds_kernels(path):
    if not os.path.exists(path):
        return False
    with open(path, encoding="utf-8", newline="") as file:
        return file.read() == SOURCE


class ParityConfig(PretrainedConfig):
    """Everything in config.json is an attribute: the settings of the model, by the names of config.py, and `run`."""
    model_type = "parity_transformer"
    attribute_map = {"hidden_size": "d", "num_hidden_layers": "layers", "num_attention_heads": "heads",
                     "max_position_embeddings": "context"}


class PaddedCache(Cache):
    """Keys and values are kept by transformers, or not at all, and there may be padding.

    past: a cache of transformers or None.  mask: (B, past + T), True for tokens; None if there is no padding.
    """

    def __init__(self, past, mask, T, device):
        self.past, self.layer = past, -1
        self.length = past.get_seq_length() if past is not None else 0
        self.at = slice(self.length, self.length + T)
        self.may_see = torch.ones(T, self.length + T, dtype=torch.bool, device=device).tril(self.length)
        if mask is not None:
            self.at = (mask.cumsum(1) - 1).clamp(min=0)[:, -T:]
            own = torch.eye(self.length + T, dtype=torch.bool, device=device)[-T:]  # or padding would see nothing
            self.may_see = (self.may_see & (mask[:, None] | own))[:, None]  # (B, 1, T, past + T)

    def places(self, T):
        return self.at

    def seen(self, T, device):
        return self.may_see

    def extend(self, attention, k, v):
        self.layer += 1  # blocks come in order
        return (k, v) if self.past is None else self.past.update(k, v, self.layer)


class Window(DynamicCache):
    """Keys and values from the second half of a text on. In a batch another text's window may be longer: then a row
    does not see its first `unused` columns, (B, 1)."""


def seen_since(past, mask, fresh):
    """Of the columns from the first one in the cache on, which each row sees: (B, past + fresh); None: all."""
    if mask is None:
        return None
    mask = mask[:, -(past.get_seq_length() + fresh):].bool()
    at = torch.arange(mask.shape[1], device=mask.device)
    return mask & (at >= past.unused) if isinstance(past, Window) else mask


class ParityForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = ParityConfig
    base_model_prefix = "model"
    _keep_in_fp32_modules_strict = ["mean", "var"]  # the moments, where the rest is loaded as bfloat16

    def __init__(self, config):
        super().__init__(config)
        place_kernels()
        self.model = GPT(config)
        self.bare = self.model.embedding.weight.is_meta  # transformers loads into a model that was made without memory
        self.post_init()

    def _init_weights(self, module):
        """What is not saved; and what a file lacks, of which transformers says so."""
        if isinstance(module, Block):
            module.share.fill_(1)
        elif isinstance(module, DeepParityBottleneck):
            module.sums.zero_()
        elif self.bare:
            super()._init_weights(module)

    def get_input_embeddings(self):
        return self.model.embedding

    def forward(self, input_ids, attention_mask=None, past_key_values=None, use_cache=None, labels=None, edit=None,
                patch=None, logits_to_keep=0, return_dict=True, output_hidden_states=None, output_attentions=None):
        self.check_asked(output_hidden_states, output_attentions)
        T, past = input_ids.shape[1], past_key_values
        if past is None and use_cache:
            past = DynamicCache()
        padded = check_mask(attention_mask, input_ids, past)
        cache = None
        if padded or past is not None:
            cache = PaddedCache(past, attention_mask.bool() if padded else None, T, input_ids.device)
        x = self.model.hidden(input_ids, edit=edit, patch=patch, cache=cache)
        logits = F.linear(x[:, -logits_to_keep:], self.model.embedding.weight)  # (B, T, V); all for 0
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        found = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past)
        return found if return_dict else found.to_tuple()

    def check_asked(self, hidden_states, attentions):
        if hidden_states or self.config.output_hidden_states:
            raise ValueError("output_hidden_states is not there: patch=f is called as f(site, layer, x), and for "
                             "'block_out' x is the stream after a layer")
        if attentions or self.config.output_attentions:
            raise ValueError("output_attentions is not there: attention is computed without its weights being kept")

    def _prepare_attention_mask_for_generation(self, inputs_tensor, *_, **__):
        """Every token counts: transformers would take <|endoftext|>, with which each text starts, for padding."""
        return torch.ones(inputs_tensor.shape[:2], dtype=torch.long, device=inputs_tensor.device)

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, **kwargs):
        """What the next step reads: the new tokens, or all that the windows hold, anew, when one of them moves."""
        if past_key_values is not None:
            fresh = kwargs.pop("next_sequence_length", None) or input_ids.shape[1]
            drafted = fresh > 1 and kwargs.get("is_first_iteration") is False  # and may be taken back
            before, seen = past_key_values, seen_since(past_key_values, attention_mask, fresh)
            past_key_values, attention_mask, fresh = self.windows(before, seen, fresh, input_ids)
            if drafted and past_key_values is not before:
                raise ValueError(f"assisted generation ends where the context of {self.config.context} is full: leave "
                                 "out assistant_model and prompt_lookup_num_tokens, or ask for fewer tokens")
            input_ids = input_ids[:, -fresh:]
        return super().prepare_inputs_for_generation(input_ids, past_key_values=past_key_values,
                                                     attention_mask=attention_mask, **kwargs)

    def windows(self, past, seen, fresh, input_ids):
        """(past, seen, fresh) when each text that goes past the context has lost its start, as in model.py: a prompt
        keeps as many tokens as fit, and what was read before keeps half as many."""
        length, context = past.get_seq_length(), self.config.context
        if 0 < length <= context - fresh:
            return past, seen, fresh
        seen = input_ids.new_ones(len(input_ids), length + fresh).bool() if seen is None else seen
        after = seen.flip(1).cumsum(1).flip(1)  # tokens from here on
        full = after[:, :1] > context  # (B, 1)
        if length and not full.any():
            return past, seen, fresh
        seen = seen & (~full | (after <= (context // 2 if length else context)))
        seen = seen[:, int(seen.any(0).int().argmax()):]  # without columns that nobody sees
        if seen.shape[1] > input_ids.shape[1]:
            raise ValueError(f"the context of {context} is full, and its second half is to be read again: give the "
                             "tokens that past_key_values holds, too")
        if full.any():
            past = Window()
            past.unused = (seen.cumsum(1) == 0).sum(1, keepdim=True)
        return past, seen, seen.shape[1]


def check_mask(mask, input_ids, past):
    """Whether there is padding; or an error that says which masks there are."""
    if mask is None:
        return False
    T = input_ids.shape[1] + (past.get_seq_length() if past is not None else 0)
    if mask.shape != (len(input_ids), T):
        raise ValueError(f"attention_mask must have shape {(len(input_ids), T)}, a number for each token so far, but "
                         f"has {tuple(mask.shape)}: give one of two dimensions, and no static cache")
    return not mask.all()
