"""Random losses of models: a seed makes a tree of parameters, a model that uses them, and how anybatch is called.

`python tests/model_programs.py SEED` prints the program of a seed and compares it, interpreted and compiled.
"""

import functools
import sys
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from cases.meshes import mesh_of
from fuzz.interpreter import results_of
from fuzz.program_operations import Draw
from fuzz.program_parameters import Block
from fuzz.programs import Outcome, difference

import anybatch as ab

TOLERANCE = 1e-9
LOSSES = {
    "mean": jnp.mean,
    "sum": jnp.sum,
    "mean of squares": lambda each: jnp.mean(each**2),
    "sum over a number": lambda each: jnp.sum(each) / each.shape[0],
    "log of mean": lambda each: jnp.log(jnp.mean(jnp.exp(0.1 * each))),
    "mean and spread": lambda each: jnp.mean(each) + jnp.sqrt(jnp.mean((each - jnp.mean(each)) ** 2) + 0.1),
}


class ModelProgram:
    """`loss(params, batch)` and `options` for `ab.value_and_grad`."""

    def __init__(self, seed):
        self.seed = seed
        draw = self.draw = Draw(seed)
        self.num_examples = draw.choice([2, 3, 4, 5, 6, 7])
        self.width = draw.choice([2, 3, 3, 3, 4, self.num_examples])
        self.form = draw.choice(["batch", "batch", "vmap"])
        draw.alone = self.form == "vmap"
        self.block = Block(draw, self.width)
        self.tied = draw.choice([None, None, "embedding", "first parameter"])
        if self.tied == "first parameter" and (self.width, self.width) not in self.block.shapes:
            self.tied = "embedding"
        self.reduction = draw.choice(["mean"] * 5 + ["sum", "weighted"] + ["infer"] * 4)
        self.kind = draw.choice(list(LOSSES)) if self.reduction == "infer" else self.reduction
        self.masked = draw.chance(0.2) and self.reduction == "infer"
        self.classifies = draw.chance(0.4)
        self.has_aux = draw.chance(0.15) and self.reduction == "infer"
        self.microbatch_size = draw.randint(1, self.num_examples - 1) if draw.chance(0.95) else self.num_examples
        self.remat = draw.choice([None] * 24 + ["dots_saveable", "nothing_saveable", 0.25, 0.6, 1.0])

    @property
    def options(self):
        return {
            **{"microbatch_size": self.microbatch_size, "reduction": self.reduction, "has_aux": self.has_aux},
            "remat": self.remat,
        }

    def each(self, params, batch):
        """The losses of the examples."""
        tree, x, labels = params["model"], batch["x"], batch["label"]
        table = params.get("embedding")
        if self.tied == "first parameter":
            place = self.block.shapes.index((self.width, self.width))
            table = self.block.tree.leaves(tree)[place].astype(x.dtype)

        def features(tree, table, x, label):
            h = x if table is None else x + table[label % table.shape[0]]
            h = self.block(tree, h)
            return h if table is None else h @ table.T

        if self.form == "vmap":
            features = jax.vmap(features, in_axes=(None, None, 0, 0))
        h = features(tree, table, x, labels)
        if self.classifies:
            wanted = jnp.take_along_axis(h, labels[:, None] % h.shape[-1], 1)[:, 0]
            return jax.nn.logsumexp(h, -1) - wanted
        return jnp.sum(jnp.sin(h) * jnp.arange(1.0, 1.0 + h.shape[-1]), -1)

    def loss(self, params, batch):
        """What anybatch is given."""
        each = self.each(params, batch)
        if self.reduction == "weighted":
            return jnp.sum(each * batch["mask"]), jnp.sum(batch["mask"])
        if self.masked:
            value = jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])
        else:
            value = LOSSES[self.kind](each)
        if self.reduction != "sum":
            value = value + self.block.penalty(params["model"])
        return (value, {"each": each}) if self.has_aux else value

    def full_loss(self, params, batch):
        """What it stands for."""
        if self.reduction != "weighted":
            return self.loss(params, batch)
        total, weight = self.loss(params, batch)
        return total / weight

    def arguments(self):
        generator = np.random.default_rng(self.seed)
        params = {"model": self.block.parameters(generator)}
        if self.tied == "embedding":
            size = self.width if self.seed % 2 else self.width + 2
            params["embedding"] = 0.7 * generator.standard_normal((size, self.width))
        batch = {
            "x": 0.7 * generator.standard_normal((self.num_examples, self.width)),
            "label": generator.integers(0, 3, self.num_examples),
            "mask": generator.uniform(0.2, 1.0, self.num_examples),
        }
        return params, batch

    def __str__(self):
        first = (
            f"model {self.seed}: {self.num_examples} examples, {self.form}, {self.kind}, tied: {self.tied}, "
            f"masked: {self.masked}, classifies: {self.classifies}, casts first: {self.block.casts_first}, "
            f"weight decay: {self.block.weight_decay}, {self.options}"
        )
        return f"{first}\n{self.block}"


def interpreted(fun):
    return functools.partial(results_of, fun)


def compare_model(program, value_and_grad=None, run=interpreted, run_parts=None):
    """The gradient, value and aux, microbatched and at once. `run(fun)` is how a function is computed."""
    value_and_grad = value_and_grad or ab.value_and_grad
    args = program.arguments()
    full = jax.value_and_grad(program.full_loss, has_aux=program.has_aux)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            expected = run(full)(*args)
        except Exception:
            return Outcome("invalid", traceback.format_exc(limit=-4))  # JAX itself has no gradient of it.
        try:
            actual = (run_parts or run)(value_and_grad(program.loss, **program.options))(*args)
        except ab.AnybatchError as error:
            return Outcome("refused", str(error))
        except Exception:
            return Outcome("crashed", traceback.format_exc(limit=-12))
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected)):
            return Outcome("not finite")
        if jax.tree.structure(actual) != jax.tree.structure(expected):
            return Outcome("different", "in its tree")
        error = difference(actual, expected)
        if error > TOLERANCE and error > 100 * model_sensitivity(program, run(full), expected):
            return Outcome("different", f"by {error:.1e}: {where(actual, expected)}")
    # Warnings that JAX was found to be wrong, where the choice of what is written in place trusts it.
    messages = {str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)}
    warned = [message for message in messages if "does not add up" in message]
    return Outcome("same", warned=tuple(warned))


def where(actual, expected):
    """The leaves that are different."""
    got, want = (jax.tree_util.tree_leaves_with_path(tree) for tree in (actual, expected))
    return ", ".join(
        jax.tree_util.keystr(path)
        for (path, one), (_, other) in zip(got, want, strict=True)
        if np.shape(one) != np.shape(other) or not np.allclose(one, other, rtol=1e-7, atol=1e-9)
    )


def model_sensitivity(program, full, expected):
    """How far the full batch's own result moves with the thirteenth digit of its inputs."""
    generator = np.random.default_rng(0)

    def moved(x):
        return x * (1 + 1e-13 * generator.standard_normal(np.shape(x))) if x.dtype == np.float64 else x

    return max(difference(full(*jax.tree.map(moved, program.arguments())), expected) for _ in range(3))


def compare_compiled(program, devices=1):
    """As `compare_model`, compiled by XLA; with two devices, spread over a mesh."""
    full = jax.value_and_grad(program.full_loss, has_aux=program.has_aux)
    try:
        text = str(jax.make_jaxpr(full)(*program.arguments()))
    except Exception:
        return Outcome("invalid")
    if program.block.is_narrow or "f32[" in text:
        return Outcome("narrow")  # There roundings are those of the narrow dtypes.
    gradient = ab.value_and_grad
    if devices > 1:
        gradient = functools.partial(gradient, mesh=mesh_of(devices))
    outcome = compare_model(program, gradient, jax.jit, (lambda fun: fun) if program.seed % 3 == 0 else jax.jit)
    if outcome.kind != "same":
        return outcome
    error = difference(results_of(full, *program.arguments()), jax.jit(full)(*program.arguments()))
    return outcome if error <= TOLERANCE else Outcome("different", f"interpreted, by {error:.1e}")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for seed in map(int, sys.argv[1:]):
        the_program = ModelProgram(seed)
        print(the_program, compare_model(the_program), compare_compiled(the_program), sep="\n")
