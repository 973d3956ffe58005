"""Steps that are done once: command lines, given again only when what they depend on has changed.

A step is finished if its record says that these very commands ended well, and everything is as it was then:

    its files      weights, SAEs and data that it reads, by checksum
    its code       its script and all that this imports, by checksum
    its results    the files of results, which are copied to the step's folder; and what it leaves for later steps

So an interrupted list of steps goes on, and a change costs what depends on it. A training whose code alone changed is
given again, too, and says that it is finished: weights are as good as the commit that made them, which their
config.json tells. Where its data changed it starts over. A step that fails is tried again next time; what needs a file
that is not there says so, and the others go on. report.py has the steps.
"""
import ast
import collections
import contextlib
import functools
import glob
import hashlib
import math
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from typing import NamedTuple

from helpers import UserError, is_terminal, progress, provenance, read_json, say, write_json

HERE = os.path.dirname(os.path.abspath(__file__))


class Step(NamedTuple):
    """Paths are as the user would type them; those of files may be patterns."""
    name: str
    commands: tuple        # command lines without `python`, each a tuple of words
    needs: tuple = ()      # names of the steps before it
    reads: tuple = ()      # files that it depends on
    keeps: tuple = ()      # its results, copied to the step's folder
    leaves: tuple = ()     # files that later steps read
    again: tuple = ()      # words to add where other files than before are read: what is there would be taken as done
    seconds: float = 60    # about how long it takes, until it is known

    def lines(self):
        return [f"python {shlex.join(words)}" for words in self.commands]


# What a step depends on


def hash_file(path):
    status = os.stat(path)
    return hash_content(path, status.st_mtime_ns, status.st_size)


@functools.cache
def hash_content(path, changed, size):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def found(patterns):
    return sorted({path for pattern in patterns for path in glob.glob(pattern)})


def code_of(script, folder):
    """The files that make a script: those it imports, anywhere in it, and so on; and other files that it names."""
    waiting, names = [script], set()
    while waiting:
        name = waiting.pop()
        path = os.path.join(folder, name)
        if name not in names and os.path.isfile(path):
            names.add(name)
            waiting += mentioned(path, os.stat(path).st_mtime_ns) if name.endswith(".py") else ()
    return sorted(names)


@functools.cache
def mentioned(path, changed):
    with open(path, encoding="utf-8") as file:
        tree, names = ast.parse(file.read(), path), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [f"{alias.name.partition('.')[0]}.py" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(f"{node.module.partition('.')[0]}.py")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith((".c", ".txt")):
            names.append(node.value)
    return names


def inputs_of(step):
    """{what: checksum or text} of all that a step's results are a function of."""
    about = provenance()
    inputs = {"the command": "\n".join(step.lines()), "torch": about["torch"]}
    inputs |= {path: hash_file(path) for path in found(step.reads)}
    code = [name for words in step.commands for name in code_of(words[0], HERE)]
    return inputs | {name: hash_file(os.path.join(HERE, name)) for name in code}


def missing_inputs(step):
    return [pattern for pattern in step.reads if not glob.glob(pattern)]


# Records


@functools.cache
def machine():
    """What it ran on."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    memory = ""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2 ** 30:.0f} GiB"
    return f"{name}, {os.cpu_count()} cores{memory}, {platform.system()}"


def folder_of(out, step):
    return os.path.join(out, "steps", step.name)


def read_record(out, step):
    """What is known of a step; {} if nothing is, or if its record is damaged."""
    with contextlib.suppress(UserError):
        record = read_json(os.path.join(folder_of(out, step), "step.json"), "")
        return record if {"inputs", "error", "results", "leaves", "seconds"} <= record.keys() else {}
    return {}


def reasons(step, record, out):
    """Why a step must run: [] if it is finished."""
    if not record:
        return ["it has not run yet"]
    if record["error"]:
        return ["it failed"]
    now = inputs_of(step)
    changed = [what for what in {**record["inputs"], **now} if record["inputs"].get(what) != now.get(what)]
    if changed:
        return [f"{what} changed" for what in changed]
    kept = {os.path.join(folder_of(out, step), name): digest for name, digest in record["results"].items()}
    return [f"{path} is gone or damaged" for path, digest in {**kept, **record["leaves"]}.items()
            if not os.path.exists(path) or hash_file(path) != digest]


def is_reused(step, record):
    """Whether what is there would be taken as done although it was made from other files."""
    before, now = record.get("inputs"), inputs_of(step)
    return bool(before) and any(before.get(path) != now[path] for path in found(step.reads))


def result_of(out, step, name):
    """The path of a result of a finished step."""
    return os.path.join(folder_of(out, step), name)


# Running


def commands_of(step, record):
    """As they are given now: the first with the words of `again`, where it must not take what is there as done."""
    first, *others = step.commands
    return [(*first, *step.again) if step.again and is_reused(step, record) else first, *others]


@contextlib.contextmanager
def ended_by_signals():
    """SIGTERM is as Ctrl-C, so that no child outlives this process."""
    def stop(number, frame):
        raise KeyboardInterrupt
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_command(words, log, tick):
    """The exit code of a command whose output goes to a file. Ctrl-C is passed on: programs here save, and go on."""
    command = [sys.executable, os.path.join(HERE, words[0]), *words[1:]]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT) as child:
        try:
            while child.poll() is None:
                tick()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.5)
        except BaseException:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(30)
            child.kill()
            raise
    return child.returncode


def cpu_seconds():
    """That ended children have taken: on a busy machine, less than the time that went by."""
    times = os.times()
    return times.children_user + times.children_system


def last_line(path):
    with open(path, errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def run_step(step, out, tick=lambda: None):
    """Run a step and write its record, which is given: with an error, or with its results."""
    before, folder, began, busy = read_record(out, step), folder_of(out, step), time.time(), cpu_seconds()
    given = commands_of(step, before)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)

    def write(error, inputs, keeps=(), leaves=()):
        for path in keeps:
            shutil.copy2(path, folder)
        record = {"commands": step.lines(), "inputs": inputs, "error": error, "began": began,
                  "results": {os.path.basename(path): hash_file(path) for path in keeps},
                  "leaves": {path: hash_file(path) for path in leaves}, "seconds": time.time() - began,
                  "cpu_seconds": cpu_seconds() - busy, "machine": machine(), **provenance()}
        write_json(os.path.join(folder, "step.json"), record, indent=1)
        return record
    inputs = before.get("inputs", {})  # until it ends well, what is there is of these
    write("it was stopped before its end", inputs)
    now, missing = inputs_of(step), missing_inputs(step)
    if missing:
        needed = " and ".join(step.needs) or "what makes it"
        return write(f"it needs {missing[0]}, which is not there: see {needed}", inputs)
    error = run_commands(given, os.path.join(folder, "log.txt"), tick)
    gone = [pattern for pattern in (*step.keeps, *step.leaves) if not glob.glob(pattern)]
    if error or gone:
        return write(error or f"it did not write {gone[0]}", inputs)
    return write(None, now, found(step.keeps), found(step.leaves))


def run_commands(commands, path, tick):
    """One after another, their output to a file; what went wrong, or None."""
    with open(path, "w") as file:
        for words in commands:
            code = run_command(words, file, tick)
            if code:
                return f"exit code {code}: {last_line(path)}"
    return None


def with_needs(steps, names):
    """The steps of these names, and all that they need, in order."""
    by_name, waiting, wanted = {step.name: step for step in steps}, list(names), set()
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            waiting += by_name[name].needs
    return [step for step in steps if step.name in wanted]


class Bar:
    """How far a list of steps is, and the time left: as long as steps took before, or are said to take; scaled by how
    long those of this time took, but for trainings that found their work done."""

    def __init__(self, expected):
        self.expected, self.spent, self.planned, self.done = expected, 0.0, 0.0, 0

    def left(self, name, seconds=math.inf):
        """Seconds until all is done, `seconds` into a step."""
        names = list(self.expected)
        rest = sum(self.expected[other] for other in names[names.index(name) + 1 :])
        pace = self.spent / self.planned if self.planned else 1.0
        return max(0.0, self.expected[name] * pace - seconds) + rest * pace

    def finish(self, name, seconds):
        self.done += 1
        if seconds > self.expected[name] / 5:
            self.spent, self.planned = self.spent + seconds, self.planned + self.expected[name]

    def show(self, name, began):
        left, total = int(self.left(name, time.monotonic() - began)), len(self.expected)
        bar = "#" * round(20 * self.done / total)
        progress(f"[{bar:<20}] {self.done} of {total} steps; {name}, {clock(time.monotonic() - began)}; "
                 f"about {clock(left)} left")


def clock(seconds):
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}" if minutes >= 60 else f"{minutes}:{seconds:02}"


def run_all(steps, out):
    """Run those of the steps that are not finished: {name: record}."""
    # A step that a former one may yet change is looked at when it is its turn; until then it counts as one to run.
    due = {step.name for step in steps if reasons(step, read_record(out, step), out)}
    due |= {step.name for step in steps if due & set(step.needs)}
    expected = {step.name: read_record(out, step).get("seconds") or step.seconds for step in steps if step.name in due}
    bar, records = Bar(expected), collections.OrderedDict()
    for number, step in enumerate(steps, 1):
        record = read_record(out, step)
        why = reasons(step, record, out)
        if not why:
            say(f"{number}/{len(steps)} {step.name}: finished before")
            expected.pop(step.name, None)
            records[step.name] = record
            continue
        more = f" and {len(why) - 1} more" if len(why) > 1 else ""
        say(f"{number}/{len(steps)} {step.name}: {why[0]}{more}; " + " && ".join(step.lines()))
        began = time.monotonic()
        expected.setdefault(step.name, step.seconds)
        records[step.name] = record = run_step(step, out, functools.partial(bar.show, step.name, began))
        bar.finish(step.name, record["seconds"])
        left = "" if is_terminal(sys.stderr) else f"; about {clock(bar.left(step.name))} left"
        say(f"    {'FAILED, ' + record['error'] if record['error'] else 'done'} ({clock(record['seconds'])}){left}")
    progress("")
    return records
