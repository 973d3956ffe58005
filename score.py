"""Log-probabilities of the ends of many texts, in few forward passes: all that eval.py needs to know of a model.

    scorer = Scorer(model, context, batch_tokens, rank, ranks)
    log_probs, greedy = scorer.score([Request(tokens, count), ...])

A request is a text of at most context + 1 tokens, of which the last `count` are scored, each given all before it. Three
things make it fast. Texts of about the same length share a pass. Texts with the same beginning, such as the
answers to one question, share its keys and values. And the unembedding, most of the work of a small model, is computed
only where a token is scored.
"""
import collections
import contextlib
import itertools
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from helpers import progress
from model import Cache
from ops import chunks
from ranks import all_reduce

STEP = 16  # tokens: with longer steps more questions share a pass, but their answers share less


class Request(NamedTuple):
    tokens: np.ndarray  # at most context + 1 of them
    count: int          # so many at the end are scored, each given all that come before it


def fit(before, answer, context):
    """A Request to score `answer` after `before`; what does not fit the context is cut off on the left."""
    tokens = np.array([*before, *answer][-(context + 1):])
    return Request(tokens, min(len(answer), len(tokens) - 1))


def windows(n, context, stride):
    """(start, stop, count) such that each of tokens 1..n is scored once: `count` at the end of tokens start..stop-1."""
    done = 0
    while done < n:
        count = min(stride if done else context, n - done)
        done += count
        yield max(0, done - context), done + 1, count


def plan(requests, batch_tokens):
    """Batches (prefix, groups) of about batch_tokens tokens: lists of requests whose first `prefix` tokens are equal.

    Answers to one question share what comes before them, but for the last token, which predicts their first. Prefixes
    are cut to a multiple of STEP, since all of a batch must be equally long: nothing in the cache is padding. Groups
    are sorted by length, so that little else is padding, the longest first: too large a batch fails at once.
    """
    shared = collections.defaultdict(list)
    for index, (tokens, count) in enumerate(requests):
        prefix = tokens[: len(tokens) - count - 1]
        shared[prefix.tobytes() if len(prefix) else index].append(index)
    groups = []  # (prefix, longest rest, requests)
    for group in shared.values():
        tokens, count = requests[group[0]]
        prefix = (len(tokens) - count - 1) // STEP * STEP if len(group) > 1 else 0
        groups.append((prefix, max(len(requests[index].tokens) for index in group) - prefix, group))
    batches, room, width = [], 0, 0
    for prefix, rest, group in sorted(groups, key=lambda group: (-group[0], -group[1], group[2])):
        if not batches or batches[-1][0] != prefix or room < prefix + len(group) * width:
            batches.append((prefix, []))
            room, width = batch_tokens, rest
        room -= prefix + len(group) * width
        batches[-1][1].append(group)
    return batches


class Scorer:
    """score(requests) for a model, with the work shared out over the ranks.

    As in training, the blocks run in bfloat16 on a GPU; the logits are float32 always, and only those that are needed.
    """

    def __init__(self, model, context, batch_tokens=4096, rank=0, ranks=1):
        self.model, self.context, self.batch_tokens, self.rank, self.ranks = model, context, batch_tokens, rank, ranks
        self.device = model.embedding.weight.device

    def hidden(self, tokens, **arguments):
        tokens = torch.from_numpy(tokens.astype(np.int64)).to(self.device)
        with torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else contextlib.nullcontext():
            return self.model.hidden(tokens, **arguments)

    @torch.no_grad()
    def score(self, requests, what="", **arguments):
        """Of each request the log-probability, float64, and whether each of its tokens is the most probable: (n,) both.
        arguments: of the forward passes, such as patch.

        The batches do not depend on the number of ranks, and a request is scored by one rank: the others add zeros.
        """
        found = torch.zeros(2, len(requests), dtype=torch.float64, device=self.device)  # log-probability, greedy tokens
        batches = plan(requests, self.batch_tokens)
        for index, (prefix, groups) in enumerate(batches):
            if index % self.ranks == self.rank:
                found[:, list(itertools.chain(*groups))] = self.score_batch(requests, prefix, groups, **arguments)
            progress(f"{what} {(index + 1) / len(batches):.0%}" if index + 1 < len(batches) else "")
        log_probs, greedy = all_reduce(found).cpu().numpy()
        return log_probs, greedy == [request.count for request in requests]

    def score_batch(self, requests, prefix, groups, **arguments):
        cache = None
        if prefix:
            cache = Cache()
            self.hidden(np.stack([requests[group[0]].tokens[:prefix] for group in groups]), cache=cache, **arguments)
            sizes = torch.tensor([len(group) for group in groups], device=self.device)
            cache.store = {layer: pair.repeat_interleave(sizes, 1) for layer, pair in cache.store.items()}
        rows = [requests[index] for index in itertools.chain(*groups)]
        width = max(len(tokens) for tokens, _ in rows) - prefix - 1
        inputs, targets = np.zeros((2, len(rows), width), np.int64)  # padded on the right, which no token sees
        scored = np.zeros((len(rows), width), bool)
        for row, (tokens, count) in enumerate(rows):
            length = len(tokens) - prefix - 1
            inputs[row, :length], targets[row, :length] = tokens[prefix:-1], tokens[prefix + 1 :]
            scored[row, length - count : length] = True
        x = self.hidden(inputs, cache=cache, **arguments)
        x = x[torch.from_numpy(scored).to(self.device)].float()  # (scored, d)
        owners, wanted = (torch.from_numpy(found).to(self.device) for found in (scored.nonzero()[0], targets[scored]))
        weight = self.model.embedding.weight.float()
        result = torch.zeros(2, len(rows), dtype=torch.float64, device=self.device)
        # a CPU's cache is small
        for part in chunks(len(x), len(weight), 2 ** 22 if self.device.type == "cpu" else 2 ** 26):
            logits = F.linear(x[part], weight)  # (part, V)
            most, chosen = logits.amax(-1), logits.gather(1, wanted[part, None])[:, 0]
            greedy = chosen == most
            # of equals the first; slow, so only here
            greedy[greedy.clone()] = logits[greedy].argmax(-1) == wanted[part][greedy]
            log_probs = chosen - most - logits.sub_(most[:, None]).exp_().sum(-1).log()  # in place: time is memory here
            result.index_add_(1, owners[part], torch.stack([log_probs, greedy]).double())
        return result


def score_documents(scorer, documents, end, stride, what=""):
    """The log-probability of each document, an array of tokens, after an end-of-text token: (n,)."""
    requests, owners = [], []
    for owner, tokens in enumerate(documents):
        tokens = np.concatenate([np.array([end], tokens.dtype), tokens])
        for start, stop, count in windows(len(tokens) - 1, scorer.context, stride):
            requests.append(Request(tokens[start:stop], count))
            owners.append(owner)
    return np.bincount(np.array(owners, int), scorer.score(requests, what)[0], len(documents))
