"""Does a planned gradient go on if the memory runs out later?

    python benchmarks/out_of_memory.py        on a GPU; a minute

A plan is made while the device is empty. Then another array takes most of its memory, as another process might, and the
same function is called again. Expected: the second call warns once, takes a smaller microbatch and returns the same
gradient; the third call does not warn.
"""

import os
import warnings

os.environ["ANYBATCH_CACHE"] = "off"

import jax
import jax.numpy as jnp
from models import GPT

import anybatch as ab
from anybatch.call.memory import memory_left, readable


def main() -> None:
    model = GPT(layers=4, width=768, heads=12)
    params, batch = model.init(jax.random.key(0)), model.batch(jax.random.key(1), 256)
    fun = ab.value_and_grad(model.loss)
    expected, gradient = fun(params, batch)
    norm = sum(float(jnp.vdot(leaf, leaf)) for leaf in jax.tree.leaves(gradient))
    del gradient
    plan = ab.plan(model.loss, params, batch, timed=False)
    print(plan)
    left = memory_left()
    blocker = jnp.zeros(int(left - 0.3 * (plan.chosen.total)) // 4, jnp.float32).block_until_ready()
    print(f"left {readable(left)}, then {readable(memory_left())}", flush=True)
    for call in ("second", "third"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value, gradient = fun(params, batch)
        again = sum(float(jnp.vdot(leaf, leaf)) for leaf in jax.tree.leaves(gradient))
        print(
            f"{call} call: value {float(value):.6f} (was {float(expected):.6f}), norm {again / norm:.6f} of the first"
        )
        print(*(f"  {each.category.__name__}: {each.message}" for each in caught), sep="\n", flush=True)
        del gradient
    try:
        jax.block_until_ready(ab.value_and_grad(model.loss, microbatch_size=256)(params, batch))
    except jax.errors.JaxRuntimeError as error:
        print("with microbatch_size=256:", str(error).splitlines()[0])
    del blocker


if __name__ == "__main__":
    main()
