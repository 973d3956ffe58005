"""The live parts of view.py's page: the model behind it, on 127.0.0.1 and nowhere else.

    python view.py out/tiny --serve                 http://127.0.0.1:8137/

    GET  /  /FOLDER/NAME.js        the page, and the pieces of its data: no other file is served
    POST /api/state                what there is to steer towards
    POST /api/codes                the codes of a text
    POST /api/effect               what a feature does to the next token, if the page does not know
    POST /api/next                 the next token's probabilities, unedited and edited, and the Python lines for it
    POST /api/generate             both continuations, token by token: a line of JSON for each
    POST /api/stop                 ends the one that is being written

One text is written at a time; a second request is told so, and either page can stop it. Nobody waits for a page that
is left open: connections are closed after every answer, threads are daemons, and a reader who is slow or gone ends what
was written for him. Other sites cannot use the server by way of a browser: the Host must be this one (DNS rebinding),
and so must the Origin of every POST, which has to be JSON; nor may they load its scripts.
"""
import codecs
import contextlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import torch.nn.functional as F

from dpb import unfold
from features import effect, open_index, parse_feature, prompt_tokens
from helpers import UserError, first_line, say
from sources import read_codes
from steer import Change, add_features, change_features, contrast, piece, toy_texts
from toyworld import TOPICS, is_toy

MOST_BODY = 2 ** 16      # bytes of a request
MOST_CONNECTIONS = 64
PATIENCE = 10            # seconds for a client to send, or to take, the next bytes
PIECE = re.compile(r"[a-z]+(-\d{1,9}){0,2}\.js")
HEADERS = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin",
           "Cache-Control": "no-store", "Content-Security-Policy": "frame-ancestors 'none'",
           "Referrer-Policy": "no-referrer"}


class Refused(Exception):
    """An answer other than 200: (status, sentence)."""


class Stopped(Exception):
    """Somebody asked to stop."""


class Watched:
    """A model whose every pass first looks whether to stop."""

    def __init__(self, model, stop):
        self.model, self.stop = model, stop

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, *arguments, **options):
        if self.stop.is_set():
            raise Stopped
        return self.model(*arguments, **options)


# What a request asks for


def number(given, name, low, high, default=None, kind=float):
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:  # nor NaN
        raise UserError(f"{name} must be a number from {low:g} to {high:g}")
    return kind(value)


def text_in(given, name):
    if not isinstance(given.get(name, ""), str):
        raise UserError(f"{name} must be a text")
    return given.get(name, "")


def changes_in(given, source):
    """The Changes of the list `edits`: {feature, layers, kind: zero | scale | add, amount}."""
    edits, found = given.get("edits", []), []
    if not isinstance(edits, list) or len(edits) > 64 or not all(isinstance(edit, dict) for edit in edits):
        raise UserError("edits must be a list of at most 64 objects")
    for edit in edits:
        layer, index, sign = parse_feature(text_in(edit, "feature"), source)
        layers = edit.get("layers", [layer])
        if not isinstance(layers, list) or not all(isinstance(item, int) and item in source.layers for item in layers):
            raise UserError("layers must be a list of layers that the source has")
        kind, amount = edit.get("kind"), number(edit, "amount", -1e4, 1e4, 0.0)
        if kind not in ("zero", "scale", "add"):
            raise UserError("kind must be zero, scale or add")
        scale, add = {"zero": (0.0, 0.0), "scale": (amount, 0.0), "add": (1.0, amount)}[kind]
        found.append(Change(tuple(sorted(set(layers))), index, sign, scale, add))
    return found


class Live:
    """A model, a source of features, and the one text that may be in the making."""

    def __init__(self, run, source, path, options):
        """path: of the page.  options: those of view.py."""
        self.run, self.source, self.path, self.options = run, source, path, options
        self.busy, self.stopping, self.vectors, self.index = threading.Lock(), threading.Event(), {}, None
        self.asking = threading.Lock()  # of the index, which is read once

    def state(self, given):
        return {"concepts": sorted(TOPICS) if is_toy(self.run.encoding) else [], "context": self.run.config.context,
                "busy": self.busy.locked()}

    def codes(self, given):
        """{tokens, layers: {layer: of every token [[unfolded id, strength], ...], the strongest first}}"""
        tokens = prompt_tokens(self.run, text_in(given, "text"))
        layers = {}
        for layer, code in read_codes(self.run.model, tokens, self.source).items():
            ids, strength = unfold(code, self.source.m)
            pairs = zip(ids[0].tolist(), strength[0].float().tolist())
            layers[layer] = [sorted(([id, round(value, 4)] for id, value in zip(*pair) if value > 0),
                                    key=lambda found: -found[1]) for pair in pairs]
        return {"tokens": tokens[0].tolist(), "layers": layers}

    def effect(self, given):
        layer, index, sign = parse_feature(text_in(given, "feature"), self.source)
        with self.asking:
            if self.index is None:
                self.index = open_index(self.run, self.source, self.options.index_tokens, say)
        known, tokens = self.index
        positions, coefs = known.firings(layer, index, sign)
        if not len(positions):
            raise UserError("it never fires in this piece of data")
        hardest = (-coefs).argsort(kind="stable")[:5]
        change = effect(self.run.model, self.source, tokens, layer, index, positions[hardest])
        change = change[: self.run.encoding.n_vocab]
        (ups, up), (downs, down) = change.topk(8), (-change).topk(8)
        return {"ups": up.tolist(), "up": ups.tolist(), "downs": down.tolist(), "down": downs.tolist()}

    def steering(self, given):
        """(Changes, concept, alpha) that a request asks for."""
        concept = text_in(given, "concept")
        if concept and not (is_toy(self.run.encoding) and concept in TOPICS):
            raise UserError(f"there is no concept {concept!r} in the toy world")
        return changes_in(given, self.source), concept, number(given, "alpha", -100, 100, 1.0)

    def arguments(self, given, make=True):
        """(arguments of an edited forward pass, the concept's vector): without `make`, a vector that is not known yet
        is left out."""
        changes, concept, alpha = self.steering(given)
        if make and concept and concept not in self.vectors:
            watched = self.run._replace(model=Watched(self.run.model, self.stopping))
            self.vectors[concept] = contrast(watched, self.source, concept, *toy_texts(concept))
        vector = self.vectors.get(concept)

        def edit(layer, code):
            code = change_features(changes, layer, code)
            return code if vector is None else add_features(vector, alpha, layer, code)
        return (self.source.edited(edit) if changes or vector is not None else {}), vector

    @torch.no_grad()
    def next(self, given):
        """The likeliest next tokens, before and after: [[token, p, p edited], ...]; and Python lines."""
        tokens = prompt_tokens(self.run, text_in(given, "text"))
        edited, vector = self.arguments(given, make=False)
        weight = self.run.model.embedding.weight[: self.run.encoding.n_vocab]
        before, after = (F.linear(self.run.model.hidden(tokens, **arguments)[0, -1], weight).float().softmax(-1)
                         for arguments in ({}, edited))
        if not after.isfinite().all():
            raise UserError("the model gives no probabilities, but infinities: the edit is too large")
        best = torch.maximum(before, after).topk(min(12, len(before))).indices
        return {"tokens": [[token, before[token].item(), after[token].item()] for token in best.tolist()],
                "python": python_lines(self, given), "vector": not text_in(given, "concept") or vector is not None}

    def settings(self, given):
        return {"temperature": number(given, "temperature", 0, 10, 0.8), "top_p": 0.9,
                "seed": number(given, "seed", 0, 2 ** 31, 0, int), "stop": self.run.encoding.eot_token}

    def generate(self, given, write):
        """Write {side, text} as both texts grow: 0 unedited, 1 edited."""
        tokens, count = prompt_tokens(self.run, text_in(given, "text")), number(given, "tokens", 1, 1024, 60, int)
        settings, (_, concept, _) = self.settings(given), self.steering(given)  # what is wrong is said first
        if not self.busy.acquire(blocking=False):
            raise Refused(409, "another text is being written: stop it, or wait for it")
        try:
            self.stopping.clear()
            if concept and concept not in self.vectors:
                write({"status": f"fitting the vector of {concept}, once: about half a minute on a CPU"})
            edited, _ = self.arguments(given)
            sides = [self.texts(tokens, count, settings | arguments) for arguments in ({}, edited)]
            while sides_left := [side for side in (0, 1) if sides[side] is not None]:
                for side in sides_left:
                    if self.stopping.is_set():
                        raise Stopped
                    text = next(sides[side], None)
                    sides[side] = None if text is None else sides[side]
                    if text:
                        write({"side": side, "text": text})
            last = {"done": True}
        except Stopped:
            last = {"done": True, "stopped": True}
        finally:
            self.busy.release()
        write(last)  # when the next may begin

    def texts(self, tokens, count, options):
        """The text of each new token; a character whose bytes are in several comes with the last."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in self.run.model.generate(tokens, count, **options):
            if token.item() == self.run.encoding.eot_token:
                break
            yield decoder.decode(piece(self.run.encoding, token.item()))
        yield decoder.decode(b"", final=True)

    def stop(self, given):
        self.stopping.set()
        return {"stopped": True}


def python_lines(live, given):
    """What a user would write to get the edited text."""
    (changes, concept, alpha), settings = live.steering(given), live.settings(given)
    names = ["Change", "change_features"] * bool(changes) + ["add_features", "contrast", "toy_texts"] * bool(concept)
    names = sorted([*names, "text_of"], key=lambda name: (name[0].islower(), name))
    option, site = live.options.source, live.options.site
    opened = "".join(f", {value!r}" for value in (option, site)[: 2 if site else option != "own"])
    lines = ["from checkpoint import open_run", "from features import prompt_tokens", "from sources import open_source",
             f"from steer import {', '.join(names)}", "", f"run = open_run({live.options.run!r})",
             f"source = open_source(run{opened})"]
    code = "code"
    if changes:
        lines += ["changes = [" + ",\n           ".join(map(repr, changes)) + "]"]
        code = "change_features(changes, layer, code)"
    if concept:
        lines += [f"vector = contrast(run, source, {concept!r}, *toy_texts({concept!r}))"]
        code = f"add_features(vector, {alpha!r}, layer, {code})"
    edited = f",\n                            **source.edited(lambda layer, code: {code})" if code != "code" else ""
    return "\n".join([*lines, f"prompt = prompt_tokens(run, {text_in(given, 'text')!r})",
                      f"tokens = run.model.generate(prompt, {number(given, 'tokens', 1, 1024, 60, int)}, "
                      f"temperature={settings['temperature']!r}, top_p=0.9, seed={settings['seed']},\n"
                      f"                            stop=run.encoding.eot_token{edited})",
                      "print(text_of(run.encoding, list(tokens)))"])


# The server


class Handler(BaseHTTPRequestHandler):
    server_version, sys_version, timeout = "view", "", PATIENCE

    def log_message(self, *arguments):
        pass

    def check(self, page=False):
        """Refuse whoever is not this page."""
        names = {f"{name}:{self.server.server_port}" for name in ("127.0.0.1", "localhost")}
        if self.headers.get("Host") not in names:
            raise Refused(403, "the Host of this request is not this server")
        if self.headers.get("Origin", f"http://{self.headers['Host']}") != f"http://{self.headers['Host']}":
            raise Refused(403, "this request comes from another site")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin") and not page:
            raise Refused(403, "this request comes from another site")

    def begin(self, status, kind, length=None):
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.send_header("Connection", "close")
        self.end_headers()

    def answer(self, content, status=200, kind="application/json"):
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.begin(status, kind, len(content))
        self.wfile.write(content)

    def guarded(self, work):
        """Do it; what goes wrong becomes an answer, and a client who has left becomes nothing."""
        try:
            work()
        except Refused as error:
            self.fail(*error.args)
        except (UserError, RecursionError) as error:
            self.fail(400, str(error))
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:
            self.fail(500, f"this is a bug: {type(error).__name__}: {first_line(error)}")

    def fail(self, status, sentence):
        with contextlib.suppress(ConnectionError, TimeoutError):
            self.answer({"error": sentence}, status)

    def do_GET(self):
        self.guarded(self.get)

    def get(self):
        path, live = self.path.partition("?")[0], self.server.live
        self.check(page=path == "/")
        folder = live.path.removesuffix(".html")
        if path == "/":
            with open(live.path, "rb") as file:
                page = file.read().replace(b'data-live="no"', b'data-live="yes"', 1)
            return self.answer(page, kind="text/html; charset=utf-8")
        base, _, name = path.removeprefix("/").rpartition("/")
        file = os.path.join(folder, name)
        if (base != os.path.basename(folder) or not PIECE.fullmatch(name) or os.path.islink(file)
                or not os.path.isfile(file)):
            raise Refused(404, "there is no such page")
        with open(file, "rb") as content:
            self.answer(content.read(), kind="text/javascript; charset=utf-8")

    def do_POST(self):
        self.guarded(self.post)

    def post(self):
        self.check()
        given = self.body()
        name = self.path.removeprefix("/api/")
        if self.path == "/api/generate":
            return self.stream(given)
        if self.path not in [f"/api/{known}" for known in ("state", "codes", "effect", "next", "stop")]:
            raise Refused(404, "there is no such request")
        self.answer(getattr(self.server.live, name)(given))

    def body(self):
        if not self.headers.get("Content-Type", "").startswith("application/json"):
            raise Refused(415, "send JSON")
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"\d{1,18}", length):
            raise Refused(411, "say how long the request is")
        if int(length) > MOST_BODY:
            raise Refused(413, f"a request may have {MOST_BODY:,} bytes")
        try:
            given = json.loads(self.rfile.read(int(length)))
        except ValueError:
            raise UserError("that is no JSON") from None
        if not isinstance(given, dict):
            raise UserError("send an object")
        return given

    def stream(self, given):
        """A line of JSON for each event. The answer begins with the first, so that what is refused can be."""
        begun = []

        def write(event):
            if not begun:
                self.begin(200, "application/x-ndjson")
                begun.append(True)
            self.wfile.write(json.dumps(event).encode() + b"\n")
            self.wfile.flush()
        try:
            self.server.live.generate(given, write)
        except Exception as error:
            if not begun or isinstance(error, (ConnectionError, TimeoutError)):
                raise
            write({"error": first_line(error)})


class Server(ThreadingHTTPServer):
    daemon_threads, allow_reuse_address = True, True

    def __init__(self, live, port):
        self.live, self.connections, self.counting = live, 0, threading.Lock()
        super().__init__(("127.0.0.1", port), Handler)

    def count(self, step):
        """Whether there is room for it."""
        with self.counting:
            if self.connections + step > MOST_CONNECTIONS:
                return False
            self.connections += step
            return True

    def process_request(self, request, client):
        if self.count(1):
            super().process_request(request, client)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request, client):
        try:
            super().process_request_thread(request, client)
        finally:
            self.count(-1)

    def handle_error(self, request, client):
        pass  # a client who left in the middle


def open_server(live, port):
    try:
        return Server(live, port)
    except OSError as error:
        raise UserError(f"port {port} cannot be had ({error.strerror}): choose another, --port N, or any, "
                        "--port 0") from None


def serve(live, port):
    """Until Ctrl-C."""
    with open_server(live, port) as server:
        say(f"open http://127.0.0.1:{server.server_port}/ in a browser on this machine; Ctrl-C ends it")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        say("stopped")
