"""Runs a pass over the batch on one device, or on all devices of a mesh.

Open `executor.py` first: the executor for one device. `sharded.py` runs the same pass inside `shard_map`. Both can sum
in an order that does not depend on the number of devices. `call_shardings.py` has the shardings of the arguments and
results of one call.
"""
