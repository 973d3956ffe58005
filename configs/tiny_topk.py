"""tiny.py with learned in-loop TopK dictionaries of the same 4,096 features, 24 active, instead of the parity dictionary.

Result, measured (seed 0): validation loss 1.1888, 75.7% dead features, IOI 0.51, pronoun 1.00, greater-than 0.85. Its time
on a quiet machine was not measured.
"""
layers = 4
d = 128
heads = 4
context = 128
vocab_size = 2048
bottleneck = "topk"
bits = (7, 12)
active = (8, 16)
children = (64,)
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
