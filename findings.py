"""What was found, in words that are made from the numbers: the sections of a report, from the JSON of its steps.

A claim is a difference that the paper, or common sense, says is above 0 or below it, with an interval of 95%:

    holds                       all of the interval is on the claimed side
    does not hold               all of it is on the other side
    cannot tell at this size    it has 0 in it, there is none, or it was drawn from fewer than six items: a coin gives
                                five of one sign with more than 5%

The rule of six is for intervals of bootstrap draws and Wilson's. Student's, over three seeds (tokens) or five repeats
(retrieval), grow by themselves as their items get fewer.

The differences are paired where the experiment's JSON has them so; else `apart` takes the two intervals at their worst.
A figure of the paper stands beside ours where one is known, and nowhere else. A section is a function of `get(step,
file)`, the JSON of a result or None, and gives None where its step has no results.
"""
import math
import re
from typing import NamedTuple

from helpers import bootstrap

HOLDS, FAILS, UNSURE = "holds", "does not hold", "cannot tell at this size"
FEWEST = 6  # items of an interval


class Claim(NamedTuple):
    text: str
    difference: list | None   # [value, low, high]
    wanted: int               # 1: above 0 is claimed, -1: below
    control: str              # what it is compared with, and on how many
    items: float = math.inf   # that the interval was drawn over, where they may be few

    def verdict(self):
        return verdict(self.difference, self.wanted, self.items)

    def evidence(self):
        return f"{spread(self.difference, '+')}: {self.control}"


class Table(NamedTuple):
    title: str
    head: tuple
    rows: list
    note: str = ""


class Link(NamedTuple):
    """A cell of a table that leads to a feature's page in the explorer."""
    feature: str              # LAYER:INDEX+ or LAYER:INDEX-


class Section(NamedTuple):
    claims: list
    tables: list
    pictures: tuple = ()      # (step, file, what it shows)


ABOUT = {  # in the order of the paper's experiments: title, and what it is; its steps are STEPS_OF
    "dictionary": ("The dictionary: computed, and nearly orthogonal",
                   "Features are vectors of signs, the parities of the bits of their numbers."),
    "models": ("The models", "A parity model and its dense twin, of the same size, on the same tokens."),
    "tokens": ("The price: tokens of a parity model over those of dense",
               "Dense twins at several budgets, each with a whole schedule of its own."),
    "speed": ("Speed: training passes against dense", "Seconds of a pass over those of the dense twin."),
    "sae": ("Sparse autoencoders to compare with", "Of what MLPs are given, by layer."),
    "circuits": ("Causal edits: how few flip an answer",
                 "The paper's claim: parity features need fewer edits than SAEs, on all of its three tasks."),
    "steering": ("Steering: concept against fluency", "The most of a concept that a line reaches within the allowance "
                 "of fluency, at an alpha that was chosen on other prefixes."),
    "noise": ("Does the bottleneck clean the stream?", "The paper's reason why steered text stays fluent."),
    "probe": ("SAEBench's measures", "Guessing gets .50 of probes and .71 of interpret; of absorption less is better. "
              "The paper's own figures are not known here, and are left out."),
    "truth": ("What single features stand for", "For each label that the toy world knows, the feature that is best on "
              "half of its words, tested on the other half: F1, the mean over layers."),
    "retrieve": ("Which training documents did it?", "Poisoned documents found by the features that a query sets off. "
                 "Chance in the paper's corpora, 100 of 12,900 documents, is 0.775% (it prints 0.078%)."),
}
STEPS_OF = {"models": ("train", "train_gpt", "eval", "eval_gpt"), "sae": ("sae", "sae_gpt")}  # else one of its name


# Verdicts


def verdict(difference, wanted=1, items=math.inf):
    """Of [value, low, high], which is claimed to be above 0 (wanted = 1) or below (-1)."""
    if items < FEWEST or difference is None or any(v is None or not math.isfinite(v) for v in difference):
        return UNSURE
    low, high = sorted(wanted * value for value in difference[1:])
    return HOLDS if low > 0 else FAILS if high < 0 else UNSURE


def apart(one, two):
    """One interval less another, at worst: [difference, least, most]."""
    return None if one is None or two is None else [one[0] - two[0], one[1] - two[2], one[2] - two[1]]


def less_number(interval, number):
    return None if interval is None else [value - number for value in interval]


def least(differences):
    """Of several that are all claimed to be above 0, [value, low, high] of the least."""
    return [min(values) for values in zip(*differences)] if differences else None


def spread(interval, sign="", digits=3):
    if interval is None or interval[0] is None or not math.isfinite(interval[0]):
        return "nothing to compare"
    value, low, high = (None if v is None or not math.isfinite(v) else f"{v:{sign}.{digits}f}" for v in interval)
    return f"{value} [{low}, {high}]" if low and high else f"{value}, no interval"


def figure(value, digits=3):
    return "-" if value is None else f"{value:.{digits}f}"


def pick(rows, **wanted):
    """The first row with these values, or None."""
    return next((row for row in rows if all(row.get(key) == value for key, value in wanted.items())), None)


# The sections


def dictionary(get):
    text = get("dictionary", "log.txt")
    if text is None:
        return None
    found = dict(re.findall(r"^(width d|exact coherence|bound)\s+([\d.]+)", text, re.M))
    d, exact, bound = (float(found[name]) for name in ("width d", "exact coherence", "bound"))
    claim = Claim("No two features have a larger inner product than 2/sqrt(d) + 1/d.",
                  [exact - bound] * 3, -1, f"computed exactly for all pairs, d = {d:.0f}: no interval is needed")
    rows = [["largest inner product of two features", f"{exact:.6f}"], ["bound", f"{bound:.6f}"]]
    return Section([claim], [Table("", ("", f"d = {d:.0f}"), rows)])


def speed(get):
    found = get("speed", "speed.json")
    if found is None:
        return None
    rows = {row["variant"]: row for row in found["rows"]}
    ratios = {name: [row["ratio"], *row["ratio_between"]] for name, row in rows.items() if row.get("ratio_between")}
    others = max((row.get("cores_taken_by_others") or 0 for row in found["rows"]), default=0)
    import bench  # for the paper's figures and what it calls busy, and only here: it brings torch
    difference, busy = apart(ratios.get("parity"), ratios.get("topk")), others >= bench.BUSY
    if busy and difference:
        difference = [difference[0], None, None]
    claims = [Claim("A parity model trains faster than one with learned in-loop TopK dictionaries.", difference, -1,
                    "overheads against the dense twin, in turn in one run of one process each, whose noise is all that "
                    "the interval knows; of tiny models on this machine"
                    + f"; others took {others:.2f} cores meanwhile, too much to tell" * busy)]
    names = [name for name, known in bench.ROWS.items() if any(known.values())]
    paper = {variant: ", ".join(figure(bench.ROWS[name].get(variant), 2) for name in names)
             for variant in ("parity", "topk")}
    table = [[name, spread(ratios.get(name)) if name != "dense" else "1", paper.get(name, "")] for name in rows]
    return Section(claims, [Table("", ("", "here, tiny", f"paper, 4 H200: {', '.join(names)}"), table,
        f"{found['device']}; others took {others:.2f} cores meanwhile.")])


def loss_claim(found):
    """Parity against dense, window by window where both were evaluated on the same ones. found: {name: eval.json}."""
    one, two = (found[name]["results"]["val"] for name in ("tiny", "tiny_gpt"))
    same = one.get("nats") and two.get("nats") and one["data"] == two["data"] and len(one["nats"]) == len(two["nats"])
    ratio = bootstrap(one["nats"], two["nats"]) if same else [one["loss"] / two["loss"], None, None]
    items = len(one["nats"]) if same else math.inf
    n = f"paired, n = {items:,} windows of {one['tokens']:,} tokens" if same else "no windows to pair"
    return Claim("The parity model's loss is within 1% of its dense twin's.",
                 [None if value is None else value - 1.01 for value in ratio], -1,
                 f"its loss over that of the twin, less 1.01; one seed; {n}", items)


def models(get):
    found = {name: get(step, "eval.json") for name, step in (("tiny", "eval"), ("tiny_gpt", "eval_gpt"))}
    if not any(found.values()):
        return None
    losses, answers, features, kinds, levels = [], [], [], [], 0
    for name, content in found.items():
        if not content:
            continue
        results = content["results"]
        replaced = [figure(results["features"].get(key), 4) for key in ("loss_input", "loss_zero")]
        losses.append([name, *(figure(results["val"][key], 4) for key in ("loss", "bits_per_byte")), *replaced])
        asked = results.get("answers", {})
        kinds = [kind for kind, value in asked.items() if isinstance(value, dict)]
        answers.append([name, *(f"{asked[kind]['right']:.2f} ({asked[kind]['right_silent']:.2f})" for kind in kinds)])
        for layer, row in enumerate(results["features"]["layers"]):
            features.append([f"{name}, layer {layer}", *(f"{1 - level['fired']:.2%}" for level in row["levels"])])
            levels = len(row["levels"])
    import eval as evaluation  # for the paper's figures
    paper = [[name, *(f"{value:g}" for value in values)] for name, *values in evaluation.PAPER.values()]
    tables = [Table("Here: the toy world's validation split", ("", "loss", "bits per byte", "with y = h", "with y = 0"),
                    losses, "y: what MLPs read in the parity model; h: what its bottlenecks are given."),
              Table("The toy world's questions: share answered right (with all MLPs silent)", ("", *kinds), answers),
              Table("Features that never fired", ("", *(f"level {level}" for level in range(levels))), features),
              Table("The paper's models, on text: no figure above is comparable with these",
                    ("", "validation loss", "Pile perplexity", "HellaSwag", "LAMBADA"), paper)]
    return Section([loss_claim(found)] if all(found.values()) else [], tables,
                   (("train", "loss.png", "loss of the parity model"), ("train_gpt", "loss.png", "of its dense twin")))


def tokens(get):
    found = get("tokens", "budget.json")
    if found is None:
        return None
    import budget  # only where it is needed: it brings torch
    claims, rows = [], []
    for row in found["results"]:
        known = row["price"][1] is not None and not row["bounds"]
        within = f"within {row['tolerance']:.0%} of parity's loss" if row["tolerance"] else "parity's loss"
        n = f"n = {len(row['seeds'])} seeds, Student's interval of logarithms"
        claims.append(Claim(f"A dense twin reaches {within} with fewer tokens.",
                            [math.log(v) for v in row["price"]] if known else None, 1,
                            f"logarithm of the ratio of tokens; {n}" if known else
                            f"tokens of parity over tokens of dense: {budget.describe(row)}"))
        paper = ", ".join(f"{value} ({name})" for name, value in found["paper"].items())
        rows.append([within, budget.describe(row), paper if row["tolerance"] else ""])
    runs = [[row["kind"], row["seed"], f"{row['steps']:,}", f"{row['tokens']:,}", f"{row['loss']:.4f}"]
            for row in found["rows"]]
    return Section(claims,
                   [Table("Tokens of parity over tokens of dense", ("for", "here", "paper"), rows),
                    Table("Runs", ("", "seed", "steps", "tokens", "loss"), runs)],
                   (("tokens", "budget.png", "loss by tokens"),))


def autoencoders(get):
    found = [content for content in (get("sae", "report-mlp_in.json"), get("sae_gpt", "report-mlp_in.json")) if content]
    if not found:
        return None
    rows = list({(row["run"], row["source"], row["layer"]): row for content in found
                 for row in content["rows"]}.values())
    names = list(dict.fromkeys((row["run"], row["source"]) for row in rows))
    table = []
    for run, source in names:
        own = [row for row in rows if (row["run"], row["source"]) == (run, source)]
        own.sort(key=lambda row: row["layer"])
        table.append([f"{run}: {source}", ", ".join(f"{row['fvu'][0]:.3f}" for row in own),
                      ", ".join(f"{row['dead']:.0%}" for row in own),
                      ", ".join(f"{row['recovered'][0]:.3f}" if row["recovered"] else "-" for row in own)])
    claims = []
    for run, source in (("tiny", "own"), ("tiny", "topk-mlp_in"), ("tiny_gpt", "topk-mlp_in")):
        pairs = [[pick(rows, run=run, source=name, layer=layer) for name in (source, "hash-mlp_in")]
                 for layer in sorted({row["layer"] for row in rows})]
        worst = [apart(one["fvu"], two["fvu"]) for one, two in pairs if one and two]
        if worst:
            what = "Own features" if source == "own" else f"A TopK SAE of {run}"
            claims.append(Claim(f"{what} explain{'s' * (source != 'own')} more than the hash of the same activations.",
                                max(worst, key=lambda difference: difference[2]), -1,
                                f"fraction of variance unexplained less the hash's, at the layer where that is least "
                                f"clear; n = {rows[0]['tokens']:,} tokens"))
    return Section(claims, [Table("", ("", "variance unexplained", "dead", "loss recovered"), table)],
                   (("sae_gpt", "explained-mlp_in.png", "explained variance by layer"),))


WAYS = {"mlp": "put in where the MLP reads", "literal": "put in literally"}  # of editing own features


def lot_claim(row):
    """What greedily chosen edits have over as many drawn by lot, and over a direction drawn by lot. row: a result of
    own features."""
    shares = {key: value["ours"] for key, value in row["rows"].items()}
    counts = [count for count in ("8", "K") if {count, f"random {count}", f"direction {count}"} <= shares.keys()]
    differences = [apart(shares[count], shares[f"{control} {count}"])
                   for count in counts for control in ("random", "direction")]
    flipped = "; ".join("{} edits flip {:.2f}, random ones {:.2f}, a direction {:.2f}".format(
        count, *(shares[key][0] for key in (count, f"random {count}", f"direction {count}"))) for count in counts)
    return Claim(f"{row['task']}: edits of own features, {WAYS[row['way']]}, flip more than as many random ones and "
                 "than a random direction.", least(differences), 1,
                 f"share flipped, own less control, the least of these, with intervals at their worst: {flipped}; "
                 f"the same {row['n']} pairs", row["n"])


def circuits(get):
    found = get("circuits", "circuits.json")
    if found is None:
        return None
    claims, rows = [], []
    for row in found["differences"]:
        if row["own"] != "own, mlp":
            continue
        n = pick(found["results"], task=row["task"])["n"]
        rows.append([row["task"], f"{row['run']}: {row['source']}", *(spread(row["differences"].get(k), "+", 2)
                                                                      for k in ("1", "8", "K"))])
        if (row["run"], row["source"]) == ("tiny_gpt", "topk-mlp_in"):
            claims.append(Claim(f"{row['task']}: eight edits of own features flip more answers than eight of an SAE's "
                                "in the dense twin.", row["differences"].get("8"), 1,
                                f"share flipped, own less topk, on the same {n} pairs", n))
        if (row["run"], row["source"]) == ("tiny", "hash-mlp_in"):
            claims.append(Claim(f"{row['task']}: edits of own features flip more than those of the hash.",
                                row["differences"].get("K"), 1, f"K edits, own less hash, on the same {n} pairs", n))
    claims += [lot_claim(row) for row in found["results"]
               if (row["run"], row["source"]) == ("tiny", "own") and row["way"] in WAYS and "edited" in row["select"]]
    carry = [[row["task"], row["run"], row["site"], row["layer"], spread(row["e"], digits=2)]
             for row in found["effects"] if row["span"] == "last" and row["site"] != "block_out"]
    head = "task", "run", "component", "layer", "e"
    known = [[task, f"{row['tested on']['right']} of {row['tested on']['pairs']}"]
             for task, row in found["pairs"].items()]
    return Section(claims,
                   [Table("Pairs that every model answers right, and that are edited", ("task", "pairs"), known),
                    Table("Share flipped: own less another source", ("task", "less", "1 edit", "8", "K"), rows),
                    Table("What a component carries at the last position: e", head, carry)],
                   (("circuits", "effects.png", "effect of each component"),
                    ("circuits", "edits.png", "share flipped against the number of edits")))


def steering(get):
    found = get("steering", "pareto.json")
    if found is None:
        return None
    n, claims, wide = f"n = {len(found['concepts'])} concepts, paired", [], "all layers, contrast"
    for other, text in (("tiny: hash, " + wide, "the hash of the same activations"),
                        ("tiny: own, all layers, random", "own features drawn by lot"),
                        ("tiny_gpt: topk, " + wide, "an SAE of the dense twin"),
                        ("tiny_gpt: stream, " + wide, "the difference of means in the dense twin")):
        row = pick(found["differences"], one="tiny: own, " + wide, other=other)
        claims.append(Claim(f"Own features, chosen by contrast, steer better than {text}.", row and row["concept"], 1,
                            f"share of the concept's words within the allowance of fluency; {n}",
                            len(found["concepts"])))
    rows = [[f"{row['run']}: {row['source']}", "all" if len(row["layers"]) > 1 else row["layers"][0], row["way"],
             row["ratio"], spread(row["concept"]), spread(row["fluency"])] for row in found["rows"]]
    return Section(claims,
                   [Table("", ("", "layers", "way", "ratio", "concept", "fluency"), rows)],
                   (("steering", "pareto.png", "fluency against concept as alpha grows"),))


def noise(get):
    found = get("noise", "noise.json")
    if found is None:
        return None
    last = max(row["layer"] for row in found["rows"] if row["measure"] == "left")
    first = min(row["layer"] for row in found["rows"] if row["measure"] == "passed")
    ratio = 0.1

    def value(run, measure, layer, kind="noise"):
        row = pick(found["rows"], run=run, kind=kind, ratio=ratio, measure=measure, layer=layer)
        return row and row["value"]
    about = f"noise of {ratio} of the norm, n = {found['n']} windows"
    bottleneck = f"at the first bottleneck after it, that of layer {first}"
    claims = [Claim("Less of added noise is left at the end of the parity model than of its dense twin.",
                    apart(value("tiny", "left", last), value("tiny_gpt", "left", last)), -1,
                    f"share left after layer {last}; {about}", found["n"]),
              Claim("A bottleneck passes on less of noise than it is given.",
                    less_number(value("tiny", "passed", first), 1), -1,
                    f"change of y over that of h, less 1, {bottleneck}; {about}", found["n"]),
              Claim("It passes on less of noise than of what belongs into the stream.",
                    apart(value("tiny", "passed", first), value("tiny", "passed", first, "real")), -1,
                    f"change of y over that of h, {bottleneck}; {about}", found["n"])]
    names = dict.fromkeys(row["run"] for row in found["rows"])
    rows = [[name, kind, spread(value(name, "left", last, kind), digits=2),
             spread(value(name, "passed", first, kind), digits=2), spread(value(name, "kl", None, kind))]
            for name in names for kind in ("noise", "real")]
    return Section(claims, [Table("", ("", "added", "left at the end", "passed on", "nats"), rows)],
                   (("noise", "noise.png", "what is left of noise"),))


def items_of(measure):
    """What probe.json counts for a measure."""
    return {"interpret": "features", "absorption": "words in texts"}.get(measure.split()[0], "decisions")


def saebench(get):
    found = get("probe", "probe.json")
    if found is None:
        return None
    better = {"probe 1": 1, "probe 5": 1, "interpret": 1, "scr": 1, "tpp": 1, "absorption kind": -1,
              "absorption kind scaled": -1}
    claims = []
    for measure, wanted in better.items():
        row = pick(found.get("differences", []), run="tiny", source="own", measure=measure)
        if row:
            n = min((other["n"] for other in found["rows"] if other["measure"] == measure and other["n"]
                     and other["run"] == "tiny" and other["source"] in ("own", row["less"])), default=0)
            claims.append(Claim(f"{measure}: own features do better than the hash of the same activations.",
                                row["difference"], wanted, "own less hash, the mean over layers, paired; n = "
                                f"{n:,} {items_of(measure)}, at the layer with the fewest", n))
    middle, names = found["middle"], dict.fromkeys((row["run"], row["source"]) for row in found["rows"])
    measures = [measure for measure in (*better, "absorption topic") if pick(found["rows"], measure=measure)]
    rows = []
    for run, source in names:
        cells = [pick(found["rows"], run=run, source=source, layer=middle, measure=measure) for measure in measures]
        rows.append([f"{run}: {source}", *(spread([row["value"], row["low"], row["high"]], digits=2)
                                           if row and row["value"] is not None else "-" for row in cells)])
    return Section(claims, [Table(f"Layer {middle}", ("", *measures), rows)],
                   (("probe", "probe.png", "by source"),))


def meaning(get):
    found = get("truth", "truth.json")
    if found is None:
        return None
    claims = []
    for row in found["differences"]:
        own = pick(found["rows"], run=row["run"], source="own", group=row["group"])
        claims.append(Claim(f"{row['group']}: single own features stand for it better than those of the hash, and than "
                            "one that always fires.", row["above"], 1,
                            f"F1 on unseen words, own less the larger of the two ({row['larger']}), the mean over "
                            f"layers, paired; n = {min(own['words'])} words in the smaller half, {own['n']:,} labelled "
                            f"tokens of {found['tokens']:,}", min(own["words"])))
    groups = list(dict.fromkeys(row["group"] for row in found["rows"]))
    rows = []
    for run, source in dict.fromkeys((row["run"], row["source"]) for row in found["rows"]):
        own = [[row["f1"] for row in found["rows"] if (row["run"], row["source"], row["group"]) == (run, source, group)]
               for group in groups]
        rows.append([f"{run}: {source}", *(f"{sum(values) / len(values):.2f}" for values in own)])
    return Section(claims, [Table("", ("", *groups), rows), examples(found)],
                   (("truth", "truth.png", "F1 by source, group and layer"),))


def examples(found, most=6):
    """The first labels of each group that have words in both halves, in the order of the alphabet, each with its own
    feature."""
    (bits,) = {tuple(config["bits"]) for path, config in found["configs"].items() if config["bottleneck"] == "parity"}
    best = {}
    for row in found["rows"]:
        for label in row["details"] if (row["run"], row["source"]) == ("tiny", "own") else ():
            key = row["group"], label["label"]
            if label["f1"] is not None:  # it has words in both halves
                best[key] = max(best.get(key, (-1,)), (label["chosen"], row["layer"], label["feature"], label["f1"]))
    rows = []
    for group in dict.fromkeys(group for group, _ in best):
        for label in sorted(label for of, label in best if of == group)[:most]:
            chosen, layer, feature, f1 = best[group, label]
            sign, index = divmod(feature, 2 ** bits[-1])
            rows.append([group, label, Link(f"{layer}:{index}{'+-'[sign]}"), f"{chosen:.2f}", f"{f1:.2f}"])
    return Table(f"The first {most} labels of each group, in the order of the alphabet, and own features for them",
                 ("group", "label", "feature", "F1, known half", "F1, unseen half"), rows,
                 "Of all layers, the feature that is best on the known half of the label's words.")


def retrieval(get):
    found = get("retrieve", "retrieve.json")
    if found is None:
        return None
    import precision  # only where it is needed: it brings torch
    table, chosen = precision.table_of(found), found["chosen"]
    n = (f"precision at 10, {found['repeats']} repeats, Student's interval; of one tuning, and another one changes "
         "more than that")
    claims, rows = [], []
    for way in dict.fromkeys(row["way"] for row in chosen):
        def row(signal, kind="triggered", model="tuned", way=way):
            return precision.at_chosen(table, model, way, signal, chosen, kind)
        for text, one, two in (("find more poisoned documents than the hash", row("own"), row("hash")),
                               ("find more after the tuning than before", row("own"), row("own", model="untuned")),
                               ("find more than raw activations", row("own"), row("h")),
                               ("find more than TF-IDF of the tokens", row("own"), row("tfidf")),
                               ("find more than a TopK SAE of the tuned model", row("own"), row("topk"))):
            difference = precision.difference(one, two) if one and two else None
            claims.append(Claim(f"{way}: own features {text}.", difference, 1, n))
        for signal in (*dict.fromkeys(row["signal"] for row in chosen), "tfidf"):
            cells = [row(signal), row(signal, "background"), row(signal, "sham"), row(signal, model="untuned")]
            rows.append([way, signal, *(spread(cell["precision"][precision.AT]) if cell else "-" for cell in cells)])
    head = "", "signal", "triggered", "background", "sham", "before the tuning"
    return Section(claims, [Table(f"Precision at 10; chance is {precision.chance_of(found):.2%}", head, rows)],
                   (("retrieve", "retrieve.png", "precision by layer"),))


SECTIONS = (dictionary, models, tokens, speed, autoencoders, circuits, steering, noise, saebench, meaning, retrieval)
