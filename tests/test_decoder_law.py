"""The whole sampled decoder follows the target's law.

`verify_lossless` enumerates the joint law of the first four tokens over a vocabulary of five and compares it with
200,000 continuations of the compiled step, over ragged prompts, four sampling settings and draft lengths that change
between steps and rows, in one batch. What breaking any of this means: users who turn speculation on get text from
another distribution, and no accuracy test of theirs tells them.
"""

import jax
import pytest

import bass_jax as bass
from bass_jax.drafters import NgramDrafter
from bass_jax.sampling import registered_rules
from bass_jax.sampling.keys import Role
from bass_jax.verify import tiny_target, verify_lossless
from tests import faults, tiny

VOCAB = 5
THRESHOLD = 1e-3 / 64
"""p-values are uniform where the decoder is exact; Bonferroni over the cases of this file and some to come."""

CAUGHT = 1e-9
"""Where a fault is planted the p-value is not small by accident."""

FEWER = 60_000
"""Samples that show a planted fault."""

RULES = sorted(name for name, rule in registered_rules().items() if rule.lossless and rule.noise != "none")
DRAFTERS = {
    "model": tiny.model_drafter(tiny.perturbed(tiny_target(), 0.15), VOCAB),
    "ngram": NgramDrafter(),
    "table": tiny.table_drafter(VOCAB),
}
PADDED = {size: tiny.model_drafter(tiny.repadded(tiny.perturbed(tiny_target(), 0.15), size), VOCAB) for size in (3, 9)}
STEPS = (bass.decode_step, bass.speculate_step)
CASES = [
    ("model", 0), ("model", 1), ("model", 3), ("model", 5), ("ngram", 1), ("ngram", 5), ("table", 3), ("table", 5)
]  # fmt: skip


@pytest.mark.parametrize("drafter, draft_len", CASES)
def test_the_token_rule_keeps_the_targets_law(drafter, draft_len):
    assert verify_lossless(DRAFTERS[drafter], "token", draft_len=draft_len).p_value > THRESHOLD


@pytest.mark.parametrize("rule", sorted({*RULES, "bass_jax.sampling.template:REJECT_ALL"} - {"token"}))
@pytest.mark.parametrize("drafter, draft_len", [("model", 3), ("table", 5)])
def test_every_lossless_rule_keeps_the_targets_law(rule, drafter, draft_len):
    assert verify_lossless(DRAFTERS[drafter], rule, draft_len=draft_len).p_value > THRESHOLD


@pytest.mark.slow
@pytest.mark.parametrize("drafter, draft_len", CASES)
@pytest.mark.parametrize("rule", sorted({*RULES} - {"token"}))
def test_every_lossless_rule_everywhere(rule, drafter, draft_len):
    assert verify_lossless(DRAFTERS[drafter], rule, draft_len=draft_len).p_value > THRESHOLD


@pytest.mark.parametrize("size", PADDED)
def test_a_draft_with_another_vocabulary_keeps_the_targets_law(size):
    """Broken by a law that counts what the target lacks, or by a noise vector of the draft's width."""
    assert verify_lossless(PADDED[size], "token", draft_len=3, num_samples=FEWER).p_value > THRESHOLD


def test_regular_decoding_keeps_the_targets_law():
    assert verify_lossless(DRAFTERS["ngram"], draft_len=0, step=bass.decode_step).p_value > THRESHOLD


def test_a_step_of_each_kind_in_turn_keeps_the_targets_law():
    """Regular and speculative steps mixed: their noise and their caches must not get into each other's way."""
    assert verify_lossless(DRAFTERS["model"], step=_either_step).p_value > THRESHOLD


def _either_step(pair, state, spec):
    is_odd = state.num_steps[0] % 2 == 1
    regular, speculative = (lambda step=step: step(pair, state, spec)[0] for step in STEPS)
    return jax.lax.cond(is_odd, regular, speculative), None


# Negative controls: the same statistic finds every fault that is planted.


@pytest.mark.parametrize("fault", ["RESIDUAL_FROM_UNIFORM", "FIRST_TOKEN_UNCHECKED", "OFF_BY_ONE"])
def test_a_faulty_rule_is_caught(fault):
    assert verify_lossless(DRAFTERS["table"], f"tests.faults:{fault}", num_samples=FEWER).p_value < CAUGHT


def test_a_drafter_that_returns_another_law_is_caught():
    drafter = faults.WrongLawDrafter(DRAFTERS["table"].table)
    assert verify_lossless(drafter, num_samples=FEWER).p_value < CAUGHT


@pytest.mark.parametrize("role", [Role.ACCEPT, Role.RESIDUAL])
def test_a_stream_shared_with_the_draft_is_caught(monkeypatch, role):
    """The drafter is handed the keys of another role, as when a role is forgotten."""
    monkeypatch.setattr("bass_jax.step._draft_keys", faults.shared_stream(role))

    def fresh_step(*arguments):  # another function: the executable of the sound one is not met
        return bass.speculate_step(*arguments)

    assert verify_lossless(DRAFTERS["table"], draft_len=1, num_samples=FEWER, step=fresh_step).p_value < CAUGHT
