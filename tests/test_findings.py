"""Verdicts against known numbers: every section on results that are for its claims, against them, and neither."""
import json
import math
import types

import pytest

import budget
import config as configs
import findings
from findings import FAILS, HOLDS, UNSURE, Claim, Link
from helpers import UserError, student, write_json

SIDES = {HOLDS: 1, FAILS: -1, UNSURE: 0}


def above(side, wanted=1):
    """A difference on the claimed side, on the other, or on neither."""
    return [0.2 * side * wanted, 0.2 * side * wanted - 0.1, 0.2 * side * wanted + 0.1]


def around(value):
    return [value, value - 0.1, value + 0.1]


# Verdicts


@pytest.mark.parametrize("difference, wanted, expected", [
    ([0.2, 0.1, 0.3], 1, HOLDS), ([0.2, 0.1, 0.3], -1, FAILS), ([-0.2, -0.3, -0.1], 1, FAILS),
    ([-0.2, -0.3, -0.1], -1, HOLDS), ([0.2, -0.1, 0.3], 1, UNSURE), ([0.0, 0.0, 0.0], 1, UNSURE), (None, 1, UNSURE),
    ([0.2, None, None], 1, UNSURE), ([math.nan] * 3, 1, UNSURE)])
def test_a_verdict_is_what_the_interval_says(difference, wanted, expected):
    claim = Claim("x", difference, wanted, "n = 9")
    assert findings.verdict(difference, wanted) == expected == claim.verdict()
    assert claim.evidence().endswith(": n = 9") and claim._replace(items=5).verdict() == UNSURE


def test_two_intervals_are_taken_at_their_worst():
    assert findings.apart([3, 2, 4], [1, 0.5, 1.5]) == [2, 0.5, 3.5]
    assert findings.verdict(findings.apart([3, 1, 4], [1, 0.5, 1.5])) == UNSURE
    assert findings.apart(None, [1, 1, 1]) is None
    assert findings.least([[3, 1, 4], [2, 1.5, 5]]) == [2, 1, 4] and findings.least([]) is None


@pytest.mark.parametrize("values, mean, half", [  # half: t of 4.303, 2.776, 2.262, by sqrt(variance / n)
    ([1, 2, 4], 7 / 3, 4.303 * (7 / 3 / 3) ** 0.5), ([0.3, 0.1, 0.2, 0.6, 0.5], 0.34, 2.776 * (0.043 / 5) ** 0.5),
    (range(10), 4.5, 2.262 * (55 / 6 / 10) ** 0.5)])
def test_an_interval_of_few_values_is_that_of_student(values, mean, half):
    assert student(values) == pytest.approx([mean, mean - half, mean + half], rel=5e-3)
    prices = [math.exp(value) for value in values]
    assert [math.log(value) for value in budget.interval(prices)] == pytest.approx(student(values))
    assert budget.interval([2.0]) == [pytest.approx(2.0), None, None]


# The sections: of each the JSON of its steps, which is for all of its claims (side = 1), against (-1), or neither (0)


def dictionary(side):
    text = f"width d          1024\nexact coherence  {0.06 - 0.01 * side}\nbound            0.06\n"
    return findings.dictionary, {"log.txt": text}


def speed(side, others=0.02):
    rows = [{"variant": name, "ratio": ratio, "ratio_between": [ratio - 0.1, ratio + 0.1],
             "cores_taken_by_others": others} for name, ratio in (("parity", 2 - side), ("topk", 2 + side))]
    return findings.speed, {"speed.json": {"rows": rows, "device": "cpu"}}


def models(side, step=None):
    noise = [(-1) ** number * (side == 0) for number in range(8)]  # of windows, where the mean says nothing

    def content(nats):
        return {"results": {"val": {"loss": sum(nats) / 80, "bits_per_byte": 1, "tokens": 80, "nats": nats,
                                    "data": {"sha256": "same"}}, "features": {"layers": []}}}
    parity, dense = content([10.1 - 0.05 * side + value for value in noise]), content([10.0] * 8)
    return findings.models, lambda step, file: parity if step == "eval" else dense


def tokens(side):
    price = {1: [2.0, 1.5, 2.6], -1: [0.5, 0.4, 0.6], 0: [1.0, 0.8, 1.2]}[side]
    row = {"tolerance": 0.01, "seeds": [1, 2, 3], "price": price, "bounds": []}
    return findings.tokens, {"budget.json": {"rows": [], "paper": budget.PAPER, "results": [row]}}


def autoencoders(side):
    """The claim is about the worst layer: layer 0 is for it whatever the other says."""
    def row(run, source, layer, value):
        return {"run": run, "source": source, "layer": layer, "fvu": around(value), "dead": 0, "recovered": None,
                "tokens": 9}
    rows = [row(run, source, layer, 2 - layer * side if layer else 0)
            for run, source in (("tiny", "own"), ("tiny", "topk-mlp_in"), ("tiny_gpt", "topk-mlp_in"))
            for layer in (0, 1)]
    rows += [row(run, "hash-mlp_in", layer, 2) for run in ("tiny", "tiny_gpt") for layer in (0, 1)]
    return findings.autoencoders, {"report-mlp_in.json": {"rows": rows}}


def circuits(side, n=77):
    """Other numbers of edits than the claimed one say the opposite."""
    rows = [{"task": "ioi", "own": "own, mlp", "run": run, "source": source,
             "differences": dict.fromkeys(("1", "8", "K"), above(-side)) | {count: above(side)}}
            for run, source, count in (("tiny_gpt", "topk-mlp_in", "8"), ("tiny", "hash-mlp_in", "K"))]
    shares = {"8": around(0.9), "random 8": around(0.1), "direction 8": around(0.1), "direction K": around(0.1),
              "K": around(0.5 + 0.3 * side), "random K": around(0.5 - 0.1 * side)}  # the least of all counts
    results = [{"task": "ioi", "run": "tiny", "source": "own", "way": way, "select": ["edited"], "n": n,
                "rows": {count: {"ours": share, "paper": around(0.5)} for count, share in shares.items()}}
               for way in ("mlp", "literal", "delta")]
    return findings.circuits, {"circuits.json": {"differences": rows, "effects": [], "results": results, "pairs": {
        "ioi": {"tested on": {"pairs": 99, "right": n}}}}}


def steering(side, concepts=10):
    others = ("tiny: hash, all layers, contrast", "tiny: own, all layers, random",
              "tiny_gpt: topk, all layers, contrast", "tiny_gpt: stream, all layers, contrast")
    rows = [{"one": "tiny: own, all layers, contrast", "other": other, "concept": above(side)} for other in others]
    return findings.steering, {"pareto.json": {"concepts": ["x"] * concepts, "rows": [], "differences": rows}}


def noise(side, n=9):
    """Other layers and strengths than the claimed ones say the opposite."""
    def row(run, measure, layer, value, kind="noise", ratio=0.1):
        return {"run": run, "kind": kind, "ratio": ratio, "measure": measure, "layer": layer, "value": around(value)}
    rows = [row("tiny", "left", 3, 2 - side), row("tiny_gpt", "left", 3, 2 + side), row("tiny", "left", 2, 2 + side),
            row("tiny", "passed", 1, 1 - 0.5 * side), row("tiny", "passed", 1, 1 + 0.5 * side, "real"),
            row("tiny", "passed", 2, 1 + side), row("tiny", "passed", 1, 1 + side, ratio=1.0)]
    return findings.noise, {"noise.json": {"rows": rows, "n": n}}


MEASURES = {"probe 1": 1, "probe 5": 1, "interpret": 1, "scr": 1, "tpp": 1, "absorption kind": -1,
            "absorption kind scaled": -1}


def saebench(side, n=50):
    rows = [{"run": "tiny", "source": source, "layer": layer, "measure": measure, "value": 0.5, "low": 0.4, "high": 0.6,
             "n": n + layer} for source in ("own", "hash-mlp_in") for layer in (0, 1) for measure in MEASURES]
    differences = [{"run": "tiny", "source": source, "less": "hash-mlp_in", "measure": measure,
                    "difference": above(side if source == "own" else -side, wanted)}
                   for measure, wanted in MEASURES.items() for source in ("topk-mlp_in", "own")]
    return findings.saebench, {"probe.json": {"rows": rows, "differences": differences, "middle": 1}}


def meaning(side, words=(12, 9)):
    """Against the larger of the two controls; against the other one it says the opposite."""
    row = {"run": "tiny", "group": "kind", "difference": above(-side), "less_always": above(-side),
           "above": above(side), "larger": "always on"}
    own = {"run": "tiny", "source": "own", "layer": 0, "group": "kind", "f1": 0.5, "words": list(words), "n": 1234,
           "details": []}
    return findings.meaning, {"truth.json": {
        "rows": [own], "tokens": 65536, "differences": [row],
        "configs": {"out/tiny/best.pt": {"bottleneck": "parity", "bits": [7, 12]}}}}


def retrieval(side):
    def row(signal, center, model="tuned", layer=1):
        hits = [[[0, 0, 10 * (center + change), 0, 0, 0]] * 4 for change in (-0.02, 0.0, 0.02)]
        hits = hits[::-1] if signal == "own" else hits  # so that differences are no constants
        return {"model": model, "way": "token", "signal": signal, "layer": layer, "kind": "triggered", "hits": hits,
                "precision": [around(center)] * 6}
    others = [row(signal, 0.5 - 0.3 * side) for signal in ("hash", "h", "topk")]
    others += [row("own", 0.5 - 0.3 * side, "untuned"), row("tfidf", 0.5 - 0.3 * side, "tokens", None)]
    return findings.retrieval, {"retrieve.json": {
        "rows": [row("own", 0.5), *others], "repeats": 3, "counts": [{"poisoned": 5, "clean": 95, "natural": 0}],
        "chosen": [{"model": model, "way": "token", "signal": signal, "layer": 1} for model in ("tuned", "untuned")
                   for signal in ("own", "hash", "h", "topk")]}}


ALL = {dictionary: 1, models: 1, tokens: 1, speed: 1, autoencoders: 3, circuits: 4, steering: 4, noise: 3, saebench: 7,
       meaning: 1, retrieval: 5}  # the number of claims


def claims_of(made):
    section, files = made
    return section(files if callable(files) else lambda step, file: files.get(file)).claims


@pytest.mark.parametrize("verdict", SIDES)
@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_every_claim_says_what_the_numbers_say(make, verdict):
    claims = claims_of(make(SIDES[verdict]))
    assert [claim.verdict() for claim in claims] == [verdict] * ALL[make]
    assert all(claim.evidence() for claim in claims)


def test_every_section_is_tested_and_gives_nothing_without_results():
    assert {make(1)[0] for make in ALL} == set(findings.SECTIONS) and len(findings.ABOUT) == len(findings.SECTIONS)
    assert [section(lambda step, file: None) for section in findings.SECTIONS] == [None] * len(findings.SECTIONS)


@pytest.mark.parametrize("make, few", [(circuits, {"n": 5}), (steering, {"concepts": 5}), (noise, {"n": 5}),
                                       (saebench, {"n": 5}), (meaning, {"words": (12, 5)})],
                         ids=lambda value: getattr(value, "__name__", ""))
def test_fewer_than_six_items_tell_nothing(make, few):
    assert {claim.verdict() for claim in claims_of(make(1, **few))} == {UNSURE}


def test_evidence_says_how_many_and_where():
    (claim,) = claims_of(meaning(1))
    assert "n = 9 words in the smaller half, 1,234 labelled tokens" in claim.control and "always on" in claim.control
    first, *_, last = claims_of(saebench(1))
    assert "n = 50 decisions" in first.control and "n = 50 words" in last.control
    assert all("77 pairs" in claim.control for claim in claims_of(circuits(1)))
    left, passed, real = claims_of(noise(1))
    assert "after layer 3" in left.control and all("layer 1" in claim.control for claim in (passed, real))
    assert all("noise of 0.1 of the norm" in claim.control for claim in (left, passed, real))


def test_a_busy_machine_is_no_place_to_tell_what_is_faster():
    (quiet,), (busy,) = claims_of(speed(1, others=0.14)), claims_of(speed(1, others=0.4))
    assert quiet.verdict() == HOLDS and "one process each" in quiet.evidence()
    assert busy.verdict() == UNSURE and "others took 0.40 cores" in busy.evidence()


def test_losses_on_other_windows_are_not_paired():
    section, get = models(1)
    eval_gpt = json.loads(json.dumps(get("eval_gpt", "eval.json")))
    eval_gpt["results"]["val"]["data"]["sha256"] = "another"
    (claim,) = section(lambda step, file: get(step, file) if step == "eval" else eval_gpt).claims
    assert claim.verdict() == UNSURE and "no interval" in claim.evidence()
    assert section(lambda step, file: get(step, file) if step == "eval" else None).claims == []


def test_edits_are_weighed_against_the_stronger_of_their_controls():
    section, files = circuits(1)
    rows = files["circuits.json"]["results"][0]["rows"]
    for name in ("random 8", "direction 8", "random K", "direction K"):
        before, rows[name] = rows[name], {"ours": [1.0, 0.98, 1.0], "paper": around(0)}
        *_, own_way, literal = claims_of((section, files))
        assert (own_way.verdict(), literal.verdict()) == (UNSURE if "8" in name else FAILS, HOLDS), name
        rows[name] = before


def test_examples_of_features_are_chosen_by_the_known_half_and_by_the_alphabet():
    def row(layer, *labels, source="own"):
        return {"run": "tiny", "source": source, "layer": layer, "group": "kind", "details": [
            {"label": label, "feature": feature, "chosen": chosen, "f1": f1} for label, feature, chosen, f1 in labels]}
    rows = [row(0, ("thing", 7, 0.5, 0.9), ("verb", 1, 0.1, None), ("agent", 3, 0.2, 0.2)),
            row(1, ("thing", 4096 + 9, 0.6, 0.1), ("verb", 2, 0.0, 0.4)), row(2, ("thing", 5, 1.0, 1.0), source="hash")]
    found = {"rows": rows, "configs": {"tiny": {"bottleneck": "parity", "bits": [7, 12]},
                                       "tiny_gpt": {"bottleneck": "none", "bits": [10, 15]}}}
    assert findings.examples(found, most=2).rows == [["kind", "agent", Link("0:3+"), "0.20", "0.20"],
                                                     ["kind", "thing", Link("1:9-"), "0.60", "0.10"]]
    assert ["kind", "verb", Link("1:2+"), "0.00", "0.40"] in findings.examples(found, most=3).rows  # nothing unseen


def test_missing_controls_of_retrieval_are_no_verdict():
    section, files = retrieval(1)
    found = files["retrieve.json"]
    found["rows"] = [row for row in found["rows"] if row["signal"] not in ("tfidf", "topk")]
    made = section(lambda step, file: found)
    assert [claim.verdict() for claim in made.claims] == [HOLDS, HOLDS, HOLDS, UNSURE, UNSURE]
    assert "5.00%" in made.tables[0].title


# The price in tokens


def test_a_bound_says_its_side_and_two_bounds_are_none():
    dense = {seed: [(500, 2.0), (1000, 1.5)] for seed in range(3)}
    losses = {(): [1.7, 1.8, 1.75], ("fewer",): [2.1, 1.8, 1.75], ("more",): [1.4, 1.8, 1.75],
              ("fewer", "more"): [2.1, 1.4, 1.75]}
    words = {(): "times [", ("fewer",): "at least ", ("more",): "at most ", ("fewer", "more"): "not known"}
    for bounds, values in losses.items():
        row = budget.price({seed: (2000, loss) for seed, loss in enumerate(values)}, dense, 0.0)
        assert tuple(row["bounds"]) == bounds and words[bounds] in budget.describe(row)
        assert ("[" in budget.describe(row)) == (row["price"][1] is not None) == (bounds == ())
        section = findings.tokens(lambda step, file, row=row: {"rows": [], "paper": budget.PAPER, "results": [row]})
        assert section.tables[0].rows[0][1] == budget.describe(row)
        (claim,) = section.claims
        assert bounds == () or (claim.verdict() == UNSURE and budget.describe(row) in claim.evidence())
    known = {seed: (2000, 2.1) for seed in range(3)}
    assert budget.describe(budget.price(known, dense, 0.0)) == (
        "at least 4.00 times; for some seeds dense needs fewer steps than were tried")


@pytest.mark.parametrize("change, fits", [
    ({}, True), ({"data": "./data/../data/toy"}, True), ({"data": "data/toy:1"}, True), ({"seed": 1}, False),
    ({"data": "data/other"}, False), ({"data": "data/toy:1,data/other:1"}, False), ({"init_from": "out/x"}, False),
    ({"eval_tokens": 64}, False), ({"device": "cuda", "out": "elsewhere"}, True)])
def test_a_run_is_reused_only_where_its_loss_is_comparable(tmp_path, monkeypatch, change, fits):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dense.py").write_text("layers = 1; d = 32; heads = 1; bottleneck = 'none'; data = 'data/toy'; "
                                       "max_steps = 6")
    config = configs.load(["dense.py"])
    (tmp_path / "run").mkdir()
    write_json("run/config.json", vars(config) | change)
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 6, "loss": 2.5, "val_loss": 2.25}\n')
    assert budget.last_loss("run", config) == (2.25 if fits else None)


def test_a_run_of_its_own_folder_on_other_data_is_answered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dense.py").write_text("bottleneck = 'none'; max_steps = 6")
    (tmp_path / "run").mkdir()
    write_json("run/config.json", vars(configs.load(["dense.py"])) | {"data": "data/other"})
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 6, "loss": 2.5, "val_loss": 2.25}\n')
    done = types.SimpleNamespace(run=lambda command: types.SimpleNamespace(returncode=0))
    monkeypatch.setattr(budget, "subprocess", done)  # train.py finds its work done
    with pytest.raises(UserError, match="on other data or from other weights: --fresh"):
        budget.finished("dense.py", [], "run", (), False)


def test_a_folder_to_reuse_that_is_no_run_is_answered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dense.py").write_text("bottleneck = 'none'")
    with pytest.raises(UserError, match="--reuse nonexist is no folder of a run"):
        budget.main(["--parity", "dense.py", "--dense", "dense.py", "--reuse", "nonexist"])
