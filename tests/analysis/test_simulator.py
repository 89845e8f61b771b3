"""The simulator, compared with the decoder and with closed forms.

If it is wrong, conclusions about policies do not hold for the decoder.
"""

import time

import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax import policies
from bass_jax.analysis.replay import Replay, make_replay, replay_acceptance
from bass_jax.analysis.simulator import compose, regret, simulate
from bass_jax.cost_model import geometric_tokens_per_pass, step_seconds
from bass_jax.decoding.traces import TraceWriter, read_trace
from bass_jax.drafters import NgramDrafter
from tests import tiny
from tests.cost_model.profiles import made_up
from tests.marks import mostly_slow

PROFILE = made_up(0.12)
POLICIES = {
    "fixed": policies.fixed(4),
    "bass_heuristic": policies.bass_heuristic(start=3, limit=4),
    "auto": policies.auto(profile=PROFILE, lengths=(0, 1, 2, 4), use_clock=False),
    "auto with trials": policies.auto(profile=PROFILE, lengths=(0, 1, 2, 4), trial_share=0.3, use_clock=False),
    "confidence": policies.confidence(threshold=0.5, max_len=4),
    "template": policies.find_policy("bass_jax.policies.template:OneMore(max_len=4)"),
}
LIMITS = (60, 41, 50)


@pytest.fixture(scope="module")
def pair():
    target = tiny.model(1, num_layers=1)
    return bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.2)))


def record(path, pair, spec, step):
    with TraceWriter(path) as trace:
        bass.generate(pair, tiny.PROMPTS, spec, max_new_tokens=LIMITS, step=step, trace=trace)
    return make_replay(read_trace(path))


@pytest.fixture(scope="module")
def replay(pair, tmp_path_factory):
    """The replay of a greedy exhaustive run."""
    return record(tmp_path_factory.mktemp("traces") / "exhaustive.jsonl", pair, bass.SpecConfig(8), "exhaustive")


@pytest.mark.parametrize("name", mostly_slow(POLICIES, lambda name: name == "bass_heuristic"))
def test_counts_equal_those_of_the_decoder(pair, replay, name):
    """Greedy decoding and its simulation are deterministic: the same passes, drafts and accepted drafts."""
    policy = POLICIES[name]
    run = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=LIMITS, policy=policy)
    simulated = simulate(replay, policy, PROFILE.table, compose(3, 3))
    summary = run.metrics
    assert simulated.num_emitted == summary.num_emitted
    assert simulated.num_steps.tolist() == [summary.num_steps]
    assert simulated.num_row_steps == summary.num_row_steps
    assert simulated.num_drafted == summary.num_drafted
    assert simulated.num_accepted == summary.num_accepted
    assert simulated.tokens_per_pass == summary.tokens_per_pass
    # With these policies the drafter never has to catch up, so the time follows from the decoder's steps.
    if name in ("fixed", "template"):
        table = PROFILE.table
        expected = 0.0
        for info in run.infos:
            num_drafts, width = int(info.num_drafted.max()), info.tokens.shape[1]
            expected += float(table.target_seconds(4, width, 100) + table.draft_seconds(4, num_drafts, 100, 0))
        assert float(simulated.seconds.sum()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_an_exhaustive_run_with_ngrams_is_exact(tmp_path):
    """The drafts depend on the position at which drafting starts, so the recorded counts are used."""
    target = tiny.model(1, num_layers=1)
    pair = bass.Pair(target, NgramDrafter())
    replay = record(tmp_path / "trace.jsonl", pair, bass.SpecConfig(4), "exhaustive")
    run = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=LIMITS)
    simulated = simulate(replay, policies.fixed(4), PROFILE.table, compose(3, 3))
    assert simulated.num_steps.tolist() == [run.metrics.num_steps]
    assert simulated.num_accepted == run.metrics.num_accepted > 0


@pytest.mark.slow
def test_a_speculative_run_is_close_to_an_exhaustive_one(pair, replay, tmp_path):
    """With long drafts few positions are not observed: those of bonus tokens."""
    from_run = record(tmp_path / "trace.jsonl", pair, bass.SpecConfig(8), "speculate")
    assert from_run.share_unknown < 0.05
    np.testing.assert_array_equal(from_run.num_tokens, replay.num_tokens)
    exact, near = (simulate(one, policies.fixed(2), PROFILE.table, compose(3, 3)) for one in (replay, from_run))
    assert near.tokens_per_pass == pytest.approx(exact.tokens_per_pass, rel=0.05)


@pytest.mark.slow
def test_a_sampled_trace_is_exact_in_distribution(pair, tmp_path):
    """Tokens per pass with another draft length than the recorded one, compared with decoding."""
    sampling, prompts = bass.SamplingParams(temperature=1.0), [[1 + i % 9, *range(i % 5)] for i in range(64)]
    options = bass.DecodeOptions(sampling=sampling, max_new_tokens=48)
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as trace:
        bass.generate(pair, prompts, bass.SpecConfig(6), options, trace=trace, seeds=range(64))
    run = bass.generate(pair, prompts, bass.SpecConfig(2), options, seeds=range(100, 164))
    simulated = simulate(make_replay(read_trace(path)), policies.fixed(2), PROFILE.table, compose(64, 64))
    # Each has about 1,800 passes with 1 to 3 tokens: the standard errors are near 0.02.
    assert simulated.tokens_per_pass == pytest.approx(run.metrics.tokens_per_pass, abs=0.08)


def synthetic_replay(rate: float, num_rows=64, num=4000, seed=0) -> Replay:
    """Returns rows without a limit whose drafts are accepted independently with probability `rate`."""
    accepts = np.random.default_rng(seed).random((num_rows, num)) < rate
    runs = np.zeros((num_rows, num + 1), np.int32)
    for position in range(num - 1, -1, -1):
        runs[:, position] = np.where(accepts[:, position], runs[:, position + 1] + 1, 0)
    counts = np.full(num_rows, num, np.int32)
    return Replay(runs[:, :num], np.ones((num_rows, num, 1), np.float32), counts, counts, counts * 0 + 9, 0.0)


@pytest.mark.parametrize("rate, draft_len", [(0.5, 1), (0.8, 4), (0.95, 16)])
def test_tokens_per_pass_equals_the_closed_form(rate, draft_len):
    """The tolerance is 1 % for a quarter of a million tokens."""
    replay = synthetic_replay(rate)
    found = simulate(replay, policies.fixed(draft_len), PROFILE.table, compose(64, 8))
    assert found.tokens_per_pass == pytest.approx(geometric_tokens_per_pass(rate, draft_len), rel=0.01)
    assert replay_acceptance(replay) == pytest.approx([rate] * 8, abs=0.05)


@pytest.mark.slow
def test_the_oracle_is_the_fastest_for_each_batch_in_hindsight():
    """Here the policy that plans each step may not draft, so fixed lengths are faster than it."""
    replay, named = synthetic_replay(0.7, num_rows=8, num=40), {f"fixed {n}": policies.fixed(n) for n in (1, 2)}
    found = regret(replay, named, PROFILE.table, compose(8, 4), (0,))
    seconds = np.stack([found[name][0].seconds for name in named])
    stepwise = simulate(replay, policies.oracle(PROFILE.table, (0,)), PROFILE.table, compose(8, 4))
    assert (seconds.min(axis=0) < stepwise.seconds).all()
    np.testing.assert_array_equal(found["oracle"][0].seconds, seconds.min(axis=0))
    assert found["oracle"][0].num_emitted == stepwise.num_emitted == 8 * 40
    assert min(share for _, share in found.values()) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 4])
def test_no_policy_is_faster_than_the_oracle(replay, num_rows):
    named = {**POLICIES, **{f"fixed {n}": policies.fixed(n) for n in (0, 1, 2, 8)}}
    found = regret(replay, named, PROFILE.table, compose(3, num_rows), tuple(range(9)))
    assert found["oracle"][1] == 0.0
    assert min(share for name, (_, share) in found.items() if name != "oracle") >= -1e-6
    regular = found["fixed 0"][0]
    assert regular.tokens_per_pass == 1.0
    seconds = regular.num_steps.sum() * float(step_seconds(PROFILE.table, num_rows, 0, 9))
    assert float(regular.seconds.sum()) == pytest.approx(seconds)


@pytest.mark.slow
def test_auto_is_close_to_the_best_length_and_faster_than_the_heuristic():
    """From cheap to expensive drafts. The heuristic (algorithm 1 of BASS) never stops drafting."""
    replay, ratios, batches = synthetic_replay(0.6, num_rows=16, num=400), [], compose(16, 8)
    for slope in (0.005, 0.05, 0.15, 0.6):
        profile = made_up(slope, rates=(0.6,) * 8)

        def seconds(policy, profile=profile):
            return float(simulate(replay, policy, profile.table, batches).seconds.sum())

        fixed = {length: seconds(policies.fixed(length)) for length in (0, 1, 2, 4, 8)}
        found = seconds(policies.auto(lengths=(0, 1, 2, 4, 8)))
        heuristic = seconds(policies.bass_heuristic(limit=8))
        assert found <= 1.05 * min(fixed.values())
        ratios.append(heuristic / found)
        if slope == 0.6:
            assert min(fixed, key=fixed.__getitem__) == 0
            assert heuristic > 1.3 * fixed[0]
    assert np.mean(ratios) > 1.1


def test_a_simulated_batch_takes_less_than_a_millisecond():
    """The quickstart pair takes seconds for a batch of this size."""
    replay = synthetic_replay(0.6, num_rows=16, num=128)
    batches = compose(16, 16, num_batches=500)
    simulate(replay, policies.bass_heuristic(), PROFILE.table, batches)
    start = time.perf_counter()
    simulate(replay, policies.bass_heuristic(), PROFILE.table, batches)
    assert (time.perf_counter() - start) / 500 < 1e-3


def test_a_trace_without_drafts_is_refused(tmp_path, pair):
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as trace:
        bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(0), max_new_tokens=4, trace=trace)
    with pytest.raises(ValueError, match="no drafts"):
        make_replay(read_trace(path))


def test_batches_are_composed():
    np.testing.assert_array_equal(compose(5, 2), [[0, 1], [2, 3], [4, -1]])
    random = compose(5, 3, num_batches=100)
    assert random.shape == (100, 3)
    assert set(np.unique(random)) == set(range(5))
    with pytest.raises(ValueError, match="batch=0"):
        compose(5, 0)
    assert jnp.asarray(random).dtype == jnp.int32
