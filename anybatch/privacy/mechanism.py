"""`private_grad`: the sum of clipped gradients with noise, for your own training loop."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.call.checks import whole_number
from anybatch.errors import InputError
from anybatch.per_example.clipping import clipped_grad
from anybatch.privacy.accounting import positive
from anybatch.privacy.guarantee_checks import (
    check_batch_size,
    check_clip_norm,
    check_noise,
    check_options,
    check_outside_shard_map,
    check_sampling,
    check_shared,
    padding_of,
)
from anybatch.privacy.key_ledger import LEDGER
from anybatch.privacy.noise import add_noise, at_least_float32, check_floating, check_key


@dataclasses.dataclass(frozen=True, kw_only=True)
class MechanismOptions:
    """The options of `private_grad` that set its privacy, as given and not yet checked."""

    clip_norm: Any
    noise_multiplier: Any
    expected_batch_size: Any
    num_examples: Any
    max_batch_size: Any
    allow_no_noise: bool
    allow_key_reuse: bool


class PrivateGrad:
    """A function that returns a clipped and noised gradient; made by `privacy.private_grad`.

    Args:
      sensitivity: the most that adding or removing one example changes the gradient before noise, in its norm.
      noise_stddev: the standard deviation of the noise: `noise_multiplier` times the sensitivity.
      clip_norm: the norm to which the gradient of each example is scaled down, if it is longer.
      noise_multiplier: the standard deviation of the noise, divided by the sensitivity.
      expected_batch_size: the constant that the sum is divided by.
      sampling_rate: the expected batch size divided by the number of examples; None if that number was not given.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        argnums: int | tuple[int, ...],
        has_aux: bool,
        given: MechanismOptions,
        options: dict[str, Any],
    ) -> None:
        self.noise_multiplier = check_noise(given.noise_multiplier, given.allow_no_noise)
        self.clip_norm = check_clip_norm(given.clip_norm, self.noise_multiplier)
        self.expected_batch_size = positive("expected_batch_size", given.expected_batch_size, example="256")
        self.num_examples, self.sampling_rate = None, None
        if given.num_examples is not None:
            self.num_examples, self.sampling_rate = check_sampling(given.num_examples, given.expected_batch_size)
        self.max_batch_size = given.max_batch_size
        if given.max_batch_size is not None:
            self.max_batch_size = whole_number("max_batch_size", given.max_batch_size, 1, example="512")
        self.allow_key_reuse = given.allow_key_reuse
        self._fun, self._argnums, self._has_aux = fun, argnums, has_aux
        self._options = check_options(options, self.expected_batch_size)
        self._clipped = self._clip(fun)
        self.sensitivity: float = self._clipped.sensitivity()
        # Without noise the sensitivity may be infinite, and 0 times infinity is NaN.
        self.noise_stddev = self.noise_multiplier * self.sensitivity if self.noise_multiplier else 0.0
        if not math.isfinite(self.noise_stddev):
            raise InputError(
                "The sensitivity must be finite",
                given=f"sensitivity={self.sensitivity} with {self._options}",
                remedy="Leave out the option with which clipping does not bound it.",
            )

    def __call__(self, *args: Any, noise_key: Any, is_padding: Any = None, **kwargs: Any) -> Any:
        check_key("noise_key", noise_key)
        if any(leaf is noise_key for leaf in jax.tree.leaves((args, kwargs))):
            raise InputError(
                "noise_key must be used for noise alone",
                given="a key that is also an argument of the loss",
                remedy="Split it: key, noise_key = jax.random.split(key).",
            )
        if not self.allow_key_reuse:
            LEDGER.check_draw(noise_key)
        gradient, extra = self.clipped(args, kwargs, is_padding)
        gradient = self.noised(gradient, args, noise_key)
        LEDGER.record_draw(noise_key)
        return (gradient, extra) if self.has_extra else gradient

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The mesh over which batches are sharded, if one was given."""
        return self._options.get("mesh")

    @property
    def has_extra(self) -> bool:
        """True if values, norms or aux are returned beside the gradient. None of them is private."""
        asked = [self._options.get(name, False) for name in ("return_values", "return_norms")]
        return bool(self._has_aux or any(asked))

    def padding_of(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_padding: Any,
        *,
        call: str = "grad(params, {}, noise_key=key)",
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The arguments with each `PaddedBatch` replaced by its examples, and the booleans that mark padding.

        Raises:
          InputError: if the call does not say which rows are padding.
        """
        return padding_of(args, kwargs, is_padding, batch=self._batch(args, kwargs), call=call)

    def clipped(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_padding: Any) -> tuple[Any, Any]:
        """The clipped gradient before noise, in at least float32; and the values, norms or aux that were asked for.

        If a sum is rounded to bfloat16 before noise is added, removing one example may change it by far more than the
        sensitivity. So narrow parameters are differentiated as float32. The loss still gets them in their own dtypes.
        """
        args, kwargs, is_padding = self.padding_of(args, kwargs, is_padding)
        self.check(args, kwargs, is_padding)
        wrt = [args[position] for position in self._positions]
        clipped, wide = self._clipped, args
        if any(_is_narrow(leaf) for leaf in jax.tree.leaves(wrt)):
            clipped = self._clip(_as_given(self._fun, args, self._positions))
            wide = tuple(_widened(arg) if place in self._positions else arg for place, arg in enumerate(args))
        results = clipped(*wide, **kwargs, is_padding=is_padding)
        gradient, extra = results if self.has_extra else (results, None)
        if any(_is_narrow(leaf) for leaf in jax.tree.leaves(gradient)):
            raise InputError(
                "The sum must be at least float32 when noise is added: rounding may reveal more than the noise hides",
                given=f"{', '.join(sorted({str(leaf.dtype) for leaf in jax.tree.leaves(gradient)}))} from transform",
                remedy="Let transform return the dtypes of its argument.",
            )
        return gradient, extra

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_padding: Any) -> None:
        """Refuses a call that would not be private.

        Raises:
          InputError: for parameters to which noise cannot be added, or a batch that is not a sample at the declared
            rate.
        """
        check_outside_shard_map()
        wrt = [args[position] for position in self._positions if position < len(args)]
        check_floating("params", wrt[0] if len(wrt) == 1 else wrt)
        self._check_batch(args, kwargs, is_padding)

    def noised(self, gradient: Any, args: tuple[Any, ...], key: Any) -> Any:
        """A clipped gradient with noise added, in the dtypes of the parameters."""
        noised = add_noise(gradient, key, self.noise_stddev)
        if "transform" in self._options:
            return noised  # its tree may differ from that of the parameters
        wrt = tuple(args[position] for position in self._positions)
        like = wrt[0] if isinstance(self._argnums, int) else wrt
        return jax.tree.map(lambda leaf, given: leaf.astype(jnp.result_type(given)), noised, like)

    @property
    def _positions(self) -> tuple[int, ...]:
        return (self._argnums,) if isinstance(self._argnums, int) else tuple(self._argnums)

    def _clip(self, fun: Callable[..., Any]) -> Any:
        return clipped_grad(
            fun,
            self._argnums,
            self._has_aux,
            clip_norm=self.clip_norm,
            normalize_by=self.expected_batch_size,
            **{"strict": True, **self._options},
        )

    def _batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments that are batches."""
        positions = self._positions_of("batch_argnums", 1, len(args))
        return [args[place] for place in positions] + [kwargs[name] for name in self._batch_argnames if name in kwargs]

    def _positions_of(self, option: str, default: Any, number: int) -> list[int]:
        """The positions that an option names, as non-negative indices into `number` arguments."""
        given = _several(self._options.get(option, default))
        return [position % number for position in given if -number <= position < number]

    @property
    def _batch_argnames(self) -> tuple[str, ...]:
        return _several(self._options.get("batch_argnames", ()))

    def _check_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_padding: Any) -> None:
        arguments = self._clipped.options.roles.sort(self._fun, args, kwargs)
        named = {leaf.slot for leaf in arguments.leaves if leaf.role != "rest"}
        names = _names(self._fun, len(args))
        shared = {names[place]: arg for place, arg in enumerate(args) if place not in named}
        shared |= {name: value for name, value in kwargs.items() if name not in named}
        check_shared(shared, arguments.num_examples)
        if self.num_examples is not None and self.sampling_rate is not None:
            batch = arguments.arrays.batch
            check_batch_size(batch, is_padding, self.num_examples, self.sampling_rate, self.max_batch_size)


def private_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    clip_norm: float,
    noise_multiplier: float,
    expected_batch_size: float,
    num_examples: int | None = None,
    max_batch_size: int | None = None,
    allow_no_noise: bool = False,
    allow_key_reuse: bool = False,
    **options: Any,
) -> PrivateGrad:
    """The gradient of DP-SGD: per-example gradients, clipped, summed, noised, and divided by the expected batch size.

    Use it in your own training loop; `privacy.dp_sgd` is a complete step with an optimizer. If its batch is a Poisson
    sample, each call is one step to account for by `privacy.epsilon`.

    **Private.** Before noise, adding or removing one example changes the result by at most `sensitivity =
    clip_norm / expected_batch_size`. The noise is Gaussian, independent for each entry, with the standard deviation
    `noise_multiplier * sensitivity`. It is added once, after the sum over all microbatches and devices, in at least
    float32. Values, norms and aux, which may be returned beside the gradient, are **not** private.

    >>> import jax, jax.numpy as jnp
    >>> from anybatch import privacy
    >>> def loss(w, example):
    ...     return (w * example["x"] - example["y"]) ** 2
    >>> grad = privacy.private_grad(loss, clip_norm=1.0, noise_multiplier=1.1, expected_batch_size=4)
    >>> data = {"x": jnp.ones(60), "y": jnp.ones(60)}
    >>> draw = privacy.poisson_batches(60, expected_batch_size=4, steps=1, seed=privacy.secret_key()).batch(0)
    >>> noised = grad(jnp.array(0.0), draw.take(data), noise_key=privacy.secret_key())
    >>> grad.sensitivity, noised.shape
    (0.25, ())

    Args:
      fun: the loss of one example. It must return a real scalar. It is traced, as under `jit`.
      argnums: the positional arguments to differentiate, an int or a tuple of ints. They are clipped together.
      has_aux: whether `fun` returns a pair `(loss, aux)`. aux is returned for all examples, and is **not** private.
      clip_norm: the norm to which the gradient of each example is scaled down, if it is longer.
      noise_multiplier: the standard deviation of the noise, divided by the sensitivity. `privacy.noise_multiplier`
        computes it for a given epsilon.
      expected_batch_size: the number of examples that a batch has on average. The sum is divided by it, and never by
        the number of examples in the batch, which is not private.
      num_examples: the number of examples of the dataset. If given, batches that are too large for the sampling rate
        are refused.
      max_batch_size: the largest number of rows that a batch may have, with padding.
      allow_no_noise: allows `noise_multiplier=0`, which is not private, and with it `clip_norm=inf`.
      allow_key_reuse: allows keys that were used before, which is private only if one of the results is released.
      **options: options of `ab.clipped_grad`:
        `batch_argnums` (default 1) and `batch_argnames`: the arguments that hold the batch, by position and by name.
        `keep_batch_dim`: whether `fun` is written for batches; it then gets batches of one example.
        `microbatch_size`: the number of examples at a time. `None` is the full batch. `"auto"`, the default, takes the
        size that `anybatch.plan` has measured to be the fastest, or else the largest that fits the memory.
        `memory`: the bytes that the gradient and its arguments may take, for `"auto"`, e.g. `"16GiB"`.
        `method`: `"vmap"` computes every gradient, `"factored"` keeps its factors where that is cheaper, `"auto"`, the
        default, prefers `"factored"`.
        `transform`: a function of the gradient of one example. What it returns is clipped, summed and noised.
        `rng_argnums`: the positional arguments that are PRNG keys. Every example draws its own numbers.
        `return_values`, `return_norms`: whether to also return the losses and norms of the examples, which are **not**
        private.
        `accumulator_dtype`: the dtype in which narrower gradients are summed, float32 by default.
        `strict` (default True): whether the sensitivity holds even if all rounding errors have the same sign.
        `mesh`, `axis_name` and `param_specs`: the devices, the axis over which the batch is sharded, and the shardings
        of the parameters.
        `nan_safe` and `normalize_by`: they must be True and `expected_batch_size`, and need not be passed.

    Returns:
      A function with the arguments of `fun`, `noise_key=` and `is_padding=`, that returns the gradient. With `has_aux`
      it returns `(gradient, aux)`, with `return_values` or `return_norms` `(gradient, PerExample(values, norms, aux))`.
      The batch must say which of its rows are padding: pass a `privacy.PaddedBatch`, or `is_padding=`.

    Raises:
      InputError: for arguments that would void the guarantee, before any work is done.
      CoupledError: with `keep_batch_dim=True`, for a loss that looks across examples.
    """
    given = MechanismOptions(
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        num_examples=num_examples,
        max_batch_size=max_batch_size,
        allow_no_noise=allow_no_noise,
        allow_key_reuse=allow_key_reuse,
    )
    return PrivateGrad(fun, argnums, has_aux, given, options)


def _names(fun: Callable[..., Any], number: int) -> list[str]:
    """The names of the positional arguments of a loss, for messages."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return names[:number] + [f"args[{place}]" for place in range(len(names), number)]


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _is_narrow(leaf: Any) -> bool:
    return jnp.result_type(leaf) != at_least_float32(jnp.result_type(leaf))


def _widened(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, at_least_float32(jnp.result_type(leaf))), tree)


def _as_given(fun: Callable[..., Any], args: tuple[Any, ...], positions: tuple[int, ...]) -> Callable[..., Any]:
    """`fun`, as a function of wider parameters, which it casts back to the dtypes that were given."""
    dtypes = {position: jax.tree.map(jnp.result_type, args[position]) for position in positions}

    @functools.wraps(fun)
    def narrow_fun(*wide: Any, **kwargs: Any) -> Any:
        given = [
            jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), arg, dtypes[place]) if place in dtypes else arg
            for place, arg in enumerate(wide)
        ]
        return fun(*given, **kwargs)

    return narrow_fun
