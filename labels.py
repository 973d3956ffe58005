"""What is known about tokens: groups of labels, for the toy world and for English text.

    for group in groups_of(encoding, windows): ...      windows: (n, T) tokens

In a group every token has one label, or none. A token counts for a unit, mostly its word. Units are cut into two
halves, so that what was chosen on the words of one can be tested on those of the other. A token outside of the universe
of a group counts for none.

Of the toy world:
  topic     32: the words of a topic                                         all tokens, split by word
  kind      4: those that act, things, adjectives, verbs                     likewise
  class     12: women, men, jobs, places, objects, events, praise, blame, towns, traits, values, years     likewise
  pronoun   2: jobs mostly of women, of men                                  jobs, split by job
  letter    first letters of at least 12 words                               words that a sentence spells, split by word
  opinion   2: praise, blame                                                 ends of such sentences, split by adjective
  trait     8: what a fact is about: a flag, a gate ...                      tokens before its value, split by pairs
  town      24: which town it is about                                       of (town, trait)

Of English text, as far as it can be known without a tagger:
  form      6: digits, capitals, small letters, inside of a word, marks, spaces      all tokens, split by word
  word      10: determiners, prepositions, pronouns ..., months, days, places        likewise
  start     1: the first word of a sentence                                          likewise
"""
from typing import NamedTuple

import numpy as np

import toyworld
from steer import text_of


class Group(NamedTuple):
    name: str
    labels: tuple      # their names
    label: np.ndarray  # (N,) the number of each token's label, -1 for none
    unit: np.ndarray   # (N,) the number of the word that the token counts for; -1 outside of the universe
    half: np.ndarray   # (units,) 0 or 1


def cut_in_two(lists, texts):
    """{word: its half}: of every word in the lists, each of which is cut by itself, and then of all other texts."""
    rng, half = np.random.default_rng(0), {}
    others = sorted(set(texts) - {word for words in lists for word in words})
    for words in (*lists, others):
        for place, number in enumerate(rng.permutation(len(words))):
            half[words[number]] = place % 2
    return half


def groups_of(encoding, windows):
    """The groups of labels of tokens (windows, T)."""
    text = [text_of(encoding, [token]) for token in range(encoding.n_vocab)]
    return (toy_groups if toyworld.is_toy(encoding) else text_groups)(text, windows)


# The toy world


def toy_groups(text, windows):
    text = [word.strip() for word in text]
    lists = [words for topic in toyworld.TOPICS.values() for words in topic.values()]
    half = cut_in_two([*lists, *toyworld.WORDS.values(), toyworld.SHE, toyworld.HE, toyworld.YEARS], text)
    number, half = {word: place for place, word in enumerate(half)}, np.array(list(half.values()))
    tokens = windows.flatten()
    unit = np.array([number[word] for word in text])[tokens]

    def by_word(name, members):
        """A group whose labels are lists of words, {label: words}."""
        of = {word: place for place, label in enumerate(members) for word in members[label]}
        return Group(name, tuple(members), np.array([of.get(word, -1) for word in text])[tokens], unit, half)

    def within(group, inside):
        return group._replace(unit=np.where(inside, group.unit, -1), label=np.where(inside, group.label, -1))

    topics = {topic: toyworld.concept_words(topic) for topic in toyworld.TOPICS}
    kinds = {kind: [word for topic in toyworld.TOPICS.values() for word in topic[kind]]
             for kind in ("agent", "thing", "adj", "verb")}
    classes = {"she": toyworld.SHE, "he": toyworld.HE, **toyworld.WORDS, "year": toyworld.YEARS}
    jobs = {"she": [job for job, share in toyworld.OCCUPATIONS.items() if share >= .8],
            "he": [job for job, share in toyworld.OCCUPATIONS.items() if share <= .2]}
    spelt = [word for words in topics.values() for word in words]
    letters = {letter: [word for word in spelt if word[0] == letter] for letter in sorted({word[0] for word in spelt})}
    letters = {letter: words for letter, words in letters.items() if len(words) >= 12}
    words_of = np.array(text)[windows]
    after_word = np.zeros(windows.shape, bool)
    after_word[:, 1:] = words_of[:, :-1] == "word"
    pronoun, letter = by_word("pronoun", jobs), by_word("letter", letters)
    return (by_word("topic", topics), by_word("kind", kinds), by_word("class", classes),
            within(pronoun, pronoun.label >= 0), within(letter, after_word.flatten() & np.isin(tokens, [
                token for token, word in enumerate(text) if word in spelt])),
            opinions(words_of, number, half), *town_groups(words_of))


def opinions(words, number, half):
    """The ends of sentences that praise or blame. words: (windows, T) texts of tokens."""
    sign = {word: place for place, kind in enumerate(("good", "bad")) for word in toyworld.WORDS[kind]}
    label, unit = np.full(words.shape, -1), np.full(words.shape, -1)
    for row in range(len(words)):
        found = None
        for column, word in enumerate(words[row].tolist()):
            found = word if word in sign else found
            if word.startswith("."):
                if found:
                    label[row, column], unit[row, column] = sign[found], number[found]
                found = None
    return Group("opinion", ("praise", "blame"), label.flatten(), unit.flatten(), half)


def town_groups(words):
    """What is known where a value is about to be said: trait and town. The pairs of both are cut in two like a
    chessboard, so that each half has half of the towns for every trait. words: (windows, T) texts of tokens."""
    towns, traits, values = (toyworld.WORDS[kind] for kind in ("town", "trait", "value"))
    label = np.full((2, *words.shape), -1)  # the numbers of trait and town
    for row in range(len(words)):
        town = trait = -1
        for column, word in enumerate(words[row].tolist()):
            if word in towns:
                town = towns.index(word)
            elif word in traits:
                trait = traits.index(word)
            elif word in values and town >= 0 and trait >= 0:
                label[:, row, column - 1] = trait, town
            elif word.startswith("."):
                town = trait = -1
    trait, town = label.reshape(2, -1)
    unit = np.where(town >= 0, town * len(traits) + trait, -1)
    half = np.add.outer(np.arange(len(towns)), np.arange(len(traits))).flatten() % 2
    return Group("trait", tuple(traits), trait, unit, half), Group("town", tuple(towns), town, unit, half)


# English text

WORDS = {
    "determiner": "the a an this that these those every each some any no all both another".split(),
    "preposition": """of in to for with on at by from about into through after before between under over against during
        without within among across behind since until""".split(),
    "pronoun": "i you he she it we they me him her us them my your his its our their himself themselves".split(),
    "auxiliary": "is are was were be been being am has have had do does did can could will would must should".split(),
    "conjunction": "and or but because although while if though unless nor so yet".split(),
    "question": "who what which when where why how whose".split(),
    "number": """one two three four five six seven eight nine ten twenty hundred thousand million billion first third
        half""".split(),
    "month": "January February March April June July August September October November December".split(),
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "place": """America Africa Asia Europe China Russia India Japan France Germany England Britain Canada Mexico Brazil
        Australia Iraq Iran Israel Syria Turkey Spain Italy Greece Egypt Korea Ukraine Pakistan Afghanistan Texas
        California Florida York Washington Chicago Boston Virginia Ohio Michigan Iowa London Paris Berlin Moscow Jersey
        Houston Seattle Toronto Ireland Scotland""".split(),
}
FORMS = ("digits", "capital", "small", "inside", "mark", "space")


def form_of(text):
    """The number of a token's form: "inside" is what goes on with a word, or begins one without a space before it."""
    word = text.strip()
    if not word:
        return FORMS.index("space")
    if word.isdecimal():
        return FORMS.index("digits")
    if not any(letter.isalpha() for letter in word):
        return FORMS.index("mark")
    if word[0].isupper():
        return FORMS.index("capital")
    return FORMS.index("small" if text[0].isspace() else "inside")


def text_groups(text, windows):
    """Words with and without a capital are one word. Lists of words are kept as far as the tokenizer knows at least two
    of their words in each half."""
    plain = [word.strip().lower() for word in text]
    half = cut_in_two([[word.lower() for word in words] for words in WORDS.values()], plain)
    number, halves = {word: place for place, word in enumerate(half)}, np.array(list(half.values()))
    tokens = windows.flatten()
    unit = np.array([number[word] for word in plain])[tokens]
    kinds = {kind: {word.strip() for word in text} & {*words, *(word.capitalize() for word in words)}
             for kind, words in WORDS.items()}
    kinds = {kind: words for kind, words in kinds.items()
             if min(len({word.lower() for word in words if half[word.lower()] == side}) for side in (0, 1)) >= 2}
    of = {word: place for place, kind in enumerate(kinds) for word in kinds[kind]}
    known = np.array([of.get(word.strip(), -1) for word in text])
    form = np.array([form_of(word) for word in text])
    ends = np.array([word.strip(" \"')\u201d")[-1:] in (".", "!", "?", "\n") or "\n" in word for word in text])
    begins = np.isin(form, [FORMS.index("capital"), FORMS.index("digits")])[windows]
    begins[:, 1:] &= ends[windows[:, :-1]]
    begins[:, 0] = False  # what came before is not known
    return (Group("form", FORMS, form[tokens], unit, halves), Group("word", tuple(kinds), known[tokens], unit, halves),
            Group("start", ("first of a sentence",), np.where(begins, 0, -1).flatten(), unit, halves))
