"""Gradients of single examples, their norms, and their clipped sum.

Open `grads.py` first (`per_example_grads`, `per_example_norms`), then `clipping.py` (`clipped_grad`). `computation.py`
builds the computation of one call, and `example_pass.py` runs it, one microbatch at a time. `terms.py` recognises the
products that gradients are made of, and `forms.py` chooses which of them to keep; from these, `norms.py` and
`kept_gradients.py` compute norms and clipped sums without the gradients themselves.
"""
