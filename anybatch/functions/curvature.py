"""Curvature of a loss over a batch: products with the Hessian and the Gauss-Newton matrix, the diagonal of the Fisher.

A product with a matrix is the gradient of a scalar, so that `hvp` and `ggn_product` have the memory, the options and
the exactness of `grad`. `fisher_diagonal` maps the squares of the gradients of single examples over the batch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.call.checks import describe, named_leaves
from anybatch.call.models import combined, frozen, has_nnx, partition_models, trainable
from anybatch.call.options import Options
from anybatch.errors import InputError
from anybatch.functions.map_batch import MappedFunction, map_batch
from anybatch.gradients.computation import Gradient
from anybatch.gradients.value_and_grad import grad
from anybatch.jaxprs import interpreter
from anybatch.jaxprs.primitives import CUSTOM_VJP
from anybatch.per_example.grads import per_example_grads
from anybatch.planning.problem import Problem


class Product:
    """Computes the products of a matrix with vectors. `read`, `plan`, `explain` and `verify` take it as well.

    A product is the gradient of `scalar`, a function of the arguments and of `vector=`.
    """

    def __init__(self, scalar: Callable[..., Any], positions: dict[str, int], options: dict[str, Any]) -> None:
        """`positions` are those of the arguments that `scalar` needs by position, by the names of their options."""
        for name, position in positions.items():
            if not isinstance(position, int) or isinstance(position, bool):
                raise InputError(
                    f"{name} must be the position of one argument",
                    given=f"{name}={position!r}",
                    remedy="Put several arguments into one tree, e.g. fun((params, more), batch).",
                )
        functools.update_wrapper(self, scalar)
        options = positions | options
        if options.get("reduction") == "weighted":
            raise InputError(
                "A product with a matrix is not made of a total and a weight",
                given='reduction="weighted"',
                remedy="Let the loss return total / weight, and leave reduction out.",
            )
        self.scalar, self.positions, self.options = scalar, positions, Options.of(scalar, **options)
        self._grad = grad(scalar, **options)

    def __call__(self, *args: Any, vector: Any, **kwargs: Any) -> Any:
        self._check(args)
        return self._grad(*args, vector=vector, **kwargs)

    def _check(self, args: tuple[Any, ...]) -> None:
        for name, position in self.positions.items():
            if not -len(args) <= position < len(args):
                raise InputError(
                    "The parameters and the batch must be passed by position",
                    given=f"{name}={position} and a call with {len(args)} positional arguments",
                    remedy="For example product(params, batch, vector=vector).",
                )
        argnums = self.positions["argnums"]
        if has_nnx(args[argnums]):
            raise InputError(
                "Products with a matrix need parameters that are a tree of arrays, like the vector",
                given=f"an NNX model, {type(args[argnums]).__name__}",
                remedy="Pass its state: graphdef, params, rest = nnx.split(model, nnx.Param, ...), and in the function "
                "model = nnx.merge(graphdef, params, rest, copy=True).",
            )

    def to_read(self) -> tuple[Callable[..., Any], Options]:
        """The function that is read and verified, and its options."""
        return self.scalar, self.options

    def to_plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, memory: Any, objective: Any
    ) -> tuple[Callable[..., Problem], tuple[Any, ...], dict[str, Any]]:
        """A function that makes the computation of a call, and its arguments, with models split into arrays."""
        self._check(args)
        options = self.options.to_plan(memory, objective)
        call = partition_models(self.scalar, options.roles, False, args, kwargs)

        def gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Problem:
            return Gradient(call.fun, call.options(options), options.roles.sort(call.fun, args, kwargs))

        return gradient, call.args, call.kwargs


def hvp(fun: Callable[..., Any], argnums: int = 0, has_aux: bool = False, **options: Any) -> Product:
    """Products of the Hessian of a loss with a vector, in microbatches: Hessian-vector products.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, x):
    ...     return jnp.mean((x @ w) ** 2)
    >>> x = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    >>> product = ab.hvp(loss, microbatch_size=2)
    >>> print(product(jnp.zeros(2), x, vector=jnp.array([1.5, 0.0])).round(2))  # 2 / 3 * x.T @ x @ vector
    [35. 44.]

    **Exact.** The result equals `jax.jvp(jax.grad(loss), (params,), (vector,))[1]` for the full batch, up to rounding,
    for every loss that `value_and_grad` takes, whether it is a mean or compares examples. If the loss has a
    `jax.custom_vjp`, the result is the gradient of the product of `jax.grad(loss)` and the vector, which is the same
    where the `custom_vjp` is the true derivative.

    **Memory.** As for `grad`: about twice the activations of one microbatch, whatever the size of the batch.

    Args:
      fun: the loss, as for `value_and_grad`.
      argnums: the position of the argument that it is differentiated by, twice.
      has_aux: whether `fun` returns a pair `(loss, aux)`. aux is ignored.
      **options: the other options of `value_and_grad`.

    Returns:
      A function with the arguments of `fun` and `vector=`, a tree like the differentiated argument. It returns the
      product, which is such a tree, too.
    """

    @functools.wraps(fun)
    def slope(*args: Any, vector: Any, **kwargs: Any) -> Any:
        """The derivative of the loss in the direction of the vector. Its gradient is the product."""
        params, rest = _split(args, argnums)
        _check_vector(vector, params)

        def loss(params: Any) -> Any:
            result = fun(*_with(args, argnums, combined(params, rest)), **kwargs)
            return result[0] if has_aux else result

        if _has_custom_vjp(loss, params):
            return _dot(vector, jax.grad(loss)(params))
        return jax.jvp(loss, (params,), (vector,))[1]

    return Product(slope, {"argnums": argnums}, options)


def ggn_product(
    predict: Callable[..., Any], loss: Callable[..., Any], argnums: int = 0, batch_argnums: int = 1, **options: Any
) -> Product:
    """Products of the generalised Gauss-Newton matrix of a loss with a vector, in microbatches.

    The loss of the batch is `loss(predict(params, batch), batch)`. The matrix is J.T @ H @ J, where J is the Jacobian
    of the predictions with respect to the parameters, and H is the Hessian of the loss with respect to the predictions.
    It is positive semi-definite if the loss is convex in the predictions. For cross-entropy and squared errors, it is
    the Fisher matrix of the model.

    >>> import jax, jax.numpy as jnp, anybatch as ab
    >>> def predict(w, batch):
    ...     return jnp.tanh(batch["x"] @ w)
    >>> def loss(predictions, batch):
    ...     return jnp.mean((predictions - batch["y"]) ** 2)
    >>> batch = {"x": jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), "y": jnp.ones(3)}
    >>> product = ab.ggn_product(predict, loss, microbatch_size=2)
    >>> print(product(jnp.zeros(2), batch, vector=jnp.array([1.5, 0.0])).round(2))
    [35. 44.]

    **Exact.** The result equals J.T @ H @ J @ vector for the full batch, up to rounding. The loss may be any function
    of all predictions: where it looks across examples, predictions are gathered, and layers are not.

    **Memory.** As for `grad`: about twice the activations of one microbatch, whatever the size of the batch.

    Args:
      predict: the model: a function of parameters, a batch and further arguments that returns any tree of arrays.
      loss: a function of the predictions and the batch that returns a scalar. It may return `(loss, aux)`, e.g. if it
        is shared with training; aux is ignored.
      argnums: the position of the parameters among the arguments of `predict`.
      batch_argnums: the position of the batch among them.
      **options: the other options of `value_and_grad`.

    Returns:
      A function with the arguments of `predict` and `vector=`, a tree like the parameters. It returns the product,
      which is such a tree, too.
    """

    @functools.wraps(predict)
    def projection(*args: Any, vector: Any, **kwargs: Any) -> Any:
        """The predictions times H @ J @ vector, which is a constant here. Its gradient is the product."""
        params, rest = _split(args, argnums)
        _check_vector(vector, params)

        def predicted(params: Any) -> Any:
            return predict(*_with(args, argnums, combined(params, rest)), **kwargs)

        every = predicted(params)
        made, others = trainable(every), frozen(every)  # masks and indices have no derivative

        def predictions(params: Any) -> Any:
            return trainable(predicted(params))

        def of_predictions(values: Any) -> Any:
            result = loss(combined(values, others), args[batch_argnums])
            return result[0] if isinstance(result, tuple) else result

        pushed = _push(predictions, _stopped(params), vector)
        _, curved = jax.jvp(jax.grad(of_predictions), (_stopped(made),), (pushed,))
        return _dot(_stopped(curved), made)

    return Product(projection, {"argnums": argnums, "batch_argnums": batch_argnums}, options)


def fisher_diagonal(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    batch_argnames: str | tuple[str, ...] = (),
    rng_argnums: int | tuple[int, ...] = (),
    keep_batch_dim: bool = False,
    **options: Any,
) -> MappedFunction:
    """The diagonal of the empirical Fisher matrix: the mean over the examples of their squared gradients.

    With the labels of the batch it is the empirical Fisher. With labels that are drawn from the model's predictions, it
    is an estimate of the Fisher itself.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, example):
    ...     return 0.5 * (example["x"] @ w - example["y"]) ** 2
    >>> batch = {"x": jnp.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]), "y": jnp.array([1.0, 1.0, 2.0])}
    >>> print(ab.fisher_diagonal(loss, microbatch_size=2)(jnp.zeros(2), batch).round(3))
    [1.667 2.667]

    **Exact.** The result equals the mean of `jax.vmap(jax.grad(loss))(...) ** 2` over the full batch, up to rounding.

    **Memory.** The gradients of the examples of one microbatch, whatever the size of the batch.

    Args:
      fun: the loss of one example, which gets it without the batch axis.
      argnums: the positions of the arguments that it is differentiated by.
      batch_argnums: the positions of the arguments that hold the batch.
      batch_argnames: the names of further arguments that hold the batch.
      rng_argnums: the positions of PRNG keys. The example at index `i` gets `jax.random.fold_in(key, i)`.
      keep_batch_dim: whether `fun` gets a batch of one example instead. It must then not look across examples.
      **options: the other options of `map_batch`.

    Returns:
      A function with the arguments of `fun`, of which those of the batch have examples along axis 0. It returns a tree
      like the differentiated argument.

    Raises:
      InputError: for arguments that are not allowed, as by `per_example_grads`.
      CoupledError: with `keep_batch_dim=True`, for a loss that looks across examples, such as one with BatchNorm.
    """
    batches: dict[str, Any] = {"batch_argnums": batch_argnums, "batch_argnames": batch_argnames}
    gradients = per_example_grads(
        fun, argnums, rng_argnums=rng_argnums, keep_batch_dim=keep_batch_dim, microbatch_size=None, **batches
    )

    @functools.wraps(fun)
    def mean_square(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.mean(jnp.square(jnp.abs(leaf)), axis=0), gradients(*args, **kwargs))

    return map_batch(mean_square, **batches, **options)


def _push(fun: Callable[[Any], Any], params: Any, vector: Any) -> Any:
    """The derivative of a function in the direction of a vector."""
    if not _has_custom_vjp(fun, params):
        return jax.jvp(fun, (params,), (vector,))[1]
    # A function with a custom_vjp has no forward-mode derivative. But its backward pass is linear in the cotangents, so
    # that the transpose of the backward pass is the derivative.
    made, pullback = jax.vjp(fun, params)
    zeros = jax.tree.map(jnp.zeros_like, made)
    return jax.vjp(lambda cotangents: pullback(cotangents)[0], zeros)[1](vector)[0]


def _has_custom_vjp(fun: Callable[[Any], Any], params: Any) -> bool:
    jaxpr = jax.make_jaxpr(fun)(params)
    return any(equation.primitive.name in CUSTOM_VJP for equation in interpreter.walk(jaxpr))


def _dot(one: Any, other: Any) -> Any:
    """The sum of the products of all entries of two trees."""
    products = jax.tree.map(lambda left, right: jnp.sum(left * right), one, other)
    return functools.reduce(jnp.add, jax.tree.leaves(products), jnp.zeros(()))


def _stopped(tree: Any) -> Any:
    return jax.tree.map(jax.lax.stop_gradient, tree)


def _with(args: Sequence[Any], position: int, value: Any) -> tuple[Any, ...]:
    position %= len(args)
    return (*args[:position], value, *args[position + 1 :])


def _split(args: Sequence[Any], argnums: int) -> tuple[Any, Any]:
    """The floating-point arrays of the differentiated argument, and its other leaves."""
    return trainable(args[argnums]), frozen(args[argnums])


def _check_vector(vector: Any, params: Any) -> None:
    given, wanted = named_leaves("vector", vector), named_leaves("params", params)
    own: Any = jax.tree.structure(vector)
    like: Any = jax.tree.structure(params)
    if own != like:
        raise InputError(
            "vector must be a tree like the differentiated argument",
            given=f"{own} for {like}",
            remedy="For example vector=jax.tree.map(jnp.ones_like, params).",
        )
    for (name, leaf), (_, parameter) in zip(given, wanted, strict=True):
        if jnp.shape(leaf) != jnp.shape(parameter) or jnp.result_type(leaf) != jnp.result_type(parameter):
            raise InputError(
                "Each array of vector must have the shape and the dtype of its parameter",
                given=f"{name} = {describe(leaf)} for {describe(parameter)}",
                remedy="Cast or reshape it, e.g. jax.tree.map(lambda v, p: v.astype(p.dtype), vector, params).",
            )
