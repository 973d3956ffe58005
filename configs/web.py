"""The recipe of tiny.py on real text, with a tokenizer of its own: do features mean something there?

    python data.py text YOUR_FILES --out data/web --tokenizer bpe:4096 && python train.py configs/web.py
    python probe.py truth out/web

Cost and result: see docs/results.md#real-text.
"""
base = "tiny.py"
d = 256
vocab_size = 4096
bits = (8, 13)
active = (8, 16)
children = (64,)
data = "data/web"
max_steps = 1500
adam_lr = 3e-3
