"""Export: the folder is our code and weights, transformers computes with it what we do, and the way back is exact."""
import ast
import difflib
import functools
import importlib.util
import json
import math
import os
import random
import shutil
import subprocess
import sys
import types

import pytest
import safetensors.torch
import torch
from test_eval import write_questions

import config as configs
import data
import eval as evaluation
import export
import kernels_cpu
import sample
import toyworld
import train
from checkpoint import open_run, weights_hash
from features import prompt_tokens
from helpers import UserError, read_json, write_json

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KINDS = ("parity", "none")
PROMPTS = ("In 1436, a", "The sailor saw the ship and went to the", "Clara was a")
SMALL = """
layers = 2; d = 32; heads = 2; context = 48; vocab_size = 2048; bits = (5, 8); active = (4, 6); children = (16,)
batch_tokens = 768; max_steps = 120; warmup_steps = 2; muon_lr = 0.02; adam_lr = 1e-2; eval_every = 120
eval_tokens = 1536; save_every = 120; device = "cpu"
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder: tokens of the toy world, questions on it, two models trained on it a little, and both exported."""
    root = tmp_path_factory.mktemp("export")
    torch.use_deterministic_algorithms(False)
    data.prepare_toy(str(root / "tokens"), tokens=20_000)
    (root / "small.py").write_text(SMALL)
    for kind in KINDS:
        train.train(configs.load([str(root / "small.py"), f"--data={root / 'tokens'}", f"--out={root / kind}",
                                  f"--bottleneck={kind}"]))
        export.main([str(root / kind), "--to", str(root / f"hf_{kind}")])
    write_questions(root, random.Random(0), 40)
    return root


@pytest.fixture
def folder(world, tmp_path):
    """A copy of the parity model's folder, to be damaged."""
    copy = tmp_path / "hf"
    copy.mkdir()
    for name in os.listdir(world / "hf_parity"):
        (copy / name).write_bytes((world / "hf_parity" / name).read_bytes())
    return copy


# The way back


@pytest.mark.parametrize("kind", KINDS)
def test_the_way_back_gives_the_same_run_and_the_same_figures(world, tmp_path, kind, capsys):
    back = str(tmp_path / "back")
    export.main(["--from", str(world / f"hf_{kind}"), "--out", back])
    runs = [open_run(str(world / kind)), open_run(back)]
    assert weights_hash(runs[0].model) == weights_hash(runs[1].model)
    assert [{**vars(run.config), "out": ""} for run in runs][0] == {**vars(runs[1].config), "out": ""}
    assert runs[0].content["tokenizer"] == runs[1].content["tokenizer"]
    assert [runs[0].content[key] for key in ("step", "best")] == [runs[1].content[key] for key in ("step", "best")]
    printed = []
    for folder in str(world / kind), back:
        capsys.readouterr()
        evaluation.main([folder, "--device", "cpu", "--tasks", "val,features,answers", "--limit", "8"])
        sample.main([folder, "--prompt", "The", "--tokens", "12", "--samples", "1"])
        printed.append(capsys.readouterr().out.replace(folder, "RUN"))
    assert printed[0] == printed[1] and "nats per token" in printed[0]


def test_a_damaged_folder_is_never_made_a_run(folder, tmp_path):
    out = str(tmp_path / "back")
    for name in (*export.READ, "checksums.json"):
        whole = (folder / name).read_bytes()
        at = len(whole) // 2
        for content in (whole[:at], b"", whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
            (folder / name).write_bytes(content)
            with pytest.raises(UserError, match=f"{name} is damaged"):
                export.main(["--from", str(folder), "--out", out])
        os.remove(folder / name)
        with pytest.raises(UserError, match=f"{name} is missing"):
            export.main(["--from", str(folder), "--out", out])
        (folder / name).write_bytes(whole)
    assert not os.path.exists(out)


def rewrite(folder, name, content):
    """Change a file and its checksum, as someone would who knows what he does."""
    (folder / name).write_bytes(content)
    known = read_json(str(folder / "checksums.json"), "")
    write_json(str(folder / "checksums.json"), known | {name: export.sha256(content)})


def refuses(match, folder, tmp_path):
    with pytest.raises(UserError, match=match):
        export.main(["--from", str(folder), "--out", str(tmp_path / "back")])
    assert not os.path.exists(tmp_path / "back")


def test_what_does_not_belong_together_is_answered(folder, tmp_path):
    refuse = functools.partial(refuses, folder=folder, tmp_path=tmp_path)
    settings = json.loads((folder / "config.json").read_bytes())
    for change, match in (({"d": 64}, "d=64"), ({"d": "x"}, "d must be a whole number"), ({"run": {}}, "KeyError"),
                          ({"run": None}, "TypeError"), ({"layers": 3}, "another"), ({"vocab_size": 10}, "another"),
                          ({"layers": "x"}, "TypeError"), ({"children": 16}, "TypeError")):
        rewrite(folder, "config.json", json.dumps(settings | change).encode())
        refuse(match)
    rewrite(folder, "config.json", json.dumps(settings).encode())
    tokenizer, weights = folder / "tokenizer.json", safetensors.torch.load((folder / "model.safetensors").read_bytes())
    for change, match in ((torch.full_like(weights["model.norm.weight"], math.nan), "no finite numbers"),
                          (torch.zeros(7), "another model's"),
                          (weights["model.norm.weight"] * 2, "not those that config.json was written with")):
        rewrite(folder, "model.safetensors", safetensors.torch.save(weights | {"model.norm.weight": change}))
        refuse(match)
    rewrite(folder, "model.safetensors", safetensors.torch.save(weights))
    content = json.loads(tokenizer.read_bytes())
    content["added_tokens"][0]["content"] = "<|other|>"
    rewrite(folder, "tokenizer.json", json.dumps(content).encode())
    refuse("does not match its id")


@pytest.mark.parametrize("progress", (
    {"step": -5}, {"step": 1e308}, {"step": True}, {"step": None}, {"step": 121}, {"best": {"a": [1]}}, {"best": "x"},
    {"best": math.nan}, {"best": -1.0}, {"best_step": "x"}, {"best_step": -1}, {"best_step": 1.5}))
def test_the_progress_of_a_run_is_one_that_a_run_can_have(folder, tmp_path, progress):
    settings = json.loads((folder / "config.json").read_bytes())
    rewrite(folder, "config.json", json.dumps(settings | {"run": settings["run"] | progress}).encode())
    refuses("of no run of 120 steps: its config.json says", folder, tmp_path)


@pytest.mark.parametrize("change", (
    {"d": 4096, "bits": [12, 17], "layers": 8, "children": [64]}, {"vocab_size": 2 ** 24},
    {"layers": 10 ** 4}, {"children": [2 ** 40]}, {"children": [2 ** 40, -2 ** 40]}))
def test_no_memory_is_taken_for_a_model_that_the_weights_are_not_of(folder, tmp_path, monkeypatch, change):
    devices = set()

    def watched(kind):
        def make(*arguments, **options):
            devices.add(torch.get_default_device().type)
            return kind(*arguments, **options)
        return make
    monkeypatch.setattr(export, "GPT", watched(export.GPT))
    monkeypatch.setattr(configs, "DeepParityBottleneck", watched(configs.DeepParityBottleneck))
    settings = json.loads((folder / "config.json").read_bytes())
    rewrite(folder, "config.json", json.dumps(settings | change).encode())
    refuses("another model's", folder, tmp_path)
    assert devices <= {"meta"}


def test_nothing_of_others_is_overwritten(world, folder, tmp_path):
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds notes.txt"):
        export.main([str(world / "parity"), "--to", str(folder)])
    os.remove(folder / "notes.txt")
    export.main([str(world / "parity"), "--to", str(folder)])
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    (folder / "model.safetensors.tmp").write_text("of a process that was killed")
    export.main([str(world / "parity"), "--to", str(folder)])
    assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before
    with pytest.raises(UserError, match="not empty"):
        export.main(["--from", str(folder), "--out", str(world / "parity")])


def test_only_an_export_is_overwritten_and_only_as_it_was_written(world, folder, tmp_path):
    def refuse(folder, match):
        before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
        with pytest.raises(UserError, match=match):
            export.main([str(world / "parity"), "--to", str(folder)])
        assert {name: (folder / name).read_bytes() for name in os.listdir(folder)} == before
    for name in "README.md", "model.py", "checksums.json":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("{}")
        (tmp_path / name / "config.json").write_text("mine")
    refuse(tmp_path / "README.md", "holds README.md, which no export has written")
    refuse(tmp_path / "model.py", "holds config.json, which no export has written")
    refuse(tmp_path / "checksums.json", "holds config.json, which no export has written")
    (folder / "README.md").write_bytes((folder / "README.md").read_bytes() + b"mine")
    refuse(folder, "README.md was changed since it was exported")
    os.remove(folder / "README.md")
    export.main([str(world / "parity"), "--to", str(folder)])
    assert sorted(os.listdir(folder)) == sorted(os.listdir(world / "hf_parity"))


def test_an_interrupted_export_is_no_run_and_goes_on_but_not_over_the_work_of_others(world, folder, tmp_path,
                                                                                      monkeypatch):
    with open(world / "hf_none" / "model.safetensors", "rb") as file:
        other = file.read()
    whole = export.write_bytes
    for stop_at in "model.safetensors", "tokenizer.json", "README.md":
        def interrupted(path, content, stop_at=stop_at):
            if path.endswith(stop_at):
                raise KeyboardInterrupt
            whole(path, content)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(export, "write_bytes", interrupted)
            export.main([str(world / "none"), "--to", str(folder)])
        refuses("the export to it was interrupted", folder, tmp_path)
    assert (folder / "model.safetensors").read_bytes() == other  # files of two exports
    (folder / "LICENSE").write_text("mine")
    with pytest.raises(UserError, match="LICENSE was changed"):
        export.main([str(world / "none"), "--to", str(folder)])
    os.remove(folder / "LICENSE")
    export.main([str(world / "none"), "--to", str(folder)])
    assert sorted(os.listdir(folder)) == sorted(os.listdir(world / "hf_none"))
    for name in export.READ:
        assert (folder / name).read_bytes() == (world / "hf_none" / name).read_bytes()


def test_an_older_file_of_an_export_is_taken_away(world, folder):
    rewrite(folder, "older.py", b"")
    export.main([str(world / "parity"), "--to", str(folder)])
    assert sorted(os.listdir(folder)) == sorted(os.listdir(world / "hf_parity"))


def test_options_that_do_not_go_together_are_answered(world, tmp_path):
    run, to = str(world / "parity"), ["--to", str(tmp_path / "new")]
    for arguments, match in (([run, *to, "--out", "y"], "--out is the run that --from makes"),
                             ([run, *to, "--private"], "--private is of the repository"),
                             (["--from", run, "--private"], "goes with --out only"),
                             ([run], "give a run and a folder")):
        with pytest.raises(UserError, match=match):
            export.main(arguments)
    assert not os.path.exists(tmp_path / "new")


# The folder


def test_the_code_in_the_folder_is_ours_but_for_three_changes(world):
    held = {}
    exec((world / "hf_parity" / "kernels_c.py").read_text(), held)
    with open(os.path.join(ROOT, "kernels.c")) as file:
        assert held["SOURCE"] == file.read()
    for name in export.CODE:
        with open(os.path.join(ROOT, f"{name}.py")) as file:
            ours = file.read()
        script = ours[ours.index("\n\nif __name__ ==") :].splitlines() if "\n\nif __name__ ==" in ours else []
        theirs = (world / "hf_parity" / f"{name}.py").read_text()
        for line in difflib.ndiff(ours.splitlines(), theirs.splitlines()):
            if line[0] == "-":
                assert line[2:].startswith(("from ", "import ", '@torch.library.custom_op("parity::')) \
                    or line[2:] in script, line
            elif line[0] == "+":
                assert line[2:].startswith(("from .", '@torch.library.custom_op("parity_" + __name__.')), line


def test_the_code_in_the_folder_needs_nothing_but_itself_torch_numpy_and_transformers(world):
    """transformers refuses a file with an import that is not installed, wherever in it, but for `try`."""
    known = {*sys.stdlib_module_names, "torch", "numpy", "transformers"}

    def imports(node):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.partition(".")[0]
        elif not isinstance(node, ast.Try):
            for child in ast.iter_child_nodes(node):
                yield from imports(child)
    for name in (*export.CODE, "kernels_c"):
        assert set(imports(ast.parse((world / "hf_parity" / f"{name}.py").read_text()))) <= known, name


def test_the_licence_goes_with_the_code(world):
    with open(os.path.join(ROOT, "LICENSE")) as file:
        assert (world / "hf_parity" / "LICENSE").read_text() == file.read()
    assert (world / "hf_parity" / "README.md").read_text().startswith("---\nlicense: mit\n")


def test_the_card_has_the_figures_of_the_run(world, folder):
    run = open_run(str(world / "parity"))
    assert f"| val_loss, in training | {run.content['best']:,.6g} |" in (folder / "README.md").read_text()
    evaluation.main([str(world / "parity"), "--device", "cpu", "--tasks", "val", "--limit", "8"])
    export.main([str(world / "parity"), "--to", str(folder)])
    result = read_json(str(world / "parity" / "eval.json"), "")["results"]["val"]
    assert f"| loss: val, {result['what']} | {result['loss']:,.6g} |" in (folder / "README.md").read_text()


def test_tokenizers_cuts_texts_as_ours_does(world):
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers, which comes with transformers, is not installed")
    rng, encoding = random.Random(0), open_run(str(world / "parity")).encoding
    theirs = tokenizers.Tokenizer.from_file(str(world / "hf_parity" / "tokenizer.json"))
    letters = "aab ha- \n\t\r'sé🐚0123.,XyZ\u00a0\u2028\0<|>_"
    texts = [document.text for document in toyworld.documents(3, 20)]
    texts += ["".join(rng.choices(letters, k=rng.randint(0, 40))) for _ in range(2000)]
    texts += [letter * count for letter in letters for count in range(1, 40)]
    for text in texts:
        ids = theirs.encode(text).ids
        assert ids == encoding.encode_ordinary(text), text
        assert theirs.decode(ids, skip_special_tokens=False) == text


def test_push_uploads_the_folder_or_says_why_not(world, folder, monkeypatch, capsys):
    calls, there = [], {"me/open": False}  # repositories, and whether they are private

    class Hub:
        def create_repo(self, repo, exist_ok, private):
            if repo == "me/forbidden":
                raise PermissionError("403 Forbidden")
            there.setdefault(repo, bool(private))

        def model_info(self, repo):
            return types.SimpleNamespace(private=there[repo])

        def upload_folder(self, repo_id, folder_path):
            calls.append((repo_id, sorted(os.listdir(folder_path))))
            return f"https://hub/{repo_id}"
    command = [str(world / "parity"), "--to", str(folder), "--push"]
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=Hub))
    for arguments, said in ((["me/tiny"], "public: everyone can read it"), (["me/mine", "--private"], "private"),
                            (["me/mine"], "private"), (["me/open"], "public: everyone can read it")):
        export.main([*command, *arguments])
        assert calls.pop() == (arguments[0], sorted(os.listdir(folder)))
        assert f"pushed: https://hub/{arguments[0]}, {said}\n" in capsys.readouterr().out
    with pytest.raises(UserError, match="not pushed: me/open is there and public"):
        export.main([*command, "me/open", "--private"])
    assert not calls
    with pytest.raises(UserError, match="could not be pushed .*403 Forbidden"):
        export.main([*command, "me/forbidden"])
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        export.main([*command, "me/tiny"])


# transformers, in a process that knows nothing of this repository: both models at once, from a fresh cache of modules

THEIRS = """
import os, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
asked, found = torch.load(sys.argv[1]), {}
for kind in asked["kinds"]:
    folder = asked["root"] + "/hf_" + kind
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    package = type(model).__module__.rpartition(".")[0]
    model(torch.tensor([[0]]))
    for earlier in found:  # torch must survive two models, and the first still work
        assert torch.equal(found[earlier]["model"](asked["tokens"]).logits, found[earlier]["logits"])
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    prompts, forward = asked["prompts"], {}
    ids = [asked["start"] + tokenizer(text).input_ids for text in prompts]
    greedy = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": [asked["never"]]}

    def pad(side, ids):
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in ids], True, 3, side)
        return tokens, torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in ids], True, 0, side).long()

    def refused(function, *arguments, **options):
        try:
            return str(function(*arguments, **options))
        except ValueError as error:
            return str(error)

    def edit(layer, code):
        return code._replace(coefs=code.coefs.clamp(min=0))

    def patch(site, layer, x):
        return x * 0.8 if site == "mlp_out" else x
    with torch.no_grad():
        here = found[kind] = {"model": model, "logits": model(asked["tokens"]).logits, "ids": ids,
            "edited": model(asked["tokens"], edit=edit).logits, "patched": model(asked["tokens"], patch=patch).logits,
            "backend": sys.modules[package + ".ops"].backend(torch.zeros(1)),
            "loss": model(asked["tokens"], labels=asked["tokens"]).loss,
            "fresh": [block.share.item() for block in model.model.blocks]
                     + [block.parity.sums.abs().sum().item() for block in model.model.blocks if block.parity],
            "long": model.generate(torch.tensor(ids[:1]), attention_mask=torch.ones(1, len(ids[0])).long(), **greedy),
            "long edited": model.generate(torch.tensor(ids[:1]), attention_mask=torch.ones(1, len(ids[0])).long(),
                                          edit=edit, patch=patch, **greedy)}
        for side in ("left", "right"):
            tokens, mask = pad(side, ids)
            for cached in (False, True):
                logits = model(tokens, mask, use_cache=cached).logits
                here[side, cached] = [row[kept.bool()] for row, kept in zip(logits, mask)]
        here["unmasked"] = model.generate(torch.tensor(ids[1:2]), **greedy)[:, -80:]
        tokens, mask = pad("left", [*ids, asked["longer"]])
        here["batch"] = model.generate(tokens, attention_mask=mask, **greedy)[:, -80:]
        tokens, mask = pad("left", ids)
        here["refused"] = [refused(model, tokens, mask[:, 1:]), refused(model, tokens, output_hidden_states=True),
                           refused(model, tokens, output_attentions=True),
                           refused(model.generate, tokens, attention_mask=mask, use_cache=False, **greedy),
                           refused(model.generate, tokens[:1], prompt_lookup_num_tokens=2, **greedy)]
model = AutoModelForCausalLM.from_pretrained("me/tiny", trust_remote_code=True)  # as the hub would have it
assert torch.equal(model(asked["tokens"]).logits, found["parity"]["logits"])
code = sys.modules[type(found["parity"]["model"]).__module__]
beside = os.path.join(os.path.dirname(code.__file__), "kernels.c")
assert os.stat(beside).st_mode & 0o777 == 0o644  # others may read it, too
os.rename(beside, beside + ".old")
os.mkdir(beside)  # so that no file can be put there, by whomever
for cache in os.environ["XDG_CACHE_HOME"], code.__file__:  # the user's; one where no folder can be
    os.environ["XDG_CACHE_HOME"] = cache
    code.place_kernels.cache_clear()
    kept = code.place_kernels()
    place = os.path.dirname(code.kernels_cpu.__file__)
    assert open(os.path.join(place, "kernels.c")).read() == code.SOURCE
    assert place.startswith(cache if kept is None else kept.name)
code.kernels_cpu.library.cache_clear()
assert torch.equal(found["parity"]["model"](asked["tokens"]).logits, found["parity"]["logits"])
assert "helpers" not in sys.modules and "model" not in sys.modules  # this repository is not on the path
for here in found.values():
    del here["model"]
torch.save(found, sys.argv[2])
"""


def run_theirs(script, *arguments, folder):
    """Run a script where neither this repository nor anything that was compiled or copied before can be found."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home"),
                    "HF_MODULES_CACHE": str(folder / "modules"), "XDG_CACHE_HOME": str(folder / "cache"),
                    "DISABLE_MULTIPROC": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], cwd=folder, env=environment, text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def theirs(world, tmp_path_factory):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    folder = tmp_path_factory.mktemp("theirs")
    torch.manual_seed(0)
    asked = {"root": str(world), "kinds": KINDS, "prompts": PROMPTS, "tokens": torch.randint(1500, (3, 48)),
             "start": [open_run(str(world / "parity")).encoding.eot_token], "never": 2047,
             "longer": torch.randint(1500, (60,)).tolist()}
    torch.save(asked, folder / "asked.pt")
    hub = folder / "home" / "hub" / "models--me--tiny"  # as if it had been downloaded
    shutil.copytree(world / "hf_parity", hub / "snapshots" / ("ab" * 20))
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("ab" * 20)
    run_theirs(THEIRS, folder / "asked.pt", folder / "found.pt", folder=folder)
    assert any(name == "kernels.c" for _, _, names in os.walk(folder / "modules") for name in names)
    return asked, torch.load(folder / "found.pt")


def edit(layer, code):
    return code._replace(coefs=code.coefs.clamp(min=0))


def patch(site, layer, x):
    return x * 0.8 if site == "mlp_out" else x


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_our_logits_edited_and_patched_too(world, theirs, kind):
    (asked, found), model = theirs, open_run(str(world / kind)).model
    with torch.no_grad():
        for key, arguments in ("logits", {}), ("edited", {"edit": edit}), ("patched", {"patch": patch}):
            assert (found[kind][key] - model(asked["tokens"], **arguments)).abs().max() <= 1e-5, key
        assert (found[kind]["patched"] - found[kind]["logits"]).abs().max() > 0.01
        assert kind == "none" or (found[kind]["edited"] - found[kind]["logits"]).abs().max() > 0.01
        loss = model(asked["tokens"][:, :-1], asked["tokens"][:, 1:], auxiliary=False)["lm"]
    assert found[kind]["loss"].item() == pytest.approx(loss.item(), abs=1e-5)
    assert set(found[kind]["fresh"]) <= {0.0, 1.0}  # buffers that are not saved are as in a new model
    assert found[kind]["backend"] == "c" or kernels_cpu.find_compiler() is None


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_generates_our_tokens_past_the_context(world, theirs, kind):
    (_, found), run = theirs, open_run(str(world / kind))
    prompt = prompt_tokens(run, PROMPTS[0])
    assert found[kind]["ids"][0] == prompt[0].tolist()
    assert prompt.shape[1] + 80 > run.config.context + run.config.context // 2
    texts = {}
    for key, arguments in ("long", {}), ("long edited", {"edit": edit, "patch": patch}):
        texts[key] = torch.stack(list(run.model.generate(prompt, 80, temperature=0, **arguments)), 1)
        assert torch.equal(found[kind][key], torch.cat([prompt, texts[key]], 1)), key
    assert len(texts["long"].unique()) > 5 and not torch.equal(*texts.values())


@pytest.mark.parametrize("kind", KINDS)
def test_padding_on_either_side_changes_nothing(world, theirs, kind):
    (_, found), model = theirs, open_run(str(world / kind)).model
    with torch.no_grad():
        for row, ids in enumerate(found[kind]["ids"]):
            alone = model(torch.tensor([ids]))[0]
            for key in ("left", False), ("left", True), ("right", False), ("right", True):
                assert (found[kind][key][row] - alone).abs().max() <= 1e-4, key


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_batch_pass_the_context_each_as_it_would_alone(world, theirs, kind):
    (asked, found), run = theirs, open_run(str(world / kind))
    texts = [*found[kind]["ids"], asked["longer"]]
    assert len(set(map(len, texts))) == len(texts) and len(asked["longer"]) > run.config.context
    for row, ids in enumerate(texts):
        ours = torch.stack(list(run.model.generate(torch.tensor([ids]), 80, temperature=0)), 1)
        assert torch.equal(found[kind]["batch"][row], ours[0]), row


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_mask_every_token_counts(world, theirs, kind):
    """transformers takes <|endoftext|> for padding, which it is, too, when another token is to end a text."""
    (_, found), model = theirs, open_run(str(world / kind)).model
    ours = torch.stack(list(model.generate(torch.tensor(found[kind]["ids"][1:2]), 80, temperature=0)), 1)
    assert torch.equal(found[kind]["unmasked"], ours)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_there_ends_with_a_sentence(theirs, kind):
    sentences = ("attention_mask must have shape", "output_hidden_states is not there",
                 "output_attentions is not there", "do not fit the context of 48",
                 "assisted generation ends where the context of 48 is full")
    for said, sentence in zip(theirs[1][kind]["refused"], sentences, strict=True):
        assert sentence in said


HARNESS = """
import json, os, sys, lm_eval, lm_eval.tasks
manager = lm_eval.tasks.TaskManager(include_path=sys.argv[2], include_defaults=False)
found = lm_eval.simple_evaluate("hf", model_args=f"pretrained={sys.argv[1]},trust_remote_code=True", device="cpu",
                                tasks=["hellaswag", "lambada_openai"], task_manager=manager, batch_size=8,
                                bootstrap_iters=0)
found = {task: {"values": values, "samples": found["samples"][task]} for task, values in found["results"].items()}
json.dump(found, open(sys.argv[3], "w"), default=str)
"""


def test_the_harness_own_backend_marks_the_same_questions_right(world, tmp_path):
    tasks = importlib.util.find_spec("lm_eval") and importlib.util.find_spec("lm_eval.tasks")
    if not tasks or importlib.util.find_spec("accelerate") is None:  # which its hf backend needs
        pytest.skip("lm-evaluation-harness is not installed with its hf backend: lm_eval, transformers, accelerate")
    (tmp_path / "tasks").mkdir()
    for name in evaluation.LOCAL:
        evaluation.write_local_task(name, os.path.dirname(tasks.origin), str(world), str(tmp_path / "tasks"))
    run_theirs(HARNESS, world / "hf_parity", tmp_path / "tasks", tmp_path / "found.json", folder=tmp_path)
    evaluation.main([str(world / "parity"), "--device", "cpu", "--tasks", "hellaswag,lambada", "--data", str(world)])
    ours = read_json(str(world / "parity" / "eval.json"), "")["results"]
    found = json.loads((tmp_path / "found.json").read_text())
    for task, name in ("hellaswag", "hellaswag"), ("lambada", "lambada_openai"):
        result = evaluation.harness_result(found[name]["values"], found[name]["samples"], "")
        assert result["right"] == ours[task]["right"] and len(result["right"]["acc"]) == 40
        assert all(result[key] == ours[task][key] for key in ours[task]["right"])
    perplexity = found["lambada_openai"]["values"]["perplexity,none"]
    assert perplexity == pytest.approx(ours["lambada"]["perplexity"], rel=1e-4)
