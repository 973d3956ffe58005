"""tiny_plain.py with learned in-loop TopK dictionaries in place of the parity one: 4,096 features, 24 active.

Result: not measured since the toy world has facts; before, with 1,800 steps, three quarters of its features were dead,
and it had not learnt IOI (docs/log.md). Its time on a quiet machine was not measured.
"""
base = "tiny_plain.py"
bottleneck = "topk"
