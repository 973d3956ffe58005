"""The report: steps run once, go on after failures, and are run again for a reason; verdicts against known numbers;
the page shows texts as texts; the docs have the figures that were measured."""
import argparse
import glob
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import types

import pytest

import budget
import figures
import findings
import report
import steps
from findings import HOLDS, UNSURE, Claim, Link, Section, Table
from helpers import UserError
from steps import Step

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WORK = """
import os
import sys
import part
name, state = sys.argv[1], sys.argv[1] + ".state"
text = open("input").read() if "--read" in sys.argv else ""
went_on = os.path.exists(state)
open(state, "w").write(text)
if "late" in text:
    open(name, "w").write("half of it")
if "bad" in text or "late" in text:
    sys.exit("work.py: the input is bad: mend it")
open("runs", "a").write(name + went_on * " goes on" + "\\n")
open(name, "w").write('{"result": "%s%s"}' % (text, part.NAME))
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A folder with a small program of two files, and its input. The program goes on from its state."""
    for name, text in (("work.py", WORK), ("part.py", "NAME = 'x'"), ("other.py", ""), ("input", "one")):
        (tmp_path / name).write_text(text)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "tiny.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(steps, "HERE", str(tmp_path))
    return tmp_path


def runs(world):
    """What ran since the last time that this was asked."""
    path = world / "runs"
    lines = path.read_text().splitlines() if path.exists() else []
    path.write_text("")
    return lines


LIST = [Step("first", (("work.py", "first.json", "--read"),), (), ("input",), ("first.json",), ("first.json",),
             ("first.json.state",), lasting=True),
        Step("second", (("work.py", "second.json"),), ("first",), ("first.json",), ("second.json",), (),
             ("second.json.state",)),
        Step("third", (("work.py", "third.json"),), (), (), ("third.json",), (), ("third.json.state",),
             ("other.*",), "settings")]
ALL = ["first.json", "second.json", "third.json"]


def test_what_is_finished_is_not_run_again_and_a_change_costs_what_depends_on_it(world):
    steps.run_all(LIST, "out")
    assert runs(world) == ALL
    (world / "nobody.py").write_text("1")  # nobody imports it
    steps.run_all(LIST, "out")
    assert runs(world) == []
    (world / "input").write_text("two")
    steps.run_all(LIST, "out")
    assert runs(world) == ["first.json", "second.json"]  # nothing goes on from what is of another input
    assert (world / "first.json.state-before").read_text() == "one" and not list(world.glob("third*before"))
    (world / "part.py").write_text("NAME = 'y'")  # code of all three: only what lasts goes on
    steps.run_all(LIST, "out")
    assert runs(world) == ["first.json goes on", "second.json", "third.json"]
    (world / "other.py").write_text("1")  # it is only shown
    steps.run_all(LIST, "out")
    assert runs(world) == ["third.json goes on"]
    steps.run_all([LIST[0], LIST[1], LIST[2]._replace(settings="others")], "out")
    assert runs(world) == ["third.json"]


def test_a_lost_or_damaged_result_is_made_again_and_another_command_is_another_step(world):
    steps.run_all(LIST, "out")
    runs(world)
    (world / "third.json").unlink()  # the program's own copy: the report has its own
    steps.run_all(LIST, "out")
    assert runs(world) == []
    (world / "out/steps/third/third.json").write_text('{"result": "another"}')
    (world / "out/steps/second/step.json").write_text("{")
    steps.run_all(LIST, "out")
    assert runs(world) == ["second.json goes on", "third.json goes on"]
    steps.run_all([LIST[2]._replace(commands=(("work.py", "third.json", "--more"),))], "out")
    assert runs(world) == ["third.json"]
    (world / "first.json").write_text("{}")  # what later steps read was changed by hand
    steps.run_all(LIST[:2], "out")
    assert runs(world) == ["first.json goes on"]
    (world / "out/steps/first/step.json").write_text('{"inputs": [], "error": null, "results": {}, "leaves": {}, '
                                                     '"seconds": 1}')
    assert steps.read_record("out", LIST[0]) == {}


def test_a_step_that_fails_says_so_what_needs_it_waits_and_the_others_go_on(world):
    (world / "input").write_text("bad")
    records = steps.run_all(LIST, "out")
    assert records["first"]["error"] == "exit code 1: work.py: the input is bad: mend it"
    assert records["second"]["error"] == "it needs first, which failed"
    assert records["third"]["error"] is None and runs(world) == ["third.json"]
    (world / "input").write_text("good")
    assert not any(record["error"] for record in steps.run_all(LIST, "out").values())
    assert runs(world) == ["first.json", "second.json"]
    (world / "input").write_text("late")  # it fails with its file half written
    records = steps.run_all(LIST, "out")
    assert records["second"]["error"] == "it needs first, which failed" and runs(world) == []
    (world / "input").unlink()
    assert steps.run_all(LIST, "out")["first"]["error"] == (
        "it needs input, which is not there: it is part of the repository")


def test_an_interrupted_step_goes_on_but_not_from_other_inputs(world, monkeypatch):
    def stopped(text):
        """An input, and a run that is stopped when it has begun anew."""
        (world / "input").write_text(text)

        def stop(*_):
            (world / "first.json.state").write_text(text)
            time.sleep(0.1)
            raise KeyboardInterrupt
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(steps, "run_command", stop)
            steps.run_all(LIST[:1], "out")
        assert steps.read_record("out", LIST[0])["seconds"] > 0.1
    (world / "first.json.state").write_text("a user's own")  # no report made it: the program decides
    steps.run_all(LIST[:1], "out")
    assert runs(world) == ["first.json goes on"]
    stopped("two")
    assert steps.reasons(LIST[0], steps.read_record("out", LIST[0]), "out") == ["it failed"]
    before = steps.read_record("out", LIST[0])["seconds"]
    assert steps.run_all(LIST[:1], "out")["first"]["seconds"] > before  # of both times
    assert runs(world) == ["first.json goes on"]
    stopped("three")
    (world / "input").write_text("two")
    steps.run_all(LIST[:1], "out")
    assert runs(world) == ["first.json"]
    for path in world.glob("first.json*"):
        path.unlink()
    shutil.rmtree(world / "out")
    stopped("one")  # the first time
    (world / "input").write_text("two")
    steps.run_all(LIST[:1], "out")
    assert runs(world) == ["first.json"]


def test_the_time_and_commit_of_a_step_are_those_of_what_it_made(world, monkeypatch):
    def commit_is(name):
        monkeypatch.setattr(steps, "provenance", lambda: {"commit": name, "torch": "2"})
    commit_is("one")
    began = steps.run_all(LIST, "out")
    (world / "out/steps/first/step.json").write_text(json.dumps(began["first"] | {"seconds": 500.0}))
    commit_is("two")
    (world / "part.py").write_text("NAME = 'x'  # a comment")  # the same results, and a training that finds itself done
    records = steps.run_all(LIST, "out")
    assert runs(world)[3:] == ["first.json goes on", "second.json", "third.json"]
    assert records["first"]["commit"] == "one" and 500 < records["first"]["seconds"] < 560
    assert records["second"]["commit"] == "two" and records["second"]["seconds"] < 60
    assert steps.usual_seconds(LIST[0], records["first"]) > 500
    assert steps.usual_seconds(LIST[0], records["first"] | {"error": "it broke"}) == LIST[0].seconds


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_killed_report_leaves_no_process_behind(world, number):
    """A step that starts a process of its own, as budget.py does."""
    sleeper = ("import os, time; open('pid.tmp', 'w').write(str(os.getpid())); os.rename('pid.tmp', 'pid'); "
               "time.sleep(60)")
    (world / "work.py").write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleeper!r}])")
    program = ("import report, steps, test_report; steps.HERE = '.'; "
               "report.make_steps = lambda *_: test_report.LIST[2:]; report.main([])")
    path = os.pathsep.join([ROOT, os.path.join(ROOT, "tests")])
    child = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path},
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (world / "pid").exists():
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(number)
    child.wait(40)
    with pytest.raises(ProcessLookupError):
        os.kill(int((world / "pid").read_text()), 0)
    assert steps.read_record("out/report", LIST[2])["error"] == "it was stopped before its end"
    assert "stopped before its end" in (world / "out/report/index.html").read_text()


def test_only_takes_what_a_step_needs(world):
    assert [step.name for step in report.choose(LIST, "second")] == ["first", "second"]
    assert [step.name for step in report.choose(LIST, None)] == ["first", "second", "third"]
    with pytest.raises(UserError, match="did you mean 'third'"):
        report.choose(LIST, "thrid")


@pytest.mark.parametrize("quick", [False, True])
def test_every_file_that_a_step_reads_is_made_by_a_step_before_it(quick, monkeypatch):
    monkeypatch.chdir(ROOT)
    made, known = set(), set()
    for step in report.make_steps("out/report", quick):
        assert set(step.needs) <= known and all(os.path.exists(os.path.join(ROOT, words[0])) for words in step.commands)
        assert {*step.reads, *step.shows} <= made, step.name
        made |= set(step.leaves)
        known.add(step.name)
    assert set(steps.code_of("train.py", ROOT)) >= {"train.py", "model.py", "dpb.py", "kernels.c", "helpers.py"}
    assert not set(steps.code_of("noise.py", ROOT)) & {"report.py", "judge.py", "pareto.py"}
    assert {"train.py", "optim.py", "toyworld.py"} <= set(steps.code_of("budget.py", ROOT))  # it starts one by its name
    assert {"web/page.js", "web/page.css", "web/page.html"} <= set(steps.code_of("view.py", ROOT))


class Parsed(Exception):
    pass


@pytest.mark.parametrize("quick", [False, True])
def test_every_step_is_a_command_that_its_program_understands(quick, monkeypatch):
    """Each program is run until it has read its arguments."""
    import config
    read = argparse.ArgumentParser.parse_args

    def parsed(self, *arguments):
        read(self, *arguments)
        raise Parsed
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.chdir(ROOT)
    for step in report.make_steps("out/report", quick):
        for script, *words in step.commands:
            if script == "train.py":
                config.load(words)
            elif script == "kloosterman.py":
                assert words == ["1024"]
            else:
                with pytest.raises(Parsed):
                    importlib.import_module(script.removesuffix(".py")).main(words)


def test_a_report_in_a_folder_with_brackets_finds_its_files(world, monkeypatch):
    (world / "a[1]").mkdir()
    step = Step("x", (("work.py", "a[1]/x.json"),), keeps=(f"{glob.escape('a[1]')}/x.json",))
    assert steps.run_all([step], "out[1]")["x"]["error"] is None
    monkeypatch.setattr(report, "settings_of", lambda *names: "")
    for step in report.make_steps("out[1]", True):
        assert not any(os.path.basename(pattern) and "out[1]" in pattern for pattern in (
            *step.reads, *step.keeps, *step.leaves, *step.state, *step.shows)), step.name


# The price in tokens


def test_the_price_of_a_power_law_is_found_exactly():
    def loss(steps):
        return 3 * steps ** -0.1
    dense = {seed: [(steps, loss(steps)) for steps in (500, 1000, 2000)] for seed in range(3)}
    parity = {seed: (3000, loss(1200)) for seed in range(3)}
    found = budget.price(parity, dense, 0.0)
    assert found["price"] == pytest.approx([2.5] * 3) and found["bounds"] == []
    parity = {0: (3000, loss(1200)), 1: (3000, loss(1000)), 2: (3000, loss(1500))}
    value, low, high = budget.price(parity, dense, 0.0)["price"]
    assert value == pytest.approx((2.5 * 3 * 2) ** (1 / 3)) and low < value < high
    assert math.log(high / value) == pytest.approx(math.log(value / low))
    assert budget.price(parity, dense, 0.01)["price"][0] > value  # a worse loss is had for less


def test_a_loss_outside_of_the_budgets_is_only_a_bound():
    dense = {0: [(500, 2.0), (1000, 1.5)]}
    for loss, needed, bound in ((1.4, 1000, "more"), (2.1, 500, "fewer"), (1.5, 1000, ""), (2.0, 500, "")):
        found = budget.price({0: (2000, loss)}, dense, 0.0)
        assert found["seeds"][0]["steps"] == pytest.approx(needed) and found["seeds"][0]["bound"] == bound
        assert found["price"][1] is None  # one seed has no interval
    section = findings.tokens(lambda step, file: {"rows": [], "paper": budget.PAPER, "results": [
        {"tolerance": 0.0, "seeds": [1, 2, 3], "price": [2.0, 1.5, 2.6], "bounds": []},
        {"tolerance": 0.01, "seeds": [1, 2, 3], "price": [2.0, 1.5, 2.6], "bounds": ["more"]}]})
    assert [claim.verdict() for claim in section.claims] == [HOLDS, UNSURE]
    assert "9.4 (small), 6.7 (large)" in section.tables[0].rows[1]


def test_runs_of_a_budget_are_trained_once_and_others_are_reused(tmp_path, monkeypatch):
    (tmp_path / "small.py").write_text(
        "layers = 1; d = 32; heads = 1; context = 16; vocab_size = 2048; bits = (5, 8); active = (4, 6); "
        "children = (16,); batch_tokens = 32; warmup_steps = 1; eval_tokens = 64; data = 'data'; device = 'cpu'")
    (tmp_path / "dense.py").write_text("base = 'small.py'\nbottleneck = 'none'")
    monkeypatch.chdir(tmp_path)
    import data
    import train
    data.prepare_toy("data", tokens=3000)
    trained = []

    def run(command):  # as a process would, without waiting for torch
        trained.append(command[-3])
        return types.SimpleNamespace(returncode=train.main(command[2:]) or 0)
    monkeypatch.setattr(budget, "subprocess", types.SimpleNamespace(run=run))  # a compiler may yet have to run
    command = ["--parity", "small.py", "--dense", "dense.py", "--steps", "6", "--budgets", "2,4", "--seeds", "1"]
    budget.main(command)
    first = json.loads((tmp_path / "out/budget/budget.json").read_text())
    assert [(row["kind"], row["steps"]) for row in first["rows"]] == [("parity", 6), ("dense", 2), ("dense", 4)]
    os.rename("out/budget/dense-4-0", "elsewhere")
    budget.main([*command, "--reuse", "elsewhere"])
    again = json.loads((tmp_path / "out/budget/budget.json").read_text())
    assert [row["loss"] for row in again["rows"]] == [row["loss"] for row in first["rows"]]
    assert len(trained) == 3


# The page

HOSTILE = ["<script>document.title = 'run'</script>", "</style><img src=x onerror=alert(1)>", "\"'&<b>", "{content}"]


@pytest.fixture
def page(world, monkeypatch):
    """A page whose every text would like to be run, with a failed step."""
    listed = [Step("dictionary", (("work.py", HOSTILE[0], HOSTILE[1]),), (), (), (HOSTILE[3],)), LIST[2]]
    shutil.rmtree("out", ignore_errors=True)
    (world / "work.py").write_text(f"import sys; sys.exit({HOSTILE[1]!r})")
    (world / "third.json").write_text("{}")

    def section(get):
        claims = [Claim(text, [0.1, 0.05, 0.2], 1, text) for text in HOSTILE]
        return Section(claims, [Table(HOSTILE[0], HOSTILE, [HOSTILE, [Link('0:7+"'), *HOSTILE[1:]]], HOSTILE[1])])
    monkeypatch.setattr(report, "SECTIONS", [section] * len(findings.SECTIONS))
    steps.run_all(listed, "out")
    report.write_page("out", listed, True, "../tiny/features.html?a=\"b")
    return world / "out" / "index.html"


def test_texts_are_shown_as_texts_and_a_failure_is_in_the_page(page):
    text = page.read_text()
    assert "<script" not in text and "<img src=x" not in text and text.count("</style>") == 1
    assert "&lt;script&gt;" in text and "failed: exit code 1" in text and "{content}" in text
    assert "Not part of --quick" in text and 'href="../tiny/features.html?a=&quot;b"' in text
    assert '<a href="../tiny/features.html?a=&quot;b#0:7+&quot;">0:7+&quot;</a>' in text  # into the explorer
    known = json.loads((page.parent / "report.json").read_text())
    assert known["steps"]["dictionary"]["word"].startswith("failed: exit code 1")
    assert {claim["verdict"] for claim in known["claims"]} == {HOLDS}


def test_in_a_browser_the_page_has_no_error_fits_a_phone_and_fetches_nothing(page):
    browser = pytest.importorskip("browser", reason="tests/browser.py is not here")
    if browser.find_browser() is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with browser.Browser(width=400, height=800) as opened:
        for dark in (False, True):
            opened.resize(400, 800, dark=dark)
            opened.open(page.as_uri())
            opened.wait("document.querySelectorAll('section').length > 5")
            assert opened.run("document.documentElement.scrollWidth") <= 400
            colours = opened.run("[getComputedStyle(document.body).color, getComputedStyle(document.body)."
                                 "backgroundColor].map(text => text.match(/\\d+/g).slice(0, 3).map(Number))")
            assert (sum(colours[0]) > sum(colours[1])) == dark
        assert opened.run("document.title") == "ParityTransformer: report"
        assert opened.problems == [] and all(url.startswith("file:") for url in opened.requests)


def test_the_command_ends_with_a_sentence_when_steps_fail_and_writes_the_page(world, monkeypatch, capsys):
    monkeypatch.setattr(report, "make_steps", lambda out, quick: LIST)
    (world / "input").write_text("bad")
    with pytest.raises(UserError, match="2 of 3 steps failed: first, second. The page says why"):
        report.main([])
    assert (world / "out/report/index.html").exists()
    (world / "input").write_text("good")
    report.main(["--only", "first"])
    assert runs(world) == ["third.json", "first.json"]
    report.main(["--list"])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[-3:]] == [
        ["first", "finished"], ["second", "it"], ["third", "finished"]]
    with pytest.raises(UserError, match="holds no report"):
        report.main(["--docs", "--out", "nowhere"])
    with pytest.raises(UserError, match="no source of figures for the docs"):
        report.main(["--docs", "--quick"])
    os.chdir("configs")
    with pytest.raises(UserError, match="in the folder of the repository"):
        report.main([])


def test_what_is_out_of_date_is_marked_not_counted_and_not_for_the_docs(world, monkeypatch):
    listed = [LIST[0]._replace(name="noise"), LIST[2]._replace(name="probe")]
    monkeypatch.setattr(report, "make_steps", lambda out, quick: listed)
    monkeypatch.setattr(report, "SECTIONS", [lambda get, key=key: Section([Claim(f"claim of {key}", [3, 2, 4], 1, "x")],
                                                                          [], ()) for key in findings.ABOUT])
    written = []
    monkeypatch.setattr(figures, "rewrite", lambda root, known, made: written.append(sorted(made)))
    report.main([])
    page = world / "out/report/index.html"
    assert "claims 11 hold, 0 do not" in page.read_text() and "out of date" not in page.read_text()
    report.main(["--docs"])
    assert written == [["noise", "probe"]]
    (world / "input").write_text("another")
    report.main(["--page"])
    assert "claims 10 hold" in page.read_text() and "1 more are out of date" in page.read_text()
    claims = json.loads((page.parent / "report.json").read_text())["claims"]
    assert [claim["section"] for claim in claims if claim["out of date"]] == ["noise"]
    with pytest.raises(UserError, match="noise is done, but since then: input changed"):
        report.main(["--docs"])
    assert len(written) == 1


def test_results_that_cannot_be_read_cost_one_section_and_the_page_is_there_from_the_first_step_on(
        world, monkeypatch):
    def broken(get):
        return get("noise", "first.json")["rows"][0]
    monkeypatch.setattr(report, "make_steps", lambda out, quick: [LIST[0]._replace(name="noise"), LIST[2]])
    monkeypatch.setattr(report, "SECTIONS", [broken if key == "noise" else lambda get: None for key in findings.ABOUT])
    broken.__name__ = "of_noise"
    monkeypatch.setattr(figures, "of_noise", broken)
    pages = []
    run_step = steps.run_step

    def spied(step, out, tick):
        pages.append(os.path.exists("out/report/index.html"))
        return run_step(step, out, tick)
    monkeypatch.setattr(steps, "run_step", spied)
    report.main([])
    assert pages == [False, True]
    assert "Its results cannot be read (KeyError: &#x27;rows&#x27;)" in (world / "out/report/index.html").read_text()
    with pytest.raises(UserError, match="of noise cannot be read .KeyError"):
        report.main(["--docs"])


# The docs


def test_the_docs_have_the_figures_that_were_measured():
    steps, places = figures.load(ROOT)
    assert places and figures.missing(ROOT) == [] and all(step["commit"] for step in steps.values())


def test_figures_have_names_and_a_form():
    entry = {"text": "{:.2f~} +-{:.3f~}, {:+.1f~}, {:.1%}, {}", "values": [0.123, 0.0456, -0.32, 0.5, 1.4]}
    assert figures.shown(entry) == ".12 +-.046, -.3, 50.0%, 1.4"
    pareto = {"rows": [{"run": "tiny", "source": "own", "layers": [0, 1], "way": "contrast", "ratio": 0.3,
                        "concept": [0.2, 0.1, 0.3], "fluency": [0.9, 0.8, 1.0]}]}
    metrics = b'{"step": 1}\n{"val_loss": 3}\n{"val_loss": 2, "dead_fraction": [0.1, 0.2]}\n'
    known = {("steering", "pareto.json"): pareto, ("train", "metrics.jsonl"): metrics}
    found = figures.collect(lambda *which: known.get(which))
    line = "tiny: own, all layers, contrast: "
    assert found.pop(f"{line}concept half") == pytest.approx(0.1) == found.pop(f"{line}fluency half")
    assert found == {f"{line}concept": 0.2, f"{line}concept low": 0.1, f"{line}concept high": 0.3,
                     f"{line}fluency": 0.9, f"{line}fluency low": 0.8, f"{line}fluency high": 1.0, f"{line}ratio": 0.3,
                     "tiny trained val_loss": 2, "tiny trained dead_fraction 0": 0.1,
                     "tiny trained dead_fraction 1": 0.2}


def test_new_figures_are_written_into_the_docs_and_drift_is_noticed(tmp_path):
    entry = {"file": "README.md", "text": "a loss of {:.2f}, and {:.1%} dead", "names": ["loss", "dead"],
             "values": [1.5, 0.011]}
    (tmp_path / "docs").mkdir()
    figures.save(tmp_path, {"train": {"commit": "a"}, "eval": {"commit": "b"}}, [entry])
    (tmp_path / "README.md").write_text("It has a loss of 1.50, and 1.1% dead ones.")
    assert figures.missing(tmp_path) == []
    assert figures.rewrite(tmp_path, {"loss": 1.257, "others": 3}, {"eval": {"commit": "c"}}) == [
        ("README.md", "a loss of 1.50, and 1.1% dead", "a loss of 1.26, and 1.1% dead")]
    assert (tmp_path / "README.md").read_text() == "It has a loss of 1.26, and 1.1% dead ones."
    assert figures.missing(tmp_path) == []
    assert figures.load(tmp_path) == ({"train": {"commit": "a"}, "eval": {"commit": "c"}},
                                      [entry | {"values": [1.257, 0.011]}])
    (tmp_path / "README.md").write_text("It has a loss of 1.20, and 1.1% dead ones.")
    assert len(figures.missing(tmp_path)) == 1
    with pytest.raises(UserError, match="mend either"):
        figures.rewrite(tmp_path, {}, {})
