"""The engine gives a request the same output as `generate` gives it alone.

The output must not depend on other requests, and every request must end.
"""

import asyncio
import concurrent.futures
import dataclasses
import functools
import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax import policies
from bass_jax.drafters import ModelDrafter, NgramDrafter, suffix_drafter
from bass_jax.engine import EngineClosed, QueueFull, device_executor
from bass_jax.engine.step_clock import is_measured
from bass_jax.models.kv_cache import pages_of
from bass_jax.policies import Plan
from bass_jax.runtime.jit_cache import JIT_CACHE
from tests import tiny
from tests.compilations import recorded_compilations
from tests.letters import Letters
from tests.marks import mostly_slow
from tests.models import own_models

CONFIG = bass.EngineConfig(num_slots=6, capacity=64, chunk=16, buckets=(1, 8))
ONE_SIZE = dataclasses.replace(CONFIG, buckets=(8,))
"""For tests that are not about changes of the batch size: fewer steps are compiled."""
POISON = tiny.VOCAB - 1
"""A token whose embedding is NaN in some tests."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChangingPolicy:
    """Drafts nothing in every fourth step, and another number per row in the others. Its state has rows."""

    @property
    def lengths(self):
        return (0, 3)

    def init(self, num_rows):
        return jnp.int32(0), jnp.zeros(num_rows, jnp.int32)

    def update(self, state, stats):
        step, seen = state
        seen = seen + stats.num_emitted
        wanted = jnp.where(step % 4 == 3, 0, (step + seen) % 4)
        return (step + 1, seen), Plan(wanted.astype(jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WholePrompts:
    """A drafter with a cache that reads whole prompts only."""

    model: ModelDrafter

    def init(self, tokens, lengths):
        return self.model.init(tokens, lengths)

    def propose(self, state, context, draft_len, *, is_sampled):
        return self.model.propose(state, context, draft_len, is_sampled=is_sampled)

    def commit(self, state, lengths):
        return self.model.commit(state, lengths)


@pytest.fixture(scope="module")
def pair():
    target = tiny.model(1)
    return bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.07)), Letters(tiny.VOCAB))


@pytest.fixture(scope="module", params=mostly_slow(["ngram", "model"], lambda drafter: drafter == "ngram"))
def quick_pair(request, pair):
    """The pair of tests that do not depend on the drafter. Steps with prompt lookup compile faster."""
    return pair if request.param == "model" else pair.with_drafter(NgramDrafter())


PAGED = dataclasses.replace(CONFIG, page_size=16, token_budget=170)
"""Ten pages, fewer than six rows of 64 tokens need."""

SPEC = bass.SpecConfig(3)
SHARED_NOISE = bass.SpecConfig(3, "shared_noise")
ENGINES = {
    "token": (SPEC, None, CONFIG),
    "shared_noise": (SHARED_NOISE, ChangingPolicy(), CONFIG),
    "paged": (SPEC, None, PAGED),
    "paged shared_noise": (SHARED_NOISE, ChangingPolicy(), PAGED),
    "paged multi_draft": (bass.SpecConfig(3, "multi_draft", num_candidates=2), None, PAGED),
}


@pytest.fixture(scope="module", params=mostly_slow(ENGINES, lambda name: name == "paged shared_noise"))
def make_engine(request, pair):
    spec, policy, config = ENGINES[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_executor, "SHORT_CHUNK", 8)  # half a chunk
        yield functools.partial(bass.Engine, pair, spec, policy=policy, config=config, num_stop_tokens=4)


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine()


PROMPTS = [[1 + index % 7, 2, 3, index % 5] for index in range(24)]


@pytest.fixture(scope="module")
def regular(pair):
    """The first 30 tokens of regular decoding after each of `PROMPTS`. A lower limit gives the beginnings of them."""
    return [tokens.tolist() for tokens in bass.generate(pair, PROMPTS, step="decode", max_new_tokens=30).tokens]


@pytest.fixture
def token_engine(quick_pair):
    """A new engine with functions that are already compiled, for one batch size."""
    return bass.Engine(quick_pair, SPEC, config=ONE_SIZE, num_stop_tokens=4)


def draw_request(random) -> dict:
    sampling = bass.SamplingParams()
    if random.random() < 0.5:
        sampling = bass.SamplingParams(float(random.uniform(0.3, 1.4)), top_p=float(random.choice([1.0, 0.9])))
    num_prompt = int(random.integers(1, 40))
    prompt = random.integers(0, tiny.VOCAB, num_prompt)
    num_common = int(random.integers(num_prompt + 1))  # with pages, full pages of them are shared
    prompt[:num_common] = np.arange(num_common) ** 2 % 7
    return {
        "prompt": prompt.tolist(),
        "max_new_tokens": int(random.integers(1, 64 - num_prompt + 1)) if random.random() < 0.9 else 1,
        "sampling": sampling,
        "seed": int(random.integers(0, 2**32)),
        "stop_tokens": random.integers(0, tiny.VOCAB, random.integers(0, 2)).tolist(),
        "stop_strings": [("ab",), ("kg", "e"), ()][random.integers(3)] if random.random() < 0.3 else (),
    }


def alone(pair, spec, request: dict):
    options = {name: value for name, value in request.items() if name not in ("prompt", "seed")}
    return bass.generate(pair, [request["prompt"]], spec, seeds=[request["seed"]], **options)


def serve_at_random(engine, num: int, seed: int, monkeypatch):
    """Submits random requests between steps, and cancels some."""
    random, requests, handles, cancelled = np.random.default_rng(seed), [], [], set()
    reads, device_get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(1) or device_get(tree))
    before = engine.counts
    while len(handles) < num or not engine.loop.is_idle:
        for _ in range(min(random.poisson(0.5), num - len(handles))):
            requests.append(draw_request(random))
            handles.append(engine.submit(**requests[-1], priority=int(random.integers(2))))
        if handles and random.random() < 0.1:
            chosen = int(random.integers(max(0, len(handles) - 8), len(handles)))
            if handles[chosen].finish_reason is None:
                handles[chosen].cancel()
                cancelled.add(chosen)
        engine.advance()
    monkeypatch.setattr(jax, "device_get", device_get)
    assert engine.counts.num_steps - before.num_steps == len(reads), "the host reads the device once per step"
    assert engine.counts.num_finished - before.num_finished == num
    return requests, handles, cancelled


def check_outputs(pair, spec, requests, handles, cancelled):
    for index, (request, handle) in enumerate(zip(requests, handles, strict=True)):
        expected, output = alone(pair, spec, request), handle.output()
        events = list(handle)
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        np.testing.assert_array_equal(np.concatenate([event.tokens for event in events]), output.tokens)
        assert "".join(event.text for event in events) == output.text
        if output.finish_reason == "cancelled":
            assert index in cancelled
            np.testing.assert_array_equal(output.tokens, expected.tokens[0][: len(output.tokens)])
            continue
        np.testing.assert_array_equal(output.tokens, expected.tokens[0], err_msg=f"request {index}: {request}")
        np.testing.assert_allclose(output.logprobs, expected.logprobs[0], atol=1e-4)
        assert output.finish_reason == expected.finish_reasons[0]
        assert output.text == expected.texts[0]


def check_empty(engine):
    scheduler = engine.loop.scheduler
    assert scheduler.is_idle and scheduler.num_reserved == 0 and not scheduler.reading
    assert scheduler.rows == [None] * len(scheduler.rows)
    engine.executor._send_finish()  # Rows that the host has ended are sent to the device before the next step.
    assert bool(engine.executor.state.done.all())
    assert engine.page_use is None or engine.page_use[1:3] == (0, 0)


def test_random_requests_get_the_output_that_they_get_alone(engine, pair, monkeypatch):
    """Greedy and sampled requests with stop tokens, stop strings, limits and cancellations.

    With the token rule this holds because the draft length is fixed.
    """
    requests, handles, cancelled = serve_at_random(engine, 60, 0, monkeypatch)
    check_outputs(pair, engine.spec, requests, handles, cancelled)
    check_empty(engine)
    assert engine.counts.num_regroups >= 2
    assert engine.counts.num_accepted > 100
    assert sum(handles[index].finish_reason == "cancelled" for index in cancelled) > 2


@pytest.mark.slow
def test_a_thousand_requests(make_engine, pair, monkeypatch):
    engine = make_engine()
    with recorded_compilations() as compiled:
        requests, handles, cancelled = serve_at_random(engine, 1000, 1, monkeypatch)
    assert not compiled, "nothing is compiled after warm-up"
    check_outputs(pair, engine.spec, requests, handles, cancelled)
    check_empty(engine)
    assert sum(handles[index].finish_reason == "cancelled" for index in cancelled) > 20


def test_nothing_is_compiled_after_warm_up(make_engine, monkeypatch):
    """Neither by the engine nor by jax, for requests of all kinds.

    The engine is new, because compiled functions may be dropped between tests.
    """
    engine = make_engine()
    before = JIT_CACHE.num_compiled
    with recorded_compilations() as compiled:
        serve_at_random(engine, 40, 2, monkeypatch)
        assert not compiled
        jax.jit(lambda x: x * 3 + 1)(jnp.arange(17))
        assert compiled, "a compilation is recorded"
    assert JIT_CACHE.num_compiled == before


def test_a_policy_is_compiled_in_the_warm_up_too(quick_pair):
    """With all its functions; otherwise their compilation would count as the time of a step."""
    config = bass.EngineConfig(4, 64, buckets=(4,), chunk=16)
    policy = "bass_heuristic(start=2, limit=3)"  # of no other test of the engine
    engine = bass.Engine(quick_pair, bass.SpecConfig(None, "greedy"), config=config, policy=policy)
    with recorded_compilations() as compiled:
        engine.submit([1, 2, 3], max_new_tokens=8).result()
    assert not compiled


def test_a_policy_with_few_lengths_compiles_and_measures_all_before_it_serves(quick_pair, monkeypatch):
    monkeypatch.setattr(JIT_CACHE, "run_seconds", 1e9)  # A further length could be compiled at once.
    config, policy = bass.EngineConfig(4, 64, buckets=(4,), chunk=16), policies.auto(lengths=(0, 1, 3))
    engine = bass.Engine(quick_pair, config=config, policy=policy)
    steps = [engine.executor.steps.find(bucket, 4) for bucket in engine.executor.steps.buckets]
    assert all(step is not None and is_measured(step) for step in steps), "no request waits for a measurement"
    with recorded_compilations() as compiled:
        for seed in range(4):
            engine.submit([1, 2, 3 + seed], max_new_tokens=30)
        engine.run()
    assert not compiled


@pytest.mark.slow
@pytest.mark.parametrize(("is_processed", "page_size"), [(True, None), (False, None), (False, 16)])
def test_logits_processors(quick_pair, is_processed, page_size):
    """Bias, bans, penalties and minimum lengths join a batch in which a row without any is running."""
    config = bass.EngineConfig(4, 64, buckets=(4,), chunk=16, page_size=page_size)
    engine = bass.Engine(quick_pair, SPEC, config=config, is_processed=is_processed, warm_up=False)
    samplings = [
        bass.SamplingParams(),
        bass.SamplingParams(0.9, repetition_penalty=1.4, frequency_penalty=0.3),
        bass.SamplingParams(banned_tokens=[3, 4], logit_bias={2: 1.5}),
        bass.SamplingParams(0.7, min_new_tokens=9),
    ]
    requests = [
        {"prompt": [1, 2, 3, i], "sampling": sampling, "seed": i, "stop_tokens": [5, 7], "max_new_tokens": 20}
        for i, sampling in enumerate(samplings)
    ]
    handles = [engine.submit(**requests[0])]
    for _ in range(3):
        engine.advance()
    assert handles[0].num_tokens > 0 and not handles[0].is_finished
    handles += [engine.submit(**request) for request in requests[1:]]
    engine.run()
    check_outputs(quick_pair, engine.spec, requests, handles, set())


@pytest.mark.slow
def test_a_drafter_that_reads_whole_prompts(pair):
    pair = pair.with_drafter(NgramDrafter())
    engine = bass.Engine(pair, SPEC, config=bass.EngineConfig(4, 64, chunk=16, buckets=(4,)))
    requests = [draw_request(np.random.default_rng(seed)) for seed in range(6)]
    handles = [engine.submit(**request) for request in requests]
    engine.run()
    check_outputs(pair, engine.spec, requests, handles, set())


def test_a_request_that_stops_while_a_step_is_ahead_emits_nothing_more(token_engine, quick_pair, monkeypatch):
    """The device does not see a stop string: the step ahead decodes the row, and the next request there is another."""
    endless = {"max_new_tokens": 40, "stop_tokens": (), "seed": 0}
    text = alone(quick_pair, token_engine.spec, {"prompt": [1, 2, 3]} | endless).texts[0]
    requests = [
        {"prompt": [1, 2, 3], "stop_strings": (text[9:12],)} | endless,
        {"prompt": [4, 2, 1]} | endless,
        {"prompt": [5, 6]} | endless | {"max_new_tokens": 9},
    ]
    executor, num_ahead = token_engine.executor, []
    stop = executor.stop
    monkeypatch.setattr(executor, "stop", lambda row: (num_ahead.append(len(executor._in_flight)), stop(row)))
    before = token_engine.counts
    handles = [token_engine.submit(**request) for request in requests[:2]]
    while handles[0].finish_reason is None:
        token_engine.advance()
    token_engine.advance()
    assert int(executor.state.done.sum()) == len(executor.state.done) - 1, "only the other request still runs"
    handles.append(token_engine.submit(**requests[2]))
    token_engine.run()
    assert num_ahead == [1]
    check_outputs(quick_pair, token_engine.spec, requests, handles, set())
    assert token_engine.counts.num_emitted - before.num_emitted == sum(len(one.output().tokens) for one in handles)


def test_requests_without_speculation(token_engine, regular):
    """They draft nothing beside requests that do, and all get what regular decoding gives."""
    handles = [
        token_engine.submit(one, max_new_tokens=12, is_speculative=i % 2 == 0) for i, one in enumerate(PROMPTS[:4])
    ]
    outputs = [handle.result().tokens.tolist() for handle in handles]
    assert all((handle.num_drafted > 0) == (i % 2 == 0) for i, handle in enumerate(handles))
    assert outputs == [tokens[:12] for tokens in regular[:4]]
    for is_speculative in (False, True):  # One alone in the batch does not stop the drafting for the next one.
        handle = token_engine.submit(PROMPTS[0], max_new_tokens=12, is_speculative=is_speculative)
        assert handle.result().tokens.tolist() == regular[0][:12] and (handle.num_drafted > 0) == is_speculative


@pytest.mark.slow
def test_log_probabilities_of_alternatives(pair):
    spec = bass.SpecConfig(2, num_logprobs=2)
    engine = bass.Engine(pair, spec, config=bass.EngineConfig(1, 64))
    request = {"prompt": [1, 2, 3], "seed": 4, "max_new_tokens": 9, "stop_tokens": ()}
    output, expected = engine.submit(**request).result(), alone(pair, spec, request)
    assert output.token_logprobs is not None
    for found, wanted in zip(output.token_logprobs, expected.token_logprobs[0], strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_an_async_for_yields_the_events(token_engine, quick_pair):
    requests = [draw_request(np.random.default_rng(seed)) for seed in range(10, 18)]

    async def read(request):
        handle = token_engine.submit(**request)
        return handle, [event async for event in handle]

    async def main():
        return await asyncio.gather(*(read(request) for request in requests))

    found = asyncio.run(main())
    for (handle, events), request in zip(found, requests, strict=True):
        expected = alone(quick_pair, token_engine.spec, request)
        np.testing.assert_array_equal(np.concatenate([event.tokens for event in events]), expected.tokens[0])
        assert "".join(event.text for event in events) == expected.texts[0] == handle.output().text
    check_empty(token_engine)


def test_a_request_ends_if_its_consumer_is_cancelled_or_leaves(token_engine, quick_pair):
    """Other requests are served to their end."""
    request = {"prompt": [1, 2, 3], "max_new_tokens": 60, "stop_tokens": ()}

    async def leave(handle):
        async for _ in handle:
            break

    async def wait(handle):
        return await handle

    async def main():
        handles = [token_engine.submit(**request, seed=seed) for seed in range(3)]
        leaver, waiter, stayer = handles
        task = asyncio.create_task(wait(waiter))
        await leave(leaver)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gc.collect()
        output = await stayer
        return leaver, waiter, output

    leaver, waiter, output = asyncio.run(main())
    token_engine.run()
    assert leaver.finish_reason == waiter.finish_reason == "cancelled"
    assert 0 < leaver.num_tokens < 60
    np.testing.assert_array_equal(output.tokens, alone(quick_pair, token_engine.spec, request | {"seed": 2}).tokens[0])
    check_empty(token_engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "page_size"),
    [("ngram", None), ("model", None), ("model", 16)],
)
def test_nan_in_a_row_does_not_affect_other_requests(pair, drafter, page_size):
    """Neither rows of the same batch, nor requests that later use its slot, its pages or its prompt buffer."""
    params = dict(pair.target.params)
    params["embedding"] = params["embedding"].at[POISON].set(jnp.nan)
    # The draft model never proposes the token, because a draft with NaN would end its row.
    reduced = tiny.model_drafter(tiny.reduced_vocabulary(tuple(range(POISON))))
    drafter = NgramDrafter() if drafter == "ngram" else reduced
    poisoned = bass.Pair(dataclasses.replace(pair.target, params=params), drafter, pair.tokenizer)
    config = bass.EngineConfig(2, 64, 96 if page_size else None, chunk=16, buckets=(2,), page_size=page_size)
    engine = bass.Engine(poisoned, SPEC, config=config)
    prompts = [[1, 2], [1, POISON, 3], [4, 5, POISON], [3, 1, 4], [POISON], [2, 7, 1, 8], [6, 6]]
    requests = [{"prompt": prompt, "max_new_tokens": 12, "seed": 5, "stop_tokens": (POISON,)} for prompt in prompts]
    handles = [engine.submit(**request) for request in requests]
    engine.run()
    for request, handle in zip(requests, handles, strict=True):
        if POISON in request["prompt"]:
            assert handle.finish_reason == "not_finite" and handle.num_tokens == 0
        else:
            assert handle.finish_reason in ("length", "stop")
            expected = alone(pair, engine.spec, request)  # With the target without NaN.
            np.testing.assert_array_equal(handle.output().tokens, expected.tokens[0])
    check_empty(engine)


def test_an_invalid_request_is_refused(token_engine):
    before = token_engine.counts
    for request, message in (
        ({"prompt": [1] * 60, "max_new_tokens": 5}, "capacity=64"),
        ({"prompt": []}, "empty"),
        ({"prompt": [tiny.VOCAB]}, "vocabulary"),
        ({"prompt": [1], "max_new_tokens": 0}, "max_new_tokens=0"),
        ({"prompt": [1], "max_new_tokens": 5, "seed": -1}, "seed=-1"),
        ({"prompt": [1], "max_new_tokens": 5, "stop_tokens": range(5)}, "stop_tokens has 5"),
    ):
        with pytest.raises(ValueError, match=message):
            token_engine.submit(**request)
    assert token_engine.loop.is_idle and token_engine.counts == before


def test_a_greedy_rule_refuses_sampled_requests(quick_pair):
    engine = bass.Engine(quick_pair, bass.SpecConfig(3, "greedy"), config=ONE_SIZE, warm_up=False)
    with pytest.raises(ValueError, match=r"temperature=0\.5"):
        engine.submit([1], max_new_tokens=3, sampling=bass.SamplingParams(0.5))


def test_a_full_queue_refuses_requests_until_one_is_served(quick_pair):
    config = dataclasses.replace(ONE_SIZE, max_waiting=3)
    engine = bass.Engine(quick_pair, SPEC, config=config, num_stop_tokens=4)
    request = {"prompt": [1, 2, 3], "max_new_tokens": 5, "stop_tokens": ()}
    handles = [engine.submit(**request) for _ in range(3)]
    with pytest.raises(QueueFull):
        engine.submit(**request)
    assert [len(handle.result().tokens) for handle in handles] == [5, 5, 5]
    assert engine.submit(**request).result().finish_reason == "length"


def test_a_callback_that_raises_ends_only_its_own_request(token_engine, quick_pair):
    def fail(event):
        raise RuntimeError("in a callback")

    request = {"prompt": [1, 2, 3], "max_new_tokens": 20, "stop_tokens": ()}
    failing = token_engine.submit(**request, on_event=fail)
    events = []
    other = token_engine.submit(**request, seed=3, on_event=events.append)
    token_engine.run()
    assert failing.finish_reason == "error" and str(failing.error) == "in a callback"
    np.testing.assert_array_equal(
        other.output().tokens, alone(quick_pair, token_engine.spec, request | {"seed": 3}).tokens[0]
    )
    assert sum(len(event.tokens) for event in events) == 20
    check_empty(token_engine)


@pytest.mark.slow
def test_the_default_engine_chooses_the_draft_length(pair, regular):
    """The tokens are those of regular decoding, whatever is measured; two lengths are compiled before the start."""
    engine = bass.Engine(pair, config=CONFIG, num_stop_tokens=4)
    steps = engine.executor.steps
    for size in CONFIG.sizes:
        compiled = [bucket for bucket in steps.buckets if steps.find(bucket, size)]
        assert 0 in compiled and len(compiled) <= 2
    handles = [engine.submit(prompt, max_new_tokens=30) for prompt in PROMPTS[:12]]
    engine.run()
    for handle, tokens in zip(handles, regular[:12], strict=True):
        assert handle.result().tokens.tolist() == tokens


def test_pages_are_reserved_and_freed(pair):
    """There are more rows than dense caches with as many tokens would have."""
    spec, policy, config = ENGINES["paged shared_noise"]
    engine = bass.Engine(pair, spec, policy=policy, config=config, num_stop_tokens=4)
    handles = [engine.submit([1, 2, 3], max_new_tokens=num, stop_tokens=()) for num in (13, 13, 13, 29, 40)]
    while engine.loop.scheduler.num_running < 5:
        engine.advance()
    # 3 rows have 1 page, one has 2 and one has 3. Dense caches of 160 tokens have 2 rows.
    use = engine.page_use
    assert (use.num_pages, use.num_reserved) == (10, 8)
    assert use.num_tokens == sum(3 + handle.num_tokens for handle in handles)
    assert use.fragmentation(16) == 1 - use.num_tokens / 128
    handles[4].cancel()
    engine.advance()
    assert engine.page_use.num_reserved <= 5
    engine.run()
    assert [handle.num_tokens for handle in handles[:4]] == [13, 13, 13, 29]
    check_empty(engine)


@pytest.mark.parametrize("drafter", mostly_slow(["model", "ngram"], lambda drafter: drafter == "ngram"))
def test_equal_beginnings_of_prompts_are_read_once(drafter):
    """Full pages are shared within a prefix group, also after their request has ended, until the room is needed.

    With two layers, the keys and values of a page depend on the pages before it.
    """
    target = tiny.model(1, num_layers=2)
    pair, config = bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.07))), PAGED
    if drafter == "ngram":
        pair, config = pair.with_drafter(NgramDrafter()), dataclasses.replace(PAGED, buckets=(8,))
    engine = bass.Engine(pair, SPEC, config=config, num_stop_tokens=4)
    start = [1 + (index * index) % 7 for index in range(34)]

    def serve(prompts: list[list[int]], **options) -> int:
        """Returns how many prompt tokens were read."""
        before = engine.counts.num_read
        requests = [{"prompt": one, "max_new_tokens": 8, "stop_tokens": (), "seed": 0} for one in prompts]
        handles = [engine.submit(**request, **options) for request in requests]
        engine.run()
        for request, handle in zip(requests, handles, strict=True):
            output, expected = handle.output(), alone(pair, SPEC, request)
            np.testing.assert_array_equal(output.tokens, expected.tokens[0])
            np.testing.assert_allclose(output.logprobs, expected.logprobs[0], atol=1e-4)
        assert engine.page_use[1:3] == (0, 0)
        return engine.counts.num_read - before

    shared = [[*start, index, 3] for index in range(4)]
    assert serve(shared) == 35 + 3 * 3, "two pages of 16 tokens are read once"
    assert engine.page_use.num_kept == 2
    assert serve([[*start, 9, 9], start[:32], start[:17]]) == 3 + 15 + 16, "at least one token is read"
    assert serve([[*start, 9, 9]], prefix_group="other") == 35
    others = [[index, *start, *range(10)] for index in range(4)]
    assert serve(others) == 4 * 44 and engine.page_use.num_kept <= 10
    assert serve(others[3:]) == 12, "the second page, which all of them have, follows another first page"
    assert serve(shared[:1]) == 35, "the pages were needed for others"
    engine.executor.pool.forget()
    assert engine.page_use.num_kept == 0 and serve(shared[:1]) == 35


@pytest.mark.slow
def test_a_drafter_that_reads_whole_prompts_keeps_a_dense_cache(pair):
    """The second prompt shares its first page. The target reads the rest of it, and the drafter the whole prompt."""
    pair = pair.with_drafter(WholePrompts(pair.drafter))
    engine = bass.Engine(pair, SPEC, config=dataclasses.replace(PAGED, buckets=(8,)), warm_up=False)
    for prompt, num_read in (([1, 2, 3, 4, 5, 6] * 6, 35), ([1, 2, 3, 4, 5, 6] * 5 + [0, 2, 1], 16)):
        before = engine.counts.num_read
        request = {"prompt": prompt, "max_new_tokens": 12, "stop_tokens": (), "seed": 0}
        handle = engine.submit(**request)
        engine.run()
        output, expected = handle.output(), alone(pair, SPEC, request)
        np.testing.assert_array_equal(output.tokens, expected.tokens[0])
        assert handle.num_steps == expected.metrics.num_steps
        assert engine.counts.num_read - before == num_read
    assert len(pages_of(engine.executor.state)) == 1, "the target's"
    check_empty(engine)


def test_pages_that_do_not_fit_are_refused():
    """A model's own cache layout cannot be paged, and pages fill the capacity."""
    target = own_models.plain_model(tiny.VOCAB, 1)
    with pytest.raises(ValueError, match=r"page_size: expected None, because .* has its own cache layout"):
        bass.Engine(bass.Pair(target, NgramDrafter()), SPEC, config=PAGED, warm_up=False)
    with pytest.raises(ValueError, match="page_size=24"):
        bass.EngineConfig(2, 64, page_size=24)


def test_threads_share_an_engine(token_engine, regular):
    """Eight threads once crashed or did not end."""
    outputs: dict[int, list[int]] = {}

    def serve(worker: int) -> None:
        for index in range(worker, len(PROMPTS), 8):
            handle = token_engine.submit(PROMPTS[index], max_new_tokens=12)
            if index % 3 == 0:
                token_engine.submit(PROMPTS[index], max_new_tokens=40).cancel()
            outputs[index] = handle.result().tokens.tolist()

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        for done in [threads.submit(serve, worker) for worker in range(8)]:
            done.result(timeout=120)
    assert [outputs[index] for index in range(len(PROMPTS))] == [tokens[:12] for tokens in regular]


def test_a_with_block_completes_the_requests(quick_pair):
    with bass.Engine(quick_pair, SPEC, config=ONE_SIZE, num_stop_tokens=4) as engine:
        handles = [engine.submit([1, 2, index], max_new_tokens=9, stop_tokens=()) for index in range(9)]
    assert [(len(handle.output().tokens), handle.finish_reason) for handle in handles] == [(9, "length")] * 9
    with pytest.raises(EngineClosed, match="the engine is closed"):
        engine.submit([1], max_new_tokens=2)
    engine.close()
    assert engine.is_closed and not engine.advance()
    check_empty(engine)


def test_an_exception_in_a_with_block_cancels_the_requests(quick_pair):
    handles = []

    def serve():
        with bass.Engine(quick_pair, SPEC, config=ONE_SIZE, num_stop_tokens=4) as engine:
            handles.extend(engine.submit([1, 2, index], max_new_tokens=40, stop_tokens=()) for index in range(9))
            for _ in range(5):
                engine.advance()
            raise KeyError

    with pytest.raises(KeyError):
        serve()
    assert {handle.finish_reason for handle in handles} == {"cancelled"}
    assert 0 < len(handles[0].result().tokens) < 40 and len(handles[8].result().tokens) == 0


def test_a_step_that_fails_ends_all_requests(quick_pair, monkeypatch):
    """Threads and event loops that wait get the error, and none waits forever.

    Running, waiting and late requests are covered.
    """
    engine = bass.Engine(quick_pair, SPEC, config=ONE_SIZE, num_stop_tokens=4)
    collect, num_steps = engine.executor.collect, 0

    def fail():
        nonlocal num_steps
        num_steps += 1
        return collect() if num_steps < 4 else 1 / 0

    monkeypatch.setattr(engine.executor, "collect", fail)
    handles = [engine.submit([1, 2, index], max_new_tokens=40, stop_tokens=()) for index in range(10)]

    def wait(handle):
        with pytest.raises(EngineClosed):
            handle.result()

    async def wait_async(handle):
        with pytest.raises(EngineClosed):
            await handle

    with concurrent.futures.ThreadPoolExecutor(10) as threads:
        waiting = [threads.submit(wait, handle) for handle in handles[:8]]
        waiting += [threads.submit(asyncio.run, wait_async(handle)) for handle in handles[8:]]
        for one in waiting:
            one.result(timeout=60)
    assert {handle.finish_reason for handle in handles} == {"error"}
    assert len(handles[0].output().tokens) > 0
    for call in (handles[0].result, lambda: engine.submit([1], max_new_tokens=2)):
        with pytest.raises(EngineClosed, match="a step of the engine failed: ZeroDivisionError") as found:
            call()
        assert isinstance(found.value.__cause__, ZeroDivisionError)
    engine.close()


@pytest.mark.slow
def test_sixteen_threads_and_two_event_loops(pair):
    """2,000 requests are submitted, read and cancelled: none is lost, doubled or hangs."""
    engine = bass.Engine(pair, SPEC, config=dataclasses.replace(CONFIG, max_waiting=2000), num_stop_tokens=4)
    prompts = [[1 + index % 7, 2, 3, index % 5] for index in range(35)]
    expected = [row.tolist() for row in bass.generate(pair, prompts, step="decode", max_new_tokens=12).tokens]

    def check(index: int, tokens: list[int], reason: str | None) -> None:
        whole = expected[index % 35]
        assert tokens == (whole[: len(tokens)] if reason == "cancelled" else whole)

    def serve(worker: int) -> int:
        for index in range(worker * 100, worker * 100 + 100):
            handle = engine.submit(prompts[index % 35], max_new_tokens=12)
            if index % 4 == 0:
                handle.cancel()
            output = handle.result()
            check(index, output.tokens.tolist(), output.finish_reason)
        return 100

    def serve_async(worker: int) -> int:
        async def one(index: int) -> None:
            handle = engine.submit(prompts[index % 35], max_new_tokens=12)
            if index % 4 == 0:
                handle.cancel()
            output = await handle
            check(index, output.tokens.tolist(), output.finish_reason)

        async def gather() -> int:
            await asyncio.gather(*(one(index) for index in range(worker * 200, worker * 200 + 200)))
            return 200

        return asyncio.run(gather())

    with concurrent.futures.ThreadPoolExecutor(18) as threads:
        found = [threads.submit(serve, worker) for worker in range(16)]
        found += [threads.submit(serve_async, worker) for worker in range(2)]
        assert sum(one.result(timeout=600) for one in found) == 2000
    assert engine.counts.num_finished == 2000
    check_empty(engine)


def test_a_task_that_starts_when_a_step_is_done_does_not_block_the_event_loop(token_engine):
    """The event loop has not told the engine yet that the step is done; the task must not wait for this step."""
    engine, num_seen = token_engine, 0

    async def start_late():
        nonlocal num_seen
        loop = asyncio.get_running_loop()
        while num_seen < 3:
            await asyncio.sleep(0)
            if loop in engine._pending and engine._pending[loop].done():
                num_seen += 1
                await engine.submit([1, 2], max_new_tokens=2, stop_tokens=())

    async def serve():
        await asyncio.gather(start_late(), engine.submit([1, 2, 3], max_new_tokens=40, stop_tokens=()))

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive() and num_seen == 3


@pytest.mark.slow
def test_event_loops_share_an_engine(pair):
    engine = bass.Engine(pair, SPEC, config=CONFIG, num_stop_tokens=4)
    expected = bass.generate(pair, [[1, 2], [3]], step="decode", max_new_tokens=20).tokens

    def serve(prompt: list[int]) -> list[list[int]]:
        async def gather():
            handles = [engine.submit(prompt, max_new_tokens=20) for _ in range(4)]
            return [output.tokens.tolist() for output in await asyncio.gather(*handles)]

        return asyncio.run(gather())

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = [threads.submit(serve, prompt) for prompt in ([1, 2], [3])]
        for outputs, row in zip(found, expected, strict=True):
            assert outputs.result(timeout=120) == [row.tolist()] * 4


@pytest.mark.parametrize("page_size", [None, 16])
def test_the_text_of_a_finished_request_is_kept_once_and_speeds_up_the_next(page_size):
    pair = bass.Pair(tiny.model(1), suffix_drafter(shared_tokens=256))
    config = bass.EngineConfig(num_slots=2, capacity=64, chunk=16, buckets=(2,), page_size=page_size)
    engine = bass.Engine(pair, bass.SpecConfig(4, "greedy"), config=config)
    text = []

    def finish(*handles):
        while not engine.loop.is_idle:
            engine.advance()
        return [handle.output().tokens.tolist() for handle in handles]

    def kept():
        drafter = engine.loop.executor._pair.drafter
        tokens = np.asarray(drafter.finished_text.tokens)
        assert (tokens[int(drafter.finished_text.end) :] == -1).all()
        return tokens[: int(drafter.finished_text.end)].tolist()

    assert kept() == [], "the request that warms up is not kept"
    prompts = [[3, 1, 4], [2, 7, 1, 8]]
    handles = [engine.submit(prompt, max_new_tokens=num) for prompt, num in zip(prompts, (12, 20), strict=True)]
    outputs = finish(*handles)
    for prompt, output in zip(prompts, outputs, strict=True):  # The shorter one ends first.
        text += [*prompt, *output, -1]
    assert kept() == text
    again = engine.submit(prompts[1], max_new_tokens=20)
    assert finish(again) == outputs[1:]
    assert handles[1].num_steps > again.num_steps == 4, "all drafts are those of the first request"
    text += [*prompts[1], *outputs[1], -1]
    assert kept() == text
    ended = engine.submit([5, 6], max_new_tokens=40)
    engine.advance()
    engine.advance()
    ended.cancel()
    (output,) = finish(ended)
    cancelled = kept()[len(text) :]  # A step may have run between the last event and the cancellation.
    assert 0 < len(output) < 40 and cancelled[: 2 + len(output)] == [5, 6, *output] and cancelled.index(-1) < 42
    assert (pair.drafter.finished_text.tokens == -1).all(), "the pair itself is not changed"
