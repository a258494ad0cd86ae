"""Reads a loss: finds out from its jaxpr how each value depends on the batch axis.

Open `states.py` first (the state of a value: invariant, batched, summed or head), then `reader.py`, which applies the
rules of `rules/` to every equation. `split.py` splits the loss into a prefix that runs per microbatch and a head that
runs once, and `evaluation.py` computes both. `read.py` has `ab.read`, and `report.py` the `Reading` that it returns.
"""
