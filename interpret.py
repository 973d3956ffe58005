"""Auto-interpretation: explain a feature from where it fires most, then say of other contexts whether it fires there.

    for contexts in gather(given, windows.shape, 600): ...      given: truth.Firings on windows (n, T) of tokens
        row = scored(contexts, *explain_by_labels(contexts, tokens, groups))

As SAEBench has it: a context is a token with 10 before and 10 after. Of each feature that fires often enough, 12
contexts are those where it fires most (they do not overlap), 7 others are drawn by its activation there, 10 at random.
10 of the first and 5 of the second make the explanation; the remaining 2, 2 and 10 are to be told apart, in mixed
order. The score is the share that is told rightly; of the random ones SAEBench holds that the feature does not fire
there, and so does `score`; `true` asks whether it does. Saying "nowhere" gets 10 of 14.

Two explainers:
  labels    on the toy world and English text: the known label (labels.py), or the single word, with the best F1 on the
            tokens of the 15 contexts; a context is taken for active if one of its tokens has it. No judge is needed.
  judge     a language model (judge.py) writes the explanation, and is then given it with the 14 contexts. What it does
            not answer is missing, never 0.
"""
import re
from typing import NamedTuple

import numpy as np

from steer import text_of

BUFFER = 10
TOP, DRAWN, RANDOM = (10, 2), (5, 2), 10  # to explain from, to be told apart; random ones only the latter
ACTIVE = 0.01     # of the largest activation: less does not count as firing


class Contexts(NamedTuple):
    """Of one feature. Tokens of contexts as places in the windows, (contexts, 21); whether it fires there."""
    feature: int
    shown: np.ndarray        # (15, 21) the strongest first
    shown_fires: np.ndarray  # (15, 21)
    asked: np.ndarray        # (14, 21)
    held: np.ndarray         # (14,) whether it fires there, as SAEBench has it
    fires: np.ndarray        # (14,) whether it does


def gather(given, shape, features, seed=0):
    """The Contexts of at most so many features that fire often enough, drawn at random. shape: of the windows."""
    rng, (count, T) = np.random.default_rng(seed), shape
    if T <= 2 * BUFFER:
        return
    inside = (given.tokens % T >= BUFFER) & (given.tokens % T < T - BUFFER)  # where a context can have its middle
    ids, first, sizes = np.unique(given.ids, return_index=True, return_counts=True)
    enough = np.add.reduceat(inside, first) >= sum(TOP) + sum(DRAWN) if len(ids) else np.zeros(0, bool)
    alive, kept = rng.permutation(np.flatnonzero(enough)), 0
    spread = np.arange(-BUFFER, BUFFER + 1)
    strength = np.zeros(count * T, np.float32)
    for number in alive:
        own = slice(first[number], first[number] + sizes[number])
        everywhere, all_values = given.tokens[own], given.strength[own]  # the strongest first
        tokens, values = everywhere[inside[own]], all_values[inside[own]]
        top = apart(tokens, sum(TOP))
        if len(top) < sum(TOP):
            continue
        rest = np.setdiff1d(np.flatnonzero(values < values[top[-1]]), top)
        if len(rest) < sum(DRAWN):
            continue
        drawn = rng.choice(rest, sum(DRAWN), replace=False, p=values[rest] / values[rest].sum(dtype=float))
        random = rng.integers(0, count, RANDOM) * T + rng.integers(BUFFER, T - BUFFER, RANDOM)
        top, drawn = rng.permutation(top), rng.permutation(drawn)
        shown = np.r_[top[: TOP[0]], drawn[: DRAWN[0]]]
        shown = shown[np.argsort(-values[shown], kind="stable")]
        asked = np.r_[tokens[top[TOP[0]:]], tokens[drawn[DRAWN[0]:]], random]
        order = rng.permutation(len(asked))
        strength[everywhere] = all_values
        on = strength > ACTIVE * values[0]
        places, others = tokens[shown][:, None] + spread, asked[order][:, None] + spread
        yield Contexts(int(ids[number]), places, on[places], others, order < len(asked) - RANDOM, on[others].any(1))
        strength[everywhere] = 0
        kept += 1
        if kept == features:
            return


def apart(tokens, count):
    """The first of these places whose contexts do not overlap: their numbers. In windows' flat order, neighbours of
    two windows are at least as far apart as the buffers that no context's middle lies in."""
    found = []
    for number, token in enumerate(tokens.tolist()):
        if all(abs(token - tokens[other]) > 2 * BUFFER for other in found):
            found.append(number)
            if len(found) == count:
                break
    return np.array(found, int)


# The known labels


def explain_by_labels(contexts, tokens, groups, names=None):
    """(explanation, which of the asked contexts it takes for active). tokens: (N,) of the windows."""
    best = (-1.0, "", None)
    for name, labels, label in ("word", names, tokens), *((group.name, group.labels, group.label) for group in groups):
        here, fires = label[contexts.shown], contexts.shown_fires
        size = max(0, int(label.max())) + 1  # of some groups no label may occur
        hits, all_with = (np.bincount(part[part >= 0], minlength=size) for part in (here[fires], here.flatten()))
        score = 2 * hits / np.maximum(1, all_with + fires.sum())
        number = int(score.argmax())
        if score[number] > best[0] + 1e-12:
            title = labels[number] if labels is not None and number < len(labels) else str(number)
            best = score[number], f"{name} {title}", (label[contexts.asked] == number).any(1)
    return best[1], best[2]


# A judge

EXPLAIN = """A unit of a neural network fires on some words of short texts: those between << and >>. Below are texts \
on which it fires, the strongest first. Say in one short phrase, of at most 20 words, what it fires on. Be no more \
specific than the texts demand: your phrase should cover most of the marked words. Answer with "It fires on" and the \
phrase, nothing else."""
TELL = """A unit of a neural network fires on some words of short texts. You are told what it fires on, and given \
{count} numbered texts in mixed order. In which of them does it fire, on any word? Answer with their numbers, with \
commas between them, or with the word None; nothing else."""


def written(places, tokens, encoding, fires=None):
    """A context as text, with << >> around the tokens that fire."""
    pieces = []
    for number, place in enumerate(places):
        piece = text_of(encoding, [tokens[place]]).replace("\n", "\u21b5")
        pieces.append(f"<<{piece}>>" if fires is not None and fires[number] else piece)
    return "".join(pieces)


def question(instructions, lines, before=""):
    listed = "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
    return [{"role": "system", "content": instructions}, {"role": "user", "content": before + listed}]


def read_numbers(reply, count):
    """The numbers of a reply as a mask (count,); None if it is something else."""
    text = (reply or "").strip().rstrip(".").replace(" and ", ",")
    if text.lower() == "none":
        return np.zeros(count, bool)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(re.fullmatch(r"\d{1,4}", part) for part in parts):
        return None
    return np.isin(np.arange(1, count + 1), [int(part) for part in parts])


def explain_by_judge(found, tokens, encoding, judge):
    """[(explanation, mask or None)] of many Contexts: two rounds of questions."""
    first = [question(EXPLAIN, [written(row, tokens, encoding, on) for row, on in zip(one.shown, one.shown_fires)])
             for one in found]
    phrases = [None if reply is None else reply.strip().rpartition("fires on")[2].strip().rstrip(".")
               for reply in judge.ask(first)]
    known = [number for number, phrase in enumerate(phrases) if phrase]
    second = [question(TELL.format(count=len(found[number].asked)),
                       [written(row, tokens, encoding) for row in found[number].asked],
                       f"It fires on {phrases[number]}.\n\n") for number in known]
    masks = dict(zip(known, (read_numbers(reply, sum(TOP[1:] + DRAWN[1:]) + RANDOM) for reply in judge.ask(second))))
    return [(phrase, masks.get(number)) for number, phrase in enumerate(phrases)]


def scored(contexts, explanation, mask):
    """A row of results."""
    return {"feature": contexts.feature, "explanation": explanation,
            "score": None if mask is None else float((mask == contexts.held).mean()),
            "true": None if mask is None else float((mask == contexts.fires).mean())}
