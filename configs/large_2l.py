"""PT-Large-2L of the paper: 24 layers, d = 2048, 32,768 features, 48 active; 20B tokens.

Cost, predicted: 1.6e20 operations for the dense part, 110 hours of one H100 at 40% of its peak;
the bottleneck costs 1.22x of dense in the paper (4 H200). To expect (the paper's): validation loss 2.808, Pile
perplexity 17.65, HellaSwag .385, LAMBADA .311.
The batch size is ours; the paper's is not known to us. Not yet run by us.
"""
layers = 24
d = 2048
heads = 16
bits = (11, 15)
active = (16, 32)
children = (256,)
batch_tokens = 512 * 1024
max_steps = 20_000_000_000 // batch_tokens
muon_lr = 8e-3
adam_lr = 3e-4
decay_fraction = 0.5
