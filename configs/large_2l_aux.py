"""PT-Large-2L-Aux of the paper: large_2l.py with both auxiliary losses.

Cost, predicted: 1.6e20 operations for the dense part, 110 hours of one H100 at 40% of its peak, as
large_2l. To expect (the paper's): validation loss 2.842, Pile perplexity 18.56, HellaSwag .376, LAMBADA .264.
The batch size is ours; the paper's is not known to us. Not yet run by us.
"""
layers = 24
d = 2048
heads = 16
bits = (11, 15)
active = (16, 32)
children = (256,)
variance_weight = 0.05
reconstruction_weight = 0.1
batch_tokens = 512 * 1024
max_steps = 20_000_000_000 // batch_tokens
muon_lr = 8e-3
adam_lr = 3e-4
decay_fraction = 0.5
