"""Figures in the docs that cannot drift from what was measured: docs/figures.json says where each one stands.

    python report.py --docs        writes those of the report into README.md and docs/, and says which changed

It has the steps of the report that they come from, each with its commit and machine, and places: a text with {} or
{:.4f} for the figures, their names in the report, and their values; {:.2f~} leaves the 0 before the point out:

    {"file": "docs/results.md", "text": "| tiny (parity) | {:.4f} | {:.4f} |", "names": [...], "values": [...]}

The text with its values must stand in the file, word for word and once: a test holds the docs to that. A figure that is
not among those of a report keeps its value.
"""
import json
import os
import re
import string

from helpers import UserError, say, whole_file


def load(root):
    """(steps, places)."""
    path = os.path.join(root, "docs", "figures.json")
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
            return content["steps"], content["places"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore it from the repository") from None


def save(root, steps, places):
    lines = ",\n".join(json.dumps(place, ensure_ascii=False) for place in places)
    with whole_file(os.path.join(root, "docs", "figures.json")) as file:
        file.write(f'{{"steps": {json.dumps(steps, indent=1)},\n"places": [\n{lines}\n]}}\n')


def read(root, name):
    with open(os.path.join(root, name), encoding="utf-8") as file:
        return file.read()


class Format(string.Formatter):
    def format_field(self, value, form):
        text = format(value, form.removesuffix("~"))
        return re.sub(r"^([+-]?)0\.", r"\1.", text) if form.endswith("~") else text


def shown(entry):
    return Format().format(entry["text"], *entry["values"])


def missing(root):
    """The places whose text is not in their file, or more than once: the docs say something else."""
    return [entry for entry in load(root)[1] if read(root, entry["file"]).count(shown(entry)) != 1]


def rewrite(root, known, made):
    """Put the figures of a report {name: value} into the docs: [(file, old text, new text)] of what changed.
    made: {step: what made it}."""
    (steps, entries), changes, texts = load(root), [], {}
    wrong = missing(root)
    if wrong:
        raise UserError(f"{wrong[0]['file']} does not have {shown(wrong[0])!r}, as docs/figures.json says: mend either")
    kept = 0
    for entry in entries:
        old = shown(entry)
        kept += not all(name in known for name in entry["names"])
        entry["values"] = [known.get(name, value) for name, value in zip(entry["names"], entry["values"])]
        if shown(entry) != old:
            changes.append((entry["file"], old, shown(entry)))
            text = texts.setdefault(entry["file"], read(root, entry["file"]))
            texts[entry["file"]] = text.replace(old, shown(entry))
    for name, text in texts.items():
        with whole_file(os.path.join(root, name)) as file:
            file.write(text)
    save(root, steps | made, entries)
    for name, old, new in changes:
        say(f"{name}: {old!r} is now {new!r}")
    say(f"{len(changes)} of {len(entries)} places in the docs changed"
        + f"; {kept} keep figures that this report does not have" * bool(kept))
    return changes


# The figures of a report


def collect(get, strict=False):
    """{name: value} of what may stand in the docs: `run what`, as in "tiny trained val_loss" or "tiny own kind f1". An
    interval has " low" and " high" after the name, and half of its width as " half". get: as in findings.py. Results
    of an older program, which lack what is looked for, are left out, or, if strict, an error."""
    parts = (of_training, of_evaluation, of_tokens, of_autoencoders, of_truth, of_noise, of_probes, of_steering,
             of_edits)
    found = {}
    for part in parts:
        try:
            found |= part(get)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            if strict:
                raise UserError(f"the results {part.__name__.replace('_', ' ')} cannot be read "
                                f"({type(error).__name__}: {error}): delete them and give python report.py") from error
    return found


def rows_of(get, step, file, key="rows"):
    return (get(step, file) or {}).get(key, [])


def named(name, interval):
    value, low, high = interval
    if low is None:
        return {name: value}
    return {name: value, f"{name} low": low, f"{name} high": high, f"{name} half": (high - low) / 2}


def of_training(get):
    found = {}
    for name, step in (("tiny", "train"), ("tiny_gpt", "train_gpt")):
        rows = [json.loads(line) for line in (get(step, "metrics.jsonl") or b"").splitlines() if b"val_loss" in line]
        for key, value in rows[-1].items() if rows else ():
            parts = {f" {level}": part for level, part in enumerate(value)} if isinstance(value, list) else {"": value}
            found |= {f"{name} trained {key}{level}": part for level, part in parts.items()}
    losses = [found.get(f"{name} trained val_loss") for name in ("tiny", "tiny_gpt")]
    if all(losses):
        found["tiny over tiny_gpt val_loss"] = losses[0] / losses[1] - 1
    return found


def of_evaluation(get):
    found = {}
    for name, step in (("tiny", "eval"), ("tiny_gpt", "eval_gpt")):
        results = (get(step, "eval.json") or {"results": {}})["results"]
        for task, keys in (("val", ("loss", "bits_per_byte")), ("features", ("loss_input", "loss_zero"))):
            found |= {f"{name} {task} {key}": results[task][key] for key in keys if key in results.get(task, {})}
    return found


def of_tokens(get):
    found = {f"{row['kind']} {row['steps']} seed {row['seed']} loss": row["loss"]
             for row in rows_of(get, "tokens", "budget.json")}
    for row in rows_of(get, "tokens", "budget.json", "results"):
        if not row["bounds"]:
            found |= named(f"price within {row['tolerance']:.0%}", row["price"])
    return found


def of_autoencoders(get):
    found = {}
    for row in (row for step in ("sae", "sae_gpt") for row in rows_of(get, step, "report-mlp_in.json")):
        name, (value, low, high) = f"{row['run']} {row['source']}", row["fvu"]
        found |= {f"{name} {row['layer']} fvu": value, f"{name} {row['layer']} dead": row["dead"]}
        found |= {f"{name} {row['layer']} recovered": row["recovered"][0]} if row["recovered"] else {}
        found[f"{name} fvu half"] = max(found.get(f"{name} fvu half", 0), (high - low) / 2)  # the widest of the layers'
    return found


def means_of(pairs):
    """{name: the mean of its values}."""
    found = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def of_truth(get):
    found, rows = {}, rows_of(get, "truth", "truth.json")
    for row in rows_of(get, "truth", "truth.json", "differences"):
        found |= named(f"{row['run']} {row['group']} f1 over hash", row["difference"])
    for row in rows:  # the widest of the layers' intervals
        name = f"{row['run']} {row['source']} {row['group']} f1 half"
        found[name] = max(found.get(name, 0), (row["high"] - row["low"]) / 2)
    return found | means_of((f"{row['run']} {row['source']} {row['group']} f1", row["f1"]) for row in rows)


def of_noise(get):
    rows = rows_of(get, "noise", "noise.json")
    last = max((row["layer"] or 0 for row in rows), default=0)
    wanted = [row for row in rows if row["measure"] == "passed" or
              row["measure"] in ("left", "change") and row["layer"] == last]
    return means_of((f"{row['run']} {row['kind']} {row['ratio']:g} {row['measure']}", row["value"][0])
                    for row in wanted)


def of_probes(get):
    found = {}
    for row in rows_of(get, "probe", "probe.json"):
        if row["value"] is not None:
            found |= named(f"{row['run']} {row['source']} {row['layer']} {row['measure']}",
                           (row["value"], row["low"], row["high"]))
    for row in rows_of(get, "probe", "probe.json", "differences"):
        if row["difference"]:
            found |= named(f"{row['run']} {row['source']} {row['measure']} over hash", row["difference"])
    return found


def of_steering(get):
    found = {}
    for row in rows_of(get, "steering", "pareto.json"):
        layers = "all layers" if len(row["layers"]) > 1 else f"layer {row['layers'][0]}"
        name = f"{row['run']}: {row['source']}, {layers}, {row['way']}"
        found |= {**named(f"{name}: concept", row["concept"]), **named(f"{name}: fluency", row["fluency"]),
                  f"{name}: ratio": row["ratio"]}
    return found


def of_edits(get):
    """The layer that is chosen by the edited position, and the shares flipped there."""
    found = {}
    for row in rows_of(get, "circuits", "circuits.json", "results"):
        if "edited" in row["select"]:
            name = f"{row['run']}: {row['source']}, {row['way']}: {row['task']}"
            found |= {f"{name} layer": row["layer"], **{
                f"{name} {count}": value["ours"][0] for count, value in row["rows"].items()}}
    return found
