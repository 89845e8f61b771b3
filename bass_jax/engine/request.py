"""A request, its handle and its output."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from bass_jax.decoding.state import FinishReason, TokenLogprobs
from bass_jax.decoding.stop_strings import StopStrings
from bass_jax.sampling import SamplingParams

CANCELLED, FAILED = "cancelled", "error"
"""Finish reasons of a request, in addition to the names of `FinishReason`."""


class EngineClosed(RuntimeError):  # noqa: N818, as `concurrent.futures.BrokenExecutor`
    """The engine takes no requests: it was closed, or a step raised the exception in ``__cause__``."""


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A request.

    Attributes:
        prompt: ``[n]`` int32.
        max_new_tokens: limit of the output.
        sampling: for one row.
        seed: the row's random key.
        stop_tokens: the output ends with the first of these.
        priority: requests with a higher priority are admitted first; equal ones by arrival.
        prefix_group: pages of a prompt's beginning are shared only with requests of the same group.
        is_speculative: whether the request's row drafts.
    """

    prompt: np.ndarray
    max_new_tokens: int
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    priority: int = 0
    prefix_group: str = ""
    is_speculative: bool = True

    @property
    def limit(self) -> int:
        """The largest number of tokens of prompt and output."""
        return len(self.prompt) + self.max_new_tokens


class RequestEvent(NamedTuple):
    """The tokens that a request received in one step."""

    tokens: np.ndarray  # [num] int32
    logprobs: np.ndarray  # [num] float32, under the target's raw distribution
    text: str  # complete characters only; "" without a tokenizer
    finish_reason: str | None  # None while the request runs
    token_logprobs: TokenLogprobs | None = None  # with `SpecConfig.num_logprobs`


class RequestOutput(NamedTuple):
    """The output of a request."""

    tokens: np.ndarray  # [num] int32
    text: str | None  # None without a tokenizer
    logprobs: np.ndarray  # [num] float32
    token_logprobs: TokenLogprobs | None
    finish_reason: str | None  # None while the request runs


@dataclasses.dataclass
class Times:
    """The times of a request in seconds on the engine's clock; NaN for events that have not happened.

    Attributes:
        submitted: the request joined the queue.
        admitted: it received a slot.
        begun: its prompt was read and its row joined the batch.
        first: its first token was on the host.
        finished: its last token was on the host.
    """

    submitted: float = float("nan")
    admitted: float = float("nan")
    begun: float = float("nan")
    first: float = float("nan")
    finished: float = float("nan")


@runtime_checkable
class Driver(Protocol):
    """Runs the steps for the handles: an engine."""

    def advance(self) -> bool:
        """Runs one step; returns False if there was nothing to do."""
        ...

    async def advance_async(self) -> None:
        """Runs one step in a thread, or waits for the step that is running."""
        ...


class RequestHandle:
    """The handle of a submitted request.

    Iterating over it with ``for`` or ``async for`` yields a `RequestEvent` per step and runs the engine: while a caller
    waits for one request, all requests advance. ``await handle`` and `result` wait for the complete output. Leaving an
    ``async for`` early, or cancelling its task, cancels the request.

    Attributes:
        request: the request.
        order: its arrival number.
        times: of the request.
        num_tokens: tokens emitted so far.
        num_steps: steps of the engine that the request took part in.
        num_drafted: drafts of these steps.
        num_accepted: accepted drafts of these steps, whether or not they were emitted before a stop string.
        finish_reason: None while the request runs; then ``"stop"``, ``"length"``, ``"not_finite"``, ``"no_token"``,
            ``"cancelled"``, or ``"error"`` if its callback or a step of the engine raised an exception.
        error: the exception of the callback; `EngineClosed` if a step failed, which waiting for the request raises.
    """

    def __init__(
        self,
        request: Request,
        order: int = 0,
        *,
        driver: Driver | None = None,
        text: StopStrings | None = None,
        on_event: Callable[[RequestEvent], None] | None = None,
        on_cancel: Callable[["RequestHandle"], None] = lambda handle: None,
    ):
        """Makes a handle without tokens; `text` is None without a tokenizer."""
        self.request, self.order = request, order
        self.times = Times()
        self.num_tokens = self.num_steps = self.num_drafted = self.num_accepted = 0
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self._driver, self._text, self._on_event, self._on_cancel = driver, text, on_event, on_cancel
        self._history: list[RequestEvent] = []
        self._unread: deque[RequestEvent] = deque()

    @property
    def is_finished(self) -> bool:
        """Whether the last event was delivered."""
        return bool(self._history) and self._history[-1].finish_reason is not None

    @property
    def is_cut(self) -> bool:
        """Whether the request ended with a stop string."""
        return self._text is not None and bool(self._text.is_hit[0])

    @property
    def has_stop_strings(self) -> bool:
        """Whether the request has stop strings."""
        return self._text is not None and self._text.has_strings

    def cancel(self) -> None:
        """Ends the request before the next step and keeps its tokens. It has no effect on a finished request."""
        self._on_cancel(self)

    def result(self) -> RequestOutput:
        """Runs the engine until the request has finished; returns its output."""
        for _ in self:
            pass
        return self.output()

    def output(self) -> RequestOutput:
        """Returns the output so far."""
        events = self._history
        token_logprobs = [event.token_logprobs for event in events if event.token_logprobs is not None]
        return RequestOutput(
            tokens=np.concatenate([event.tokens for event in events] or [np.zeros(0, np.int32)]),
            text=None if self._text is None else self._text.text(0),
            logprobs=np.concatenate([event.logprobs for event in events] or [np.zeros(0, np.float32)]),
            token_logprobs=jax.tree.map(lambda *parts: np.concatenate(parts), *token_logprobs)
            if token_logprobs
            else None,
            finish_reason=events[-1].finish_reason if events else None,
        )

    def __iter__(self) -> Iterator[RequestEvent]:
        while True:
            # Read this first, because another thread can deliver the last event in between.
            is_finished = self.is_finished
            while self._unread:
                yield self._unread.popleft()
            if is_finished or self._driver is None:
                self._raise_failure()
                return
            try:
                self._driver.advance()
            except Exception:
                if not self.is_finished:
                    raise

    async def __aiter__(self) -> AsyncIterator[RequestEvent]:
        try:
            while True:
                is_finished = self.is_finished
                while self._unread:
                    yield self._unread.popleft()
                if is_finished or self._driver is None:
                    self._raise_failure()
                    return
                try:
                    await self._driver.advance_async()
                except Exception:
                    if not self.is_finished:
                        raise
        except (GeneratorExit, asyncio.CancelledError):
            self.cancel()
            raise

    def _raise_failure(self) -> None:
        if isinstance(self.error, EngineClosed):
            raise EngineClosed(str(self.error)) from self.error.__cause__

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._wait().__await__()

    async def _wait(self) -> RequestOutput:
        async for _ in self:
            pass
        return self.output()

    def record(
        self, tokens: np.ndarray, logprobs: np.ndarray, token_logprobs: TokenLogprobs | None, finish: int, now: float
    ) -> RequestEvent:
        """Records the tokens of a step up to a stop string; returns the event that `deliver` delivers.

        Without stop strings, `deliver` decodes the text, because the device is running again by then.
        """
        text, num = "", len(tokens)
        is_last = finish != FinishReason.RUNNING
        if self._text is not None and self.has_stop_strings:
            num, text = self._text.push(0, tokens, is_last)
            if self._text.is_hit[0]:
                finish, is_last = FinishReason.STOP, True
                tokens, logprobs = tokens[:num], logprobs[:num]
                token_logprobs = (
                    None if token_logprobs is None else TokenLogprobs(*(field[:num] for field in token_logprobs))
                )
        if num and self.num_tokens == 0:
            self.times.first = now
        self.num_tokens += num
        if is_last:
            self.finish_reason = FinishReason(finish).name.lower()
            self.times.finished = now
        return RequestEvent(tokens, logprobs, text, self.finish_reason, token_logprobs)

    def end(self, reason: str, now: float) -> RequestEvent:
        """Records that the request ends without another token."""
        self.finish_reason, self.times.finished = reason, now
        nothing, text = np.zeros(0, np.int32), ""
        if self._text is not None and self.has_stop_strings:
            text = self._text.push(0, nothing, True)[1]
        return RequestEvent(nothing, np.zeros(0, np.float32), text, reason)

    def deliver(self, event: RequestEvent) -> RequestEvent:
        """Adds the text to `event` and delivers it. An exception of the callback is stored in `error`."""
        if self._text is not None and not self.has_stop_strings:
            is_last = event.finish_reason is not None
            event = event._replace(text=self._text.push(0, event.tokens, is_last)[1])
        self._unread.append(event)
        self._history.append(event)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception as error:
                self.error, self._on_event = error, None
        return event
