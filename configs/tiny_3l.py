"""tiny_plain.py with three levels: 16,384 features, 56 active.

Cost: not measured on a quiet machine; expect a minute or two more than tiny.py on 2 CPU cores.
Result, measured (seed 0, one thread): validation loss 1.1810, dead features 0.00%, 0.01% and 0.00%, IOI 1.00,
pronoun 1.00, greater-than 1.00.
"""
base = "tiny_plain.py"
bits = (7, 12, 14)
active = (8, 16, 32)
children = (64, 64)
