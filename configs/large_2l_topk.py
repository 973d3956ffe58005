"""large_2l.py with learned in-loop TopK dictionaries instead of the parity dictionary: 24 layers, d = 2048, 32,768 features, 48 active.

4.5B parameters; in the paper (4 H200) it costs 3.15x of dense. A baseline for throughput: the
paper has no loss for it. The rates are ours: Muon's as large_2l, Adam's 3e-4.
The batch size is ours; the paper's is not known to us. Not yet run by us.
"""
bottleneck = "topk"
layers = 24
d = 2048
heads = 16
bits = (11, 15)
active = (16, 32)
children = (256,)
batch_tokens = 512 * 1024
max_steps = 20_000_000_000 // batch_tokens
muon_lr = 8e-3
adam_lr = 3e-4
decay_fraction = 0.5
