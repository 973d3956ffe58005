"""The page itself: from what is known of a source's features to an HTML file with its data in it, or beside it.

    write_all("out/tiny/features.html", about, facts)

Data are cut into pieces by what a view needs: the tokens, the table of a layer, what is shown of 128 features, the
codes of some windows. While all fit into 10 MB they are in the page; past that each is a script in a folder of the
page's name, which calls chunk(key, name, content): a page from the disk may not read files, but may load scripts.
Arrays are in base64. Texts are JSON with < escaped, and the page only ever shows them as text; its policy allows no
script but its own.
"""
import base64
import contextlib
import hashlib
import html
import json
import os
import re
import shutil
from typing import NamedTuple

import numpy as np

from catalog import AFTER, BEFORE, BLOCK, blocks_of, by_token, layer_of, names_of, table_of
from eval import EDGES
from helpers import UserError, progress, say, whole_file

WEB = os.path.join(os.path.dirname(os.path.abspath(__file__)), "web")
SCRIPTS = ("base.js", "overview.js", "table.js", "feature.js", "texts.js", "live.js", "page.js")
MOST = 10_000_000         # bytes of a page with all of its data in it
PIECE = 2 ** 18           # bytes of a piece with the codes of some windows, about
NAME = re.compile(r"[a-z]+(-\d{1,9}){0,2}\.js")  # of the file of a piece


# Pieces of data


def pack(array):
    """An array as JSON: whole numbers in as few bytes as they need, others in 16 bits of the greatest."""
    array = np.ascontiguousarray(array)
    if array.dtype.kind == "f":
        scale = float(np.max(array, initial=0)) or 1.0
        kind, content = f"q{scale!r}", np.rint(array / scale * 65535).astype("<u2")
    else:
        size = next(size for size in (1, 2, 4) if np.max(array, initial=0) < 1 << 8 * size)
        kind, content = f"u{size}", array.astype(f"<u{size}")
    return {"kind": kind, "data": base64.b64encode(content.tobytes()).decode()}


def pack_exact(array):
    """Of floats that may be negative, or no number."""
    return {"kind": "f4", "data": base64.b64encode(np.asarray(array, "<f4").tobytes()).decode()}


def as_json(content):
    """JSON in ASCII that may stand in a script, and in HTML."""
    return json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")


def check_folder(path):
    """A folder with the name of the page's pieces that holds something else is not ours to replace."""
    folder = path.removesuffix(".html")
    foreign = [name for name in os.listdir(folder) if not NAME.fullmatch(name)] if os.path.isdir(folder) else []
    if foreign or os.path.isfile(folder):
        what = f"holds {min(foreign)}" if foreign else "is a file"
        raise UserError(f"{folder} is where the data of the page belong, but it {what}: move that away")


class Chunks:
    """Pieces of a page's data by name: in memory while all fit into the page, from then on in files of a folder.

    The folder is filled under another name and takes the place of the old one when it is whole: `finish`.
    """

    def __init__(self, folder, key):
        self.folder, self.key, self.size, self.inside = folder, key, 0, {}
        self.fresh = f"{folder}.tmp"
        shutil.rmtree(self.fresh, ignore_errors=True)

    def add(self, name, content):
        text = as_json({key: pack(value) if isinstance(value, np.ndarray) else value for key, value in content.items()})
        self.size += len(text)
        if self.inside is None:
            self.write(name, text)
            return
        self.inside[name] = text
        if self.size > MOST:
            os.makedirs(self.fresh)
            for earlier in self.inside.items():
                self.write(*earlier)
            self.inside = None

    def write(self, name, text):
        with open(os.path.join(self.fresh, f"{name}.js"), "w", encoding="ascii") as file:
            file.write(f"chunk({as_json(self.key)},{as_json(name)},{text});\n")

    def finish(self):
        """Put the folder in its place; the pieces that belong into the page, as JSON."""
        old = f"{self.folder}.old"
        shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.folder, old)
        if self.inside is None:
            os.replace(self.fresh, self.folder)
        shutil.rmtree(old, ignore_errors=True)
        return "{" + ",".join(f"{as_json(name)}:{text}" for name, text in (self.inside or {}).items()) + "}"


class Facts(NamedTuple):
    """All that the pieces are made of."""
    index: object            # features.Index
    corpus: np.ndarray       # (tokens,) that it is about
    context: int
    families: dict           # {layer: catalog.Family, or None}
    groups: tuple            # of labels
    effects: object          # function of (layer, features): {ups, up_values, downs, down_values, kl}, or None


def write_chunks(chunks, facts):
    """Every piece, layer by layer; yields what the overview says of a layer."""
    index, context = facts.index, facts.context
    chunks.add("corpus", {"tokens": facts.corpus})
    for number in index.layers:
        progress(f"layer {number}: sorting")
        layer = layer_of(index, number)
        tokens = by_token(layer, index.tokens)
        table = table_of(layer)
        live = table["ids"]
        if facts.groups:
            names, _ = names_of(layer, facts.groups, context)
            table |= {"label": names["label"][live] + 1}  # 0 is none
            table |= {key: whole_share(names[key][live]) for key in ("f1", "precision", "recall", "purity")}
        done = facts.effects(number, live)
        if done:
            table["kl"] = pack_exact(done["kl"])
        chunks.add(f"table-{number}", table)
        for features, content in blocks_of(layer, facts.families[number], tokens, context):
            progress(f"layer {number}: features {features.stop:,} of {2 * layer.m:,}, {chunks.size / 1e6:,.0f} MB")
            rows = np.flatnonzero((live >= features.start) & (live < features.stop))
            if done:
                content |= {"effect_of": live[rows] - features.start} | {
                    key: pack_exact(done[key][rows]) if key.endswith("values") else done[key][rows]
                    for key in ("ups", "up_values", "downs", "down_values")}
            chunks.add(f"block-{number}-{features.start // BLOCK}", content)
        for first, content in windows_of(tokens, context):
            chunks.add(f"text-{number}-{first}", content)
        progress("")
        yield level_figures(layer, facts.families[number], index.tokens)


def whole_share(values):
    """Shares as whole numbers: 1 for 0, 10001 for 1, and 0 for none."""
    return np.where(np.isnan(values), 0, np.rint(np.nan_to_num(values) * 10000) + 1).astype(np.uint16)


def windows_each(entries, tokens, context):
    """How many windows go into a piece."""
    return max(1, int(PIECE // (6 * context * max(1, entries / tokens))))


def windows_of(tokens, context):
    """(number, content) of pieces with the codes of some windows."""
    count = len(tokens.starts) - 1
    each = windows_each(len(tokens.ids), count, context) * context
    for number, first in enumerate(range(0, count, each)):
        starts = tokens.starts[first : first + each + 1]
        own = slice(starts[0], starts[-1])
        yield number, {"starts": starts - starts[0], "ids": tokens.ids[own], "strength": tokens.strength[own],
                       "windows": each // context}


def level_figures(layer, family, tokens):
    """Of every level of a layer: features, the share that never fires with either sign, and how often the others do."""
    counts = layer.counts()
    either = counts[: layer.m] + counts[layer.m :]
    lows = [0, layer.m] if family is None else family.lows
    figures = []
    for low, high in zip(lows[:-1], lows[1:]):
        rate = either[low:high] / tokens
        classes = np.where(rate > 0, 1 + np.digitize(rate, EDGES), 0)
        figures.append({"features": int(high - low), "dead": float((rate == 0).mean()), "l0": float(rate.sum()),
                        "signed": int((counts.reshape(2, -1)[:, low:high] > 0).sum()),
                        "histogram": np.bincount(classes, minlength=len(EDGES) + 2).tolist()})
    return figures


# The page


def write_page(path, about, inside):
    """The HTML file: page.html with its style, its script and the data in it, and a policy that allows nothing else."""
    style, script = "\n" + read_own("page.css"), "\n" + "".join(map(read_own, SCRIPTS))
    policy = (f"default-src 'none'; script-src 'self' file: {sri(script)}; style-src {sri(style)}; connect-src 'self'; "
              "img-src data:; base-uri 'none'; form-action 'none'")
    parts = {"title": html.escape(about["title"]), "policy": policy, "style": style, "script": script,
             "data": f'{{"about":{as_json(about)},"chunks":{inside}}}'}
    with whole_file(path) as file:  # in one go: what a part holds is never looked at again
        file.write(re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], read_own("page.html")))


def read_own(name):
    with open(os.path.join(WEB, name), encoding="utf-8") as file:
        return file.read()


def sri(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write_all(path, about, facts):
    """The pieces, then the page."""
    chunks = Chunks(path.removesuffix(".html"), about["key"])
    levels = list(write_chunks(chunks, facts))
    each = [windows_each(np.diff(facts.index.offsets[[2 * facts.index.m * n, 2 * facts.index.m * (n + 1)]])[0],
                         facts.index.tokens, facts.context) for n in range(len(facts.index.layers))]
    family = facts.families[facts.index.layers[0]]
    about |= {"levels": levels, "text_windows": each, "block": BLOCK, "before": BEFORE, "after": AFTER,
              "edges": list(EDGES), "folder": os.path.basename(chunks.folder),
              "lows": [0, facts.index.m] if family is None else [int(low) for low in family.lows]}
    inside = chunks.finish()
    write_page(path, about, inside)
    more = f", and {chunks.size / 1e6:,.0f} MB in {chunks.folder}/" if inside == "{}" else ""
    say(f"wrote {path}, {os.path.getsize(path) / 1e6:,.1f} MB{more}")
