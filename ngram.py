"""What counting alone can do: the validation loss of a trigram model, to hold against a transformer's.

    python ngram.py data/toy
"""
import argparse
import math
from collections import Counter, defaultdict

import data
from helpers import UserError, run_script


def trigram_loss(train, test, discount=0.75):
    """Nats per token of a trigram model with interpolated absolute discounting. train, test: lists of tokens."""
    after = defaultdict(Counter)  # context of 0, 1 or 2 tokens -> counts of the next
    for i, token in enumerate(train):
        for n in range(min(i, 2) + 1):
            after[tuple(train[i - n : i])][token] += 1
    totals = {context: counts.total() for context, counts in after.items()}
    total = 0.0
    for i, token in enumerate(test):
        p = 1 / (len(after[()]) + 1)  # one for all that training never had
        for n in range(min(i, 2) + 1):
            context = tuple(test[i - n : i])
            if context in totals:
                seen = after[context]
                p = (max(seen[token] - discount, 0) + discount * len(seen) * p) / totals[context]
        total -= math.log(p)
    return total / len(test)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a folder that data.py made, such as data/toy")
    folder = parser.parse_args(arguments).folder
    train, test = (data.Tokens(folder, split) for split in ("train", "val"))
    if len(train) > 10 ** 8:
        raise UserError(f"{folder} has {len(train):,} training tokens, "
                        "and counting them in Python needs too much memory: give at most 100 million")
    loss = trigram_loss(train.read(0, len(train)).tolist(), test.read(0, len(test)).tolist())
    print(f"trigram: validation loss {loss:.4f} nats per token, from {len(train):,} training tokens")


if __name__ == "__main__":
    run_script(main)
