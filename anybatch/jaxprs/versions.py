"""What differs between versions of JAX, 0.10 to 0.12, and what JAX says of the process: platforms, config, traces."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jaxlib

from anybatch.jaxprs.interpreter import jax_core

_CONFIG: Any = jax.config  # partly unannotated

# Whether the transpose of a scan keeps its inputs apart if only some of their gradients are written in place.
TRANSPOSES_MIXED_SCANS = jax.__version_info__ >= (0, 11)


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
    results: list[Any] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            with jax.enable_x64(double), jax.default_device(device):
                results.append(fun())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


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
