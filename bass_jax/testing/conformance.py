"""Conformance tests for drafters, acceptance rules and policies, for parts of this package and for a user's own.

Each function raises an `AssertionError` with one sentence that names the method and what was expected.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.acceptance import AcceptanceResult, AcceptanceRule, RuleKeys
from bass_jax.acceptance.base import check_acceptance
from bass_jax.config import DRAFT_LEN_BUCKETS
from bass_jax.drafters import DraftContext, Drafter, MultiDraftDrafter, Proposal, reads_hidden_states
from bass_jax.drafters.protocols import borrows_cache, check_proposal, reads_chunks
from bass_jax.models.prefill_cache import read_in_chunks
from bass_jax.models.protocol import TargetModel, read_tokens
from bass_jax.policies import Policy, PolicyStats
from bass_jax.policies.protocol import checked_plan
from bass_jax.sampling import LogitsProcessors, SamplingParams, TokenDistribution, sample_tokens
from bass_jax.sampling.keys import Role, draw_keys, gumbel, position_keys, row_keys, step_draft_keys
from bass_jax.testing.lossless import chi_square

CAPACITY, DRAFT_LEN = 64, 4
LENGTHS = np.array([1, 5, 9, 8, 3], np.int32)
WANTED = np.array([4, 0, 3, 4, 1], np.int32)
SIGNIFICANCE = 1e-5
"""A correct part fails a chi-square test with this probability."""


def check_drafter(
    drafter: Drafter, vocab_size: int, *, hidden_width: int | None = None, target: TargetModel | None = None
) -> None:
    """Checks the protocol of a drafter: shapes, rollback, independence of rows, and the distribution of its drafts.

    Args:
        drafter: the drafter.
        vocab_size: V of the target.
        hidden_width: E, the width of the hidden states that the drafter reads, if it reads any.
        target: the model whose cache the drafter borrows, if it borrows one.

    Raises:
        AssertionError: naming the method and what was expected.
        ValueError: if a proposal has a wrong type, dtype or shape.
    """
    name = type(drafter).__name__
    _require(isinstance(drafter, Drafter), f"{name}: expected the methods init, propose and commit")
    context = _context(vocab_size)
    hidden = None
    if reads_hidden_states(drafter):
        _require(hidden_width is not None, f"{name} reads hidden states: expected hidden_width")
        hidden = np.random.default_rng(3).normal(size=(vocab_size, hidden_width or 1)).astype(np.float32)

    if borrows_cache(drafter):
        _require(target is not None, f"{name} uses the target's cache: expected target")

    @jax.jit
    def init(tokens, lengths):
        if borrows_cache(drafter):
            assert target is not None
            slots = jnp.arange(tokens.shape[1])
            positions = jnp.where(slots < lengths[:, None] - 1, slots, tokens.shape[1])
            cache = read_tokens(target, tokens, positions, target.init_cache(*tokens.shape))[1]
            return drafter.borrow(drafter.init(tokens, lengths), cache, lengths)
        if hidden is None:
            return drafter.init(tokens, lengths)
        return drafter.init(tokens, lengths, jnp.asarray(hidden)[tokens % vocab_size])  # type: ignore

    @functools.partial(jax.jit, static_argnames="is_sampled")
    def propose_from(state, context, is_sampled):
        proposal, state = drafter.propose(state, context, DRAFT_LEN, is_sampled=is_sampled)
        check_proposal(drafter, proposal, (len(context.lengths), DRAFT_LEN), vocab_size)
        return proposal, state

    def propose(context, is_sampled=True, state=None):
        state = init(context.tokens, context.lengths) if state is None else state
        return propose_from(state, context, is_sampled)

    start = jax.eval_shape(init, context.tokens, context.lengths)
    state = jax.eval_shape(propose, context)[1]
    end = jax.eval_shape(drafter.commit, state, context.lengths)
    for method, found in (("propose", state), ("commit", end)):
        _require(start == found, f"{name}.{method}: expected a state with the structure and shapes of init's")
    has_rows = all(leaf.shape[:1] == (len(LENGTHS),) for leaf in jax.tree.leaves(start))
    _require(has_rows, f"{name}.init: expected arrays whose first axis is the rows")

    for is_sampled in (True, False):
        _check_drafts(name, propose(context, is_sampled)[0], is_sampled, vocab_size)
    straight, state = propose(context)
    _check_equal(
        straight,
        propose(_context(vocab_size, past_the_end=vocab_size - 1))[0],
        f"{name}.propose: expected drafts that do not depend on tokens at or past a row's length",
        1e-6,
    )
    order = np.array([3, 1, 4, 0, 2])
    _check_equal(
        _take_rows(straight, order),
        propose(_take_rows(context, order))[0],
        f"{name}.propose: expected drafts of a row that do not depend on the other rows",
        1e-6,
    )
    if hidden is None:  # The hidden states of the next tokens would come from the target.
        _check_rollback(name, drafter, propose, context, state, vocab_size)
    if reads_chunks(drafter) and not borrows_cache(drafter):

        def read_chunk(state, tokens, positions):
            of_target = () if hidden is None else (jnp.asarray(hidden)[tokens % vocab_size],)
            return drafter.read(state, tokens, positions, *of_target)

        @jax.jit
        def read(tokens, lengths):
            return read_in_chunks(read_chunk, drafter.start(*tokens.shape), tokens, lengths - 1, CAPACITY)

        _check_equal(
            straight,
            propose(context, state=read(context.tokens, context.lengths))[0],
            f"{name}.read: expected the same drafts as after init with the whole prompts",
        )
    _check_sampling(name, init, propose, vocab_size)
    if isinstance(drafter, MultiDraftDrafter) and hidden is None:
        _check_candidates(name, drafter, init, context, vocab_size)


def check_rule(rule: AcceptanceRule) -> None:
    """Checks the protocol of an acceptance rule; if it is lossless, also the distribution of the first emitted token.

    `bass_jax.testing.verify_lossless` tests the joint distribution of several tokens.

    Raises:
        AssertionError: naming the rule and what was expected.
        ValueError: if the result has a wrong type, dtype or shape.
    """
    name = f"acceptance={getattr(rule, 'name', rule)!r}"
    _require(isinstance(rule, AcceptanceRule), f"{name}: expected an AcceptanceRule")
    _require(rule.noise in ("none", "step", "position"), f"{name}: expected noise 'none', 'step' or 'position'")
    compiled = jax.jit(rule.accept)

    def accept(*arguments: Any) -> Any:
        return jax.device_get(compiled(*arguments))

    for is_sampled in (True, False):
        # All but the keys on the host, where jax compiles no operations.
        *arrays, keys = _rule_arguments(rule.noise, is_sampled)
        drafts, num_drafted, _, target, _ = arguments = *jax.device_get(arrays), keys
        result = compiled(*arguments)
        check_acceptance(rule, result, AcceptanceResult, jnp.asarray(num_drafted), target.probs.shape[-1])
        result = jax.device_get(result)
        is_in_range = (result.num_accepted >= 0) & (result.num_accepted <= num_drafted)
        _require(is_in_range.all(), f"{name}: expected 0 to num_drafted accepted drafts")
        is_token = (result.next_token >= 0) & (result.next_token < target.probs.shape[-1])
        _require(is_token.all(), f"{name}: expected a next token inside the vocabulary")
        padded = np.where(np.arange(drafts.shape[1]) < num_drafted[:, None], drafts, 0)
        same = accept(padded, *arguments[1:])
        _require(_are_equal(result, same), f"{name}: expected a result that does not depend on drafts past num_drafted")
        order = np.random.default_rng(0).permutation(len(num_drafted))
        shuffled = accept(*_take_rows(arguments, order))
        is_same = _are_equal(jax.tree.map(lambda leaf, order=order: leaf[order], result), shuffled)
        _require(is_same, f"{name}: expected a row's result that does not depend on the other rows")
        if rule.lossless and rule.noise != "none":
            first = np.where(result.num_accepted > 0, drafts[:, 0], result.next_token)
            counts = np.bincount(first, minlength=target.probs.shape[-1])
            p_value = chi_square(counts[None], np.asarray(target.probs[:1, 0], np.float64))
            _require(p_value > SIGNIFICANCE, f"{name}: expected first tokens that follow the target's distribution")
    first = TokenDistribution(target.probs[:, :1], target.argmax[:, :1])
    keys_of_first = keys._replace(positions=keys.positions[:, :1])
    nothing = accept(drafts[:, :0], np.zeros_like(num_drafted), None, first, keys_of_first)
    _require(not nothing.num_accepted.any(), f"{name}: expected 0 accepted drafts if there is none")
    if rule.lossless:
        one_hot = target._replace(probs=np.eye(target.probs.shape[-1], dtype=np.float32)[target.argmax])
        result = accept(drafts, num_drafted, None, one_hot, keys)
        expected = np.take_along_axis(target.argmax, result.num_accepted[:, None], axis=1)[:, 0]
        is_right = (result.next_token == expected).all()
        _require(is_right, f"{name}: expected the target's most probable token after one-hot distributions")


def check_policy(policy: Policy) -> None:
    """Checks the protocol of a policy: its lengths, its plans, and the same plans when it is compiled.

    Raises:
        AssertionError: naming the method and what was expected.
        ValueError: if a plan has a wrong type, dtype or shape.
    """
    name = type(policy).__name__
    _require(isinstance(policy, Policy), f"{name}: expected lengths, init and update")
    lengths = list(policy.lengths)
    is_ascending = len(lengths) > 0 and lengths == sorted(set(lengths))
    is_ascending = is_ascending and min(lengths) >= 0 and max(lengths) <= DRAFT_LEN_BUCKETS[-1]
    _require(is_ascending, f"{name}.lengths: expected ascending draft lengths from 0 to {DRAFT_LEN_BUCKETS[-1]}")
    start = jax.eval_shape(lambda: policy.init(4))
    state = jax.eval_shape(policy.update, start, example_stats(0, len(lengths)))[0]
    same = jax.tree.structure(start) == jax.tree.structure(state) and all(
        (one.shape, one.dtype) == (other.shape, other.dtype)
        for one, other in zip(jax.tree.leaves(start), jax.tree.leaves(state), strict=True)
    )
    _require(same, f"{name}.update: expected a state with the structure, shapes and dtypes of init's")
    states, update = [policy.init(4), policy.init(4)], (policy.update, jax.jit(policy.update))
    draft_lens: Any = jnp.zeros(4, jnp.int32)
    for step in range(12):
        stats, plans = example_stats(step, len(lengths), draft_lens), []
        for i in range(2):
            states[i], plan = update[i](states[i], stats)
            checked_plan(policy, plan, 4)
            plans.append(plan)
        draft_lens = plans[0].draft_lens
        is_in_range = (draft_lens >= lengths[0]) & (draft_lens <= lengths[-1])
        _require(bool(is_in_range.all()), f"{name}.update: expected draft lengths from {lengths[0]} to {lengths[-1]}")
        is_same = _are_equal(*plans)
        _require(is_same, f"{name}.update: expected the same plan with and without jax.jit")


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise AssertionError(message)


@jax.jit
def _take_rows(tree: Any, rows: Any) -> Any:
    """Takes rows of all arrays in one compiled function."""
    return jax.tree.map(lambda leaf: leaf[rows], tree)


def _are_equal(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def _context(vocab_size: int, lengths=LENGTHS, wanted=WANTED, seed: int = 0, past_the_end: int = 0) -> DraftContext:
    """Returns rows of random tokens; the last half of row 3 repeats its first half."""
    random, num_rows = np.random.default_rng(1), len(lengths)
    tokens = random.integers(0, vocab_size, (num_rows, CAPACITY)).astype(np.int32)
    tokens[3:4, 4:8] = tokens[3:4, :4]
    tokens = np.where(np.arange(CAPACITY) < lengths[:, None], tokens, past_the_end)
    sampling = SamplingParams(temperature=np.resize([1.0, 0.0, 0.7, 1.0, 1.0], num_rows), top_p=0.9)
    keys = row_keys(jax.random.key(seed), jnp.arange(num_rows, dtype=jnp.uint32))
    return DraftContext(
        tokens=jnp.asarray(tokens, jnp.int32),
        lengths=jnp.asarray(lengths),
        num_wanted=jnp.asarray(wanted),
        sampling_arrays=jax.tree.map(jnp.asarray, sampling.sampling_arrays(num_rows, vocab_size)),
        keys=step_draft_keys(keys, jnp.zeros(num_rows, jnp.int32), DRAFT_LEN),
        processors=LogitsProcessors(None, jnp.asarray(lengths), jnp.full((num_rows, 1), -1)),
    )


def _check_drafts(name: str, proposal: Proposal, is_sampled: bool, vocab_size: int) -> None:
    num_drafted, tokens = np.asarray(proposal.num_drafted), np.asarray(proposal.tokens)
    is_in_range = (num_drafted >= 0) & (num_drafted <= WANTED)
    _require(is_in_range.all(), f"{name}.propose: expected num_drafted from 0 to num_wanted")
    is_draft = np.arange(DRAFT_LEN) < num_drafted[:, None]
    is_token = (tokens >= 0) & (tokens < vocab_size)
    _require(is_token[is_draft].all(), f"{name}.propose: expected drafts from 0 to {vocab_size - 1}")
    if proposal.probs is None:
        return
    _require(is_sampled, f"{name}.propose: expected probs=None with is_sampled=False")
    probs = np.asarray(proposal.probs)
    is_normalized = np.abs(probs.sum(axis=-1)[is_draft] - 1) < 1e-5
    _require(is_normalized.all(), f"{name}.propose: expected probs that sum to 1")
    drawn = np.take_along_axis(probs, tokens[..., None], axis=2)[..., 0]
    _require((drawn[is_draft] > 0).all(), f"{name}.propose: expected drafts with a probability above 0")


def _check_equal(one: Proposal, other: Proposal, message: str, tolerance: float = 1e-4) -> None:
    """Compares two proposals up to the number of drafts."""
    _require(np.array_equal(one.num_drafted, other.num_drafted), message)
    is_draft = np.arange(DRAFT_LEN) < np.asarray(one.num_drafted)[:, None]
    _require(np.array_equal(np.asarray(one.tokens)[is_draft], np.asarray(other.tokens)[is_draft]), message)
    if one.probs is not None and other.probs is not None:
        difference = np.abs(np.asarray(one.probs)[is_draft] - np.asarray(other.probs)[is_draft])
        _require(difference.max(initial=0) <= tolerance, message)


def _check_rollback(name: str, drafter: Drafter, propose, context: DraftContext, state: Any, vocab_size: int) -> None:
    """Rejects all drafts, commits two other tokens, and compares the next proposal with that of a fresh state."""
    lengths = context.lengths + 2
    new = jnp.asarray(np.random.default_rng(2).integers(0, vocab_size, (len(LENGTHS), 2)), jnp.int32)
    columns = context.lengths[:, None] + jnp.arange(2)
    tokens = context.tokens.at[jnp.arange(len(LENGTHS))[:, None], columns].set(new)
    state = drafter.commit(drafter.commit(state, context.lengths), lengths)
    context = context._replace(tokens=tokens, lengths=lengths, num_wanted=jnp.full_like(lengths, DRAFT_LEN))
    message = f"{name}.commit: expected the same drafts after a rejection as after init with the committed tokens"
    _check_equal(propose(context)[0], propose(context, state=state)[0], message)


def _check_sampling(name: str, init, propose, vocab_size: int, num_rows: int = 5000, num_rounds: int = 4) -> None:
    """Samples the first draft of rows that differ only in their keys."""
    lengths, wanted = np.full(num_rows, 5, np.int32), np.full(num_rows, 1, np.int32)
    counts, expected, state = np.zeros(vocab_size, np.int64), None, None
    for seed in range(num_rounds):
        context = _context(vocab_size, lengths, wanted, seed)
        equal = jax.device_get((context.tokens, context.sampling_arrays))
        tokens, sampling_arrays = jax.tree.map(lambda leaf: np.repeat(leaf[:1], num_rows, axis=0), equal)
        context = context._replace(tokens=tokens, sampling_arrays=sampling_arrays)
        if state is None:
            state = init(tokens, context.lengths)
        proposal = jax.device_get(propose(context, state=state)[0])
        if not int(proposal.num_drafted[0]):
            return
        counts += np.bincount(proposal.tokens[:, 0], minlength=vocab_size)
        expected = None if proposal.probs is None else np.asarray(proposal.probs[:1, 0], np.float64)
    if expected is None:
        is_constant = counts.max() == counts.sum()
        _require(is_constant, f"{name}.propose: expected drafts that do not depend on the keys, because probs is None")
        return
    p_value = chi_square(counts[None], expected)
    _require(p_value > SIGNIFICANCE, f"{name}.propose: expected drafts that follow probs")


def _check_candidates(name: str, drafter: MultiDraftDrafter, init, context: DraftContext, vocab_size: int) -> None:
    num_candidates = 2

    @jax.jit
    def propose_many(state, context):
        return drafter.propose_many(state, context, DRAFT_LEN, num_candidates, is_sampled=True)[0]

    proposal = propose_many(init(context.tokens, context.lengths), context)
    check_proposal(drafter, proposal, (len(LENGTHS), num_candidates, DRAFT_LEN), vocab_size)
    first = np.asarray(proposal.tokens)[:, :, 0]
    has_both = (np.asarray(proposal.num_drafted) > 0).all(axis=1)
    differ = first[:, 0] != first[:, 1]
    _require(differ[has_both].all(), f"{name}.propose_many: expected candidates with different first tokens")


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _rule_arguments(noise: str, is_sampled: bool, num_rows: int = 8192) -> tuple[Any, ...]:
    """Returns arguments of a rule; rows share the distributions and differ in their keys and numbers of drafts."""
    num_drafts, vocab_size = 3, 5
    random = np.random.default_rng(0)
    logits = jnp.asarray(1.5 * random.normal(size=(2 * num_drafts + 1, vocab_size)), jnp.float32)
    # XLA computes what depends on constants only when it compiles, which takes seconds for all rows.
    probs = jax.nn.softmax(logits)
    argmax = jnp.argmax(probs, axis=-1).astype(jnp.int32)
    probs, argmax = (jnp.broadcast_to(one, (num_rows, *one.shape)) for one in (probs, argmax))
    draft_probs, target_probs = probs[:, :num_drafts], probs[:, num_drafts:]
    keys = row_keys(jax.random.key(1), jnp.arange(num_rows, dtype=jnp.uint32))
    counter = jnp.zeros(num_rows, jnp.int32)
    positions = position_keys(keys, counter, num_drafts + 1)
    draft_keys = positions[:, :-1] if noise == "position" else step_draft_keys(keys, counter, num_drafts)
    drafts = [sample_tokens(draft_probs[:, i], gumbel(draft_keys[:, i], vocab_size)) for i in range(num_drafts)]
    tokens = jnp.stack(drafts, axis=1) if is_sampled else jnp.full((num_rows, num_drafts), 2, jnp.int32)
    num_drafted = jnp.arange(num_rows, dtype=jnp.int32) % (num_drafts + 1)
    target = TokenDistribution(target_probs, argmax[:, num_drafts:])
    accept, residual = (draw_keys(keys, counter, role) for role in (Role.ACCEPT, Role.RESIDUAL))
    return tokens, num_drafted, draft_probs if is_sampled else None, target, RuleKeys(accept, residual, positions)


def example_stats(step: int, num_lengths: int, draft_lens: Any = None) -> PolicyStats:
    """Returns the stats of an invented step of four rows. Row 3 finishes early, and row 2 comes close to its limit."""
    random = np.random.default_rng(step)
    wanted = np.zeros(4, np.int32) if draft_lens is None else np.asarray(draft_lens, np.int32)
    room = np.array([200, 150, max(1, 12 - step), 50], np.int32)
    is_active = np.array([step > 0, step > 0, step > 0, 0 < step < 4])
    drafted = np.where(is_active, np.minimum(wanted, room), 0).astype(np.int32)
    accepted = random.integers(0, drafted + 1).astype(np.int32)
    fields: dict[str, Any] = {
        "is_active": is_active,
        "is_running": np.array([True, True, True, step < 3]),
        "num_wanted": wanted,
        "num_drafted": drafted,
        "num_accepted": accepted,
        "num_emitted": np.where(is_active, accepted + 1, 0).astype(np.int32),
        "was_clipped": drafted < wanted,
        "lengths": np.array([20, 30, 9, 40], np.int32) + 3 * step,
        "room": room,
        "step_seconds": np.where(np.arange(num_lengths) < step, 0.01 + 0.002 * np.arange(num_lengths), np.nan),
        "is_compiled": np.arange(num_lengths) <= step,
        "resume_seconds": np.float32(0.001 * step),
        "is_refilled": np.asarray(step % 2 == 1),
        "num_acceptable": np.array([3, 0, 9, 1], np.int32),
    }
    return PolicyStats(
        **{
            name: jnp.asarray(value, jnp.float32 if value.dtype == np.float64 else None)
            for name, value in fields.items()
        }
    )
