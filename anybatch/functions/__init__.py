"""Any function of a batch, computed microbatch by microbatch: evaluation, metrics, embeddings, curvature.

`map_batch.py` has `map_batch`, which the others build on. `curvature.py` has products with the Hessian and the
generalised Gauss-Newton matrix, and the diagonal of the Fisher matrix.
"""
