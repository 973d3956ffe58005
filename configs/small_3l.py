"""PT-Small-3L of the paper: 12 layers, d = 1024, 131,072 features, 112 active; 20B tokens.

Cost, predicted: 2.4e19 operations for the dense part, 17 hours of one H100 at 40% of its peak;
the bottleneck costs 2.06x of dense in the paper (4 H200). To expect (the paper's): validation loss 3.133, Pile
perplexity 25.89, HellaSwag .360, LAMBADA .233. The paper gives one learning rate, used here for Muon and Adam.
The batch size is ours; the paper's is not known to us. Not yet run by us.
"""
base = "small_2l.py"
bits = (10, 15, 17)
active = (16, 32, 64)
children = (256, 256)
