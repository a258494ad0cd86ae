"""Random losses: a seed makes a program of a few operations, which must have one gradient at every microbatch size.

`python tests/programs.py SEED` prints the program of a seed and compares it.
"""

import collections
import dataclasses
import functools
import sys
import traceback
import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from cases.comparing import quick_jit
from fuzz.interpreter import results_of
from fuzz.program_indexing import INDEXING
from fuzz.program_operations import ARRAYS, Draw, clipped_gradient
from fuzz.program_structures import STRUCTURES

import anybatch as ab

OPERATIONS = [*ARRAYS, *INDEXING, *STRUCTURES]
LARGEST_VALUE, MOST_AXES = 400, 4
INPUTS = ["params", "params", "params", "batch", "batch", "labels", "key", "trees"]

TERMS = [
    lambda x: jnp.mean(jnp.tanh(x)),
    lambda x: 0.1 * jnp.sum(x**2),
    lambda x: jnp.mean(x),
    lambda x: jnp.sum(jnp.sin(x)) / (1.0 + jnp.sum(x > 0)),
]
HEADS = [
    lambda terms: sum(terms),
    lambda terms: terms[-1],
    lambda terms: terms[0] + jnp.sqrt(1 + terms[-1] ** 2),
    lambda terms: terms[-1] / (1.5 + jnp.tanh(terms[0])),
    lambda terms: terms[-1] * terms[0] + terms[1 % len(terms)],
    lambda terms: jnp.tanh(terms[-1]),
    lambda terms: jnp.sum(jnp.stack(terms)),
    lambda terms: jax.nn.logsumexp(jnp.stack(terms)),
    lambda terms: 1.0 / (1.0 + terms[-1] ** 2) + terms[0],
]


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation of a program: a function of values that came before."""

    name: str
    operands: tuple[int, ...]
    fun: Callable


def weighted(fun, seed):
    """Every element of the result gets a weight of its own: a sum over all of them would hide a wrong order."""

    def heavy(*values):
        result = fun(*values)
        return result * np.random.default_rng(seed).uniform(0.5, 1.5, result.shape)

    return heavy


class Program:
    """`loss(params, batch, key)`: three parameters, two arrays of examples and their labels, and a key.

    Some programs have blocks of a model in them, each with a tree of parameters of its own beside the three.
    The number of examples is 2 to 7. In half of the programs features come in that number too, so that a shape does
    not tell which axis is which.
    """

    def __init__(self, seed):
        self.seed = seed
        draw = self.draw = Draw(seed)
        draw.num_examples = self.num_examples = draw.choice([2, 3, 5, 5, 6, 6, 7])
        draw.boldness = draw.choice([0.05, 0.05, 0.6])
        draw.sizes = (2, 3, self.num_examples) if draw.chance(0.5) else (2, 3, 4)
        param_shapes = [(), *(self._shape(draw.choice([0, 1, 2, 2])) for _ in range(2))]
        batch_shapes = [(self.num_examples, *self._shape(draw.choice([0, 1, 1, 2]))) for _ in range(2)]
        self.input_shapes = [*param_shapes, *batch_shapes]
        self.named = {"labels": 5, "key": 6, "trees": 7}
        draw.blocks = []
        params, batch, key = self.arguments()
        self.values = [*(jax.typeof(leaf) for leaf in (*params[:3], *batch, key)), []]
        self.moving = {0, 1, 2, self.named["trees"]}  # what depends on the parameters
        self.steps: list[Step] = []
        self._build(draw)
        unused = set(range(len(INPUTS), len(self.values))).difference(*(step.operands for step in self.steps))
        picks = draw.sample(sorted(unused), min(3, len(unused))) or [0]  # So that few operations are for nothing.
        moving = self.moving - {self.named["trees"]}
        self.terms = [(draw.choice(TERMS), index) for index in [*picks, max(moving)]]
        self.head = draw.choice(HEADS)
        self.has_aux = draw.chance(0.4)
        self.aux = [self._pick(recent=True) for _ in range(3)] if self.has_aux else []
        self.microbatch_size = draw.randint(1, self.num_examples - 1)

    def _shape(self, num_axes):
        return tuple(self.draw.choice(self.draw.sizes) for _ in range(num_axes))

    def _build(self, draw):
        parameter = 0
        if draw.chance(0.15):  # Of parameters alone, and not linear: it must see the gradient of all examples at once.
            self._add("clipped gradient", clipped_gradient, (0,))
            parameter = len(INPUTS)
        for index in (3, 4):  # The examples move with a parameter, as the activations of a model do.
            if draw.chance(0.9):
                self._add("scaled by a parameter", lambda p, x: x * (1 + jnp.tanh(p)), (parameter, index))
        weights = [operation.weight for operation in OPERATIONS]
        length = draw.randint(3, 9) + len(self.steps)
        for _ in range(200):
            if len(self.steps) >= length:
                return
            (operation,) = draw.choices(OPERATIONS, weights)
            for _ in range(5):  # Few values suit a convolution; without a search it would hardly ever come up.
                operands = tuple(self._pick(recent=True) for _ in range(operation.operands))
                fun = operation.build(draw, *(self.values[index].shape for index in operands))
                if fun is None:
                    continue
                fun = weighted(fun, draw.randrange(1000)) if draw.chance(0.3) else fun
                if self._add(operation.name, fun, operands + tuple(self.named[name] for name in operation.needs)):
                    break

    def _pick(self, recent):
        """An index of a value; mostly one of the latest, so that programs become deep."""
        count = len(self.values)
        while True:
            far = not recent or self.draw.chance(0.25)
            index = self.draw.randrange(count) if far else count - 1 - int(self.draw.expovariate(0.35))
            if index >= 0 and index not in self.named.values():
                return index

    def _add(self, name, fun, operands):
        """Appends a step and returns True, unless its operands do not fit or its result is large."""
        self.values[self.named["trees"]] = jax.eval_shape(self._trees)
        try:
            value = jax.eval_shape(lambda *values: fun(*values), *(self.values[index] for index in operands))
        except (TypeError, ValueError):
            return False
        if np.prod(value.shape) > LARGEST_VALUE or len(value.shape) > MOST_AXES or 0 in value.shape:
            return False
        if self.moving.intersection(operands):
            self.moving.add(len(self.values))
        self.steps.append(Step(name, operands, fun))
        self.values.append(value)
        return True

    def _trees(self, generator=None):
        return [block.parameters(generator or np.random.default_rng(0)) for block in self.draw.blocks]

    def loss(self, params, batch, key):
        values, value = self._run(params, batch, key)
        return (value, [values[index] for index in self.aux]) if self.has_aux else value

    def outputs(self, params, batch, key):
        """A function with many outputs: the value, what all steps compute, and for every third seed the gradient."""
        values, value = self._run(params, batch, key)
        grads = []
        if self.seed % 3 == 0:
            grads = jax.grad(lambda params: self._run(params, batch, key)[1])(params)
        return {"grads": grads, "value": value, "values": values[len(INPUTS) :]}

    def _run(self, params, batch, key):
        values = [*params[:3], *batch, key, params[3]]
        for step in self.steps:
            values.append(step.fun(*(values[index] for index in step.operands)))
        return values, self.head([term(values[index]) for term, index in self.terms])

    def arguments(self, variant=0):
        generator = np.random.default_rng([self.seed, variant])
        arrays = [0.7 * generator.standard_normal(shape) for shape in self.input_shapes]
        labels = generator.integers(0, 3, self.num_examples)
        trees = jax.tree.map(np.asarray, self._trees(generator))
        return [*arrays[:3], trees], [*arrays[3:], labels], jax.random.key(self.seed % 1000)

    def __str__(self):
        lines = [f"program {self.seed}: {self.num_examples} examples, microbatches of {self.microbatch_size}"]
        for index, value in enumerate(self.values):
            step = self.steps[index - len(INPUTS)] if index >= len(INPUTS) else None
            origin = f"{step.name}({', '.join(f'v{i}' for i in step.operands)})" if step else INPUTS[index]
            lines.append(f"  v{index} = {origin}: {getattr(value, 'shape', '')}")
        lines += [str(block) for block in self.draw.blocks]
        terms = ", ".join(f"v{index} by {TERMS.index(term)}" for term, index in self.terms)
        return "\n".join([*lines, f"  head {HEADS.index(self.head)} of {terms}; aux: {self.aux}"])


@dataclasses.dataclass
class Outcome:
    """What became of one program: "same", "different", "refused", "crashed" or "not finite"."""

    kind: str
    text: str = ""
    warned: tuple[str, ...] = ()


def compare(program, value_and_grad=None, tolerance=1e-9):
    """The program's gradient, value and aux, microbatched and at once."""
    value_and_grad = value_and_grad or ab.value_and_grad
    full = jax.value_and_grad(program.loss, has_aux=program.has_aux)
    parts = value_and_grad(program.loss, has_aux=program.has_aux, microbatch_size=program.microbatch_size)
    # One program of both takes less time to compile than two.
    both = quick_jit(lambda *args: (full(*args), parts(*args)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            expected, actual = both(*program.arguments())
        except ab.AnybatchError as error:
            return Outcome("refused", str(error))
        except Exception:
            return Outcome("crashed", traceback.format_exc(limit=-12))
    warned = tuple(sorted({str(warning.message) for warning in caught}))
    error = difference(actual, expected)
    if error > tolerance:
        # In haste, XLA may compute the largest of some numbers twice, with different last digits, and find it nowhere.
        expected, actual = (jax.jit(fun)(*program.arguments()) for fun in (full, parts))
        error = difference(actual, expected)
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected)):
        return Outcome("not finite", warned=warned)
    # Where a decision hangs by the last digit of a number, the full batch itself changes with that digit.
    if error > tolerance and error > 100 * sensitivity(program, jax.jit(full), expected):
        return Outcome("different", f"by {error:.1e}", warned)
    return Outcome("same", warned=warned)


def compare_interpreted(program, tolerance=1e-9):
    """As `compare`, without XLA: both gradients are traced, and evaluated by an interpreter."""
    full = jax.value_and_grad(program.loss, has_aux=program.has_aux)
    parts = ab.value_and_grad(program.loss, has_aux=program.has_aux, microbatch_size=program.microbatch_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = results_of(full, *program.arguments())
        except Exception:
            return Outcome("invalid", traceback.format_exc(limit=-4))  # JAX itself has no gradient of it.
        try:
            actual = results_of(parts, *program.arguments())
        except ab.AnybatchError as error:
            return Outcome("refused", str(error))
        except Exception:
            return Outcome("crashed", traceback.format_exc(limit=-12))
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected)):
        return Outcome("not finite")
    error = difference(actual, expected)
    if error > tolerance and error > 100 * sensitivity(program, functools.partial(results_of, full), expected):
        return Outcome("different", f"by {error:.1e}")
    return Outcome("same")


def compare_mapped(program, compiled=False, tolerance=1e-9, **options):
    """The program's many outputs by `map_batch`, and at once: by an interpreter, or compiled by XLA."""
    mapped = ab.map_batch(program.outputs, microbatch_size=program.microbatch_size, **options)

    def run(fun, *arguments):
        return quick_jit(fun)(*arguments) if compiled else results_of(fun, *arguments)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = run(program.outputs, *program.arguments())
        except Exception:
            return Outcome("invalid", traceback.format_exc(limit=-4))  # JAX itself has no gradient of it.
        try:
            actual = run(mapped, *program.arguments())
        except ab.AnybatchError as error:
            return Outcome("refused", str(error))
        except Exception:
            return Outcome("crashed", traceback.format_exc(limit=-12))
    if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected)):
        return Outcome("not finite")

    def distance(actual, expected):
        # The gradient is one vector: a leaf of it may be zero up to rounding.
        (grads, *others), (full_grads, *full) = (
            (tree["grads"], *jax.tree.leaves(tree["values"])) for tree in (actual, expected)
        )
        return difference(((actual["value"], others), grads or [0.0]), ((expected["value"], full), full_grads or [0.0]))

    error = distance(actual, expected)
    if error > tolerance and error > 100 * sensitivity(
        program, functools.partial(run, program.outputs), expected, distance
    ):
        return Outcome("different", f"by {error:.1e}")
    return Outcome("same")


def difference(actual, expected):
    """The largest relative difference: of the gradient as one vector, of the value, and of every aux leaf."""

    def relative(one, other):
        one, other = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(x)]) for x in (one, other))
        return np.linalg.norm(one - other) / max(np.linalg.norm(other), 1e-5) if one.shape == other.shape else np.inf

    pairs = [(actual[1], expected[1]), *zip(*map(jax.tree.leaves, (actual[0], expected[0])), strict=True)]
    return max(float(np.nan_to_num(relative(one, other), nan=np.inf)) for one, other in pairs)


def sensitivity(program, full, expected, difference=difference):
    """How far the full batch's own result moves with the thirteenth digit of its inputs."""
    generator = np.random.default_rng(0)
    params, (*arrays, labels), key = program.arguments()

    def moved(arrays):
        return jax.tree.map(lambda x: x * (1 + 1e-13 * generator.standard_normal(x.shape)), arrays)

    return max(difference(full(moved(params), [*moved(arrays), labels], key), expected) for _ in range(4))


def survey(seeds, value_and_grad=None):
    """Compares the programs of the seeds. Returns how many became what, and the text of all that went wrong."""
    counts, wrong = collections.Counter(), []
    for number, seed in enumerate(seeds):
        program = Program(seed)
        outcome = compare(program, value_and_grad)
        counts[outcome.kind] += 1
        counts["warned"] += bool(outcome.warned)
        if number % 5 == 0 and outcome.kind == "same":  # Reading once more takes time; a sample is enough.
            reading = ab.read(program.loss, *program.arguments(), has_aux=program.has_aux)
            counts[f"{reading.passes} pass of a sample"] += 1
        if outcome.kind in ("different", "crashed"):
            wrong.append(f"{outcome.kind} {outcome.text}\n{program}")
        if number % 50 == 49:
            jax.clear_caches()  # Every program is compiled once and never again.
    return counts, wrong


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for seed in map(int, sys.argv[1:]):
        the_program = Program(seed)
        print(the_program, compare(the_program), sep="\n")
