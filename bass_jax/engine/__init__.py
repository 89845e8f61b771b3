"""The host loop: `generate`, `stream` and continuous batching with `Engine`.

Imports `bass_jax.decoding` and lower packages. Start with `loop.py`, the loop itself, then `scheduler.py`, which
decides who runs.
"""

from bass_jax.engine.engine import Engine
from bass_jax.engine.engine_config import EngineConfig
from bass_jax.engine.loop import Counts, Loop, QueueFull
from bass_jax.engine.request import Answer, Event, Request, Ticket, Times
from bass_jax.engine.scheduler import Scheduler

__all__ = [
    "Answer",
    "Counts",
    "Engine",
    "EngineConfig",
    "Event",
    "Loop",
    "QueueFull",
    "Request",
    "Scheduler",
    "Ticket",
    "Times",
]
