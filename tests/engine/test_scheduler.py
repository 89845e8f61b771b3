"""The queue, the reading of prompts and the slots, tested without a device.

No request is lost, served twice or starved, and no slot is lost.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bass_jax.engine import EngineConfig, Loop, QueueFull, Request, RequestHandle, Scheduler
from bass_jax.engine.page_pool import PagePool
from tests.engine.fakes import FakeExecutor, expected_tokens

CONFIG = EngineConfig(num_slots=5, capacity=64, chunk=8)


def request(num_prompt: int = 3, num_new: int = 4, **settings) -> Request:
    return Request(np.arange(num_prompt, dtype=np.int32), num_new, **settings)


def make(config: EngineConfig = CONFIG, *, runs_ahead: bool = False, **options):
    executor = FakeExecutor(config.sizes[0], config.chunk, runs_ahead=runs_ahead)
    return Loop(Scheduler(config), executor, **options), executor


def submit(loop: Loop, *requests: Request) -> list[RequestHandle]:
    handles = [RequestHandle(one, on_cancel=loop.cancel) for one in requests]
    for handle in handles:
        loop.submit(handle)
    return handles


def check_empty(loop: Loop):
    scheduler = loop.scheduler
    assert scheduler.is_idle
    assert scheduler.num_running == scheduler.num_waiting == scheduler.num_reserved == 0
    assert scheduler.rows == [None] * len(scheduler.rows)
    assert not scheduler.reading


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    batching=st.sampled_from(["continuous", "static"]),
    num_slots=st.integers(1, 9),
    buckets=st.sampled_from([None, (4, 16), (16,)]),
    budget=st.sampled_from([None, 64, 200]),
    chunks=st.integers(1, 3),
    runs_ahead=st.booleans(),
    is_pipelined=st.booleans(),
)
def test_every_request_gets_all_of_its_tokens_once(
    seed, batching, num_slots, buckets, budget, chunks, runs_ahead, is_pipelined
):
    random = np.random.default_rng(seed)
    config = EngineConfig(num_slots, 64, budget, chunk=8, chunks_per_step=chunks, batching=batching, buckets=buckets)
    loop, executor = make(config, runs_ahead=runs_ahead, is_pipelined=is_pipelined)
    handles: list[RequestHandle] = []
    cancelled: set[RequestHandle] = set()
    for _ in range(40):
        for _ in range(random.poisson(0.7)):
            num_prompt, num_new = int(random.integers(1, 40)), int(random.integers(1, 20))
            priority = int(random.integers(3))
            handles += submit(loop, request(num_prompt, num_new, seed=100 * len(handles), priority=priority))
        if handles and random.random() < 0.2:
            chosen = handles[random.integers(len(handles))]
            if chosen.finish_reason is None:
                cancelled.add(chosen)
                chosen.cancel()
        loop.advance()
        scheduler = loop.scheduler
        assert scheduler.num_running + len(scheduler.reading) <= num_slots
        assert scheduler.num_reserved <= config.budget
        assert scheduler.num_reserved == 64 * (scheduler.num_running + len(scheduler.reading))
    loop.run()
    check_empty(loop)
    assert all(row is None for row in executor.rows)
    for handle in handles:
        expected, answer = expected_tokens(handle.request), handle.output()
        assert answer.finish_reason == handle.finish_reason
        # A request can finish in the step that was running when it was cancelled.
        assert handle.finish_reason == "length" or (handle in cancelled and handle.finish_reason == "cancelled")
        np.testing.assert_array_equal(answer.tokens, expected[: len(answer.tokens)])
        if handle.finish_reason == "length":
            assert len(answer.tokens) == handle.num_tokens == len(expected)
    assert loop.counts.num_finished == len(handles)
    assert loop.counts.num_emitted == sum(handle.num_tokens for handle in handles)


def test_steps_run_ahead_while_the_rows_stay_the_same():
    """The device always has a step to run, except where a request can be admitted."""
    loop, executor = make(EngineConfig(num_slots=2, capacity=64), runs_ahead=True, is_pipelined=False)
    first, second = submit(loop, request(num_new=40), request(num_new=40))
    loop.advance()
    assert executor.num_in_flight == 1
    loop.advance()
    (waiting,) = submit(loop, request())
    loop.advance()  # There is no free slot.
    assert executor.num_in_flight == 1 and waiting not in executor.rows
    first.cancel()
    loop.advance()  # The step ahead ends before the row is given to another request.
    assert first.finish_reason == "cancelled" and waiting in executor.rows
    loop.run()
    assert second.finish_reason == waiting.finish_reason == "length"
    np.testing.assert_array_equal(second.output().tokens, expected_tokens(second.request))


def test_the_step_ahead_of_a_batch_that_has_ended_is_not_waited_for():
    loop, executor = make(EngineConfig(num_slots=1, capacity=64), runs_ahead=True, is_pipelined=False)
    submit(loop, request(num_new=9))
    loop.run()
    num_steps = [entry[0] for entry in executor.log].count("step")
    assert executor.log[-1] == ("discard",) and loop.counts.num_steps == num_steps - 1


def test_requests_leave_the_queue_by_priority_and_then_by_arrival():
    loop, executor = make(EngineConfig(num_slots=1, capacity=64))
    priorities = [0, 0, 2, 1, 2, 0]
    handles = submit(loop, *(request(priority=priority) for priority in priorities))
    loop.run()
    served = [entry[1] for entry in executor.log if entry[0] == "insert"]
    assert [handles.index(handle) for handle in served] == [2, 4, 3, 0, 1, 5]


def test_a_small_request_does_not_overtake_a_large_one():
    """Otherwise the large one would starve while small ones keep arriving."""
    loop, _ = make(EngineConfig(num_slots=4, capacity=64, token_budget=128))
    first, second, third = submit(loop, *(request(num_new=30) for _ in range(3)))
    while third.times.admitted != third.times.admitted:
        assert loop.scheduler.num_reserved <= 128
        loop.advance()
    assert first.finish_reason or second.finish_reason


def test_running_rows_wait_for_at_most_the_configured_number_of_chunks():
    loop, executor = make(EngineConfig(num_slots=4, capacity=64, chunk=8, chunks_per_step=2))
    submit(loop, request(num_new=40))
    for _ in range(3):
        loop.advance()
    submit(loop, *(request(num_prompt=40, num_new=3) for _ in range(3)))
    loop.run()
    between, num_reads = [], 0
    for entry in executor.log[4:]:
        if entry[0] == "step":
            between.append(num_reads)
            num_reads = 0
        num_reads += entry[0] == "read"
    assert max(between) == 2
    assert sum(between) >= 12  # 39 tokens are 5 chunks each.


def test_a_static_batch_contains_the_waiting_requests_and_runs_to_completion():
    loop, executor = make(EngineConfig(num_slots=4, capacity=64, batching="static"))
    submit(loop, *(request(num_new=num) for num in (3, 30, 5)))
    loop.advance()
    late = submit(loop, request(), request())
    loop.run()
    assert all(handle.finish_reason == "length" for handle in late)
    inserts = [index for index, entry in enumerate(executor.log) if entry[0] == "insert"]
    # No request joins while the long one runs, and the batch keeps its size.
    steps = [entry for entry in executor.log[inserts[2] : inserts[3]] if entry[0] == "step"]
    assert {rows for _, _, rows in steps} == {4}
    assert steps[-1][1] == 1
    assert [entry[0] for entry in executor.log[: inserts[2]]].count("step") == 0


def test_the_batch_shrinks_after_some_steps_or_when_no_row_runs():
    loop, executor = make(EngineConfig(num_slots=8, capacity=64))
    submit(loop, *(request(num_new=60 if i == 0 else 2) for i in range(8)))
    loop.run()
    sizes = [rows for kind, *_, rows in (entry for entry in executor.log if entry[0] == "step")]
    assert max(sizes) >= 4 and sizes[-1] == 1
    submit(loop, request())
    loop.run()
    assert executor.log[-1][2] == 1


@pytest.mark.parametrize(
    "num_prompt, num_new, message",
    [(60, 5, "capacity=64"), (90, 50, "context is 100"), (3, 0, "max_new_tokens=0")],
)
def test_a_request_that_can_never_run_is_refused(num_prompt, num_new, message):
    with pytest.raises(ValueError, match=message):
        CONFIG.check(num_prompt, num_new, 100)


def test_a_request_above_the_token_budget_is_refused():
    with pytest.raises(ValueError, match="token_budget=50"):
        EngineConfig(num_slots=2, capacity=64, token_budget=50).check(3, 4, 100)


def test_a_full_queue_refuses_requests_until_one_is_served():
    loop, _ = make(EngineConfig(num_slots=1, capacity=64, max_waiting=2))
    handles = submit(loop, request(), request())
    with pytest.raises(QueueFull, match="max_waiting=2"):
        submit(loop, request())
    loop.run()
    handles += submit(loop, request())
    loop.run()
    assert [handle.finish_reason for handle in handles] == ["length"] * 3


def test_a_callback_that_raises_ends_only_its_own_request():
    loop, _ = make()
    seen: list[int] = []

    def fail(event):
        seen.append(len(event.tokens))
        raise KeyError("mine")

    failing = RequestHandle(request(num_new=20), on_event=fail, on_cancel=loop.cancel)
    loop.submit(failing)
    others = submit(loop, request(num_new=20, seed=7), request(num_new=5))
    loop.run()
    assert failing.finish_reason == "error" and isinstance(failing.error, KeyError)
    assert len(seen) == 1 and failing.num_tokens < 20
    for handle in others:
        np.testing.assert_array_equal(handle.output().tokens, expected_tokens(handle.request))
    check_empty(loop)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"num_slots": 0}, "num_slots=0"),
        ({"buckets": (1, 96)}, "buckets"),
        ({"buckets": (1, 3)}, "buckets"),
        ({"num_slots": 8, "buckets": (1, 4)}, "num_slots=8"),
        ({"chunk": 0}, "chunk=0"),
    ],
)
def test_an_invalid_configuration_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


def test_a_page_is_shared_only_behind_equal_pages():
    """Two prompts have an equal second page behind different first pages."""
    pool = PagePool(num_pages=12, page_size=4, pages_per_row=3)
    prompts = [[1] * 4 + [2] * 6, [3] * 4 + [2] * 6]
    tables = []
    for prompt in (*prompts, *prompts):
        handle = RequestHandle(Request(np.array(prompt, np.int32), 2))
        tables.append(pool.table(handle)[0].tolist())
        pool.publish(handle)
    assert tables[2][:2] == tables[0][:2] and tables[3][:2] == tables[1][:2]
