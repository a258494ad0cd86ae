"""The ways to call a candidate: a function that returns gradients, or a training step.

A `Form` says what the candidate is called with (its *subject*), which numbers of its result are compared, and what
these numbers would be for a given gradient. `Subject` holds what it is called with as a list of arrays, so that it can
be copied, cast to float64 and traced.
"""

import abc
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.call.checks import describe, is_array, is_key, named_leaves
from anybatch.call.models import combined, frozen, has_nnx, trainable
from anybatch.errors import InputError
from anybatch.verification.comparison import wide


class Observation(NamedTuple):
    """The numbers of a candidate's result that are compared: a pytree of arrays."""

    leaves: list[Any]  # of the gradient; of a step, the changes of the parameters and the optimizer's new state
    value: Any = None  # the loss, if it was returned
    aux: Any = None  # the leaves of aux, if it was returned


class Packed:
    """A pytree, an NNX object or a dataclass as a list of arrays, and the way back."""

    def __init__(self, tree: Any) -> None:
        self._rebuild: Callable[[list[Any]], Any]
        if has_nnx(tree):
            nnx = sys.modules["flax.nnx"]
            definition, state = nnx.split(tree)
            leaves, structure = jax.tree.flatten(state)
            self._rebuild = lambda found: nnx.merge(definition, jax.tree.unflatten(structure, found))
        elif _is_plain_dataclass(tree):
            fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
            leaves, structure = jax.tree.flatten(fields)
            self._rebuild = lambda found: dataclasses.replace(tree, **jax.tree.unflatten(structure, found))
        else:
            leaves, structure = jax.tree.flatten(tree)
            self._rebuild = lambda found: jax.tree.unflatten(structure, found)
        self._leaves = leaves
        self.arrays = [leaf for leaf in leaves if is_array(leaf)]

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """The tree with other arrays. What is not an array stays."""
        supply = iter(arrays)
        return self._rebuild([next(supply) if is_array(leaf) else leaf for leaf in self._leaves])


def _is_plain_dataclass(tree: Any) -> bool:
    """True for a dataclass that is no pytree."""
    structure: Any = jax.tree.structure(tree)
    is_leaf = structure == jax.tree.structure(0)
    return is_leaf and dataclasses.is_dataclass(tree) and not isinstance(tree, type)


class Inputs(NamedTuple):
    """The arrays that a candidate is called with. It is a pytree."""

    subject: list[Any]
    batch: list[Any]
    args: list[Any]

    def copied(self) -> "Inputs":
        """Copies, which the candidate may donate."""
        return Inputs(*(list(map(_copied, arrays)) for arrays in self))

    def widened(self) -> "Inputs":
        """The same in double precision. Needs x64."""
        return Inputs(*(list(map(_widened, arrays)) for arrays in self))

    def rows(self, rows: Any) -> "Inputs":
        """The same with these rows of the batch."""
        return self._replace(batch=[leaf[rows] for leaf in self.batch])

    def with_keys(self, change: Callable[[Any], Any]) -> "Inputs":
        """The same with other PRNG keys."""
        subject = [change(leaf) if is_typed_key(leaf) else leaf for leaf in self.subject]
        return self._replace(subject=subject, args=[change(leaf) if is_key(leaf) else leaf for leaf in self.args])


def is_typed_key(leaf: Any) -> bool:
    """True for `jax.random.key(0)`; False for an array of integers that may be something else."""
    return is_key(leaf) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        bits = jnp.copy(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def _widened(leaf: Any) -> Any:
    if not jax.dtypes.issubdtype(leaf.dtype, np.inexact):
        return leaf
    return leaf.astype(wide(leaf.dtype))


class Candidate:
    """A candidate with what it is called with, as a function of arrays."""

    def __init__(self, form: "Form", subject: Any, batch: Any, args: tuple[Any, ...], size: int | None) -> None:
        """`size` is that of the microbatches, if the candidate is called for each of them; else None."""
        self.form, self.size = form, size
        self.packed = [Packed(subject), Packed(batch), Packed(args)]
        self.inputs = Inputs(*(packed.arrays for packed in self.packed))

    def __call__(self, *inputs: list[Any]) -> Observation:
        """Calls the candidate with these arrays: those of an `Inputs`."""
        subject, batch, args = (packed.rebuild(arrays) for packed, arrays in zip(self.packed, inputs, strict=True))
        before = list(map(_copied, self.form.trained(subject)))  # the candidate may donate them
        if self.size is None:
            return self.form.observe(before, *self.form.call(subject, batch, args))
        result = None
        for number, start in enumerate(range(0, len(inputs[1][0]), self.size)):
            microbatch = self.packed[1].rebuild([leaf[start : start + self.size] for leaf in inputs[1]])
            keys = Inputs([], [], inputs[2]).with_keys(functools.partial(_fold_in, number=number)).args
            subject, result = self.form.call(subject, microbatch, self.packed[2].rebuild(keys))
        return self.form.observe(before, subject, result)

    def predict(self, subject: list[Any], gradient: Sequence[Any]) -> Observation:
        """What a step should give for this gradient of the full batch."""
        assert isinstance(self.form, StepForm)
        return self.form.predict(self.packed[0].rebuild(subject), gradient)


def _fold_in(key: Any, number: int) -> Any:
    return jax.random.fold_in(key, number)


class Form(abc.ABC):
    """How a candidate is called, and what of its result is compared.

    Attributes:
      names: of the leaves that are compared.
      is_step: True if the candidate updates parameters; False if it returns their gradient.
      notes: what the user should know about the comparison.
      aux_names: of the leaves of aux in the last result.
    """

    is_step = True
    names: list[str]

    def __init__(self, candidate: Callable[..., Any], trained: Any, name: str) -> None:
        self.candidate, self.name = candidate, name
        self.gradient_tree: Any = jax.tree.structure(trained)
        self.shapes = [np.shape(leaf) for leaf in jax.tree.leaves(trained)]
        self.parameter_names = [path for path, _ in named_leaves(name, trained)]
        self.notes: list[str] = []
        self.aux_names: list[str] = []

    @abc.abstractmethod
    def call(self, subject: Any, batch: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        """Calls the candidate. Returns the subject for the next call, and what it returned."""

    @abc.abstractmethod
    def observe(self, before: list[Any], after: Any, result: Any) -> Observation:
        """What is compared, of a candidate that left a subject with `trained` leaves and returned `result`."""

    def trained(self, subject: Any) -> list[Any]:
        """The leaves of the parameters that are trained. They are needed for a step only."""
        return []


class GradientForm(Form):
    """A candidate that returns gradients: `grads`, `(value, grads)` or `((value, aux), grads)`."""

    is_step = False

    def __init__(self, candidate: Callable[..., Any], trained: Any, name: str, *, has_aux: bool) -> None:
        super().__init__(candidate, trained, name)
        self.has_aux = has_aux
        self.names = self.parameter_names

    def call(self, subject: Any, batch: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        return subject, self.candidate(subject, batch, *args)

    def observe(self, before: list[Any], after: Any, result: Any) -> Observation:
        gradient, beside = self._read(result)
        value, aux = beside if self.has_aux and _is_pair(beside) else (beside, None)
        is_number = (is_array(value) and np.shape(value) == ()) or isinstance(value, float)
        named = [] if aux is None else named_leaves("aux", aux)
        self.aux_names = [name for name, _ in named]
        aux_leaves = None if aux is None else [leaf for _, leaf in named]
        return Observation(jax.tree.leaves(gradient), value if is_number else None, aux_leaves)

    def _read(self, result: Any) -> tuple[Any, Any]:
        """The gradient, and what stands beside it: the value, or a pair of the value and aux."""
        if self._is_gradient(result):
            return result, None
        if _is_pair(result) and self._is_gradient(result[1]) and _is_value(result[0]):
            return result[1], result[0]
        if _is_pair(result) and self._is_gradient(result[0]) and _is_value(result[1]):
            return result[0], result[1]
        raise self._unreadable(result)

    def _is_gradient(self, tree: Any) -> bool:
        leaves = jax.tree.leaves(tree)
        if [np.shape(leaf) for leaf in leaves] != self.shapes:
            return False
        # Libraries return dicts for their own types of dicts. A tuple may be a value and a gradient.
        return self.gradient_tree == jax.tree.structure(tree) or (len(leaves) > 1 and type(tree) is not tuple)

    def _unreadable(self, result: Any) -> InputError:
        """The error for a result without a gradient. It names the first leaf that is missing or has another shape."""
        tree = result[1] if _is_pair(result) else result
        found = dict(named_leaves(self.name, tree))
        shapes = dict(zip(self.parameter_names, self.shapes, strict=True))
        wrong = [name for name, shape in shapes.items() if name not in found or np.shape(found[name]) != shape]
        name = wrong[0] if wrong else self.parameter_names[0]
        leaf = found.get(name)
        got = describe(leaf) if is_array(leaf) else "no array"
        return InputError(
            "The candidate must return grads, (value, grads) or ((value, aux), grads), where grads is a tree like "
            f"{self.name}",
            given=f"{got} for {name} of shape {shapes[name]}",
            remedy="Return the gradient, e.g. return value, grads. For a training step, pass optimizer= or state=.",
        )


def _is_pair(tree: Any) -> bool:
    return isinstance(tree, (tuple, list)) and len(tree) == 2


def _is_value(tree: Any) -> bool:
    """True for a number, or a pair of a number and aux."""
    first = tree[0] if _is_pair(tree) else tree
    return (is_array(first) or isinstance(first, (int, float))) and np.shape(first) == ()


class StepForm(Form):
    """A candidate that updates parameters. `trained` and `optimizer_state` say where a subject has its numbers."""

    def __init__(self, candidate: Callable[..., Any], trained: Any, name: str, subject: Any) -> None:
        super().__init__(candidate, trained, name)
        state = named_leaves("opt_state", self.optimizer_state(subject))
        self.state_names = [path for path, leaf in state if is_array(leaf)]
        self.names = [*self.parameter_names, *self.state_names]

    @abc.abstractmethod
    def optimizer_state(self, subject: Any) -> Any:
        """The state of the optimizer, as the reference has it."""

    @abc.abstractmethod
    def apply(self, subject: Any, gradient: Sequence[Any]) -> Any:
        """The subject after one update with this gradient."""

    def observe(self, before: list[Any], after: Any, result: Any) -> Observation:
        new = self.trained(after)
        if [np.shape(leaf) for leaf in new] != self.shapes:
            raise InputError(
                "The candidate must return parameters of the shapes that it was given",
                given=", ".join(map(str, (np.shape(leaf) for leaf in new))) or "none",
                remedy="Return (new_params, new_opt_state, ...), or with state= the new state.",
            )
        changes = [
            jnp.asarray(b) - jnp.asarray(a).astype(jnp.asarray(b).dtype) for a, b in zip(before, new, strict=True)
        ]
        return Observation([*changes, *self.state_leaves(after)])

    def state_leaves(self, subject: Any) -> list[Any]:
        """The arrays of the optimizer's state."""
        return [leaf for leaf in jax.tree.leaves(self.optimizer_state(subject)) if is_array(leaf)]

    def predict(self, subject: Any, gradient: Sequence[Any]) -> Observation:
        """What would be compared if the update were made with this gradient."""
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            before = self.trained(subject)  # first, since an NNX model is changed in place
            return self.observe(before, self.apply(subject, gradient), None)


class OptimizerForm(StepForm):
    """A candidate `candidate(params, opt_state, batch)` that returns `(new_params, new_opt_state, ...)`."""

    def __init__(
        self, candidate: Callable[..., Any], trained: Any, name: str, subject: Any, optimizer: Any, reference: Any
    ) -> None:
        self.optimizer = reference or inner_optimizer(optimizer) or optimizer
        self.compares_state = True
        if reference is not None:
            wanted: Any = jax.tree.structure(jax.eval_shape(reference.init, trainable(subject[0])))
            self.compares_state = wanted == jax.tree.structure(_inner_state(subject[1]))
        super().__init__(candidate, trained, name, subject)
        if not self.compares_state:
            self.notes.append("The states of the two optimizers have different trees. Only parameters are compared.")

    def call(self, subject: Any, batch: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        result = self.candidate(*subject, batch, *args)
        if not isinstance(result, (tuple, list)) or len(result) < 2:
            raise InputError(
                "With optimizer=, the candidate must return (new_params, new_opt_state, ...)",
                given=f"a {type(result).__name__}",
                remedy="Return both, or leave optimizer out if the candidate returns gradients.",
            )
        for name, old, new in zip(("new_params", "new_opt_state"), subject, result[:2], strict=True):
            _check_tree(name, old, new, "Return (new_params, new_opt_state, ...), or leave optimizer out.")
        return tuple(result[:2]), result

    def trained(self, subject: Any) -> list[Any]:
        return jax.tree.leaves(trainable(subject[0]))

    def optimizer_state(self, subject: Any) -> Any:
        return _inner_state(subject[1]) if self.compares_state else ()

    def apply(self, subject: Any, gradient: Sequence[Any]) -> Any:
        params, opt_state = subject
        opt_state = _inner_state(opt_state) if self.compares_state else self.optimizer.init(trainable(params))
        return _updated(self.optimizer, params, opt_state, jax.tree.unflatten(self.gradient_tree, gradient))


class StateForm(StepForm):
    """A candidate `candidate(state, batch)` for a state with `params` and `opt_state`: attributes, or keys of a dict.

    It returns the new state, or a tuple whose first entry is the new state.
    """

    def __init__(
        self, candidate: Callable[..., Any], trained: Any, name: str, subject: Any, optimizer: Any, reference: Any
    ) -> None:
        own = getattr(subject, "tx", None)
        self.applies = own is not None and optimizer is None and reference is None
        self.applies = self.applies and hasattr(subject, "apply_gradients") and inner_optimizer(own) is None
        optimizer = own if optimizer is None else optimizer
        if optimizer is None:
            raise InputError(
                "A state without an optimizer of its own needs one, for the update that the step should make",
                given=f"state of type {type(subject).__name__}",
                remedy="Pass the optimizer that the step uses, e.g. optimizer=optax.adamw(3e-4).",
            )
        self.optimizer = reference or inner_optimizer(optimizer) or optimizer
        super().__init__(candidate, trained, name, subject)

    def call(self, subject: Any, batch: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        result = self.candidate(subject, batch, *args)
        is_plain_tuple = type(result) is tuple or (isinstance(result, list) and not isinstance(subject, list))
        after = result[0] if is_plain_tuple and result and type(subject) is not tuple else result
        if type(after) is not type(subject):
            raise InputError(
                "With state=, the candidate must return the new state, or a tuple whose first entry is the new state",
                given=f"a {type(after).__name__} for a {type(subject).__name__}",
                remedy="Return state, or (state, metrics).",
            )
        _check_tree("the parameters", _part(subject, "params"), _part(after, "params"), "Return the new state.")
        return after, result

    def trained(self, subject: Any) -> list[Any]:
        return jax.tree.leaves(trainable(_part(subject, "params")))

    def optimizer_state(self, subject: Any) -> Any:
        return _inner_state(_part(subject, "opt_state"))

    def apply(self, subject: Any, gradient: Sequence[Any]) -> Any:
        tree = jax.tree.unflatten(self.gradient_tree, gradient)
        if self.applies:
            return subject.apply_gradients(grads=tree)
        params, opt_state = _updated(self.optimizer, _part(subject, "params"), self.optimizer_state(subject), tree)
        return {"params": params, "opt_state": opt_state}


class NnxForm(StepForm):
    """A candidate that changes an NNX model and its optimizer in place.

    It is called as `candidate(model, optimizer, batch)`; for a pair `(model, optimizer)` as a state, or for an
    `nnx.ModelAndOptimizer`, as `candidate(state, batch)`.
    """

    def __init__(self, candidate: Callable[..., Any], trained: Any, name: str, subject: Any, how: str) -> None:
        self.how = how  # "model, optimizer", "pair" or "both"
        super().__init__(candidate, trained, name, subject)

    def call(self, subject: Any, batch: Any, args: tuple[Any, ...]) -> tuple[Any, Any]:
        if self.how == "model, optimizer":
            return subject, self.candidate(*subject, batch, *args)
        state = subject[1] if self.how == "both" else subject
        return subject, self.candidate(state, batch, *args)

    def trained(self, subject: Any) -> list[Any]:
        if isinstance(subject, _Updated):
            return jax.tree.leaves(subject.params)
        model, optimizer = subject
        return jax.tree.leaves(_pure(model, optimizer.wrt))

    def optimizer_state(self, subject: Any) -> Any:
        opt_state = subject.opt_state if isinstance(subject, _Updated) else _pure(subject[1].opt_state)
        return _inner_state(opt_state)

    def apply(self, subject: Any, gradient: Sequence[Any]) -> Any:
        if isinstance(subject, _Updated):
            optimizer, params = subject.optimizer, subject.params
        else:
            model, nnx_optimizer = subject
            optimizer, params = nnx_optimizer.tx, _pure(model, nnx_optimizer.wrt)
            optimizer = inner_optimizer(optimizer) or optimizer
        tree = jax.tree.unflatten(jax.tree.structure(params), gradient)
        return _Updated(*_updated(optimizer, params, self.optimizer_state(subject), tree), optimizer)


class _Updated(NamedTuple):
    """An NNX model and its optimizer after an update, without the objects."""

    params: Any
    opt_state: Any
    optimizer: Any


def _pure(tree: Any, *filters: Any) -> Any:
    """The arrays of an NNX object, or of a tree of variables."""
    nnx = sys.modules["flax.nnx"]
    return nnx.as_pure(nnx.state(tree, *filters) if filters else tree)


def _part(state: Any, name: str) -> Any:
    return state[name] if isinstance(state, dict) else getattr(state, name)


def _check_tree(name: str, old: Any, new: Any, remedy: str) -> None:
    """Raises an InputError if a new tree has other leaves than the old one, and names the first of them."""
    old_leaves, new_leaves = (dict(named_leaves(name, tree)) for tree in (old, new))
    for path, leaf in old_leaves.items():
        found: Any = new_leaves.get(path)
        if path not in new_leaves or np.shape(found) != np.shape(leaf):
            raise InputError(
                f"The candidate must return {name} with the leaves that it was given",
                given=f"{'nothing' if path not in new_leaves else describe(found)} for {path} = {describe(leaf)}",
                remedy=remedy,
            )


def _updated(optimizer: Any, params: Any, opt_state: Any, gradient: Any) -> tuple[Any, Any]:
    """The parameters and the optimizer's state after one update."""
    trained = trainable(params)
    updates, opt_state = optimizer.update(gradient, opt_state, trained)
    new = jax.tree.map(lambda leaf, update: jnp.asarray(leaf + update).astype(leaf.dtype), trained, updates)
    return combined(new, frozen(params)), opt_state


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer that an `optax.MultiSteps` wraps; None for another one."""
    owner = optimizer if hasattr(optimizer, "inner_opt") else getattr(optimizer.update, "__self__", None)
    return getattr(owner, "inner_opt", None)


def _inner_state(opt_state: Any) -> Any:
    return getattr(opt_state, "inner_opt_state", opt_state)
