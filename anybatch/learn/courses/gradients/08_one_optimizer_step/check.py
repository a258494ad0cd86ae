"""One step of SGD from two averaged gradients, of a linear model with the initial parameters that Flax draws."""

import functools

import numpy as np

from anybatch.learn.check import Case, Check, Mistake
from anybatch.learn.rules import matters


def cases(rng):
    """A float for a seed and an array for a learning rate: the other ways round are easier."""
    # One seed in a check, since each is a program of its own to compile. 2M and D differ, for the rule below.
    seed = float(rng.integers(1, 1000))
    for _ in range(2):
        x = rng.normal(size=(2, 4, 3)).astype(np.float32)
        # A line through the origin is far off, so that the step matters.
        y = (2 + x @ rng.normal(size=3) + rng.normal(size=(2, 4))).astype(np.float32)
        lr = np.float32(rng.uniform(0.1, 0.2))
        yield Case((seed, x, y, lr), f"seed {seed}, two microbatches of 4 examples with 3 numbers each, lr={lr:.3f}")


@functools.lru_cache
def initial(seed, columns, by_itself=False):
    """The draws of Flax: the weights, and a bias of 0. They depend on where in the module a layer stands."""
    import flax.linen as nn
    import jax

    class Linear(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x)

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        model = nn.Dense(1) if by_itself else Linear()
        variables = model.init(jax.random.PRNGKey(seed), np.zeros((1, columns), np.float32))["params"]
    layer = variables if by_itself else variables["Dense_0"]
    return np.append(np.asarray(layer["kernel"], np.float64)[:, 0], np.asarray(layer["bias"], np.float64))


def start(seed, x, **how):
    """The initial parameters for these inputs: weights, then the bias."""
    return initial(int(seed), x.shape[-1], **how)


def with_ones(x):
    """The inputs and a column of ones, all microbatches below each other."""
    x = x.reshape(-1, x.shape[-1])
    return np.column_stack([x, np.ones(len(x))])


def loss(params, x, y):
    """The mean squared error."""
    return np.mean((with_ones(x) @ params - y.reshape(-1)) ** 2)


def gradient(params, x, y):
    """That of the loss."""
    x = with_ones(x)
    return 2 * x.T @ (x @ params - y.reshape(-1)) / len(x)


def both(params, x, y):
    """The gradients of the two microbatches."""
    return gradient(params, x[0], y[0]), gradient(params, x[1], y[1])


def reference(seed, x, y, lr):
    """The loss after the step."""
    return stepped(seed, x, y, lr)


def stepped(seed, x, y, lr, factor=0.5, on=slice(None), **how):
    """With the sum of the gradients times a factor, and the loss of some microbatches."""
    params = start(seed, x, **how)
    return loss(params - lr * factor * sum(both(params, x, y)), x[on], y[on])[None]


def two_steps(seed, x, y, lr):
    """A step for each microbatch."""
    params = start(seed, x)
    for each_x, each_y in zip(x, y, strict=True):
        params = params - lr * gradient(params, each_x, each_y)
    return loss(params, x, y)[None]


def second_at_stepped(seed, x, y, lr):
    """The gradient of the second microbatch is taken after a step with the first."""
    params = start(seed, x)
    first = gradient(params, x[0], y[0])
    second = gradient(params - lr * first, x[1], y[1])
    return loss(params - lr * (first + second) / 2, x, y)[None]


def not_flattened(seed, x, y, lr):
    """Predictions (M, 1) less targets (M,): every prediction with every target."""

    def slopes(params, x, y):
        x = with_ones(x)
        return 2 * x.T @ (x @ params - np.mean(y)) / len(x)

    params = start(seed, x)
    params = params - lr * (slopes(params, x[0], y[0]) + slopes(params, x[1], y[1])) / 2
    return np.mean(((with_ones(x) @ params)[:, None] - y.reshape(-1)) ** 2)[None]


def two_gradients(program, args):
    """No gradient of the weights, D numbers, is contracted from all 2M examples at once."""
    x = args[1]
    for product in program.find("dot_general", "reduce_sum", "reduce", "cumsum"):
        if product.outputs[0].size == x.shape[-1] and product.size >= x.size:
            return (
                "You took one gradient of all examples at once.\n"
                "It is the same number, and that is the point of this exercise: take the gradient of each of the two "
                "microbatches, as if both together did not fit, and average them with jax.tree.map."
            )
    return None


derivatives_matter = matters(
    "jax.grad",
    "Take the gradient of each of the two microbatches, average them, and let apply_gradients take the step with that.",
    selects=[{"stack": "jvp"}],
    least=1e-3,
)


ONE = "The loss that is asked for is that of all 2M examples, x_batches.reshape(-1, D) and y_batches.reshape(-1)."

check = Check(
    function="grad_accumulation_step",
    parameters=("seed", "x_batches", "y_batches", "lr"),
    cases=cases,
    reference=reference,
    mistakes=(
        Mistake(
            "a step after each microbatch",
            two_steps,
            "You took a step after each microbatch; one step from both is asked for.\n"
            "Two steps with two small batches are another algorithm than one step with a large one. Take both "
            "gradients first, average them, and call apply_gradients once.",
        ),
        Mistake(
            "summed gradients",
            functools.partial(stepped, factor=1.0),
            "You added the two gradients; they are to be averaged.\n"
            "The loss is a mean. The sum of two such gradients is a step twice as long, as if lr were twice as large.",
        ),
        Mistake(
            "the loss before the step",
            lambda seed, x, y, lr: loss(start(seed, x), x, y)[None],
            "This is the loss before the step.\n"
            "apply_gradients changes nothing in place: it returns a new state. Compute the loss with its params.",
        ),
        Mistake(
            "the loss of the first microbatch",
            functools.partial(stepped, on=slice(0, 1)),
            f"This is the loss of the first microbatch alone.\n{ONE}",
        ),
        Mistake(
            "the loss of the second microbatch",
            functools.partial(stepped, on=slice(1, 2)),
            f"This is the loss of the second microbatch alone.\n{ONE}",
        ),
        Mistake(
            "the second gradient at moved parameters",
            second_at_stepped,
            "The gradient of the second microbatch is taken at parameters that have moved already.\n"
            "Take both at the initial parameters, state.params, before any apply_gradients; only then are they parts "
            "of one gradient.",
        ),
        Mistake(
            "predictions not flattened",
            not_flattened,
            "Every prediction is compared with every target: predictions have shape (M, 1), targets (M,), and their "
            "difference (M, M).\n"
            "Flatten the predictions before you subtract: model.apply(params, x).reshape(-1).",
        ),
        Mistake(
            "another seed",
            lambda seed, x, y, lr: stepped(0, x, y, lr),
            lambda seed, x, y, lr: (
                f"The initial parameters are those from PRNGKey(0); the seed is {int(seed)}.\n"
                "Draw them from jax.random.PRNGKey(int(seed))."
            ),
        ),
        Mistake(
            "a layer by itself",
            functools.partial(stepped, by_itself=True),
            "The initial parameters are those of nn.Dense(1) by itself; the layer inside Linear draws others.\n"
            "Flax derives the key of a layer from its place in the module. Initialise Linear(), as it is given.",
        ),
    ),
    program=(two_gradients, derivatives_matter),
)
