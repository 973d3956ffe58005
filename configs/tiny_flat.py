"""tiny_plain.py without the hierarchy: of all 4,096 features, the 24 with the largest standardised scores are active.

Cost: 1.40 of the dense twin's time a step on 2 CPU cores, 1.28 with the hierarchy (`python bench.py --rows tiny`).
Result: not measured since the toy world has facts; before, with 1,800 steps, as good as tiny_plain (docs/log.md).
"""
base = "tiny_plain.py"
selection = "flat"
