"""`ab.verify`: compares the gradient at several microbatch sizes with the full-batch gradient of `jax.value_and_grad`.

Open `verify.py` first: it has the function and the table that it returns. `comparison.py` computes the gradients and
their differences, in float64 with the help of `widening.py`. `diagnosis.py` finds the cause of a difference.
"""
