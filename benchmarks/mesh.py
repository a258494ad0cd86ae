"""What do a mesh and sums in a fixed order cost, compared with the same gradient without them?

    python benchmarks/mesh.py                  # CPU, about a minute; look at the memory, not the times
    python benchmarks/mesh.py gpt2:8           # model:microbatch size; on a GPU, times mean something

Everything runs on one device. On several devices each takes this time, plus one reduction (benchmarks/scaling.py).
Expected: with a mesh within 1.02 of the time and memory without; sums in a fixed order within 1.05 of the time for
GPT-2, with the memory of up to 6 more gradients, or 3 on 8 devices.
"""

import argparse
import gc

import jax
from jax.sharding import AxisType
from models import MODELS
from overhead import by_hand, compare, report

import anybatch as ab


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["mlp:16", "gpt-tiny:8"], help="model:microbatch size")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.device_kind}, JAX {jax.__version__}")
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=[device])
    for case in options.cases:
        name, size = case.split(":")
        model, examples = MODELS[name]
        here = {"microbatch_size": int(size)}
        contestants = {
            "by hand": by_hand(model.loss, int(size)),
            "anybatch": ab.value_and_grad(model.loss, **here),
            "mesh": ab.value_and_grad(model.loss, mesh=mesh, **here),
            "fixed order": ab.value_and_grad(model.loss, reproducible=True, **here),
            "mesh, fixed": ab.value_and_grad(model.loss, mesh=mesh, reproducible=True, **here),
        }
        params = jax.jit(model.init)(jax.random.key(0))
        results = compare(contestants, params, model.batch(jax.random.key(1), examples), options.repeats)
        report(f"{name}, {examples} examples, microbatch {size}", results)
        gc.collect()


if __name__ == "__main__":
    main()
