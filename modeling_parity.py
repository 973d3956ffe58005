"""model.py as transformers wants it: export.py puts this file, and those that it imports, beside the weights of a run.

    model = AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)
    logits = model(input_ids, attention_mask).logits          (B, T) -> (B, T, vocabulary)
    logits = model(input_ids, edit=f, patch=g).logits         as in model.py
    tokens = model.generate(input_ids, max_new_tokens=50, edit=f)

Without padding and cache the computation is model.py's own, bit for bit. Padding, on any side, is not looked at and
takes no position, but it does get a code, which `edit` sees. Keys and values are kept in the cache that `generate`
makes. When it is as long as the context, generation goes on from the second half, as model.py's does.

The modules here are for inference: `python export.py --from DIR` makes a run of them, which train.py can go on from.
"""
import os
import tempfile

import torch
import torch.nn.functional as F
from kernels_c import SOURCE
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from dpb import DeepParityBottleneck
from model import GPT, Block, Cache


def place_kernels():
    """transformers copies Python files only, to a folder of its own: put kernels.c beside them, for kernels_cpu.py."""
    folder = os.path.dirname(os.path.abspath(__file__))
    path = os.path.join(folder, "kernels.c")
    if os.path.exists(path):
        with open(path, encoding="utf-8", newline="") as file:
            if file.read() == SOURCE:
                return
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8", newline="") as file:
        file.write(SOURCE)
    os.replace(file.name, path)  # others see all of it or nothing


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
                patch=None, logits_to_keep=0, return_dict=True):
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

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, **kwargs):
        """What the next step reads; when the context is full, its second half, anew."""
        if past_key_values is not None:
            past, context = past_key_values.get_seq_length(), self.config.context
            fresh = min(kwargs.pop("next_sequence_length", None) or input_ids.shape[1], context)
            if past + fresh > context:
                past_key_values, past, fresh = DynamicCache(), 0, context // 2
            input_ids = input_ids[:, -fresh:]
            attention_mask = attention_mask[:, -(past + fresh):] if attention_mask is not None else None
        return super().prepare_inputs_for_generation(input_ids, past_key_values=past_key_values,
                                                     attention_mask=attention_mask, **kwargs)


def check_mask(mask, input_ids, past):
    """Whether there is padding; or an error that says which masks there are."""
    if mask is None:
        return False
    T = input_ids.shape[1] + (past.get_seq_length() if past is not None else 0)
    if mask.shape != (len(input_ids), T):
        raise ValueError(f"attention_mask must have shape {(len(input_ids), T)}, a number for each token so far, but "
                         f"has {tuple(mask.shape)}: give one of two dimensions, and no static cache")
    return not mask.all()
