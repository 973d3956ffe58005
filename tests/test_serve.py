"""The live parts of the page: a server for this machine and this page only, and what it does with the model."""
import contextlib
import http.client
import io
import json
import os
import re
import socket
import threading
import time

import pytest
import torch
from browser import Browser
from test_view import TOKENS, make_run, needs_browser

import live
import sae
import serve
import view
from checkpoint import open_run
from dpb import Code
from features import effect, open_index, prompt_tokens
from helpers import UserError
from live import Live
from sources import open_source, read_codes
from steer import Change, change_features, contrast, toy_texts
from tokenizer import END


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A run with random weights, its page, and a server in a thread."""
    folder = make_run(tmp_path_factory.mktemp("serve"))
    arguments = [folder, "--index-tokens", str(TOKENS), "--device", "cpu", "--effects", "10"]
    view.main(arguments)
    run = open_run(folder)
    live = Live(run, open_source(run), f"{folder}/features.html", view.parse(arguments))
    with serve.open_server(live, 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(server, path, content=None, headers=(), method=None, body=None):
    """(status, answer as text) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    body = body if body is not None else None if content is None else json.dumps(content)
    headers = {"Content-Type": "application/json"} | dict(headers)
    connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
    answer = connection.getresponse()
    with contextlib.closing(connection):
        return answer.status, answer.read().decode()


def events(text):
    return [json.loads(line) for line in text.splitlines()]


def text_on(side, found):
    return "".join(event["text"] for event in found if event.get("side") == side)


def printed_by(lines):
    """What Python lines print, up to the end of the text."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(lines, {})
    return printed.getvalue().removesuffix("\n").partition(END)[0]


def raw(server, content):
    """A connection that has sent these bytes."""
    connection = socket.create_connection(("127.0.0.1", server.server_port), timeout=20)
    connection.sendall(content)
    return connection


def request(server, path, content):
    body = json.dumps(content).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.server_port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n").encode() + body


@pytest.fixture
def slow(server, monkeypatch):
    """Texts that take their time: 20 ms a token."""
    generate = type(server.live.run.model).generate

    def slowly(self, *arguments, **options):
        for token in generate(self, *arguments, **options):
            time.sleep(0.02)
            yield token
    monkeypatch.setattr(type(server.live.run.model), "generate", slowly)
    yield
    server.live.stopping.set()
    assert server.live.busy.acquire(timeout=10)
    server.live.busy.release()


# Who may ask


def test_it_listens_on_the_loopback_only(server):
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(UserError, match="--port"):
        serve.open_server(server.live, server.server_port)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "", "0.0.0.0:{port}", "[::1]:{port}"])
def test_another_host_is_refused(server, host):
    for content in (None, {}):
        path = "/" if content is None else "/api/state"
        status, text = ask(server, path, content, {"Host": host.format(port=server.server_port)})
        assert status == 403 and "Host" in text


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Origin": "null"},
                                     {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}])
def test_another_site_is_refused(server, headers):
    assert ask(server, "/api/state", {}, headers)[0] == 403
    assert ask(server, "/api/stop", {}, headers)[0] == 403
    assert ask(server, "/features/corpus.js", headers=headers)[0] == 403


def test_this_page_is_not(server):
    for name in ("127.0.0.1", "localhost"):
        here = f"{name}:{server.server_port}"
        assert ask(server, "/api/state", {}, {"Host": here, "Origin": f"http://{here}"})[0] == 200
    status, text = ask(server, "/", headers={"Sec-Fetch-Site": "none"})
    assert status == 200 and 'data-live="yes"' in text[:200]


def test_a_form_of_another_site_cannot_post(server):
    assert ask(server, "/api/stop", {}, {"Content-Type": "text/plain"})[0] == 415


@pytest.mark.parametrize("path", ["/best.pt", "/features.html", "/../best.pt", "/features/../best.pt", "//etc/passwd",
                                  "/features/..%2fbest.pt", "/features/best.pt", "/features/%00.js", "/features/",
                                  "/features/link-1.js", "/features/corpus.js/", "/api/state",
                                  "/features/table-0.js.tmp"])
def test_no_other_file_is_served(server, path):
    folder = server.live.path.removesuffix(".html")
    os.makedirs(folder, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.symlink(server.live.run.path, f"{folder}/link-1.js")
    assert ask(server, path)[0] == 404


def test_a_piece_of_the_page_is_served(server):
    folder = server.live.path.removesuffix(".html")
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/corpus.js", "w") as file:
        file.write("chunk();")
    assert ask(server, "/features/corpus.js") == (200, "chunk();")


def test_requests_are_bounded(server):
    status, text = ask(server, "/api/codes", {"text": "x" * 2 ** 17})
    assert status == 413
    connection = raw(server, request(server, "/api/codes", {}).replace(b"Content-Length: 2", b"Content-Length: 9e9"))
    assert b" 411 " in connection.recv(2 ** 16)
    connection.close()
    status, text = ask(server, "/api/codes", {"text": "the " * 100})
    assert status == 400 and "context" in text


@pytest.mark.parametrize("body", ["", "x", "[1]", "[" * 50_000, '{"text": 1}', '{"edits": 1}', '{"edits": [1]}',
                                  '{"edits": [{"feature": "9:9+", "kind": "zero"}]}',
                                  '{"edits": [{"feature": "0:1+", "kind": "x"}]}',
                                  '{"edits": [{"feature": "0:1+", "kind": "add", "amount": NaN}]}',
                                  '{"edits": [{"feature": "0:1+", "kind": "zero", "layers": [7]}]}',
                                  '{"concept": "nothing"}', '{"alpha": 1e999}', '{"seed": -1}', '{"tokens": 1e9}',
                                  '{"temperature": "x"}'])
def test_nonsense_is_answered_with_a_sentence(server, body):
    for path in ("/api/next", "/api/generate"):
        status, text = ask(server, path, body=body)
        assert status == 400 and not json.loads(text)["error"].startswith("this is a bug"), (path, status, text)


# What it does


def test_codes_are_those_of_the_model(server):
    live, text = server.live, "The sailor \ud800 saw 🐚 <script>"
    status, answer = ask(server, "/api/codes", {"text": text})
    found = json.loads(answer)
    tokens = prompt_tokens(live.run, text)
    assert status == 200 and found["tokens"] == tokens[0].tolist()
    for layer, code in read_codes(live.run.model, tokens, live.source).items():
        own = {(index + live.source.m * (coef < 0)): abs(coef)
               for index, coef in zip(code.indices[0, 2].tolist(), code.coefs[0, 2].tolist())}
        assert dict(map(tuple, found["layers"][str(layer)][2])) == pytest.approx(own, abs=1e-4)


def test_an_effect_that_the_page_lacks_is_computed(server):
    live = server.live
    index, tokens = open_index(live.run, live.source, TOKENS)
    positions, coefs = index.firings(1, 3, 1)
    change = effect(live.run.model, live.source, tokens, 1, 3, positions[(-coefs).argsort(kind="stable")[:5]])
    found = json.loads(ask(server, "/api/effect", {"feature": "1:3+"})[1])
    assert found["up"] == pytest.approx(change[: live.run.encoding.n_vocab].topk(8).values.tolist(), abs=1e-5)


def test_a_change_is_what_it_says():
    code = Code(torch.tensor([[3, 5, 3]]), torch.tensor([[2.0, -1.0, -4.0]]))
    scaled = change_features([Change((0,), 3, 1, scale=0.5)], 0, code)
    assert scaled.coefs.tolist() == [[1.0, -1.0, -4.0]]  # the other sign is another feature
    added = change_features([Change((0, 1), 5, -1, add=3.0)], 1, code)
    assert added.indices.tolist() == [[3, 5, 3, 5]] and added.coefs.tolist() == [[2.0, -1.0, -4.0, -3.0]]
    assert change_features([Change((1,), 3, 1, 0.0)], 0, code) is code


def test_the_python_lines_write_the_same_text(server, monkeypatch):
    given = {"text": "The \"sailor\" \n'", "edits": [{"feature": "0:3+", "kind": "add", "amount": 30, "layers": [0, 1]},
                                                     {"feature": "1:40-", "kind": "zero"}],
             "tokens": 20, "seed": 3, "temperature": 0.7}
    found = events(ask(server, "/api/generate", given)[1])
    assert found[-1] == {"done": True} and text_on(0, found) != text_on(1, found)
    lines = json.loads(ask(server, "/api/next", given)[1])["python"]
    for text, side in ((lines, 1), (re.sub(r",\s*\*\*source.edited\(.*\)\)\n", ")\n", lines), 0)):
        assert printed_by(text) == text_on(side, found)


def test_the_lines_for_saes_and_a_saved_vector_write_the_same_text(tmp_path):
    folder, path = make_run(tmp_path, "none"), str(tmp_path / "vector.npz")
    sae.main([folder, "--steps", "16", "--batch-tokens", "64", "--eval-tokens", "64"])
    run = open_run(folder)
    source = open_source(run, "topk")
    contrast(run, source, "sea", *toy_texts("sea"), steps=0).save(path)
    served = Live(run, source, "", view.parse([folder, "--source", "topk", "--vector", path]))
    assert served.state({})["concepts"][0] == path
    edit = {"feature": "1:5+", "kind": "add", "amount": 9}
    for given in ({"edits": [edit]}, {"concept": path, "alpha": 30}, {"edits": [edit], "concept": path, "alpha": -20}):
        given, found = {"text": "In", "tokens": 12} | given, []
        served.generate(given, found.append)
        assert text_on(0, found) != text_on(1, found) == printed_by(served.next(given)["python"])


def test_steering_is_fitted_once_and_its_lines_do_the_same(server, monkeypatch):
    made, contrast = [], live.contrast

    def short(*arguments):
        made.append(arguments[2])
        return contrast(*arguments, steps=2)
    monkeypatch.setattr(live, "contrast", short)
    given = {"text": "In", "concept": "sea", "alpha": 40, "tokens": 12}
    first, second = (events(ask(server, "/api/generate", given)[1]) for _ in range(2))
    assert "fitting" in first[0]["status"] and made == ["sea"]
    assert text_on(1, first) == text_on(1, second) != text_on(0, second)
    lines = json.loads(ask(server, "/api/next", given)[1])["python"]
    monkeypatch.setattr("steer.contrast", short)
    assert printed_by(lines) == text_on(1, first)


def test_probabilities_are_those_of_the_edited_model(server):
    live = server.live
    given = {"text": "The", "edits": [{"feature": "0:3+", "kind": "add", "amount": 9}]}
    found = json.loads(ask(server, "/api/next", given)[1])["tokens"]
    edit = live.source.edited(lambda layer, code: change_features([Change((0,), 3, 1, 1.0, 9.0)], layer, code))
    with torch.no_grad():
        for column, arguments in ((1, {}), (2, edit)):
            logits = live.run.model(prompt_tokens(live.run, "The"), **arguments)[0, -1, : live.run.encoding.n_vocab]
            expected = logits.softmax(-1)
            assert all(row[column] == pytest.approx(expected[row[0]].item(), rel=1e-4) for row in found)


# One at a time, and nobody waits


def test_a_second_text_is_refused_and_either_page_can_stop_the_first(server, slow):
    first = raw(server, request(server, "/api/generate", {"text": "The", "tokens": 1000}))
    assert b'"side"' in read_until(first, b'"side"')
    status, text = ask(server, "/api/generate", {"text": "The"})
    assert status == 409 and "another text" in text
    assert ask(server, "/api/next", {"text": "The"})[0] == 200  # what is short goes on
    assert ask(server, "/api/stop", {})[0] == 200
    assert b'"stopped": true' in read_until(first, b"stopped")
    first.close()
    assert events(ask(server, "/api/generate", {"text": "The", "tokens": 2})[1])[-1]["done"]


def test_a_page_that_is_closed_ends_its_text(server, slow):
    first = raw(server, request(server, "/api/generate", {"text": "The", "tokens": 1000}))
    read_until(first, b'"side"')
    first.close()
    assert server.live.busy.acquire(timeout=5)
    server.live.busy.release()


def test_a_page_that_reads_nothing_blocks_no_other(server):
    idle = [raw(server, b"POST /api/generate HTTP/1.1\r\nHost: x") for _ in range(8)]  # never finished
    stuck = raw(server, request(server, "/api/generate", {"text": "The", "tokens": 50}))  # its answer is never read
    until = time.monotonic() + 20
    while (found := ask(server, "/api/generate", {"text": "The", "tokens": 2}))[0] == 409 and time.monotonic() < until:
        time.sleep(0.05)
    assert found[0] == 200 and ask(server, "/")[0] == 200
    for connection in (*idle, stuck):
        connection.close()


def test_whoever_is_silent_is_cut_off(server, monkeypatch):
    monkeypatch.setattr(serve.Handler, "timeout", 0.3)
    silent = raw(server, b"POST /api/stop HTTP/1.1\r\n")
    began = time.monotonic()
    assert silent.recv(100) == b"" and time.monotonic() - began < 5
    silent.close()


def test_there_are_only_so_many_connections(server, monkeypatch):
    wait_for(lambda: server.connections == 0)  # those of earlier tests are gone
    monkeypatch.setattr(serve, "MOST_CONNECTIONS", 2)
    silent = [raw(server, b"GET") for _ in range(2)]
    wait_for(lambda: server.connections == 2)
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        ask(server, "/")
    for connection in silent:
        connection.close()
    wait_for(lambda: server.connections == 0)
    assert ask(server, "/")[0] == 200  # there is room again


def wait_for(test, seconds=10):
    until = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < until
        time.sleep(0.01)


def read_until(connection, wanted):
    content = b""
    while wanted not in content and (part := connection.recv(2 ** 16)):
        content += part
    return content


# In the browser


@needs_browser
def test_a_feature_is_edited_in_the_page(server, slow):
    home = f"http://127.0.0.1:{server.server_port}/"
    with Browser() as browser:
        browser.open(f"{home}#0:3+")
        browser.wait("document.querySelector('#effects table')")  # asked of the server
        browser.click("[data-edit=add]")
        browser.wait("document.querySelector('#next tr[data-token]') && document.querySelector('#codes .token')")
        browser.run("document.querySelector('#prompt').select()")
        browser.run("document.querySelector('#prompt').focus()")
        browser.type("The <img src=x onerror=alert(1)> sailor")
        browser.wait("document.querySelector('#python').textContent.includes('onerror')")
        browser.wait("document.querySelector('#document').textContent.includes('onerror')")
        browser.run("live.given.tokens = 8")
        browser.click("#write")
        browser.wait("document.querySelector('#note').textContent === 'done'")
        given = browser.run("live.given")
        texts = [browser.text(f"#{side}") for side in ("unedited", "edited")]
        found = events(ask(server, "/api/generate", given)[1])
        assert texts == [given["text"] + text_on(side, found) for side in (0, 1)]
        assert all(text.startswith("The <img") for text in texts)
        browser.click("#codes [aria-label^=edit]")  # a feature of the text, beside its code
        browser.wait("live.given.edits.length === 2 && document.querySelectorAll('#edits .edit').length === 2")
        browser.click("#follow")
        browser.run("live.given.text = document.querySelector('#prompt').value = 'The'")
        browser.click("#edits .edit:last-child button")  # removed: both texts are written anew
        browser.wait("""live.given.edits.length === 1 && !live.writing &&
                        !document.querySelector('#edited').textContent.includes('onerror')""")
        browser.click("#follow")
        browser.run("live.given.tokens = 1000")
        browser.click("#write")
        browser.wait("document.querySelector('#edited').textContent.length > 60")
        browser.click("#stop")
        browser.wait("document.querySelector('#note').textContent === 'stopped'")
        assert server.live.busy.acquire(timeout=2)
        server.live.busy.release()
        browser.run("live.given.text = 'the '.repeat(200)")
        browser.click("#write")
        browser.wait("document.querySelector('#note').textContent.includes('context')")
        assert [problem for problem in browser.problems if "400" not in problem] == []
        assert browser.run("document.querySelectorAll('main img').length") == 0
        assert all(request.startswith((home, "data:", "about:")) for request in browser.requests)


@needs_browser
def test_steering_has_a_slider(server, monkeypatch):
    live = server.live
    vector = contrast(live.run, live.source, "sea", *toy_texts("sea"), steps=0)
    monkeypatch.setattr(live, "vectors", {"sea": vector})
    with Browser() as browser:
        browser.open(f"http://127.0.0.1:{server.server_port}/#live")
        browser.wait("document.querySelector('#next tr[data-token]')")
        assert browser.run("document.querySelector('#alpha').offsetParent === null")  # there is nothing to steer with
        for node, value, event in (("concept", "sea", "change"), ("alpha", "3", "input")):
            browser.run(f"""(node => {{ node.value = {value!r}; node.dispatchEvent(new Event({event!r})); }})(
                document.getElementById({node!r}))""")
        assert browser.run("document.querySelector('#alpha').offsetParent !== null")
        browser.wait("document.querySelector('#python').textContent.includes('add_features(vector, 3.0, layer, code)')")
        found = json.loads(ask(server, "/api/next", {"text": "In 1436, a", "concept": "sea", "alpha": 3})[1])["tokens"]
        assert browser.run("[...document.querySelectorAll('#next tr[data-token]')].map(row => row.cells[2].textContent)"
                           ) == [f"{after:.1%}" for _, _, after in found]
        assert browser.problems == []


@needs_browser
def test_another_site_can_neither_read_nor_write(server, tmp_path):
    """A page of another origin, in the same browser."""
    (tmp_path / "evil.html").write_text(f"""<script>
        const home = "http://127.0.0.1:{server.server_port}"; window.seen = [];
        window.chunk = () => seen.push("read");
        const tag = document.createElement("script"); tag.src = home + "/features/corpus.js"; document.head.append(tag);
        fetch(home + "/api/stop", {{method: "POST", mode: "no-cors", body: "{{}}"}}).then(r => seen.push(r.type));
        fetch(home + "/api/state", {{method: "POST", headers: {{"Content-Type": "application/json"}}, body: "{{}}"}})
            .then(() => seen.push("answered"), () => seen.push("refused"));</script>""")
    server.live.stopping.clear()
    with Browser() as browser:
        browser.open(f"file://{tmp_path}/evil.html")
        browser.wait("window.seen.includes('refused')")
        time.sleep(0.2)
        assert not {"read", "answered"} & set(browser.run("window.seen")) and not server.live.stopping.is_set()
