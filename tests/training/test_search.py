"""The sweep over draft shapes: what it measures, predicts, and goes on from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.cost_model import H200, pass_shape, roofline
from bass_jax.training import search
from bass_jax.training.distill_config import DraftConfig
from bass_jax.training.search import acceptance_rates, best_draft_len, draft_shape, search_drafts
from tests.checkpoint.small import small_tokenizer
from tests.training.conftest import synthetic_rollouts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flat:
    """A target pass takes 10 and a draft 1, whatever else."""

    def target_seconds(self, num_rows, num_tokens, context):
        return jnp.asarray(10.0)

    def draft_seconds(self, num_rows, num_drafts, context, num_behind):
        return jnp.asarray(1.0 * num_drafts)


def test_the_best_length_by_hand():
    """Two drafts: 1 + 0.8 + 0.4 tokens in 12, against 10 per token."""
    length, speedup = best_draft_len(Flat(), [0.8, 0.5, 0.0, 0.0], 1, 256)
    assert (length, speedup) == (2, pytest.approx(2.2 * 10 / 12))
    assert best_draft_len(Flat(), [0.05, 0.0], 1, 256) == (0, pytest.approx(1.0))


def test_acceptance_by_position():
    matches = [np.array([True, True, False, True, False]), np.array([False, True, True])]
    # Passes with two drafts: TT+, F..., T F | F, TT: accepted 2, 1 | 0, 1 (cut at the end).
    rates = acceptance_rates(matches, 2)
    accepted = [2, 1, 0, 1]
    assert rates == [sum(a >= 1 for a in accepted) / 4, sum(a >= 2 for a in accepted) / 3]


def test_shapes_are_scaled():
    shape = draft_shape(DraftConfig(), 2, 512)
    assert (shape.num_layers, shape.width, shape.num_heads, shape.num_kv_heads, shape.mlp_width) == (2, 512, 8, 4, 1536)
    with pytest.raises(ValueError, match="0 layers of width 256"):
        draft_shape(DraftConfig(), 0, 256)


def test_a_search_trains_measures_and_goes_on(make_config, make_rows, target, monkeypatch):
    config = make_config(training={"num_steps": 8, "save_every": 8})
    rows = make_rows(synthetic_rollouts(100), 0.2)
    monkeypatch.setattr(search, "new_draft", lambda config, rows, target, tokenizer: draft_of(config, target))
    cost = {"cost_of": lambda draft: roofline(pass_shape(target.config), pass_shape(draft), H200)}
    begun, tokenizer = [], small_tokenizer()
    options = {"batches": (1, 8), "progress": begun.append, **cost}
    first = list(search_drafts(config, rows, target, tokenizer, [(1, 16), (2, 32)], **options))
    assert [(point.num_layers, point.width) for point in first] == [(1, 16), (2, 32)]
    assert first[0].num_params < first[1].num_params
    for point in first:
        assert point.pass_seconds > 0 and len(point.rates) == search.NUM_POSITIONS
        assert set(point.speedups) == {1, 8} and min(point.speedups.values()) >= 1
    assert list(search_drafts(config, rows, target, tokenizer, [(1, 16), (2, 32)], **options)) == first
    assert len(begun) == 2


def draft_of(config, target):
    from bass_jax.training.init_draft import init_draft

    return init_draft(
        config.draft, target, np.arange(config.draft.output_vocab_size, dtype=np.int32), jax.random.key(0)
    )
