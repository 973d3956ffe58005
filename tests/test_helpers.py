"""What goes wrong is told in a sentence; files appear whole or not at all."""
import os
import subprocess
import sys

import pytest

import helpers

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run_as_script(body, *arguments, **options):
    """`def main(arguments): BODY` run as a script of its own."""
    program = f"import sys, torch\nsys.path.insert(0, {ROOT!r})\nfrom helpers import *\n" if "torch" in body else \
        f"import sys\nsys.path.insert(0, {ROOT!r})\nfrom helpers import *\n"
    program += f"sys.argv[0] = 'thing.py'\ndef main(arguments):\n    {body}\nrun_script(main, 'half of it is kept')\n"
    return subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, **options)


@pytest.mark.parametrize("body, words", [
    ("raise UserError('do this')", "thing.py: do this\n"),
    ("open('/nowhere/at/all')", "thing.py: /nowhere/at/all: No such file or directory\n"),
    ("raise KeyboardInterrupt", "thing.py: half of it is kept\n"),
    ("raise MemoryError", "thing.py: not enough memory (MemoryError): take a smaller model or batch\n"),
    ("torch.empty(2 ** 55)", "thing.py: not enough memory ("),
])
def test_what_goes_wrong_is_a_sentence(body, words):
    run = run_as_script(body)
    assert run.returncode == 1 and run.stderr.startswith(words) and run.stderr.count("\n") == 1


def test_a_bug_is_a_short_report_with_the_rest_in_a_file(tmp_path):
    run = run_as_script("{}['key']", "--some", env={**os.environ, "TMPDIR": str(tmp_path)})
    assert run.returncode == 1 and run.stderr.count("\n") == 1 and "Traceback" not in run.stderr
    assert run.stderr.startswith("thing.py: this is a bug: KeyError: 'key' (")
    path, = tmp_path.glob("parity-bug-*.txt")
    assert str(path) in run.stderr
    assert "thing.py --some" in path.read_text() and "Traceback" in path.read_text()


def test_a_reader_who_leaves_and_a_letter_that_a_terminal_lacks():
    run = run_as_script("print('caf\\u00e9 \\U0001f600')", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (run.returncode, run.stdout, run.stderr) == (0, "caf? ?\n", "")
    for redirect in "| head -1", ">&-", "2>&-", "> /dev/full":
        script = f"import sys; sys.path.insert(0, {ROOT!r}); from helpers import *\n" \
                 "run_script(lambda arguments: [say('line') for _ in range(100000)])"
        command = f"'{sys.executable}' -c \"{script}\" {redirect}"
        run = subprocess.run(command, shell=True, capture_output=True, text=True)
        assert "Traceback" not in run.stderr and "Exception" not in run.stderr, (redirect, run.stderr)


def test_a_file_is_whole_or_the_old_one(tmp_path):
    path, kept = str(tmp_path / "file"), str(tmp_path / "kept")
    for text in "one", "two":
        with helpers.whole_file(path, keep=kept) as file:
            file.write(text)
            assert not os.path.exists(path) if text == "one" else open(path).read() == "one"
    assert open(path).read() == "two" and open(kept).read() == "one"
    with pytest.raises(ZeroDivisionError), helpers.whole_file(path, keep=kept) as file:
        file.write("three" * 1000)
        raise ZeroDivisionError
    assert sorted(os.listdir(tmp_path)) == ["file", "kept"]
    assert open(path).read() == "two" and open(kept).read() == "one"


def test_there_is_a_file_at_every_moment_of_its_replacement(tmp_path, monkeypatch):
    """Whoever opens it between any two steps finds the old one or the new one."""
    path = str(tmp_path / "file")
    with helpers.whole_file(path) as file:
        file.write("old")
    for name in "replace", "link", "remove":
        real = getattr(os, name)

        def watched(*arguments, real=real):
            assert open(path).read() in ("old", "new")
            real(*arguments)
            assert open(path).read() in ("old", "new")
        monkeypatch.setattr(os, name, watched)
    with helpers.whole_file(path, keep=str(tmp_path / "kept")) as file:
        file.write("new")


def test_small_figures_and_rows(capsys):
    assert helpers.standard_error([1, 2, 3, 4]) == pytest.approx(0.6455, abs=1e-4)
    assert helpers.standard_error([1]) is None
    helpers.print_row((-5, 4, 3), "ab", "cd", "")
    assert capsys.readouterr().out == "ab      cd\n"
    assert helpers.suggest("laers", ["layers", "seed"]) == ": did you mean 'layers'?"
    assert helpers.suggest("zzz", ["layers", "seed"]) == ": the names are layers, seed"


def test_json_comes_back_as_it_was_or_is_damaged(tmp_path):
    path = str(tmp_path / "file.json")
    content = {"b": 1, "a": [1.5, None, "x"], "c": {"10": 1, "9": 2}}
    helpers.write_json(path, {"b": 1, "a": (1.5, None, "x"), "c": {10: 1, 9: 2}}, indent=1)
    assert helpers.read_json(path, "") == content
    raw = open(path, "rb").read()
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with open(path, "wb") as file:
            file.write(damaged)
        try:
            found = helpers.read_json(path, "Make it again.")
            assert found.items() >= content.items(), damaged  # the name "checksum" itself, or a blank
        except helpers.UserError as error:
            assert str(error).startswith(f"{path} is damaged (") and str(error).endswith("Make it again.")
    for text in "[1]", "{", "", "[" * 100_000, "7" * 5_000:
        (tmp_path / "file.json").write_text(text)
        with pytest.raises(helpers.UserError, match="is damaged"):
            helpers.read_json(path, "")
