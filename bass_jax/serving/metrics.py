"""The engine's figures in the format of Prometheus."""

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from bass_jax.engine import Engine
from bass_jax.engine.loop import Loop

_MILLISECONDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Metrics:
    """Counters of one engine. `on_step` is called after every step; the gauges are read when they are asked for."""

    def __init__(self):
        disable_created_metrics()
        self.registry = CollectorRegistry()
        settings = {"registry": self.registry, "namespace": "bass_jax"}
        self.requests = Counter("requests", "Requests by their end", ["end"], **settings)
        self._tokens = Counter("tokens", "Tokens emitted", **settings)
        self._prompt_tokens = Counter("prompt_tokens", "Prompt tokens of admitted requests", **settings)
        self._drafted = Counter("drafted_tokens", "Drafts by position", ["position"], **settings)
        self._accepted = Counter("accepted_tokens", "Accepted drafts by position", ["position"], **settings)
        self._lengths = Histogram("draft_length", "Drafts per row and step", buckets=(0, 1, 2, 3, 4, 6, 8), **settings)
        buckets = [one / 1000 for one in _MILLISECONDS]
        self._seconds = Histogram("step_seconds", "Time of a step", buckets=buckets, **settings)
        self._running = Gauge("running_requests", "Requests in the batch", **settings)
        self._waiting = Gauge("waiting_requests", "Requests in the queue", **settings)
        self._cache = Gauge("cache_use_ratio", "Reserved tokens over the token budget", **settings)

    def on_step(self, loop: Loop) -> None:
        """Counts a step."""
        assert loop.last is not None
        info = loop.last.info
        self._seconds.observe(loop.last.seconds)
        self._tokens.inc(int(info.num_emitted.sum()))
        for drafted, accepted in zip(
            info.num_drafted[info.is_active].tolist(), info.num_accepted[info.is_active].tolist(), strict=True
        ):
            self._lengths.observe(drafted)
            for position in range(1, drafted + 1):
                self._drafted.labels(position).inc()
                if position <= accepted:
                    self._accepted.labels(position).inc()

    def on_submit(self, num_tokens: int) -> None:
        """Counts the prompt of a request."""
        self._prompt_tokens.inc(num_tokens)

    def text(self, engine: Engine) -> bytes:
        """Returns all figures in the text format."""
        scheduler = engine.loop.scheduler
        self._running.set(scheduler.num_running)
        self._waiting.set(engine.loop.num_waiting + len(scheduler.reading))
        self._cache.set(scheduler.num_reserved / scheduler.config.budget)
        return generate_latest(self.registry)
