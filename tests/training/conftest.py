"""A tiny target, its corpus, and a configuration that distills it in seconds."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.runtime.yaml_config import parse_yaml
from bass_jax.training.corpus import Corpus
from bass_jax.training.data import CorpusRows
from bass_jax.training.distill_config import DistillConfig
from bass_jax.training.init_draft import init_draft, init_eagle3
from bass_jax.training.rollout import Rollout
from tests import tiny

VOCAB = 64


def synthetic_rollouts(count: int, seed: int = 0) -> list[Rollout]:
    """Answers of a "target" whose next token is a fixed function of the last one, which is easy to learn."""
    generator = np.random.default_rng(seed)
    successor = np.random.default_rng(7).permutation(VOCAB)
    rollouts = []
    for _ in range(count):
        prompt = generator.integers(0, VOCAB, generator.integers(2, 9)).astype(np.int32)
        response = [successor[prompt[-1]]]
        for _ in range(int(generator.integers(3, 20))):
            response.append(successor[response[-1]])
        response = np.array(response, np.int32)
        others = (response[:, None] + np.arange(1, 4)) % VOCAB
        ids = np.concatenate([response[:, None], others], axis=1).astype(np.int32)
        logprobs = np.tile(np.log([0.85, 0.06, 0.05, 0.04]).astype(np.float32), (len(response), 1))
        rollouts.append(Rollout(prompt, response, ids, logprobs, 0.0))
    return rollouts


@jax.jit
def last_logits(model, tokens, length):
    """The logits after the first `length` of the padded `tokens`, from a fresh pass."""
    positions = jnp.arange(tokens.shape[1])[None]
    positions = jnp.where(positions < length, positions, tokens.shape[1])
    logits, *_ = model.forward(tokens, positions, model.init_cache(1, tokens.shape[1]))
    return logits[0, length - 1]


def padded(tokens, length: int = 64) -> np.ndarray:
    """The tokens in an array of one shape, so that few functions are compiled."""
    array = np.zeros((1, length), np.int32)
    array[0, : len(tokens)] = tokens
    return array


def next_token(model, tokens) -> int:
    """The model's most probable token after `tokens`."""
    column = int(jnp.argmax(last_logits(model, padded(tokens), len(tokens))))
    return column if model.output_ids is None else int(model.output_ids[column])


@pytest.fixture(scope="session")
def target():
    return tiny.model(3, scale=1.0, num_layers=2, vocab_size=VOCAB, width=16, mlp_width=32, is_tied=True)


@pytest.fixture
def make_config(tmp_path):
    """Makes a configuration; keyword arguments replace keys of its sections."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "what is the capital of France"}) + "\n")

    def make(**sections):
        content = {
            "target": "tiny",
            "output_dir": str(tmp_path / "run"),
            "prompts": {"files": [str(tmp_path / "data.jsonl")]},
            "draft": {
                "width": 32,
                "num_layers": 1,
                "num_heads": 4,
                "num_kv_heads": 2,
                "head_dim": 8,
                "mlp_width": 32,
                "output_vocab_size": 48,
            },
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 5, "weight_decay": 0.0},
            "training": {
                "num_steps": 60,
                "batch_tokens": 128,
                "length_grain": 32,
                "log_every": 5,
                "save_every": 20,
                "held_out_share": 0.1,
            },
        }
        for name, values in sections.items():
            content[name] = content.get(name, {}) | values if isinstance(values, dict) else values
        return parse_yaml(DistillConfig, content, "test")

    return make


@pytest.fixture
def make_rows(tmp_path):
    """Writes rollouts as a corpus of several shards and opens it for training."""

    def make(rollouts, share=0.1, **options):
        corpus = Corpus(tmp_path / "corpus", {"made": "here"})
        for number in range(0, len(rollouts), 50):
            corpus.write(number // 50, rollouts[number : number + 50], ["data"] * len(rollouts[number : number + 50]))
        return CorpusRows([corpus], share, 128, **options)

    return make


@pytest.fixture(scope="session")
def drafts():
    """The drafts made so far: their initialization takes longer than most tests."""
    return {}


@pytest.fixture
def make_draft(target, drafts):
    """Makes the initial draft of a configuration, which proposes `output_ids` or the first tokens."""

    def make(config, output_ids=None):
        ids = np.arange(config.draft.output_vocab_size, dtype=np.int32) if output_ids is None else output_ids
        key = (config.draft, config.seed, ids.tobytes())
        if key not in drafts:
            init = init_eagle3 if config.draft.is_head else init_draft
            drafts[key] = init(config.draft, target, ids, jax.random.key(config.seed))
        return drafts[key]

    return make
