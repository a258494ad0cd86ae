"""Profiles a compiled program: a text file with its kernels by time and the HLO operations they come from."""

import collections
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax


def profile(name: str, compiled: Any, arguments: tuple[Any, ...], folder: pathlib.Path, runs: int = 3) -> None:
    """Writes `name.hlo` and `name.txt` into the folder. The program must have run once before."""
    folder.mkdir(parents=True, exist_ok=True)
    text = compiled.as_text()
    (folder / f"{name}.hlo").write_text(text)
    with tempfile.TemporaryDirectory() as traced:
        with jax.profiler.trace(traced):
            start = time.perf_counter()
            for _ in range(runs):
                jax.block_until_ready(compiled(*arguments))
            seconds = (time.perf_counter() - start) / runs
        files = list(pathlib.Path(traced).rglob("*.xplane.pb"))
        events = [event for file in files for event in kernels(jax.profiler.ProfileData.from_file(str(file)))]
    summary = [f"{name}: {seconds * 1e3:.2f} ms for each of {runs} runs, as the host sees them while traced"]
    origins = dict(_origins(text))
    by_operation = [(operation, origins.get(operation, ""), duration) for operation, _, duration in events]
    summary += table("by HLO operation", by_operation, runs)
    summary += table("by kernel", [(kernel, "", duration) for _, kernel, duration in events], runs)
    by_origin = [(_place(origins.get(operation, "")), "", duration) for operation, _, duration in events]
    summary += table("by place in the JAX program", by_origin, runs)
    (folder / f"{name}.txt").write_text("\n".join(summary) + "\n")


def kernels(data: Any) -> Iterator[tuple[str, str, float]]:
    """All events on the device, or in the threads of a CPU: operation, kernel and milliseconds."""
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in devices or planes:
        for line in plane.lines:
            # Other lines of a device may repeat the events of its streams.
            if devices and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                if devices or "hlo_op" in stats:
                    yield str(stats.get("hlo_op", "no operation")), event.name, event.duration_ns / 1e6


def table(title: str, events: list[tuple[str, str, float]], runs: int, most: int = 40) -> list[str]:
    """The entries that take the most time, for one run."""
    totals: dict[tuple[str, str], float] = collections.defaultdict(float)
    calls: dict[tuple[str, str], int] = collections.defaultdict(int)
    for name, note, duration in events:
        totals[name, note] += duration
        calls[name, note] += 1
    everything = sum(totals.values())
    lines = [f"\n{title}: {everything / runs:.2f} ms for each run, {len(totals)} of them"]
    for key in sorted(totals, key=totals.__getitem__, reverse=True)[:most]:
        share = totals[key] / everything
        lines.append(f"{totals[key] / runs:9.3f} ms {share:6.1%} {calls[key] / runs:7.1f}x  {key[0][:100]}  {key[1]}")
    return lines


def _origins(hlo: str) -> Iterator[tuple[str, str]]:
    """For each operation of a program: its shape, and the name that JAX gave it."""
    for line in hlo.splitlines():
        if found := re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (\(?[a-z0-9]+\[[\d,]*\])", line):
            named = re.search(r'op_name="([^"]*)"', line)
            yield found[1], f"{found[2]} {named[1] if named else ''}"


def _place(origin: str) -> str:
    """The name without shape and numbers, so that layers are counted together."""
    return re.sub(r"\d+", "", origin.partition(" ")[2]) or "unnamed"
