"""Runs a pass over the batch on one device or on all devices of a mesh.

Open `executor.py` first: the interface, and the executor for one device. `sharded.py` runs the same pass inside
`shard_map`, `reductions.py` adds up over devices, `fixed_order.py` does so in an order that no number of devices
changes. `call_shardings.py` knows where the arrays of one call are and belong.
"""
