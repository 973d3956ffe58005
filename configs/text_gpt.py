"""The dense twin of text.py: a small model for text of your own, with GPT-2's tokenizer, on a CPU.

    python data.py text YOUR_FILES --out data/text && python train.py configs/text_gpt.py

Cost: some minutes on 2 CPU cores. Result, measured (seed 0) on 1.2M tokens of OpenWebText and FineWeb-Edu:
validation loss 6.892.
"""
base = "text.py"
bottleneck = "none"
