"""Circuits: patches and edits that are known, the search for edits against trying all, and models built by hand."""
import dataclasses
import json
import os

import pytest
import torch

import circuits
import data
import toyworld
from checkpoint import open_run, save
from config import Config
from dpb import Code
from helpers import UserError
from model import GPT
from sources import Source, open_source
from tokenizer import load_tokenizer, pack_tokenizer
from word_pairs import text_pairs

SHARED = os.path.join(os.path.dirname(__file__), "..", "..", "shared", "data")


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Toy data, a parity and a dense run with random weights."""
    folder = tmp_path_factory.mktemp("circuits")
    data.prepare_toy(str(folder / "data"), tokens=60_000)
    for kind in ("parity", "none"):
        config = Config(layers=3, d=32, heads=2, context=64, vocab_size=2048, bits=(5, 8), active=(4, 6),
                        children=(16,), data=str(folder / "data"), seed=1, bottleneck=kind)
        os.makedirs(folder / kind)
        model = GPT(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(3)  # so that parts have an effect
        save(str(folder / kind / "best.pt"),
             {"config": dataclasses.asdict(config), "tokenizer": pack_tokenizer(load_tokenizer(str(folder / "data"))),
              "model": model.state_dict(), "step": 0})
    return folder


@pytest.fixture(params=["parity", "none"])
def run(world, request):
    return open_run(str(world / request.param))


@pytest.fixture
def parity(world):
    return open_run(str(world / "parity"))


def batch_of(run, kind="ioi", count=40):
    return max(circuits.make_batches(run, circuits.toy_pairs(kind, count, 3))[0], key=lambda batch: len(batch.numbers))


def test_batches_have_one_length_and_the_answers_of_their_pairs(run):
    pairs = circuits.toy_pairs("ioi", 100, 0)
    found, out = circuits.make_batches(run, pairs)
    assert out == 0 and sorted(number for batch in found for number in batch.numbers) == list(range(100))
    for batch in found:
        for row, number in enumerate(batch.numbers):
            pair = pairs[number]
            assert run.encoding.decode(batch.source[row, 1:].tolist()) == pair.source
            assert run.encoding.decode(batch.target[row, 1:].tolist()) == pair.target
            for mask, answers in zip((batch.before, batch.after, batch.subject), pair[2:]):
                ids = mask[row].nonzero().flatten().tolist()
                assert {run.encoding.decode([token]) for token in ids} == set(answers)
    strange = [pairs[0]._replace(before=(" not a token",)), pairs[1]._replace(target=pairs[1].target + " more")]
    assert circuits.make_batches(run, strange)[1] == 2


def test_a_block_at_all_positions_carries_all_and_what_is_not_changed_nothing(run):
    batch = batch_of(run)
    effects = circuits.mediate(run.model, [batch])
    for layer in range(3):
        assert effects["block_out", layer, "all"] == pytest.approx(1, abs=1e-4)
    assert effects["block_out", 2, "last"] == pytest.approx(1, abs=1e-4) != effects["block_out", 0, "last"]
    own = circuits.read(run.model, batch.source)
    clean = circuits.last_logits(run.model, batch.source)
    for (site, layer), x in own.items():  # a patch of a prompt's own activations
        for span in circuits.SPANS:
            same = circuits.last_logits(run.model, batch.source, patch=circuits.replacing(site, layer, span, x))
            assert torch.equal(same, clean)


def test_effects_are_those_of_their_definition(run):
    batch = batch_of(run)
    theirs = circuits.read(run.model, batch.target)["mlp_out", 1]

    def by_hand(site, layer, x):
        x = x.clone()
        if (site, layer) == ("mlp_out", 1):
            x[:, -1] = theirs[:, -1]
        return x
    d = [circuits.margin(circuits.last_logits(run.model, tokens, patch=patch), batch)
         for tokens, patch in ((batch.source, None), (batch.source, by_hand), (batch.target, None))]
    e = ((d[0] - d[1]).mean() / (d[0] - d[2]).mean()).item()
    assert circuits.mediate(run.model, [batch])["mlp_out", 1, "last"] == pytest.approx(e, abs=1e-5)


def test_flipped_asks_for_both_the_source_answer_and_the_subject():
    masks = [torch.tensor([[True, False, False, False]] * 3), torch.tensor([[False, True, False, False]] * 3),
             torch.tensor([[False, False, True, False]] * 2 + [[False] * 4])]
    batch = circuits.Batch([0, 1, 2], None, None, *masks)
    logits = torch.tensor([[1.0, 2.0, 3.0, 9.0], [2.0, 1.0, 0.0, 9.0], [1.0, 2.0, 0.0, 9.0]])
    ours, papers = circuits.flipped(logits, batch)
    assert ours.tolist() == [False, False, True] and papers.tolist() == [False, True, True]


def codes_of(run, source, batch, layer=1):
    here, there = (circuits.Prompt(run.model, tokens).read() for tokens in (batch.source, batch.target))
    x, goal = here[source.site, layer], there[source.site, layer]
    part = source.layers[layer]
    return part, here, x, goal, circuits.same_width(part.encode(x), part.encode(goal))


def sources(run):
    return [open_source(run, name) for name in (("own",) if run.config.bottleneck == "parity" else ())
            + ("hash", "neurons")]


@torch.no_grad()
def test_no_edit_changes_no_bit_and_all_edits_give_the_target_code(run):
    batch = batch_of(run)
    prompt = circuits.Prompt(run.model, batch.source)
    assert torch.allclose(prompt.logits(), circuits.last_logits(run.model, batch.source), atol=1e-4)
    for source in sources(run):
        own = source.kind == "own"
        part, here, x, goal, codes = codes_of(run, source, batch)
        for union in (False, True) if own else (True,):
            space = circuits.make_space(part, *codes, union, None if own else goal - x)
            for way in set(circuits.ways_of(source)) - {"literal", "replace"}:
                logits = prompt.logits(**circuits.put_in(way, source, 1, here, space, space.start()))
                assert torch.equal(logits, prompt.logits()), (source.name, way)
            assert circuits.code_of(space, space.end()) is codes[1]
        if own:
            theirs = Code(*(value[:, None] for value in codes[1]))
            whole = prompt.logits(**circuits.put_in("mlp", source, 1, here, space, space.end()))
            given = prompt.logits(edit=lambda layer, code, theirs=theirs: theirs if layer == 1 else code)
            assert torch.equal(whole, given) and not torch.equal(whole, prompt.logits())


def distances(part, code, x, goal, own, codes):
    if own:
        return (part.decode(code, like=x) - part.decode(codes[1], like=goal)).norm(dim=-1)
    change = part.decode(code) - part.decode(codes[0])
    return (x + change - goal).norm(dim=-1)


def every_edit(codes, row, union):
    """The codes of one pair after each edit there is, as lists of (index, coefficient)."""
    source, target = ([(int(i), float(c)) for i, c in zip(code.indices[row], code.coefs[row]) if c] for code in codes)
    here, there = dict(source), dict(target)
    for index in here:
        rest = [(i, c) for i, c in source if i != index]
        if union:
            yield rest + ([(index, there[index])] if index in there else [])
            continue
        yield rest
        if index in there:
            yield rest + [(index, there[index])]
        else:
            yield from (rest + [(i, c)] for i, c in target if i not in here)
    if union:
        yield from (source + [(i, c)] for i, c in target if i not in here)


@torch.no_grad()
@pytest.mark.parametrize("union", [False, True])
def test_the_first_edit_is_the_best_of_all(run, union):
    batch = batch_of(run, "pronoun")
    for source in sources(run):
        own = source.kind == "own"
        if not own and not union:
            continue
        part, _, x, goal, codes = codes_of(run, source, batch)
        space = circuits.make_space(part, *codes, union, None if own else goal - x)
        _, weights = circuits.search(space, 1)
        got = distances(part, circuits.code_of(space, weights), x, goal, own, codes)
        for row in range(len(batch.numbers)):
            tried = []
            for edited in every_edit(codes, row, union):
                code = Code(torch.tensor([[i for i, _ in edited]]), torch.tensor([[c for _, c in edited]]))
                one = [Code(part_.indices[row : row + 1], part_.coefs[row : row + 1]) for part_ in codes]
                tried.append(distances(part, code, x[row : row + 1], goal[row : row + 1], own, one).item())
            assert got[row].item() == pytest.approx(min(tried), rel=1e-4), (source.name, row)


@torch.no_grad()
def test_edits_never_lead_away_and_end_at_the_target(run):
    batch = batch_of(run, "fact")
    for source in sources(run):
        own = source.kind == "own"
        part, _, x, goal, codes = codes_of(run, source, batch)
        for union in (False, True) if own else (True,):
            space = circuits.make_space(part, *codes, union, None if own else goal - x)
            steps = list(circuits.search(space, 30))
            left = torch.stack([circuits.distance(part, space, weights, x, goal, own) for weights in steps])
            assert (left.diff(dim=0) < 1e-4).all() and torch.allclose(left[0], torch.ones_like(left[0]), atol=1e-5)
            assert left[-1].mean() < left[1].mean()
            changed = [((weights != space.start()).sum(1)) for weights in steps[:4]]
            assert all((count <= (2 if own else 2) * k).all() for k, count in enumerate(changed))
            *_, drawn = circuits.search(space, 60, torch.Generator().manual_seed(0))
            if union:  # where nothing is left to edit, all is as in the target
                assert torch.equal(drawn, space.end())


@torch.no_grad()
def test_one_edit_finds_the_feature_that_writes_the_answer(parity):
    """The MLP of layer 0 writes the answer if and only if one feature is on; nothing else depends on the token."""
    model = parity.model
    source = open_source(parity)
    part, feature = source.layers[0], 20  # of level 0, the coordinates
    phi = torch.eye(32)[feature]
    for block in model.blocks:
        block.attention.out.weight.zero_()
        block.mlp.down.weight.zero_()
        block.norm2.weight.fill_(1.0)
    model.positions.weight.zero_()
    yes, no, one, two = 10, 11, 20, 21
    base = torch.zeros(32)
    base[:3] = torch.tensor([3.0, -2.0, 2.5])
    model.embedding.weight[one], model.embedding.weight[two] = base, base + 6 * phi
    for token, coordinate in ((yes, 30), (no, 31)):
        model.embedding.weight[token] = 0
        model.embedding.weight[token, coordinate] = 3.0
    answer = torch.zeros(32)
    answer[30], answer[31] = 30.0, -30.0
    block = model.blocks[0].mlp
    block.up.weight.zero_()
    block.up.weight[0] = 20 * phi
    block.down.weight[:, 0] = answer
    rows = torch.eye(2048, dtype=torch.bool)
    batch = circuits.Batch([0], torch.tensor([[5, one]]), torch.tensor([[5, two]]), rows[no][None], rows[yes][None],
                           torch.zeros(1, 2048, dtype=torch.bool))
    codes = [part.encode(circuits.Prompt(model, tokens).read()["mlp_in", 0]) for tokens in (batch.source, batch.target)]
    assert feature not in codes[0].indices and codes[1].indices[0, codes[1].coefs[0].abs().argmax()] == feature
    found, _ = circuits.edit_batch(parity, source, 0, batch, union=False)
    assert not found["mlp", "0"][0, 0] and found["mlp", "1"][0, 0] and found["mlp", "all"][0, 0]
    assert not found["mlp", "random direction"][0, 0]


def test_the_command_writes_tables_rows_and_pictures(world, capsys, monkeypatch):
    monkeypatch.setattr(circuits, "answered", lambda run, batch: torch.ones(len(batch.numbers), dtype=torch.bool))
    circuits.main([str(world / "parity"), "--against", str(world / "none"), "--pairs", "24", "--choose", "12",
                   "--site", "mlp_in", "block_out"])
    text = capsys.readouterr().out
    assert "what a component carries" in text and "own (union)" in text and "hash-block_out" in text
    found = json.loads((world / "parity" / "circuits.json").read_text())
    assert {row["task"] for row in found["results"]} == set(circuits.TASKS)
    for row in found["results"]:
        assert row["n"] == 24 and all(0 <= low <= share <= high <= 1 for cell in row["rows"].values()
                                      for share, low, high in cell.values())
    lines = (world / "parity" / "circuits.jsonl").read_text().splitlines()
    assert len(lines) == sum(row["n"] for row in found["results"])
    for name in ("effects.png", "edits.png"):
        assert (world / "parity" / name).stat().st_size > 5000


def test_wrong_input_is_answered(world, monkeypatch):
    with pytest.raises(UserError, match="there is no task 'io'.*did you mean 'ioi'"):
        circuits.main([str(world / "parity"), "--tasks", "io"])
    monkeypatch.setattr(circuits, "answered", lambda run, batch: torch.zeros(len(batch.numbers), dtype=torch.bool))
    with pytest.raises(UserError, match="no task has a pair that every model answers right"):
        circuits.main([str(world / "parity"), "--pairs", "8", "--choose", "8"])
    monkeypatch.setattr(toyworld, "TOKEN_PATTERN", "another")
    with pytest.raises(UserError, match="--data DIR"):
        circuits.main([str(world / "parity")])
    with pytest.raises(UserError, match="there is no task 'fact'"):
        circuits.main([str(world / "parity"), "--tasks", "fact", "--data", "nowhere"])
    with pytest.raises(UserError, match="nowhere.*cannot be read"):
        circuits.main([str(world / "parity"), "--data", "nowhere"])


@pytest.mark.skipif(not os.path.isdir(os.path.join(SHARED, "circuits")), reason="needs ../shared/data/circuits")
@pytest.mark.parametrize("kind", ["ioi", "pronoun", "greater_than"])
def test_pairs_of_english_are_matched(kind, monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", os.path.join(SHARED, "tiktoken_cache"))
    encoding = tiktoken.get_encoding("gpt2")
    pairs, unknown = text_pairs(kind, SHARED, encoding, 200, 0)
    assert len(pairs) == 200 and unknown < 60 and len({pair.source for pair in pairs}) > 30
    for pair in pairs:
        one, two = (encoding.encode_ordinary(prompt) for prompt in pair[:2])
        assert len(one) == len(two) and len({(a, b) for a, b in zip(one, two) if a != b}) == 1
        assert pair.before and pair.after and not set(pair.before) & set(pair.after)
        if kind != "greater_than":
            assert all(len(encoding.encode_ordinary(answer)) == 1 for answer in pair.before + pair.after)


def test_sources_of_single_layers_become_one():
    parts = [Source("sae", "topk-mlp_in", str(layer), "mlp_in", 64, {layer: object()}) for layer in (0, 1)]
    (merged,) = circuits.merge_layers(parts)
    assert sorted(merged.layers) == [0, 1]
