"""Notices compilations, for tests that nothing is compiled."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def recorded_compilations() -> Iterator[list[str]]:
    """Yields a list that gets an entry for everything that jax compiles, in any thread."""
    compiled = []

    def listen(name, *_, **__):
        if name.endswith("backend_compile_duration"):
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
