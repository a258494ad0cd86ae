"""Honest solutions of the exercises, written in other idioms than the course's solutions. Every check must pass them.

`HONEST` has, for the name of an exercise, the text of a file for each way.
"""

from collections.abc import Iterator

from anybatch.learn.catalogue import Course

IMPORTS = """\
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
"""


def _two_ways() -> Iterator[tuple[str, str]]:
    each = {
        "vmap of grad": "jax.vmap(jax.grad(f), in_axes=(None, 0))(w, x).sum()",
        "vmap of a lambda": "jnp.sum(jax.vmap(lambda one: jax.grad(f)(w, one))(x))",
        "vmap of argnums": "jnp.sum(jax.vmap(jax.grad(f, argnums=0), (None, 0), 0)(w, x), axis=0)",
        "jit outside": "jax.jit(jax.vmap(jax.grad(f), (None, 0)))(w, x).sum()",
        "jit inside": "jax.vmap(jax.jit(jax.grad(f)), (None, 0))(w, x).sum()",
        "value_and_grad": "jax.vmap(jax.value_and_grad(f), (None, 0))(w, x)[1].sum()",
        "partial": "jax.vmap(functools.partial(jax.grad(f), w))(x).sum()",
        "lax.map": "lax.map(lambda one: jax.grad(f)(w, one), x).sum()",
        "scan": "lax.scan(lambda c, one: (c + jax.grad(f)(w, one), None), jnp.zeros(()), x)[0]",
        "jacrev": "jax.jacrev(lambda w: jax.vmap(f, (None, 0))(w, x))(w).sum()",
        "jacfwd": "jax.jacfwd(lambda w: jax.vmap(f, (None, 0))(w, x))(w).sum()",
        "vmap of jacfwd": "jax.vmap(jax.jacfwd(f), (None, 0))(w, x).sum()",
        "vjp": "jax.vmap(lambda one: jax.vjp(lambda w: f(w, one), w)[1](jnp.ones(()))[0])(x).sum()",
        "jvp": "jax.vmap(lambda one: jax.jvp(lambda w: f(w, one), (w,), (jnp.ones(()),))[1])(x).sum()",
        "mean times N": "jax.vmap(jax.grad(f), (None, 0))(w, x).mean() * len(x)",
        "a dot with ones": "jnp.ones(len(x)) @ jax.vmap(jax.grad(f), (None, 0))(w, x)",
    }
    total = {
        "vmap of f": "jax.grad(lambda w: jax.vmap(f, (None, 0))(w, x).sum())(w)",
        "broadcast": "jax.grad(lambda w: jnp.sum((w * x) ** 2))(w)",
        "f of all": "jax.grad(lambda w: f(w, x).sum())(w)",
        "square": "jax.grad(lambda w: jnp.square(w * x).sum())(w)",
        "dot": "jax.grad(lambda w: jnp.dot(w * x, w * x))(w)",
        "jit inside": "jax.grad(jax.jit(lambda w: jax.vmap(f, (None, 0))(w, x).sum()))(w)",
        "jit outside": "jax.jit(jax.grad(lambda w: jax.vmap(f, (None, 0))(w, x).sum()))(w)",
        "value_and_grad": "jax.value_and_grad(lambda w: jnp.sum(jax.vmap(lambda one: f(w, one))(x)))(w)[1]",
        "jacfwd": "jax.jacfwd(lambda w: jax.vmap(f, (None, 0))(w, x).sum())(w)",
        "vjp": "jax.vjp(lambda w: jax.vmap(f, (None, 0))(w, x).sum(), w)[1](jnp.ones(()))[0]",
        "mean times N": "jax.grad(lambda w: jax.vmap(f, (None, 0))(w, x).mean())(w) * len(x)",
        "lax.map": "jax.grad(lambda w: lax.map(lambda one: f(w, one), x).sum())(w)",
        "scan": "jax.grad(lambda w: lax.scan(lambda c, one: (c + f(w, one), None), jnp.zeros(()), x)[0])(w)",
        "checkpoint": "jax.grad(jax.checkpoint(lambda w: jax.vmap(f, (None, 0))(w, x).sum()))(w)",
    }

    def file(row_0: str, row_1: str, join: str = "jnp.stack([{}, {}])") -> str:
        return f"""{IMPORTS}

def f(w, x):
    return (w * x) ** 2

def equivalent_two_ways(w, x_batch):
    w, x = jnp.asarray(w, jnp.float32), x_batch
    return {join.format(row_0, row_1)}
"""

    for name, row in each.items():
        yield f"row 0: {name}", file(row, total["vmap of f"])
    for name, row in total.items():
        yield f"row 1: {name}", file(each["vmap of grad"], row)
    for join in (
        "jnp.array([{}, {}])",
        "jnp.concatenate([({})[None], ({})[None]])",
        "jnp.zeros(2).at[0].set({}).at[1].set({})",
    ):
        yield f"joined by {join[:12]}", file(each["vmap of grad"], total["vmap of f"], join)


_NETWORK = """
def logits_of(params, x):
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]
"""


def _value_aux() -> Iterator[tuple[str, str]]:
    losses = {
        "take": "-jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])",
        "take_along_axis": "-jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1).mean()",
        "one_hot": "-jnp.mean(jnp.sum(jax.nn.one_hot(y, logits.shape[1]) * jax.nn.log_softmax(logits), axis=1))",
        "logsumexp": "jnp.mean(jax.nn.logsumexp(logits, axis=1) - logits[jnp.arange(len(y)), y])",
        "vmap": "-jax.vmap(lambda row, label: jax.nn.log_softmax(row)[label])(logits, y).mean()",
    }
    calls = {
        "has_aux": "return jax.value_and_grad(loss, has_aux=True)(params)",
        "grad with the loss in aux": "grads, (value, aux) = jax.grad(lambda p: (lambda a: (a[0], a))(loss(p)), "
        "has_aux=True)(params)\n    return (value, aux), grads",
        "vjp": "value, back, aux = jax.vjp(loss, params, has_aux=True)\n"
        "    return (value, aux), back(jnp.ones_like(value))[0]",
        "jit": "return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)",
    }

    def file(value: str, call: str, network: str = _NETWORK) -> str:
        return f"""{IMPORTS}{network}
def value_aux_and_grad(params, x, y):
    def loss(params):
        logits = logits_of(params, x)
        return {value}, {{"accuracy": jnp.mean(logits.argmax(1) == y), "logits": logits}}
    {call}
"""

    for name, value in losses.items():
        yield name, file(value, calls["has_aux"])
    for name, call in calls.items():
        yield name, file(losses["take"], call)
    yield (
        "one example at a time, by vmap",
        file(
            losses["take"],
            calls["has_aux"],
            """
def logits_of(params, x):
    def one(row):
        hidden = jnp.tanh(jnp.dot(row, params["hidden"]["w"]) + params["hidden"]["b"])
        return jnp.dot(hidden, params["out"]["w"]) + params["out"]["b"]
    return jax.vmap(one)(x)
""",
        ),
    )
    yield (
        "einsum",
        file(
            losses["take"],
            calls["has_aux"],
            _NETWORK.replace('x @ params["hidden"]["w"]', 'jnp.einsum("nd,dh->nh", x, params["hidden"]["w"])'),
        ),
    )


def _trees() -> Iterator[tuple[str, str]]:
    bodies = {
        "sum": "return jax.tree.map(lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves)), *trees)",
        "reduce": "scaled = [jax.tree.map(lambda leaf: w * leaf, tree) for w, tree in zip(weights, trees)]\n"
        "    return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), scaled)",
        "tensordot": "return jax.tree.map(lambda *leaves: jnp.tensordot(weights, jnp.stack(leaves), 1), *trees)",
        "flatten": "leaves = [jax.tree.leaves(tree) for tree in trees]\n"
        "    added = [sum(w * leaf for w, leaf in zip(weights, each)) for each in zip(*leaves)]\n"
        "    return jax.tree.unflatten(jax.tree.structure(trees[0]), added)",
        "einsum": "return jax.tree.map(lambda *leaves: jnp.einsum('i,i...', weights, jnp.stack(leaves)), *trees)",
        "a loop": "total = jax.tree.map(jnp.zeros_like, trees[0])\n    for w, tree in zip(weights, trees):\n"
        "        total = jax.tree.map(lambda t, leaf: t + w * leaf, total, tree)\n    return total",
    }
    for name, body in bodies.items():
        yield name, f"{IMPORTS}\ndef weighted_sum(trees, weights):\n    {body}\n"


def _cut() -> Iterator[tuple[str, str]]:
    ways = {
        "reshape": "leaf.reshape(n, -1, *leaf.shape[1:])",
        "a tuple": "jnp.reshape(leaf, (n, leaf.shape[0] // n) + leaf.shape[1:])",
        "stack of split": "jnp.stack(jnp.split(leaf, n))",
        "array of slices": "jnp.stack([leaf[i * (len(leaf) // n):(i + 1) * (len(leaf) // n)] for i in range(n)])",
        "indices": "leaf[jnp.arange(len(leaf)).reshape(n, -1)]",
    }
    for name, way in ways.items():
        yield (
            name,
            f"""{IMPORTS}
def cut(batch, n_microbatches):
    n, num = int(n_microbatches), len(jax.tree.leaves(batch)[0])
    if n != n_microbatches or n < 1 or num % n:
        raise ValueError(f"{{num}} examples cannot be cut into {{n_microbatches}} microbatches")
    return jax.tree.map(lambda leaf: {way}, batch)
""",
        )


def _in_a_scan() -> Iterator[tuple[str, str]]:
    head = f"""{IMPORTS}
def loss(w, x, y):
    return jnp.sum((w * x - y) ** 2)

def microbatched_grads(w, b, x_full, y_full, n_microbatches):
    n, num = int(n_microbatches), len(x_full)
    if n != n_microbatches or n < 1 or num % n:
        raise ValueError(f"{{num}} examples cannot be cut into {{n_microbatches}} microbatches")
    w, size = jnp.asarray(w, jnp.float32), num // n
"""
    bodies = {
        "carry of a sum": """
    def body(total, xy):
        return total + jax.grad(loss)(w, *xy), None
    return lax.scan(body, jnp.zeros(()), (x_full.reshape(n, -1), y_full.reshape(n, -1)))[0]
""",
        "value_and_grad": """
    def body(carry, xy):
        value, grad = jax.value_and_grad(loss)(w, *xy)
        return (carry[0] + value, carry[1] + grad), None
    return lax.scan(body, (0.0, jnp.zeros_like(w)), (x_full.reshape(n, size), y_full.reshape(n, size)))[0][1]
""",
        "dynamic_slice": """
    def body(total, i):
        x, y = (lax.dynamic_slice(a, (i * size,), (size,)) for a in (x_full, y_full))
        return total + jax.grad(loss)(w, x, y), None
    return lax.scan(body, jnp.zeros(()), jnp.arange(n))[0]
""",
        "dynamic_slice_in_dim": """
    def body(total, start):
        x, y = (lax.dynamic_slice_in_dim(a, start, size) for a in (x_full, y_full))
        return total + jax.grad(loss)(w, x, y), None
    return lax.scan(body, jnp.zeros(()), jnp.arange(0, num, size))[0]
""",
        "indices": """
    def body(total, rows):
        return total + jax.grad(loss)(w, x_full[rows], y_full[rows]), None
    return lax.scan(body, jnp.zeros(()), jnp.arange(num).reshape(n, size))[0]
""",
        "fori_loop": """
    def body(i, total):
        x, y = (lax.dynamic_slice(a, (i * size,), (size,)) for a in (x_full, y_full))
        return total + jax.grad(loss)(w, x, y)
    return lax.fori_loop(0, n, body, jnp.zeros(()))
""",
        "stack of split": """
    def body(total, xy):
        return total + jax.grad(loss)(w, *xy), None
    cut = (jnp.stack(jnp.split(x_full, n)), jnp.stack(jnp.split(y_full, n)))
    return lax.scan(body, jnp.zeros(()), cut)[0]
""",
        "one array": """
    def body(total, both):
        return total + jax.grad(loss)(w, both[0], both[1]), None
    return lax.scan(body, jnp.zeros(()), jnp.stack([x_full.reshape(n, -1), y_full.reshape(n, -1)], 1))[0]
""",
        "jit inside": """
    gradient = jax.jit(jax.grad(loss))
    def body(total, xy):
        return total + gradient(w, *xy), None
    return jax.jit(lambda xy: lax.scan(body, jnp.zeros(()), xy)[0])((x_full.reshape(n, -1), y_full.reshape(n, -1)))
""",
        "checkpoint": """
    @jax.checkpoint
    def body(total, xy):
        return total + jax.grad(loss)(w, *xy), None
    return lax.scan(body, jnp.zeros(()), (x_full.reshape(n, -1), y_full.reshape(n, -1)))[0]
""",
        "w in the carry": """
    def body(carry, xy):
        w, total = carry
        return (w, total + jax.grad(loss)(w, *xy)), None
    return lax.scan(body, (w, jnp.zeros_like(w)), (x_full.reshape(n, -1), y_full.reshape(n, -1)))[0][1]
""",
        "reversed": """
    def body(total, xy):
        return total + jax.grad(loss)(w, *xy), None
    return lax.scan(body, jnp.zeros(()), (x_full.reshape(n, -1), y_full.reshape(n, -1)), reverse=True)[0]
""",
        "unrolled twice": """
    def body(total, xy):
        return total + jax.grad(loss)(w, *xy), None
    return lax.scan(body, jnp.zeros(()), (x_full.reshape(n, -1), y_full.reshape(n, -1)), unroll=2)[0]
""",
        "vmap of grad inside": """
    def body(total, xy):
        return total + jax.vmap(jax.grad(loss), (None, 0, 0))(w, *xy).sum(), None
    return lax.scan(body, jnp.zeros(()), (x_full.reshape(n, -1), y_full.reshape(n, -1)))[0]
""",
        "the first before the loop": """
    xs, ys = x_full.reshape(n, -1), y_full.reshape(n, -1)
    def body(total, xy):
        return total + jax.grad(loss)(w, *xy), None
    return lax.scan(body, jax.grad(loss)(w, xs[0], ys[0]), (xs[1:], ys[1:]))[0]
""",
        "the first added at the end": """
    xs, ys = x_full.reshape(n, -1), y_full.reshape(n, -1)
    def body(total, xy):
        return total + jax.grad(loss)(w, *xy), None
    return lax.scan(body, jnp.zeros(()), (xs[1:], ys[1:]))[0] + jax.grad(loss)(w, xs[0], ys[0])
""",
        "by hand": """
    def body(total, xy):
        x, y = xy
        return total + jnp.sum(2 * x * (w * x - y)), None
    return lax.scan(body, jnp.zeros(()), (x_full.reshape(n, -1), y_full.reshape(n, -1)))[0]
""",
        "a reference": """
    total = jax.new_ref(jnp.zeros(()))
    def body(_, xy):
        total[...] += jax.grad(loss)(w, *xy)
        return _, None
    lax.scan(body, None, (x_full.reshape(n, -1), y_full.reshape(n, -1)))
    return total[...]
""",
        "a print": """
    def body(total, xy):
        total = total + jax.grad(loss)(w, *xy)
        jax.debug.print("{}", total)
        return total, None
    return lax.scan(body, jnp.zeros(()), (x_full.reshape(n, -1), y_full.reshape(n, -1)))[0]
""",
        "a guard against NaN": """
    def body(total, xy):
        return total + jax.grad(loss)(w, *xy), None
    total = lax.scan(body, jnp.zeros(()), (x_full.reshape(n, -1), y_full.reshape(n, -1)))[0]
    return jnp.where(jnp.isfinite(total), total, 0.0)
""",
    }
    for name, body in bodies.items():
        yield name, head + body


_ACCUMULATE = f"""{IMPORTS}
def predict(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[:, 0]

def loss(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)

def zeros_like(tree):
    return jax.tree.map(jnp.zeros_like, tree)

def cut(n, *arrays):
    return tuple(a.reshape(n, -1, *a.shape[1:]) for a in arrays)

def accumulate(params, x, y, n_microbatches):
    n, size = n_microbatches, len(x) // n_microbatches
"""


def _a_tree() -> Iterator[tuple[str, str]]:
    bodies = {
        "mean in the loop": """
    def body(total, xy):
        return jax.tree.map(lambda t, g: t + g / n, total, jax.grad(loss)(params, *xy)), None
    return lax.scan(body, zeros_like(params), cut(n, x, y))[0]
""",
        "running mean": """
    def body(carry, xy):
        mean, i = carry
        return (jax.tree.map(lambda m, g: m + (g - m) / (i + 1), mean, jax.grad(loss)(params, *xy)), i + 1), None
    return lax.scan(body, (zeros_like(params), 0), cut(n, x, y))[0][0]
""",
        "fori_loop": """
    def body(i, total):
        part = (lax.dynamic_slice_in_dim(a, i * size, size) for a in (x, y))
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *part))
    return jax.tree.map(lambda t: t / n, lax.fori_loop(0, n, body, zeros_like(params)))
""",
        "while_loop": """
    def body(carry):
        i, total = carry
        part = (lax.dynamic_slice_in_dim(a, i * size, size) for a in (x, y))
        return i + 1, jax.tree.map(jnp.add, total, jax.grad(loss)(params, *part))
    total = lax.while_loop(lambda carry: carry[0] < n, body, (0, zeros_like(params)))[1]
    return jax.tree.map(lambda t: t / n, total)
""",
        "sum of losses, divided by N": """
    def summed(params, x, y):
        return jnp.sum((predict(params, x) - y) ** 2)
    def body(total, xy):
        return jax.tree.map(jnp.add, total, jax.grad(summed)(params, *xy)), None
    return jax.tree.map(lambda t: t / len(x), lax.scan(body, zeros_like(params), cut(n, x, y))[0])
""",
        "value_and_grad": """
    def body(carry, xy):
        return jax.tree.map(jnp.add, carry, jax.value_and_grad(loss)(params, *xy)), None
    total = lax.scan(body, (0.0, zeros_like(params)), cut(n, x, y))[0][1]
    return jax.tree.map(lambda t: t / n, total)
""",
        "losses are put out": """
    def body(total, xy):
        value, grad = jax.value_and_grad(loss)(params, *xy)
        return jax.tree.map(jnp.add, total, grad), value
    total, losses = lax.scan(body, zeros_like(params), cut(n, x, y))
    return jax.tree.map(lambda t: t / n, total)
""",
        "gradients of single examples": """
    def one(params, x, y):
        return loss(params, x[None], y[None])
    def body(total, xy):
        each = jax.vmap(jax.grad(one), (None, 0, 0))(params, *xy)
        return jax.tree.map(lambda t, e: t + e.mean(0), total, each), None
    return jax.tree.map(lambda t: t / n, lax.scan(body, zeros_like(params), cut(n, x, y))[0])
""",
        "raveled": """
    from jax.flatten_util import ravel_pytree
    flat, back = ravel_pytree(params)
    def body(total, xy):
        return total + ravel_pytree(jax.grad(loss)(params, *xy))[0], None
    return back(lax.scan(body, jnp.zeros_like(flat), cut(n, x, y))[0] / n)
""",
        "stack of split": """
    def body(total, xy):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *xy)), None
    parts = (jnp.stack(jnp.split(x, n)), jnp.stack(jnp.split(y, n)))
    return jax.tree.map(lambda t: t / n, lax.scan(body, zeros_like(params), parts)[0])
""",
        "jit and partial": """
    gradient = functools.partial(jax.jit(jax.grad(loss)), params)
    def body(total, xy):
        return jax.tree.map(jnp.add, total, gradient(*xy)), None
    return jax.tree.map(lambda t: t / n, jax.jit(lambda xy: lax.scan(body, zeros_like(params), xy)[0])(cut(n, x, y)))
""",
        "checkpointed loss": """
    def body(total, xy):
        return jax.tree.map(jnp.add, total, jax.grad(jax.checkpoint(loss))(params, *xy)), None
    return jax.tree.map(lambda t: t / n, lax.scan(body, zeros_like(params), cut(n, x, y))[0])
""",
        "indices": """
    def body(total, rows):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x[rows], y[rows])), None
    rows = jnp.arange(len(x)).reshape(n, size)
    return jax.tree.map(lambda t: t / n, lax.scan(body, zeros_like(params), rows)[0])
""",
        "checkpointed scan, differentiated": """
    def total(params):
        @jax.checkpoint
        def body(total, xy):
            return total + loss(params, *xy), None
        return lax.scan(body, 0.0, cut(n, x, y))[0] / n
    return jax.grad(total)(params)
""",
        "leaf by leaf": """
    leaves, structure = jax.tree.flatten(params)
    def body(total, xy):
        grads = jax.tree.leaves(jax.grad(loss)(params, *xy))
        return [t + g for t, g in zip(total, grads)], None
    total = lax.scan(body, [jnp.zeros(p.shape, p.dtype) for p in leaves], cut(n, x, y))[0]
    return jax.tree.unflatten(structure, [t / n for t in total])
""",
    }
    for name, body in bodies.items():
        yield name, _ACCUMULATE + body


def _shard_map() -> Iterator[tuple[str, str]]:
    meshes = {
        "make_mesh": 'jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))',
        "Mesh": 'jax.sharding.Mesh(np.array(jax.devices()), ("data",))',
    }
    functions = {
        "vmap": "jax.vmap(lambda row: jnp.sum(row**2))",
        "vdot": "jax.vmap(lambda row: jnp.vdot(row, row))",
        "axis": "lambda rows: jnp.sum(rows * rows, axis=1)",
        "einsum": 'lambda rows: jnp.einsum("ij,ij->i", rows, rows)',
        "square": "jax.vmap(lambda row: jnp.square(row).sum())",
        "norm": "jax.vmap(lambda row: jnp.linalg.norm(row) ** 2)",
        "lax.map": "lambda rows: lax.map(lambda row: jnp.sum(row**2), rows)",
        "jit": "jax.jit(jax.vmap(lambda row: jnp.sum(row**2)))",
    }

    def file(mesh: str, inside: str, outside: str = functions["vmap"], call: str = "", join: str = "jnp.stack") -> str:
        call = call or 'jax.shard_map(inside, mesh=mesh, in_specs=P("data"), out_specs=P("data"))'
        return f"""{IMPORTS}
from jax.sharding import PartitionSpec as P

def shard_map_vs_vmap(x):
    mesh = {mesh}
    inside = {inside}
    return {join}([{call}(x), ({outside})(x)])
"""

    for name, mesh in meshes.items():
        yield name, file(mesh, functions["vmap"])
    for name, function in functions.items():
        yield f"{name} inside", file(meshes["make_mesh"], function)
    for name in ("vdot", "axis", "einsum", "jit"):
        yield f"{name} outside", file(meshes["make_mesh"], functions["vmap"], functions[name])
    yield "joined by array", file(meshes["make_mesh"], functions["vmap"], join="jnp.array")
    for name, call in {
        "specs in tuples": 'jax.shard_map(inside, mesh=mesh, in_specs=(P("data"),), out_specs=P("data"))',
        "specs with None": 'jax.shard_map(inside, mesh=mesh, in_specs=P("data", None), out_specs=P("data"))',
        "in a jit": 'jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=P("data"), out_specs=P("data")))',
        "unchecked": 'jax.shard_map(inside, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)',
    }.items():
        yield name, file(meshes["make_mesh"], functions["vmap"], call=call)


def _one_step() -> Iterator[tuple[str, str]]:
    head = f"""{IMPORTS}
import flax.linen as nn
import optax
from flax.training.train_state import TrainState

class Linear(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)

def grad_accumulation_step(seed, x_batches, y_batches, lr):
    model = Linear()
    params = model.init(jax.random.PRNGKey(int(seed)), x_batches[0])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(lr))
    def loss(params, x, y):
        return jnp.mean((state.apply_fn(params, x).reshape(-1) - y) ** 2)
    x_all, y_all = x_batches.reshape(-1, x_batches.shape[-1]), y_batches.reshape(-1)
"""
    grads = {
        "two": "g = [jax.grad(loss)(state.params, x_batches[i], y_batches[i]) for i in range(2)]\n"
        "    average = jax.tree.map(lambda a, b: (a + b) / 2, *g)",
        "zip": "a, b = (jax.grad(loss)(state.params, x, y) for x, y in zip(x_batches, y_batches))\n"
        "    average = jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, a, b)",
        "vmap": "both = jax.vmap(jax.grad(loss), (None, 0, 0))(state.params, x_batches, y_batches)\n"
        "    average = jax.tree.map(lambda g: g.mean(0), both)",
        "scan": "total = lax.scan(lambda t, xy: (jax.tree.map(jnp.add, t, jax.grad(loss)(state.params, *xy)), None), "
        "jax.tree.map(jnp.zeros_like, params), (x_batches, y_batches))[0]\n"
        "    average = jax.tree.map(lambda t: t / 2, total)",
        "value_and_grad": "(_, a), (_, b) = (jax.value_and_grad(loss)(state.params, x_batches[i], y_batches[i]) "
        "for i in (0, 1))\n    average = jax.tree.map(lambda *g: jnp.mean(jnp.stack(g), 0), a, b)",
        "jit": "gradient = jax.jit(jax.grad(loss))\n"
        "    g = [gradient(state.params, x_batches[i], y_batches[i]) for i in range(2)]\n"
        "    average = jax.tree.map(lambda *g: sum(g) / len(g), *g)",
        "lax.map": "both = lax.map(lambda xy: jax.grad(loss)(state.params, *xy), (x_batches, y_batches))\n"
        "    average = jax.tree.map(lambda g: (g[0] + g[1]) / 2, both)",
    }
    ends = {
        "reshape": "return loss(state.params, x_all, y_all).reshape(1)",
        "array": "return jnp.array([loss(state.params, x_all, y_all)])",
        "mean of two": "both = [loss(state.params, x_batches[i], y_batches[i]) for i in (0, 1)]\n"
        "    return jnp.mean(jnp.stack(both))[None]",
    }
    step = "\n    state = state.apply_gradients(grads=average)\n    "
    for name, way in grads.items():
        yield name, f"{head}    {way}{step}{ends['reshape']}\n"
    for name, end in ends.items():
        yield f"ends with {name}", f"{head}    {grads['two']}{step}{end}\n"


def _optax() -> Iterator[tuple[str, str]]:
    head = f"""{IMPORTS}
import optax

def loss(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

def make_optimizer(lr):
    return optax.adam(lr, b2=0.9, eps=0.1)

def three_steps(params, x, y, lr):
    adam, start = make_optimizer(lr), params
    wrapped = optax.MultiSteps(adam, every_k_schedule=2)
"""
    by_hand = {
        "a loop": """
    state = adam.init(params)
    for i in range(3):
        a, b = (jax.grad(loss)(params, x[i, j], y[i, j]) for j in range(2))
        updates, state = adam.update(jax.tree.map(lambda a, b: (a + b) / 2, a, b), state, params)
        params = optax.apply_updates(params, updates)
    first = params
""",
        "a scan": """
    def step(carry, xy):
        params, state = carry
        grads = jax.tree.map(lambda g: g.mean(0), jax.vmap(jax.grad(loss), (None, 0, 0))(params, *xy))
        updates, state = adam.update(grads, state)
        return (optax.apply_updates(params, updates), state), None
    first = lax.scan(step, (params, adam.init(params)), (x, y))[0][0]
""",
        "the whole batch of a step": """
    state = adam.init(params)
    for i in range(3):
        grads = jax.grad(loss)(params, x[i].reshape(-1, x.shape[-1]), y[i].reshape(-1))
        updates, state = adam.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    first = params
""",
    }
    multi = {
        "a loop": """
    params, state = start, wrapped.init(start)
    for i in range(3):
        for j in range(2):
            updates, state = wrapped.update(jax.grad(loss)(params, x[i, j], y[i, j]), state, params)
            params = optax.apply_updates(params, updates)
    return first, params
""",
        "a scan": """
    def mini(carry, xy):
        params, state = carry
        updates, state = wrapped.update(jax.grad(loss)(params, *xy), state, params)
        return (optax.apply_updates(params, updates), state), None
    six = x.reshape(6, *x.shape[2:]), y.reshape(6, -1)
    return first, lax.scan(mini, (start, wrapped.init(start)), six)[0][0]
""",
        "scans in a scan": """
    def mini(carry, xy):
        params, state = carry
        updates, state = wrapped.update(jax.grad(loss)(params, *xy), state, params)
        return (optax.apply_updates(params, updates), state), None
    def step(carry, xy):
        return lax.scan(mini, carry, xy)[0], None
    return first, lax.scan(step, (start, wrapped.init(start)), (x, y))[0][0]
""",
        "a gradient transformation": """
    chain = wrapped.gradient_transformation()
    params, state = start, chain.init(start)
    for i in range(3):
        for j in range(2):
            updates, state = chain.update(jax.grad(loss)(params, x[i, j], y[i, j]), state, params)
            params = optax.apply_updates(params, updates)
    return first, params
""",
    }
    for name, way in by_hand.items():
        yield f"by hand: {name}", head + way + multi["a scan"]
    for name, way in multi.items():
        yield f"MultiSteps: {name}", head + by_hand["a loop"] + way


_MASKED = f"""{IMPORTS}
def token_losses(params, x, y):
    return (x @ params["w"] + params["b"] - y) ** 2

def cut(n, *arrays):
    return tuple(a.reshape(n, -1, *a.shape[1:]) for a in arrays)

def masked_mean_grads(params, x, y, mask, n_microbatches):
    n, size = n_microbatches, len(x) // n_microbatches
    zeros = jax.tree.map(jnp.zeros_like, params)
    def summed(params, x, y, mask):
        return jnp.sum(jnp.where(mask, token_losses(params, x, y), 0.0))
"""


def _masked() -> Iterator[tuple[str, str]]:
    bodies = {
        "float count": """
    def body(carry, part):
        total, count = carry
        more = jnp.sum(part[2], dtype=jnp.float32)
        return (jax.tree.map(jnp.add, total, jax.grad(summed)(params, *part)), count + more), None
    (total, count), _ = lax.scan(body, (zeros, 0.0), cut(n, x, y, mask))
    return jax.tree.map(lambda t: t / jnp.maximum(count, 1.0), total)
""",
        "count outside": """
    def body(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(summed)(params, *part)), None
    total, _ = lax.scan(body, zeros, cut(n, x, y, mask))
    return jax.tree.map(lambda t: t / jnp.maximum(mask.sum(), 1), total)
""",
        "weights": """
    def weighted(params, x, y, w):
        return jnp.sum(token_losses(params, x, y) * w)
    count = jnp.maximum(mask.sum(), 1)
    def body(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(weighted)(params, *part)), None
    return lax.scan(body, zeros, cut(n, jnp.where(mask[..., None], x, 0), jnp.where(mask, y, 0), mask / count))[0]
""",
        "counts are put out": """
    def body(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(summed)(params, *part)), part[2].sum()
    total, counts = lax.scan(body, zeros, cut(n, x, y, mask))
    return jax.tree.map(lambda t: t / jnp.maximum(counts.sum(), 1), total)
""",
        "has_aux": """
    def both(params, x, y, mask):
        return summed(params, x, y, mask), mask.sum()
    def body(carry, part):
        grads, count = jax.grad(both, has_aux=True)(params, *part)
        return jax.tree.map(jnp.add, carry, (grads, count)), None
    total, count = lax.scan(body, (zeros, jnp.int32(0)), cut(n, x, y, mask))[0]
    return jax.tree.map(lambda t: jnp.where(count > 0, t / jnp.maximum(count, 1), 0.0), total)
""",
        "dynamic_slice": """
    def body(carry, i):
        part = [lax.dynamic_slice_in_dim(a, i * size, size) for a in (x, y, mask)]
        total, count = carry
        return (jax.tree.map(jnp.add, total, jax.grad(summed)(params, *part)), count + part[2].sum()), None
    (total, count), _ = lax.scan(body, (zeros, 0), jnp.arange(n))
    return jax.tree.map(lambda t: t / jnp.maximum(count, 1), total)
""",
        "fori_loop": """
    def body(i, carry):
        part = [lax.dynamic_slice_in_dim(a, i * size, size) for a in (x, y, mask)]
        total, count = carry
        return jax.tree.map(jnp.add, total, jax.grad(summed)(params, *part)), count + part[2].sum()
    total, count = lax.fori_loop(0, n, body, (zeros, 0))
    return jax.tree.map(lambda t: t / jnp.maximum(count, 1), total)
""",
        "two scans": """
    parts = cut(n, x, y, mask)
    total = lax.scan(lambda t, p: (jax.tree.map(jnp.add, t, jax.grad(summed)(params, *p)), None), zeros, parts)[0]
    count = lax.scan(lambda c, m: (c + m.sum(), None), 0, parts[2])[0]
    return jax.tree.map(lambda t: t / jnp.maximum(count, 1), total)
""",
        "running mean": """
    def body(carry, part):
        mean, count = carry
        more = part[2].sum()
        both = jnp.maximum(count + more, 1)
        grads = jax.grad(summed)(params, *part)
        return (jax.tree.map(lambda m, g: m * (count / both) + g / both, mean, grads), count + more), None
    return lax.scan(body, (zeros, 0), cut(n, x, y, mask))[0][0]
""",
        "masked before": """
    x = jnp.where(mask[..., None], x, 0.0)
    y = jnp.where(mask, y, 0.0)
    def body(carry, part):
        total, count = carry
        return (jax.tree.map(jnp.add, total, jax.grad(summed)(params, *part)), count + part[2].sum()), None
    (total, count), _ = lax.scan(body, (zeros, 0), cut(n, x, y, mask))
    return jax.tree.map(lambda t: t / jnp.maximum(count, 1), total)
""",
    }
    for name, body in bodies.items():
        yield name, _MASKED + body


_NARROW = f"""{IMPORTS}
def loss(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

def cut(n, *arrays):
    return tuple(a.reshape(n, -1, *a.shape[1:]) for a in arrays)

def accumulated_grads(params, x, y, n_microbatches):
    n, size = n_microbatches, len(x) // n_microbatches
    wide = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
"""


def _narrow() -> Iterator[tuple[str, str]]:
    bodies = {
        "astype": """
    def body(total, xy):
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, jax.grad(loss)(params, *xy)), None
    return jax.tree.map(lambda t: t / n, lax.scan(body, wide, cut(n, x, y))[0])
""",
        "promotion": """
    def body(total, xy):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *xy)), None
    return jax.tree.map(lambda t: t / n, lax.scan(body, wide, cut(n, x, y))[0])
""",
        "cast, then added": """
    def body(total, xy):
        grads = jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), jax.grad(loss)(params, *xy))
        return jax.tree.map(jnp.add, total, grads), None
    return jax.tree.map(lambda t: t * (1 / n), lax.scan(body, wide, cut(n, x, y))[0])
""",
        "fori_loop": """
    def body(i, total):
        part = [lax.dynamic_slice_in_dim(a, i * size, size) for a in (x, y)]
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, jax.grad(loss)(params, *part))
    return jax.tree.map(lambda t: t / n, lax.fori_loop(0, n, body, wide))
""",
        "divided in the loop": """
    def body(total, xy):
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32) / n, total, jax.grad(loss)(params, *xy)), None
    return lax.scan(body, wide, cut(n, x, y))[0]
""",
        "value_and_grad": """
    def body(carry, xy):
        total, value = carry
        more, grads = jax.value_and_grad(loss)(params, *xy)
        total = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads)
        return (total, value + more.astype(jnp.float32)), None
    return jax.tree.map(lambda t: t / n, lax.scan(body, (wide, jnp.float32(0)), cut(n, x, y))[0][0])
""",
        "stack of split": """
    def body(total, xy):
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, jax.grad(loss)(params, *xy)), None
    parts = (jnp.stack(jnp.split(x, n)), jnp.stack(jnp.split(y, n)))
    return jax.tree.map(lambda t: t / n, lax.scan(body, wide, parts)[0])
""",
        "jit": """
    gradient = jax.jit(jax.grad(loss))
    def body(total, xy):
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, gradient(params, *xy)), None
    return jax.jit(lambda: jax.tree.map(lambda t: t / n, lax.scan(body, wide, cut(n, x, y))[0]))()
""",
    }
    for name, body in bodies.items():
        yield name, _NARROW + body


_DROPOUT = f"""{IMPORTS}
RATE = 0.25

def loss(params, x, y, mask):
    hidden = jnp.tanh(x @ params["w"]) * mask
    return jnp.mean((hidden @ params["v"] - y) ** 2)

def cut(n, *arrays):
    return tuple(a.reshape(n, -1, *a.shape[1:]) for a in arrays)

def dropout_grads(params, key, x, y, n_microbatches):
    n, size = n_microbatches, len(x) // n_microbatches
    zeros = jax.tree.map(jnp.zeros_like, params)
    def mask_of(key):
        return jax.random.bernoulli(key, 1 - RATE, params["v"].shape) / (1 - RATE)
    def mean(total):
        return jax.tree.map(lambda t: t / n, total)
"""


def _dropout() -> Iterator[tuple[str, str]]:
    bodies = {
        "indices": """
    def body(total, part):
        x, y, i = part
        masks = jax.vmap(lambda i: mask_of(jax.random.fold_in(key, i)))(i)
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x, y, masks)), None
    return mean(lax.scan(body, zeros, cut(n, x, y, jnp.arange(len(x))))[0])
""",
        "keys beforehand": """
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(x)))
    def body(total, part):
        x, y, keys = part
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x, y, jax.vmap(mask_of)(keys))), None
    return mean(lax.scan(body, zeros, cut(n, x, y, keys))[0])
""",
        "number of the microbatch": """
    def body(total, part):
        x, y, number = part
        masks = jax.vmap(lambda i: mask_of(jax.random.fold_in(key, number * size + i)))(jnp.arange(size))
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x, y, masks)), None
    return mean(lax.scan(body, zeros, (*cut(n, x, y), jnp.arange(n)))[0])
""",
        "start in the carry": """
    def body(carry, part):
        total, start = carry
        masks = jax.vmap(lambda i: mask_of(jax.random.fold_in(key, i)))(start + jnp.arange(size))
        return (jax.tree.map(jnp.add, total, jax.grad(loss)(params, *part, masks)), start + size), None
    return mean(lax.scan(body, (zeros, 0), cut(n, x, y))[0][0])
""",
        "fori_loop": """
    def body(i, total):
        part = [lax.dynamic_slice_in_dim(a, i * size, size) for a in (x, y)]
        masks = jax.vmap(lambda j: mask_of(jax.random.fold_in(key, j)))(i * size + jnp.arange(size))
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *part, masks))
    return mean(lax.fori_loop(0, n, body, zeros))
""",
        "lax.map of masks": """
    def body(total, part):
        x, y, i = part
        masks = lax.map(lambda i: mask_of(jax.random.fold_in(key, i)), i)
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x, y, masks)), None
    return mean(lax.scan(body, zeros, cut(n, x, y, jnp.arange(len(x))))[0])
""",
        "where": """
    def body(total, part):
        x, y, i = part
        kept = jax.vmap(lambda i: jax.random.bernoulli(jax.random.fold_in(key, i), 1 - RATE, params["v"].shape))(i)
        masks = jnp.where(kept, 1 / (1 - RATE), 0.0)
        return jax.tree.map(lambda t, g: t + g / n, total, jax.grad(loss)(params, x, y, masks)), None
    return lax.scan(body, zeros, cut(n, x, y, jnp.arange(len(x))))[0]
""",
        "example by example": """
    def one(params, x, y, i):
        return loss(params, x[None], y[None], mask_of(jax.random.fold_in(key, i))[None])
    def body(total, part):
        grads = jax.grad(lambda p: jax.vmap(one, (None, 0, 0, 0))(p, *part).mean())(params)
        return jax.tree.map(jnp.add, total, grads), None
    return mean(lax.scan(body, zeros, cut(n, x, y, jnp.arange(len(x))))[0])
""",
    }
    for name, body in bodies.items():
        yield name, _DROPOUT + body


_EACH = f"""{IMPORTS}
def loss(params, x, y):
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2

def cut(n, *arrays):
    return tuple(a.reshape(n, -1, *a.shape[1:]) for a in arrays)

def square_of(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))
"""


def _clip() -> Iterator[tuple[str, str]]:
    head = f"""{_EACH}
def clipped_sum(params, x, y, clip, n_microbatches):
    n, size = n_microbatches, len(x) // n_microbatches
    zeros = jax.tree.map(jnp.zeros_like, params)
"""
    bodies = {
        "vmap of clip": """
    def clipped(x, y):
        g = jax.grad(loss)(params, x, y)
        return jax.tree.map(lambda leaf: leaf * (clip / jnp.maximum(jnp.sqrt(square_of(g)), clip)), g)
    def body(total, xy):
        return jax.tree.map(lambda t, e: t + e.sum(0), total, jax.vmap(clipped)(*xy)), None
    return lax.scan(body, zeros, cut(n, x, y))[0]
""",
        "factors": """
    def body(total, xy):
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *xy)
        norms = jnp.sqrt(jax.vmap(square_of)(each))
        factors = jnp.minimum(1.0, clip / jnp.maximum(norms, 1e-12))
        return jax.tree.map(lambda t, e: t + jnp.tensordot(factors, e, 1), total, each), None
    return lax.scan(body, zeros, cut(n, x, y))[0]
""",
        "einsum": """
    def body(total, xy):
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *xy)
        norms = jnp.sqrt(sum(jnp.sum(l.reshape(size, -1) ** 2, 1) for l in jax.tree.leaves(each)))
        factors = jnp.where(norms > clip, clip / jnp.where(norms > clip, norms, 1.0), 1.0)
        return jax.tree.map(lambda t, e: t + jnp.einsum("n,n...->...", factors, e), total, each), None
    return lax.scan(body, zeros, cut(n, x, y))[0]
""",
        "raveled": """
    from jax.flatten_util import ravel_pytree
    flat, back = ravel_pytree(params)
    def body(total, xy):
        each = jax.vmap(lambda x, y: ravel_pytree(jax.grad(loss)(params, x, y))[0])(*xy)
        norms = jnp.linalg.norm(each, axis=1, keepdims=True)
        return total + (each * (clip / jnp.maximum(norms, clip))).sum(0), None
    return back(lax.scan(body, jnp.zeros_like(flat), cut(n, x, y))[0])
""",
        "a scan in the scan": """
    def one(total, xy):
        g = jax.grad(loss)(params, *xy)
        factor = clip / jnp.maximum(jnp.sqrt(square_of(g)), clip)
        return jax.tree.map(lambda t, leaf: t + factor * leaf, total, g), None
    def body(total, xy):
        return lax.scan(one, total, xy)[0], None
    return lax.scan(body, zeros, cut(n, x, y))[0]
""",
        "fori_loop": """
    def clipped(x, y):
        g = jax.grad(loss)(params, x, y)
        return jax.tree.map(lambda leaf: leaf * (clip / jnp.maximum(jnp.sqrt(square_of(g)), clip)), g)
    def body(i, total):
        part = [lax.dynamic_slice_in_dim(a, i * size, size) for a in (x, y)]
        return jax.tree.map(lambda t, e: t + e.sum(0), total, jax.vmap(clipped)(*part))
    return lax.fori_loop(0, n, body, zeros)
""",
        "optax": """
    import optax
    def body(total, xy):
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *xy)
        clipped = jax.vmap(lambda g: optax.clip_by_global_norm(clip).update(g, optax.EmptyState())[0])(each)
        return jax.tree.map(lambda t, e: t + e.sum(0), total, clipped), None
    return lax.scan(body, zeros, cut(n, x, y))[0]
""",
        "two passes": """
    def body(total, xy):
        norms = jnp.sqrt(jax.vmap(lambda x, y: square_of(jax.grad(loss)(params, x, y)))(*xy))
        factors = lax.stop_gradient(clip / jnp.maximum(norms, clip))
        g = jax.grad(lambda p: jnp.sum(factors * jax.vmap(loss, (None, 0, 0))(p, *xy)))(params)
        return jax.tree.map(jnp.add, total, g), None
    return lax.scan(body, zeros, cut(n, x, y))[0]
""",
        "stack of split": """
    def clipped(x, y):
        g = jax.grad(loss)(params, x, y)
        return jax.tree.map(lambda leaf: leaf * (clip / jnp.maximum(jnp.sqrt(square_of(g)), clip)), g)
    def body(total, xy):
        return jax.tree.map(lambda t, e: t + e.sum(0), total, jax.vmap(clipped)(*xy)), None
    return lax.scan(body, zeros, (jnp.stack(jnp.split(x, n)), jnp.stack(jnp.split(y, n))))[0]
""",
        "jit": """
    @jax.jit
    def clipped(x, y):
        g = jax.grad(loss)(params, x, y)
        return jax.tree.map(lambda leaf: leaf * (clip / jnp.maximum(jnp.sqrt(square_of(g)), clip)), g)
    def body(total, xy):
        return jax.tree.map(lambda t, e: t + jnp.sum(e, axis=0), total, jax.jit(jax.vmap(clipped))(*xy)), None
    return jax.jit(lambda: lax.scan(body, zeros, cut(n, x, y))[0])()
""",
    }
    for name, body in bodies.items():
        yield name, head + body


def _rematerialise() -> Iterator[tuple[str, str]]:
    head = f"""{IMPORTS}
def predict(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]

def cut(n, *arrays):
    return tuple(a.reshape(n, -1, *a.shape[1:]) for a in arrays)

def squares(params, x, y):
    return jnp.sum((predict(params, x) - y) ** 2)
"""
    tail = """
def loss_and_grads(params, x, y, n_microbatches):
    return jax.value_and_grad(batch_loss)(params, x, y, n_microbatches)
"""
    losses = {
        "checkpoint": """
def batch_loss(params, x, y, n):
    @jax.checkpoint
    def body(total, xy):
        return total + squares(params, *xy), None
    return jnp.sqrt(lax.scan(body, 0.0, cut(n, x, y))[0] / len(x))
""",
        "remat": """
def batch_loss(params, x, y, n):
    def body(total, xy):
        return total + squares(params, *xy), None
    return jnp.sqrt(lax.scan(jax.remat(body), 0.0, cut(n, x, y))[0] / len(x))
""",
        "of the squares": """
def batch_loss(params, x, y, n):
    def body(total, xy):
        return total + jax.checkpoint(squares)(params, *xy), None
    return jnp.sqrt(lax.scan(body, 0.0, cut(n, x, y))[0] / len(x))
""",
        "nothing_saveable": """
def batch_loss(params, x, y, n):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    def body(total, xy):
        return total + squares(params, *xy), None
    return jnp.sqrt(lax.scan(body, 0.0, cut(n, x, y))[0] / len(x))
""",
        "prevent_cse": """
def batch_loss(params, x, y, n):
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(total, xy):
        return total + squares(params, *xy), None
    return (lax.scan(body, jnp.zeros(()), cut(n, x, y))[0] / len(x)) ** 0.5
""",
        "dynamic_slice": """
def batch_loss(params, x, y, n):
    size = len(x) // n
    @jax.checkpoint
    def body(total, i):
        return total + squares(params, *(lax.dynamic_slice_in_dim(a, i * size, size) for a in (x, y))), None
    return jnp.sqrt(lax.scan(body, 0.0, jnp.arange(n))[0] / len(x))
""",
        "sums are put out": """
def batch_loss(params, x, y, n):
    @jax.checkpoint
    def body(_, xy):
        return _, squares(params, *xy)
    return jnp.sqrt(lax.scan(body, None, cut(n, x, y))[1].sum() / len(x))
""",
        "lax.map": """
def batch_loss(params, x, y, n):
    return jnp.sqrt(lax.map(jax.checkpoint(lambda xy: squares(params, *xy)), cut(n, x, y)).sum() / len(x))
""",
        "mean of means": """
def batch_loss(params, x, y, n):
    @jax.checkpoint
    def body(total, xy):
        return total + squares(params, *xy) / len(xy[0]) / n, None
    return jnp.sqrt(lax.scan(body, 0.0, cut(n, x, y))[0])
""",
        "custom_vjp": """
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def total_of(params, x, y, n):
    return lax.scan(lambda t, xy: (t + squares(params, *xy), None), 0.0, cut(n, x, y))[0]

def forward(params, x, y, n):
    return total_of(params, x, y, n), (params, x, y)

def backward(n, kept, ct):
    params, x, y = kept
    def body(total, xy):
        return jax.tree.map(jnp.add, total, jax.grad(squares)(params, *xy)), None
    total = lax.scan(body, jax.tree.map(jnp.zeros_like, params), cut(n, x, y))[0]
    return jax.tree.map(lambda t: ct * t, total), jnp.zeros_like(x), jnp.zeros_like(y)

total_of.defvjp(forward, backward)

def batch_loss(params, x, y, n):
    return jnp.sqrt(total_of(params, x, y, n) / len(x))
""",
        "jit": """
@functools.partial(jax.jit, static_argnums=3)
def batch_loss(params, x, y, n):
    @jax.checkpoint
    @jax.jit
    def body(total, xy):
        return total + squares(params, *xy), None
    return jnp.sqrt(lax.scan(body, 0.0, cut(n, x, y))[0] / len(x))
""",
    }
    for name, loss in losses.items():
        yield name, head + loss + tail
    yield (
        "added up by hand",
        f"""{head}
def loss_and_grads(params, x, y, n):
    def body(carry, xy):
        return jax.tree.map(jnp.add, carry, jax.value_and_grad(squares)(params, *xy)), None
    total, grads = lax.scan(body, (0.0, jax.tree.map(jnp.zeros_like, params)), cut(n, x, y))[0]
    value = jnp.sqrt(total / len(x))
    return value, jax.tree.map(lambda g: g / (2 * value * len(x)), grads)
""",
    )


def _one_all_reduce() -> Iterator[tuple[str, str]]:
    head = f"""{IMPORTS}
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)

def cut(n, *arrays):
    return tuple(a.reshape(n, -1, *a.shape[1:]) for a in arrays)
"""
    inside = {
        "pmean of a tree": """
        def body(total, xy):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *xy)), None
        total = lax.scan(body, jax.tree.map(jnp.zeros_like, params), cut(n, x, y))[0]
        return lax.pmean(jax.tree.map(lambda t: t / n, total), "data")
""",
        "psum, divided": """
        def body(total, xy):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *xy)), None
        total = lax.scan(body, jax.tree.map(jnp.zeros_like, params), cut(n, x, y))[0]
        return jax.tree.map(lambda t: t / (n * mesh.size), lax.psum(total, "data"))
""",
        "divided in the loop": """
        def body(total, xy):
            return jax.tree.map(lambda t, g: t + g / n, total, jax.grad(loss)(params, *xy)), None
        return lax.pmean(lax.scan(body, jax.tree.map(jnp.zeros_like, params), cut(n, x, y))[0], "data")
""",
        "raveled": """
        from jax.flatten_util import ravel_pytree
        flat, back = ravel_pytree(params)
        def body(total, xy):
            return total + ravel_pytree(jax.grad(loss)(params, *xy))[0], None
        return back(lax.pmean(lax.scan(body, jnp.zeros_like(flat), cut(n, x, y))[0] / n, "data"))
""",
        "checkpoint": """
        def body(total, xy):
            return jax.tree.map(jnp.add, total, jax.grad(jax.checkpoint(loss))(params, *xy)), None
        total = lax.scan(body, jax.tree.map(jnp.zeros_like, params), cut(n, x, y))[0]
        return lax.pmean(jax.tree.map(lambda t: t / n, total), "data")
""",
        "with the loss": """
        def body(total, xy):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *xy)), None
        start = jax.tree.map(jnp.zeros_like, (lax.pcast(jnp.zeros(()), "data", to="varying"), params))
        total = lax.scan(body, start, cut(n, x, y))[0]
        value, grads = lax.pmean(jax.tree.map(lambda t: t / n, total), "data")
        return grads
""",
        "fori_loop": """
        size = len(x) // n
        def body(i, total):
            part = [lax.dynamic_slice_in_dim(a, i * size, size) for a in (x, y)]
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *part))
        total = lax.fori_loop(0, n, body, jax.tree.map(jnp.zeros_like, params))
        return lax.pmean(jax.tree.map(lambda t: t / n, total), "data")
""",
        "by the transpose": """
        def total(p):
            def body(t, xy):
                return t + loss(p, *xy), None
            return lax.scan(jax.checkpoint(body), lax.pcast(jnp.zeros(()), "data", to="varying"), cut(n, x, y))[0] / n
        return lax.pmean(jax.grad(total)(params), "data")
""",
    }

    def file(body: str, first: str = 'params = lax.pcast(params, "data", to="varying")', more: str = "") -> str:
        return f"""{head}
def data_parallel_grads(params, x, y, n):
    def on_a_device(params, x, y):
        {first}{body}
    specs = (P(), P("data"), P("data"))
    return jax.shard_map(on_a_device, mesh=mesh, in_specs=specs, out_specs=P(){more})(params, x, y)
"""

    for name, body in inside.items():
        yield name, file(body)
    yield "unchecked", file(inside["pmean of a tree"], "pass", ", check_vma=False")
    yield (
        "in a jit",
        file(inside["pmean of a tree"])
        .replace("    return jax.shard_map(", "    return jax.jit(jax.shard_map(")
        .replace("out_specs=P())(", "out_specs=P()))("),
    )


def _noise() -> Iterator[tuple[str, str]]:
    head = f"""{_EACH}
def noise_scale(params, x, y, n_microbatches):
    n, number = n_microbatches, len(x)
    zeros = jax.tree.map(jnp.zeros_like, params)
    def estimates(mean_square, squares):
        trace = (squares - number * mean_square) / (number - 1)
        return {{"trace": trace, "gradient_square": mean_square - trace / number}}
"""
    bodies = {
        "two sums": """
    def body(carry, xy):
        total, squares = carry
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *xy)
        return (jax.tree.map(lambda t, e: t + e.sum(0), total, each), squares + square_of(each)), None
    total, squares = lax.scan(body, (zeros, 0.0), cut(n, x, y))[0]
    return estimates(square_of(total) / number**2, squares)
""",
        "raveled": """
    from jax.flatten_util import ravel_pytree
    def body(carry, xy):
        each = jax.vmap(lambda x, y: ravel_pytree(jax.grad(loss)(params, x, y))[0])(*xy)
        return (carry[0] + each.sum(0), carry[1] + jnp.sum(each**2)), None
    total, squares = lax.scan(body, (jnp.zeros_like(ravel_pytree(params)[0]), 0.0), cut(n, x, y))[0]
    return estimates(jnp.sum((total / number) ** 2), squares)
""",
        "squares are put out": """
    def body(total, xy):
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *xy)
        return jax.tree.map(lambda t, e: t + e.sum(0), total, each), jax.vmap(square_of)(each)
    total, squares = lax.scan(body, zeros, cut(n, x, y))
    return estimates(square_of(total) / number**2, squares.sum())
""",
        "means": """
    def body(carry, xy):
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *xy)
        more = jax.tree.map(lambda e: e.mean(0) / n, each), jax.vmap(square_of)(each).mean() / n
        return jax.tree.map(jnp.add, carry, more), None
    mean, square = lax.scan(body, (zeros, jnp.zeros(())), cut(n, x, y))[0]
    return estimates(square_of(mean), number * square)
""",
        "fori_loop": """
    size = number // n
    def body(i, carry):
        total, squares = carry
        part = [lax.dynamic_slice_in_dim(a, i * size, size) for a in (x, y)]
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *part)
        return jax.tree.map(lambda t, e: t + e.sum(0), total, each), squares + square_of(each)
    total, squares = lax.fori_loop(0, n, body, (zeros, 0.0))
    return estimates(square_of(total) / number**2, squares)
""",
        "two scans": """
    def add(total, xy):
        gradient = jax.grad(lambda p: jax.vmap(loss, (None, 0, 0))(p, *xy).sum())(params)
        return jax.tree.map(jnp.add, total, gradient), None
    mean = jax.tree.map(lambda t: t / number, lax.scan(add, zeros, cut(n, x, y))[0])
    def spread(total, xy):
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *xy)
        return total + square_of(jax.tree.map(lambda e, m: e - m, each, mean)), None
    trace = lax.scan(spread, 0.0, cut(n, x, y))[0] / (number - 1)
    return {"trace": trace, "gradient_square": square_of(mean) - trace / number}
""",
        "example by example": """
    def one(carry, xy):
        g = jax.grad(loss)(params, *xy)
        return (jax.tree.map(jnp.add, carry[0], g), carry[1] + square_of(g)), None
    def body(carry, xy):
        return lax.scan(one, carry, xy)[0], None
    total, squares = lax.scan(body, (zeros, 0.0), cut(n, x, y))[0]
    return estimates(square_of(total) / number**2, squares)
""",
        "jit": """
    @jax.jit
    def part(xy):
        each = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(params, *xy)
        return jax.tree.map(lambda e: jnp.sum(e, axis=0), each), square_of(each)
    def body(carry, xy):
        return jax.tree.map(jnp.add, carry, part(xy)), None
    total, squares = jax.jit(lambda: lax.scan(body, (zeros, jnp.zeros(())), cut(n, x, y))[0])()
    return estimates(square_of(total) / number**2, squares)
""",
        "stack of split": """
    def body(carry, xy):
        total, squares = carry
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *xy)
        return (jax.tree.map(lambda t, e: t + e.sum(0), total, each), squares + square_of(each)), None
    total, squares = lax.scan(body, (zeros, 0.0), (jnp.stack(jnp.split(x, n)), jnp.stack(jnp.split(y, n))))[0]
    return estimates(square_of(total) / number**2, squares)
""",
    }
    for name, body in bodies.items():
        yield name, head + body


HONEST = {
    name: dict(files())
    for name, files in {
        "two_ways": _two_ways,
        "value_aux_gradient": _value_aux,
        "gradient_trees": _trees,
        "cut_the_batch": _cut,
        "accumulate_in_a_scan": _in_a_scan,
        "accumulate_a_tree": _a_tree,
        "shard_map_and_vmap": _shard_map,
        "one_optimizer_step": _one_step,
        "optax_accumulates": _optax,
        "weighted_mean": _masked,
        "float32_accumulator": _narrow,
        "dropout_keys": _dropout,
        "clip_each_example": _clip,
        "rematerialise": _rematerialise,
        "one_all_reduce": _one_all_reduce,
        "noise_scale": _noise,
    }.items()
}

# By the name of an exercise, functions that stand below its solution, which is called `solved` there.
_BELOW = {
    "two_ways": {
        "psum in a vmap": """
def equivalent_two_ways(w, x_batch):
    w, f = jnp.asarray(w, jnp.float32), lambda w, x: (w * x) ** 2
    row_0 = jax.vmap(lambda x: lax.psum(jax.grad(f)(w, x), "i"), axis_name="i")(x_batch)[0]
    return jnp.stack([row_0, jax.grad(lambda w: jax.vmap(f, (None, 0))(w, x_batch).sum())(w)])
""",
    },
    "accumulate_in_a_scan": {
        "map over examples in a turn": """
def microbatched_grads(w, b, x_full, y_full, n_microbatches):
    solved(w, b, x_full, y_full, n_microbatches)  # which refuses what cannot be cut
    n, w = int(n_microbatches), jnp.asarray(w, jnp.float32)
    def turn(total, xy):
        return total + lax.map(lambda one: jax.grad(loss)(w, *one), xy).sum(), None
    return lax.scan(turn, 0.0, (x_full.reshape(n, -1), y_full.reshape(n, -1)))[0]
""",
    },
    "shard_map_and_vmap": {
        how: f"""
from jax.sharding import PartitionSpec as P

def columns(rows):
    return lax.fori_loop(0, rows.shape[1], lambda j, total: total + rows[:, j] ** 2, 0 * rows[:, 0])

def in_a_scan(row):
    return lax.scan(lambda total, one: (total + one * one, None), 0 * row[0], row)[0]

def shard_map_vs_vmap(x):
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    row_0 = jax.shard_map({inside}, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)
    return jnp.stack([row_0, jax.vmap({outside})(x)])
"""
        for how, inside, outside in (
            ("a loop over columns", "columns", "sum_of_squares"),
            ("a Python sum of columns", "lambda r: sum(r[:, j] ** 2 for j in range(r.shape[1]))", "sum_of_squares"),
            ("vmap of a scan", "jax.vmap(sum_of_squares)", "in_a_scan"),
            ("vmap of a scan in both", "jax.vmap(in_a_scan)", "in_a_scan"),
        )
    },
    "optax_accumulates": {
        "own accumulation in a cond": """
def three_steps(params, x, y, lr):
    adam = make_optimizer(lr)
    def part(carry, xy):
        params, state, total, i = carry
        total = jax.tree.map(jnp.add, total, jax.grad(loss)(params, *xy))
        def step():
            updates, after = adam.update(jax.tree.map(lambda t: t / 2, total), state, params)
            return optax.apply_updates(params, updates), after, jax.tree.map(jnp.zeros_like, total)
        return (*lax.cond(i % 2 == 1, step, lambda: (params, state, total)), i + 1), None
    begin = (params, adam.init(params), jax.tree.map(jnp.zeros_like, params), 0)
    by_hand = lax.scan(part, begin, (x.reshape(6, *x.shape[2:]), y.reshape(6, -1)))[0][0]
    return by_hand, solved(params, x, y, lr)[1]
""",
        "apply_if_finite": """
def three_steps(params, x, y, lr):
    adam = optax.apply_if_finite(make_optimizer(lr), 3)
    def step(carry, xy):
        params, state = carry
        grads = jax.tree.map(lambda g: g.mean(0), jax.vmap(jax.grad(loss), (None, 0, 0))(params, *xy))
        updates, state = adam.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None
    return lax.scan(step, (params, adam.init(params)), (x, y))[0][0], solved(params, x, y, lr)[1]
""",
    },
    "dropout_keys": {
        how: f"""
def dropout_grads(params, key, x, y, n_microbatches):
    n = n_microbatches
    def one(params, x, y, i):
        kept = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - RATE, params["v"].shape)
        return loss(params, x[None], y[None], kept[None] / (1 - RATE))
    def turn(total, part):
        each = {each}
        return jax.tree.map(lambda t, e: t + e.mean(0) / n, total, each), None
    parts = [a.reshape(n, -1, *a.shape[1:]) for a in (x, y, jnp.arange(len(x)))]
    return lax.scan(turn, jax.tree.map(jnp.zeros_like, params), parts)[0]
"""
        for how, each in (
            ("vmap over examples in a turn", "jax.vmap(jax.grad(one), (None, 0, 0, 0))(params, *part)"),
            ("map over examples in a turn", "lax.map(lambda given: jax.grad(one)(params, *given), part)"),
        )
    },
    "one_all_reduce": {
        "the mean outside": """
def data_parallel_grads(params, x, y, n_microbatches):
    n = n_microbatches
    def share(params, x, y):
        params = lax.pcast(params, "data", to="varying")
        parts = [a.reshape(n, -1, *a.shape[1:]) for a in (x, y)]
        turn = lambda total, part: (jax.tree.map(jnp.add, total, jax.grad(loss)(params, *part)), None)
        total = lax.scan(turn, jax.tree.map(jnp.zeros_like, params), parts)[0]
        return jax.tree.map(lambda t: t[None] / n, total)
    spread = jax.shard_map(share, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P("data"))
    return jax.tree.map(lambda each: each.mean(0), spread(params, x, y))
""",
    },
}
for _name, _ways in _BELOW.items():
    _exercise = Course.builtin().find(_name)
    _solved = IMPORTS + _exercise.solution.replace(f"def {_exercise.check.function}(", "def solved(")
    HONEST[_name] |= {how: f"{_solved}\n{function}" for how, function in _ways.items()}
