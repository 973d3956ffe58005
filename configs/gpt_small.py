"""GPT-Small of the paper, the dense twin of small_3l: planned for 10B tokens, stopped within 1% of its validation loss.

Cost, predicted: 2.6e18 operations for the dense part, 1.8 hours of one H100 at 40% of its peak
if it stops at 2.13B tokens as the paper's did. To expect (the paper's): validation loss 3.135, Pile perplexity 26.43,
HellaSwag .346, LAMBADA .229. The paper gives one learning rate, used here for Muon and Adam.
The batch size is ours; the paper's is not known to us. Not yet run by us.
"""
base = "small_3l.py"
bottleneck = "none"
max_steps = 10_000_000_000 // batch_tokens
muon_lr = 6e-3
adam_lr = 6e-3
decay_fraction = 0.4
stop_at_val_loss = 3.133  # small_3l
stop_tolerance = 0.01
