"""Our SAEs beside those of dictionary_learning, SAELens and sparsify: the same losses, gradients and codes.

    pip install -r requirements-compare.txt       in an environment of its own: see there
    python -m pytest -rs tests/test_compare.py    each test is skipped where its library is absent
    python tests/test_compare.py out/tiny_gpt     what comes of a training, and its speed, beside dictionary_learning's
"""
import math
import os
import sys
import time

import pytest
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # as a script

import sae as training  # noqa: E402
from autoencoder import SAE, VARIANTS  # noqa: E402
from checkpoint import open_run  # noqa: E402
from data import Tokens  # noqa: E402
from sae_files import export_sae, import_sae  # noqa: E402
from sources import open_tokens, read_activations  # noqa: E402

D, M, K, N = 32, 256, 8, 64


def ours(variant, **settings):
    """An SAE in the middle of its training, with some dead features."""
    torch.manual_seed(0)
    sae = SAE(variant, D, M, K, seed=1, **settings)
    with torch.no_grad():
        sae.W_enc += 0.1 * torch.randn(M, D)
        sae.b_enc.copy_(0.05 * torch.randn(M))
        sae.b_dec.copy_(0.1 * torch.randn(D))
        sae.b_enc[:40] = -0.5
        sae.unfired[:40] = 1000
        if variant == "jumprelu":
            sae.threshold.copy_(0.2 * torch.rand(M))
            sae.threshold[:20] = torch.linspace(-0.0008, 0.0008, 20)  # near zero, where its L0 has a peculiar gradient
        elif variant != "topk":
            sae.threshold.fill_(0.3)
    return sae


def inputs():
    return torch.randn(N, D, generator=torch.Generator().manual_seed(2)) / D ** 0.5


def theirs(sae, **settings):
    """dictionary_learning's trainer with the weights of ours: (trainer, its parameters by our names, those turned)."""
    trainers = pytest.importorskip("dictionary_learning.trainers", reason="dictionary_learning is not installed")
    from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKTrainer
    common = dict(steps=100, warmup_steps=10) | settings
    common |= dict(activation_dim=sae.d, dict_size=sae.m, layer=0, lm_name="x", device="cpu")
    if sae.variant == "topk":
        trainer = trainers.TopKTrainer(k=sae.k, **common)
    elif sae.variant == "batchtopk":
        trainer = trainers.BatchTopKTrainer(k=sae.k, **common)
    elif sae.variant == "jumprelu":
        trainer = trainers.JumpReluTrainer(target_l0=sae.k, **{"sparsity_warmup_steps": 50} | common)
    else:
        parts = [size / sae.m for size in sae.groups]
        trainer = MatryoshkaBatchTopKTrainer(k=sae.k, group_fractions=parts, **common)
        assert tuple(trainer.group_sizes) == sae.groups
    ae, linear = trainer.ae, sae.variant in ("topk", "batchtopk")
    names = {"W_enc": ae.encoder.weight if linear else ae.W_enc, "W_dec": ae.decoder.weight if linear else ae.W_dec,
             "b_enc": ae.encoder.bias if linear else ae.b_enc, "b_dec": ae.b_dec}
    if sae.variant == "jumprelu":
        names["threshold"] = ae.threshold
    turned = {"W_dec"} if linear else {"W_enc"}
    copy_weights(sae, names, turned)
    trainer.num_tokens_since_fired = sae.unfired.clone()
    trainer.dead_feature_threshold = 1000
    return trainer, names, turned


@torch.no_grad()
def copy_weights(sae, names, turned):
    for name, weight in names.items():
        value = getattr(sae, name).detach()
        weight.copy_(value.T if name in turned else value)


def assert_same_gradients(sae, names, turned):
    for name, weight in names.items():
        expected = weight.grad.T if name in turned else weight.grad
        error = (getattr(sae, name).grad - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_gradients_are_those_of_dictionary_learning(variant):
    sae, x = ours(variant), inputs()
    trainer, names, turned = theirs(sae)
    wanted = trainer.loss(x.clone(), step=25)
    wanted.backward()
    found, _, _ = sae.loss(x, dead_after=1000, penalty=0.5, divided=variant == "matryoshka")
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert_same_gradients(sae, names, turned)
    assert torch.equal(sae.unfired, trainer.num_tokens_since_fired)
    assert variant == "jumprelu" or (sae.unfired >= 1000).any()


@pytest.mark.parametrize("variant", ["topk", "batchtopk", "jumprelu"])
def test_reconstruction_losses_and_gradients_are_those_of_saelens(variant):
    """Its loss of dead features is another. Its L0 is that of step_on="z", but not squared: with the coefficient that
    is the derivative of our square, the gradients are equal."""
    lens = pytest.importorskip("sae_lens", reason="SAELens is not installed")
    from sae_lens.saes.sae import TrainStepInput
    sae, x = ours(variant), inputs()
    common = dict(d_in=D, d_sae=M, apply_b_dec_to_input=sae.centred)
    if variant == "jumprelu":
        with torch.no_grad():
            sae.threshold.abs_().add_(0.01)  # it keeps them positive
            sae.threshold[:200] = (x[0] @ sae.W_enc.T + sae.b_enc)[:200].clamp(min=0.01) + 0.0002  # close to many z
        config = lens.JumpReLUTrainingSAEConfig(l0_coefficient=1.0, jumprelu_bandwidth=0.001, **common)
        other = lens.JumpReLUTrainingSAE(config)
    elif variant == "topk":
        other = lens.TopKTrainingSAE(lens.TopKTrainingSAEConfig(k=K, rescale_acts_by_decoder_norm=False, **common))
    else:
        other = lens.BatchTopKTrainingSAE(
            lens.BatchTopKTrainingSAEConfig(k=K, rescale_acts_by_decoder_norm=False, **common))
    names = {name: getattr(other, name) for name, _ in sae.named_parameters()}
    copy_weights(sae, names, {"W_enc"})
    coefficients = dict.fromkeys(other.get_coefficients(), 0.0)
    if variant == "jumprelu":
        l0 = (sae.scores(x) > sae.threshold).sum(1).float().mean().item()
        coefficients["l0"] = 2 * (l0 / K - 1) / K
    wanted = other.training_forward_pass(TrainStepInput(x, coefficients, None, 0, False))
    wanted.loss.backward()
    found, error, _ = sae.loss(x, math.inf, step_on="z")
    found.backward()
    assert error.item() == pytest.approx(wanted.losses["mse_loss"].item(), rel=1e-5)
    assert_same_gradients(sae, names, {"W_enc"})


# Files


def dense_code(code, m):
    return torch.zeros(len(code.indices), m).scatter(1, code.indices, code.coefs)


def check_both_ways(variant, form, tmp_path, load):
    """Exported, loaded by its library, and imported again: the same codes and reconstructions."""
    sae, x = ours(variant).requires_grad_(False), inputs()
    export_sae(sae, {"run": "out/x", "site": "mlp_in", "layer": 1}, form, str(tmp_path / "there"))
    code, x_hat = load(str(tmp_path / "there"), x)
    torch.testing.assert_close(code, dense_code(sae.encode(x), M), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(x_hat, sae.decode(sae.encode(x)), atol=1e-5, rtol=1e-5)
    again = import_sae(str(tmp_path / "there"))
    torch.testing.assert_close(dense_code(again.encode(x), M), code, atol=1e-5, rtol=1e-5)
    assert (code > 0).sum() > N


@pytest.mark.parametrize("variant", VARIANTS)
def test_saelens_loads_what_we_export(variant, tmp_path):
    lens = pytest.importorskip("sae_lens", reason="SAELens is not installed")

    @torch.no_grad()
    def load(folder, x):
        other = lens.SAE.load_from_disk(folder)
        return other.encode(x), other(x)
    check_both_ways(variant, "saelens", tmp_path, load)


@pytest.mark.parametrize("variant", VARIANTS)
def test_dictionary_learning_loads_what_we_export(variant, tmp_path):
    pytest.importorskip("dictionary_learning", reason="dictionary_learning is not installed")
    from dictionary_learning.utils import load_dictionary

    @torch.no_grad()
    def load(folder, x):
        other, _ = load_dictionary(folder, "cpu")
        return other.encode(x), other(x)
    check_both_ways(variant, "dictionary_learning", tmp_path, load)


def test_sparsify_loads_what_we_export(tmp_path):
    sparsify = pytest.importorskip("sparsify", reason="sparsify is not installed")

    @torch.no_grad()
    def load(folder, x):
        other = sparsify.Sae.load_from_disk(folder)
        found = other.encode(x)
        code = torch.zeros(N, M).scatter(1, found.top_indices, found.top_acts)
        return code, other.decode(found.top_acts, found.top_indices)
    check_both_ways("topk", "sparsify", tmp_path, load)


def test_saelens_own_files_are_read(tmp_path):
    lens = pytest.importorskip("sae_lens", reason="SAELens is not installed")
    torch.manual_seed(0)
    other = lens.TopKTrainingSAE(lens.TopKTrainingSAEConfig(k=K, d_in=D, d_sae=M, rescale_acts_by_decoder_norm=False))
    other.save_inference_model(tmp_path)
    loaded = lens.SAE.load_from_disk(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(dense_code(import_sae(str(tmp_path)).encode(inputs()), M), loaded.encode(inputs()))


# What comes of a training


def compare_trainings(path, layer=0):
    """A line for each variant: FVU on validation tokens, ours and theirs, of one and the same training."""
    run = open_run(path)
    tokens = open_tokens(run, "train")
    source = training.Activations(run, tokens, "mlp_in", [layer], 1024, 0, 0, 1)
    rows = Tokens(run.config.data, "val").windows(range(256), run.config.context)[:, :-1]
    held_out = read_activations(run.model, rows, "mlp_in", [layer])[layer].flatten(0, 1)
    print(f"{path}, layer {layer}: 4,096 features, 24 active, 1,500 steps of 1,024 tokens, the same in the same order; "
          f"FVU and L0 on {len(held_out):,} validation tokens")
    for variant in VARIANTS:
        lr = training.default_rate(variant, 4096, 1500)
        settings = training.Settings(variant, 4096, 24, 1500, 1024, lr, 0, "f", variant == "matryoshka")
        own = training.Training(settings, run.config.d, layer, "", torch.device("cpu"))
        scheduled = dict(steps=1500, warmup_steps=75, decay_start=1200, lr=lr)
        if variant == "jumprelu":
            scheduled["sparsity_warmup_steps"] = 150
        else:
            scheduled |= dict(threshold_beta=1 - 1 / 75, threshold_start_step=0)
        trainer, _, _ = theirs(own.sae, **scheduled)
        trainer.dead_feature_threshold = settings.dead_after()
        seconds = [0.0, 0.0]
        for step in range(1500):
            x = source.batch(step)[layer]
            start = time.perf_counter()
            own.update(x)
            middle = time.perf_counter()
            trainer.update(step, x / own.scale)
            seconds[0] += middle - start
            seconds[1] += time.perf_counter() - middle
        own.sae.scale(own.scale)
        trainer.ae.scale_biases(own.scale)
        with torch.no_grad():
            codes = [dense_code(own.sae.encode(held_out[:4096]), 4096), trainer.ae.encode(held_out[:4096])]
            outputs = [torch.cat([decode(part) for part in held_out.split(4096)])
                       for decode in (lambda x: own.sae.decode(own.sae.encode(x)), trainer.ae)]  # noqa: B023
        total = (held_out - held_out.mean(0)).square().sum()
        fvu = [((held_out - output).square().sum() / total).item() for output in outputs]
        l0 = [(code > 0).sum(1).float().mean().item() for code in codes]
        print(f"{variant:<11} FVU {fvu[0]:.4f}, theirs {fvu[1]:.4f} ({fvu[0] / fvu[1] - 1:+.1%})   L0 {l0[0]:.1f}, "
              f"theirs {l0[1]:.1f}   seconds {seconds[0]:.0f}, theirs {seconds[1]:.0f}", flush=True)


def compare_speed(d=1024, m=32768, k=48, tokens=1024, passes=3):
    """Steps of topk in turn, the least times."""
    torch.manual_seed(0)
    settings = training.Settings("topk", m, k, 1000, tokens, 1e-4, 0, "f", False)
    own = training.Training(settings, d, 0, "", torch.device("cpu"))
    trainer, _, _ = theirs(own.sae, steps=1000, warmup_steps=10)
    x, times = torch.randn(tokens, d), ([], [])
    for step in range(passes + 1):
        for found, update in zip(times, (own.update, lambda x: trainer.update(step, x))):  # noqa: B023
            start = time.perf_counter()
            update(x)
            found.append(time.perf_counter() - start)
    least = [min(found[1:]) for found in times]
    print(f"topk, d={d}, {m:,} features, {k} active, {tokens:,} tokens: {least[0]:.2f} s a step, dictionary_learning "
          f"{least[1]:.2f} s: {least[1] / least[0]:.1f} times as fast")


if __name__ == "__main__":
    compare_speed()
    compare_trainings(sys.argv[1])
