"""`ab.noise_scale`: estimates, beside a gradient, how large a batch is worth its cost.

Open `noise_scale.py`: it has the function `noise_scale` and the record `NoiseScale`, which adds up over steps.
The sums over microbatches that the record is made from are computed in `gradients/squared_norms.py`.
"""
