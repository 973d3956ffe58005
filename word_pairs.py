"""Pairs of prompts for models of English text: indirect objects, pronouns, spans of years, from lists of words.

    pairs, unknown = text_pairs("ioi", folder, encoding, seed=0)      as many pairs as are asked for

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


def text_pairs(kind, folder, encoding, seed):
    """(an endless stream of pairs, how many words of the lists are not one token)."""
    rng, unknown = Random(seed), set()

    def known(words):
        """Those that are one token after a space."""
        found = [word for word in words if len(encoding.encode_ordinary(" " + word)) == 1]
        unknown.update(set(words) - set(found))
        return found

    if kind == "ioi":
        people = known(names(folder))
        need(people, 3, "names", folder)
        return forever(indirect_object, rng, people), len(unknown)
    if kind == "pronoun":
        shares = occupations(folder)
        women, men = (known([job for job, share in shares.items() if test(share)])
                      for test in (lambda share: share >= 0.7, lambda share: share <= 0.3))
        need(women, 1, "occupations of women", folder)
        need(men, 1, "occupations of men", folder)
        return forever(pronoun, rng, women, men), len(unknown)
    nouns = known([line.strip() for line in read_lines(folder, "greater_than_nouns.txt") if line.strip()])
    need(nouns, 1, "nouns", folder)
    return forever(greater_than, rng, nouns), len(unknown)


def forever(make, *arguments):
    while True:
        yield make(*arguments)


def indirect_object(rng, people):
    receiver, giver, other = rng.sample(people, 3)
    place, thing, first = rng.choice(PLACES), rng.choice(OBJECTS), rng.random() < 0.5
    source, target = (f"When {' and '.join((one, giver) if first else (giver, one))} went to the {place}, "
                      f"{giver} gave a {thing} to" for one in (receiver, other))
    return Pair(source, target, (" " + receiver,), (" " + other,), (" " + giver,))


def pronoun(rng, women, men):
    saying = rng.choice(SAYINGS)
    she, he = (f"The {rng.choice(jobs)} {saying}" for jobs in (women, men))
    return Pair(she, he, (" she",), (" he",), ()) if rng.random() < 0.5 else Pair(he, she, (" he",), (" she",), ())


def greater_than(rng, nouns):
    """Of the ends that are right after the earlier year, most are wrong after the later."""
    noun, early = rng.choice(nouns), rng.randrange(2, 62)
    late = early + 1 + int((99 - early) * rng.uniform(0.7, 0.82))
    one, two = (f"The {noun} lasted from the year 17{year:02} to the year 17" for year in (early, late))
    low, high = (tuple(f"{year:02}" for year in part) for part in (range(early + 1, late + 1), range(late + 1, 100)))
    return Pair(one, two, low, high, ()) if rng.random() < 0.5 else Pair(two, one, high, low, ())


def need(words, least, what, folder):
    if len(words) < least:
        raise UserError(f"of the {what} in {folder}/circuits only {len(words)} are single tokens of this model's "
                        f"tokenizer, and {least} are needed: this task is for models with GPT-2's tokenizer")
