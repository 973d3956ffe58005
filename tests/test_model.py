"""The model: sizes, losses, editing, generation, compiling."""
import contextlib
import dataclasses
import gc
import itertools
import types

import pytest
import torch
import torch.nn.functional as F
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import config
import model as model_module
from config import Config
from dpb import Code
from model import GPT, PATCH_SITES, TopKBottleneck, cross_entropy, cross_entropy_op

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


# The loss by parts: the plain cross entropy is the judge


def plain(x, weight, targets):
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def exact(x, weight, targets):
    return F.cross_entropy(F.linear(x.double(), weight.double()), targets)


def head(N, V=100, d=48, dtype=torch.float32):
    rng = torch.Generator().manual_seed(N)
    x, weight = (torch.randn(rows, d, generator=rng, dtype=dtype).requires_grad_() for rows in (N, V))
    return x, weight, torch.randint(0, V, (N,), generator=rng)


def with_gradients(loss, *inputs):
    """The loss and its gradients; by a third of it, as training that accumulates over three passes."""
    return loss.detach(), *torch.autograd.grad(loss / 3, inputs)


def assert_as_good(found, judged, truth):
    """No more than twice the error that the plain loss makes, or than one rounding."""
    for ours, theirs, true in zip(found, judged, truth, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == true.shape
        error, allowed = ((other.double() - true.double()).norm() for other in (ours, theirs))
        assert error <= 2 * allowed + torch.finfo(theirs.dtype).eps * true.double().norm()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("N", [1, 2, 7, 41, 300])
def test_the_loss_by_parts_is_as_exact_as_the_plain_one(N, autocast, monkeypatch):
    """300 tokens are seven parts of 38 and one of 34, 41 six of 6 and one of 5; of fewer, each is a part."""
    monkeypatch.setattr(model_module, "LOGITS", 600 if N > 7 else 99)
    x, weight, targets = head(N)
    truth = with_gradients(exact(x, weight, targets), x, weight)
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        found, judged = (with_gradients(loss(x, weight, targets), x, weight) for loss in (cross_entropy, plain))
        with torch.no_grad():
            assert torch.equal(cross_entropy(x, weight, targets), found[0])
    assert_as_good(found, judged, truth)


@pytest.mark.parametrize("bottleneck", ["none", "parity", "topk"])
def test_a_model_has_the_gradients_of_the_plain_loss(bottleneck, monkeypatch):
    """The embedding's come from both of its ends; the other losses do not change at all."""
    aux = {} if bottleneck == "none" else dict(variance_weight=0.05, reconstruction_weight=0.1, n_min=2)
    model, results, others = build(bottleneck=bottleneck, **aux), [], []
    monkeypatch.setattr(model_module, "LOGITS", 1000)
    for loss in cross_entropy, plain, exact:
        monkeypatch.setattr(model_module, "cross_entropy", loss)
        losses = model(*batch())
        results.append(with_gradients(model.total_loss(losses), *model.parameters()))
        others.append([value for name, value in losses.items() if name != "lm"])
    assert_as_good(*results)
    assert all(torch.equal(*pair) for pair in zip(*others[:2]))


def test_few_logits_are_simply_made():
    """So that the tiny models learn bit for bit as they always did, and are evaluated so, on more tokens at a time."""
    x, weight, targets = head(50)
    for found, judged in zip(*(with_gradients(loss(x, weight, targets), x, weight) for loss in (cross_entropy, plain))):
        assert torch.equal(found, judged)
    settings = config.load(["configs/tiny.py"])
    assert max(settings.batch_tokens, 16384) * settings.vocab_size <= model_module.LOGITS


def test_gradients_by_parts_in_double_precision(monkeypatch):
    monkeypatch.setattr(model_module, "LOGITS", 60)
    x, weight, targets = head(11, V=13, d=5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *inputs: cross_entropy(*inputs, targets), (x, weight))
    for gradients in False, True:
        torch.library.opcheck(cross_entropy_op, (x.detach(), weight.detach(), targets, gradients))
    first, = torch.autograd.grad(cross_entropy(x, weight, targets), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        first.sum().backward()


def test_a_model_in_bfloat16_sums_its_parts_in_float32(monkeypatch):
    monkeypatch.setattr(model_module, "LOGITS", 600)
    x, weight, targets = head(300, dtype=torch.bfloat16)
    assert_as_good(*(with_gradients(loss(x, weight, targets), x, weight) for loss in (cross_entropy, plain, exact)))
    assert cross_entropy_op(x.detach(), weight.detach(), targets, True)[2].dtype == torch.float32


def memory(run):
    """(largest, most at a time) of the bytes that torch took while it ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    taken = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(taken), max(itertools.accumulate(taken))


@pytest.mark.parametrize("bottleneck", ["none", "parity", "topk"])
def test_the_logits_are_never_all_in_memory(bottleneck, monkeypatch):
    model = build(bottleneck=bottleneck, layers=1, d=64, vocab_size=5000)
    tokens, targets = batch(B=20, T=32)
    logits = 20 * 32 * 5000 * 4  # bytes

    def train():
        model(tokens, targets)["lm"].backward()
        model.zero_grad()

    def evaluate():
        with torch.no_grad():
            model(tokens, targets)
    for run, held in (train, 3), (evaluate, 2):
        monkeypatch.setattr(model_module, "LOGITS", 2 ** 25)
        run()  # tables
        _, before = memory(run)
        monkeypatch.setattr(model_module, "LOGITS", 2 ** 17)
        largest, after = memory(run)
        assert largest < logits / 4  # learned TopK's scores are a fifth
        assert before >= held * logits and before - after > (held - 1) * logits


def test_one_rank_of_many_has_the_same_gradients_by_parts(monkeypatch):
    monkeypatch.setattr(model_module, "LOGITS", 1000)
    model = build()

    def gradients(run):
        model.zero_grad()
        run(*batch())["lm"].backward()
        return [p.grad.clone() for p in model.parameters()]

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:  # what holds the group is gone before the group: torch 2.13 can wait forever if it goes the other way round
        alone = gradients(model)
        among = gradients(DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True))
        gc.collect()
    finally:
        distributed.destroy_process_group()
    assert all(torch.equal(*pair) for pair in zip(alone, among))


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


@pytest.mark.parametrize("bottleneck, site", [("none", "mlp"), ("parity", "mlp"), ("parity", "attention"),
                                              ("topk", "mlp")])
def test_the_identity_patch_gives_bit_equal_logits_and_sees_the_four_sites_of_every_layer(bottleneck, site):
    model = build(bottleneck=bottleneck, site=site).eval()
    tokens, _ = batch()
    seen = []

    def look(at, layer, x):
        seen.append((layer, at, tuple(x.shape)))
        return x

    def same(layer, code):
        return code

    assert torch.equal(model(tokens, patch=look), model(tokens))
    assert seen == [(layer, at, (3, 20, 64)) for layer in (0, 1) for at in PATCH_SITES]
    assert torch.equal(model(tokens, patch=look, edit=same), model(tokens))


def test_what_a_patch_returns_is_what_goes_on():
    """Each site stands where its name says: a block put together by hand from what is patched."""
    model = build(bottleneck="parity").eval()
    tokens, _ = batch()
    changes = dict(zip(PATCH_SITES, torch.randn(4, 3, 20, 64, generator=torch.Generator().manual_seed(0))))
    with torch.no_grad():
        logits = model(tokens, patch=lambda at, layer, x: x + changes[at] if layer == 1 else x)
        x = model.blocks[0](model.embedding(tokens) + model.positions.weight[:20])
        block = model.blocks[1]
        x = x + block.attention(block.norm1(x)) + changes["attention_out"]
        h = block.norm2(x) + changes["mlp_in"]
        x = x + block.mlp(block.parity(h)) + changes["mlp_out"] + changes["block_out"]
        torch.testing.assert_close(logits, F.linear(model.norm(x), model.embedding.weight))


def test_a_patch_goes_with_the_cache_and_generation():
    model = build(bottleneck="parity").eval()
    prompt = batch()[0][:, :5]

    def push(at, layer, x):
        return x + 0.5 if at == "mlp_in" else x

    def double(layer, code):
        return Code(code.indices, 2 * code.coefs * (code.indices % 2))

    cached, plain = (torch.stack(list(model.generate(prompt, 50, temperature=0, cached=c, patch=push, edit=double)))
                     for c in (True, False))
    assert torch.equal(cached, plain)
    assert not torch.equal(cached, torch.stack(list(model.generate(prompt, 50, temperature=0, edit=double))))


@pytest.mark.parametrize("sampling", [dict(temperature=0), dict(temperature=1.3, top_k=20), dict(top_p=0.8), {}])
@pytest.mark.parametrize("bottleneck", ["none", "parity"])
def test_cached_generation_gives_the_tokens_of_uncached(bottleneck, sampling):
    """70 tokens with a context of 32: the context fills up and is halved twice."""
    model = build(bottleneck=bottleneck).eval()
    prompt = batch()[0][:, :5]
    cached, plain = (torch.stack(list(model.generate(prompt, 70, seed=3, cached=c, **sampling))) for c in (True, False))
    assert cached.shape == (70, 3) and torch.equal(cached, plain)


@pytest.mark.parametrize("bottleneck", ["none", "parity"])
def test_a_step_that_is_replayed_in_the_same_memory_gives_the_same_tokens(bottleneck, monkeypatch):
    """As a CUDA graph does it, which there is none of on a CPU: what step() returns and reads never moves."""
    net, prompt, made = build(bottleneck=bottleneck).eval(), batch(T=32)[0], []

    def captured(step, device):
        step()
        result = step()
        made.append(result)
        return lambda: result.copy_(step())
    forced = torch.full((3, 4), -1)
    forced[1, :3] = 7
    cases = [(5, 70), (32, 40), (31, 16)]  # a context of 32: full several times, at the first token, at the second
    plain = [list(net.generate(prompt[:, :length], count, seed=3, forced=forced)) for length, count in cases]
    monkeypatch.setattr(model_module, "worth_a_graph", lambda *_: True)
    monkeypatch.setattr(model_module, "captured", captured)
    for number, (length, count) in enumerate(cases, 1):
        again = list(net.generate(prompt[:, :length], count, seed=3, forced=forced))
        assert torch.equal(torch.stack(plain[number - 1]), torch.stack(again)) and len(made) == number
    list(net.generate(prompt, 3, edit=lambda layer, code: code))
    assert len(made) == len(cases)  # whoever edits must be called at every step


def test_a_graph_reads_no_weights_that_autocast_frees_and_is_not_made_where_a_hook_waits(monkeypatch):
    """Autocast keeps weights in its type until it ends, and a step that was recorded would go on reading them."""
    net, prompt, kept = build(bottleneck="none").eval(), batch()[0][:, :5], []

    def captured(step, device):
        net.blocks[0].register_forward_hook(lambda *_: kept.append(torch.is_autocast_cache_enabled()))
        step()
        return step
    with monkeypatch.context() as patched:
        patched.setattr(model_module, "worth_a_graph", lambda *_: True)
        patched.setattr(model_module, "captured", captured)
        with torch.autocast("cpu", torch.bfloat16):
            text = net.generate(prompt, 3)
            next(text), next(text)
            assert kept == [False, False] and torch.is_autocast_cache_enabled()
    gpu = types.SimpleNamespace(is_cuda=True)
    assert not model_module.worth_a_graph(net, gpu, 40)
    net.blocks[0]._forward_hooks.clear()
    assert model_module.worth_a_graph(net, gpu, 40) and not model_module.worth_a_graph(net, gpu, 3)
    assert not model_module.worth_a_graph(net, prompt, 40) and not model_module.worth_a_graph(net.train(), gpu, 40)


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


def test_the_model_compiles_with_the_loss_by_parts_in_it(monkeypatch):
    """In one graph, for training and for evaluation, and for any number of tokens."""
    monkeypatch.setattr(model_module, "LOGITS", 1000)
    model = build(layers=1, bottleneck="none")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for stance, (tokens, targets) in ("default", batch()), ("fail_on_recompile", batch(B=2, T=31)):
        with torch.compiler.set_stance(stance):
            eager, found = (with_gradients(run(tokens, targets)["lm"], *model.parameters())
                            for run in (model, compiled))
            torch.testing.assert_close(found, eager)
            with torch.no_grad():
                torch.testing.assert_close(compiled(tokens, targets)["lm"], eager[0])
