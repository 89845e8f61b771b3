"""Policies do not change the decoded tokens or their distribution, and nothing compiles after the first step.

A failure means that the text depends on the policy, or that compilation interrupts a stream of tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax import policies
from bass_jax.drafters import NgramDrafter, autoregressive, draft_model
from bass_jax.drafters.autoregressive import choose_draft
from bass_jax.engine.generate import GenerateLoop
from bass_jax.runtime.jit_cache import JIT_CACHE
from bass_jax.testing.lossless import tiny_target, verify_lossless
from tests import tiny
from tests.cost_model.profiles import made_up
from tests.marks import mostly_slow

LENGTHS = (0, 1, 2, 4)
POLICIES = {
    "fixed": policies.fixed(4),
    "none": policies.fixed(0),
    "bass_heuristic": policies.bass_heuristic(start=3, limit=4),
    "batch_table": policies.batch_table({1: 4, 4: 2}),
    "auto": policies.auto(lengths=LENGTHS),
    "auto with trials": policies.auto(profile=made_up(0.9), lengths=LENGTHS, trial_share=1.0, use_clock=False),
    "auto with two lengths": policies.auto(profile=made_up(0.2), lengths=(0, 4), trial_share=0.3, use_clock=False),
    "confidence": policies.confidence(threshold=0.5, max_len=4),
    "bandit": policies.bandit(lengths=LENGTHS, use_clock=False),
    "template": policies.find_policy("bass_jax.policies.template:OneMore(max_len=4)"),
}
LIMITS = (40, 25, 33)


@pytest.fixture(scope="module")
def pair():
    target = tiny.model(1)
    return bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.2)))


def decode(pair, sampling, **options):
    spec = bass.SpecConfig(4, "shared_noise" if sampling else "token")
    return bass.generate(pair, tiny.PROMPTS, spec, sampling=sampling, max_new_tokens=LIMITS, **options)


CASES = [(name, temperature) for name in POLICIES for temperature in (0.0, 1.0)]
QUICK = {(name, 0.0) for name in POLICIES} - {("auto with trials", 0.0), ("auto with two lengths", 0.0)}
"""Every policy but the variants. Their steps with temperature 1 take longer to compile."""


@pytest.mark.parametrize("name, temperature", mostly_slow(CASES, lambda case: case in QUICK))
def test_tokens_equal_those_of_regular_decoding(pair, name, temperature):
    """With greedy decoding, and with sampling by the shared-noise rule."""
    sampling = bass.SamplingParams(temperature=temperature) if temperature else None
    regular = decode(pair, sampling, step="decode")
    run = decode(pair, sampling, policy=POLICIES[name])
    for found, expected in zip(run.tokens, regular.tokens, strict=True):
        np.testing.assert_array_equal(found, expected)
    lengths = {int(info.num_drafted.max()) for info in run.infos[:-8]}
    if name in (
        "bass_heuristic",
        "auto with trials",
        "auto with two lengths",
        "bandit",
        "template",
        "confidence",
    ):
        assert len(lengths) > 1  # The policy changes the length.
    if name in ("auto with trials", "auto with two lengths"):
        assert 0 in lengths


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter, name",
    [
        ("ngram", "auto with two lengths"),
        ("model", "auto with trials"),
        ("model", "bass_heuristic"),
        ("model", "confidence"),
    ],
)
def test_the_device_loop_equals_the_host_loop(pair, drafter, name):
    """Both use the same lengths and emit the same tokens in every step."""
    pair = pair if drafter == "model" else pair.with_drafter(NgramDrafter())
    sampling = bass.SamplingParams(temperature=1.0)
    host = decode(pair, sampling, policy=POLICIES[name])
    spec = bass.SpecConfig(4, "shared_noise")
    state = bass.prefill(pair, tiny.PROMPTS, spec, sampling=sampling, max_new_tokens=LIMITS)
    state, infos = bass.decoding.generate_on_device(pair, state, spec, max_steps=41, policy=POLICIES[name])
    for row in range(3):
        np.testing.assert_array_equal(bass.output_tokens(state, row), host.tokens[row])
    drafted = np.stack([info.num_drafted for info in host.infos])
    np.testing.assert_array_equal(infos.num_drafted[: len(drafted)], drafted)
    assert not infos.is_active[len(drafted) :].any()
    assert repr(bass.summarize(infos)) == repr(host.metrics)  # By repr, because NaN is not equal to itself.


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", ["auto", "confidence", "bass_heuristic", "template"])
def test_samples_follow_the_targets_distribution_with_every_policy(name):
    """Draft lengths up to 4 depend on committed tokens, acceptance and confidence."""
    drafter, policy = tiny.model_drafter(tiny.perturbed(tiny_target(), 0.15), 5), POLICIES[name]
    num_samples = 60_000
    if name == "auto":  # With costs at which drafting is worth it in a batch of thousands.
        drafter, num_samples = tiny.table_drafter(5), 40_000
        policy = policies.auto(profile=made_up(0.0, rates=(0.6, 0.5)), lengths=LENGTHS, use_clock=False)
    report = verify_lossless(drafter, draft_len=4, num_samples=num_samples, policy=policy)
    assert report.p_value > 1e-3 / 64
    assert report.tokens_per_step > 1.01


@pytest.mark.slow
def test_dropping_drafts_by_their_token_is_detected(monkeypatch):
    """The negative control of the test above: stopping at an improbable draft instead of a flat distribution."""
    drafter = tiny.model_drafter(tiny.perturbed(tiny_target(), 0.15), 5)

    def choose_by_token(*arguments):
        token, probs, _ = choose_draft(*arguments)
        return token, probs, jnp.take_along_axis(probs, token[:, None], axis=1)[:, 0]

    monkeypatch.setattr(autoregressive, "choose_draft", choose_by_token)
    monkeypatch.setattr(draft_model, "choose_draft", choose_by_token)

    def fresh_step(*arguments):  # Another function object, so that the cached compiled step is not used.
        return bass.speculate_step(*arguments)

    report = verify_lossless(drafter, draft_len=4, num_samples=60_000, policy=POLICIES["confidence"], step=fresh_step)
    assert report.p_value < 1e-9


def test_rows_of_a_batch_can_have_different_lengths(pair):
    """Three rows with three lengths run in one bucket."""
    run = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=30)
    wanted = [0, 2, 4, 0]
    run.state = run.state._replace(draft_lens=jnp.asarray(wanted, jnp.int32))
    info = next(iter(run))
    np.testing.assert_array_equal(info.num_drafted, wanted)


@pytest.mark.slow
def test_every_bucket_is_compiled_before_the_first_step(pair):
    """Functions compiled are one per bucket and two for the plan. The same batch compiles nothing again."""
    JIT_CACHE.clear()  # Other tests have compiled the function that reads the rows.
    target = tiny.model(3, mlp_width=28)
    pair = bass.Pair(target, NgramDrafter())
    policy = policies.bandit(lengths=(0, 1, 2), use_clock=False)
    before = JIT_CACHE.num_compiled
    bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=1, step="decode")
    prefill_and_decode = JIT_CACHE.num_compiled - before
    run = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=50, policy=policy)
    assert set(run.warm_up_seconds) == {0, 1, 2}
    assert run.warm_up_seconds[0] == 0.0 < run.warm_up_seconds[1]  # Length 0 runs the compiled decode_step.
    warm = JIT_CACHE.num_compiled
    for _ in run:
        pass
    assert JIT_CACHE.num_compiled == warm
    timings = run.result().timings
    assert timings.num_compiled == warm - before - prefill_and_decode == 4  # Buckets 1 and 2, the rows and the update.
    assert timings.compile >= sum(timings.warm_up.values()) > 0
    again = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=50, policy=policy).timings
    assert (again.num_compiled, again.compile) == (0, 0.0)
    # Changing a traced constant of the policy compiles nothing.
    other = policies.bandit(lengths=(0, 1, 2), exploration=0.9, use_clock=False)
    changed = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=9, policy=other)
    assert changed.timings.num_compiled == 0
    # Without warm-up a bucket is compiled when it is first needed. This time does not count as the step's.
    fresh = policies.fixed(3)
    late = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=5, policy=fresh, warm_up=False)
    assert late.warm_up_seconds == {}
    next(iter(late))
    assert late.warm_up_seconds[3] > 0
    assert late.step_seconds[0] < late.warm_up_seconds[3]


def test_the_host_reads_the_device_once_per_step(pair, monkeypatch):
    """The step's counts and the next bucket are read together."""
    run = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=30, policy=POLICIES["bass_heuristic"])
    reads = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(1) or device_get(tree))
    num_steps = sum(1 for _ in run)
    assert len(reads) == num_steps > 5


def test_a_policy_for_regular_decoding_is_refused(pair):
    with pytest.raises(ValueError, match="step='decode': expected 'speculate' with a policy"):
        bass.generate(pair, tiny.PROMPTS, step="decode", policy="fixed")
    with pytest.raises(ValueError, match="policy='adaptive'"):
        bass.generate(pair, tiny.PROMPTS, policy="adaptive")
