"""Tiny models and drafters for tests: random weights, large enough that the distributions are uneven."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

import bass_jax as bass
from bass_jax.checkpoint.speculators import head_param_shapes
from bass_jax.drafters import (
    DraftContext,
    EagleDrafter,
    EnsembleDrafter,
    ModelDrafter,
    NgramDrafter,
    OtherVocabularyDrafter,
    Proposal,
    RetrievalDrafter,
    SuffixDrafter,
    VocabularyMatch,
    network_drafter,
    other_vocabulary_drafter,
    suffix_drafter,
)
from bass_jax.drafters.eagle.dflash import DFlashConfig, DFlashModel
from bass_jax.drafters.eagle.eagle3 import Eagle3Config, Eagle3Model
from bass_jax.drafters.eagle.mtp import MTPConfig
from bass_jax.drafters.retrieval import suffix_hashes
from bass_jax.models import abstract_params
from bass_jax.sampling import sample_tokens
from bass_jax.sampling.keys import gumbel
from tests.flat_config import flat_config

VOCAB = 11
PROMPTS = ([7], [3, 1, 4, 1, 5, 9, 2, 6, 5], [5, 6, 7, 5, 6, 7, 5, 6])
"""Prompts of different lengths: one token, no repetition, and one that repeats itself.

Three prompts fill a batch of four rows except for one padding row.
"""


def config(vocab_size: int = VOCAB, **changes) -> bass.models.ModelConfig:
    shape = {"width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "mlp_width": 24}
    return flat_config(vocab_size=vocab_size, context=256, **(shape | {"is_tied": False} | changes))


def model(seed: int, scale: float = 16.0, vocab_size: int = VOCAB, **changes) -> bass.models.Model:
    """Returns a model with random weights.

    With a scale of 16, distributions have an entropy of about 1 nat and depend on the whole prefix. NumPy draws the
    weights because compiling the initializers takes longer than most tests.
    """
    made, random = config(vocab_size, **changes), np.random.default_rng(seed)

    def fill(leaf):
        size = np.ones(leaf.shape) if leaf.ndim == 1 else 0.02 * scale * random.normal(size=leaf.shape)
        return jax.device_put(size.astype(leaf.dtype))  # `jnp.asarray` compiles a function per shape

    output_ids = None if made.output_vocab_size is None else jnp.arange(made.output_vocab_size, dtype=jnp.int32)
    return bass.models.Model(jax.tree.map(fill, nn.meta.unbox(abstract_params(made))), made, output_ids)


def perturbed(original: bass.models.Model, amount: float, seed: int = 3) -> bass.models.Model:
    """Returns the model with noise added to every weight: a draft model whose drafts are often accepted."""
    random = np.random.default_rng(seed)

    def change(leaf):  # on the host, because jax compiles every operation outside of a jitted function
        noise = amount * random.normal(size=leaf.shape).astype(np.float32)
        return jax.device_put(np.asarray(leaf) + noise)

    return dataclasses.replace(original, params=jax.tree.map(change, original.params))


def shared_embedding(target: bass.models.Model) -> bass.models.Model:
    """Returns a narrower draft model that projects the target's embedding and has its own head."""
    draft = model(5, width=8, embedding_width=target.config.width)
    return dataclasses.replace(draft, params=draft.params | {"embedding": target.params["embedding"]})


def padded_vocabulary(original: bass.models.Model, vocab_size: int) -> bass.models.Model:
    """Returns the model with a larger or smaller vocabulary. Added tokens get large logits, so they are proposed."""
    config, random = dataclasses.replace(original.config, vocab_size=vocab_size), np.random.default_rng(4)
    size = original.config.vocab_size

    def resize(matrix):
        added = 3 * random.normal(size=(max(0, vocab_size - size), matrix.shape[1])).astype(np.float32)
        return jax.device_put(np.concatenate([np.asarray(matrix)[:vocab_size], added]))

    names = ("embedding",) if config.is_tied else ("embedding", "head")
    changes = {name: resize(original.params[name]) for name in names}
    return bass.models.Model(original.params | changes, config)


def reduced_vocabulary(output_ids: tuple[int, ...]) -> bass.models.Model:
    """Returns a draft model that can only propose `output_ids`."""
    draft = model(6, output_vocab_size=len(output_ids))
    return dataclasses.replace(draft, output_ids=jnp.asarray(output_ids, jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableDrafter:
    """A user's stochastic drafter: a table of next-token distributions by the last token, ``[V, V]``.

    Rows whose last token is odd draft at most 2 tokens, so rows of a batch draft different numbers.
    """

    table: jax.Array

    def init(self, tokens, lengths) -> Any:
        return None

    def propose(self, state, context: DraftContext, draft_len: int, *, is_sampled: bool):
        proposal, _ = self.propose_many(state, context, draft_len, 1, is_sampled=is_sampled)
        return jax.tree.map(lambda leaf: leaf[:, 0], proposal), state

    def propose_many(self, state, context: DraftContext, draft_len: int, num_candidates: int, *, is_sampled: bool):
        last = jnp.take_along_axis(context.tokens, context.lengths[:, None] - 1, axis=1)[:, 0]
        num_drafted = jnp.where(last % 2 == 0, context.num_wanted, jnp.minimum(context.num_wanted, 2))
        rows, left, candidates = jnp.arange(last.shape[0]), self.table[last], []
        for candidate in range(num_candidates):
            tokens, probs = [], []
            for step in range(draft_len):
                step_probs = self.table[tokens[-1]] if step else left / left.sum(axis=-1, keepdims=True)
                keys = context.keys[:, step]  # Candidate 0 uses the random numbers of a single draft.
                keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, candidate) if candidate else keys
                noise = gumbel(keys, step_probs.shape[-1])
                sampled = sample_tokens(step_probs, noise) if is_sampled else jnp.argmax(step_probs, axis=-1)
                tokens.append(sampled.astype(jnp.int32))
                probs.append(step_probs)
            left = left.at[rows, tokens[0]].set(0.0)
            candidates.append(Proposal(jnp.stack(tokens, 1), num_drafted, jnp.stack(probs, 1) if is_sampled else None))
        return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1), *candidates), state

    def commit(self, state, lengths):
        return state


def table_drafter(vocab_size: int = VOCAB) -> TableDrafter:
    """Returns a drafter with distributions unlike any target's; one probability is 0."""
    return TableDrafter(_random_table(vocab_size))


@functools.partial(jax.jit, static_argnums=0)
def _random_table(vocab_size: int):
    table = jax.nn.softmax(1.5 * jax.random.normal(jax.random.key(8), (vocab_size, vocab_size)))
    table = table.at[0, 0].set(0.0)
    return table / table.sum(axis=1, keepdims=True)


def model_drafter(draft: bass.models.Model, vocab_size: int = VOCAB) -> ModelDrafter:
    return ModelDrafter(draft, vocab_size)


def vocabulary_match(vocab_size: int = VOCAB) -> VocabularyMatch:
    """Returns how a target's tokens are written by a draft with two tokens more: every third one as 2 or 3 of them.

    The draft reads two tokens of its own before every text.
    """
    random, ids = np.random.default_rng(12), np.arange(vocab_size)
    num_own = np.where(ids % 3 == 1, 2 + ids % 2, 1)
    own_tokens = random.integers(0, vocab_size + 2, (vocab_size, 3))
    output_ids = ids[num_own == 1]
    own_tokens[output_ids, 0] = own_ids = random.permutation(vocab_size + 2)[: len(output_ids)]
    own_tokens[np.arange(3) >= num_own[:, None]] = 0
    return VocabularyMatch(own_tokens, num_own, output_ids, own_ids, np.array([1, 4]))


def other_vocabulary(vocab_size: int = VOCAB) -> OtherVocabularyDrafter:
    """Returns a random draft that has two tokens more than the target and shares two thirds of the target's."""
    return other_vocabulary_drafter(model(13, vocab_size=vocab_size + 2), vocabulary_match(vocab_size))


def eagle_drafter(target: bass.models.Model, vocab_size: int = VOCAB, scale: float = 16.0) -> EagleDrafter:
    """Returns a random draft that reads the hidden states of `target`."""
    draft = model(7, scale, vocab_size, hidden_width=target.config.width)
    return EagleDrafter(draft, vocab_size)


def eagle3_drafter(target: bass.models.Model, vocab_size: int = VOCAB, scale: float = 16.0, mask: int | None = None):
    """Returns a random head on two hidden states of `target`; with a mask token it drafts all tokens in one pass."""
    layers = (0, target.config.num_layers)
    head = Eagle3Config(layers, target.config.width, norm_before_residual=True, mask_token_id=mask)
    return _head_drafter(head, vocab_size, scale, config().width)


def mtp_drafter(target: bass.models.Model, vocab_size: int = VOCAB, scale: float = 16.0):
    """Returns a random MTP head for `target`."""
    return _head_drafter(
        MTPConfig((target.config.num_layers,), target.config.width), vocab_size, scale, target.config.width
    )


def dflash_drafter(
    target: bass.models.Model, vocab_size: int = VOCAB, scale: float = 16.0, block_size: int = 7, **changes
):
    """Returns a random DFlash head of two layers, one with a window, on two hidden states of `target`."""
    layers = (0, target.config.num_layers)
    head = DFlashConfig(layers, target.config.width, block_size, mask_token_id=2, **changes)
    return _head_drafter(head, vocab_size, scale, target.config.width, num_layers=2, window=4)


def _head_drafter(head: Any, vocab_size: int, scale: float, width: int, num_layers: int = 1, window: int | None = None):
    decoder = config(vocab_size, width=width, hidden_width=width)
    layer = decoder.layers[0]
    windowed = dataclasses.replace(layer, mixer=dataclasses.replace(layer.attention, window=window))
    decoder = dataclasses.replace(decoder, layers=(layer, windowed)[:num_layers])
    random = np.random.default_rng(10)

    def fill(leaf):
        is_norm = leaf.ndim == 1 and leaf.shape[0] == decoder.width
        size = np.ones(leaf.shape) if is_norm else 0.02 * scale * random.normal(size=leaf.shape)
        return jax.device_put(size.astype(leaf.dtype))

    params = unflatten_dict(jax.tree.map(fill, head_param_shapes(decoder, head)), sep="/")
    model = DFlashModel if isinstance(head, DFlashConfig) else Eagle3Model
    return network_drafter(model(params, decoder, head), vocab_size)


def retrieval_drafter(vocab_size: int = VOCAB, min_confidence: float = 0.0) -> RetrievalDrafter:
    """Returns a drafter with about half of the contexts of one and two tokens, each with a random next token."""
    random = np.random.default_rng(9)
    pairs = np.stack(np.meshgrid(np.arange(vocab_size), np.arange(vocab_size), indexing="ij"), -1).reshape(-1, 2)
    hashes = suffix_hashes(pairs.astype(np.int32))
    keys = np.concatenate([np.unique(hashes[:, 0])[::2], np.unique(hashes[:, 1])[1::2]])
    keys = np.sort(keys)
    tokens, confidence = (random.integers(0, high, len(keys)) for high in (vocab_size, 256))
    arrays = (keys, tokens.astype(np.uint16), confidence.astype(np.uint8))
    return RetrievalDrafter(*map(jax.device_put, arrays), max_ngram=2, min_ngram=1, min_confidence=min_confidence)


def shared_suffix(vocab_size: int = VOCAB) -> SuffixDrafter:
    """Returns a suffix drafter that knows a finished request of random tokens and has room for a few others."""
    drafter = suffix_drafter(shared_tokens=80)
    text = np.random.default_rng(11).integers(0, vocab_size, 40).astype(np.int32)
    return drafter.with_finished_text(jax.jit(type(drafter).remember)(drafter, text, 40))


def ensemble_drafter(network: ModelDrafter | EagleDrafter, vocab_size: int = VOCAB) -> EnsembleDrafter:
    """Returns an ensemble of prompt lookup, a retrieval datastore with a confidence threshold, and a network."""
    return EnsembleDrafter((NgramDrafter(3, 2), retrieval_drafter(vocab_size, min_confidence=0.4), network))
