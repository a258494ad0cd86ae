"""`anybatch doctor`: what this machine has, and what is missing."""

import importlib.metadata
import os
import pathlib
import platform
import tempfile

import jax
import jax.numpy as jnp

from anybatch import __version__
from anybatch.call.checks import Finding
from anybatch.call.memory import memory_left, memory_limit, readable
from anybatch.gradients.value_and_grad import value_and_grad
from anybatch.jaxprs import versions
from anybatch.planning import store

# package -> the extra that brings it, and what for
EXTRAS = {
    "optax": ("train", "optimizers"),
    "flax": ("train", "models"),
    "orbax-checkpoint": ("train", "checkpoints"),
    "dp-accounting": ("privacy", "the privacy that was spent"),
    "typer": ("cli", "the command line"),
    "rich": ("cli", "tables and progress bars"),
    "matplotlib": ("cli", "plots"),
    "jinja2": ("cli", "reports"),
}


def examine() -> list[Finding]:
    """Everything that the doctor looks at."""
    return [*_versions(), *_devices(), _gradient(), _cache(), *_packages()]


def _versions() -> list[Finding]:
    jax_version, runtime = versions.versions()
    is_known = versions.is_supported()
    remedy = "" if is_known else 'pip install "jax>=0.10,<0.13"'
    return [
        Finding("anybatch", __version__),
        Finding("Python", platform.python_version()),
        Finding("JAX", f"{jax_version}, jaxlib {runtime}", is_known, remedy),
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
        findings.append(
            Finding("device", "there is an NVIDIA GPU, and JAX does not see it", False, 'pip install "jax[cuda12]"')
        )
    if os.environ.get("JAX_PLATFORMS"):
        findings.append(Finding("device", f"as JAX_PLATFORMS={os.environ['JAX_PLATFORMS']} has it"))
    return findings


def _gradient() -> Finding:
    """One small gradient in microbatches, beside JAX's own."""
    x = jnp.arange(12.0).reshape(6, 2)
    w = jnp.ones((2, 3))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    difference = jnp.abs(value_and_grad(loss, microbatch_size=4)(w, x)[1] - jax.grad(loss)(w, x)).max()
    is_well = bool(difference < 1e-5)
    return Finding("gradient", f"in microbatches as at once, to {float(difference):.0e}", is_well)


def _cache() -> Finding:
    folder = store.folder()
    if folder is None:
        return Finding("cache", "off: every process plans anew")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding("cache", f"{folder} cannot be written: {error.strerror}", False, "export ANYBATCH_CACHE=...")
    return Finding("cache", f"{folder}, {len(list(folder.glob('*.json')))} plans")


def _packages() -> list[Finding]:
    findings = []
    for package, (extra, purpose) in EXTRAS.items():
        try:
            findings.append(Finding(package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            findings.append(
                Finding(package, f"missing; it is for {purpose}", False, f'pip install "anybatch[{extra}]"')
            )
    return findings
