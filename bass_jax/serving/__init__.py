"""Continuous batching: requests come and go while rows run."""

from bass_jax.serving.config import EngineConfig
from bass_jax.serving.engine import Engine
from bass_jax.serving.loop import Counts, Loop, QueueFull
from bass_jax.serving.scheduler import Scheduler
from bass_jax.serving.ticket import Answer, Event, Request, Ticket, Times

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
