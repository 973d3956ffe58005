"""Config files and command-line settings: what is right is read, what is wrong is answered."""
import glob

import pytest

import config
from helpers import UserError


def load(tmp_path, text="", *arguments):
    path = tmp_path / "run.py"
    path.write_text(text)
    return config.load([str(path), *arguments])


def test_every_config_of_the_repo_is_sound_and_says_what_it_is():
    paths = glob.glob("configs/*.py")
    assert len(paths) >= 16
    for path in paths:
        assert config.load([path]).out == "out/" + path[8:-3]
        with open(path) as file:
            opening = file.read().split('"""')[1]
        assert ("expect" in opening or "measured" in opening
                or "paper has no" in opening or "no benchmark" in opening), path


def test_values_expressions_and_overrides(tmp_path):
    read = load(tmp_path,
                '"""A run."""\nbatch_tokens = 4 * 1024\nmax_steps = 10_000_000 // batch_tokens\n'
                'muon_lr = 1e-2\nbits = [10, 15]\n',
                "--max_steps=1e3", "--fresh=true", "--active=8,16",
                "--stop_at_val_loss=3", "--data=some/where", "--bottleneck=none")
    assert (read.batch_tokens, read.max_steps, read.muon_lr, read.bits) == (4096, 1000, 0.01, (10, 15))
    assert (read.fresh, read.active, read.stop_at_val_loss, read.data) == (True, (8, 16), 3.0, "some/where")
    assert read.bottleneck == "none"
    assert load(tmp_path).stop_at_val_loss is None


@pytest.mark.parametrize("text, argument, words", [
    ("max_step = 3", "", "line 1: there is no setting 'max_step': did you mean 'max_steps'"),
    ("", "--zzz=3", "there is no setting 'zzz': the names are layers"),
    ("", "--seed", "--seed has no value: write --seed=value"),
    ("layers = 'two'", "", "layers must be a whole number, not 'two'"),
    ("layers = 2.5", "", "layers must be a whole number, not 2.5"),
    ("fresh = 1", "", "fresh must be True or False, not 1"),
    ("bits = (10, 'x')", "", "bits must be whole numbers, as in"),
    ("import os", "", "line 1: a config file holds only lines of the form key = value"),
    ("out = open('x')", "", "is not a plain value"),
    ("layers = 1 / 0", "", "division by zero"),
    ("max_steps = 9 ** 9 ** 9", "", "is not a plain value"),
    ("layers = (", "", "line 1"),
    ("d = 1000", "", "d=1000 must be a power of two from 8 to 32768: the nearest is 1024"),
    ("heads = 7", "", "heads=7 must divide d=1024: the nearest is 8"),
    ("batch_tokens = 5000", "", "must be a multiple of context=1024: the nearest is 5120"),
    ("bottleneck = 'topp'", "", "must be one of 'none', 'parity', 'topk': did you mean 'topk'"),
    ("site = 'MLP'", "", "site='MLP' must be one of"),
    ("bits = (9, 15)", "", "must start with log2 d = 10"),
    ("active = (16, 9999)", "", r"active\[1\]=9999 must lie in 1.."),
    ("children = (256, 256)", "", "one for each level but the first"),
    ("layers = 0", "", "layers=0 must be at least 1"),
    ("muon_lr = -1", "", "must not be negative"),
    ("decay_fraction = 2", "", r"must lie in \[0, 1\]"),
    ("bottleneck = 'none'\nvariance_weight = 0.1", "", "need a bottleneck"),
])
def test_wrong_settings_are_answered(tmp_path, text, argument, words):
    with pytest.raises(UserError, match=words):
        load(tmp_path, text, *([argument] if argument else []))


def test_a_missing_file_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'configs/tiny.py'"):
        config.load(["configs/tinny.py"])
    with pytest.raises(UserError, match="give one config file"):
        config.load(["--seed=1"])


def test_settings_survive_a_round_trip_and_differences_are_named():
    import dataclasses
    import json
    one = config.load(["configs/tiny.py"])
    saved = json.loads(json.dumps(dataclasses.asdict(one)))
    assert config.from_dict(saved) == one and config.differences(one, saved) == []
    other = dataclasses.replace(one, muon_lr=0.5, bits=(7, 11), log_every=3)  # how often to log is free to change
    assert config.differences(other, saved) == ["bits", "muon_lr"]


def test_a_config_takes_the_settings_of_its_base_and_changes_some(tmp_path):
    (tmp_path / "first.py").write_text('"""One."""\nlayers = 3\nbatch_tokens = 4096\nmuon_lr = 0.5\n')
    (tmp_path / "second.py").write_text('"""Two."""\nbase = "first.py"\nlayers = 5\n')
    read = load(tmp_path, 'base = "second.py"\nmax_steps = batch_tokens // 1024\n', "--muon_lr=0.25")
    assert (read.layers, read.batch_tokens, read.max_steps, read.muon_lr) == (5, 4096, 4, 0.25)
    assert read.out == "out/run"  # its own, not the base's


@pytest.mark.parametrize("text, words", [
    ('base = "first.py"', "first.py, line 1: .*a config cannot be its own base"),
    ('layers = 2\nbase = "first.py"', "line 2: base comes first"),
    ("base = 3", 'base must be the name of a config file, as in base = "tiny.py", not 3'),
    ('base = "nowhere.py"', "line 1: cannot read .*nowhere.py"),
])
def test_a_wrong_base_is_answered(tmp_path, text, words):
    (tmp_path / "first.py").write_text('base = "run.py"')
    with pytest.raises(UserError, match=words):
        load(tmp_path, text)


def test_settings_without_effect_on_a_dense_model_do_not_make_it_another():
    dense = config.load(["configs/tiny_gpt.py"])
    assert config.differences(dense, vars(dense) | {"bits": [10, 15], "active": [16, 32]}) == []
    assert config.differences(dense, vars(dense) | {"layers": 3}) == ["layers"]
