"""Generate text, look at features, steer.

    python sample.py                                               the newest run in out/, steered and not, side by side
    python sample.py out/tiny --prompt "In 1436, a" --samples 3    streamed, token by token
    python sample.py out/tiny --interactive                        type prompts, change the steering, go on
    python sample.py out/tiny --prompt "The sailor" --features     the strongest features of each token
    python sample.py out/tiny --top-features                       those that stand best for something, by a rule
    python sample.py out/tiny --feature 2:1234+                    what one feature fires on, and what it does
    python sample.py out/tiny --feature 2:1234+ --source hash      the same of another source: sources.py
    python sample.py out/tiny --steer sea --alphas 0,0.5,1,2       how far steering goes, and what it costs

A run is a folder of train.py or a checkpoint in it. features.py and steer.py have the same for use from Python;
pareto.py measures how far steering goes, against controls.
"""
import argparse
import codecs
import difflib
import itertools
import re
import shutil
import sys
import textwrap

import torch

import steer
import toyworld
from checkpoint import newest_run, open_run
from features import effect, find_parents, level_of, open_index, parse_feature, prompt_tokens
from helpers import UserError, run_script, within
from sources import open_source, read_codes
from steer import Vector, contrast, count_toy_words, perplexity, piece, steered, steering_source, text_of
from tokenizer import END
from toyworld import is_toy
from truth import describe_feature, top_features

HELP = """  /steer CONCEPT [ALPHA]   steer; /steer alone stops it      /alpha ALPHA   how strongly
  /seed SEED               of the next text                  /quit          or Ctrl-D
  anything else is a prompt; an empty line starts from nothing"""


# Prompts and texts


def read_text(path):
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({getattr(error, 'strerror', None) or 'it is no UTF-8 text'})") from None
    if not text.strip():
        raise UserError(f"{path} is empty: it should hold some text")
    return text


def stream(encoding, tokens, write):
    """Write each token's text as it comes; a character whose bytes are in several tokens comes with the last."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        write(decoder.decode(piece(encoding, token)))
    write(decoder.decode(b"", final=True))


def mark(text, words, before, after):
    """The text with each of the words between `before` and `after`."""
    return re.sub(rf"\b({'|'.join(words)})\b", rf"{before}\1{after}", text) if words else text


def columns(left, right, words, width, colour):
    """Two texts side by side, as lines. Marks that a terminal shows as colour take no room; stars do."""
    half = max(8, (width - 3) // 2)
    if not colour:
        left, right = (mark(text, words, "*", "*") for text in (left, right))
    wrapped = [[line for part in text.split("\n") for line in textwrap.wrap(part, half) or [""]]
               for text in (left, right)]
    for pair in itertools.zip_longest(*wrapped, fillvalue=""):
        line = f"{pair[0]:{half}} | {pair[1]}"
        yield mark(line, words, "\033[1;32m", "\033[0m") if colour else line


def sampling(options):
    return {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}


def sample_tokens(run, prompt, samples, options, seed, source=None, vector=None, alpha=1.0):
    """Tokens (samples, tokens) that follow the prompt (1, T), in one batch."""
    steps = run.model.generate(prompt.expand(samples, -1), options.tokens, seed=seed, **sampling(options),
                               **steered(source, vector, alpha))
    return torch.stack(list(steps), dim=1)


def write_sample(run, prompt, options, seed, source=None, vector=None, alpha=1.0):
    """Stream one text to the terminal, to its end or options.tokens."""
    end = run.encoding.eot_token
    steps = run.model.generate(prompt, options.tokens, seed=seed, stop=end, **sampling(options),
                               **steered(source, vector, alpha))
    tokens = (token.item() for token in steps)
    stream(run.encoding, itertools.takewhile(lambda token: token != end, tokens),
           lambda text: print(text, end="", flush=True))
    print()


# Steering


def check_concept(concept):
    if concept not in toyworld.TOPICS:
        near = sorted(toyworld.TOPICS, key=lambda topic: -difflib.SequenceMatcher(None, concept, topic).ratio())
        raise UserError(f"there is no concept {concept!r} in the toy world: "
                        f"the concepts, nearest first, are {', '.join(near)}. "
                        "For any other give --positive FILE --negative FILE")


def make_vector(run, source, concept, options):
    """The vector of a concept, from texts."""
    if options.positive or options.negative:
        if not (options.positive and options.negative):
            raise UserError("a contrast needs both --positive FILE and --negative FILE")
        texts = [read_text(options.positive)], [read_text(options.negative)]
    elif is_toy(run.encoding):
        check_concept(concept)
        texts = steer.toy_texts(concept)
    else:
        raise UserError("this model was not trained on the toy world, whose concepts are known: "
                        "give texts with the concept and texts without it, --positive FILE --negative FILE")
    print(f"making the vector of {concept}" + f", fitted in {options.fit} steps" * (options.fit > 0), flush=True)
    vector = contrast(run, source, concept, *texts, k=options.k, steps=options.fit)
    if options.save_vector:
        vector.save(options.save_vector)
        print(f"wrote {options.save_vector}")
    return vector


def first_vector(run, source, options):
    """The vector that the command line asks for, or None."""
    if not (options.vector or options.steer or options.positive or options.negative):
        return None
    if not options.vector:
        return make_vector(run, source, options.steer or "the positive text", options)
    if options.steer or options.positive or options.negative:
        raise UserError("--vector FILE is a vector already: leave --steer, --positive and --negative off")
    return Vector.load(options.vector, run.model, source)


def words_of(run, concept):
    return toyworld.concept_words(concept) if is_toy(run.encoding) and concept in toyworld.TOPICS else ()


def show_steering(run, prompt, source, vector, options):
    """Unsteered and steered text from the same seed, side by side."""
    colour, words = sys.stdout.isatty(), words_of(run, vector.concept)
    width = min(150, shutil.get_terminal_size((130, 24)).columns)
    for number in range(options.samples or 3):
        start = text_of(run.encoding, prompt[0, 1:].tolist())
        texts = [start + text_of(run.encoding, tokens[0].tolist()).partition(END)[0] for tokens in (
                 sample_tokens(run, prompt, 1, options, options.seed + number, source, vector, alpha)
                 for alpha in (0, options.alpha))]
        heads = f"unsteered, seed {options.seed + number}", f"{vector.concept}, alpha {options.alpha:g}"
        print(*columns(*heads, (), width, colour), *columns(*texts, words, width, colour), sep="\n", end="\n\n")


def measure(texts, concept):
    """Share of the concept's words with its standard error (over texts), share of well-formed sentences, sentences."""
    counts = torch.tensor([count_toy_words(text, concept) for text in texts], dtype=torch.float64)
    words, total, formed, sentences = counts.unbind(1)
    share = (words.sum() / total.sum()).item()
    error = ((words - share * total).std() / total.mean() / len(texts) ** 0.5).item()
    return share, error, (formed.sum() / sentences.sum().clamp(min=1)).item(), int(sentences.sum())


def sweep(run, prompt, source, vector, options):
    """A row for each alpha: what steering gains and what it costs."""
    toy, samples = bool(words_of(run, vector.concept)), options.samples or 32
    print(f"{vector.concept}: {samples} texts of {options.tokens} tokens for each alpha, "
          f"temperature {options.temperature}, top-p {options.top_p}, seed {options.seed}; "
          "perplexity is the unsteered model's")
    print(f"{'alpha':>7}" + f"{'concept words':>18}{'well-formed':>13}" * toy + f"{'perplexity':>12}")
    for alpha in options.alphas:
        tokens = sample_tokens(run, prompt, samples, options, options.seed, source, vector, alpha)
        row = f"{alpha:7g}"
        if toy:
            share, error, formed, _ = measure([text_of(run.encoding, ids) for ids in tokens.tolist()], vector.concept)
            row += f"{share:9.2%} +-{error:6.2%}{formed:13.1%}"
        whole = torch.cat([prompt.expand(samples, -1), tokens], dim=1)
        print(row + f"{perplexity(run.model, whole, prompt.shape[1]):12.2f}", flush=True)


# Features


def show_features(run, source, prompt, top):
    """For each token of the prompt and each layer the strongest features: level, index, sign, coefficient, parent."""
    codes = read_codes(run.model, prompt, source)
    print("feature INDEX[+-], |coefficient|"
          + ", < the parent it was reached from; level 0 has no parents" * (source.kind == "own"))
    for at, token in enumerate(prompt[0].tolist()):
        print(f"\n{at} {text_of(run.encoding, [token])!r}")
        for layer, code in codes.items():
            cells = [f"{cell:30}" for cell in cells_of(source, layer, code, at, top)]
            print(f"  layer {layer}  {' '.join(cells)}".rstrip())


def cells_of(source, layer, code, at, top):
    """The strongest features of the token at `at`, as they are printed; levels and parents are of own features."""
    own = source.kind == "own"
    parents = find_parents(source.layers[layer], code)[0, at] if own else None
    for place in code.coefs[0, at].abs().topk(min(top, code.coefs.shape[-1])).indices.tolist():
        index, coef = code.indices[0, at, place].item(), code.coefs[0, at, place].item()
        if coef == 0 and not own:  # room that this token does not need
            continue
        cell = f"{index}{'-' if coef < 0 else '+'} {abs(coef):.2f}"
        if own:
            cell = f"level {level_of(source.layers[layer], index)}: {cell}"
            cell += f" < {parents[place]}" if parents[place] >= 0 else ""
        yield cell


def show_feature(run, source, name, options):
    """One feature: how often it fires, where hardest, what it does there, whose child it is, who its children are."""
    layer, index, sign = parse_feature(name, source)
    statistics, tokens = open_index(run, source, options.index_tokens)
    positions, coefs = statistics.firings(layer, index, sign)
    of = f", level {level_of(source.layers[layer], index)}" if source.kind == "own" else f" of {source.name}"
    print(f"feature {layer}:{index}{'-' if sign < 0 else '+'}{of}: fires on {len(positions):,} of "
          f"{statistics.tokens:,} tokens ({len(positions) / statistics.tokens:.3%})")
    if not len(positions):
        return print("it never fires in this piece of data: there is nothing to show")
    print(describe_feature(run, tokens, statistics.tokens, positions))
    hardest = (-coefs).argsort(kind="stable")[: options.top]
    before, after = ("\033[1;32m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")
    for coef, position in zip(coefs[hardest], positions[hardest].astype(int).tolist()):
        start = max(position - 12, position // run.config.context * run.config.context)  # what the model saw of it
        left, own, right = (text_of(run.encoding, tokens.read(a, min(b, len(tokens))).tolist()).replace("\n", "\\n")
                            for a, b in ((start, position), (position, position + 1), (position + 1, position + 6)))
        print(f"  {coef:6.2f}  {left}{before}{own}{after}{right}")
    change = effect(run.model, source, tokens, layer, index, positions[hardest])[: run.encoding.n_vocab]
    for title, values, ids in (("raises", *change.topk(8)), ("lowers", *(-change).topk(8))):
        print(f"{title} the logit of the next token there: "
              + ", ".join(f"{text_of(run.encoding, [i])!r} {v:.2f}" for v, i in zip(values.tolist(), ids.tolist())))
    if source.kind == "own":
        show_family(source.layers[layer], statistics, layer, index, positions, options.top)


def show_family(bottleneck, statistics, layer, index, positions, top):
    """The parents and children of a feature that fire with it most often."""
    level = level_of(bottleneck, index)
    for title, number, low in (("parents", level, level - 1), ("children", level + 1, level + 1)):
        if hasattr(bottleneck, f"generators_{number}"):
            family = (bottleneck.get_buffer(f"generators_{number}") ^ index).tolist()
            family = [i for i in family if bottleneck.lows[low] <= i < bottleneck.lows[low + 1]]
            counts = statistics.cofiring(layer, positions, family)[:top]
            print(f"{title}, of {len(family)}, by tokens that both fire on: "
                  + ", ".join(f"{i} ({count:,})" for count, i in counts))


# The program


def interact(run, source, options):
    """Prompts and commands until the input ends."""
    vector, alpha, seed = first_vector(run, source, options), options.alpha, options.seed
    concept = vector and vector.concept
    vectors = {None: None, concept: vector}
    print(HELP)
    while True:
        try:
            line = input(f"[{concept + f' {alpha:g}' if concept else 'unsteered'}, seed {seed}]> ").strip()
        except (EOFError, KeyboardInterrupt):
            return print()
        command, *words = line.split() if line.startswith("/") else ("",)
        try:
            if command == "/quit":
                return
            elif command == "/steer":
                alpha = ALPHA(words[1]) if len(words) > 1 else alpha
                if words and words[0] not in vectors:
                    vectors[words[0]] = make_vector(run, source, words[0], options)
                concept = words[0] if words else None
            elif command == "/alpha":
                alpha = ALPHA(words[0])
            elif command == "/seed":
                seed = SEED(words[0])
            elif command:
                print(HELP)
            else:
                prompt = prompt_tokens(run, line)
                print(line, end="")
                write_sample(run, prompt, options, seed, source, vectors[concept], alpha)
        except (UserError, argparse.ArgumentTypeError) as error:
            print(error)
        except (ValueError, IndexError):
            print(f"{command} needs a number\n{HELP}")
        except KeyboardInterrupt:
            print()


ALPHA, SEED = within(float, -1e6, 1e6), within(int, 0, 2 ** 62)


def numbers(text):
    return [ALPHA(part) for part in text.split(",")]


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="a run's folder or checkpoint; the newest in out/ if not given")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    text = parser.add_argument_group("generate")
    text.add_argument("--prompt", metavar="TEXT", help="what to go on from")
    text.add_argument("--prompt-file", metavar="FILE", help="the same, from a file")
    text.add_argument("--interactive", action="store_true", help="type prompts; /help tells the commands")
    text.add_argument("--samples", type=within(int, 1), metavar="N",
                      help="texts (1; 3 side by side; 32 for each of --alphas)")
    text.add_argument("--tokens", type=within(int, 1), default=127, metavar="N", help="tokens of a text, at most (127)")
    text.add_argument("--temperature", type=within(float, 0), default=0.8, metavar="T", help="0 is greedy (0.8)")
    text.add_argument("--top-k", type=within(int, 1), metavar="N", help="only the N likeliest tokens")
    text.add_argument("--top-p", type=within(float, 0, 1, open_low=True), default=0.9, metavar="P",
                      help="only the likeliest tokens with probability P together (0.9)")
    text.add_argument("--seed", type=SEED, default=0, metavar="N",
                      help="the same seed gives the same text (0)")
    parser.add_argument("--source", metavar="NAME",
                        help="whose features to look at or steer with: own, hash, neurons, a variant of SAE that "
                             "sae.py has trained, or its folder (own; steering a dense model: its residual stream)")
    parser.add_argument("--site", metavar="SITE",
                        help="of hash, neurons and SAEs: attention_out, mlp_in, mlp_out or block_out (mlp_in)")
    look = parser.add_argument_group("look at features")
    look.add_argument("--features", action="store_true",
                      help="the strongest features of each token of the prompt, by layer")
    look.add_argument("--feature", metavar="LAYER:INDEX[+-]", help="what a feature fires on, and what it does")
    look.add_argument("--top-features", action="store_true",
                      help="toy world: the features that stand best for something, tested on unseen words")
    look.add_argument("--top", type=within(int, 1), default=5, metavar="N",
                      help="features of a token, contexts of a feature (5)")
    look.add_argument("--index-tokens", type=within(int, 1), default=2 ** 16, metavar="N",
                      help="validation tokens to gather statistics from (65536); "
                           "6 bytes for each active feature of each")
    bend = parser.add_argument_group("steer")
    bend.add_argument("--steer", metavar="CONCEPT",
                      help="a topic of the toy world, or a name for the contrast of two files")
    bend.add_argument("--alpha", type=ALPHA, metavar="A", help="how strongly (1)")
    bend.add_argument("--alphas", type=numbers, metavar="A,B,...", help="compare these, as in 0,0.5,1,2")
    bend.add_argument("--k", type=within(int, 1), default=256, metavar="N", help="features of each layer (256)")
    bend.add_argument("--fit", type=within(int, 0), default=100, metavar="STEPS",
                      help="steps to fit the weights in; "
                           "0: the differences of mean activations, scaled to length 1 (100)")
    bend.add_argument("--layer", type=within(int, 0), default=0, metavar="N",
                      help="dense models: steered after this layer (0)")
    bend.add_argument("--positive", metavar="FILE", help="text with the concept")
    bend.add_argument("--negative", metavar="FILE", help="text without it")
    bend.add_argument("--save-vector", metavar="FILE", help="keep the vector (.npz)")
    bend.add_argument("--vector", metavar="FILE", help="steer with a vector that was kept")
    return parser.parse_args(arguments)


def main(arguments):
    options = parse(arguments)
    run = open_run(options.run or newest_run(), options.device)
    if options.layer >= run.config.layers:
        raise UserError(f"there is no layer {options.layer}: this model has the layers 0 to {run.config.layers - 1}")
    text = read_text(options.prompt_file) if options.prompt_file else options.prompt
    prompt = prompt_tokens(run, text or "")
    asked = (text, options.steer, options.vector, options.positive, options.negative, options.feature, options.features,
             options.top_features, options.interactive)
    if not any(asked) and is_toy(run.encoding):
        options.steer, options.alpha = "cars", 1.25 if options.alpha is None else options.alpha
        print(f"{run.path}, steered to speak of cars (python sample.py --help tells what else there is)\n")
    options.alpha = 1.0 if options.alpha is None else options.alpha
    if options.feature or options.features or options.top_features:
        source = open_source(run, "own" if options.source is None else options.source, options.site)
        if options.feature:
            show_feature(run, source, options.feature, options)
        elif options.features:
            show_features(run, source, prompt, options.top)
        elif not is_toy(run.encoding):
            raise UserError("--top-features needs a model of the toy world, where it is known what tokens are")
        else:
            top_features(run, source, options.index_tokens, options.top)
        return
    if not any(asked[1:]) and (options.source or options.site):
        raise UserError("--source and --site are for --features, --feature and steering: leave them off, or add one")
    source = steering_source(run, options.source, options.site, options.layer)
    if options.interactive:
        interact(run, source, options)
    elif vector := first_vector(run, source, options):
        (sweep if options.alphas else show_steering)(run, prompt, source, vector, options)
    else:
        for number in range(options.samples or 1):
            print(text or "", end="")
            write_sample(run, prompt, options, options.seed + number)


if __name__ == "__main__":
    run_script(main)
