"""The measured times of steps, and what the policy `auto` compiles and plans with them."""

import dataclasses
import itertools
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax import policies
from bass_jax.decoding.policy_runner import StepTimes
from bass_jax.decoding.state import output_tokens
from bass_jax.drafters import NgramDrafter
from bass_jax.engine import device_executor, step_clock, timed_steps
from bass_jax.engine.device_executor import PLAN_INTERVAL
from bass_jax.engine.generate import GenerateLoop
from bass_jax.engine.planner import Planner
from bass_jax.engine.step_clock import NUM_FIRST, StepClock, calibrate
from bass_jax.policies.auto import Auto
from bass_jax.runtime import jit_cache
from bass_jax.runtime.jit_cache import JIT_CACHE, CompiledFunction
from tests import tiny


def set_measured(step: CompiledFunction) -> None:
    step.seconds, step.num_calls = 1.0, 1 + NUM_FIRST


def compiled() -> CompiledFunction:
    return CompiledFunction(lambda: None, compile_seconds=1.0)


def test_the_first_call_and_catching_up_are_not_the_time_of_a_step():
    step = compiled()
    clock = StepClock([step])
    clock.record(step, 9.0, resumes=False)
    assert np.isnan(clock.times().step_seconds).all()
    clock.record(step, 1.0, resumes=False)
    clock.record(step, 3.0, resumes=True)
    times = clock.times()
    np.testing.assert_allclose(times.step_seconds, [1.0])
    np.testing.assert_allclose(times.resume_seconds, 2.0)


def test_an_interruption_moves_the_estimate_little():
    step = compiled()
    clock = StepClock([step])
    for seconds in (1.0, 70.0, 1.0, 100.0):
        clock.record(step, seconds, resumes=False)
    assert clock.times().step_seconds[0] == 1.0, "of the first ones the shortest counts"
    clock.record(step, 100.0, resumes=False)
    assert 1.0 < clock.times().step_seconds[0] <= 1.2


def clock_with(*all_seconds: float) -> tuple[StepClock, list[CompiledFunction]]:
    """A clock with steps of several lengths, all of which were measured."""
    steps = [compiled() for _ in all_seconds]
    clock = StepClock([*steps])
    for step, seconds in zip(steps, all_seconds, strict=True):
        for _ in range(1 + NUM_FIRST):
            clock.record(step, seconds, resumes=False)
    return clock, steps


def test_a_longer_context_is_seen_in_the_lengths_that_are_not_in_use():
    """Every step becomes slower by the same factor. Only one length measures it."""
    clock, (_, used) = clock_with(1.0, 1.5)
    for _ in range(50):
        clock.record(used, 1.9, resumes=False)
    times = clock.times().step_seconds
    assert times[1] == pytest.approx(1.9, rel=0.01)
    assert 1.1 < times[0] < 1.9 / 1.5


def test_a_busy_machine_does_not_make_short_steps_seem_slower_than_they_are():
    """All steps take 1.5 times as long. If regular steps seem to take longer still, drafts go on where they lose."""
    clock, (_, middle, longest) = clock_with(1.0, 2.0, 3.0)
    for _ in range(4):
        for step, seconds in ((longest, 4.5), (middle, 3.0)):
            for _ in range(10):
                clock.record(step, seconds, resumes=False)
    times = clock.times().step_seconds
    assert times[2] == pytest.approx(4.5, rel=0.1)
    assert 1.2 < times[0] < 1.5


def test_lengths_without_a_measurement_are_in_proportion_to_the_calibration():
    step = compiled()
    clock = StepClock([None, step, None], np.array([1.0, 2.0, 4.0], np.float32))
    np.testing.assert_allclose(clock.times().step_seconds, [1.0, 2.0, 4.0])
    for _ in range(2):
        clock.record(step, 0.2, resumes=False)
    times = clock.times()
    np.testing.assert_allclose(times.step_seconds, [0.1, 0.2, 0.4], rtol=1e-6)
    assert times.is_compiled.tolist() == [False, True, False]


def test_between_measured_lengths_the_ratio_to_the_calibration_is_interpolated():
    steps = [compiled(), None, compiled(), None]
    clock = StepClock(steps, [1.0, 2.0, 4.0, 8.0])
    for step, seconds in ((steps[0], 10.0), (steps[2], 80.0)):
        for _ in range(2):
            clock.record(step, seconds, resumes=False)
    np.testing.assert_allclose(clock.times().step_seconds, [10.0, 2.0 * 15, 80.0, 8.0 * 20])


def test_the_calibration_counts_the_drafter():
    target = tiny.model(1)
    free = calibrate(bass.Pair(target, NgramDrafter()), 2, (0, 0))
    assert free[0] == free[1] > 0
    drafts = bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.1)))
    # The draft model is as large as the target, so four drafts take as long as four steps.
    times = calibrate(drafts, 2, (0, 4))
    assert times[1] >= 4 * times[0]


def test_the_calibration_does_not_time_odd_lengths():
    first, odd, last = calibrate(bass.Pair(tiny.model(1), NgramDrafter()), 2, (0, 1, 2))
    assert odd == pytest.approx((first + last) / 2)


@pytest.mark.parametrize("content", [None, "", "{}"])
def test_the_next_process_takes_the_calibration_from_disk(tmp_path, monkeypatch, content):
    """Else it may start with another step, which is not compiled. A file that cannot be read is replaced."""
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    folder, times = tmp_path / "xla", itertools.count(1.0)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    monkeypatch.setattr(step_clock, "_call_seconds", lambda *_: next(times))
    try:
        pair = bass.Pair(tiny.model(1), NgramDrafter())
        JIT_CACHE.clear()
        first = calibrate(pair, 2, (0, 4))
        JIT_CACHE.clear()
        (file,) = folder.glob("*.json")
        if content is None:
            num_compiled = JIT_CACHE.num_compiled
            assert calibrate(pair, 2, (0, 4)) == first and JIT_CACHE.num_compiled == num_compiled
        else:
            file.write_text(content)
            second = calibrate(pair, 2, (0, 4))
            assert second != first
            JIT_CACHE.clear()
            assert calibrate(pair, 2, (0, 4)) == second
        assert calibrate(pair, 3, (0, 4)) != first
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_product_of_several_processes_is_measured_in_all_of_them(monkeypatch):
    """One that waited for another, which has found the time on disk, would wait forever."""
    weight = types.SimpleNamespace(is_fully_addressable=False)
    monkeypatch.setattr(step_clock, "_measured_product_seconds", lambda *_: [1.0])
    monkeypatch.setattr(step_clock, "read_json", lambda *_: pytest.fail("a time is read"))
    assert jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    assert step_clock._product_seconds(weight, [1]) == [1.0]


def test_nothing_is_timed_before_the_first_step_on_a_gpu(monkeypatch):
    """A call takes longer than the product, and ``auto`` did not draft where six drafts were twice as fast (H200)."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(step_clock, "_product_seconds", lambda *_: pytest.fail("a product is timed"))
    times = calibrate(bass.Pair(tiny.model(1), NgramDrafter()), 2, (0, 1, 4))
    assert times[0] < times[1] < times[2] < 2 * times[0]


@pytest.fixture
def pair():
    JIT_CACHE.clear()  # Other tests of this process may have compiled the same steps.
    device_executor._LAST_RUNS.clear()
    target = tiny.model(5)
    return bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.1)))


def test_the_default_compiles_one_step_first_and_at_most_four(pair, monkeypatch):
    """A further step is compiled when the steps so far took as long as a compilation."""
    run = GenerateLoop(pair, tiny.PROMPTS, max_new_tokens=40)
    executor, timed = run._executor, run._executor._timed_steps
    assert isinstance(executor.steps.policy, Auto)
    num_rows = len(run.state.lengths)

    def buckets():
        return [bucket for bucket in executor.steps.buckets if executor.steps.find(bucket, num_rows)]

    assert len(buckets()) == 1
    assert buckets()[0] in (0, 1, 2, 4, 8)
    assert not timed._may_compile
    set_measured(executor.steps.find(buckets()[0], num_rows))
    assert {timed.bucket(num, num_rows) for num in range(9)} == set(buckets())  # Too early to compile another.
    monkeypatch.setattr(timed_steps, "MAX_MEASURED", 2)
    for num in (0, 1, 2, 8):
        timed._may_compile = True
        set_measured(executor._step(timed.bucket(num, num_rows)))
    assert len(buckets()) == 2
    regular = bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=40)
    for _ in run:
        pass
    for found, expected in zip(run.result().tokens, regular.tokens, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_compilation_postpones_the_next_one_by_its_own_time(monkeypatch):
    """A small function that is compiled does not make up for all steps before it."""
    monkeypatch.setattr(JIT_CACHE, "run_seconds", 100.0)
    before = JIT_CACHE.compile_seconds
    JIT_CACHE.get(lambda value: value + 1, jnp.ones(2))
    taken = JIT_CACHE.compile_seconds - before
    assert 0 < taken < 100
    assert JIT_CACHE.run_seconds == pytest.approx(100 - taken)
    JIT_CACHE.run_seconds = 0.0
    JIT_CACHE.get(lambda value: value + 2, jnp.ones(2))
    assert JIT_CACHE.run_seconds == 0.0


def test_a_length_that_cannot_be_compiled_takes_as_long_as_the_next_larger_step(pair, monkeypatch):
    monkeypatch.setattr(JIT_CACHE, "run_seconds", 0.0)
    monkeypatch.setattr(timed_steps, "calibrate", lambda *_: [1.0, 9.0, 10.0])  # Without drafts is best at first.
    run = GenerateLoop(
        pair, tiny.PROMPTS, bass.SpecConfig(), max_new_tokens=40, policy=policies.auto(lengths=(0, 3, 4))
    )
    executor = run._executor
    num_rows = len(run.state.lengths)
    set_measured(executor._step(4))
    assert executor.steps.find(3, num_rows) is None
    assert executor._timed_steps.times(executor._pair, executor.state).step_seconds[1:].tolist() == [1.0, 1.0]
    JIT_CACHE.run_seconds = 1e9  # Now it can be compiled, so its own time counts, as far as it is known.
    assert executor._timed_steps.times(executor._pair, executor.state).step_seconds[1] != 1.0


def test_the_first_length_is_the_best_power_of_two(pair, monkeypatch):
    """Lengths of 3 and 6 are the best and the second best, by little; of the powers of two 4 is."""
    times = {0: 1.0, 1: 1.0, 2: 1.2, 3: 1.05, 4: 1.25, 6: 1.3, 8: 2.0}
    monkeypatch.setattr(timed_steps, "calibrate", lambda *_: list(times.values()))
    run = GenerateLoop(pair, tiny.PROMPTS, max_new_tokens=40)
    steps = run._executor.steps
    assert [bucket for bucket in steps.buckets if steps.find(bucket, len(run.state.lengths))] == [4]


def test_the_first_length_is_at_most_four(pair, monkeypatch):
    monkeypatch.setattr(timed_steps, "calibrate", lambda *_: [1.0] * 7)  # Eight drafts seem best.
    run = GenerateLoop(pair, tiny.PROMPTS, max_new_tokens=40)
    steps = run._executor.steps
    assert run._executor._wanted[0] == 8
    assert [bucket for bucket in steps.buckets if steps.find(bucket, len(run.state.lengths))] == [4]


def test_no_pass_or_step_is_compiled_before_the_calibration_ends(pair, monkeypatch):
    """A thread that compiles takes one of two processors, and changes the ratios of the times."""
    monkeypatch.setattr(step_clock, "_product_seconds", step_clock._measured_product_seconds)  # not those on disk
    timed, compiled = [], []
    time_call, get = step_clock._call_seconds, JIT_CACHE.get
    monkeypatch.setattr(step_clock, "_call_seconds", lambda *args: timed.append(compiled[:]) or time_call(*args))
    monkeypatch.setattr(
        JIT_CACHE, "get", lambda *args, **options: compiled.append(args[0].__name__) or get(*args, **options)
    )
    GenerateLoop(pair, tiny.PROMPTS, max_new_tokens=40)
    assert timed and "_fill_caches" in compiled
    assert not {"_fill_caches", "speculate_step"} & set(timed[-1])


def test_a_plan_that_is_cut_to_a_compiled_length_counts_as_cut(pair):
    """Drafts that no compiled step could propose are not counted as rejected."""
    run = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(), max_new_tokens=40, policy=policies.auto(lengths=(2, 8)))
    executor = run._executor
    (compiled,) = [bucket for bucket in (2, 8) if executor.steps.find(bucket, len(run.state.lengths))]
    run.state = run.state._replace(draft_lens=jnp.full_like(run.state.draft_lens, 8))
    executor._wanted = np.array([8, 8], np.int32)
    executor._timed_steps._may_compile = False
    next(iter(run))
    assert compiled == 2 and not executor._planner.state.num_reached[2:].any()


@pytest.mark.parametrize("lengths", [(2, 8), (0, 8)])
def test_a_length_above_the_compiled_ones_is_not_planned(pair, monkeypatch, lengths):
    """The longest compiled one would run in its place, and take its own time."""
    monkeypatch.setattr(timed_steps, "calibrate", lambda *_: [1.0, 0.5])  # Eight drafts seem to be faster.
    settings = {"max_new_tokens": 40, "policy": policies.auto(lengths=lengths)}
    executor = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(), **settings)._executor
    assert executor.steps.find(8, len(executor.state.lengths)) is None
    set_measured(executor._step(lengths[0]))
    monkeypatch.setattr(JIT_CACHE, "run_seconds", 0.0)
    executor.replan()
    assert executor._wanted.tolist() == [lengths[0]] * 2
    monkeypatch.setattr(JIT_CACHE, "run_seconds", 1e9)
    executor.replan()
    assert executor._wanted.tolist() == [8, 8]


def test_a_compiled_step_with_fewer_drafts_is_measured_before_others(pair):
    """The regular steps of another run are compiled, so the default measures what it would gain without drafts."""
    bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=40)
    run = GenerateLoop(pair, tiny.PROMPTS, max_new_tokens=40)
    for _ in run:
        pass
    regular = run._executor.steps.find(0, len(run.state.lengths))
    assert regular is not None and np.isfinite(regular.seconds)


def test_a_step_that_is_not_timed_has_a_measured_length(pair):
    """One after a pass over a prompt measures nothing, so a length that may lose does not run there."""
    settings = {"max_new_tokens": 40, "policy": policies.auto(lengths=(0, 2, 8))}
    executor = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(), **settings)._executor
    steps = {bucket: executor._step(bucket) for bucket in (0, 2, 8)}
    for bucket in (0, 2):
        set_measured(steps[bucket])
    for is_timed, longest in ((False, 2), (True, 8)):
        executor._timed_steps._is_timed = is_timed
        found = [executor._timed_steps.bucket(num, len(executor.state.lengths)) for num in (0, 2, 8)]
        assert found == [0, 2, longest]


def test_a_step_after_a_pass_over_a_prompt_is_not_timed(pair, monkeypatch):
    """Its time contains that of the pass."""
    config = bass.EngineConfig(num_slots=4, capacity=64, chunk=16, buckets=(4,))
    engine = bass.Engine(pair, config=config, warm_up=False)
    calls, executor = [], engine.executor
    for owner, name in ((executor, "read"), (executor, "collect"), (StepClock, "record")):
        own = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, own=own, name=name, **options: calls.append(name) or own(*args, **options)
        )
    for prompt in tiny.PROMPTS:
        engine.submit(prompt, max_new_tokens=20)
        for _ in range(4):
            engine.advance()
    assert "record" in calls
    for index, name in enumerate(calls):
        if name == "read":
            following = calls[index + 1 :]
            assert following[following.index("collect") + 1] != "record"


def test_steps_go_on_while_a_thread_compiles_a_further_length(pair, monkeypatch):
    """They are slower then, so they are not measured. The compiled length runs when it is ready."""
    monkeypatch.setattr(timed_steps, "calibrate", lambda *_: [1.0, 9.0])
    settings = {"max_new_tokens": 60, "policy": policies.auto(lengths=(2, 8))}
    executor = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(), **settings)._executor
    short = executor._step(2)
    set_measured(short)

    def num_drafts_of_next_step() -> int:
        executor._wanted = np.array([8, 8], np.int32)
        executor.dispatch()
        return executor.collect().draft_len

    may_end, compile_now = threading.Event(), jit_cache._compile

    def compile_later(*args, **options):
        if threading.current_thread() is not threading.main_thread():
            assert may_end.wait(60)
        return compile_now(*args, **options)

    monkeypatch.setattr(jit_cache, "_compile", compile_later)
    timed = executor._timed_steps
    timed._compiles_beside, timed._is_timed = True, True  # as on a GPU, after other steps
    timed._may_compile, timed._compile_cost = True, 5.0
    monkeypatch.setattr(JIT_CACHE, "run_seconds", 1e9)
    num_calls = short.num_calls
    for _ in range(3):
        assert num_drafts_of_next_step() == 2 and executor.steps.is_compiling() and not timed._may_compile
    assert short.num_calls == num_calls
    assert JIT_CACHE.run_seconds < 1e9 - 4, "the compilation postpones the next one"
    may_end.set()
    while executor.steps.is_compiling():
        time.sleep(0.01)
    assert num_drafts_of_next_step() == 2, "the first step after a compilation in a thread is not timed"
    assert num_drafts_of_next_step() == 8 and executor._step(8).num_calls == 1
    while not executor.state.done.all():
        num_drafts_of_next_step()
    regular = bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=60)
    for row, expected in enumerate(regular.tokens):
        np.testing.assert_array_equal(output_tokens(executor.state, row), expected)


def test_every_compiled_length_is_measured_whatever_the_calibration_says(pair, monkeypatch):
    """Else ``auto`` never drafts if the calibration is wrong, as on an H200, where six drafts were twice as fast."""
    monkeypatch.setattr(timed_steps, "calibrate", lambda *_: [1.0, 50.0, 100.0])
    settings = {"max_new_tokens": 60, "policy": policies.auto(lengths=(0, 2, 4))}
    run = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(), **settings)
    steps = [run._executor._step(bucket) for bucket in (0, 2, 4)]
    assert [step.num_calls for step in steps] == [0, 0, 0]
    for _ in run:
        pass
    assert np.isfinite([step.seconds for step in steps]).all()


def test_a_length_with_drafts_is_compiled_whatever_the_calibration_says(pair, monkeypatch):
    """Without drafts seems best at first, and no other length would be measured."""
    monkeypatch.setattr(timed_steps, "calibrate", lambda *_: [1.0, 50.0, 60.0, 70.0])
    monkeypatch.setattr(JIT_CACHE, "run_seconds", 0.0)
    settings = {"max_new_tokens": 60, "policy": policies.auto(lengths=(0, 1, 2, 4))}
    run = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(), **settings)
    steps, num_rows = run._executor.steps, len(run.state.lengths)
    assert [bucket for bucket in steps.buckets if steps.find(bucket, num_rows)] == [0]
    JIT_CACHE.run_seconds = 1e9
    for _ in run:
        pass
    tried = steps.find(2, num_rows)
    assert tried is not None and np.isfinite(tried.seconds)


def test_compile_time_does_not_enter_an_estimate(pair):
    run = GenerateLoop(pair, tiny.PROMPTS, max_new_tokens=60)
    for _ in run:
        pass
    num_rows = len(run.state.lengths)
    steps = [run._executor.steps.find(bucket, num_rows) for bucket in run._executor.steps.buckets]
    measured = [step for step in steps if step is not None and np.isfinite(step.seconds)]
    assert measured
    assert all(step.seconds < 0.5 * step.compile_seconds for step in measured)


def test_a_run_starts_from_the_acceptance_of_the_last_one(pair):
    def run_with(policy):
        run = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(), max_new_tokens=20, policy=policy)
        assert run._executor._planner is not None
        start = run._executor._planner.state.rates
        for _ in run:
            pass
        return start, run._executor._planner.state.rates

    policy = policies.auto(lengths=(2,))
    first, learned = run_with(policy)
    np.testing.assert_allclose(first, policy.prior)
    assert not np.allclose(learned, first)
    np.testing.assert_array_equal(run_with(policy)[0], learned)
    # A policy that repeats exactly starts from its own prior, as does one with other positions.
    short = dataclasses.replace(policy, prior=jnp.full(3, 0.5))
    for other in (dataclasses.replace(policy, use_clock=False), policies.auto(lengths=(4,)), short):
        np.testing.assert_allclose(run_with(other)[0], other.prior)


def test_short_runs_save_for_a_trial_together(pair, monkeypatch):
    """A trial of two drafts costs what 20 steps save. A run has 17 steps, and plans after the 8th and the 16th."""
    times = StepTimes(np.asarray([1.0, 2.0], np.float32), np.ones(2, bool), np.float32(np.nan))
    monkeypatch.setattr(timed_steps.TimedSteps, "times", lambda *_: times)
    policy = Auto(None, jnp.full((2,), 0.01), trial_share=0.2, lengths=(0, 2))
    runs = [bass.generate(pair, tiny.PROMPTS, policy=policy, max_new_tokens=17) for _ in range(2)]
    drafted = [[int(info.num_drafted.sum()) for info in run.infos] for run in runs]
    assert not any(drafted[0]) and any(drafted[1])


def never_drafts() -> Auto:
    return Auto(None, jnp.full((8,), 0.01), prior_weight=1e9, trial_share=0.0)


def test_while_it_does_not_draft_the_default_does_not_plan_after_every_step(pair, monkeypatch):
    num_steps = []
    plan = Planner.plan

    def counted(self, rows, counts, times):
        num_steps.append(int(times.num_steps))
        return plan(self, rows, counts, times)

    monkeypatch.setattr(Planner, "plan", counted)
    bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(), policy=never_drafts(), max_new_tokens=40)  # compiles
    num_steps.clear()
    infos = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(), policy=never_drafts(), max_new_tokens=40).infos
    assert sum(info.num_drafted.sum() for info in infos) == 0
    # The first plan is made before the first step.
    assert set(num_steps[1:]) == {PLAN_INTERVAL}
    assert len(num_steps) == 1 + len(infos) // PLAN_INTERVAL


def test_a_request_drafts_from_its_first_step_when_no_other_runs(pair, monkeypatch):
    times = StepTimes(np.asarray([1.0, 1.1], np.float32), np.ones(2, bool), np.float32(np.nan))
    monkeypatch.setattr(timed_steps.TimedSteps, "times", lambda *_: times)
    policy = Auto(None, jnp.full((2,), 0.9), prior_weight=1e9, trial_share=0.0, lengths=(0, 2))
    output = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(), policy=policy, max_batch=1, max_new_tokens=20)
    drafted = [int(info.num_drafted.sum()) for info in output.infos]
    ends = [index for index, info in enumerate(output.infos) if info.finish[0] != bass.FinishReason.RUNNING]
    assert len(ends) == len(tiny.PROMPTS) > 1
    for start in [0, *(end + 1 for end in ends[:-1])]:
        assert drafted[start] == drafted[start + 1] == 2


@pytest.mark.slow
def test_with_a_cost_model_in_place_of_the_clock_a_run_repeats_exactly(pair):
    from tests.cost_model.profiles import made_up

    policy = policies.auto(profile=made_up(0.2), lengths=(0, 2, 4), trial_share=0.2, use_clock=False)
    sampling = bass.SamplingParams(temperature=1.0)
    runs = [bass.generate(pair, tiny.PROMPTS, policy=policy, sampling=sampling, max_new_tokens=40) for _ in range(2)]
    for first, second in zip(runs[0].infos, runs[1].infos, strict=True):
        np.testing.assert_array_equal(first.tokens, second.tokens)
        np.testing.assert_array_equal(first.num_drafted, second.num_drafted)
