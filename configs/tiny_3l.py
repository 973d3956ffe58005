"""tiny.py with three levels: 16,384 features, 56 active.

Cost and result: not measured yet; expect some minutes more than tiny.py on 2 CPU cores.
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
