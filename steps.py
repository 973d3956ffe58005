"""Steps that are done once: command lines, given again only when what they depend on has changed.

A step is finished if its record says that these very commands ended well, and everything is as it was then:

    its files      weights, SAEs and data that it reads, by checksum
    its code       its script and all that this imports, by checksum
    its results    the files of results, which are copied to the step's folder; and what it leaves for later steps

So an interrupted list of steps goes on, and a change costs what depends on it. Programs go on from what they find; what
was made of other files, by another command or by other code is set aside before they can (`-before`). A training whose
code alone changed is given again, too, and says that it is finished: weights are as good as the commit that made them,
which their config.json tells. A step that fails is tried again next time; what needs it is not run, and the others go
on. report.py has the steps.
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
    state: tuple = ()      # what its program goes on from, or takes as done
    shows: tuple = ()      # files that it depends on, too, but not its state
    settings: str = ""     # whatever else it is a function of
    lasting: bool = False  # a training: other code alone does not spoil its state
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


CODE = (".py", ".c", ".txt", ".js", ".css", ".html")


def code_of(script, folder):
    """The files that make a script: those it imports, anywhere in it, and so on; and other files that it names, there
    or in web/."""
    waiting, names = [script], set()
    while waiting:
        name = waiting.pop()
        for place in (name, os.path.join("web", name)):
            path = os.path.join(folder, place)
            if place not in names and os.path.isfile(path):
                names.add(place)
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
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(CODE):
            names.append(node.value)
    return names


def inputs_of(step):
    """All that a step's results are a function of, {what: checksum or text} of each kind: what decides whether its
    state is what it would make, what it only shows, and its code."""
    decides = {"the command": "\n".join(step.lines()), "the settings": step.settings}
    code = sorted({name for words in step.commands for name in code_of(words[0], HERE)})
    return {"decides": decides | {path: hash_file(path) for path in found(step.reads)},
            "shows": {path: hash_file(path) for path in found(step.shows)},
            "code": {"torch": provenance()["torch"]} | {name: hash_file(os.path.join(HERE, name)) for name in code}}


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
    with contextlib.suppress(UserError, AttributeError):
        record = read_json(os.path.join(folder_of(out, step), "step.json"), "")
        known = {"inputs", "error", "results", "leaves", "seconds"} <= record.keys()
        return record if known and record["inputs"].keys() <= {"decides", "shows", "code"} else {}
    return {}


def reasons(step, record, out):
    """Why a step must run: [] if it is finished."""
    if not record:
        return ["it has not run yet"]
    if record["error"]:
        return ["it failed"]
    changed = [what for kind, now in inputs_of(step).items() for what in {**record["inputs"][kind], **now}
               if record["inputs"][kind].get(what) != now.get(what)]
    if changed:
        return [f"{what} changed" for what in changed]
    kept = {os.path.join(folder_of(out, step), name): digest for name, digest in record["results"].items()}
    return [f"{path} is gone or damaged" for path, digest in {**kept, **record["leaves"]}.items()
            if not os.path.exists(path) or hash_file(path) != digest]


def is_spoilt(step, record, now):
    """Whether the state that is there was made of something else than what it would be made of now."""
    before = record.get("inputs")
    return bool(before) and any(before[kind] != now[kind] for kind in (["decides"] if step.lasting else
                                                                       ["decides", "code"]))


def result_of(out, step, name):
    """The path of a result of a finished step."""
    return os.path.join(folder_of(out, step), name)


# Running


@contextlib.contextmanager
def ended_by_signals():
    """SIGTERM, and a terminal that is closed, are as Ctrl-C, so that no child outlives this process."""
    def stop(number, frame):
        raise KeyboardInterrupt
    numbers = [number for name in ("SIGTERM", "SIGHUP") if (number := getattr(signal, name, None))
               and signal.getsignal(number) != signal.SIG_IGN]  # nohup has it ignored
    before = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def run_command(words, log, tick):
    """The exit code of a command whose output goes to a file. Ctrl-C is passed on: programs here save, and go on."""
    command = [sys.executable, os.path.join(HERE, words[0]), *words[1:]]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                          start_new_session=True) as child:
        try:
            while child.poll() is None:
                tick()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.5)
        except BaseException:
            end(child)
            raise
    return child.returncode


def end(child, patience=30):
    """It and all that it started, a group of their own: after `patience` seconds by force."""
    if not hasattr(os, "killpg"):
        return child.terminate()
    number, until = signal.SIGTERM, time.monotonic() + patience
    with contextlib.suppress(ProcessLookupError, PermissionError):  # until there is none left
        os.killpg(child.pid, number)
        while number != signal.SIGKILL:
            time.sleep(0.05)
            child.poll()
            number = signal.SIGKILL if time.monotonic() > until else 0
            os.killpg(child.pid, number)


def cpu_seconds():
    """That ended children have taken: on a busy machine, less than the time that went by."""
    times = os.times()
    return times.children_user + times.children_system


def last_line(path):
    with open(path, errors="replace") as file:
        lines = [line.strip() for line in file if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def set_aside(step):
    """State that was made of something else is kept under another name, in place of what was set aside before."""
    for path in found(step.state):
        aside = f"{path}-before"
        if os.path.isdir(aside) and not os.path.islink(aside):
            shutil.rmtree(aside)
        os.replace(path, aside)
        say(f"    {path} was made of something else, and is {aside} now")


def write_record(step, out, before, error, inputs, began, keeps=(), leaves=()):
    folder = folder_of(out, step)
    os.makedirs(folder, exist_ok=True)
    for path in keeps:
        shutil.copy2(path, folder)
    left = {path: hash_file(path) for path in leaves}
    made = {"machine": machine(), **provenance()}
    if step.lasting and left and before.get("leaves") == left:  # it was finished: this is who made it
        made |= {name: before[name] for name in made if name in before}
    record = {"commands": step.lines(), "inputs": inputs, "error": error, "leaves": left, **made,
              "results": {os.path.basename(path): hash_file(path) for path in keeps},
              "seconds": before.get("seconds", 0) + time.time() - began[0],
              "cpu_seconds": before.get("cpu_seconds", 0) + cpu_seconds() - began[1]}
    write_json(os.path.join(folder, "step.json"), record, indent=1)
    return record


def refuse(step, out, error):
    """The record of a step that is not run: what it would go on from stays what it is."""
    before = read_record(out, step)
    return write_record(step, out, before, error, before.get("inputs", {}), (time.time(), cpu_seconds()))


def run_step(step, out, tick=lambda: None):
    """Run a step and write its record, which is given: with an error, or with its results. A step that goes on from
    what it did before adds to the time that this took."""
    missing = missing_inputs(step)
    if missing:
        needed = f"see {' and '.join(step.needs)}" if step.needs else "it is part of the repository"
        return refuse(step, out, f"it needs {missing[0]}, which is not there: {needed}")
    before, now, began = read_record(out, step), inputs_of(step), (time.time(), cpu_seconds())
    if is_spoilt(step, before, now):
        set_aside(step)
        before = {}
    goes_on = before if step.state else {}
    shutil.rmtree(folder_of(out, step), ignore_errors=True)
    stopped = functools.partial(write_record, step, out, goes_on, "it was stopped before its end", now, began)
    stopped()  # from here on what is there is of these inputs, however it ends
    try:
        error = run_commands(step.commands, os.path.join(folder_of(out, step), "log.txt"), tick)
    except BaseException:
        stopped()  # after so long
        raise
    gone = [pattern for pattern in (*step.keeps, *step.leaves) if not glob.glob(pattern)]
    if error or gone:
        return write_record(step, out, goes_on, error or f"it did not write {gone[0]}", now, began)
    return write_record(step, out, goes_on, None, now, began, found(step.keeps), found(step.leaves))


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


def run_all(steps, out, after=lambda: None):
    """Run those of the steps that are not finished: {name: record}. after() is called when one has ended."""
    # A step that a former one may yet change is looked at when it is its turn; until then it counts as one to run.
    due = {step.name for step in steps if reasons(step, read_record(out, step), out)}
    due |= {step.name for step in steps if due & set(step.needs)}
    expected = {step.name: usual_seconds(step, read_record(out, step)) for step in steps if step.name in due}
    bar, records = Bar(expected), collections.OrderedDict()
    for number, step in enumerate(steps, 1):
        record = read_record(out, step)
        why = reasons(step, record, out)
        if not why:
            say(f"{number}/{len(steps)} {step.name}: finished before")
            expected.pop(step.name, None)
            records[step.name] = record
            continue
        broken = next((name for name in step.needs if records.get(name, {}).get("error")), None)
        if broken:
            records[step.name] = refuse(step, out, f"it needs {broken}, which failed")
            expected.pop(step.name, None)
            say(f"{number}/{len(steps)} {step.name}: FAILED, {records[step.name]['error']}")
            continue
        more = f" and {len(why) - 1} more" if len(why) > 1 else ""
        say(f"{number}/{len(steps)} {step.name}: {why[0]}{more}; " + " && ".join(step.lines()))
        began = time.monotonic()
        expected.setdefault(step.name, step.seconds)
        records[step.name] = record = run_step(step, out, functools.partial(bar.show, step.name, began))
        took = time.monotonic() - began
        bar.finish(step.name, took)
        left = "" if is_terminal(sys.stderr) else f"; about {clock(bar.left(step.name))} left"
        say(f"    {'FAILED, ' + record['error'] if record['error'] else 'done'} ({clock(took)}){left}")
        after()
    progress("")
    return records


def usual_seconds(step, record):
    """How long a step took when it ended well, or is said to take."""
    return record["seconds"] if record.get("error", "") is None else step.seconds
