"""The EAGLE-3 head: a small decoder on hidden states of several layers of the target, and its drafter."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from bass_jax.drafters.eagle.drafter import EagleDrafter, EagleState
from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.models import kv_cache as kv
from bass_jax.models import rotary
from bass_jax.models.attention import Attention, LayerOutput
from bass_jax.models.decoder import ForwardOutput, Layer
from bass_jax.models.kv_cache import KVCache, PagedCache, join_layers, split_layers
from bass_jax.models.mlp import MLP
from bass_jax.models.model_config import DenseMLP, LayerConfig, ModelConfig, NormConfig
from bass_jax.models.norm import Normed, apply_norm, declare_norm, norm_for_projections
from bass_jax.models.parameters import declare
from bass_jax.models.weights import declare_weight, embed, multiply, product
from bass_jax.typing import Array, Float, Int, Key, Params


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """What an EAGLE-3 head has besides its layers.

    Attributes:
        hidden_layers: the hidden states of the target that it reads, as in `bass_jax.models.Model.forward`.
        target_width: D of the target.
        norm_before_residual: whether the residual stream of the first layer starts from the normalized hidden state.
        norm_before_fc: whether the joined hidden states are normalized before they are projected.
        fc_norm: whether each of the hidden states is normalized before they are joined.
        norm_output: whether a draft reads the head's output after the final norm, not before it.
        mask_token_id: the token read at positions that are not drafted yet; None for a head that drafts one token per
            pass. See `bass_jax.drafters.eagle.p_eagle`.
    """

    hidden_layers: tuple[int, ...]
    target_width: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None

    def __post_init__(self):
        if not self.hidden_layers:
            raise ValueError("hidden_layers=(): expected at least one layer")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("fc_norm=True: expected False with norm_before_fc=True")

    def network(self, config: ModelConfig) -> "Eagle3Network":
        """Returns the network of a head whose layers have this configuration."""
        return Eagle3Network(config, self)


class FirstLayer(nn.Module):
    """The first layer: its attention reads the token's embedding joined with the hidden state.

    Attributes:
        config: of the decoder.
        layer: of this layer.
        norm_before_residual: see `Eagle3Config`.
    """

    config: ModelConfig
    layer: LayerConfig
    norm_before_residual: bool

    @nn.compact
    def __call__(self, embedded, x, positions, angles, keys, values) -> LayerOutput:
        """Returns the residual stream and the new cache for embeddings and hidden states, both ``[B, T, D]``."""
        config, norm = self.config, self.layer.norm
        embedded = apply_norm(norm, embedded, declare_norm(self, "attention_norm", norm, config.width))
        normed = apply_norm(norm, x, declare_norm(self, "hidden_norm", norm, config.width))
        joined = Normed(jnp.concatenate([embedded, normed], axis=-1), None)
        out = Attention(config, self.layer.attention, name="attention")(joined, positions, angles, keys, values)
        x = (normed if self.norm_before_residual else x) + out.x
        y = norm_for_projections(norm, x, declare_norm(self, "mlp_norm", norm, config.width))
        assert isinstance(self.layer.mlp, DenseMLP)
        return out._replace(x=x + MLP(config, self.layer.mlp, name="mlp")(y))


class Eagle3Network(nn.Module):
    """The network of an EAGLE-3 head.

    Attributes:
        config: of the decoder; `ModelConfig.hidden_width` is its width.
        head: the rest.
    """

    config: ModelConfig
    head: Eagle3Config

    def setup(self):
        """Declares the tensors outside the layers, and the layers."""
        config, head = self.config, self.head
        D, joined = config.width, len(head.hidden_layers) * head.target_width
        self.embedding = declare_weight(self, "embedding", (config.vocab_size, D), ("vocab", "embed"))
        self.fc = declare(self, "fc", (D, joined), ("embed", None))
        if head.norm_before_fc:
            self.input_norm = declare_norm(self, "input_norm", self._norm, joined, axis=None)
        if head.fc_norm:
            names = [f"fc_norm_{index}" for index in range(len(head.hidden_layers))]
            self.fc_norms = [declare_norm(self, name, self._norm, head.target_width, axis=None) for name in names]
        if head.mask_token_id is not None:
            self.mask_hidden = declare(self, "mask_hidden", (joined,), (None,))
        first = FirstLayer(config, config.layers[0], head.norm_before_residual, name="layer_0")
        rest = [Layer(config, layer, name=f"layer_{i + 1}") for i, layer in enumerate(config.layers[1:])]
        self.layers = [first, *rest]
        self.final_norm = declare_norm(self, "final_norm", self._norm, D)
        vocab_size = config.output_vocab_size or config.vocab_size
        self.output_head = declare_weight(self, "head", (vocab_size, D), ("vocab", "embed"))

    def project(self, hidden: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        """Projects the joined hidden states of the target to the width of the head."""
        if self.head.norm_before_fc:
            hidden = apply_norm(self._norm, hidden, self.input_norm)
        if self.head.fc_norm:
            parts = jnp.split(hidden, len(self.fc_norms), axis=-1)
            normed = [apply_norm(self._norm, part, norm) for part, norm in zip(parts, self.fc_norms, strict=True)]
            hidden = jnp.concatenate(normed, axis=-1)
        return product(hidden, self.fc)

    def projected_mask(self) -> Float[Array, "D"]:
        """Returns the projection of the learned hidden state of positions that are not drafted yet."""
        return self.project(self.mask_hidden[None, None])[0, 0]

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache | PagedCache | None,
        hidden: Float[Array, "B T D"],
    ) -> ForwardOutput:
        """Runs the layers; `ForwardOutput.hidden` is their output before the final norm.

        Without a cache the tokens are whole sequences, and the pass can be differentiated.
        """
        embedded = embed(self.embedding, tokens, self.config.dtype)
        inputs, outputs = self.first_inputs(embedded, hidden.astype(embedded.dtype)), []
        nothing = (None,) * len(self.layers)
        cached = (nothing, nothing) if cache is None else split_layers(cache)
        for index, (layer, keys, values) in enumerate(zip(self.layers, *cached, strict=True)):
            attention = self.config.layers[index].attention
            assert attention.rope is not None
            angles = rotary.angles(positions, attention.rope, attention.head_dim, self.config.context)
            out = layer(*inputs, positions, angles, keys, values)
            inputs = (out.x,)
            outputs.append(out)
        keys, values = (tuple(getattr(out, name) for out in outputs) for name in ("keys", "values"))
        return ForwardOutput(None, join_layers(cache, keys, values), outputs[-1].x)

    def first_inputs(self, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T D"]) -> tuple[Array, ...]:
        """Returns what the first layer reads: the embeddings, and the projected hidden states."""
        return embedded, hidden

    def next_hidden(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns what the next draft reads in place of the target's hidden states."""
        return apply_norm(self._norm, hidden, self.final_norm) if self.head.norm_output else hidden

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T O"]:
        """Computes the logits of `ForwardOutput.hidden`, float32."""
        return multiply(apply_norm(self._norm, hidden, self.final_norm), self.output_head, dtype=jnp.float32)

    def __call__(self, tokens, positions, cache, hidden) -> ForwardOutput:
        """Runs a whole pass on hidden states of the target."""
        if self.head.mask_token_id is not None:
            self.projected_mask()
        output = self.hidden_states(tokens, positions, cache, self.project(hidden))
        return output._replace(logits=self.logits(output.hidden))

    @property
    def _norm(self) -> NormConfig:
        assert self.config.final_norm is not None
        return self.config.final_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Eagle3Model:
    """An EAGLE-3 or MTP head with its parameters. Its methods are those of `bass_jax.models.Model` that drafting uses.

    Attributes:
        params: of `Eagle3Network`. The embedding may be the target's array.
        config: of the decoder; static.
        head: the rest; static.
        output_ids: ``[O]`` int32, the token of each column of a reduced vocabulary; None for the whole vocabulary.
    """

    params: Params
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    head: Eagle3Config = dataclasses.field(metadata={"static": True})
    output_ids: Any = None  # an array or None; `Any` because JAX rebuilds the tree with other objects

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty cache of `capacity` slots for `batch` rows."""
        return kv.allocate(self.config.cache_shapes, batch, capacity, jnp.dtype(self.config.dtype))

    def project(self, hidden: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        """Projects the joined hidden states of the target; `hidden_states` reads the result."""
        return self._apply(hidden, method="project")

    def projected_mask(self) -> Float[Array, "D"]:
        """Returns the projected hidden state of positions that are not drafted yet."""
        return self._apply(method="projected_mask")

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache | PagedCache | None,
        hidden: Float[Array, "B T D"],
    ) -> ForwardOutput:
        """Runs one pass over tokens and the projected hidden states at the positions before them.

        There is no hidden state before position 0, and the head was trained without this position. Position p therefore
        has slot p - 1 of the cache, and the token at position 0 is not read. Its output is meaningless.

        Args:
            tokens: ``[B, T]`` int32.
            positions: ``[B, T]`` int32, as in `bass_jax.models.Model.forward`.
            cache: contains every earlier position of each row; None for whole sequences from position 0 on.
            hidden: ``[B, T, D]``.
        """
        if cache is None:
            output = self._apply(tokens[:, 1:], positions[:, 1:] - 1, None, hidden[:, 1:], method="hidden_states")
            return output._replace(hidden=jnp.pad(output.hidden, ((0, 0), (1, 0), (0, 0))))
        num_tokens = tokens.shape[1]
        # A pass reads consecutive slots from its first column on, so a row that starts at position 0 moves up by one.
        offset = (positions[:, :1] == 0).astype(jnp.int32)
        columns = jnp.arange(num_tokens) + offset
        rows, found = jnp.arange(tokens.shape[0])[:, None], jnp.minimum(columns, num_tokens - 1)
        is_read = (columns < num_tokens) & (positions[rows, found] < cache.capacity)
        slots = jnp.where(is_read, positions[rows, found] - 1, cache.capacity)
        output = self._apply(tokens[rows, found], slots, cache, hidden[rows, found], method="hidden_states")
        return output._replace(hidden=output.hidden[rows, jnp.maximum(jnp.arange(num_tokens) - offset, 0)])

    def next_hidden(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns what the next draft reads in place of the target's hidden states."""
        return self._apply(hidden, method="next_hidden")

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T O"]:
        """Computes the logits, float32."""
        return self._apply(hidden, method="logits")

    def _apply(self, *arguments: Any, method: str) -> Any:
        return _network(self.config, self.head).apply({"params": self.params}, *arguments, method=method)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Eagle3Drafter(EagleDrafter):
    """Drafts autoregressively with an EAGLE-3 head, or an MTP head (`bass_jax.drafters.eagle.mtp`).

    The state holds the projected hidden states, D values per position. At its own drafts the head reads its last output
    in their place. A row of one token has no hidden state yet, so it drafts nothing.

    Attributes:
        model: an `Eagle3Model`.
        vocab_size: V of the target.
        min_confidence: as in `ModelDrafter`.

    Source: Li et al. 2025 (EAGLE-3, arXiv 2503.01840).
    """

    model: Any

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Those of the head."""
        return self.model.head.hidden_layers

    def propose(
        self, state: EagleState, context: DraftContext, draft_len: int, *, is_sampled: bool
    ) -> tuple[Proposal, EagleState]:
        """Drafts up to `draft_len` tokens per row, one pass per token."""
        return super().propose(state, without_short_rows(context), draft_len, is_sampled=is_sampled)

    def _kept(self, hidden: Float[Array, "B T E"]) -> Float[Array, "B T D"]:
        return self.model.project(hidden)


def without_short_rows(context: DraftContext) -> DraftContext:
    """Returns a context in which rows of one token want no drafts."""
    return context._replace(num_wanted=jnp.where(context.lengths > 1, context.num_wanted, 0))


def init_eagle3_params(config: ModelConfig, head: Eagle3Config, key: Key[Array, ""]) -> Params:
    """Returns random parameters, without their logical axes."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    hidden = jnp.zeros((1, 1, len(head.hidden_layers) * head.target_width), config.dtype)
    cache = kv.allocate(config.cache_shapes, 1, 8, jnp.dtype(config.dtype))
    variables = _network(config, head).init(key, tokens, tokens, cache, hidden)
    return nn.meta.unbox(variables["params"])


def eagle3_param_shapes(config: ModelConfig, head: Eagle3Config) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of every parameter, by its path."""
    key = jax.eval_shape(jax.random.key, 0)
    shapes = jax.eval_shape(functools.partial(init_eagle3_params, config, head), key)
    return flatten_dict(shapes, sep="/")  # type: ignore[return-value]


@functools.cache
def _network(config: ModelConfig, head: Eagle3Config) -> Eagle3Network:
    return head.network(config)
