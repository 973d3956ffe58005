"""The judge, against servers on this machine that fail in every way, and against scores made by hand."""
import contextlib
import email.utils
import http.server
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from types import SimpleNamespace

import pytest
import torch

import judge as judges
import toyworld
from checkpoint import Run
from config import Config
from helpers import Records, UserError
from judge import Asked, Grammar, Judge, Likelihood, open_judge, rating
from model import GPT
from tokenizer import END, encode, train_bpe, word_counts

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KEY = "sk-never-to-be-seen"
SEA = SimpleNamespace(name="the sea", words=toyworld.concept_words("sea"))


# Servers


class Server(http.server.ThreadingHTTPServer):
    """An endpoint. answer(handler, text, times) answers a question that comes for the times-th time: with a reply, with
    (status, headers, body), or in its own way, and then with None, after which the connection is closed."""
    request_queue_size = 64

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url, self.answer, self.over = f"http://127.0.0.1:{self.server_port}/v1", answer, threading.Event()
        self.lock, self.asked, self.when, self.requests, self.now, self.most = threading.Lock(), [], [], [], 0, 0

    def handle_error(self, *_):
        pass  # a client that did not wait


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"]
        with server.lock:
            server.asked.append(text)
            server.when.append(time.time())
            server.requests.append((self.path, self.headers, body))
            server.now, times = server.now + 1, server.asked.count(text)
            server.most = max(server.most, server.now)
        found = server.answer(self, text, times)
        with server.lock:
            server.now -= 1  # before the answer: after it, the next question may be here at once
        if found is not None:
            send(self, *(found if isinstance(found, tuple) else (200, {}, chat(found))))

    def do_GET(self):
        self.server.asked.append("GET")

    def log_message(self, *_):
        pass


def chat(reply, usage=True):
    usage = {"prompt_tokens": 10, "completion_tokens": 3} if usage is True else usage
    return json.dumps({"choices": [{"message": {"content": reply}}], "usage": usage}).encode()


def send(handler, status, headers, body, reason=None):
    handler.send_response(status, reason)
    for name, value in ({"Content-Length": len(body)} | headers).items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


@contextlib.contextmanager
def running(answer):
    with Server(answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()


@pytest.fixture
def serve():
    """Call with how to answer: a server, until the end of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda answer: stack.enter_context(running(answer))


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache.jsonl")


@pytest.fixture
def connect(cache):
    """Call with a server: a Judge that asks it."""
    def make(server, model="m", key=KEY, **settings):
        return Judge(model, cache, server.url, key, **{"pause": 0.01, "patience": 10} | settings)
    return make


def ask(judge, *texts):
    return judge.ask([question(text) for text in texts])


def question(text):
    return [{"role": "user", "content": text}]


def numbered(count):
    return [f"question {number}" for number in range(count)]


def echo(handler, text, times):
    return f"on {text}"


def kept_in(path):
    return set(Records(path).known.values())


# Processes


COMMAND = "import runpy; sys.argv[0] = 'judge.py'; runpy.run_path(f'{sys.path[0]}/judge.py', run_name='__main__')"


def light(program):
    """The arguments for a Python that runs a program."""
    return "-c", f"import json, sys, types; sys.path.insert(0, {ROOT!r})\n{program}"


def start(server, key, *arguments):
    environment = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": key, "OMP_NUM_THREADS": "1"}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # one that is ignored here would be there, too
    try:
        return subprocess.Popen([sys.executable, *arguments], env=environment, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)


def wait_until(true):
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


# Ratings


def test_a_rating_is_the_last_one_and_halves_count():
    assert rating("It speaks of ships.\nRating: [[2]]") == 2 and rating("Rating: [[0]]") == 0
    assert rating("Rating: [[0.5]]") == 0.5 and rating("Rating:[[ 1.5 ]] and no more") == 1.5
    assert rating("**Rating:** [[1]]") == rating("**Rating: [[1]]**") == 1
    assert rating("At first Rating: [[0]], but then\nRating: [[2]].") == 2


@pytest.mark.parametrize("reply", [
    None, "", "Good.", "Rating: 2", "Rating: [2]", "[[]]", "Rating: [[]]", "Rating: [[x]]", "Rating: [[two]]",
    "Rating: [[3]]", "Rating: [[2.5]]", "Rating: [[-1]]", "Rating: [[-0.5]]", "Rating: [[nan]]", "Rating: [[inf]]",
    "Rating: [[1]] or rather Rating: [[7]]", "Rating: [[1]] or rather Rating: [[-1]]", f"Rating: [[{'9' * 400}]]",
    "Rating: [[\u0662]]", "Rating: [[1",
])
def test_what_is_no_rating_from_0_to_2_is_missing(reply):
    assert rating(reply) is None


def test_a_text_is_asked_about_without_what_follows_its_end(serve, connect):
    def answer(handler, text, times):
        if "Concept: the sea" in text:
            return "Rating: [[1.5]]"
        return "{no} rating" if "An odd one." in text else "Rating: [[0]]"
    server = serve(answer)
    pairs = [("A {ship}", f" sailed.{END}Then more."), ("An odd", " one.")]
    assert Asked(connect(server)).score(SEA, pairs) == [(1.5, 0.0), (1.5, None)]
    assert len(server.asked) == 4 and not any("Then more" in text for text in server.asked)
    assert sum("\nA {ship} sailed.\n" in text for text in server.asked) == 2


# What may pass


def cut_short(handler, *_):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + chat("half of it")[:30])


TROUBLE = {
    "408": (408, {}, b""), "409": (409, {}, b""), "429": (429, {}, b"slowly"), "500": (500, {}, b"{}"),
    "503": (503, {"Retry-After": "soon"}, b""), "529": (529, {"Retry-After": "-3"}, b""),
    "a date that is none": (503, {"Retry-After": "Mon, 01 Jan 2024 00:00:00 +" + "9" * 30}, b""),
    "a closed connection": lambda *_: None, "an answer cut short": cut_short,
    "no http": lambda handler, *_: handler.wfile.write(b"hello there\r\n\r\n") and None,
    "no text": (200, {}, b""), "no json": (200, {}, b"<html>busy</html>"), "no utf-8": (200, {}, b'{"a": "\xff\xfe"}'),
    "a list": (200, {}, b"[]"), "a number": (200, {}, b"7"), "nothing": (200, {}, b"null"),
    "no choices": (200, {}, b'{"choices": []}'), "an error": (200, {}, b'{"error": {"message": "busy"}}'),
    "no message": (200, {}, b'{"choices": [{"message": null}]}'),
    "no words": (200, {}, b'{"choices": [{"message": {"content": ["a", 1]}}]}'),
    "depths": (200, {}, b"[" * 100_000),
}


def test_what_may_pass_is_tried_again_until_it_is_answered(serve, connect, cache, capsys):
    def answer(handler, text, times):
        trouble = TROUBLE[text]
        return f"on {text}" if times == 3 else trouble(handler) if callable(trouble) else trouble
    server = serve(answer)
    assert ask(connect(server), *TROUBLE) == [f"on {name}" for name in TROUBLE]
    assert {name: server.asked.count(name) for name in TROUBLE} == dict.fromkeys(TROUBLE, 3)
    assert kept_in(cache) == {f"on {name}" for name in TROUBLE} and capsys.readouterr().out == ""


def test_the_pause_that_the_server_asks_for_is_kept(serve, connect):
    moment = math.floor(time.time() + 1.6)
    asked_for = {"in seconds": "0.4", "at a date": email.utils.formatdate(moment, usegmt=True)}

    def answer(handler, text, times):
        return (503 if text == "at a date" else 429, {"Retry-After": asked_for[text]}, b"") if times == 1 else text
    server = serve(answer)
    assert ask(connect(server), *asked_for) == list(asked_for)
    times = {name: [when for text, when in zip(server.asked, server.when) if text == name] for name in asked_for}
    assert 0.4 <= times["in seconds"][1] - times["in seconds"][0] < 3
    assert moment <= times["at a date"][1] < moment + 3


def test_a_pause_is_two_minutes_at_most_and_garbage_asks_for_none():
    assert judges.asked_pause("7") == 7 and judges.asked_pause("0.5") == 0.5 and judges.asked_pause("86400") == 120
    in_a_minute = email.utils.formatdate(time.time() + 60, usegmt=True)
    assert 58 < judges.asked_pause(in_a_minute) <= 60
    for text in (None, "", "soon", "-5", "nan", "inf", "-inf", "Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 99 Oct",
                 "Mon, 01 Jan 2024 00:00:00 +" + "9" * 30, "Mon, 01 Jan 0001 00:00:00 -0000", "9" * 400 + "x"):
        assert judges.asked_pause(text) == 0


def test_pauses_grow(serve, connect):
    server = serve(lambda handler, text, times: text if times == 5 else (500, {}, b""))
    assert ask(connect(server, pause=0.04), "a") == ["a"]
    gaps = [after - before for before, after in zip(server.when, server.when[1:])]
    assert all(gap >= 0.75 * 0.04 * 2 ** number for number, gap in enumerate(gaps)) and sum(gaps) < 5


def test_long_answers_and_answers_in_pieces_are_read_whole(serve, connect):
    long = "word " * 100_000

    def answer(handler, text, times):
        if text == "long":
            return long
        body = chat(long)
        pieces = [body[start : start + 70_000] for start in range(0, len(body), 70_000)]
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(
            b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n")
    assert ask(connect(serve(answer)), "long", "in pieces") == [long, long]


# Without an end


def drip(start, again=b"x"):
    """An answer that begins so and then goes on, a little at a time, for longer than a test waits."""
    def answer(handler, text, times):
        end = time.monotonic() + 8
        with contextlib.suppress(OSError):
            handler.wfile.write(start)
            while time.monotonic() < end and not handler.server.over.wait(0.02):
                handler.wfile.write(again)
    return answer


ENDLESS = {
    "silence": lambda handler, *_: handler.server.over.wait(8) and None,
    "a body": drip(b"HTTP/1.1 200 OK\r\n\r\n"),
    "a body of known length": drip(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"),
    "a status": drip(b"HTTP/1.1 200 "),
    "a header": drip(b"HTTP/1.1 200 OK\r\nX: "),
    "promises": drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "the length of a piece": drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5;"),
    "what follows the last piece": drip(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n"),
    "a header of a failure": drip(b"HTTP/1.1 500 Oh\r\nX: "),
}


def test_silence_and_drips_without_end_are_failures_in_time(serve, connect, cache, capsys, monkeypatch):
    monkeypatch.setattr(judges, "ATTEMPTS", 2)
    monkeypatch.setattr(judges, "AT_ONCE", len(ENDLESS) + 1)
    server = serve(lambda handler, text, times: ENDLESS[text](handler, text, times) if text in ENDLESS else text)
    began = time.monotonic()
    assert ask(connect(server, patience=0.5), *ENDLESS, "fine") == [None] * len(ENDLESS) + ["fine"]
    assert time.monotonic() - began < 6
    assert len(server.asked) == 2 * len(ENDLESS) + 1 and kept_in(cache) == {"fine"}
    assert f"{len(ENDLESS)} of {len(ENDLESS) + 1} questions got no answer" in capsys.readouterr().out


@pytest.mark.parametrize("status", [400, 404])
def test_a_refusal_whose_words_have_no_end_is_a_refusal_in_time(serve, connect, status):
    began = time.monotonic()
    with pytest.raises(UserError, match=f"status {status}"):
        ask(connect(serve(drip(b"HTTP/1.1 %d No\r\n\r\n" % status)), patience=0.5), "a")
    assert time.monotonic() - began < 5


def test_the_time_for_an_answer_is_for_the_whole_of_it(serve, connect, monkeypatch):
    monkeypatch.setattr(judges, "ATTEMPTS", 1)

    def answer(handler, text, times):
        time.sleep(0.8)
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n{")
        handler.server.over.wait(8)
    judge, began = connect(serve(answer), patience=1), time.monotonic()
    assert ask(judge, "a") == [None] and 1 <= time.monotonic() - began < 1.6


def test_an_answer_of_any_size_is_not_read_to_its_end(serve, connect, monkeypatch):
    monkeypatch.setattr(judges, "ATTEMPTS", 1)
    monkeypatch.setattr(judges, "LARGEST", 10 ** 6)
    sent = []

    def answer(handler, text, times):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not handler.server.over.is_set() and len(sent) < 2000:
            handler.wfile.write(b" " * 2 ** 16)
            sent.append(1)
    assert ask(connect(serve(answer), patience=20), "a") == [None] and len(sent) < 200


# What will not pass


def test_a_server_that_always_fails_leaves_questions_missing_and_says_so(serve, connect, cache, capsys):
    server = serve(lambda *_: (500, {}, b""))
    assert ask(connect(server), *numbered(7)) == [None] * 7
    assert len(server.asked) == 7 * judges.ATTEMPTS and not kept_in(cache)
    out = capsys.readouterr().out
    assert out.startswith(f"7 of 7 questions got no answer from {server.url} (the last: ") and "status 500" in out
    assert out.count("\n") == 1


def test_failures_in_a_row_end_the_run_and_what_was_answered_is_kept(serve, connect, cache, capsys):
    def answer(handler, text, times):
        return echo(handler, text, times) if text in numbered(5) else (503, {}, b"")
    server = serve(answer)
    with pytest.raises(UserError, match="^8 questions in a row got no answer from .*status 503.* are kept"):
        ask(connect(server), *numbered(100))
    assert kept_in(cache) == {f"on {text}" for text in numbered(5)} and len(server.asked) < 30 * judges.ATTEMPTS
    server.answer = echo
    server.asked.clear()
    assert ask(connect(server), *numbered(100)) == [f"on {text}" for text in numbered(100)]
    assert set(server.asked) == set(numbered(100)[5:])


def test_failures_that_are_not_in_a_row_do_not_end_the_run(serve, connect, monkeypatch):
    monkeypatch.setattr(judges, "ATTEMPTS", 1)
    failing = set(numbered(60)[::3])
    server = serve(lambda handler, text, times: (500, {}, b"") if text in failing else text)
    judge = connect(server)
    assert ask(judge, *numbered(60)) == [None if text in failing else text for text in numbered(60)]
    server.asked.clear()
    failing.clear()
    assert None in ask(judge, *numbered(60)) and not server.asked  # by the same judge nothing is put again
    assert ask(connect(server), *numbered(60)) == numbered(60) and set(server.asked) == set(numbered(60)[::3])


@pytest.mark.parametrize("status, words", [
    (401, "does not take the key"), (404, "is there this model"), (400, "too odd.* it would refuse the same question"),
    (403, "it would refuse the same question again"), (302, "it sends the question elsewhere"),
])
def test_what_will_not_change_stops_all_at_once(serve, connect, cache, status, words):
    body = json.dumps({"error": {"message": "too\n odd"}}).encode()
    server = serve(lambda *_: (status, {}, body))
    with pytest.raises(UserError, match=words) as error:
        ask(connect(server), *numbered(200))
    assert "\n" not in str(error.value) and server.url in str(error.value) and f"status {status}" in str(error.value)
    time.sleep(0.1)
    assert 1 <= len(server.asked) <= 8 and not kept_in(cache)


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b'"text"', b'{"error": "text"}', b"[" * 60_000, b"\xff\xfe",
                                  b'{"error": {"message": null}}'])
def test_a_refusal_is_a_sentence_whatever_its_body(serve, connect, body):
    server = serve(lambda *_: (404, {}, body))
    with pytest.raises(UserError, match="refuses 'm' .status 404: .*: is there this model"):
        ask(connect(server), "a")
    assert len(server.asked) == 1


def test_what_was_answered_before_a_refusal_is_kept(serve, connect, cache):
    def answer(handler, text, times):
        return (400, {}, b"") if text == "question 20" else text
    server = serve(answer)
    with pytest.raises(UserError):
        ask(connect(server), *numbered(40))
    assert len(kept_in(cache)) >= 13 and "question 20" not in kept_in(cache)  # 7 others may have been under way


# The key


@pytest.mark.parametrize("status", [400, 401, 403, 404, 500, 302])
def test_the_key_is_shown_nowhere_though_the_server_repeats_it(serve, connect, cache, capfd, monkeypatch, status):
    monkeypatch.setattr(judges, "ATTEMPTS", 2)

    def answer(handler, text, times):
        if text == "fine":
            return text
        body = json.dumps({"error": {"message": f"the key {KEY} {'long ' * 32}{KEY}"}}).encode()
        send(handler, status, {"X-Key": KEY, "Location": f"ftp://{KEY}"}, body, f"{KEY} is no key")
    judge, shown = connect(serve(answer)), ""
    ask(judge, "fine")
    try:
        ask(judge, "a", "b")
        assert status == 500
    except UserError as error:
        shown = str(error) + repr(error) + "".join(traceback.format_exception(error))
        assert "status" in shown
    shown += "".join(capfd.readouterr()) + open(cache).read()
    assert "fine" in shown and KEY not in shown and KEY[:9] not in shown


def test_the_key_is_shown_nowhere_though_it_comes_instead_of_an_answer(serve, connect, capfd, monkeypatch):
    monkeypatch.setattr(judges, "ATTEMPTS", 1)
    judge = connect(serve(lambda handler, text, times: handler.wfile.write(text.encode()) and None))
    for text in (f"HTTP/1.1 {KEY} no status\r\n\r\n", f"{KEY}\r\n\r\n", f"HTTP/{KEY} 200 OK\r\n\r\n",
                 f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{KEY}\r\n", f"HTTP/1.1 200 OK\r\n\r\n{{{KEY}"):
        ask(judge, text)
        out, err = capfd.readouterr()
        assert "1 of 1 questions" in out and KEY not in out + err


@pytest.mark.parametrize("key", ["sk-first\nsecond", "sk-first\r\nX-Other: second", "sk-first second",
                                 "sk-first\u00e9second", "sk-first\u0416second", "sk-first\x00second",
                                 "sk-first\tsecond", "sk-first\udcffsecond"])
def test_a_key_that_no_header_can_hold_is_refused_without_showing_it(serve, cache, capfd, key):
    server = serve(echo)
    environment = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": key}
    for make in (lambda: open_judge("openai:m", cache, environment),
                 lambda: Judge("m", cache, server.url, key, pause=0.01, patience=0.5)):
        with pytest.raises(UserError, match="OPENAI_API_KEY") as error:
            ask(make(), "a")
        shown = "".join(traceback.format_exception(error.value)) + "".join(capfd.readouterr())
        assert "first" not in shown and "second" not in shown
    assert not server.asked and not os.path.exists(cache)


def test_the_key_goes_out_as_a_header_and_without_one_there_is_none(serve, cache):
    server = serve(echo)
    for key in KEY, f"  {KEY}\n", "":
        environment = {"OPENAI_BASE_URL": f"{server.url}/", "OPENAI_API_KEY": key}
        ask(open_judge("openai:m:7b", cache, environment), f"with {key}")
    assert [headers["Authorization"] for _, headers, _ in server.requests] == [f"Bearer {KEY}"] * 2 + [None]
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions" and headers["Content-Type"] == "application/json"
    assert body["model"] == "m:7b" and body["temperature"] == 0 and body["messages"] == question(f"with {KEY}")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(serve, connect, status):
    other = serve(echo)
    server = serve(lambda *_: (status, {"Location": f"{other.url}/chat/completions"}, b""))
    with pytest.raises(UserError, match=f"status {status}.*it sends the question elsewhere"):
        ask(connect(server), "a", "b")
    assert server.asked and not other.asked


def test_what_is_on_this_machine_is_not_asked_through_a_proxy(serve, connect, monkeypatch):
    proxy = serve(lambda *_: "from the proxy")
    for name in "http_proxy", "HTTP_PROXY", "all_proxy":
        monkeypatch.setenv(name, proxy.url)
    monkeypatch.delenv("no_proxy", raising=False)
    assert ask(connect(serve(echo)), "a") == ["on a"] and not proxy.asked


# Addresses and names


@pytest.mark.parametrize("url", [
    "file:///etc/passwd", "ftp://127.0.0.1/v1", "127.0.0.1:8000/v1", "localhost:8000", "http://", "http:///v1",
    "http://:8000/v1", "http://127.0.0.1:0/v1", "http://127.0.0.1:99999/v1", "http://127.0.0.1:port/v1",
    "http://[::1/v1", "http://me:hunter2@127.0.0.1:9/v1", "http://hunter2@127.0.0.1:9/v1", "http://127.0.0.1:9/v 1",
    " http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1\n", "http://127.0.0.1:9/v1\r\nX-Other: 1", "http://h\u00f6st/v1",
    "http://me:hunter2@[::1/v1", "http://127.0.0.1:9/v1?key=hunter2", "http://127.0.0.1:9/v1#hunter2",
])
def test_an_address_that_will_not_do_is_refused_without_showing_it(cache, url):
    with pytest.raises(UserError, match="^OPENAI_BASE_URL must be an address such as") as error:
        open_judge("openai:m", cache, {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": KEY})
    shown = "".join(traceback.format_exception(error.value))
    assert "hunter2" not in shown and KEY not in shown and "\n" not in str(error.value)


def test_without_an_address_there_must_be_a_key(cache):
    for environment in {}, {"OPENAI_BASE_URL": ""}, {"OPENAI_BASE_URL": f"{judges.DEFAULT_URL}/"}:
        for key in {}, {"OPENAI_API_KEY": ""}, {"OPENAI_API_KEY": " \n"}:
            with pytest.raises(UserError, match="the judge needs a key"):
                open_judge("openai:m", cache, environment | key)


@pytest.mark.parametrize("name", ["", "gpt", "openai", "openai:", "openai: ", "other:gpt", ":gpt"])
def test_a_judge_that_there_is_not_is_refused(cache, name):
    with pytest.raises(UserError, match="there is no judge .*write openai:MODEL"):
        open_judge(name, cache, {"OPENAI_API_KEY": KEY})


# Many questions


def test_8_are_under_way_at_most_and_answers_are_in_the_order_of_the_questions(serve, connect):
    delays = random.Random(0)

    def answer(handler, text, times):
        time.sleep(delays.uniform(0.005, 0.03))
        return (500, {}, b"") if times == 1 and text.endswith("7") else echo(handler, text, times)
    server = serve(answer)
    texts = numbered(80) + numbered(40)[::-1]
    judge = connect(server)
    assert ask(judge, *texts) == [f"on {text}" for text in texts]
    assert server.most == 8
    assert sorted(server.asked) == sorted(numbered(80) + numbered(80)[7::10])  # equal questions once
    assert judge.spent == [80, 800, 240]
    assert ask(judge) == []


def test_an_answer_counts_though_its_figures_are_garbage(serve, connect):
    figures = None, {}, "many", 7, [1, 2], {"prompt_tokens": "ten"}, {"prompt_tokens": 5}
    bodies = [chat("a", usage) for usage in figures]
    server = serve(lambda handler, text, times: (200, {}, bodies[int(text)]))
    judge = connect(server)
    assert ask(judge, *map(str, range(len(bodies)))) == ["a"] * len(bodies)
    assert len(server.asked) == len(bodies) and judge.spent == [len(bodies), 5, 0]


def test_another_model_temperature_or_address_is_another_question(serve, connect, cache):
    server = serve(echo)
    for settings in {}, {"model": "other"}, {"temperature": 0.5}, {"temperature": None}, {"key": "another"}, {}:
        ask(connect(server, **settings), "a")
    assert [(body["model"], body.get("temperature")) for *_, body in server.requests] == [
        ("m", 0), ("other", 0), ("m", 0.5), ("m", None)]
    other = serve(echo)
    ask(connect(other), "a")
    assert len(other.asked) == 1
    other.url += "/"  # the same address
    ask(connect(other), "a")
    assert len(other.asked) == 1 and len(open(cache).readlines()) == 5


def test_a_reply_without_a_rating_is_kept_and_stays_missing(serve, connect):
    odd = "no \ud800 idea \u00e9\u2028"
    server = serve(lambda handler, text, times: odd)
    for _ in range(2):
        replies = ask(connect(server), "odd")
        assert replies == [odd] and list(map(rating, replies)) == [None]
    assert len(server.asked) == 1


@pytest.mark.parametrize("reply", [None, "", " \n"])
def test_an_empty_reply_is_missing_and_not_asked_for_again_before_the_next_run(serve, connect, reply, capsys):
    server = serve(lambda handler, text, times: (200, {}, chat(reply)))
    for number in (1, 2):
        assert ask(connect(server), "silent") == [None] and len(server.asked) == number
    assert "an empty reply" in capsys.readouterr().out
    with pytest.raises(UserError, match="in a row"):
        ask(connect(server), *numbered(20))


def test_a_model_that_gives_no_ratings_is_found_out_before_all_is_paid_for(serve, connect):
    server = serve(lambda handler, text, times: "I would rather not say.")
    with pytest.raises(UserError, match="rather not say"):
        Asked(connect(server)).try_out([question(text) for text in numbered(50)])
    assert len(server.asked) == 8
    server = serve(lambda handler, text, times: "Rating: [[1]]")
    Asked(connect(server)).try_out([question(text) for text in numbered(50)])


def test_the_cost_is_of_what_is_not_answered_yet(serve, connect):
    judge = connect(serve(echo))
    texts = ["a" * 400, "b" * 800, "b" * 800, "c" * 4000]
    before = judge.cost([question(text) for text in texts])
    assert before == (3, 0, 1300 + 24, 3 * judges.REPLY_TOKENS)
    assert str(before) == "3 questions, about 1,324 tokens in and at most 1,200 out"
    ask(judge, *texts[:2])
    after = judge.cost([question(text) for text in texts])
    assert after == (1, 2, 1000 + 8, judges.REPLY_TOKENS)
    assert str(after).endswith("; 2 more were answered before") and judge.spent[0] == 2
    ask(judge, *texts)
    assert judge.cost([question(text) for text in texts])[:3] == (0, 3, 0)


# The cache


ASKING = """
from judge import open_judge
questions = [[{"role": "user", "content": f"question {number}"}] for number in range(40)]
print(json.dumps(open_judge("openai:m", sys.argv[1]).ask(questions)))
"""


def test_a_killed_run_asks_nothing_again_that_was_answered(serve, cache):
    healthy = threading.Event()

    def answer(handler, text, times):
        time.sleep(0.01)
        with server.lock:
            first = len(answered) < 20
            if first:
                answered.append(text)
        if not first:
            healthy.wait(20)
        return echo(handler, text, times)
    answered, server = [], serve(answer)
    with start(server, KEY, *light(ASKING), cache) as killed:
        wait_until(lambda: len(server.asked) == 28 and len(open(cache).readlines()) == 20)
        killed.send_signal(signal.SIGKILL)
    before = open(cache, "rb").read()
    assert kept_in(cache) == {f"on {text}" for text in answered} and before.count(b"\n") == 20
    healthy.set()
    server.asked.clear()
    out, err = start(server, KEY, *light(ASKING), cache).communicate(timeout=60)
    assert json.loads(out) == [f"on {text}" for text in numbered(40)] and err == ""
    assert sorted(server.asked) == sorted(set(numbered(40)) - set(answered))
    assert open(cache, "rb").read().startswith(before) and KEY.encode() not in open(cache, "rb").read()


def test_only_a_damaged_line_is_asked_again(serve, connect, cache, capsys):
    server = serve(echo)
    ask(connect(server), *numbered(30))
    *lines, last = open(cache, "rb").read().splitlines(keepends=True)
    spoilt = json.loads(lines[10])["value"], json.loads(last)["value"]
    lines[10] = lines[10].replace(b"on question", b"no question")
    damaged = b"".join(lines) + last[:-9]
    with open(cache, "wb") as file:
        file.write(damaged)
    server.asked.clear()
    judge = connect(server)
    assert "2 damaged or repeated line(s) of 30 are left out" in capsys.readouterr().out
    assert judge.cost([question(text) for text in numbered(30)])[:2] == (2, 28)
    assert ask(judge, *numbered(30)) == [f"on {text}" for text in numbered(30)]
    assert sorted(f"on {text}" for text in server.asked) == sorted(spoilt)
    assert open(cache, "rb").read().startswith(damaged + b"\n")
    assert ask(connect(server), *numbered(30)) == [f"on {text}" for text in numbered(30)] and len(server.asked) == 2


def test_a_record_is_what_was_written_or_gone_whichever_bit_changes(tmp_path, capsys):
    path = str(tmp_path / "records")
    truth = {"a": "one", "b": "Rating: [[1]]", "c": "three"}
    for key, value in truth.items():
        Records(path).add(key, value)
    raw = open(path, "rb").read()
    start = raw.index(b"\n") + 1
    for bit in range(8 * start, 8 * (raw.index(b"\n", start) + 1)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        with open(path, "wb") as file:
            file.write(damaged)
        records = Records(path)
        assert records.known.items() <= truth.items() and records["a"] == "one"
        assert bit >= 8 * raw.index(b"\n", start) or records["c"] == "three"
    for end in range(len(raw)):
        with open(path, "wb") as file:
            file.write(raw[:end])
        Records(path).add("d", "four")
        assert Records(path).known.items() <= (truth | {"d": "four"}).items() and Records(path)["d"] == "four"
        assert len(Records(path).known) == 1 + raw[:end].count(b"\n") + (raw[end : end + 1] == b"\n")


def test_a_file_of_other_things_holds_no_answers(serve, connect, cache):
    server = serve(echo)
    name = connect(server).name_of(question("a"))
    with open(cache, "w") as file:
        for row in [name], {"key": name}, {"value": "x"}, {"key": [name], "value": "x"}, {"key": 7, "value": "x"}, None:
            file.write(json.dumps(row) + "\n")
        file.write("\n\n\x00\x00\n" + "[" * 100_000)
    assert ask(connect(server), "a") == ["on a"] == ask(connect(server), "a") and len(server.asked) == 1


def test_no_question_goes_out_whose_answer_cannot_be_kept(serve, tmp_path):
    server = serve(echo)
    (tmp_path / "file").write_text("")
    for path in tmp_path / "absent" / "cache.jsonl", tmp_path / "file" / "cache.jsonl", tmp_path:
        with pytest.raises((OSError, UserError)):
            ask(Judge("m", str(path), server.url, KEY), "a", "b")
    assert not server.asked
    assert ask(Judge("m", os.devnull, server.url, KEY), "a") == ["on a"]


# The command


def test_the_command_prints_both_ratings(serve):
    server = serve(lambda handler, text, times:
                   "It is.\nRating: [[2]]" if "Concept: sea\n" in text else "Rating: [[0.5]]")
    process = start(server, KEY, os.path.join(ROOT, "judge.py"), "openai:x", "The ship sailed.", "--concept", "sea")
    assert process.communicate(timeout=60) == (
        "concept: 2\n  It is.\nRating: [[2]]\nfluency: 0.5\n  Rating: [[0.5]]\n"
        "asked 2 questions, 20 tokens in, 6 out\n", "")
    assert process.returncode == 0 and len(server.asked) == 2


def test_the_command_says_that_a_key_is_wrong_and_does_not_show_it(serve):
    server = serve(lambda *_: (401, {}, json.dumps({"error": {"message": f"{KEY} is no key"}}).encode()))
    process = start(server, KEY, *light(COMMAND), "openai:x", "text")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == "" and KEY not in err
    assert err.startswith(f"judge.py: {server.url} does not take the key") and err.count("\n") == 1


def test_ctrl_c_ends_the_command_while_it_waits_for_an_answer(serve):
    server = serve(lambda handler, *_: handler.server.over.wait(60) and None)
    process = start(server, KEY, *light(COMMAND), "openai:x", "text")
    wait_until(lambda: len(server.asked) == 2)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "judge.py: stopped\n") and process.returncode == 1
    assert time.monotonic() - began < 4


# Offline


FORMED = "The sailor sailed the marine ship."  # 6 words, 4 of the sea
OTHER = "The king conquered the royal castle."  # 6 words, none of the sea
BROKEN = "Ship the the ship a king."  # 6 words, 2 of the sea


@pytest.mark.parametrize("prefix, text, share, formed", [
    ("", f"{FORMED} {OTHER}", 4 / 12, 1), ("", f"{FORMED} {BROKEN} {OTHER} {OTHER}", 6 / 24, 3 / 4),
    ("", BROKEN, 2 / 6, 0), ("", FORMED.upper(), 4 / 6, 0), ("", "", 0, 0), ("", "...", 0, 0),
    ("", f"{FORMED} The pirate", 5 / 8, 1), ("", f"{FORMED} Ship ship", 6 / 8, 1), ("", "The ship", 1 / 2, 0),
    ("", f"{FORMED}{END}{OTHER}{END}", 4 / 12, 1), ("", f"{FORMED}{END}The ship", 5 / 8, 1),
    ("", f"{FORMED} The ship{END}{OTHER}", 5 / 14, 2 / 3),  # ended there by the model itself
    ("The sailor", " sailed the marine ship. The", 3 / 5, 1), ("The sailor", " king. The", 0, 0),
    (f"{BROKEN} The", " king conquered the royal castle.", 0, 1 / 2), (OTHER, " the end", 0, 1), (FORMED, "", 0, 1),
])
def test_the_toy_grammar_counts_words_of_the_concept_and_well_formed_sentences(prefix, text, share, formed):
    assert Grammar().score(SEA, [(prefix, text)] * 2) == [(pytest.approx(share), pytest.approx(formed))] * 2


def test_the_toy_worlds_own_documents_are_well_formed():
    for document in toyworld.documents(3, 5):
        topic = document.labels["topics"][0]
        concept = SimpleNamespace(name=topic, words=toyworld.concept_words(topic))
        (share, formed), = Grammar().score(concept, [("", document.text)])
        assert 0 < share < 1 and formed == 1


def test_the_share_of_sentences_with_a_concept_is_exact():
    assert judges.share_of_sentences(SEA.words, f"{FORMED} {OTHER} {BROKEN} {OTHER}") == 2 / 4
    assert judges.share_of_sentences(SEA.words, f"{OTHER} {FORMED} {FORMED} The ship") == pytest.approx(2 / 3)
    assert judges.share_of_sentences(SEA.words, f"{OTHER}{END}{FORMED} {OTHER} {OTHER}") == 1 / 4
    assert judges.share_of_sentences(SEA.words, "") == judges.share_of_sentences(SEA.words, "The ship") == 0
    assert judges.share_of_sentences(SEA.words, "The shipping of kings. The SHIP.") == 1 / 2


def test_new_threes_are_the_share_of_threes_that_are_not_repeated():
    assert judges.new_threes("a b c d e") == judges.new_threes("") == judges.new_threes("a, b.") == 1
    assert judges.new_threes("a b c a b c") == 3 / 4 and judges.new_threes("So so. So SO! so") == pytest.approx(1 / 3)


@pytest.fixture(scope="module")
def run():
    """A model with random weights and a tokenizer of the toy world."""
    config = Config(layers=2, d=32, heads=2, context=32, vocab_size=512, bits=(5, 8), active=(4, 6), children=(16,),
                    seed=1)
    texts = [document.text for document in toyworld.documents(0, 50)]
    encoding = train_bpe(word_counts(texts, toyworld.TOKEN_PATTERN), 512, toyworld.TOKEN_PATTERN)
    torch.manual_seed(0)
    return Run(GPT(config).eval(), config, encoding, {}, "out/random")


@torch.no_grad()
def test_likelihood_is_the_probability_of_a_token_times_new_threes(run):
    pairs = [("The sailor", f" sailed the ship.{END}The ship"), (f"{OTHER} {BROKEN}", " The ship"), ("", FORMED),
             ("The king", END), ("The king", ""), ("The king", f" {BROKEN} {BROKEN} {OTHER} {FORMED}" * 3),
             ("a", " ship"), ("The ship the ship", " the ship the ship")]
    judge, expected = Likelihood(run), []
    for prefix, text in pairs:
        text = text.split(END)[0]
        words = text.replace(".", "").lower().split()
        share = sum(word in SEA.words for word in words) / max(1, len(words))
        after = encode(run.encoding, text).tolist()
        tokens = [run.encoding.eot_token, *encode(run.encoding, prefix).tolist(), *after][-33:]
        if not after:
            expected.append((share, None))
            continue
        log_probs = run.model(torch.tensor([tokens[:-1]]))[0].log_softmax(-1)
        found = [log_probs[place, tokens[place + 1]].item() for place in range(len(tokens) - 1)][-len(after):]
        words = (prefix + text).replace(".", "").lower().split()
        threes = [tuple(words[place : place + 3]) for place in range(len(words) - 2)]
        new = sum(three not in threes[:place] for place, three in enumerate(threes)) / len(threes) if threes else 1
        expected.append((pytest.approx(share), pytest.approx(math.exp(sum(found) / len(found)) * new, rel=1e-4)))
    assert judge.score(SEA, pairs) == expected
    assert judge.score(SEA, pairs[3:5]) == expected[3:5] and judge.score(SEA, []) == []
    assert judge.name == "run:out/random"


def test_the_least_fluency_is_a_tenth_less_than_that_of_unsteered_texts(run, serve, connect):
    assert judges.least_fluency(Asked(connect(serve(echo))), 1.8) == pytest.approx(1.6)
    assert judges.least_fluency(Grammar(), 0.95) == pytest.approx(0.85)
    assert judges.least_fluency(Likelihood(run), 0.5) == pytest.approx(0.45)
