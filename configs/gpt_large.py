"""GPT-Large of the paper, the dense twin of large_2l: planned for 26B tokens, stopped within 1% of its validation loss.

Cost, predicted: 5.4e19 operations for the dense part, 38 hours of one H100 at 40% of its peak
if it stops at 6.82B tokens as the paper's did. To expect (the paper's): validation loss 2.828, Pile perplexity 18.23,
HellaSwag .370, LAMBADA .293.
The batch size is ours; the paper's is not known to us. Not yet run by us.
"""
base = "large_2l.py"
bottleneck = "none"
max_steps = 26_000_000_000 // batch_tokens
stop_at_val_loss = 2.808  # large_2l
stop_tolerance = 0.01
