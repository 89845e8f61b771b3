"""The layer for multi-token prediction that a target's checkpoint holds, as its drafter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.checkpoint import load_model, load_native_mtp
from bass_jax.drafters import network_drafter
from tests import tiny
from tests.marks import mostly_slow
from tests.models.cases import CONFIGS, VOCAB
from tests.models.conftest import load_arrays, run_reference
from tests.models.passes import relative_error

pytestmark = pytest.mark.peer

TOKENS = np.random.default_rng(3).integers(0, VOCAB, 20)
LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
TARGETS = {
    "deepseek_v3": CONFIGS["deepseek_v3"] | {"first_k_dense_replace": 0},
    "qwen3_next": CONFIGS["qwen3_next"] | LAYERS,
    "qwen3_5_text": CONFIGS["qwen3_5_text"] | LAYERS,
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Returns the directory in which `native_mtp_reference` wrote the targets and the logits of their layers."""
    todo = [
        {"name": name, "config": config, "seed": i, "tokens": TOKENS.tolist()}
        for i, (name, config) in enumerate(TARGETS.items())
    ]
    return run_reference(tmp_path_factory.mktemp("native_mtp"), todo, "native_mtp_reference.py")


@jax.jit
def layer_logits(target, model, tokens, positions):
    """Returns the logits of the layer after every token but the first."""
    cache = target.init_cache(1, 32)
    hidden = target.forward(tokens, positions, cache, hidden_layers=model.head.hidden_layers).hidden
    before = jnp.pad(model.project(hidden)[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return model.logits(model.hidden_states(tokens, positions, None, before).hidden[:, 1:])


@pytest.mark.parametrize("name", mostly_slow(TARGETS, lambda name: name == "qwen3_5_text"))
def test_the_logits_are_those_of_transformers(reference, name):
    """The layer reads the target's hidden states after the final norm."""
    target = load_model(reference / name)
    model = load_native_mtp(reference / name, target)
    assert model.params["target_norm"] is target.params["final_norm"]
    tokens, positions = jnp.asarray(TOKENS[None], jnp.int32), jnp.arange(len(TOKENS))[None]
    found = layer_logits(target, model, tokens, positions)[0]
    expected = load_arrays(reference / f"{name}.npz")["logits"]
    assert relative_error(np.asarray(found), expected) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_of_the_layer_do_not_change_the_tokens(reference, name):
    target = load_model(reference / name)
    pair = bass.Pair(target, network_drafter(load_native_mtp(reference / name, target), VOCAB))
    prompts = [TOKENS[:7], TOKENS[5:], TOKENS[:1]]
    expected = bass.generate(pair, prompts, step="decode", max_new_tokens=24).tokens
    run = bass.generate(pair, prompts, bass.SpecConfig(3, "greedy"), max_new_tokens=24)
    for found, tokens in zip(run.tokens, expected, strict=True):
        np.testing.assert_array_equal(found, tokens)
    assert run.metrics.num_drafted > 0


def test_a_checkpoint_without_such_a_layer_is_refused(reference, tmp_path):
    from bass_jax.checkpoint import save_hugging_face

    target = load_model(reference / "qwen3_next")
    save_hugging_face(tmp_path / "target", target)
    with pytest.raises(ValueError, match=r"has no tensor 'mtp\.fc\.weight': expected a layer for it"):
        load_native_mtp(tmp_path / "target", target)
    save_hugging_face(tmp_path / "other", tiny.model(0))
    with pytest.raises(ValueError, match=r"expected a Hugging Face directory of one of the families \['deepseek_v3'"):
        load_native_mtp(tmp_path / "other", tiny.model(0))
