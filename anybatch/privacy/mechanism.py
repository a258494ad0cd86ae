"""`private_grad`: the sum of clipped gradients with noise, for your own training loop.

It refuses whatever would silently void the privacy guarantee: options, when a gradient is made, and the batches and
arguments of each call.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.call.checks import describe, is_array, is_key, whole_number
from anybatch.errors import InputError
from anybatch.per_example.clipping import clipped_grad
from anybatch.privacy.accounting import constant, largest_sample, positive
from anybatch.privacy.key_ledger import LEDGER, is_readable
from anybatch.privacy.noise import add_noise, at_least_float32, check_floating, check_key
from anybatch.privacy.sampling import PaddedBatch, rate_of


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
        *,
        clip_norm: Any,
        noise_multiplier: Any,
        expected_batch_size: Any,
        num_examples: Any,
        max_batch_size: Any,
        allow_no_noise: bool,
        allow_key_reuse: bool,
        **options: Any,
    ) -> None:
        self.noise_multiplier = constant(
            "noise_multiplier",
            noise_multiplier,
            example="1.1",
            must="be positive and finite",
            allowed=lambda noise: 0 < noise < math.inf or (noise == 0 and allow_no_noise),
            remedy="privacy.noise_multiplier(epsilon=3.0, delta=1e-5, sampling_rate=..., steps=...) computes one. "
            "To train without privacy, pass noise_multiplier=0, allow_no_noise=True.",
        )
        self.clip_norm = constant(
            "clip_norm",
            clip_norm,
            example="1.0",
            must="be positive and finite: if nothing bounds the effect of one example, no noise is enough",
            allowed=lambda norm: 0 < norm < math.inf or (norm == math.inf and self.noise_multiplier == 0),
            remedy="For example clip_norm=1.0. ab.per_example_norms shows the norms of gradients; it is not private.",
        )
        self.expected_batch_size = positive("expected_batch_size", expected_batch_size, example="256")
        self.num_examples, self.sampling_rate = None, None
        if num_examples is not None:
            self.num_examples = whole_number("num_examples", num_examples, 1, example="60_000")
            self.sampling_rate = rate_of(self.num_examples, expected_batch_size)
        self.max_batch_size = max_batch_size
        if max_batch_size is not None:
            self.max_batch_size = whole_number("max_batch_size", max_batch_size, 1, example="512")
        self.allow_key_reuse = allow_key_reuse
        self._fun, self._argnums, self._has_aux = fun, argnums, has_aux
        self._options = _check_options(options, self.expected_batch_size)
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
        return self._has_aux or self._clipped.options.returns_examples

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
          InputError: if the call does not say which rows are padding, or says it twice.
        """
        padded = [value for value in (*args, *kwargs.values()) if isinstance(value, PaddedBatch)]
        masks = {id(mask): mask for mask in (is_padding, *(each.is_padding for each in padded)) if mask is not None}
        if not masks:
            roles, number = self._clipped.options.roles, len(args)
            batch = [args[position] for position in roles.batch_argnums if -number <= position < number]
            batch += [kwargs[name] for name in roles.batch_argnames if name in kwargs]
            raise _padding_unknown(kwargs, batch, call)
        if len(masks) > 1:
            raise InputError(
                "A call must say once which rows of the batch are padding",
                given=f"{len(padded)} PaddedBatch {'and' if is_padding is not None else 'without'} is_padding=",
                remedy=f"Take all arrays at once: {call.format('draw.take((x, y))')}; or pass each array by itself, "
                "and is_padding=draw.is_padding.",
            )

        def plain(value: Any) -> Any:
            return value.examples if isinstance(value, PaddedBatch) else value

        (mask,) = masks.values()
        mask = mask if is_array(mask) else np.asarray(mask)
        return tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}, mask

    def clipped(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_padding: Any) -> tuple[Any, Any]:
        """The clipped gradient before noise, in at least float32; and the values, norms or aux that were asked for.

        If a sum is rounded to bfloat16 before noise is added, removing one example may change it by far more than the
        sensitivity. So narrow parameters are differentiated as float32. The loss still gets them in their own dtypes.
        """
        args, kwargs, is_padding = self.padding_of(args, kwargs, is_padding)
        self.check(args, kwargs, is_padding)
        positions = self._positions(args)
        wrt = [args[position] for position in positions]
        clipped, wide = self._clipped, args
        if any(_is_narrow(leaf) for leaf in jax.tree.leaves(wrt)):
            clipped = self._clip(_as_given(self._fun, args, positions))
            wide = tuple(_widened(arg) if place in positions else arg for place, arg in enumerate(args))
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
        axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        if axes:  # each device would add its own noise to its part of the sum
            raise InputError(
                "Noise is added once, to the sum over all devices",
                given=f"a call inside shard_map over {axes}",
                remedy="Call it outside, and pass mesh=... to shard the batch over devices.",
            )
        wrt = [args[position] for position in self._positions(args) if 0 <= position < len(args)]
        check_floating("params", wrt[0] if len(wrt) == 1 else wrt)
        arguments = self._clipped.options.roles.sort(self._fun, args, kwargs)
        named = {leaf.slot for leaf in arguments.leaves if leaf.role != "rest"}
        names = _names(self._fun, len(args))
        shared = {names[place]: arg for place, arg in enumerate(args) if place not in named}
        shared |= {name: value for name, value in kwargs.items() if name not in named}
        _check_shared(shared, arguments.num_examples)
        self._check_batch_size(arguments.num_examples, is_padding)

    def _check_batch_size(self, rows: int, is_padding: Any) -> None:
        """Refuses a batch with more rows than declared, or more examples than the declared rate would ever give.

        Padding is not counted. If it cannot be read without waiting for a device, or under `jit`, nothing is counted.
        """
        if self.max_batch_size is not None and rows > self.max_batch_size:
            raise InputError(
                "A batch must not be larger than declared",
                given=f"{rows} rows and max_batch_size={self.max_batch_size}",
                remedy="Pass max_batch_size=batches.batch_size, of privacy.poisson_batches(...).",
            )
        number, rate = self.num_examples, self.sampling_rate
        if number is None or rate is None:
            return
        if isinstance(is_padding, jax.core.Tracer) or not is_readable(is_padding):
            return
        examples = rows - int(np.asarray(is_padding).sum())
        most = largest_sample(number, rate, failure=1e-15)
        if examples > most:
            raise InputError(
                "A batch must be a Poisson sample at the declared rate: larger batches spend more than is accounted "
                "for",
                given=f"{examples} examples, where {number * rate:g} of {number} are expected and more than {most} "
                "have a probability below 1e-15",
                remedy="Draw batches by privacy.poisson_batches(num_examples, expected_batch_size=..., steps=..., "
                "seed=...), and pass its is_padding; or declare the larger expected_batch_size.",
            )

    def noised(self, gradient: Any, args: tuple[Any, ...], key: Any) -> Any:
        """A clipped gradient with noise added, in the dtypes of the parameters."""
        noised = add_noise(gradient, key, self.noise_stddev)
        if self._clipped.options.transform is not None:
            return noised  # its tree may differ from that of the parameters
        wrt = tuple(args[position] for position in self._positions(args))
        like = wrt[0] if isinstance(self._argnums, int) else wrt
        return jax.tree.map(lambda leaf, given: leaf.astype(jnp.result_type(given)), noised, like)

    def _positions(self, args: tuple[Any, ...]) -> tuple[int, ...]:
        """The positions of the parameters among the arguments, counted from the first."""
        given = (self._argnums,) if isinstance(self._argnums, int) else self._argnums
        return tuple(position + len(args) if position < 0 else position for position in given)

    def _clip(self, fun: Callable[..., Any]) -> Any:
        return clipped_grad(
            fun,
            self._argnums,
            self._has_aux,
            clip_norm=self.clip_norm,
            normalize_by=self.expected_batch_size,
            **{"strict": True, **self._options},
        )


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
        `block_size`: how many rows of a big value of one example to compute at a time, such as tokens of logits. `None`
        computes them in full. `"auto"`, the default, uses blocks only if a plan finds that they are needed or faster.
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
    return PrivateGrad(
        fun=fun,
        argnums=argnums,
        has_aux=has_aux,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        num_examples=num_examples,
        max_batch_size=max_batch_size,
        allow_no_noise=allow_no_noise,
        allow_key_reuse=allow_key_reuse,
        **options,
    )


def _check_options(options: dict[str, Any], expected_batch_size: float) -> dict[str, Any]:
    """The options for `clipped_grad`, without those that `private_grad` sets itself.

    Raises:
      InputError: for an option that would void the guarantee.
    """
    options = dict(options)
    if options.pop("nan_safe", True) is not True:
        raise InputError(
            "nan_safe must be True: one example whose gradient is not finite would make the sum NaN or infinite",
            given="nan_safe=False",
            remedy="Leave it out: such an example then counts for nothing.",
        )
    if "normalize_by" in options:
        given = constant("normalize_by", options.pop("normalize_by"), example=f"{expected_batch_size:g}")
        if given != expected_batch_size:
            raise InputError(
                "normalize_by must be the expected batch size: the noise is scaled to that sensitivity",
                given=f"normalize_by={given:g} and expected_batch_size={expected_batch_size:g}",
                remedy="Leave it out. The number of examples in a batch depends on the data, and is not private.",
            )
    return options


def _padding_unknown(kwargs: dict[str, Any], batch: Any, call: str) -> InputError:
    others = [f"{name}={describe(value)}" for name, value in kwargs.items() if _looks_like_padding(name, value)]
    ignored = f", and {', '.join(others)}, which only the loss would see" if others else ""
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if getattr(leaf, "ndim", 0)}
    return InputError(
        "A call must say which rows of the batch are padding: padding that counts as examples voids the guarantee",
        given=f"{' and '.join(type(each).__name__ for each in batch) or 'no batch'} without is_padding{ignored}",
        remedy=f"Pass {call.format('draw.take(data)')} for each draw of privacy.poisson_batches(...), or "
        "ab.fit(step, state, batches.of(data)). For a batch without padding, pass "
        f"is_padding=np.zeros({rows.pop() if len(rows) == 1 else 'len(batch)'}, bool).",
    )


def _check_shared(arguments: dict[str, Any], rows: int) -> None:
    """Refuses an argument with one row per example that is not part of the batch: every example would see all of it.

    If the batch has only one row, no example can see another.
    """
    for name, value in arguments.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=_is_list_of_numbers):
            length = len(leaf) if _is_list_of_numbers(leaf) else leaf.shape[0] if _has_rows(leaf) else 0
            if length != rows or length < 2:
                continue
            found = f"{name}{jax.tree_util.keystr(path)}"
            kind = describe(leaf) if is_array(leaf) else f"a {type(leaf).__name__} of {length} numbers"
            if _looks_like_padding(name, value):
                remedy = f"If it says which rows are padding, pass it as is_padding={name}. Otherwise put"
            else:
                remedy = "Put"
            raise InputError(
                "An argument with one row for each example must be part of the batch: otherwise each example sees the "
                "rows of all examples, and clipping does not bound that",
                given=f"{found} = {kind}, beside a batch of {rows} rows",
                remedy=f'{remedy} it into the batch: {{"x": x, "{name}": {name}}}; or, if it is positional, name it in '
                f"batch_argnums. If it is public, and has as many rows by chance, close over it: "
                f"functools.partial(loss, {name}=...); or draw batches with another max_batch_size=.",
            )


def _has_rows(leaf: Any) -> bool:
    return is_array(leaf) and leaf.ndim > 0 and not is_key(leaf)


def _is_list_of_numbers(node: Any) -> bool:
    return isinstance(node, (list, tuple)) and bool(node) and all(isinstance(item, (bool, int, float)) for item in node)


def _looks_like_padding(name: str, value: Any) -> bool:
    """True if a keyword may be meant for `is_padding`: `is_padding_example`, `pad_mask`; not `padding="SAME"`."""
    is_named_so = any(part.startswith(("pad", "ispad")) for part in name.lower().split("_"))
    return is_named_so and (_is_list_of_numbers(value) or any(map(_has_rows, jax.tree.leaves(value))))


def _names(fun: Callable[..., Any], number: int) -> list[str]:
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return names[:number] + [f"args[{place}]" for place in range(len(names), number)]


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
