"""A small parity model for text of your own, with GPT-2's tokenizer, on a CPU.

    python data.py text YOUR_FILES --out data/text && python train.py configs/text.py

Cost: some minutes on 2 CPU cores. Result, measured (seed 0) on 1.2M tokens of OpenWebText and FineWeb-Edu: validation
loss 7.064, dead features 0.20% and 1.63%. That is a short run on little data: raise max_steps, d and layers for more.
"""
layers = 4
d = 128
heads = 4
context = 256
bits = (7, 12)
active = (8, 16)
children = (64,)
data = "data/text"
batch_tokens = 1024
max_steps = 300
warmup_steps = 30
decay_fraction = 0.5
muon_lr = 0.01
adam_lr = 3e-3
eval_every = 50
eval_tokens = 32768
save_every = 100
