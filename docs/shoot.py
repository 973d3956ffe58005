"""The pictures of the page of features in README.md and results.md, by Chromium without a screen.

    python docs/shoot.py out/tiny                  writes docs/view_*.png
    python docs/shoot.py out/tiny --all DIR        every view, 1280 and 400 pixels wide, light and dark, to look at

What is shown is the page of that run as `python view.py RUN --serve` has it. A picture has 64 colours: that is a third
of the size, and nobody sees the difference.
"""
import argparse
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

WRITE = """(live.given = {...live.given, text: "In 1436, a", tokens: 50, seed: 2,
    edits: [{feature: FEATURE, layers: [0], kind: "add", amount: 8}]}, location.hash = "#live")"""


def best_feature(page):
    """The address of the first feature of the ranking that is no coordinate: the one that README.md prints."""
    return page.run("about.ranking.rows.map(row => row[0]).find(name => levelOf(parseName(name).id) > 0)")


def visit(page, hash):
    page.run(f"location.hash = {hash!r}")
    page.wait(f"document.getElementById('main').dataset.shown === {hash!r} && !document.querySelector('[aria-busy]')")
    page.run("new Promise(resolve => setTimeout(resolve, 200))")  # what is filled in a moment later


def prepare(page, name, feature):
    """Bring a view to the screen."""
    if name == "live":
        visit(page, "#overview")
        page.run(WRITE.replace("FEATURE", repr(feature)))
        page.wait("document.querySelector('#next tr[data-token]') && document.querySelector('#codes .token')")
        page.run("document.getElementById('write').click()")
        page.wait("document.getElementById('note').textContent === 'done'", 60)
        page.run("window.scrollTo(0, 0)")
    else:
        visit(page, {"overview": "#overview", "table": "#features", "feature": f"#{feature}", "texts": "#texts",
                     "text": "#text/4", "search": "#features?in=text&q=%2Fsail%5Ba-z%5D%2B%2F&sort=over"}[name])


def shoot(page, name, feature, path, width=1280, height=900, dark=False, whole=False):
    page.resize(width, height, dark)
    prepare(page, name, feature)
    if whole:
        page.resize(width, page.run("document.documentElement.scrollHeight"), dark)
    page.shoot(path)
    Image.open(path).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    say(f"wrote {path}, {os.path.getsize(path) / 1e3:.0f} kB")


def pictures(page, feature, folder):
    """(arguments of shoot) of the pictures that are kept."""
    yield dict(name="feature", path=f"{folder}/view_feature.png", height=1010)
    yield dict(name="overview", path=f"{folder}/view_overview.png", height=1000)
    yield dict(name="live", path=f"{folder}/view_live.png", height=1010, dark=True)


def every_picture(folder):
    for name in ("overview", "table", "search", "feature", "texts", "text", "live"):
        for width in (1280, 400):
            for dark in (False, True):
                path = f"{folder}/{name}-{width}-{'dark' if dark else 'light'}.png"
                yield dict(name=name, path=path, width=width, dark=dark, whole=True)


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
    if options.all:
        os.makedirs(options.all, exist_ok=True)
    with open_server(Live(run, source, view.page_path(run, source), given), 0) as server, Browser() as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.open(f"http://127.0.0.1:{server.server_port}/#overview")
        page.wait("document.getElementById('main')?.dataset.shown")
        feature = best_feature(page)
        for picture in every_picture(options.all) if options.all else pictures(page, feature, ROOT / "docs"):
            shoot(page, feature=feature, **picture)
        server.shutdown()


if __name__ == "__main__":
    run_script(main)
