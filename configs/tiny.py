"""The tiny parity model on the embedded toy world: see all of it work in minutes, without a GPU.

It learns first and is aligned later: both auxiliary losses are off for the first 60% of the steps, and then act while
the rate is still high (it falls in the last 30%). It is they that make features mean something
(docs/results.md#what-single-features-stand-for); tiny_plain.py is without them.
Cost: 5 min 47 s on 2 CPU cores. Result, measured (seed 0, one thread or two): validation loss 1.1288, dead features
0.78% and 0.06%, IOI 1.00, pronoun 1.00, greater-than 0.89, facts 0.98.
"""
layers = 4
d = 128
heads = 4
context = 128
vocab_size = 2048
bits = (7, 12)
active = (8, 16)
children = (64,)
variance_weight = 0.05
reconstruction_weight = 0.5
auxiliary_start = 0.6
auxiliary_ramp = 0.1
data = "data/toy"
batch_tokens = 1024
max_steps = 3000
warmup_steps = 50
decay_fraction = 0.3
muon_lr = 0.01
adam_lr = 5e-3
eval_every = 200
eval_tokens = 65536
save_every = 200
