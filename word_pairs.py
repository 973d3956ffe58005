"""Pairs of prompts for models of English text: indirect objects, pronouns, spans of years, from lists of words.

    pairs, unknown = text_pairs("ioi", folder, encoding, count=200, seed=0)

The folder has circuits/ioi_names.json, circuits/winogender_occupations.tsv and circuits/greater_than_nouns.txt. A name,
occupation or noun that is not one token with its space is left out; `unknown` says how many.
"""
import json
import os
from random import Random

from helpers import UserError
from toyworld import Pair

PLACES = "store park market library office museum hotel river station school hospital restaurant".split()
OBJECTS = "drink book key basket map lamp bag box gift card phone ring".split()
SAYINGS = ("said that", "thought that", "was sure that", "left early because", "was late because", "was tired because")


def read_lines(folder, name):
    path = os.path.join(folder, "circuits", name)
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): --data DIR is the folder that has circuits/{name}") from None


def names(folder):
    text = "\n".join(read_lines(folder, "ioi_names.json"))
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise UserError(f"{folder}/circuits/ioi_names.json must be a list of names")
    return found


def occupations(folder):
    """{occupation: share of women}, by the labour statistics of the list."""
    head, *rows = [line.split("\t") for line in read_lines(folder, "winogender_occupations.tsv") if line.strip()]
    try:
        column = head.index("bls_pct_female")
        return {row[0]: float(row[column]) / 100 for row in rows}
    except (ValueError, IndexError):
        raise UserError(f"{folder}/circuits/winogender_occupations.tsv must have the columns occupation and "
                        "bls_pct_female, with tabs between") from None


def text_pairs(kind, folder, encoding, count, seed):
    rng = Random(seed)
    unknown = set()

    def known(words):
        """Those that are one token after a space."""
        found = []
        for word in words:
            if len(encoding.encode_ordinary(" " + word)) == 1:
                found.append(word)
            else:
                unknown.add(word)
        return found

    pairs = []
    if kind == "ioi":
        people = known(names(folder))
        need(people, 3, "names", folder)
        for _ in range(count):
            receiver, giver, other = rng.sample(people, 3)
            place, thing, first = rng.choice(PLACES), rng.choice(OBJECTS), rng.random() < 0.5
            source, target = (f"When {' and '.join((one, giver) if first else (giver, one))} went to the {place}, "
                              f"{giver} gave a {thing} to" for one in (receiver, other))
            pairs.append(Pair(source, target, (" " + receiver,), (" " + other,), (" " + giver,)))
    elif kind == "pronoun":
        shares = occupations(folder)
        jobs = known(shares)
        women, men = ([job for job in jobs if test(shares[job])] for test in (lambda x: x >= 0.7, lambda x: x <= 0.3))
        need(women, 1, "occupations of women", folder)
        need(men, 1, "occupations of men", folder)
        for _ in range(count):
            she, he, saying = rng.choice(women), rng.choice(men), rng.choice(SAYINGS)
            one, two = (f"The {job} {saying}" for job in (she, he))
            pair = Pair(one, two, (" she",), (" he",), ())
            pairs.append(pair if rng.random() < 0.5 else Pair(two, one, pair.after, pair.before, ()))
    else:
        nouns = known(read_lines(folder, "greater_than_nouns.txt"))
        need(nouns, 1, "nouns", folder)
        for _ in range(count):
            noun, early = rng.choice(nouns), rng.randrange(2, 62)
            late = early + 1 + int((99 - early) * rng.uniform(0.7, 0.82))
            one, two = (f"The {noun} lasted from the year 17{year:02} to the year 17" for year in (early, late))
            low, high = (tuple(f"{year:02}" for year in part) for part in (range(early + 1, late + 1),
                                                                           range(late + 1, 100)))
            pairs.append(Pair(one, two, low, high, ()) if rng.random() < 0.5 else Pair(two, one, high, low, ()))
    return pairs, len(unknown)


def need(words, least, what, folder):
    if len(words) < least:
        raise UserError(f"of the {what} in {folder}/circuits only {len(words)} are single tokens of this model's "
                        f"tokenizer, and {least} are needed: this task is for models with GPT-2's tokenizer")
