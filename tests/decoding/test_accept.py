"""The fused acceptance op and the rules in jnp evaluate alike; on a GPU the step runs the op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.acceptance import GREEDY, TOKEN, RuleKeys
from bass_jax.decoding import accept as judge_module
from bass_jax.decoding.accept import TargetLogits, accept
from bass_jax.drafters import Proposal
from bass_jax.sampling import SamplingParams
from tests.abstract import abstract_pair, abstract_state, of_depth
from tests.decoding.test_step_compiles_for_gpus import BATCH as STEP_BATCH
from tests.decoding.test_step_compiles_for_gpus import CAPACITY, TARGET
from tests.gpu_compile import compile_for, needs_gpu_compiler

BATCH, DRAFTS, VOCAB = 16, 4, 300


def case(seed: int, is_sampled: bool):
    keys = jax.random.split(jax.random.key(seed), 5)
    logits = 2 * jax.random.normal(keys[0], (BATCH, DRAFTS + 1, VOCAB))
    draft_logits = logits[:, :-1] + jax.random.normal(keys[1], (BATCH, DRAFTS, VOCAB))
    tokens = jax.random.categorical(keys[2], draft_logits).astype(jnp.int32)
    # Some rows draft the target's own favorites, so that long runs are accepted too.
    tokens = jnp.where(jnp.arange(BATCH)[:, None] % 2 == 0, tokens, logits[:, :-1].argmax(axis=-1).astype(jnp.int32))
    num_drafted = jax.random.randint(keys[3], (BATCH,), 0, DRAFTS + 1)
    proposal = Proposal(tokens, num_drafted, jax.nn.softmax(draft_logits) if is_sampled else None)
    row_keys = jax.random.split(keys[4], (2, BATCH))
    sampling = SamplingParams(
        temperature=np.tile([0.0, 0.7, 1.0, 1.3], 4), top_k=np.repeat([0, 5, 40, 0], 4),
        top_p=np.tile([1.0, 0.9], 8), min_p=np.repeat([0.0, 0.05], 8),
    )  # fmt: skip
    sampling_arrays = jax.tree.map(jnp.asarray, sampling.sampling_arrays(BATCH, VOCAB))
    positions = jax.random.split(keys[4], (BATCH, DRAFTS + 1))
    return proposal, TargetLogits(logits, logits), sampling_arrays, RuleKeys(row_keys[0], row_keys[1], positions)


@pytest.mark.parametrize("rule", [GREEDY, TOKEN], ids=lambda rule: rule.name)
@pytest.mark.parametrize("is_sampled", [False, True])
def test_op_and_rule_emit_the_same_tokens(monkeypatch, rule, is_sampled):
    """Broken by noise that is drawn otherwise, by another order of the warps, or by another tie-break."""
    for seed in range(6):
        arguments = case(seed, is_sampled)
        by_rule = accept(rule, *arguments, kernel="xla")
        with monkeypatch.context() as patch:
            # The op's plain-XLA implementation runs on a CPU; the kernel is compared with it in kernels_pallas' tests.
            patch.setattr(judge_module, "_has_kernel", lambda keys: True)
            by_op = accept(rule, *arguments, kernel="pallas")
        np.testing.assert_array_equal(by_op.num_accepted, by_rule.num_accepted)
        is_emitted = np.arange(DRAFTS + 1) <= np.asarray(by_rule.num_accepted)[:, None]
        np.testing.assert_array_equal(np.where(is_emitted, by_op.tokens, 0), np.where(is_emitted, by_rule.tokens, 0))
        np.testing.assert_allclose(
            np.where(is_emitted, by_op.logprobs, 0), np.where(is_emitted, by_rule.logprobs, 0), atol=1e-5
        )


def test_both_end_a_row_at_the_same_broken_distribution(monkeypatch):
    proposal, logits, sampling_arrays, keys = case(0, is_sampled=False)
    proposal = proposal._replace(num_drafted=jnp.full((BATCH,), DRAFTS))
    sampling_arrays = sampling_arrays._replace(temperature=jnp.zeros(BATCH))
    logits = logits.raw
    modes = logits[:, :-1].argmax(axis=-1).astype(jnp.int32)
    proposal = proposal._replace(tokens=modes)
    broken = np.arange(BATCH) % (DRAFTS + 1)
    logits = logits.at[jnp.arange(BATCH), broken, 7].set(jnp.nan)
    logits = TargetLogits(logits, logits)
    by_rule = accept(TOKEN, proposal, logits, sampling_arrays, keys, kernel="xla")
    monkeypatch.setattr(judge_module, "_has_kernel", lambda keys: True)
    by_op = accept(TOKEN, proposal, logits, sampling_arrays, keys, kernel="pallas")
    np.testing.assert_array_equal(np.minimum(by_rule.num_drawable, by_rule.num_accepted + 1), broken)
    np.testing.assert_array_equal(np.minimum(by_op.num_drawable, by_op.num_accepted + 1), broken)


@needs_gpu_compiler
@pytest.mark.parametrize("kernel", ["pallas", "xla"])
def test_on_a_gpu_the_step_runs_the_fused_kernels(kernel):
    """What the kernel writes is bounded by its own tests; here, that the step uses it, and sorts no vocabulary."""
    pair = abstract_pair(of_depth(TARGET, 2), None)
    state = abstract_state(pair, STEP_BATCH, CAPACITY)
    spec = bass.SpecConfig(draft_len=4, acceptance="token", acceptance_kernel=kernel)
    text = compile_for(bass.speculate_step, pair, state, spec, donate_argnums=1).as_text()
    assert " sort(" not in text
    assert ("acceptance_draw_token" in text) == (kernel == "pallas")
    assert "ragged_attention" in text
