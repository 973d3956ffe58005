"""large_3l.py with learned in-loop TopK dictionaries instead of the parity dictionary: 24 layers, d = 2048, 131,072 features, 112 active.

14.2B parameters; in the paper (4 H200) it runs out of memory. A baseline for throughput: the
paper has no loss for it. The rates are ours: Muon's as large_3l, Adam's 3e-4.
The batch size is ours; the paper's is not known to us. Not yet run by us.
"""
bottleneck = "topk"
layers = 24
d = 2048
heads = 16
bits = (11, 15, 17)
active = (16, 32, 64)
children = (256, 256)
batch_tokens = 512 * 1024
max_steps = 20_000_000_000 // batch_tokens
muon_lr = 8e-3
adam_lr = 3e-4
decay_fraction = 0.5
