"""An inverted index on disk: of each feature, the passages that have it, and how strongly. numpy only.

    with Builder("corpus.postings", features, about) as builder:     features: how many there are; about: a dict
        for part in what_is_left(builder.done):                      how much of the work an interrupted build had done
            builder.add(counts, features, values, owners, places, done)
        builder.finish()
    index = open_postings("corpus.postings")                         memory mapped; its tables are read, to check them
    documents, scores, *_ = index.search(features, values, k=10)     cosine, the best first

A passage is a sparse vector; the score of a document is the cosine of the query with the best of its passages:

    score(q, p) = sum_f idf_f^2 q_f p_f / (|q| |p|),   |p|^2 = sum_f (idf_f p_f)^2,  idf_f = ln((1 + n) / (1 + n_f)) + 1

for n passages, n_f of which have feature f; without idf it is 1. Only the lists of the query's features are read, and a
pass over one number a passage finds the best. Entries are 6 bytes: a passage (uint32), a value (float16).

Building streams: entries are sorted by feature in memory, up to a budget or a minute's worth, laid aside in a file, and
merged at the end, a range of features at a time. What was laid aside is there for a build that is started again. The
index appears under its name when all of it is on disk. Its header and its tables have checksums that are checked when
it is opened, and every list has its own, checked when it is read.
"""
import contextlib
import json
import os
import shutil
import time
import zlib
from typing import NamedTuple

import numpy as np

from helpers import UserError, locked, read_json, say, whole_file, write_json

MAGIC, VERSION, HEADER = b"PARITYIX", 1, 2 ** 16
TABLES = {"offsets": "<u8", "checks": "<u4", "owners": "<u4", "places": "<u8", "norms": "<f4", "idf_norms": "<f4"}
LISTS = {"passages": "<u4", "values": "<f2"}
PIECE = {"offsets": "<u8", "passages": "<u4", "values": "<f2", "owners": "<u4", "places": "<u8"}
AGAIN = "Make it again with retrieve.py index"


# Building


class Builder:
    """Collects the entries of passages 0, 1, ... in order, in bounded memory: `budget` entries, or the longest list, at
    a time, and 40 bytes a passage at the end. All is laid aside, in PATH.parts, after `seconds` at the latest."""

    def __init__(self, path, features, about, budget=2 ** 24, seconds=60):
        self.path, self.features, self.about, self.budget, self.seconds = path, features, about, budget, seconds
        self.folder, self.held = f"{path}.parts", contextlib.ExitStack()

    def __enter__(self):
        self.held.enter_context(locked(self.folder, ""))
        self.waiting, self.entries, self.since = [], 0, time.time()
        state = self.read_state()
        self.pieces, self.passages, self.count, self.done = (state[key] for key in (
            "pieces", "passages", "count", "done"))
        return self

    def __exit__(self, *error):
        self.held.close()

    def read_state(self):
        """What an earlier build of the same index has laid aside, if all of it is sound."""
        fresh = {"pieces": [], "passages": 0, "count": 0, "done": 0}
        path = os.path.join(self.folder, "state.json")
        if not os.path.exists(path):
            return fresh
        state = read_json(path, f"delete {self.folder}")
        same = state["about"] == self.about and state["features"] == self.features
        if same and all(self.piece_sum(number) == piece["sum"] for number, piece in enumerate(state["pieces"])):
            say(f"{self.path}: going on after {state['passages']:,} passages")
            return state
        say(f"{self.path}: what an earlier build left is of other settings, or damaged: starting over")
        os.remove(path)
        return fresh

    def piece_path(self, number):
        return os.path.join(self.folder, f"{number}.piece")

    def piece_sum(self, number):
        """The checksum of a piece as it is on disk; None if it is missing."""
        if not os.path.exists(self.piece_path(number)):
            return None
        total = 0
        with open(self.piece_path(number), "rb") as file:
            while part := file.read(2 ** 20):
                total = zlib.crc32(part, total)
        return total

    def add(self, counts, features, values, owners, places, done):
        """The next passages: how many entries each has (n,), and their features and values, passage by passage (E,);
        each passage's document, ascending, and its place, any number. done: what to go on after, as the caller counts.
        """
        features, values, owners = np.asarray(features), np.asarray(values), np.asarray(owners)
        if len(features) and not (0 <= features.min() and features.max() < self.features):
            raise ValueError(f"features are 0 to {self.features - 1:,}, not {features.min():,} to {features.max():,}")
        if max(self.passages + len(counts), owners.max(initial=0)) >= 2 ** 32:
            raise ValueError("an index has at most 2^32 passages and documents: make several")
        if len(values) and not np.abs(values).max() <= 65504:
            raise ValueError("a value is beyond float16: scale all of them, which changes no cosine")
        passages = np.repeat(np.arange(self.passages, self.passages + len(counts), dtype=np.uint32), counts)
        arrays = (features, passages, values, owners, places)
        self.waiting.append([np.asarray(part, kind) for part, kind in zip(arrays, ("<u4", "<u4", "<f2", "<u4", "<u8"))])
        self.passages += len(counts)
        self.entries += len(passages)
        self.count += len(passages)
        self.done = done
        if self.entries >= self.budget or time.time() - self.since > self.seconds:
            self.lay_aside()

    def lay_aside(self):
        """Sort what is held by feature (passages are in order already), and write it to a file of its own."""
        features, passages, values, owners, places = (np.concatenate(parts) for parts in zip(*self.waiting))
        self.waiting, self.entries, self.since = [], 0, time.time()
        order = np.argsort(features, kind="stable")
        offsets = np.concatenate([[0], np.cumsum(np.bincount(features, minlength=self.features))])
        parts = (offsets, passages[order], values[order], owners, places)
        total, number = 0, len(self.pieces)
        with whole_file(self.piece_path(number), "wb") as file:
            for part, kind in zip(parts, PIECE.values()):
                payload = np.ascontiguousarray(part, kind)
                total = zlib.crc32(payload, total)
                payload.tofile(file)
        self.pieces.append({"entries": len(passages), "passages": len(owners), "sum": total})
        write_json(os.path.join(self.folder, "state.json"), {
            "about": self.about, "features": self.features, "pieces": self.pieces, "passages": self.passages,
            "count": self.count, "done": self.done})

    def read_piece(self, number, wanted, first=0, last=None):
        """Items first .. last - 1 of one of its arrays, by its name in PIECE."""
        piece, start = self.pieces[number], 0
        sizes = (self.features + 1, piece["entries"], piece["entries"], piece["passages"], piece["passages"])
        for (name, kind), size in zip(PIECE.items(), sizes):
            step = np.dtype(kind).itemsize
            if name == wanted:
                return np.fromfile(self.piece_path(number), kind, (size if last is None else last) - first,
                                   offset=start + first * step)
            start += size * step

    def finish(self, **more):
        """Merge, and give the file its name. more: what else it shall say about itself."""
        if self.waiting or not self.pieces:
            self.waiting = self.waiting or [[np.zeros(0, kind) for kind in ("<u4", "<u4", "<f2", "<u4", "<u8")]]
            self.lay_aside()
        numbers = range(len(self.pieces))
        offsets = sum(self.read_piece(number, "offsets").astype(np.int64) for number in numbers)
        sizes = {"offsets": len(offsets), "checks": self.features, "owners": self.passages, "places": self.passages,
                 "norms": self.passages, "idf_norms": self.passages, "passages": self.count, "values": self.count}
        starts, end = {}, HEADER
        for name, size in sizes.items():
            starts[name] = end
            end += -(-size * np.dtype((TABLES | LISTS)[name]).itemsize // 64) * 64
        with whole_file(self.path, "wb") as file:
            checks, norms = self.merge(file, starts, offsets)
            tables = {"offsets": offsets, "checks": checks, "norms": norms[0], "idf_norms": norms[1]} | {
                name: np.concatenate([self.read_piece(number, name) for number in numbers])
                for name in ("owners", "places")}
            sums = {}
            for name, kind in TABLES.items():
                payload = np.ascontiguousarray(tables[name], kind)
                sums[name] = zlib.crc32(payload)
                file.seek(starts[name])
                payload.tofile(file)
            file.truncate(end)
            file.seek(0)
            file.write(header({"features": self.features, "sizes": sizes, "starts": starts, "sums": sums, "end": end,
                               "about": self.about | more}))
        shutil.rmtree(self.folder)

    def merge(self, file, starts, offsets):
        """Write all lists, a range of features at a time. Their checksums, and the norms without and with idf."""
        checks, squares = np.zeros(self.features, np.uint32), np.zeros((2, self.passages))
        idf = idf_of(self.passages, np.diff(offsets))
        low = 0
        while low < self.features and self.count:
            high = max(low + 1, int(np.searchsorted(offsets, offsets[low] + self.budget, "right")) - 1)
            passages, values = self.merge_range(low, high, offsets)
            for name, part in (("passages", passages), ("values", values)):
                file.seek(starts[name] + int(offsets[low]) * part.itemsize)
                part.tofile(file)
            bounds = (offsets[low : high + 1] - offsets[low]).tolist()
            for feature in np.flatnonzero(np.diff(bounds)).tolist():
                own = slice(bounds[feature], bounds[feature + 1])
                checks[low + feature] = zlib.crc32(values[own], zlib.crc32(passages[own]))
            wide = values.astype(np.float64) ** 2
            squares[0] += np.bincount(passages, wide, self.passages)
            squares[1] += np.bincount(passages, wide * np.repeat(idf[low:high] ** 2, np.diff(bounds)), self.passages)
            low = high
        return checks, np.sqrt(squares)

    def merge_range(self, low, high, offsets):
        """The lists of features low .. high - 1, one after the other; each is those of the pieces, in their order."""
        size = int(offsets[high] - offsets[low])
        passages, values = np.empty(size, np.uint32), np.empty(size, np.float16)
        at = offsets[low:high] - offsets[low]  # where each list goes on
        for number in range(len(self.pieces)):
            bounds = self.read_piece(number, "offsets", low, high + 1).astype(np.int64)
            first, last, lengths = int(bounds[0]), int(bounds[-1]), np.diff(bounds)
            to = np.arange(last - first) + np.repeat(at - (bounds[:-1] - first), lengths)
            passages[to] = self.read_piece(number, "passages", first, last)
            values[to] = self.read_piece(number, "values", first, last)
            at = at + lengths
        return passages, values


def header(content):
    text = json.dumps(content).encode()
    if len(text) > HEADER - 24:
        raise ValueError(f"what an index says about itself must fit {HEADER - 24:,} bytes, not {len(text):,}")
    body = (MAGIC + VERSION.to_bytes(4, "little") + len(text).to_bytes(4, "little") + text).ljust(HEADER - 4, b"\0")
    return body + zlib.crc32(body).to_bytes(4, "little")


def idf_of(n, counts):
    """1 for a feature that every passage has, more for rarer ones."""
    return np.log((1 + n) / (1 + np.asarray(counts, np.float64))) + 1


# Searching


def open_postings(path):
    """A finished index, memory mapped, once its header and its tables are found sound."""
    try:
        content = np.memmap(path, np.uint8, "r")
    except FileNotFoundError:
        raise UserError(f"there is no index {path}: make it with retrieve.py index") from None
    except ValueError:  # an empty file cannot be mapped
        raise UserError(f"{path} is empty. {AGAIN}") from None
    start = bytes(content[:HEADER])
    if not start.startswith(MAGIC):
        raise UserError(f"{path} is no index of retrieve.py's. {AGAIN}")
    if int.from_bytes(start[8:12], "little") != VERSION:
        raise UserError(f"{path} has format version {int.from_bytes(start[8:12], 'little')}, but this program reads "
                        f"version {VERSION}. {AGAIN}")
    if len(start) < HEADER or zlib.crc32(start[:-4]) != int.from_bytes(start[-4:], "little"):
        raise UserError(f"{path} has a damaged header. {AGAIN}")
    about = json.loads(start[16 : 16 + int.from_bytes(start[12:16], "little")])
    if len(content) != about["end"]:
        raise UserError(f"{path} should have {about['end']:,} bytes, but has {len(content):,}: it was truncated, or "
                        f"added to. {AGAIN}")
    found = {}
    for name, kind in (TABLES | LISTS).items():
        first = about["starts"][name]
        found[name] = content[first : first + about["sizes"][name] * np.dtype(kind).itemsize].view(kind)
        if name in TABLES and zlib.crc32(found[name]) != about["sums"][name]:
            raise UserError(f"{path} is damaged: its table of {name} does not match its checksum. {AGAIN}")
    return Postings(path, about["about"], **{name: np.asarray(part) for name, part in found.items()})


class Postings(NamedTuple):
    path: str
    about: dict            # what the builder was given
    offsets: np.ndarray    # (features + 1,) where each feature's list starts
    checks: np.ndarray     # (features,) its checksum
    owners: np.ndarray     # (n,) the document of each passage, ascending
    places: np.ndarray     # (n,)
    norms: np.ndarray      # (n,) without idf
    idf_norms: np.ndarray  # (n,)
    passages: np.ndarray   # (entries,) the lists, one after the other
    values: np.ndarray

    def list_of(self, feature):
        """(passages, values) of a feature: (n_f,) each."""
        own = slice(int(self.offsets[feature]), int(self.offsets[feature + 1]))
        passages, values = self.passages[own], self.values[own]
        if len(passages) and zlib.crc32(values, zlib.crc32(passages)) != self.checks[feature]:
            raise UserError(f"{self.path} is damaged: the list of feature {feature} does not match its checksum. "
                            f"{AGAIN}")
        return passages, values

    def weights(self, features, idf):
        """idf of each of these features; 1 without."""
        counts = self.offsets[features + 1].astype(np.int64) - self.offsets[features].astype(np.int64)
        return idf_of(len(self.owners), counts) if idf else np.ones(len(features))

    def scores(self, features, values, idf=True):
        """The cosine of every passage with a query (E,): (n,); and how many postings were touched.

        A feature that no passage has counts in the query's norm, as it should.
        """
        features = np.asarray(features, np.int64)
        weights = self.weights(features, idf)
        query = np.asarray(values, np.float64) * weights
        length = np.linalg.norm(query)
        total, touched = np.zeros(len(self.owners), np.float32), 0
        for feature, value in zip(features.tolist(), (query * weights / (length or 1.0)).astype(np.float32).tolist()):
            passages, strength = self.list_of(feature)
            total[passages] += np.float32(value) * strength
            touched += len(passages)
        norms = self.idf_norms if idf else self.norms
        return np.divide(total, norms, out=total, where=norms > 0), touched

    def search(self, features, values, k=10, idf=True):
        """The k best documents, by their best passage: (documents, scores, passages, postings touched). Fewer, if
        fewer have any of the query's features."""
        scores, touched = self.scores(features, values, idf)
        many = min(len(scores), k * self.most_passages())
        while True:
            best = largest(scores, many)
            documents, first = np.unique(self.owners[best], return_index=True)
            if len(documents) >= k or many >= len(scores):
                chosen = best[np.sort(first)[:k]]
                chosen = chosen[scores[chosen] > 0]
                return self.owners[chosen], scores[chosen], chosen, touched
            many = min(len(scores), 4 * many)

    def most_passages(self):
        """A guess of how many passages of one document are among the best."""
        return 1 if not len(self.owners) else -(-len(self.owners) // (int(self.owners[-1]) + 1))


def largest(scores, k, part=1024):
    """The places of the k largest, the largest first, of equal ones the lower. Most parts need no second look: the k
    largest are in the parts whose own largest is among the k largest of these."""
    n = len(scores) // part * part
    if n > 4 * k * part:
        tops = scores[:n].reshape(-1, part).max(1)
        least = np.partition(tops, len(tops) - k)[len(tops) - k]
        kept = np.flatnonzero(tops >= least)
        places = np.concatenate([(kept[:, None] * part + np.arange(part)).ravel(), np.arange(n, len(scores))])
    else:
        places = np.arange(len(scores))
    if k < len(places):
        least = np.partition(scores[places], len(places) - k)[len(places) - k]
        places = places[scores[places] >= least]
    return places[np.lexsort((places, -scores[places]))][:k]
