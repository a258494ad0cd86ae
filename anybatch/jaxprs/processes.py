"""What `anybatch.distributed` needs of JAX's runtime for many processes, and JAX does not make public.

Everything is imported when it is called, so that a version of JAX that has moved it breaks `distributed.initialize`
alone, with an error that says so, and not `import anybatch`.
"""

import importlib
from collections.abc import Sequence
from typing import Any

from anybatch.errors import NotAvailableError
from anybatch.jaxprs.versions import versions


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
