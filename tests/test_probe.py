"""Single features against the truth: on features that are made to mean something, or nothing."""
import dataclasses
import json
import os

import numpy as np
import pytest
import torch

import data
import labels
import probe
import sample
import toyworld
import truth as truth_of
from checkpoint import open_run, save
from config import Config
from helpers import UserError
from model import GPT
from sources import open_source
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


def test_the_command_says_what_it_found(world, capsys):
    probe.main(["truth", str(world / "tiny"), "--tokens", "2048"])
    text = capsys.readouterr().out
    assert "own less hash" in text and text.count("random weights") == 2
    rows = json.loads((world / "tiny" / "truth.json").read_text())["rows"]
    assert {row["source"] for row in rows} == {"own", "hash-mlp_in", "neurons-mlp_in", "random weights"}
    assert len(rows) == 4 * 2 * 8 and all(0 <= row["low"] <= row["high"] <= 1 for row in rows)
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
    untrained, source = truth_of.random_weights(run)
    assert torch.equal(untrained.model.embedding.weight, GPT(run.config).embedding.weight)
    assert source.name == "random weights" and sorted(source.layers) == [0, 1]
    assert not torch.equal(source.layers[0].bottleneck.mean, open_source(run, "hash").layers[0].bottleneck.mean) or \
        torch.equal(run.model.embedding.weight, untrained.model.embedding.weight)
