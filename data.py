"""Shards of tokens on disk, and batches that are a pure function of (seed, step).

    python data.py toy --out data/toy                                     the embedded world: no download
    python data.py text book.txt 'news/*.jsonl.gz' --out data/mine        local files
    python data.py fineweb-edu --tokens 20e9 --out data/fineweb-edu       streamed; the same command again continues
    python data.py info data/mine                                         what is there; `check` reads every byte

A folder holds train_00000.bin ..., val_00000.bin ..., tokenizer.json and state.json. The shards of a split are one long
stream of tokens, in which an end-of-text token comes *before* each document. A document goes to training or to
validation by a hash of its text, so that equal documents are never in both. A .txt file is one document; a long one is
read in parts of 16 KiB, each of which goes to training or to validation by itself.

    tokens = Tokens("data/mine", "train")
    tokens.batch(seed, step, B, T)         (B, T+1) token ids: inputs are [:, :-1], targets are [:, 1:]

Window w is tokens wT .. wT+T of the stream. Neighbours share a token, so that every token is a target once per epoch,
but for the very first and fewer than T at the end. An epoch is a permutation of the windows keyed by (seed, epoch).

Several folders can be mixed: `data = "data/web:12,data/code:3,data/books:1"` takes 12 of 16 windows from the first.

    tokens = open_split("data/web:12,data/code:3,data/books:1", "train")       a Mixture, with the same batch(...)
"""
import argparse
import bisect
import codecs
import collections
import concurrent.futures
import contextlib
import errno
import functools
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import queue
import struct
import sys
import threading
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import regex
import torch

from helpers import Progress, UserError, locked, read_json, run_script, sync_folder, whole_number, write_json
from tokenizer import GPT2_PATTERN, encode, load_tokenizer, make_tokenizer, pack_tokenizer, well_formed

# Shards: a header of 4096 bytes, then the tokens, little-endian.

HEADER = 4096
FIELDS = struct.Struct("<8sIIQIII32s")  # magic, version, bytes per token, tokens, vocab_size, end, crc32, tokenizer
MAGIC, VERSION = b"PARITYTK", 1
AGAIN = "Restore it from a copy, or delete the folder and prepare the data again"
VERIFIED = set()  # shards whose bytes this process has checked: path, size, time of change


class Shard(NamedTuple):
    tokens: np.ndarray  # (n,) uint16 or uint32, memory mapped
    vocab_size: int
    end: int            # the end-of-text token
    tokenizer_id: str
    crc: int            # of the tokens


class ShardWriter:
    """A shard under a temporary name. Its header, and then its name, come last, so that half of one never counts."""

    def __init__(self, path, encoding, tokenizer_id):
        self.path, self.encoding, self.tokenizer_id = path, encoding, tokenizer_id
        self.width = 2 if encoding.n_vocab <= 2 ** 16 else 4
        self.count = self.crc = 0
        self.file = open(path + ".tmp", "wb", buffering=2 ** 20)
        self.file.write(bytes(HEADER))

    def append(self, tokens):
        payload = tokens.astype(f"<u{self.width}").tobytes()
        self.file.write(payload)
        self.crc = zlib.crc32(payload, self.crc)
        self.count += len(tokens)

    def finish(self):
        header = FIELDS.pack(MAGIC, VERSION, self.width, self.count, self.encoding.n_vocab, self.encoding.eot_token,
                             self.crc, self.tokenizer_id.encode()).ljust(HEADER - 4, b"\0")
        self.file.seek(0)
        self.file.write(header + struct.pack("<I", zlib.crc32(header)))
        publish(self.file, self.path)

    def abandon(self):
        with contextlib.suppress(OSError):  # closing writes what is left in the buffer, perhaps to a full disk
            self.file.close()


def publish(file, path):
    """Give a temporary file its name, once its bytes are on the disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    os.replace(file.name, path)
    sync_folder(path)


def open_shard(path, verify=True):
    """A finished shard, memory mapped, after a check of its header and, once per process, of all its bytes."""
    try:
        with open(path, "rb") as file:
            header, stat = file.read(HEADER), os.fstat(file.fileno())
    except FileNotFoundError:
        raise UserError(f"{path} is missing, though state.json lists it. {AGAIN}") from None
    if not header.startswith(MAGIC):
        raise UserError(f"{path} is not a shard of tokens that data.py made. {AGAIN}")
    version = int.from_bytes(header[8:12], "little")
    if version != VERSION:
        raise UserError(f"{path} has format version {version}, but this program reads version {VERSION}. Prepare the "
                        "data again, or use the program that made it")
    if len(header) < HEADER or zlib.crc32(header[:-4]) != int.from_bytes(header[-4:], "little"):
        raise UserError(f"{path} has a damaged header. {AGAIN}")
    _, _, width, count, vocab_size, end, crc, tokenizer_id = FIELDS.unpack_from(header)
    if stat.st_size != HEADER + width * count:
        raise UserError(f"{path} should have {HEADER + width * count:,} bytes for its {count:,} tokens, but has "
                        f"{stat.st_size:,}: it was truncated, or added to. {AGAIN}")
    tokens = np.asarray(np.memmap(path, f"<u{width}", "r", HEADER, (count,)))  # a plain array: its slices are cheaper
    key = os.path.abspath(path), stat.st_size, stat.st_mtime_ns
    if verify and key not in VERIFIED:
        if zlib.crc32(tokens.view(np.uint8)) != crc:
            raise UserError(f"{path} is damaged: its tokens do not match their checksum. {AGAIN}")
        VERIFIED.add(key)
    return Shard(tokens, vocab_size, end, tokenizer_id.decode(), crc)


# Sources: where documents come from.


class Piece(NamedTuple):
    """A document, or a part that `continues` the piece before. Without a split, a hash of the text decides."""
    text: str
    continues: bool = False
    split: str | None = None


class Source(NamedTuple):
    """open(position) gives the pieces from there on, and a function that tells the position after those drawn."""
    settings: dict  # what the source is: a run that continues must have the same
    open: Callable[[Any], tuple]
    pattern: str = GPT2_PATTERN  # for a tokenizer trained on this source
    words: tuple = ()            # single tokens in it


def counted(pieces, position):
    """For Source.open: pieces whose position is just the number of pieces before."""
    drawn = position or 0

    def run():
        nonlocal drawn
        for piece in itertools.islice(pieces, drawn, None):
            drawn += 1
            yield piece

    return run(), lambda: drawn


def text_source(files, field="text"):
    """Local .txt, .jsonl and .parquet files, perhaps with .gz; patterns such as 'news/*.txt' are expanded."""
    paths = []
    for name in files:
        found = [name] if os.path.exists(name) else sorted(glob.glob(name, recursive=True))
        if not found:
            raise UserError(f"no file matches {name}: check the name and the folder")
        paths += found
    paths = list(dict.fromkeys(paths))
    for path in paths:
        if os.path.isdir(path):
            raise UserError(f"{path} is a folder: name the files in it, for example '{os.path.join(path, '*.txt')}'")
        if reader_of(path) is None:
            raise UserError(f"{path} is of no known kind: the name must end in .txt, .jsonl or .parquet, or in one of "
                            "these and .gz")
        if not os.path.getsize(path):
            raise UserError(f"{path} is empty: leave it out")
    settings = {"files": [[path, os.path.getsize(path)] for path in paths], "field": field}
    return Source(settings, lambda position: counted(read_files(paths, field), position))


def reader_of(path):
    ending = os.path.splitext(path.removesuffix(".gz"))[1]
    return {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}.get(ending)


def read_files(paths, field):
    for path in paths:
        piece = None
        try:
            with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
                for piece in reader_of(path)(file, path, field):
                    yield piece
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(f"{path} cannot be unpacked ({error}): get it again, or leave it out") from error
        if piece is None:
            raise UserError(f"{path} holds no text: leave it out")


def read_txt(file, path, field, part=2 ** 14):
    """One document in parts, cut before a line (or else a word) in mid-text: tokens are the same as without the cut."""
    decoder, buffer, offset, continues, block = codecs.getincrementaldecoder("utf-8")(), "", 0, False, b"start"
    while block:
        block = file.read(part)
        if block and len(buffer) >= part // 2:
            cut = regex.search(r"(?r)(?<=\S)\n(?=\S)", buffer) or regex.search(r"(?r)(?<=\S) (?=\S)", buffer)
            at = cut.start() if cut else len(buffer) if len(buffer) > 64 * part else 0
            if at:
                yield Piece(buffer[:at], continues)
                buffer, continues = buffer[at:], True
        try:
            buffer += decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise not_utf8(error, path, offset + len(block) - len(error.object)) from None
        offset += len(block)
    if buffer:
        yield Piece(buffer, continues)


def not_utf8(error, path, offset):
    at, byte = offset + error.start, error.object[error.start]
    return UserError(f"{path} is not UTF-8: there is a byte 0x{byte:02x} at offset {at}. Convert it first, for example "
                     "with iconv -f LATIN1 -t UTF-8, or leave it out")


def read_jsonl(file, path, field):
    offset = 0
    for number, line in enumerate(file, 1):
        try:
            if line.strip():
                yield from document(json.loads(line.decode()), field, f"{path}, line {number},")
        except UnicodeDecodeError as error:
            raise not_utf8(error, path, offset) from None
        except (ValueError, RecursionError) as error:  # also a number of 5,000 digits, or brackets 10,000 deep
            raise UserError(f"{path}, line {number}, is not JSON ({error}): mend the line, or remove it") from None
        offset += len(line)


def read_parquet(file, path, field):
    import pyarrow.parquet
    try:
        table = pyarrow.parquet.ParquetFile(io.BytesIO(file.read()) if path.endswith(".gz") else file)
        known = field in table.schema_arrow.names  # if not, read all fields, so that the error can list them
        for batch in table.iter_batches(256, columns=[field] if known else None):
            for record in batch.to_pylist():
                yield from document(record, field, path)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a sound parquet file ({error}): get it again, or leave it out") from error


def document(record, field, where):
    """The text in a record as a Piece; nothing if there is no character in it."""
    if not isinstance(record, dict) or field not in record:
        names = ", ".join(record) if isinstance(record, dict) else "none"
        raise UserError(f"{where} has no field {field!r} (its fields: {names}): name the right one with --field")
    if not isinstance(record[field], str):
        raise UserError(f"{where} has {type(record[field]).__name__} in field {field!r} and not text: mend it, or name "
                        "another field with --field")
    if record[field]:
        yield Piece(record[field])


def hub_source(name, config=None, field="text"):
    """What `datasets` streams: a data set of the Hugging Face hub, or a local folder of parquet or jsonl files.

    A position is the state of the stream, which leads straight to the right file: nothing is downloaded twice.
    """
    def open_at(position):
        import datasets
        try:
            stream = datasets.load_dataset(name, config, split="train", streaming=True)
        except Exception as error:
            raise UserError(f"the data set {name} cannot be opened ({type(error).__name__}: {error}). Check its name, "
                            "--config and the network, or give a local folder with --dataset") from error
        if position:
            stream.load_state_dict(position)
        return rows(stream), stream.state_dict

    def rows(stream):
        try:
            for record in stream:
                yield from document(record, field, f"the data set {name}")
        except UserError:
            raise
        except Exception as error:  # whatever the network or a broken file makes of it
            raise UserError(f"reading the data set {name} broke off ({type(error).__name__}: {error}). "
                            "What is finished is kept: the same command again continues") from error

    return Source({"dataset": name, "config": config, "field": field}, open_at)


def toy_source(seed=0, val_every=30):
    """The embedded world, without end. Validation has documents of another seed, and none that training has as well."""
    import toyworld

    owner = {}  # of a text, by its hash: the split that had it first

    def claim(text, split):
        if owner.setdefault(hash_of(text), split) == split:
            yield Piece(text, split=split)

    def pieces():
        owner.clear()
        others = toyworld.documents(seed + 1, 10 ** 9)
        for number, doc in enumerate(toyworld.documents(seed, 10 ** 9)):
            yield from claim(doc.text, "train")
            if number % val_every == 0:
                yield from claim(next(others).text, "val")

    years = [f"{n:02}" for n in range(100)] + [f" {century}" for century in range(10, 21)]
    words = [f" {word}" for word in toyworld.vocabulary()] + years
    return Source({"toy": seed, "val_every": val_every}, lambda position: counted(pieces(), position),
                  toyworld.TOKEN_PATTERN, tuple(words))


def hash_of(text):
    return int.from_bytes(hashlib.blake2b(well_formed(text).encode(), digest_size=8).digest(), "big")


# From a source to a folder.


def read_state(folder, must=True):
    path = os.path.join(folder, "state.json")
    if not os.path.exists(path):
        if must:
            raise UserError(f"{folder or 'no folder'} has no prepared data: make it with python data.py "
                            "(--help shows how)")
        return None
    state = read_json(path, AGAIN)
    if not is_state(state):
        raise UserError(f"{path} is no file of data.py's. {AGAIN}")
    return state


def is_state(state):
    """Whether a state.json holds what data.py writes into it."""
    kinds = {"settings": dict, "done": bool, "shards": dict, "documents": dict}
    if not all(isinstance(state.get(key), kind) for key, kind in kinds.items()):
        return False
    lists = [state["shards"].get(split) for split in ("train", "val")]
    counts = [state["documents"].get(split) for split in ("train", "val")]
    return all(isinstance(count, int) for count in counts) and all(
        isinstance(shards, list) and all(map(is_entry, shards)) for shards in lists)


def is_entry(entry):
    """A shard's name and its number of tokens."""
    return isinstance(entry, list) and [type(value) for value in entry] == [str, int]


@contextlib.contextmanager
def swept(folder):
    """Remove temporary files: before, those of a run that was killed; after, those of one that failed."""
    def sweep():
        for name in ("train_*.bin.tmp", "val_*.bin.tmp", "state.json.tmp", "tokenizer.json.tmp"):
            for path in glob.glob(os.path.join(glob.escape(folder), name)):
                os.remove(path)

    sweep()
    try:
        yield
    finally:
        sweep()


class Folder:
    """The shards of both splits as they grow, and state.json, which says how far they are.

    state: settings, done, shards and documents by split, and the place to go on from: the position in the source of a
    chunk of pieces, how many of its pieces are done, how many tokens of the next one, and the split of the one before.
    """
    START = {"position": None, "pieces": 0, "offset": 0, "previous": None}

    def __init__(self, path, state, encoding):
        self.path, self.state, self.encoding = path, state, encoding
        self.tokenizer_id, self.writers = pack_tokenizer(encoding)["id"], {}
        for name, _ in state["shards"]["train"] + state["shards"]["val"]:
            open_shard(os.path.join(path, name), verify=False)

    def append(self, split, tokens):
        if split not in self.writers:
            name = f"{split}_{len(self.state['shards'][split]):05}.bin"
            self.writers[split] = ShardWriter(os.path.join(self.path, name), self.encoding, self.tokenizer_id)
        self.writers[split].append(tokens)

    def commit(self, **place):
        """Finish the shards of both splits and note the place in the source: an interrupted run goes on from here."""
        for split, writer in self.writers.items():
            writer.finish()
            self.state["shards"][split].append([os.path.basename(writer.path), writer.count])
        self.writers.clear()
        self.state.update(place)
        write_json(os.path.join(self.path, "state.json"), self.state)

    def close(self):
        for writer in self.writers.values():
            writer.abandon()


def prepare(source, out, tokenizer="gpt2", tokens=None, val_fraction=0.05, shard_tokens=10 ** 8, wait=False,
            sample=2 ** 25):
    """Tokenise a source into a folder, or go on where an earlier run with the same settings was interrupted.

    tokens: of training, to stop at; None is the whole source.  val_fraction: share of the documents for validation.
    wait: for another process that is writing to the folder, instead of an error.
    sample: characters on which a tokenizer is trained.
    """
    named = tokenizer == "gpt2" or tokenizer.startswith("bpe:") or not os.path.isdir(tokenizer)
    settings = {"source": source.settings, "tokens": tokens, "val_fraction": val_fraction, "shard_tokens": shard_tokens,
                "tokenizer": tokenizer if named else pack_tokenizer(load_tokenizer(tokenizer))["id"]}
    settings = json.loads(json.dumps(settings))  # as state.json will give it back
    try:
        with locked(out, wait=wait), swept(out):
            state = read_state(out, must=False) or {
                "settings": settings, "done": False, "shards": {"train": [], "val": []},
                "documents": {"train": 0, "val": 0}, **Folder.START}
            differ = [key for key in settings if state["settings"].get(key) != settings[key]]
            if differ:
                raise UserError(f"{out} holds data made with another {' and '.join(differ)}: choose another --out, or "
                                "delete that folder")
            if state["done"]:
                return print(f"{out} is finished already: {describe(state)}", file=sys.stderr)
            if state["shards"]["train"]:
                encoding = load_tokenizer(out)
            else:
                encoding = make_tokenizer(tokenizer, lambda: (piece.text for piece in source.open(None)[0]), sample,
                                          source.pattern, source.words)
                write_json(os.path.join(out, "tokenizer.json"), pack_tokenizer(encoding))
            with contextlib.closing(Folder(out, state, encoding)) as folder:
                fill(folder, source)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"the disk is full ({out}). The finished shards are kept: "
                        "make room, and the same command again continues") from error


def fill(folder, source):
    """Write the source's tokens from the state's place on. A full shard of training commits both splits."""
    state, end = folder.state, folder.encoding.eot_token
    settings, shards, documents = state["settings"], state["shards"]["train"], state["documents"]
    budget = settings["tokens"] or float("inf")
    written = sum(count for _, count in shards)  # tokens of training
    previous, offset = state["previous"], state["offset"]
    progress = Progress(settings["tokens"], written)
    for position, number, piece, split, tokens in encoded(source, folder.encoding, state):
        if not piece.continues or split != previous:
            tokens = np.concatenate([[end], tokens])
            documents[split] += offset == 0
        at, offset = offset, 0  # a finished shard may have the start of this piece already
        while at < len(tokens) and written < budget:
            full = min((len(shards) + 1) * settings["shard_tokens"], budget)
            part = tokens[at : at + full - written] if split == "train" else tokens[at:]
            folder.append(split, part)
            at += len(part)
            written += len(part) * (split == "train")
            if written == full:
                folder.commit(position=position, pieces=number, offset=at, previous=previous)
        previous = split
        progress.show(written)
        if written == budget:
            break
    for split in ("train", "val"):
        if not documents[split] and (split == "train" or settings["val_fraction"] > 0):
            way_out = "raise --tokens" if written == budget else "give more text"
            raise UserError(f"none of {sum(documents.values())} documents fell into the {split} split, "
                            f"at --val-fraction {settings['val_fraction']}: {way_out}, or take another fraction")
    folder.commit(done=True, **Folder.START)
    progress.show(written, last=True)
    print(f"{folder.path}: {describe(state)}", file=sys.stderr)


def encoded(source, encoding, state):
    """(position, number, piece, split, tokens) of each piece from the state's place on, in order; threads encode ahead.

    tiktoken works without Python's global lock, so threads use all cores, and nothing is copied between processes.
    """
    threshold = state["settings"]["val_fraction"] * 2 ** 64

    def work(pieces):
        splits = [piece.split or ("val" if hash_of(piece.text) < threshold else "train") for piece in pieces]
        return [(piece, split, encode(encoding, piece.text)) for piece, split in zip(pieces, splits)]

    workers = os.cpu_count() or 1
    ahead, skip = collections.deque(), state["pieces"]
    chunks = chunked(*source.open(state["position"]), state["position"])
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        while True:
            for position, pieces in itertools.islice(chunks, 2 * workers - len(ahead)):
                ahead.append((position, pool.submit(work, pieces)))
            if not ahead:
                return
            position, future = ahead.popleft()
            for number, result in enumerate(future.result()):
                if number >= skip:
                    yield position, number, *result
            skip = 0


def chunked(pieces, tell, position, size=2 ** 19):
    """Lists of pieces of about `size` characters together, each with the position at which it starts."""
    chunk, length = [], 0
    for piece in pieces:
        chunk.append(piece)
        length += len(piece.text)
        if length >= size:
            yield position, chunk
            position, chunk, length = tell(), [], 0
    if chunk:
        yield position, chunk


def describe(state):
    return "; ".join(f"{split} {sum(count for _, count in shards):,} tokens, {state['documents'][split]:,} documents, "
                     f"{len(shards)} shards" for split, shards in state["shards"].items())


def prepare_toy(out, tokens=3_000_000):
    """The toy corpus, with its tokenizer of 2,048 entries; train.py calls this when it is missing."""
    prepare(toy_source(), out, "bpe:2048", tokens, wait=True, sample=2 ** 21)


# Reading: one stream of tokens for a split, and batches of windows from it.


class Tokens:
    """The tokens of one split of a folder, 0 .. len - 1, across its shards.

    verify: check the shards' checksums, once per process, at more than a gigabyte a second. With many ranks, one on
    each machine is enough.
    """

    def __init__(self, folder, split="train", verify=True):
        state = read_state(folder)
        if not state["done"]:
            raise UserError(f"{folder} is not finished: run the data.py command that makes it again, and it continues")
        if not state["shards"].get(split):
            raise UserError(f"{folder} has no {split} split: prepare it again with a --val-fraction above 0")
        paths = [os.path.join(folder, name) for name, _ in state["shards"][split]]
        with concurrent.futures.ThreadPoolExecutor() as pool:  # the checksum, too, works without the global lock
            self.shards = list(pool.map(functools.partial(open_shard, verify=verify), paths))
        for (_, count), path, shard in zip(state["shards"][split], paths, self.shards):
            if shard[1:4] != self.shards[0][1:4] or len(shard.tokens) != count:
                raise UserError(f"{path} belongs to other data: it does not match state.json and {paths[0]}. {AGAIN}")
        self.folder, self.split = folder, split
        _, self.vocab_size, self.end, self.tokenizer_id, _ = self.shards[0]
        path = os.path.join(folder, "tokenizer.json")
        if read_json(path, AGAIN).get("id") != self.tokenizer_id:
            raise UserError(f"{path} is not the tokenizer with which the shards were made. {AGAIN}")
        self.bounds = [0, *itertools.accumulate(len(shard.tokens) for shard in self.shards)]  # where each shard starts

    def __len__(self):
        return self.bounds[-1]

    def identity(self):
        """The same for the same tokens in the same shards, wherever they lie; from the headers alone."""
        shards = [(len(shard.tokens), *shard[1:]) for shard in self.shards]
        return f"{len(self):,} ({hashlib.sha256(repr(shards).encode()).hexdigest()[:16]})"

    def read(self, start, stop):
        """Tokens start .. stop-1 of the stream, wherever the shards part."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"{self.folder} has tokens 0..{len(self)} in {self.split}, not {start}..{stop}")
        parts, shard = [], bisect.bisect_right(self.bounds, start) - 1
        while start < stop:
            parts.append(self.shards[shard].tokens[start - self.bounds[shard] : stop - self.bounds[shard]])
            start += len(parts[-1])
            shard += 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts or [self.shards[0].tokens[:0]])

    def document_bounds(self):
        """Where documents start, and the end of the last: document j is tokens bounds[j] .. bounds[j + 1] - 1."""
        starts = [low + np.flatnonzero(shard.tokens == self.end) for low, shard in zip(self.bounds, self.shards)]
        return np.concatenate([*starts, [len(self)]])

    def count(self, context):
        """How many windows of context + 1 tokens there are."""
        if len(self) <= context:
            raise UserError(f"{self.folder} has {len(self):,} tokens in {self.split}, fewer than one window of "
                            f"{context + 1:,}: take a shorter context, or more text")
        return (len(self) - 1) // context

    def windows(self, indices, context):
        """The windows with these numbers, in the order of the text: (n,) -> (n, context + 1) int64. For evaluation."""
        out = np.empty((len(indices), context + 1), np.int64)
        for row, start in zip(out, (np.asarray(indices) * context).tolist()):
            row[:] = self.read(start, start + context + 1)
        return torch.from_numpy(out)

    def places(self, numbers, seed, context):
        """The windows that come numbers-th in the order of a seed, epoch after epoch: (n,) -> (n,)."""
        n = self.count(context)
        epochs, places = np.divmod(numbers, n)
        for epoch in np.unique(epochs):
            places[epochs == epoch] = shuffled(places[epochs == epoch], n, seed, epoch)
        return places

    def batch(self, seed, step, batch_size, context, rank=0, ranks=1, micro=0, micros=1):
        """This rank's part of this step's batch: (batch_size / ranks / micros, context + 1) int64."""
        numbers = batch_numbers(step, batch_size, rank, ranks, micro, micros)
        return self.windows(self.places(numbers, seed, context), context)


def batch_numbers(step, batch_size, rank, ranks, micro, micros):
    """Which windows of the endless order are in this rank's part of this step's batch: (batch_size / ranks / micros,).

    batch_size is that of all ranks and accumulation steps (`micros`) together. Rank r takes the r-th slice of the
    global batch, and micro step a the a-th slice of that, so that every layout trains on the same rows.
    """
    rows, left = divmod(batch_size, ranks * micros)
    if left or not rows:
        raise UserError(f"a batch of {batch_size} windows cannot be shared out evenly over {ranks} ranks and "
                        f"{micros} accumulation steps: choose a multiple of {ranks * micros}")
    first = step * batch_size + (rank * micros + micro) * rows
    return np.arange(first, first + rows)


class Mixture:
    """Windows of several folders, in shares that hold exactly in every sum(weights) windows one after the other.

    Each folder goes through its own epochs. Which folder a window is from follows from its number alone, so a batch is
    a function of (seed, step) here, too. There is no one stream of tokens: read and windows are each folder's own.
    """

    def __init__(self, parts, weights):
        self.parts, self.weights = parts, weights
        self.folder, self.split = ",".join(f"{p.folder}:{w}" for p, w in zip(parts, weights)), parts[0].split
        self.vocab_size, self.end, self.tokenizer_id = parts[0].vocab_size, parts[0].end, parts[0].tokenizer_id
        for part in parts[1:]:
            if part.tokenizer_id != self.tokenizer_id:
                raise UserError(f"{part.folder} was made with another tokenizer than {parts[0].folder}: make it with "
                                f"--tokenizer {parts[0].folder}")
        # A window of each folder at the middle of each of its equal shares of a round, so that they alternate.
        turns = sorted(((turn + 0.5) / weight, part, turn) for part, weight in enumerate(weights)
                       for turn in range(weight))
        self.owners, self.turns = np.array([(part, turn) for _, part, turn in turns]).T

    def __len__(self):
        return sum(map(len, self.parts))

    def identity(self):
        return " + ".join(f"{weight} x {part.identity()}" for part, weight in zip(self.parts, self.weights))

    def count(self, context):
        """How many windows there are in all; each folder must have one."""
        return sum(part.count(context) for part in self.parts)

    def batch(self, seed, step, batch_size, context, rank=0, ranks=1, micro=0, micros=1):
        """As Tokens.batch."""
        rounds, slots = np.divmod(batch_numbers(step, batch_size, rank, ranks, micro, micros), len(self.owners))
        out = torch.empty(len(slots), context + 1, dtype=torch.int64)
        for number, (part, weight) in enumerate(zip(self.parts, self.weights)):
            own = self.owners[slots] == number
            numbers = rounds[own] * weight + self.turns[slots[own]]
            out[torch.from_numpy(own)] = part.windows(part.places(numbers, seed, context), context)
        return out


def parse_mixture(text):
    """[(folder, weight)] of a setting `data`: a folder, or several, as in "data/web:12,data/code:3,data/books:1"."""
    if os.path.isdir(text) or not regex.search(r",|:\d+$", text):
        return [(text, 1)]
    found = [regex.fullmatch(r"\s*(.+?)\s*:\s*([1-9]\d{0,5})\s*", part) for part in text.split(",")]
    if not all(found):
        wrong = text.split(",")[found.index(None)]
        raise UserError(f"data={text!r}: {wrong!r} is no folder with a weight. Write FOLDER:WEIGHT,FOLDER:WEIGHT with "
                        "whole numbers, as in data/web:12,data/code:3")
    return [(match[1], int(match[2])) for match in found]


def open_split(text, split="train", verify=True):
    """The tokens of a setting `data`: of a folder, or of a mixture. Its validation is that of the first folder."""
    parts = parse_mixture(text)
    if split == "val" or len(parts) == 1:
        return Tokens(parts[0][0], split, verify)
    return Mixture([Tokens(folder, split, verify) for folder, _ in parts], [weight for _, weight in parts])


def shuffled(places, n, seed, epoch):
    """A permutation of 0..n-1 keyed by (seed, epoch), at these places only: no list of n numbers is ever made.

    A Feistel network permutes the numbers of some bits; what leaves 0..n-1 goes through it again until it is back.
    """
    keys = np.frombuffer(hashlib.blake2b(f"{seed} {epoch}".encode()).digest(), "<u8")  # one for each of 8 rounds
    bits = max(4, int(n - 1).bit_length())
    half = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
    x = places.astype(np.uint64)
    todo = np.arange(len(x))
    while len(todo):
        high, low = x[todo] >> half, x[todo] & low_mask
        for even, odd in zip(keys[::2], keys[1::2]):
            high ^= mix(low, even) & high_mask
            low ^= mix(high, odd) & low_mask
        x[todo] = high << half | low
        todo = todo[x[todo] >= n]
    return x.astype(np.int64)


def mix(x, key):
    """64 well mixed bits for each number (the finaliser of splitmix64)."""
    x = (x ^ key) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)


def check_vocabulary(tokens, vocab_size):
    """An error if the data has token ids that a model with this vocabulary does not."""
    if tokens.vocab_size > vocab_size:
        raise UserError(f"{tokens.folder} has token ids up to {tokens.vocab_size - 1:,}, but the model's vocab_size is "
                        f"{vocab_size:,}: set vocab_size to {tokens.vocab_size:,} or more, or choose other data")


def prefetch(make, keys, device="cpu", depth=4):
    """make(key) for each key, as a tensor on the device; a thread works up to `depth` ahead.

        for batch in prefetch(lambda step: tokens.batch(seed, step, B, T), range(start, stop), device): ...

    On CUDA the copy is from pinned memory and does not block. An error in the thread is raised here, in its place.
    """
    device = torch.device(device)
    index = None if device.type != "cuda" else torch.cuda.current_device() if device.index is None else device.index
    ready, stop = queue.Queue(depth), threading.Event()

    def put(item, error=None):
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                return ready.put((item, error), timeout=0.1)

    def work():
        try:
            if index is not None:
                torch.cuda.set_device(index)  # pinning would otherwise wake GPU 0 in every rank
            for key in keys:
                item = make(key)
                put(item if index is None else item.pin_memory())
                if stop.is_set():
                    return
            put(None)
        except BaseException as error:
            put(None, error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item.to(device, non_blocking=True)
    finally:
        stop.set()
        thread.join()


# The command line.


def fraction(text):
    if not 0 <= float(text) < 1:
        raise ValueError
    return float(text)


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="data.py", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Turn text into shards of tokens that train.py reads.", epilog="""\
examples:
  python data.py toy --out data/toy                                   the embedded world, no download
  python data.py text book.txt --out data/book --tokenizer bpe:4096   one text, a small tokenizer of its own
  python data.py text 'news/*.jsonl.gz' --field body --out data/news  documents in a field of JSON lines
  python data.py text more.txt --out data/more --tokenizer data/book  the tokenizer of other data
  python data.py fineweb-edu --tokens 20e9 --out data/fineweb-edu     streamed from the Hugging Face hub
  python data.py info data/book                                       what is there
  python data.py check data/book                                      read every byte against its checksum

A command that was interrupted continues when it is given again. Without internet, GPT-2's tokenizer is read from the
folder in TIKTOKEN_CACHE_DIR. A .txt file is one document, in .jsonl and .parquet files each record is one, and the
end-of-text token comes before each. A hash of its text sends a document to training or to validation; long .txt files
are sent there in parts of 16 KiB.""")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{toy,text,fineweb-edu,info,check}")
    toy = commands.add_parser("toy", help="the embedded world")
    text = commands.add_parser("text", help="local .txt, .jsonl and .parquet files, and .gz of these")
    web = commands.add_parser("fineweb-edu", help="FineWeb-Edu, or another data set that `datasets` can stream")
    text.add_argument("files", nargs="+", help="names or patterns such as 'news/*.txt'")
    for command in (toy, text, web):
        command.add_argument("--out", required=True, metavar="DIR", help="folder for the shards")
    toy.add_argument("--tokens", type=whole_number, metavar="N", default=3_000_000,
                     help="tokens of training (default 3e6)")
    text.add_argument("--tokens", type=whole_number, metavar="N",
                      help="tokens of training to stop at (default: everything)")
    web.add_argument("--tokens", type=whole_number, metavar="N", default=20_000_000_000, help="the same (default 20e9)")
    for command, share in ((text, 0.05), (web, 0.001)):
        command.add_argument("--tokenizer", default="gpt2", metavar="gpt2|bpe:N|DIR",
                             help="GPT-2's (default), one of N entries trained on this text, or that of another folder")
        command.add_argument("--field", default="text", help="name of the field with the text (default text)")
        command.add_argument("--val-fraction", type=fraction, default=share, metavar="F",
                             help=f"share of the documents for validation (default {share})")
        command.add_argument("--shard-tokens", type=whole_number, default=10 ** 8, metavar="N",
                             help="tokens in a shard (default 1e8)")
    web.add_argument("--dataset", default="HuggingFaceFW/fineweb-edu",
                     help="another name on the hub, or a local folder")
    web.add_argument("--config", help="its configuration (default for FineWeb-Edu: sample-100BT)")
    for name, what in (("info", "what a folder holds"), ("check", "check every shard of a folder")):
        commands.add_parser(name, help=what).add_argument("folder")
    return parser.parse_args(arguments)


def main(arguments):
    args = parse(arguments)
    if args.command == "toy":
        return prepare_toy(args.out, args.tokens)
    if args.command in ("text", "fineweb-edu"):
        if args.command == "text":
            source = text_source(args.files, args.field)
        else:
            ours = args.dataset == "HuggingFaceFW/fineweb-edu"
            source = hub_source(args.dataset, args.config or ("sample-100BT" if ours else None), args.field)
        return prepare(source, args.out, args.tokenizer, args.tokens, args.val_fraction, args.shard_tokens)
    state = read_state(args.folder)
    if args.command == "info":
        packed = read_json(os.path.join(args.folder, "tokenizer.json"), AGAIN)
        print(f"{args.folder}: {describe(state)}")
        print(f"tokenizer {packed['name']}, id {packed['id']}; "
              + ("finished" if state["done"] else "not finished: the command that makes it continues"))
    else:
        load_tokenizer(args.folder)
        shards = [name for split in state["shards"].values() for name, _ in split]
        for name in shards:
            open_shard(os.path.join(args.folder, name))
        print(f"{args.folder}: {len(shards)} shards are as they were written")


if __name__ == "__main__":
    run_script(main, "stopped. What is finished is kept: the same command again continues")
