"""Does a gradient have the same bits if it is run again, compiled again, or computed on another number of devices?

    python benchmarks/bits.py gpt-tiny:8                     # CPU: on 1, 2, 4 and 8 simulated devices
    python benchmarks/bits.py gpt2-scanned:8                 # all GPUs of this machine
    XLA_FLAGS="--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0" python benchmarks/bits.py gpt2-scanned:8

Prints hashes of value and gradient. Expected: with `reproducible=True` one hash for all numbers of devices from 2 on,
and for 1 device too if XLA rewrites no division; without it, different hashes. A GPU needs the flags: without them it
adds up some gradients in the order in which threads arrive, and chooses kernels by timing them.
"""

import argparse
import hashlib
import os
from typing import Any

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import numpy as np
from jax.sharding import AxisType
from models import MODELS

import anybatch as ab


def fingerprint(result: Any) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(result):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["gpt-tiny:8"], help="model:microbatch size")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, XLA_FLAGS={os.environ['XLA_FLAGS'].split()}")
    for case in options.cases:
        name, size = case.split(":")
        model, examples = MODELS[name]
        params, batch = jax.jit(model.init)(jax.random.key(0)), model.batch(jax.random.key(1), examples)
        print(f"\n{name}, {examples} examples, microbatch {size}")
        for reproducible in (False, True):
            for devices in (None, 1, 2, 4, 8):
                if (devices or 1) > jax.device_count() or examples % ((devices or 1) * int(size)):
                    continue
                mesh = None
                if devices is not None:
                    some = jax.devices()[:devices]
                    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=some)
                fun = ab.value_and_grad(model.loss, microbatch_size=int(size), mesh=mesh, reproducible=reproducible)
                found = []
                for _ in range(2):
                    compiled = jax.jit(lambda params, batch, fun=fun: fun(params, batch)).lower(params, batch).compile()
                    found += [fingerprint(compiled(params, batch)) for _ in range(2)]
                how = "fixed order" if reproducible else "plain"
                where = "no mesh" if devices is None else f"{devices} device{'s' if devices > 1 else ''}"
                print(f"  {how:11} {where:10} run twice {found[:2]}, compiled again {found[2:]}", flush=True)


if __name__ == "__main__":
    main()
