"""SAEBench's measures on sparse codes: sparse probing, SCR, TPP, absorption; by formula, and never a dense matrix.

    X = Columns.of(texts, ids, values, n, m)      the mean activations of m unfolded features on n texts, sparse
    chosen = top_by_difference(X, positive, negative, k)       |mean+ - mean-|, the k largest
    w, b = logistic(X.dense(chosen)[rows], labels)             C = 1, as scikit-learn defines it

Definitions are those of SAEBench 0.6.0; tests/test_saebench.py holds each to it, and to a brute force that is dense.

Sparse probing. A text is the mean of its tokens' activations. The k features with the largest |mean+ - mean-| on
training texts go into a logistic regression; its accuracy on test texts counts.

SCR and TPP. A probe w on the model's own activations; the effect of feature j is (mean+_j - mean-_j) (w . W_dec_j), for
SCR its size, for TPP only features that are stronger on the positives. The n features with the largest effects are set
to zero at every token, what the source does not reconstruct stays. Decoding is a sum, so that this takes
sum_j f_j (w . W_dec_j) off a probe's score, with f_j the text's mean: no text is encoded or decoded again.
  SCR   (changed - original) / (clean - original) of a probe that learnt a spurious correlation, where what it should
        not have learnt is ablated; clean is a probe that learnt what is asked.  0 where clean - original < 0.001
  TPP   how much accuracy a class loses by its own features, less the mean of what the other classes lose by them

Absorption. p = x . unit probe of a class. Main features of the class: those of the shortest sparse probe that one more
feature improves by less than 0.03 in F1. Absorbers: no main feature, cos(W_dec, probe) >= 0.1, f cos > 0, the 3 first.
With M and A what main features and absorbers add up to of p: 0 if M >= p or A < 0.4 p; 1 if M <= 0; else
a / (a + M), a = min(A, p - M). The mean over the words that the probe knows, then over classes.
"""
from typing import NamedTuple

import numpy as np

COSINE = 0.1        # of an absorber with the probe
FULL_COSINE = 0.025  # the same, where one feature absorbs all
SHARE = 0.4         # of the projection that absorbers must make up
ABSORBERS = 3
JUMP = 0.03         # in F1, by which one more main feature must improve
MOST_MAIN = 10
PROBE_F1 = 0.6      # of a class that the model knows


# Sparse matrices


class Columns(NamedTuple):
    """A sparse (n, m) matrix by columns: entries sorted by column, then by row, (E,) each."""
    rows: np.ndarray
    columns: np.ndarray
    values: np.ndarray
    starts: np.ndarray  # (m + 1,) where each column starts
    n: int

    @classmethod
    def of(cls, rows, columns, values, n, m):
        """Of entries in any order; those of one place are added up."""
        keys = columns.astype(np.int64) * n + rows
        order = np.argsort(keys)  # several times faster than np.unique with an inverse
        keys = keys[order]
        first = np.flatnonzero(np.diff(keys, prepend=-1))
        values = np.add.reduceat(values[order], first, dtype=float) if len(first) else np.zeros(0)
        columns, rows = np.divmod(keys[first], n)
        return cls(rows, columns, values, np.searchsorted(columns, np.arange(m + 1)), n)

    @property
    def m(self):
        return len(self.starts) - 1

    def times(self, w):
        """X w, (m,) -> (n,)."""
        return np.bincount(self.rows, weights=self.values * w[self.columns], minlength=self.n)

    def transposed(self, v):
        """X^T v, (n,) -> (m,)."""
        return np.bincount(self.columns, weights=self.values * v[self.rows], minlength=self.m)

    def dense(self, chosen):
        """A few of its columns, (n, k)."""
        out = np.zeros((self.n, len(chosen)))
        for number, column in enumerate(chosen):
            own = slice(self.starts[column], self.starts[column + 1])
            out[self.rows[own], number] = self.values[own]
        return out

    def take(self, rows):
        """Some of its rows, in this order, each at most once."""
        place = np.full(self.n, -1)
        place[rows] = np.arange(len(rows))
        new = place[self.rows]
        keep = new >= 0
        new, columns, values = new[keep], self.columns[keep], self.values[keep]
        if (np.diff(rows) < 0).any():  # else they are sorted as they are
            order = np.lexsort((new, columns))
            new, columns, values = new[order], columns[order], values[order]
        return Columns(new, columns, values, np.searchsorted(columns, np.arange(self.m + 1)), len(rows))


# Logistic regression


def log_loss(z, y):
    """-log of the probability of labels y (0 or 1) by scores z; no overflow."""
    return np.logaddexp(0, z) - y * z


def logistic(X, y, C=1.0, weights=None, most=100):
    """(w, b): the least 1/2 |w|^2 + C sum log(1 + exp(-+(X w + b))), by Newton's method. X: (..., n, k), y: (..., n).

    A batch of them is fitted at once. weights: (..., n) of the samples.
    """
    X, y = np.asarray(X, float), np.asarray(y, float)
    s = C * np.ones_like(y) if weights is None else C * weights
    A = np.concatenate([X, np.ones((*X.shape[:-1], 1))], -1)
    penalty = np.r_[np.ones(X.shape[-1]), 0]
    w = np.zeros((*X.shape[:-2], A.shape[-1]))

    def loss(w):
        z = np.einsum("...nk,...k->...n", A, w)
        return 0.5 * (penalty * w * w).sum(-1) + (s * log_loss(z, y)).sum(-1)
    now = loss(w)
    for _ in range(most):
        p = 1 / (1 + np.exp(-np.clip(np.einsum("...nk,...k->...n", A, w), -500, 500)))
        gradient = penalty * w + np.einsum("...nk,...n->...k", A, s * (p - y))
        if np.abs(gradient).max() < 1e-9 * max(1.0, s.sum(-1).max()):
            break
        curvature = np.swapaxes(A, -1, -2) @ (A * (s * p * (1 - p))[..., None])
        curvature = curvature + np.diag(penalty) + 1e-12 * np.eye(len(penalty))
        step = np.linalg.solve(curvature, gradient[..., None])[..., 0]
        size = np.ones(now.shape)
        for _ in range(40):  # halved, each for itself, until it does not go up
            new = loss(w - size[..., None] * step)
            worse = new > now + 1e-12 * np.abs(now)
            if not worse.any():
                break
            size = np.where(worse, size / 2, size)
        w, now = np.where((worse)[..., None], w, w - size[..., None] * step), np.where(worse, now, new)
    return w[..., :-1], w[..., -1]


def logistic_sparse(X, y, C=1.0, most=100, tolerance=1e-8):
    """The same of Columns with many columns: Newton's method whose steps are found by conjugate gradients."""
    y, w, b, squared = np.asarray(y, float), np.zeros(X.m), 0.0, X._replace(values=X.values ** 2)

    def loss(w, b):
        return 0.5 * w @ w + C * log_loss(X.times(w) + b, y).sum()
    now = loss(w, b)
    for _ in range(most):
        p = 1 / (1 + np.exp(-np.clip(X.times(w) + b, -500, 500)))
        gradient = np.r_[w + C * X.transposed(p - y), C * (p - y).sum()]
        if np.abs(gradient).max() < tolerance * max(1.0, C * len(y)):
            break
        curve = C * p * (1 - p)

        def curvature(v, curve=curve):
            z = curve * (X.times(v[:-1]) + v[-1])
            return np.r_[v[:-1] + X.transposed(z), z.sum()]
        diagonal = np.r_[1 + squared.transposed(curve), max(curve.sum(), 1e-12)]
        step = conjugate_gradients(curvature, gradient, diagonal, 0.1 * min(1, np.abs(gradient).max()))
        size = 1.0
        while (new := loss(w - size * step[:-1], b - size * step[-1])) > now and size > 1e-9:
            size /= 2
        if new > now:
            break
        w, b, now = w - size * step[:-1], b - size * step[-1], new
    return w, b


def conjugate_gradients(curvature, target, diagonal, tolerance, most=500):
    """v with curvature(v) = target to within tolerance of its length."""
    v, left = np.zeros_like(target), target.copy()
    scaled = left / diagonal
    direction, product = scaled, left @ scaled
    for _ in range(most):
        if np.linalg.norm(left) <= tolerance * np.linalg.norm(target):
            break
        turned = curvature(direction)
        size = product / (direction @ turned)
        v, left = v + size * direction, left - size * turned
        scaled = left / diagonal
        product, before = left @ scaled, product
        direction = scaled + product / before * direction
    return v


def balanced(y):
    """Weights of samples that give both labels the same weight, as scikit-learn's "balanced". y: (..., n)."""
    positives = y.mean(-1, keepdims=True)
    return np.where(y > 0, 0.5 / np.maximum(positives, 1e-12), 0.5 / np.maximum(1 - positives, 1e-12))


def f1_score(predicted, y):
    """Of (..., n) masks; 0 where nothing is found."""
    hits = (predicted & y).sum(-1)
    return 2 * hits / np.maximum(1, predicted.sum(-1) + y.sum(-1))


# Sparse probing


def differences(X, positive, negative):
    """mean+ - mean- of every feature, (m,); positive, negative: rows of texts."""
    v = np.zeros(X.n)
    np.add.at(v, positive, 1 / len(positive))
    np.add.at(v, negative, -1 / len(negative))
    return X.transposed(v)


def largest(values, k):
    """The places of the k largest, the largest first; ties go to the lower place."""
    return np.argsort(-values, kind="stable")[:k]


def top_by_difference(X, positive, negative, k):
    return largest(np.abs(differences(X, positive, negative)), k)


class Split(NamedTuple):
    """Binary tasks of one size: rows of texts, the positives first, and as many negatives. (T, n) each."""
    train: np.ndarray
    test: np.ndarray

    @staticmethod
    def labels(rows):
        return np.broadcast_to(np.arange(rows.shape[1]) < rows.shape[1] // 2, rows.shape)


def sparse_probing(X, split, ks):
    """{k: which test texts are found right, (T, n)} and the chosen features, (T, max k)."""
    half = split.train.shape[1] // 2
    chosen = [top_by_difference(X, rows[:half], rows[half:], max(ks)) for rows in split.train]
    dense = [X.dense(columns) for columns in chosen]
    train, test = (np.stack([part[rows] for part, rows in zip(dense, of)]) for of in split)  # (T, n, k)
    right = {}
    for k in ks:
        w, b = logistic(train[..., :k], split.labels(split.train))
        z = np.einsum("tnk,tk->tn", test[..., :k], w) + b[:, None]
        right[k] = (z > 0) == split.labels(split.test)
    return right, np.stack(chosen)


# SCR and TPP


def effects(difference, dots, scr):
    """How much each feature moves a probe, (m,). difference: mean+ - mean-; dots: w . W_dec, (m,) each."""
    return np.abs(difference * dots) if scr else np.maximum(difference, 0) * dots


def top_effects(effect, n):
    """The features with the n largest effects, or as many as have any."""
    return largest(effect, min(n, int((effect != 0).sum())))


def ablated(scores, X, features, dots):
    """Scores of probes (n, c) on texts with some features set to zero. dots: (m, c)."""
    return scores - X.dense(features) @ dots[features]


def scr_score(original, changed, clean):
    """Of accuracies; arrays go."""
    room = np.asarray(clean - original, float)
    return np.where(room < 0.001, 0.0, (changed - original) / np.where(room < 0.001, 1.0, room))


def tpp_parts(clean, patched):
    """What each class's texts lose by its own features, less the mean of what they lose by those of others: (c, ...).
    clean: (c, ...) accuracies; patched: (c ablated, c, ...)."""
    drop = clean[None] - patched
    own = np.einsum("cc...->c...", drop)
    return own - (drop.sum(0) - own) / (len(drop) - 1)


def tpp_score(clean, patched):
    """The mean over classes: that over what is ablated is the same."""
    return tpp_parts(clean, patched).mean(0)


# Absorption


def l1_probe(X, Y, l1=0.01, steps=50, rate=0.01, last=1e-5, decay=1e-6, start=None):
    """Weights (c, m) of sparse one-against-rest probes: balanced logistic loss and l1 times the mean of |w|_1, by Adam,
    as SAEBench trains them with all samples in one batch. X: Columns (n, m); Y: (n, c) labels.

    Only columns with entries are held; the others of SAEBench's start at random and go to about 0.
    start: (weights (c, m), biases (c,)); zeros by default.
    """
    import torch
    used, column = np.unique(X.columns, return_inverse=True)
    n, c = Y.shape
    at = torch.from_numpy(np.stack([X.rows, column]))
    product = torch.sparse_coo_tensor(at, torch.from_numpy(X.values).float(), (n, len(used)),
                                      check_invariants=True).coalesce()
    Y = torch.from_numpy(np.ascontiguousarray(Y)).float()
    weight, bias = (torch.zeros(len(used), c), torch.zeros(c)) if start is None else (
        torch.from_numpy(start[0][:, used].T.copy()).float(), torch.from_numpy(start[1].copy()).float())
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    positives = Y.sum(0)
    loss_of = torch.nn.BCEWithLogitsLoss(pos_weight=(n - positives) / positives)
    optimizer = torch.optim.Adam(parameters, lr=rate, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, (last / rate) ** (1 / steps))
    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of(torch.sparse.mm(product, weight) + bias, Y) + l1 * weight.abs().sum(0).mean()
            loss.backward()
            optimizer.step()
            schedule.step()
    out = np.zeros((c, X.m), np.float32)
    out[:, used] = weight.detach().numpy().T
    return out


def main_features(X, Y, weights, judged=None, most=MOST_MAIN, jump=JUMP):
    """For each class its main features, a list of ids. X: Columns; Y: (n, c); weights: of l1_probe, (c, m).

    judged: (X, Y) that F1 is taken on, if not on these. The features of a class are added by their weight until one
    more improves the F1 of a balanced logistic regression by less than `jump`.
    """
    other = judged or (X, Y)
    orders = [largest(weights[number], most) for number in range(Y.shape[1])]
    dense, tested = ([part.dense(order) for order in orders] for part in (X, other[0]))
    labels = Y.T.astype(float)  # (c, n)
    scores = []
    for k in range(1, most + 1):
        w, b = logistic(np.stack([part[:, :k] for part in dense]), labels, weights=balanced(labels))
        z = np.stack([part[:, :k] @ w_c + b_c for part, w_c, b_c in zip(tested, w, b)])
        scores.append(f1_score(z > 0, other[1].T > 0))
    return [order[:count_main(score, jump)] for order, score in zip(orders, np.stack(scores, 1))]


def count_main(scores, jump=JUMP):
    """How many features are main ones: scores are F1 of 1, 2, ... features."""
    k = 1
    while k < len(scores) and scores[k] > scores[k - 1] + jump:
        k += 1
    return k


class Absorbed(NamedTuple):
    """Of each word: the fraction that is absorbed, and whether one feature absorbs all of it. (n,) each."""
    fraction: np.ndarray
    full: np.ndarray


def absorption(X, projection, cosines, main, threshold=COSINE):
    """X: Columns of the words' features; projection: x . unit probe, (n,); cosines: of W_dec with the probe, (m,)."""
    is_main = np.zeros(X.m, bool)
    is_main[main] = True
    part = X.values * cosines[X.columns]
    from_main = np.bincount(X.rows, weights=part * is_main[X.columns], minlength=X.n)
    main_fires = np.bincount(X.rows, weights=(is_main[X.columns] & (X.values >= 1e-8)), minlength=X.n) > 0
    may = ~is_main[X.columns] & (cosines[X.columns] >= threshold) & (part > 0)
    rows, values = X.rows[may], part[may]
    order = np.lexsort((-values, rows))
    rows, values = rows[order], values[order]
    rank = np.arange(len(rows)) - np.searchsorted(rows, rows)
    absorbers = np.bincount(rows[rank < ABSORBERS], weights=values[rank < ABSORBERS], minlength=X.n)
    with np.errstate(divide="ignore", invalid="ignore"):
        missing = np.minimum(absorbers, projection - from_main)
        fraction = np.where((from_main >= projection) | (absorbers / projection < SHARE), 0.0,
                            np.where(from_main <= 0, 1.0, np.clip(missing / (missing + from_main), 0, 1)))
    order = np.lexsort((-part, X.rows))
    first = order[np.r_[True, np.diff(X.rows[order]) > 0]] if len(order) else order
    best, cosine = np.zeros(X.n), np.full(X.n, -1.0)
    best[X.rows[first]], cosine[X.rows[first]] = part[first], cosines[X.columns[first]]
    with np.errstate(divide="ignore", invalid="ignore"):
        full = ~main_fires & (cosine >= FULL_COSINE) & (projection >= 0) & (best / projection >= SHARE)
    return Absorbed(np.nan_to_num(fraction), full)
