"""A case of the tables of losses whose reduction is inferred, and the problems they are tried on."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

NUM_EXAMPLES = 12


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss as its author would write it: nothing in it is declared, and `jax.value_and_grad` takes it as it is.

    Attributes:
        name: The name of the function.
        loss: `loss(params, batch, *rest)`.
        make: `make(num_examples)` gives the arguments of the loss.
        passes: How often the examples are visited: 1, or 2 where the gradient of an example depends on the others.
        has_aux: The loss returns `(value, aux)`.
        batch_argnums: Which arguments are cut.
        num_examples: The only number of examples it can be tried on, where the function closes over an array.
        moves: False where the gradient is zero, and is meant to be.
    """

    name: str
    loss: Callable[..., Any]
    make: Callable[[int], tuple]
    passes: int
    has_aux: bool = False
    batch_argnums: int | tuple[int, ...] = 1
    num_examples: int | None = None
    moves: bool = True


class Table(list[Case]):
    """Cases, in the order in which they are written down."""

    def case(self, passes, make=None, **options):
        """Adds the decorated loss to the table."""

        def add(loss):
            self.append(Case(loss.__name__, loss, make or labelled_rows, passes, **options))
            return loss

        return add


def normal(generator, *shape):
    return generator.standard_normal(shape)


def mlp(generator):
    return {"w": normal(generator, 4, 3), "b": 0.1 * normal(generator, 3), "out": normal(generator, 3)}


def labelled_rows(num_examples):
    """A small network, and rows with a target, a label, a mask and a weight."""
    generator = np.random.default_rng(num_examples)
    batch = {
        "x": normal(generator, num_examples, 4),
        "y": normal(generator, num_examples),
        "label": generator.integers(0, 3, num_examples),
        "mask": np.arange(num_examples) % 3 != 1,
        "weight": generator.uniform(0.1, 2.0, num_examples),
    }
    return mlp(generator), batch


def with_key(make):
    """The same problem, and a key as third argument."""

    def made(num_examples):
        import jax

        return *make(num_examples), jax.random.key(num_examples)

    return made


def sentences(num_examples):
    """Sentences of unequal length: a mean over tokens is no mean over examples."""
    generator = np.random.default_rng(num_examples)
    lengths = generator.integers(1, 6, (num_examples, 1))
    batch = {"tokens": generator.integers(0, 7, (num_examples, 5)), "mask": np.arange(5)[None] < lengths}
    return {"embedding": normal(generator, 7, 3), "mix": 0.5 * normal(generator, 3, 3)}, batch


def views(num_examples):
    """Two views of every example, and two encoders."""
    generator = np.random.default_rng(num_examples)
    params = {"image": normal(generator, 4, 3), "text": normal(generator, 5, 3), "scale": np.asarray(0.3)}
    return params, {"image": normal(generator, num_examples, 4), "text": normal(generator, num_examples, 5)}


def square(num_examples):
    """As many features as examples, so that a shape does not tell which axis is which."""
    generator = np.random.default_rng(num_examples)
    params = {"w": 0.5 * normal(generator, num_examples, num_examples), "b": normal(generator, num_examples)}
    return params, {"x": normal(generator, num_examples, num_examples), "y": normal(generator, num_examples)}


def images(num_examples):
    generator = np.random.default_rng(num_examples)
    params = {"kernel": normal(generator, 3, 3, 2, 3), "out": normal(generator, 3)}
    return params, {"x": normal(generator, num_examples, 5, 5, 2), "y": normal(generator, num_examples)}


def sequences(num_examples):
    generator = np.random.default_rng(num_examples)
    params = {"in": normal(generator, 3, 4), "step": 0.5 * normal(generator, 4, 4), "out": normal(generator, 4)}
    return params, {"x": normal(generator, num_examples, 6, 3), "y": normal(generator, num_examples)}
