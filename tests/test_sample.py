"""Generating, looking at features, steering: on a small model of the toy world, with random weights."""
import dataclasses
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import data
import features
import sample
import steer
import toyworld
from checkpoint import open_run, save
from config import Config
from dpb import Code, DeepParityBottleneck
from features import open_index, parse_feature
from helpers import UserError
from model import GPT
from sources import open_source, read_codes
from steer import Vector, contrast, steered, steering_source, toy_texts
from tokenizer import encode, load_tokenizer, pack_tokenizer

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KINDS = {"tiny": "parity", "tiny_topk": "topk", "tiny_gpt": "none"}  # runs in out/


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Toy data, and in out/ a run of each kind with random weights."""
    folder = tmp_path_factory.mktemp("sample")
    data.prepare_toy(str(folder / "data"), tokens=30_000)
    encoding = load_tokenizer(str(folder / "data"))
    for name, kind in KINDS.items():
        config = Config(layers=2, d=32, heads=2, context=32, vocab_size=2048, bottleneck=kind,
                        bits=(5, 8), active=(4, 6), children=(16,), data=str(folder / "data"), seed=1)
        os.makedirs(folder / "out" / name)
        save(str(folder / "out" / name / "best.pt"),
             {"config": dataclasses.asdict(config), "tokenizer": pack_tokenizer(encoding),
              "model": GPT(config).state_dict(), "step": 0})
    return folder


@pytest.fixture(params=KINDS)
def any_run(request, folder):
    return open_run(str(folder / "out" / request.param))


@pytest.fixture
def run(folder):
    return open_run(str(folder / "out" / "tiny"))


def some_vector(run, scale=3.0):
    """A vector of random features, for what does not depend on what they mean."""
    rng, source = torch.Generator().manual_seed(0), source_of(run)
    if run.config.bottleneck == "none":
        layers, indices = torch.tensor([1]), torch.arange(run.config.d)[None]
    else:
        layers, indices = torch.arange(2), torch.randint(0, 256, (2, 8), generator=rng)
    weights = scale * torch.randn(indices.shape, generator=rng)
    return Vector("sea", features.weights_hash(run.model), source.key, layers, indices, weights)


def source_of(run):
    return steering_source(run, layer=1)


def codes_of(run):
    """Of the prompt, layer by layer."""
    return read_codes(run.model, prompt(run), open_source(run)).values()


def generate(run, tokens, count, alpha, **settings):
    return run.model.generate(tokens, count, **steered(source_of(run), some_vector(run), alpha), **settings)


def prompt(run, text="In 1436, a"):
    return features.prompt_tokens(run, text)


def command(folder, *arguments, stdin=""):
    """sample.py in a process of its own, in the folder that has out/."""
    return subprocess.run([sys.executable, os.path.join(ROOT, "sample.py"), *arguments], cwd=folder, input=stdin,
                          text=True, capture_output=True, timeout=120)


def refuses(capsys, *arguments):
    """The sentence with which sample.py refuses these arguments."""
    with pytest.raises(UserError) as error:
        sample.main(list(map(str, arguments)))
    assert "\n" not in str(error.value)
    return str(error.value)


# Editing


def test_an_edit_that_changes_nothing_gives_bit_equal_logits(any_run):
    tokens = prompt(any_run)
    with torch.no_grad():
        assert torch.equal(any_run.model(tokens), any_run.model(tokens, edit=lambda layer, code: code))


def test_editing_one_coefficient_changes_the_output_by_what_the_decoder_says(run):
    bottleneck, record = run.model.blocks[1].bottleneck, []

    def edit(layer, code):
        if layer == 1:
            code = Code(code.indices, code.coefs.clone())
            code.coefs[0, 3, 2] += 1.5
        return code

    with torch.no_grad():
        run.model(prompt(run), record=record)
        run.model(prompt(run), edit=edit, record=record)
    (code, before, h), (edited, after, same) = record[1], record[3]
    assert torch.equal(h, same)
    change = bottleneck.decode(edited) - bottleneck.decode(code)
    row = bottleneck.decode(Code(code.indices[:, :, 2:3], torch.ones_like(code.coefs[:, :, 2:3])))  # of that feature
    assert torch.allclose(change[0, 3], 1.5 * row[0, 3], atol=1e-5)
    assert torch.equal(change[0, :3], torch.zeros_like(change[0, :3]))
    assert torch.equal(after, bottleneck.decode(edited, like=h)) and not torch.equal(after[0, 3], before[0, 3])


def test_steering_adds_to_an_active_feature_and_makes_active_one_that_is_not(run):
    bottleneck, (code, _) = run.model.blocks[0].bottleneck, codes_of(run)
    active = code.indices[0, 2, 0].item()
    silent = next(i for i in range(bottleneck.m) if i not in code.indices[0, 2])
    vector = some_vector(run)._replace(indices=torch.tensor([[active, silent]] * 2),
                                       weights=torch.tensor([[2.0, -3.0]] * 2))
    added = bottleneck.decode(steer.add_features(vector, 0.5, 0, code))[0, 2]
    coefs = torch.cat([code.coefs[0, 2], torch.tensor([-1.5])])
    coefs[0] += 1.0
    by_hand = bottleneck.decode(Code(torch.cat([code.indices[0, 2], torch.tensor([silent])])[None], coefs[None]))[0]
    assert torch.allclose(added, by_hand, atol=1e-5)


# Generating


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_cached_and_recomputed_generation_give_the_same_tokens(any_run, alpha):
    tokens = prompt(any_run).expand(3, -1)
    cached, recomputed = (torch.stack(list(generate(any_run, tokens, 40, alpha, seed=3, cached=cached)))
                          for cached in (True, False))
    assert torch.equal(cached, recomputed)


def test_steering_is_repeatable_by_seed_and_leaves_the_model_as_it_was(any_run):
    def tokens(alpha, seed):
        return torch.cat(list(generate(any_run, prompt(any_run), 20, alpha, seed=seed))).tolist()

    plain = torch.cat(list(any_run.model.generate(prompt(any_run), 20, seed=5))).tolist()
    steered_text = tokens(2.0, 5)
    assert steered_text == tokens(2.0, 5) != tokens(2.0, 6)
    assert plain == tokens(0.0, 5) != steered_text
    steps = generate(any_run, prompt(any_run), 3, 2.0)
    next(steps)  # a steered text that is not finished does not steer another
    assert plain == torch.cat(list(any_run.model.generate(prompt(any_run), 20, seed=5))).tolist()


def test_streaming_writes_whole_characters(run):
    text, written = "naïve – 日本 🙂.", []
    tokens = encode(run.encoding, text).tolist()
    assert len(tokens) > len(text)  # the toy tokenizer spells these byte by byte
    sample.stream(run.encoding, tokens, written.append)
    assert "".join(written) == text and "\ufffd" not in text
    sample.stream(run.encoding, tokens[:-3], written.append)
    assert written[-1] == "\ufffd"  # what is cut within a character
    sample.stream(run.encoding, [run.encoding.n_vocab, 2047], written.append)  # rows that only round up the vocabulary


def test_columns_mark_the_words_of_the_concept():
    starred = list(sample.columns("a ship\nsails", "the ship, shipped", ("ship",), 43, colour=False))
    assert starred == [f"{'a *ship*':20} | the *ship*, shipped", f"{'sails':20} | "]
    coloured = next(sample.columns("a ship", "", ("ship",), 43, colour=True))
    assert coloured == "a \033[1;32mship\033[0m" + " " * 14 + " | "


# Features


def test_the_parent_of_an_active_feature_is_active_and_a_generator_away(run):
    bottleneck, (code, _) = run.model.blocks[0].bottleneck, codes_of(run)
    parents = features.find_parents(bottleneck, code)
    assert (parents[..., :4] == -1).all()
    steps = parents[..., 4:] ^ code.indices[..., 4:]
    assert torch.isin(steps, bottleneck.generators_1).all()
    assert (parents[..., 4:, None] == code.indices[..., None, :4]).any(-1).all()


def test_the_index_finds_a_planted_feature(folder, tmp_path):
    """A direction is added to one token's embedding; the feature of that coordinate must fire on it, and hardest."""
    run = open_run(str(folder / "out" / "tiny"))
    run = run._replace(path=str(tmp_path / "best.pt"))
    token = encode(run.encoding, " was")[0]
    with torch.no_grad():
        run.model.embedding.weight[int(token)] = 0
        run.model.embedding.weight[int(token), 9] = -50.0
    index, tokens = open_index(run, open_source(run))
    positions, coefs = index.firings(0, 9, -1)
    there = np.flatnonzero(tokens.read(0, index.tokens) == token)
    assert len(there) and set(there) <= set(positions.tolist())
    assert set(positions[(-coefs).argsort()[: len(there)]].tolist()) == set(there.tolist())
    code = read_codes(run.model, tokens.windows([there[0] // 32], 32)[:, :-1], open_source(run))[0]
    at = (code.indices[0, there[0] % 32] == 9).nonzero()[0, 0]
    assert coefs[positions == there[0]] == pytest.approx(-code.coefs[0, there[0] % 32, at].item(), rel=1e-3)
    assert len(index.positions) == index.tokens * 10 * 2  # every active feature of every token and layer
    changed = features.effect(run.model, open_source(run), tokens, 0, 9, positions[:4])
    assert changed.abs().max() > 0 and abs(changed.sum().item()) < 1e-2


def test_the_index_is_kept_and_made_anew_for_other_weights_or_when_damaged(folder, tmp_path):
    run, said = open_run(str(folder / "out" / "tiny"))._replace(path=str(tmp_path / "best.pt")), []
    first, _ = open_index(run, open_source(run), most=512, say=said.append)
    assert first.tokens == 512 and "MB" in said[-1]
    said.clear()
    again, _ = open_index(run, open_source(run), most=512, say=said.append)
    assert not said and np.array_equal(first.positions, again.positions)
    with torch.no_grad():
        run.model.blocks[0].mlp.up.weight[0, 0] += 1
    open_index(run, open_source(run), most=512, say=said.append)
    assert "another checkpoint" in said[0]
    said.clear()
    (tmp_path / "features.npz").write_bytes((tmp_path / "features.npz").read_bytes()[:5000])
    open_index(run, open_source(run), most=512, say=said.append)
    assert "damaged" in said[0] and os.listdir(tmp_path) == ["features.npz"]


def test_looking_at_features_prints_them(folder, capsys):
    out = str(folder / "out" / "tiny")
    sample.main([out, "--prompt", "The sailor", "--features", "--top", "3"])
    text = capsys.readouterr().out
    assert "' sailor'" in text and text.count("layer 1") == 3 and " < " in text
    sample.main([out, "--feature", "0:200+", "--index-tokens", "2048"])
    text = capsys.readouterr().out
    assert "feature 0:200+, level 1: fires on" in text and "raises" in text and "parents" in text and "[[" in text


# Steering


def test_steering_raises_the_likelihood_of_its_texts(any_run):
    positive, negative = toy_texts("sea", n=16)
    source = steering_source(any_run)
    vector = contrast(any_run, source, "sea", positive, negative, k=16, steps=40)

    def loss(alpha):
        with torch.no_grad():
            tokens, real = next(steer.batches(any_run, positive))
            logits = any_run.model(tokens[:, :-1], **steered(source, vector, alpha))[real[:, 1:]]
            return torch.nn.functional.cross_entropy(logits, tokens[:, 1:][real[:, 1:]]).item()

    assert loss(1.0) < loss(0.0) - 0.01


def test_without_fitting_the_weights_are_the_largest_differences(run):
    texts = toy_texts("sea", n=8)
    source = open_source(run)
    vector = contrast(run, source, "sea", *texts, k=5, steps=0)
    difference = steer.mean_features(run, source, texts[0]) - steer.mean_features(run, source, texts[1])
    for layer in range(2):
        ids = difference[layer].argsort(descending=True)[:5]
        assert set(vector.indices[layer].tolist()) == set((ids % 256).tolist())
        assert vector.weights[layer].norm().item() == pytest.approx(1)
        assert torch.equal(vector.weights[layer] < 0, difference[layer].topk(5).indices >= 256)


def test_toy_texts_have_the_concept_or_not_and_are_in_no_split(folder):
    positive, negative = toy_texts("sea", n=20)
    words = set(toyworld.concept_words("sea"))
    assert len(positive) == len(negative) == 20
    assert all(words & set(text.replace(".", "").replace(",", "").split()) for text in positive)
    assert not any(words & set(text.replace(".", "").replace(",", "").split()) for text in negative)
    assert steer.TOY_SEED not in (0, 1) and len(set(steer.HELD_OUT)) == 10


def test_measures_of_a_known_text():
    text = "The pirate sailed the naval ship. The the. The sailor"
    assert steer.count_toy_words(text, "sea") == (5, 10, 1, 2)


def test_perplexity_is_that_of_the_loss(run):
    tokens = torch.randint(0, 300, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = run.model(tokens[:, :-1], tokens[:, 1:])["lm"].item()
    assert steer.perplexity(run.model, tokens, 1) == pytest.approx(np.exp(loss), rel=1e-4)


def test_a_vector_survives_a_file_and_is_refused_by_another_model(any_run, folder, tmp_path):
    vector, path = some_vector(any_run), str(tmp_path / "sea.npz")
    vector.save(path)
    again = Vector.load(path, any_run.model, source_of(any_run))
    assert again.concept == "sea" and all(torch.equal(a, b) for a, b in zip(vector[3:], again[3:]))
    other = open_run(str(folder / "out" / ("tiny_topk" if any_run.config.bottleneck == "parity" else "tiny")))
    with pytest.raises(UserError, match="another model"):
        Vector.load(path, other.model, source_of(other))
    with pytest.raises(UserError, match="of the source"):
        Vector.load(path, any_run.model, open_source(any_run, "neurons"))


def test_a_sweep_and_a_demonstration(folder, capsys, tmp_path):
    arguments = [str(folder / "out" / "tiny"), "--steer", "sea", "--fit", "2", "--k", "8",
                 "--tokens", "12", "--samples", "2"]
    sample.main([*arguments, "--alphas", "0,2", "--save-vector", str(tmp_path / "v.npz")])
    text = capsys.readouterr().out
    assert "concept words" in text and "perplexity" in text and text.count("%") == 6
    with pytest.raises(UserError, match="--vector FILE is a vector already"):
        sample.main([*arguments, "--vector", str(tmp_path / "v.npz")])
    sample.main([arguments[0], *arguments[5:], "--vector", str(tmp_path / "v.npz")])
    assert "unsteered, seed 1" in capsys.readouterr().out


def test_five_lines_of_library(folder, monkeypatch):
    """These are the README's, which says nothing that was not run."""
    monkeypatch.chdir(folder)
    from functools import partial

    from checkpoint import open_run
    from features import prompt_tokens
    from sources import open_source, read_codes
    from steer import add_features, contrast, text_of, toy_texts

    run = open_run("out/tiny")
    source = open_source(run)                                  # its own features; "hash", "neurons", "topk", a folder
    codes = read_codes(run.model, prompt_tokens(run, "The pirate sailed the naval ship."), source)  # {layer: Code}
    vector = contrast(run, source, "sea", *toy_texts("sea"))   # features, with weights
    edit = partial(add_features, vector, 1.0)                  # any f(layer, code) -> code
    tokens = run.model.generate(prompt_tokens(run, "In 1436, a"), 100, **source.edited(edit))
    print(text_of(run.encoding, list(tokens)))
    assert len(codes) == 2 and codes[0].coefs.shape == (1, 8, 10) and vector.indices.shape == (2, 256)


# The program


def test_the_program_in_a_process(folder):
    done = command(folder, "out/tiny", "--interactive", "--tokens", "5", "--fit", "1", "--k", "4",
                   stdin="In 1436, a\n/steer sea 2\n/alpha x\n/seed 3\n\n/steer nothing\n/help\n/quit\n")
    assert (done.returncode == 0 and "[sea 2, seed 3]" in done.stdout
            and "there is no concept" in done.stdout), done.stderr
    assert "needs a number" in done.stdout and "Traceback" not in done.stderr
    empty = folder / "nothing"
    empty.mkdir(exist_ok=True)
    done = command(empty)
    assert done.returncode == 1 and "python train.py configs/tiny.py" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments, sentence", [
    (["--steer", "see"], "the concepts, nearest first, are sea"),
    (["--prompt", "word " * 40], "the context of this model is 32"),
    (["--feature", "0:256+"], "the features 0 to 255"),
    (["--feature", "2:3"], "the layers 0 to 1"),
    (["--feature", "three"], "LAYER:INDEX"),
    (["--steer", "sea", "--positive", "empty.txt", "--negative", "empty.txt"], "is empty"),
    (["--steer", "sea", "--positive", "empty.txt"], "both --positive"),
    (["--prompt-file", "absent.txt"], "cannot read absent.txt"),
    (["--vector", "empty.txt"], "no vector"),
    (["--layer", "2"], "the layers 0 to 1"),
])
def test_bad_input_is_answered_with_a_sentence(folder, capsys, monkeypatch, arguments, sentence):
    monkeypatch.chdir(folder)
    open("empty.txt", "w").close()
    assert sentence in refuses(capsys, "out/tiny", *arguments)


def test_dense_models_have_no_features_and_other_texts_no_concepts(folder, capsys, monkeypatch, run):
    monkeypatch.chdir(folder)
    for look in (["--features"], ["--feature", "0:1"]):
        assert "dense" in refuses(capsys, "out/tiny_gpt", *look)
    assert parse_feature("1:200-", open_source(run)) == (1, 200, -1)
    monkeypatch.setattr(toyworld, "TOKEN_PATTERN", "another")
    assert "--positive FILE --negative FILE" in refuses(capsys, "out/tiny", "--steer", "sea")


def test_features_of_flat_selection_have_no_parents():
    torch.manual_seed(0)
    layer = DeepParityBottleneck(32, bits=(5, 8), active=(4, 6), children=(16,), selection="flat")
    assert (features.find_parents(layer, layer.encode(torch.randn(3, 32))) == -1).all()


def test_a_vector_from_a_file_steers_only_under_its_own_name(folder, tmp_path, monkeypatch, capsys, run):
    """--vector FILE --interactive, then /steer CONCEPT: what is shown is what steers."""
    path, used = str(tmp_path / "v.npz"), []
    some_vector(run).save(path)
    monkeypatch.setattr(sample, "open_run", lambda *arguments: run)
    monkeypatch.setattr(sample, "make_vector", lambda run, source, concept, options: Vector(concept, *[None] * 5))
    monkeypatch.setattr(sample, "write_sample", lambda run, prompt, options, seed, source, vector, alpha: used.append(
        (vector and vector.concept, alpha)))
    lines = iter(["one", "/steer war 2", "two", "/steer", "three", "/steer sea nan", "/alpha inf", "four", "/quit"])
    shown = []
    monkeypatch.setattr("builtins.input", lambda prompt: (shown.append(prompt), next(lines))[1])
    sample.main(["out/tiny", "--interactive", "--vector", path])
    assert used == [("sea", 1.0), ("war", 2.0), (None, 2.0), (None, 2.0)]
    assert [shown[i].split(",")[0] for i in (0, 2, 4)] == ["[sea 1", "[war 2", "[unsteered"]
    assert capsys.readouterr().out.count("must be at least -1000000.0 and at most 1000000.0") == 2


def test_every_bit_of_a_vectors_file_is_checked(run, tmp_path):
    path, kept = str(tmp_path / "v.npz"), some_vector(run)
    kept.save(path)
    raw = open(path, "rb").read()
    assert Vector.load(path, run.model, source_of(run)).concept == "sea"
    rng = np.random.default_rng(0)
    for bit in rng.choice(8 * len(raw), 300, replace=False):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with open(path, "wb") as file:
            file.write(damaged)
        try:
            found = Vector.load(path, run.model, source_of(run))
            assert found.concept == "sea" and torch.equal(found.weights, kept.weights), bit  # a date, say
        except UserError as error:
            assert "missing, damaged, or no vector" in str(error)


def test_a_temperature_near_zero_is_greedy_and_a_narrow_terminal_no_reason_to_stop(run):
    tokens = prompt(run)
    greedy, cold = (list(run.model.generate(tokens, 5, temperature=t)) for t in (0, 1e-40))
    assert torch.equal(torch.stack(greedy), torch.stack(cold))
    assert list(sample.columns("one two", "three", (), 3, False))
