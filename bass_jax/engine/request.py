"""A request, and the handle on which its answer grows."""

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
"""Reasons to finish that no single batch knows; the others are `FinishReason`'s names."""


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What is asked for.

    Attributes:
        prompt: ``[n]`` int32.
        max_new_tokens: most tokens of the answer.
        sampling: of one row.
        seed: what the row draws depends on it alone.
        stop_tokens: the answer ends with the first of these.
        priority: higher ones leave the queue first; among equals the earlier.
    """

    prompt: np.ndarray
    max_new_tokens: int
    sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    priority: int = 0

    @property
    def limit(self) -> int:
        """Most tokens of prompt and answer."""
        return len(self.prompt) + self.max_new_tokens


class RequestEvent(NamedTuple):
    """What a request was given by one step."""

    tokens: np.ndarray  # [num] int32
    logprobs: np.ndarray  # [num] float32, under the target's raw distribution
    text: str  # whole characters only; "" without a tokenizer
    finish_reason: str | None  # None while it goes on
    token_logprobs: TokenLogprobs | None = None  # with `SpecConfig.num_logprobs`


class RequestOutput(NamedTuple):
    """A request's whole answer."""

    tokens: np.ndarray  # [num] int32
    text: str | None  # None without a tokenizer
    logprobs: np.ndarray  # [num] float32
    token_logprobs: TokenLogprobs | None
    finish_reason: str | None  # None while it goes on


@dataclasses.dataclass
class Times:
    """Seconds on the engine's clock; NaN for what has not happened.

    Attributes:
        submitted: it joined the queue.
        admitted: it left the queue for a slot.
        begun: its prompt was read, and its row entered the batch.
        first: its first token was known.
        finished: its last token was known.
    """

    submitted: float = float("nan")
    admitted: float = float("nan")
    begun: float = float("nan")
    first: float = float("nan")
    finished: float = float("nan")


@runtime_checkable
class Driver(Protocol):
    """What makes handles grow: an engine."""

    def advance(self) -> bool:
        """Takes one step; False when there was nothing to do."""
        ...

    async def advance_async(self) -> None:
        """Takes one step beside the event loop, or waits for the one that is being taken."""
        ...


class RequestHandle:
    """One request in flight.

    Iterating it, with ``for`` or ``async for``, yields its `Event` s as they come and drives the engine meanwhile: all
    requests advance while anybody waits for any of them. ``await handle`` and `result` wait for the whole answer.
    Leaving an ``async for`` early, or cancelling its task, cancels the request.

    Attributes:
        request: what was asked for.
        order: its place in the order of arrival.
        times: what happened when.
        num_tokens: emitted so far.
        finish_reason: None while it goes on; ``"stop"``, ``"length"``, ``"not_finite"``, ``"no_token"``,
            ``"cancelled"``, or ``"error"`` after its callback raised `error`.
        error: what the callback raised.
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
        """Starts without tokens; `text` is None where nobody has a tokenizer."""
        self.request, self.order = request, order
        self.times = Times()
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self._driver, self._text, self._on_event, self._on_cancel = driver, text, on_event, on_cancel
        self._history: list[RequestEvent] = []
        self._unread: deque[RequestEvent] = deque()

    @property
    def is_finished(self) -> bool:
        """Whether its last event has been handed out."""
        return bool(self._history) and self._history[-1].finish_reason is not None

    @property
    def is_cut(self) -> bool:
        """Whether it ended with a stop string."""
        return self._text is not None and bool(self._text.is_hit[0])

    @property
    def has_stop_strings(self) -> bool:
        """Whether its text decides when it ends."""
        return self._text is not None and self._text.has_strings

    def cancel(self) -> None:
        """Ends the request before the next step; what it has been given stays. No effect on a finished one."""
        self._on_cancel(self)

    def result(self) -> RequestOutput:
        """Waits for the answer, driving the engine."""
        for _ in self:
            pass
        return self.answer()

    def answer(self) -> RequestOutput:
        """Returns what has been handed out so far."""
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
            # Asked first, because another thread may hand out the last event meanwhile.
            is_finished = self.is_finished
            while self._unread:
                yield self._unread.popleft()
            if is_finished or self._driver is None:
                return
            self._driver.advance()

    async def __aiter__(self) -> AsyncIterator[RequestEvent]:
        try:
            while True:
                is_finished = self.is_finished
                while self._unread:
                    yield self._unread.popleft()
                if is_finished or self._driver is None:
                    return
                await self._driver.advance_async()
        except (GeneratorExit, asyncio.CancelledError):
            self.cancel()
            raise

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._wait().__await__()

    async def _wait(self) -> RequestOutput:
        async for _ in self:
            pass
        return self.answer()

    def take(
        self, tokens: np.ndarray, logprobs: np.ndarray, token_logprobs: TokenLogprobs | None, finish: int, now: float
    ) -> RequestEvent:
        """Notes what a step emitted, cut at a stop string; `deliver` hands it out.

        Where there are no stop strings the text is made later, when the device is at work again.
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
        """Notes that the request ends without another token."""
        self.finish_reason, self.times.finished = reason, now
        nothing, text = np.zeros(0, np.int32), ""
        if self._text is not None and self.has_stop_strings:
            text = self._text.push(0, nothing, True)[1]
        return RequestEvent(nothing, np.zeros(0, np.float32), text, reason)

    def deliver(self, event: RequestEvent) -> RequestEvent:
        """Adds the text to `event`, and hands it out. An exception of the callback becomes `error`."""
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
