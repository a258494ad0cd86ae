"""Assertions for your own tests: the gradient of a training loop, its memory, and its collectives.

`assert_full_batch_gradient` runs a loop and compares its gradient with that of the full batch. The other assertions
compile a function and run nothing, so that a laptop can check a program for a larger machine. Each raises an
`AssertionError` that says what must hold, what was found, and what to do. Each returns what it has found.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax

from anybatch.auditing.audit import Audit, audit
from anybatch.call.checks import describe, is_array, named_leaves, one_of, whole_number
from anybatch.call.memory import memory_budget, readable
from anybatch.call.placement import local_bytes
from anybatch.collectives import KINDS, Traffic
from anybatch.errors import InputError
from anybatch.jaxprs.hlo import Program

# Temporaries may grow by this share of themselves and by this many bytes without being called growth: a loop keeps a
# few numbers of each microbatch, and buffers begin at multiples of 64 bytes or more.
SLACK_SHARE = 0.01
SLACK_BYTES = 4096


def assert_full_batch_gradient(
    candidate: Callable[..., Any], loss: Callable[..., Any], params: Any, batch: Any, *args: Any, **options: Any
) -> Audit:
    """Asserts that a function computes the gradient of the full batch, however it cuts the batch.

    It is `ab.audit(...).raise_if_different()`. Both the candidate and `jax.value_and_grad` of the loss run once or a
    few times, so a small model and a small batch are best.

    >>> import jax, jax.numpy as jnp, anybatch as ab
    >>> def loss(w, x):
    ...     return jnp.mean((x @ w) ** 2)
    >>> def in_two_halves(w, x):
    ...     one, other = jnp.split(x, 2)
    ...     return (jax.grad(loss)(w, one) + jax.grad(loss)(w, other)) / 2
    >>> w, x = jnp.ones(2), jnp.arange(8.0).reshape(4, 2)
    >>> ab.testing.assert_full_batch_gradient(in_two_halves, loss, w, x).same
    True

    Args:
      candidate: the function to check, as for `ab.audit`: it returns gradients, a step of an optimizer, or a state.
      loss: the loss of the full batch.
      params: the parameters.
      batch: the full batch.
      *args: the other arguments of the loss.
      **options: the options of `ab.audit`, such as `has_aux`, `optimizer` and `state`.

    Returns:
      The `Audit`.

    Raises:
      AssertionError: if the gradient is another one. The message has the table of the audit and the cause.
    """
    __tracebackhide__ = True
    return audit(candidate, loss, params, batch, *args, **options).raise_if_different()


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """The bytes of a compiled program on one device, as XLA counts them. Print it for a table.

    >>> print(ProgramMemory(arguments=3 * 2**20, outputs=2**20, aliased=2**20, temporaries=5 * 2**20))
    arguments     3.0 MiB
    outputs       1.0 MiB
    aliased      -1.0 MiB
    temporaries   5.0 MiB
    total         8.0 MiB

    Attributes:
      arguments: the arguments that the program uses.
      outputs: its results.
      aliased: the part of the outputs that takes the place of donated arguments.
      temporaries: everything between, such as activations.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int

    @classmethod
    def of(cls, compiled: Any) -> "ProgramMemory":
        """The memory of a compiled program, `jax.jit(fun).lower(...).compile()`."""
        found = compiled.memory_analysis()
        return cls(
            arguments=found.argument_size_in_bytes,
            outputs=found.output_size_in_bytes,
            aliased=found.alias_size_in_bytes,
            temporaries=found.temp_size_in_bytes,
        )

    @property
    def total(self) -> int:
        """The bytes of all of them together: arguments, outputs that are not aliased, and temporaries."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    def __str__(self) -> str:
        rows = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {"total": self.total}
        texts = {name: readable(number) for name, number in rows.items()}
        texts["aliased"] = f"-{texts['aliased']}" if self.aliased else texts["aliased"]
        width = max(map(len, texts.values()))
        return "\n".join(f"{name:11}  {text:>{width}}" for name, text in texts.items())


def assert_memory(
    fun: Any, args: Sequence[Any] = (), at_most: int | str = "8GiB", kwargs: Mapping[str, Any] | None = None
) -> ProgramMemory:
    """Asserts that one run of a function takes at most so many bytes on each device. It compiles, and runs nothing.

    The bytes are those that the planner of anybatch counts: arguments, outputs that are not aliased, and temporaries,
    as XLA reports them for the device that the program is compiled for. Arrays that you keep beside, such as the state
    of an optimizer that is not an argument, are not counted.

    >>> import jax, jax.numpy as jnp, anybatch as ab
    >>> def loss(w, x):
    ...     return jnp.mean(jnp.tanh(x @ w) ** 2)
    >>> w = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    >>> used = ab.testing.assert_memory(ab.grad(loss, microbatch_size=64), (w, x), at_most="2MiB")
    >>> used.arguments == 4 * (64 * 256 + 4096 * 64)
    True
    >>> ab.testing.assert_memory(jax.grad(loss), (w, x), at_most="2MiB")
    Traceback (most recent call last):
        ...
    AssertionError: The program may take at most 2.0 MiB on each device.
    ...

    Args:
      fun: a function, jitted or not, or a compiled program. A plain function is compiled as `jax.jit` would; what it
        donates, and where its arguments are, is known only of a function that is jitted already.
      args: its arguments, as arrays or as `jax.ShapeDtypeStruct`. Flax and Equinox models are allowed. Leaves that are
        no arrays are constants, unless the function is jitted. A function that changes an NNX model needs `nnx.jit`.
      at_most: a number of bytes, or a text with a unit, e.g. "8GiB".
      kwargs: its keyword arguments.

    Returns:
      The bytes that it takes, by kind.

    Raises:
      AssertionError: if it takes more. The message has the bytes by kind.
    """
    __tracebackhide__ = True
    most = _parsed("at_most", at_most, "8GiB")
    used = ProgramMemory.of(_compiled(fun, args, kwargs))
    if used.total > most:
        fixed = used.total - used.temporaries
        _fail(
            f"The program may take at most {readable(most)} on each device",
            f"It takes {readable(used.total)}:",
            str(used),
            "Arguments and outputs alone are too large: donate arguments with jax.jit(fun, donate_argnums=...), or "
            "shard them over a mesh."
            if fixed > most
            else "Temporaries are what smaller microbatches save: pass a smaller microbatch_size or memory= to "
            "ab.value_and_grad, or wrap blocks of the model in jax.checkpoint.",
        )
    return used


def assert_flat_memory(
    fun: Any,
    args: Sequence[Any],
    batch_argnums: int | Sequence[int] = 1,
    factor: int = 4,
    slack: int | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[ProgramMemory, ProgramMemory]:
    """Asserts that the temporaries of a function do not grow with the batch. It compiles twice, and runs nothing.

    The function is compiled for the batch, and for `factor` times as many examples. The temporaries of the second
    program may exceed those of the first by 1% and 4 KiB. Arguments and outputs may grow, since a larger batch is
    larger. A loop over microbatches of a fixed size passes; the gradient of the full batch does not, nor does a loop
    over a fixed number of microbatches.

    >>> import jax, jax.numpy as jnp, anybatch as ab
    >>> def loss(w, x):
    ...     return jnp.mean(jnp.tanh(x @ w) ** 2)
    >>> w = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((1024, 64), jnp.float32)
    >>> small, large = ab.testing.assert_flat_memory(ab.grad(loss, microbatch_size=64), (w, x))
    >>> large.arguments > small.arguments
    True
    >>> ab.testing.assert_flat_memory(jax.grad(loss), (w, x))
    Traceback (most recent call last):
        ...
    AssertionError: Temporaries must not grow with the number of examples.
    ...

    Args:
      fun: a function, jitted or not.
      args: its arguments, as arrays or as `jax.ShapeDtypeStruct`, as for `assert_memory`. Take a batch of several
        microbatches, of the sizes that you train with: shapes cost no memory.
      batch_argnums: which arguments are the batch. Axis 0 of each of their arrays counts the examples.
      factor: how many times larger the second batch is.
      slack: the growth that is allowed, instead of 1% and 4 KiB: a number of bytes, a text with a unit, or a percentage
        of the temporaries of the first program, e.g. "5%".
      kwargs: its keyword arguments.

    Returns:
      The bytes of both programs, by kind.

    Raises:
      AssertionError: if the temporaries grow.
      InputError: if they do not, and the batch is so small that growth would be within the slack.
    """
    __tracebackhide__ = True
    if _is_compiled(fun):
        raise InputError(
            "assert_flat_memory compiles for two batches, so it needs a function",
            given=f"{type(fun).__name__}, a compiled program",
            remedy="Pass the function, jitted or not.",
        )
    factor = whole_number("factor", factor, 2, example="4")
    argnums = [batch_argnums] if isinstance(batch_argnums, int) else list(batch_argnums)
    given, _ = _with_examples(args, argnums, 1)
    more, added = _with_examples(args, argnums, factor)
    small, large = (ProgramMemory.of(_compiled(fun, each, kwargs)) for each in (given, more))
    allowed = SLACK_BYTES + int(SLACK_SHARE * small.temporaries)
    if slack is not None:
        allowed = 0 if slack == 0 else _parsed("slack", slack, "64KiB", left=small.temporaries)
    growth = large.temporaries - small.temporaries
    if growth > allowed:
        _fail(
            "Temporaries must not grow with the number of examples",
            f"With {factor} times as many examples they grow by {readable(growth)}; {readable(allowed)} is allowed:",
            f"temporaries  {readable(small.temporaries)} -> {readable(large.temporaries)}\n"
            f"that is      {growth / max(added, 1):.2g} times the bytes of the examples that were added",
            "Compute the gradient in microbatches of a fixed size, e.g. ab.value_and_grad(loss, microbatch_size=8). A "
            "loop over a fixed number of microbatches grows, too, and so does a copy of the batch.",
        )
    if added <= allowed:
        raise InputError(
            "The batch must be large enough to show growth: the examples that are added must take more bytes than the "
            "slack",
            given=f"{readable(added)} for {factor} times as many examples, and a slack of {readable(allowed)}",
            remedy="Pass a larger batch, e.g. jax.ShapeDtypeStruct((4096, 64), jnp.float32), which costs no memory, a "
            "larger factor, or a smaller slack.",
        )
    return small, large


def assert_collectives(
    fun: Any,
    args: Sequence[Any] = (),
    *,
    mesh: Any = None,
    axis: str | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    others: int | str = 0,
    all_reduce: int | None = None,
    all_gather: int | None = None,
    reduce_scatter: int | None = None,
    all_to_all: int | None = None,
    ragged_all_to_all: int | None = None,
    collective_permute: int | None = None,
    collective_broadcast: int | None = None,
) -> Traffic:
    """Asserts how many collectives one run of a function executes. It compiles, and runs nothing.

    They are counted in the compiled program: one in a loop counts as often as the loop runs, and one in a branch as if
    the branch were taken. The reduction of a whole pytree is usually one collective. A kind that you name must be
    executed exactly so often, and kinds that you do not name not at all, unless `others="any"`.

    >>> import jax, jax.numpy as jnp, anybatch as ab
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    >>> def loss(w, x):
    ...     return jnp.mean((x @ w) ** 2)
    >>> shardings = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    >>> args = jnp.ones(4), jnp.ones((8, 4))
    >>> traffic = ab.testing.assert_collectives(jax.grad(loss), args, in_shardings=shardings, all_reduce=1)
    >>> traffic.executed
    1

    Args:
      fun: a function, jitted or not, or a compiled program.
      args: its arguments, as for `assert_memory`. Arrays and `jax.ShapeDtypeStruct` may have shardings.
      mesh: the mesh, for the names of its axes in the message.
      axis: counts only collectives along this axis of the mesh.
      in_shardings: as for `jax.jit`, for a function whose arguments have no shardings.
      out_shardings: as for `jax.jit`.
      kwargs: its keyword arguments.
      others: 0 if a run may execute no collectives of other kinds, or "any".
      all_reduce: how often a run executes an all-reduce, such as a `psum`; likewise for the other kinds.
      all_gather: the same for all-gathers.
      reduce_scatter: the same for reduce-scatters.
      all_to_all: the same for all-to-alls.
      ragged_all_to_all: the same for ragged all-to-alls.
      collective_permute: the same for permutations, such as a `ppermute`.
      collective_broadcast: the same for broadcasts.

    Returns:
      The collectives that were found.

    Raises:
      AssertionError: if the numbers are others, or not known. The message has the table of the collectives.
      InputError: if the program is for one device, which has nobody to communicate with.
      UnreadableProgramError: if the compiled program has an unknown form.
    """
    __tracebackhide__ = True
    if others != 0 or isinstance(others, bool):
        one_of("others", others, ("any",))
    given = (
        all_reduce,
        all_gather,
        reduce_scatter,
        all_to_all,
        ragged_all_to_all,
        collective_permute,
        collective_broadcast,
    )
    named = {
        kind: whole_number(kind.replace("-", "_"), number)
        for kind, number in zip(KINDS, given, strict=True)
        if number is not None
    }
    expected = named if others == "any" else dict.fromkeys(KINDS, 0) | named
    if axis is not None and mesh is not None:
        one_of("axis", axis, tuple(mesh.axis_names))
    shardings = {"in_shardings": in_shardings, "out_shardings": out_shardings}
    compiled = _compiled(fun, args, kwargs, {name: each for name, each in shardings.items() if each is not None})
    if Program(compiled.as_text()).devices == 1:
        raise InputError(
            "Collectives are counted in a program for several devices",
            given="a program for one device",
            remedy="Pass arrays or jax.ShapeDtypeStruct with sharding=NamedSharding(mesh, P('data')), or "
            "in_shardings=. A CPU has several devices with XLA_FLAGS=--xla_force_host_platform_device_count=8.",
        )
    traffic = Traffic.of(compiled, mesh)
    traffic = traffic if axis is None else traffic.over(axis)
    found = dict.fromkeys(KINDS, 0) | traffic.by_kind
    wrong = [kind for kind, number in expected.items() if found[kind] != number]
    if wrong:
        along = "" if axis is None else f" along {axis!r}"
        _fail(
            f"One run must execute {_numbers({kind: expected[kind] for kind in wrong})}{along}",
            f"It executes {_numbers({kind: found[kind] for kind in wrong})}:",
            str(traffic),
            _remedy(traffic, wrong, found, expected),
        )
    return traffic


def _numbers(counts: Mapping[str, int | None]) -> str:
    """The counts in words, e.g. "1 all-reduce, 0 all-gather"."""
    return ", ".join(f"{'an unknown number of' if n is None else n} {kind}" for kind, n in counts.items())


def _remedy(traffic: Traffic, wrong: list[str], found: Mapping[str, int | None], expected: Mapping[str, int]) -> str:
    if any(found[kind] is None for kind in wrong):
        return "A loop whose trip count is not in the program repeats them: use lax.scan, or a fixed length."
    if all((found[kind] or 0) < expected[kind] for kind in wrong):
        return (
            "Reductions may be missing: check that the batch is sharded, and that the gradient is summed over all "
            "devices. The compiler may also have merged some: then the number to expect is the smaller one."
        )
    if any(each.in_loop and each.kind in wrong for each in traffic.collectives):
        return (
            "A loop repeats some of them: add up the gradients of the microbatches on each device, and reduce once "
            "after the loop, as ab.value_and_grad(loss, microbatch_size=8, mesh=mesh) does."
        )
    return (
        'The column "from" names the operations that they come from. Where it is empty, a sharding of an argument or '
        "a result has made the compiler add them."
    )


def _parsed(name: str, given: Any, example: str, left: int | None = None) -> int:
    """The bytes of an option; a percentage is one of `left`, or else of the free memory."""
    try:
        number = memory_budget(given, left) if given is not None else None
    except InputError:
        number = None
    if number is None:
        raise InputError(
            f"{name} must be a number of bytes, or a text with a unit",
            given=f"{name}={given!r}",
            remedy=f'For example {name}="{example}".',
        )
    return number


def _fail(must: str, found: str, table: str, remedy: str) -> NoReturn:
    """Raises an AssertionError of three parts."""
    __tracebackhide__ = True
    indented = "\n".join("    " + line for line in table.splitlines())
    raise AssertionError(f"{must}.\n{found}\n{indented}\n{remedy}")


# Compiling.


def _is_compiled(fun: Any) -> bool:
    return hasattr(fun, "memory_analysis") and hasattr(fun, "as_text")


def _compiled(
    fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, jit_options: Mapping[str, Any] | None = None
) -> Any:
    """The compiled program of a function for these arguments."""
    if _is_compiled(fun):
        return fun
    if not callable(fun):
        raise InputError(
            "fun must be a function or a compiled program",
            given=f"{type(fun).__name__}",
            remedy="Pass the function, e.g. jax.grad(loss), and its arguments as a tuple.",
        )
    if not isinstance(args, (tuple, list)):
        raise InputError(
            "args must be a tuple with the arguments of the function",
            given=f"args of type {type(args).__name__}",
            remedy="Pass for example args=(params, batch), or (params,) for a single argument.",
        )
    # Equinox's jit and `train_step` lower for arrays only. Inside of another jit they take shapes, too.
    arrays_only = type(fun).__module__.startswith(("equinox.", "anybatch.")) and any(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((args, kwargs))
    )
    if hasattr(fun, "lower") and not jit_options and not arrays_only:
        program = fun.lower(*args, **(kwargs or {})).compile()
        return getattr(program, "compiled", program)  # Equinox and Flax wrap what JAX has compiled
    return _compiled_arrays(fun, args, dict(kwargs or {}), dict(jit_options or {}))


def _compiled_arrays(fun: Any, args: Sequence[Any], kwargs: dict[str, Any], jit_options: dict[str, Any]) -> Any:
    """Compiles a plain function. Arrays are the arguments of the program, and all other leaves are constants."""
    if jit_options:  # shardings follow the arguments, so these must stay as they are
        return jax.jit(lambda *args, **kwargs: fun(*args, **kwargs), **jit_options).lower(*args, **kwargs).compile()
    leaves, structure = jax.tree.flatten((tuple(args), kwargs))
    places = [place for place, leaf in enumerate(leaves) if _is_input(leaf)]

    def call(*arrays: Any) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        all_args, all_kwargs = jax.tree.unflatten(structure, filled)
        results = jax.tree.leaves(fun(*all_args, **all_kwargs))
        return [result for result in results if _is_input(result) or isinstance(result, (int, float, complex))]

    return jax.jit(call).lower(*(leaves[place] for place in places)).compile()


def _is_input(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, (jax.ShapeDtypeStruct, jax.core.Tracer))


def _with_examples(args: Sequence[Any], argnums: Sequence[int], factor: int) -> tuple[tuple[Any, ...], int]:
    """The arguments with `factor` times as many examples, as shapes, and the bytes that are added on one device."""
    if not isinstance(args, (tuple, list)) or not all(-len(args) <= argnum < len(args) for argnum in argnums):
        raise InputError(
            "args must be a tuple with the arguments of the function, and batch_argnums positions in it",
            given=f"args of type {type(args).__name__} and batch_argnums={tuple(argnums)}",
            remedy="Pass for example args=(params, batch) and batch_argnums=1.",
        )
    changed, added = list(args), 0
    for argnum in argnums:
        for name, leaf in named_leaves(f"args[{argnum}]", args[argnum]):
            if not _is_input(leaf) or not leaf.shape:
                raise InputError(
                    "Every leaf of the batch must be an array with an axis of examples",
                    given=f"{name}: {describe(leaf)}",
                    remedy="Take it out of the batch, or out of batch_argnums.",
                )
            added += (factor - 1) * local_bytes(leaf)
        changed[argnum] = jax.tree.map(lambda leaf: _repeated(leaf, factor), args[argnum])
    return tuple(changed), added


def _repeated(leaf: Any, factor: int) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.Array) and not leaf.committed:
        sharding = None  # it is where JAX puts arrays by default
    return jax.ShapeDtypeStruct((factor * leaf.shape[0], *leaf.shape[1:]), leaf.dtype, sharding=sharding)
