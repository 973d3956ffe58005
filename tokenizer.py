"""Tokenizers: GPT-2's, or a byte-level BPE trained here; always a tiktoken.Encoding.

    encoding = train_bpe(word_counts(texts), 4096)       256 bytes, merges, and the end-of-text token: 4096 entries
    encode(encoding, text)                               an array of token ids

Training starts from bytes and makes the most frequent pair of neighbours a token, again and again; ties go to the lower
bytes, so that the same text gives the same tokenizer everywhere. Any text round-trips, since every byte is a token. A
tokenizer is kept as JSON, beside the shards made with it and in checkpoints, with a hash of its content as its id.
"""
import base64
import collections
import hashlib
import heapq
import json
import os

import regex  # comes with tiktoken, whose patterns need it
import tiktoken

from helpers import UserError, read_json

END = "<|endoftext|>"
RESTORE = "Restore it from a copy, or prepare the data again in a new folder"
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""


def well_formed(text):
    """The text with half characters, which JSON can hold and UTF-8 cannot, replaced as tiktoken does."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def encode(encoding, text):
    """encode_ordinary without a Python list in between: what looks like a special token in the text is plain text."""
    return encoding.encode_to_numpy(well_formed(text), disallowed_special=())


def word_counts(texts, pattern=GPT2_PATTERN, limit=float("inf")):
    """How often each word that the pattern finds occurs in about the first `limit` characters of the texts."""
    counts, find = collections.Counter(), regex.compile(pattern).findall
    for text in texts:
        counts.update(find(well_formed(text)))
        limit -= len(text)
        if limit <= 0:
            break
    return counts


def merges(counts):
    """The tokens of a BPE of counted words, in the order in which they are learnt, down to pairs that occur once.

    When a pair is merged, only the words that contain it are counted anew. A changed count goes on the heap again, and
    what is out of date there is skipped.
    """
    spell = [bytes([b]) for b in range(256)]
    ids = {token: number for number, token in enumerate(spell)}
    counts = sorted(counts.items())
    words = [list(word.encode()) for word, _ in counts]
    counts = [count for _, count in counts]
    total, where = collections.Counter(), collections.defaultdict(set)  # of a pair: its count, the words that have it
    for number, word in enumerate(words):
        for pair in zip(word, word[1:]):
            total[pair] += counts[number]
            where[pair].add(number)
    heap = [(-count, spell[a], spell[b], a, b) for (a, b), count in total.items()]
    heapq.heapify(heap)
    while heap:
        count, left, right, a, b = heapq.heappop(heap)
        if -count != total[a, b]:
            continue
        if count > -2:
            return
        if left + right not in ids:  # else it was spelled with other parts before, and is no new entry
            ids[left + right] = len(spell)
            spell.append(left + right)
            yield left + right
        new, changed = ids[left + right], set()
        for number in where.pop((a, b)):
            for pair, change in merge(words[number], a, b, new):
                total[pair] += change * counts[number]
                changed.add(pair)
                if change > 0:
                    where[pair].add(number)
        for a, b in changed:
            if total[a, b]:
                heapq.heappush(heap, (-total[a, b], spell[a], spell[b], a, b))


def merge(word, a, b, new):
    """Replace every a that a b follows by one new token, in place; a list of the pairs that went (-1) and came (+1)."""
    changes, at = [], 0
    while at + 1 < len(word):
        if word[at] == a and word[at + 1] == b:
            changes.append(((a, b), -1))
            if at:
                changes += [((word[at - 1], a), -1), ((word[at - 1], new), 1)]
            if at + 2 < len(word):
                changes += [((b, word[at + 2]), -1), ((new, word[at + 2]), 1)]
            word[at : at + 2] = [new]
        at += 1
    return changes


def train_bpe(counts, size, pattern=GPT2_PATTERN, words=()):
    """A tokenizer of at most `size` entries from the counts of the words that the pattern finds.

    Each of `words` is one token whatever its count: tiktoken looks up a whole word before it merges pairs.
    """
    words = [word.encode() for word in dict.fromkeys(words)]
    room = size - 257 - sum(len(word) > 1 for word in words)
    if room < 0:
        raise UserError(f"a tokenizer of {size} entries cannot hold 256 bytes, {END} and {len(words)} whole words: it "
                        f"needs at least {size - room} entries, that is bpe:{size - room}")
    ranks = {bytes([b]): b for b in range(256)}
    for token in merges({word: count for word, count in counts.items() if word.encode() not in words}):
        room -= token not in words
        if room < 0:
            break
        ranks[token] = len(ranks)
    for word in words:
        ranks.setdefault(word, len(ranks))
    encoding = tiktoken.Encoding(f"bpe:{size}", pat_str=pattern, mergeable_ranks=ranks,
                                 special_tokens={END: len(ranks)})
    for word in words:
        if len(encode(encoding, word.decode())) != 1:
            raise UserError(f"the word {word.decode()!r} cannot be one token: the pattern {pattern} cuts it")
    return encoding


def gpt2():
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever the network makes of it
        raise UserError(f"GPT-2's tokenizer could not be downloaded ({type(error).__name__}). Two ways out: set "
                        "TIKTOKEN_CACHE_DIR to a folder in which tiktoken has cached it on another machine, or train "
                        "one on your own text with --tokenizer bpe:4096") from error


def pack_tokenizer(encoding):
    """A tokenizer as plain JSON. GPT-2's goes by its name, with the id to know it by."""
    ranks = sorted(encoding._mergeable_ranks, key=encoding._mergeable_ranks.get)
    content = {"pattern": encoding._pat_str, "special": encoding._special_tokens,
               "ranks": [base64.b64encode(token).decode() for token in ranks]}
    id = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
    return {"name": encoding.name, "id": id, **({} if encoding.name == "gpt2" else content)}


def unpack_tokenizer(packed, path="this tokenizer"):
    """The tiktoken.Encoding that pack_tokenizer packed, checked against its id."""
    if packed.get("name") == "gpt2":
        encoding = gpt2()
    else:
        try:
            ranks = {base64.b64decode(token): rank for rank, token in enumerate(packed["ranks"])}
            encoding = tiktoken.Encoding(packed["name"], pat_str=packed["pattern"], mergeable_ranks=ranks,
                                         special_tokens=packed["special"])
        except Exception:  # whatever tiktoken makes of it
            encoding = None
    if encoding is None or pack_tokenizer(encoding)["id"] != packed.get("id"):
        raise UserError(f"{path} is damaged, or not ours: its content does not match its id. "
                        f"{RESTORE}")
    return encoding


def load_tokenizer(folder):
    """The tiktoken.Encoding with which the shards of a folder were made."""
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.exists(path):
        raise UserError(f"{path} is missing: {folder} is no folder that data.py has made")
    return unpack_tokenizer(read_json(path, RESTORE), path)


def make_tokenizer(spec, texts, limit, pattern=GPT2_PATTERN, words=()):
    """The tokenizer that a user names: gpt2, bpe:N trained on texts() up to a limit, or a folder that has one."""
    kind, _, size = spec.partition(":")
    if spec == "gpt2":
        return gpt2()
    if kind == "bpe" and size.isdecimal() and len(size) < 10:
        return train_bpe(word_counts(texts(), pattern, limit), int(size), pattern, words)
    if os.path.isdir(spec):
        return load_tokenizer(spec)
    raise UserError(f"there is no tokenizer {spec!r}: choose gpt2, or bpe:N for one of N entries (bpe:4096), "
                    "or a folder that data.py has made")
