"""PT-Large-3L of the paper, which measured only its throughput: 24 layers, d = 2048, 131,072 features, 112 active.

Cost, predicted: 1.6e20 operations for the dense part, 110 hours of one H100 at 40% of its peak;
the bottleneck costs 1.55x of dense in the paper (4 H200). The paper has no result for it; rates as for large_2l.
The batch size is ours; the paper's is not known to us. Not yet run by us.
"""
base = "large_2l.py"
bits = (11, 15, 17)
active = (16, 32, 64)
children = (256, 256)
