"""A GPT-2-style language model in which every MLP may read only a sparse code.

    logits = model(tokens)                       (B, T) -> (B, T, vocabulary)
    losses = model(tokens, targets)              {"lm": ..., "variance": ..., "reconstruction": ...}
    logits = model(tokens, edit=f)               f(layer, code) -> code, called at every bottleneck
    logits = model(tokens, patch=f)              f(site, layer, x) -> x, called at every one of PATCH_SITES

Learned positions, tied embedding, RMSNorm, no biases, a GELU MLP of width 4d. `bottleneck` is "none" (dense), "parity"
(dpb.py) or "topk" (a learned dictionary of m rows a layer); `site` puts it before the MLP or before attention. Reading
features and editing them is one call: `edit` sees each layer's Code and returns the Code to go on with. `patch` is the
same for activations, of any model: what an attention adds to the stream, what an MLP is given (before a bottleneck) and
adds, and the stream after a block, (B, T, d) each.

Letters: B sequences, T tokens of each, d width, V vocabulary, H heads.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

from dpb import Code, DeepParityBottleneck, reconstruction_loss, variance_loss
from kernels import rescale
from kernels_cpu import chunks

BOTTLENECKS = ("none", "parity", "topk")
SITES = ("mlp", "attention")
PATCH_SITES = ("attention_out", "mlp_in", "mlp_out", "block_out")  # of a block, in the order of the computation
LOGITS = 2 ** 25  # a loss holds up to so many at once, 128 MiB; tiny has 2^21 in a pass and just these in evaluation


class TopKBottleneck(nn.Module):
    """The in-loop baseline: a learned encoder and decoder of m rows each; the K largest of m scores are kept.

    Its output has the norm of its input, as the parity bottleneck's, so that only the dictionary differs.
    """

    def __init__(self, d, m, K):
        super().__init__()
        self.m, self.active, self.lows = m, (K,), (0, m)
        self.encoder = nn.Parameter(torch.empty(m, d))
        self.decoder = nn.Parameter(torch.empty(m, d))

    def encode(self, x):
        coefs, indices = F.linear(x, self.encoder).topk(self.active[0], dim=-1)  # of (..., m)
        return Code(indices, coefs)

    def decode(self, code, like=None):
        K = code.indices.shape[-1]
        y = F.embedding_bag(code.indices.reshape(-1, K), self.decoder.to(code.coefs.dtype),
                            per_sample_weights=code.coefs.reshape(-1, K), mode="sum")
        y = y.view(*code.indices.shape[:-1], -1)
        return y if like is None else rescale(y, like)

    def narrow(self, x, again=False):
        code = self.encode(x)
        return code, self.decode(code, like=x), x


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, x, cache=None):
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)  # (B, H, T, d/H) each
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            k, v = cache.extend(self, k, v)  # (B, H, past + T, d/H)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=cache.seen(T, x.device))
        return self.out(y.transpose(1, 2).reshape(B, T, d))


class MLP(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.up = nn.Linear(d, 4 * d, bias=False)
        self.down = nn.Linear(4 * d, d, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.site = layer, config.site
        self.norm1, self.attention = nn.RMSNorm(config.d), Attention(config.d, config.heads)
        self.norm2, self.mlp = nn.RMSNorm(config.d), MLP(config.d)
        self.parity = self.topk = None
        self.fading = False  # in training, while the bottleneck is not yet all that counts: fade_in
        self.register_buffer("share", torch.ones(()), persistent=False)
        if config.bottleneck == "parity":
            self.parity = DeepParityBottleneck(config.d, config.bits, config.active, config.children,
                                               seed=config.seed * 1000 + layer, standardise=config.standardise,
                                               selection=config.selection)
        elif config.bottleneck == "topk":
            self.topk = TopKBottleneck(config.d, 2 ** config.bits[-1], sum(config.active))

    @property
    def bottleneck(self):
        return self.parity or self.topk

    def forward(self, x, edit=None, patch=None, cache=None, record=None):  # (B, T, d)
        def at(site, x):
            return x if patch is None else patch(site, self.layer, x)

        h = self.norm1(x)
        x = x + at("attention_out", self.attention(self.narrow(h, edit, record) if self.site == "attention" else h,
                                                   cache))
        h = at("mlp_in", self.norm2(x))
        x = x + at("mlp_out", self.mlp(self.narrow(h, edit, record) if self.site == "mlp" else h))
        return at("block_out", x)

    def narrow(self, h, edit, record):
        """What the bottleneck lets through of h.

        `record` gets (code, output, input): the losses and measures need them.
        """
        if self.bottleneck is None:
            return h
        if torch.is_autocast_enabled(h.device.type):  # the type the next matrix product would round to anyway
            h = h.to(torch.get_autocast_dtype(h.device.type))
        if edit is None:
            code, y, h = self.bottleneck.narrow(h, again=record is not None or self.fading)
        else:
            code = edit(self.layer, self.bottleneck.encode(h))
            y = self.bottleneck.decode(code, like=h)
        if self.training and self.fading:
            y = torch.lerp(h, y, self.share.to(h.dtype))
        if record is not None:
            record.append((code, y, h))
        return y


# The loss


def cross_entropy(x, weight, targets):
    """Mean over N tokens of -log softmax(weight x)[target]: x (N, d), weight (V, d), targets (N,).

    Few logits are simply made. Of many, a part of the tokens' at a time is, and none is kept for the backward pass.
    On a GPU a compiler fuses the plain loss and keeps its logits in bfloat16 only, which is faster as long as they fit.
    """
    fused = x.is_cuda and torch.compiler.is_compiling()
    if x.shape[0] * weight.shape[0] <= (32 * LOGITS if fused else LOGITS):
        return F.cross_entropy(F.linear(x, weight).float(), targets)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return cross_entropy_op(x, weight, targets, torch.is_grad_enabled())[0]


def parts(N, V):
    """Slices of N tokens whose logits are held at once: LOGITS of them, or an eighth of all if that is more, since each
    part reads and writes the whole gradient of the weight."""
    count = min(8, -(-N * V // LOGITS))
    return chunks(N, 1, -(-N // count))


@torch.library.custom_op("parity::cross_entropy", mutates_args=())
def cross_entropy_op(x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor,
                     gradients: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean loss, and N times its gradients to x and weight, made while a part's logits are there, so that none is
    made twice: (softmax - onehot) weight and (softmax - onehot)^T x. Without `gradients` these are empty.

    Products are in the type of x, softmax and sums over parts in at least float32. One operator: a compiler that sees
    the parts arranges them anew, and in bfloat16 holds nearly as much as without them.
    """
    N, V = len(x), len(weight)
    rounded, wide = weight.to(x.dtype), torch.promote_types(x.dtype, torch.float32)
    loss = torch.zeros((), dtype=wide, device=x.device)
    to_x, to_weight = empty_gradients(x, weight, gradients)
    to_weight.zero_()
    for part in parts(N, V):
        target = targets[part, None]
        scores = F.log_softmax(F.linear(x[part], rounded).to(wide), -1)  # (part, V)
        loss -= scores.gather(1, target).sum()
        if gradients:
            scores = scores.exp_().scatter_add_(1, target, loss.new_full(target.shape, -1)).to(x.dtype)
            torch.mm(scores, rounded, out=to_x[part])
            if to_weight.dtype == x.dtype:
                to_weight.addmm_(scores.T, x[part])
            else:
                to_weight += scores.T @ x[part]
        del scores  # before the next part's are made
    return loss / N, to_x, to_weight


def empty_gradients(x, weight, gradients):
    wide = torch.promote_types(x.dtype, torch.float32)
    return (torch.empty_like(x) if gradients else x.new_empty(0),
            torch.empty(weight.shape if gradients else 0, dtype=wide, device=weight.device))


@cross_entropy_op.register_fake
def _(x, weight, targets, gradients):
    to_x, to_weight = empty_gradients(x, weight, gradients)
    return to_weight.new_empty(()), to_x, to_weight


def keep_gradients(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:])


def scale_gradients(ctx, grad, *others):
    if any(other is not None for other in others):
        raise NotImplementedError("the loss by parts has no second derivative: give fewer tokens, or raise LOGITS")
    if grad is None:  # zero, by autograd's convention
        return None, None, None, None
    to_x, to_weight = ctx.saved_tensors
    scale = grad / to_x.shape[0]  # len() would fix the number of tokens for a compiler
    return (to_x.to(scale.dtype) * scale).to(to_x.dtype), to_weight * scale, None, None


cross_entropy_op.register_autograd(scale_gradients, setup_context=keep_gradients)


class GPT(nn.Module):
    """config: anything with the attributes layers, d, heads, context, vocab_size, bottleneck, site, bits, active,
    children, standardise, selection, seed, variance_weight, reconstruction_weight and n_min: a Config of config.py."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d)  # also the unembedding
        self.positions = nn.Embedding(config.context, config.d)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.d)
        if self.embedding.weight.device.type != "meta":
            self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """GPT-2's: normal with std 0.02, less for the 2 * layers matrices that write to the residual stream."""
        rng = torch.Generator(self.embedding.weight.device).manual_seed(self.config.seed)
        for name, weight in self.named_parameters():
            if name.endswith((".out.weight", ".down.weight")):
                weight.normal_(0, 0.02 / math.sqrt(2 * self.config.layers), generator=rng)
            elif name.endswith(".encoder"):
                weight.normal_(0, self.config.d ** -0.5, generator=rng)
            elif weight.dim() == 2 and not name.endswith(".decoder"):
                weight.normal_(0, 0.02, generator=rng)
        for block in self.blocks:
            if block.topk is not None:  # a dictionary starts as its own inverse, nearly
                block.topk.decoder.copy_(block.topk.encoder)

    def fade_in(self, share):
        """In training, bottlenecks let h + share (y - h) through, from now on; in evaluation always y alone."""
        for block in self.blocks:
            block.fading = share < 1
            block.share.fill_(share)  # a tensor: a compiler would take a number for a constant

    def count_parameters(self):
        return sum(weight.numel() for weight in self.parameters())

    def hidden(self, tokens, edit=None, patch=None, cache=None, record=None):
        """What the unembedding reads, (B, T) -> (B, T, d): for whoever needs the logits of a few places only."""
        T, past = tokens.shape[1], cache.length if cache else 0
        if past + T > self.config.context:
            raise ValueError(f"{past + T} tokens do not fit the context of {self.config.context}: give fewer")
        x = self.embedding(tokens) + self.positions.weight[cache.places(T) if cache else slice(T)]
        for block in self.blocks:
            x = block(x, edit, patch, cache, record)
        if cache:
            cache.length += T
        return self.norm(x)

    def forward(self, tokens, targets=None, edit=None, patch=None, cache=None, record=None, auxiliary=True):
        weights = {"variance": self.config.variance_weight, "reconstruction": self.config.reconstruction_weight}
        weights = weights if auxiliary else dict.fromkeys(weights, 0.0)
        if record is None and targets is not None and any(weights.values()):
            record = []
        x = self.hidden(tokens, edit, patch, cache, record)  # (B, T, d)
        if targets is None:
            return F.linear(x, self.embedding.weight)  # (B, T, V)
        losses = {"lm": cross_entropy(x.flatten(0, 1), self.embedding.weight, targets.flatten())}
        if weights["variance"]:
            m = self.blocks[0].bottleneck.m
            losses["variance"] = sum(variance_loss(code, m, self.config.n_min) for code, _, _ in record) / len(record)
        if weights["reconstruction"]:
            losses["reconstruction"] = sum(reconstruction_loss(y, h) for _, y, h in record) / len(record)
        return losses

    def total_loss(self, losses, share=1.0):
        """What training lowers: lm, plus the auxiliary losses times their weights, or a share of these."""
        return (losses["lm"] + share * self.config.variance_weight * losses.get("variance", 0)
                + share * self.config.reconstruction_weight * losses.get("reconstruction", 0))

    @torch.no_grad()
    def generate(self, tokens, count, temperature=1.0, top_k=None, top_p=None, seed=0,
                 stop=None, edit=None, patch=None, cached=True, forced=None):
        """Yield `count` next tokens (B,) of the prompts tokens (B, T), one step at a time;
        ends early once each row had `stop`.

        forced (B, n): what the first n steps give, where it is not -1. Prompts of several lengths go into one batch so,
        without padding: what the longer ones have more than the shortest is forced.
        temperature 0 is greedy. When the context is full, generation goes on from its second half. `cached=False`
        recomputes everything at every step: the same tokens, slowly. On a GPU, without edit and patch, a step is
        replayed as a CUDA graph.
        """
        if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
            raise ValueError(f"temperature={temperature} must be at least 0, top_k={top_k} at least 1, "
                             f"top_p={top_p} in (0, 1]")
        if tokens.shape[1] == 0:
            raise ValueError("the prompt has no tokens: start with the end-of-text token to generate from nothing")
        rng = torch.Generator(tokens.device).manual_seed(seed)
        context = self.config.context
        window, cache = tokens[:, -context:], Cache() if cached else None
        ended = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        fresh = window  # what the cache has not seen
        replay, graph = None, cached and edit is patch is None and worth_a_graph(self, tokens, count)
        for step in range(count):
            if graph and cache.length:
                if replay is None:
                    replay = Replay(self, fresh, cache, min(context, window.shape[1] + count))
                logits = replay(fresh)
            else:
                logits = self(fresh if cached else window, edit=edit, patch=patch, cache=cache)[:, -1].float()
                if replay is not None:  # the context was full
                    replay.cache.load(cache)
            chosen = sample(logits, temperature, top_k, top_p, rng)
            if forced is not None and step < forced.shape[1]:
                chosen = torch.where(forced[:, step] < 0, chosen, forced[:, step])
            if stop is not None:
                chosen = torch.where(ended, stop, chosen)
                ended |= chosen == stop
            yield chosen
            if ended.all():
                return
            fresh = chosen[:, None]
            window = torch.cat([window, fresh], dim=1)
            if window.shape[1] > context:
                fresh = window = window[:, -(context // 2):]
                cache = Cache() if cached else None


def sample(logits, temperature, top_k, top_p, rng):
    """One token for each row of logits (B, V)."""
    if temperature < 1e-6:  # below, nothing else has any probability left
        return logits.argmax(-1)
    values, order = (logits / temperature).softmax(-1), None  # (B, V)
    if top_k is not None and top_k < values.shape[-1]:
        values, order = values.topk(top_k)
        values = values / values.sum(-1, keepdim=True)
    if top_p is not None and top_p < 1:
        values, places = nucleus(values, top_p)
        order = places if order is None else order.gather(1, places)
    mass = values.double().cumsum(-1)
    if not mass[:, -1].isfinite().all():
        raise ValueError("the model gives no probabilities, but infinities: its weights, or an edit, are too large")
    drawn = torch.rand(len(mass), 1, generator=rng, device=mass.device, dtype=mass.dtype) * mass[:, -1:]
    last = torch.searchsorted(mass, mass[:, -1:].contiguous())  # that has any probability: rounding may draw the mass
    place = torch.searchsorted(mass, drawn, right=True).minimum(last)
    return (place if order is None else order.gather(1, place))[:, 0]


def nucleus(values, top_p):
    """(probabilities, tokens) of the smallest set with mass top_p, the likeliest first, then zeros: (B, n) both.

    To sort all would take most of the time of a small model. Few tokens have the mass in most rows; the others are
    looked at again.
    """
    V, size = values.shape[-1], min(16, values.shape[-1])
    kept, order = values.topk(size)
    while (short := kept.sum(-1) < top_p).any() and size < V:
        kept, order = (F.pad(part, (0, min(V, 16 * size) - size)) for part in (kept, order))
        size = kept.shape[-1]
        kept[short], order[short] = values[short].topk(size)
    return kept.masked_fill(kept.cumsum(-1) - kept >= top_p, 0), order  # those with less before them


class Cache:
    """Keys and values of the tokens seen so far, layer by layer."""

    def __init__(self):
        self.length, self.store = 0, {}

    def places(self, T):
        """Positions of the T tokens that come next."""
        return slice(self.length, self.length + T)

    def seen(self, T, device):
        """Which tokens the T that come next may look at: (T, past + T)."""
        return torch.ones(T, self.length + T, dtype=torch.bool, device=device).tril(self.length)

    def extend(self, layer, k, v):  # (B, H, T, d/H)
        T = k.shape[2]
        if layer not in self.store or self.length + T > self.store[layer].shape[3]:
            room = max(64, 2 * (self.length + T))  # grow by doubling: few copies, no waste for short texts
            grown = k.new_empty(2, *k.shape[:2], room, k.shape[3])
            if layer in self.store:
                grown[:, :, :, : self.length] = self.store[layer][:, :, :, : self.length]
            self.store[layer] = grown
        new = slice(self.length, self.length + T)
        self.store[layer][0][:, :, new], self.store[layer][1][:, :, new] = k, v
        return self.store[layer][:, :, :, : self.length + T]


# Generation on a GPU: a token is hundreds of kernels, so short that the launches are what takes the time


def worth_a_graph(model, tokens, count):
    """A graph calls no Python: where a hook waits to be called there is none."""
    return tokens.is_cuda and count >= 16 and not model.training and not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Fixed(Cache):
    """A Cache whose tensors stay where they are, whatever its length: so a CUDA graph can use it.

    The place of the next token is a tensor, too. What lies behind it is not seen, so it may be anything finite.
    """

    def __init__(self, cache, room):
        super().__init__()
        self.place = torch.zeros(1, dtype=torch.int64, device=next(iter(cache.store.values())).device)
        self.store = {layer: kept.new_zeros(*kept.shape[:3], room, kept.shape[4])
                      for layer, kept in cache.store.items()}

    def load(self, cache):
        """What a cache holds, and it no longer."""
        self.length = cache.length
        self.place.fill_(cache.length)
        for layer, kept in cache.store.items():
            self.store[layer][:, :, :, : cache.length] = kept[:, :, :, : cache.length]
        cache.store.clear()

    def places(self, T):
        return self.place

    def seen(self, T, device):
        return torch.arange(next(iter(self.store.values())).shape[3], device=device) <= self.place[:, None]

    def extend(self, layer, k, v):
        for kept, new in zip(self.store[layer], (k, v)):
            kept.index_copy_(2, self.place, new)
        return self.store[layer]


class Replay:
    """replay(tokens (B, 1)) -> logits (B, V) of the next token: the model's step as one CUDA graph, one launch for all.

    Captured once for a generation, with room for so many tokens in its cache. After the context was full cache.load()
    starts it anew.
    """

    def __init__(self, model, tokens, cache, room):
        self.tokens, self.cache = tokens.clone(), Fixed(cache, room)

        def step():
            with uncached(tokens.device.type):
                logits = model(self.tokens, cache=self.cache)[:, -1].float()
            self.cache.place += 1
            return logits
        self.step = captured(step, tokens.device)
        self.cache.load(cache)

    def __call__(self, tokens):
        self.tokens.copy_(tokens)
        return self.step()


def uncached(kind):
    """Autocast as it is, without weights kept in its type: it frees them at its end, and a graph would read them."""
    return torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache_enabled=False)


def captured(step, device):
    """A function that does on the GPU again what step() does there, in the same memory."""
    with torch.cuda.device(device):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # what is made at first use is made outside of the graph
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            result = step()

    def replay():
        graph.replay()
        return result
    return replay
