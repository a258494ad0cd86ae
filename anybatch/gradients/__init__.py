"""`value_and_grad`, `grad`, `plan` and `explain`, and the strategies that compute the gradient of a batch.

Open `value_and_grad.py` first, then `computation.py`: one gradient as a function of flat arrays, for any strategy.
`split_passes.py` runs a loss that was read, `declared.py` one whose reduction was declared.
"""
