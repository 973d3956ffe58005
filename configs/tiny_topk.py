"""tiny_plain.py with learned in-loop TopK dictionaries in place of the parity one: 4,096 features, 24 active.

Result, measured (seed 0): validation loss 1.1888, 75.7% dead features, IOI 0.51, pronoun 1.00, greater-than 0.85.
Its time on a quiet machine was not measured.
"""
base = "tiny_plain.py"
bottleneck = "topk"
