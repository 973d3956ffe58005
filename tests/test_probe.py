"""Features against the truth, one by one and by SAEBench's measures: made to mean something, or nothing."""
import dataclasses
import functools
import json
import os

import numpy as np
import pytest
import torch

import data
import geometry
import interpret
import labels
import probe
import probe_tasks
import probing
import sample
import toyworld
import truth as truth_of
from checkpoint import open_run, save
from config import Config
from dpb import Code
from helpers import UserError
from measures import Columns
from model import GPT
from sources import Source, open_source
from tokenizer import load_tokenizer, pack_tokenizer


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Toy data, and a parity run with random weights."""
    folder = tmp_path_factory.mktemp("probe")
    data.prepare_toy(str(folder / "data"), tokens=60_000)
    config = Config(layers=2, d=32, heads=2, context=32, vocab_size=2048, bits=(5, 8), active=(4, 6), children=(16,),
                    data=str(folder / "data"), seed=1)
    os.makedirs(folder / "tiny")
    save(str(folder / "tiny" / "best.pt"),
         {"config": dataclasses.asdict(config), "tokenizer": pack_tokenizer(load_tokenizer(str(folder / "data"))),
          "model": GPT(config).state_dict(), "step": 0})
    return folder


@pytest.fixture
def run(world):
    return open_run(str(world / "tiny"))


@pytest.fixture
def truth(run):
    """Tokens (windows, T), and the groups of labels by name."""
    windows = data.Tokens(run.config.data, "train").windows(range(1500), 32)[:, :-1].numpy()
    return windows, {group.name: group for group in labels.groups_of(run.encoding, windows)}


@pytest.fixture(scope="module")
def tasks(world):
    run = open_run(str(world / "tiny"))
    return probe_tasks.toy_tasks(run.encoding, 64, n=4, paired=1)


def made(fires, strength=None, noise=200):
    """Firings of feature 7, on these tokens, and of others at random."""
    rng, N = np.random.default_rng(0), len(fires)
    at = np.flatnonzero(fires)
    ids = np.r_[np.full(len(at), 7), rng.integers(8, 40, noise)]
    tokens = np.r_[at, rng.integers(0, N, noise)]
    values = np.r_[np.full(len(at), 2.0) if strength is None else strength[at], rng.random(noise)]
    order = np.lexsort((-values, ids))
    return truth_of.Firings(ids[order], tokens[order], values[order])


def scores(given, group):
    """(F1 where it was chosen, F1 on unseen words, feature) by (label, half)."""
    return {(detail["label"], half): (detail["chosen"], truth_of.f1(counts.sum(0)), detail["feature"])
            for half in (0, 1) for detail, counts in truth_of.test(given, group, half)}


def test_labels_are_what_the_world_says(run, truth):
    windows, groups = truth
    text = np.array([sample.text_of(run.encoding, [token]).strip() for token in range(run.encoding.n_vocab)])
    words = text[windows.flatten()]
    assert {name: len(group.labels) for name, group in groups.items()}.items() >= {
        "topic": 32, "kind": 4, "class": 12, "pronoun": 2, "opinion": 2, "trait": 8, "town": 24}.items()
    sea, verb = groups["topic"].labels.index("sea"), groups["kind"].labels.index("verb")
    assert ((groups["topic"].label == sea) == np.isin(words, toyworld.concept_words("sea"))).all()
    assert set(words[groups["kind"].label == verb]) <= {word for topic in toyworld.TOPICS.values()
                                                        for word in topic["verb"]}
    job = groups["pronoun"]
    assert set(words[job.label == 0]) <= {name for name, share in toyworld.OCCUPATIONS.items() if share >= .8}
    assert ((job.unit >= 0) == (job.label >= 0)).all()
    spelt = groups["letter"]
    inside = np.flatnonzero(spelt.unit >= 0)
    assert len(inside) and (words[inside - 1] == "word").all()
    letters = np.array(spelt.labels)[spelt.label[inside]]
    assert all(words[at][0] == letter for at, letter, label in zip(inside, letters, spelt.label[inside]) if label >= 0)
    opinion = groups["opinion"]
    ends = np.flatnonzero(opinion.unit >= 0)
    assert len(ends) and all(word.startswith(".") for word in words[ends])
    for end in ends[:20]:
        start = max([at for at in range(end - 1, -1, -1) if words[at].startswith(".")][:1] or [0])
        kinds = ["good" if opinion.label[end] == 0 else "bad"]
        assert any(word in toyworld.WORDS[kinds[0]] for word in words[max(start, end // 32 * 32) : end])


def test_traits_and_towns_are_known_before_the_value(run, truth):
    windows, groups = truth
    text = np.array([sample.text_of(run.encoding, [token]).strip() for token in range(run.encoding.n_vocab)])
    words, (known, _) = text[windows.flatten()], toyworld.town_facts()
    trait, town = groups["trait"], groups["town"]
    at = np.flatnonzero(trait.unit >= 0)
    assert len(at) > 300 and set(at) == set(np.flatnonzero(town.label >= 0))
    for place in at:
        pair = town.labels[town.label[place]], trait.labels[trait.label[place]]
        assert known[pair] == words[place + 1] and words[place] in ("was", "chose")
    assert len(np.unique(trait.half[trait.unit[at]])) == 2
    for group in (trait, town):  # no pair in both halves, every label in both
        assert all(set(group.half[group.unit[at][group.label[at] == number]]) == {0, 1} for number in range(8))


def test_labels_of_english_text():
    words = [" The", " the", " cat", "s", ".", " It", " was", " 1", " May", "\n", " March", " march", " in", " Paris",
             '."', " of", " to", " and"]
    text = words + [f" {word}" for kind in ("month", "place") for word in labels.WORDS[kind]]
    number = {word: place for place, word in reversed(list(enumerate(text)))}
    said = [" The", " cat", "s", " was", " in", " Paris", '."', " It", " was", " March", " 1", ".", "\n", " The",
            " march"]
    form, word, start = labels.text_groups(text, np.array([[number[one] for one in said]]))
    assert [form.labels[label] for label in form.label] == [
        "capital", "small", "inside", "small", "small", "capital", "mark", "capital", "small", "capital", "digits",
        "mark", "space", "capital", "small"]
    named = [word.labels[label] if label >= 0 else None for label in word.label]
    assert named[9] == "month" and named[5] == "place" and named[14] is None and "day" not in word.labels
    assert np.flatnonzero(start.label == 0).tolist() == [7, 13]
    assert form.unit[9] == form.unit[14] and form.unit[0] == form.unit[13]  # March and march are one word
    for label in range(len(word.labels)):
        assert word.labels[label] in labels.WORDS


def test_halves_share_no_word_and_both_have_every_label(truth):
    windows, groups = truth
    for name in ("topic", "kind", "class"):
        group = groups[name]
        assert (group.unit >= 0).all()
        for number in range(len(group.labels)):
            units = np.unique(group.unit[group.label == number])
            assert set(group.half[units]) == {0, 1}, (name, group.labels[number])


def test_a_feature_of_a_class_is_found_and_holds_on_unseen_words(truth):
    _, groups = truth
    group = groups["kind"]
    found = scores(made(group.label == 2), group)
    assert found["adj", 0] == (1.0, 1.0, 7) == found["adj", 1]
    assert max(found["verb", 0][:2]) < 0.3


def test_a_feature_of_some_words_only_fails_on_the_others(truth):
    """As a hash of well-separated clusters does: it knows those that it has seen."""
    _, groups = truth
    group = groups["topic"]
    sea = group.labels.index("sea")
    known = (group.label == sea) & (group.half[group.unit] == 0)
    found = scores(made(known), group)
    assert found["sea", 0] == (1.0, 0.0, 7) and found["sea", 1][1] < 0.1


def test_the_threshold_is_chosen_with_the_feature(truth):
    _, groups = truth
    group = groups["class"]
    job = group.label == group.labels.index("job")
    strength = np.where(job, 3.0, 1.0)  # it fires on everything, but harder on jobs
    (detail, counts), *_ = (pair for pair in truth_of.test(made(np.ones_like(job), strength), group, 0)
                            if pair[0]["label"] == "job")
    assert detail["feature"] == 7 and detail["threshold"] == 3.0 and truth_of.f1(counts.sum(0)) == 1.0


def test_the_best_choice_is_that_of_trying_all(truth):
    rng = np.random.default_rng(1)
    given = made(rng.random(2000) < 0.2, rng.random(2000), noise=3000)
    given = given.select(given.tokens < 2000)
    label = rng.random(2000) < 0.3
    best = max((2 * label[fires].sum() / (len(fires) + label.sum()), feature, threshold)
               for feature in np.unique(given.ids) for threshold in given.strength[given.ids == feature]
               for fires in [given.tokens[(given.ids == feature) & (given.strength >= threshold)]])
    feature, threshold, score = truth_of.choose(given, label[given.tokens].astype(int), label.sum())
    assert score == pytest.approx(best[0]) and (feature, threshold) == best[1:]


def test_purity_of_known_contexts(truth):
    _, groups = truth
    group = groups["kind"]
    things, verbs = (np.flatnonzero(group.label == number)[:20] for number in (1, 3))
    mixed = np.r_[things[:15], verbs[:5]]
    given = truth_of.Firings(np.repeat([1, 2, 3], [20, 20, 5]), np.r_[things, mixed, verbs[:5]], np.ones(45))
    assert truth_of.purity(given, group) == (pytest.approx((1 + 0.75) / 2), 2)


def test_always_on_is_what_a_feature_gets_that_always_fires(truth):
    for group in truth[1].values():
        given = made(np.ones(len(group.unit)), noise=0)
        tested = [pair for half in (0, 1) for pair in truth_of.test(given, group, half)]
        for (detail, counts), expected in zip(tested, truth_of.always(group), strict=True):
            assert not detail["known"] or np.array_equal(counts, expected), (group.name, detail["label"])
    rows = {row["group"]: row for row, _ in truth_of.always_on(truth[1].values())}
    job = truth[1]["pronoun"]
    unseen = [(job.label == number) & (job.half[job.unit] == 1) for number in (0, 1)]  # what half 0 chose
    every = (job.unit >= 0) & (job.half[job.unit] == 1)
    for number, detail in enumerate(rows["pronoun"]["details"][:2]):
        share = unseen[number].sum() / every.sum()
        assert detail["f1"] == pytest.approx(2 * share / (1 + share))
        assert detail["words"][1] == len(set(job.unit[unseen[number]]))
    other = [len(set(job.unit[(job.label == number) & (job.half[job.unit] == 0)])) for number in (0, 1)]
    assert [detail["words"][0] for detail in rows["pronoun"]["details"][:2]] == other
    assert rows["pronoun"]["words"] == [sum(other), len(set(job.unit[every]))]
    assert rows["pronoun"]["f1"] == pytest.approx(np.mean([detail["f1"] for detail in rows["pronoun"]["details"]]))


def test_features_that_fire_nearly_always_are_not_above_their_controls(truth):
    """As those of a model that was hardly trained: above the hash, and below a feature that always fires."""
    group, draws = truth[1]["pronoun"], np.linspace(-0.01, 0.01, 400)
    fires, others = (0.66, 0.66 + draws), {"own": 0.59, "hash-mlp_in": 0.11}
    drawn = {("tiny", name, layer, "pronoun"): (value, value + draws) for name, value in others.items()
             for layer in (0, 1)} | {("tiny", truth_of.ALWAYS, None, "pronoun"): fires}
    (row,) = truth_of.differences_of(drawn, [group], "tiny")
    assert row["difference"] == pytest.approx([0.48] * 3) and row["larger"] == truth_of.ALWAYS
    assert row["above"] == row["less_always"] == pytest.approx([-0.07] * 3)
    drawn["tiny", truth_of.ALWAYS, None, "pronoun"] = 0.05, 0.05 + draws
    (row,) = truth_of.differences_of(drawn, [group], "tiny")
    assert row["above"] == row["difference"] and row["larger"] == "hash"
    drawn["tiny", truth_of.ALWAYS, None, "pronoun"] = 0.1, 0.1 - 10 * draws  # now the one is larger, now the other
    (row,) = truth_of.differences_of(drawn, [group], "tiny")
    assert row["above"][0] == pytest.approx(0.48) and row["above"][1] < row["difference"][1] - 0.05


def test_the_command_says_what_it_found(world, capsys):
    probe.main(["truth", str(world / "tiny"), "--tokens", "2048"])
    text = capsys.readouterr().out
    assert "own less hash, less always on" in text and text.count("random weights") == 2
    found = json.loads((world / "tiny" / "truth.json").read_text())
    rows = found["rows"]
    assert {row["source"] for row in rows} == {"own", "hash-mlp_in", "neurons-mlp_in", "random weights", "always on"}
    assert len(rows) == (4 * 2 + 1) * 8 and all(0 <= row["low"] <= row["high"] <= 1 for row in rows)
    for row in rows:
        (control,) = (other for other in rows if (other["source"], other["group"]) == ("always on", row["group"]))
        assert (row["always"], row["words"]) == (control["f1"], control["words"])
        assert [detail["words"] for detail in row["details"]] == [detail["words"] for detail in control["details"]]
    assert all(row["above"][0] <= min(row["difference"][0], row["less_always"][0]) + 1e-9
               for row in found["differences"])
    assert os.path.exists(world / "tiny" / "truth.png")
    with pytest.raises(SystemExit):
        probe.main(["truth"])
    for sources, sentence in (("nothing", "there is no source 'nothing'"), ("own,hesh", "did you mean 'hash'"),
                              ("", "there is no source ''"), ("topk", "no run here has the source topk")):
        with pytest.raises(UserError, match=sentence):
            probe.main(["truth", str(world / "tiny"), "--tokens", "512", "--sources", sources])


def test_features_get_names(world, run, capsys, monkeypatch):
    sample.main([str(world / "tiny"), "--top-features", "--top", "3", "--index-tokens", "16384"])
    text = capsys.readouterr().out
    assert "unseen words" in text and "stand for nothing" in text
    tokens = data.Tokens(run.config.data, "val")
    windows = tokens.windows(range(40), 32)[:, :-1].numpy()
    sea = np.isin(windows.flatten(), [run.encoding.encode_single_token(f" {word}")
                                      for word in toyworld.WORDS["place"]])
    line = truth_of.describe_feature(run, tokens, 40 * 32, np.flatnonzero(sea))
    assert "class place, precision 1.00, recall 1.00" in line
    monkeypatch.setattr(toyworld, "TOKEN_PATTERN", "another")
    token = run.encoding.encode_single_token(" the")
    at = np.flatnonzero(windows.flatten() == token)
    line = truth_of.describe_feature(run, tokens, 40 * 32, at)
    assert line.startswith(f"most specific to: ' the' ({len(at)} of {len(at)})")
    with pytest.raises(UserError, match="toy world"):
        sample.main([str(world / "tiny"), "--top-features"])
    probe.main(["truth", str(world / "tiny"), "--sources", "own", "--tokens", "2048"])
    assert "purity: form, word, start" in capsys.readouterr().out


def test_random_weights_are_those_of_an_untrained_model(run):
    with torch.no_grad():
        run.model.embedding.weight += 1  # as if it were trained
    untrained, source = truth_of.random_weights(run)
    assert torch.equal(untrained.model.embedding.weight, GPT(run.config).embedding.weight)
    assert source.name == "random weights" and sorted(source.layers) == [0, 1]
    assert not torch.equal(source.layers[0].bottleneck.mean, open_source(run, "hash").layers[0].bottleneck.mean)


# Tasks


def test_texts_are_of_the_toy_world_and_say_what_their_class_says(run, tasks):
    def text(row):
        return run.encoding.decode(list(tasks.texts[row].tokens[tasks.texts[row].start:])).strip()
    sets = {task.name: task for task in tasks.sets}
    assert {name: len(task.classes) for name, task in sets.items()} == {
        "topic": 32, "job": 30, "gender": 2, "letter": 16, "opinion": 2, "town": 24, "trait": 8, "value": 12}
    for task in sets.values():
        assert not set(task.train.flatten()) & set(task.test.flatten())  # no text is learnt from and tested on
        half = task.train.shape[1] // 2
        for rows in (task.train, task.test):
            for own in rows:
                assert len(set(own)) == len(own) and not set(own[: len(own) // 2]) & set(own[len(own) // 2:])
        for number, name in enumerate(task.classes[: len(task.train)]):
            for row in task.train[number, :half][:3]:
                words = text(row).replace(".", "").replace(",", "").split()
                if task.name == "topic":
                    assert set(words) & set(toyworld.concept_words(name)) and toyworld.well_formed(text(row))
                elif task.name in ("job", "town", "trait"):
                    assert name in words
                elif task.name == "letter":
                    assert words[words.index("word") + 1][0] == name and words[-1] in ("letter", "is")
                elif task.name == "value":
                    known, _ = toyworld.town_facts()
                    town, trait = (next(w for w in words if w in toyworld.WORDS[kind]) for kind in ("town", "trait"))
                    assert known[town, trait] == name and name not in words
    people = sets["gender"].train[0]
    names = [{*text(row).replace(",", " ").replace(".", " ").split()} for row in people]
    assert all(words & set(toyworld.HE) and not words & set(toyworld.SHE) for words in names[: len(names) // 2])
    assert all(words & set(toyworld.SHE) for words in names[len(names) // 2:])


def test_pairs_are_confounded_as_far_as_they_should_be(run):
    for correlation in (1.0, 0.75):
        tasks = probe_tasks.toy_tasks(run.encoding, 64, n=4, correlation=correlation)
        pair = tasks.pairs[0]
        texts = [run.encoding.decode(list(text.tokens[text.start:])) for text in
                 (tasks.texts[row] for row in pair.train["both"])]
        jobs, half = pair.name.split(", "), len(texts) // 2
        men = [any(name in text for name in toyworld.HE) for text in texts]
        assert all(jobs[0] in text for text in texts[:half]) and all(jobs[1] in text for text in texts[half:])
        assert np.mean(men[:half]) == correlation and np.mean(men[half:]) == pytest.approx(1 - correlation)
        for name in ("job", "gender"):  # where they are mixed, one says nothing about the other
            rows, other = pair.test[name], pair.test["gender" if name == "job" else "job"]
            positives = set(rows[: len(rows) // 2])
            assert len(positives & set(other[: len(other) // 2])) == len(positives) // 2
        assert not set(pair.test["job"]) & set(pair.train["both"])
    names = [pair.name.split(", ") for pair in tasks.pairs]
    assert sorted(sum(names, [])) == sorted(15 * list(toyworld.OCCUPATIONS)) and len(set(map(tuple, names))) == 225
    assert len({job for pair in names[:15] for job in pair}) == 30  # the first 15 are about different professions


def test_what_does_not_count_is_not_read(run, tasks):
    """Of words only the last token counts; leads and end-of-texts never do; no batch has padding."""
    words = tasks.words[0]
    texts = [text for text in (tasks.texts[row] for row in (*words.rows[:3], *tasks.pairs[0].test["job"], 0))
             if len(text.tokens) <= 32]
    read = probing.read_texts(run, texts, "mlp_in", [0, 1], batch_tokens=64)
    for number, text in enumerate(texts):
        found = {}

        def look(site, layer, x, found=found):
            found[site, layer] = x
            return x
        with torch.no_grad():
            run.model.hidden(torch.tensor([text.tokens]), patch=look)
        expected = found["mlp_in", 1][0, text.start:]
        assert read.count[number] == len(expected) and (number > 2 or len(expected) == 1)
        np.testing.assert_allclose(read.means[1][number], expected.double().mean(0).numpy(), atol=1e-5)
        np.testing.assert_allclose(read.tokens[1][read.owner == number].numpy(), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", ["own", "hash", "neurons"])
def test_mean_features_are_those_of_a_dense_matrix_and_add_up_to_the_output(run, tasks, name):
    source = open_source(run, name)
    texts = tasks.texts[:20]
    read = probing.read_texts(run, texts, "mlp_in", [1])
    x, part = read.tokens[1], source.layers[1]
    ids, values = probing.activations(source, 1, x)
    dense = np.zeros((len(x), 2 * source.m))
    np.put_along_axis(dense, ids, values, 1)
    X = probing.mean_features(source, 1, read, part_tokens=37)
    for row in range(20):
        expected = dense[read.owner == row].mean(0)
        np.testing.assert_allclose(X.take([row]).dense(range(2 * source.m))[0], expected, atol=1e-5)
    rows, norms = probing.decoder_dots(source, 1, np.eye(32), part=50)
    y = part.decode(part.encode(x), like=x) if name != "neurons" else part.decode(part.encode(x))
    np.testing.assert_allclose(dense @ rows, y.detach().numpy(), atol=1e-4)
    np.testing.assert_allclose(norms, 1, atol=1e-5)


# Measures on what is made


class Made:
    """A source whose codes are given: token t has the features that its first coordinates spell."""

    def __init__(self, d):
        self.d = d

    def encode(self, x):
        strength, indices = x[:, : self.d].clamp(min=0).topk(4)
        return Code(indices, strength)

    def decode(self, code, like=None):
        return torch.zeros(*code.indices.shape[:-1], self.d).scatter_add(-1, code.indices, code.coefs)


def made_read(tasks, d=64, seed=0):
    """Activations in which coordinate c of a text is on where it is of topic c; all else is small noise."""
    rng, n = np.random.default_rng(seed), len(tasks.texts)
    mean = 0.05 * rng.random((n, d))
    topic = tasks.sets[0]
    half, half2 = topic.train.shape[1] // 2, topic.test.shape[1] // 2
    for number in range(32):
        mean[topic.train[number, :half], number] = mean[topic.test[number, :half2], number] = 1
    mean = mean.astype(np.float32)
    return probing.Read({0: torch.from_numpy(mean)}, {0: mean.astype(float)}, np.arange(n), np.ones(n, int))


def test_features_of_topics_are_found_removed_and_nothing_else_is(tasks):
    read, source = made_read(tasks), Source("sae", "made", "", "mlp_in", 64, {0: Made(64)})
    only = tasks._replace(sets=tasks.sets[:1], pairs=())
    X = probing.mean_features(source, 0, read)
    found = dict(probing.measure_probing(X, only.sets))
    assert found["probe 1"].value == 1 and found["probe 1"].n == only.sets[0].test.size
    assert probing.measure_all(X, only.sets).value > 0.95
    tpp = dict(probing.measure_tpp(X, source, 0, only, probing.fit_probes(read.means[0], only)))
    assert tpp["tpp"].value > 0.4 and tpp["tpp 2"].value > 0.4  # all positives become negatives
    rng = np.random.default_rng(1)
    shuffled = X._replace(rows=rng.integers(0, X.n, len(X.rows)))  # features that say nothing about their text
    shuffled = Columns.of(shuffled.rows, shuffled.columns, shuffled.values, X.n, X.m)
    nothing = dict(probing.measure_probing(shuffled, only.sets))["probe 1"]
    assert np.quantile(nothing.draws, 0.01) < 0.6 and abs(nothing.value - 0.5) < 0.1


def test_spurious_correlation_is_removed_by_the_features_of_gender(tasks):
    """A feature for each profession, one for each gender, and a probe that learnt both: without gender it is right."""
    mean = 0.02 * np.random.default_rng(0).random((len(tasks.texts), 64))
    for number, pair in enumerate(tasks.pairs):
        for part in (pair.train, pair.test):
            for offset, name in ((0, "job"), (2, "gender")):
                for side, rows in enumerate(np.split(part[name], 2)):
                    mean[rows, 4 * number + offset + side] = 1 if name == "gender" else 0.6
        for side, rows in enumerate(np.split(pair.train["both"], 2)):
            mean[rows, 4 * number + side], mean[rows, 4 * number + 2 + side] = 0.6, 1
    mean = mean.astype(np.float32)
    n = len(mean)
    read = probing.Read({0: torch.from_numpy(mean)}, {0: mean.astype(float)}, np.arange(n), np.ones(n, int))
    source = Source("sae", "made", "", "mlp_in", 64, {0: Made(64)})
    X, probes = probing.mean_features(source, 0, read), probing.fit_probes(read.means[0], tasks)
    assert set(probes.asked) == {"job"}
    found = dict(probing.measure_scr(X, source, 0, tasks, probes))
    original, changed, clean = found["scr 2"].detail["accuracies"]
    assert original < 0.6 and clean == 1 and changed > 0.95 and found["scr 2"].value > 0.9
    low, high = np.quantile(found["scr 2"].draws, [0.025, 0.975])
    assert low <= found["scr 2"].value <= high


def test_an_interval_is_that_of_as_many_texts():
    """Of accuracies: that of the normal approximation. A text that two tasks ask about is one text, not two."""
    rng, n = np.random.default_rng(0), 400
    own, right = np.arange(2 * n).reshape(2, n), rng.random((2, n)) < 0.8
    wide = 1.96 * np.sqrt(0.16 / n)  # half of the interval of one task
    for rows, values, expected in ((own[:1], right[:1], wide), (own, right, wide / np.sqrt(2)),
                                   (own[[0, 0]], right[[0, 0]], wide)):
        drawn = probing.draw_texts(values, rows, 2 * n)
        low, high = np.quantile(drawn, [0.025, 0.975])
        assert (high - low) / 2 == pytest.approx(expected, rel=0.15)
        assert drawn.mean() == pytest.approx(values.mean(), abs=0.005)
    rows = np.r_[rng.permutation(50), 50 + rng.permutation(50)][None]  # who says yes to all is right in half, always
    np.testing.assert_allclose(probing.draw_texts(np.arange(100)[None] < 50, rows, 100), 0.5, atol=1e-6)


def test_tasks_that_are_read_one_after_another_count_as_they_would_together(tasks):
    read, source = made_read(tasks), Source("sae", "made", "", "mlp_in", 64, {0: Made(64)})
    X = probing.mean_features(source, 0, read)
    parts = [dict(probing.measure_probing(X, tasks.sets[part]))["probe 2"] for part in (slice(3), slice(3, None))]
    whole, both = dict(probing.measure_probing(X, tasks.sets))["probe 2"], probing.merged(parts)
    assert both.value == pytest.approx(whole.value) and (both.n, both.detail) == (whole.n, whole.detail)
    np.testing.assert_allclose(both.draws, whole.draws)


def test_absorption_is_found_where_a_words_own_feature_stands_for_its_class():
    """96 words of 2 classes, d = 128. Class 0 has a feature of its own; that of every third word is silent, and a
    feature of the word alone, along the probe, fires instead."""
    rng = np.random.default_rng(0)
    words, label = np.repeat(np.arange(96), 2), np.repeat(np.arange(96) % 2, 2)
    x = np.zeros((192, 128), np.float32)
    x[np.arange(192), label] = 1
    x[:, 2:] += 0.02 * rng.standard_normal((192, 126))
    read = probing.Read({0: torch.from_numpy(x)}, {0: x.astype(float)}, np.arange(192), np.ones(192, int))
    of = probe_tasks.Words("class", ("a", "b"), np.arange(192), words, label)
    folds = list(probing.fold_words(read.means[0], of))
    assert all((fold.f1 == 1).all() for fold in folds)

    class Absorbing:
        """Feature 0, 1: the classes. Feature 2 + word: of a word, in the direction of its class."""
        rows = torch.zeros(98, 128)
        rows[[0, 1], [0, 1]] = 1
        rows[np.arange(2, 98), np.arange(96) % 2] = 1
        silent = ()

        def encode(self, x):
            place = torch.arange(len(x))
            word, own = torch.from_numpy(words), torch.from_numpy(label)
            absorbed = torch.tensor([w in self.silent for w in words.tolist()])[place]
            return Code(torch.where(absorbed, 2 + word, own)[:, None], x[place, own][:, None])

        def decode(self, code, like=None):
            return (self.rows[code.indices] * code.coefs[..., None]).sum(-2)

    for silent, expected in (((), 0.0), (range(0, 96, 3), 1 / 3)):
        part = Absorbing()
        part.silent = set(silent)
        source = Source("sae", "made", "", "mlp_in", 98, {0: part})
        X = probing.mean_features(source, 0, read)
        found = dict(probing.measure_absorption(X, source, 0, folds))
        assert found["absorption class"].value == pytest.approx(expected, abs=0.02)
        assert found["absorption class scaled"].value == pytest.approx(expected, abs=0.02)
        assert found["absorption class"].detail["full"] == pytest.approx(expected, abs=0.02)


# Explaining


def test_a_feature_of_a_class_is_explained_and_a_random_one_is_not(run, truth):
    windows, groups = truth
    tokens = windows.flatten()
    names = [sample.text_of(run.encoding, [token]).strip() for token in range(run.encoding.n_vocab)]
    job = groups["class"].label == groups["class"].labels.index("job")
    rng = np.random.default_rng(0)
    rows = {}
    for name, fires in (("job", job), ("random", rng.random(len(tokens)) < job.mean())):
        at = np.flatnonzero(fires)
        strength = rng.random(len(at)).astype(np.float32) + 0.1
        order = np.argsort(-strength, kind="stable")
        given = truth_of.Firings(np.zeros(len(at), int), at[order], strength[order])
        one, = interpret.gather(given, windows.shape, 5)
        assert one.shown.shape == (15, 21) and one.asked.shape == (14, 21) and one.held.sum() == 4
        assert one.shown_fires[:, 10].all() and (one.shown_fires == fires[one.shown]).mean() > 0.99
        rows[name] = interpret.scored(one, *interpret.explain_by_labels(one, tokens, groups.values(), names))
        middle = one.shown[:, 10]
        assert not {*middle.tolist()} & {*one.asked[one.held][:, 10].tolist()}
    assert rows["job"]["explanation"] == "class job" and rows["job"]["true"] == 1 > rows["random"]["true"]


def test_a_judge_is_told_and_asked_and_what_it_does_not_say_is_missing(run, truth):
    windows, _ = truth
    at = np.flatnonzero(np.arange(windows.size) % 40 == 15)
    given = truth_of.Firings(np.repeat([3, 5], len(at)), np.tile(at, 2), np.tile(np.linspace(2, 1, len(at)), 2))
    found = list(interpret.gather(given, windows.shape, 5))
    asked = []

    class Judge:
        def ask(self, questions):
            asked.append(questions)
            return ["It fires on ships.", "It fires on cars."] if len(asked) == 1 else ["1, 2 and 14.", "who knows"]
    first, second = interpret.explain_by_judge(found, windows.flatten(), run.encoding, Judge())
    assert first[0] == "ships" and np.flatnonzero(first[1]).tolist() == [0, 1, 13] and second == ("cars", None)
    assert "<<" in asked[0][0][1]["content"] and "<<" not in asked[1][0][1]["content"]
    assert "It fires on ships." in asked[1][0][1]["content"] and "14. " in asked[1][0][1]["content"]
    assert interpret.scored(found[1], *second)["score"] is None
    assert not interpret.read_numbers("None", 14).any() and interpret.read_numbers("", 14) is None


# Real text, and the commands


def test_texts_of_ones_own(world, tmp_path, capsys):
    for name, word in (("positive", "ship"), ("negative", "priest")):
        os.makedirs(tmp_path / name)
        for number in range(12):
            (tmp_path / name / f"{number}.txt").write_text(f"The {word} came to the {toyworld.WORDS['place'][number]}.")
    probe.main([str(world / "tiny"), "--positive", str(tmp_path / "positive"), "--negative", str(tmp_path / "negative"),
                "--features", "3", "--sources", "own"])
    assert "1 tasks in 1 sets" in capsys.readouterr().out
    with pytest.raises(UserError, match="both --positive"):
        probe.main([str(world / "tiny"), "--positive", str(tmp_path)])
    with pytest.raises(UserError, match="holds 0 texts"):
        probe.main([str(world / "tiny"), "--positive", str(tmp_path), "--negative", str(tmp_path / "negative")])


def test_ag_news_from_shared_data(world):
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "..", "shared", "data")
    if not os.path.isdir(folder):
        pytest.skip("../shared/data is absent")
    name, classes = probe_tasks.ag_news(folder, n=20)
    assert name == "agnews" and {len(texts) for texts in classes.values()} == {20}
    run = open_run(str(world / "tiny"))
    tasks, = probe_tasks.text_tasks(run.encoding, 32, [(name, classes)])
    assert tasks.sets[0].train.shape == (4, 20) and tasks.words[0].name == "letter"


def small_tasks(monkeypatch):
    monkeypatch.setattr(probe_tasks, "BIASED", 8)
    monkeypatch.setattr(probe_tasks, "TESTED", 8)
    monkeypatch.setattr(probe_tasks, "toy_tasks", functools.partial(probe_tasks.toy_tasks, n=4, paired=1))


def test_the_table_is_printed_and_written(world, capsys, monkeypatch):
    small_tasks(monkeypatch)
    probe.main([str(world / "tiny"), "--sources", "own,hash,random", "--features", "4", "--layers", "0,1"])
    text = capsys.readouterr().out
    assert "layer 1, the middle one" in text and "less the hash" in text
    content = json.loads((world / "tiny" / "probe.json").read_text())
    rows = content["rows"]
    assert {row["source"] for row in rows} == {"own", "hash-mlp_in", "random weights"}
    assert {"probe 1", "probe 20", "interpret", "scr", "tpp", "absorption kind"} <= {row["measure"] for row in rows}
    for row in rows:
        assert row["value"] is None or row["low"] <= row["high"] and row["n"] > 0
    assert os.path.exists(world / "tiny" / "probe.png") and content["weights"] and content["commit"]
    probe.main([str(world / "tiny"), "--sources", "own", "--features", "4", "--dry-run"])
    assert "would be asked 16 questions" in capsys.readouterr().out
    for arguments, sentence in ((["--sources", "hesh"], "did you mean 'hash'"), (["--layers", "7"], "from 0 to 1"),
                                (["--layers", "x"], "from 0 to 1"), (["--sources", "topk"], "no run here has"),
                                (["--judge", "x"], "there is no judge 'x'")):
        with pytest.raises(UserError, match=sentence):
            probe.main([str(world / "tiny"), *arguments])


def test_a_model_is_read_once_and_what_was_measured_is_kept(world, capsys, monkeypatch):
    """Stopped after the first of four rows, the same command measures the other three, and the table is the same."""
    small_tasks(monkeypatch)
    command = [str(world / "tiny"), "--sources", "own,neurons", "--features", "4", "--seed", "3"]
    read, measured = [], []
    monkeypatch.setattr(probing, "read_activations", lambda model, tokens, *rest, reading=probing.read_activations: (
        read.append(tokens.numel()), reading(model, tokens, *rest))[1])
    mean_features = probing.mean_features

    def once(source, layer, *rest):
        if measured == ["own"]:
            raise KeyboardInterrupt
        measured.append(source.name)
        return mean_features(source, layer, *rest)

    def counted(source, layer, *rest):
        measured.append((source.name.partition("-")[0], layer))
        return mean_features(source, layer, *rest)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(probing, "mean_features", once)
    with pytest.raises(KeyboardInterrupt):
        probe.main(command)
    run = open_run(str(world / "tiny"))
    texts = probe_tasks.toy_tasks(run.encoding, run.config.context, 3).texts
    windows = min(data.Tokens(run.config.data, "val").count(32), probe.WINDOW_TOKENS // 32) * 32
    assert sum(read) == sum(len(text.tokens) for text in texts) + windows  # of two sources and two layers
    measured.clear()
    monkeypatch.setattr(probing, "mean_features", counted)
    capsys.readouterr()
    tables = []
    rows = [("own", 0), ("own", 1), ("neurons", 0), ("neurons", 1)]
    for expected in (rows[1:], rows):
        probe.main(command)
        assert measured == expected and not os.path.exists(world / "tiny" / "probe_unfinished.jsonl")
        measured.clear()
        tables.append(capsys.readouterr().out.rpartition("written to")[0])
    assert tables[0] == tables[1]


def test_differences_are_those_of_paired_draws(capsys):
    rng = np.random.default_rng(0)
    common = 0.1 * rng.standard_normal(400)
    drawn = {("tiny", source, layer, "tpp"): probing.Found(value, value + common, 9, {})
             for source, value in (("own", 0.5), ("hash-mlp_in", 0.2), ("random weights", 0.1)) for layer in (0, 1)}
    drawn["tiny", "own", 0, "scr"] = probing.Found(0.4, 0.4 + common, 9, {})  # the hash has none
    probe.print_differences(probe.differences_of(drawn, ["tpp", "scr"]))
    _, line = capsys.readouterr().out.splitlines()
    assert line.split() == ["tiny", "own", "+0.30", "[+0.30,", "+0.30]", "-"]  # what draws have in common cancels


def test_absorption_of_a_random_dictionary_falls_with_the_width(tmp_path, capsys):
    rows = [geometry.row_of(d, 0.5, 1) for d in (64, 256)]
    for row in rows:
        assert row["pass"] == pytest.approx(row["normal tail"], abs=0.02) and row["probe F1"] > 0.6
    assert rows[0]["plain"][0] > rows[1]["plain"][0] and rows[0]["plain"][0] > rows[0]["scaled"][0]
    with pytest.raises(UserError, match="widths are some of"):
        probe.main(["geometry", "--widths", "7"])
