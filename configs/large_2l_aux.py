"""PT-Large-2L-Aux of the paper: large_2l.py with both auxiliary losses.

Cost, predicted: 1.6e20 operations for the dense part, 110 hours of one H100 at 40% of its peak, as
large_2l. To expect (the paper's): validation loss 2.842, Pile perplexity 18.56, HellaSwag .376, LAMBADA .264.
The batch size is ours; the paper's is not known to us. Not yet run by us.
The losses act from the first step, as in the paper. tiny.py lets the model learn first, and weighs the reconstruction
more: --reconstruction_weight=0.5 --auxiliary_start=0.6 --auxiliary_ramp=0.1. Not known at this size.
"""
base = "large_2l.py"
variance_weight = 0.05
reconstruction_weight = 0.1
