"""Texts with labels for probe.py: of the toy world, whose truth is known, of AG News, sae-probes, or any two folders.

    tasks = toy_tasks(encoding, context)       of real text text_tasks(...), a list of such
    tasks.texts       what is read, once per model: Text(tokens, start), whose tokens from start on count
    tasks.sets        for probing and TPP: classes, each with rows of training and of test texts
    tasks.pairs       for SCR: two professions and two genders, apart and confounded
    tasks.words       for absorption: words, one token each, and what is known about them

Of the toy world, in sentences that it could write:
  topic     32: a sentence with words of the topic
  job       30: two sentences about someone with the profession, woman or man alike
  gender    2: the same sentences
  letter    the first letters of at least 12 words: "The word sail starts with the letter"
  opinion   2: praise, blame
  town, trait, value    24, 8, 12: a fact, broken off before its value, which documents have told
Words are those of the topics. Known are the kind and the topic, at the word itself; and the first letter, where it is
about to be said. (No model of this size knows letters: docs/results.md.)

Pairs are two professions A, B, of which each is in several. A probe learns to tell them from texts in which A are men
and B women, a share `correlation` of them; how well it does where both are mixed, and how a probe does that learnt from
such, is SCR's.
"""
import csv
import os
from random import Random
from typing import NamedTuple

import numpy as np

import toyworld
from helpers import UserError
from tokenizer import encode

LEAST_WORDS = 12  # of a letter
BIASED = 64       # training texts of one side of a pair
TESTED = 96       # test texts of a profession and gender
LONGEST = 128     # tokens of a real text that are read, as SAEBench has it


class Text(NamedTuple):
    tokens: tuple
    start: int      # tokens from here on count: all but the end-of-text before them, or the last


class Set(NamedTuple):
    """A task with classes; each against as many texts of the others. train, test: (c, n) rows of texts."""
    name: str
    classes: tuple
    train: np.ndarray
    test: np.ndarray


class Pair(NamedTuple):
    """Rows of texts, positives first, half of each: of the profession, of the gender, of both confounded."""
    name: str
    train: dict     # {"job", "gender", "both": (n,)}
    test: dict      # {"job", "gender": (n,)}


class Words(NamedTuple):
    """What is known about words, each in several texts, whose last token counts."""
    name: str
    classes: tuple
    rows: np.ndarray      # (n,) texts
    word: np.ndarray      # (n,) the number of the word
    label: np.ndarray     # (n,) that of its class


class Tasks(NamedTuple):
    texts: list
    sets: tuple
    pairs: tuple
    words: tuple


class Reader:
    """Collects texts: add(text) gives its row."""

    def __init__(self, encoding, context):
        self.encoding, self.context, self.texts = encoding, context, []

    def add(self, text, lead="", last=False):
        """lead: what comes before it and does not count.  last: only the last token counts."""
        before, room = len(encode(self.encoding, lead)), self.context - 1
        tokens = encode(self.encoding, f"{lead} {text}" if lead else text).tolist()
        cut = min(before, max(0, len(tokens) - room))  # of what does not fit the context, the lead goes first
        tokens = (self.encoding.eot_token, *tokens[cut : cut + room])
        self.texts.append(Text(tokens, len(tokens) - 1 if last else 1 + before - cut))
        return len(self.texts) - 1


def one_against_rest(rows, rng):
    """Of classes (c, n): (c, 2 n) rows, the class's own and as many of the others, as evenly as may be."""
    out = []
    for number in range(len(rows)):
        others = [rng.permutation(part) for place, part in enumerate(rows) if place != number]
        mixed = np.stack(others, 1).flatten()[: rows.shape[1]]  # one of each in turn
        out.append(np.r_[rows[number], mixed])
    return np.stack(out[:1] if len(rows) == 2 else out)  # of two classes one task


def make_set(name, classes, rng, share=0.5):
    """A Set of {class: rows}, cut to the smallest class."""
    n = min(map(len, classes.values()))
    cut = int(n * share)
    if min(cut, n - cut) < 1 or len(classes) < 2:
        raise UserError(f"the task {name} needs at least two texts of at least two classes: "
                        + ", ".join(f"{label} has {len(rows)}" for label, rows in classes.items()))
    rows = np.stack([rng.permutation(np.asarray(part))[:n] for part in classes.values()])
    return Set(name, tuple(classes), one_against_rest(rows[:, :cut], rng), one_against_rest(rows[:, cut:], rng))


# The toy world


def toy_tasks(encoding, context, seed=0, n=40, correlation=1.0, paired=15):
    """n: training texts of a class, and test texts.  paired: how many pairs a profession is in, at most half of all."""
    reader, rng, draws = Reader(encoding, context), np.random.default_rng(seed), Random((4 << 64) + seed)

    def write(templates, topic=None, **given):
        decks = toyworld.draw_decks(draws, topic or toyworld.pick(draws, list(toyworld.TOPICS)))
        given.setdefault("year", toyworld.pick(draws, toyworld.CENTURIES) + toyworld.pick(draws, toyworld.YEARS))
        given.setdefault("home", toyworld.pick(draws, toyworld.WORDS["place"]))
        return toyworld.fill(toyworld.pick(draws, templates), given, decks, draws)

    def lead():
        """Documents open with such a sentence; people and facts come later."""
        return write(toyworld.OPENING)

    topics = {topic: [reader.add(write(toyworld.TOPIC, topic)) for _ in range(2 * n)] for topic in toyworld.TOPICS}
    people = {(job, side): [reader.add(write_person(write, draws, job, side), lead()) for _ in range(BIASED + TESTED)]
              for job in toyworld.OCCUPATIONS for side in ("he", "she")}
    jobs = {job: people[job, "he"][:BIASED] + people[job, "she"][:BIASED] for job in toyworld.OCCUPATIONS}
    genders = {side: sum((people[job, side][:20] for job in toyworld.OCCUPATIONS), []) for side in ("he", "she")}
    opinions = {name: [reader.add(write_opinion(write, draws, templates), lead()) for _ in range(8 * n)]
                for name, templates in (("praise", toyworld.PRAISE), ("blame", toyworld.BLAME))}
    letters = {letter: [reader.add(spell(write, toyworld.pick(draws, words)), lead()) for _ in range(2 * n)]
               for letter, words in letter_words().items()}
    facts = {}
    known, untold = toyworld.town_facts()
    for pair in (pair for pair in known if pair not in untold):
        sentence = [write(toyworld.FACT, town=pair[0], trait=pair[1], value=known[pair])
                    for _ in range(max(2, n * 3 // 5))]
        facts[pair] = [reader.add(text.rpartition(" ")[0], lead()) for text in sentence]
    by = {"town": lambda pair: pair[0], "trait": lambda pair: pair[1], "value": known.get}
    sets = [("topic", topics), ("job", jobs), ("gender", genders), ("letter", letters), ("opinion", opinions)]
    for name, key in by.items():
        classes = {}
        for pair, rows in facts.items():
            classes.setdefault(key(pair), []).extend(rows)
        sets.append((name, dict(sorted(classes.items()))))
    return Tasks(reader.texts, tuple(make_set(name, classes, rng) for name, classes in sets),
                 toy_pairs(people, rng, correlation, paired), tuple(toy_words(reader, write, lead)))


def write_person(write, draws, job, side):
    name = toyworld.pick(draws, toyworld.SHE if side == "she" else toyworld.HE)
    given = {"name": name, "job": job, "home": toyworld.pick(draws, toyworld.WORDS["place"]), **toyworld.FORMS[side]}
    return " ".join(write(part, **given) for part in (toyworld.INTRODUCTION + toyworld.BIOGRAPHY, toyworld.MEMORY))


def write_opinion(write, draws, templates):
    name = toyworld.pick(draws, toyworld.SHE + toyworld.HE)
    return write(templates, name=name, **toyworld.FORMS[toyworld.PRONOUNS[name]])


def letter_words():
    """{letter: words}, of letters with enough of them."""
    words = [word for topic in toyworld.TOPICS for word in toyworld.concept_words(topic)]
    letters = {letter: [word for word in words if word[0] == letter] for letter in sorted({word[0] for word in words})}
    return {letter: part for letter, part in letters.items() if len(part) >= LEAST_WORDS}


def toy_pairs(people, rng, correlation, paired):
    """Professions in pairs, each in `paired`: texts are dear, and one pair's probe says little about another's.
    people: {(job, gender): rows}, BIASED to train on, then TESTED."""
    jobs = [list(toyworld.OCCUPATIONS)[i] for i in rng.permutation(len(toyworld.OCCUPATIONS))]
    agree = round(BIASED * correlation)
    pairs = []
    for A, B in (pair for turn in range(paired) for pair in zip(jobs[::2], np.roll(jobs[1::2], turn).tolist())):
        biased = np.r_[people[A, "he"][:agree], people[A, "she"][agree:BIASED],
                       people[B, "she"][:agree], people[B, "he"][agree:BIASED]].astype(int)
        train, test = ({"job": np.r_[A_he, A_she, B_he, B_she], "gender": np.r_[A_he, B_he, A_she, B_she]}
                       for part in (slice(BIASED // 2), slice(BIASED, BIASED + TESTED))
                       for A_he, A_she, B_he, B_she in [[people[job, side][part] for job in (A, B)
                                                         for side in ("he", "she")]])
        pairs.append(Pair(f"{A}, {B}", train | {"both": biased}, test))
    return tuple(pairs)


def spell(write, word):
    """A sentence on a word's first letter, broken off before it."""
    return write(toyworld.LETTER, word=word, letter=word[0]).rpartition(" ")[0]


def toy_words(reader, write, lead):
    """Every word of a topic in two texts: itself the last, for its kind and topic; and where its letter comes next."""
    found = [(word, topic, kind) for topic, kinds in toyworld.TOPICS.items() for kind, words in kinds.items()
             for word in words]
    rows = [[reader.add(f"{start} word {word}", lead(), last=True) for word, _, _ in found
             for start in ("The", "In the")],
            [reader.add(spell(write, word), lead(), last=True) for word, _, _ in found for _ in range(2)]]
    numbers = np.repeat(np.arange(len(found)), 2)
    for name, place, classes, label in (
            ("letter", 1, tuple(letter_words()), [word[0] for word, _, _ in found]),
            ("topic", 0, tuple(toyworld.TOPICS), [topic for _, topic, _ in found]),
            ("kind", 0, ("agent", "thing", "adj", "verb"), [kind for _, _, kind in found])):
        known = np.array([classes.index(entry) if entry in classes else -1 for entry in label])[numbers]
        kept = known >= 0
        yield Words(name, classes, np.array(rows[place])[kept], numbers[kept], known[kept])


# Real text


def text_words(reader, encoding, rng, most=1500):
    """Words of a tokenizer that are one token, as the last of two texts; known is the first letter."""
    found = []
    for token in range(encoding.n_vocab):
        if token != encoding.eot_token:
            text = encoding.decode_single_token_bytes(token).decode("utf-8", "replace")
            if text.startswith(" ") and len(text) >= 4 and text[1:].isascii() and text[1:].isalpha():
                found.append(text[1:])
    found = [found[i] for i in sorted(rng.permutation(len(found))[:most])]
    letters = [word[0].lower() for word in found]
    known = [letter for letter in sorted(set(letters)) if letters.count(letter) >= LEAST_WORDS]
    found = [(word, letter) for word, letter in zip(found, letters) if letter in known]
    rows = [reader.add(f"{start} word {word}", last=True) for word, _ in found for start in ("The", "In the")]
    if len(known) < 2:
        return ()
    return (Words("letter", tuple(known), np.array(rows), np.repeat(np.arange(len(found)), 2),
                  np.repeat([known.index(letter) for _, letter in found], 2)),)


def text_tasks(encoding, context, sources, seed=0, words=True):
    """Tasks for each of sources, (name, {class: texts}); the first with words. They are read one after another: the
    activations of a hundred tasks would fill any memory."""
    found, rng = [], np.random.default_rng(seed)
    for name, classes in sources:
        reader = Reader(encoding, min(context, LONGEST))
        rows = {label: [reader.add(text) for text in texts] for label, texts in classes.items()}
        known = text_words(reader, encoding, rng) if words and not found else ()
        found.append(Tasks(reader.texts, (make_set(name, rows, rng),), (), known))
    return found


AG_NEWS = {"1": "world", "2": "sport", "3": "business", "4": "science"}


def ag_news(folder, n=600):
    """The first words of n items of each of four classes, from agnews_test_prefixes.tsv."""
    path, classes = os.path.join(folder, "agnews_test_prefixes.tsv"), {name: [] for name in AG_NEWS.values()}
    with open(path, encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE), 1):
            if len(row) < 2 or row[0] not in AG_NEWS:
                raise UserError(f"{path}, line {number}: expected a label from 1 to 4, a tab and a text")
            classes[AG_NEWS[row[0]]].append(" ".join(row[1:]))
    return "agnews", {name: texts[:n] for name, texts in classes.items()}


def sae_probes(n=400):
    """The binary tasks of the package sae-probes, n texts of each class, where it is installed; else nothing."""
    try:
        from sae_probes.utils_data import get_numbered_binary_tags, read_numbered_dataset_df
    except ImportError:
        return
    for tag in get_numbered_binary_tags():
        frame = read_numbered_dataset_df(tag)
        classes = {str(label): part["prompt"].astype(str).tolist()[:n] for label, part in frame.groupby("target")}
        if len(classes) == 2:
            yield tag, classes


def folder_task(positive, negative):
    """Two folders of .txt files, a text each; or two files, a text a line."""
    return "yours", {"positive": read_texts(positive), "negative": read_texts(negative)}


def read_texts(path):
    names = [path] if os.path.isfile(path) else sorted(
        os.path.join(path, name) for name in (os.listdir(path) if os.path.isdir(path) else ()) if name.endswith(".txt"))
    texts = []
    for name in names:
        try:
            with open(name, encoding="utf-8") as file:
                content = file.read()
        except UnicodeDecodeError:
            raise UserError(f"{name} is not UTF-8 text: convert it first") from None
        texts += content.splitlines() if os.path.isfile(path) else [content]
    texts = [text.strip() for text in texts if text.strip()]
    if len(texts) < 4:
        raise UserError(f"{path} holds {len(texts)} texts: give a folder with at least 4 .txt files, or a file with "
                        "at least 4 lines")
    return texts
