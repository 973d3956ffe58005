"""The page of features: what it says against the index, in a real browser, and with texts that would like to be run."""
import dataclasses
import json
import os
import re
import shutil
import urllib.parse

import numpy as np
import pytest
import torch
from browser import Browser, find_browser

import catalog
import data
import page
import view
from checkpoint import open_run, save
from config import Config
from features import effect, open_index
from helpers import UserError
from labels import groups_of
from model import GPT
from sources import open_source, open_tokens, read_codes
from tokenizer import load_tokenizer, pack_tokenizer
from truth import describe_feature

needs_browser = pytest.mark.skipif(find_browser() is None, reason="there is no Chromium here: apt-get install chromium")
TOKENS = 4096
HOSTILE = ["<script>document.title = 'run'</script>", "</script><img src=x onerror=alert(1)>", "\"'`${alert(2)}\\",
           "\u202eevil\u2066", "שלום", "🐚", "\ud800", "\udcf0\udc9f", "\udc90\udc9a", "\0\x1b[31m", "\n\t", "{{data}}",
           "<!--", "&lt;b&gt;", "]]>", "\u2028", "javascript:alert(3)", "  ", "\ufeff"]


def make_run(folder, kind="parity"):
    """A run of the toy world with random weights."""
    data.prepare_toy(str(folder / "data"), tokens=150_000)
    encoding = load_tokenizer(str(folder / "data"))
    config = Config(layers=2, d=32, heads=2, context=32, vocab_size=2048, bottleneck=kind, bits=(5, 8), active=(4, 6),
                    children=(16,), data=str(folder / "data"), seed=1, eval_tokens=1024)
    os.makedirs(folder / "out" / "tiny")
    save(str(folder / "out" / "tiny" / "best.pt"), {"config": dataclasses.asdict(config), "step": 0,
                                                    "tokenizer": pack_tokenizer(encoding),
                                                    "model": GPT(config).state_dict()})
    return str(folder / "out" / "tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, and its page."""
    folder = make_run(tmp_path_factory.mktemp("view"))
    view.main([folder, "--index-tokens", str(TOKENS), "--device", "cpu"])
    return folder


@pytest.fixture(scope="module")
def run(folder):
    return open_run(folder)


@pytest.fixture(scope="module")
def known(run):
    """(source, index, tokens)"""
    source = open_source(run)
    return source, *open_index(run, source, TOKENS)


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


def address(folder, hash="", name="features"):
    return f"file://{folder}/{name}.html{hash}"


def visit(browser, folder, hash="#overview", name="features"):
    """Open a page anew, and wait until it shows what its address says."""
    browser.open("about:blank")
    browser.problems.clear()
    browser.open(address(folder, hash, name))
    return shown(browser, hash)


def shown(browser, hash):
    browser.wait(f"document.getElementById('main')?.dataset.shown === {json.dumps(hash)}")


def go(browser, hash):
    browser.run(f"location.hash = {json.dumps(hash)}")
    shown(browser, hash)


def about_of(folder, name="features"):
    with open(f"{folder}/{name}.html", encoding="utf-8") as file:
        return json.loads(re.search(r'id="data">(.*?)</script>', file.read(), re.S)[1])["about"]


def rows_of(browser):
    return browser.run("[...document.querySelectorAll('#rows tbody tr')].map(row => row.dataset.name)")


def name_of(layer, id, m):
    return f"{layer}:{id % m}{'-' if id >= m else '+'}"


# What is computed


def test_the_table_counts_what_the_index_holds(known):
    _, index, _ = known
    table = catalog.table_of(catalog.layer_of(index, 1))
    for row in range(0, len(table["ids"]), 17):
        id = table["ids"][row]
        positions, coefs = index.firings(1, id % index.m, -1 if id >= index.m else 1)
        order = (-coefs).argsort(kind="stable")[:4]
        assert table["count"][row] == len(positions) and table["peak"][row] == coefs.max()
        assert table["mean"][row] == pytest.approx(coefs.mean(), rel=1e-5)
        top = table["top"][row]
        assert top[top != catalog.NONE].tolist() == positions[order].tolist()


def test_a_label_is_the_one_that_sample_py_prints(run, known):
    _, index, tokens = known
    windows = tokens.windows(range(TOKENS // 32), 32)[:, :-1].numpy()
    groups, layer = groups_of(run.encoding, windows), catalog.layer_of(index, 0)
    labels = [f"{group.name} {label}" for group in groups for label in group.labels]
    names, control = catalog.names_of(layer, groups, 32, few=0)
    assert len(control) == len(labels)
    checked = 0
    for id in np.flatnonzero(layer.counts() > 20)[::29]:
        said = describe_feature(run, tokens, TOKENS, layer.positions[layer.starts[id] : layer.starts[id + 1]])
        assert said.startswith(f"best label: {labels[names['label'][id]]}, precision {names['precision'][id]:.2f}, "
                               f"recall {names['recall'][id]:.2f} ")
        checked += 1
    assert checked > 3


def test_purity_is_the_share_of_the_label_among_the_20_strongest(run, known):
    _, index, tokens = known
    windows = tokens.windows(range(TOKENS // 32), 32)[:, :-1].numpy()
    kind, layer = groups_of(run.encoding, windows)[1], catalog.layer_of(index, 0)
    names, _ = catalog.names_of(layer, [kind], 32, few=0)
    id = int(layer.counts().argmax())
    positions, coefs = layer.positions[layer.starts[id] : layer.starts[id + 1]], layer.strength[
        layer.starts[id] : layer.starts[id + 1]]
    top = positions[(-coefs).argsort(kind="stable")[:20]]
    assert names["purity"][id] == pytest.approx((kind.label[top] == names["label"][id]).mean())
    assert np.isnan(names["purity"][layer.counts() < 20]).all()


def test_effects_are_those_of_sample_py(run, known):
    source, index, tokens = known
    layer = catalog.layer_of(index, 0)
    ids = np.flatnonzero(layer.counts())[:40:7]
    positions = catalog.strongest(layer, ids, 5)
    change, kl = catalog.effects(run, source, tokens, np.stack([np.zeros_like(ids), ids % index.m], 1), positions)
    for row, id in enumerate(ids):
        at = positions[row][positions[row] != catalog.NONE]
        slow = effect(run.model, source, tokens, 0, id % index.m, at)[: run.encoding.n_vocab]
        assert torch.allclose(change[row], slow, atol=2e-5) and kl[row] >= -1e-6
    assert change.abs().max() > 1e-3


def test_who_fires_with_whom_is_counted_as_by_the_index(known):
    source, index, _ = known
    layer, family = catalog.layer_of(index, 1), catalog.family_of(source.layers[1])
    tokens = catalog.by_token(layer, TOKENS)
    generators = set(source.layers[1].get_buffer("generators_1").tolist())
    for features, block in catalog.blocks_of(layer, family, tokens, 32):
        for name in ("allies", "parents", "children"):
            for place in range(0, len(features), 31):
                own = slice(*block[f"{name}_starts"][place : place + 2])
                index_of = features[place] % index.m
                mine, _ = index.firings(1, index_of, -1 if features[place] >= index.m else 1)
                for other, count in zip(block[f"{name}_ids"][own], block[f"{name}_counts"][own]):
                    theirs, _ = index.firings(1, other % index.m, -1 if other >= index.m else 1)
                    assert count == np.isin(mine, theirs).sum() > 0
                    if name != "allies":
                        assert int(index_of) ^ int(other % index.m) in generators
                        assert (index_of >= 32) == (name == "parents")


def test_a_context_has_the_strength_of_every_token(known):
    _, index, _ = known
    layer = catalog.layer_of(index, 0)
    features, block = next(catalog.blocks_of(layer, None, catalog.by_token(layer, TOKENS), 32))
    place = int(layer.counts()[: len(features)].argmax())
    positions, coefs = index.firings(0, features[place], 1)
    strength = dict(zip(positions.tolist(), coefs.tolist()))
    bands = []
    for c in range(block["starts"][place], block["starts"][place + 1]):
        at, left = int(block["at"][c]), int(block["left"][c])
        assert left == min(catalog.BEFORE, at % 32)  # what the model saw
        own = slice(*block["fire_starts"][c : c + 2])
        found = dict(zip((block["fire_at"][own] + at - left).tolist(), block["fire_value"][own].tolist()))
        assert found == {t: s for t, s in strength.items() if at - left <= t <= at + catalog.AFTER}
        bands.append((int(block["band"][c]), found[at]))
    numbers = [band for band, _ in bands]
    assert numbers == sorted(numbers) and set(numbers) == set(range(6))
    spread = [value for band, value in bands if band]
    assert spread == sorted(spread, reverse=True) and bands[0][1] == coefs.max()


def test_what_is_kept_is_not_made_again(folder, capsys):
    with open(f"{folder}/features.html", "rb") as file:
        before = file.read()
    view.main([folder, "--index-tokens", str(TOKENS), "--device", "cpu"])
    assert "once" not in capsys.readouterr().out
    with open(f"{folder}/features.html", "rb") as file:
        assert file.read() == before


def test_the_page_is_one_file_that_names_no_other_place(folder):
    with open(f"{folder}/features.html", encoding="utf-8") as file:
        text = file.read()
    assert not os.path.exists(f"{folder}/features") and len(text) < page.MOST + 2 ** 18
    assert "default-src 'none'" in text
    assert not re.search(r"https?://", re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.S))


@pytest.mark.parametrize("arguments, says", [(["nowhere"], "holds no checkpoint"), (["--source", "x"], "no source 'x'"),
                                             (["--source", "topk"], "sae.py"), (["--site", "x"], "no site 'x'"),
                                             (["--port", "1"], "--serve"), (["--vector", "x"], "--serve"),
                                             (["--vector", "x", "--serve"], "no vector")])
def test_wrong_commands_are_answered_with_a_sentence(folder, arguments, says):
    with pytest.raises(UserError, match=re.escape(says)):
        view.main(arguments if arguments[0] == "nowhere" else [folder, *arguments])


def test_a_folder_of_somebody_else_is_left_alone(folder):
    """One that has the name of the page's pieces, in which there is something else."""
    os.makedirs(f"{folder}/features")
    with open(f"{folder}/features/notes.txt", "w"):
        pass
    with pytest.raises(UserError, match="notes.txt"):
        view.main([folder, "--index-tokens", str(TOKENS), "--device", "cpu"])
    assert os.path.exists(f"{folder}/features/notes.txt")
    shutil.rmtree(f"{folder}/features")


# What is shown


@needs_browser
def test_the_overview_shows_losses_and_levels(browser, folder):
    visit(browser, folder)
    about, text = about_of(folder), browser.text("#main")
    with open(f"{folder}/eval.json") as file:
        found = json.load(file)["results"]["features"]
    assert f"{found['loss']:.4f}" in text and f"{found['loss_zero']:.4f}" in text
    assert all(f"{layer['loss_input']:.4f}" in text for layer in found["layers"])
    assert about["levels"][0][1]["features"] == 224 and "224" in text and "toy world" in text and "hash" in text
    for layer, levels in zip(found["layers"], about["levels"]):
        for measured, figures in zip(layer["levels"], levels):
            assert measured["features"] == figures["features"]
    assert browser.problems == []
    assert all(request.startswith(("file://", "data:", "about:")) for request in browser.requests)


@needs_browser
def test_the_table_sorts_and_finds(browser, folder, known, run):
    _, index, tokens = known
    visit(browser, folder, "#features?sort=rate")
    counts = np.diff(index.offsets)
    assert browser.text("#total") == f"{(counts > 0).sum():,} that fire"
    order = np.argsort(-counts, kind="stable")
    first = [2 * index.m * index.layers.index(int(name.split(":")[0])) + int(name[2:-1]) + index.m * (name[-1] == "-")
             for name in rows_of(browser)[:20]]
    assert counts[first].tolist() == counts[order[:20]].tolist()
    browser.click("[data-sort=rate]")  # the other way round
    browser.wait("location.hash.includes('down=0') && document.getElementById('main').dataset.shown === location.hash")
    layer, id = re.match(r"(\d+):(\d+)", name := rows_of(browser)[0]).groups()
    assert len(index.firings(int(layer), int(id), -1 if name[-1] == "-" else 1)[0]) == counts[counts > 0].min()
    words = tokens.read(0, TOKENS)
    texts = [run.encoding.decode_single_token_bytes(int(word)).decode("utf-8", "replace") for word in words]

    def expected(test, layer=0):
        table = catalog.table_of(catalog.layer_of(index, layer))
        return [name_of(layer, id, index.m) for id, top in zip(table["ids"], table["top"])
                if any(test(int(at)) for at in top if at != catalog.NONE)]

    for query, scope, test in (
            ("the", "token", lambda at: "the" in texts[at].lower()),
            ("/^ [A-Z]/", "token", lambda at: re.search("^ [A-Z]", texts[at])),
            (" was a", "text", lambda at: any(" was a" in part.lower() for part in context_texts(texts, at)))):
        go(browser, f"#features?layer=0&n=5000&in={scope}&q={query.replace(' ', '%20')}")
        assert sorted(rows_of(browser)) == sorted(expected(test)), query
    go(browser, "#features?q=/(/")
    assert "no regular expression" in browser.text(".problem") and browser.problems == []


def context_texts(texts, at):
    """The text of a context, cut where a window of the model begins."""
    first, edge, last = at - min(catalog.BEFORE, at % 32), at // 32 * 32 + 32, at + 1 + catalog.AFTER
    return "".join(texts[first : min(edge, last)]), "".join(texts[edge:last])


@needs_browser
def test_a_feature_shows_what_the_index_holds(browser, folder, known, run):
    source, index, tokens = known
    counts = np.diff(index.offsets)[: index.m]
    id = int(np.argsort(-counts)[40])
    name = f"0:{id}+"
    visit(browser, folder, f"#{name}")
    positions, coefs = index.firings(0, id, 1)
    assert browser.text("h1") == name and f"{len(positions):,} of {TOKENS:,}" in browser.text("#figures")
    shown_contexts = browser.run("""[...document.querySelectorAll('#contexts li')].map(item => [Number(item.dataset.at),
        item.querySelector('.value').textContent, [...item.querySelectorAll('.token')].map(token => token.title)])""")
    hardest = (-coefs).argsort(kind="stable")[:10]
    assert [item[0] for item in shown_contexts[:10]] == positions[hardest].tolist()
    strength = dict(zip(positions.tolist(), coefs.tolist()))
    for at, value, titles in shown_contexts:
        assert value == f"{strength[at]:.2f}"
        first = at - min(catalog.BEFORE, at % 32)
        for place, title in enumerate(titles):
            assert title == (f"{strength[first + place]:.2f}" if first + place in strength else "")
    change = effect(run.model, source, tokens, 0, id, positions[hardest[:5]])[: run.encoding.n_vocab]
    shown_values = browser.run("[...document.querySelectorAll('#effects tr')].map(row => row.cells[1].textContent)")
    expected = [*change.topk(8).values.tolist(), *(-change).topk(8).values.tolist()]
    assert [float(value) for value in shown_values] == pytest.approx(expected, abs=0.006)
    other = len(index.firings(0, id, -1)[0])
    assert (f"{other / TOKENS:.3%}" if other else "never fires") in browser.text("#other-sign")
    bars = browser.run("[...document.querySelectorAll('#histogram i')].map(bar => bar.title.split(': ')[1])")
    assert sum(int(count.replace(",", "")) for count in bars) == len(positions)
    assert browser.problems == []


@needs_browser
def test_keys_go_through_rows_features_and_tokens(browser, folder):
    visit(browser, folder, "#features?sort=rate")
    names = rows_of(browser)
    for _ in range(3):
        browser.press("ArrowDown")
    browser.press("ArrowUp")
    assert browser.run("document.querySelector('tr.chosen').dataset.name") == names[1]
    browser.press("Enter")
    shown(browser, f"#{names[1]}")
    browser.press("ArrowRight")
    shown(browser, f"#{names[2]}")
    browser.press("ArrowLeft")
    shown(browser, f"#{names[1]}")
    browser.press("Escape")
    shown(browser, "#features?sort=rate")
    browser.press("/")
    browser.type("1:3-")
    browser.press("Enter")
    shown(browser, "#1:3-")
    go(browser, "#text/2")
    browser.wait("document.querySelector('#panel h2')")
    before = browser.text("#panel h2")
    browser.press("ArrowRight")
    browser.wait(f"document.querySelector('#panel h2').textContent !== {json.dumps(before)}")
    browser.click("#theme")
    assert browser.run("document.documentElement.dataset.theme") == "light"
    assert browser.problems == []


@needs_browser
def test_a_text_shows_the_code_of_every_token(browser, folder, known, run):
    source, index, tokens = known
    visit(browser, folder, "#texts")
    starts = [0, *(np.flatnonzero(tokens.read(1, TOKENS) == run.encoding.eot_token) + 1)]
    browser.click("#main tr:nth-child(4) a")
    shown(browser, "#text/3")
    at = int(starts[3]) + 2
    go(browser, f"#text@{at}")
    browser.wait("document.querySelector('#panel [data-layer=\"1\"] tr')")
    window = tokens.windows([at // 32], 32)[:, :-1]
    for layer, code in read_codes(run.model, window, source).items():
        values = code.coefs[0, at % 32]
        best = values.abs().argsort(descending=True)[:6]
        expected = [[f"{layer}:{code.indices[0, at % 32, k]}{'-' if values[k] < 0 else '+'}", f"{abs(values[k]):.2f}"]
                    for k in best]
        found = browser.run(f"[...document.querySelectorAll('#panel [data-layer=\"{layer}\"] tr')].map(row =>"
                            "[row.cells[0].textContent, row.cells[1].textContent])")
        assert [name for name, _ in found] == [name for name, _ in expected]
        assert [float(value) for _, value in found] == pytest.approx([float(value) for _, value in expected], abs=0.011)
    browser.click("#panel [data-layer=\"0\"] button")
    browser.wait("document.querySelector('#tint').textContent.startsWith('Tinted by 0:')")
    assert browser.problems == []


@needs_browser
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_screen(browser, folder, width):
    browser.resize(width, 800)
    for hash in ("#overview", "#features", "#0:3+", "#texts", "#text/1", "#live"):
        visit(browser, folder, hash)
        assert browser.run("document.documentElement.scrollWidth") <= width, hash
    browser.resize(1280, 900)


@pytest.fixture(scope="module")
def hostile(folder, tmp_path_factory):
    """The same run with texts of tokens that would like to be run, and its data in pieces."""
    copy = str(tmp_path_factory.mktemp("hostile") / "<img src=x onerror=alert(4)>{{data}}")
    shutil.copytree(folder, copy)
    patch = pytest.MonkeyPatch()
    run = open_run(copy)
    common = np.bincount(open_tokens(run, "val").read(0, TOKENS)).argsort()[::-1][: len(HOSTILE) + 1]
    common = [int(token) for token in common if token != run.encoding.eot_token]
    texts = view.token_texts

    def evil(encoding):
        known = texts(encoding)
        for token, text in zip(common, HOSTILE):
            known[token] = text
        return known
    patch.setattr(view, "token_texts", evil)
    patch.setattr(page, "MOST", 0)
    view.main([copy, "--index-tokens", str(TOKENS), "--device", "cpu"])
    patch.undo()
    return copy, common


@needs_browser
def test_texts_of_tokens_are_shown_and_never_run(browser, hostile):
    copy, common = hostile
    folder = urllib.parse.quote(copy)
    visit(browser, folder)
    seen = ""
    for hash in ("#overview", "#features?sort=rate", "#text/0", "#text/1", "#text/2", "#texts", "#0:3+", "#1:3+",
                 "#0:5-", "#features?in=text&q=%3Cscript%3E", "#features?q=%2F%3Cimg%2F"):
        go(browser, hash)
        browser.run("new Promise(resolve => setTimeout(resolve, 30))")
        seen += browser.text("#main")
    assert browser.problems == []  # no error, no dialog, nothing that the policy had to forbid
    assert browser.run("document.querySelectorAll('#main script, #main img').length") == 0
    assert "features" in browser.run("document.title") and browser.run("document.title") != "run"
    for text in (*HOSTILE[:3], "⟨202e⟩evil⟨2066⟩", "שלום", "🐚", "⟨d800⟩", "␀␛[31m", "↵⇥", "{{data}}"):
        assert text in seen, text
    assert not re.search("[\u202e\u2066\0\ud800-\udfff]", seen)


@needs_browser
def test_a_character_in_two_tokens_is_shown_with_the_last(browser, hostile):
    _, common = hostile
    first, second = (common[HOSTILE.index(text)] for text in ("\udcf0\udc9f", "\udc90\udc9a"))
    assert browser.run(f"textsOf([{first}, {second}]).map(part => part.text)") == ["⟨f0 9f⟩", "🐚"]
    assert browser.run(f"textsOf([{second}, {first}]).map(part => part.text)") == ["⟨90 9a⟩", "⟨f0 9f⟩"]


@needs_browser
def test_pieces_that_are_missing_or_of_another_page_are_said(browser, hostile):
    copy, _ = hostile
    folder = urllib.parse.quote(copy)
    piece = f"{copy}/features/table-1.js"
    with open(piece) as file:
        content = file.read()
    with open(piece, "w") as file:
        file.write(content.replace('chunk("', 'chunk("x', 1))
    visit(browser, folder, "#1:3+")
    assert "another time" in browser.text(".problem")
    os.remove(piece)
    visit(browser, folder, "#1:3+")
    assert "is missing" in browser.text(".problem")
    with open(piece, "w") as file:
        file.write(content)


@needs_browser
def test_a_control_has_its_page_too(browser, folder):
    view.main([folder, "--index-tokens", str(TOKENS), "--device", "cpu", "--source", "hash", "--effects", "10"])
    visit(browser, folder, "#overview", "features-hash-mlp_in")
    assert "the control itself" in browser.text("#main")
    go(browser, "#features?sort=rate")
    go(browser, f"#{rows_of(browser)[-1]}")
    assert "was not computed" in browser.text("#effects") and browser.problems == []
