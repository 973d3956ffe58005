"""large_3l.py with learned in-loop TopK dictionaries instead of the parity dictionary.

24 layers, d = 2048, 131,072 features, 112 active; 14.2B parameters; in the paper (4 H200) it runs out of memory.
A baseline for throughput: the paper has no loss for it. The rates are ours: Muon's as large_3l, Adam's 3e-4.
The batch size is ours; the paper's is not known to us. Not yet run by us.
"""
base = "large_3l.py"
bottleneck = "topk"
