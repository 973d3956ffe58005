"""The recipe of tiny.py on real text, with a tokenizer of its own: do features mean something there?

    python data.py text YOUR_FILES --out data/web --tokenizer bpe:4096 && python train.py configs/web.py
    python probe.py truth out/web

Cost: 16 minutes on one CPU core. Result, measured (seed 0) on 1.58M tokens of OpenWebText and FineWeb-Edu: validation
loss 5.162, dead features 3.8% and 0.15%; docs/results.md#real-text has what single features stand for.
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
