"""Evaluation: scores equal the plain way of computing them, the harness's, and those of any number of ranks."""
import dataclasses
import json
import math
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import config as configs
import data
import eval as evaluation
import score
import tasks
import toyworld
import train
from checkpoint import open_run, save
from helpers import UserError, commit
from model import GPT

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHARED = os.path.join(ROOT, "..", "shared", "data")
SMALL = """
layers = 2
d = 32
heads = 2
context = 48
vocab_size = 2048
bits = (5, 8)
active = (4, 6)
children = (16,)
batch_tokens = 768
max_steps = 40
warmup_steps = 2
decay_fraction = 0.5
muon_lr = 0.02
adam_lr = 1e-2
eval_every = 40
eval_tokens = 1536
save_every = 40
"""


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """A folder: tokens of the toy world, three models trained on it a little, and questions on it in both formats."""
    root = tmp_path_factory.mktemp("eval")
    torch.use_deterministic_algorithms(False)
    data.prepare_toy(str(root / "tokens"), tokens=60_000)
    (root / "small.py").write_text(SMALL)
    for kind in "parity", "topk", "none":
        train.train(configs.load([str(root / "small.py"), f"--data={root / 'tokens'}", f"--out={root / kind}",
                                  "--device=cpu", f"--bottleneck={kind}"]))
    write_questions(root, random.Random(0), 60)
    return root


def write_questions(folder, rng, count):
    """Files like HellaSwag's and LAMBADA's, awkward as those are: marks in brackets, runs of spaces, no context."""
    words = [document.text.split(" ") for document in toyworld.documents(5, count + 3)]
    choices, last_words = [], []
    for number in range(count):
        cut = rng.randint(3, 30)
        endings = [" ".join(words[number + other][cut : cut + rng.randint(3, 9)])
                   + rng.choice([" [step] now.", "  Yes.", " é."]) for other in range(4)]
        label = rng.randrange(4)
        endings[0], endings[label] = endings[label], endings[0]
        context = " ".join(words[number][:cut]) + rng.choice(["", " [title] How", "  "])
        choices.append({"activity_label": "Day", "ctx_a": context, "ctx_b": rng.choice(["", "the"]), "endings": endings,
                        "label": str(label)})
        last_words.append({"text": " ".join(words[number][: rng.randint(1, 60)]) if number else "alone"})
    for name, records in (("hellaswag_val.jsonl", choices), ("lambada_test.jsonl", last_words)):
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(world, tmp_path):
    """Call with a kind of model: a copy of its checkpoint in a folder of its own."""
    def make(kind="parity"):
        folder = tmp_path / kind
        folder.mkdir(exist_ok=True)
        (folder / "best.pt").write_bytes((world / kind / "best.pt").read_bytes())
        return str(folder)
    return make


def go(*arguments):
    """The results in eval.json after a run of eval.py in this process."""
    evaluation.evaluate(evaluation.parse([str(argument) for argument in arguments] + ["--device", "cpu"]))
    with open(os.path.join(arguments[0], "eval.json")) as file:
        return json.load(file)["results"]


def command(*arguments, ranks=0):
    start = ([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
             if ranks else [sys.executable])
    return subprocess.run([*start, "eval.py", *map(str, arguments), "--device", "cpu"], cwd=ROOT,
                          text=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)


@torch.no_grad()
def plain(model, tokens, count, patch=None):
    """(log-probability, all greedy) of the last `count` tokens: one sequence, no padding, no cache."""
    tokens = torch.as_tensor(np.asarray(tokens, np.int64))
    logits = model(tokens[None, :-1], patch=patch)[0, -count:]
    found = logits.log_softmax(-1).gather(1, tokens[-count:, None]).double().sum().item()
    return found, bool((logits.argmax(-1) == tokens[-count:]).all())


def pieces(model, tokens, context, stride):
    """Log-probability of tokens[1:], as defined: token i is in the first window, or in one that ends at its step."""
    total = 0
    for i in range(1, len(tokens)):
        end = i if i <= context else min(context + math.ceil((i - context) / stride) * stride, len(tokens) - 1)
        total += plain(model, tokens[max(0, end - context) : i + 1], 1)[0]
    return total


# Scoring


@pytest.mark.parametrize("kind", ["parity", "topk", "none"])
@pytest.mark.parametrize("batch_tokens", [1, 300, 16384])
def test_batches_score_what_one_sequence_at_a_time_does(world, kind, batch_tokens):
    model = open_run(str(world / kind)).model
    rng = np.random.default_rng(0)
    requests = []
    for _ in range(12):
        context = rng.integers(0, 1500, rng.integers(1, 20))
        for _ in range(rng.integers(1, 5)):  # answers to one question
            requests.append(score.fit(context, rng.integers(0, 1500, rng.integers(1, 40)), 48))
    requests.append(score.fit([3], plain_greedy(model, 3), 48))
    log_probs, greedy = score.Scorer(model, 48, batch_tokens).score(requests)
    expected = [plain(model, *request) for request in requests]
    assert log_probs == pytest.approx([value for value, _ in expected], abs=1e-3, rel=1e-5)
    assert greedy.tolist() == [value for _, value in expected] and greedy[-1]


def plain_greedy(model, start):
    return [token.item() for token in model.generate(torch.tensor([[start]]), 5, temperature=0)]


def test_every_request_is_in_one_batch_and_batches_keep_to_the_budget():
    rng = np.random.default_rng(1)
    requests = [score.fit([question] * rng.integers(1, 30), range(rng.integers(1, 30)), 64)
                for question in range(40) for _ in range(4)]
    for batch_tokens in 1, 500, 5000:
        batches = score.plan(requests, batch_tokens)
        assert (sorted(index for _, groups in batches for group in groups for index in group)
                == list(range(len(requests))))
        for prefix, groups in batches:
            rows = [requests[index] for group in groups for index in group]
            padded = len(groups) * prefix + len(rows) * (max(len(row.tokens) for row in rows) - prefix)
            assert padded <= batch_tokens or len(groups) == 1
            for group in groups:
                assert len({requests[index].tokens[:prefix].tobytes() for index in group}) == 1


def test_an_answer_is_cut_on_the_left_to_fit_the_context():
    assert score.fit([1, 2, 3], [4, 5], 4).tokens.tolist() == [1, 2, 3, 4, 5]
    cut = score.fit([1, 2, 3], [4, 5], 3)
    assert (cut.tokens.tolist(), cut.count) == ([2, 3, 4, 5], 2)
    longer = score.fit([1], [2, 3, 4, 5], 2)
    assert (longer.tokens.tolist(), longer.count) == ([3, 4, 5], 2)


def test_windows_score_each_token_once_with_the_context_promised():
    for n, context, stride in [(1, 8, 8), (8, 8, 8), (9, 8, 8), (50, 8, 8), (50, 8, 3), (50, 8, 1)]:
        seen = []
        for start, stop, count in score.windows(n, context, stride):
            assert start >= 0 and stop - start <= context + 1
            seen += range(stop - count, stop)
            assert stop - count - start >= min(stop - count, context - stride + 1)  # tokens before the first scored
        assert seen == list(range(1, n + 1))


def test_windows_are_those_of_the_harness():
    utils = pytest.importorskip("lm_eval.utils", reason="lm-evaluation-harness is not installed")
    for n, context, stride in [(5, 8, 8), (8, 8, 8), (50, 8, 8), (50, 8, 3)]:
        tokens = list(range(100, 100 + n))
        theirs = utils.get_rolling_token_windows(tokens, 7, context, context - stride + 1)
        ours = [([7, *tokens][start:stop], count) for start, stop, count in score.windows(n, context, stride)]
        assert ours == [([*given, wanted[-1]], len(wanted)) for given, wanted in theirs]


def test_batches_are_few_and_hold_little_padding(world, capsys):
    """And how much faster they are, the two ways timed in turn, is printed: python -m pytest -k few test_eval.py"""
    run = open_run(str(world / "parity"))
    requests = [score.fit(*tasks.encode_pair(run.encoding, question.context, answer), 48)
                for question in tasks.questions("hellaswag", str(world))[0] for answer in question.answers]
    passes = []

    def count(site, layer, x):
        if (site, layer) == ("block_out", 0):
            passes.append(x.shape[0] * x.shape[1])
        return x

    ways = {"one at a time": lambda: [plain(run.model, *request, patch=count) for request in requests],
            "in batches": lambda: score.Scorer(run.model, 48).score(requests, patch=count)}
    work, times = {}, {name: [] for name in ways}
    for _ in range(3):
        for name, way in ways.items():
            passes.clear()
            start = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - start)
            work[name] = len(passes), sum(passes)
    ratio = min(times["one at a time"]) / min(times["in batches"])
    with capsys.disabled():
        print(f"\nHellaSwag's format, {len(requests)} texts: {ratio:.1f} times as fast in batches; "
              f"passes, tokens: {work}")
    assert work["in batches"][0] * 10 <= work["one at a time"][0]
    assert work["in batches"][1] < 1.2 * work["one at a time"][1]
    assert ratio > 1.5  # generous: machines are busy


# The tasks


@pytest.mark.parametrize("kind", ["parity", "none"])
def test_val_is_the_loss_of_training_and_its_bytes_are_those_of_the_text(world, run, kind):
    result = go(run(kind), "--tasks", "val")["val"]
    opened, tokens = open_run(str(world / kind)), data.Tokens(str(world / "tokens"), "val")
    everything = dataclasses.replace(opened.config, eval_tokens=10 ** 9)
    row = train.evaluate(opened.model, tokens, everything, 0, 1, torch.device("cpu"), torch.no_grad)
    assert result["loss"] == pytest.approx(row["val_loss"], abs=2e-6)
    stream = tokens.read(1, result["tokens"] + 1).tolist()
    assert result["tokens"] == tokens.count(48) * 48
    text = opened.encoding.decode_bytes([token for token in stream if token != tokens.end])
    assert result["bytes"] == len(text)
    assert result["bits_per_byte"] == pytest.approx(result["loss"] * len(stream) / math.log(2) / len(text))
    assert len(result["nats"]) == tokens.count(48)  # a window each, so that two models can be compared in pairs
    assert sum(result["nats"]) / result["tokens"] == pytest.approx(result["loss"], abs=1e-5)
    assert "disjoint windows of 48" in result["what"]


def test_val_slides_and_takes_the_first_windows(world, run):
    tokens, model = data.Tokens(str(world / "tokens"), "val"), open_run(str(world / "parity")).model
    for stride in 48, 16:
        result = go(run(), "--tasks", "val", "--limit", 2, "--stride", stride)["val"]
        assert result["tokens"] == 96
        assert result["loss"] == pytest.approx(-pieces(model, tokens.read(0, 97), 48, stride) / 96, abs=1e-4)
    assert "slide by 16" in result["what"]
    short = go(run(), "--tasks", "val", "--limit", 4, "--context", 24)["val"]
    assert short["loss"] == pytest.approx(-pieces(model, tokens.read(0, 97), 24, 24) / 96, abs=1e-4)


def test_ppl_scores_each_document_by_itself(world, run, tmp_path):
    texts = ["Clara was a cashier at the hall.", "é and 漢字: " + next(toyworld.documents(7, 1)).text, "No."]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    opened = open_run(str(world / "parity"))
    nats = []
    for text in texts:
        tokens = [opened.encoding.eot_token, *opened.encoding.encode_ordinary(text)]
        nats.append(-pieces(opened.model, tokens, 48, 48))
    result = go(run(), "--tasks", "ppl", "--text", tmp_path / "some.jsonl")["ppl"]
    size = [len(text.encode()) for text in texts]
    assert (result["documents"], result["bytes"]) == (3, sum(size))
    assert result["loss"] * result["tokens"] == pytest.approx(sum(nats), rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(sum(nats) / result["tokens"]), rel=1e-4)
    assert result["byte_perplexity"] == pytest.approx(math.exp(sum(nats) / sum(size)), rel=1e-5)
    assert result["bits_per_byte"] == pytest.approx(math.log2(result["byte_perplexity"]))
    each = sorted(n / math.log(2) / s for n, s in zip(nats, size))
    assert result["bits_per_byte_quantiles"][::2] == pytest.approx(each, rel=1e-4)
    assert go(run(), "--tasks", "ppl", "--text", tmp_path / "some.jsonl", "--limit", 2)["ppl"]["documents"] == 2


def test_ppl_of_a_long_txt_file_is_of_one_document(run, tmp_path):
    text = " ".join(document.text for document in toyworld.documents(8, 60))
    assert len(text) > 2 ** 15  # data.py reads it in parts
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text}))
    one, two = (go(run(), "--text", tmp_path / name, "--tasks", "ppl")["ppl"] for name in ("long.txt", "long.jsonl"))
    assert one["documents"] == 1 and one["loss"] == two["loss"] and one["data"]["sha256"] == two["data"]["sha256"]


def test_questions_are_marked_as_when_asked_one_at_a_time(world, run):
    opened = open_run(str(world / "parity"))
    results = go(run(), "--tasks", "hellaswag,lambada", "--data", world)
    right = {"acc": "", "acc_norm": ""}
    for question in tasks.questions("hellaswag", str(world))[0]:
        pairs = [tasks.encode_pair(opened.encoding, question.context, answer) for answer in question.answers]
        values = [plain(opened.model, *score.fit(*pair, 48))[0] for pair in pairs]
        right["acc"] += str(int(max(values) == values[question.right]))
        each = [value / len(answer[1:]) for value, answer in zip(values, question.answers)]
        right["acc_norm"] += str(int(max(each) == each[question.right]))
    assert results["hellaswag"]["right"] == right
    share = right["acc_norm"].count("1") / 60
    assert results["hellaswag"]["acc_norm"] == pytest.approx(share)
    assert results["hellaswag"]["acc_norm_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / 59))
    found = [plain(opened.model,
                   *score.fit(*tasks.encode_pair(opened.encoding, question.context, question.answers[0]), 48))
             for question in tasks.questions("lambada", str(world))[0]]
    assert results["lambada"]["right"]["acc"] == "".join(str(int(greedy)) for _, greedy in found)
    assert results["lambada"]["perplexity"] == pytest.approx(
        math.exp(-np.mean([value for value, _ in found])), rel=1e-4)
    assert 0 < results["lambada"]["acc"] < 1 and results["lambada"]["cut"] > 0  # or the test says little


def test_answers_are_compared_per_character_not_per_byte_and_the_first_of_equals_wins():
    questions = [tasks.Question("", [" éééé", " eeeee"], 0), tasks.Question("", [" ab", " cd"], 1)]
    assert tasks.mark_choice(questions, [-5.0, -6.0, -1.0, -1.0]) == {"acc": [True, False], "acc_norm": [False, False]}


def test_hellaswag_text_is_cleaned_and_lambada_splits_at_the_last_space():
    record = {"activity_label": "Cooking", "ctx_a": "Mix it. [header] How [title] Stir", "ctx_b": "then YOU",
              "label": "2", "endings": ["a [step] b", "  c", "d", "[substeps] e"]}
    question = tasks.hellaswag(record)
    assert question == ("Cooking: Mix it. How. Stir Then you", [" a b", " c", " d", "  e"], 2)
    assert tasks.lambada({"text": "one two\nthree four"}) == ("one two\nthree", [" four"], 0)


@pytest.mark.parametrize("kind", ["parity", "topk"])
def test_features_equal_their_definitions(world, run, kind):
    result = go(run(kind), "--tasks", "features", "--limit", 20, "--batch_tokens", 300)["features"]
    opened = open_run(str(world / kind))
    windows = data.Tokens(str(world / "tokens"), "val").windows(range(20), 48)
    given, wanted = windows[:, :-1], windows[:, 1:]
    record = []
    with torch.no_grad():
        loss = opened.model(given, wanted, record=record)["lm"].item()
    assert result["loss"] == pytest.approx(loss, abs=1e-5)
    assert len(result["layers"]) == 2
    for layer, ((code, y, h), found) in enumerate(zip(record, result["layers"])):
        bottleneck, start = opened.model.blocks[layer].bottleneck, 0
        assert len(found["levels"]) == len(bottleneck.active)
        for level, values in enumerate(found["levels"]):
            low, high = bottleneck.lows[level : level + 2]
            own = code.indices[..., start : start + bottleneck.active[level]].flatten().tolist()
            start += bottleneck.active[level]
            counts = [own.count(feature) for feature in range(low, high)]
            assert values["features"] == high - low and values["l0"] == pytest.approx(bottleneck.active[level])
            assert values["fired"] == pytest.approx(sum(count > 0 for count in counts) / (high - low))
            assert values["histogram"][0] == counts.count(0) and sum(values["histogram"]) == high - low
            assert values["histogram"][-1] == sum(count >= 0.1 * 20 * 48 for count in counts)
            part = bottleneck.decode(type(code)(code.indices[..., :start], code.coefs[..., :start]), like=h)
            explained = 1 - (h - part).square().sum() / (h - h.mean((0, 1))).square().sum()
            assert values["explained"] == pytest.approx(explained.item(), abs=1e-4)
        torch.testing.assert_close(part, y)

    dense = GPT(dataclasses.replace(opened.config, bottleneck="none"))  # the same weights without a bottleneck
    dense.load_state_dict({name: weight for name, weight in opened.model.state_dict().items()
                           if name in dense.state_dict()})
    with torch.no_grad():
        assert result["loss_input"] == pytest.approx(dense(given, wanted)["lm"].item(), abs=1e-5)
        logits = opened.model(given, edit=lambda layer, code: type(code)(code.indices, 0 * code.coefs))
        assert result["loss_zero"] == pytest.approx(
            F.cross_entropy(logits.flatten(0, 1), wanted.flatten()).item(), abs=1e-5)
        logits = opened.model(given, edit=lambda layer, code: type(code)(code.indices, code.coefs * (layer != 1)))
        assert result["layers"][1]["loss_zero"] == pytest.approx(
            F.cross_entropy(logits.flatten(0, 1), wanted.flatten()).item(), abs=1e-5)


@pytest.mark.parametrize("site", ["mlp", "attention"])
def test_what_stands_in_for_a_bottleneck_is_its_input_or_nothing(world, site):
    """Of both sites and of one layer: y = h is the model without that bottleneck, y = 0 an MLP or attention of zero."""
    config = dataclasses.replace(open_run(str(world / "parity")).config, site=site)
    model, tokens = GPT(config).eval(), torch.arange(20)[None]
    without = GPT(config).eval()
    without.blocks[1].parity = None
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, **evaluation.through_input(model, [1])), without(tokens))
        nothing = model(tokens, patch=lambda at, layer, x: 0 * x if (at, layer) == (f"{site}_out", 1) else x)
        assert torch.equal(model(tokens, **evaluation.through_nothing([1])), nothing)


def test_a_dense_model_has_no_features_and_says_so(run, capsys):
    assert go(run("none"), "--tasks", "features")["features"]["layers"] == []
    assert "a dense model, which has no bottleneck" in capsys.readouterr().out


# The harness


def assert_same_as_the_harness(folder, questions, limit):
    results = go(folder, "--tasks", "hellaswag,lambada", "--data", questions, "--limit", limit,
                 "--harness", "hellaswag,lambada_openai")
    for ours, theirs in ("hellaswag", "harness hellaswag"), ("lambada", "harness lambada_openai"):
        assert len(results[ours]["right"]["acc"]) == limit
        assert results[ours]["right"] == results[theirs]["right"]
        for key in results[ours]["right"]:
            assert results[ours][key] == results[theirs][key]
            assert results[ours][f"{key}_stderr"] == pytest.approx(results[theirs][f"{key}_stderr"])
    assert results["lambada"]["perplexity"] == results["harness lambada_openai"]["perplexity"]
    return results


def test_the_harness_marks_the_same_questions_right(world, run):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    results = assert_same_as_the_harness(run(), world, 60)
    assert 0 < results["lambada"]["acc"] < 1 and 0 < results["hellaswag"]["acc"] < 1


def test_the_harness_agrees_on_the_real_questions(run):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    if not os.path.exists(os.path.join(SHARED, "hellaswag_val.jsonl")):
        pytest.skip("../shared/data with hellaswag_val.jsonl and lambada_test.jsonl is not here")
    assert_same_as_the_harness(run("none"), SHARED, 50)


def test_the_adapter_answers_all_the_harness_can_ask(world):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    from lm_eval.api.instance import Instance
    opened = open_run(str(world / "parity"))
    adapter = evaluation.adapter(score.Scorer(opened.model, 48), opened)

    def ask(*arguments):
        return Instance("any", {}, arguments, 0)
    text = next(toyworld.documents(9, 1)).text
    tokens = [opened.encoding.eot_token, *opened.encoding.encode_ordinary(text)]
    whole, none = adapter.loglikelihood_rolling([ask(text), ask("")])
    assert whole == pytest.approx(pieces(opened.model, tokens, 48, 48), rel=1e-5) and none == 0
    prompt = "Clara was a"
    ids = torch.tensor([opened.encoding.encode_ordinary(prompt)])
    free = opened.encoding.decode([token.item() for token in opened.model.generate(ids, 12, temperature=0)])
    assert adapter.generate_until([ask(prompt, {"max_gen_toks": 12})]) == [free]
    stop = free[len(free) // 2 :][:3]
    assert adapter.generate_until([ask(prompt, {"max_gen_toks": 12, "until": [stop]})]) == [free[: free.index(stop)]]
    with pytest.raises(UserError, match="greedy"):
        adapter.generate_until([ask(prompt, {"do_sample": True})])


# Ranks, results, bad input


def test_two_ranks_find_what_one_does_to_the_bit(world, run):
    everything = ["--tasks", "val,ppl,hellaswag,lambada,features", "--text", world / "lambada_test.jsonl",
                  "--data", world, "--limit", 40, "--batch_tokens", 500]
    found = []
    for ranks in 0, 2:
        done = command(run(), *everything, ranks=ranks)
        assert done.returncode == 0, done.stderr
        assert "\r" not in done.stderr
        with open(os.path.join(run(), "eval.json")) as file:
            found.append(json.load(file)["results"])
        os.remove(os.path.join(run(), "eval.json"))
        assert done.stdout.count("accuracy, per character") == 1  # one rank speaks
    one, two = found
    for result in found:
        for layer in result["features"]["layers"]:
            for level in layer["levels"]:
                level["explained"] = round(level["explained"], 12)  # sums over tokens, in another order
    assert one == two


def test_results_are_of_one_checkpoint_and_say_what_made_them(world, run, monkeypatch):
    folder = run()
    go(folder, "--tasks", "val", "--limit", 3)
    assert set(go(folder, "--tasks", "lambada", "--data", world)) == {"val", "lambada"}
    with open(os.path.join(folder, "eval.json")) as file:
        content = json.load(file)
    assert content["seed"] == 0 and content["config"]["d"] == 32 and content["checkpoint"]["step"] == 40
    assert content["commit"] == commit()
    assert len(content["checkpoint"]["weights"]) == 32  # a hash of them
    val, lambada = content["results"]["val"], content["results"]["lambada"]
    assert len(val["data"]["sha256"]) == len(lambada["data"]["sha256"]) == 64 and val["commit"] == content["commit"]
    assert lambada["data"]["source"] == str(world / "lambada_test.jsonl")
    assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]

    monkeypatch.setattr(tasks, "mark_choice", lambda *arguments: exec("raise KeyboardInterrupt"))
    with pytest.raises(KeyboardInterrupt):
        go(folder, "--tasks", "val,hellaswag", "--data", world, "--limit", 5)
    with open(os.path.join(folder, "eval.json")) as file:
        results = json.load(file)["results"]
    assert set(results) == {"val", "lambada"} and results["val"]["tokens"] == 5 * 48  # only what is finished is kept

    checkpoint = torch.load(os.path.join(folder, "best.pt"), weights_only=True)
    checkpoint["model"]["norm.weight"] *= 1.01
    save(os.path.join(folder, "best.pt"), checkpoint)
    assert set(go(folder, "--tasks", "val", "--limit", 3)) == {"val"}


def test_a_checkpoint_that_changes_while_it_is_read_is_noticed(run, monkeypatch):
    folder = run()

    def replaced(path, device):
        opened = open_run(path, device)
        os.utime(path, (1, 1))
        return opened
    monkeypatch.setattr(evaluation, "open_run", replaced)
    with pytest.raises(UserError, match="was replaced while it was being read"):
        go(folder, "--tasks", "val")


@pytest.mark.parametrize("kind", ["parity", "none"])
def test_answers_are_those_of_asking_one_by_one(run, kind, capsys, monkeypatch):
    result = go(run(kind), "--tasks", "answers", "--limit", 30)["answers"]
    opened = open_run(str(run(kind)))
    for name in toyworld.QUESTIONS:
        rng, found = random.Random(1), {"": ([], []), "_silent": ([], [])}
        for _ in range(30):
            question = toyworld.ask(name, rng)
            tokens = torch.tensor([[opened.encoding.eot_token, *opened.encoding.encode_ordinary(question.prompt)]])
            for key, (right, nats) in found.items():
                with monkeypatch.context() as patched, torch.no_grad():
                    if key:
                        for block in opened.model.blocks:
                            patched.setattr(block.mlp, "forward", torch.zeros_like)
                    mass = opened.model(tokens)[0, -1].softmax(-1)
                yes, no = (sum(mass[opened.encoding.encode_single_token(answer)].item() for answer in answers)
                           for answers in (question.right, question.wrong))
                right.append(yes > no)
                nats.append(-math.log(yes))
        for key, (right, nats) in found.items():
            assert result[name][f"right{key}"] == pytest.approx(np.mean(right))
            assert result[name][f"nats{key}"] == pytest.approx(np.mean(nats), abs=1e-4)
        assert abs(result[name]["nats"] - result[name]["nats_silent"]) > 1e-3
    go(run(kind), "--tasks", "answers", "--limit", 1)
    monkeypatch.setattr(toyworld, "TOKEN_PATTERN", "another")
    with pytest.raises(UserError, match="not trained on the toy world"):
        go(run(kind), "--tasks", "answers")


def test_without_tasks_it_takes_what_needs_no_download_and_names_the_others(run, capsys):
    assert set(go(run(), "--limit", 3)) == {"val", "features", "answers"}
    assert "other tasks: ppl, hellaswag, lambada" in capsys.readouterr().out


def test_the_papers_figures_are_beside_the_models_that_have_some():
    expected = {"small_2l": "PT-Small-2L", "small_3l": "PT-Small-3L",
                "large_2l": "PT-Large-2L", "large_2l_aux": "PT-Large-2L-Aux",
                "gpt_small": "GPT-Small", "gpt_large": "GPT-Large",
                "tiny": None, "small_2l_topk": None, "large_3l": None}
    names = {name: evaluation.paper_figures(configs.load([os.path.join(ROOT, "configs", f"{name}.py")]))
             for name in expected}
    assert {name: figures and figures[0] for name, figures in names.items()} == expected
    result = {"what": "", "loss": 3.0, "perplexity": 20.0, "bits_per_byte": 1.0,
              "acc": 0.3, "acc_norm": 0.4, "acc_norm_stderr": 0.01}
    assert evaluation.describe("val", result, names["small_2l"])[1].split()[-2:] == ["3.0000", "3.1580"]
    assert evaluation.describe("hellaswag", result, names["small_2l"])[2].split()[-3:] == ["0.4000", "0.0100", "0.3500"]


def test_bad_input_is_answered_in_a_sentence(world, run, tmp_path):
    other = tmp_path / "other"
    (tmp_path / "short.txt").write_text("Too short.")
    (tmp_path / "hellaswag_val.jsonl").write_text('{"ctx": 3}\n')
    (tmp_path / "lambada_test.jsonl").write_text("no json\n")
    data.prepare(data.toy_source(), str(other), "bpe:1600", 5_000, sample=2 ** 18)
    folder = run()
    cases = [
        ([tmp_path], "holds no checkpoint: python train.py"),
        ([tmp_path / "nothing.pt"], "there is no checkpoint"),
        ([tmp_path / "short.txt"], "holds no checkpoint"),
        ([folder, "--val", other], "has another vocabulary than"),
        ([folder, "--val", tmp_path / "absent"], "has no prepared data"),
        ([folder, "--text", tmp_path / "short.txt", "--tasks", "ppl"], "fewer than one context of 48"),
        ([folder, "--text", tmp_path / "absent.txt"], "no file matches"),
        ([folder, "--text", tmp_path / "short.txt", "--tasks", "val"], "--text is for the task ppl"),
        ([folder, "--context", 49], "--context 49 is longer than the model's, 48"),
        ([folder, "--stride", 49], "--stride 49 is longer than the context, 48"),
        ([folder, "--tasks", "hellaswagg"], "there is no task 'hellaswagg': did you mean 'hellaswag'"),
        ([folder, "--tasks", "hellaswag", "--data", tmp_path / "absent"], "hellaswag_val.jsonl cannot be read"),
        ([folder, "--tasks", "hellaswag", "--data", tmp_path], "record 1 of .* is no question of hellaswag"),
        ([folder, "--tasks", "lambada", "--data", tmp_path], "line 1, is not JSON"),
    ]
    for arguments, words in cases:
        with pytest.raises((UserError, UserError, UserError), match=words):
            go(*arguments)
    (tmp_path / "parity" / "eval.json").write_text("{")
    with pytest.raises(UserError, match="eval.json is damaged"):
        go(folder, "--tasks", "val", "--limit", 1)
    done = command(tmp_path)
    assert (done.returncode == 1 and done.stderr.startswith("eval.py: ")
            and "Traceback" not in done.stderr and not done.stdout)


def test_without_a_network_both_ways_out_are_named(run, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")

    def unreachable(*arguments, **options):
        raise ConnectionError("no route to the hub")
    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    for name, words in ("hellaswag", "--data DIR"), ("lambada", "--data DIR"), ("ppl", "--text FILES"):
        with pytest.raises(UserError, match=f"(?s)no route to the hub.*Two ways out: .* a network, or .*{words}"):
            go(run(), "--tasks", name)


def test_from_the_hub_only_as_much_as_asked_for_is_read(world, run, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")
    drawn = []

    def stream(name, config, split, streaming):
        assert (name, config, split, streaming) == ("EleutherAI/lambada_openai", "default", "test", True)
        for line in (world / "lambada_test.jsonl").read_text().splitlines():
            drawn.append(line)
            yield json.loads(line)
    monkeypatch.setattr(datasets, "load_dataset", stream)
    found = go(run(), "--tasks", "lambada", "--limit", 7)["lambada"]
    local = go(run(), "--tasks", "lambada", "--limit", 7, "--data", world)["lambada"]
    assert len(drawn) == 7 and found["data"]["sha256"] == local["data"]["sha256"] and found["right"] == local["right"]
    assert found["data"]["source"] == "EleutherAI/lambada_openai, test"


def test_the_harness_is_optional(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match="pip install lm_eval"):
        go(run(), "--harness", "hellaswag")


@pytest.mark.parametrize("change, words", [
    ({"label": 7}, "its label is 7, but it has the endings 0 to 1"),
    ({"label": "-1"}, "its label is -1"),
    ({"endings": "a text"}, "its endings must be a list of texts"),
    ({"endings": ["one", ""]}, "that are not empty"),
    ({"endings": ["one", "[title]"]}, "that are not empty"),
    ({"endings": ["one", 2]}, "its endings must be a list of texts"),
])
def test_a_question_that_cannot_be_answered_is_refused(tmp_path, change, words):
    record = {"activity_label": "Doing", "ctx_a": "One", "ctx_b": "does", "endings": ["this", "that"], "label": "1"}
    path = tmp_path / "hellaswag_val.jsonl"
    path.write_text(json.dumps(record) + "\n")
    assert tasks.questions("hellaswag", str(tmp_path))[0][0].right == 1
    path.write_text(json.dumps(record) + "\n" + json.dumps(record | change) + "\n")
    with pytest.raises(UserError, match=f"record 2 of .*hellaswag_val.jsonl is no question of hellaswag.*{words}"):
        tasks.questions("hellaswag", str(tmp_path))


def test_what_a_later_task_would_miss_is_said_before_the_first(run, monkeypatch, tmp_path):
    monkeypatch.setattr(evaluation, "val", lambda *arguments: pytest.fail("val has run"))
    for arguments in (["--tasks", "val,ppl", "--text", tmp_path / "missing.txt"],
                      ["--tasks", "val,lambada", "--data", tmp_path]):
        with pytest.raises(UserError, match="no file matches|cannot be read"):
            go(run("parity"), *arguments)


def test_a_word_longer_than_the_context_has_no_finite_perplexity(run, tmp_path):
    (tmp_path / "lambada_test.jsonl").write_text(json.dumps({"text": "a " + "q" * 3000}) + "\n")
    result = go(run("parity"), "--tasks", "lambada", "--data", tmp_path)["lambada"]
    assert result["perplexity"] > 1e10 and result["acc"] == 0
