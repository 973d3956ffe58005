"""All of it in one command: train, measure, and write a page that says what holds.

    python report.py                          the models, the SAEs, every experiment: out/report/index.html
    python report.py --quick                  a first look, with shorter trainings and fewer items: out/report-quick/
    python report.py --only circuits,probe    these steps, and what they need
    python report.py --only tokens            the price of a parity model in tokens: budget.py
    python report.py --list                   the steps, their commands, and what would run
    python report.py --docs                   the report's figures into README.md and docs/: figures.py

A step is a command that can be given by hand. It is given again only if what it depends on has changed (steps.py), so
that an interrupted report goes on; a step that fails says so in the page, and the others go on. The page holds each
experiment's tables and pictures in the order of the paper's, its figures beside ours where they are known, and what was
found, in words that findings.py makes from the numbers. --quick has runs of its own, in its own folder, and leaves out
the poisoned documents, whose tuning alone takes minutes. The toy world is no evidence about language.
"""
import argparse
import base64
import contextlib
import glob
import html
import json
import os
import time

import config
import figures
from findings import ABOUT, FAILS, HOLDS, SECTIONS, STEPS_OF, UNSURE, Link, Section
from helpers import UserError, locked, provenance, run_script, say, suggest, whole_file, write_json
from steps import HERE, Step, clock, ended_by_signals, machine, read_record, reasons, result_of, run_all, with_needs

DATA = ("data/toy/*.bin", "data/toy/tokenizer.json")


# The steps


def settings_of(*names):
    """What configs say, without their comments."""
    return "\n".join(repr(config.load([os.path.join(HERE, "configs", f"{name}.py")])) for name in names)


def make_steps(out, quick=False):
    """Every step, in order. out: the folder of the report."""
    home = out if quick else "out"
    tiny, dense = f"{home}/tiny", f"{home}/tiny_gpt"
    runs = (tiny, "--against", dense)
    in_tiny, in_dense, in_out = (glob.escape(path) for path in (tiny, dense, out if quick else "out"))

    def words(*whole, short=()):
        return (*whole, *(short if quick else ()))

    def training(name, config, run, seconds):
        at = glob.escape(run)
        return Step(name, (words("train.py", f"configs/{config}.py", short=(f"--out={run}", "--max_steps=800")),),
                    ("data",), DATA, (f"{at}/loss.png", f"{at}/metrics.jsonl", f"{at}/config.json"), (f"{at}/best.pt",),
                    (at,), settings=settings_of(config), lasting=True, seconds=seconds)

    def saes(name, run, others, needs, seconds):
        kinds = ("--variant", "topk" if quick else "all") if others else ()
        at = glob.escape(run)
        return Step(name, (words("sae.py", run, *kinds, *others, short=("--steps", "400", "--eval-tokens", "8192")),),
                    needs, (*DATA, f"{at}/best.pt"), (f"{at}/sae/report-mlp_in.json", f"{at}/sae/explained-mlp_in.png"),
                    (f"{at}/sae/*-mlp_in-*/sae.safetensors",), (f"{at}/sae",),
                    tuple(f"{in_tiny}/sae/*-mlp_in-*/sae.safetensors" for _ in others[:1]), lasting=True,
                    seconds=seconds)

    models = (*DATA, f"{in_tiny}/best.pt", f"{in_dense}/best.pt")
    features = (*models, *(f"{at}/sae/*-mlp_in-*/sae.safetensors" for at in (in_tiny, in_dense)))
    every, trained = ("train", "train_gpt", "sae", "sae_gpt"), ("train", "train_gpt")

    def experiment(name, command, needs, reads, keeps, seconds, state=()):
        return Step(name, (command,), needs, reads, tuple(f"{in_tiny}/{file}" for file in keeps), (),
                    tuple(f"{in_tiny}/{file}" for file in state), seconds=seconds)

    budget = ("--steps", "800", "--budgets", "250,450", "--seeds", "2", "--out", f"{out}/budget")
    rival = "own,topk,hash,neurons,random"
    few, concepts = ("--limit", "256"), "space,cooking,cars,forest,magic,sport"
    found = [
        Step("data", (("data.py", "toy", "--out", "data/toy"),), leaves=DATA, state=("data/toy",), seconds=30),
        training("train", "tiny", tiny, 95 if quick else 350),
        training("train_gpt", "tiny_gpt", dense, 75 if quick else 275),
        Step("dictionary", (("kloosterman.py", "1024"),), seconds=2),
        experiment("eval", words("eval.py", tiny, short=few), ("train",), models[:-1], ("eval.json",), 45),
        Step("eval_gpt", (words("eval.py", dense, short=few),), ("train_gpt",), (*DATA, models[-1]),
             (f"{in_dense}/eval.json",), seconds=10),
        Step("tokens", (("budget.py", "--reuse", tiny, dense, *(budget if quick else ())),), trained, DATA,
             tuple(f"{in_out}/budget/budget.{kind}" for kind in ("json", "png")), (), (f"{in_out}/budget",),
             models[-2:], settings_of("tiny", "tiny_gpt"), True, 220 if quick else 1840),
        Step("speed", (words("bench.py", "--rows", "tiny", "--variants", "dense,parity,topk", "--json",
                             f"{out}/speed.json", short=("--repeats", "1")),), (), (),
             (f"{glob.escape(out)}/speed.json",), seconds=20 if quick else 60),
        saes("sae", tiny, (), ("train",), 50 if quick else 180),
        saes("sae_gpt", dense, ("--against", tiny), ("train_gpt", "sae"), 50 if quick else 640),
        experiment("circuits", words("circuits.py", *runs, short=("--pairs", "40", "--choose", "20")), every, features,
                   ("circuits.json", "effects.png", "edits.png"), 50 if quick else 400),
        experiment("steering", words("pareto.py", *runs, short=(
            "--concepts", concepts, "--prefix-count", "6", "--ratios", "0.1,0.3,0.7", "--fit", "10", "--tokens", "24")),
            every, features, ("pareto.json", "pareto.png"), 60 if quick else 1020, ("pareto_texts.jsonl",)),
        experiment("noise", words("noise.py", *runs, short=("--tokens", "2048")), trained, models,
                   ("noise.json", "noise.png"), 10 if quick else 35),
        experiment("probe", words("probe.py", *runs, short=("--layers", "2", "--features", "60", "--sources", rival)),
                   every, features, ("probe.json", "probe.png"), 120 if quick else 800, ("probe_unfinished.jsonl",)),
        experiment("truth", words("probe.py", "truth", *runs, short=("--tokens", "16384", "--sources", rival)), every,
                   features, ("truth.json", "truth.png"), 40 if quick else 200),
        Step("view", (words("view.py", tiny, short=("--effects", "256")),), ("train", "eval"), models[:-1], (),
             (f"{in_tiny}/features.html",), (f"{in_tiny}/view", f"{in_tiny}/features.npz"),
             seconds=20 if quick else 60)]
    if not quick:
        found.append(experiment("retrieve", ("retrieve.py", "all", tiny), ("train",), models[:-1],
                                ("retrieve/retrieve.json", "retrieve/retrieve.png"), 1200,
                                ("retrieve/make.json",)))  # without which it starts over
    return found


# What is known


def reader(steps, out):
    """get(step, file): the JSON, text or bytes of a result of a finished step, else None."""
    by_name = {step.name: step for step in steps}
    finished = {name for name, step in by_name.items() if read_record(out, step).get("error", "") is None}

    def get(name, file):
        if name not in finished:
            return None
        path = result_of(out, by_name[name], file)
        with contextlib.suppress(OSError, ValueError), open(path, "rb") as opened:
            content = opened.read()
            return json.loads(content) if file.endswith(".json") else (
                content.decode(errors="replace") if file.endswith(".txt") else content)
        return None
    return get


def states(steps, out):
    """Of each step: its record, a word on it, and its command lines."""
    found = {}
    for step in steps:
        record = read_record(out, step)
        why = reasons(step, record, out)
        if not record:
            word = "not run yet"
        elif record["error"]:
            word = f"failed: {record['error']}"
        else:
            word = f"done, but since then: {', '.join(why[:3])}" if why else "done"
        found[step.name] = {"record": record, "word": word, "commands": step.lines(),
                            "old": bool(record and not record["error"] and why)}
    return found


# The page

STYLE = """
:root { --paper: #fcfcfb; --card: #fff; --ink: #1d2327; --soft: #5c6670; --line: #e2e5e8; --faint: #f3f4f5;
  --accent: #075666; --good: #2b6e3f; --bad: #a33a0a; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181b; --card: #1a1f23; --ink: #e4e8ea; --soft: #98a3ac;
  --line: #2c343a; --faint: #20262b; --accent: #7fd5e3; --good: #79c58f; --bad: #e8975a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 24px 20px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 22px; margin: 0 0 6px; } h2 { font-size: 18px; margin: 44px 0 6px; }
h3 { font-size: 14px; margin: 20px 0 4px; color: var(--soft); }
p { margin: 0 0 10px; max-width: 76ch; } a { color: var(--accent); }
.soft { color: var(--soft); } .small { font-size: 13px; }
code { font: 13px ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
pre { background: var(--faint); border-radius: 6px; padding: 8px 12px; margin: 6px 0; white-space: pre-wrap; }
.scroll { overflow-x: auto; } .scroll:focus-visible { outline: 2px solid var(--accent); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { padding: 4px 12px 4px 0; text-align: left; vertical-align: baseline; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; font-size: 13px; } .figures :is(th, td) { white-space: nowrap; }
.verdict { font-weight: 600; white-space: nowrap; } .holds { color: var(--good); } .fails { color: var(--bad); }
.unsure { color: var(--soft); }
.problem { border: 1px solid var(--bad); color: var(--bad); border-radius: 6px; padding: 8px 12px; margin: 8px 0; }
figure { margin: 12px 0; } img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
figcaption { color: var(--soft); font-size: 13px; }
ul.claims { list-style: none; padding: 0; margin: 8px 0; } ul.claims li { margin: 0 0 8px; max-width: 84ch; }
@media (max-width: 480px) { body { padding: 16px 12px 40px; font-size: 14px; } .verdict { white-space: normal; } }
"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>ParityTransformer: report</title><style>{style}</style></head><body>{content}</body></html>
"""
KINDS = {HOLDS: "holds", FAILS: "fails", UNSURE: "unsure"}


def escape(value):
    return html.escape(str(value))


def badge(verdict):
    return f'<span class="verdict {KINDS[verdict]}">{escape(verdict)}</span>'


def write_cell(cell, explorer):
    if isinstance(cell, Link) and explorer:
        return f'<td><a href="{escape(explorer)}#{escape(cell.feature)}">{escape(cell.feature)}</a></td>'
    return f"<td>{escape(cell.feature if isinstance(cell, Link) else cell)}</td>"


def write_table(table, explorer):
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    rows = "".join("<tr>" + "".join(write_cell(cell, explorer) for cell in row) + "</tr>" for row in table.rows)
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    note = f'<p class="soft small">{escape(table.note)}</p>' if table.note else ""
    return (f'{title}<div class="scroll" tabindex="0"><table class="figures"><thead><tr>{head}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>{note}")


def write_picture(get, step, file, what):
    content = get(step, file)
    if not content:
        return ""
    data = base64.b64encode(content).decode()
    return (f'<figure><img src="data:image/png;base64,{data}" alt="{escape(what)}" loading="lazy">'
            f"<figcaption>{escape(what)}</figcaption></figure>")


def write_section(key, section, known, get, explorer):
    """known: {step: state} of the section's steps."""
    title, text = ABOUT[key]
    parts = [f'<section id="{key}"><h2>{escape(title)}</h2><p>{escape(text)}</p>']
    for name, state in known.items():
        commands, record = "\n".join(state["commands"]), state["record"]
        kind = "problem" if record.get("error") or state["old"] else "soft small"
        took = f", {clock(record['seconds'])}" if record else ""
        parts.append(f'<pre><code>{escape(commands)}</code></pre><p class="{kind}">{escape(name)}: '
                     f'{escape(state["word"])}{took}</p>')
    if isinstance(section, str):
        parts.append(f'<p class="problem">{escape(section)}</p>')
    elif section:
        items = "".join(f"<li>{badge(claim.verdict())} {escape(claim.text)} <span class=soft>{escape(claim.evidence())}"
                        "</span></li>" for claim in section.claims)
        parts.append(f'<ul class="claims">{items}</ul>' if items else "")
        parts += [write_table(table, explorer) for table in section.tables]
        parts += [write_picture(get, *picture) for picture in section.pictures]
    return "".join(parts) + "</section>"


def steps_of(key, known):
    """{step: state} of a section's steps."""
    return {name: known[name] for name in STEPS_OF.get(key, (key,)) if name in known}


def claims_of(sections, known):
    """[(section, claim, whether it is of what is there now)]."""
    return [(key, claim, not any(state["old"] for state in steps_of(key, known).values()))
            for key, section in sections.items() if isinstance(section, Section) for claim in section.claims]


def write_summary(claims):
    """Every claim with its verdict, in one table. What is out of date does not count."""
    counts = {kind: sum(claim.verdict() == kind for _, claim, now in claims if now) for kind in KINDS}
    rows = "".join(f'<tr><td>{badge(claim.verdict()) if now else "out of date"}</td>'
                   f'<td><a href="#{key}">{escape(claim.text)}</a></td></tr>' for key, claim, now in claims)
    old = sum(not now for _, _, now in claims)
    more = f" {old} more are out of date: the same command measures them again." if old else ""
    return (f"<p>Of {len(claims) - old} claims {counts[HOLDS]} hold, {counts[FAILS]} do not, and of {counts[UNSURE]} "
            f'it cannot be told at this size.{more}</p><div class="scroll" tabindex="0"><table><tbody>{rows}</tbody>'
            "</table></div>")


def write_steps(known):
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(state['word'])}</td>"
        f"<td>{clock(state['record']['seconds']) if state['record'] else ''}</td>"
        f"<td>{escape(state['record'].get('commit') or '')}</td><td><code>"
        + escape(" && ".join(state["commands"])) + "</code></td></tr>" for name, state in known.items())
    total = sum(state["record"].get("seconds", 0) for state in known.values())
    busy = sum(state["record"].get("cpu_seconds", 0) for state in known.values())
    head = "".join(f"<th>{name}</th>" for name in ("step", "state", "time", "commit", "command"))
    return (f'<section id="steps"><h2>Steps</h2><p>{clock(total)} in all and {clock(busy)} of processor time, with '
            'what steps that were stopped took before.</p><div class="scroll" tabindex="0"><table><thead>'
            f"<tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>")


def seeds_of(get):
    found = {f"seed {config['seed']} of {name}, weights of commit {config.get('about', {}).get('commit')}"
             for name, step in (("tiny", "train"), ("tiny_gpt", "train_gpt")) if (config := get(step, "config.json"))}
    budget = get("tokens", "budget.json")
    return sorted(found) + ([f"seeds 0 to {budget['options']['seeds'] - 1} of the token budgets"] if budget else [])


def write_body(sections, known, get, explorer):
    parts = []
    for key, section in sections.items():
        own = steps_of(key, known)
        parts.append(write_section(key, section, own, get, explorer) if own else
                     f'<section id="{key}"><h2>{escape(ABOUT[key][0])}</h2><p>Not part of --quick.</p></section>')
    return "".join(parts)


def about_machine(known):
    """Where the steps ran, and what wrote the page."""
    machines = sorted({state["record"]["machine"] for state in known.values() if "machine" in state["record"]})
    return provenance() | {"machine": " and ".join(machines) or machine(),
                           "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}


def make_section(key, make, get):
    """A section, None without results, or a sentence: results of an older program may lack what this one looks for."""
    try:
        return make(get)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, ZeroDivisionError) as error:
        steps = ",".join(STEPS_OF.get(key, (key,)))
        return (f"Its results cannot be read ({type(error).__name__}: {error}). Delete those of the folder steps and "
                f"give python report.py --only {steps}")


def write_page(out, steps, quick, explorer):
    """index.html and report.json."""
    get, known = reader(steps, out), states(steps, out)
    sections = {key: make_section(key, make, get) for key, make in zip(ABOUT, SECTIONS)}
    about, claims = about_machine(known), claims_of(sections, known)
    link = f'<p><a href="{escape(explorer)}">The features, one by one</a>: the page of view.py.</p>' if explorer else ""
    first = "A first look: short trainings, few items. " if quick else ""
    lines = [about["machine"], f"commit {about['commit']}, torch {about['torch']}, Python {about['python']}",
             *seeds_of(get), f"written {about['written']}"]
    content = (f"<h1>ParityTransformer: what holds{' at first look' * quick}</h1><p>{first}Every experiment of the "
               "paper on a toy world whose truth is known: it shows whether a pipeline finds what is there, and is no "
               f'evidence about language.</p><p class="soft small">{"<br>".join(map(escape, lines))}</p>{link}'
               f"{write_summary(claims)}{write_body(sections, known, get, explorer)}{write_steps(known)}")
    with whole_file(os.path.join(out, "index.html")) as file:
        file.write(PAGE.format(style=STYLE, content=content))
    write_json(os.path.join(out, "report.json"), {
        "claims": [{"section": key, "claim": claim.text, "verdict": claim.verdict(), "difference": claim.difference,
                    "control": claim.control, "out of date": not now} for key, claim, now in claims],
        "figures": figures.collect(get), "quick": quick, "steps": {
            name: {"word": state["word"], "seconds": state["record"].get("seconds"), "commands": state["commands"]}
            for name, state in known.items()}, **about}, indent=1)


# The command


def choose(steps, only):
    if only is None:
        return steps
    names, known = [name.strip() for name in only.split(",")], [step.name for step in steps]
    for name in names:
        if name not in known:
            raise UserError(f"there is no step {name!r}{suggest(name, known)}")
    return with_needs(steps, names)


def find_explorer(out, quick):
    path = os.path.join(out if quick else "out", "tiny", "features.html")
    return os.path.relpath(path, out).replace(os.sep, "/") if os.path.exists(path) else None


def write_docs(out, steps):
    """The figures of a report's finished steps into the docs, if they are what these commands would give now."""
    get, known = reader(steps, out), states(steps, out)
    old = [name for name, state in known.items() if state["old"]]
    if not any(state["word"] == "done" for state in known.values()):
        raise UserError(f"{out} holds no report: python report.py makes one")
    if old:
        raise UserError(f"{old[0]} is {known[old[0]]['word']}: python report.py makes it anew, then give --docs again")
    left = [name for name, state in known.items() if state["word"] != "done"]
    made = {name: {key: state["record"].get(key) for key in ("commit", "machine", "torch")}
            for name, state in known.items() if state["word"] == "done"}
    figures.rewrite(HERE, figures.collect(get, strict=True), made)
    if left:
        say(f"figures of these steps stay what they are, as there are no others: {', '.join(left)}")


def main(arguments):
    parser = argparse.ArgumentParser(prog="report.py", formatter_class=argparse.RawDescriptionHelpFormatter,
                                     description=__doc__.partition("\n")[0], epilog=__doc__.partition("\n")[2])
    parser.add_argument("--quick", action="store_true", help="a first look: shorter trainings, fewer items")
    parser.add_argument("--only", metavar="A,B", help="these steps, and what they need (all)")
    parser.add_argument("--out", metavar="DIR", help="folder of the page (out/report, or out/report-quick)")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="say what would run, and stop")
    instead.add_argument("--page", action="store_true", help="run nothing: write the page from what there is")
    instead.add_argument("--docs", action="store_true", help="run nothing: the report's figures into the docs")
    options = parser.parse_args(arguments)
    out = options.out or ("out/report-quick" if options.quick else "out/report")
    if options.docs and options.quick:
        raise UserError("a quick report is no source of figures for the docs: leave off --quick")
    steps = make_steps(out, options.quick)
    if options.docs:
        return write_docs(out, steps)
    chosen = choose(steps, options.only)
    if options.list:
        for step in chosen:
            why = reasons(step, read_record(out, step), out)
            say(f"{step.name:<12}{why[0] if why else 'finished':<40}  {' && '.join(step.lines())}")
        return
    if not options.page and not os.path.exists("configs/tiny.py"):
        raise UserError("give this command in the folder of the repository: its steps are commands given there")
    with locked(out), ended_by_signals():
        def write():
            write_page(out, steps, options.quick, find_explorer(out, options.quick))
        try:
            records = {} if options.page else run_all(chosen, out, after=write)
        finally:
            write()
    say(f"open {os.path.join(out, 'index.html')}")
    failed = [name for name, record in records.items() if record["error"]]
    if failed:
        raise UserError(f"{len(failed)} of {len(records)} steps failed: {', '.join(failed)}. The page says why; the "
                        "same command tries them again")


if __name__ == "__main__":
    run_script(main, stopped="stopped; finished steps are kept, and the same command goes on")
