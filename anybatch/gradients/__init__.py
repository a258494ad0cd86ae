"""`value_and_grad`, `grad`, `plan` and `explain`, and the strategies that compute the gradient of a batch.

Open `value_and_grad.py` first, then `computation.py`, the gradient of one call as a function of flat arrays for any
strategy. `split_passes.py` computes it in passes over the batch, with the one loop of `accumulate.py`. The loss is
split by reading it, or as its declared reduction says (`declared.py`).
"""
