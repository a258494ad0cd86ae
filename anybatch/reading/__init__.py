"""Reads a loss: finds out from its jaxpr how each value depends on the batch axis.

Open `states.py` first (what a value can be: invariant, per-example, summed, coupled), then `reader.py`, which applies
the rules of `rules/` to every equation. `split.py` cuts the loss into what runs per microbatch and what runs once;
`read.py` has `ab.read`, and `report.py` the `Reading` that it returns.
"""
