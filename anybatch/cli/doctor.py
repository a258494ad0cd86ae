"""`anybatch doctor`: prints versions, devices, memory and the cache, and which packages are missing."""

import importlib.metadata
import os
import pathlib
import platform
import tempfile

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anybatch import __version__
from anybatch.call.checks import Finding
from anybatch.call.memory import memory_left, memory_limit, readable
from anybatch.cli import EXTRAS
from anybatch.errors import install
from anybatch.gradients.value_and_grad import value_and_grad
from anybatch.jaxprs import versions
from anybatch.planning import store


def print_findings() -> bool:
    """Prints all findings as a table. Returns True if nothing is wrong."""
    findings = examine()
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        mark = "[green]ok[/green]" if finding.is_well else "[red]--[/red]"
        remedy = f"\n[bold]{escape(finding.remedy)}[/bold]" if finding.remedy else ""
        table.add_row(mark, finding.subject, escape(finding.text) + remedy)
    Console(soft_wrap=True).print(table)
    return all(finding.is_well for finding in findings)


def examine() -> list[Finding]:
    """All findings: versions, devices, one test gradient, the cache of plans, optional packages."""
    return [*_versions(), *_devices(), _gradient(), _cache(), *_packages()]


def _versions() -> list[Finding]:
    jax_version, runtime = versions.versions()
    remedy = "" if versions.is_supported() else 'pip install "jax>=0.10,<0.13"'
    return [
        Finding("anybatch", __version__),
        Finding("Python", platform.python_version()),
        Finding("JAX", f"{jax_version}, jaxlib {runtime}", not remedy, remedy),
    ]


def _devices() -> list[Finding]:
    findings = []
    devices = jax.local_devices()
    for device in devices if devices[0].platform != "cpu" else devices[:1]:
        limit, left = memory_limit([device]), memory_left([device])
        memory = "" if limit is None or left is None else f", {readable(left)} of {readable(limit)} left"
        number = f"{len(devices)} x " if device.platform == "cpu" and len(devices) > 1 else ""
        findings.append(Finding("device", f"{number}{device.device_kind} ({device.platform}{memory})"))
    has_gpu = any(pathlib.Path("/dev").glob("nvidia[0-9]*"))
    if has_gpu and all(device.platform == "cpu" for device in devices):
        text = "JAX does not see the NVIDIA GPU of this machine"
        findings.append(Finding("device", text, False, 'pip install "jax[cuda12]"'))
    if os.environ.get("JAX_PLATFORMS"):
        findings.append(Finding("device", f"restricted by JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}"))
    return findings


def _gradient() -> Finding:
    """Compares a small gradient, computed in microbatches, with `jax.grad`."""
    x = jnp.arange(12.0).reshape(6, 2)
    w = jnp.ones((2, 3))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    difference = float(jnp.abs(value_and_grad(loss, microbatch_size=4)(w, x)[1] - jax.grad(loss)(w, x)).max())
    text = f"microbatches and the full batch agree to {difference:.0e}"
    return Finding("gradient", text, is_well=difference < 1e-5)


def _cache() -> Finding:
    folder = store.folder()
    if folder is None:
        return Finding("cache", "off: every process makes its plans again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding("cache", f"{folder} is not writable: {error.strerror}", False, "export ANYBATCH_CACHE=...")
    return Finding("cache", f"{folder}, {len(list(folder.glob('*.json')))} plans")


def _packages() -> list[Finding]:
    findings = []
    for package, (extra, purpose) in EXTRAS.items():
        try:
            findings.append(Finding(package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(Finding(package, f"missing; needed for {purpose}", False, install(extra)))
    return findings
