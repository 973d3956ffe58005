"""The dense twin of tiny.py: the same model without a bottleneck.

TINYGPT_RESULT
"""
layers = 4
d = 128
heads = 4
context = 256
vocab_size = 2048
bottleneck = "none"
data = "data/toy"
batch_tokens = 2048
max_steps = 1000
warmup_steps = 50
decay_fraction = 0.6
muon_lr = 0.02
adam_lr = 3e-3
eval_every = 100
eval_tokens = 65536
save_every = 250
