"""The conformance test of models, for the decoder and the adapters of this package and for a user's own model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bass_jax.models.protocol import TargetModel, check_cache, check_model, commit_pass, forward

CAPACITY, NUM_NEW = 64, 4
LENGTHS = np.array([CAPACITY, 20, 7], np.int32)
"""Tokens of each row; the first row fills its cache."""


def check_target(model: TargetModel, *, tolerance: float = 1e-4) -> None:
    """Checks the protocol of a model, a target or a draft model, with random tokens.

    It checks shapes and dtypes, that padding writes nothing, that rejected tokens leave no trace, that passes over
    parts give the logits of one pass over the whole, that rows do not depend on each other, and that neither another
    pass nor other parameters need a compilation.

    Args:
        model: any `bass_jax.models.TargetModel`.
        tolerance: the largest difference of two logits, relative to the largest logit. A model in bfloat16 needs more
            than the default.

    Raises:
        AssertionError: naming the method and what was expected.
        ValueError: if the model lacks a member or is no pytree, or an array has a wrong type, dtype or shape.
    """
    name = type(model).__name__
    check_model("model", model)
    _require(jax.tree.leaves(model), f"{name}: expected parameters as leaves of the pytree")
    size = model.vocab_size
    tokens = np.random.default_rng(0).integers(0, size, (len(LENGTHS), CAPACITY)).astype(np.int32)
    num_traced = 0

    @jax.jit
    def run(model, tokens, positions, cache, num_kept):
        nonlocal num_traced
        num_traced += 1
        output = forward(model, tokens, positions, cache)
        return output.logits, commit_pass(model, output.cache, num_kept)

    def read(cache, tokens, start, num, num_kept=None, model=model):
        """Reads `num` tokens of each row from position `start` on; the rest of the pass is padding.

        The first `num_kept` tokens of each row are committed, all by default.
        """
        slots = np.arange(tokens.shape[1])
        is_padding = slots >= num[:, None]
        positions = np.where(is_padding, CAPACITY, start[:, None] + slots).astype(np.int32)
        num_kept = num if num_kept is None else num_kept
        logits, cache = run(model, np.where(is_padding, (tokens + 1) % size, tokens), positions, cache, num_kept)
        return np.asarray(logits), cache

    empty = check_cache(model, model.init_cache(len(LENGTHS), CAPACITY), len(LENGTHS))
    zero, all_new = np.zeros_like(LENGTHS), np.full_like(LENGTHS, NUM_NEW)
    whole, _ = read(empty, tokens, zero, LENGTHS)
    is_real = np.arange(CAPACITY) < LENGTHS[:, None]
    _require(np.isfinite(whole[is_real]).all(), f"{name}.forward: expected finite logits")
    start = LENGTHS - NUM_NEW
    columns = start[:, None] + np.arange(NUM_NEW)
    new = np.take_along_axis(tokens, columns, axis=1)
    expected = np.take_along_axis(whole, columns[..., None], axis=1)
    margin = tolerance * max(1.0, float(np.abs(whole[is_real]).max()))

    def require_equal(found, wanted, message):
        _require(np.abs(found - wanted).max(initial=0) <= margin, f"{name}.forward: expected {message}")

    _, prefix = read(empty, tokens, zero, start)
    found, cache = read(prefix, new, start, all_new)
    require_equal(found, expected, "the logits of one pass over the whole after a pass over the rest")

    wrong, no_trace = (new + 1) % size, "logits that do not depend on rejected tokens, which the next pass overwrites"
    _, rejected = read(prefix, wrong, start, all_new, zero)
    found, _ = read(rejected, new, start, all_new)
    require_equal(found, expected, no_trace)

    num, slots = np.array([2, 1, 0], np.int32), np.arange(NUM_NEW)
    first, cache = read(prefix, new, start, num)
    is_first = slots < num[:, None]
    require_equal(first[is_first], expected[is_first], "logits that do not depend on padding in the same pass")
    rest = np.take_along_axis(new, np.minimum(num[:, None] + slots, NUM_NEW - 1), axis=1)
    second, cache = read(cache, rest, start + num, NUM_NEW - num)
    message = f"that a position at or past the capacity ({CAPACITY}) writes nothing"
    for row, count in enumerate(num):
        require_equal(second[row, : NUM_NEW - count], expected[row, count:], message)
    _, partly = read(prefix, np.where(is_first, new, wrong), start, all_new, num)
    found, _ = read(partly, rest, start + num, NUM_NEW - num)
    for row, count in enumerate(num):
        require_equal(found[row, : NUM_NEW - count], expected[row, count:], no_trace)

    order = np.array([2, 0, 1])
    turned, _ = read(empty, tokens[order], zero, LENGTHS[order])
    other = np.where(np.arange(len(LENGTHS))[:, None] == 0, (tokens + 1) % size, tokens)
    changed, _ = read(empty, other, zero, LENGTHS)
    message = "logits of a row that do not depend on the other rows"
    require_equal(turned[is_real[order]], whole[order][is_real[order]], message)
    require_equal(changed[1:][is_real[1:]], whole[1:][is_real[1:]], message)

    read(cache, new, start, all_new, model=jax.tree.map(_scaled, model))
    _require(num_traced == 2, f"{name}.forward: expected 2 compilations for 2 shapes, not {num_traced}")


def _scaled(leaf: Any) -> Any:
    return leaf * 2 if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf


def _require(condition: Any, message: str) -> None:
    if not condition:
        raise AssertionError(message)
