"""SAEs and sources of features: against dense references, across interruptions and ranks, on disk, and misused."""
import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import autoencoder
import data
import features
import sae as training
import sample
import sources
import steer
from autoencoder import BANDWIDTH, SAE, VARIANTS, Entries, geometric_median, largest, top_rows
from checkpoint import open_run, save, weights_hash
from config import Config
from dpb import Code
from helpers import UserError, bootstrap
from model import GPT, PATCH_SITES
from sae_files import FORMATS, export_sae, import_sae, load_sae, save_sae
from sources import Neurons, Rotated, open_source, read_activations, read_codes
from tokenizer import load_tokenizer, pack_tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SMALL = ["--width", "64", "--k", "6", "--steps", "24", "--batch-tokens", "128", "--eval-tokens", "512"]


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Toy data, a parity run and a dense one with random weights, and of the dense one all four SAEs."""
    folder = tmp_path_factory.mktemp("sae")
    data.prepare_toy(str(folder / "data"), tokens=30_000)
    encoding = load_tokenizer(str(folder / "data"))
    for name, kind in (("tiny", "parity"), ("dense", "none")):
        config = Config(layers=2, d=32, heads=2, context=32, vocab_size=2048, bottleneck=kind, bits=(5, 8),
                        active=(4, 6), children=(16,), data=str(folder / "data"), seed=1)
        os.makedirs(folder / name)
        save(str(folder / name / "best.pt"), {"config": dataclasses.asdict(config), "step": 0,
                                              "tokenizer": pack_tokenizer(encoding), "model": GPT(config).state_dict()})
    training.main([str(folder / "dense"), "--variant", "all", *SMALL])
    return folder


@pytest.fixture
def dense(world, tmp_path):
    """A copy of the dense run with its SAEs."""
    shutil.copytree(world / "dense", tmp_path / "dense")
    return tmp_path / "dense"


def random_sae(variant, d=32, m=128, k=6):
    """In the middle of its training, with some dead features."""
    torch.manual_seed(0)
    sae = SAE(variant, d, m, k, seed=1)
    with torch.no_grad():
        sae.W_enc += 0.1 * torch.randn(m, d)
        sae.b_enc.copy_(0.05 * torch.randn(m))
        sae.b_dec.copy_(0.1 * torch.randn(d))
        sae.b_enc[:10] = -5
        sae.unfired[:10] = 1000
        if variant == "jumprelu":
            sae.threshold.copy_(0.3 * torch.rand(m))
            sae.threshold[:8] = torch.linspace(-0.0008, 0.0008, 8)
        elif variant != "topk":
            sae.threshold.fill_(0.3)
    return sae


def points(N=50, d=32, seed=2):
    return torch.randn(N, d, generator=torch.Generator().manual_seed(seed)) / d ** 0.5


# The losses, against autograd on dense matrices


def dense_loss(sae, x, step_on="f"):
    """As it is defined, with a dense f (N, m)."""
    z = (x - sae.b_dec if sae.centred else x) @ sae.W_enc.T + sae.b_enc
    if sae.variant == "jumprelu":
        f = DenseJump.apply(z, sae.threshold, False)
        l0 = DenseJump.apply(f.detach() if step_on == "f" else z, sae.threshold, True).sum(1).mean()
        return (x - f @ sae.W_dec - sae.b_dec).square().sum(1).mean() + 0.5 * (l0 / sae.k - 1) ** 2
    positive = z.relu()
    if sae.variant == "topk":
        kept = torch.zeros_like(z).scatter(1, positive.topk(sae.k).indices, 1.0)
    else:
        kept = (positive >= positive.flatten().topk(sae.k * len(x)).values[-1]).float()
    f, loss = positive * kept, 0
    ends = np.cumsum(getattr(sae, "groups", (sae.m,)))
    for end in ends:
        error = x - f[:, :end] @ sae.W_dec[:end] - sae.b_dec
        loss = loss + error.square().sum(1).mean()
    e, dead = error.detach(), torch.zeros(sae.m, dtype=torch.bool)
    dead[:10] = True
    of_dead = positive * dead * torch.zeros_like(z).scatter(
        1, positive.masked_fill(~dead, -1).topk(min(sae.d // 2, 10)).indices, 1.0)
    aux = (e - of_dead @ sae.W_dec).square().sum(1).mean() / (e - e.mean(0)).square().sum(1).mean()
    return loss + aux / 32


class DenseJump(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, threshold, step):
        ctx.save_for_backward(z, threshold)
        ctx.step = step
        return (z > threshold).float() * (1 if step else z)

    @staticmethod
    def backward(ctx, grad):
        z, threshold = ctx.saved_tensors
        near = ((z - threshold).abs() < BANDWIDTH / 2).float()
        to_threshold = -(1 if ctx.step else threshold) / BANDWIDTH * near * grad
        return (0 if ctx.step else 1) * grad * (z > threshold), to_threshold.sum(0), None


@pytest.mark.parametrize("variant, step_on", [*((variant, "f") for variant in VARIANTS), ("jumprelu", "z")])
def test_losses_and_gradients_are_those_of_dense_matrices(variant, step_on, monkeypatch):
    monkeypatch.setattr(autoencoder, "BANDWIDTH", 0.1)  # so that many values are near a threshold
    monkeypatch.setitem(globals(), "BANDWIDTH", 0.1)
    x, found = points(), {}
    for way in ("sparse", "dense"):
        sae = random_sae(variant)
        loss = sae.loss(x, 1000, 0.5, step_on=step_on)[0] if way == "sparse" else dense_loss(sae, x, step_on)
        loss.backward()
        found[way] = {"loss": loss.detach()} | {name: weight.grad for name, weight in sae.named_parameters()}
    for name, value in found["dense"].items():
        torch.testing.assert_close(found["sparse"][name], value, rtol=1e-4, atol=1e-5 * value.abs().max().item(),
                                   msg=lambda text, name=name: f"{name}: {text}")
    assert all(grad.abs().max() > 0 for grad in found["dense"].values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_the_same_bits_on_several_threads(variant):
    """Without the settings of these tests, which make torch's own operations repeatable."""
    torch.use_deterministic_algorithms(False)
    sae, x = SAE(variant, 32, 2048, 32), points(1024)
    found = []
    for _ in range(4):
        sae.zero_grad()
        sae.loss(x)[0].backward()
        found.append(torch.cat([weight.grad.flatten() for weight in sae.parameters()]))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("density", [0.01, 0.3])
def test_products_of_entries_are_those_of_the_matrix(density):
    torch.manual_seed(0)
    whole = torch.randn(40, 70) * (torch.rand(40, 70) < density)
    whole[3], whole[:, 5] = 0, 0
    entries = Entries(*whole.nonzero().unbind(1), 40, 70)
    values, left, right = whole[whole != 0], torch.randn(40, 8), torch.randn(70, 8)
    assert entries.many == (density > 1 / 16)
    torch.testing.assert_close(entries.times(values, right), whole @ right)
    torch.testing.assert_close(entries.transposed_times(values, left), whole.T @ left)
    torch.testing.assert_close(entries.dots(left, right), (left @ right.T)[entries.rows, entries.columns])


def test_the_decoders_side_never_makes_a_matrix_of_tokens_by_features():
    """The forward pass has one such matrix, of scores; autograd keeps none, and the backward pass makes none."""
    sae, x = SAE("topk", 16, 4096, 4), points(256, 16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t.numel()), t)[1], lambda t: t):
        loss, _, _ = sae.loss(x)
    assert max(kept) < 256 * 4096 / 8
    with torch.profiler.profile(profile_memory=True) as profiler:
        loss.backward()
    allocated = [event.self_cpu_memory_usage for event in profiler.events()]
    assert max(allocated) < 256 * 4096 * 4 / 2


def test_the_largest_of_a_batch_are_found_exactly():
    torch.manual_seed(0)
    for N, m, count in ((7, 11, 5), (300, 400, 2000), (50, 60, 2900), (9, 9, 81)):
        z = torch.randn(N, m) ** 3
        entries, values, least = largest(z, count)
        wanted = z.clamp(min=0).flatten().topk(count).values
        assert torch.equal(values.sort().values, wanted[wanted > 0].sort().values)
        assert torch.equal(z[entries.rows, entries.columns], values)
        assert least == wanted[-1]


def test_the_top_of_rows_is_that_of_topk():
    f = torch.randn(30, 1000, generator=torch.Generator().manual_seed(0)).relu()
    values, columns = top_rows(f, 20)
    assert torch.equal(values, f.topk(20).values) and torch.equal(f.gather(1, columns), values)


def test_the_geometric_median_is_that_of_least_distances():
    x = points(200, 3) + 5
    x[:60] += 100  # which would move a mean
    median = geometric_median(x)
    least = (x - median).norm(dim=1).sum()
    assert all((x - median - step).norm(dim=1).sum() > least for step in 0.01 * torch.randn(20, 3))


@pytest.mark.parametrize("variant", VARIANTS)
def test_codes_are_the_active_features_and_decode_to_the_reconstruction(variant):
    sae, x = random_sae(variant), points().view(5, 10, 32)
    code = sae.encode(x)
    z = (x - sae.b_dec if sae.centred else x) @ sae.W_enc.T + sae.b_enc
    f = torch.zeros_like(z).scatter(-1, code.indices, code.coefs)
    kept = z >= z.topk(6).values[..., -1:] if variant == "topk" else z > sae.threshold
    torch.testing.assert_close(f, z.relu() * kept)
    torch.testing.assert_close(sae.decode(code), f @ sae.W_dec + sae.b_dec)
    assert (code.coefs[..., :-1] >= code.coefs[..., 1:]).all()
    grown = random_sae(variant)
    grown.scale(3.0)
    torch.testing.assert_close(grown.decode(grown.encode(3 * x)), 3 * sae.decode(code))


# Sources


def all_sources(run):
    names = ["hash", "neurons", *(VARIANTS if run.config.bottleneck == "none" else ["own"])]
    return [open_source(run, name) for name in names]


@pytest.mark.parametrize("name", ["tiny", "dense"])
def test_every_source_reads_and_edits(world, name):
    run = open_run(str(world / name))
    tokens = features.prompt_tokens(run, "The sailor went home")
    for source in all_sources(run):
        codes = read_codes(run.model, tokens, source)
        assert list(codes) == [0, 1] and all(code.indices.max() < source.m for code in codes.values())
        with torch.no_grad():
            plain = run.model(tokens)
            assert torch.equal(run.model(tokens, **source.edited(lambda layer, code: code)), plain), source.name
            gone = run.model(tokens, **source.edited(
                lambda layer, code: Code(code.indices, code.coefs * (layer != 1))))
            assert not torch.equal(gone, plain)
            x = read_activations(run.model, tokens, "mlp_in", [1])[1]
            part, code = source.layers[1], codes[1]
            nothing = Code(code.indices, 0 * code.coefs)
            block = run.model.blocks[1]
            if source.kind == "own":
                read = part.decode(nothing, like=x)  # all that the MLP reads
            else:
                read = x + part.decode(nothing) - part.decode(code)
                read = read if block.bottleneck is None else block.bottleneck(read)
            written = block.mlp(read)
            stream = run.model(tokens, patch=lambda site, layer, value, written=written:
                               written if (site, layer) == ("mlp_out", 1) else value)
            torch.testing.assert_close(gone, stream, msg=source.name)


def test_the_hash_control_is_rotated_untrained_and_fitted(world):
    run = open_run(str(world / "tiny"))
    source = open_source(run, "hash")
    tokens = data.Tokens(str(world / "data"), "train")
    rows = tokens.batch(0, 0, sources.FITTED_ON // 32, 32)[:, :-1]
    x = read_activations(run.model, rows, "mlp_in", [0, 1])
    for layer, part in source.layers.items():
        own, R = run.model.blocks[layer].bottleneck, part.rotation
        torch.testing.assert_close(R @ R.T, torch.eye(32), atol=1e-5, rtol=0)
        assert R.abs().max() < 0.9  # no permutation of coordinates
        assert not torch.equal(part.bottleneck.generators_1, own.generators_1)
        turned = x[layer].flatten(0, 1) @ R
        torch.testing.assert_close(part.bottleneck.mean[:32], turned.mean(0), atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(part.bottleneck.var[:32], turned.var(0, correction=0), atol=1e-4, rtol=1e-3)
        code = part.encode(x[layer].flatten(0, 1))
        for feature in code.indices[:, 4:].flatten().bincount().topk(3).indices.tolist():  # level 1, on its candidates
            parents = (part.bottleneck.generators_1 ^ feature).tolist()
            candidate = torch.isin(code.indices[:, :4], torch.tensor(parents)).any(1)
            scores = turned[candidate] @ part.bottleneck.decode(Code(torch.tensor([[feature]]), torch.ones(1, 1)))[0]
            assert part.bottleneck.mean[feature].item() == pytest.approx(scores.mean().item(), abs=2e-2)
        y = part.decode(code, like=x[layer].flatten(0, 1))
        torch.testing.assert_close(y.norm(dim=1), x[layer].flatten(0, 1).norm(dim=1))
    again = open_source(run, "hash")
    assert all(torch.equal(a.bottleneck.mean, b.bottleneck.mean)
               for a, b in zip(source.layers.values(), again.layers.values()))


def test_the_hash_control_has_the_shape_of_the_bottleneck_or_there_is_none(world):
    run = open_run(str(world / "tiny"))
    flat = run._replace(config=dataclasses.replace(run.config, selection="flat", standardise=False))
    source = open_source(flat, "hash")
    part = source.layers[0].bottleneck
    assert part.selection == "flat" and (part.var == 1).all() and source.key != open_source(run, "hash").key
    wrong = run._replace(config=dataclasses.replace(run.config, bits=(10, 15)))
    with pytest.raises(UserError, match="no hash control"):
        open_source(wrong, "hash")


@pytest.mark.parametrize("name", ["tiny", "dense"])
def test_to_steer_is_to_add_features_whatever_the_source(world, name):
    run = open_run(str(world / name))
    tokens = features.prompt_tokens(run, "The sailor went home")
    for source in all_sources(run):
        layers = torch.tensor(sorted(source.layers))
        indices, weights = torch.tensor([[3, 7]] * 2), torch.tensor([[2.0, -1.0]] * 2)
        vector = steer.Vector("sea", "", source.key, layers, indices, weights)
        with torch.no_grad():
            one = run.model(tokens, **steer.steered(source, vector, 0.5))
            two = run.model(tokens, **source.edited(lambda layer, code, vector=vector:
                                                    steer.add_features(vector, 0.5, layer, code)))
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4, msg=source.name)
            assert not torch.equal(one, run.model(tokens))


def test_neurons_are_the_largest_coordinates():
    x = torch.tensor([[3.0, -5.0, 1.0, 0.5]])
    code = Neurons(4, 2).encode(x)
    assert code.indices.tolist() == [[1, 0]] and code.coefs.tolist() == [[-5.0, 3.0]]
    assert Neurons(4, 2).decode(code).tolist() == [[3.0, -5.0, 0, 0]]


def test_a_rotation_keeps_what_a_bottleneck_keeps():
    torch.manual_seed(0)
    part, x = Rotated(32, (5, 8), (4, 6), (16,), 3), torch.randn(200, 32)
    part.fit(x)
    torch.testing.assert_close(part.decode(part.encode(x), like=x) @ part.rotation, part.bottleneck(x @ part.rotation))


@pytest.mark.parametrize("source", ["hash", "neurons", "topk", "jumprelu", "matryoshka"])
def test_looking_and_steering_take_any_source(dense, source, capsys):
    sample.main([str(dense), "--prompt", "The sailor", "--features", "--source", source, "--top", "2"])
    assert capsys.readouterr().out.count("layer 1") == 3
    run = open_run(str(dense))
    index, _ = features.open_index(run, open_source(run, source), most=512, say=lambda text: None)
    assert os.path.exists(dense / f"features-{source}-mlp_in.npz") and not os.path.exists(dense / "features.npz")
    most = int(np.diff(index.offsets)[: 2 * index.m].argmax())
    name = f"0:{most % index.m}{'+-'[most // index.m]}"
    sample.main([str(dense), "--feature", name, "--source", source, "--index-tokens", "512"])
    text = capsys.readouterr().out
    assert f"feature {name} of {source}-mlp_in: fires on" in text and "raises" in text and "gathering" not in text
    opened = open_source(run, source)
    positive, negative = steer.toy_texts("sea", n=8)
    vector = steer.contrast(run, opened, "sea", positive, negative, k=8, steps=20)

    def loss(alpha):
        tokens, real = next(steer.batches(run, positive))
        with torch.no_grad():
            logits = run.model(tokens[:, :-1], **steer.steered(opened, vector, alpha))[real[:, 1:]]
        return F.cross_entropy(logits, tokens[:, 1:][real[:, 1:]]).item()
    assert loss(1.0) < loss(0.0) - 1e-3
    sample.main([str(dense), "--steer", "sea", "--source", source, "--fit", "1", "--k", "4", "--tokens", "4",
                 "--samples", "1"])
    assert "sea, alpha 1" in capsys.readouterr().out


def test_indices_of_sources_with_codes_of_varying_length(dense):
    """Every firing is there once, and no room of a code that is not active."""
    run = open_run(str(dense))
    source = open_source(run, "jumprelu")
    index, tokens = features.open_index(run, source, most=512, say=lambda text: None)
    code = read_codes(run.model, tokens.windows(range(16), 32)[:, :-1], source)[1]
    assert (code.coefs == 0).any()
    on = code.coefs.flatten(0, 1) > 0
    places, slots = on.nonzero().unbind(1)
    pairs = sorted(zip(code.indices.flatten(0, 1)[places, slots].tolist(), places.tolist()))
    found = [(feature, int(position)) for feature in range(source.m)
             for position in index.firings(1, feature, 1)[0]]
    assert found == pairs


# Training


def files_of(folder):
    return {name: (folder / name).read_bytes() for name in os.listdir(folder)}


def weights_of(dense, variants=VARIANTS):
    return {(variant, layer): (dense / "sae" / f"{variant}-mlp_in-{layer}" / "sae.safetensors").read_bytes()
            for variant in variants for layer in (0, 1)}


def test_a_training_leaves_what_it_says(world):
    about = json.loads((world / "dense" / "sae" / "jumprelu-mlp_in-1" / "config.json").read_text())
    assert about["of"]["model"] == weights_hash(open_run(str(world / "dense")).model)
    assert (about["site"], about["layer"], about["m"], about["k"]) == ("mlp_in", 1, 64, 6)
    assert about["settings"]["steps"] == 24 and about["torch"]
    rows = json.loads((world / "dense" / "sae" / "report-mlp_in.json").read_text())["rows"]
    assert {row["source"] for row in rows} == {f"{name}-mlp_in" for name in (*VARIANTS, "hash", "neurons")}
    assert len(rows) == 12 and os.path.exists(world / "dense" / "sae" / "explained-mlp_in.png")
    assert not os.path.exists(world / "dense" / "sae" / "topk-mlp_in-0" / "ckpt.pt")


def test_the_reports_figures_equal_their_definitions(world):
    run = open_run(str(world / "dense"))
    rows = json.loads((world / "dense" / "sae" / "report-mlp_in.json").read_text())["rows"]
    windows = data.Tokens(str(world / "data"), "val").windows(range(16), 32)
    given, wanted = windows[:, :-1], windows[:, 1:]
    for name in ("topk", "batchtopk", "hash", "neurons"):
        source = open_source(run, name)
        row = next(row for row in rows if row["source"] == f"{name}-mlp_in" and row["layer"] == 1)
        x = read_activations(run.model, given, "mlp_in", [1])[1].flatten(0, 1)
        code = source.layers[1].encode(x)
        x_hat = source.layers[1].decode(code, like=x)
        fvu = (x - x_hat).square().sum() / (x - x.mean(0)).square().sum()
        assert row["fvu"][0] == pytest.approx(fvu.item(), rel=1e-4) and row["fvu"][1] < row["fvu"][0] < row["fvu"][2]
        assert row["l0"] == pytest.approx((code.coefs != 0).sum().item() / len(x))
        fired = torch.zeros(source.m).index_fill(0, code.indices[code.coefs != 0], 1)
        assert row["dead"] == pytest.approx(1 - fired.mean().item(), abs=1e-6)
        losses = []
        for put in (x, x_hat, 0 * x):
            with torch.no_grad():
                losses.append(run.model(given, wanted, patch=lambda site, layer, value, put=put: put.view_as(value)
                                        if (site, layer) == ("mlp_in", 1) else value)["lm"].item())
        assert [row["loss"], row["loss_spliced"], row["loss_zero"]] == pytest.approx(losses, abs=1e-5)
        recovered = (losses[2] - losses[1]) / (losses[2] - losses[0])
        assert row["recovered"][0] == pytest.approx(recovered, rel=1e-2, abs=1e-3)


def test_the_same_command_gives_the_same_bits_and_says_what_is_finished(dense, capsys):
    before = weights_of(dense)
    training.main([str(dense), "--variant", "all", *SMALL])
    assert capsys.readouterr().out.count("is finished") == 8 and weights_of(dense) == before
    training.main([str(dense), "--variant", "topk,jumprelu", *SMALL, "--fresh"])
    assert weights_of(dense) == before  # alone or beside others


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_stopped_at_any_moment_and_continued_is_bit_equal(dense, stop):
    before = weights_of(dense)
    shutil.rmtree(dense / "sae")
    command = [sys.executable, "-c", KEEN, str(dense), "--variant", "all", *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not os.path.exists(dense / "sae" / "matryoshka-mlp_in-0" / "ckpt.pt"):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(stop)
    out, _ = process.communicate(timeout=60)
    if stop == signal.SIGTERM:
        assert process.returncode == 0 and "the same command goes on" in out
    assert not os.path.exists(dense / "sae" / "matryoshka-mlp_in-1" / "config.json")
    training.main([str(dense), "--variant", "all", *SMALL])
    assert weights_of(dense) == before


def test_an_interrupted_fresh_training_goes_on_and_takes_the_older_ones_place(dense, monkeypatch):
    more = [*SMALL, "--layers", "1", "--seed", "7"]
    with pytest.raises(UserError, match="seed"):
        training.main([str(dense), *more])
    with monkeypatch.context() as patched:
        stop_after(9, patched)
        training.main([str(dense), *more, "--fresh"])
    folder = dense / "sae" / "topk-mlp_in-1"
    assert os.path.exists(folder / "ckpt.pt") and not os.path.exists(folder / "config.json")
    training.main([str(dense), *more])
    assert load_sae(str(folder))[1]["settings"]["seed"] == 7 and not os.path.exists(folder / "ckpt.pt")
    whole = (folder / "sae.safetensors").read_bytes()
    training.main([str(dense), *more, "--fresh"])
    assert (folder / "sae.safetensors").read_bytes() == whole


def stop_after(step, monkeypatch):
    """As if a signal came after so many steps of a training."""
    update = training.Training.update

    def counted(self, x):
        update(self, x)
        if self.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
    monkeypatch.setattr(training.Training, "update", counted)


def test_trainings_at_different_steps_go_on_together(dense, monkeypatch):
    before = weights_of(dense, ["topk", "batchtopk"])
    for variant, step in (("topk", 5), ("batchtopk", 18)):
        with monkeypatch.context() as patched:
            stop_after(step, patched)
            training.main([str(dense), "--variant", variant, *SMALL, "--fresh"])
    training.main([str(dense), "--variant", "topk,batchtopk", *SMALL])
    assert weights_of(dense, ["topk", "batchtopk"]) == before


def test_other_data_is_another_training(dense, world, tmp_path):
    shutil.copytree(world / "data", tmp_path / "data")
    run = open_run(str(dense))
    shutil.rmtree(tmp_path / "data")
    data.prepare_toy(str(tmp_path / "data"), tokens=31_000)
    config = dataclasses.asdict(run.config) | {"data": str(tmp_path / "data")}
    save(str(dense / "best.pt"), {"config": config, "step": 0, "model": run.model.state_dict(),
                                  "tokenizer": pack_tokenizer(load_tokenizer(str(tmp_path / "data")))})
    assert "tokens (was" in refuse(dense, *SMALL)


def test_a_report_of_two_runs_leaves_out_what_it_cannot_read(dense, world, capsys):
    shutil.rmtree(dense / "sae" / "topk-mlp_in-0")
    training.main([str(dense), *SMALL, "--layers", "0", "--width", "128"])  # another width than layer 1's
    (dense / "sae" / "batchtopk-mlp_in-1" / "sae.safetensors").write_bytes(b"")
    os.makedirs(dense / "sae" / "topk-mlp_in-old")
    capsys.readouterr()
    training.main([str(dense), "--report", "--against", str(world / "tiny"), "--eval-tokens", "512"])
    assert "left out" in capsys.readouterr().out
    rows = json.loads((dense / "sae" / "report-mlp_in.json").read_text())["rows"]
    assert [row["features"] for row in rows if row["source"] == "topk-mlp_in"] == [128, 64]
    assert [row["layer"] for row in rows if row["source"] == "batchtopk-mlp_in"] == [0]
    own = [row for row in rows if row["source"] == "own"]
    assert len(own) == 2 and all(row["recovered"] is None and row["run"] == "tiny" for row in own)


# sae.py with a checkpoint after every step, and steps that take some time
KEEN = """
import sys, time
import sae
real = time.monotonic
ticks = iter(range(10 ** 9))
sae.time.monotonic = lambda: real() + 60 * next(ticks)
fill = sae.Activations.batch
sae.Activations.batch = lambda self, step: (time.sleep(0.2), fill(self, step))[1]
sae.main(sys.argv[1:])
"""


def test_two_ranks_train_the_same_saes_to_rounding(dense):
    before = {key: load_sae(str(dense / "sae" / f"{key[0]}-mlp_in-{key[1]}"))[0] for key in weights_of(dense)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*torchrun, "sae.py", str(dense), "--variant", "all", *SMALL, "--fresh", "--device", "cpu"],
                          cwd=ROOT, text=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
                          timeout=300)
    assert done.returncode == 0, done.stderr
    for (variant, layer), sae in before.items():
        again, _ = load_sae(str(dense / "sae" / f"{variant}-mlp_in-{layer}"))
        for name, value in sae.state_dict().items():
            error = (value - again.state_dict()[name]).norm() / value.norm().clamp(min=1e-6)
            assert error < 2e-3, f"{variant} {layer} {name}: {error:.1e}"


def test_what_a_step_sees_is_each_token_of_the_buffer_once_on_any_number_of_ranks(world):
    run = open_run(str(world / "dense"))
    tokens = data.Tokens(str(world / "data"), "train")
    alone = training.Activations(run, tokens, "mlp_in", [0], 128, 0, 0, 1)
    halves = [training.Activations(run, tokens, "mlp_in", [0], 128, 0, rank, 2) for rank in (0, 1)]
    batches = [alone.batch(step)[0] for step in range(alone.span)]
    for step in (3, 1):  # in any order
        torch.testing.assert_close(torch.cat([half.batch(step)[0] for half in halves]), batches[step])
    rows = tokens.batch(0, 0, alone.windows, 32)[:, :-1]
    everything = read_activations(run.model, rows, "mlp_in", [0])[0].flatten(0, 1)
    assert torch.equal(torch.cat(batches).sort(0).values, everything.sort(0).values)
    assert not torch.equal(torch.cat(batches), everything) and not torch.equal(alone.batch(alone.span)[0], batches[0])


def test_training_lowers_the_error_and_wakes_the_dead():
    """Of data that has a sparse code, and features that start dead."""
    torch.manual_seed(0)
    basis = F.normalize(torch.randn(48, 16), dim=1)

    def batch():
        return 10 * (torch.rand(256, 48) * (torch.rand(256, 48) < 0.05)) @ basis
    for variant in VARIANTS:
        settings = training.Settings(variant, 64, 3, 300, 256, 3e-3, 0, "f", False)
        found = training.Training(settings, 16, 0, "", torch.device("cpu"))
        with torch.no_grad():
            found.sae.b_enc[:20] = -0.5  # too low to be among the largest, but not always below zero
            found.sae.unfired[:20] = 10 ** 9
        for _ in range(30):
            found.update(batch())
        first = found.word()[0]
        for _ in range(269):
            found.update(batch())
        last, l0, dead = found.word()
        assert last < 0.6 * first, (variant, first, last)
        assert variant == "jumprelu" or l0 <= 3.01 and dead < 20 / 64, (variant, l0, dead)
        norms = found.sae.W_dec.norm(dim=1)
        torch.testing.assert_close(norms, torch.ones_like(norms))


# Files


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("form", FORMATS)
def test_an_sae_survives_every_format(variant, form, tmp_path):
    sae, x = random_sae(variant).requires_grad_(False), points()
    about = {"run": "out/x", "of": {"model": "0" * 32}, "site": "mlp_in", "layer": 1}
    if form == "sparsify" and variant != "topk":
        with pytest.raises(UserError, match="topk SAEs only"):
            export_sae(sae, about, form, str(tmp_path / "there"))
        return
    export_sae(sae, about, form, str(tmp_path / "there"))
    again = import_sae(str(tmp_path / "there"))
    dense_codes = [torch.zeros(len(x), sae.m).scatter(1, *one.encode(x)) for one in (sae, again)]
    torch.testing.assert_close(*dense_codes)
    torch.testing.assert_close(sae.decode(sae.encode(x)), again.decode(again.encode(x)))
    with pytest.raises(UserError, match="not empty"):
        export_sae(sae, about, form, str(tmp_path / "there"))


def test_a_damaged_sae_is_noticed(tmp_path):
    folder = tmp_path / "sae"
    save_sae(str(folder), random_sae("batchtopk"), {"of": {"model": "x"}, "site": "mlp_in", "layer": 0})
    assert torch.equal(load_sae(str(folder))[0].W_enc, random_sae("batchtopk").W_enc)
    rng, whole, noticed = np.random.default_rng(0), files_of(folder), 0
    for name, raw in whole.items():
        for bit in rng.choice(8 * len(raw), 40, replace=False):
            damaged = bytearray(raw)
            damaged[bit // 8] ^= 1 << bit % 8
            (folder / name).write_bytes(damaged)
            try:
                sae, about = load_sae(str(folder))
                assert name == "config.json"  # a space there, or the word checksum: nothing that is read
                assert torch.equal(sae.W_enc, random_sae("batchtopk").W_enc) and about["layer"] == 0
            except UserError:
                noticed += 1
        (folder / name).write_bytes(raw)
    assert noticed > 60


def test_an_imported_sae_is_a_source(dense, tmp_path, capsys):
    training.main([str(dense / "sae" / "topk-mlp_in-0"), "--export", f"saelens:{tmp_path / 'lens'}"])
    training.main([str(dense), "--import", str(tmp_path / "lens"), "--layers", "1", "--fresh"])
    run = open_run(str(dense))
    parts = open_source(run, "topk").layers
    assert torch.equal(parts[0].W_dec, parts[1].W_dec)
    with pytest.raises(UserError, match="say which"):
        training.main([str(dense), "--import", str(tmp_path / "lens")])
    with pytest.raises(UserError, match="already"):
        training.main([str(dense), "--import", str(tmp_path / "lens"), "--layers", "1"])
    with pytest.raises(UserError, match="was imported"):
        training.main([str(dense), *SMALL])
    capsys.readouterr()
    training.main([str(dense), "--report", "--eval-tokens", "512"])
    assert "topk-mlp_in" in capsys.readouterr().out


def refuse(*arguments):
    with pytest.raises(UserError) as error:
        training.main(list(map(str, arguments)))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_bad_input_is_answered_with_a_sentence(world, dense, tmp_path):
    assert "the names are attention_out" in refuse(dense, "--site", "nowhere")
    assert "did you mean 'mlp_in'" in refuse(dense, "--site", "mlpin")
    assert "did you mean 'topk'" in refuse(dense, "--variant", "top")
    assert "the layers 0 to 1" in refuse(dense, "--layers", "2")
    assert "cannot be active" in refuse(dense, "--width", "8", "--k", "9")
    assert "choose a multiple of 2" in refuse(dense, "--batch-tokens", "129", "--fresh")
    assert "k (was 6, now 5)" in refuse(dense, *SMALL, "--k", "5")
    assert "has no folder" in refuse(dense, "--export", "saelens")
    assert "holds no finished SAE" in refuse(dense, "--export", f"saelens:{tmp_path / 'x'}")
    assert "the formats are" in refuse(dense / "sae" / "topk-mlp_in-0", "--export", f"what:{tmp_path / 'x'}")
    assert "holds no SAE of SAELens" in refuse(dense, "--import", tmp_path, "--layers", "0")
    run = open_run(str(dense))
    with pytest.raises(UserError, match="did you mean 'hash'"):
        open_source(run, "hesh")
    with pytest.raises(UserError, match="trains them"):
        open_source(run, "topk", "mlp_out")
    with pytest.raises(UserError, match="there is no site 'x'"):
        open_source(run, "hash", "x")
    with pytest.raises(UserError, match="this model is dense"):
        open_source(run)
    with torch.no_grad():
        run.model.blocks[0].mlp.up.weight[0, 0] += 1
    with pytest.raises(UserError, match="other weights"):
        open_source(run, "topk")
    save_sae(str(tmp_path / "wide"), SAE("topk", 64, 128, 4), {"of": {"model": "x"}, "site": "mlp_in", "layer": 0})
    with pytest.raises(UserError, match="width 64"):
        open_source(run, str(tmp_path / "wide"))
    with pytest.raises(UserError, match="of the site mlp_in"):
        open_source(open_run(str(world / "dense")), str(world / "dense" / "sae" / "topk-mlp_in-0"), "mlp_out")
    with pytest.raises(UserError, match="leave --site off"):
        open_source(open_run(str(world / "tiny")), "own", "block_out")
    with pytest.raises(UserError, match="--source and --site are for"):
        sample.main([str(world / "tiny"), "--prompt", "The", "--source", "hash"])
    config = dataclasses.asdict(run.config) | {"data": str(tmp_path / "nothing")}
    save(str(dense / "best.pt"), {"config": config, "step": 0, "tokenizer": run.content["tokenizer"],
                                  "model": run.model.state_dict()})
    assert "nothing" in refuse(dense, *SMALL, "--fresh")


def test_an_interval_holds_its_ratio():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(100):
        below = rng.uniform(1, 2, 200)
        low, high = bootstrap(below * 0.5 + rng.normal(0, 0.1, 200), below)[1:]
        inside += low < 0.5 < high
    assert 88 <= inside <= 100
    assert math.isclose(bootstrap([1, 2], [2, 2])[0], 0.75)


def test_every_site_can_be_read(world):
    run = open_run(str(world / "tiny"))
    tokens = features.prompt_tokens(run, "The sailor")
    seen = {}
    run.model(tokens, patch=lambda site, layer, x: seen.setdefault((site, layer), x))
    for site in PATCH_SITES:
        found = read_activations(run.model, tokens, site, [0, 1])
        assert all(torch.equal(found[layer], seen[site, layer]) for layer in (0, 1))
