"""small_3l.py with learned in-loop TopK dictionaries instead of the parity dictionary.

12 layers, d = 1024, 131,072 features, 112 active; 3.4B parameters; in the paper (4 H200) it costs 16.4x of dense.
A baseline for throughput: the paper has no loss for it. The rates are ours: Muon's as small_3l, Adam's 3e-4.
The batch size is ours; the paper's is not known to us. Not yet run by us.
"""
base = "small_3l.py"
bottleneck = "topk"
adam_lr = 3e-4
