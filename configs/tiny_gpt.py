"""The dense twin of tiny.py: the same model without a bottleneck.

Cost: 3.2 minutes on 2 CPU cores. Result, measured (seed 0): validation loss 1.1746, IOI 1.00, pronoun 1.00,
greater-than 0.88.
"""
layers = 4
d = 128
heads = 4
context = 128
vocab_size = 2048
bottleneck = "none"
data = "data/toy"
batch_tokens = 1024
max_steps = 1800
warmup_steps = 50
decay_fraction = 0.5
muon_lr = 0.01
adam_lr = 5e-3
eval_every = 200
eval_tokens = 65536
save_every = 200
