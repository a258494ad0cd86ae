"""`anybatch demo`: the four recipes, what is read of a few losses, and one gradient at several microbatch sizes."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from anybatch import compat, recipes
from anybatch.gradient import value_and_grad
from anybatch.read import read

WIDTHS = (784, 1024, 1024, 10)
REPEATS = 3
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One way of computing the gradient of the batch."""

    microbatch_size: int | None  # None for the full batch
    temporaries: int  # bytes, as XLA reports them
    seconds: float
    difference: float  # largest, relative to the largest entry of that leaf of the full-batch gradient


def run(*, examples: int, memory_mib: int) -> None:
    """Prints the demonstration, with a progress bar where the output is a terminal."""
    console = Console()
    console.print(f"[bold]anybatch[/bold] on {_device()}, JAX {compat.versions()[0]}\n")
    console.print(_recipe_table())
    console.print(_reading_table())
    sizes = [None, *(size for size in (1024, 256, 64) if size < examples)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Measuring", total=len(sizes))
        measured = []
        for measurement in measure(examples, sizes):
            measured.append(measurement)
            progress.update(task, advance=1, description=f"Measured {_size_text(measurement)}")
    console.print(_gradient_table(measured, examples, memory_mib))
    console.print(_verdict(measured, memory_mib), soft_wrap=True, highlight=False)


def measure(examples: int, sizes: list[int | None]) -> Iterator[Measurement]:
    """Computes the gradient of an MLP's loss over `examples` examples, at each microbatch size in turn."""
    params, batch = _problem(examples)
    expected = jax.jit(jax.grad(_loss))(params, batch)
    for size in sizes:
        fun = jax.jit(value_and_grad(_loss, microbatch_size=size))
        compiled = fun.lower(params, batch).compile()
        _, gradient = jax.block_until_ready(compiled(params, batch))
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            jax.block_until_ready(compiled(params, batch))
            seconds.append(time.perf_counter() - start)
        yield Measurement(
            microbatch_size=size,
            temporaries=compat.temporaries(compiled),
            seconds=statistics.median(seconds),
            difference=max(jax.tree.leaves(jax.tree.map(_difference, gradient, expected))),
        )


def _problem(examples: int) -> tuple[Any, Any]:
    keys = iter(jax.random.split(jax.random.key(0), len(WIDTHS) + 1))
    shapes = itertools.pairwise(WIDTHS)
    params = [jax.random.normal(next(keys), shape) * (2 / shape[0]) ** 0.5 for shape in shapes]
    images = jax.random.normal(next(keys), (examples, WIDTHS[0]))
    return params, {"image": images, "label": jax.random.randint(next(keys), (examples,), 0, WIDTHS[-1])}


def _loss(params: Any, batch: Any) -> jax.Array:
    hidden = batch["image"]
    for weights in params[:-1]:
        hidden = jax.nn.gelu(hidden @ weights)
    log_probabilities = jax.nn.log_softmax(hidden @ params[-1])
    return -jnp.mean(jnp.take_along_axis(log_probabilities, batch["label"][:, None], axis=1))


def _difference(actual: jax.Array, expected: jax.Array) -> float:
    return float(jnp.abs(actual - expected).max() / jnp.abs(expected).max())


def _recipe_table() -> Table:
    table = Table(title="The four recipes: one gradient, several routes", title_justify="left")
    for column in ("recipe", "routes", "result"):
        table.add_column(column)
    x, y = jnp.arange(1.0, 9.0), 2 * jnp.arange(1.0, 9.0)
    two_ways = recipes.equivalent_two_ways(3.0, x)
    table.add_row("equivalent_two_ways", "vmap of grad, grad of the sum", _numbers(two_ways))
    in_pieces = jnp.stack([recipes.microbatched_grads(1.0, 0.0, x, y, n) for n in (1, 4)])
    table.add_row("microbatched_grads", "in 1 piece, in 4 by lax.scan", _numbers(in_pieces))
    by_row = recipes.shard_map_vs_vmap(x.reshape(2, 4))
    table.add_row("shard_map_vs_vmap", "over devices, vmap", _numbers(by_row))
    inputs = x.reshape(2, 4, 1) / 8
    losses = jnp.concatenate(
        [recipes.grad_accumulation_step(0, inputs, inputs[..., 0], learning_rate) for learning_rate in (0.0, 0.5)]
    )
    table.add_row("grad_accumulation_step", "loss before, after a step of 2", _numbers(losses))
    return table


def _reading_table() -> Table:
    table = Table(title="What is read of a loss", title_justify="left", caption="z = tanh(x @ w), 64 examples")
    for column in ("loss", "over its examples", "passes"):
        table.add_column(column)

    def read_as(text: str, head: Callable[[jax.Array, jax.Array], jax.Array]) -> None:
        batch = {"x": jnp.ones((64, 8)), "mask": jnp.ones(64)}
        reading = read(lambda w, batch: head(jnp.tanh(batch["x"] @ w), batch["mask"]), jnp.ones((8, 4)), batch)
        table.add_row(text, reading.kind, str(reading.passes))

    read_as("mean(z**2)", lambda z, _: jnp.mean(z**2))
    read_as("sum(z * mask) / sum(mask)", lambda z, mask: jnp.sum(z * mask[:, None]) / jnp.sum(mask))
    read_as("sqrt(mean(z**2))", lambda z, _: jnp.sqrt(jnp.mean(z**2)))
    read_as("mean(logsumexp(z @ z.T))", lambda z, _: jnp.mean(jax.nn.logsumexp(z @ z.T, axis=1)))
    return table


def _gradient_table(measured: list[Measurement], examples: int, memory_mib: int) -> Table:
    title = f"The gradient of {examples:,} examples, in {memory_mib} MiB"
    table = Table(title=title, title_justify="left", caption=f"MLP {'-'.join(map(str, WIDTHS))}, float32")
    for column in ("microbatch", "temporaries", "fits", "time", "difference"):
        table.add_column(column, justify="right")
    for row in measured:
        fits = row.temporaries <= memory_mib * MIB
        cells = (_size_text(row), f"{row.temporaries / MIB:.1f} MiB", "yes" if fits else "no")
        table.add_row(*cells, f"{row.seconds * 1e3:.0f} ms", f"{row.difference:.0e}", style=None if fits else "dim")
    return table


def _verdict(measured: list[Measurement], memory_mib: int) -> str:
    full, fitting = measured[0], [row for row in measured if row.temporaries <= memory_mib * MIB]
    if not fitting:
        smallest = min(measured, key=lambda row: row.temporaries)
        return f"None fits {memory_mib} MiB; the least is {smallest.temporaries / MIB:.1f} MiB."
    best = min(fitting, key=lambda row: row.seconds)
    if best is full:
        return f"The full batch fits {memory_mib} MiB: no microbatches needed."
    less, slower = full.temporaries / best.temporaries, best.seconds / full.seconds
    return (
        f"The same gradient in {less:.0f} times less memory and {slower:.2f} times the time of the full batch:\n"
        f"    anybatch.value_and_grad(loss, microbatch_size={best.microbatch_size})(params, batch)"
    )


def _size_text(measurement: Measurement) -> str:
    return "full" if measurement.microbatch_size is None else str(measurement.microbatch_size)


def _numbers(array: jax.Array) -> str:
    return "  ".join(f"{number:.4g}" for number in array.reshape(-1).tolist())


def _device() -> str:
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind}"
