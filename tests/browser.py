"""Chromium without a screen, by its DevTools protocol over a pipe: all that tests of the page and docs/shoot.py need.

    with Browser() as browser:
        browser.open("file:///.../features.html")
        browser.wait("document.querySelector('h1')")         until an expression of JavaScript is true
        browser.run("location.hash = '#2:1234+'")            its value, as JSON gives it
        browser.press("/"), browser.shoot("page.png")        keys are real keys; so are clicks: browser.click(SELECTOR)

Messages are JSON, each ended by a NUL, on file descriptors 3 and 4 of the browser. What the page writes to its console
and every error that is not caught go to browser.problems; dialogs, which a script that should not run might open, too.
"""
import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
KEYS = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def find_browser():
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    def __init__(self, width=1280, height=900):
        self.folder = tempfile.mkdtemp(prefix="parity-browser-")
        self.buffer, self.number, self.problems, self.session, self.requests = b"", 0, [], None, []
        to_read, self.write_end = os.pipe()
        self.read_end, to_write = os.pipe()

        def give_pipes():
            os.dup2(to_read, 13), os.dup2(to_write, 14)  # out of the way first: either may be 3 or 4
            os.dup2(13, 3), os.dup2(14, 4)
        command = [find_browser(), "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self.folder}",
                   "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
                   "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
                   "--force-color-profile=srgb", "--disable-sync", f"--window-size={width},{height}", "about:blank"]
        self.process = subprocess.Popen(command, preexec_fn=give_pipes, pass_fds=(3, 4), stdin=subprocess.DEVNULL,
                                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_read), os.close(to_write)
        target = next(target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with contextlib.suppress(Exception):
            self.session = None
            self.call("Browser.close", patience=5)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        self.process.kill()
        self.process.wait()
        os.close(self.write_end), os.close(self.read_end)
        shutil.rmtree(self.folder, ignore_errors=True)

    # The protocol

    def send(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        return self.number

    def call(self, method, patience=60, **parameters):
        """The result of a method; what comes before it is taken note of."""
        number, until = self.send(method, **parameters), time.monotonic() + patience
        while True:
            message = self.receive(until)
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]

    def receive(self, until):
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read_end], [], [], max(0, until - time.monotonic()))
            part = os.read(self.read_end, 2 ** 20) if ready else b""
            if not part:
                raise TimeoutError("the browser does not answer")
            self.buffer += part
        text, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(text)
        self.note(message.get("method"), message.get("params", {}))
        return message

    def note(self, method, given):
        if method == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            self.problems.append((details.get("exception") or {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console: {[part.get('value', part.get('description')) for part in given['args']]}")
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"a dialog: {given['message']}")
            self.send("Page.handleJavaScriptDialog", accept=False)

    # The page

    def open(self, address):
        self.call("Page.navigate", url=address)

    def resize(self, width, height, dark=None, scale=1):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale,
                  mobile=False)
        if dark is not None:
            self.call("Emulation.setEmulatedMedia",
                      features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def run(self, expression):
        """The value of an expression; of a promise, what it becomes."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"].get("exception", {}).get("description", str(result)))
        return result["result"].get("value")

    def wait(self, expression, seconds=15):
        """Until an expression is true: its value."""
        until = time.monotonic() + seconds
        while True:
            with contextlib.suppress(RuntimeError):  # between two pages there is none to ask
                if value := self.run(f"(value => value instanceof Node || value)({expression})"):
                    return value
            if time.monotonic() > until:
                page = self.run("document.body.innerText")[:2000]
                raise TimeoutError(f"never true: {expression}\n{self.problems}\n{page}")
            time.sleep(0.01)

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)})?.textContent")

    def click(self, selector):
        """A click of the mouse in the middle of an element."""
        x, y = self.run(f"""(() => {{ const node = document.querySelector({json.dumps(selector)});
            node.scrollIntoView({{block: "center", behavior: "instant"}}); const box = node.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2]; }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key):
        text = {"Enter": "\r"}.get(key, key if len(key) == 1 else None)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=KEYS.get(key, 0),
                      **({"text": text} if text and kind == "keyDown" else {}))

    def type(self, text):
        self.call("Input.insertText", text=text)

    def shoot(self, path, whole=False):
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))
