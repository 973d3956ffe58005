"""Concepts to steer towards, with texts that have them and texts that have not; and prefixes to go on from.

    concepts = toy_concepts(["sea", "war"])                    of the toy world, whose topics are known
    concepts = text_concepts(run, "concepts.txt")              of English text: from the data that a run was trained on

concepts.txt has a hundred, with a few words each; any file like it will do, or a .jsonl with texts of your own.
"""
import itertools
import re
from typing import NamedTuple

import toyworld
from helpers import UserError, read_lines, say
from sample import check_concept, read_text
from sources import open_tokens
from steer import text_of, toy_texts
from tokenizer import END

PREFIX_WORDS = 8     # of English text
PREFIX_SEED = 3      # of the toy documents that texts go on from: vectors are made from those of seed 2
SCANNED = 5_000_000  # training tokens in which texts with a concept are looked for


class Concept(NamedTuple):
    name: str
    words: tuple     # that speak of it; () if not known
    positive: list   # texts with it
    negative: list   # texts without it


def toy_concepts(names):
    for name in names:
        check_concept(name)
    if len(set(names)) < len(names):
        raise UserError(f"a concept is named twice in {','.join(names)}")
    return [Concept(name, toyworld.concept_words(name), *toy_texts(name)) for name in names]


def read_concepts(path):
    """[(name, words, texts)] of a file with lines CONCEPT: WORD WORD ..., or of a .jsonl with concept, and words or
    positive, a list of texts."""
    found = []
    if path.endswith(".jsonl"):
        read_text(path)  # or a sentence
        rows, lines = read_lines(path)
        if len(rows) < lines or not lines:
            raise UserError(f"{path} must hold one JSON object a line, and {lines - len(rows)} of {lines} are none")
        for row in rows:
            words, texts = row.get("words", []), row.get("positive", [])
            if not isinstance(row.get("concept"), str) or not (words or texts) or not all(
                    isinstance(part, list) and all(isinstance(item, str) and item.strip() for item in part)
                    for part in (words, texts)):
                raise UserError(f"{path}: a concept is {{\"concept\": NAME, \"words\": [...]}}, or has \"positive\", a "
                                f"list of texts, but one is {str(row)[:80]}")
            found.append((row["concept"], tuple(words), texts))
    else:
        for line in read_text(path).splitlines():
            name, colon, words = line.partition(":")
            if line.strip() and not line.startswith("#"):
                if not colon or not name.strip() or not words.split():
                    raise UserError(f"{path}: a line is CONCEPT: WORD WORD ..., but one is {line[:80]!r}")
                found.append((name.strip(), tuple(words.split()), []))
    for word in (word for _, words, _ in found for word in words):
        if not re.fullmatch(r"\w+", word):
            raise UserError(f"{path}: words are compared one by one, so {word!r} is never found: give single words")
    names = [name for name, _, _ in found]
    if not names or len(set(names)) < len(names):
        raise UserError(f"{path} has no concept, or two of one name: each needs a name of its own")
    return found


def text_concepts(run, path, n=64, length=48, fewest=8):
    """The concepts of a file, with texts: those given, else pieces of the training data that have one of the words, up
    to n; and n others that have no word of any. One that has fewer than `fewest` is left out, and named."""
    listed, tokens = read_concepts(path), open_tokens(run, "train", verify=False)
    tokens = getattr(tokens, "parts", [tokens])[0]  # of a mixture the first folder
    by_word = {}
    for name, words, _ in listed:
        for word in words:
            by_word.setdefault(word.lower(), set()).add(name)
    found, plain = {name: [] for name, _, _ in listed}, []
    for start in range(0, min(len(tokens), SCANNED) - length, length):
        text = text_of(run.encoding, tokens.read(start, start + length).tolist()).partition(END)[0]
        there = set().union(*(by_word.get(word, ()) for word in re.findall(r"\w+", text.lower())))
        for name in there:
            if len(found[name]) < n:
                found[name].append(text)
        if not there and text.strip() and len(plain) < 4 * n:
            plain.append(text)
        if len(plain) == 4 * n and all(len(texts) == n for texts in found.values()):
            break
    concepts = [Concept(name, words, given or found[name], plain[: max(n, len(given))])
                for name, words, given in listed if len(given or found[name]) >= fewest]
    if len(concepts) < len(listed):
        out = [name for name, _, given in listed if len(given or found[name]) < fewest]
        say(f"left out, for fewer than {fewest} texts of the training data have a word of them: {', '.join(out)}")
    if not concepts or not plain:
        raise UserError(f"the training data of {run.path} has too few texts with a concept of {path}, or without: give "
                        "texts of your own, in a .jsonl with concept and positive")
    return concepts


def toy_prefixes(count, words, concepts):
    """Beginnings of documents that are about none of the concepts, all different: the words before the first that tells
    what they are about, or so many words."""
    known, found = {concept.name for concept in concepts}, {}
    telling = {word for topic in toyworld.TOPICS for word in toyworld.concept_words(topic)}
    for text, labels in toyworld.documents(PREFIX_SEED, 200 * count):
        if known.isdisjoint(labels["topics"]):
            listed = text.split()
            end = words or next(place for place, word in enumerate(listed) if word.strip(".,") in telling)
            found[" ".join(listed[:end])] = True
            if len(found) == count:
                return list(found)
    raise UserError(f"{200 * count:,} documents about none of the concepts have {len(found)} different beginnings, but "
                    f"{count} prefixes are wanted: give fewer concepts or --prefix-count, or more --prefix-words")


def text_prefixes(run, path, count, words):
    """The first words of a file's lines, of which the last column counts; without a file, of validation documents."""
    if path is None:
        tokens = open_tokens(run, "val")
        texts = (text_of(run.encoding, tokens.read(start, min(end, start + 16 * words)).tolist())
                 for start, end in itertools.pairwise(tokens.document_bounds()))
    else:
        texts = (line.split("\t")[-1] for line in read_text(path).splitlines())
    parts = (text.replace(END, " ").split()[:words] for text in texts)
    found = list(dict.fromkeys(" ".join(part) for part in parts if len(part) == words))
    if len(found) < count:
        raise UserError(f"{path or run.config.data} has {len(found)} different texts of at least {words} words, but "
                        f"{count} prefixes are wanted: ask for fewer with --prefix-count")
    return found[:: len(found) // count][:count]  # over all of them: a file may be sorted
