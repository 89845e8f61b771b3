"""In every family, a smaller member drafts for a larger one, and what comes out is what `transformers` decodes.

What breaking it means: a window, a learned position or a norm that is right for a prefill and wrong for the five
tokens of a verification, or after a roll-back.
"""

import dataclasses

import numpy as np
import pytest

import bass_jax as bass
from bass_jax.checkpoint import load_model
from bass_jax.drafters import ModelDrafter
from bass_jax.models.families import FAMILIES
from tests.marks import mostly_slow
from tests.models.cases import CONFIGS, NUM_NEW, prompts

pytestmark = pytest.mark.peer

OFTEN = ("opt-350m", "codegen", "gemma2-untied-mqa-bias", "qwen3-tied-bias-windows")
SLOWLY = (
    "opt", "llama-rope-llama3", "llama-rope-yarn", "mistral-window-head-10", "qwen2-tied-mqa-windows",
    "gemma-untied-mqa", "gemma3-rope-mqa-softcap", "gpt2", "bigcode-mqa", "neox",
)  # fmt: skip


def smaller(model: bass.models.Model, num_layers: int = 1) -> bass.models.Model:
    """The same family with fewer layers: the first of a larger member's."""
    config = model.config
    dropped = {f"layer_{i}" for i in range(num_layers, config.num_layers)}
    params = {name: value for name, value in model.params.items() if name not in dropped}
    return bass.models.Model(params, dataclasses.replace(config, layers=config.layers[:num_layers]))


def test_every_family_is_here():
    assert {CONFIGS[name]["model_type"] for name in OFTEN + SLOWLY} == set(FAMILIES)


@pytest.mark.parametrize("name", mostly_slow([*OFTEN, *SLOWLY], lambda name: name in OFTEN))
def test_speculation_is_greedy_decoding(name, reference):
    expected = np.load(reference / f"{name}.npz")
    target = load_model(reference / name)
    pair = bass.Pair(target, ModelDrafter(smaller(target), target.config.vocab_size))
    texts = prompts(list(CONFIGS).index(name))
    for run in (
        bass.generate(pair, texts, step="decode", max_new_tokens=NUM_NEW),
        bass.generate(pair, texts, bass.SpecConfig(4, "greedy"), max_new_tokens=NUM_NEW),
    ):
        assert [row.tolist() for row in run.tokens] == [expected[f"greedy_{i}"].tolist() for i in range(len(texts))]
    # Drafts were accepted and rejected: both ways through the cache were taken.
    assert 0 < run.metrics.acceptance_rate < 1
