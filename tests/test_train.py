"""Runs: exact continuation, ranks, checkpoints, bad input. Small models on a small piece of the toy world."""
import dataclasses
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
import types
from concurrent import futures

import pytest
import torch
import torch.distributed as dist

import config as configs
import data
import helpers
import plot
import train
from checkpoint import open_run
from helpers import UserError
from ranks import store_of_this_attempt

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SMALL = """
layers = 2
d = 32
heads = 2
context = 32
vocab_size = 2048
bits = (5, 8)
active = (4, 6)
children = (16,)
batch_tokens = 512
max_steps = 12
warmup_steps = 2
decay_fraction = 0.5
muon_lr = 0.02
adam_lr = 3e-3
eval_every = 6
eval_tokens = 2048
save_every = 4
log_every = 1
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("data") / "world")
    data.prepare_toy(folder, tokens=60_000)
    return folder


@pytest.fixture
def arguments(tmp_path, corpus):
    """Command-line arguments of a run in its own folder; call with settings to change."""
    path = tmp_path / "small.py"
    path.write_text(SMALL)

    def make(name="run", **changes):
        values = {"data": corpus, "out": str(tmp_path / name), "device": "cpu"} | changes
        return [str(path)] + [f"--{key}={value}" for key, value in values.items()]
    return make


def go(arguments):
    """A run in this process."""
    torch.use_deterministic_algorithms(False)
    config = configs.load(arguments)
    train.train(config)
    return rows_of(config.out)


def rows_of(out):
    """The metrics of a run, but for the speed."""
    return [{key: value for key, value in row.items() if key != "tokens_per_second"} for row in plot.read_metrics(out)]


def command(arguments, ranks=0, restarts=0):
    """A run in a process of its own, or under torchrun."""
    start = [sys.executable, "train.py"]
    if ranks:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                 f"--max-restarts={restarts}", "train.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(start + arguments, cwd=ROOT, env=environment, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def close(one, two):
    """The same curves to rounding."""
    assert [row["step"] for row in one] == [row["step"] for row in two]
    for a, b in zip(one, two):
        for key in a:
            assert b[key] == pytest.approx(a[key], rel=2e-3, abs=2e-3), (a["step"], key)


def wait_for_step(out, step, process):
    """Until the run has logged a step."""
    deadline = time.time() + 120
    while time.time() < deadline and process.poll() is None:
        rows = plot.read_metrics(out)
        if rows and rows[-1]["step"] >= step:
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate(timeout=300)[0])


def test_a_run_writes_everything_it_says(arguments, tmp_path):
    process = command(arguments())
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    out = tmp_path / "run"
    assert {path.name for path in out.iterdir()} == {
        ".lock", "config.json", "metrics.jsonl", "ckpt.pt", "ckpt.prev.pt", "best.pt", "loss.png"}
    settings = json.loads((out / "config.json").read_text())
    assert configs.from_dict(settings) == configs.load(arguments())
    assert settings["about"]["parameters"] > 0 and settings["about"]["torch"] == torch.__version__
    rows = plot.read_metrics(out)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all({"step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second"} <= row.keys() for row in rows)
    assert {"val_loss", "dead_fraction", "l0", "variance_explained"} <= rows[5].keys() and rows[5]["tokens"] == 6 * 512
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3 and len(rows[-1]["dead_fraction"]) == 2 and rows[-1]["l0"] == 10
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert f"validation loss {rows[-1]['val_loss']:.4f}" in printed and "\r" not in printed
    checkpoint = torch.load(out / "ckpt.pt", weights_only=True)
    assert checkpoint["step"] == 12 and {"model", "optimizer", "config", "tokenizer"} <= checkpoint.keys()


def test_killed_at_any_moment_and_continued_is_bit_equal(arguments):
    whole = go(arguments("whole", save_every=1))
    run = arguments("killed", save_every=1)
    out = configs.load(run).out
    for step in 2, 7, 9:
        process = command(run)
        wait_for_step(out, step, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    process = command(run)
    printed = process.communicate(timeout=300)[0]
    assert "continuing" in printed and process.returncode == 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes have
    try:
        assert rows_of(out) == go(arguments("single", save_every=1))
    finally:
        torch.set_num_threads(threads)
    close(rows_of(out), whole)


def test_ctrl_c_and_sigterm_save_and_leave_cleanly(arguments):
    for number in signal.SIGTERM, signal.SIGINT:
        run = arguments(f"stopped{number}", max_steps=400, save_every=1000, eval_every=1000)
        out = configs.load(run).out
        process = command(run)
        wait_for_step(out, 3, process)
        process.send_signal(number)
        printed = process.communicate(timeout=300)[0]
        assert process.returncode == 0 and "saved: the same command goes on" in printed and "Traceback" not in printed
        step = torch.load(os.path.join(out, "ckpt.pt"), weights_only=True)["step"]
        assert step == plot.read_metrics(out)[-1]["step"] >= 3


def test_two_ranks_follow_the_curve_of_one_and_runs_change_ranks(arguments):
    """Two ranks; one rank; one rank that accumulates; and one that goes on from the checkpoint of two."""
    process = command(arguments("two", max_steps=12, save_every=4), ranks=2)
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    two = rows_of(configs.load(arguments("two")).out)
    one = go(arguments("one"))
    close(one, two)
    close(one, go(arguments("accumulated", micro_batch=4)))

    started = command(arguments("moved", save_every=1), ranks=2)
    out = configs.load(arguments("moved")).out
    wait_for_step(out, 5, started)
    started.send_signal(signal.SIGTERM)
    printed = started.communicate(timeout=300)[0]
    assert torch.load(os.path.join(out, "ckpt.pt"), weights_only=True)["step"] < 12, printed
    close(one, go(arguments("moved", save_every=1)))


def test_ranks_of_a_restart_do_not_meet_those_of_the_attempt_before():
    store = dist.HashStore()
    for _ in range(3):  # the second and third time, the store is full of what is over
        with futures.ThreadPoolExecutor(3) as pool:
            stores = list(pool.map(lambda rank: store_of_this_attempt(store, rank, 3), [2, 1, 0]))
        assert not stores[0].check(["address"])
        stores[0].set("address", "of rank 2")
        assert stores[1].get("address") == stores[2].get("address") == b"of rank 2"


def test_a_killed_rank_is_restarted_by_torchrun_and_the_run_ends_the_same(arguments):
    run = arguments("restarted", save_every=1)
    out = configs.load(run).out
    process = command(run, ranks=2, restarts=2)
    wait_for_step(out, 4, process)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(children[-1]), signal.SIGKILL)
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    assert "continuing" in printed
    close(go(arguments("plain", save_every=1)), rows_of(out))


def test_a_finished_run_says_so_and_fresh_starts_over(arguments, capsys):
    first = go(arguments())
    again = go(arguments())
    assert "is finished, at step 12" in capsys.readouterr().out and again == first
    assert go(arguments(fresh="true")) == first  # the same numbers, computed again
    assert "is finished" not in capsys.readouterr().out


def test_another_config_is_refused_by_the_names_of_the_keys(arguments):
    go(arguments(max_steps=4))
    with pytest.raises(UserError, match=r"muon_lr \(was 0.02, now 0.5\), seed \(was 0, now 3\)"):
        go(arguments(max_steps=4, muon_lr=0.5, seed=3))
    go(arguments(max_steps=4, log_every=7))  # how often to log may change


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty"])
def test_a_damaged_checkpoint_is_noticed_and_the_previous_one_used(arguments, capsys, damage):
    whole = go(arguments("whole"))
    run = arguments("damaged", max_steps=12)
    config = configs.load(run)
    go(run)
    path = os.path.join(config.out, "ckpt.pt")
    content = bytearray(open(path, "rb").read())
    if damage == "flip":
        content[len(content) // 2] ^= 16
    with open(path, "wb") as file:
        file.write({"truncate": content[: len(content) // 2], "flip": content, "empty": b""}[damage])
    assert go(run) == whole
    printed = capsys.readouterr().out
    assert "ckpt.pt is damaged" in printed and "going on from" in printed and "ckpt.prev.pt, step 8" in printed
    for name in "ckpt.pt", "ckpt.prev.pt":
        with open(os.path.join(config.out, name), "wb") as file:
            file.write(b"no")
    with pytest.raises(UserError, match="--fresh=true starts over"):
        go(run)


def test_a_full_disk_does_not_cost_the_last_good_checkpoint(arguments, monkeypatch, capsys):
    config = configs.load(arguments())
    real, calls = torch.save, []

    def full(content, file):
        calls.append(file.name)
        if "ckpt" in file.name and len([name for name in calls if "ckpt" in name]) > 1:
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(content, file)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="ckpt.pt could not be written.*kept"):
        go(arguments())  # step 4 is saved, step 8 is not (and said), step 12, the last, is an error
    assert "No space left" in capsys.readouterr().out
    assert train.load(os.path.join(config.out, "ckpt.pt"))["step"] == 4
    assert not [name for name in os.listdir(config.out) if name.endswith(".tmp")]
    monkeypatch.setattr(torch, "save", real)
    assert go(arguments())[-1]["step"] == 12


def test_a_loss_that_is_not_finite_stops_the_run_with_its_place(arguments):
    with pytest.raises(UserError) as error:
        go(arguments(adam_lr=1e30, save_every=1))
    text = str(error.value)
    assert "at step" in text and "windows" in text and "last good checkpoint is" in text and "Lower" in text


def test_it_stops_at_a_validation_loss(arguments, capsys):
    plain = go(arguments("plain"))
    target = plain[5]["val_loss"]
    stopped = go(arguments("stopped", stop_at_val_loss=target / 1.005, stop_tolerance=0.01))
    assert stopped == plain[:6]
    capsys.readouterr()
    go(arguments("stopped", stop_at_val_loss=target / 1.005))
    assert "is finished, at step 6" in capsys.readouterr().out


def test_a_mixture_is_continued_exactly_and_what_is_also_measured_may_end_the_run(arguments, corpus, tmp_path):
    more = str(tmp_path / "more")
    data.prepare(data.toy_source(seed=5), more, corpus, tokens=20_000)
    whole = go(arguments("whole", data=f"{corpus}:3,{more}:1", save_every=6))
    assert whole != go(arguments("plain", save_every=6)) and whole[0]["step"] == 1

    def at_six(run):
        run.stopped = True
        return {"seen": run.step}
    torch.use_deterministic_algorithms(False)
    config = configs.load(arguments("part", data=f"{corpus}:3,{more}:1", save_every=6))
    train.train(config, also=at_six)
    assert rows_of(config.out) == [*whole[:5], whole[5] | {"seen": 6}]
    path = os.path.join(config.out, "ckpt.pt")
    torch.save(torch.load(path, weights_only=True) | {"stopped": False}, path)
    train.train(config)
    assert rows_of(config.out)[6:] == whole[6:]


def test_fine_tuning_starts_from_the_weights_of_another_run(arguments):
    first = go(arguments("first"))
    tuned = go(arguments("tuned", init_from=configs.load(arguments("first")).out, seed=1))
    assert tuned[0]["loss"] < first[0]["loss"] - 0.5
    with pytest.raises(UserError, match="are another model's: Error.* Unexpected key"):
        go(arguments("wrong", init_from=configs.load(arguments("first")).out, bottleneck="none", layers=1))
    with pytest.raises(UserError, match="holds no checkpoint"):
        go(arguments("none", init_from="nowhere"))


def test_a_dense_model_becomes_a_parity_model(arguments):
    """Its weights are taken, the bottleneck fades in, and what is evaluated and saved has it whole."""
    go(arguments("dense", bottleneck="none", max_steps=30))
    dense = configs.load(arguments("dense")).out
    rows = go(arguments("converted", init_from=dense, fade=0.5, max_steps=20, log_every=1, muon_lr=1e-3))
    scratch = go(arguments("scratch", max_steps=20, log_every=1))
    assert rows[0]["loss"] < scratch[0]["loss"] - 0.3
    run = open_run(configs.load(arguments("converted")).out)
    assert run.config.bottleneck == "parity" and not run.model.blocks[0].fading
    batch = data.Tokens(run.config.data, "val").windows(range(4), run.config.context)
    model = run.model
    whole = model(batch[:, :-1])
    model.fade_in(0.0)
    assert torch.equal(model(batch[:, :-1]), whole)  # in evaluation
    plain = train.GPT(dataclasses.replace(run.config, bottleneck="none")).eval()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if name in plain.state_dict()})
    torch.testing.assert_close(model.train()(batch[:, :-1]), plain(batch[:, :-1]))  # nothing of it yet
    model.fade_in(1.0)
    torch.testing.assert_close(model(batch[:, :-1]), whole)


@pytest.mark.parametrize("bottleneck", ["none", "topk"])
def test_dense_and_topk_train_too(arguments, bottleneck):
    rows = go(arguments(bottleneck, bottleneck=bottleneck))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert ("l0" in rows[-1]) == (bottleneck == "topk")


def test_auxiliary_losses_begin_when_they_should(arguments, monkeypatch):
    """Up to their start a run is the one without them; from then on they weigh as the ramp says."""
    config = configs.Config(max_steps=100, auxiliary_start=0.5, auxiliary_ramp=0.2)
    shares = [train.auxiliary_share(step, config) for step in range(100)]
    assert shares[:50] == [0.0] * 50 and shares[50] == pytest.approx(1 / 20) and shares[69:] == [1.0] * 31
    assert train.auxiliary_share(0, configs.Config()) == 1.0
    seen, weights = [], dict(variance_weight=0.05, reconstruction_weight=5.0, auxiliary_start=0.5, max_steps=6)
    total = train.GPT.total_loss

    def look(self, losses, share):
        seen.append((sorted(losses), share))
        return total(self, losses, share)
    monkeypatch.setattr(train.GPT, "total_loss", look)
    plain = go(arguments("plain", max_steps=6, log_every=1))
    seen.clear()
    late = go(arguments("late", log_every=1, **weights))
    assert [row["loss"] for row in late[:4]] == [row["loss"] for row in plain[:4]]
    assert late[4]["loss"] != plain[4]["loss"]
    assert seen == [(["lm"], 0.0)] * 3 + [(["lm", "reconstruction", "variance"], 1.0)] * 3


def test_evaluation_equals_its_definition(arguments, corpus):
    config = configs.load(arguments(eval_tokens=640))
    torch.manual_seed(0)
    model = train.GPT(config)
    tokens = data.Tokens(corpus, "val")
    from contextlib import nullcontext
    row = train.evaluate(model, tokens, config, 0, 1, torch.device("cpu"), nullcontext)
    windows = tokens.windows(range(20), 32)
    model.eval()
    record = []
    loss = model(windows[:, :-1], windows[:, 1:], record=record)["lm"].item()
    assert row["val_loss"] == pytest.approx(loss, abs=1e-6)
    for level, (low, high) in enumerate([(0, 32), (32, 256)]):
        alive = [len(set(code.indices.flatten().tolist()) & set(range(low, high))) for code, _, _ in record]
        assert row["dead_fraction"][level] == pytest.approx(1 - sum(alive) / len(alive) / (high - low))
    explained = [1 - ((h - y) ** 2).sum() / ((h - h.mean((0, 1))) ** 2).sum() for _, y, h in record]
    assert row["variance_explained"] == pytest.approx(sum(explained).item() / len(explained), abs=1e-4)


def test_wrong_runs_are_answered(arguments, tmp_path):
    for change, words in [(dict(data=str(tmp_path / "nothing")), "has no prepared data"),
                          (dict(vocab_size=100), "model's vocab_size is 100"),
                          (dict(context=100_000, batch_tokens=100_000), "fewer than one window"),
                          (dict(device="cuda"), "finds no GPU")]:
        if change.get("device") == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises(UserError, match=words):
            go(arguments("wrong", **change))
    with pytest.raises(UserError, match="cannot share evenly"):
        train.micro_steps(configs.load(arguments(batch_tokens=96)), 2)
    run = subprocess.run([sys.executable, "train.py", "configs/tiny.py", "--lr=3"], cwd=ROOT,
                         capture_output=True, text=True)
    assert (run.returncode == 1 and run.stderr.startswith("train.py: there is no setting 'lr'")
            and "Traceback" not in run.stderr)


def test_accumulation_follows_from_the_batch(arguments):
    config = configs.load(arguments(batch_tokens=32 * 24))  # 24 sequences
    assert train.micro_steps(dataclasses.replace(config, micro_batch=10), 1) == 3
    assert train.micro_steps(dataclasses.replace(config, micro_batch=10), 2) == 2
    assert train.micro_steps(config, 1) == 1


def test_the_picture_of_several_runs(arguments, tmp_path):
    for name in "a", "b":
        go(arguments(name, max_steps=4))
    run = subprocess.run([sys.executable, "plot.py", str(tmp_path / "a"), str(tmp_path / "b"),
                          "--out", str(tmp_path / "both.png")],
                         cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and (tmp_path / "both.png").stat().st_size > 10_000
    run = subprocess.run([sys.executable, "plot.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 1 and "has no metrics.jsonl" in run.stderr


def test_wandb_and_tensorboard_get_every_row_and_are_asked_for_when_missing(arguments, monkeypatch):
    for package, flag in ("wandb", "wandb"), ("torch.utils.tensorboard", "tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)  # as if not installed
        with pytest.raises(UserError, match=f"{flag} is not installed: pip install {flag}"):
            go(arguments(flag, max_steps=2, **{flag: "true"}))
    logged, scalars = [], []
    run = types.SimpleNamespace(log=lambda row, step: logged.append((step, row["loss"])))
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **settings: run))
    writer = types.SimpleNamespace(add_scalar=lambda key, value, step: scalars.append((step, key, value)))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard",
                        types.SimpleNamespace(SummaryWriter=lambda folder: writer))
    rows = go(arguments("both", max_steps=2, wandb="true", tensorboard="true"))
    assert logged == [(row["step"], row["loss"]) for row in rows]
    assert [(step, value) for step, key, value in scalars if key == "loss"] == logged


def test_the_progress_line_has_mfu_where_the_peak_is_known(arguments, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    config = configs.load(arguments())
    model = train.GPT(config)
    for peak in None, 1e9:
        train.show_progress(config, 3, 2.5, 0.5, 0.25, model, peak, ranks=2)
    plain, known = capsys.readouterr().err.split("\r\x1b[K")[1:]
    assert plain == "step 3/12  loss 2.5000  1,024 tokens/s  0:02 left"
    weights = 2 * 12 * 32 * 32 + 2048 * 32  # of two blocks, and of the embedding, which is also the unembedding
    mfu = 1024 * (6 * weights + 12 * 2 * 32 * 32) / 1e9 / 2
    assert f"MFU {mfu:.1%}" in known


def files_of(out):
    return {path.name: path.read_bytes() for path in out.iterdir() if path.suffix in (".pt", ".jsonl", ".json", ".png")}


def test_a_folder_that_holds_a_run_is_never_cleared_without_fresh(arguments, tmp_path):
    go(arguments())
    out = tmp_path / "run"
    for name in "ckpt.pt", "ckpt.prev.pt":
        (out / name).unlink()
    before = files_of(out)
    for kept in ("best.pt and metrics.jsonl", "metrics.jsonl"):
        with pytest.raises(UserError, match=f"run holds {kept} of a run, but no checkpoint to go on from"):
            go(arguments())
        assert files_of(out).items() <= before.items()
        if kept != "metrics.jsonl":
            (out / "best.pt").unlink()


def test_fresh_replaces_the_older_run_when_the_new_one_is_saved_and_not_before(arguments, tmp_path, monkeypatch):
    first = go(arguments())
    out, before = tmp_path / "run", files_of(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if not installed
    with pytest.raises(UserError, match="wandb is not installed"):
        go(arguments(fresh="true", wandb="true"))
    assert files_of(out) == before
    real = train.train_step

    def fail(run, *rest):
        if run.step == 3:  # before the first checkpoint, at step 4
            raise UserError("the lights went out")
        return real(run, *rest)
    monkeypatch.setattr(train, "train_step", fail)
    with pytest.raises(UserError, match="the lights went out"):
        go(arguments(fresh="true", seed=5))
    assert before.items() <= files_of(out).items()
    monkeypatch.undo()
    assert rows_of(out) == first
    second = go(arguments(fresh="true", seed=5))
    assert second != first and len(second) == 12 and not set(files_of(out)) - set(before)
    assert json.loads((out / "config.json").read_text())["seed"] == 5


def test_a_fresh_run_killed_while_it_replaces_the_older_one_goes_on_replacing(arguments, tmp_path, monkeypatch):
    go(arguments(seed=5))
    monkeypatch.setattr(train, "replace_older", lambda run: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        go(arguments(fresh="true"))
    monkeypatch.undo()
    assert len(list((tmp_path / "run").glob("metrics.*.jsonl"))) == 1
    rows = go(arguments())  # goes on at step 4
    assert rows == go(arguments("whole")) and not list((tmp_path / "run").glob("metrics.*.jsonl"))
    bests = [torch.load(tmp_path / name / "best.pt", weights_only=True) for name in ("run", "whole")]
    assert all(torch.equal(bests[0]["model"][key], bests[1]["model"][key]) for key in bests[0]["model"])


def test_best_is_written_even_if_the_run_was_killed_before_that(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "save_best", lambda *rest: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        go(arguments(save_every=100))  # the first evaluation, at step 6, saves a checkpoint, then the best
    monkeypatch.undo()
    assert torch.load(tmp_path / "run" / "ckpt.pt", weights_only=True)["step"] == 6
    monkeypatch.setattr(train, "loop", lambda run: False)
    go(arguments(save_every=100))
    assert torch.load(tmp_path / "run" / "best.pt", weights_only=True)["step"] == 6


def test_two_runs_in_one_folder_do_not_mix(arguments, tmp_path):
    with helpers.locked(str(tmp_path / "run")):
        process = command(arguments())
        printed = process.communicate(timeout=120)[0]
    assert process.returncode == 1 and "another process" in printed and "choose another --out" in printed


def test_weights_of_another_tokenizer_are_refused(arguments):
    run = types.SimpleNamespace(tokens=types.SimpleNamespace(tokenizer_id="another"), config=configs.load(arguments()))
    with pytest.raises(UserError, match="first/best.pt was trained on data of another tokenizer"):
        train.take_weights(run, {"tokenizer": {"id": "one"}, "model": {}}, "first/best.pt")


def test_a_full_disk_at_a_row_of_metrics_does_not_end_the_run(arguments, monkeypatch, capsys):
    whole, real, calls = go(arguments("whole")), open, []

    def full(path, mode="r", *rest, **options):
        file = real(path, mode, *rest, **options)
        if str(path).endswith("metrics.jsonl") and mode == "r+":
            calls.append(path)
            if 3 <= len(calls) <= 5:  # half a row is written, then there is no room
                file.seek(0, 2)
                file.write('{"step": 3, "lo')
                file.close()
                raise OSError(errno.ENOSPC, "No space left on device")
        return file
    monkeypatch.setattr(train, "open", full, raising=False)
    assert go(arguments("full")) == whole
    assert capsys.readouterr().out.count("Going on; the row is kept for later") == 3


def test_nobody_listens_any_more(arguments, tmp_path):
    for name, redirect in ("head", "| head -1"), ("closed", ">&- 2>&-"):
        words = " ".join(f"'{word}'" for word in arguments(name))
        subprocess.run(f"'{sys.executable}' train.py {words} {redirect}", shell=True, cwd=ROOT, capture_output=True,
                       env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
        assert torch.load(tmp_path / name / "ckpt.pt", weights_only=True)["step"] == 12, name


def test_a_billion_steps_are_not_laid_out_in_memory(arguments):
    tokens = types.SimpleNamespace(batch=lambda *key: torch.ones(1))
    run = types.SimpleNamespace(config=configs.load(arguments(max_steps=10 ** 9)), step=0, micros=1, rank=0, ranks=1,
                                device=torch.device("cpu"), tokens=tokens)
    tracemalloc.start()
    source = train.batches(run)
    next(source)
    source.close()
    assert tracemalloc.get_traced_memory()[1] < 10 ** 7
    tracemalloc.stop()


def test_a_damaged_line_of_metrics_is_left_out(arguments, tmp_path):
    rows = go(arguments(max_steps=4))
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 4\n[1]\n7\n\xff\xfe\nnull\n{"step": "4", "loss": 1}\n{"loss": 2}\n' + b"[" * 100_000)
    assert rows_of(tmp_path / "run") == rows
    content = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    digit = content.index(b'"loss": ') + 8
    changed = b"%d" % (9 - int(content[digit : digit + 1]))
    (tmp_path / "run" / "metrics.jsonl").write_bytes(content[:digit] + changed + content[digit + 1 :])
    assert rows_of(tmp_path / "run") == rows[1:]
    run = subprocess.run([sys.executable, "plot.py", str(tmp_path / "run"), "--out", str(tmp_path / "picture")],
                         cwd=ROOT, capture_output=True, text=True)
    assert "damaged line(s) of" in run.stdout and run.stdout.endswith(f"\n{tmp_path}/picture.png\n")
    assert (tmp_path / "picture.png").exists()
    run = subprocess.run([sys.executable, "plot.py", str(tmp_path / "run"), "--out", "/nowhere/x.png"], cwd=ROOT,
                         capture_output=True, text=True)
    assert run.returncode == 1 and run.stderr.startswith("plot.py: ") and run.stderr.count("\n") == 1


def test_a_run_killed_after_its_last_checkpoint_still_gets_its_picture(arguments, tmp_path):
    go(arguments(max_steps=4))
    (tmp_path / "run" / "loss.png").unlink()
    go(arguments(max_steps=4))
    assert (tmp_path / "run" / "loss.png").exists()


def test_help_lists_every_setting():
    run = subprocess.run([sys.executable, "train.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0
    assert all(f"--{key}=" in run.stdout for key in configs.KEYS)


# Several nodes without a shared folder: one process each, with an out/ and perhaps data of its own

SLOW = """
import datetime, functools, sys, time
import torch.distributed as dist
import data, train

timeout = datetime.timedelta(seconds=3)
dist.init_process_group = functools.partial(dist.init_process_group, timeout=timeout)
crc32 = data.zlib.crc32

def slow(content, *rest):
    if len(content) > data.HEADER:  # the tokens of a shard, not its header
        time.sleep(2 * timeout.total_seconds())
    return crc32(content, *rest)

data.zlib.crc32 = slow
train.run_script(train.main)
"""


def nodes(*commands, script="train.py", local_ranks=(0, 0)):
    """[(exit code, what it printed)] of two processes with these arguments."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                           "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    started = [subprocess.Popen([sys.executable, script, *command], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, env=common | {"RANK": str(rank), "LOCAL_RANK": str(local)})
               for rank, (local, command) in enumerate(zip(local_ranks, commands))]
    try:
        return [(process.communicate(timeout=120)[0], process.returncode)[::-1] for process in started]
    finally:
        for process in started:
            process.kill()


def all_say(ended, *words):
    """Both ended with a sentence that has these words."""
    for code, printed in ended:
        assert code == 1 and "Traceback" not in printed and "this is a bug" not in printed, printed
        assert all(word in printed for word in words), printed


def stop_before(step, monkeypatch):
    """Runs of this process end with an error before they take this step."""
    real = train.train_step

    def fail(run, *rest):
        if run.step == step:
            raise UserError("the lights went out")
        return real(run, *rest)
    monkeypatch.setattr(train, "train_step", fail)


def test_a_node_without_the_checkpoint_goes_on_from_that_of_rank_0(arguments, tmp_path, monkeypatch):
    whole = go(arguments("whole"))
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the lights went out"):
        stop_before(8, patch)
        go(arguments())
    ended = nodes(arguments(), arguments("nothing"))
    assert [code for code, _ in ended] == [0, 0] and "from step 8" in ended[0][1], ended
    close(whole, rows_of(tmp_path / "run"))
    assert not (tmp_path / "nothing").exists() and not any("_buffers" in text for _, text in ended), ended


def test_nodes_with_other_settings_or_other_data_stop(arguments, tmp_path):
    all_say(nodes(arguments(), arguments("two", eval_every=7)),
            "rank 1 on", "has eval_every=7", "has 6: give the same command on every node")
    other = tmp_path / "other"
    data.prepare_toy(str(other), tokens=50_000)
    all_say(nodes(arguments(), arguments("two", data=other)), "has tokens of train=", "copy the same data to every")
    with open(other / "train_00000.bin", "r+b") as file:
        file.seek(-2, os.SEEK_END)
        file.write(b"\1\2")
    all_say(nodes(arguments(), arguments("two", data=other)), str(other / "train_00000.bin"), "checksum")
    assert not (tmp_path / "run").exists()


def test_checking_the_data_may_take_longer_than_the_timeout_of_a_collective(arguments, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    run = arguments(max_steps=2)
    ended = nodes(run, run, script=str(tmp_path / "slow.py"), local_ranks=(0, 1))  # one node: its first rank checks
    assert [code for code, _ in ended] == [0, 0] and rows_of(tmp_path / "run")[-1]["step"] == 2, ended


# What is written while the run goes on


def test_the_run_goes_on_while_a_checkpoint_is_written_which_is_that_of_its_step(arguments, monkeypatch):
    real_save, real_step, at = torch.save, train.train_step, [0]

    def step(run, *rest):
        result = real_step(run, *rest)
        at[0] = run.step
        return result

    def weights_of_checkpoints(name, steps):
        """What is written, by a disk that takes as long as some steps."""
        found, writing = {}, []

        def slow(content, file):
            assert not writing
            writing.append(file)
            deadline = time.time() + 10
            while found and at[0] < min(content["step"] + steps, 12):  # the first checkpoint is waited for
                assert time.time() < deadline, "the run waits"
                time.sleep(0.01)
            real_save(content, file)
            writing.clear()
            found[content["step"]] = {key: value.clone() for key, value in content["model"].items()}
        monkeypatch.setattr(torch, "save", slow)
        go(arguments(name, eval_every=100))
        return found
    monkeypatch.setattr(train, "train_step", step)
    quick, slow = weights_of_checkpoints("quick", 0), weights_of_checkpoints("slow", 3)
    assert quick.keys() == slow.keys() == {4, 8, 12}
    assert all(torch.equal(quick[step][key], slow[step][key]) for step in quick for key in quick[step])


def test_an_error_in_the_loop_waits_for_the_writer_and_one_in_the_writer_ends_the_loop(arguments, tmp_path,
                                                                                      monkeypatch):
    real = torch.save
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the lights went out"):
        stop_before(5, patch)
        patch.setattr(torch, "save", lambda *content: (time.sleep(1), real(*content)))
        go(arguments())
    assert train.load(str(tmp_path / "run" / "ckpt.pt"))["step"] == 4
    assert not list((tmp_path / "run").glob("*.tmp"))
    monkeypatch.setattr(torch, "save", lambda *content: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        go(arguments())


def test_best_is_a_second_name_of_a_checkpoint_of_its_step(arguments, tmp_path, monkeypatch):
    go(arguments("linked"))
    assert os.path.samefile(tmp_path / "linked" / "best.pt", tmp_path / "linked" / "ckpt.pt")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="the lights went out"):
        stop_before(10, patch)
        go(arguments("apart", save_every=4, eval_every=3))  # checkpoints at 3, 4 and 8, the best at 9
    contents = {name: train.load(str(tmp_path / "apart" / name)) for name in ("ckpt.pt", "best.pt")}
    assert [content["step"] for content in contents.values()] == [8, 9] and "optimizer" not in contents["best.pt"]

    def refuse(*names):
        raise OSError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(os, "link", refuse)  # a file system without links
    go(arguments("copied"))
    best = train.load(str(tmp_path / "copied" / "best.pt"))
    assert best["step"] == train.load(str(tmp_path / "copied" / "ckpt.pt"))["step"] == 12 and "optimizer" not in best


def test_tokens_per_second_are_those_of_steps_alone(arguments, tmp_path, monkeypatch):
    clock = [0]

    def taking(seconds, function):
        def timed(run, *rest):
            result = function(run, *rest)
            clock[0] += seconds(run)
            return result
        return timed
    monkeypatch.setattr(train, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(train, "train_step", taking(lambda run: 64 if run.step == 1 else 2, train.train_step))
    for name in "examine", "save_run":
        monkeypatch.setattr(train, name, taking(lambda run: 100, getattr(train, name)))
    go(arguments())
    speeds = [row["tokens_per_second"] for row in plot.read_metrics(str(tmp_path / "run"))]
    assert speeds == [512 / 64] + [512 / 2] * 11


def test_a_finished_run_asked_again_leaves_its_files_alone(arguments, tmp_path):
    go(arguments(max_steps=4))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("*.pt")}
    go(arguments(max_steps=4))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").glob("*.pt")} == before


def test_fresh_leaves_files_that_are_not_its_own(arguments, tmp_path):
    go(arguments(max_steps=4))
    (tmp_path / "run" / "metrics.backup.jsonl").write_text("mine")
    go(arguments(max_steps=4, fresh="true"))
    assert (tmp_path / "run" / "metrics.backup.jsonl").read_text() == "mine"


def test_a_folder_may_have_any_name(arguments, tmp_path):
    go(arguments("exp.ptb", max_steps=8))
    assert (tmp_path / "exp.ptb" / "ckpt.prev.pt").exists()


def test_a_run_killed_at_its_first_evaluation_starts_again(arguments, tmp_path):
    rows = go(arguments("whole"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(map(helpers.checked_line, rows[:6])))
    assert go(arguments()) == rows


def test_a_moments_failure_to_read_is_no_damage(arguments, tmp_path, monkeypatch):
    go(arguments(max_steps=8))

    def fail(*arguments, **options):
        raise OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(OSError, match="Input/output"):
        go(arguments(max_steps=8))
    monkeypatch.setattr(torch, "load", lambda *a, **o: (_ for _ in ()).throw(RuntimeError("can't allocate memory")))
    with pytest.raises(RuntimeError, match="allocate"):
        go(arguments(max_steps=8))


def test_a_damaged_checkpoint_never_takes_the_place_of_a_good_one(arguments, tmp_path):
    go(arguments())
    out = tmp_path / "run"
    (out / "ckpt.pt").write_bytes(b"no")
    go(arguments())
    assert (out / "ckpt.pt.damaged").read_bytes() == b"no"
    assert torch.load(out / "ckpt.prev.pt", weights_only=True)["step"] == 8


def test_toy_questions_longer_than_the_context_are_left_out(arguments):
    rows = go(arguments(context=8, batch_tokens=64, max_steps=6))
    assert "val_loss" in rows[-1] and "ioi" not in rows[-1]
