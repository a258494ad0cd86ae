"""Checks the exact nesting, the gradient by finite differences, and that there is only one forward pass."""

import numpy as np

from anybatch.learn.check import Case, Check, Differences, Mistake, Same
from anybatch.learn.rules import matters, needs

FEATURES, HIDDEN, CLASSES = 3, 5, 4


def cases(rng):
    """Batches of one shape, since compiling is what takes time."""
    return [Case(arguments(rng, 8), "8 examples, 4 classes") for _ in range(4)]


def arguments(rng, examples):
    """Parameters, and a batch in which some examples are classified correctly, and no two logits nearly tie."""
    while True:
        params = {
            "hidden": layer(rng, FEATURES, HIDDEN),
            "out": layer(rng, HIDDEN, CLASSES),
        }
        x = rng.normal(size=(examples, FEATURES)).astype(np.float32)
        logits = forward(params, x)[1]
        second, best = np.sort(logits, axis=1)[:, -2:].T
        if np.min(best - second) > 1e-2:  # rounding could change the accuracy if two logits were nearly equal
            break
    y = np.where(rng.random(examples) < 0.5, np.argmax(logits, axis=1), rng.integers(0, CLASSES, examples))
    y[0] = np.argmax(logits[0])
    return params, x, y.astype(np.int32)


def layer(rng, inputs, outputs):
    """The parameters of one layer."""
    return {
        "b": rng.normal(0, 0.5, outputs).astype(np.float32),
        "w": rng.normal(0, 1, (inputs, outputs)).astype(np.float32),
    }


def forward(params, x):
    """The hidden layer and the logits."""
    hidden = np.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden, hidden @ params["out"]["w"] + params["out"]["b"]


def backward(params, x, from_logits):
    """The gradients of the parameters, from those of the logits."""
    hidden, _ = forward(params, x)
    from_hidden = (from_logits @ params["out"]["w"].T) * (1 - hidden**2)
    return {
        "hidden": {"b": from_hidden.sum(axis=0), "w": x.T @ from_hidden},
        "out": {"b": from_logits.sum(axis=0), "w": hidden.T @ from_logits},
    }


def log_softmax(logits, axis=1):
    """The logarithm of the probabilities."""
    shifted = logits - np.max(logits, axis=axis, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=axis, keepdims=True))


def reference(params, x, y):
    """Cross-entropy, its aux, and backpropagation by hand."""
    logits = forward(params, x)[1]
    right = np.arange(len(y)), y
    loss = -np.mean(log_softmax(logits)[right])
    from_logits = np.exp(log_softmax(logits)) / len(y)
    from_logits[right] -= 1 / len(y)
    aux = {"accuracy": np.mean(np.argmax(logits, axis=1) == y), "logits": logits}
    return (loss, aux), backward(params, x, from_logits)


def scaled(tree, factor):
    """A tree of dicts, times a number."""
    return {name: scaled(leaf, factor) for name, leaf in tree.items()} if isinstance(tree, dict) else tree * factor


def count_for_accuracy(params, x, y):
    """The number of correct examples."""
    (loss, aux), grads = reference(params, x, y)
    return (loss, aux | {"accuracy": aux["accuracy"] * len(y)}), grads


def times(factor):
    """The right answer with loss and gradients times a function of the number of examples."""

    def answer(params, x, y):
        (loss, aux), grads = reference(params, x, y)
        return (loss * factor(len(y)), aux), scaled(grads, factor(len(y)))

    return answer


def softmax_over_examples(params, x, y):
    """log_softmax along axis 0."""
    (_, aux), _ = reference(params, x, y)
    logits, right = aux["logits"], (np.arange(len(y)), y)
    from_logits = np.exp(log_softmax(logits, axis=0)) * np.bincount(y, minlength=CLASSES) / len(y)
    from_logits[right] -= 1 / len(y)
    return (-np.mean(log_softmax(logits, axis=0)[right]), aux), backward(params, x, from_logits)


def nested_as(arrange):
    """The right numbers in another nesting."""

    def answer(*args):
        (loss, aux), grads = reference(*args)
        return arrange(loss, aux, grads)

    return answer


MISTAKES = (
    Mistake(
        "the sum of the losses",
        times(lambda n: n),
        lambda params, x, y: (
            f"The loss is the sum over the {len(y)} examples; this exercise asks for the mean.\n"
            f"Its gradient is {len(y)} times too large as well."
        ),
    ),
    Mistake(
        "the log-likelihood",
        times(lambda n: -1),
        "The sign is wrong: this is the mean log-probability, which training should increase.\nThe loss is minus that.",
    ),
    Mistake(
        "a softmax over the examples",
        softmax_over_examples,
        "The softmax is over the examples; it has to be over the classes.\n"
        "The probabilities of each example must add up to 1: use axis=-1, the default of jax.nn.log_softmax.",
    ),
    Mistake(
        "a count for the accuracy",
        count_for_accuracy,
        "aux['accuracy'] counts the correct examples; this exercise asks for their fraction, a mean.",
    ),
    Mistake(
        "three things side by side",
        nested_as(lambda loss, aux, grads: (loss, aux, grads)),
        "You return a flat tuple (loss, aux, grads); the answer is nested, ((loss, aux), grads).\n"
        "JAX pairs what a function returns with its gradient. Return what jax.value_and_grad returns.",
    ),
    Mistake(
        "no aux",
        nested_as(lambda loss, aux, grads: (loss, grads)),
        "aux is missing; the answer is ((loss, aux), grads).\n"
        "With has_aux=True, the function that is differentiated returns a pair (loss, aux), and aux is passed through.",
    ),
    Mistake(
        "no loss",
        nested_as(lambda loss, aux, grads: (grads, aux)),
        "The loss is missing; the answer is ((loss, aux), grads).\njax.grad returns (grads, aux); "
        "jax.value_and_grad returns ((loss, aux), grads).",
    ),
)


def backwards(rng, args):
    """The last example first."""
    params, x, y = args
    return params, x[::-1].copy(), y[::-1].copy()


def rows_backwards(answer, args, changed):
    """The expected answer: the same loss and gradients, and the rows of the logits reversed."""
    (loss, aux), grads = answer
    return (loss, aux | {"logits": aux["logits"][::-1]}), grads


TWO_PASSES = (
    "The value is right, but the network runs more than once.\n"
    "{} The backward pass needs the forward pass anyway. Take loss and aux from that one: "
    "jax.value_and_grad(..., has_aux=True)."
)


def one_product_of_each_layer(program, args):
    """The forward pass must multiply by the weights of each layer only once, however tanh is written."""
    params, x, _ = args
    hidden = len(x) * HIDDEN
    layers = ((x.size, params["hidden"]["w"].size, hidden), (hidden, params["out"]["w"].size, len(x) * CLASSES))
    for given, weights, result in layers:
        found = [
            product
            for product in program.find("dot_general")
            if sorted(each.size for each in product.inputs) == sorted((given, weights))
            and product.outputs[0].size == result
        ]
        if len(found) > 1:
            return TWO_PASSES.format("The product with the weights of a layer occurs several times in the program.")
    return None


check = Check(
    function="value_aux_and_grad",
    parameters=("params", "x", "y"),
    cases=cases,
    reference=reference,
    mistakes=MISTAKES,
    same=(
        Same(
            "the order of the examples",
            backwards,
            rows_backwards,
            "Loss and gradients are means over the examples. Only the rows of the logits may change places.",
        ),
    ),
    differences=Differences(value=lambda answer: answer[0][0], gradient=lambda answer: answer[1]),
    # The derivative of tanh is computed from its value, so one pass has one tanh.
    program=(
        needs(
            "tanh",
            at_most=1,
            says=TWO_PASSES.format("Its tanh occurs several times in the program, or not at all."),
        ),
        one_product_of_each_layer,
        matters(
            "tanh",
            "Loss, logits and every gradient must come from one pass through the network: "
            "jax.value_and_grad(..., has_aux=True).",
            least=1e-3,
            but=(1,),  # the accuracy may stay the same
        ),
    ),
)
