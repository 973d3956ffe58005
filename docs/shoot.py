"""The pictures of the page of features in README.md and results.md, by Chromium without a screen.

    python docs/shoot.py out/tiny                  writes docs/view_*.png
    python docs/shoot.py out/tiny --all DIR        every view, 1280 and 400 pixels wide, light and dark, to look at

What is shown is the page of that run as `python view.py RUN --serve` has it, and of features the first of the ranking
that is no plain coordinate, as in README.md. A picture has 64 colours: a third of the size, and nobody sees it.
"""
import argparse
import itertools
import os
import sys
import threading
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from browser import Browser, find_browser  # noqa: E402

import view  # noqa: E402
from checkpoint import open_run  # noqa: E402
from helpers import UserError, run_script, say  # noqa: E402
from live import Live  # noqa: E402
from serve import open_server  # noqa: E402
from sources import open_source  # noqa: E402

VIEWS = {"overview": "#overview", "table": "#features", "search": "#features?in=text&q=%2Fsail%5Ba-z%5D%2B%2F",
         "feature": "#FEATURE", "texts": "#texts", "text": "#text/4", "live": "#live"}
KEPT = (("overview", {"height": 910}), ("feature", {"height": 1010}), ("live", {"height": 890, "dark": True}))
EDITED = """Object.assign(live.given, {concept: "sea", alpha: 1.25, tokens: 60, seed: 2,
    edits: [{feature: "FEATURE", layers: [0, 1], kind: "scale", amount: 2}]})"""


def visit(page, hash):
    page.run(f"location.hash = {hash!r}")
    page.wait(f"document.getElementById('main').dataset.shown === {hash!r}")
    page.run("new Promise(resolve => setTimeout(resolve, 300))")  # what is filled in a moment later


def prepare(page, name, feature):
    """Bring a view to the screen."""
    if name == "live" and not page.run("live.page"):
        page.run(EDITED.replace("FEATURE", feature))
        visit(page, "#live")
        page.click("#write")
        page.wait("document.getElementById('note').textContent === 'done'", 300)
    if name == "feature":
        visit(page, "#features")  # so that there is one before it and one after it
    visit(page, VIEWS[name].replace("FEATURE", feature))
    page.run("window.scrollTo(0, 0)")


def shoot(page, feature, name, path, width=1280, height=900, dark=False, whole=False):
    page.resize(width, height, dark)
    prepare(page, name, feature)
    if whole:
        page.resize(width, page.run("document.documentElement.scrollHeight"), dark)
    page.shoot(path)
    Image.open(path).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    say(f"wrote {path}, {os.path.getsize(path) / 1e3:.0f} kB")


def shoot_all(page, folder):
    """The pictures of docs/, or every view in every form into a folder."""
    feature = page.run("about.ranking.rows.map(row => row[0]).find(name => levelOf(parseName(name).id) > 0)")
    if not folder:
        for name, form in KEPT:
            shoot(page, feature, name, str(ROOT / "docs" / f"view_{name}.png"), **form)
        return
    os.makedirs(folder, exist_ok=True)
    for name, width, dark in itertools.product(VIEWS, (1280, 400), (False, True)):
        path = os.path.join(folder, f"{name}-{width}-{'dark' if dark else 'light'}.png")
        shoot(page, feature, name, path, width, dark=dark, whole=True)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run's folder, such as out/tiny")
    parser.add_argument("--all", metavar="DIR", help="every view in every form, into this folder")
    options = parser.parse_args(arguments)
    if find_browser() is None:
        raise UserError("there is no Chromium here: apt-get install chromium")
    given = view.parse([options.run])
    run = open_run(options.run, "cpu")
    source = open_source(run)
    view.build(run, source, view.page_path(run, source), given)
    with open_server(Live(run, source, view.page_path(run, source), given), 0) as server, Browser() as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.open(f"http://127.0.0.1:{server.server_port}/#overview")
        page.wait("document.getElementById('main')?.dataset.shown")
        shoot_all(page, options.all)
        server.shutdown()


if __name__ == "__main__":
    run_script(main)
