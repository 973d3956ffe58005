"""Circuits: patches and edits that are known, the search for edits against trying all, and models built by hand."""
import dataclasses
import json
import os
from itertools import cycle, islice

import pytest
import torch
import torch.nn.functional as F

import circuits
import data
import edits
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
    found, _ = circuits.make_batches(run, list(islice(circuits.toy_pairs(kind, 3), count)))
    return max(found, key=lambda batch: len(batch.numbers))


def test_batches_have_one_length_and_the_answers_of_their_pairs(run):
    pairs = list(islice(circuits.toy_pairs("ioi", 0), 100))
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
        assert effects["block_out", layer, "all"] == pytest.approx([1, 1, 1], abs=1e-3)
    assert effects["block_out", 2, "last"][0] == pytest.approx(1, abs=1e-4)
    assert effects["block_out", 0, "last"][0] != pytest.approx(1, abs=1e-4)
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
    assert circuits.mediate(run.model, [batch])["mlp_out", 1, "last"][0] == pytest.approx(e, abs=1e-5)


def test_flipped_asks_for_more_than_the_source_answer():
    """The target's answer must be above it and above all that is near and wrong; the paper's rule looks at a name."""
    masks = [torch.tensor(rows, dtype=torch.bool) for rows in (
        [[1, 0, 0, 0, 0]] * 4, [[0, 1, 0, 0, 0]] * 4, [[0, 0, 1, 0, 0], [0, 0, 1, 0, 0], [0] * 5, [0, 0, 1, 1, 0]])]
    batch = circuits.Batch([0, 1, 2, 3], None, None, *masks)
    logits = torch.tensor([[1.0, 2.0, 3.0, 0.0, 9.0], [2.0, 1.0, 0.0, 0.0, 9.0], [1.0, 2.0, 5.0, 0.0, 9.0],
                           [1.0, 2.0, 1.9, 1.9, 9.0]])
    ours, papers = circuits.flipped(logits, batch)
    assert ours.tolist() == [False, False, True, True] and papers.tolist() == [False, True, True, True]


def test_layers_are_chosen_by_the_component_that_is_edited(parity):
    effects = {(site, layer, span): e for site, values in (("mlp_out", (.1, .5, .2)), ("block_out", (.1, .93, 1)),
                                                           ("attention_out", (.3, .1, .1)))
               for layer, e in enumerate(values) for span in circuits.SPANS}
    own, elsewhere = open_source(parity), open_source(parity, "hash", "attention_out")
    assert [circuits.component_of(own, way) for way in circuits.ways_of(own)] == ["mlp_out", "block_out", "block_out"]
    assert circuits.component_of(elsewhere, "add") == "attention_out"
    assert [circuits.choose_layer(effects, site, "last") for site in circuits.COMPONENTS] == [0, 1, 1]
    negative = {("block_out", layer, "all"): -1.0 - layer for layer in (0, 1)}
    assert circuits.choose_layer(negative, "block_out", "all") == 0


def test_no_pair_is_both_chosen_on_and_tested(parity, monkeypatch):
    options = circuits.parse(["run", "--pairs", "40", "--choose", "30"])
    for task in circuits.TASKS:
        chosen, tested, _ = circuits.draw_pairs(parity, task, options)
        assert len({frozenset(pair[:2]) for pair in chosen + tested}) == 70 and len(chosen) == 30
    few = list(islice(circuits.toy_pairs("ioi", 0), 70))
    swapped = [pair._replace(source=pair.target, target=pair.source) for pair in few]
    with monkeypatch.context() as patched:  # pairs that come again, also the other way round, count once
        patched.setattr(circuits, "toy_pairs", lambda kind, seed: (pair for pair in (*few[:9], *swapped[:9], *few)))
        chosen, tested, _ = circuits.draw_pairs(parity, "ioi", options)
        assert chosen + tested == few
        patched.setattr(circuits, "toy_pairs", lambda kind, seed: cycle(few[:69]))
        with pytest.raises(UserError, match="no 70 different pairs, but 69"):
            circuits.draw_pairs(parity, "ioi", options)
    options.answer = "digit"
    for pair in circuits.draw_pairs(parity, "greater_than", options)[1]:
        low, high = sorted((pair.before, pair.after))
        years = sorted(int(word) for word in [pair.source.split()[-3][2:], pair.target.split()[-3][2:]])
        assert [year // 10 for year in map(int, low)] == [year // 10 for year in range(
            years[0] // 10 * 10 + 10, years[1] // 10 * 10 + 10)]
        assert list(map(int, high)) == list(range(years[1] // 10 * 10 + 10, 100))


def codes_of(run, source, batch, layer=1):
    here, there = (circuits.Prompt(run.model, tokens).read() for tokens in (batch.source, batch.target))
    x, goal = here[source.site, layer], there[source.site, layer]
    part = source.layers[layer]
    return part, here, x, goal, edits.same_width(part.encode(x), part.encode(goal))


def sources(run):
    return [open_source(run, name) for name in (("own",) if run.config.bottleneck == "parity" else ())
            + ("hash", "neurons")]


@torch.no_grad()
def test_no_edit_changes_no_bit_and_k_edits_give_the_target_code(run):
    batch = batch_of(run)
    prompt = circuits.Prompt(run.model, batch.source)
    assert torch.allclose(prompt.logits(), circuits.last_logits(run.model, batch.source), atol=1e-4)
    for source in sources(run):
        part, here, x, goal, codes = codes_of(run, source, batch)
        for union in (False, True) if source.kind == "own" else (True,):
            space = edits.make_space(part, *codes, union, None if circuits.is_scaled(source) else goal - x)
            for way in set(circuits.ways_of(source)) - {"literal", "replace"}:
                logits = prompt.logits(**circuits.put_in(way, source, 1, here, space, space.start()))
                assert torch.equal(logits, prompt.logits()), (source.name, way)
            if union:
                continue
            *_, weights = edits.search(space, 10)
            reached = (weights == space.end()).all(1)
            assert reached.float().mean() > 0.9  # the rest has a slot that was set to zero, and stays near
            y, theirs = (part.decode(code, like=x) for code in (edits.code_of(space, weights), codes[1]))
            assert torch.allclose(y[reached], theirs[reached], atol=1e-4)
            whole = prompt.logits(**circuits.put_in("mlp", source, 1, here, space, space.end()))
            by_hand = prompt.logits(patch=lambda site, layer, x, theirs=theirs: run.model.blocks[1].mlp(theirs)[:, None]
                                    if (site, layer) == ("mlp_out", 1) else x)
            assert torch.allclose(whole, by_hand, atol=1e-4) and not torch.equal(whole, prompt.logits())


@torch.no_grad()
def test_a_random_direction_is_as_long_as_the_edit(parity):
    batch, source = batch_of(parity), open_source(parity)
    part, here, _, _, codes = codes_of(parity, source, batch)
    space = edits.make_space(part, *codes, False)
    *_, weights = edits.search(space, 4)
    rng = torch.Generator().manual_seed(0)
    for way in ("literal", "delta"):
        site, new = circuits.edited(way, source, 1, here, space, weights)
        _, old = circuits.edited(way, source, 1, here, space, space.start())
        patch = circuits.put_direction(way, parity.model, source, 1, here, space, weights, rng)["patch"]
        drawn = patch(site, 1, old[:, None])[:, 0]
        assert torch.allclose((drawn - old).norm(dim=1), (new - old).norm(dim=1), rtol=1e-3)
        assert (F.cosine_similarity(drawn - old, new - old).abs() < 0.9).all()


def distances(part, code, x, goal, scaled, codes):
    if scaled:
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
        if source.kind != "own" and not union:
            continue
        scaled = circuits.is_scaled(source)
        part, _, x, goal, codes = codes_of(run, source, batch)
        space = edits.make_space(part, *codes, union, None if scaled else goal - x)
        _, weights = edits.search(space, 1)
        got = distances(part, edits.code_of(space, weights), x, goal, scaled, codes)
        for row in range(len(batch.numbers)):
            tried = []
            for edited in every_edit(codes, row, union):
                code = Code(torch.tensor([[i for i, _ in edited]]), torch.tensor([[c for _, c in edited]]))
                one = [Code(part_.indices[row : row + 1], part_.coefs[row : row + 1]) for part_ in codes]
                tried.append(distances(part, code, x[row : row + 1], goal[row : row + 1], scaled, one).item())
            assert got[row].item() == pytest.approx(min(tried), rel=1e-4), (source.name, row)


@torch.no_grad()
def test_edits_never_lead_away_and_end_at_the_target(run):
    batch = batch_of(run, "fact")
    for source in sources(run):
        part, _, x, goal, codes = codes_of(run, source, batch)
        for union in (False, True) if source.kind == "own" else (True,):
            space = edits.make_space(part, *codes, union, None if circuits.is_scaled(source) else goal - x)
            steps = list(edits.search(space, 30))
            left = torch.stack([edits.distance(part, space, weights, x, goal) for weights in steps])
            assert (left.diff(dim=0) < 1e-4).all() and torch.allclose(left[0], torch.ones_like(left[0]), atol=1e-5)
            assert left[-1].mean() < left[1].mean()
            for k, weights in enumerate(steps[:4]):
                changed = weights != space.start()
                features = [set(torch.cat([code.indices for code in codes], 1)[row][changed[row]].tolist())
                            for row in range(len(changed))]
                assert all(len(found) <= (k if union else 2 * k) for found in features)
            *_, drawn = edits.search(space, 60, torch.Generator().manual_seed(0))
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
    found, _ = circuits.edit_batch(parity, source, 0, ("mlp",), batch, False, torch.Generator().manual_seed(0))
    assert not found["mlp", "0"][0, 0] and found["mlp", "1"][0, 0] and found["mlp", "all"][0, 0]
    assert not found["mlp", "direction 1"][0, 0]


def test_the_command_writes_tables_rows_and_pictures(world, capsys, monkeypatch):
    monkeypatch.setattr(circuits, "answered", lambda run, batch: torch.ones(len(batch.numbers), dtype=torch.bool))
    circuits.main([str(world / "parity"), "--against", str(world / "none"), "--pairs", "24", "--choose", "12",
                   "--site", "mlp_in", "block_out"])
    text = capsys.readouterr().out
    assert "what a component carries" in text and "own (union)" in text and "hash-block_out" in text
    assert "own less another source" in text
    found = json.loads((world / "parity" / "circuits.json").read_text())
    for part in ("results", "differences", "effects"):
        assert {row["task"] for row in found[part]} == set(circuits.TASKS)
    for row in found["results"]:
        assert row["n"] == 24 and all(0 <= low <= share <= high <= 1 for cell in row["rows"].values()
                                      for share, low, high in cell.values())
        assert {"0", "1", "8", "K", "all", "patch", "random 8", "direction K"} <= set(row["rows"])
    lines = [json.loads(line) for line in (world / "parity" / "circuits.jsonl").read_text().splitlines()]
    assert len(lines) == sum(row["n"] for row in found["results"]) and len(lines[0]["prompts"]) == 2
    share = next(row for row in found["results"] if row["source"] == "own" and row["way"] == "literal")
    same = [line["flipped"]["K"][0] for line in lines if all(line[key] == share[key] for key in (
        "task", "run", "source", "layer", "way"))]
    assert sum(same) / len(same) == pytest.approx(share["rows"]["K"]["ours"][0])
    for name in ("effects.png", "edits.png"):
        assert (world / "parity" / name).stat().st_size > 5000


def test_a_model_with_few_active_features_and_one_with_a_learned_dictionary(world, tmp_path, monkeypatch):
    monkeypatch.setattr(circuits, "answered", lambda run, batch: torch.ones(len(batch.numbers), dtype=torch.bool))
    for kind in ("parity", "topk"):
        config = Config(layers=2, d=32, heads=2, context=64, vocab_size=2048, bits=(5, 8), active=(3, 4),
                        children=(16,), data=str(world / "data"), seed=1, bottleneck=kind)
        os.makedirs(tmp_path / kind)
        save(str(tmp_path / kind / "best.pt"),
             {"config": dataclasses.asdict(config), "tokenizer": pack_tokenizer(load_tokenizer(str(world / "data"))),
              "model": GPT(config).state_dict(), "step": 0})
        circuits.main([str(tmp_path / kind), "--pairs", "8", "--choose", "8", "--tasks", "fact"])
        rows = json.loads((tmp_path / kind / "circuits.json").read_text())["results"]
        assert {"0", "1", "2", "4", "K"} <= set(rows[0]["rows"]) and "8" not in rows[0]["rows"]


def test_wrong_input_is_answered(world, monkeypatch):
    with pytest.raises(UserError, match="there is no task 'io'.*did you mean 'ioi'"):
        circuits.main([str(world / "parity"), "--tasks", "io"])
    monkeypatch.setattr(circuits, "answered", lambda run, batch: torch.zeros(len(batch.numbers), dtype=torch.bool))
    with pytest.raises(UserError, match="there is no site 'mlpin'.*did you mean 'mlp_in'"):
        circuits.main([str(world / "parity"), "--site", "mlpin"])
    with pytest.raises(UserError, match="folders of one name"):
        circuits.main([str(world / "parity"), "--against", str(world / "parity")])
    (world / "parity" / "circuits.jsonl").write_text("kept")
    with pytest.raises(UserError, match="no task has a pair that every model answers right"):
        circuits.main([str(world / "parity"), "--pairs", "8", "--choose", "8"])
    assert (world / "parity" / "circuits.jsonl").read_text() == "kept"
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
    pairs, unknown = text_pairs(kind, SHARED, encoding, 0)
    pairs = list(islice(pairs, 200))
    assert unknown < 60 and len({frozenset(pair[:2]) for pair in pairs}) > 120
    for pair in pairs:
        one, two = (encoding.encode_ordinary(prompt) for prompt in pair[:2])
        assert len(one) == len(two) and len({(a, b) for a, b in zip(one, two) if a != b}) == 1
        assert pair.before and pair.after and not set(pair.before) & set(pair.after)
        assert all(len(encoding.encode_ordinary(answer)) == 1 for answer in pair.before + pair.after)


def test_sources_of_single_layers_become_one():
    parts = [Source("sae", "topk-mlp_in", str(layer), "mlp_in", 64, {layer: object()}) for layer in (0, 1)]
    (merged,) = circuits.merge_layers(parts)
    assert sorted(merged.layers) == [0, 1]
