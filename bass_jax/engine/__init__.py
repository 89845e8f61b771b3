"""The host loop: `generate`, `stream` and continuous batching with `Engine`.

Imports `bass_jax.decoding` and lower packages. Start with `loop.py`, the loop itself, then `scheduler.py`, which
decides which requests run, then `device_executor.py`, which runs them.
"""

from bass_jax.engine.engine import Engine
from bass_jax.engine.engine_config import EngineConfig
from bass_jax.engine.loop import Counts, Loop, QueueFull
from bass_jax.engine.request import EngineClosed, Request, RequestEvent, RequestHandle, RequestOutput, Times
from bass_jax.engine.scheduler import Scheduler

__all__ = [
    "Counts",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "Loop",
    "QueueFull",
    "Request",
    "RequestEvent",
    "RequestHandle",
    "RequestOutput",
    "Scheduler",
    "Times",
]
