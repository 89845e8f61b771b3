"""The simulator against the decoder it replays, and against closed forms.

What breaking it means: conclusions about policies that the decoder does not bear out.
"""

import json
import time

import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax import policies
from bass_jax.analysis.replay import Replay, make_replay
from bass_jax.analysis.simulator import compose, regret, simulate
from bass_jax.cost_model import geometric_block_efficiency, step_seconds
from bass_jax.decoding.traces import TraceWriter, read_trace
from bass_jax.drafters import NgramDrafter
from tests import tiny
from tests.cost_model.profiles import made_up
from tests.marks import mostly_slow

PROFILE = made_up(0.12)
POLICIES = {
    "fixed": policies.fixed(4),
    "bass_heuristic": policies.bass_heuristic(start=3, limit=4),
    "goodput": policies.goodput(profile=made_up(0.12, rates=(0.6, 0.5)), lengths=(0, 1, 2, 4), prior_weight=4.0),
    "goodput that probes": policies.goodput(profile=made_up(0.9), lengths=(0, 1, 2, 4), exploration_share=0.3),
    "confidence": policies.confidence(threshold=0.5, max_len=4),
    "template": policies.find_policy("bass_jax.policies.template:OneMore(max_len=4)"),
}
LIMITS = (60, 41, 50)


@pytest.fixture(scope="module")
def pair():
    target = tiny.model(1, num_layers=1)
    return bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.2)))


def record(path, pair, spec, step, **options):
    with TraceWriter(path) as trace:
        bass.generate(pair, tiny.PROMPTS, spec, max_new_tokens=LIMITS, step=step, trace=trace, **options)
    return make_replay(read_trace(path))


@pytest.fixture(scope="module")
def replay(pair, tmp_path_factory):
    """A greedy exhaustive run."""
    return record(tmp_path_factory.mktemp("traces") / "survey.jsonl", pair, bass.SpecConfig(8), "exhaustive")


@pytest.mark.parametrize("name", mostly_slow(POLICIES, lambda name: name == "goodput that probes"))
def test_the_decoders_counts_step_by_step(pair, replay, name):
    """Greedy decoding is deterministic, and so is its simulation: the same passes, drafts and acceptances."""
    policy = POLICIES[name]
    run = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=LIMITS, policy=policy)
    simulated = simulate(replay, policy, PROFILE.table, compose(3, 3))
    summary = run.summary
    assert simulated.num_emitted == summary.num_emitted
    assert simulated.num_steps.tolist() == [summary.num_steps]
    assert simulated.num_row_steps == summary.num_row_steps
    assert simulated.num_drafted == summary.num_drafted
    assert simulated.num_accepted == summary.num_accepted
    assert simulated.block_efficiency == summary.block_efficiency
    # Priced as the same model prices what the decoder did, where nothing had to catch up.
    if name in ("fixed", "template"):
        wanted = [int(info.num_drafted.max()) for info in run.infos]
        widths = [info.tokens.shape[1] - 1 for info in run.infos]
        table = PROFILE.table
        expected = sum(
            float(table.target_seconds(4, width + 1, 100) + table.draft_seconds(4, num, 100, 0))
            for num, width in zip(wanted, widths, strict=True)
        )
        assert float(simulated.seconds.sum()) == pytest.approx(expected, rel=1e-4)


def test_an_ngram_survey_is_exact_too(tmp_path):
    """Its drafts are not what it would draft one position later: the recorded runs count, not the positions."""
    target = tiny.model(1, num_layers=1)
    pair = bass.Pair(target, NgramDrafter())
    replay = record(tmp_path / "trace.jsonl", pair, bass.SpecConfig(4), "exhaustive")
    run = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=LIMITS)
    simulated = simulate(replay, policies.fixed(4), PROFILE.table, compose(3, 3))
    assert simulated.num_steps.tolist() == [run.summary.num_steps]
    assert simulated.num_accepted == run.summary.num_accepted > 0


def test_a_trace_of_a_run_tells_nearly_as_much(pair, replay, tmp_path):
    """Long drafts leave few positions unseen: those of bonus tokens."""
    from_run = record(tmp_path / "trace.jsonl", pair, bass.SpecConfig(8), "speculate")
    assert from_run.share_unknown < 0.05
    np.testing.assert_array_equal(from_run.num_tokens, replay.num_tokens)
    exact, near = (simulate(one, policies.fixed(2), PROFILE.table, compose(3, 3)) for one in (replay, from_run))
    assert near.block_efficiency == pytest.approx(exact.block_efficiency, rel=0.05)


@pytest.mark.slow
def test_a_sampled_trace_is_exact_in_distribution(pair, tmp_path):
    """Tokens per pass of another length than was recorded, against decoding with it: many rows, both sampled."""
    sampling, prompts = bass.SamplingParams(temperature=1.0), [[1 + i % 9, *range(i % 5)] for i in range(64)]
    options = {"sampling": sampling, "max_new_tokens": 48}
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as trace:
        bass.generate(pair, prompts, bass.SpecConfig(6), trace=trace, seeds=range(64), **options)
    run = bass.generate(pair, prompts, bass.SpecConfig(2), seeds=range(100, 164), **options)
    simulated = simulate(make_replay(read_trace(path)), policies.fixed(2), PROFILE.table, compose(64, 64))
    # About 1,800 passes each, of tokens between 1 and 3: standard errors near 0.02.
    assert simulated.block_efficiency == pytest.approx(run.summary.block_efficiency, abs=0.08)


def synthetic_replay(rate: float, num_rows=64, num=4000, seed=0) -> Replay:
    """Coins, and texts without an end in sight."""
    accepts = np.random.default_rng(seed).random((num_rows, num)) < rate
    runs = np.zeros((num_rows, num + 1), np.int32)
    for position in range(num - 1, -1, -1):
        runs[:, position] = np.where(accepts[:, position], runs[:, position + 1] + 1, 0)
    counts = np.full(num_rows, num, np.int32)
    return Replay(runs[:, :num], np.ones((num_rows, num, 1), np.float32), counts, counts, counts * 0 + 9, 0.0)


@pytest.mark.parametrize("rate, draft_len", [(0.5, 1), (0.8, 4), (0.95, 16)])
def test_block_efficiency_is_that_of_the_closed_form(rate, draft_len):
    """Within 1 %: a quarter of a million tokens."""
    found = simulate(synthetic_replay(rate), policies.fixed(draft_len), PROFILE.table, compose(64, 8))
    assert found.block_efficiency == pytest.approx(geometric_block_efficiency(rate, draft_len), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 4])
def test_no_policy_beats_the_oracle(replay, num_rows):
    named = {**POLICIES, **{f"fixed {n}": policies.fixed(n) for n in (0, 1, 2, 8)}}
    found = regret(replay, named, PROFILE.table, compose(3, num_rows), tuple(range(9)))
    assert found["oracle"][1] == 0.0
    assert min(share for name, (_, share) in found.items() if name != "oracle") >= -1e-6
    none = found["fixed 0"][0]
    assert none.block_efficiency == 1.0
    batch = 1 if num_rows == 1 else 4
    assert float(none.seconds.sum()) == pytest.approx(
        none.num_steps.sum() * float(step_seconds(PROFILE.table, batch, 0, 9))
    )


def test_goodput_is_close_to_the_best_length_and_beats_the_heuristic():
    """Where speculation pays and where it does not; Algorithm 1 never turns it off."""
    replay, ratios, batches = synthetic_replay(0.6, num_rows=16, num=400), [], compose(16, 8)
    for slope in (0.005, 0.05, 0.15, 0.6):
        profile = made_up(slope, rates=(0.6,) * 8)

        def seconds(policy, profile=profile):
            return float(simulate(replay, policy, profile.table, batches).seconds.sum())

        fixed = {length: seconds(policies.fixed(length)) for length in (0, 1, 2, 4, 8)}
        found = seconds(policies.goodput(profile=profile, lengths=(0, 1, 2, 4, 8)))
        heuristic = seconds(policies.bass_heuristic(limit=8))
        assert found <= 1.05 * min(fixed.values())
        ratios.append(heuristic / found)
        if slope == 0.6:
            assert min(fixed, key=fixed.__getitem__) == 0
            assert heuristic > 1.3 * fixed[0]
    assert np.mean(ratios) > 1.1


def test_it_is_thousands_of_times_faster_than_a_second_per_batch():
    """The target of the quickstart takes seconds for a batch of this size."""
    replay = synthetic_replay(0.6, num_rows=16, num=128)
    batches = compose(16, 16, num_batches=500)
    simulate(replay, policies.bass_heuristic(), PROFILE.table, batches)
    start = time.perf_counter()
    simulate(replay, policies.bass_heuristic(), PROFILE.table, batches)
    assert (time.perf_counter() - start) / 500 < 1e-3


def test_a_killed_recording_goes_on(tmp_path, pair):
    """What follows the last ended run is cut off, however it was cut, and the next run is appended."""
    path, spec = tmp_path / "trace.jsonl", bass.SpecConfig(2)
    for expected in range(2):
        with TraceWriter(path) as trace:
            assert trace.num_complete == expected
            bass.generate(pair, tiny.PROMPTS, spec, max_new_tokens=6, trace=trace)
    whole = path.read_text()
    first_end = whole.index('{"kind":"end"}') + len('{"kind":"end"}\n')
    for cut in (first_end + 40, whole.index("\n", first_end) + 1, len(whole) - 5, first_end - 5, 30):
        path.write_text(whole[:cut])
        with TraceWriter(path) as trace:
            assert trace.num_complete == (1 if cut >= first_end else 0)
            bass.generate(pair, tiny.PROMPTS, spec, max_new_tokens=6, trace=trace)
        assert len(read_trace(path)) == (2 if cut >= first_end else 1)
    runs = read_trace(path)
    assert [len(run.steps) for run in runs] == [len(runs[0].steps)] * len(runs)
    assert runs[0].seconds > 0


def test_what_is_recorded(tmp_path, pair):
    """Ratios of the recorded distributions against the draws decide what was recorded as accepted."""
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as trace:
        bass.generate(
            pair,
            tiny.PROMPTS,
            bass.SpecConfig(3),
            sampling=bass.SamplingParams(temperature=1.0),
            max_new_tokens=30,
            trace=trace,
        )
    (run,) = read_trace(path)
    assert run.about["prompt_lengths"] == [1, 9, 8]
    assert run.about["limits"] == [30, 30, 30]
    num_checked = 0
    for step in run.steps:
        for slot, (drafted, accepted) in enumerate(zip(step["num_drafted"], step["num_accepted"], strict=True)):
            target, draft, draws = (step[name][slot] for name in ("target_logprobs", "draft_logprobs", "accept_draws"))
            assert len(target) == len(draft) == len(draws) == drafted
            ratios = [0.0 if t is None else np.exp(t - d) for t, d in zip(target, draft, strict=True)]
            if any(abs(ratio - draw) < 0.01 for ratio, draw in zip(ratios, draws, strict=True)):
                continue  # rounded to four digits
            is_accepted = [draw <= ratio for ratio, draw in zip(ratios, draws, strict=True)]
            assert accepted == (is_accepted.index(False) if False in is_accepted else drafted)
            num_checked += drafted
    assert num_checked > 30
    assert sum(map(sum, (step["num_emitted"] for step in run.steps))) == 90


@pytest.mark.parametrize("text", ["", "hello\n", '{"a": 1}\n', "[]\n"])
def test_what_is_no_trace_is_refused(tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="trace"):
        read_trace(path)
    if text:
        with pytest.raises(ValueError, match="trace"):
            TraceWriter(path)
        assert path.read_text() == text
    with pytest.raises(ValueError, match="cannot be read"):
        read_trace(tmp_path / "nowhere")


def test_without_drafts_there_is_nothing_to_replay(tmp_path, pair):
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as trace:
        bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(0), max_new_tokens=4, trace=trace)
    json.loads(path.read_text().splitlines()[0])
    with pytest.raises(ValueError, match="no drafts"):
        make_replay(read_trace(path))


def test_batches_are_composed():
    np.testing.assert_array_equal(compose(5, 2), [[0, 1], [2, 3], [4, -1]])
    drawn = compose(5, 3, num_batches=100)
    assert drawn.shape == (100, 3)
    assert set(np.unique(drawn)) == set(range(5))
    with pytest.raises(ValueError, match="batch=0"):
        compose(5, 0)
    assert jnp.asarray(drawn).dtype == jnp.int32
