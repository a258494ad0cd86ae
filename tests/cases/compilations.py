"""Counts how often XLA compiles."""

import contextlib

import jax
import jax.monitoring


@contextlib.contextmanager
def counted_compilations():
    """A list with the number of compilations since the `with` began."""
    count = [0]

    def listen(event, duration, **_):
        count[0] += "backend_compile" in event

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
