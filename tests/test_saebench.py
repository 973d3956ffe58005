"""SAEBench's measures: each against a dense brute force, and against SAEBench's own functions where it is installed.

    pip install -r requirements-saebench.txt       in an environment of its own: see there
    JAXTYPING_DISABLE=1 python -m pytest -rs tests/test_saebench.py
"""
import dataclasses
import itertools
import json
import os
import types

os.environ.setdefault("JAXTYPING_DISABLE", "1")  # its annotations are stricter than its code

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

import data  # noqa: E402
import interpret  # noqa: E402
import measures  # noqa: E402
import probe  # noqa: E402
import probe_tasks  # noqa: E402
import saebench  # noqa: E402
from checkpoint import save  # noqa: E402
from config import Config  # noqa: E402
from helpers import UserError  # noqa: E402
from measures import Columns, Split  # noqa: E402
from model import GPT  # noqa: E402
from tokenizer import load_tokenizer, pack_tokenizer  # noqa: E402


def theirs(module):
    pytest.importorskip("sae_bench", reason="SAEBench is not installed")
    return pytest.importorskip(f"sae_bench.evals.{module}", reason="SAEBench lacks a library")


def made(n=60, m=40, seed=0, share=0.2):
    """A sparse matrix of non-negative activations, dense and as Columns; column 3 is empty."""
    rng = np.random.default_rng(seed)
    dense = rng.random((n, m)) * (rng.random((n, m)) < share)
    dense[:, 3] = 0
    rows, columns = dense.nonzero()
    order = rng.permutation(len(rows))
    return dense, Columns.of(rows[order], columns[order], dense[rows, columns][order], n, m)


def labels(n, seed=1):
    return np.random.default_rng(seed).random(n) < 0.5


def test_a_sparse_matrix_is_its_dense_one():
    dense, X = made()
    rng = np.random.default_rng(2)
    w, v, rows = rng.standard_normal(40), rng.standard_normal(60), rng.permutation(60)[:25]
    np.testing.assert_allclose(X.times(w), dense @ w)
    np.testing.assert_allclose(X.transposed(v), v @ dense)
    np.testing.assert_array_equal(X.dense([5, 3, 0]), dense[:, [5, 3, 0]])
    part = X.take(rows)
    np.testing.assert_array_equal(part.dense(range(40)), dense[rows])
    np.testing.assert_allclose(part.transposed(v[:25]), v[:25] @ dense[rows])
    twice = Columns.of(np.r_[X.rows, X.rows], np.r_[X.columns, X.columns], np.r_[X.values, X.values], 60, 40)
    np.testing.assert_allclose(twice.dense(range(40)), 2 * dense)


# Logistic regression


def slow_logistic(X, y, C=1.0, weights=None):
    """The minimum by torch's L-BFGS, in float64."""
    A, y = torch.tensor(np.c_[X, np.ones(len(X))]), torch.tensor(np.asarray(y, float))
    s = torch.ones(len(y), dtype=torch.float64) if weights is None else torch.tensor(weights)
    w = torch.zeros(A.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=2000, tolerance_grad=1e-11, tolerance_change=0,
                                  line_search_fn="strong_wolfe")

    def loss():
        optimizer.zero_grad()
        value = 0.5 * w[:-1].square().sum() + C * (s * torch.nn.functional.binary_cross_entropy_with_logits(
            A @ w, y, reduction="none")).sum()
        value.backward()
        return value
    optimizer.step(loss)
    return w.detach().numpy()[:-1], w.detach().numpy()[-1]


@pytest.mark.parametrize("C", [0.1, 1.0, 100.0])
def test_logistic_regression_is_the_minimum(C):
    dense, X = made(share=0.5)
    y = dense[:, 1] + dense[:, 2] > dense[:, 4] + 0.2
    w, b = slow_logistic(dense, y, C)
    for found in (measures.logistic(dense, y, C), measures.logistic_sparse(X, y, C)):
        np.testing.assert_allclose(found[0], w, atol=1e-5 * C)
        assert found[1] == pytest.approx(b, abs=1e-5 * C)


def test_a_batch_of_regressions_is_each_by_itself():
    dense, _ = made(share=0.6)
    parts, ys = np.stack([dense[:, :5], 9 * dense[:, 5:10]]), np.stack([labels(60), dense[:, 6] > 0])
    w, b = measures.logistic(parts, ys, weights=measures.balanced(ys))
    for number in range(2):
        alone = slow_logistic(parts[number], ys[number], weights=measures.balanced(ys[number]))
        np.testing.assert_allclose(w[number], alone[0], atol=1e-6)
        assert b[number] == pytest.approx(alone[1], abs=1e-6)


def test_logistic_regression_is_that_of_scikit_learn():
    linear = pytest.importorskip("sklearn.linear_model", reason="scikit-learn is not installed")
    dense, X = made(share=0.5)
    y = labels(60)
    for weight in (None, "balanced"):
        other = linear.LogisticRegression(tol=1e-10, max_iter=10_000, class_weight=weight).fit(dense, y)
        w, b = measures.logistic(dense, y, weights=None if weight is None else measures.balanced(y))
        np.testing.assert_allclose(w, other.coef_[0], atol=1e-5)
        assert b == pytest.approx(other.intercept_[0], abs=1e-5)
    other = linear.LogisticRegression(tol=1e-10, max_iter=10_000).fit(dense, y)
    np.testing.assert_allclose(measures.logistic_sparse(X, y)[0], other.coef_[0], atol=1e-5)


def test_65536_columns_make_no_dense_matrix():
    """2,000 texts of 150 features each: dense they would take 1 GB."""
    import tracemalloc
    rng, n, m = np.random.default_rng(0), 2000, 65_536
    rows, columns = np.repeat(np.arange(n), 150), rng.integers(0, m, n * 150)
    y = np.arange(n) < n // 2
    columns[::150] = np.where(y, 7, 8)  # one entry of each text tells
    tracemalloc.start()
    X = Columns.of(rows, columns, np.ones(n * 150), n, m)
    w, b = measures.logistic_sparse(X, y)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6 and ((X.times(w) + b > 0) == y).all() and {np.argmax(w), np.argmin(w)} == {7, 8}


# Sparse probing


def test_sparse_probing_is_that_of_dense_matrices():
    dense, X = made(n=200, seed=3)
    dense[:, 9] += 2 * (np.arange(200) % 4 == 0)  # a feature of class 0
    X = Columns.of(*dense.nonzero(), dense[dense.nonzero()], 200, 40)
    rng = np.random.default_rng(0)
    classes = np.arange(200) % 4
    rows = [np.r_[rng.permutation(np.flatnonzero(classes == c)), rng.permutation(np.flatnonzero(classes != c))[:50]]
            for c in range(4)]
    split = Split(*(np.stack([np.r_[r[:50][of], r[50:][of]] for r in rows]) for of in (slice(30), slice(30, 50))))
    right, chosen = measures.sparse_probing(X, split, (1, 5))
    for number, (train, test) in enumerate(zip(*split)):
        difference = np.abs(dense[train[:30]].mean(0) - dense[train[30:]].mean(0))
        assert (np.argsort(-difference, kind="stable")[:5] == chosen[number]).all()
        for k in (1, 5):
            w, b = slow_logistic(dense[train][:, chosen[number][:k]], np.arange(60) < 30)
            predicted = dense[test][:, chosen[number][:k]] @ w + b > 0
            assert ((predicted == (np.arange(40) < 20)) == right[k][number]).all()
    assert right[1][0].all() and chosen[0, 0] == 9 and right[1][1:].mean() < 0.8


def test_features_are_chosen_as_saebench_does():
    training = theirs("sparse_probing.probe_training")
    dense, X = made(seed=4)
    y = labels(60)
    mask = training.get_top_k_mean_diff_mask(torch.tensor(dense), torch.tensor(y).int(), 7)
    positive, negative = np.flatnonzero(y), np.flatnonzero(~y)
    assert set(measures.top_by_difference(X, positive, negative, 7)) == set(np.flatnonzero(~mask.numpy()))
    k = measures.top_by_difference(X, positive, negative, 5)
    _, accuracy = training.train_sklearn_probe(*(torch.tensor(part) for part in (
        dense[:40, k], y[:40].astype(np.int32), dense[40:, k], y[40:].astype(np.int32))))
    w, b = measures.logistic(dense[:40, k], y[:40])
    assert ((dense[40:, k] @ w + b > 0) == y[40:]).mean() == accuracy


# SCR and TPP


class Dense:
    """A dense autoencoder of known weights, for the brute force and for SAEBench."""

    def __init__(self, d=8, m=40, seed=5):
        rng = torch.Generator().manual_seed(seed)
        self.W_enc, self.W_dec = torch.randn(d, m, generator=rng), torch.randn(m, d, generator=rng)
        self.W_dec /= self.W_dec.norm(dim=1, keepdim=True)
        self.b_dec, self.device, self.dtype = 0.1 * torch.randn(d, generator=rng), torch.device("cpu"), torch.float32

    def encode(self, x):
        return (x @ self.W_enc - 1).relu() * (x != 0).any(-1, keepdim=True)

    def decode(self, f):
        return f @ self.W_dec + self.b_dec


def texts(n, seed, d=8, T=6):
    return torch.randn(n, T, d, generator=torch.Generator().manual_seed(seed))


def meant(sae, x):
    """The mean features of texts (n, T, d) as Columns, and their mean activations (n, d)."""
    f = sae.encode(x).mean(1).double().numpy()
    rows, columns = f.nonzero()
    return Columns.of(rows, columns, f[rows, columns], *f.shape), x.mean(1).double().numpy()


def test_an_ablation_is_that_of_decoding_every_token():
    sae, x = Dense(), texts(30, 6)
    X, mean = meant(sae, x)
    probes = np.random.default_rng(7).standard_normal((8, 3))
    features = [4, 11, 30]
    f = sae.encode(x)
    error = x - sae.decode(f)
    f[..., features] = 0
    expected = (sae.decode(f) + error).mean(1).double().numpy() @ probes
    found = measures.ablated(mean @ probes, X, features, sae.W_dec.double().numpy() @ probes)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("scr", [True, False])
def test_effects_and_ablations_are_those_of_saebench(scr):
    main, training = theirs("scr_and_tpp.main"), theirs("sparse_probing.probe_training")
    info = pytest.importorskip("sae_bench.sae_bench_utils.dataset_info")
    sae, w = Dense(), torch.randn(1, 8, generator=torch.Generator().manual_seed(8))
    probe = training.Probe(8, torch.float32)
    probe.net.weight.data.copy_(w)
    name = "male / female"
    data = {name: texts(20, 9) + 0.5, info.PAIRED_CLASS_KEYS[name]: texts(20, 10)}
    expected = main.get_effects_per_class_precomputed_acts(
        types.SimpleNamespace(W_dec=sae.W_dec, encode=sae.encode, decode=sae.decode), probe, name, data, scr, 7)
    x = torch.cat(list(data.values()))
    X, mean = meant(sae, x)
    dots = (sae.W_dec @ w[0]).double().numpy()
    found = measures.effects(measures.differences(X, np.arange(20), np.arange(20, 40)), dots, scr)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)
    for n in (1, 5, 40):
        mask = main.select_top_n_features(torch.tensor(found), n, name)
        features = measures.top_effects(found, n)
        assert n > 30 or set(features) == set(np.flatnonzero(mask.numpy()))
        means = main.ablated_precomputed_activations(x.clone(), sae, mask, 7)
        scores = measures.ablated((mean @ w[0].double().numpy())[:, None], X, np.flatnonzero(mask.numpy()),
                                  dots[:, None])
        np.testing.assert_allclose(scores[:, 0], (means @ w[0]).numpy(), atol=1e-5)


def test_scores_of_scr_and_tpp_are_those_of_saebench():
    main = theirs("scr_and_tpp.main")
    rng = np.random.default_rng(11)
    kinds = ("male / female", "professor / nurse")
    biased = "male_professor / female_nurse"
    clean = {kind: rng.random() for kind in kinds} | {f"{biased} probe on {kind} data": rng.random() / 2
                                                      for kind in kinds}
    patched = {kind: {5: {f"{biased} probe on {other} data": rng.random() for other in kinds}} for kind in kinds}
    found = main.get_scr_plotting_dict(patched, clean)
    for direction, (ablated, asked) in enumerate((kinds, kinds[::-1]), 1):
        name = f"{biased} probe on {asked} data"
        assert measures.scr_score(clean[name], patched[ablated][5][name], clean[asked]) == pytest.approx(
            found[f"scr_dir{direction}_threshold_5"])
    names = ["a", "b", "c"]
    before, after = rng.random(3), rng.random((3, 3))
    overall, _ = main.create_tpp_plotting_dict(
        {a: {2: dict(zip(names, after[i]))} for i, a in enumerate(names)}, dict(zip(names, before)))
    assert measures.tpp_score(before, after) == pytest.approx(overall["tpp_threshold_2_total_metric"])


def test_scr_and_tpp_of_a_perfect_ablation_are_one():
    assert measures.scr_score(np.array(0.5), np.array(1.0), np.array(1.0)) == 1
    assert measures.scr_score(np.array(0.9), np.array(1.0), np.array(0.9)) == 0
    assert measures.tpp_score(np.ones(3), 1 - 0.5 * np.eye(3)) == 0.5


# Absorption


def slow_absorption(f, x, probe, W_dec, main, threshold):
    """Word by word, as SAEBench's text has it."""
    probe, fractions, full = probe / np.linalg.norm(probe), [], []
    cosines = W_dec @ probe / np.linalg.norm(W_dec, axis=1)
    for own, activation in zip(f, x):
        p, part = activation @ probe, own * cosines
        M = sum(part[j] for j in main)
        A = sum(sorted((part[j] for j in range(len(part)) if j not in main and cosines[j] >= threshold and part[j] > 0),
                       reverse=True)[:3])
        if M >= p or A / p < 0.4:
            fractions.append(0.0)
        elif M <= 0:
            fractions.append(1.0)
        else:
            fractions.append(min(A, p - M) / (min(A, p - M) + M))
        best = int(np.argmax(part))
        full.append(all(own[j] < 1e-8 for j in main) and cosines[best] >= 0.025 and p >= 0 and part[best] / p >= 0.4)
    return np.array(fractions), np.array(full)


def absorbing(seed=12, n=80):
    """Words whose activations lie along a probe, an autoencoder of them, and two main features."""
    sae, rng = Dense(seed=seed), np.random.default_rng(seed)
    probe = rng.standard_normal(8)
    x = torch.tensor(rng.standard_normal((n, 8)) + 0.7 * probe).float()
    f = sae.encode(x).double().numpy() / 4
    return sae, probe, x, f, Columns.of(*f.nonzero(), f[f.nonzero()], *f.shape)


@pytest.mark.parametrize("threshold", [0.1, 0.4, -1])
def test_absorption_is_that_of_word_by_word(threshold):
    sae, probe, x, f, X = absorbing()
    W = sae.W_dec.double().numpy()
    unit = probe / np.linalg.norm(probe)
    main = [1, 20]
    found = measures.absorption(X, x.double().numpy() @ unit, W @ unit, main, threshold)
    fraction, full = slow_absorption(f, x.double().numpy(), probe, W, main, threshold)
    np.testing.assert_allclose(found.fraction, fraction, atol=1e-9)
    assert (found.full == full).all() and len(np.unique(fraction)) > 5 and full.any() and not full.all()


def test_absorption_is_that_of_saebench():
    calculator = theirs("absorption.feature_absorption_calculator")
    sae, probe, x, f, X = absorbing()
    name = "blocks.0.hook_resid_post"

    class Words:
        def run_with_cache(self, prompts, names_filter):
            return None, {name: x[[int(p) for p in prompts]][:, None].expand(-1, 2, -1)}

        def to_tokens(self, text):
            return torch.zeros(1, 2)
    other = calculator.FeatureAbsorptionCalculator(Words(), [], topk_feats=5)
    other._build_prompts = lambda words: [types.SimpleNamespace(base=word, word=word) for word in words]
    holder = types.SimpleNamespace(W_dec=sae.W_dec, device="cpu", encode=lambda part: sae.encode(part) / 4)
    expected = other.calculate_absorption(holder, [str(i) for i in range(80)], torch.tensor(probe).float(), [1, 20], 0,
                                          show_progress=False).word_results
    unit = probe / np.linalg.norm(probe)
    found = measures.absorption(X, x.double().numpy() @ unit, sae.W_dec.double().numpy() @ unit, [1, 20])
    np.testing.assert_allclose(found.fraction, [word.absorption_fraction for word in expected], atol=1e-4)
    assert (found.full == [word.is_full_absorption for word in expected]).all()


def test_sparse_probes_are_those_of_saebench():
    """Under one seed, with the weights that it starts from."""
    probing = theirs("absorption.probing")
    k_sparse = theirs("absorption.k_sparse_probing")
    dense, X = made(n=90, seed=13)
    y = np.random.default_rng(0).integers(0, 3, 90)
    torch.manual_seed(0)
    start = probing.LinearProbe(40, 3)
    torch.manual_seed(0)
    x = torch.tensor(dense).float()
    other = k_sparse.train_sparse_multi_probe(x, torch.nn.functional.one_hot(torch.tensor(y)), torch.device("cpu"),
                                              show_progress=False)
    found = measures.l1_probe(X, np.eye(3)[y], start=(start.weights.detach().numpy(), start.biases.detach().numpy()))
    used = dense.any(0)
    np.testing.assert_allclose(found[:, used], other.weights.detach().numpy()[:, used], atol=1e-4)


def test_main_features_stop_where_one_more_helps_little():
    rng = np.random.default_rng(14)
    y = np.arange(400) % 4
    dense = 0.1 * rng.random((400, 30)) * (rng.random((400, 30)) < 0.2)
    dense[y == 0, 5] = 1  # one feature tells class 0
    half = rng.random(400) < 0.5
    dense[(y == 1) & half, 8] = dense[(y == 1) & ~half, 9] = 1  # two tell class 1
    X = Columns.of(*dense.nonzero(), dense[dense.nonzero()], 400, 30)
    Y = np.eye(4)[y]
    main = measures.main_features(X, Y, measures.l1_probe(X, Y))
    assert list(main[0]) == [5] and set(main[1]) == {8, 9}


def test_main_features_are_counted_as_saebench_does():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    k_sparse = theirs("absorption.k_sparse_probing")
    rng = np.random.default_rng(15)
    letters = [chr(97 + i) for i in range(26)]
    scores = np.cumsum(rng.random((26, 10)) * 0.08, axis=1)
    frame = pandas.DataFrame({"letter": letters} | {f"f1_sparse_sae_{k + 1}": scores[:, k] for k in range(10)})
    for k in range(1, 11):
        frame[f"sparse_sae_k_{k}_feats"] = [np.arange(k)] * 26
    k_sparse.add_feature_splits_to_metrics_df(frame, 10)
    counts = [measures.count_main(row) for row in scores]
    assert counts == [len(found) for found in frame["split_feats"]] and len(set(counts)) > 3


# Explaining


def test_predictions_are_scored_and_read_as_saebench_does():
    main = theirs("autointerp.main")
    rng = np.random.default_rng(16)
    for _ in range(20):
        held, said = rng.random(14) < 0.3, rng.random(14) < 0.3
        examples = [types.SimpleNamespace(is_active=bool(active)) for active in held]
        numbers = (np.flatnonzero(said) + 1).tolist()
        expected = main.AutoInterp.score_predictions(None, numbers, examples)
        contexts = interpret.Contexts(0, None, None, None, held, held)
        assert interpret.scored(contexts, "", said)["score"] == expected
        reply = ", ".join(map(str, numbers)) or "None"
        assert main.AutoInterp.parse_predictions(None, reply) == numbers
        assert (interpret.read_numbers(reply, 14) == said).all()
    for reply in ("4 and 7.", "3", "1,2,,5"):
        numbers = main.AutoInterp.parse_predictions(None, reply)
        assert (np.flatnonzero(interpret.read_numbers(reply, 14)) + 1).tolist() == numbers
    assert main.AutoInterp.parse_predictions(None, "the first") is interpret.read_numbers("the first", 14) is None


# Its data, and from texts to scores


def test_tasks_of_sae_probes_are_read():
    pytest.importorskip("sae_probes", reason="sae-probes is not installed")
    tasks = list(itertools.islice(probe_tasks.sae_probes(n=50), 5))
    assert all(len(classes) == 2 and all(texts for texts in classes.values()) for _, classes in tasks)
    assert len({name for name, _ in tasks}) == 5


def test_negatives_are_drawn_again_as_saebench_drew_them():
    training = theirs("sparse_probing.probe_training")
    given = {name: torch.arange(12.0)[:, None] + 100 * number for number, name in enumerate("abcde")}
    noted = saebench.Noted(training.prepare_probe_data)
    torch.manual_seed(3)
    for name in "abe":
        values, y = noted(given, name)
        positive, negative = saebench.draw_again(noted.calls[-1], scr=False)
        for rows, sign in ((positive, 1), (negative, 0)):
            found = sorted(given[key][place].item() for key, place in rows)
            assert found == sorted(values[y == sign].flatten().tolist())


def test_saebench_and_we_agree_on_a_model(tmp_path, capsys):
    """The same texts, features and draws, from tokens to scores: the same figures, but for one text of a probe at most,
    since scikit-learn's solver stops early."""
    theirs("scr_and_tpp.main")
    data.prepare_toy(str(tmp_path / "data"), tokens=60_000)
    config = Config(layers=2, d=32, heads=2, context=64, vocab_size=2048, bits=(5, 8), active=(4, 6), children=(16,),
                    data=str(tmp_path / "data"), seed=1)
    os.makedirs(tmp_path / "tiny")
    save(str(tmp_path / "tiny" / "best.pt"),
         {"config": dataclasses.asdict(config), "tokenizer": pack_tokenizer(load_tokenizer(config.data)),
          "model": GPT(config).state_dict(), "step": 0})
    probe.main([str(tmp_path / "tiny"), "--saebench", "--sources", "own,hash"])
    assert "the largest difference" in capsys.readouterr().out
    rows = json.loads((tmp_path / "tiny" / "saebench.json").read_text())["rows"]
    assert len(rows) == 28
    for row in rows:
        one = 1 / (saebench.CLASSES * 2 * 40) if row["figure"].startswith("probe") else 0
        assert row["ours"] == pytest.approx(row["saebench"], abs=1e-5 + one), row


def test_without_saebench_a_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setitem(saebench.MODULES, "data", "no_such_module")
    with pytest.raises(UserError, match="requirements-saebench.txt"):
        saebench.import_saebench()
