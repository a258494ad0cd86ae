"""Everything that depends on JAX's internals: jaxprs, avals, lowered programs, versions of JAX.

No other folder imports `jax._src` or `jax.extend`. Open `interpreter.py` first: it opens jaxprs and evaluates them
equation by equation, and most other files build on it. `graph.py` makes the graph that `reading` reads, `primitives.py`
lists the families of primitives, and `versions.py` has what differs between versions of JAX.
"""
