"""Everything that depends on JAX's internals: jaxprs, lowered programs, versions of JAX.

No other folder imports `jax._src` or `jax.extend`. Open `versions.py` first: what differs between JAX versions, and the
few functions on jaxprs that all others are built on. `graph.py` is a jaxpr without its nesting, which `reading` reads.
"""
