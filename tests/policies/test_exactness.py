"""No policy changes what is decoded, and none compiles in the middle of it.

What breaking it means: the text, or its distribution, depends on how the batch was sped up; or minutes of compilation
fall into a stream of tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax import policies
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
    "goodput": policies.goodput(profile=made_up(0.12, rates=(0.6, 0.5)), lengths=LENGTHS, prior_weight=4.0),
    "goodput that probes": policies.goodput(profile=made_up(0.9), lengths=LENGTHS, exploration_share=0.3),
    "confidence": policies.confidence(threshold=0.5, max_len=4),
    "bandit": policies.bandit(lengths=LENGTHS),
    "template": policies.find_policy("bass_jax.policies.template:OneMore(max_len=4)"),
}
LIMITS = (40, 25, 33)


@pytest.fixture(scope="module")
def pair():
    target = tiny.model(1, num_layers=1)
    return bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.2)))


def decode(pair, sampling, **options):
    return bass.generate(
        pair, tiny.PROMPTS, bass.SpecConfig(4, "shared_noise" if sampling else "token"), sampling=sampling,
        max_new_tokens=LIMITS, **options,
    )  # fmt: skip


QUICK = {("fixed", 0.0), ("goodput that probes", 0.0), ("confidence", 1.0), ("bandit", 1.0)}
CASES = [(name, temperature) for name in POLICIES for temperature in (0.0, 1.0)]


@pytest.mark.parametrize("name, temperature", mostly_slow(CASES, lambda case: case in QUICK))
def test_the_tokens_are_those_of_regular_decoding(pair, name, temperature):
    """Greedy, and by the shared-noise rule sampled: the very tokens."""
    sampling = bass.SamplingParams(temperature=temperature) if temperature else None
    regular = decode(pair, sampling, step="decode")
    run = decode(pair, sampling, policy=POLICIES[name])
    for found, expected in zip(run.tokens, regular.tokens, strict=True):
        np.testing.assert_array_equal(found, expected)
    lengths = {int(info.num_drafted.max()) for info in run.infos[:-8]}
    if name in ("bass_heuristic", "goodput that probes", "bandit", "template", "confidence"):
        assert len(lengths) > 1  # it did change them
    if name == "goodput that probes":
        assert 0 in lengths


@pytest.mark.parametrize(
    "name",
    mostly_slow(["goodput that probes", "bass_heuristic", "confidence"], lambda name: name == "goodput that probes"),
)
def test_the_device_loop_plans_what_the_host_plans(pair, name):
    """One code: step by step the same lengths and tokens."""
    sampling = bass.SamplingParams(temperature=1.0)
    host = decode(pair, sampling, policy=POLICIES[name])
    spec = bass.SpecConfig(4, "shared_noise")
    state = bass.prefill(pair, tiny.PROMPTS, spec, sampling=sampling, max_new_tokens=LIMITS)
    state, infos = bass.generate_on_device(pair, state, spec, max_steps=41, policy=POLICIES[name])
    for row in range(3):
        np.testing.assert_array_equal(bass.output_tokens(state, row), host.tokens[row])
    drafted = np.stack([info.num_drafted for info in host.infos])
    np.testing.assert_array_equal(infos.num_drafted[: len(drafted)], drafted)
    assert not infos.is_active[len(drafted) :].any()
    assert repr(bass.summarize(infos)) == repr(host.summary)  # repr: NaN equals itself


@pytest.mark.parametrize(
    "name", mostly_slow(["goodput", "confidence", "bass_heuristic", "template"], lambda name: name == "goodput")
)
def test_the_law_is_the_targets_whatever_the_policy(name):
    """Lengths that follow from what was committed, accepted and believed, up to 4."""
    drafter = tiny.model_drafter(tiny.perturbed(tiny_target(), 0.15), 5)
    policy = POLICIES[name]
    if name == "goodput":  # where drafting pays in a batch of thousands too
        policy = policies.goodput(profile=made_up(0.0, rates=(0.6, 0.5)), lengths=LENGTHS, objective="rate")
    report = verify_lossless(drafter, draft_len=4, num_samples=60_000, policy=policy)
    assert report.p_value > 1e-3 / 64
    assert report.tokens_per_step > 1.01


def test_a_policy_that_drops_drafts_for_what_they_are_is_caught(monkeypatch):
    """The control of the test above: stopping at an unlikely draft, rather than at a flat distribution, is not
    lossless.
    """
    drafter = tiny.model_drafter(tiny.perturbed(tiny_target(), 0.15), 5)
    model_choose = type(drafter)._choose

    def by_the_draft(*arguments):
        token, probs, _ = model_choose(*arguments)
        return token, probs, jnp.take_along_axis(probs, token[:, None], axis=1)[:, 0]

    monkeypatch.setattr(type(drafter), "_choose", by_the_draft)

    def fresh_step(*arguments):  # another function: the executable of the sound one is not met
        return bass.speculate_step(*arguments)

    report = verify_lossless(drafter, draft_len=4, num_samples=60_000, policy=POLICIES["confidence"], step=fresh_step)
    assert report.p_value < 1e-9


def test_rows_may_want_different_lengths(pair):
    """Three rows, three lengths, one bucket."""
    run = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=30)
    wanted = [0, 2, 4, 0]
    run.state = run.state._replace(draft_lens=jnp.asarray(wanted, jnp.int32))
    info = next(iter(run))
    np.testing.assert_array_equal(info.num_drafted, wanted)


def test_every_bucket_is_compiled_before_the_first_step(pair):
    """And the run says how many: one per bucket and one for the update; the same batch again compiles nothing."""
    target = tiny.model(3, num_layers=1, mlp_width=20)  # a shape of its own: nothing is compiled yet
    pair = bass.Pair(target, pair.drafter)
    policy = policies.bandit(lengths=(0, 1, 2))
    before = JIT_CACHE.num_compiled
    bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=1, step="decode")
    prefill_and_decode = JIT_CACHE.num_compiled - before
    run = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=50, policy=policy)
    assert set(run.warm_up_seconds) == {0, 1, 2}
    assert run.warm_up_seconds[0] == 0.0 < run.warm_up_seconds[1]  # decode_step's own executable serves 0
    warm = JIT_CACHE.num_compiled
    for _ in run:
        pass
    assert JIT_CACHE.num_compiled == warm
    timings = run.result().timings
    assert timings.num_compiled == warm - before - prefill_and_decode == 3  # buckets 1 and 2, and the update
    assert timings.compile >= sum(timings.warm_up.values()) > 0
    again = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=50, policy=policy).timings
    assert (again.num_compiled, again.compile) == (0, 0.0)
    # Another constant of a policy that traces it compiles nothing either.
    other = policies.bandit(lengths=(0, 1, 2), exploration=0.9)
    assert (
        bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=9, policy=other).timings.num_compiled == 0
    )
    # Without warm-up a bucket is made when it is wanted, and not in the time of a step.
    fresh = policies.fixed(3)
    late = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=5, policy=fresh, warm_up=False)
    assert late.warm_up_seconds == {}
    next(iter(late))
    assert late.warm_up_seconds[3] > 0
    assert late.step_seconds[0] < late.warm_up_seconds[3]


def test_a_step_reads_the_device_once(pair, monkeypatch):
    """Counts and the next bucket come together; nothing else waits for the device."""
    run = GenerateLoop(pair, tiny.PROMPTS, bass.SpecConfig(4), max_new_tokens=30, policy=POLICIES["bass_heuristic"])
    reads = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: reads.append(1) or device_get(tree))
    num_steps = sum(1 for _ in run)
    assert len(reads) == num_steps > 5


def test_a_policy_beside_regular_decoding_is_refused(pair):
    with pytest.raises(ValueError, match="a policy chooses draft lengths of 'speculate' alone"):
        bass.generate(pair, tiny.PROMPTS, step="decode", policy="fixed")
    with pytest.raises(ValueError, match="policy='adaptive'"):
        bass.generate(pair, tiny.PROMPTS, policy="adaptive")
