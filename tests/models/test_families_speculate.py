"""In every family, a model keeps the protocol, and speculation gives the greedy tokens of `transformers`.

This fails if windows, learned positions or norms are correct in a prefill, but not in a verification of five tokens or
after a rollback.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest

import bass_jax as bass
from bass_jax.checkpoint import load_model
from bass_jax.drafters import ModelDrafter
from bass_jax.models.families import FAMILIES
from bass_jax.testing import check_target
from tests import tiny
from tests.models.cases import CONFIGS, NUM_NEW, prompts
from tests.models.conftest import load_arrays

pytestmark = pytest.mark.peer

NAMES = (
    *("codegen", "qwen3-tied-bias-windows", "opt-350m", "gemma2-untied-mqa-bias"),
    *("opt", "llama-rope-llama3", "llama-rope-yarn", "mistral-window-head-10", "ministral", "qwen2-tied-mqa-windows"),
    *("gemma-untied-mqa", "gemma3-rope-mqa-softcap", "gemma3_vision", "gpt2", "bigcode-mqa", "neox"),
    *("qwen3_moe-tied-mqa-unnormalized-window", "qwen2_moe-normalized-windows-no-bias", "mixtral-window-mqa-tied"),
    *("olmoe-normalized-tied-mqa", "olmo2-tied-mqa-rope-linear", "olmo3", "phi3-longrope-tied-mqa"),
    *("smollm3-tied-windows-first-layer-not-rotated", "granite", "glm", "glm4-head-16-quarter-rotated-sharded"),
    "gpt_oss-mqa-tied-no-bias-other-layers",
    *("deepseek_v2-groups-no-query-rank-yarn-biases-tied", "deepseek_v3", "llama4_text", "llama4_vision"),
    *("qwen3_next-other-layers-dense-bias-tied", "qwen3_5_text", "qwen3_5_moe_text-all-experts-mha-sharded"),
    *("qwen3_5_vision", "qwen3_5_moe_text-vision"),
    *("starcoder2-tied-mqa-window", "cohere-tied-mqa-norms", "cohere2", "falcon-new-two-norms-bias"),
)


def smaller(model: bass.models.Model) -> bass.models.Model:
    """Returns the model with only its first layer."""
    params = {name: value for name, value in model.params.items() if not name.startswith("layer_")}
    layers = model.config.layers[:1]
    return bass.models.Model(
        params | {"layer_0": model.params["layer_0"]}, dataclasses.replace(model.config, layers=layers)
    )


def answers_drafter(answers: Sequence[np.ndarray], vocab_size: int) -> tiny.TableDrafter:
    """Returns a drafter that proposes the next token of an answer, except every fourth time another one."""
    table = np.zeros((vocab_size, vocab_size), np.float32)
    for answer in answers:
        for index, (token, following) in enumerate(itertools.pairwise(answer)):
            table[token] = np.eye(vocab_size)[(following + (index % 4 == 3)) % vocab_size]
    return tiny.TableDrafter(jnp.asarray(table))


def test_every_family_is_tested():
    assert {CONFIGS[name]["model_type"] for name in NAMES} == set(FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_speculation_gives_the_greedy_tokens_of_transformers(name, reference):
    expected = load_arrays(reference / f"{name}.npz")
    target = load_model(reference / name)
    check_target(target)
    texts = prompts(list(CONFIGS).index(name))
    if target.is_recurrent:  # A draft model has no recurrent layers, and predicts nothing of such a target.
        drafter = answers_drafter([expected[f"greedy_{i}"] for i in range(len(texts))], target.config.vocab_size)
    else:
        draft = smaller(target)
        if name == "gemma3_vision":  # Its answers repeat a token that every similar draft predicts.
            draft = tiny.perturbed(draft, 1.1)
        drafter = ModelDrafter(draft, target.config.vocab_size)
    pair = bass.Pair(target, drafter)
    for run in (
        bass.generate(pair, texts, step="decode", max_new_tokens=NUM_NEW),
        bass.generate(pair, texts, bass.SpecConfig(4, "greedy"), max_new_tokens=NUM_NEW),
    ):
        assert [row.tolist() for row in run.tokens] == [expected[f"greedy_{i}"].tolist() for i in range(len(texts))]
    # Both acceptances and rejections occurred.
    assert 0 < run.metrics.acceptance_rate < 1
