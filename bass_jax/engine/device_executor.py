"""The executor that runs the steps on the device."""

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.decoding.compiled_steps import CompiledSteps, bucket_spec
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.policy_runner import counts_of, no_step, rows_of, with_plan
from bass_jax.decoding.prefill import PromptState, reads_in_chunks
from bass_jax.decoding.state import FinishReason, SpecState, StepInfo
from bass_jax.drafters.protocols import keeps_finished_text, reads_hidden_states
from bass_jax.engine.engine_config import EngineConfig
from bass_jax.engine.executor import StepResult
from bass_jax.engine.page_pool import PagePool
from bass_jax.engine.planner import Planner, with_joined
from bass_jax.engine.request import Request, RequestHandle
from bass_jax.engine.slots import (
    Pages,
    empty_prompt,
    empty_state,
    filled,
    finish_prompt,
    insert_row,
    planned_rows,
    read_prompt_chunk,
    regroup_rows,
    remember_finished,
)
from bass_jax.engine.step_clock import is_measured
from bass_jax.engine.timed_steps import TimedSteps
from bass_jax.models.kv_cache import KVCache, pages_of, with_pages
from bass_jax.models.mesh import mesh_of, place_whole
from bass_jax.models.protocol import is_recurrent
from bass_jax.policies.auto import Auto
from bass_jax.policies.fixed import Fixed
from bass_jax.policies.protocol import Plan
from bass_jax.runtime.jit_cache import JIT_CACHE, CompiledFunction
from bass_jax.runtime.processes import Channel

PLAN_INTERVAL = 8
"""Steps between two plans of ``auto`` while it does not draft. A plan costs 0.7 ms of two cores that run a step."""

SHORT_CHUNK = 64
"""A chunk of at most so many tokens is read by a pass of this size, because a pass over a whole chunk takes longer."""

_LAST_RUNS: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
"""Rates and budgets of the last `AutoState`, by the structure of the pair, the rule, and the sizes of the policy.

Without the budgets, short runs that begin without drafts would never try any.
"""


class _InFlight(NamedTuple):
    """A step that was dispatched and not collected."""

    info: StepInfo
    rows: Any  # `planned_rows` after it; None if nothing is planned after a step
    plan: Plan | None  # of a fixed length, if rows that do not draft have changed it
    bucket: int
    num_steps: int  # since the last one after which a plan is made
    start: float  # when it was dispatched


class DeviceExecutor:
    """A batch on JAX's default device, or on a mesh.

    Every operation is one compiled function, and only `collect` waits for the device.

    Attributes:
        state: of the batch after all dispatched operations.
        steps: the compiled steps.
        pool: the pages of the caches; None with dense caches.
        channel: from process 0 to the others, if the mesh is one over several processes; else None.
    """

    def __init__(
        self,
        pair: Pair,
        steps: CompiledSteps,
        config: EngineConfig,
        lay_out: Callable[[RequestHandle], SpecState],
        state: SpecState | None = None,
        *,
        is_refilled: bool = False,
    ):
        """Allocates a batch.

        Args:
            pair: target and drafter.
            steps: the compiled steps.
            config: sizes and limits.
            lay_out: returns the row of a request, a state with a batch of one and without caches.
            state: of a batch whose prompts were read, or its caches as shapes, and `fill` later; None makes an empty
                batch of the smallest size.
            is_refilled: whether other requests take the rows of those that end.
        """
        self._pair, self.steps, self._config, self._lay_out = pair, steps, config, lay_out
        self._policy, self._mesh = steps.policy, mesh_of(pair)
        if keeps_finished_text(pair.drafter):
            self._take_text(place_whole(pair.drafter.finished_text, self._mesh))
        self.channel = None if self._mesh is None or not self._mesh.is_multi_process else Channel()
        self._compiled: dict[Any, Callable] = {}
        self.pool: PagePool | None = None
        self._shares_pages = not reads_hidden_states(pair.drafter) and not is_recurrent(pair.target)
        self._reads_in_chunks = reads_in_chunks(pair)
        if state is None:
            pages = None
            if config.page_size is not None:
                if not isinstance(jax.eval_shape(lambda: pair.target.init_cache(1, 64)), KVCache):
                    kind = type(pair.target).__name__
                    raise ValueError(f"page_size: expected None, because {kind} has its own cache layout")
                pages = Pages(config.num_pages, config.page_size)
                self.pool = PagePool(config.num_pages, config.page_size, config.capacity // config.page_size)
            blank = lay_out(RequestHandle(Request(np.zeros(1, np.int32), 1)))
            rows = np.zeros(config.sizes[0], np.int32)
            state = self._run("empty_state", _with_pages(empty_state, pages), pair, blank, rows)
        assert state is not None
        num_rows = len(state.lengths)
        self.state: SpecState = state
        self._handles: list[RequestHandle | None] = [None] * num_rows
        self._new: tuple[RequestHandle, SpecState] | None = None  # the request whose prompt is being read
        self._reading: PromptState | None = None  # its caches
        self._prompt: np.ndarray | None = None  # the prompt that these caches hold completely
        # A copy of the state's field, so that a row can be stopped without waiting for the device.
        self._finish = np.full(num_rows, FinishReason.INACTIVE, np.int32)
        self._stopped: list[int] = []  # rows that the device does not know to be stopped
        self._is_refilled = np.asarray(is_refilled)
        self._num_steps = 0  # dispatched since the last one after which a plan is made
        self._is_due = False  # whether a plan is made after the next one in any case
        self._in_flight: deque[_InFlight] = deque()
        self._timed_steps = TimedSteps(steps, self.channel)
        self._is_auto = isinstance(self._policy, Auto) and self._timed_steps.uses_clock
        # A step that runs ahead has the plan that was made before the last step. Only these policies plan as well then.
        self._runs_ahead = (self._is_auto or isinstance(self._policy, Fixed | None)) and self.channel is None
        self._last_end = 0.0  # when the last step had ended
        self._wanted = np.zeros(2, np.int32)  # see `plan_rows`; without a policy there is one bucket
        policy: Any = self._policy
        parts = (policy.lengths, policy.prior.shape) if self._is_auto else ()
        self._run_key = jax.tree.structure(pair), steps.spec.acceptance, *parts
        self._planner = None if policy is None else self._start_planner(policy, num_rows)
        self._plans = not isinstance(self._policy, Fixed | None)  # after every step
        if self._planner is not None:
            self.replan()

    def compile_steps(self) -> None:
        """Compiles the steps of this batch size; of a policy with a clock the one that it has planned.

        Other steps are compiled on first use.
        """
        if self._plans:
            self._planned_rows()
        buckets = self.steps.buckets
        if self._timed_steps.uses_clock:
            buckets = (self._timed_steps.bucket(int(self._wanted[0]), len(self.state.lengths)),)
        for bucket in buckets:
            self._step(bucket)

    def compile_shortest_step(self) -> None:
        """Compiles the step with the fewest drafts, which takes the least time, and a pass over a short prompt.

        A policy that measures times then starts with it. Which step it would start with otherwise depends on times that
        it measures, so that the compilation cache of an earlier process may hold another one. XLA compiles the pass in
        a thread while the step is traced and compiled.
        """
        handle = RequestHandle(Request(np.zeros(2, np.int32), 1))
        reading = self._empty_prompt(handle, self._lay_out(handle))
        arguments = self._chunk(reading, handle.request.prompt, 0, 1)
        JIT_CACHE.get(read_prompt_chunk, *arguments, donate_argnums=(1, 2), in_background=True)
        self._step(self.steps.buckets[0])

    def fill(self, state: SpecState) -> None:
        """Takes the caches of `state` in place of shapes."""
        self.state = self.state._replace(target_cache=state.target_cache, drafter_state=state.drafter_state)

    def start(self, handles: Sequence[RequestHandle]) -> None:
        """Assigns requests to the first rows of a batch that was given as a state."""
        self._handles[: len(handles)] = handles
        self._finish[: len(handles)] = FinishReason.RUNNING

    def num_shared(self, handle: RequestHandle) -> int:
        """Returns how many tokens at the beginning of a prompt are in pages of other requests.

        A drafter that reads hidden states shares nothing, because it needs those of the token before its first one; nor
        does a recurrent target, whose state at the end of a page is not kept.
        """
        return 0 if self.pool is None or not self._shares_pages else self.pool.num_shared(handle)

    def read(self, handle: RequestHandle, start: int, num: int) -> None:
        """Dispatches a pass over a chunk of a prompt."""
        self._timed_steps.skip_next()
        prompt = handle.request.prompt
        if self._new is None or self._new[0] is not handle:
            if self._new is not None:  # The request ended while its prompt was being read.
                self._release(self._new[0])
            self._new = handle, self._lay_out(handle)
            if self._new[1].sampling_arrays.processor_arrays is not None:
                self._process_logits()
            if prompt is self._prompt:  # Another sample of the last prompt.
                return
            self._prompt = None
            self._reading = self._empty_prompt(handle, self._new[1])
        if num == 0 or prompt is self._prompt:
            return
        arguments = self._chunk(self._reading, prompt, start, num)
        name = "read_prompt_chunk", arguments[3].shape[1]
        pages, self._reading = self._run(name, read_prompt_chunk, *arguments, donate=(1, 2))
        if pages:
            self.state = with_pages(self.state, pages)

    def _empty_prompt(self, handle: RequestHandle, row: SpecState) -> PromptState:
        tables = () if self.pool is None else (self.pool.table(handle),)
        return self._run("empty_prompt", empty_prompt, self._pair, row.tokens, *tables)

    def _chunk(self, reading: PromptState | None, prompt: np.ndarray, start: int, num: int) -> tuple:
        """Returns the arguments of `read_prompt_chunk`."""
        size = SHORT_CHUNK if num <= SHORT_CHUNK < self._config.chunk else self._config.chunk
        tokens = np.zeros((1, size), np.int32)
        chunk = prompt[start : start + num]
        tokens[0, : len(chunk)] = chunk
        numbers = np.int32(start), np.int32(num), np.int32(self._config.capacity)
        return self._pair, pages_of(self.state), reading, tokens, *numbers

    def _process_logits(self) -> None:
        """Gives the batch the arrays of `ProcessorArrays` if it has none. All functions are then compiled anew."""
        sampling_arrays = self.state.sampling_arrays
        if sampling_arrays.processor_arrays is None:
            one = filled(None, self._pair.target.vocab_size)
            rows = place_whole(jax.tree.map(lambda x: np.repeat(x, len(self._finish), axis=0), one), self._mesh)
            self.state = self.state._replace(sampling_arrays=sampling_arrays._replace(processor_arrays=rows))
            self._compiled.clear()
            self.steps.forget()

    def insert(self, handle: RequestHandle, row: int) -> None:
        """Dispatches the move of the prompt that was read into `row`."""
        self._timed_steps.skip_next()
        assert self._new is not None and self._new[0] is handle, "another prompt was read"
        new = self._new[1]
        if handle.request.prompt is not self._prompt and not self._reads_in_chunks:
            self._reading = self._run("finish_prompt", finish_prompt, self._pair, self._reading, new)
        self._send_finish()
        arguments = self.state, self._reading, new, np.int32(row)
        self.state = self._run(("insert_row", len(self._finish)), insert_row, *arguments, donate=(0,))
        if self._planner is not None:
            self._planner.insert(row)
        self._finish[row], self._handles[row] = FinishReason.RUNNING, handle
        self._is_due = True
        if handle.request.is_speculative:
            self._wanted = with_joined(self._wanted, handle.request.max_new_tokens - 1)
        # Dense caches are copied, so the next sample of this prompt can use them.
        self._prompt = handle.request.prompt if self.pool is None else None
        if self.pool is not None and self._shares_pages:
            self.pool.publish(handle)
        self._new = None

    def regroup(self, sources: Sequence[int]) -> None:
        """Dispatches the gather of rows into a batch of another size."""
        self._timed_steps.skip_next()
        kept = np.asarray(sources, np.int32)
        rows = np.maximum(kept, 0)
        self._handles = [None if source < 0 else self._handles[source] for source in sources]
        self._finish = np.where(kept < 0, FinishReason.INACTIVE, self._finish[rows]).astype(np.int32)
        # The pages are not arguments, because a function may copy an argument that it returns unchanged.
        pages = pages_of(self.state)
        name = ("regroup_rows", len(self.state.lengths), len(rows))
        state = self._run(name, regroup_rows, with_pages(self.state, None), rows, self._finish.copy())
        self.state = with_pages(state, pages)
        if self._planner is not None:
            self._planner.regroup(rows)
        self._stopped.clear()
        self._is_due = True

    def stop(self, row: int) -> None:
        """Ends the request in `row`. The state on the device is updated before the next step."""
        self._finish[row] = FinishReason.INACTIVE
        self._free_rows([row])
        self._stopped.append(row)

    def dispatch(self) -> None:
        """Dispatches a step."""
        self._send_finish()
        num_wanted = int(self._wanted[0])
        drafts = np.array([handle is None or handle.request.is_speculative for handle in self._handles])
        if not drafts.all():
            self.state = self.state._replace(draft_lens=self.state.draft_lens * place_whole(drafts, self._mesh))
            num_wanted = num_wanted if any(h is not None and h.request.is_speculative for h in self._handles) else 0
        bucket = self._timed_steps.next_bucket(num_wanted, self._pair, self.state)
        if bucket < num_wanted:  # The policy counts a draft that it wanted and did not get as rejected.
            self.state = self.state._replace(draft_lens=jnp.minimum(self.state.draft_lens, bucket))
        self._num_steps += 1
        holds = self._is_auto and not (self._is_due or self._wanted.any() or self._num_steps >= PLAN_INTERVAL)
        does_plan = self._plans and not holds
        step, planned, rows, plan = self._step(bucket), self._planned_rows() if does_plan else None, None, None
        start = time.perf_counter()
        self.state, info = step(self._pair, self.state, bucket_spec(self.steps.spec, bucket))
        if planned is not None:
            rows = planned(rows_of(self.state))
        elif isinstance(self._policy, Fixed) and not drafts.all():  # The next requests of these rows may draft.
            plan = Plan(place_whole(np.full(len(drafts), self._policy.draft_len, np.int32), self._mesh))
        self._in_flight.append(_InFlight(info, rows, plan, bucket, self._num_steps, start))
        if does_plan:
            self._num_steps, self._is_due = 0, False

    def can_run_ahead(self) -> bool:
        """Returns whether the next step can be dispatched before the last one is collected.

        The step must be compiled, and some row must have room for another step after the most that the last one emits.
        """
        if not self._runs_ahead or self._stopped or len(self._in_flight) != 1:
            return False
        room = max((one.request.max_new_tokens - one.num_tokens for one in self._handles if one is not None), default=0)
        is_ready = self._timed_steps.is_ready(int(self._wanted[0]), len(self.state.lengths))
        return is_ready and room > self._in_flight[0].bucket + 1

    def collect(self) -> StepResult:
        """Waits for the oldest step in flight, reads its info, and plans the next step to be dispatched."""
        info, rows, plan, bucket, num_steps, start = self._in_flight.popleft()
        info, rows = jax.device_get((info, rows))
        end = time.perf_counter()
        seconds, self._last_end = end - max(start, self._last_end), end
        JIT_CACHE.run_seconds += seconds
        self._timed_steps.record(bucket, len(self.state.lengths), seconds)
        if rows is not None:
            self._plan(rows, counts_of(info), num_steps)
        elif plan is not None:
            self.state = with_plan(self.state, plan)
        if not self._in_flight:  # Else the device runs the next step while the policy plans.
            seconds += time.perf_counter() - end
        self._finish = np.array(info.finish)
        self._finish[self._stopped] = FinishReason.INACTIVE
        self._free_rows(np.flatnonzero(self._finish != FinishReason.RUNNING).tolist())
        return StepResult(info, bucket, seconds)

    def discard(self) -> None:
        """Forgets the step in flight, in which no request runs, without waiting for it."""
        self._in_flight.clear()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes that are compiled."""
        return self._config.sizes

    def wait(self) -> None:
        """Waits for all dispatched operations, for measurements."""
        jax.block_until_ready((self.state, self._reading))

    def replan(self) -> None:
        """Plans the next step as if it were the first."""
        self._plan(*self._before_first_step())

    def _start_planner(self, policy: Any, num_rows: int) -> Planner:
        """Returns a planner; ``auto`` starts from the rates and budgets of the last run of such a pair, if any."""
        last = _LAST_RUNS.get(self._run_key) if self._is_auto else None
        if self._is_auto and self.channel is not None:
            last = self.channel.share(last)
        if last is None:
            return Planner(policy, num_rows)
        rates, budget = last
        planner = Planner(dataclasses.replace(policy, prior=rates), num_rows)
        planner.state = planner.state._replace(budget=budget)
        return planner

    def _before_first_step(self) -> tuple[tuple, tuple]:
        """Returns the rows and the counts that a policy gets before the first step."""
        return jax.device_get((rows_of(self.state), counts_of(no_step(len(self.state.lengths)))))

    def _plan(self, rows: Sequence[Any], counts: Sequence[Any], num_steps: int = 1) -> None:
        assert self._planner is not None
        self._planner.compile(rows, counts)  # in a thread, while the products of the calibration are compiled too
        times = self._timed_steps.times(self._pair, self.state)
        times = times._replace(is_refilled=self._is_refilled, num_steps=np.asarray(num_steps, np.int32))
        plan, self._wanted = self._planner.plan(rows, counts, times)
        if self._is_auto:
            state = self._planner.state
            _LAST_RUNS[self._run_key] = np.asarray(state.rates), np.asarray(state.budget)
        # The call of the step places a NumPy array in less time than `device_put` does, but only on one device.
        self.state = with_plan(self.state, plan if self._mesh is None else place_whole(plan, self._mesh))

    def _free_rows(self, rows: Sequence[int]) -> None:
        """Frees the rows of requests that have ended; a drafter that keeps finished text gets theirs."""
        is_new = np.zeros(len(self._handles), bool)
        for row in rows:
            handle, self._handles[row] = self._handles[row], None
            if handle is not None:
                is_new[row] = True
                self._release(handle)
        if is_new.any() and keeps_finished_text(self._pair.drafter):
            arguments = self._pair.drafter, self.state.tokens, self.state.lengths, is_new
            self._take_text(self._run(("remember", len(is_new)), remember_finished, *arguments))

    def _take_text(self, finished_text: Any) -> None:
        drafter: Any = self._pair.drafter
        self._pair = self._pair.with_drafter(drafter.with_finished_text(finished_text))

    def _release(self, handle: RequestHandle) -> None:
        if self.pool is not None:
            self.pool.release(handle)

    def _send_finish(self) -> None:
        if self._stopped:
            self.state = self.state._replace(finish=place_whole(self._finish.copy(), self._mesh))
            self._stopped.clear()

    def _run(self, name: Any, function: Callable, *arguments: Any, donate: tuple[int, ...] = ()) -> Any:
        """Calls the compiled `function`. `name` identifies the shapes of the arguments, which are not compared."""
        return self._function(name, function, *arguments, donate=donate)(*arguments)

    def _function(self, name: Any, function: Callable, *arguments: Any, donate: tuple[int, ...] = ()) -> Callable:
        """Returns the compiled `function`; see `_run`."""
        if name not in self._compiled:
            self._compiled[name] = JIT_CACHE.get(function, *arguments, donate_argnums=donate)
        return self._compiled[name]

    def _planned_rows(self) -> Callable:
        return self._function(("planned_rows", len(self.state.lengths)), planned_rows, rows_of(self.state))

    def _step(self, bucket: int) -> CompiledFunction:
        return self.steps.get(bucket, self._pair, self.state)

    def warm_up(self) -> None:
        """Compiles all functions for all batch sizes. The steps are `TimedSteps.first_buckets`.

        All functions but the steps are run. The steps are run if the policy measures their times, until it relies on
        them: while requests arrive this takes longer, because a step after a pass over a prompt is not timed.
        """
        handle, pair = RequestHandle(Request(np.zeros(2, np.int32), 1)), self._pair
        sizes = self._config.sizes
        for index, size in enumerate(sizes):
            if index:
                self.regroup([*range(sizes[index - 1]), *[-1] * (size - sizes[index - 1])])
            if self._plans and self._planner is not None:
                self._planned_rows()
                rows, counts = self._before_first_step()
                self._planner.compile(rows, counts)
            if self._timed_steps.uses_clock:
                self.replan()
                jnp.minimum(self.state.draft_lens, 0)  # compiles what `dispatch` calls
            for bucket in self._timed_steps.first_buckets(int(self._wanted[1]), size):
                step = self._step(bucket)
                if self._timed_steps.uses_clock:
                    self._measure(bucket, step)
            self.read(handle, 0, self._config.chunk)  # longer than the prompt, which makes no difference
            self.read(handle, 0, 1)
            self.insert(handle, 0)
            self.stop(0)
            self._send_finish()
        for size in reversed(sizes[:-1]):
            self.regroup([-1] * size)
        self._prompt, self._pair = None, pair  # without the text of the request above
        jax.block_until_ready(self.state)

    def _measure(self, bucket: int, step: CompiledFunction) -> None:
        """Runs a step, in which no request runs, until its measured time is relied on."""
        while not is_measured(step):
            start = time.perf_counter()
            self.state, info = step(self._pair, self.state, bucket_spec(self.steps.spec, bucket))
            jax.block_until_ready(info)
            self._timed_steps.record(bucket, len(self.state.lengths), time.perf_counter() - start)


@functools.cache
def _with_pages(function: Callable, pages: Pages | None) -> Callable:
    """Returns the same function object for the same pages, so that engines share compiled functions."""
    return function if pages is None else functools.partial(function, pages=pages)
