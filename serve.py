"""The server of view.py --serve: the page and the model behind it (live.py), on 127.0.0.1 and nowhere else.

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
import contextlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from helpers import UserError, first_line, say
from live import Refused
from page import NAME

MOST_BODY = 2 ** 16      # bytes of a request
MOST_CONNECTIONS = 64
PATIENCE = 10            # seconds for a client to send, or to take, the next bytes
HEADERS = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin",
           "Cache-Control": "no-store", "Content-Security-Policy": "frame-ancestors 'none'",
           "Referrer-Policy": "no-referrer"}


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
        if (base != os.path.basename(folder) or not NAME.fullmatch(name) or os.path.islink(file)
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
