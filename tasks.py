"""What models are asked: HellaSwag and LAMBADA, marked as lm-evaluation-harness does it, and the toy world's questions.

    asked, where = questions("hellaswag", folder, limit)
    pairs = [encode_pair(encoding, question.context, answer) for question in asked for answer in question.answers]
    marks = mark_choice(asked, log_probs)           of all pairs -> {"acc": [True, ...], "acc_norm": [True, ...]}

HellaSwag: the ending with the largest log-probability is the model's answer (acc), or the one with the largest
log-probability per *character* (acc_norm; the harness counts characters, some papers bytes or tokens). LAMBADA, in
OpenAI's variant: the last word of a text is right if each of its tokens is the most probable one; the perplexity is
that of words, exp(-mean log p(word)), not of tokens.
"""
import itertools
import json
import os
import random
import re
from typing import NamedTuple

import numpy as np
import torch

import toyworld
from helpers import UserError
from tokenizer import encode

# Of each data set: its name and configuration on the Hugging Face hub, its split, and the local file in its stead.
SETS = {
    "hellaswag": ("Rowan/hellaswag", None, "validation", "hellaswag_val.jsonl"),
    "lambada": ("EleutherAI/lambada_openai", "default", "test", "lambada_test.jsonl"),
    # The Pile itself is no longer offered.
    # This mirror lacks Books3, BookCorpus2, OpenSubtitles, YoutubeSubtitles and OpenWebText2.
    "pile": ("monology/pile-uncopyrighted", None, "validation", None),
}


class Question(NamedTuple):
    context: str
    answers: list[str]  # what may follow, each with the space before it
    right: int          # the number of the right one


def hellaswag(record):
    context = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    endings, label = record["endings"], int(record["label"])
    if not isinstance(endings, list) or not all(isinstance(ending, str) and clean(ending) for ending in endings):
        raise ValueError("its endings must be a list of texts that are not empty")
    if not 0 <= label < len(endings):
        raise ValueError(f"its label is {label}, but it has the endings 0 to {len(endings) - 1}")
    return Question(clean(context), [" " + clean(ending) for ending in endings], label)


def clean(text):
    """Without the marks that WikiHow's pages left in the data."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def lambada(record):
    context, _, word = record["text"].rpartition(" ")
    if not word:
        raise ValueError("its text must end in a word")
    return Question(context, [" " + word], 0)


def encode_pair(encoding, context, answer):
    """Tokens of the context, and of the answer in the text that both make; spaces between them belong to the answer."""
    bare = context.rstrip()
    if not bare:
        return [encoding.eot_token], encode(encoding, context + answer).tolist()
    before = encode(encoding, bare).tolist()
    return before, encode(encoding, context + answer).tolist()[len(before):]


def mark_choice(questions, log_probs):
    """log_probs: of all answers to all questions, one after the other."""
    marks = {"acc": [], "acc_norm": []}
    log_probs = iter(log_probs)
    for question in questions:
        values = np.array(list(itertools.islice(log_probs, len(question.answers))))
        lengths = np.array([len(answer) - 1 for answer in question.answers])  # in characters, without the space
        marks["acc"].append(bool(values.argmax() == question.right))
        marks["acc_norm"].append(bool((values / lengths).argmax() == question.right))
    return marks


def questions(name, folder=None, limit=None):
    """The first `limit` questions of a data set, and where they come from."""
    found, where = [], source(name, folder)
    for number, record in enumerate(records(name, folder, limit), 1):
        try:
            found.append({"hellaswag": hellaswag, "lambada": lambada}[name](record))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise UserError(f"record {number} of {where} is no question of {name} ({type(error).__name__}: {error}): "
                            "get the data again") from None
    if not found:
        raise UserError(f"{where} holds no questions: get the data again")
    return found, where


@torch.no_grad()
def toy_answers(model, encoding, count=256, **arguments):
    """{kind: (right, nats)} of the toy world's questions, (count,) each: whether right answers have more mass than
    wrong ones, and -log of the mass that they have. The model is called with the arguments. A kind whose prompts are
    longer than the context, or whose answers are no tokens of this vocabulary, is left out."""
    training, answered = model.training, {}
    model.eval()
    for kind in toyworld.QUESTIONS:
        rng = random.Random(1)
        asked = [toyworld.ask(kind, rng) for _ in range(count)]
        prompts = [torch.tensor([encoding.eot_token, *encoding.encode_ordinary(question.prompt)]) for question in asked]
        try:
            answers = [[[encoding.encode_single_token(answer) for answer in side] for side in question[1:]]
                       for question in asked]
        except KeyError:  # a run on the world as it was before it had these words
            continue
        if max(map(len, prompts)) > model.config.context:
            continue
        mass = [row for part in range(0, count, 64) for row in last_masses(model, prompts[part : part + 64], arguments)]
        right, wrong = (np.array([row[ids].sum().item() for row, ids in zip(mass, side)]) for side in zip(*answers))
        answered[kind] = right > wrong, -np.log(np.maximum(right, 1e-30))
    model.train(training)
    return answered


def last_masses(model, prompts, arguments):
    """The probabilities of what follows each prompt: (n, V)."""
    weight = model.embedding.weight
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(weight.device)  # none sees what is behind it
    ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=weight.device)
    x = model.hidden(padded, **arguments)[torch.arange(len(prompts), device=weight.device), ends]
    return torch.nn.functional.linear(x, weight).float().softmax(-1).cpu()


def source(name, folder=None):
    hub, _, split, file = SETS[name]
    return os.path.join(folder, file) if folder is not None and file else f"{hub}, {split}"


def records(name, folder=None, limit=None):
    """The first `limit` records of a data set: of its file in the folder, if one is given, or else of the hub."""
    hub, config, split, file = SETS[name]
    if folder is not None and file:
        return itertools.islice(read_lines(os.path.join(folder, file)), limit)
    return hub_records(hub, config, split, limit,
                       f"a folder with {file} in it, --data DIR" if file else "other text, --text FILES")


def read_lines(path):
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"{path}, line {number}, is not JSON ({error}): get the file again") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error}): get the file again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give the folder that has it with --data DIR, "
                        "or leave --data off to read from the Hugging Face hub") from None


def hub_records(name, config, split, limit, way_out):
    """Streamed, so that a limit is also one of what is downloaded."""
    try:
        import datasets
        yield from itertools.islice(datasets.load_dataset(name, config, split=split, streaming=True), limit)
    except Exception as error:  # whatever is not installed, or the network makes of it
        raise UserError(f"{name} cannot be read from the Hugging Face hub ({type(error).__name__}: {error}). "
                        f"Two ways out: the package datasets and a network, or {way_out}") from error
