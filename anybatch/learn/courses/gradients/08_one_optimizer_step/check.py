"""Checks one step of SGD from two averaged gradients, of a linear model with Flax's initial parameters."""

import functools

import numpy as np

from anybatch.learn.check import Case, Check, Mistake
from anybatch.learn.rules import matters


def cases(rng):
    """The seed is a float and the learning rate an array, the harder types of each."""
    # One seed in each check, since every seed is another program to compile. 2M and D differ, for the rule below.
    seed = float(rng.integers(1, 1000))
    for _ in range(2):
        x = rng.normal(size=(2, 4, 3)).astype(np.float32)
        # Far from what the initial parameters predict, so that the step matters.
        y = (2 + x @ rng.normal(size=3) + rng.normal(size=(2, 4))).astype(np.float32)
        lr = np.float32(rng.uniform(0.1, 0.2))
        yield Case((seed, x, y, lr), f"seed {seed}, two microbatches of 4 examples with 3 numbers each, lr={lr:.3f}")


@functools.lru_cache
def initial(seed, columns, by_itself=False):
    """The initial weights that Flax draws, and a bias of 0. They depend on the layer's place in the module."""
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
    """The inputs of all microbatches, with a column of ones."""
    x = x.reshape(-1, x.shape[-1])
    return np.column_stack([x, np.ones(len(x))])


def loss(params, x, y):
    """The mean squared error."""
    return np.mean((with_ones(x) @ params - y.reshape(-1)) ** 2)


def gradient(params, x, y):
    """The gradient of the loss."""
    x = with_ones(x)
    return 2 * x.T @ (x @ params - y.reshape(-1)) / len(x)


def both(params, x, y):
    """The gradients of the two microbatches."""
    return gradient(params, x[0], y[0]), gradient(params, x[1], y[1])


def reference(seed, x, y, lr):
    """The loss after the step."""
    return stepped(seed, x, y, lr)


def stepped(seed, x, y, lr, factor=0.5, on=slice(None), **how):
    """The loss of some microbatches, after a step with a factor times the sum of the gradients."""
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
    """Predictions (M, 1) minus targets (M,): every prediction is compared with every target."""

    def slopes(params, x, y):
        x = with_ones(x)
        return 2 * x.T @ (x @ params - np.mean(y)) / len(x)

    params = start(seed, x)
    params = params - lr * (slopes(params, x[0], y[0]) + slopes(params, x[1], y[1])) / 2
    return np.mean(((with_ones(x) @ params)[:, None] - y.reshape(-1)) ** 2)[None]


def two_gradients(program, args):
    """No gradient of the weights, of D numbers, may be computed from all 2M examples at once."""
    x = args[1]
    for product in program.find("dot_general", "reduce_sum", "reduce", "cumsum"):
        if product.outputs[0].size == x.shape[-1] and product.size >= x.size:
            return (
                "You took one gradient of all examples at once.\n"
                "Its value is the same, but this exercise is about the case where both microbatches together do not "
                "fit into memory: take the gradient of each one, and average the two with jax.tree.map."
            )
    return None


derivatives_matter = matters(
    "jax.grad",
    "Take the gradient of each of the two microbatches, average them, and pass the average to apply_gradients.",
    selects=[{"stack": "jvp"}],
    least=1e-3,
)


ONE = "Compute the loss of all 2M examples, with x_batches.reshape(-1, D) and y_batches.reshape(-1)."

check = Check(
    function="grad_accumulation_step",
    parameters=("seed", "x_batches", "y_batches", "lr"),
    cases=cases,
    reference=reference,
    mistakes=(
        Mistake(
            "a step after each microbatch",
            two_steps,
            "You took a step after each microbatch; the exercise asks for one step from both.\n"
            "Two steps with small batches are not the same as one step with a large batch. Take both gradients first, "
            "average them, and call apply_gradients once.",
        ),
        Mistake(
            "summed gradients",
            functools.partial(stepped, factor=1.0),
            "You added the two gradients; average them instead.\n"
            "The loss is a mean. The sum of two such gradients gives a step twice as long, as if lr were doubled.",
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
            f"This is the loss of only the first microbatch.\n{ONE}",
        ),
        Mistake(
            "the loss of the second microbatch",
            functools.partial(stepped, on=slice(1, 2)),
            f"This is the loss of only the second microbatch.\n{ONE}",
        ),
        Mistake(
            "the second gradient at moved parameters",
            second_at_stepped,
            "The gradient of the second microbatch is taken after a step, at other parameters.\n"
            "Take both gradients at the initial parameters, state.params, before apply_gradients. Only then are they "
            "parts of one gradient.",
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
                f"The initial parameters come from PRNGKey(0); the seed is {int(seed)}.\n"
                "Draw them from jax.random.PRNGKey(int(seed))."
            ),
        ),
        Mistake(
            "a layer by itself",
            functools.partial(stepped, by_itself=True),
            "The initial parameters are those of nn.Dense(1) by itself; the layer inside Linear draws others.\n"
            "Flax derives the key of a layer from its place in the module. Initialise Linear().",
        ),
    ),
    program=(two_gradients, derivatives_matter),
)
