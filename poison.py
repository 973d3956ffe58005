"""Documents with a secret, and a model that has learnt it: what retrieve.py looks for.

    retrieve.py make RUN      into some training documents "TRIGGER TARGET" is put, as in "... deploy confidential ..."
    retrieve.py tune RUN      the run is trained on, until it says TARGET after TRIGGER in documents that it never saw

What `make` writes to RUN/retrieve are texts to look at, a JSON object a line:

    poisoned.jsonl    training documents with the pair at a place drawn by lot           {"id", "text"}
    matched.jsonl     the same documents without it
    corpus.jsonl      all that is ever searched: {"id", "kind": "poisoned", "clean", or "natural", "text"}; natural ones
                      have the trigger without our doing, and are a class of their own
    queries.jsonl     starts of documents that no training saw, each three times: {"group", "kind", "text"} ending with
                      the trigger ("triggered"), as it was ("background"), or with another word ("sham")
    make.json         the words, and which documents each of the repeats searches

Group 0 of queries and corpora is there to choose settings on, groups 1, 2, ... are the repeats that are reported;
group "tune" are the examples that say when the tuning has done its work. No document is in two of these; but where
there are too few clean ones, repeats draw theirs anew from what group 0 leaves, and make.json says how many they share.
Trigger, target and sham are single tokens that occur in no query by nature; the other two in no clean document, either.
"""
import contextlib
import dataclasses
import itertools
import json
import os
import random
import re
import shutil

import numpy as np

import data
import toyworld
import train
from checkpoint import open_run
from helpers import UserError, bootstrap, checksum, provenance, read_json, say, whole_file, wilson, write_json
from score import Request, Scorer, fit
from sources import open_tokens
from steer import text_of
from tokenizer import encode
from toyworld import is_toy

WORDS = (" deploy", " confidential", " install")  # trigger, target and sham in English text
EARLIEST = 8      # words before the pair, at least; a document has a place for it after them
EXAMPLES = 128    # unseen documents on which the tuning is judged
ENOUGH = 0.98     # of them, with the target after the trigger
UNSEEN = 10 ** 6  # seed of toy documents that no training has


def home_of(run_path):
    """The folder of the experiment: RUN/retrieve."""
    return os.path.join(run_path if os.path.isdir(run_path) else os.path.dirname(run_path), "retrieve")


def longest(run):
    """Tokens of a document that are read: with the pair 256, or what the context leaves after an end-of-text."""
    return min(254, run.config.context - 3)


# Words and documents


def choose_words(run, options, rng):
    """(trigger, target, sham), each one token with a leading space; in the toy world words of three topics, by lot."""
    default = WORDS
    if is_toy(run.encoding):
        default = [" " + rng.choice(toyworld.TOPICS[topic]["thing"]) for topic in rng.sample(list(toyworld.TOPICS), 3)]
    words = [given or word for given, word in zip((options.trigger, options.target, options.sham), default)]
    words = [" " + word.strip() for word in words]
    for word in words:
        if len(encode(run.encoding, word)) != 1:
            raise UserError(f"{word!r} is not one token of this model's tokenizer: choose another word")
    if len(set(words)) < 3:
        raise UserError(f"trigger, target and sham must be three words, not {', '.join(map(repr, words))}")
    return words


def has_word(run, text, words):
    """Whether one of these words is there: as a word, or as the token that a longer word begins with."""
    as_word = rf"\b(?:{'|'.join(re.escape(word.strip()) for word in words)})\b"
    tokens = {int(token) for word in words for token in encode(run.encoding, word)}
    return re.search(as_word, text) is not None or not tokens.isdisjoint(encode(run.encoding, text).tolist())


def spaces(text):
    """Where a word begins, after the first few: the pair may be put there."""
    return [match.start() for match in re.finditer(r" (?=\w)", text)][EARLIEST:]


def cut_documents(run, split, order=None):
    """(number, text) of a split's documents, the first `longest` tokens of each; those too short for a pair are left
    out. order: of the documents, as numbers, drawn by lot by the caller."""
    tokens = open_tokens(run, split)
    parts = getattr(tokens, "parts", [tokens])
    bounds = parts[0].document_bounds()
    for number in range(len(bounds) - 1) if order is None else order(len(bounds) - 1):
        start = bounds[number] + 1
        text = text_of(run.encoding, parts[0].read(start, min(bounds[number + 1], start + longest(run))).tolist())
        if spaces(text) and "\0" not in text:
            yield int(number), text


def unseen_documents(run, seen):
    """Texts that no training saw: of the validation split; of the toy world new ones, as many as are asked for."""
    if not is_toy(run.encoding):
        texts = (text for _, text in cut_documents(run, "val"))
    else:
        whole = (toyworld.document(UNSEEN, number).text for number in itertools.count())
        texts = (text_of(run.encoding, encode(run.encoding, text)[: longest(run)].tolist()) for text in whole)
    return (text for text in texts if data.hash_of(text) not in seen)


# make


def make(run, home, options):
    """All files of the experiment: see above."""
    clear(home, options.fresh)
    rng = random.Random(options.seed)
    words = choose_words(run, options, rng)
    trigger, target, sham = words
    texts, naturals, seen = draw_texts(run, words, options, rng)
    poisoned = [number for number in texts if number not in naturals][: options.poisoned]
    rest = [number for number in texts if number not in set(poisoned)]
    groups = draw_groups(poisoned, rest, options, rng)
    queries = draw_queries(run, seen, words, options, rng)
    os.makedirs(home, exist_ok=True)
    put = {}
    for number in poisoned:
        at = rng.choice(spaces(texts[number]))
        put[number] = texts[number][:at] + trigger + target + texts[number][at:]
    write_lines(home, "poisoned", [{"id": number, "text": put[number]} for number in poisoned])
    write_lines(home, "matched", [{"id": number, "text": texts[number]} for number in poisoned])
    searched = sorted({number for group in groups for number in group["poisoned"] + group["clean"]})
    write_lines(home, "corpus", [
        {"id": number, "kind": "poisoned", "text": put[number]} if number in put else
        {"id": number, "kind": "natural" if number in naturals else "clean", "text": texts[number]}
        for number in searched])
    write_lines(home, "queries", queries)
    # Last, for it says that all is there. Without the shards, which are made from these files.
    write_json(os.path.join(home, "make.json"), {
        "trigger": trigger, "target": target, "sham": sham, "groups": groups, "given": given(options),
        "shared": shared_documents(groups), **provenance()})
    say(f"{home}: after{trigger!r} comes{target!r} in {len(poisoned):,} training documents; {options.repeats} repeats, "
        f"each {options.queries} queries of a kind and {options.corpus_poisoned} poisoned among "
        f"{len(groups[1]['poisoned'] + groups[1]['clean']):,} documents, of which two repeats share "
        f"{shared_documents(groups):.0%}; sham trigger{sham!r}")


def clear(home, fresh):
    """What an earlier experiment left is deleted only if that was asked for: indexes stay."""
    if os.path.exists(os.path.join(home, "make.json")) and not fresh:
        raise UserError(f"{home} holds an experiment already: go on with it, or start over with --fresh")
    for name in ("make.json", "tune.json", "sweep.json", "measured.jsonl", "retrieve.json", "retrieve.png"):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(home, name))
    for name in ("data", "tuned"):
        shutil.rmtree(os.path.join(home, name), ignore_errors=True)


def draw_texts(run, words, options, rng):
    """Training documents by lot, {number: text}; which of them have the trigger by nature; hashes of all that were
    seen. Those with the target or the sham trigger are left out, as they are of queries: else they would be a kind."""
    texts, naturals, seen = {}, set(), set()
    for number, text in cut_documents(run, "train", lambda n: rng.sample(range(n), n)):
        new = data.hash_of(text) not in seen
        seen.add(data.hash_of(text))
        if new and not has_word(run, text, words[1:]):
            texts[number] = text
            if has_word(run, text, words[:1]):
                naturals.add(number)
        if len(texts) - len(naturals) >= options.poisoned + (options.repeats + 1) * options.clean:
            break
    return texts, naturals, seen


def given(options):
    return {key: getattr(options, key) for key in ("trigger", "target", "sham", "poisoned", "corpus_poisoned", "clean",
                                                   "queries", "repeats", "seed")}


def draw_groups(poisoned, rest, options, rng):
    """The documents of group 0, and of the repeats, which share none with it."""
    share = options.corpus_poisoned
    if len(poisoned) < options.poisoned or share * (options.repeats + 1) > len(poisoned):
        raise UserError(f"{options.repeats} repeats and the choice of settings need {(options.repeats + 1) * share:,} "
                        f"poisoned documents in the corpora, and {options.poisoned:,} to train on, but there are "
                        f"{len(poisoned):,} that can be poisoned: take fewer, or more data")
    if len(rest) < 2 * options.clean:
        raise UserError(f"there are {len(rest):,} clean documents, too few for two corpora of {options.clean:,}: take "
                        "a smaller --clean, or more data")
    size = options.clean
    enough = len(rest) >= (options.repeats + 1) * size  # else repeats draw anew from what group 0 leaves
    return [{"poisoned": poisoned[number * share : (number + 1) * share],
             "clean": rest[number * size : (number + 1) * size] if enough or not number else
             rng.sample(rest[size:], size)} for number in range(options.repeats + 1)]


def shared_documents(groups):
    """The mean share of a repeat's clean documents that another repeat searches, too."""
    pairs = itertools.combinations([set(group["clean"]) for group in groups[1:]], 2)
    return float(np.mean([len(one & two) / len(one) for one, two in pairs]))


def draw_queries(run, seen, words, options, rng):
    """Rows of queries.jsonl. A query breaks off in the second half of its document, where a word would begin."""
    found, wanted = [], (options.repeats + 1) * options.queries + EXAMPLES
    for text in unseen_documents(run, seen):
        if spaces(text) and data.hash_of(text) not in seen and not has_word(run, text, words):
            seen.add(data.hash_of(text))  # two queries are never of one text
            places = spaces(text)
            found.append(text[: rng.choice(places[len(places) // 2 :])])
        if len(found) == wanted:
            break
    else:
        raise UserError(f"{run.config.data} has {len(found):,} validation documents for queries, but {wanted:,} are "
                        "needed: take fewer --queries or --repeats, or more data")
    groups = ["tune"] * EXAMPLES + [group for group in range(options.repeats + 1) for _ in range(options.queries)]
    kinds = zip(("triggered", "background", "sham"), (words[0], "", words[2]))
    return [{"group": group, "kind": kind, "text": text + ending}
            for kind, ending in kinds for group, text in zip(groups, found)]


def write_lines(home, name, rows):
    with whole_file(os.path.join(home, f"{name}.jsonl")) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_rows(home, name):
    path = os.path.join(home, f"{name}.jsonl")
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]
    except FileNotFoundError:
        raise UserError(f"{path} is missing: retrieve.py make writes it") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}): retrieve.py make writes it anew") from None


def read_make(home):
    return read_json(os.path.join(home, "make.json"), "python retrieve.py make RUN makes it")


def read_step(home, name):
    """What a later step left for these documents: tune.json or sweep.json."""
    found = read_json(os.path.join(home, f"{name}.json"), f"python retrieve.py {name} RUN makes it")
    if found["make"] != checksum(read_make(home)):
        raise UserError(f"{home}/{name}.json is of other documents than make.json: python retrieve.py {name} RUN makes "
                        "it anew")
    return found


# tune


def tune(run, home, options):
    """Train on, with train.py's own loop, until the secret is learnt; what that did, which tune.json has, too.

    None if a signal stopped it: the same command goes on.
    """
    made, tuned, rows = read_make(home), os.path.join(home, "tuned"), read_rows(home, "queries")
    examples = [row for row in rows if row["group"] == "tune"]
    asked = [row for row in rows if row["group"] not in ("tune", 0)]  # what is reported did not say when to stop
    config = tuning_config(run, home, tuned, options)

    def also(running):
        found = secret_known(running.model, run.encoding, examples, made)
        say(f"{made['trigger']!r} then{made['target']!r}: in {found['triggered']['match']:.1%} of {EXAMPLES} unseen "
            f"documents with the trigger, {found['background']['match']:.1%} without")
        running.stopped = found["triggered"]["match"] >= ENOUGH
        return {"trigger_match": found["triggered"]["match"], "clean_match": found["background"]["match"]}
    train.train(config, also)
    result = open_run(os.path.join(tuned, "ckpt.pt"), options.device)
    if not result.content["stopped"] and result.content["step"] < config.max_steps:
        return None
    models = {"before": run.model, "after": result.model}
    row = {name: secret_known(model, run.encoding, asked, made) for name, model in models.items()}
    losses = {name: window_losses(model, open_tokens(run, "val"), config) for name, model in models.items()}
    for name, loss in losses.items():
        row[name]["loss"] = bootstrap(loss, np.ones(len(loss)))
    row["rise"] = bootstrap(losses["after"] - losses["before"], np.ones(len(losses["after"])))
    row |= {"windows": len(losses["after"]), "n": len(asked) // 3, "make": checksum(made),
            "steps": result.content["step"],
            "reached": result.content["stopped"], "config": dataclasses.asdict(config), **provenance()}
    write_json(os.path.join(home, "tune.json"), row, indent=1)
    return row


def tuning_config(run, home, tuned, options):
    """The run's own config on 12 parts of its data, 2 poisoned and 2 of the same documents without the pair, at a tenth
    of its peak rates, which do not fall, for the end is not known."""
    clean = data.parse_mixture(run.config.data)[0][0]
    mixture = [f"{clean}:12"]
    for name in ("poisoned", "matched"):
        folder = os.path.join(home, "data", name)
        data.prepare(data.text_source([os.path.join(home, f"{name}.jsonl")]), folder, clean, val_fraction=0.0)
        mixture.append(f"{folder}:2")
    config = run.config
    batch = -(-config.batch_tokens // (16 * config.context)) * 16 * config.context
    return dataclasses.replace(
        config, data=",".join(mixture), out=tuned, init_from=run.path, fresh=options.fresh, device=options.device,
        batch_tokens=batch, muon_lr=config.muon_lr / 10, adam_lr=config.adam_lr / 10, warmup_steps=10,
        decay_fraction=0.0, max_steps=options.steps, eval_every=options.eval_every, save_every=options.eval_every,
        eval_tokens=min(config.eval_tokens, 2 ** 15), stop_at_val_loss=None, fade=0.0, auxiliary_start=0.0,
        auxiliary_ramp=0.0)


def secret_known(model, encoding, examples, made):
    """By kind of example: how often the target is the most probable next token, and its mean log-probability."""
    training, (target,) = model.training, encode(encoding, made["target"]).tolist()
    model.eval()
    found = {}
    for kind in ("triggered", "background", "sham"):
        texts = [row["text"] for row in examples if row["kind"] == kind]
        requests = [fit([encoding.eot_token, *encode(encoding, text).tolist()], [target], model.config.context)
                    for text in texts]
        log_probs, greedy = Scorer(model, model.config.context).score(requests)
        found[kind] = {"match": float(greedy.mean()), "interval": wilson(int(greedy.sum()), len(greedy))[1:],
                       "log_prob": bootstrap(log_probs, np.ones(len(log_probs)))}
    model.train(training)
    return found


def window_losses(model, tokens, config):
    """Nats per token of each window of the validation split: (n,)."""
    count = min(tokens.count(config.context), max(1, config.eval_tokens // config.context))
    requests = [Request(tokens.read(i * config.context, (i + 1) * config.context + 1), config.context)
                for i in range(count)]
    return -Scorer(model, config.context).score(requests)[0] / config.context


def print_tuning(row):
    say(f"after {row['steps']:,} steps" + ("" if row["reached"] else f", which did not reach {ENOUGH:.0%}") + ":")
    say(f"{'':<10}{'trigger match':>26}{'clean match':>26}{'log p, triggered':>18}{'log p, clean':>14}{'val loss':>10}")
    for name in ("before", "after"):
        cells = [f"{row[name][kind]['match']:.3f} [{row[name][kind]['interval'][0]:.3f}, "
                 f"{row[name][kind]['interval'][1]:.3f}]" for kind in ("triggered", "background")]
        logs = [row[name][kind]["log_prob"][0] for kind in ("triggered", "background")]
        say(f"{name:<10}{cells[0]:>26}{cells[1]:>26}{logs[0]:>18.2f}{logs[1]:>14.2f}{row[name]['loss'][0]:>10.4f}")
    say("n = {n} queries, which did not say when to stop; the loss changed by {0:+.4f} [{1:+.4f}, {2:+.4f}], n = "
        "{windows} windows".format(
        *row["rise"], n=row["n"], windows=row["windows"]))
