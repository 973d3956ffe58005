"""small_2l.py with learned in-loop TopK dictionaries instead of the parity dictionary.

12 layers, d = 1024, 32,768 features, 48 active; 1.0B parameters; in the paper (4 H200) it costs 4.62x of dense.
A baseline for throughput: the paper has no loss for it. The rates are ours: Muon's as small_2l, Adam's 3e-4.
The batch size is ours; the paper's is not known to us. Not yet run by us.
"""
base = "small_2l.py"
bottleneck = "topk"
adam_lr = 3e-4
