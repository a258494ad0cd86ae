"""`private_grad`: the sum of clipped gradients with noise, for a training loop of one's own."""

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
from anybatch.privacy.keys import LEDGER
from anybatch.privacy.noise import add_noise, at_least_float32, check_floating, check_key
from anybatch.privacy.numbers import positive
from anybatch.privacy.refusals import (
    check_batch_size,
    check_clip_norm,
    check_noise,
    check_options,
    check_outside_shard_map,
    check_sampling,
    check_shared,
    padding_of,
)


class PrivateGrad:
    """A gradient that is clipped and noised; made by `privacy.private_grad`.

    Args:
      sensitivity: by how much adding or removing one example can change the gradient before noise, in its norm.
      noise_stddev: the standard deviation of the noise: `noise_multiplier` times the sensitivity.
      clip_norm: to which the gradient of each example is scaled down.
      noise_multiplier: as given.
      expected_batch_size: by which the sum is divided.
      sampling_rate: the expected batch size by the number of examples; None if that was not given.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        argnums: int | tuple[int, ...],
        has_aux: bool,
        *,
        clip_norm: Any,
        noise_multiplier: Any,
        expected_batch_size: Any,
        num_examples: Any,
        max_batch_size: Any,
        allow_no_noise: bool,
        allow_key_reuse: bool,
        options: dict[str, Any],
    ) -> None:
        self.noise_multiplier = check_noise(noise_multiplier, allow_no_noise)
        self.clip_norm = check_clip_norm(clip_norm, self.noise_multiplier)
        self.expected_batch_size = positive("expected_batch_size", expected_batch_size, example="256")
        self.num_examples, self.sampling_rate = None, None
        if num_examples is not None:
            self.num_examples, self.sampling_rate = check_sampling(num_examples, expected_batch_size)
        self.max_batch_size = max_batch_size
        if max_batch_size is not None:
            self.max_batch_size = whole_number("max_batch_size", max_batch_size, 1, example="512")
        self.allow_key_reuse = allow_key_reuse
        self._fun, self._argnums, self._has_aux = fun, argnums, has_aux
        self._options = check_options(options, self.expected_batch_size)
        self._clipped = self._clip(fun)
        self.sensitivity: float = self._clipped.sensitivity()
        # Without noise there may be no bound either, and 0 times infinity is no number.
        self.noise_stddev = self.noise_multiplier * self.sensitivity if self.noise_multiplier else 0.0
        if not math.isfinite(self.noise_stddev):
            raise InputError(
                "The sensitivity must be finite",
                given=f"sensitivity={self.sensitivity} with {self._options}",
                remedy="Leave out the option that keeps clipping from bounding it.",
            )

    def __call__(self, *args: Any, noise_key: Any, is_padding: Any = None, **kwargs: Any) -> Any:
        check_key("noise_key", noise_key)
        if any(leaf is noise_key for leaf in jax.tree.leaves((args, kwargs))):
            raise InputError(
                "noise_key must be used for noise alone",
                given="a key that the loss is given, too",
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
        """The devices over which batches are spread, if any were given."""
        return self._options.get("mesh")

    @property
    def has_extra(self) -> bool:
        """Whether there is something beside the gradient: values, norms or aux. None of it is private."""
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
        """The arguments with each `PaddedBatch` replaced by its examples, and which rows are padding.

        Raises:
          InputError: if that is not known.
        """
        return padding_of(args, kwargs, is_padding, batch=self._batch(args, kwargs), call=call)

    def clipped(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_padding: Any) -> tuple[Any, Any]:
        """The sum of clipped gradients by the expected batch size, in float32 at least; and what else was asked for.

        A sum that is rounded to bfloat16 before noise is added may change by far more than the sensitivity when one
        example is removed. So narrow parameters are differentiated as float32, and the loss sees them narrow as ever.
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
                "The sum must be float32 at least when noise is added: rounding it may tell more than noise hides",
                given=f"{', '.join(sorted({str(leaf.dtype) for leaf in jax.tree.leaves(gradient)}))} from transform",
                remedy="Let transform return the dtypes that it is given.",
            )
        return gradient, extra

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_padding: Any) -> None:
        """Refuses a call that would not be private.

        Raises:
          InputError: for arguments to which no noise can be added, or a batch that is no sample at the declared rate.
        """
        check_outside_shard_map()
        wrt = [args[position] for position in self._positions if position < len(args)]
        check_floating("params", wrt[0] if len(wrt) == 1 else wrt)
        self._check_batch(args, kwargs, is_padding)

    def noised(self, gradient: Any, args: tuple[Any, ...], key: Any) -> Any:
        """A clipped gradient with noise, in the dtypes of what it is the gradient of."""
        noised = add_noise(gradient, key, self.noise_stddev)
        if "transform" in self._options:
            return noised  # which may be another tree
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
        positions = self._places("batch_argnums", 1, len(args))
        return [args[place] for place in positions] + [kwargs[name] for name in self._batch_argnames if name in kwargs]

    def _places(self, option: str, default: Any, number: int) -> list[int]:
        """The positions that an option names, among so many arguments."""
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
    """The gradient of DP-SGD: those of the examples, each clipped, added up, noised, by the expected batch size.

    For a training loop of one's own; `privacy.dp_sgd` is the whole step. Each call is one step to account for, by
    `privacy.epsilon`, if its batch is a Poisson sample.

    **Private.** Before noise, adding or removing one example changes the result by at most `sensitivity =
    clip_norm / expected_batch_size`. The noise is Gaussian, independent for each number, with the standard deviation
    `noise_multiplier * sensitivity`; it is added once, after the sum over all microbatches and devices, in float32 at
    least. What clipped gradients return beside the gradient (values, norms, aux) is **not** private.

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
      fun: the loss of one example, as for `ab.clipped_grad`.
      argnums: which positional arguments to differentiate with respect to. They are clipped together.
      has_aux: whether `fun` returns a pair `(loss, aux)`.
      clip_norm: to which the gradient of each example is scaled down, if it is longer.
      noise_multiplier: how much noise, by the sensitivity; `privacy.noise_multiplier` finds it for a budget.
      expected_batch_size: the number of examples that a batch has on average. The sum is divided by it, and never by
        the number of examples at hand, which is not private.
      num_examples: of the dataset; if given, batches that are too large for the sampling rate are refused.
      max_batch_size: the most rows that a batch may have, with padding.
      allow_no_noise: accepts `noise_multiplier=0`, which is not private, and with it `clip_norm=inf`.
      allow_key_reuse: accepts keys that were used before, which is private only if one of the results is released.
      **options: of `ab.clipped_grad`: `microbatch_size`, `method`, `batch_argnums`, `mesh`, ...

    Returns:
      A function with the arguments of `fun`, and `noise_key=`, that returns the gradient; or `(gradient, extra)` if
      `ab.clipped_grad` does with these options. The batch must say which of its rows are padding: it is a
      `privacy.PaddedBatch`, or `is_padding=` is given, too.

    Raises:
      InputError: for what would void the guarantee, before any work is done.
      CoupledError: with `keep_batch_dim=True`, for a loss that looks across examples.
    """
    return PrivateGrad(
        fun,
        argnums,
        has_aux,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        num_examples=num_examples,
        max_batch_size=max_batch_size,
        allow_no_noise=allow_no_noise,
        allow_key_reuse=allow_key_reuse,
        options=options,
    )


def _names(fun: Callable[..., Any], number: int) -> list[str]:
    """What a loss calls its positional arguments."""
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
    """`fun` of parameters that are wider than they were given: it sees them as they were."""
    dtypes = {position: jax.tree.map(jnp.result_type, args[position]) for position in positions}

    @functools.wraps(fun)
    def narrow_fun(*wide: Any, **kwargs: Any) -> Any:
        given = [
            jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), arg, dtypes[place]) if place in dtypes else arg
            for place, arg in enumerate(wide)
        ]
        return fun(*given, **kwargs)

    return narrow_fun
