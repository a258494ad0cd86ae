"""`train_step` and `fit`: an optimizer step, and a loop with data, checkpoints and a log.

Open `step.py` first, then `loop.py`. `state.py` knows the states of Flax, NNX and our own; `batches.py` and `feed.py`
bring the data; `checkpoints.py` saves and restores.
"""
