"""Gradients and gradient norms of single examples, and their clipped sum.

Open `grads.py` first (`per_example_grads`, `per_example_norms`), then `clipping.py`. `each_example.py` walks over the
examples. `terms.py` recognises the products that a gradient is made of, from which `norms.py` and `sums.py` compute
norms and clipped sums without forming the gradients.
"""
