"""Decoys: files with the right value that contain the operation of the exercise, but do not use its result.

`DECOYS`: name of an exercise -> files, each with the stage that must catch it and words of the verdict.
"""

from collections.abc import Iterator

from cases.learn_honest import HONEST, IMPORTS

from anybatch.learn.catalogue import Course

COURSE = Course.builtin()
NOTHING = "has no influence on the answer"
PART = "Part of the answer does not come from the"

# Ways to combine `a`, computed in another way, with `b`, computed by the required operation. `p` is an argument.
IGNORED = {
    "times a zero": "jax.tree.map(lambda a, b: a + 0 * b, a, b)",
    "times what is always zero": "jax.tree.map(lambda a, b: a + jnp.minimum(jnp.abs(p), 0) * b, a, b)",
    "where a number is NaN": "jax.tree.map(lambda a, b: jnp.where(jnp.isnan(p), b, a), a, b)",
    "where a number is huge": "jax.tree.map(lambda a, b: lax.select(jnp.full(jnp.shape(a), p > 1e30), b, a), a, b)",
    "in a branch that is not taken": "lax.cond(p > 1e30, lambda: b, lambda: a)",
    "times 1e-30": "jax.tree.map(lambda a, b: a + 1e-30 * b, a, b)",
    "less itself": "jax.tree.map(lambda a, b: a + (b - lax.optimization_barrier(b)), a, b)",
    "behind a barrier": "lax.optimization_barrier((a, b))[0]",
    "clipped to the other": "jax.tree.map(lambda a, b: jnp.clip(b, a, a), a, b)",
    "its sign": "jax.tree.map(lambda a, b: a * jnp.sign(b) ** 2 + jnp.where(b == 0, a, 0), a, b)",
    "inside a call": "jax.jit(lambda *ab: jax.tree.map(lambda a, b: a + jnp.minimum(jnp.abs(p), 0) * b, *ab))(a, b)",
}
MIXED = {
    "one part in a million": "jax.tree.map(lambda a, b: a * (1 - 1e-6) + b * 1e-6, a, b)",
    "one half": "jax.tree.map(lambda a, b: 0.5 * a + 0.5 * b, a, b)",
}


def beside(name: str, other: str, number: str, join: str) -> str:
    """A file that combines the solution, called `shown`, with another computation, `other`."""
    exercise = COURSE.find(name)
    function, parameters = exercise.check.function, ", ".join(exercise.check.parameters)
    return f"""{IMPORTS}{exercise.solution.replace(f"def {function}(", "def shown(")}
{other}

def {function}({parameters}):
    b, a, p = shown({parameters}), other({parameters}), {number}
    return {join}
"""


def _handed_through(name: str, other: str) -> str:
    """A file whose scan only doubles the result of another computation, and divides by that afterwards."""
    exercise = COURSE.find(name)
    function, parameters = exercise.check.function, ", ".join(exercise.check.parameters)
    guard = f"shown({parameters})" if name == "accumulate_in_a_scan" else "None"
    return f"""{IMPORTS}{exercise.solution.replace(f"def {function}(", "def shown(")}
{other}

def {function}({parameters}):
    {guard}  # raises for a count that does not fit
    a, n = other({parameters}), int(n_microbatches)
    twice = lambda c, _: (jax.tree.map(lambda leaf: 2 * leaf, c), None)
    return jax.tree.map(lambda leaf: leaf / 2.0**n, lax.scan(twice, a, None, length=n)[0])
"""


# Other computations that use one microbatch at a time, but in a loop of another length than required.
_OTHERWISE = """
def turns_of(n, *arrays):
    return tuple(a.reshape({times} * n, -1, *a.shape[1:]) for a in arrays)

def summed(one, zeros, parts):
    return lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, one(*part)), None), zeros, parts)[0]

def other({parameters}):
"""
OTHERWISE = {
    "accumulate_in_a_scan": (
        "jnp.asarray(w, jnp.float32)",
        """
def other(w, b, x, y, n):
    xs, ys = x.reshape(int(n), -1), y.reshape(int(n), -1)
    return sum(jax.grad(loss)(jnp.asarray(w, jnp.float32), xs[i], ys[i]) for i in range(int(n)))
""",
    ),
    "weighted_mean": (
        'params["b"]',
        _OTHERWISE.format(times=2, parameters="params, x, y, mask, n")
        + """
    def of_sum(params, x, y, mask):
        return jnp.sum(jnp.where(mask, token_losses(params, x, y), 0.0))
    total = summed(functools.partial(jax.grad(of_sum), params), params, turns_of(n, x, y, mask))
    return jax.tree.map(lambda t, p: (t - p) / jnp.maximum(mask.sum(), 1), total, params)
""",
    ),
    "float32_accumulator": (
        'params["b"].astype(jnp.float32)',
        _OTHERWISE.format(times=2, parameters="params, x, y, n")
        + """
    def one(x, y):
        return jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(loss)(params, x, y))
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return jax.tree.map(lambda t: t / (2 * n), summed(one, zeros, turns_of(n, x, y)))
""",
    ),
    "dropout_keys": (
        'params["v"][0]',
        _OTHERWISE.format(times=3, parameters="params, key, x, y, n")
        + """
    def mask_of(i):
        return jax.random.bernoulli(jax.random.fold_in(key, i), 1 - RATE, params["v"].shape) / (1 - RATE)
    def one(x, y, rows):
        return jax.grad(loss)(params, x, y, jax.vmap(mask_of)(rows))
    total = summed(one, jax.tree.map(jnp.zeros_like, params), turns_of(n, x, y, jnp.arange(len(x))))
    return jax.tree.map(lambda t: t / (3 * n), total)
""",
    ),
    "clip_each_example": (
        'params["v"][0]',
        _OTHERWISE.format(times=2, parameters="params, x, y, clip, n")
        + """
    def clipped(x, y):
        g = jax.grad(loss)(params, x, y)
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(g)))
        return jax.tree.map(lambda leaf: leaf * (clip / jnp.maximum(norm, clip)), g)
    def one(x, y):
        return jax.tree.map(lambda e: e.sum(0), jax.vmap(clipped)(x, y))
    return summed(one, jax.tree.map(jnp.zeros_like, params), turns_of(n, x, y))
""",
    ),
    "rematerialise": (
        'params["v"][0]',
        _OTHERWISE.format(times=2, parameters="params, x, y, n")
        + """
    def one(x, y):
        return jax.value_and_grad(lambda p: jnp.sum((predict(p, x) - y) ** 2))(params)
    total, grads = summed(one, (0.0, jax.tree.map(jnp.zeros_like, params)), turns_of(n, x, y))
    value = jnp.sqrt(total / len(x))
    return value, jax.tree.map(lambda g: g / (2 * value * len(x)), grads)
""",
    ),
    "one_all_reduce": (
        'params["v"][0]',
        _OTHERWISE.format(times=8, parameters="params, x, y, n")
        + """
    total = summed(functools.partial(jax.grad(loss), params), jax.tree.map(jnp.zeros_like, params), turns_of(n, x, y))
    return jax.tree.map(lambda t: t / (8 * n), total)
""",
    ),
    "noise_scale": (
        'params["v"][0]',
        _OTHERWISE.format(times=2, parameters="params, x, y, n")
        + """
    def one(x, y):
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, x, y)
        return jax.tree.map(lambda e: e.sum(0), each), square_of(each)
    total, squares = summed(one, (jax.tree.map(jnp.zeros_like, params), 0.0), turns_of(n, x, y))
    mean_square, number = square_of(total) / len(x) ** 2, len(x)
    trace = (squares - number * mean_square) / (number - 1)
    return {"trace": trace, "gradient_square": mean_square - trace / number}
""",
    ),
}

_TWICE = """
def shown_twice(w, x):
    w = jnp.asarray(w, jnp.float32)
    each = jax.vmap(jax.grad(f), in_axes=(None, 0))(w, x).sum()
    of_sum = jax.grad(lambda w: jax.vmap(f, in_axes=(None, 0))(w, x).sum())(w)
    zero = jnp.minimum(jnp.abs(w), 0)
    return {}

def equivalent_two_ways(w, x_batch):
    return shown_twice(w, x_batch)
"""


def _two_ways() -> Iterator[tuple[str, str, str]]:
    formula = """
def other(w, x_batch):
    return jnp.full(2, 2 * jnp.asarray(w, jnp.float32) * jnp.sum(x_batch**2))
"""
    for how, join in (IGNORED | MIXED).items():
        words = "formula" if how in ("times a zero",) else "No derivative has an influence on row 0"
        if how in ("less itself", "behind a barrier", "clipped to the other", "in a branch that is not taken"):
            words = "row"
        yield how, beside("two_ways", formula, "jnp.asarray(w, jnp.float32)", join), words
    head = COURSE.find("two_ways").solution.replace("def equivalent_two_ways(", "def unused(")
    both = "both rows are gradients of a summed loss"
    yield "of the sum, twice", head + _TWICE.format("jnp.stack([of_sum + zero * each, of_sum])"), both
    each = "both rows add up a gradient for each example"
    yield "of each, twice", head + _TWICE.format("jnp.stack([each, each + zero * of_sum])"), each
    yield "of each, nearly twice", head + _TWICE.format("jnp.stack([each, each + 1e-30 * of_sum])"), each


def _value_aux() -> Iterator[tuple[str, str, str]]:
    again = """
def other(params, x, y):
    def loss(params):
        hidden = 2 * jax.nn.sigmoid(2 * (x @ params["hidden"]["w"] + params["hidden"]["b"])) - 1
        logits = hidden @ params["out"]["w"] + params["out"]["b"]
        value = -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])
        return value, {"accuracy": jnp.mean(jnp.argmax(logits, -1) == y), "logits": logits}
    return jax.value_and_grad(loss, has_aux=True)(params)
"""
    number = 'params["out"]["b"][0]'
    for how, join in IGNORED.items():
        words = "tanh" if how == "times a zero" else "runs more than once"
        yield how, beside("value_aux_gradient", again, number, join), words
    yield (
        "gradients of another pass",
        beside("value_aux_gradient", again, number, "(b[0], a[1])"),
        "runs more than once",
    )
    once = """
def value_aux_and_grad(params, x, y):
    def loss(params):
        before = x @ params["hidden"]["w"] + params["hidden"]["b"]
        hidden = 2 * jax.nn.sigmoid(2 * before) - 1 + jnp.minimum(jnp.abs(params["out"]["b"][0]), 0) * jnp.tanh(before)
        logits = hidden @ params["out"]["w"] + params["out"]["b"]
        value = -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])
        return value, {"accuracy": jnp.mean(jnp.argmax(logits, -1) == y), "logits": logits}
    return jax.value_and_grad(loss, has_aux=True)(params)
"""
    yield "a tanh for show", IMPORTS + once, f"The tanh {NOTHING}"


def _shard_map() -> Iterator[tuple[str, str, str]]:
    plain = "def other(x):\n    return jnp.stack([jnp.sum(x**2, axis=1)] * 2)\n"
    nothing = "The shard_map has no influence on row 0"
    for how, join in (IGNORED | MIXED).items():
        words = "" if how in ("times a zero", "less itself", "behind a barrier") else nothing
        yield how, beside("shard_map_and_vmap", plain, "x[0, 0]", join), words
    head = COURSE.find("shard_map_and_vmap").solution.replace("def shard_map_vs_vmap(", "def unused(")
    for name, body, words in (
        (
            "sums that are handed on",
            """
    sums = each_row(x)
    on = lambda x, sums: sums + jnp.minimum(jnp.abs(x[0, 0]), 0) * each_row(x)
    spread = jax.shard_map(on, mesh=mesh(jax.devices()), in_specs=P("data"), out_specs=P("data"))
    return jnp.stack([spread(x, sums), each_row(x)])
""",
            nothing,
        ),
        (
            "both rows from it",
            """
    spread = jax.shard_map(each_row, mesh=mesh(jax.devices()), in_specs=P("data"), out_specs=P("data"))(x)
    return jnp.stack([spread, spread + jnp.minimum(jnp.abs(x[0, 0]), 0) * each_row(x)])
""",
            "Both rows come from shard_map",
        ),
    ):
        mesh = "\ndef mesh(devices):\n    return jax.sharding.Mesh(devices, ('data',))\n"
        mesh += "\neach_row = jax.vmap(sum_of_squares)\n"
        yield name, f"{IMPORTS}{head}{mesh}\ndef shard_map_vs_vmap(x):\n{body}", words


def _one_step() -> Iterator[tuple[str, str, str]]:
    at_once = """
def other(seed, x_batches, y_batches, lr):
    model = Linear()
    params = model.init(jax.random.PRNGKey(int(seed)), x_batches[0])["params"]["Dense_0"]
    x, y = x_batches.reshape(-1, x_batches.shape[-1]), y_batches.reshape(-1)
    w, b = params["kernel"][:, 0], params["bias"]
    error = (x * w).sum(1) + b - y
    w, b = w - lr * 2 * jnp.sum(x * error[:, None], 0) / len(y), b - lr * 2 * error.mean()
    return jnp.mean(((x * w).sum(1) + b - y) ** 2).reshape(1)
"""
    in_two = at_once.replace(
        "jnp.sum(x * error[:, None], 0) / len(y)",
        "sum(jnp.sum(p * e[:, None], 0) for p, e in zip(x_batches, error.reshape(2, -1))) / len(y)",
    )
    for how, join in IGNORED.items():
        yield how, beside("one_optimizer_step", at_once, "lr", join), "one gradient of all examples at once"
        if how != "times a zero":  # else it is not part of the program
            yield f"{how}, by hand", beside("one_optimizer_step", in_two, "lr", join), f"The jax.grad {NOTHING}"


def _optax() -> Iterator[tuple[str, str, str]]:
    pick = "(shown(params, x, y, lr)[{0}],) * 2"
    by_hand, multi = (f"def other(params, x, y, lr):\n    return {pick.format(i)}\n" for i in (0, 1))
    for how, join in (IGNORED | MIXED).items():
        words = "MultiSteps is not in your program" if how == "times a zero" else "on the second answer"
        if how in ("less itself", "in a branch that is not taken", "behind a barrier"):
            words = "MultiSteps"
        yield f"by hand, {how}", beside("optax_accumulates", by_hand, 'params["b"]', join), words
        words = "both answers come from optax.MultiSteps"
        if how == "in a branch that is not taken":
            words = "MultiSteps"
        yield f"MultiSteps, {how}", beside("optax_accumulates", multi, 'params["b"]', join), words


def _work() -> Iterator[tuple[str, str, str, str]]:
    """The exercise with eight devices."""
    name = "one_all_reduce"
    head = COURSE.find(name).solution.replace("def data_parallel_grads(", "def unused(")
    everything = """
def data_parallel_grads(params, x, y, n):
    def on_a_device(params, x, y):
        params = jax.lax.pcast(params, "data", to="varying")
        x, y = jax.lax.pcast((x, y), "data", to="varying")
        def body(total, xy):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *xy)), None
        def turn(total, xy):
            return jax.lax.scan(body, total, xy)[0], None
        xs, ys = (a.reshape(n, 8, -1, *a.shape[1:]) for a in (x, y))
        total = jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, params), (xs, ys))[0]
        return jax.lax.pmean(jax.tree.map(lambda t: t / (8 * n), total), "data")
    return jax.shard_map(on_a_device, mesh=mesh, in_specs=(P(), P(), P()), out_specs=P())(params, x, y)
"""
    yield "all rows on each device", head + everything, "collectives", "more than its share"
    half = everything.replace(
        "        xs, ys =",
        "        at = jax.lax.axis_index('data') % 2 * (len(x) // 2) if mesh.size > 1 else 0\n"
        "        rows = len(x) // 2 if mesh.size > 1 else len(x)\n"
        "        x, y = (jax.lax.dynamic_slice_in_dim(a, at, rows) for a in (x, y))\n        xs, ys =",
    )
    yield "half of the rows on each device", head + half, "collectives", "more than its share"
    aside = (
        everything.replace(
            '        return jax.lax.pmean(jax.tree.map(lambda t: t / (8 * n), total), "data")',
            "        mean = jax.tree.map(lambda t: t / (8 * n), total)\n"
            "        zero = jnp.minimum(jnp.abs(params['v'][0]), 0)\n"
            "        summed = jax.lax.psum(jax.tree.map(lambda t: t * zero, mean), 'data')\n"
            "        return jax.tree.map(lambda m, s: m + s, mean, summed)",
        )
        .replace("out_specs=P())", "out_specs=P(), check_vma=False)")
        .replace('jax.lax.pcast((x, y), "data", to="varying")', "x, y")
        .replace('jax.lax.pcast(params, "data", to="varying")', "params")
    )
    yield "an all-reduce of zeros", head + aside, "program", f"The all-reduce {NOTHING}"


_CUT = "def cut(n, *arrays):\n    return tuple(a.reshape(n, -1, *a.shape[1:]) for a in arrays)\n"
# The required number of iterations, but each computes with half of the batch.
_HALVES = (
    "def cut(n, *arrays):\n"
    "    return tuple(jnp.repeat(a.reshape(2, -1, *a.shape[1:]), n // 2, axis=0) for a in arrays)\n"
)


def _halves() -> dict[str, tuple[str, str, str]]:
    def halved(name: str, way: str, *changes: tuple[str, str]) -> str:
        source = HONEST[name][way]
        for old, new in ((_CUT, _HALVES), *changes):
            assert old in source, (name, old)
            source = source.replace(old, new)
        return source

    def twice(name: str, way: str, result: str) -> str:
        """With a sum that is divided by how often each half comes."""
        return halved(name, way, (result, f"jax.tree.map(lambda t: t * 2 / n, {result})"))

    whole = "(x_full.reshape(n, -1), y_full.reshape(n, -1))"
    halves = "tuple(jnp.repeat(a.reshape(2, -1), n // 2, axis=0) for a in (x_full, y_full)) if n % 2 == 0 else " + whole
    in_a_scan = HONEST["accumulate_in_a_scan"]["carry of a sum"].replace(
        f"return lax.scan(body, jnp.zeros(()), {whole})[0]",
        f"return lax.scan(body, jnp.zeros(()), {halves})[0] * (2 / n if n % 2 == 0 else 1)",
    )
    at_once = "more than one microbatch"
    return {
        "accumulate_in_a_scan": (in_a_scan, "program", "computes with 12 examples"),
        "accumulate_a_tree": (halved("accumulate_a_tree", "mean in the loop"), "memory", "Memory grows"),
        "weighted_mean": (halved("weighted_mean", "float count"), "program", at_once),
        "float32_accumulator": (halved("float32_accumulator", "astype"), "value", "rounded to bfloat16"),
        "dropout_keys": (halved("dropout_keys", "indices"), "program", at_once),
        "clip_each_example": (
            twice("clip_each_example", "vmap of clip", "lax.scan(body, zeros, cut(n, x, y))[0]"),
            "program",
            at_once,
        ),
        "rematerialise": (halved("rematerialise", "checkpoint", ("/ len(x)", "/ len(x) * 2 / n")), "program", at_once),
        "noise_scale": (
            twice("noise_scale", "two sums", "lax.scan(body, (zeros, 0.0), cut(n, x, y))[0]"),
            "program",
            at_once,
        ),
    }


_BUFFER = """
def {function}({parameters}):
    result = shown({parameters})
    scale = jnp.max(jnp.abs(jax.tree.leaves(params)[0]))
    waste = lax.fori_loop(0, 3, lambda i, v: jnp.sort(v * 1.5 + i), jnp.arange(2.0**17) * scale)
    return jax.tree.map(lambda r: r + jnp.minimum(jnp.abs(waste[7]), 0), result)
"""
_PADDED = """
def accumulate(params, x, y, n_microbatches):
    more = 1024 - len(x)
    weights = jnp.where(jnp.arange(1024) < len(x), 1 / len(x), 0.0)
    x, y = jnp.pad(x, ((0, more), (0, 0))), jnp.pad(y, (0, more))
    return jax.grad(lambda p: jnp.sum(weights * (predict(p, x) - y) ** 2))(params)
"""


def _padding() -> Iterator[tuple[str, str, tuple[str, str, str]]]:
    for name in ("accumulate_a_tree", "clip_each_example", "rematerialise", "noise_scale"):
        exercise = COURSE.find(name)
        function, parameters = exercise.check.function, ", ".join(exercise.check.parameters)
        source = exercise.solution.replace(f"def {function}(", "def shown(")
        source = IMPORTS + source + _BUFFER.format(function=function, parameters=parameters)
        yield name, "a buffer of one size", (source, "memory", "for temporaries, where")
    solution = COURSE.find("accumulate_a_tree").solution.replace("def accumulate(", "def unused(")
    yield "accumulate_a_tree", "padded to one size", (IMPORTS + solution + _PADDED, "memory", "for temporaries, where")


def _decoys() -> Iterator[tuple[str, str, tuple[str, str, str]]]:
    for name, files in {
        "two_ways": _two_ways,
        "value_aux_gradient": _value_aux,
        "shard_map_and_vmap": _shard_map,
        "one_optimizer_step": _one_step,
        "optax_accumulates": _optax,
    }.items():
        for how, source, words in files():
            yield name, how, (source, "program", words)
    for how, source, stage, words in _work():
        yield "one_all_reduce", how, (source, stage, words)
    for name, (number, other) in OTHERWISE.items():
        for how, join in (IGNORED | MIXED).items():
            # What is multiplied by a literal 0 is left out of the program.
            words = (
                "scan"
                if how == "times a zero"
                else "come from the scan"
                if how == "one half"
                else f"The scan {NOTHING}"
            )
            yield name, how, (beside(name, other, number, join), "program", words)
    for name, (_, other) in OTHERWISE.items():
        if name in ("rematerialise", "one_all_reduce"):  # their scan may be the second of two passes
            continue
        yield name, "handed through", (_handed_through(name, other), "program", "were computed from the batch")
    # Exercises that check only values. The result of the operation is ignored here, and the answer is wrong.
    for name, other, number in (
        (
            "gradient_trees",
            "def other(trees, weights):\n    return jax.tree.map(lambda *l: sum(l), *trees)\n",
            "weights[0]",
        ),
        (
            "cut_the_batch",
            "def other(batch, n):\n"
            "    return jax.tree.map(lambda l: l[::-1].reshape(int(n), -1, *l.shape[1:]), batch)\n",
            'batch["x"][0, 0, 0]',
        ),
    ):
        yield (
            name,
            "where a number is NaN",
            (beside(name, other, number, IGNORED["where a number is NaN"]), "value", ""),
        )
    for name, found in _halves().items():
        yield name, "half of the batch in every iteration", found
    yield from _padding()
    # The full batch in one iteration of the scan.
    source = HONEST["accumulate_in_a_scan"]["carry of a sum"].replace(
        "def body(total, xy):\n        return total + jax.grad(loss)(w, *xy), None",
        "def body(total, i):\n        whole = lambda: jax.grad(loss)(w, x_full, y_full)\n"
        "        return total + lax.cond(i == 0, whole, lambda: jnp.zeros(())), None",
    )
    source = source.replace("(x_full.reshape(n, -1), y_full.reshape(n, -1)))[0]", "jnp.arange(n))[0]")
    yield "accumulate_in_a_scan", "all in one iteration", (source, "program", "computes with the full batch")
    source = HONEST["accumulate_in_a_scan"]["map over examples in a turn"].replace(
        "    return lax.scan(turn, 0.0, (x_full.reshape(n, -1), y_full.reshape(n, -1)))[0]",
        "    x, y = (jnp.asarray(a).astype(jnp.complex64) for a in (x_full, y_full))\n"
        "    return jnp.real(2 * jnp.sum((w * x - y) * x))"
        " + 1e-30 * lax.scan(turn, w, (x_full.reshape(n, -1), y_full.reshape(n, -1)))[0]",
    )
    yield "accumulate_in_a_scan", "complex numbers", (source, "program", "outside of it")
    # A scan over nothing, whose result is known.
    constant = """
def other(w, b, x, y, n):
    xs, ys = x.reshape(int(n), -1), y.reshape(int(n), -1)
    true = sum(jax.grad(loss)(jnp.asarray(w, jnp.float32), xs[i], ys[i]) for i in range(int(n)))
    seven = lax.scan(lambda c, _: (c + 7 / int(n), None), 0.0, None, length=int(n))[0]
    return jnp.where(jnp.abs(seven - 7) < 1e-3, true, seven)
"""
    yield (
        "accumulate_in_a_scan",
        "a known result",
        (
            beside("accumulate_in_a_scan", constant, "w", "a"),
            "program",
            f"The scan {NOTHING}",
        ),
    )
    two = """
def other(w, b, x, y, n):
    xs, ys = x.reshape(int(n), -1), y.reshape(int(n), -1)
    true = sum(jax.grad(loss)(jnp.asarray(w, jnp.float32), xs[i], ys[i]) for i in range(int(n)))
    again = lambda t, xy: (t + jax.grad(loss)(jnp.asarray(w, jnp.float32), *xy), None)
    return true / lax.scan(again, 0.0, (xs, ys))[0]
"""
    yield (
        "accumulate_in_a_scan",
        "divided by another",
        (
            beside("accumulate_in_a_scan", two, "w", "a * b"),
            "program",
            f"The scan {NOTHING}",
        ),
    )
    number, other = OTHERWISE["weighted_mean"]
    yield (
        "weighted_mean",
        "one leaf of two",
        (
            beside("weighted_mean", other, number, '{"w": b["w"], "b": a["b"]}'),
            "program",
            f"{PART} scan",
        ),
    )


DECOYS: dict[str, dict[str, tuple[str, str, str]]] = {exercise.name: {} for exercise in COURSE.exercises}
for _name, _how, _found in _decoys():
    DECOYS[_name][_how] = _found
