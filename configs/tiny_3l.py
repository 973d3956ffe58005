"""tiny_plain.py with three levels: 16,384 features, 56 active.

Cost: not measured on a quiet machine; expect a minute or two more than tiny.py on 2 CPU cores.
Result: not measured since the toy world has facts; before, with 1,800 steps, as good as tiny_plain (docs/log.md).
"""
base = "tiny_plain.py"
bits = (7, 12, 14)
active = (8, 16, 32)
children = (64, 64)
