"""PT-Large-3L of the paper, which measured only its throughput: 24 layers, d = 2048, 131,072 features, 112 active.

Cost, predicted: 1.6e20 operations for the dense part, 110 hours of one H100 at 40% of its peak;
the bottleneck costs 1.55x of dense in the paper (4 H200). The paper has no result for it; rates as for large_2l.
The batch size is ours; the paper's is not known to us. Not yet run by us.
"""
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
