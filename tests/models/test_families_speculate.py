"""What families add to the decoder keeps greedy speculation equal to greedy decoding.

What breaking it means: a window, a learned position or a norm that is right for a prefill and wrong for the five
tokens of a verification, or after a roll-back.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from tests import tiny

KINDS = {
    "mistral, qwen": {"window": 5, "windowed_layers": (False, True), "has_qk_norm": True},
    "opt, gpt2": {
        "positions": "learned", "position_offset": 2, "norm": "layer", "is_gated": False, "activation": "relu",
        "has_attention_bias": True, "has_mlp_bias": True,
    },
    "neox, codegen": {"norm": "layer", "block": "parallel", "rotary_dim": 4, "is_gated": False, "has_head_bias": True},
    "gemma2, gemma3": {
        "block": "sandwich", "norm_offset": 1.0, "window": 6, "windowed_layers": (True, False), "attention_scale": 0.5,
        "window_rope_base": 100.0, "embedding_scale": 4.0, "logit_softcap": 20.0,
        "attention_softcap": 2.0,
    },
}  # fmt: skip


def random_model(changes: dict) -> bass.Model:
    """A tiny model whose biases are drawn too; ones would drown every token."""
    model, draw = tiny.model(1, **changes), np.random.default_rng(0)

    def fill(path, leaf):
        is_bias = jax.tree_util.keystr(path).endswith("bias']")
        return jnp.asarray(0.3 * draw.standard_normal(leaf.shape), leaf.dtype) if is_bias else leaf

    return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(fill, model.params))


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_greedy_speculation_is_greedy_decoding(changes):
    target = random_model(changes)
    pair = bass.Pair(target, tiny.model_drafter(tiny.perturbed(target, 0.03)))
    regular = bass.generate(pair, tiny.PROMPTS, step="decode", max_new_tokens=40)
    found = bass.generate(pair, tiny.PROMPTS, bass.SpecConfig(4, "greedy"), max_new_tokens=40)
    assert [row.tolist() for row in found.tokens] == [row.tolist() for row in regular.tokens]
    emitted, steps = sum(map(len, found.tokens)), sum(int((info.num_emitted > 0).sum()) for info in found.infos)
    # Drafts were accepted and rejected: both ways through the cache were taken.
    assert 1.1 < emitted / steps < 4.9
    assert len({tuple(row) for row in found.tokens}) == len(tiny.PROMPTS)
