"""`value_and_grad`, `grad`, `plan` and `explain`, and the strategies that compute the gradient of a batch.

Open `value_and_grad.py` first, then `computation.py`: the gradient of one call, as a function of flat arrays for any
strategy. `split_passes.py` runs the microbatches of a loss that was read, `declared.py` those of a loss whose reduction
was declared.
"""
