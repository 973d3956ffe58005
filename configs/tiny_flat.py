"""tiny.py without the hierarchy: of all 4,096 features, the 24 with the largest standardised scores are active.

Cost: 2.6 of the dense twin's time a step on 2 CPU cores (`python bench.py --rows tiny`). Result: not measured yet.
"""
layers = 4
d = 128
heads = 4
context = 128
vocab_size = 2048
bits = (7, 12)
active = (8, 16)
children = (64,)
selection = "flat"
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
