"""Sources of features: whatever turns the activations of a model into sparse codes and back.

    source = open_source(run, "own")                 the model's own bottlenecks
    source = open_source(run, "topk")                SAEs in RUN/sae, one a layer; or a folder of one
    source = open_source(run, "hash"), "neurons"     the controls, below
    codes = read_codes(run.model, tokens, source)    {layer: Code(indices, coefs)}, (B, T, K) each
    logits = run.model(tokens, **source.edited(f))   f(layer, code) -> code: for every source, as edit= is for its own

A source has features 0 .. m - 1, a site (model.PATCH_SITES) and for some layers a part with two methods: encode(x) ->
Code, where coefficient 0 is not active, and decode(code, like=x) -> (..., d). An edit of the model's own code changes
all that the MLP reads. An edit of another source adds to the activation what it changes of the decoded, which is a sum
over features: what the source does not reconstruct stays.

Two controls stand beside every figure of a trained source; it must beat them, or it means nothing:
  hash      an untrained parity bottleneck of the same shape on the same activations after a random rotation, with
            moments fitted there. Without the rotation it would share the dictionary of the trained one.
  neurons   the coordinates themselves, the K with the largest |x|.
"""
import contextlib
import hashlib
import os
from typing import NamedTuple

import torch
from torch import nn

from autoencoder import VARIANTS
from checkpoint import weights_hash
from data import open_split
from dpb import Code, DeepParityBottleneck, update_moments
from helpers import UserError, suggest
from model import PATCH_SITES
from sae_files import is_sae, load_sae, variant_folder

FITTED_ON = 2 ** 14  # tokens of the training split that the moments of hash are fitted on


class Source(NamedTuple):
    kind: str      # own, hash, neurons, sae, or stream: all coordinates, for steering
    name: str      # for people and names of files
    key: str       # tells it from every other source of the same model
    site: str      # where its activations are read
    m: int         # features
    layers: dict   # layer: encode, decode

    def edited(self, edit):
        """Arguments of a forward pass in which edit(layer, code) -> code changes the source's codes."""
        if self.kind == "own":
            return {"edit": edit}

        def change(layer, x):
            part = self.layers[layer]
            code = part.encode(x)
            new = edit(layer, code)
            return x if new is code else x + (part.decode(new) - part.decode(code)).to(x.dtype)
        return self.patched(change)

    def spliced(self):
        """Arguments of a forward pass in which all that goes on is what the source reconstructs. Not for own."""
        def change(layer, x):
            part = self.layers[layer]
            return part.decode(part.encode(x), like=x).to(x.dtype)
        return self.patched(change)

    def added(self, layer, indices, weights):
        """What the features with these weights add to an activation: (k,), (k,) -> (d,)."""
        code = Code(indices[None], weights[None])
        nothing = Code(indices[None], torch.zeros_like(weights)[None])
        return (self.layers[layer].decode(code) - self.layers[layer].decode(nothing))[0]

    def patched(self, change):
        """Arguments of a forward pass in which change(layer, x) -> x is applied wherever the source reads."""
        def patch(site, layer, x):
            if site != self.site or layer not in self.layers:
                return x
            with torch.autocast(x.device.type, enabled=False):  # codes are not rounded more than activations are
                return change(layer, x)
        return {"patch": patch}


class Rotated(nn.Module):
    """The hash control: a bottleneck on x R, R orthogonal."""

    def __init__(self, d, bits, active, children, seed, **settings):
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.register_buffer("rotation", torch.linalg.qr(torch.randn(d, d, generator=rng)).Q)
        # With decay 0 the moments become those of the tokens that were seen; all of them are sampled.
        self.bottleneck = DeepParityBottleneck(d, bits, active, children, seed=seed, decay=0.0, samples=2 ** 40,
                                               **settings)

    @torch.no_grad()
    def fit(self, x):
        """The moments of x (N, d): level by level, for a level's candidates follow from the moments before it."""
        self.bottleneck.train()
        for _ in self.bottleneck.active:
            for part in (x @ self.rotation).split(2 ** 12):
                self.bottleneck.encode(part)
            update_moments(self.bottleneck)
        return self.eval()

    def encode(self, x):
        return self.bottleneck.encode(x.float() @ self.rotation)

    def decode(self, code, like=None):
        y = self.bottleneck.decode(code, like=None if like is None else like.float() @ self.rotation)
        return y @ self.rotation.T


class Neurons:
    """The K coordinates with the largest |x|, signed."""

    def __init__(self, d, K):
        self.d, self.K = d, K

    def encode(self, x):
        indices = x.detach().abs().topk(self.K).indices
        return Code(indices, x.gather(-1, indices))

    def decode(self, code, like=None):
        x = torch.zeros(*code.indices.shape[:-1], self.d, dtype=code.coefs.dtype, device=code.coefs.device)
        return x.scatter_add(-1, code.indices, code.coefs)


# Reading


class Enough(Exception):
    """Raised in a forward pass that has come as far as it is needed."""


@torch.no_grad()
def read_activations(model, tokens, site, layers):
    """The activations of a site for tokens (B, T): {layer: (B, T, d)}. On a GPU in bfloat16, as in training."""
    found = {}

    def look(at, layer, x):
        if at == site and layer in layers:
            found[layer] = x
            if len(found) == len(layers):
                raise Enough
        return x
    with contextlib.suppress(Enough), torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
        model.hidden(tokens, patch=look)
    return found


@torch.no_grad()
def read_codes(model, tokens, source):
    """The codes of a source for tokens (B, T): {layer: Code}, (B, T, K)."""
    if source.kind != "own":
        found = read_activations(model, tokens, source.site, source.layers)
        return {layer: source.layers[layer].encode(x) for layer, x in found.items()}
    codes = {}

    def look(layer, code):
        codes[layer] = code
        return code
    model.hidden(tokens, edit=look)
    return codes


# Opening


def open_source(run, name="own", site=None, weights=None):
    """The Source that a user means: own, hash, neurons, a variant of SAE, or the folder of one.

    site: mlp_in unless said; own features and the SAE of a folder have theirs.  weights: weights_hash, where it is
    known already.
    """
    if site is not None and site not in PATCH_SITES:
        raise UserError(f"there is no site {site!r}{suggest(site, PATCH_SITES)}")
    config, layers = run.config, range(run.config.layers)
    if name == "own":
        return open_own(run, site)
    if name == "neurons":
        site, K = site or "mlp_in", min(sum(config.active), config.d)
        return Source("neurons", f"neurons-{site}", f"neurons-{site} {K}", site, config.d,
                      dict.fromkeys(layers, Neurons(config.d, K)))
    if name == "hash":
        site = site or "mlp_in"
        parts, key = fit_hashes(run, site)
        return Source("hash", f"hash-{site}", key, site, 2 ** config.bits[-1], parts)
    return open_saes(run, name, site, weights or weights_hash(run.model))


def open_own(run, site):
    config, parts = run.config, [block.bottleneck for block in run.model.blocks]
    if parts[0] is None:
        raise UserError("this model is dense, so it has no features of its own: train SAEs on it, python sae.py "
                        f"{os.path.dirname(run.path)}, and take --source topk; or train a model that has some, "
                        "python train.py configs/tiny.py")
    if site not in (None, f"{config.site}_in"):
        raise UserError(f"the model's own features are those before its {config.site}: leave --site off, or choose "
                        "another --source")
    return Source("own", "own", "own", f"{config.site}_in", parts[0].m, dict(enumerate(parts)))


def open_saes(run, name, site, weights):
    folders = [name] if os.path.isdir(name) else find_saes(run, name, site or "mlp_in")
    found = [load_sae(folder) for folder in folders]
    for folder, (sae, about) in zip(folders, found):
        check_sae(run, folder, sae, about, weights)
        if site not in (None, about["site"]):
            raise UserError(f"{folder} is of the site {about['site']}, not of {site}: leave --site off")
        if sae.m != found[0][0].m:
            raise UserError(f"{folder} has {sae.m:,} features, {folders[0]} has {found[0][0].m:,}: features of one "
                            "source must be as many at every layer. Give the folder of one of them")
    site, device = found[0][1]["site"], run.model.embedding.weight.device
    title = f"{name}-{site}" if name in VARIANTS else os.path.basename(os.path.normpath(name))
    made = " ".join(f"{about['layer']} {about['sha256']}" for _, about in found)
    key = f"sae {site} {hashlib.sha256(made.encode()).hexdigest()[:16]}"
    return Source("sae", title, key, site, found[0][0].m, {about["layer"]: sae.to(device) for sae, about in found})


def find_saes(run, variant, site):
    """The folders of a variant, layer by layer."""
    if variant not in VARIANTS:
        raise UserError(f"there is no source {variant!r}{suggest(variant, ('own', 'hash', 'neurons', *VARIANTS))}; or "
                        "give the folder of an SAE")
    home = os.path.dirname(run.path)
    folders = [variant_folder(home, variant, site, layer) for layer in range(run.config.layers)]
    found = [folder for folder in folders if is_sae(folder)]
    if not found:
        raise UserError(f"{os.path.join(home, 'sae')} has no {variant} SAEs at {site}: python sae.py {home} "
                        f"--variant {variant} --site {site} trains them")
    return found


def check_sae(run, folder, sae, about, weights):
    """A sentence if an SAE is not of this model. weights: of the model, weights_hash."""
    if sae.d != run.config.d:
        raise UserError(f"{folder} is of activations of width {sae.d}, but those of {run.path} have width "
                        f"{run.config.d}: train one for it, python sae.py {os.path.dirname(run.path)}")
    if (about.get("of") or {}).get("model") != weights:
        raise UserError(f"{folder} was trained on other weights than those of {run.path}: train it again, python "
                        f"sae.py {os.path.dirname(run.path)} --fresh")
    if about.get("site") not in PATCH_SITES or about.get("layer") not in range(run.config.layers):
        raise UserError(f"{folder} is of layer {about.get('layer')}, {about.get('site')}, which this model has not")


def open_tokens(run, split, verify=True):
    """The tokens that a run was trained or evaluated on."""
    tokens = open_split(run.config.data, split, verify)
    if tokens.tokenizer_id != run.content["tokenizer"]["id"]:
        raise UserError(f"{run.config.data} was made with another tokenizer than this model's: prepare its data again")
    return tokens


def fit_hashes(run, site):
    """The hash control of every layer, {layer: Rotated}, the same for the same weights and data; and its key."""
    config, device = run.config, run.model.embedding.weight.device
    tokens, context, layers = open_tokens(run, "train", verify=False), config.context, range(config.layers)
    shape = {key: getattr(config, key) for key in ("bits", "active", "children", "standardise", "selection")}
    try:  # seeds far from those of models, config.seed * 1000 + layer
        parts = {layer: Rotated(config.d, seed=2 ** 61 + layer, **shape).to(device) for layer in layers}
    except ValueError as error:
        raise UserError(f"there is no hash control of the shape in this run's config: {error}") from error
    rows = tokens.batch(0, 0, min(tokens.count(context), max(1, FITTED_ON // context)), context)[:, :-1]
    found = {layer: [] for layer in layers}
    for part in rows.split(max(1, 2 ** 13 // context)):
        for layer, x in read_activations(run.model, part.to(device), site, layers).items():
            found[layer].append(x.flatten(0, 1).float())
    for layer, part in parts.items():
        part.fit(torch.cat(found.pop(layer)))
    return parts, f"hash-{site} {shape} {FITTED_ON} of {tokens.identity()}"
