"""The engine: continuous batching with speculation."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from bass_jax.acceptance import find_rule
from bass_jax.config import SpecConfig
from bass_jax.decoding.candidates import check_candidates
from bass_jax.decoding.compiled_steps import CompiledSteps
from bass_jax.decoding.pair import Pair, check_pair
from bass_jax.decoding.prompt_layout import check_prompts, encode_texts
from bass_jax.decoding.state import SpecState
from bass_jax.decoding.stop_strings import StopStrings
from bass_jax.drafters.protocols import max_draft_len_of
from bass_jax.engine.device_executor import DeviceExecutor
from bass_jax.engine.engine_config import EngineConfig
from bass_jax.engine.loop import Counts, Loop
from bass_jax.engine.page_pool import PageUse
from bass_jax.engine.request import Request, RequestEvent, RequestHandle
from bass_jax.engine.scheduler import Scheduler
from bass_jax.engine.several_processes import Leader, follow
from bass_jax.engine.slots import check_sampling, make_row
from bass_jax.models.protocol import context_of
from bass_jax.policies import Policy, fixed
from bass_jax.runtime.checks import check_callable, check_flag, check_integer, check_kind, check_tokens
from bass_jax.sampling import SamplingParams


class Engine:
    """Continuous batching with speculation on this device.

    `advance` runs one step of all running rows. Waiting for a handle calls it. Under asyncio, handles can be awaited;
    the steps then run in the engine's thread. All methods can be called from any thread and any event loop. One step
    runs at a time: a lock is held while it runs, and callers that wait for their requests take turns.

    .. code-block:: python

        with bass.Engine(pair, config=bass.EngineConfig(num_slots=16, capacity=2048)) as engine:
            async for event in engine.submit("def fibonacci(n):", max_new_tokens=64):
                print(event.text, end="")

    Leaving the ``with`` block completes all requests; after an exception it cancels them. If a step raises an
    exception, all requests end with the reason ``"error"`` and waiting for them raises `EngineClosed`. The engine then
    takes no further requests.

    The output of a request does not depend on the other requests in the batch. Greedy tokens equal those of regular
    decoding, the tokens of the shared-noise rule equal those of regular sampling, and other sampled tokens follow the
    target's distribution.

    Attributes:
        config: sizes and limits.
        loop: the host loop.
        executor: the batch on the device.
        is_lossless: whether the tokens follow the target's distribution exactly; False for a lossy rule.
    """

    def __init__(
        self,
        pair: Pair,
        spec: SpecConfig | None = None,
        *,
        policy: str | Policy | None = None,
        config: EngineConfig | None = None,
        is_processed: bool = False,
        num_stop_tokens: int = 8,
        warm_up: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        on_step: Callable[[Loop], None] | None = None,
    ):
        """Allocates the caches and compiles the steps.

        Args:
            pair: target and drafter.
            spec: default ``SpecConfig()``. The greedy rule accepts only greedy requests.
            policy: chooses draft lengths; None uses ``spec.draft_len``, or the policy ``"auto"`` if that is None.
            config: default ``EngineConfig()``.
            is_processed: compile for requests with logit bias, banned tokens, penalties, minimum lengths or grammars,
                and allocate an array ``[B, V]`` for them. Otherwise the first such request does so, and all functions
                are compiled anew.
            num_stop_tokens: the largest number of stop tokens of a request.
            warm_up: compile everything before the first request, and measure the steps for a policy that uses their
                times; False compiles on first use.
            clock: returns the time in seconds, for `RequestHandle.times`.
            on_step: called on the host after every step.

        Raises:
            ValueError: if `spec` records drafts, the tokenizer has too many stop tokens, or the target's cache has a
                layout of its own and `config` has pages.
        """
        check_pair(pair)
        check_kind("spec", spec, SpecConfig | None)
        check_kind("config", config, EngineConfig | None)
        check_flag("is_processed", is_processed)
        check_flag("warm_up", warm_up)
        check_integer("num_stop_tokens", num_stop_tokens, 0)
        check_callable("clock", clock)
        check_callable("on_step", on_step)
        spec = spec or SpecConfig()
        if spec.record_drafts:
            raise ValueError("record_drafts=True: expected False, because an engine does not record drafts")
        self.pair, self.config = pair, config or EngineConfig()
        self.spec = dataclasses.replace(spec, draft_len=spec.bucket)
        self.is_lossless = find_rule(spec.acceptance).lossless
        self._is_processed, self._num_stop_tokens = is_processed, num_stop_tokens
        self._stops = () if pair.tokenizer is None else tuple(pair.tokenizer.stop_ids)
        if len(self._stops) > num_stop_tokens:
            raise ValueError(f"num_stop_tokens={num_stop_tokens}: the tokenizer has {len(self._stops)} stop tokens")
        if policy is None and spec.draft_len is not None:
            policy = fixed(spec.draft_len)
        steps = CompiledSteps("speculate", spec, False, policy, max_draft_len_of(pair.drafter))
        check_candidates(pair, steps.spec, find_rule(steps.spec.acceptance))
        is_refilled = self.config.batching == "continuous"
        self.executor = DeviceExecutor(pair, steps, self.config, self._lay_out, is_refilled=is_refilled)
        if warm_up:
            self.executor.warm_up()
        channel = self.executor.channel
        self._leader = None if channel is None or jax.process_index() else Leader(self.executor, channel)
        scheduler = Scheduler(self.config, self.executor.num_shared)
        self.loop = Loop(scheduler, self._leader or self.executor, clock, on_step)
        self._thread: Any = None
        self._start_lock = threading.Lock()
        self._is_closed = False
        self._pending: dict[asyncio.AbstractEventLoop, asyncio.Future] = {}

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: Any) -> None:
        self.close(drain=error_type is None)

    def close(self, *, drain: bool = False) -> None:
        """Refuses further requests and waits until the others have ended. A second call has no effect.

        Args:
            drain: complete the other requests. Otherwise they are cancelled and keep their tokens.
        """
        self.loop.close(drain=drain)
        with self._start_lock:
            if self._leader is not None and not self._is_closed:
                self._leader.close()
            self._is_closed = True
            if self._thread is not None:
                self._thread.shutdown(wait=False)

    def follow(self) -> None:
        """Runs the steps of process 0 in another process of `jax.distributed`, until process 0 closes its engine.

        With a mesh over several processes, all of them make the same engine. Process 0 takes the requests.

        Raises:
            ValueError: in process 0, or if the mesh is one of this process alone.
        """
        if self.executor.channel is None or self._leader is not None:
            raise ValueError("follow: expected a process other than 0 of a mesh over several processes")
        follow(self.executor, self.executor.channel, self.pair.tokenizer)
        self.close()

    @property
    def is_closed(self) -> bool:
        """Whether the engine takes no further requests: after `close`, or after a step that failed."""
        return self.loop.is_closed

    @property
    def counts(self) -> Counts:
        """Totals so far."""
        return self.loop.counts

    @property
    def page_use(self) -> PageUse | None:
        """The current use of the pages; None with dense caches."""
        return None if self.executor.pool is None else self.executor.pool.use()

    def _lay_out(self, handle: RequestHandle) -> SpecState:
        vocab_size = self.pair.target.vocab_size
        self._is_processed |= check_sampling(handle.request.sampling, self.spec, vocab_size)
        return make_row(handle.request, self.config.capacity, vocab_size, self._num_stop_tokens, self._is_processed)

    def submit(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        *,
        raw: bool = False,
        max_new_tokens: int = 128,
        sampling: SamplingParams | None = None,
        seed: int = 0,
        stop_tokens: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        priority: int = 0,
        prefix_group: str = "",
        is_speculative: bool = True,
        on_event: Callable[[RequestEvent], None] | None = None,
    ) -> RequestHandle:
        """Adds a request to the queue.

        Args:
            prompt: text, or token ids.
            raw: continue a text as it is, without the chat template; see `bass_jax.DecodeOptions`.
            max_new_tokens: limit of the output.
            sampling: for one row; default greedy.
            seed: the row's random key.
            stop_tokens: default the tokenizer's.
            stop_strings: the output ends with the token that completes one of these; needs a tokenizer.
            priority: requests with a higher priority are admitted first.
            prefix_group: with pages, requests whose prompts begin equally share the pages of this beginning. Requests
                of different groups do not, so that the time of one says nothing about the prompts of another. A drafter
                that keeps the text of finished requests shares it between groups.
            is_speculative: False drafts nothing for this request: every step emits one token of it.
            on_event: called with every event, in the thread that runs the step. If it raises an exception, only this
                request ends, with the reason ``"error"``.

        Returns:
            The handle. Iterate over it, await it, or call `RequestHandle.result`.

        Raises:
            ValueError: if the request can never run: it is too long for the context, the capacity or the token budget,
                a token is outside the vocabulary, or the acceptance rule does not support its sampling parameters.
            QueueFull: if the queue is full.
            EngineClosed: after `close`, or after a step that failed.
        """
        if self.executor.channel is not None and self._leader is None:
            raise ValueError(f"submit: expected process 0, which takes the requests; this is {jax.process_index()}")
        check_flag("raw", raw)
        ids: Any = prompt
        if isinstance(prompt, str):
            (ids,) = encode_texts(self.pair, [prompt], raw=raw)
        (row,) = check_prompts(self.pair, [ids])
        target = self.pair.target
        check_kind("sampling", sampling, SamplingParams | None)
        self.config.check(len(row), max_new_tokens, context_of(target))
        sampling = sampling or SamplingParams()
        check_sampling(sampling, self.spec, target.vocab_size)
        seed = check_integer("seed", seed, 0, 2**32 - 1)
        priority = check_integer("priority", priority)
        check_callable("on_event", on_event)
        check_kind("prefix_group", prefix_group, str)
        check_flag("is_speculative", is_speculative)
        stops = self._stops if stop_tokens is None else tuple(check_tokens("stop_tokens", stop_tokens).tolist())
        if len(stops) > self._num_stop_tokens:
            raise ValueError(f"stop_tokens has {len(stops)} values: expected at most {self._num_stop_tokens}")
        request = Request(
            row.astype(np.int32), max_new_tokens, sampling, seed, stops, priority, prefix_group, is_speculative
        )
        text = None if self.pair.tokenizer is None else StopStrings(self.pair.tokenizer, stop_strings, 1)
        handle = RequestHandle(request, driver=self, text=text, on_event=on_event, on_cancel=self.loop.cancel)
        self.loop.submit(handle)
        return handle

    def advance(self) -> bool:
        """Runs one step of all running rows; returns False if there was nothing to do."""
        return self.loop.advance()

    def run(self) -> None:
        """Advances until all requests have ended."""
        self.loop.run()

    async def advance_async(self) -> None:
        """Runs one step in the engine's thread. Callers in the same event loop wait for the same step."""
        loop = asyncio.get_running_loop()
        pending = self._pending.get(loop)
        # A step that is done stays here until the event loop calls `_is_done`, which it cannot while a task runs.
        if pending is None or pending.done():
            with self._start_lock:
                if self._is_closed:
                    return  # All requests have ended.
                if self._thread is None:
                    from concurrent.futures import ThreadPoolExecutor

                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="bass-jax-engine")
                pending = self._pending[loop] = loop.run_in_executor(self._thread, self.loop.advance)
            pending.add_done_callback(lambda pending: self._is_done(loop, pending))
        await asyncio.shield(pending)

    def _is_done(self, loop: asyncio.AbstractEventLoop, pending: asyncio.Future) -> None:
        if self._pending.get(loop) is pending:
            del self._pending[loop]
        if not pending.cancelled():
            pending.exception()  # The waiting callers receive it; this marks it as retrieved for asyncio.
