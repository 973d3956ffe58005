"""Our SAEs beside those of dictionary_learning, SAELens and sparsify: the same losses, gradients and codes.

    pip install -r requirements-compare.txt       in an environment of its own: see there
    python -m pytest -rs tests/test_compare.py

Each test is skipped where its library is absent.
"""
import math

import pytest
import torch

from autoencoder import SAE, VARIANTS

D, M, K, N = 32, 256, 8, 64


def ours(variant, **settings):
    """An SAE in the middle of its training, with some dead features."""
    torch.manual_seed(0)
    sae = SAE(variant, D, M, K, seed=1, **settings)
    with torch.no_grad():
        sae.W_enc += 0.1 * torch.randn(M, D)
        sae.b_enc.copy_(0.05 * torch.randn(M))
        sae.b_dec.copy_(0.1 * torch.randn(D))
        sae.unfired[:40] = 1000
        if variant == "jumprelu":
            sae.threshold.copy_(0.2 * torch.rand(M))
            sae.threshold[:20] = torch.linspace(-0.0008, 0.0008, 20)  # near zero, where its L0 has a peculiar gradient
        elif variant != "topk":
            sae.threshold.fill_(0.3)
    return sae


def inputs():
    return torch.randn(N, D, generator=torch.Generator().manual_seed(2)) / D ** 0.5


def theirs(sae):
    """dictionary_learning's trainer with the weights of ours: (trainer, its parameters by the names of ours)."""
    trainers = pytest.importorskip("dictionary_learning.trainers", reason="dictionary_learning is not installed")
    from dictionary_learning.trainers.matryoshka_batch_top_k import MatryoshkaBatchTopKTrainer
    common = dict(steps=100, activation_dim=D, dict_size=M, layer=0, lm_name="x", device="cpu", warmup_steps=10)
    if sae.variant == "topk":
        trainer = trainers.TopKTrainer(k=K, **common)
    elif sae.variant == "batchtopk":
        trainer = trainers.BatchTopKTrainer(k=K, **common)
    elif sae.variant == "jumprelu":
        trainer = trainers.JumpReluTrainer(target_l0=K, sparsity_warmup_steps=50, **common)
    else:
        parts = [size / M for size in sae.groups]
        trainer = MatryoshkaBatchTopKTrainer(k=K, group_fractions=parts, **common)
        assert tuple(trainer.group_sizes) == sae.groups
    ae = trainer.ae
    linear = sae.variant in ("topk", "batchtopk")
    names = {"W_enc": ae.encoder.weight if linear else ae.W_enc, "W_dec": ae.decoder.weight if linear else ae.W_dec,
             "b_enc": ae.encoder.bias if linear else ae.b_enc, "b_dec": ae.b_dec}
    if sae.variant == "jumprelu":
        names["threshold"] = ae.threshold
    turned = {"W_dec"} if linear else {"W_enc"}
    with torch.no_grad():
        for name, weight in names.items():
            value = getattr(sae, name).detach()
            weight.copy_(value.T if name in turned else value)
    trainer.num_tokens_since_fired = sae.unfired.clone()
    trainer.dead_feature_threshold = 1000
    return trainer, names, turned


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_gradients_are_those_of_dictionary_learning(variant):
    sae, x = ours(variant), inputs()
    trainer, names, turned = theirs(sae)
    wanted = trainer.loss(x.clone(), step=25)
    wanted.backward()
    found, _, _ = sae.loss(x, dead_after=1000, penalty=0.5, divided=variant == "matryoshka")
    found.backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
    for name, weight in names.items():
        expected = weight.grad.T if name in turned else weight.grad
        error = (getattr(sae, name).grad - expected).abs().max() / expected.abs().max()
        assert error < 1e-5, f"{name}: {error:.1e}"
    assert torch.equal(sae.unfired, trainer.num_tokens_since_fired) and (sae.unfired >= 1000).any()


if __name__ == "__main__":
    print(math.pi)
