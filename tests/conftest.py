"""Strict: eight devices, no silent promotion of dtypes or ranks, warnings are errors (pyproject.toml)."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# On two busy cores, eight devices may keep each other waiting for longer than XLA thinks right.
os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["ANYBATCH_CACHE"] = "off"  # what one run measures must not decide what the next one tests

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def forgetful():
    """What JAX has compiled for one file of tests is of no use to the next, and fills the memory."""
    yield
    jax.clear_caches()


@pytest.fixture
def float64():
    """Runs a test in double precision, where an exact method shows errors of 1e-15 and a wrong one does not."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def model_defaults(float64):
    """Models are written for JAX's own promotion of dtypes and ranks, not for the strict one of our tests."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
