"""What several scripts need and none is about: sentences for the user, whole files, progress, small figures.

Imports nothing of ours, so that everything may import it.
"""
import argparse
import contextlib
import difflib
import errno
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib

import numpy as np

try:
    import fcntl
except ImportError:  # Windows: all works, but two writers to one folder are not noticed
    fcntl = None

# Sentences


class UserError(ValueError):
    """A sentence for the user: what was given, what was expected, what to do."""


def run_script(main, stopped="stopped", told=UserError):
    """Run main(arguments) as a script: what goes wrong is told in a sentence, and a bug in a short report.

    stopped: what Ctrl-C leaves behind.  told: errors whose text is a sentence already.
    """
    name = os.path.basename(sys.argv[0])
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a letter that a terminal lacks is no reason to stop
    try:
        main(sys.argv[1:])
        if sys.stdout:
            sys.stdout.flush()
    except told as error:
        leave(f"{name}: {error}")
    except BrokenPipeError:
        leave("")  # `| head` has seen enough
    except OSError as error:
        leave(f"{name}: {error.filename}: {error.strerror}" if error.filename else f"{name}: {error}")
    except UnicodeError as error:
        leave(f"{name}: a name or a text holds what is no character ({error}): give another")
    except KeyboardInterrupt:
        leave(f"{name}: {stopped}")
    except Exception as error:
        if is_out_of_memory(error):
            leave(f"{name}: not enough memory ({first_line(error)}): take a smaller model or batch")
        leave(f"{name}: {report(error)}")


def leave(text):
    """Exit with a sentence."""
    show(f"{text}\n" if text else "", sys.stderr)
    show("", sys.stdout)
    sys.exit(1)


def silence(stream):
    """What is still buffered for a reader who is gone must not be tried again at exit."""
    if stream:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_out_of_memory(error):
    words = ("can't allocate memory", "out of memory", "Storage size calculation overflowed", "array is too big")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def first_line(error):
    """Of its text; of torch's list of mismatches, whose first line says nothing, the first two."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])[:300]


def report(error):
    """What to send of an error that nobody foresaw; the rest of it is in a file."""
    *_, place = traceback.extract_tb(error.__traceback__)
    text = (f"this is a bug: {type(error).__name__}: {first_line(error)} ({os.path.basename(place.filename)}, line "
            f"{place.lineno}, commit {commit()}). Please send us the command")
    with contextlib.suppress(OSError):
        options = dict(prefix="parity-bug-", suffix=".txt", delete=False, errors="replace")
        with tempfile.NamedTemporaryFile("w", **options) as file:
            file.write(f"{' '.join(sys.argv)}\n{provenance()}\n{''.join(traceback.format_exception(error))}")
        text += f" and {file.name}"
    return text


def suggest(name, known, least=0.5):
    """': did you mean ...?' for a name that is not among those known; with none near, all of them if they are few."""
    near = difflib.get_close_matches(name, known, 1, least)
    return f": did you mean {near[0]!r}?" if near else f": the names are {', '.join(known)}" if len(known) < 50 else ""


def whole_number(text):
    """An argparse type: 20e9, 5_000 or 300."""
    value = float(text)
    if not value.is_integer() or not 1 <= value <= 1e15:
        raise ValueError
    return int(value)


def within(kind, low, high=math.inf, open_low=False):
    """An argparse type: a number of this kind from low to high."""
    def convert(text):
        value = kind(text)
        if not low <= value <= high or open_low and value == low:
            raise argparse.ArgumentTypeError(f"{text} must be {'above' if open_low else 'at least'} {low}"
                                             + (f" and at most {high}" if high < math.inf else ""))
        return value
    convert.__name__ = kind.__name__
    return convert


# Files: whole or not at all


@contextlib.contextmanager
def whole_file(path, mode="w", keep=None):
    """A file to write that appears under its name when all of it is on disk, or not at all.

    keep: a name under which the file that it replaces stays. Where the file system has links, there is a file of the
    first name at every moment.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if keep and os.path.exists(path):
            keep_file(path, keep)
        os.replace(temporary, path)
        sync_folder(path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        raise


def keep_file(path, keep):
    """A second name for a file, in place of what has it now; where there are no links, the only one."""
    if not link_file(path, keep):
        os.replace(path, keep)


def link_file(path, name):
    """A second name for a file, in place of what has it now; False on a file system without links."""
    if os.path.exists(name) and os.path.samefile(path, name):
        return True  # to rename one name of a file to the other would do nothing
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"{name}.tmp")
    try:
        os.link(path, f"{name}.tmp")
    except OSError:
        return False
    os.replace(f"{name}.tmp", name)
    sync_folder(name)
    return True


def sync_folder(path):
    """A name, too, must outlive a power cut, where the file system can see to that."""
    if os.name == "posix":
        folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
                raise
        finally:
            os.close(folder)


def check_writable(path):
    """Say now, not after hours of work, that a file cannot be written."""
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UserError(f"{path} cannot be written: choose a file in a folder that exists")


def write_json(path, content, indent=None):
    """A dict, with its checksum."""
    with whole_file(path) as file:
        json.dump(content | {"checksum": checksum(content)}, file, indent=indent)


def read_json(path, way_out):
    """The dict that write_json wrote, or a sentence that ends with the way out."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        if not isinstance(content, dict) or content.pop("checksum", None) not in (None, checksum(content)):
            raise ValueError("its checksum is wrong")
        return content
    except FileNotFoundError:
        raise UserError(f"{path} is missing. {way_out}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}). {way_out}") from None


def checksum(content):
    """Of what JSON keeps of it."""
    plain = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def checked_line(row):
    """A dict as a line of JSON, with its checksum."""
    return json.dumps(row | {"crc": zlib.crc32(json.dumps(row).encode())}) + "\n"


def read_lines(path):
    """(rows, lines): the dicts of a file of such lines, and how many lines it has. One that was cut off, damaged, or is
    not ours is left out; one without a checksum counts."""
    rows, lines = [], []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), open(path, errors="replace") as file:
        lines = file.readlines()
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict) and row.pop("crc", None) in (None, zlib.crc32(json.dumps(row).encode())):
                rows.append(row)
    return rows, len(lines)


class Records:
    """What is known by key, in a file that is only ever added to: work that was done once, or paid for, is not done
    again, however the program ended. A damaged line is as if it had never been written."""

    def __init__(self, path):
        self.path, self.lock = path, threading.Lock()
        rows, lines = read_lines(path)
        self.known = {row["key"]: row["value"] for row in rows if isinstance(row.get("key"), str) and "value" in row}
        if lines > len(self.known):
            say(f"{path}: {lines - len(self.known)} damaged or repeated line(s) of {lines} are left out")

    def __contains__(self, key):
        return key in self.known

    def __getitem__(self, key):
        return self.known[key]

    def add(self, key, value):
        line = checked_line({"key": key, "value": value})
        with self.lock, open(self.path, "ab+") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END), file.read())[1] != b"\n":
                line = "\n" + line  # after one that was cut off
            file.write(line.encode())
        self.known[key] = json.loads(line)["value"]


@contextlib.contextmanager
def locked(folder, otherwise=", or choose another --out", wait=False):
    """Hold a folder's lock. The system frees it when the process ends, however it ends: no lock is ever stale."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UserError(f"{folder} is a file: choose a folder for --out")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".lock"), "a+") as file:
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"another process (pid {file.read()}) is writing to {folder}: let it finish or stop it"
                            + otherwise) from None
        except OSError as error:  # some network file systems have no locks
            print(f"{folder} cannot be locked ({error.strerror}): let no other process write to it", file=sys.stderr)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


# What made a result


@functools.cache
def commit():
    """The commit of this code, marked where files were changed since; None outside of git."""
    here = os.path.dirname(os.path.abspath(__file__))
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="]
    try:
        return subprocess.run(command, cwd=here, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance():
    """Every file of results says what made it."""
    found = {"commit": commit(), "torch": None, "python": platform.python_version()}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a report of a bug needs none
        found["torch"] = importlib.metadata.version("torch")
    return found


# On the screen


def say(text):
    """A line, printed by the first rank only, in place of a progress line if one is there."""
    if is_first_rank():
        show(("\r\x1b[K" if is_terminal(sys.stderr) else "") + f"{text}\n", sys.stdout)


def progress(text):
    """A line on a terminal that the next one replaces; "" takes it away."""
    if is_terminal(sys.stderr) and is_first_rank():
        show(f"\r\x1b[K{text}", sys.stderr)


def show(text, stream):
    """Long work goes on when nobody listens any more."""
    try:
        print(text, end="", file=stream, flush=True)
    except (OSError, ValueError, AttributeError):
        silence(stream)


def is_terminal(stream):
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # closed, or never there
        return False


def is_first_rank():
    return os.environ.get("RANK", "0") == "0"


class Progress:
    """Tokens, tokens per second and time left: one line kept up to date on a terminal, else a line every 30 seconds."""

    def __init__(self, total, start):
        self.total, self.start, self.began, self.terminal = total, start, time.monotonic(), is_terminal(sys.stderr)
        self.next = self.began + (0.5 if self.terminal else 30)

    def show(self, tokens, last=False):
        now = time.monotonic()
        if now < self.next and not last:
            return
        self.next = now + (0.5 if self.terminal else 30)
        rate = (tokens - self.start) / max(now - self.began, 1e-9)
        line = f"{tokens:,} tokens, {rate:,.0f} per second"
        if self.total and rate and not last:
            minutes, seconds = divmod(int((self.total - tokens) / rate), 60)
            line += f", {tokens / self.total:.1%}, {minutes // 60}:{minutes % 60:02}:{seconds:02} left"
        start, end = ("\r", "\033[K" + "\n" * last) if self.terminal else ("", "\n")
        show(start + line + end, sys.stderr)


def print_row(widths, *cells):
    """The cells of a table's row, or of its head; a negative width aligns to the left."""
    line = " ".join(f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for width, cell in zip(widths, cells))
    print(line.rstrip(), flush=True)


# Signals


@contextlib.contextmanager
def stop_signals():
    """A list that SIGTERM and Ctrl-C add to: the loop looks at it after each step. A second Ctrl-C leaves at once."""
    asked = []

    def take_note(number, frame):
        if number == signal.SIGINT and number in asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, take_note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# Figures


def standard_error(values):
    """Of their mean; None for a single one."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def bootstrap(tops, bottoms, draws=1000):
    """(ratio, low, high) of the sums of two lists, such as errors and variances of texts: 95% of draws of as many
    items with replacement give a ratio between low and high."""
    tops, bottoms = np.asarray(tops, float), np.asarray(bottoms, float)
    weights = np.random.default_rng(0).multinomial(len(tops), np.full(len(tops), 1 / len(tops)), draws)
    ratios = (weights @ tops) / (weights @ bottoms)
    return [float(tops.sum() / bottoms.sum()), *map(float, np.quantile(ratios, [0.025, 0.975]))]


STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # of 2 to 10 values, 95%


def student(values):
    """[mean, low, high]: Student's interval of 95%, beyond ten values a little too wide; none for a single one."""
    mean, n = float(np.mean(values)), len(values)
    if n < 2:
        return [mean, None, None]
    half = STUDENT[min(n, 10) - 2] * standard_error(values)
    return [mean, mean - half, mean + half]


def wilson(hits, count):
    """[share, low, high]: Wilson's interval of 95%."""
    if not count:
        return [0.0, 0.0, 1.0]
    z, share = 1.96, hits / count
    middle, scale = share + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return [share, max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)]
