"""Checks that refuse whatever would silently void the privacy guarantee.

First come the numbers and options that are checked when a step is made, then the batches and arguments of a call, then
the optimizer.
"""

import math
from typing import Any

import jax
import numpy as np

from anybatch.call.checks import describe, is_array, is_key, whole_number
from anybatch.errors import InputError
from anybatch.privacy.accounting import constant, largest_sample
from anybatch.privacy.key_ledger import is_readable
from anybatch.privacy.sampling import PaddedBatch, rate_of

# The optimizer states of optax that accumulate the gradients of several calls.
ACCUMULATING = ("MultiStepsState", "ApplyEvery")


def check_noise(noise_multiplier: Any, allow_no_noise: bool) -> float:
    """The noise multiplier as a float. It must be positive, or 0 with `allow_no_noise`."""
    noise = constant("noise_multiplier", noise_multiplier, example="1.1")
    if not (0 < noise < math.inf or (noise == 0 and allow_no_noise)):
        raise InputError(
            "noise_multiplier must be positive and finite",
            given=f"noise_multiplier={noise_multiplier!r}",
            remedy="privacy.noise_multiplier(epsilon=3.0, delta=1e-5, sampling_rate=..., steps=...) computes one. "
            "To train without privacy, pass noise_multiplier=0, allow_no_noise=True.",
        )
    return noise


def check_clip_norm(clip_norm: Any, noise: float) -> float:
    """The clipping norm as a float. It must be positive, and finite unless there is no noise."""
    norm = constant("clip_norm", clip_norm, example="1.0")
    if not (0 < norm < math.inf or (norm == math.inf and noise == 0)):
        raise InputError(
            "clip_norm must be positive and finite: if nothing bounds the effect of one example, no noise is enough",
            given=f"clip_norm={clip_norm!r}",
            remedy="For example clip_norm=1.0. ab.per_example_norms shows the norms of gradients; it is not private.",
        )
    return norm


def check_sampling(num_examples: Any, expected_batch_size: Any) -> tuple[int, float]:
    """The number of examples, and their sampling rate."""
    number = whole_number("num_examples", num_examples, 1, example="60_000")
    return number, rate_of(number, expected_batch_size)


def check_options(options: dict[str, Any], expected_batch_size: float) -> dict[str, Any]:
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


# A call ---------------------------------------------------------------------------------------------------------------


def padding_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], is_padding: Any, *, batch: Any, call: str
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """The arguments with each `PaddedBatch` replaced by its examples, and the booleans that mark padding.

    Args:
      args: the positional arguments of a call. A `PaddedBatch` among them says which rows are padding.
      kwargs: the keyword arguments of the call. A `PaddedBatch` among them does too.
      is_padding: the keyword argument of that name, or None.
      batch: the arguments that are batches, for the message.
      call: how the function is called, for the message.

    Raises:
      InputError: if the call does not say which rows are padding, or says it twice.
    """
    padded = [value for value in (*args, *kwargs.values()) if isinstance(value, PaddedBatch)]
    masks = {id(mask): mask for mask in (is_padding, *(each.is_padding for each in padded)) if mask is not None}
    if not masks:
        raise _padding_unknown(kwargs, batch, call)
    if len(masks) > 1:
        raise InputError(
            "A call must say once which rows of the batch are padding",
            given=f"{len(padded)} PaddedBatch {'and' if is_padding is not None else 'without'} is_padding=",
            remedy=f"Take all arrays at once: {call.format('draw.take((x, y))')}; or pass each array by itself, and "
            "is_padding=draw.is_padding.",
        )

    def plain(value: Any) -> Any:
        return value.examples if isinstance(value, PaddedBatch) else value

    (mask,) = masks.values()
    mask = mask if is_array(mask) else np.asarray(mask)
    return tuple(map(plain, args)), {name: plain(value) for name, value in kwargs.items()}, mask


def _padding_unknown(kwargs: dict[str, Any], batch: Any, call: str) -> InputError:
    others = [f"{name}={describe(value)}" for name, value in kwargs.items() if _looks_like_padding(name, value)]
    ignored = f", and {', '.join(others)}, which only the loss would see" if others else ""
    rows = rows_of(batch) or "len(batch)"
    return InputError(
        "A call must say which rows of the batch are padding: padding that counts as examples voids the guarantee",
        given=f"{' and '.join(type(each).__name__ for each in batch) or 'no batch'} without is_padding{ignored}",
        remedy=f"Pass {call.format('draw.take(data)')} for each draw of privacy.poisson_batches(...), or "
        "ab.fit(step, state, batches.of(data)). For a batch without padding, pass "
        f"is_padding=np.zeros({rows}, bool).",
    )


def rows_of(batch: Any) -> int | None:
    """The number of rows of the arrays of a batch; None if they differ, or there are no arrays."""
    rows = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if getattr(leaf, "ndim", 0)}
    return rows.pop() if len(rows) == 1 else None


def check_shared(arguments: dict[str, Any], rows: int | None) -> None:
    """Refuses an array with one row per example that is not part of the batch: every example would see all of it.

    Args:
      arguments: the arguments that are not part of the batch, by name.
      rows: the number of rows of the batch. If there is only one, no example can see another.

    Raises:
      InputError: for an array, or a list of numbers, with as many rows.
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


def check_batch_size(
    batch: Any, is_padding: Any, num_examples: int, sampling_rate: float, max_batch_size: int | None
) -> None:
    """Refuses a batch with more examples than Poisson sampling at the declared rate would ever give.

    Args:
      batch: a tree of arrays with one row for each example.
      is_padding: booleans that mark padding, which is not counted. If they cannot be read without waiting for a device,
        nothing is counted.
      num_examples: the number of examples of the dataset.
      sampling_rate: the declared sampling rate.
      max_batch_size: the declared largest number of rows, if any.
    """
    size = rows_of(batch)
    if size is None:
        return  # clipped_grad raises an error that says what is wrong
    if max_batch_size is not None and size > max_batch_size:
        raise InputError(
            "A batch must not be larger than declared",
            given=f"{size} rows and max_batch_size={max_batch_size}",
            remedy="Pass max_batch_size=batches.batch_size, of privacy.poisson_batches(...).",
        )
    padding = _read_if_ready(is_padding)
    if padding is None:
        return
    examples = size - int(padding.sum())
    most = largest_sample(num_examples, sampling_rate, failure=1e-15)
    if examples > most:
        raise InputError(
            "A batch must be a Poisson sample at the declared rate: larger batches spend more than is accounted for",
            given=f"{examples} examples, where {num_examples * sampling_rate:g} of {num_examples} are expected and "
            f"more than {most} have a probability below 1e-15",
            remedy="Draw batches by privacy.poisson_batches(num_examples, expected_batch_size=..., steps=..., "
            "seed=...), and pass its is_padding; or declare the larger expected_batch_size.",
        )


def _read_if_ready(is_padding: Any) -> np.ndarray | None:
    """The booleans that mark padding; None under `jit`, or if reading them would wait for a device."""
    if isinstance(is_padding, jax.core.Tracer):
        return None
    return np.asarray(is_padding) if is_readable(is_padding) else None


def check_outside_shard_map() -> None:
    """Refuses to add noise inside `shard_map`, where each device would add its own to its part of the sum."""
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if axes:
        raise InputError(
            "Noise is added once, to the sum over all devices",
            given=f"a call inside shard_map over {axes}",
            remedy="Call it outside, and pass mesh=... to shard the batch over devices.",
        )


# The optimizer --------------------------------------------------------------------------------------------------------


def check_optimizer(optimizer: Any, params: Any = None) -> None:
    """Refuses an object that is not an optimizer, and an optimizer that accumulates the gradients of several calls.

    Args:
      optimizer: an optimizer of optax, or an object with the same `init` and `update`.
      params: the parameters, to inspect the state of the optimizer. Without them, only its type is checked.

    Raises:
      InputError: if it is refused.
    """
    if type(optimizer).__name__ == "MultiSteps":
        raise _accumulates("optax.MultiSteps")
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise InputError(
            "optimizer must have init and update, like those of optax",
            given=f"optimizer={optimizer!r}",
            remedy="For example optax.sgd(0.1); the optimizer, not its state.",
        )
    if params is not None:
        state = jax.eval_shape(optimizer.init, params)
        parts = jax.tree.leaves(state, is_leaf=lambda part: type(part).__name__ in ACCUMULATING)
        found = {type(part).__name__ for part in parts} & set(ACCUMULATING)
        if found:
            raise _accumulates({"MultiStepsState": "optax.MultiSteps", "ApplyEvery": "optax.apply_every"}[min(found)])


def _accumulates(name: str) -> InputError:
    return InputError(
        "optimizer must take one step for each call: noise is added and accounted for once in each",
        given=f"an optimizer with {name}, which accumulates several noised gradients for one step",
        remedy="Pass the optimizer inside it and the full batch. With microbatch_size=..., its gradient is computed "
        "per microbatch, and noise is added once, after the last.",
    )
