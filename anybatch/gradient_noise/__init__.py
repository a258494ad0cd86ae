"""The gradient noise scale: how large a batch the gradient is worth.

Open `noise_scale.py`: `ab.noise_scale` and the `NoiseScale` that it returns.
"""
