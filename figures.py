"""Figures in the docs that cannot drift from what was measured: docs/figures.json says where each one stands.

    python report.py --docs        writes those of the newest report into README.md and docs/, and says which changed

An entry is a place in a text, with {} or {:.4f} for the figures, their names in the report, and their values:

    {"file": "docs/results.md", "text": "| tiny (parity) | {:.4f} | {:.4f} |", "names": [...], "values": [...]}

The text with its values must stand in the file, word for word: a test holds the docs to that. A figure that is not
among those of a report keeps its value.
"""
import json
import os

from helpers import UserError, say, whole_file


def load(root):
    path = os.path.join(root, "docs", "figures.json")
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): restore it from the repository") from None


def read(root, name):
    with open(os.path.join(root, name), encoding="utf-8") as file:
        return file.read()


def shown(entry):
    return entry["text"].format(*entry["values"])


def missing(root):
    """The entries whose text is not in their file, or more than once: the docs say something else."""
    return [entry for entry in load(root) if read(root, entry["file"]).count(shown(entry)) != 1]


def rewrite(root, known):
    """Put the figures of a report {name: value} into the docs: [(file, old text, new text)] of what changed."""
    entries, changes, texts = load(root), [], {}
    wrong = missing(root)
    if wrong:
        raise UserError(f"{wrong[0]['file']} does not have {shown(wrong[0])!r}, as docs/figures.json says: mend either")
    for entry in entries:
        old = shown(entry)
        entry["values"] = [known.get(name, value) for name, value in zip(entry["names"], entry["values"])]
        if shown(entry) != old:
            changes.append((entry["file"], old, shown(entry)))
            text = texts.setdefault(entry["file"], read(root, entry["file"]))
            texts[entry["file"]] = text.replace(old, shown(entry))
    for name, text in texts.items():
        with whole_file(os.path.join(root, name)) as file:
            file.write(text)
    with whole_file(os.path.join(root, "docs", "figures.json")) as file:
        file.write("[\n" + ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries) + "\n]\n")
    for name, old, new in changes:
        say(f"{name}: {old!r} is now {new!r}")
    say(f"{len(changes)} of {len(entries)} places in the docs changed")
    return changes
