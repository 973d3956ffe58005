"""The picture of a bottleneck in README.md: d = 32, 1,024 features, 5 of them active on one token.

    python docs/draw.py                        writes docs/bottleneck.png

Every bit, sign, score and colour is computed, by kloosterman.py; x is drawn at random, and the running mean and
variance of a score are 0 and 1, as in a layer that has not been trained. Lengths are pixels of the page, y downward.
"""
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no screen needed
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import Circle, FancyBboxPatch, Rectangle  # noqa: E402
from PIL import Image  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kloosterman import seed_matrix, sign_vectors  # noqa: E402

WIDTH, HEIGHT = 900, 740
INK, SOFT, LINE, ACCENT, FAINT = "#1f2933", "#66727f", "#c3cbd3", "#c2410c", 0.36
LABEL, BITS, VECTOR, SCORE = 58, 220, 400, 806  # left edges of the columns; SCORE is the zero of the bars
BIT, CELL, TALL = 14, 11, 14                     # widths of a cell, height of any

d, t, row = 32, 5, 13  # the width, its logarithm, and the coordinate whose sign is worked out in step 1
rng = np.random.default_rng(2)
x = rng.standard_normal(d)
generators = rng.integers(d, d * d, 4)                     # each has a bit at position t or above
parents = np.argsort(-abs(x))[:2]                          # level 0 is the standard basis: its scores are x itself
children = (parents[:, None] ^ generators).ravel()
scores = sign_vectors(children, d) @ x / d**0.5
chosen = np.argsort(-abs(scores))[:3]
y = sign_vectors(children[chosen], d).T @ scores[chosen] / d**0.5
y[parents] += x[parents]
y *= np.linalg.norm(x) / np.linalg.norm(y)
feature = children[chosen[0]]                              # the strongest child is the example of step 1

figure = plt.figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=200, facecolor="white")
axes = figure.add_axes((0, 0, 1, 1))
axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
axes.axis("off")


def write(left, top, text, size=9, color=INK, **options):
    axes.text(left, top, text, size=size, color=color, va="center", **options)


def cells(left, middle, colors, width, alpha=1.0):
    """A strip of cells, the first at `left`."""
    for n, color in enumerate(colors):
        corner = (left + n * width, middle - TALL / 2)
        axes.add_patch(Rectangle(corner, width, TALL, facecolor=color, edgecolor=LINE, linewidth=0.5, alpha=alpha))


def bits(middle, word, alpha=1.0, marked=0):
    """The 2t bits of a word, the highest first; those of `marked` in the accent."""
    for n in range(2 * t):
        digit, mark = (int(w) >> 2 * t - 1 - n & 1 for w in (word, marked))
        fill, ink = ("#fdebdc", ACCENT) if mark else ("#eef1f4", INK) if digit else ("white", SOFT)
        cells(BITS + n * BIT, middle, [fill], BIT, alpha)
        write(BITS + (n + 0.5) * BIT, middle + 0.5, digit, 8, ink, ha="center", alpha=alpha)


def signs(middle, index, alpha=1.0):
    cells(VECTOR, middle, ["white" if sign > 0 else INK for sign in sign_vectors(index, d)[0]], CELL, alpha)


def values(middle, vector):
    """A strip of real numbers: blue below zero, red above."""
    cells(VECTOR, middle, plt.get_cmap("RdBu_r")(0.5 + vector / 5), CELL)


def frame(middle, k):
    """Around coordinate k of a strip."""
    corner = (VECTOR + k * CELL, middle - TALL / 2)
    axes.add_patch(Rectangle(corner, CELL, TALL, fill=False, edgecolor=ACCENT, linewidth=1.6))


def coefficient(middle, value, alpha=1.0):
    """A number, as a bar in the colours of `values` and in digits."""
    color = plt.get_cmap("RdBu_r")(0.9 if value > 0 else 0.1)
    axes.add_patch(Rectangle((SCORE, middle - 4), 14 * value, 8, color=color, linewidth=0, alpha=alpha))
    write(WIDTH - 24, middle, f"{value:+.1f}".replace("-", "−"), ha="right", alpha=alpha)


def arrow(start, end):
    axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": SOFT, "shrinkA": 0, "shrinkB": 0})


def box(left, top, width, height, **options):
    axes.add_patch(FancyBboxPatch((left, top), width, height, "round,pad=0,rounding_size=5", **options))


def step(top, number, title, text):
    axes.add_patch(Circle((LABEL - 20, top), 10, color=INK))
    write(LABEL - 20, top + 0.5, str(number), 9, "white", ha="center", weight="bold")
    write(LABEL, top, title, 10.5, weight="bold")
    write(LABEL, top + 19, text, 9, SOFT)


# Step 1: one sign of one feature, bit by bit
step(36, 1, "A feature is a number: the parities of its bits are its vector",
     "No vector is stored. Sign k comes from the bits that index i shares with row k of one fixed matrix M, "
     f"{d} rows of {2 * t} bits.")
word = int(seed_matrix(d)[row])
shared = int(feature) & word
ones, middle = shared.bit_count(), 90
for label, bitmap in ((f"index  i = {feature}", feature), (f"row  M[{row}]", word), ("i and M[k]", shared)):
    write(BITS - 12, middle, label, ha="right")
    bits(middle, bitmap, marked=shared)
    middle += 22
signs(90, feature)
frame(90, row)
arrow((VECTOR + (row + 0.5) * CELL, 124), (VECTOR + (row + 0.5) * CELL, 99))
arrow((BITS + 2 * t * BIT + 8, 134), (VECTOR - 8, 134))
parity = ("an even number", "+") if ones % 2 == 0 else ("an odd number", "−")
write(VECTOR, 134, f"{ones} ones, {parity[0]}:  sign {row} is {parity[1]}", color=ACCENT)
write(VECTOR + d * CELL + 14, 90, rf"$\sqrt{{{d}}}\,h_{{{feature}}}$")
write(VECTOR + d * CELL + 14, 112, "white +  black −", 8, SOFT)

# Step 2: level 0 is the standard basis
step(186, 2, "Level 0: the largest coordinates of x",
     f"Features 0 to {d - 1} are the basis vectors, so their scores are x itself. "
     f"The {len(parents)} of largest size are active.")
write(VECTOR - 12, 240, "x, the residual stream of one token", ha="right")
write(WIDTH - 24, 240, "score", color=SOFT, ha="right")
values(240, x)
for n, parent in enumerate(parents):
    write(BITS - 12, 264 + 20 * n, f"feature {parent}", ha="right")
    bits(264 + 20 * n, parent)
    cells(VECTOR, 264 + 20 * n, [ACCENT if k == parent else "#f5f6f8" for k in range(d)], CELL)
    frame(240, parent)
    coefficient(264 + 20 * n, x[parent])

# Step 3: level 1 is the children of the active features
step(332, 3, "Level 1: only children of active features are scored",
     f"Child = parent xor g, for {len(generators)} fixed words g. A score is the inner product with x. "
     f"Of these {len(children)}, the {len(chosen)} of largest size are active.")
for n, (child, score) in enumerate(zip(children, scores)):
    parent, g = divmod(n, len(generators))
    middle, alpha = 386 + 20 * n + 8 * parent, 1 if n in chosen else FAINT
    write(BITS - 12, middle, f"{parents[parent]} xor {generators[g]} = {child}", ha="right", alpha=alpha)
    bits(middle, child, alpha)
    signs(middle, child, alpha)
    coefficient(middle, score, alpha)

# Step 4: the code and what becomes of it
active = [*zip(parents, x[parents]), *zip(children[chosen], scores[chosen])]
step(586, 4, "The code, and all that the MLP reads",
     f"{len(active)} of {d * d:,} features with their coefficients. To edit these numbers is to steer the model.")
for n, (index, value) in enumerate(active):
    left = VECTOR + n * (d * CELL + 8) / len(active)
    box(left, 632, 64, 18, facecolor="#eef1f4", linewidth=0)
    write(left + 32, 641, f"{index}: {value:+.1f}".replace("-", "−"), 8.5, ha="center")
write(VECTOR - 12, 641, "code:  index and coefficient of each", ha="right")
write(VECTOR - 12, 682, "y:  their weighted sum, made as long as x", ha="right")
arrow((VECTOR + d * CELL / 2, 653), (VECTOR + d * CELL / 2, 672))
values(682, y)
arrow((VECTOR + d * CELL + 6, 682), (SCORE - 16, 682))
box(SCORE - 14, 662, 84, 40, facecolor="white", edgecolor=INK)
write(SCORE + 28, 682, "MLP", 11, ha="center", weight="bold")

figure.canvas.draw()
picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
picture.quantize(128).save(Path(__file__).with_name("bottleneck.png"), optimize=True)  # a palette: a third of the size
