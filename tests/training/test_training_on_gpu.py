"""A training step compiled for an H200 without one."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from bass_jax.models import Model
from bass_jax.training.batches import TrainingBatch
from bass_jax.training.distill_config import OptimizerConfig
from bass_jax.training.loss import LossWeights
from bass_jax.training.optimizer import make_optimizer
from bass_jax.training.trainer import TrainState, train_step
from tests.abstract import abstract_model
from tests.flat_config import flat_config
from tests.gpu_compile import compile_for, needs_gpu_compiler
from tests.marks import mostly_slow

B, T, M, TOP = 16, 512, 1024, 16
DRAFT = flat_config(
    vocab_size=49152,
    width=256,
    num_layers=1,
    num_heads=16,
    num_kv_heads=2,
    head_dim=16,
    mlp_width=256,
    context=8192,
    is_tied=False,
    embedding_width=128,
    output_vocab_size=512,
    dtype="bfloat16",
)


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize(
    ("num_tokens", "config"),
    mostly_slow(
        [(64, DRAFT), (T, DRAFT), (64, dataclasses.replace(DRAFT, dtype="float32", product_dtype="bfloat16"))],
        lambda case: case[0] == T,
    ),
)
def test_a_step_compiles_and_keeps_no_weights_of_attention(num_tokens, config):
    """Of the shortest sequences that a configuration makes by default, too."""
    params = {name: leaf for name, leaf in abstract_model(DRAFT).params.items() if name != "embedding"}
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), params)
    optimizer = make_optimizer(OptimizerConfig(kind="muon"), 100)
    state = TrainState(params, jax.eval_shape(optimizer.init, params))

    def spec(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    batch = TrainingBatch(
        tokens=spec(jnp.int32, B, num_tokens),
        lengths=spec(jnp.int32, B),
        selected=spec(jnp.int32, M),
        weights=spec(jnp.float32, M),
        distribution_columns=spec(jnp.int32, M, TOP),
        distribution_probs=spec(jnp.float32, M, TOP),
        labels=spec(jnp.int32, M),
        distribution_mass=spec(jnp.float32, M),
    )
    embedding = spec(config.dtype, DRAFT.vocab_size, DRAFT.embedding_width)
    weights = LossWeights(*(spec(jnp.float32) for _ in LossWeights._fields))

    def step(state, embedding, batch, weights):
        return train_step(1, optimizer, Model({}, config), state, embedding, batch, weights)

    executable = compile_for(step, state, embedding, batch, weights)
    if num_tokens == T:
        # One layer's weights, [B, N, T, T] in float32; a quarter of the rows is scored at a time.
        whole = 4 * B * DRAFT.layers[0].attention.num_heads * T * T
        assert executable.memory_analysis().temp_size_in_bytes < whole
