"""What the live parts of view.py's page ask of a model: codes of a text, edited passes, two texts side by side.

    live = Live(run, source, path, options)                  options: those of view.py
    live.next({"text": "In 1436, a", "edits": [{"feature": "0:3+", "kind": "add", "amount": 4, "layers": [0]}]})

Every method takes what a request holds, and checks all of it; serve.py hands over requests and answers. One text is
written at a time, and every one can be stopped. python_lines are what a user would write to get the same.
"""
import codecs
import threading

import torch
import torch.nn.functional as F

from catalog import EFFECT_AT, TOKENS
from dpb import unfold
from features import effect, open_index, parse_feature, prompt_tokens
from helpers import UserError, say
from sources import read_codes
from steer import Change, Vector, add_features, change_features, contrast, piece, toy_texts
from toyworld import TOPICS, is_toy


class Refused(Exception):
    """An answer other than 200: (status, sentence)."""


class Stopped(Exception):
    """Somebody asked to stop."""


class Watched:
    """A model whose every pass first looks whether to stop."""

    def __init__(self, model, stop):
        self.model, self.stop = model, stop

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, *arguments, **options):
        if self.stop.is_set():
            raise Stopped
        return self.model(*arguments, **options)


# What a request asks for


def number(given, name, low, high, default=None, kind=float):
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:  # nor NaN
        raise UserError(f"{name} must be a number from {low:g} to {high:g}")
    return kind(value)


def text_in(given, name):
    if not isinstance(given.get(name, ""), str):
        raise UserError(f"{name} must be a text")
    return given.get(name, "")


def changes_in(given, source):
    """The Changes of the list `edits`: {feature, layers, kind: zero | scale | add, amount}."""
    edits, found = given.get("edits", []), []
    if not isinstance(edits, list) or len(edits) > 64 or not all(isinstance(edit, dict) for edit in edits):
        raise UserError("edits must be a list of at most 64 objects")
    for edit in edits:
        layer, index, sign = parse_feature(text_in(edit, "feature"), source)
        layers = edit.get("layers", [layer])
        if not isinstance(layers, list) or not all(isinstance(item, int) and item in source.layers for item in layers):
            raise UserError("layers must be a list of layers that the source has")
        kind, amount = edit.get("kind"), number(edit, "amount", -1e4, 1e4, 0.0)
        if kind not in ("zero", "scale", "add"):
            raise UserError("kind must be zero, scale or add")
        scale, add = {"zero": (0.0, 0.0), "scale": (amount, 0.0), "add": (1.0, amount)}[kind]
        found.append(Change(tuple(sorted(set(layers))), index, sign, scale, add))
    return found


class Live:
    """A model, a source of features, and the one text that may be in the making."""

    def __init__(self, run, source, path, options):
        """path: of the page.  options: those of view.py."""
        self.run, self.source, self.path, self.options = run, source, path, options
        self.busy, self.stopping, self.index = threading.Lock(), threading.Event(), None
        self.asking = threading.Lock()  # of the index, which is read once
        given = options.vector
        self.vectors = {given: Vector.load(given, run.model, source)} if given else {}  # by concept, or by file
        self.topics = sorted(TOPICS) if is_toy(run.encoding) else []

    def state(self, given):
        return {"concepts": [*filter(None, [self.options.vector]), *self.topics]}

    def codes(self, given):
        """{tokens, layers: {layer: of every token [[unfolded id, strength], ...], the strongest first}}"""
        tokens = prompt_tokens(self.run, text_in(given, "text"))
        layers = {}
        for layer, code in read_codes(self.run.model, tokens, self.source).items():
            ids, strength = unfold(code, self.source.m)
            pairs = zip(ids[0].tolist(), strength[0].float().tolist())
            layers[layer] = [sorted(([id, round(value, 4)] for id, value in zip(*pair) if value > 0),
                                    key=lambda found: -found[1]) for pair in pairs]
        return {"tokens": tokens[0].tolist(), "layers": layers}

    def effect(self, given):
        layer, index, sign = parse_feature(text_in(given, "feature"), self.source)
        with self.asking:
            if self.index is None:
                self.index = open_index(self.run, self.source, self.options.index_tokens, say)
        known, tokens = self.index
        positions, coefs = known.firings(layer, index, sign)
        if not len(positions):
            raise UserError("it never fires in this piece of data")
        hardest = (-coefs).argsort(kind="stable")[:EFFECT_AT]
        change = effect(self.run.model, self.source, tokens, layer, index, positions[hardest])
        change = change[: self.run.encoding.n_vocab]
        (ups, up), (downs, down) = change.topk(TOKENS), (-change).topk(TOKENS)
        return {"ups": up.tolist(), "up": ups.tolist(), "downs": down.tolist(), "down": downs.tolist()}

    def steering(self, given):
        """(Changes, concept, alpha) that a request asks for."""
        concept = text_in(given, "concept")
        if concept and concept not in self.topics and concept not in self.vectors:
            raise UserError(f"there is no concept {concept!r} to steer towards")
        return changes_in(given, self.source), concept, number(given, "alpha", -100, 100, 1.0)

    def arguments(self, given, make=True):
        """(arguments of an edited forward pass, the concept's vector): without `make`, a vector that is not known yet
        is left out."""
        changes, concept, alpha = self.steering(given)
        if make and concept and concept not in self.vectors:
            watched = self.run._replace(model=Watched(self.run.model, self.stopping))
            self.vectors[concept] = contrast(watched, self.source, concept, *toy_texts(concept))
        vector = self.vectors.get(concept)

        def edit(layer, code):
            code = change_features(changes, layer, code)
            return code if vector is None else add_features(vector, alpha, layer, code)
        return (self.source.edited(edit) if changes or vector is not None else {}), vector

    @torch.no_grad()
    def next(self, given):
        """The likeliest next tokens, before and after: [[token, p, p edited], ...]; and Python lines."""
        tokens = prompt_tokens(self.run, text_in(given, "text"))
        edited, vector = self.arguments(given, make=False)
        weight = self.run.model.embedding.weight[: self.run.encoding.n_vocab]
        before, after = (F.linear(self.run.model.hidden(tokens, **arguments)[0, -1], weight).float().softmax(-1)
                         for arguments in ({}, edited))
        if not after.isfinite().all():
            raise UserError("the model gives no probabilities, but infinities: the edit is too large")
        best = torch.maximum(before, after).topk(min(12, len(before))).indices
        return {"tokens": [[token, before[token].item(), after[token].item()] for token in best.tolist()],
                "python": python_lines(self, given), "vector": not text_in(given, "concept") or vector is not None}

    def settings(self, given):
        return {"temperature": number(given, "temperature", 0, 10, 0.8), "top_p": 0.9,
                "seed": number(given, "seed", 0, 2 ** 31, 0, int), "stop": self.run.encoding.eot_token}

    def generate(self, given, write):
        """Write {side, text} as both texts grow: 0 unedited, 1 edited."""
        tokens, count = prompt_tokens(self.run, text_in(given, "text")), number(given, "tokens", 1, 1024, 60, int)
        settings, (_, concept, _) = self.settings(given), self.steering(given)  # what is wrong is said first
        if not self.busy.acquire(blocking=False):
            raise Refused(409, "another text is being written: stop it, or wait for it")
        try:
            self.stopping.clear()
            if concept and concept not in self.vectors:
                write({"status": f"fitting the vector of {concept}, once: about half a minute on a CPU"})
            edited, _ = self.arguments(given)
            sides = [self.texts(tokens, count, settings | arguments) for arguments in ({}, edited)]
            while sides_left := [side for side in (0, 1) if sides[side] is not None]:
                for side in sides_left:
                    if self.stopping.is_set():
                        raise Stopped
                    text = next(sides[side], None)
                    sides[side] = None if text is None else sides[side]
                    if text:
                        write({"side": side, "text": text})
            last = {"done": True}
        except Stopped:
            last = {"done": True, "stopped": True}
        finally:
            self.busy.release()
        write(last)  # when the next may begin

    def texts(self, tokens, count, options):
        """The text of each new token; a character whose bytes are in several comes with the last."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in self.run.model.generate(tokens, count, **options):
            if token.item() == self.run.encoding.eot_token:
                break
            yield decoder.decode(piece(self.run.encoding, token.item()))
        yield decoder.decode(b"", final=True)

    def stop(self, given):
        self.stopping.set()
        return {"stopped": True}


def python_lines(live, given):
    """What a user would write to get the edited text."""
    (changes, concept, alpha), settings, options = live.steering(given), live.settings(given), live.options
    loaded = bool(concept) and concept == options.vector
    names = {"text_of", *["Change", "change_features"] * bool(changes), *["add_features"] * bool(concept),
             *(["Vector"] if loaded else ["contrast", "toy_texts"] * bool(concept))}
    imported = ", ".join(sorted(names, key=lambda name: (name[0].islower(), name)))
    opened = "".join(f", {value!r}" for value in (options.source, options.site)[
        : 2 if options.site else options.source != "own"])
    lines = ["from checkpoint import open_run", "from features import prompt_tokens", "from sources import open_source",
             f"from steer import {imported}", "", f"run = open_run({options.run!r})",
             f"source = open_source(run{opened})"]
    code = "code"
    if changes:
        lines += ["changes = [" + ",\n           ".join(map(repr, changes)) + "]"]
        code = "change_features(changes, layer, code)"
    if concept:
        lines += [f"vector = Vector.load({concept!r}, run.model, source)" if loaded else
                  f"vector = contrast(run, source, {concept!r}, *toy_texts({concept!r}))"]
        code = f"add_features(vector, {alpha!r}, layer, {code})"
    edited = f",\n                            **source.edited(lambda layer, code: {code})" if code != "code" else ""
    return "\n".join([*lines, f"prompt = prompt_tokens(run, {text_in(given, 'text')!r})",
                      f"tokens = run.model.generate(prompt, {number(given, 'tokens', 1, 1024, 60, int)}, "
                      f"temperature={settings['temperature']!r}, top_p=0.9, seed={settings['seed']},\n"
                      f"                            stop=run.encoding.eot_token{edited})",
                      "print(text_of(run.encoding, list(tokens)))"])
