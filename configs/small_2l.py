"""PT-Small-2L of the paper: 12 layers, d = 1024, 32,768 features, 48 active; 20B tokens.

Cost, predicted: 2.4e19 operations for the dense part, 17 hours of one H100 at 40% of its peak;
the bottleneck costs 1.47x of dense in the paper (4 H200). To expect (the paper's): validation loss 3.158, Pile
perplexity 24.57, HellaSwag .350, LAMBADA .219. The paper gives one learning rate, used here for Muon and Adam.
The batch size is ours; the paper's is not known to us. Not yet run by us.
Off here, as in the paper: what makes features mean something in tiny.py, learning first and aligning later, that is
--variance_weight=0.05 --reconstruction_weight=0.5 --auxiliary_start=0.6 --auxiliary_ramp=0.1. Not known at this size.
"""
layers = 12
d = 1024
heads = 8
bits = (10, 15)
active = (16, 32)
children = (256,)
batch_tokens = 512 * 1024
max_steps = 20_000_000_000 // batch_tokens
muon_lr = 1.2e-2
adam_lr = 1.2e-2
decay_fraction = 0.9
