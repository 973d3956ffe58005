"""Steering judged: vectors, texts, choices and the command, on small models with random weights."""
import dataclasses
import itertools
import json
import os
from argparse import Namespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

import data
import judge
import lines
import noise
import pareto
import toyworld
from checkpoint import open_run, save
from concepts import Concept, read_concepts, text_concepts, text_prefixes, toy_prefixes
from config import Config
from dpb import Code
from helpers import UserError, bootstrap, checked_line
from judge import Grammar
from lines import lines_of, norms_of, open_sources, ragged, strength, vector_of, write_texts
from model import GPT, nucleus, sample
from pareto import best_of, choose, ellipse, frontier
from sources import read_activations, read_codes
from steer import contrast, steered
from tokenizer import load_tokenizer, pack_tokenizer

SHARED = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "..", "shared", "data")
OPTIONS = Namespace(tokens=6, temperature=0.0, top_p=0.9, batch=64, seed=0, k=8, fit=2, ratios=[0.5, 1.0])
PREFIXES = ["The", "In 1436, a", "At the store, the", "The first"]
TEXTS = Concept("sea", ("ship", "boat"), ["The pirate sailed the ship.", "A boat."], ["The king saw the castle."])


def make_run(folder, name, kind, **settings):
    encoding = load_tokenizer(str(folder / "data"))
    config = Config(**{"layers": 3, "d": 32, "heads": 2, "context": 32, "vocab_size": 2048, "bottleneck": kind,
                       "bits": (5, 8), "active": (4, 6), "children": (16,), "data": str(folder / "data"), "seed": 1,
                       **settings})
    os.makedirs(folder / "out" / name)
    save(str(folder / "out" / name / "best.pt"),
         {"config": dataclasses.asdict(config), "tokenizer": pack_tokenizer(encoding),
          "model": GPT(config).state_dict(), "step": 0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Toy data, and in out/ a parity model and its dense twin with random weights."""
    folder = tmp_path_factory.mktemp("pareto")
    data.prepare_toy(str(folder / "data"), tokens=30_000)
    for name, kind in (("tiny", "parity"), ("tiny_gpt", "none")):
        make_run(folder, name, kind)
    return folder


@pytest.fixture(scope="module", params=["tiny", "tiny_gpt"])
def run(request, folder):
    return open_run(str(folder / "out" / request.param))


def every_vector(run):
    """[(line, source, vector)] of each way to steer a run."""
    sources, found = open_sources(run, []), []
    for line in lines_of(run, sources):
        vector = contrast(run, sources[line.source], TEXTS.name, TEXTS.positive, TEXTS.negative, k=8, steps=0)
        found.append((line, *vector_of(run, sources[line.source], line, vector, TEXTS, 0, OPTIONS)))
    return found


# Lines


def test_every_source_is_steered_at_all_layers_and_the_middle_one_in_every_way(run):
    found = [(line.source, line.layers, line.way) for line in lines_of(run, open_sources(run, []))]
    free = "own" if run.config.bottleneck == "parity" else "stream"
    ways = [(source, way) for source in (free, "hash") for way in ("contrast", "fitted")] + [(free, "random")]
    ways += [("own", "random fitted")] * (free == "own")
    assert sorted(found) == sorted((source, layers, way) for source, way in ways for layers in ((0, 1, 2), (1,)))


def test_alpha_zero_gives_bit_equal_logits_and_another_alpha_does_not(run):
    tokens = torch.randint(0, 2000, (2, 12), generator=torch.Generator().manual_seed(0))
    vectors = every_vector(run)
    with torch.no_grad():
        plain = run.model(tokens)
        for line, source, vector in vectors:
            for alpha in (0.0, torch.zeros(2, 1, 1)):
                assert torch.equal(run.model(tokens, **steered(source, vector, alpha)), plain), line
            both = run.model(tokens, **steered(source, vector, torch.tensor([0.0, 9.0])[:, None, None]))
            assert torch.equal(both[0], plain[0]) and not torch.equal(both[1], plain[1]), line


def test_a_vector_of_one_layer_leaves_the_others_alone(run):
    tokens = torch.randint(0, 2000, (2, 12), generator=torch.Generator().manual_seed(0))
    for line, source, vector in every_vector(run):
        if len(line.layers) == 1:
            seen = {}

            def look(site, layer, x, seen=seen):
                seen[site, layer] = x
                return x
            arguments = steered(source, vector, 5.0)
            if "patch" in arguments:
                inner = arguments["patch"]
                arguments = {"patch": lambda *place, inner=inner, look=look: inner(*place[:2], look(*place))}
            else:
                arguments["patch"] = look
            with torch.no_grad():
                run.model(tokens, **arguments)
            plain = read_activations(run.model, tokens, "block_out", [0])[0]
            assert line.layers == (1,) and torch.equal(seen["block_out", 0], plain), line


def test_the_ratio_is_the_norm_of_what_is_added_over_that_of_what_it_is_added_to(run):
    tokens = data.Tokens(run.config.data, "val")
    windows = tokens.windows(range(32), 32)[:, :-1]
    for line, source, vector in every_vector(run):
        norms = norms_of(run, source)
        by_hand = []
        for row, layer in enumerate(vector.layers.tolist()):
            if source.kind == "own":
                x = source.layers[layer].decode(read_codes(run.model, windows, source)[layer])
                signs = source.layers[layer].decode(code_of(vector, row, 1.0))
            else:
                x = read_activations(run.model, windows, source.site, [layer])[layer]
                signs = source.layers[layer].decode(code_of(vector, row, 1.0)) - source.layers[layer].decode(
                    code_of(vector, row, 0.0))
            by_hand.append((signs.norm() / x.norm(dim=-1).mean()).item())
        assert strength(run, source, vector, norms) == pytest.approx(np.mean(by_hand), rel=1e-4), line
        alpha = 0.7 / strength(run, source, vector, norms)
        assert strength(run, source, vector._replace(weights=alpha * vector.weights), norms) == pytest.approx(0.7)


def code_of(vector, row, scale):
    return Code(vector.indices[row][None], scale * vector.weights[row][None])


def test_what_is_drawn_by_lot_has_as_many_features_and_the_same_weights_but_for_order_and_sign(folder):
    run = open_run(str(folder / "out" / "tiny"))
    by_way = {line.way: vector for line, _, vector in every_vector(run)
              if line.source == "own" and len(line.layers) > 1}
    plain, drawn = by_way["contrast"], by_way["random"]
    assert torch.equal(plain.weights.abs().sort().values, drawn.weights.abs().sort().values)
    assert not torch.equal(plain.indices, drawn.indices)
    assert all(len(set(row)) == 8 for row in drawn.indices.tolist())
    assert not torch.equal(plain.weights, by_way["fitted"].weights)
    assert torch.equal(drawn.indices, by_way["random fitted"].indices)
    assert not torch.equal(drawn.weights, by_way["random fitted"].weights)


# Texts


def test_prompts_of_any_length_in_one_batch_give_the_texts_of_each_alone(run):
    """Greedy, for every alpha: nothing of a row leaks into another, and no padding into any."""
    (_, source, vector), *_ = every_vector(run)
    together = write_texts(run, PREFIXES, OPTIONS, 0, source, vector, [0.0, 3.0])
    alone = [[write_texts(run, [prefix], OPTIONS, 0, source, vector, [alpha])[0][0] for prefix in PREFIXES]
             for alpha in (0.0, 3.0)]
    assert together == alone and together[0] != together[1]
    assert together[0] == write_texts(run, PREFIXES, OPTIONS, 0)[0]
    small = Namespace(**{**vars(OPTIONS), "batch": 3})
    assert write_texts(run, PREFIXES, small, 0, source, vector, [0.0, 3.0]) == together


def test_a_text_depends_on_the_concept_and_not_on_its_place_in_a_list(folder, tmp_path):
    """So that what was kept of one command is what another would write."""
    run = open_run(str(folder / "out" / "tiny"))
    options, sources = Namespace(**{**vars(OPTIONS), "temperature": 0.8}), {"tiny": open_sources(run, [])}
    other = TEXTS._replace(name="boats")
    line = next(line for line in lines_of(run, sources["tiny"]) if line.way == "random")
    found = []
    for number, order in enumerate([(TEXTS, other), (other, TEXTS)]):
        writer = lines.Writer({"tiny": run}, sources, PREFIXES, options, str(tmp_path / f"{number}.jsonl"))
        found.append({concept.name: writer.steered(line, concept) for concept in order})
        assert writer.unsteered("tiny", 0) != writer.unsteered("tiny", 1)
    assert found[0] == found[1] and found[0]["sea"] != found[0]["boats"]


def test_what_is_added_has_the_ratio_that_was_asked_for(folder, tmp_path):
    run = open_run(str(folder / "out" / "tiny"))
    sources = {"tiny": open_sources(run, [])}
    writer = lines.Writer({"tiny": run}, sources, PREFIXES, OPTIONS, str(tmp_path / "texts.jsonl"))
    for line in lines_of(run, sources["tiny"]):
        source = sources["tiny"][line.source]
        vector = contrast(run, source, TEXTS.name, TEXTS.positive, TEXTS.negative, k=OPTIONS.k, steps=0)
        at, vector = vector_of(run, source, line, vector, TEXTS, writer.seed(TEXTS.name), OPTIONS)
        added = [strength(run, at, vector._replace(weights=alpha * vector.weights), norms_of(run, source))
                 for alpha in writer.steered(line, TEXTS)["alphas"]]
        assert added == pytest.approx(OPTIONS.ratios, rel=1e-4), line


def test_a_text_is_what_comes_after_its_own_prefix(run):
    tokens, forced = ragged([[1, 2], [1, 2, 3, 4], [5, 6, 7]])
    assert tokens.tolist() == [[1, 2], [1, 2], [5, 6]] and forced.tolist() == [[-1, -1], [3, 4], [7, -1]]
    steps = torch.stack(list(run.model.generate(tokens, 5, temperature=0, forced=forced)), 1)
    whole = run.model.generate(torch.tensor([[1, 2, 3, 4]]), 3, temperature=0)
    assert steps[1].tolist() == [3, 4, *torch.cat(list(whole)).tolist()]


def test_the_nucleus_is_the_smallest_set_with_the_mass():
    """Against sorting, for flat and peaked rows, and for a mass that needs nearly all."""
    rng = torch.Generator().manual_seed(0)
    scale = torch.tensor([0.01, 0.5, 2.0, 8.0])[:, None]
    values = (torch.randn(4, 700, generator=rng) * scale).softmax(-1)
    for top_p in (0.1, 0.5, 0.9, 0.999):
        kept, order = nucleus(values, top_p)
        for row in range(4):
            ordered, by_sort = values[row].sort(descending=True)
            count = int((ordered.cumsum(0) - ordered < top_p).sum())
            assert order[row][kept[row] > 0].tolist() == by_sort[:count].tolist()
            assert kept[row].sum() >= min(top_p, 1 - 1e-5) and torch.equal(kept[row][:count], ordered[:count])


@pytest.mark.parametrize("arguments", [(None, None), (2, None), (None, 0.85), (3, 0.85)])
def test_tokens_are_drawn_as_often_as_they_are_likely(arguments):
    probabilities = torch.tensor([0.15, 0.5, 0.05, 0.3])
    never = torch.tensor([[float("-inf"), -200.0, 0.0, 1.0]] * 1000)  # in front: what has no probability is never drawn
    assert set(sample(never, 1.0, *arguments, torch.Generator().manual_seed(0)).tolist()) == {2, 3}
    drawn = sample(probabilities.log().repeat(40_000, 1), 1.0, *arguments, torch.Generator().manual_seed(0))
    kept = {(None, None): [0, 1, 2, 3], (2, None): [1, 3], (None, 0.85): [0, 1, 3], (3, 0.85): [0, 1, 3]}[arguments]
    expected = torch.zeros(4)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    assert torch.allclose(torch.bincount(drawn, minlength=4) / 40_000, expected, atol=0.01)
    with pytest.raises(ValueError, match="infinities"):
        sample(torch.tensor([[float("nan"), 1.0]]), 1.0, *arguments, torch.Generator().manual_seed(0))


# Choices


def test_the_frontier_is_what_no_point_beats():
    rng = np.random.default_rng(0)
    for count in (1, 2, 7, 40):
        for points in (rng.random((count, 2)), rng.integers(0, 4, (count, 2)).astype(float)):  # with equal ones
            by_hand = {i for i in range(count) if not any(
                (points[j] >= points[i]).all() and (points[j] > points[i]).any() for j in range(count))}
            found = frontier([tuple(point) for point in points])
            assert set(found) == by_hand and len(found) == len(by_hand)
            assert [points[i][0] for i in found] == sorted((points[i][0] for i in found), reverse=True)


def test_what_is_missing_is_on_no_frontier():
    assert frontier([(0.1, 0.9), (np.nan, np.nan), (0.5, 0.5), (0.05, 0.2)]) == [2, 0]
    assert frontier([(np.nan, 0.3)]) == []


def test_the_ellipse_holds_the_true_mean_in_95_of_100_draws():
    rng, truth = np.random.default_rng(0), np.array([0.3, -1.0])
    mix = np.array([[2.0, 0.5], [0.0, 0.1]])
    for n in (4, 10):
        hits = 0
        for _ in range(2000):
            center, shape = ellipse(truth + rng.normal(size=(n, 2)) @ mix)
            hits += (truth - center) @ np.linalg.solve(shape, truth - center) <= 1
        assert 0.935 < hits / 2000 < 0.965
    assert ellipse(np.zeros((3, 2))) is None


def test_alpha_is_chosen_among_fluent_texts_on_one_half_and_scored_on_the_other():
    assert choose(np.array([[0.1, 0.9], [0.5, 0.8], [0.9, 0.3]]), 0.75) == 1
    assert choose(np.array([[0.1, 0.2], [0.5, 0.2]]), 0.75) == -1
    assert choose(np.array([[np.nan, 0.9], [0.5, 0.8], [0.6, np.nan]]), 0.75) == 1
    rng = np.random.default_rng(0)
    scores, base = rng.random((3, 4, 10, 2)), np.full((3, 10, 2), 0.6)
    (one, values), (each, each_values) = best_of(Grammar(), scores, base)
    changed = scores.copy()
    changed[:, :, 1::2] = rng.random((3, 4, 5, 2))  # what is scored may not choose
    assert best_of(Grammar(), changed, base)[0][0] == one and best_of(Grammar(), changed, base)[1][0] == each
    halves = scores[:, :, ::2].mean((0, 2))
    allowed = [number for number in range(4) if halves[number, 1] >= 0.5]
    assert one == max(allowed, key=lambda number: halves[number, 0])
    assert np.allclose(values, scores[:, one, 1::2].mean(1))
    assert np.allclose(each_values, [scores[c, n, 1::2].mean(0) if n >= 0 else base[c, 1::2].mean(0)
                                     for c, n in enumerate(each)])


def test_missing_scores_count_neither_as_nought_nor_as_fluent():
    scores, base = np.full((2, 2, 4, 2), np.nan), np.full((2, 4, 2), 1.5)
    scores[:, 0] = [1.0, 1.5]
    scores[0, 0, 1] = np.nan
    (one, values), _ = best_of(judge.Asked(Namespace(model="x")), scores, base)
    assert one == 0 and np.allclose(values, [1.0, 1.5])
    assert pareto.interval(np.array([np.nan, 2.0, 2.0])) == [2.0, 2.0, 2.0]


def test_a_row_is_about_the_prefixes_that_chose_nothing_with_intervals_over_concepts():
    """And about the next concept in the same texts; differences are paired, each line less its controls."""
    rng, asked = np.random.default_rng(0), []
    names, prefixes, ratios = "abc", [f"prefix {number}" for number in range(6)], [0.1, 0.2, 0.4]
    own, hashed = (lines.Line("x", source, (0, 1), "contrast") for source in ("own", "hash"))
    found = {line: [{"alphas": [ratio * (1 + place) for ratio in ratios], "texts": [
        [f"{line.source} {name} {ratio} {prefix}" for prefix in prefixes] for ratio in ratios]}
        for place, name in enumerate(names)] for line in (own, hashed)}
    values = {line: rng.random((3, 3, 6, 2)) for line in found}
    scores = pareto.Scores(values, {("x", 0): np.full((3, 1, 6, 2), 0.6)})

    def score(concept, pairs):
        asked.extend((concept.name, *pair) for pair in pairs)
        return [(ord(concept.name), None)] * len(pairs)
    rows, differences = pareto.summarise(Namespace(allowance=0.1, score=score), [Concept(name, (), [], [])
                                         for name in names], prefixes, found, {("x", 0): [[""] * 6]}, scores, ratios)
    tested, points = {}, {(line, number): values[line][:, number].mean((0, 1)) for line in found for number in range(3)}
    for line, row in zip(found, rows):
        tested[line], one = values[line][:, row["chosen"], 1::2].mean(1), row["chosen"]
        assert row["concept"] == pytest.approx(bootstrap(tested[line][:, 0], np.ones(3)))
        assert row["fluency"] == pytest.approx(bootstrap(tested[line][:, 1], np.ones(3)))
        assert one >= 0 and row["ratio"] == ratios[one] and row["alpha"] == pytest.approx(2 * ratios[one])
        for number, point in enumerate(row["curve"]):
            assert point["concept"] == pytest.approx(bootstrap(values[line][:, number, :, 0].mean(1), np.ones(3)))
            assert point["frontier"] is not any((other >= points[line, number]).all() and (
                other > points[line, number]).any() for other in points.values())
        assert row["other"][0] == pytest.approx(ord("b")) and asked[:9] == [
            (about, prefix, f"{line.source} {name} {row['ratio']} {prefix}")
            for name, about in zip(names, "bca") for prefix in prefixes[1::2]]
        del asked[:9]
    (difference,), paired = differences, tested[own][:, 0] - tested[hashed][:, 0]
    assert (difference["one"], difference["other"]) == (str(own), str(hashed)) and not asked
    assert difference["concept"] == pytest.approx(bootstrap(paired, np.ones(3)))


def test_no_label_of_the_picture_covers_another():
    axes = Figure(dpi=100).subplots()
    axes.set(xlim=(0, 1), ylim=(0, 1))
    pareto.draw_labels([(axes, point, text, "k") for point, text in (
        ((0.5, 0.5), "a"), ((0.5, 0.505), "b"), ((0.9, 0.5), "c"), ((0.5, 0.6), "d"), ((0.905, 0.505), "e"))])
    assert [text.get_text() for text in axes.texts] == ["a", "c", "d"]


# Concepts and prefixes


def test_a_hundred_concepts_have_names_and_words_of_their_own():
    found = read_concepts(pareto.HUNDRED)
    assert len(found) == len({name for name, _, _ in found}) == 100
    assert all(len(set(words)) == len(words) >= 4 for _, words, _ in found)


@pytest.mark.parametrize("name, content, sentence", [
    ("x.txt", "sea ship boat\n", "CONCEPT: WORD WORD"), ("x.txt", "sea:\n", "CONCEPT: WORD WORD"),
    ("x.txt", "# nothing\n", "no concept"), ("x.txt", "sea: a\nsea: b\n", "two of one name"),
    ("x.jsonl", "{}\n", "a concept is"), ("x.jsonl", '{"concept": "sea", "words": "ship"}\n', "a concept is"),
    ("x.jsonl", "[1]\n", "one JSON object a line"), ("x.jsonl", "", "empty"), ("x.txt", "", "empty"),
    ("x.jsonl", '{"concept": "sea", "words": ["ice cream"]}\n', "single words"), ("x.txt", "sea: ice-cream", "single"),
])
def test_a_wrong_file_of_concepts_is_answered(tmp_path, name, content, sentence):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=sentence):
        read_concepts(str(tmp_path / name))


def test_concepts_get_texts_of_the_training_data_that_have_their_words(folder, tmp_path, capsys):
    run = open_run(str(folder / "out" / "tiny"))
    (tmp_path / "some.txt").write_text("the sea: ship Boat sail\nnever: qqqqq\n")
    (tmp_path / "given.jsonl").write_text(checked_line({"concept": "own", "positive": ["a text"] * 8}))
    found, = text_concepts(run, str(tmp_path / "some.txt"))
    assert "left out" in capsys.readouterr().out and found.name == "the sea"
    wanted = {"ship", "boat", "sail"}
    assert 8 <= len(found.positive) <= 64 and all(
        wanted & set(text.lower().replace(".", " ").replace(",", " ").split()) for text in found.positive)
    assert found.negative and not any(
        wanted & set(text.lower().replace(".", " ").replace(",", " ").split()) for text in found.negative)
    given, = text_concepts(run, str(tmp_path / "given.jsonl"))
    assert given.positive == ["a text"] * 8 and given.words == ()


def test_toy_prefixes_tell_no_topic_and_are_of_other_documents_than_the_concepts():
    telling = {word for topic in toyworld.TOPICS for word in toyworld.concept_words(topic)}
    found = toy_prefixes(40, None, [TEXTS])
    assert len(set(found)) == 40 and not any(telling & set(prefix.replace(",", "").split()) for prefix in found)
    told = toy_prefixes(40, 8, [TEXTS])
    sea = set(toyworld.concept_words("sea"))
    assert all(len(prefix.split()) == 8 for prefix in told)
    assert not any(sea & set(prefix.replace(",", "").replace(".", "").split()) for prefix in told)


def test_prefixes_are_the_first_words_of_lines_or_of_validation_documents(folder, tmp_path):
    run = open_run(str(folder / "out" / "tiny"))
    (tmp_path / "news.tsv").write_text("".join(f"label\tone two three {number} five\n" for number in range(10)))
    assert text_prefixes(run, str(tmp_path / "news.tsv"), 2, 4) == ["one two three 0", "one two three 5"]
    with pytest.raises(UserError, match="10 different texts"):
        text_prefixes(run, str(tmp_path / "news.tsv"), 11, 4)
    found = text_prefixes(run, None, 3, 5)
    assert len(set(found)) == 3 and all(len(prefix.split()) == 5 for prefix in found)
    first = next(iter(toyworld.documents(0, 1))).text
    assert found[0] != " ".join(first.split()[:5])  # that one is for training


def test_the_news_give_prefixes(folder):
    path = os.path.join(SHARED, "agnews_test_prefixes.tsv")
    if not os.path.exists(path):
        pytest.skip("../shared/data is not here")
    found = text_prefixes(open_run(str(folder / "out" / "tiny")), path, 30, 8)
    assert len(set(found)) == 30 and all(len(prefix.split()) == 8 for prefix in found)


# The command

SMALL = ["--sae", "none", "--concepts", "sea,war", "--prefix-count", "4", "--tokens", "5", "--fit", "1", "--k", "4",
         "--ratios", "0.5,1"]


@pytest.fixture
def home(folder, tmp_path, monkeypatch):
    """A place of its own for what a command writes beside a run."""
    for name in ("tiny", "tiny_gpt"):
        os.makedirs(tmp_path / "out" / name)
        os.link(folder / "out" / name / "best.pt", tmp_path / "out" / name / "best.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out" / "tiny"


@pytest.fixture
def unseen(monkeypatch):
    """No picture, which takes a while and is not what the test is about."""
    monkeypatch.setattr(pareto, "draw", lambda *_: None)


def command(*arguments):
    pareto.main(["out/tiny", *arguments])


def test_the_whole_of_it_and_again_without_writing_anything_twice(home, capsys):
    arguments = [*SMALL, "--concepts", "sea,war,law,music", "--against", "out/tiny_gpt"]
    command(*arguments)
    printed = capsys.readouterr().out
    content = json.loads((home / "pareto.json").read_text())
    assert len(content["rows"]) == 22 and content["judge"] == "toy grammar" and "checksum" in content
    assert all(set(row) >= {"curve", "ratio", "alpha", "concept", "fluency", "other", "each", "n"} and row["n"] == 8
               for row in content["rows"])
    assert printed.count("less tiny") == len(content["differences"]) == 4 * 3 + 4 + 2 and "another seed" in printed
    texts = [json.loads(line) for line in (home / "pareto.jsonl").read_text().splitlines()]
    assert len(texts) == 22 * 4 * 2 * 4 + 2 * 2 * 2 * 4
    row = next(row for row in texts if row.get("source") == "own")
    assert row["scores"] == pareto.clean(Grammar().score(
        Concept("x", toyworld.concept_words(row["concept"]), [], []), [(row["prefix"], row["text"])])[0])
    assert (home / "pareto.png").stat().st_size > 10_000 and "war" in (home / "pareto.txt").read_text()
    kept = (home / "pareto_texts.jsonl").read_bytes()
    command(*arguments)
    assert capsys.readouterr().out == printed and (home / "pareto_texts.jsonl").read_bytes() == kept


def test_an_interrupted_run_goes_on_to_the_same_end(home, unseen, monkeypatch, capsys):
    command(*SMALL)
    whole, table = sorted((home / "pareto_texts.jsonl").read_text().splitlines()), capsys.readouterr().out
    (home / "pareto_texts.jsonl").unlink()
    written, count = lines.write_texts, itertools.count()

    def stops(*arguments, **options):
        if next(count) >= 10:
            raise KeyboardInterrupt
        return written(*arguments, **options)
    monkeypatch.setattr(lines, "write_texts", stops)
    with pytest.raises(KeyboardInterrupt):
        command(*SMALL)
    before = len((home / "pareto_texts.jsonl").read_text().splitlines())
    assert 10 <= before < len(whole)
    capsys.readouterr()
    again = []
    monkeypatch.setattr(lines, "write_texts",
                        lambda *arguments, **options: again.append(1) or written(*arguments, **options))
    command(*SMALL)
    assert len(again) == len(whole) - before and capsys.readouterr().out == table
    assert sorted((home / "pareto_texts.jsonl").read_text().splitlines()) == whole


def test_what_a_judge_costs_is_told_before_and_is_enough(home, unseen, monkeypatch, capsys):
    """What --dry-run promises is at least what is asked; nothing is asked by it, and nothing twice."""
    asked = []
    monkeypatch.setattr(judge.Judge, "request",
                        lambda self, question, stop: asked.append(question) or ("So. Rating: [[1.5]]", [10, 5]))
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    arguments = [*SMALL, "--judge", "openai:some-model"]
    command(*arguments, "--dry-run")
    told = int(capsys.readouterr().out.partition("would get ")[2].partition(" ")[0].replace(",", ""))
    assert not asked and not (home / "pareto_texts.jsonl").exists()
    command(*arguments)
    printed = capsys.readouterr().out
    assert 0.5 * told < len(asked) <= told and "concept, 0 to 2" in printed
    count = len(asked)
    command(*arguments)
    assert len(asked) == count
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.delenv("OPENAI_API_KEY")
    command(*arguments, "--dry-run")  # needs no key
    for path in home.iterdir():
        assert b"sk-very-secret" not in path.read_bytes()
    assert "sk-very-secret" not in printed


def test_a_wrong_key_ends_it_before_a_text_is_written(home, monkeypatch):
    def refuse(self, question, stop):
        raise UserError("does not take the key")
    monkeypatch.setattr(judge.Judge, "request", refuse)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    with pytest.raises(UserError, match="does not take the key"):
        command(*SMALL, "--judge", "openai:some-model")
    assert not (home / "pareto_texts.jsonl").exists()


def test_real_text_is_judged_offline_by_another_model(home, folder, tmp_path, capsys):
    if not (folder / "out" / "other").exists():
        make_run(folder, "other", "none", seed=5)
    (tmp_path / "some.txt").write_text("the sea: ship boat sail\nwar: army battle tank\nlaw: court judge\n")
    command(*SMALL[:2], *SMALL[4:], "--concepts", str(tmp_path / "some.txt"), "--prefix-words", "3", "--judge",
            f"run:{folder / 'out' / 'other'}")
    content = json.loads((home / "pareto.json").read_text())
    assert content["judge"].startswith("run:") and all(0 < row["fluency"][0] < 1 for row in content["rows"])
    assert "fairer" not in capsys.readouterr().out


@pytest.mark.parametrize("arguments, sentence", [
    (["--sae", "topk"], "trains them"), (["--sae", "x"], "there is no SAE"), (["--judge", "x"], "there is no judge"),
    (["--ratios", "1,0.5"], "must grow"), (["--ratios", "0,1"], "must grow"), (["--concepts", "boats"], "no concept"),
    (["--tokens", "32"], "fewer --tokens"), (["--dry-run"], "costs nothing"),
    (["--prefixes", "none.tsv"], "cannot read"), (["--concepts", "sea,sea"], "named twice"),
    (["--prefix-words", "1"], "different beginnings"), (["--concepts", ",".join(toyworld.TOPICS)], "fewer concepts"),
    (["--concepts", "none.jsonl"], "no concept"), (["--judge", "run:nowhere"], "no checkpoint"),
])
def test_wrong_arguments_are_answered_before_anything_is_written(home, arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        command("--against", "out/tiny_gpt", "--sae", "none", "--tokens", "8", *arguments)
    assert not (home / "pareto_texts.jsonl").exists()


# Noise


def test_noise_has_the_norm_that_was_asked_for_and_little_does_little(run):
    tokens = torch.randint(0, 2000, (3, 20), generator=torch.Generator().manual_seed(0))
    x = torch.randn(3, 20, 32)
    for kind in noise.KINDS:
        e = noise.make_vectors(x, kind, 0.3, torch.Generator().manual_seed(0))
        size = e.norm(dim=-1) / x.norm(dim=-1)
        assert torch.allclose(size[size > 0], torch.tensor(0.3)) and (size > 0).float().mean() > 0.9
    found = noise.measure(run.model, tokens, 0, (1e-3, 0.5))
    for kind in noise.KINDS:
        assert abs(found[kind, 1e-3, "kl", None][0]) < found[kind, 0.5, "kl", None][0] / 10
        for what in ("left", "change"):  # right after it was added, all of it is there
            assert found[kind, 0.5, what, 0] == pytest.approx([1, 1, 1], abs=1e-4)
        if run.config.bottleneck == "none":
            assert found[kind, 0.5, "passed", 1] == pytest.approx([1, 1, 1]) and (kind, 0.5, "kept", 1) not in found


def test_what_is_left_of_noise_is_what_two_passes_by_hand_give(folder):
    model = open_run(str(folder / "out" / "tiny")).model
    tokens = torch.randint(0, 2000, (4, 20), generator=torch.Generator().manual_seed(0))
    found = noise.measure(model, tokens, 0, (0.5,))
    with torch.no_grad():
        plain = read_activations(model, tokens, "block_out", [0, 2])
        e = noise.make_vectors(plain[0], "noise", 0.5, torch.Generator().manual_seed(0))
        seen, record, clean = {}, [], []

        def add(site, layer, x):
            x = x + e if (site, layer) == ("block_out", 0) else x
            seen[site, layer] = x
            return x
        model(tokens, patch=add, record=record)
        model(tokens, record=clean)
    change = seen["block_out", 2] - plain[2]
    assert found["noise", 0.5, "left", 2][0] == pytest.approx(((change * e).sum() / e.square().sum()).item(), rel=1e-4)
    assert found["noise", 0.5, "change", 2][0] == pytest.approx(
        (change.norm(dim=-1).sum() / e.norm(dim=-1).sum()).item(), rel=1e-4)
    of_y, of_h = (((record[2][at] - clean[2][at]).norm(dim=-1).sum(1) / clean[2][at].norm(dim=-1).sum(1)).sum()
                  for at in (1, 2))
    assert found["noise", 0.5, "passed", 2][0] == pytest.approx((of_y / of_h).item(), rel=1e-4)
    same = [len(set(old) & set(new)) / 10 for old, new in zip(clean[2][0].indices.flatten(0, 1).tolist(),
                                                             record[2][0].indices.flatten(0, 1).tolist())]
    assert found["noise", 0.5, "kept", 2][0] == pytest.approx(np.mean(same), rel=1e-4)


def test_the_command_for_noise(home, capsys):
    noise.main(["out/tiny", "--against", "out/tiny_gpt", "--tokens", "128"])
    printed = capsys.readouterr().out
    assert "tiny, untrained" in printed and (home / "noise.png").stat().st_size > 10_000
    assert json.loads((home / "noise.json").read_text())["n"] == 4
    with pytest.raises(UserError, match="no layer after"):
        noise.main(["out/tiny", "--layer", "2"])
