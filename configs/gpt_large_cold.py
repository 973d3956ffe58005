"""The dense large model trained on 3B tokens with its rate brought to zero, a second dense baseline of the paper.

Cost, predicted: 2.4e19 operations for the dense part, 17 hours of one H100 at 40% of its peak.
The paper gives one learning rate, used here for Muon and Adam, and no benchmark that we know of.
The batch size is ours; the paper's is not known to us. Not yet run by us.
"""
base = "gpt_large.py"
max_steps = 3_000_000_000 // batch_tokens
muon_lr = 1e-2
adam_lr = 1e-2
stop_at_val_loss = None
