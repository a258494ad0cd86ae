"""`ab.verify`: compares the gradient at several microbatch sizes with the full-batch gradient of `jax.value_and_grad`.

Open `verify.py` first: it has the function and the table that it returns. `comparison.py` computes the gradients and
their differences, in float64 even where the loss casts to other dtypes. `diagnosis.py` finds the cause of a difference.
"""
