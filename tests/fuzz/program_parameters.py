"""Random models: functions of a tree of parameters, used in every way and at every depth of nesting.

A `Block` is drawn for a number of features: a tree of parameters, many of them of equal shape, and a function of that
tree and of an array whose last axis is the features. It treats all other axes alike, so that a row of a batch comes out
as it would alone.
"""

import collections
import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Pair = collections.namedtuple("Pair", "left right")
Triple = collections.namedtuple("Triple", "query key value")
NAMES = "bias decay gain gate kernel norm out proj scale shift up weight".split()
POLICIES = jax.checkpoint_policies
MOST_DEPTH = 3


# Trees.


def tree_of(draw, count):
    """A function that makes a tree of a list of `count` leaves, in an order and with names that were drawn."""
    if count == 1 and draw.chance(0.6):
        return lambda leaves: leaves[0]
    if count > 2 and draw.chance(0.5):
        first = draw.randint(1, count - 1)
        parts = [tree_of(draw, first), tree_of(draw, count - first)]
        join = tree_of(draw, 2)
        return lambda leaves: join([parts[0](leaves[:first]), parts[1](leaves[first:])])
    kind = draw.choice(["dict", "dict", "dict", "list", "tuple", "named"])
    if kind == "dict":
        names = draw.sample(NAMES, count) if count <= len(NAMES) else [f"leaf {i}" for i in range(count)]
        return lambda leaves: dict(zip(names, leaves, strict=True))
    if kind == "named" and count in (2, 3):
        return lambda leaves: (Pair if count == 2 else Triple)(*leaves)
    return list if kind == "list" else tuple


class Tree:
    """A drawn structure of `count` leaves: `make(leaves)`, and `leaves(tree)` back in the order they were given."""

    def __init__(self, draw, count):
        self.make = tree_of(draw, count)
        self.places = jax.tree.leaves(self.make(list(range(count))))
        self.count = count

    def leaves(self, tree):
        found = dict(zip(self.places, jax.tree.leaves(tree), strict=True))
        return [found[place] for place in range(self.count)]


# Functions with derivatives of their own, which are not those of what they compute.


@jax.custom_jvp
def softsign(x):
    return x / (1.0 + jnp.abs(x))


softsign.defjvp(lambda primals, tangents: (softsign(*primals), 1.2 * tangents[0] / (1.0 + jnp.abs(primals[0])) ** 2))


@jax.custom_vjp
def scaled(h, w):
    return h * w


scaled.defvjp(lambda h, w: (h * w, (h, w)), lambda kept, g: (1.1 * g * kept[1], 0.9 * g * kept[0]))


@jax.custom_vjp
def passed_on(w):
    return w


passed_on.defvjp(lambda w: (w, None), lambda _, g: (1.5 * g,))


BACKWARDS_ONLY = set()


def with_own_backward_pass(fun):
    """Marks a function that JAX cannot differentiate forwards."""
    BACKWARDS_ONLY.add(fun)
    return fun


def custom_vjp_of(fun):
    """`fun`, with a backward pass that is given, and is right."""
    wrapped = jax.custom_vjp(lambda *args: fun(*args))
    wrapped.defvjp(lambda *args: jax.vjp(fun, *args), lambda pullback, g: pullback(g))
    return wrapped


def custom_jvp_of(fun):
    wrapped = jax.custom_jvp(lambda *args: fun(*args))
    wrapped.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
    return wrapped


def layer_norm(h, scale, shift):
    centred = h - jnp.mean(h, -1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 0.1) * scale + shift


jitted_norm = jax.jit(layer_norm)

# What is done with parameters: `fun(h, ...)` for the shapes that are written over it, of n features.

USES = {
    "": [
        lambda h, s: h * s,
        lambda h, s: h + s,
        lambda h, s: h * jax.nn.sigmoid(s),
        lambda h, s: jnp.where(s > 0, h, 0.5 * h + s),
        lambda h, s: h / (1.0 + s**2),
        lambda h, s: jnp.clip(h, -1.0, jax.nn.softplus(s)),
    ],
    "n": [
        lambda h, v: h + v,
        lambda h, v: h * v,
        lambda h, v: h + jax.nn.sigmoid(v) * jnp.tanh(h),
        lambda h, v: h * jax.nn.silu(v),
        lambda h, v: jax.nn.gelu(h + v),
        lambda h, v: h * jax.nn.softmax(v),
        lambda h, v: jnp.where(h > v, h, v),
        lambda h, v: jnp.maximum(h, v),
        lambda h, v: h * jnp.sort(v),
        lambda h, v: h + v[::-1],
        lambda h, v: h * v[0] + v[1],
        lambda h, v: jnp.concatenate([h[..., :1] * v[1:2], h[..., 1:] + v[1:]], -1),
        lambda h, v: h * jnp.concatenate([v[1:], v[:1]]),
        lambda h, v: h + lax.optimization_barrier(v),
        lambda h, v: h * lax.stop_gradient(v).astype(jnp.int32).astype(h.dtype) + v,
        lambda h, v: h * jnp.take(v, jnp.abs(lax.stop_gradient(4 * v)).astype(jnp.int32) % v.shape[0]),
        lambda h, v: h - lax.stop_gradient(v),
        lambda h, v: jnp.sum(h * v, -1, keepdims=True) * v,
        lambda h, v: h * jnp.cumsum(v),
        lambda h, v: h / (1.0 + jnp.exp(v)),
        lambda h, v: h * jnp.max(v) + jnp.min(v),
        lambda h, v: h * lax.dynamic_slice_in_dim(v, 1, 1),
        lambda h, v: h * softsign(v),
        with_own_backward_pass(lambda h, v: h * passed_on(v)),
        lambda h, v: h * jnp.linalg.norm(v),
        lambda h, v: h * v.at[0].set(0.3),
        lambda h, v: h + jnp.zeros_like(v).at[1].add(v[0]),
        lambda h, v: jax.vmap(lambda a: h * a)(v).sum(0),
        lambda h, v: jnp.sum(h[..., None] * jnp.diag(v), -2),
    ],
    "n n": [
        lambda h, a, b: h * a + b,
        lambda h, a, b: h + jax.nn.sigmoid(a) * jnp.tanh(h) * b,
        layer_norm,
        jitted_norm,
        lambda h, a, b: jnp.where(a > b, h * a, h + b),
        lambda h, a, b: h @ jnp.outer(a, b),
        with_own_backward_pass(lambda h, a, b: scaled(h, jnp.broadcast_to(a, h.shape)) + b),
        lambda h, a, b: h * jax.jit(jnp.multiply)(a, b),
        lambda h, a, b: jnp.hypot(h * a, b),
        lambda h, a, b: h * lax.optimization_barrier((a, b))[1] + a,
        lambda h, a, b: h * jnp.dot(a, b),
        lambda h, a, b: jax.nn.silu(h * a) * (h + b),
        lambda h, a, b: h @ jnp.stack([a, b]).T @ jnp.stack([b, a]),
        lambda h, a, b: h * lax.cond(jnp.sum(a) > jnp.sum(b), lambda: a, lambda: b),
        lambda h, a, b: h * lax.select(a > 0, a, b),
    ],
    "n,n": [
        lambda h, m: h @ m,
        lambda h, m: h @ m.T,
        lambda h, m: jnp.tanh(h @ m) @ m.T,
        lambda h, m: jax.nn.softmax(h @ m) @ m,
        lambda h, m: h * m[0] + m[1],
        lambda h, m: h @ m[1:].T @ m[:-1],
        lambda h, m: h * jnp.sum(m, 0),
        lambda h, m: h * jnp.mean(m, 1),
        lambda h, m: h + jnp.diagonal(m),
        lambda h, m: jnp.einsum("...i,ij,jk->...k", h, m, m),
        lambda h, m: h @ jnp.tril(m),
        lambda h, m: h @ jax.nn.softmax(m, -1),
        lambda h, m: h @ m.reshape(-1)[::-1].reshape(m.shape),
        lambda h, m: h @ jnp.concatenate(jnp.split(m, m.shape[0])[::-1]),
        lambda h, m: h @ (m / (1.0 + jnp.linalg.norm(m, axis=0, keepdims=True))),
        lambda h, m: h @ jnp.sort(m, 0),
        lambda h, m: h @ lax.optimization_barrier(m),
        with_own_backward_pass(lambda h, m: h @ passed_on(m)),
        lambda h, m: h @ jax.jit(jnp.transpose)(m),
        lambda h, m: lax.scan(lambda c, row: (jnp.tanh(c * row), None), h, m)[0],
        lambda h, m: lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c @ m), h),
        lambda h, m: lax.fori_loop(0, m.shape[0], lambda i, c: jnp.tanh(c * m[i]), h),
        lambda h, m: h @ jnp.where(m > 0, m, 0.1 * m),
        lambda h, m: h @ m.astype(jnp.float32).astype(h.dtype),
        lambda h, m: jax.checkpoint(lambda h, m: jnp.sin(h @ m))(h, m),
        lambda h, m: h @ (m @ m),
        lambda h, m: h @ jnp.linalg.solve(m + 4 * jnp.eye(m.shape[0]), m),
    ],
    "n,n n": [
        lambda h, m, b: h @ m + b,
        lambda h, m, b: jax.nn.relu(h @ m + b),
        lambda h, m, b: h @ (m * b),
        lambda h, m, b: h @ jnp.vstack([m, b])[1:],
        lambda h, m, b: jax.jit(lambda h, m, b: jax.nn.gelu(h @ m + b))(h, m, b),
        lambda h, m, b: h @ m.at[0].set(b),
    ],
    "n,n n,n": [
        lambda h, m, w: jax.nn.silu(h @ m) * (h @ w),
        lambda h, m, w: h @ m @ w.T,
        lambda h, m, w: h @ jnp.where(m > w, m, w),
        lambda h, m, w: h @ jax.jit(jnp.matmul)(m, w),
        lambda h, m, w: jax.nn.softmax(h @ m) @ w,
        lambda h, m, w: h @ (m + w) @ (m - w),
        lambda h, m, w: h @ jnp.concatenate([m[:1], w[1:]]),
    ],
    "n,f f,n": [
        lambda h, up, down: jax.nn.gelu(h @ up) @ down,
        lambda h, up, down: jnp.tanh(h @ up) @ up.T + h @ down.T @ down,
        lambda h, up, down: jax.jit(lambda h, up, down: jax.nn.relu(h @ up) @ down)(h, up, down),
    ],
    "n,f": [lambda h, up: jnp.tanh(h @ up) @ up.T, lambda h, up: h * jnp.sum(up, 1) + up[0, 0]],
    "f,n": [lambda h, down: jax.nn.softmax(h @ down.T) @ down, lambda h, down: h * down[0] + down[-1]],
    "0": [lambda h, empty: h + jnp.sum(empty)],
}

# What is made of parameters, and used as one more.

DERIVED = [
    lambda w: w + 1.0,
    lambda w: w + 1.0,
    lambda w: 1.0 - w,
    lambda w: 2.0 * w,
    lambda w: -w,
    jnp.tanh,
    jax.nn.sigmoid,
    jax.nn.silu,
    lambda w: w**3,
    lambda w: w.reshape(-1).reshape(w.shape),
    lambda w: w[None][0],
    lambda w: jax.jit(lambda w: w + 1.0)(w),
    lambda w: jax.jit(lambda w: w)(w),
    lambda w: w.astype(jnp.float32).astype(w.dtype),
    lambda w: lax.optimization_barrier(w),
    lambda w: lax.stop_gradient(w) + 0.5 * w,
    lambda w: jax.checkpoint(jnp.sin)(w),
    lambda w: softsign(w),
    with_own_backward_pass(lambda w: passed_on(w)),
    lambda w: jnp.where(w > 0, w, 0.2 * w),
    lambda w: w * jnp.arange(1.0, 1.0 + w.size).reshape(w.shape).astype(w.dtype) / max(w.size, 1),
    lambda w: lax.rev(w, tuple(range(w.ndim))),
    lambda w: jax.vmap(jnp.tanh)(w) if w.ndim else w,
    lambda w: jax.grad(lambda w: jnp.sum(jnp.sin(w)))(w),
    lambda w: jnp.concatenate([w[1:], w[:1]]) if w.ndim else w,
    lambda w: jnp.swapaxes(w, -1, -2) if w.ndim > 1 and w.shape[-1] == w.shape[-2] else w,
    lambda w: lax.broadcast_in_dim(w, w.shape, tuple(range(w.ndim))),
    lambda w: jnp.sort(w.reshape(-1)).reshape(w.shape),
    lambda w: lax.scan(lambda v, _: (jnp.sin(v), None), w, None, length=2)[0],
    lambda w: lax.scan(lambda s, row: (s, jnp.tanh(row)), 0.0, w)[1] if w.ndim else w,
]


class Body:
    """A few pieces in a row: a function of a list of arrays of the given shapes and of an array of features.

    Every piece takes the array through something that uses some of the others. A piece may contain a body.
    """

    def __init__(self, draw, shapes, width, depth=0, most=2):
        self.draw, self.width, self.depth = draw, width, depth
        self.shapes = list(shapes)
        self.lines = []
        self.pieces = []
        for _ in range(draw.randint(1, most)):
            if draw.chance(0.25) and self.shapes:
                self.derive()
            if draw.nested_left > 0 and depth < MOST_DEPTH and draw.chance(0.8 if depth == 0 else 0.4):
                draw.nested_left -= 1
                self.nested()
            else:
                self.use()

    def __call__(self, values, h):
        values = list(values)
        for piece in self.pieces:
            h = piece(values, h)
        return h

    def write(self, line, body=None):
        self.lines.append(line)
        self.lines.extend(f"    {inner}" for inner in (body.lines if body else []))

    def some_derivation(self):
        return self.draw.choice([which for which, fun in enumerate(DERIVED) if self.allows(fun)])

    def allows(self, fun):
        return fun not in BACKWARDS_ONLY or not self.draw.forwards

    def derive(self):
        index, which = self.draw.randrange(len(self.shapes)), self.some_derivation()

        def derived(values, h):
            values.append(DERIVED[which](values[index]))
            return h

        self.pieces.append(derived)
        self.write(f"v{len(self.shapes)} = derived {which} of v{index}")
        self.shapes.append(self.shapes[index])

    # One use of a parameter.

    def fits(self, pattern, shape):
        """Whether a shape is that of a pattern as `n,f`."""
        sizes = pattern.split(",") if pattern else []
        if pattern == "0":
            return 0 in shape
        return len(sizes) == len(shape) and all(
            size == self.width if letter == "n" else size not in (0, self.width)
            for letter, size in zip(sizes, shape, strict=True)
        )

    def use(self):
        draw = self.draw
        for _ in range(30):
            patterns = draw.choice(list(USES))
            picks, good = [], []
            for pattern in patterns.split(" ") if patterns else [""]:
                good = [i for i, shape in enumerate(self.shapes) if self.fits(pattern, shape)]
                if not good:
                    break
                picks.append(draw.choice(good))
            if patterns == "n,f f,n" and good and self.shapes[picks[0]][1] != self.shapes[picks[1]][0]:
                continue
            if good and len(picks) == len(patterns.split(" ") if patterns else [""]):
                break
        else:
            self.pieces.append(lambda values, h: jnp.sin(h))
            return self.write("h = sin(h)")
        most = 2 if draw.chance(0.4) else len(USES[patterns])  # Often one of the plainest, which come first.
        which = draw.choice([one for one, fun in enumerate(USES[patterns][:most]) if self.allows(fun)])
        fun = USES[patterns][which]
        residual = draw.chance(0.5)

        def used(values, h):
            made = fun(h, *(values[pick].astype(h.dtype) for pick in picks))
            return 0.5 * h + 0.5 * jnp.tanh(made) if residual else jnp.tanh(made)

        self.pieces.append(used)
        self.write(f"h = use {patterns!r} {which} of {', '.join(f'v{pick}' for pick in picks)}")

    # Functions inside.

    def nested(self):
        kinds = [
            *["scan"] * 8,
            *("jit", "jit", "remat", "remat", "custom_vjp", "custom_jvp"),
            *("cond", "switch", "fori", "vmap", "grad", "grad of parameters", "jvp", "map", "while", "unstacked"),
        ]
        getattr(self, "_" + self.draw.choice(kinds).replace(" ", "_"))()

    def some(self, most=4):
        """Indices of some of the arrays, one of them perhaps twice; and of those that are closed over."""
        draw, count = self.draw, len(self.shapes)
        passed = [draw.randrange(count) for _ in range(draw.randint(1, most))] if count else []
        passed = [*passed, passed[0]] if passed and draw.chance(0.3) else passed
        closed = [draw.randrange(count) for _ in range(draw.choice([0, 0, 1, 2]))] if count else []
        return passed, closed

    def inner(self, passed, closed, shapes=None, most=2):
        shapes = [self.shapes[index] for index in passed] if shapes is None else shapes
        shapes = [*shapes, *(self.shapes[index] for index in closed)]
        return Body(self.draw, shapes, self.width, self.depth + 1, most)

    def call(self, name, wrap, passes_h=True):
        """`wrap(fun)(tree, h)`, where `fun` is a body: some arrays come as a tree, some are closed over."""
        passed, closed = self.some()
        tree = Tree(self.draw, len(passed)) if passed else None
        body, again = self.inner(passed, closed), self.draw.chance(0.2)

        def piece(values, h):
            outside = [values[index] for index in closed]
            own = tree.make([values[index] for index in passed]) if passed else ()

            def fun(own, *given):
                x = given[0] if given else h
                return body([*(tree.leaves(own) if passed else []), *outside], x)

            wrapped = wrap(fun)
            given = (h,) if passes_h else ()
            made = wrapped(own, *given)
            return wrapped(own, made) if again and passes_h else made

        self.pieces.append(piece)
        self.write(f"h = {name}(passed {passed}, closed {closed}, twice {again})", body)

    def _jit(self):
        inline = self.draw.chance(0.1)
        self.call(f"jit inline={inline}", functools.partial(jax.jit, inline=inline), self.draw.chance(0.7))

    def _remat(self):
        policy = self.draw.choice([None, None, "dots_saveable", "nothing_saveable", "everything_saveable"])
        prevents = self.draw.chance(0.6)
        options = {"policy": policy and getattr(POLICIES, policy), "prevent_cse": prevents}
        self.call(f"remat {policy} {prevents}", functools.partial(jax.checkpoint, **options), self.draw.chance(0.7))

    def _custom_vjp(self):
        if self.draw.forwards:
            return self._custom_jvp()
        return self._custom("custom_vjp", custom_vjp_of)

    def _custom_jvp(self):
        with self.differentiated_forwards():
            self._custom("custom_jvp", custom_jvp_of)

    @contextlib.contextmanager
    def differentiated_forwards(self):
        """Inside, nothing is drawn that JAX can only differentiate backwards."""
        before, self.draw.forwards = self.draw.forwards, True
        yield
        self.draw.forwards = before

    def _custom(self, name, wrap):
        """Arguments only: nothing that is differentiated may be closed over."""
        passed, _ = self.some()
        tree = Tree(self.draw, len(passed)) if passed else None
        body = self.inner(passed, [])

        def piece(values, h):
            own = tree.make([values[index] for index in passed]) if passed else ()
            return wrap(lambda own, x: body(tree.leaves(own) if passed else [], x))(own, h)

        self.pieces.append(piece)
        self.write(f"h = {name}(passed {passed})", body)

    def _grad(self):
        """The gradient with respect to the features, which is differentiated once more."""

        def wrap(fun):
            return lambda own, h: 0.5 * h + 0.5 * jax.grad(lambda x: jnp.sum(fun(own, x)))(h)

        self.call("grad", wrap)

    def _jvp(self):
        """Moves the parameters along themselves."""

        def wrap(fun):
            return lambda own, h: jnp.tanh(h + jax.jvp(lambda own: fun(own, h), (own,), (own,))[1])

        with self.differentiated_forwards():
            self.call("jvp", wrap)

    def _grad_of_parameters(self):
        """At features that are no example, so that rows stay apart; it moves as many others as there are."""
        point = np.linspace(-0.5, 0.7, self.width)

        def wrap(fun):
            def stepped(own, h):
                grads = jax.grad(lambda own: jnp.sum(jnp.sin(fun(own, jnp.asarray(point, h.dtype)))))(own)
                return fun(jax.tree.map(lambda w, g: w - 0.3 * g, own, grads), h)

            return stepped

        self.call("grad of parameters", wrap)

    def predicate(self):
        """A function of the arrays and the features. Of the features only where they are those of one example."""
        limit, kind = self.draw.uniform(-0.3, 0.3), self.draw.choice(["parameter", "constant", "features"])
        if kind == "features" and self.draw.alone:
            return lambda values, h: jnp.sum(h) > limit
        if kind != "constant" and self.shapes:
            index = self.draw.randrange(len(self.shapes))
            return lambda values, h: jnp.sum(values[index].astype(jnp.float64)) > limit
        return lambda values, h: jnp.asarray(limit) > 0

    def _cond(self):
        self._branches(2)

    def _switch(self):
        self._branches(3)

    def _branches(self, number):
        passed, closed = self.some(most=3)
        bodies, predicate = [self.inner(passed, closed) for _ in range(number)], self.predicate()
        turned = self.draw.chance(0.3)  # the same arrays, in another order

        def piece(values, h):
            outside, own = [values[index] for index in closed], [values[index] for index in passed]
            branches = [lambda own, h, body=body: body([*own, *outside], h) for body in bodies]
            if number == 2:
                return lax.cond(predicate(values, h), branches[0], branches[1], own, h)
            return lax.switch(predicate(values, h).astype(jnp.int32) + int(turned), branches, own, h)

        self.pieces.append(piece)
        self.write(f"h = {number} branches(passed {passed}, closed {closed})", bodies[0])
        for body in bodies[1:]:
            self.write("or", body)

    def _fori(self):
        count, carries = self.draw.choice([1, 2, 3]), self.draw.chance(0.4)
        passed, closed = self.some(most=2)
        closed = closed or passed
        body = self.inner(passed, closed)

        def piece(values, h):
            outside, own = [values[index] for index in closed], [values[index] for index in passed]

            def step(i, state):
                moved, h = state
                return [jnp.tanh(w * 0.9) for w in moved] if carries else moved, body([*moved, *outside], h)

            if carries:
                return lax.fori_loop(0, count, step, (own, h))[1]
            return lax.fori_loop(0, count, lambda i, h: body([*own, *outside], h), h)

        self.pieces.append(piece)
        self.write(f"h = fori {count}(passed {passed}, closed {closed}, carries {carries})", body)

    def _while(self):
        """A while loop has no gradient backwards: it moves what is cut off from it."""
        passed, closed = self.some(most=2)
        body = self.inner(passed, closed)

        def piece(values, h):
            own = [lax.stop_gradient(values[index]) for index in (*passed, *closed)]
            start = lax.stop_gradient(h)
            made = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, body(own, s[1])), (0, start))[1]
            return h + 0.5 * made

        self.pieces.append(piece)
        self.write(f"h = while(passed {passed}, closed {closed})", body)

    # Stacks of parameters.

    def stacks(self, most=4):
        """Indices of arrays with equally many layers, one perhaps twice; and how many. None where there are none."""
        sizes = [shape[0] for shape in self.shapes if shape and shape[0]]
        if not sizes:
            return [], None
        length = self.draw.choice(sizes)
        good = [index for index, shape in enumerate(self.shapes) if shape and shape[0] == length]
        if self.draw.chance(0.6):  # Mostly each of them once, as in models.
            return self.draw.sample(good, min(len(good), self.draw.randint(1, most))), length
        return [self.draw.choice(good) for _ in range(self.draw.randint(1, most))], length

    def _scan(self):
        draw = self.draw
        stacked, length = self.stacks()
        if length is None or draw.chance(0.1):
            stacked, length = [], draw.choice([1, 2, 3])
        _, closed = self.some()
        made = [draw.chance(0.25) and self.some_derivation() for _ in stacked]  # what is scanned over is computed
        carried = [draw.randrange(len(self.shapes)) for _ in range(draw.choice([0, 0, 0, 1, 2]))] if self.shapes else []
        data = draw.chance(0.3)
        xs_shapes = [self.shapes[index][1:] for index in stacked] + ([(self.width,)] if data else [])
        tree = Tree(draw, len(xs_shapes)) if xs_shapes else None
        own = [*xs_shapes, *(self.shapes[index] for index in carried)]
        body = self.inner([], closed, own, most=3)
        moves, emits = draw.chance(0.6), draw.chance(0.3)
        options = {"reverse": draw.chance(0.25), "unroll": draw.choice([1, 1, 1, 2])}
        constant = np.random.default_rng(draw.randrange(1000)).uniform(0.5, 1.5, (length, self.width))
        remat = draw.choice([None, None, jax.checkpoint, jax.jit])

        def piece(values, h):
            outside = [values[index] for index in closed]
            pairs = zip(stacked, made, strict=True)
            xs = [values[i] if which is False else DERIVED[which](values[i]) for i, which in pairs]
            xs = [*xs, jnp.asarray(constant, h.dtype)] if data else xs

            def layer(carry, rows):
                h, moving = carry
                leaves = tree.leaves(rows) if tree else []
                h = body([*leaves, *moving, *outside], h)
                emitted = {"rows": h, "sum": [jnp.sum(leaf) for leaf in leaves]} if emits else None
                return (h, [jnp.tanh(w) for w in moving] if moves else moving), emitted

            start = (h, [values[index] for index in carried])
            layer = layer if remat is None else remat(layer)
            (h, moving), emitted = lax.scan(layer, start, tree.make(xs) if tree else None, length=length, **options)
            if emits:
                h = 0.5 * h + 0.3 * jnp.mean(emitted["rows"], 0)
                h = h + 0.1 * sum((jnp.sum(one).astype(h.dtype) for one in emitted["sum"]), jnp.zeros((), h.dtype))
            return h + 0.1 * sum((jnp.sum(w).astype(h.dtype) for w in moving), jnp.zeros((), h.dtype))

        self.pieces.append(piece)
        self.write(
            f"h = scan(xs {stacked}, computed {made}, data {data}, closed {closed}, carried {carried}, emits {emits}, "
            f"moves {moves}, {options}, layer {getattr(remat, '__name__', None)})",
            body,
        )

    def _mapped(self, name, mapped):
        """`mapped(fun)(tree of stacks)`, and the mean of the results."""
        stacked, length = self.stacks(most=3)
        if length is None:
            return self._jit()
        _, closed = self.some()
        tree = Tree(self.draw, len(stacked))
        body = self.inner([], closed, [self.shapes[index][1:] for index in stacked])

        def piece(values, h):
            outside = [values[index] for index in closed]
            own = tree.make([values[index] for index in stacked])
            return jnp.mean(mapped(lambda own: body([*tree.leaves(own), *outside], h), own), 0)

        self.pieces.append(piece)
        self.write(f"h = {name}(stacked {stacked}, closed {closed})", body)

    def _vmap(self):
        self._mapped("vmap", lambda fun, own: jax.vmap(fun)(own))

    def _map(self):
        self._mapped("map", lax.map)

    def _unstacked(self):
        """Layers in a Python loop, as `jax.tree.map(lambda w: w[i], params)` takes them apart."""
        stacked, length = self.stacks(most=3)
        if length is None:
            return self._jit()
        _, closed = self.some()
        body = self.inner([], closed, [self.shapes[index][1:] for index in stacked])
        wrap = self.draw.choice([lambda fun: fun, jax.jit, jax.checkpoint])

        def piece(values, h):
            outside = [values[index] for index in closed]
            layer = wrap(lambda own, outside, h: body([*own, *outside], h))
            for row in range(length):
                h = layer([values[index][row] for index in stacked], outside, h)
            return h

        self.pieces.append(piece)
        self.write(f"h = unstacked(stacked {stacked}, closed {closed})", body)


class Block:
    """A tree of parameters, and `block(tree, h)` with an array of the shape of `h`."""

    def __init__(self, draw, width, narrow=0.12):
        draw.nested_left = draw.choice([1, 2, 2, 3, 4])
        depth, wide = draw.choice([width, width, 2, 3, 1]), width + draw.choice([1, 2])
        # Many of equal shapes, so that a wrong order is not noticed by its shape.
        usual = [
            *[(depth, width)] * 5,
            *[(width,)] * 3,
            *[(width, width)] * 3,
            *[(depth, width, width)] * 2,
            *[(2, depth, width)] * 2,
            *[(), (depth,), (width, wide), (wide, width), (2, depth), (depth, wide, width)],
        ]
        likely = draw.sample(usual, 3)
        self.shapes = [draw.choice(likely if draw.chance(0.7) else usual) for _ in range(draw.randint(2, 7))]
        if draw.chance(0.05):
            self.shapes.append((0,))
        narrow = draw.chance(narrow)
        self.dtypes = [draw.choice(["float64", "float32", "bfloat16"] if narrow else ["float64"]) for _ in self.shapes]
        self.is_narrow = any(dtype != "float64" for dtype in self.dtypes)
        self.tree = Tree(draw, len(self.shapes))
        self.body = Body(draw, self.shapes, width, most=3)
        self.casts_first = draw.chance(0.5)
        self.weight_decay = draw.choice([None, None, None, "some", "all"])

    def __call__(self, tree, h):
        leaves = self.tree.leaves(tree)
        if self.casts_first:
            leaves = [leaf.astype(jnp.float64) for leaf in leaves]
        return self.body(leaves, h)

    def penalty(self, tree):
        """Of parameters alone."""
        leaves = [leaf.astype(jnp.float64) for leaf in jax.tree.leaves(tree)]
        if self.weight_decay is None:
            return jnp.zeros(())
        return 0.01 * sum(jnp.sum(leaf**2) for leaf in (leaves if self.weight_decay == "all" else leaves[:1]))

    def parameters(self, generator):
        """Random numbers, all of them different."""
        leaves = [
            jnp.asarray(0.7 * generator.standard_normal(shape), dtype)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        return self.tree.make(leaves)

    def __str__(self):
        kinds = [f"v{i}: {dtype}{shape}" for i, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True))]
        return "\n".join([f"  parameters {', '.join(kinds)}", *(f"    {line}" for line in self.body.lines)])
