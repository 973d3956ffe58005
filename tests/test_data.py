"""Tokenizers, shards and batches: exact counts, interrupted runs that end with the same bytes, damage that is noticed.

Tests with real text use ../shared/data, and skip where it is absent.
"""
import errno
import gzip
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tiktoken
import torch

import data
import helpers
from data import Tokens, prepare
from helpers import UserError, write_json
from tokenizer import END, encode, load_tokenizer, pack_tokenizer, train_bpe, unpack_tokenizer, word_counts

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHARED = os.path.join(ROOT, "..", "shared", "data")
WORDS = """the quick brown fox jumps over lazy dogs while naïve 東京 cafés open at 1732 and don't close ; "yes" they
said""".split()


@pytest.fixture
def shared(monkeypatch):
    if not os.path.isdir(SHARED):
        pytest.skip("../shared/data, with samples of real text, is not on this machine")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", os.path.join(SHARED, "tiktoken_cache"))
    return SHARED


def sentences(n, seed=0):
    """n different documents of 1 to 60 words, some of two lines."""
    rng = random.Random(seed)
    return [str(i) + "".join(rng.choice(" \n ") + rng.choice(WORDS) for _ in range(rng.randint(1, 60)))
            for i in range(n)]


def write_jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)),
                    encoding="utf-8")
    return str(path)


def make(tmp_path, texts, name="data", **options):
    """A prepared folder of these documents."""
    file = write_jsonl(tmp_path / f"{name}.jsonl", texts)
    options = {"tokenizer": "bpe:400", "val_fraction": 0.2, **options}
    prepare(data.text_source([file]), str(tmp_path / name), **options)
    return str(tmp_path / name)


def documents(folder, split):
    """The texts of a split, from its tokens."""
    tokens, encoding = Tokens(folder, split), load_tokenizer(folder)
    bounds = tokens.document_bounds()
    return [encoding.decode(tokens.read(a + 1, b).tolist()) for a, b in itertools.pairwise(bounds)]


def content(folder):
    """Every file of a folder but its lock, by name."""
    return {name: open(os.path.join(folder, name), "rb").read() for name in os.listdir(folder) if name != ".lock"}


def command(*arguments, **environment):
    return subprocess.run([sys.executable, os.path.join(ROOT, "data.py"), *map(str, arguments)], capture_output=True,
                          text=True, env={**os.environ, **environment}, timeout=60)


# Tokenizers


def naive_bpe(counts, size):
    """BPE by recounting all pairs for every merge: the definition."""
    words = {word: [bytes([b]) for b in word.encode()] for word in counts}
    ranks = [bytes([b]) for b in range(256)]
    while len(ranks) < size - 1:
        pairs = {}
        for word, parts in words.items():
            for pair in zip(parts, parts[1:]):
                pairs[pair] = pairs.get(pair, 0) + counts[word]
        best = min(pairs, key=lambda pair: (-pairs[pair], pair), default=None)
        if best is None or pairs[best] < 2:
            break
        if best[0] + best[1] not in ranks:
            ranks.append(best[0] + best[1])
        for parts in words.values():
            at = 0
            while at + 1 < len(parts):
                if (parts[at], parts[at + 1]) == best:
                    parts[at : at + 2] = [best[0] + best[1]]
                at += 1
    return ranks


def test_bpe_learns_what_its_definition_says():
    for texts in (sentences(80), ["aaaaaaa aaaa aa abababab banana bandana", "aaa " * 5], ["ab" * 9, "ba" * 8]):
        counts = word_counts(texts)
        encoding = train_bpe(counts, 330)
        assert [encoding.decode_single_token_bytes(i) for i in range(encoding.n_vocab - 1)] == naive_bpe(counts, 330)


def test_bpe_does_not_depend_on_the_order_of_the_text():
    texts = sentences(200)
    ids = {pack_tokenizer(train_bpe(word_counts(order), 500))["id"] for order in (texts, texts[::-1], sorted(texts))}
    assert len(ids) == 1


def test_bpe_round_trips_any_text_and_any_bytes():
    encoding = train_bpe(word_counts(sentences(200)), 330)
    assert encoding.n_vocab == 330
    rng = random.Random(1)
    for length in (0, 1, 7, 300):
        text = "".join(chr(rng.choice([rng.randrange(0xD800), rng.randrange(0xE000, 2 ** 20), 32]))
                       for _ in range(length))
        assert encoding.decode(encode(encoding, text).tolist()) == text
        raw = rng.randbytes(length)
        assert encoding.decode_bytes(encoding._encode_bytes(raw)) == raw
    assert {encoding.decode_single_token_bytes(i) for i in range(256)} == {bytes([b]) for b in range(256)}


def test_a_special_token_in_the_text_is_plain_text(tmp_path):
    texts = [f"{i} says {END} and goes on" for i in range(40)]
    folder = make(tmp_path, texts)
    assert sorted(documents(folder, "train") + documents(folder, "val")) == sorted(texts)


def test_chosen_words_are_single_tokens_and_the_vocabulary_is_full():
    words = [f" zyx{i}w" for i in range(60)] + [" the", "17", "x", " 17"]
    encoding = train_bpe(word_counts(sentences(200), r" ?\p{N}{1,2}| ?\p{L}+\p{N}*\p{L}|\s|."), 380,
                         r" ?\p{N}{1,2}| ?\p{L}+\p{N}*\p{L}|\s|.", words)
    assert all(len(encoding.encode_ordinary(word)) == 1 for word in words)
    assert encoding.decode_tokens_bytes(encoding.encode_ordinary(" 1799")) == [b" 17", b"9", b"9"]
    assert encoding.n_vocab == 380
    with pytest.raises(UserError, match="bpe:320"):
        train_bpe({}, 300, words=[f" {chr(97 + i % 26)}word{i // 26}" for i in range(63)])
    with pytest.raises(UserError, match="' two words' cannot be one token"):
        train_bpe({}, 300, words=[" two words"])


def test_a_tokenizer_survives_its_file_and_damage_to_the_file_is_noticed(tmp_path):
    encoding = train_bpe(word_counts(sentences(50)), 300)
    packed = json.loads(json.dumps(pack_tokenizer(encoding)))
    again = unpack_tokenizer(packed)
    assert again.encode_ordinary("the fox 東京") == encoding.encode_ordinary("the fox 東京")
    assert again.eot_token == encoding.eot_token and pack_tokenizer(again) == packed
    for change in ({"ranks": packed["ranks"][:-1]}, {"pattern": "."}, {"id": "0"}, {"special": {}}, {"ranks": 3}):
        with pytest.raises(UserError, match="does not match its id"):
            unpack_tokenizer({**packed, **change})
    with pytest.raises(UserError, match="does not match its id"):
        unpack_tokenizer({"name": "bpe:300"})
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer.json is damaged"):
        load_tokenizer(str(tmp_path))


def test_without_gpt2s_tokenizer_the_error_names_both_ways_out(tmp_path, monkeypatch):
    def offline(name):
        raise ConnectionError
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    file = write_jsonl(tmp_path / "a.jsonl", sentences(30))
    with pytest.raises(UserError, match="(?s)TIKTOKEN_CACHE_DIR.*bpe:4096"):
        prepare(data.text_source([file]), str(tmp_path / "out"))
    with pytest.raises(UserError, match="'gpt3'.*gpt2.*bpe:N"):
        prepare(data.text_source([file]), str(tmp_path / "out"), "gpt3")


def test_another_folders_tokenizer_can_be_used(tmp_path):
    first = make(tmp_path, sentences(100))
    second = make(tmp_path, sentences(100, seed=1), "second", tokenizer=first)
    assert Tokens(first).tokenizer_id == Tokens(second).tokenizer_id == pack_tokenizer(load_tokenizer(second))["id"]
    write_json(os.path.join(second, "tokenizer.json"), pack_tokenizer(train_bpe({}, 257)))
    with pytest.raises(UserError, match="second.tokenizer.json is not the tokenizer with which the shards were made"):
        Tokens(second)


# Real text


def test_real_text_has_exactly_the_tokens_that_tiktoken_finds(shared, tmp_path):
    encoding = tiktoken.get_encoding("gpt2")
    openwebtext, fineweb = os.path.join(shared, "openwebtext_1000.jsonl"), os.path.join(shared, "fineweb_edu_1mb.txt")
    texts = [json.loads(line)["text"] for line in open(openwebtext, encoding="utf-8")]
    # The data's README says 1,054,998 for OpenWebText: with one separator between each two of the 1,000 documents.
    for file, count, whole in ((openwebtext, 1_054_998 - 999, texts), (fineweb, 217_888, None)):
        out = str(tmp_path / os.path.basename(file))
        prepare(data.text_source([file]), out, val_fraction=0)
        tokens = Tokens(out)
        bounds = tokens.document_bounds()
        assert len(tokens) - (len(bounds) - 1) == count
        assert tokens.end == 50256 and tokens.vocab_size == 50257 and tokens.shards[0].tokens.dtype == np.uint16
        whole = whole or [open(file, encoding="utf-8", newline="").read()]
        assert len(bounds) - 1 == len(whole)
        for text, a, b in zip(whole, bounds, bounds[1:]):
            assert tokens.read(a + 1, b).tolist() == encoding.encode_ordinary(text)


def test_gpt2s_tokenizer_makes_a_million_tokens_a_second(shared, tmp_path):
    """On two cores; by the processors' time and not the clock's, since the machine may have other things to do."""
    source = data.text_source([os.path.join(shared, "openwebtext_1000.jsonl")])
    tiktoken.get_encoding("gpt2")
    best = 0
    for attempt in range(3):
        start = time.process_time()
        prepare(source, str(tmp_path / str(attempt)))
        best = max(best, 2 * 1_053_999 / (time.process_time() - start))
    assert best > 1e6, f"{best:,.0f} tokens per second"


# Sources


def test_all_kinds_of_files_give_the_same_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet
    texts = sentences(60)
    write_jsonl(tmp_path / "a.jsonl", texts, "body")
    table = pyarrow.table({"id": range(60), "body": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    for name in ("a.jsonl", "a.parquet"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        for file in (name, f"{name}.gz"):
            pieces, _ = data.text_source([str(tmp_path / file)], "body").open(None)
            assert [piece.text for piece in pieces] == texts
    for i, text in enumerate(texts):
        (tmp_path / f"{i:03}.txt").write_bytes(text.encode())
    files = [str(tmp_path / "*.txt"), str(tmp_path / "000.txt")]  # a file that is named twice counts once
    pieces, tell = data.text_source(files).open(None)
    assert [piece.text for piece in pieces] == texts and tell() == 60


def test_a_long_text_is_cut_without_changing_it_or_its_tokens(tmp_path):
    rng = random.Random(3)
    gaps = [" ", " ", "  ", "\n", "\n\n", "\r\n", "\t", " \n "]
    text = "".join(rng.choice(WORDS) + rng.choice(gaps) for _ in range(40_000))
    path = tmp_path / "long.txt"
    path.write_bytes(text.encode())
    pieces = list(data.text_source([str(path)]).open(None)[0])
    assert "".join(piece.text for piece in pieces) == text and len(pieces) > 10
    assert [piece.continues for piece in pieces] == [False] + [True] * (len(pieces) - 1)
    encoding = train_bpe(word_counts([text]), 400)
    assert [t for piece in pieces for t in encode(encoding, piece.text).tolist()] == encoding.encode_ordinary(text)
    path.write_bytes("東".encode() * 1_500_000)  # nowhere to cut: still in parts, so that memory stays small
    pieces = list(data.text_source([str(path)]).open(None)[0])
    assert "".join(piece.text for piece in pieces) == "東" * 1_500_000 and len(pieces) > 1


def test_bad_files_are_named_with_the_remedy(tmp_path):
    def expect(message, name, raw, field="text"):
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(UserError, match=message):
            list(data.text_source([str(tmp_path / name)], field).open(None)[0])
    expect(r"empty.txt is empty: leave it out", "empty.txt", b"")
    expect(r"blank.jsonl holds no text: leave it out", "blank.jsonl", b"\n\n")
    expect(r"none.txt.gz holds no text", "none.txt.gz", gzip.compress(b""))
    expect(r"latin.txt is not UTF-8: .* 0xe9 at offset 40003. .*iconv", "latin.txt", b"a " * 20000 + b"caf\xe9 " * 9)
    expect(r"cut.txt is not UTF-8: .* 0xe6 at offset 3\.", "cut.txt", b"abc" + "東".encode()[:2])
    expect(r"latin.jsonl is not UTF-8: .* 0xe9 at offset 25\.", "latin.jsonl", b'{"text": "ok"}\n{"text": "\xe9"}\n')
    expect(r"b.jsonl, line 2, is not JSON", "b.jsonl", b'{"text": "ok"}\n{"text": \n')
    expect(r"c.jsonl, line 1, has no field 'text' \(its fields: body\): .*--field", "c.jsonl", b'{"body": "x"}\n')
    expect(r"d.jsonl, line 1, has int in field 'text'", "d.jsonl", b'{"text": 3}\n')
    expect(r"e.parquet is not a sound parquet file", "e.parquet", b"PAR1 no such thing")
    expect(r"f.txt.gz cannot be unpacked", "f.txt.gz", gzip.compress(b"hello " * 1000)[:-9])
    expect(r"g.txt.gz cannot be unpacked", "g.txt.gz", b"not gzip at all")
    expect(r"h.docx is of no known kind: .*\.txt", "h.docx", b"x")
    with pytest.raises(UserError, match=r"no file matches .*nothing\*"):
        data.text_source([str(tmp_path / "nothing*")])
    with pytest.raises(UserError, match="is a folder: name the files"):
        data.text_source([str(tmp_path)])


def test_half_characters_in_json_do_not_stop_a_run(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{i} half \\ud800 character"}}\n' for i in range(40)))
    prepare(data.text_source([str(tmp_path / "a.jsonl")]), str(tmp_path / "out"), "bpe:300", val_fraction=0.2)
    assert "half \N{REPLACEMENT CHARACTER} character" in documents(str(tmp_path / "out"), "train")[0]


# Splits and shards


def test_splits_keep_every_document_once_and_equal_ones_together(tmp_path):
    texts = sentences(400)
    folder = make(tmp_path, texts + texts[:100], shard_tokens=700)
    train, val = documents(folder, "train"), documents(folder, "val")
    assert sorted(train + val) == sorted(texts + texts[:100]) and not set(train) & set(val)
    assert 0.1 < len(val) / 500 < 0.3
    other = make(tmp_path, texts[::-1], "other")  # neither the order nor the shards change the choice
    assert set(documents(other, "val")) == set(val)


def test_no_validation_and_empty_splits(tmp_path):
    folder = make(tmp_path, sentences(20), val_fraction=0)
    assert len(documents(folder, "train")) == 20
    with pytest.raises(UserError, match="no val split: .*--val-fraction"):
        Tokens(folder, "val")
    with pytest.raises(UserError, match="none of 1 documents fell into the (train|val) split, at --val-fraction 0.5"):
        make(tmp_path, ["only one"], "one", val_fraction=0.5)
    with pytest.raises(UserError, match="one is not finished|one has no prepared data"):
        Tokens(str(tmp_path / "one"))


def test_shards_have_a_fixed_size_and_long_documents_span_them(tmp_path):
    texts = ["x " * 5000 + "end", *sentences(30)]
    folder = make(tmp_path, texts, shard_tokens=1000, val_fraction=0)
    shards = Tokens(folder).shards
    assert [len(shard.tokens) for shard in shards[:-1]] == [1000] * (len(shards) - 1) and len(shards) > 4
    assert documents(folder, "train") == texts
    exact = make(tmp_path, texts, "exact", shard_tokens=1000, val_fraction=0, tokens=2500)
    assert [len(shard.tokens) for shard in Tokens(exact).shards] == [1000, 1000, 500]
    assert np.array_equal(Tokens(exact).read(0, 2500), Tokens(folder).read(0, 2500))


def test_vocabularies_above_65536_take_four_bytes(tmp_path):
    ranks = {bytes([b]): b for b in range(256)} | {b"%d" % (10 ** 6 + i): 256 + i for i in range(70_000)}
    encoding = tiktoken.Encoding("wide", pat_str=r"\d+|.", mergeable_ranks=ranks, special_tokens={END: len(ranks)})
    writer = data.ShardWriter(str(tmp_path / "a.bin"), encoding, "0" * 32)
    writer.append(encode(encoding, "1069999x"))
    writer.finish()
    shard = data.open_shard(str(tmp_path / "a.bin"))
    assert shard.tokens.tolist() == [70_255, ord("x")] and shard.tokens.dtype == np.uint32 and shard.end == 70_256


def test_damaged_shards_are_recognised_and_named(tmp_path):
    folder = make(tmp_path, sentences(300), shard_tokens=2000)
    path = os.path.join(folder, "train_00001.bin")
    good = open(path, "rb").read()
    other = content(make(tmp_path, sentences(300, seed=9), "other", shard_tokens=2000))["train_00001.bin"]

    def flip(at):
        return good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :]

    version = bytearray(good)
    version[8] = 2
    bad = {"truncated": good[:-7], "added to": good + b"\0\0", "a shard of tokens": b"\x93NUMPY" + good[6:],
           "is not a shard": b"", "damaged header": good[:100], "damaged: its tokens": flip(5000),
           "format version 2": bytes(version), "other data": other, "missing": None}
    rng = random.Random(0)
    for message, raw in [*bad.items(), *(("train_00001.bin", flip(rng.randrange(len(good)))) for _ in range(40))]:
        if raw is None:
            os.remove(path)
        else:
            with open(path, "wb") as file:
                file.write(raw)
        with pytest.raises(UserError, match=f"(?s)train_00001.bin.*{message}|{message}") as caught:
            Tokens(folder)
        assert "train_00001.bin" in str(caught.value) and "again" in str(caught.value)
    with open(path, "wb") as file:
        file.write(good)
    Tokens(folder)
    with open(path, "r+b") as file:  # in place, after it was found good: the time of change gives it away
        file.seek(4096)
        file.write(bytes([good[4096] ^ 1]))
    os.utime(path, ns=(0, 12345))
    assert "checksum" in str(pytest.raises(UserError, Tokens, folder).value)
    result = command("check", folder)
    assert result.returncode == 1 and "train_00001.bin" in result.stderr and "Traceback" not in result.stderr


# Interruption

KILLER = """
import os, random, signal, sys
import datasets, pyarrow.parquet
import data

def bomb(function):
    def run(*arguments, **options):
        tick()
        result = function(*arguments, **options)
        tick()
        return result
    return run

def tick():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

os.replace, data.ShardWriter.append = bomb(os.replace), bomb(data.ShardWriter.append)
rng, kills = random.Random(0), 0
while True:
    left = rng.randrange(1, int(sys.argv[1])) if kills < 20 else -1
    child = os.fork()
    if child == 0:
        data.main(sys.argv[2:])
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    kills += 1
    try:
        sys.exit("a killed run looks finished: " + str(data.Tokens(sys.argv[4])))
    except data.UserError:
        pass
print(kills)
"""


def dataset(tmp_path, n):
    """A folder that `datasets` loads: three parquet files in small row groups."""
    import pyarrow
    import pyarrow.parquet
    folder = tmp_path / "set"
    folder.mkdir()
    texts = sentences(n) + [""]
    for part in range(3):
        table = pyarrow.table({"text": texts[part::3], "id": range(len(texts[part::3]))})
        pyarrow.parquet.write_table(table, folder / f"train-{part}.parquet", row_group_size=50)
    return str(folder), [text for part in range(3) for text in texts[part::3] if text]


def test_a_streamed_data_set_is_tokenised_completely_and_stops_at_the_budget(tmp_path):
    folder, texts = dataset(tmp_path, 400)
    prepare(data.hub_source(folder), str(tmp_path / "all"), "bpe:400", val_fraction=0.1, shard_tokens=3000)
    train, val = documents(str(tmp_path / "all"), "train"), documents(str(tmp_path / "all"), "val")
    assert sorted(train + val) == sorted(texts) and val
    some, tokenizer = str(tmp_path / "some"), str(tmp_path / "all")
    prepare(data.hub_source(folder), some, tokenizer, 5000, val_fraction=0.1, shard_tokens=3000)
    assert len(Tokens(some)) == 5000
    with pytest.raises(UserError, match="no field 'body'.*--field"):
        prepare(data.hub_source(folder, field="body"), str(tmp_path / "x"), "bpe:400")
    with pytest.raises(UserError, match="data set .*nowhere cannot be opened .*--dataset"):
        prepare(data.hub_source(str(tmp_path / "nowhere")), str(tmp_path / "y"), "bpe:400")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kind, fuse", [("stream", 400), ("file", 30)])
def test_a_killed_run_continues_to_the_same_bytes(tmp_path, kind, fuse):
    """SIGKILL at random moments, just before and after a write or a renaming, 20 times or until the run is through."""
    if kind == "stream":
        arguments = ["fineweb-edu", "--dataset", dataset(tmp_path, 800)[0]]
    else:  # one text in many parts, so that it matters where the part before one went
        (tmp_path / "long.txt").write_text("\n".join(sentences(3000, seed=5)), encoding="utf-8")
        arguments = ["text", str(tmp_path / "long.txt")]
    options = [*arguments[1:], "--tokenizer", "bpe:400", "--val-fraction", "0.3", "--shard-tokens", "5003"]
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    data.main([arguments[0], "--out", whole, *options])
    result = subprocess.run([sys.executable, "-c", KILLER, str(fuse), arguments[0], "--out", broken, *options],
                            cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and int(result.stdout) > 5, result.stderr
    assert content(broken) == content(whole) and len(Tokens(whole).shards) > 3


def test_positions_in_a_stream_lead_back_to_the_same_documents(tmp_path):
    folder, texts = dataset(tmp_path, 300)
    for size in (1, 777, 5000):  # chunks of one document, and of many
        source = data.hub_source(folder)
        chunks = list(data.chunked(*source.open(None), None, size))
        assert [piece.text for _, pieces in chunks for piece in pieces] == texts
        for start in {0, 1, len(chunks) // 3, len(chunks) - 1}:
            position = json.loads(json.dumps(chunks[start][0]))
            rest = [piece.text for piece in source.open(position)[0]]
            assert rest == [piece.text for _, pieces in chunks[start:] for piece in pieces]
            again = list(data.chunked(*source.open(position), position, size))
            assert [pieces for _, pieces in again] == [pieces for _, pieces in chunks[start:]]


def test_a_full_disk_keeps_finished_shards_and_the_run_continues(tmp_path, monkeypatch):
    texts = sentences(400)
    whole = make(tmp_path, texts, "whole", shard_tokens=1500)
    for place in ("append", "fsync"):
        calls = itertools.count()

        def full(function, limit, calls=calls):
            def run(*arguments):
                if next(calls) >= limit:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return function(*arguments)
            return run

        with monkeypatch.context() as patch:
            if place == "append":
                patch.setattr(data.ShardWriter, "append", full(data.ShardWriter.append, 150))
            else:
                patch.setattr(os, "fsync", full(os.fsync, 12))
            with pytest.raises(UserError, match="the disk is full .*make room, and the same command again continues"):
                make(tmp_path, texts, f"full_{place}", shard_tokens=1500)
        folder = str(tmp_path / f"full_{place}")
        assert not [name for name in os.listdir(folder) if name.endswith(".tmp")]
        assert "train_00000.bin" in os.listdir(folder)
        assert make(tmp_path, texts, f"full_{place}", shard_tokens=1500) == folder
        one, two = content(folder), content(whole)
        assert one.keys() == two.keys() and all(one[name] == two[name] for name in one if name != "state.json")


@pytest.mark.skipif(helpers.fcntl is None, reason="there are no file locks on this system")
def test_two_writers_to_one_folder(tmp_path):
    out = str(tmp_path / "data")
    with helpers.locked(out, wait=False):
        with pytest.raises(UserError, match=rf"another process \(pid {os.getpid()}\) is writing to .*data: let it"):
            make(tmp_path, sentences(30))
    with helpers.locked(out, wait=False):
        waiting = threading.Thread(target=make, args=(tmp_path, sentences(30)), kwargs={"wait": True})
        waiting.start()
        time.sleep(0.3)
        assert not os.path.exists(os.path.join(out, "state.json"))
    waiting.join(30)
    assert Tokens(out)


def test_a_folder_is_not_overwritten_by_other_settings(tmp_path, capsys):
    folder = make(tmp_path, sentences(100))
    before = content(folder)
    for change in ({"val_fraction": 0.1}, {"tokenizer": "bpe:300"}, {"tokens": 50}, {"shard_tokens": 77}):
        with pytest.raises(UserError, match=f"another {next(iter(change))}: choose another --out"):
            make(tmp_path, sentences(100), **change)
    with pytest.raises(UserError, match="another source"):
        make(tmp_path, sentences(101))
    make(tmp_path, sentences(100))
    assert "finished already" in capsys.readouterr().err and content(folder) == before


# Batches


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """A folder of several small shards, so that windows cross their borders."""
    return Tokens(make(tmp_path_factory.mktemp("stream"), sentences(500), shard_tokens=997))


def test_every_token_is_a_target_once_per_epoch(stream):
    T, B = 16, 8
    n = stream.count(T)
    everything = stream.read(0, len(stream)).astype(np.int64)
    assert n == (len(stream) - 1) // T and len(stream.shards) > 3
    rows = torch.cat([stream.batch(3, step, B, T) for step in range(-(-2 * n // B))])[: 2 * n].numpy()
    windows = np.lib.stride_tricks.sliding_window_view(everything, T + 1)[: n * T : T]
    for epoch in (rows[:n], rows[n:]):
        assert not np.array_equal(epoch, windows)
        assert sorted(map(bytes, epoch)) == sorted(map(bytes, windows))
    assert not np.array_equal(rows[:n], rows[n:])
    assert np.array_equal(np.sort(rows[:n, 1:], axis=None), np.sort(everything[1 : n * T + 1]))
    assert np.array_equal(stream.windows(range(n), T).numpy(), windows)


def test_a_batch_does_not_depend_on_ranks_or_accumulation(stream):
    for step in (0, 5, 1000):
        whole = stream.batch(1, step, 24, 32)
        assert whole.shape == (24, 33) and whole.dtype == torch.int64
        for ranks, micros in itertools.product((1, 2, 4), (1, 2, 3)):
            parts = [stream.batch(1, step, 24, 32, rank, ranks, micro, micros)
                     for rank in range(ranks) for micro in range(micros)]
            assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(stream.batch(1, 0, 24, 32), stream.batch(2, 0, 24, 32))
    assert torch.equal(Tokens(stream.folder).batch(1, 7, 24, 32), stream.batch(1, 7, 24, 32))
    with pytest.raises(UserError, match="24 windows .* 5 ranks and 2 accumulation steps: choose a multiple of 10"):
        stream.batch(1, 0, 24, 32, 0, 5, 0, 2)


def test_a_mixture_keeps_its_shares_and_every_folder_its_own_epochs(stream, tmp_path):
    a, b = stream.folder, make(tmp_path, [text.upper() for text in sentences(100)], "b", tokenizer=stream.folder)
    mixture = data.open_split(f"{a}:3,{b}:1", "train")
    rows = torch.cat([mixture.batch(5, step, 8, 16) for step in range(300)])
    parts = [Tokens(folder) for folder in (a, b)]
    own = [{tuple(row) for row in part.windows(range(part.count(16)), 16).tolist()} for part in parts]
    assert not own[0] & own[1] and mixture.count(16) == sum(part.count(16) for part in parts)
    of_b = torch.tensor([tuple(row) in own[1] for row in rows.tolist()])
    assert of_b.view(-1, 4).sum(1).eq(1).all()
    for part, chosen in zip(parts, (~of_b, of_b)):  # as if it were alone
        assert torch.equal(rows[chosen], torch.cat([part.batch(5, step, 1, 16) for step in range(int(chosen.sum()))]))
    ranked = [mixture.batch(5, 9, 8, 16, rank, 2, micro, 2) for rank in (0, 1) for micro in (0, 1)]
    assert torch.equal(torch.cat(ranked), mixture.batch(5, 9, 8, 16))
    assert mixture.identity() != data.open_split(f"{a}:1,{b}:1", "train").identity()


def test_a_setting_for_data_is_a_folder_or_a_mixture(stream, tmp_path, capsys):
    assert data.parse_mixture("data/web") == [("data/web", 1)] and data.parse_mixture("D:/x") == [("D:/x", 1)]
    assert data.parse_mixture("a:12, b/c:2") == [("a", 12), ("b/c", 2)] and data.parse_mixture("a:3") == [("a", 3)]
    (tmp_path / "odd,name:2").mkdir()
    assert data.parse_mixture(str(tmp_path / "odd,name:2")) == [(str(tmp_path / "odd,name:2"), 1)]
    for wrong in ("a,b", "a:1,b:0", "a:1,b:x", "a:1,", "a:1,:2"):
        with pytest.raises(UserError, match="is no folder with a weight. Write FOLDER:WEIGHT"):
            data.parse_mixture(wrong)
    val = data.open_split(f"{stream.folder}:3,{tmp_path}:1", "val")
    assert val.folder == stream.folder and val.split == "val"
    with pytest.raises(UserError, match="has no prepared data"):
        data.open_split(f"{stream.folder}:3,{tmp_path}:1", "train")
    other = make(tmp_path, ["zebra " * 50] * 40, "other", tokenizer="bpe:260", val_fraction=0)
    with pytest.raises(UserError, match="another tokenizer than .*: make it with --tokenizer"):
        data.open_split(f"{stream.folder}:3,{other}:1", "train")


def test_batches_are_the_same_on_every_machine():
    """The order is part of what a seed means: it must never change."""
    assert data.shuffled(np.arange(8), 1000, 7, 0).tolist() == [93, 248, 803, 471, 573, 918, 214, 754]
    assert data.shuffled(np.arange(4), 19_531_250, 7, 3).tolist() == [19415908, 1854889, 7319144, 1416480]


def test_shuffling_is_a_permutation_that_looks_random_and_costs_nothing():
    for n in (1, 2, 3, 10, 255, 256, 257, 5000, 65_537):
        order = data.shuffled(np.arange(n), n, 11, 2)
        assert np.array_equal(np.sort(order), np.arange(n))
    order = data.shuffled(np.arange(100_000), 100_000, 0, 0)
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.02
    assert abs((np.diff(order) > 0).mean() - 0.5) < 0.01
    many = np.array([data.shuffled(np.arange(6), 6, seed, 0) for seed in range(2000)])  # any number anywhere: 1 in 6
    assert all(abs((many == value).mean(0) - 1 / 6).max() < 0.04 for value in range(6))
    start = time.perf_counter()
    data.shuffled(np.arange(512), 20_000_000_000 // 1024, 1, 0)
    assert time.perf_counter() - start < 0.1


def test_small_data_and_wrong_vocabularies_are_answered(tmp_path):
    tokens = Tokens(make(tmp_path, sentences(20)))
    with pytest.raises(UserError, match=f"has {len(tokens):,} tokens in train, fewer than one window of 4,097: take a"):
        tokens.batch(0, 0, 1, 4096)
    assert tokens.batch(0, 3, 2, len(tokens) - 1).shape == (2, len(tokens))  # the one window there is
    data.check_vocabulary(tokens, tokens.vocab_size)
    with pytest.raises(UserError, match=f"vocab_size is 100: set vocab_size to {tokens.vocab_size}"):
        data.check_vocabulary(tokens, 100)
    with pytest.raises(IndexError):
        tokens.read(0, len(tokens) + 1)
    with pytest.raises(UserError, match="nowhere has no prepared data: make it with python data.py"):
        Tokens(str(tmp_path / "nowhere"))


def test_prefetch_keeps_order_raises_errors_in_place_and_stops_cleanly(stream):
    batches = list(data.prefetch(lambda step: stream.batch(0, step, 4, 16), range(20)))
    assert len(batches) == 20
    assert all(torch.equal(batch, stream.batch(0, step, 4, 16)) for step, batch in enumerate(batches))

    def fail(step):
        if step == 3:
            raise UserError("step three")
        return torch.tensor(step)

    seen = []
    with pytest.raises(UserError, match="step three"):
        for item in data.prefetch(fail, range(10)):
            seen.append(item.item())
    assert seen == [0, 1, 2]
    before, made = threading.active_count(), []
    running = data.prefetch(lambda step: made.append(step) or torch.tensor(step), itertools.count(), depth=2)
    assert next(running).item() == 0
    running.close()  # as when the loop that reads it is left
    assert threading.active_count() == before and len(made) < 8


def test_a_loader_does_not_hold_up_a_gpu(tmp_path):
    encoding = train_bpe({}, 257)
    folder = tmp_path / "big"
    folder.mkdir()
    writer = data.ShardWriter(str(folder / "train_00000.bin"), encoding, pack_tokenizer(encoding)["id"])
    writer.append(np.random.default_rng(0).integers(0, 256, 20_000_000))
    writer.finish()
    write_json(str(folder / "tokenizer.json"), pack_tokenizer(encoding))
    write_json(str(folder / "state.json"), {
        "settings": {}, "done": True, "shards": {"train": [["train_00000.bin", 20_000_000]], "val": []},
        "documents": {"train": 1, "val": 0}})
    tokens = Tokens(str(folder))
    times = []
    for step in range(5):
        start = time.perf_counter()
        tokens.batch(0, step, 512, 1024)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05, f"{min(times) * 1000:.1f} ms"  # 4 ms where it was written


# The toy corpus and the command line


def test_the_toy_corpus(tmp_path):
    toyworld = pytest.importorskip("toyworld")
    out = str(tmp_path / "toy")
    data.prepare_toy(out, 300_000)
    train, val, encoding = Tokens(out, "train"), Tokens(out, "val"), load_tokenizer(out)
    assert len(train) == 300_000 and 7_000 < len(val) < 13_000 and train.vocab_size <= 2048
    for word in toyworld.vocabulary():
        assert len(encoding.encode_ordinary(f" {word}")) == 1, word
    assert [encoding.decode([t]) for t in encoding.encode_ordinary(" 1732")] == [" 17", "32"]
    assert not set(documents(out, "train")) & set(documents(out, "val"))
    first = next(iter(toyworld.documents(0, 1))).text
    assert documents(out, "train")[0] == first
    again = str(tmp_path / "again")
    data.prepare_toy(again, 300_000)
    assert content(again) == content(out)


def test_the_command_line(tmp_path):
    text = write_jsonl(tmp_path / "a.jsonl", sentences(60))
    result = command("text", text, "--out", tmp_path / "out", "--tokenizer", "bpe:300", "--val-fraction", "0.2")
    assert result.returncode == 0, result.stderr
    info = command("info", tmp_path / "out")
    assert (info.returncode == 0
            and all(word in info.stdout for word in ("documents", "tokenizer bpe:300", "; finished")))
    assert command("check", tmp_path / "out").stdout.endswith("2 shards are as they were written\n")
    wrong = command("text", tmp_path / "b.jsonl", "--out", tmp_path / "out2")
    assert wrong.returncode == 1
    assert wrong.stderr == f"data.py: no file matches {tmp_path / 'b.jsonl'}: check the name and the folder\n"
    help = command("--help").stdout
    assert all(word in help for word in ("toy", "text", "fineweb-edu", "info", "check", "examples:", "CACHE_DIR"))
