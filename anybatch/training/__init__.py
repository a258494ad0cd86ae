"""`train_step` and `fit`: a compiled optimizer step, and a loop around it with data, checkpoints and a log.

Open `step.py` first, then `loop.py`. A step is computed by `update.py` on the states that `state.py` adapts; `fit` gets
its batches from `sources.py` and `prefetch.py`, saves with `checkpoints.py` and writes with `log.py`.
"""
