"""The dense twin of tiny_plain.py: the same model without a bottleneck.

Result, measured (seed 0, one thread): validation loss 1.1011, IOI 1.00, pronoun 1.00, greater-than 0.98, facts 1.00,
and 0.73 of the facts that no document tells but that follow from others.
"""
base = "tiny_plain.py"
bottleneck = "none"
