"""The fused acceptance op gives the same tokens as the rules in jnp, and a step on a GPU runs the op."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.acceptance import GREEDY, TOKEN, RuleKeys
from bass_jax.decoding import accept as accept_module
from bass_jax.decoding.accept import TargetLogits, accept
from bass_jax.drafters import Proposal
from bass_jax.sampling import SamplingParams
from tests.abstract import abstract_pair, abstract_state, of_depth
from tests.decoding.test_step_compiles_for_gpus import BATCH as STEP_BATCH
from tests.decoding.test_step_compiles_for_gpus import CAPACITY, TARGET
from tests.gpu_compile import compile_for, needs_gpu_compiler

BATCH, DRAFTS, VOCAB = 16, 4, 300
XLA, PALLAS = (bass.SpecConfig(acceptance_kernel=kernel) for kernel in ("xla", "pallas"))


@functools.partial(jax.jit, static_argnames="is_sampled")
def case(seed: int, is_sampled: bool):
    keys = jax.random.split(jax.random.key(seed), 5)
    logits = 2 * jax.random.normal(keys[0], (BATCH, DRAFTS + 1, VOCAB))
    draft_logits = logits[:, :-1] + jax.random.normal(keys[1], (BATCH, DRAFTS, VOCAB))
    tokens = jax.random.categorical(keys[2], draft_logits).astype(jnp.int32)
    # Half of the rows draft the target's most probable tokens, so that many drafts are accepted.
    tokens = jnp.where(jnp.arange(BATCH)[:, None] % 2 == 0, tokens, logits[:, :-1].argmax(axis=-1).astype(jnp.int32))
    num_drafted = jax.random.randint(keys[3], (BATCH,), 0, DRAFTS + 1)
    proposal = Proposal(tokens, num_drafted, jax.nn.softmax(draft_logits) if is_sampled else None)
    row_keys = jax.random.split(keys[4], (2, BATCH))
    sampling = SamplingParams(
        temperature=np.tile([0.0, 0.7, 1.0, 1.3], 4),
        top_k=np.repeat([0, 5, 40, 0], 4),
        top_p=np.tile([1.0, 0.9], 8),
        min_p=np.repeat([0.0, 0.05], 8),
    )
    sampling_arrays = jax.tree.map(jnp.asarray, sampling.sampling_arrays(BATCH, VOCAB))
    positions = jax.random.split(keys[4], (BATCH, DRAFTS + 1))
    return proposal, logits, sampling_arrays, RuleKeys(row_keys[0], row_keys[1], positions)


def accept_by(spec, monkeypatch):
    """Returns `accept` compiled with the rule in jnp, or with the fused op.

    On a CPU the op runs its XLA implementation. The tests of kernels_pallas compare the kernel with it.
    """

    def run(rule, proposal, logits, sampling_arrays, keys):
        return accept(rule, proposal, TargetLogits(logits, logits), sampling_arrays, keys, spec)

    monkeypatch.setattr(accept_module, "_has_kernel", lambda keys: True)
    return jax.jit(run, static_argnums=0)


@pytest.mark.parametrize(
    "is_sampled, rule",
    [
        pytest.param(False, GREEDY, id="False-greedy"),
        pytest.param(True, GREEDY, id="True-greedy", marks=pytest.mark.slow),
        pytest.param(False, TOKEN, id="False-token", marks=pytest.mark.slow),
        pytest.param(True, TOKEN, id="True-token"),
    ],
)
def test_op_and_rule_emit_the_same_tokens(monkeypatch, rule, is_sampled):
    """Both use the same random numbers, the same order of temperature, top-k, top-p and min-p, and the same ties."""
    with_rule, with_op = accept_by(XLA, monkeypatch), accept_by(PALLAS, monkeypatch)
    for seed in range(6):
        arguments = case(seed, is_sampled)
        by_rule, by_op = with_rule(rule, *arguments), with_op(rule, *arguments)
        np.testing.assert_array_equal(by_op.num_accepted, by_rule.num_accepted)
        is_emitted = np.arange(DRAFTS + 1) <= np.asarray(by_rule.num_accepted)[:, None]
        np.testing.assert_array_equal(np.where(is_emitted, by_op.tokens, 0), np.where(is_emitted, by_rule.tokens, 0))
        np.testing.assert_allclose(
            np.where(is_emitted, by_op.logprobs, 0), np.where(is_emitted, by_rule.logprobs, 0), atol=1e-5
        )


def test_op_and_rule_end_a_row_at_the_same_invalid_distribution(monkeypatch):
    proposal, logits, sampling_arrays, keys = case(0, is_sampled=False)
    sampling_arrays = sampling_arrays._replace(temperature=jnp.zeros(BATCH))
    tokens = logits[:, :-1].argmax(axis=-1).astype(jnp.int32)
    proposal = proposal._replace(tokens=tokens, num_drafted=jnp.full((BATCH,), DRAFTS))
    first_invalid = np.arange(BATCH) % (DRAFTS + 1)
    logits = logits.at[jnp.arange(BATCH), first_invalid, 7].set(jnp.nan)
    for spec in (XLA, PALLAS):
        result = accept_by(spec, monkeypatch)(TOKEN, proposal, logits, sampling_arrays, keys)
        np.testing.assert_array_equal(np.minimum(result.num_valid, result.num_accepted + 1), first_invalid)


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["pallas", "xla"])
def test_on_a_gpu_the_step_runs_the_fused_kernels(kernel):
    """The step contains the acceptance and attention kernels and does not sort the vocabulary."""
    pair = abstract_pair(of_depth(TARGET, 1), None)
    state = abstract_state(pair, STEP_BATCH, CAPACITY)
    spec = bass.SpecConfig(draft_len=4, acceptance="token", acceptance_kernel=kernel)
    text = compile_for(bass.speculate_step, pair, state, spec, donate_argnums=1).as_text()
    assert " sort(" not in text
    assert ("acceptance_draw_token" in text) == (kernel == "pallas")
    assert "ragged_attention" in text
