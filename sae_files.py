"""SAEs on disk: our folders, and those of SAELens, dictionary_learning and sparsify.

    save_sae(folder, sae, about)                  sae.safetensors and config.json
    sae, about = load_sae(folder)
    export_sae(sae, about, "saelens", folder)     as SAE.load_from_disk of SAELens reads it; or dictionary_learning,
    sae = import_sae(folder)                      sparsify. Any of the three, told apart by their files.

`about` says what the SAE was trained on: `of`, the hashes of the model's weights and of the tokens, `site`, `layer`;
and the settings of the training. A folder is whole once it has its config.json, which knows the weights' checksum.

SAELens and sparsify have no batchtopk: once it is trained, it is a jumprelu whose thresholds are all equal, and so is
matryoshka, and as such they are exported. dictionary_learning centres x for all variants but jumprelu; where ours
differs, b_dec is folded into b_enc, which gives the same codes.
"""
import contextlib
import hashlib
import json
import os
import pickle

import safetensors
import safetensors.torch
import torch

from autoencoder import SAE, VARIANTS
from helpers import UserError, first_line, read_json, whole_file, write_json

FORMATS = ("saelens", "dictionary_learning", "sparsify")
CLASSES = {"topk": "AutoEncoderTopK", "batchtopk": "BatchTopKSAE", "matryoshka": "MatryoshkaBatchTopKSAE",
           "jumprelu": "JumpReluAutoEncoder"}  # of dictionary_learning


def tensors_of(sae):
    return {name: tensor.detach().cpu().contiguous() for name, tensor in sae.state_dict().items()}


def shape_of(sae):
    return {"variant": sae.variant, "d": sae.d, "m": sae.m, "k": sae.k, "centred": sae.centred,
            "groups": list(getattr(sae, "groups", []))}


def build(shape, tensors, path):
    """The SAE of a shape with these weights, or a sentence."""
    try:
        sae = SAE(shape["variant"], shape["d"], shape["m"], shape["k"], shape["groups"], shape["centred"])
        sae.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} holds no SAE that can be read: {first_line(error)}") from error
    broken = [name for name, tensor in sae.state_dict().items() if not torch.isfinite(tensor).all()]
    if broken:
        raise UserError(f"{path} holds weights that are no finite numbers ({broken[0]}): train it again")
    return sae.eval().requires_grad_(False)


# Ours


def save_sae(folder, sae, about):
    os.makedirs(folder, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(folder, "config.json"))  # not whole while the weights change
    content = safetensors.torch.save(tensors_of(sae))
    write_bytes(os.path.join(folder, "sae.safetensors"), content)
    shape = shape_of(sae) | {"sha256": hashlib.sha256(content).hexdigest()}
    write_json(os.path.join(folder, "config.json"), shape | about, indent=1)


def write_bytes(path, content):
    try:
        with whole_file(path, "wb") as file:
            file.write(content)
    except OSError as error:
        raise UserError(f"{path} could not be written ({error.strerror})") from error


def is_sae(folder):
    return os.path.exists(os.path.join(folder, "config.json")) and \
        os.path.exists(os.path.join(folder, "sae.safetensors"))


def load_sae(folder):
    """(SAE, what its config.json says)."""
    if not is_sae(folder):
        raise UserError(f"{folder} holds no finished SAE: python sae.py RUN trains some, into RUN/sae")
    about = read_json(os.path.join(folder, "config.json"), "Train it again: python sae.py RUN --fresh")
    path = os.path.join(folder, "sae.safetensors")
    with open(path, "rb") as file:
        content = file.read()
    if about.get("sha256") != hashlib.sha256(content).hexdigest():
        raise UserError(f"{path} is damaged (its checksum is wrong): train it again, python sae.py RUN --fresh")
    return build(about, safetensors.torch.load(content), path), about


# Those of others


def export_sae(sae, about, form, folder):
    if form not in FORMATS:
        raise UserError(f"there is no format {form!r}: the formats are {', '.join(FORMATS)}")
    if form == "sparsify" and (sae.variant != "topk" or not sae.centred):
        raise UserError(f"sparsify has topk SAEs only, and this one is {sae.variant}: export it as saelens or "
                        "dictionary_learning")
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise UserError(f"{folder} exists and is not empty: choose a new folder to export to")
    os.makedirs(folder, exist_ok=True)
    tensors = tensors_of(sae)
    if form == "sparsify":
        config = {"activation": "topk", "expansion_factor": sae.m // sae.d, "normalize_decoder": True,
                  "num_latents": sae.m, "k": sae.k, "multi_topk": False, "skip_connection": False, "transcode": False,
                  "d_in": sae.d}
        named = {"encoder.weight": tensors["W_enc"], "encoder.bias": tensors["b_enc"], "W_dec": tensors["W_dec"],
                 "b_dec": tensors["b_dec"]}
        write_bytes(os.path.join(folder, "sae.safetensors"), safetensors.torch.save(named))
        write_plain_json(os.path.join(folder, "cfg.json"), config)
    elif form == "saelens":
        config, named = as_saelens(sae, tensors, about)
        write_bytes(os.path.join(folder, "sae_weights.safetensors"), safetensors.torch.save(named))
        write_plain_json(os.path.join(folder, "cfg.json"), config)
    else:
        config, named = as_dictionary_learning(sae, tensors, about)
        with whole_file(os.path.join(folder, "ae.pt"), "wb") as file:
            torch.save(named, file)
        write_plain_json(os.path.join(folder, "config.json"), config)


def write_plain_json(path, content):
    with whole_file(path) as file:
        json.dump(content, file, indent=1)


def as_saelens(sae, tensors, about):
    named = {"W_enc": tensors["W_enc"].T.contiguous(), "b_enc": tensors["b_enc"], "W_dec": tensors["W_dec"],
             "b_dec": tensors["b_dec"]}
    of = {"model_name": str(about.get("run")), "hook_name": f"{about.get('layer')}.{about.get('site')}",
          "parity": {"of": about.get("of"), "variant": sae.variant}}
    config = {"d_in": sae.d, "d_sae": sae.m, "dtype": "float32", "device": "cpu", "apply_b_dec_to_input": sae.centred,
              "normalize_activations": "none", "reshape_activations": "none", "metadata": of}
    if sae.variant == "topk":
        return config | {"architecture": "topk", "k": sae.k}, named
    named["threshold"] = tensors["threshold"].expand(sae.m).contiguous()
    return config | {"architecture": "jumprelu"}, named


def as_dictionary_learning(sae, tensors, about):
    b_enc = tensors["b_enc"]
    if sae.centred and sae.variant == "jumprelu":
        b_enc = b_enc - tensors["W_enc"] @ tensors["b_dec"]
    elif not sae.centred and sae.variant != "jumprelu":
        b_enc = b_enc + tensors["W_enc"] @ tensors["b_dec"]
    if sae.variant in ("topk", "batchtopk"):
        named = {"encoder.weight": tensors["W_enc"], "encoder.bias": b_enc, "decoder.weight": tensors["W_dec"].T,
                 "b_dec": tensors["b_dec"]}
    else:
        named = {"W_enc": tensors["W_enc"].T, "b_enc": b_enc, "W_dec": tensors["W_dec"], "b_dec": tensors["b_dec"]}
    if sae.variant != "jumprelu":
        named["k"] = torch.tensor(sae.k, dtype=torch.int)
    named["threshold"] = tensors.get("threshold", torch.tensor(-1.0))
    if sae.variant == "matryoshka":
        named["group_sizes"] = torch.tensor(sae.groups)
    trainer = {"dict_class": CLASSES[sae.variant], "activation_dim": sae.d, "dict_size": sae.m, "k": sae.k,
               "layer": about.get("layer"), "lm_name": about.get("run"), "submodule_name": about.get("site")}
    return {"trainer": trainer, "buffer": {}}, {name: tensor.contiguous() for name, tensor in named.items()}


def import_sae(folder):
    """The SAE in a folder of SAELens, dictionary_learning or sparsify."""
    def has(name):
        return os.path.exists(os.path.join(folder, name))
    try:
        if has("ae.pt"):
            shape, tensors = from_dictionary_learning(folder)
        elif has("cfg.json") and has("sae_weights.safetensors"):
            shape, tensors = from_saelens(folder)
        elif has("cfg.json") and has("sae.safetensors"):
            shape, tensors = from_sparsify(folder)
        else:
            raise UserError(f"{folder} holds no SAE of SAELens (cfg.json, sae_weights.safetensors), "
                            "dictionary_learning (ae.pt, config.json) or sparsify (cfg.json, sae.safetensors)")
    except (OSError, KeyError, TypeError, AttributeError, ValueError, RuntimeError, RecursionError,
            pickle.UnpicklingError, safetensors.SafetensorError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"the SAE in {folder} cannot be read: {type(error).__name__}: {first_line(error)}") from error
    return build(shape, {name: tensor.float().contiguous() for name, tensor in tensors.items()}, folder)


def read_config(folder, name):
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        content = json.load(file)
    if not isinstance(content, dict):
        raise UserError(f"{os.path.join(folder, name)} is no config of an SAE")
    return content


def from_saelens(folder):
    config, tensors = read_config(folder, "cfg.json"), load_tensors(folder, "sae_weights.safetensors")
    kind = config["architecture"]
    if kind not in ("topk", "jumprelu"):
        raise UserError(f"{folder} is an SAE of the architecture {kind!r}: topk and jumprelu can be read")
    if config.get("normalize_activations", "none") not in ("none", None) or config.get("rescale_acts_by_decoder_norm"):
        raise UserError(f"{folder} rescales activations: fold that into its weights first, as SAELens can")
    m, d = tensors["W_dec"].shape  # a jumprelu does not say how many features it aimed at: m
    shape = {"variant": kind, "d": d, "m": m, "k": config["k"] if kind == "topk" else m,
             "centred": bool(config.get("apply_b_dec_to_input", True)), "groups": []}
    names = ["W_enc", "b_enc", "W_dec", "b_dec", *(["threshold"] if kind == "jumprelu" else [])]
    return shape, {name: tensors[name].T if name == "W_enc" else tensors[name] for name in names}


def from_sparsify(folder):
    config, tensors = read_config(folder, "cfg.json"), load_tensors(folder, "sae.safetensors")
    if config.get("activation", "topk") != "topk" or config.get("transcode") or config.get("skip_connection"):
        raise UserError(f"{folder} is a transcoder or no topk SAE: only topk SAEs can be read")
    m, d = tensors["W_dec"].shape
    shape = {"variant": "topk", "d": d, "m": m, "k": config["k"], "centred": True, "groups": []}
    return shape, {"W_enc": tensors["encoder.weight"], "b_enc": tensors["encoder.bias"], "W_dec": tensors["W_dec"],
                   "b_dec": tensors["b_dec"]}


def from_dictionary_learning(folder):
    trainer = read_config(folder, "config.json")["trainer"]
    tensors = torch.load(os.path.join(folder, "ae.pt"), map_location="cpu", weights_only=True)
    variant = {name: variant for variant, name in CLASSES.items()}.get(trainer["dict_class"])
    if variant is None:
        raise UserError(f"{folder} is a {trainer['dict_class']}: those that can be read are "
                        f"{', '.join(CLASSES.values())}")
    if variant in ("topk", "batchtopk"):
        named = {"W_enc": tensors["encoder.weight"], "b_enc": tensors["encoder.bias"],
                 "W_dec": tensors["decoder.weight"].T, "b_dec": tensors["b_dec"]}
    else:
        named = {"W_enc": tensors["W_enc"].T, **{name: tensors[name] for name in ("b_enc", "W_dec", "b_dec")}}
    if variant != "topk":
        named["threshold"] = tensors["threshold"]
    m, d = named["W_dec"].shape
    k = int(tensors["k"]) if "k" in tensors else min(m, int(trainer.get("target_l0") or m))
    groups = tensors["group_sizes"].tolist() if variant == "matryoshka" else []
    return {"variant": variant, "d": d, "m": m, "k": k, "centred": variant != "jumprelu", "groups": groups}, named


def load_tensors(folder, name):
    return safetensors.torch.load_file(os.path.join(folder, name))


def variant_folder(run_folder, variant, site, layer):
    assert variant in VARIANTS
    return os.path.join(run_folder, "sae", f"{variant}-{site}-{layer}")
