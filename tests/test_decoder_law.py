"""The whole sampled decoder follows the target's law.

The joint law of the first four tokens over a vocabulary of five is enumerated from the target and compared with
200,000 continuations of the compiled loop, over ragged prompts and four sampling settings in one batch. What
breaking any of this means: users who turn speculation on get text from another distribution, and no accuracy test
of theirs tells them.
"""

import jax
import pytest

import bass_jax as bass
from bass_jax.drafters import NgramDrafter
from bass_jax.sampling import registered_rules
from bass_jax.sampling.keys import Role
from tests import faults, tiny
from tests.decoder_law import VOCAB, Groups, draw_counts, p_value

BUCKETS = (0, 1, 3, 5)
NUM_CASES = 64
THRESHOLD = 1e-3 / NUM_CASES
"""p-values are uniform where the decoder is exact; Bonferroni over the cases of this file and a few to come."""

CAUGHT = 1e-9
"""Where a fault is planted the p-value is not small by accident."""

RULES = sorted(name for name, rule in registered_rules().items() if rule.lossless and rule.noise != "none")


@pytest.fixture(scope="module")
def target():
    return tiny.model(1, 5.0, VOCAB, num_layers=1, width=8, num_heads=1, mlp_width=16)


@pytest.fixture(scope="module")
def groups(target):
    return Groups(target)


@pytest.fixture(scope="module")
def drafters(target):
    return {
        "model": tiny.model_drafter(tiny.perturbed(target, 0.15), VOCAB),
        "ngram": NgramDrafter(),
        "table": tiny.table_drafter(VOCAB),
    }


@pytest.mark.parametrize("draft_len", BUCKETS)
@pytest.mark.parametrize("drafter", ["model", "ngram", "table"])
@pytest.mark.parametrize("rule", RULES)
def test_sampled_speculation_has_the_targets_law(target, groups, drafters, drafter, rule, draft_len):
    pair = bass.Pair(target, drafters[drafter])
    counts = draw_counts(pair, bass.SpecConfig(draft_len, rule), groups)
    assert p_value(counts, groups.laws) > THRESHOLD


def test_a_users_rule_has_the_targets_law(target, groups, drafters):
    spec = bass.SpecConfig(3, "bass_jax.sampling.template:REJECT_ALL")
    counts = draw_counts(bass.Pair(target, drafters["model"]), spec, groups)
    assert p_value(counts, groups.laws) > THRESHOLD


def test_regular_decoding_has_the_targets_law(target, groups, drafters):
    counts = draw_counts(bass.Pair(target, drafters["ngram"]), bass.SpecConfig(0), groups, step=bass.decode_step)
    assert p_value(counts, groups.laws) > THRESHOLD


def test_a_step_of_each_kind_in_turn_has_the_targets_law(target, groups, drafters):
    """Regular and speculative steps mixed: their noise and their caches must not get into each other's way."""
    counts = draw_counts(bass.Pair(target, drafters["model"]), bass.SpecConfig(3), groups, step=_either_step)
    assert p_value(counts, groups.laws) > THRESHOLD


def _either_step(pair, state, spec):
    is_odd = state.num_steps[0] % 2 == 1
    return jax.lax.cond(
        is_odd, lambda: bass.decode_step(pair, state, spec)[0], lambda: bass.speculate_step(pair, state, spec)[0]
    ), None


# Negative controls: the same statistic finds every fault that is planted.


@pytest.mark.parametrize("fault", ["RESIDUAL_FROM_UNIFORM", "FIRST_TOKEN_UNCHECKED", "OFF_BY_ONE"])
def test_a_faulty_rule_is_caught(target, groups, drafters, fault):
    spec = bass.SpecConfig(3, f"tests.faults:{fault}")
    counts = draw_counts(bass.Pair(target, drafters["table"]), spec, groups)
    assert p_value(counts, groups.laws) < CAUGHT


def test_a_drafter_that_returns_another_law_is_caught(target, groups, drafters):
    pair = bass.Pair(target, faults.WrongLawDrafter(drafters["table"].table))
    assert p_value(draw_counts(pair, bass.SpecConfig(3), groups), groups.laws) < CAUGHT


@pytest.mark.parametrize("role", [Role.ACCEPT, Role.RESIDUAL])
def test_a_stream_shared_with_the_draft_is_caught(target, groups, drafters, monkeypatch, role):
    """The drafter is handed the keys of another role, as when a role is forgotten."""
    monkeypatch.setattr("bass_jax.step._step_keys", faults.shared_stream(role))
    pair = bass.Pair(target, faults.FirstKeyDrafter(drafters["table"].table))
    counts = draw_counts(pair, bass.SpecConfig(1), groups, step=lambda *args: bass.speculate_step(*args))
    assert p_value(counts, groups.laws) < CAUGHT
