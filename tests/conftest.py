"""Strict: eight devices, no silent promotion of dtypes or ranks, warnings are errors (pyproject.toml)."""

import os
import signal

import jax
import pytest

# XLA reads them when it is first used, not when it is imported.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# On two busy cores, eight devices may keep each other waiting for longer than XLA thinks right.
os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))
# Small programs compile faster in one piece than in pieces for several threads.
os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
# Compiling is most of what the tests do, and for JAX 0.10 half of it is making kernels of fusions in a new way, for
# which XLA still has the old one. ANYBATCH_TESTS_COMPILE=fully has programs compiled as users have them.
if jax.__version_info__ < (0, 11) and os.environ.get("ANYBATCH_TESTS_COMPILE") != "fully":
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
# In the background of a shell Ctrl-C is ignored, and then it is by whatever is started from here.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["ANYBATCH_CACHE"] = "off"  # what one run measures must not decide what the next one tests

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    """The options of the Makefile that divide the tests."""
    parser.addoption("--at-most", type=int, help="run at most this many parameter sets of each test function")
    parser.addoption("--beyond", type=int, help="run others than so many sets, and the tests that are marked full")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Chooses parameter sets by --at-most and --beyond. The examples in docstrings run on every JAX."""
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            item.add_marker(pytest.mark.every_jax)
    number, beyond = config.getoption("--at-most", None), config.getoption("--beyond", None)
    if number is None and beyond is None:
        return
    of_function = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            of_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = set()
    for each in of_function.values():
        unmarked = [item for item in each if not item.get_closest_marker("full")]
        if beyond is None:
            chosen.update(_spread(unmarked, number), set(each) - set(unmarked))  # marked ones are left to -m
            continue
        first = _spread(unmarked, beyond)
        rest = [item for item in each if item not in first]
        every = number is None or any(item.get_closest_marker("every_set") for item in rest)
        chosen.update(rest if every else _spread(rest, max(1, number - len(first))))
    slow = [item for item in items if item.get_closest_marker("slow")]
    chosen.update(slow)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _spread(items, most):
    """So many of the items, spread evenly: parameter sets are often sorted by kind."""
    return [items[place * len(items) // most] for place in range(most)] if len(items) > most else items


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
