"""`verify`: compares every strategy with the full-batch gradient of `jax.value_and_grad`.

Open `verify.py` first. `comparison.py` computes and compares, in float64 through `widening.py`; `diagnosis.py` says
which mistake a difference looks like.
"""
