"""The model: sizes, losses, editing, generation, compiling."""
import dataclasses

import pytest
import torch

import config
from config import Config
from dpb import Code
from model import GPT, TopKBottleneck

TINY = Config(layers=2, d=64, heads=2, context=32, vocab_size=100, bits=(6, 10), active=(4, 8), children=(31,))


def build(**changes):
    return GPT(dataclasses.replace(TINY, **changes))


def batch(seed=0, B=3, T=20):
    tokens = torch.randint(0, 100, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("name, parameters, rounded", [
    ("small_2l", 203_554_816, "0.2B"), ("small_3l", 203_554_816, "0.2B"), ("gpt_small", 203_554_816, "0.2B"),
    ("large_2l", 1_313_079_296, "1.3B"), ("large_3l", 1_313_079_296, "1.3B"), ("gpt_large", 1_313_079_296, "1.3B"),
    ("small_2l_topk", None, "1.0B"), ("small_3l_topk", None, "3.4B"),
    ("large_2l_topk", None, "4.5B"), ("large_3l_topk", None, "14.2B"),
])
def test_parameter_counts_of_the_papers_models(name, parameters, rounded):
    settings = config.load([f"configs/{name}.py"])
    with torch.device("meta"):
        model = GPT(settings)
    gains = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert gains == (2 * settings.layers + 1) * settings.d
    if parameters:
        assert model.count_parameters() == parameters + gains
    assert f"{model.count_parameters() / 1e9:.1f}B" == rounded


@pytest.mark.parametrize("site", ["mlp", "attention"])
@pytest.mark.parametrize("bottleneck", ["none", "parity", "topk"])
def test_losses_by_name_and_gradients_for_all(bottleneck, site):
    aux = {} if bottleneck == "none" else dict(variance_weight=0.05, reconstruction_weight=0.1, n_min=2)
    model = build(bottleneck=bottleneck, site=site, **aux)
    losses = model(*batch())
    assert set(losses) == ({"lm"} if bottleneck == "none" else {"lm", "variance", "reconstruction"})
    total = model.total_loss(losses)
    assert torch.allclose(
        total, losses["lm"] + 0.05 * losses.get("variance", 0) + 0.1 * losses.get("reconstruction", 0))
    total.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert abs(losses["lm"].item() - 4.6) < 0.3  # ln 100: it knows nothing yet


def test_no_token_sees_a_later_one():
    model = build().eval()
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 100
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :12], after[:, :12])
    assert not torch.equal(before[:, 12:], after[:, 12:])


@pytest.mark.parametrize("bottleneck", ["parity", "topk"])
def test_the_identity_edit_gives_bit_equal_logits_and_sees_every_code(bottleneck):
    model = build(bottleneck=bottleneck).eval()
    tokens, _ = batch()
    seen = {}

    def look(layer, code):
        seen[layer] = code
        return code

    assert torch.equal(model(tokens, edit=look), model(tokens))
    assert sorted(seen) == [0, 1]
    assert all(code.indices.shape == code.coefs.shape == (3, 20, 12) for code in seen.values())


def test_an_edit_changes_what_comes_after_it_only():
    model = build().eval()
    tokens, _ = batch()
    codes = []

    def zero_last_token(layer, code):
        codes.append(code)
        coefs = code.coefs.clone()
        coefs[:, -1] = 0
        return Code(code.indices, coefs if layer == 1 else code.coefs)

    logits = model(tokens, edit=zero_last_token)
    plain = model(tokens)
    assert torch.equal(logits[:, :-1], plain[:, :-1]) and not torch.equal(logits[:, -1], plain[:, -1])


def test_an_edit_may_change_the_number_of_features():
    model = build().eval()
    tokens, _ = batch()
    extra = torch.full((3, 20, 1), 700)

    def add_feature(layer, code):
        return Code(torch.cat([code.indices, extra], -1), torch.cat([code.coefs, torch.full((3, 20, 1), 5.0)], -1))

    assert not torch.equal(model(tokens, edit=add_feature), model(tokens))


@pytest.mark.parametrize("sampling", [dict(temperature=0), dict(temperature=1.3, top_k=20), dict(top_p=0.8), {}])
@pytest.mark.parametrize("bottleneck", ["none", "parity"])
def test_cached_generation_gives_the_tokens_of_uncached(bottleneck, sampling):
    """70 tokens with a context of 32: the context fills up and is halved twice."""
    model = build(bottleneck=bottleneck).eval()
    prompt = batch()[0][:, :5]
    cached, plain = (torch.stack(list(model.generate(prompt, 70, seed=3, cached=c, **sampling))) for c in (True, False))
    assert cached.shape == (70, 3) and torch.equal(cached, plain)


def test_generation_repeats_by_seed_and_stops():
    model = build().eval()
    prompt = batch()[0][:, :5]
    one, same, other = (torch.stack(list(model.generate(prompt, 20, seed=s))) for s in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    stop = one[4, 0].item()
    row = torch.stack(list(model.generate(prompt[:1], 20, seed=1, temperature=0, stop=stop)))
    greedy = torch.stack(list(model.generate(prompt[:1], 20, temperature=0)))
    where = (greedy == stop).nonzero()
    assert len(row) == (where[0, 0].item() + 1 if len(where) else 20)


def test_top_k_and_top_p_keep_the_right_tokens():
    from model import sample
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    rng = torch.Generator().manual_seed(0)
    assert set(sample(logits, 1.0, 2, None, rng).tolist()) == {0, 1}
    assert set(sample(logits, 1.0, None, 0.85, rng).tolist()) == {0, 1, 2}
    assert set(sample(logits, 1.0, None, 0.5, rng).tolist()) == {0}
    assert set(sample(logits, 1.0, None, None, rng).tolist()) == {0, 1, 2, 3}
    assert (sample(logits, 0, None, None, rng) == 0).all()


def test_wrong_generation_arguments_are_answered():
    model = build().eval()
    prompt = batch()[0][:, :5]
    for arguments, words in [(dict(temperature=-1), "at least 0"), (dict(top_k=0), "at least 1"),
                             (dict(top_p=1.5), r"in \(0, 1\]")]:
        with pytest.raises(ValueError, match=words):
            next(model.generate(prompt, 3, **arguments))
    with pytest.raises(ValueError, match="no tokens"):
        next(model.generate(prompt[:, :0], 3))
    with pytest.raises(ValueError, match="do not fit the context of 32"):
        model(torch.zeros(1, 33, dtype=torch.int64))


def test_topk_keeps_the_largest_and_decodes_them():
    torch.manual_seed(0)
    layer = TopKBottleneck(16, 64, 5)
    torch.nn.init.normal_(layer.encoder), torch.nn.init.normal_(layer.decoder)
    x = torch.randn(2, 7, 16)
    code = layer.encode(x)
    scores = x @ layer.encoder.T
    expected = torch.zeros_like(scores).scatter(-1, code.indices, code.coefs) @ layer.decoder
    torch.testing.assert_close(layer.decode(code), expected)
    torch.testing.assert_close(code.coefs.amin(-1), scores.sort(-1, descending=True).values[..., 4])
    torch.testing.assert_close(layer.decode(code, like=x).norm(dim=-1), x.norm(dim=-1))


def test_same_seed_same_model():
    for one, two in zip(build().state_dict().values(), build().state_dict().values()):
        assert torch.equal(one, two)
    assert not torch.equal(build().embedding.weight, build(seed=1).embedding.weight)


def test_layers_have_their_own_generators():
    model = build()
    assert not torch.equal(model.blocks[0].parity.generators_1, model.blocks[1].parity.generators_1)


def test_the_model_compiles_with_the_bottleneck_in_it():
    model = build(layers=1)
    tokens, targets = batch()
    results = []
    for run in model, torch.compile(model, fullgraph=True):
        model.zero_grad()
        loss = run(tokens, targets)["lm"]
        loss.backward()
        results.append((loss.detach(), model.embedding.weight.grad.clone()))
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
