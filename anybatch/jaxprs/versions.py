"""What differs between versions of JAX, 0.10 to 0.12, and what JAX says of the process: platforms, config, traces.

The functions at the end are for `anybatch.distributed`: what JAX's runtime for many processes knows and does not make
public. They import it when they are called. A version of JAX that has moved it breaks `distributed.initialize` alone,
with an error that says so, and not `import anybatch`.
"""

import concurrent.futures
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib

from anybatch.errors import NotAvailableError
from anybatch.jaxprs.interpreter import jax_core

_CONFIG: Any = jax.config  # partly unannotated

if jax.__version_info__ >= (0, 12):
    # It adds settings to those that JAX's caches depend on: what was compiled before is compiled again.
    importlib.import_module("jax.extend")

# Whether the transpose of a scan keeps its inputs apart if only some of their gradients are written in place.
TRANSPOSES_MIXED_SCANS = jax.__version_info__ >= (0, 11)


# Whether XLA, where it divides a program among devices, pads an array with one number for all operations that pad it:
# `cumsum` and `cumprod` of one array then both pad it with 0.
PADS_WITH_ONE_NUMBER = jax.__version_info__ < (0, 12)


def versions() -> list[str]:
    """The versions of JAX, and of the compiler and runtime underneath it."""
    return [str(jax.__version__), str(jaxlib.__version__)]


def is_supported() -> bool:
    """Whether this version of JAX is one that the tests run on."""
    return (0, 10) <= jax.__version_info__[:2] < (0, 13)


def quick_compilation_flags() -> str:
    """XLA's flags for small programs on the CPU that run only a few times; they change no buffer that it plans."""
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    return flags + (" --xla_cpu_use_fusion_emitters=false" if jax.__version_info__[:2] < (0, 11) else "")


def platforms() -> set[str]:
    """The platforms that this process has devices of, as `lax.platform_dependent` names them: "cpu", "cuda", ..."""
    import jax.extend.backend

    return set(jax.extend.backend.backends())


def default_device() -> Any:
    """The device of `jax.default_device(...)`, for arrays that name none themselves; or None."""
    return _CONFIG.jax_default_device


def temporaries(compiled: Any) -> int:
    """The bytes that a compiled program needs beside its arguments and results, as XLA reports them.

    Its `peak_memory_in_bytes` is of no use on the CPU, where it is the same for every program.
    """
    return compiled.memory_analysis().temp_size_in_bytes


def has_ordered_effects(jaxpr: Any) -> bool:
    """Whether a program prints or calls back in a fixed order, which XLA learns by an argument of its own."""
    return any("Ordered" in type(effect).__name__ for effect in jaxpr.effects)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of JAX's runtime says that memory ran out."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


def program_key(lowered: Any) -> str | None:
    """A text that spells out everything a lowered program computes, or None if it cannot."""
    text = lowered.as_text()
    # A callback is a number in the text, and with this flag the arrays that a nested jit closes over are absent.
    hidden = "callback" in text or getattr(_CONFIG, "jax_use_simplified_jaxpr_constants", False)
    return None if hidden else text


# The trace around a call.


def elsewhere(fun: Callable[[], Any]) -> Any:
    """Calls a function outside of the trace and the mesh around us: in a new thread, which is inside nothing."""
    double, device = _CONFIG.jax_enable_x64, _CONFIG.jax_default_device

    def call() -> Any:
        with jax.enable_x64(double), jax.default_device(device):
            return fun()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def _trace_state() -> Any:
    return jax_core().get_opaque_trace_state(convention="anybatch")


@functools.cache
def _clean_trace_state() -> Any:
    return elsewhere(_trace_state)  # the first call may well be inside somebody's jit


def is_eager() -> bool:
    """Whether we are outside every `jit`, `grad` and `vmap`, so that a call computes its result."""
    return not _CONFIG.jax_disable_jit and _trace_state() == _clean_trace_state()


def is_jit_disabled() -> bool:
    """Whether we are under `jax.disable_jit()`, where nothing is compiled."""
    return bool(_CONFIG.jax_disable_jit)


def clear_with_jax(cache: Any) -> None:
    """Makes `jax.clear_caches()` call `cache.cache_clear()`, if this JAX offers that. JAX holds the cache weakly."""
    try:
        from jax._src.util import register_cache
    except ImportError:
        return
    register_cache(cache, "anybatch")


def _internal(module: str, name: str) -> Any:
    """`jax._src.module.name`."""
    try:
        found: Any = importlib.import_module(f"jax._src.{module}")
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise NotAvailableError(
            f"anybatch.distributed.initialize() with JAX {versions()[0]}, which has no jax._src.{module}.{name},",
            remedy="Install a version of JAX that anybatch is tested with, pip install 'jax>=0.10,<0.13', or call "
            "jax.distributed.initialize() instead, in which a process that never comes is not an error.",
        ) from error
    return found


def uses_devices() -> bool:
    """Whether this process has used a device, after which it can no longer join others."""
    return bool(_internal("xla_bridge", "backends_are_initialized")())


def cluster_name() -> str | None:
    """The name of JAX's class for the cluster that this process runs in, or None if JAX sees none."""
    known = _internal("clusters", "ClusterEnv._cluster_types")
    return next((each.__name__ for each in known if not each.opt_in_only_method and each.is_env_present()), None)


def ask_cluster(
    address: str | None, count: int | None, index: int | None, devices: Sequence[int] | None, timeout: int
) -> tuple[Any, ...]:
    """Address, number of processes, index and devices; those that are None are looked up in the cluster.

    Raises:
      Exception: whatever the cluster's interface raises.
    """
    detect = _internal("clusters", "ClusterEnv.auto_detect_unset_distributed_params")
    return tuple(detect(address, count, index, devices, None, timeout))


def joined() -> tuple[int, int, str]:
    """The index of this process, the number of those it has joined, and the address of the first of them."""
    state = _internal("distributed", "global_state")
    return (state.process_id, state.num_processes, state.coordinator_address)


def forget_client() -> None:
    """Makes JAX take this process for one that has not joined others."""
    _internal("distributed", "global_state").client = None
