import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import optim
from optim import MuonAdam, deal, orthogonalise, schedule, split_parameters

SHAPES = [(8, 24), (24, 8), (16, 16), (24, 8), (8, 24), (1, 5), (32, 3)]  # wide, tall, square, repeated, thin


@pytest.fixture
def no_bf16(monkeypatch):
    """torch.optim.Muon rounds to bf16; without that, it computes in the type of its gradient."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self)


def matrices(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return {f"w{i}": nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for i, shape in enumerate(shapes)}


def set_gradients(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@pytest.mark.parametrize("dtype, atol", [(torch.float32, 2e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_matrices_move_as_under_torch_muon(no_bf16, dtype, atol, adjust, decay):
    ours, theirs = matrices(dtype), matrices(dtype)
    optimizer = MuonAdam(ours, {}, muon_lr=0.05, weight_decay=decay, adjust=adjust)
    reference = torch.optim.Muon(theirs.values(), lr=0.05, weight_decay=decay, adjust_lr_fn=adjust)
    for step in range(5):
        before = ours["w0"].detach().clone()
        set_gradients(ours.values(), step), set_gradients(theirs.values(), step)
        optimizer.step(), reference.step()
        assert (ours["w0"] - before).abs().max() > 1e-3
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=atol)


def test_learning_rate_and_momentum_count_as_in_torch_muon(no_bf16):
    ours, theirs = matrices(torch.float64), matrices(torch.float64)
    optimizer = MuonAdam(ours, {}, muon_lr=0.1, momentum=0.8)
    reference = torch.optim.Muon(theirs.values(), momentum=0.8, weight_decay=0)
    for step in range(3):
        set_gradients(ours.values(), step), set_gradients(theirs.values(), step)
        optimizer.scale_lr(0.5 ** step)
        reference.param_groups[0]["lr"] = 0.1 * 0.5 ** step
        optimizer.step(), reference.step()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-13)


def test_the_rest_moves_as_under_torch_adamw():
    shapes = [(7, 5), (5,), (2, 3, 4)]
    ours, theirs = matrices(shapes=shapes), matrices(shapes=shapes)
    optimizer = MuonAdam(matrices(shapes=[(3, 3)]), ours, adam_lr=0.01, betas=(0.8, 0.9), eps=1e-6)
    reference = torch.optim.AdamW(theirs.values(), lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0)
    for step in range(4):
        set_gradients(ours.values(), step), set_gradients(theirs.values(), step)
        optimizer.scale_lr(1 / (1 + step))
        reference.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.step(), reference.step()
    for name in ours:
        assert torch.equal(ours[name], theirs[name])


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64)])
def test_the_update_is_nearly_orthogonal(shape):
    weight = {"w": nn.Parameter(torch.zeros(shape))}
    set_gradients(weight.values(), 0)
    left, _, right = torch.linalg.svd(weight["w"].grad, full_matrices=False)
    weight["w"].grad = left * torch.logspace(0, -2, 64) @ right  # singular values from 1 to 1/100
    MuonAdam(weight, {}, muon_lr=1.0).step()
    scaled = -weight["w"].detach() / max(1, shape[0] / shape[1]) ** 0.5
    inside = left.mT @ scaled @ right.mT  # diagonal if the singular vectors are kept
    assert 0.6 < inside.diagonal().min() and inside.diagonal().max() < 1.25
    assert (inside - inside.diagonal().diag()).abs().max() < 1e-3


def test_batched_equals_one_by_one(monkeypatch):
    x = torch.randn(5, 12, 20, dtype=torch.float64)
    x[3] = 0  # stays zero, and disturbs no other
    expected = torch.cat([orthogonalise(one.clone()) for one in x.split(1)])
    torch.testing.assert_close(orthogonalise(x), expected, rtol=0, atol=1e-13)
    assert (expected[3] == 0).all()

    ends = []
    for most in (2 ** 26, 400, 1):
        monkeypatch.setattr(optim, "BATCH", most)
        ends.append(matrices(torch.float64))
        optimizer = MuonAdam(ends[-1], {})
        set_gradients(ends[-1].values(), 0)
        optimizer.step()
    for name in ends[0]:
        torch.testing.assert_close(ends[1][name], ends[0][name], rtol=0, atol=1e-13)
        torch.testing.assert_close(ends[2][name], ends[0][name], rtol=0, atol=1e-13)


def test_bf16_takes_the_same_shapes_and_leaves_the_parameters_in_float32():
    """The types of the GPU's path, on the meta device: no number is computed."""
    weights = {name: nn.Parameter(p.to("meta")) for name, p in matrices().items()}
    optimizer = MuonAdam(weights, {})
    optimizer.dtype = torch.bfloat16
    for p in weights.values():
        p.grad = torch.empty_like(p)
    assert {u.dtype for u in optimizer.directions(optimizer.shares[0]).values()} == {torch.bfloat16}
    optimizer.step()
    assert {p.dtype for p in weights.values()} == {torch.float32}


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(d))
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
        self.topk = nn.Linear(d, 2 * d, bias=False)
        self.idle = nn.Linear(d, 2 * d, bias=False)  # never has a gradient

    def forward(self, x):
        q, k, v = self.qkv(x * self.gain).chunk(3, dim=-1)
        x = x + self.proj(torch.softmax(q @ k.mT, dim=-1) @ v)
        return x + self.down(torch.relu(self.up(x))) + self.topk(x) @ self.topk.weight


class Model(nn.Module):
    def __init__(self, d=8, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(11, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy((x @ self.embedding.weight.T)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make(folder=None, checkpoint=None, layers=3):
    torch.manual_seed(0)
    model = Model(layers=layers).double()
    optimizer = MuonAdam(*split_parameters(model), muon_lr=0.05, adam_lr=0.01, weight_decay=0.01)
    if checkpoint:
        saved = torch.load(os.path.join(folder, checkpoint), weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


def run(model, optimizer, steps):
    losses = []
    for step in steps:
        loss = model(torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(step)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.scale_lr(schedule(step, 6, 2, 0.5))
        optimizer.step()
        losses.append(loss.item())
    return losses


def save(model, optimizer, path, **more):
    state = optimizer.state_dict()
    if optimizer.rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": state, **more}, path)


def rank_worker(rank, folder):
    torch.set_num_threads(1)
    for ranks in (2, 3):  # one after the other in the same processes, since starting one takes seconds
        if rank < ranks:
            train_on_ranks(rank, ranks, folder)


def train_on_ranks(rank, ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks)
    calls, gather = [], dist.all_gather_single
    dist.all_gather_single = lambda *args: (calls.append(args), gather(*args))
    model, optimizer = make()
    result = {"losses": run(model, optimizer, range(3))}
    save(model, optimizer, os.path.join(folder, f"after3_by{ranks}.pt"))
    result["losses"] += run(model, optimizer, range(3, 6))
    result["collectives"], result["momentum"] = len(calls), list(optimizer.momentum)
    result["model"] = model.state_dict()
    result["from1"] = run(*make(folder, "after3_by1.pt"), range(3, 6))
    if ranks == 3:
        result["from2"] = run(*make(folder, "after3_by2.pt"), range(3, 6))
        few = {"a": nn.Parameter(torch.ones(4, 2)), "b": nn.Parameter(torch.ones(2, 4))}  # fewer than ranks
        optimizer = MuonAdam(few, {})
        set_gradients(few.values(), 0)
        optimizer.step()
        result["few"] = {name: p.detach() for name, p in few.items()}
        few["a"].grad = few["b"].grad = None
        optimizer.step()
    torch.save(result, os.path.join(folder, f"rank{rank}of{ranks}.pt"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks_folder(tmp_path_factory):
    """Six steps by one, by two ranks and by three, each saving after three and starting anew from others' files."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    model, optimizer = make()
    losses = run(model, optimizer, range(3))
    save(model, optimizer, os.path.join(folder, "after3_by1.pt"))
    losses += run(model, optimizer, range(3, 6))
    save(model, optimizer, os.path.join(folder, "after6_by1.pt"), losses=losses)
    mp.spawn(rank_worker, args=(folder,), nprocs=3)
    return folder


def load(folder, name):
    return torch.load(os.path.join(folder, name), weights_only=True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_end_with_the_parameters_of_one(ranks_folder, ranks):
    alone = load(ranks_folder, "after6_by1.pt")
    results = [load(ranks_folder, f"rank{rank}of{ranks}.pt") for rank in range(ranks)]
    for result in results:
        torch.testing.assert_close(result["losses"], alone["losses"], rtol=0, atol=1e-11)
        assert result["collectives"] == 6  # one a step
        for name, value in alone["model"].items():
            torch.testing.assert_close(result["model"][name], value, rtol=0, atol=1e-11)
            assert torch.equal(result["model"][name], results[0]["model"][name])  # ranks agree bit by bit
    assert alone["losses"][-1] < alone["losses"][0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_keeps_the_momentum_of_its_share_alone(ranks_folder, ranks):
    kept = [load(ranks_folder, f"rank{rank}of{ranks}.pt")["momentum"] for rank in range(ranks)]
    names, _ = split_parameters(Model())
    assert sorted(sum(kept, [])) == sorted(names)
    sizes = [sum(names[name].numel() for name in share) for share in kept]
    assert max(sizes) - min(sizes) <= max(p.numel() for p in names.values())


def test_a_state_does_not_depend_on_the_number_of_ranks(ranks_folder):
    one, two, three = (load(ranks_folder, f"after3_by{ranks}.pt")["optimizer"] for ranks in (1, 2, 3))
    assert one["muon"]["blocks.1.up.weight"].abs().max() > 0
    for other in (two, three):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-11)


def test_continuing_on_another_number_of_ranks_follows_the_same_curve(ranks_folder):
    expected = load(ranks_folder, "after6_by1.pt")["losses"][3:]
    curves = [run(*make(ranks_folder, f"after3_by{ranks}.pt"), range(3, 6)) for ranks in (2, 3)]  # to one
    curves += [load(ranks_folder, f"rank{rank}of2.pt")["from1"] for rank in range(2)]
    curves += [load(ranks_folder, f"rank{rank}of3.pt")[start] for rank in range(3) for start in ("from1", "from2")]
    for losses in curves:
        torch.testing.assert_close(losses, expected, rtol=0, atol=1e-11)
    model, optimizer = make(ranks_folder, "after3_by2.pt")  # and the momentum matters at this tolerance
    for momentum in optimizer.momentum.values():
        momentum.zero_()
    assert abs(run(model, optimizer, range(3, 6))[-1] - expected[-1]) > 1e-4


def test_more_ranks_than_matrices(ranks_folder):
    alone = matrices(shapes=[(4, 2), (2, 4)])
    for p in alone.values():
        p.data.fill_(1)
    optimizer = MuonAdam(alone, {})
    set_gradients(alone.values(), 0)
    optimizer.step()
    for rank in range(3):
        few = load(ranks_folder, f"rank{rank}of3.pt")["few"]
        torch.testing.assert_close(few["a"], alone["w0"].detach())
        torch.testing.assert_close(few["b"], alone["w1"].detach())


def test_continuing_on_as_many_ranks_is_exact(ranks_folder):
    model, optimizer = make(ranks_folder, "after3_by1.pt")
    alone = load(ranks_folder, "after6_by1.pt")
    assert run(model, optimizer, range(3, 6)) == alone["losses"][3:]
    torch.testing.assert_close(model.state_dict(), alone["model"], rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict(), alone["optimizer"], rtol=0, atol=0)


def test_a_loaded_state_is_a_copy_and_does_not_touch_the_settings():
    first, second = make(), make()
    run(*first, range(2))
    state = first[1].state_dict()
    second[1].load_state_dict(state)
    assert [group["lr"] for group in second[1].param_groups] == [0.05, 0.01]
    before = state["muon"]["blocks.0.up.weight"].clone(), state["adam"]["embedding.weight"]["exp_avg"].clone()
    run(*second, range(2, 4))
    assert torch.equal(state["muon"]["blocks.0.up.weight"], before[0])
    assert torch.equal(state["adam"]["embedding.weight"]["exp_avg"], before[1])


def test_shares_are_even():
    weights = {f"{i}.{name}": torch.empty(shape, device="meta") for i in range(12) for name, shape in
               dict(qkv=(1536, 512), proj=(512, 512), up=(2048, 512), down=(512, 2048)).items()}
    for ranks, worst in (1, 1), (2, 1), (3, 1), (8, 1), (32, 4 / 3):  # the heaviest load over the mean
        shares = deal(weights, ranks)
        assert sorted(sum(shares, [])) == sorted(weights)
        load = [sum(weights[name].numel() for name in share) for share in shares]
        assert max(load) * ranks <= worst * sum(load)


def test_which_parameters_muon_has():
    model = Model(layers=1)
    model.blocks[0].proj.weight.requires_grad_(False)  # frozen: neither has it
    muon, adam = split_parameters(model)
    assert list(muon) == [f"blocks.0.{name}.weight" for name in ("qkv", "up", "down", "idle")]
    assert sorted(adam) == ["blocks.0.gain", "blocks.0.topk.weight", "embedding.weight"]
    with pytest.raises(ValueError, match="Sequential has no matrix for Muon.*not what DDP"):
        split_parameters(nn.Sequential(Model()))


def test_a_parameter_without_gradient_stays():
    model, optimizer = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run(model, optimizer, range(1))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == ("idle" in name)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    after = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), after, rtol=0, atol=0)


def test_schedule():
    assert [schedule(step, 100, 10, 0.9) for step in (0, 4, 9, 10, 55, 100)] == [0.1, 0.5, 1, 1, 0.5, 0]
    assert [schedule(step, 100, 0, 0.4) for step in (0, 60, 80, 99)] == [1, 1, 0.5, 1 / 40]
    assert [schedule(step, 4, 2, 0) for step in range(5)] == [0.5, 1, 1, 1, 1]
    assert [schedule(step, 4, 0, 1) for step in range(5)] == [1, 0.75, 0.5, 0.25, 0]
    assert [schedule(step, 10, 0, 0.16) for step in (8, 9)] == [1, 0.5]  # 1.6 steps are two
    factors = [schedule(step, 1000, 100, 0.6) for step in range(1001)]
    assert factors.count(1.0) == 302 and max(factors) == 1 and min(factors) == factors[-1] == 0


@pytest.mark.parametrize("arguments, sentence", [
    ((5, 0, 0, 0.5), "max_steps=0"),
    ((-1, 10, 0, 0.5), "step=-1 must lie in"), ((11, 10, 0, 0.5), "step=11 must lie in"),
    ((0, 10, -1, 0.5), "warmup=-1"), ((0, 10, 0, 1.5), "decay_fraction=1.5"),
    ((0, 100, 20, 0.9), "make warmup at most 10")])
def test_schedule_says_what_is_wrong(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        schedule(*arguments)


@pytest.mark.parametrize("arguments, sentence", [
    (dict(matrices={"gain": nn.Parameter(torch.ones(3))}), r"gain has shape \(3,\); give it to Adam"),
    (dict(matrices={"a": nn.Parameter(torch.ones(2, 2)), "b": nn.Parameter(torch.ones(2, 2).double())}), "one dtype"),
    (dict(adjust="orignal"), "adjust='orignal' must be one of original, match_rms_adamw"),
    (dict(momentum=1.0), "momentum=1.0"), (dict(muon_lr=-1.0), "muon_lr=-1.0"),
    (dict(weight_decay=-1.0), "weight_decay=-1.0")])
def test_wrong_settings_are_answered(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        MuonAdam(**{"matrices": matrices(), "others": {}, **arguments})


def test_a_state_of_another_model_is_refused_and_changes_nothing():
    model, optimizer = make()
    run(model, optimizer, range(1))
    before = {name: momentum.clone() for name, momentum in optimizer.momentum.items()}
    _, deeper = make(layers=4)
    with pytest.raises(ValueError, match="muon state.* blocks.3.down.weight is only in the state"):
        optimizer.load_state_dict(deeper.state_dict())
    with pytest.raises(ValueError, match="muon state.* blocks.3.down.weight is only in the model"):
        deeper.load_state_dict(optimizer.state_dict())
    for part, name in ("muon", "blocks.0.up.weight"), ("adam", "embedding.weight"):
        state = make()[1].state_dict()
        state[part][name] = torch.zeros(2, 3) if part == "muon" else {"exp_avg": torch.zeros(2, 3)}
        with pytest.raises(ValueError, match=rf"{name} has shape \(2, 3\) in the state"):
            optimizer.load_state_dict(state)
    torch.testing.assert_close(optimizer.momentum, before, rtol=0, atol=0)
