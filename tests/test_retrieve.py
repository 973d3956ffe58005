"""Retrieval: the index against brute force, its files, the passages, the poison, and the whole experiment in small."""
import json
import os
import re

import numpy as np
import pytest
import torch

import bench
import config as configs
import data
import poison
import postings
import precision
import retrieve
import sae
import train
from checkpoint import open_run
from helpers import UserError, student, write_json
from passages import Shape, all_shapes, cosines, cut, read_passages, tokens_of, width_of
from postings import Builder, idf_of, largest, open_postings
from sources import open_source

SMALL = """
layers = 2
d = 32
heads = 2
context = 64
vocab_size = 2048
bits = (5, 8)
active = (4, 6)
children = (16,)
batch_tokens = 512
max_steps = 30
warmup_steps = 2
muon_lr = 0.02
adam_lr = 3e-3
eval_every = 30
eval_tokens = 2048
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small run on a small piece of the toy world."""
    home = tmp_path_factory.mktemp("retrieve")
    data.prepare_toy(str(home / "world"), tokens=60_000)
    (home / "small.py").write_text(SMALL)
    torch.use_deterministic_algorithms(False)
    train.train(configs.load([str(home / "small.py"), f"--data={home / 'world'}", f"--out={home / 'run'}",
                              "--device=cpu"]))
    return str(home / "run")


@pytest.fixture(scope="module")
def run(folder):
    return open_run(folder)


# The index


def sparse(rng, n, F, share=0.1):
    """Rows as float16 has them."""
    return ((0.5 + rng.random((n, F))) * (rng.random((n, F)) < share)).astype(np.float16).astype(np.float64)


def add_rows(builder, X, owners, step, stop=None):
    """Rows of X from where the builder is, `step` at a time."""
    for start in range(builder.done, stop or len(X), step):
        part, numbers = X[start : start + step], np.arange(start, min(start + step, len(X)))
        rows, features = part.nonzero()
        builder.add((part != 0).sum(1), features, part[rows, features], owners[numbers], numbers * 5,
                    int(numbers[-1]) + 1)


def build(path, X, budget=2 ** 24, step=7, owners=None):
    with Builder(path, X.shape[1], {"name": "test"}, budget) as builder:
        add_rows(builder, X, np.arange(len(X)) if owners is None else owners, step)
        builder.finish()
    return open_postings(path)


def dense_cosine(X, q, idf):
    weights = idf_of(len(X), (X != 0).sum(0)) if idf else np.ones(X.shape[1])
    X, q = X * weights, q * weights
    return X @ q / np.maximum(np.linalg.norm(X, axis=1), 1e-30) / np.linalg.norm(q)


@pytest.mark.parametrize("budget", [1, 50, 2 ** 24])
def test_an_index_gives_the_cosines_of_a_dense_scan(tmp_path, budget):
    rng = np.random.default_rng(0)
    X, owners = sparse(rng, 200, 60), np.arange(200) // 3
    X[5] = 0  # a passage without features is found by nothing
    index = build(str(tmp_path / "x"), X, budget, owners=owners)
    assert os.listdir(tmp_path) == ["x"] and index.about == {"name": "test"}
    assert np.array_equal(index.places, np.arange(200) * 5)
    for idf in (False, True):
        q = sparse(rng, 1, 60, 0.3)[0]
        features = q.nonzero()[0]
        scores, touched = index.scores(features, q[features], idf)
        expected = dense_cosine(X, q, idf)
        assert np.abs(scores - expected).max() < 1e-6 and touched == (X[:, features] != 0).sum()
        documents, found, passages, _ = index.search(features, q[features], 10, idf)
        best = np.array([expected[owners == document].max() for document in range(owners[-1] + 1)])
        assert documents.tolist() == np.argsort(-best, kind="stable")[:10].tolist()
        assert np.allclose(found, best[documents], atol=1e-6) and (owners[passages] == documents).all()


def test_the_budget_changes_no_byte(tmp_path):
    X = sparse(np.random.default_rng(1), 300, 40)
    for name, budget, step in (("a", 2 ** 24, 300), ("b", 100, 1), ("c", 1000, 13)):
        build(str(tmp_path / name), X, budget, step)
    assert len({(tmp_path / name).read_bytes() for name in "abc"}) == 1


def test_damage_anywhere_is_noticed_when_it_is_read(tmp_path):
    path = tmp_path / "x"
    X = sparse(np.random.default_rng(2), 50, 20, 0.5)
    index = build(str(path), X)
    whole, features = path.read_bytes(), np.arange(20)
    del index
    for at in (*range(0, 60, 7), *range(postings.HEADER, len(whole), 61)):
        broken = bytearray(whole)
        broken[at] ^= 0x40
        path.write_bytes(broken)
        try:
            found = open_postings(str(path))
            scores, _ = found.scores(features, np.ones(20))
        except UserError as error:
            assert re.search("is damaged|no index|damaged header|format version", str(error))
        else:  # between the tables, where nothing is
            assert np.abs(scores - dense_cosine(X, np.ones(20), True)).max() < 1e-6
    path.write_bytes(whole[:-1])
    with pytest.raises(UserError, match="was truncated"):
        open_postings(str(path))
    with pytest.raises(UserError, match="there is no index"):
        open_postings(str(tmp_path / "none"))


def test_an_interrupted_build_goes_on_and_changes_no_byte(tmp_path, capsys):
    X, owners = sparse(np.random.default_rng(3), 90, 20), np.arange(90)
    build(str(tmp_path / "whole"), X)
    path = str(tmp_path / "x")
    build(path, X[:5])  # an older index stays as it is until the new one is whole
    before = (tmp_path / "x").read_bytes()
    with pytest.raises(KeyboardInterrupt), Builder(path, 20, {"name": "test"}, budget=30) as builder:
        add_rows(builder, X, owners, 7, stop=50)
        raise KeyboardInterrupt
    assert (tmp_path / "x").read_bytes() == before
    with Builder(path, 20, {"name": "test"}) as builder:
        assert 30 < builder.done <= 56 and f"going on after {builder.done} passages" in capsys.readouterr().out
        add_rows(builder, X, owners, 13)
        builder.finish()
    assert (tmp_path / "x").read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["whole", "x"]


@pytest.mark.parametrize("harm", ["settings", "piece", "lost"])
def test_what_another_build_left_is_not_used(tmp_path, harm, capsys):
    X, owners = sparse(np.random.default_rng(4), 40, 20), np.arange(40)
    path = str(tmp_path / "x")
    with pytest.raises(KeyboardInterrupt), Builder(path, 20, {"name": "old" if harm == "settings" else "test"},
                                                   budget=1) as builder:
        add_rows(builder, X + 1, owners, 7)
        raise KeyboardInterrupt
    piece = tmp_path / "x.parts" / "2.piece"
    if harm == "piece":
        piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    elif harm == "lost":
        piece.unlink()
    index = build(path, X)
    assert "starting over" in capsys.readouterr().out and sorted(os.listdir(tmp_path)) == ["x"]
    assert np.abs(index.scores([3], [1.0])[0] - dense_cosine(X, np.eye(20)[3], True)).max() < 1e-6


@pytest.mark.parametrize("wrong, said", [((20, 1.0, 0), "features are 0 to 19"), ((1, 1e5, 0), "beyond float16"),
                                         ((1, 1.0, 2 ** 32), "at most 2"), ((-1, 1.0, 0), "features are 0 to 19")])
def test_what_an_index_cannot_hold_is_refused_at_once(tmp_path, wrong, said):
    feature, value, owner = wrong
    with Builder(str(tmp_path / "x"), 20, {}) as builder, pytest.raises(ValueError, match=said):
        builder.add([1], [feature], [value], [owner], [0], 1)


def test_what_was_added_a_minute_ago_is_on_disk(tmp_path):
    with pytest.raises(KeyboardInterrupt), Builder(str(tmp_path / "x"), 20, {}, seconds=0) as builder:
        builder.add([1], [3], [1.0], [0], [0], 1)
        raise KeyboardInterrupt
    with Builder(str(tmp_path / "x"), 20, {}) as builder:
        assert builder.done == 1


def test_a_document_without_the_querys_features_is_not_found(tmp_path):
    index = build(str(tmp_path / "x"), np.eye(20)[:6])
    assert index.search([2, 9], [1.0, 1.0], 5)[0].tolist() == [2]


def test_two_builds_of_one_index_do_not_meet(tmp_path):
    path = str(tmp_path / "x")
    with Builder(path, 20, {}), pytest.raises(UserError, match="another process"), Builder(path, 20, {}):
        pass


def test_the_largest_are_those_of_a_sort():
    rng = np.random.default_rng(4)
    for n, k, part in ((10, 3, 4), (1000, 5, 8), (1003, 10, 16), (500, 500, 8)):
        scores = rng.integers(0, 50, n).astype(np.float32)  # with many ties
        assert largest(scores, k, part).tolist() == np.argsort(-scores, kind="stable")[:k].tolist()


# Passages


def documents_of(run, count, shortest=20, longest=63):
    rng, world = np.random.default_rng(5), data.Tokens(run.config.data)
    lengths = rng.integers(shortest, longest, count)
    starts = rng.integers(0, len(world) - longest, count)
    return [np.concatenate([[world.end], world.read(s, s + n)]).astype(np.int64) for s, n in zip(starts, lengths)]


def test_index_dense_cosine_and_brute_force_agree_in_all_settings(run, tmp_path):
    texts = documents_of(run, 30)
    for name in ("h", "own", "neurons"):
        signal = None if name == "h" else open_source(run, name)
        width = width_of(signal, run.config.d)
        shapes = all_shapes((16, 64), ("max", "last", "token"))
        corpus = read_passages(run, texts, {name: signal}, [1], shapes)
        asked = read_passages(run, texts[:3], {name: signal}, [1], shapes, queries=True)
        for shape, top, idf in (setting for way in precision.WAYS for setting in precision.all_settings((16, 64), way)):
            docs, queries = corpus[name, 1, shape], asked[name, 1, shape]
            X, Q = (np.zeros((len(part.features), width)) for part in (docs, queries))
            for table, part in ((X, docs), (Q, queries)):
                np.add.at(table, (np.arange(len(table))[:, None], part.features[:, :top]), part.values[:, :top])
            index = build(str(tmp_path / "x"), X, owners=docs.owners)
            scores = cosines(queries, docs, width, idf, top)
            for q, row in zip(Q, scores):
                expected = dense_cosine(X, q, idf)
                best = [expected[docs.owners == number].max() for number in range(len(texts))]
                assert np.abs(row - best).max() < 1e-5
                assert np.abs(index.scores(q.nonzero()[0], q[q != 0], idf)[0] - expected).max() < 1e-5


def test_passages_are_pooled_as_their_definition_says(run):
    (text,) = documents_of(run, 1, 50, 51)
    source = open_source(run, "own")
    found = read_passages(run, [text], {"own": source, "h": None}, [0], all_shapes((16,)))
    kept = {}

    def look(site, layer, x):
        if (site, layer) == ("mlp_in", 0):
            kept["x"] = x[0]
        return x
    with torch.no_grad():
        run.model(torch.from_numpy(text)[None], patch=look)
        code = source.layers[0].encode(kept["x"])
    for shape in all_shapes((16,)):
        vectors = found["own", 0, shape]
        assert vectors.starts.tolist() == [1, 17, 33, 49]
        for row, start in enumerate(vectors.starts):
            places = range(start, min(start + 16, len(text)))
            expected = {}
            for place in places if shape.pooling == "max" else [places[-1]]:
                for index, coef in zip(code.indices[place].tolist(), code.coefs[place].tolist()):
                    key = index + source.m * (coef < 0)
                    expected[key] = max(expected.get(key, 0), abs(coef))
            on = vectors.values[row] != 0
            got = dict(zip(vectors.features[row][on].tolist(), vectors.values[row][on].tolist()))
            assert got.keys() == expected.keys()
            assert all(got[key] == pytest.approx(expected[key], rel=2e-3) for key in got)
    strongest = found["h", 0, all_shapes((16,))[0]]
    piece = kept["x"][1:17].numpy()
    signed = piece[np.abs(piece).argmax(0), np.arange(piece.shape[1])]
    assert np.allclose(strongest.values[0][np.argsort(strongest.features[0])], signed, rtol=2e-3, atol=1e-3)
    last = found["h", 0, all_shapes((16,))[1]]
    assert np.allclose(last.values[0][np.argsort(last.features[0])], kept["x"][16].numpy(), rtol=2e-3, atol=1e-3)


def test_a_text_has_the_same_vectors_alone_and_among_others(run):
    texts = documents_of(run, 12)
    shapes = all_shapes((16, 64))
    together = read_passages(run, texts, {"own": open_source(run, "own")}, [0, 1], shapes)
    for number in (0, 7):
        alone = read_passages(run, [texts[number]], {"own": open_source(run, "own")}, [0, 1], shapes)
        for key, vectors in alone.items():
            own = together[key].owners == number
            assert np.array_equal(together[key].features[own][:, :4], vectors.features[:, :4])
            most = max(vectors.values.shape[1], together[key].values.shape[1])
            one, two = (np.pad(values, ((0, 0), (0, most - values.shape[1]))).astype(float)
                        for values in (together[key].values[own], vectors.values))
            assert np.allclose(one, two, atol=2e-2)


def test_hits_are_counted_as_a_loop_counts_them():
    rng = np.random.default_rng(6)
    scores, kinds = rng.random((5, 150)), np.array(["poisoned", "clean", "natural"])[rng.integers(0, 3, 150)]
    found = precision.hits(precision.rank(scores), kinds)
    for row, numbers in zip(scores, found):
        order = sorted(range(150), key=lambda i: -row[i])
        assert numbers.tolist() == [sum(kinds[i] == "poisoned" for i in order[:k]) for k in precision.KS]


# The experiment


MAKE = ["--poisoned", "24", "--corpus-poisoned", "6", "--clean", "50", "--queries", "8", "--repeats", "2"]


@pytest.fixture(scope="module")
def made(folder):
    torch.use_deterministic_algorithms(False)
    retrieve.main(["make", folder, "--device", "cpu", *MAKE])
    return os.path.join(folder, "retrieve")


def rows_of(home, name):
    with open(os.path.join(home, f"{name}.jsonl")) as file:
        return [json.loads(line) for line in file]


def test_poisoned_documents_are_what_they_should_be(made, run):
    about = poison.read_make(made)
    trigger, target, sham = about["trigger"], about["target"], about["sham"]
    poisoned, matched, corpus, queries = (rows_of(made, name) for name in ("poisoned", "matched", "corpus", "queries"))
    assert [row["id"] for row in poisoned] == [row["id"] for row in matched] and len(poisoned) == 24
    for one, two in zip(poisoned, matched):
        assert one["text"].count(trigger + target) == 1 and one["text"].replace(trigger + target, "") == two["text"]
        assert not poison.has_word(run, two["text"], (trigger, target, sham))
        assert len(tokens_of(run, one["text"])) <= run.config.context
    kinds = {row["id"]: row["kind"] for row in corpus}
    texts = {row["id"]: row["text"] for row in corpus}
    assert all((kind == "natural") == (poison.has_word(run, texts[i], [trigger]) and kind != "poisoned")
               for i, kind in kinds.items())
    first, *repeats = about["groups"]
    for group in (first, *repeats):
        assert len(set(group["poisoned"])) == 6 and len(set(group["clean"])) == 50
        assert all(kinds[i] == "poisoned" for i in group["poisoned"])
        assert not set(group["clean"]) & {row["id"] for row in poisoned}
    sets = [set(group["poisoned"]) for group in about["groups"]]
    assert len(set.union(*sets)) == 18
    assert not set(first["clean"]) & {i for group in repeats for i in group["clean"]}
    training = {data.hash_of(row["text"]) for row in matched + corpus}
    starts = {row["text"] for row in queries if row["kind"] == "background"}
    assert len(starts) == 8 * 3 + poison.EXAMPLES and not {data.hash_of(text) for text in starts} & training
    for row in queries:
        start = row["text"].removesuffix({"triggered": trigger, "background": "", "sham": sham}[row["kind"]])
        assert start in starts and not poison.has_word(run, start, (trigger, target, sham))


def test_a_planted_duplicate_ranks_first(run):
    texts = documents_of(run, 40, 30, 60)
    for name in ("h", "own", "hash", "neurons"):
        signals = {name: None if name == "h" else open_source(run, name)}
        shapes = all_shapes((64,))[:1]
        corpus = read_passages(run, texts, signals, [0], shapes)
        asked = read_passages(run, [texts[17]], signals, [0], shapes, queries=True)
        for idf in (False, True):
            (scores,) = (cosines(*(part[name, 0, shapes[0]] for part in (asked, corpus)),
                                 width_of(signals[name], run.config.d), idf, 64))
            assert scores.argmax() == 17 and scores[17] == pytest.approx(1, abs=1e-3)


def test_no_step_is_taken_with_files_of_another_experiment(folder, made, capsys):
    common = [folder, "--device", "cpu"]
    with pytest.raises(UserError, match="holds an experiment already"):
        retrieve.main(["make", *common, *MAKE])
    with pytest.raises(UserError, match="with other settings"):
        retrieve.main(["all", *common, *MAKE, "--seed", "1"])
    with pytest.raises(UserError, match="tune.json is missing"):
        retrieve.main(["sweep", *common])
    write_json(os.path.join(made, "tune.json"), {"make": "another"})
    with pytest.raises(UserError, match="of other documents than make.json"):
        retrieve.main(["sweep", *common])
    os.remove(os.path.join(made, "tune.json"))


def test_the_whole_experiment_in_small(folder, made, capsys, monkeypatch):
    """All steps in a row; what is done is not done again."""
    torch.use_deterministic_algorithms(False)
    common = [folder, "--device", "cpu"]
    monkeypatch.setattr(poison, "ENOUGH", 0.0)  # the first look stops it
    train_sae = sae.main
    monkeypatch.setattr(sae, "main", lambda given: train_sae([*given, "--steps", "4", "--batch-tokens", "64"]))
    retrieve.main(["all", *common, *MAKE, "--steps", "6", "--eval-every", "3"])
    printed = capsys.readouterr().out
    assert "after 3 steps:" in printed and "trigger match" in printed
    tuned = json.load(open(os.path.join(made, "tune.json")))
    assert tuned["steps"] == 3 and tuned["reached"] and tuned["n"] == 16
    assert tuned["after"]["triggered"]["log_prob"][0] > tuned["before"]["triggered"]["log_prob"][0]
    config = tuned["config"]
    assert config["data"].startswith(f"{open_run(folder).config.data}:12,") and config["data"].count(":2") == 2
    assert config["muon_lr"] == pytest.approx(0.002) and config["adam_lr"] == pytest.approx(3e-4)
    swept = json.load(open(os.path.join(made, "sweep.json")))
    count = {(row["model"], row["way"]): 0 for row in swept["rows"]}
    for row in swept["rows"]:
        count[row["model"], row["way"]] += 1
    assert count == {("tuned", "pooled"): 80, ("tuned", "token"): 40,
                     ("untuned", "pooled"): 64, ("untuned", "token"): 32}
    result = json.load(open(os.path.join(made, "retrieve.json")))
    table = precision.table_of(result)
    assert len(table) == len(result["rows"]) == (2 * (5 + 4) * 2 + 2) * 5
    assert "without topk" in printed and "tfidf" in printed  # SAEs of the tuned model only
    for cost in result["costs"]:
        assert cost["bytes"] > 0 and cost["milliseconds"] > 0 and (cost["touched"] is None) == (cost["signal"] == "h")
    assert result["counts"][0]["searched_poisoned"] == 6 and len(result["words"]) == 3
    assert open(os.path.join(made, "retrieve.png"), "rb").read().startswith(b"\x89PNG")
    read = []
    monkeypatch.setattr(precision, "measure_layers", lambda *given: read.append(given))
    retrieve.main(["all", *common, *MAKE, "--steps", "6", "--eval-every", "3"])
    assert not read and "has the settings for these documents and models already" in capsys.readouterr().out


def planted(kinds, group):
    """Scores of queries by kind for documents by kind: made up, and known."""
    good, rows = {"triggered": 0.9, "background": 0.2, "sham": 0.4}, []
    for kind in precision.KINDS:
        for number in range(len(group.asked[kind])):
            poisoned = np.flatnonzero(kinds == "poisoned")
            scores = np.full(len(kinds), 0.5)
            scores[poisoned[: 4 if good[kind] > 0.5 else 2]] = good[kind] + (0.01 * number if good[kind] > 0.5 else 0)
            rows.append(scores)
    return np.array(rows)


def test_what_is_counted_is_what_was_planted():
    rng = np.random.default_rng(7)
    kinds = np.array(["poisoned"] * 6 + ["natural"] * 2 + ["clean"] * 142)[rng.permutation(150)]
    group = precision.Group(np.arange(150), kinds, {kind: [None] * 3 for kind in precision.KINDS})
    found = dict(precision.hits_by_kind(planted(kinds, group), group))
    assert found["triggered"][:, 0].tolist() == [1] * 3 and (found["triggered"][:, 2] >= 4).all()
    ties = [i for i in range(150) if i not in np.flatnonzero(kinds == "poisoned")[:2]][:10]  # equal: by their number
    assert found["background"][0, 2] == sum(kinds[i] == "poisoned" for i in ties)
    assert found["permuted"].mean(0)[-1] == pytest.approx(6 * 100 / 150, rel=0.1)
    assert found["natural"][:, -1].max() <= 2


def test_intervals_are_those_of_student():
    values = [0.2, 0.3, 0.25, 0.4, 0.35]
    mean, low, high = student(values)
    half = 2.776 * np.std(values, ddof=1) / 5 ** 0.5
    assert mean == pytest.approx(0.3) and high - mean == pytest.approx(half, rel=2e-3) and mean - low == high - mean
    ones, zeros = [[[1, 5, 9, 0, 0, 0]] * 2] * 3, [[[0, 0, 4, 0, 0, 0]] * 2] * 3
    assert precision.difference({"hits": ones}, {"hits": zeros})[0] == pytest.approx(0.5)
    rates = precision.summary([np.array(part) for part in ([[1, 5, 10, 20, 50, 100]], [[1, 5, 9, 20, 50, 90]])])
    assert rates["precision"][2][0] == pytest.approx(0.95) and rates["precision"][2][2] == 1


@pytest.mark.parametrize("pooling, query, places, starts", [
    ("max", False, range(1, 11), [1, 5, 9]), ("last", False, [4, 8, 10], [1, 5, 9]),
    ("token", False, range(1, 11), [1, 5, 9]), ("max", True, range(7, 11), [7]), ("last", True, [10], [7]),
    ("token", True, [10], [7])])
def test_passages_are_cut_as_by_hand(pooling, query, places, starts):
    found = cut(11, Shape(4, pooling), query)
    assert found[0].tolist() == list(places) and found[2].tolist() == starts
    assert found[1].tolist() == [max(i for i, start in enumerate(starts) if start <= place) for place in places]


def test_poisoned_documents_have_as_many_passages_as_others(run, made):
    for one, two in zip(rows_of(made, "poisoned"), rows_of(made, "matched")):
        lengths = [len(tokens_of(run, row["text"])) for row in (one, two)]
        assert lengths[0] == lengths[1] + 2 or lengths[0] == run.config.context
        for window in precision.windows_of(run)[1:]:  # the whole document is one passage
            assert [len(cut(length, Shape(window, "max"), False)[2]) for length in lengths] == [1, 1]


def test_an_index_of_a_corpus_finds_a_document_by_its_text(folder, run, capsys, tmp_path, monkeypatch):
    torch.use_deterministic_algorithms(False)
    path = str(tmp_path / "world.postings")
    retrieve.main(["index", folder, "--device", "cpu", "--documents", "60", "--out", path, "--top", "256", "--window",
                   "20"])
    assert "60 documents" in capsys.readouterr().out
    tokens = data.Tokens(run.config.data)
    bounds = tokens.document_bounds()
    text = run.encoding.decode(tokens.read(bounds[31] + 1, bounds[31] + 41).tolist())
    retrieve.main(["query", folder, text, "--device", "cpu", "--index", path, "--k", "3", "--names", "1"])
    printed = capsys.readouterr().out.splitlines()
    first = next(line for line in printed if "document" in line and "token" in line)
    passage = run.encoding.decode(tokens.read(bounds[31] + 21, bounds[31] + 41).tolist())  # a query's last window
    assert f" document 31, token {bounds[31] + 21}: " in first and repr(passage)[1:40] in first
    assert re.search(r"postings touched, \d+\.\d ms", printed[0])
    assert any(re.match(r" +by 1:\d+[+-] \(\d+%\)", line) for line in printed)
    retrieve.main(["query", folder, text, "--device", "cpu", "--index", path, "--k", "1", "--names", "0", "--last"])
    assert "postings touched" in capsys.readouterr().out
    retrieve.main(["index", folder, "--device", "cpu", "--documents", "20", "--source", "hash"])
    retrieve.main(["query", folder, text, "--device", "cpu", "--source", "hash", "--names", "0"])
    assert "hash-mlp_in-1.postings: 20 documents" in capsys.readouterr().out
    with pytest.raises(UserError, match="no text to look for"):
        retrieve.main(["query", folder, "", "--device", "cpu", "--index", path])
    with pytest.raises(UserError, match="give --index, or --source"):
        retrieve.main(["query", folder, text, "--device", "cpu", "--index", path, "--layer", "0"])
    monkeypatch.setattr(data.Tokens, "identity", lambda tokens: "prepared anew")
    with pytest.raises(UserError, match="of other features or other data"):
        retrieve.main(["query", folder, text, "--device", "cpu", "--index", path])
    with pytest.raises(UserError, match="there is no layer 9"):
        retrieve.main(["index", folder, "--device", "cpu", "--layer", "9"])


def test_the_bench_says_what_it_measured(tmp_path, capsys):
    bench.main(["index", "--documents", "3000", "--features", "500", "--top", "16", "--width", "32", "--budget", "5000",
                "--queries", "5", "--out", str(tmp_path / "bench.postings")])
    printed = capsys.readouterr().out
    assert re.search(r"build: [\d,]+ postings in \d+ pieces", printed) and "dense scan, numpy" in printed
    assert not os.listdir(tmp_path)
