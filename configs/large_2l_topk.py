"""large_2l.py with learned in-loop TopK dictionaries instead of the parity dictionary.

24 layers, d = 2048, 32,768 features, 48 active; 4.5B parameters; in the paper (4 H200) it costs 3.15x of dense.
A baseline for throughput: the paper has no loss for it. The rates are ours: Muon's as large_2l, Adam's 3e-4.
The batch size is ours; the paper's is not known to us. Not yet run by us.
"""
base = "large_2l.py"
bottleneck = "topk"
