"""A small assault on the command line, of a fixed seed: see assault.py, which goes on for longer with --seconds."""
import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def printed():
    """What an assault in a process of its own prints: its forks should not inherit threads from other tests."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "assault.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, errors="replace")
    assert run.returncode in (0, 1) and "tried" in run.stdout, run.stdout + run.stderr
    return run.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind", ["commands", "damage", "kills"])
def test_nothing_is_lost_and_no_traceback_is_seen(printed, kind):
    failures = [part for part in printed.split("FAILED ")[1:] if part.startswith(kind)]
    assert not failures, "\n".join(failures)
    row = next(line.split() for line in printed.splitlines() if line.startswith(f"{kind} "))
    assert int(row[1]) >= 12 and row[4] == "0"  # tried, failures
