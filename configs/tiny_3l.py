"""tiny.py with three levels: 16,384 features, 56 active.

Cost: not measured on a quiet machine; expect a minute or two more than tiny.py on 2 CPU cores. Result, measured (seed 0, one thread):
validation loss 1.1810, dead features 0.00%, 0.01% and 0.00%, IOI 1.00, pronoun 1.00, greater-than 1.00.
"""
layers = 4
d = 128
heads = 4
context = 128
vocab_size = 2048
bits = (7, 12, 14)
active = (8, 16, 32)
children = (64, 64)
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
