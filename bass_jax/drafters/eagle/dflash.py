"""DFlash: a head that drafts a whole block of tokens in one pass, and its drafter."""

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from bass_jax.config import DRAFT_LEN_BUCKETS, draft_len_bucket
from bass_jax.drafters.autoregressive import choose_drafts, tokens_at
from bass_jax.drafters.protocols import DraftContext, Proposal
from bass_jax.models import kv_cache as kv
from bass_jax.models import rotary
from bass_jax.models.attention import Attention, LayerOutput
from bass_jax.models.kv_cache import KVCache, LayerKV, PagedCache, PagedKV, append, join_layers, split_layers
from bass_jax.models.mesh import replicate_on_mesh
from bass_jax.models.mlp import MLP
from bass_jax.models.model_config import DenseMLP, LayerConfig, ModelConfig, NormConfig
from bass_jax.models.norm import Normed, apply_norm, declare_norm, norm_for_projections
from bass_jax.models.parameters import declare
from bass_jax.models.weights import declare_weight, embed, multiply, product
from bass_jax.typing import Array, Bool, Float, Int, Key, Params
from kernels_pallas.attention.packing import gather_pages, pack_rows, unpack_rows


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """What a DFlash head has besides its layers.

    Attributes:
        hidden_layers: the hidden states of the target that it reads, as in `bass_jax.models.Model.forward`.
        target_width: D of the target, which is also that of the head.
        block_size: number of tokens of a block, the last committed token included. Every pass reads a whole block.
        mask_token_id: the token read at all positions of the block but the first.
        sample_from_anchor: whether the output at a position predicts the token after it, as in other models. If False,
            it predicts the token at the position itself, and the output at the first position is not used.
        sliding_window_non_causal: whether positions see later positions of the block in layers with a window too. In
            layers without a window they always do.
    """

    hidden_layers: tuple[int, ...]
    target_width: int
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = False

    def __post_init__(self):
        if not self.hidden_layers:
            raise ValueError("hidden_layers=(): expected at least one layer")
        if self.max_drafts < 1:
            raise ValueError(f"block_size={self.block_size}: expected a block with at least one draft")

    @property
    def max_drafts(self) -> int:
        """The number of drafts of a block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


class BlockAttention(Attention):
    """The attention of a block to the context and to the block itself, or the projection of new context."""

    @nn.compact
    def __call__(self, x, angles, keys, values, seen=None, positions=None) -> LayerOutput:  # type: ignore[override]
        """Attends from a block, or writes keys and values of the context to the cache.

        Args:
            x: a `Normed` input, ``[B, T, D]``.
            angles: cosines and sines of the positions.
            keys: the layer's cache of the context.
            values: likewise.
            seen: which slots of the cache a block sees, ``[B, S]``, and which of its positions each position sees,
                ``[T, T]``; None to write.
            positions: ``[B, T]`` int32, the slots to write.
        """
        if seen is None:
            assert positions is not None
            _, new_keys, new_values, _ = self._project(x, angles, has_queries=False)
            keys, values = append(keys, new_keys, positions), append(values, new_values, positions)
            return LayerOutput(x.values, keys, values, new_keys, new_values)
        queries, new_keys, new_values, _ = self._project(x, angles)
        context = tuple(_dense(one, seen[0]) for one in (keys, values))
        block = new_keys.swapaxes(1, 2), new_values.swapaxes(1, 2)
        attended = _attend(queries, context, block, seen, self.attention.scale)
        return LayerOutput(self._output(attended), keys, values, new_keys, new_values)


def _dense(cached: LayerKV, is_seen: Bool[Array, "B S"]) -> Float[Array, "B K S H"]:
    """Returns the keys or values of the context. What another row left in a page is 0, because it may be NaN."""
    assert not isinstance(cached, kv.Int8KV)
    if not isinstance(cached, PagedKV):
        return cached
    assert not isinstance(cached.pages, kv.Int8KV)
    return jnp.where(is_seen[:, None, :, None], gather_pages(cached.pages, cached.tables), 0)


def _attend(queries: Float[Array, "B T N H"], context, block, seen, scale: float | None) -> Float[Array, "B T N H"]:
    """Returns the attention to the context and to the block, with one softmax in float32.

    The scores are joined and not the keys, because joining those would copy the cache.

    Args:
        queries: of the block.
        context: keys and values ``[B, K, S, H]``.
        block: keys and values ``[B, K, T, H]``.
        seen: as in `BlockAttention`.
        scale: factor on the scores; None means ``H ** -0.5``.
    """
    num_tokens, num_heads, head_dim = queries.shape[1:]
    num_kv_heads, num_slots = context[0].shape[1:3]
    rows = pack_rows(queries, num_kv_heads)
    factor = head_dim**-0.5 if scale is None else scale
    # The query heads of a kv head are neighboring rows.
    masks = seen[0][:, None, None], jnp.repeat(seen[1], num_heads // num_kv_heads, axis=0)
    scores = [
        jnp.where(
            mask, factor * jnp.einsum("bkmh,bksh->bkms", rows, keys, preferred_element_type=jnp.float32), -jnp.inf
        )
        for mask, (keys, _) in zip(masks, (context, block), strict=True)
    ]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(queries.dtype)
    parts = weights[..., :num_slots], weights[..., num_slots:]
    of_context, of_block = (
        jnp.einsum("bkms,bksh->bkmh", part, values, preferred_element_type=jnp.float32)
        for part, (_, values) in zip(parts, (context, block), strict=True)
    )
    return unpack_rows((of_context + of_block).astype(queries.dtype), num_tokens)


class DFlashLayer(nn.Module):
    """A layer of a DFlash head: attention and MLP, each with a normalized input.

    Attributes:
        config: of the decoder.
        layer: of this layer.
    """

    config: ModelConfig
    layer: LayerConfig

    @nn.compact
    def __call__(self, x, angles, keys, values, seen=None, positions=None) -> LayerOutput:
        """Returns the residual stream of a block, or the cache with new context; see `BlockAttention`.

        The context is the same for all layers, and is not normalized here.
        """
        config, norm = self.config, self.layer.norm
        attention = BlockAttention(config, self.layer.attention, name="attention")
        if seen is None:
            return attention(Normed(x, None), angles, keys, values, positions=positions)
        normed = norm_for_projections(norm, x, declare_norm(self, "attention_norm", norm, config.width))
        out = attention(normed, angles, keys, values, seen)
        x = x + out.x
        y = norm_for_projections(norm, x, declare_norm(self, "mlp_norm", norm, config.width))
        assert isinstance(self.layer.mlp, DenseMLP)
        return out._replace(x=x + MLP(config, self.layer.mlp, name="mlp")(y))


class DFlashNetwork(nn.Module):
    """The network of a DFlash head.

    Attributes:
        config: of the decoder.
        head: the rest.
    """

    config: ModelConfig
    head: DFlashConfig

    def setup(self):
        """Declares the tensors outside the layers, and the layers."""
        config, head, D = self.config, self.head, self.config.width
        self.embedding = declare_weight(self, "embedding", (config.vocab_size, D), ("vocab", "embed"))
        self.fc = declare(self, "fc", (D, len(head.hidden_layers) * head.target_width), ("embed", None))
        self.hidden_norm = declare_norm(self, "hidden_norm", self._norm, D)
        self.layers = [DFlashLayer(config, layer, name=f"layer_{i}") for i, layer in enumerate(config.layers)]
        self.final_norm = declare_norm(self, "final_norm", self._norm, D)
        vocab_size = config.output_vocab_size or config.vocab_size
        self.output_head = declare_weight(self, "head", (vocab_size, D), ("vocab", "embed"))

    def store(
        self, hidden: Float[Array, "B T E"], positions: Int[Array, "B T"], cache: KVCache | PagedCache
    ) -> KVCache | PagedCache:
        """Returns the cache with the keys and values of the target's hidden states at `positions`."""
        context = apply_norm(self._norm, product(hidden, self.fc), self.hidden_norm)
        return self._run(context, positions, cache)[1]

    def hidden_states(
        self,
        tokens: Int[Array, "B"],
        positions: Int[Array, "B"],
        cache: KVCache | PagedCache,
        num_known: Int[Array, "B"],
    ) -> Float[Array, "B W D"]:
        """Runs a block of W tokens; returns its hidden states before the final norm."""
        config, slots = self.config, jnp.arange(self.head.block_size)
        block = jnp.where(slots == 0, tokens[:, None], self.head.mask_token_id)
        x = embed(self.embedding, block, config.dtype)
        return self._run(x, positions[:, None] + slots, cache, num_known)[0]

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T O"]:
        """Computes the logits, float32; on a mesh every device gets all of them."""
        normed = apply_norm(self._norm, hidden, self.final_norm)
        return replicate_on_mesh(multiply(normed, self.output_head, dtype=jnp.float32))

    def __call__(self, hidden, positions, cache) -> Array:
        """Stores hidden states and runs the block after them."""
        cache = self.store(hidden, positions, cache)
        num_known = positions.max(axis=1) + 1
        return self.logits(self.hidden_states(jnp.zeros_like(num_known), num_known, cache, num_known))

    def _run(self, x, positions, cache, num_known=None):
        """Runs the layers on a block after `num_known` positions, or stores context."""
        outputs = []
        for index, (layer, keys, values) in enumerate(zip(self.layers, *split_layers(cache), strict=True)):
            attention = self.config.layers[index].attention
            assert attention.rope is not None
            angles = rotary.angles(positions, attention.rope, attention.head_dim, self.config.context)
            if num_known is not None:
                seen = self._seen(attention.window, positions, num_known, keys.shape[2])
                out = layer(x, angles, keys, values, seen)
                x = out.x
            else:
                out = layer(x, angles, keys, values, positions=positions)
            outputs.append(out)
        keys, values = (tuple(getattr(out, name) for out in outputs) for name in ("keys", "values"))
        return x, join_layers(cache, keys, values)

    def _seen(
        self, window: int | None, positions: Int[Array, "B W"], num_known: Int[Array, "B"], num_slots: int
    ) -> tuple[Bool[Array, "B S"], Bool[Array, "W W"]]:
        """Returns which slots of the context a block sees, and which positions of the block its positions see.

        The window of the context begins so many positions before the block, for all positions of the block.
        """
        slots, anchors = jnp.arange(num_slots), positions[:, :1]
        is_context = slots < jnp.minimum(num_known[:, None], anchors)
        if window is not None:
            is_context &= slots >= anchors - window
        of_block = jnp.ones((positions.shape[1],) * 2, bool)
        is_causal = window is not None and not self.head.sliding_window_non_causal
        return is_context, jnp.tril(of_block) if is_causal else of_block

    @property
    def _norm(self) -> NormConfig:
        assert self.config.final_norm is not None
        return self.config.final_norm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DFlashModel:
    """A DFlash head with its parameters.

    Attributes:
        params: of `DFlashNetwork`. The embedding is the target's array, and so is the head of a whole vocabulary.
        config: of the decoder; static.
        head: the rest; static.
        output_ids: ``[O]`` int32, the token of each column of a reduced vocabulary; None for the whole vocabulary.
    """

    params: Params
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    head: DFlashConfig = dataclasses.field(metadata={"static": True})
    output_ids: Any = None  # an array or None; `Any` because JAX rebuilds the tree with other objects

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty cache of `capacity` slots for `batch` rows."""
        return kv.allocate(self.config.cache_shapes, batch, capacity, jnp.dtype(self.config.dtype))

    def store(
        self, hidden: Float[Array, "B T E"], positions: Int[Array, "B T"], cache: KVCache | PagedCache
    ) -> KVCache | PagedCache:
        """Returns the cache with the keys and values of the target's hidden states.

        Args:
            hidden: ``[B, T, E]``, of `DFlashConfig.hidden_layers`.
            positions: ``[B, T]`` int32, distinct in a row; those at or past the cache's capacity are dropped.
            cache: any.
        """
        return self._apply(hidden, positions, cache, method="store")

    def hidden_states(
        self,
        tokens: Int[Array, "B"],
        positions: Int[Array, "B"],
        cache: KVCache | PagedCache,
        num_known: Int[Array, "B"],
    ) -> Float[Array, "B W D"]:
        """Runs the block that begins with `tokens`, and returns its hidden states.

        Args:
            tokens: ``[B]`` int32, the last committed token of each row.
            positions: ``[B]`` int32, their positions.
            cache: the context.
            num_known: ``[B]`` int32, number of leading positions whose hidden states were stored; others are not read.
        """
        return self._apply(tokens, positions, cache, num_known, method="hidden_states")

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T O"]:
        """Computes the logits, float32."""
        return self._apply(hidden, method="logits")

    def _apply(self, *arguments: Any, method: str) -> Any:
        return _network(self.config, self.head).apply({"params": self.params}, *arguments, method=method)


class DFlashState(NamedTuple):
    """The keys and values of the target's hidden states."""

    cache: KVCache | PagedCache
    num_known: Array  # [B] int32, leading positions that the cache holds; after a commit all tokens except the last


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DFlashDrafter:
    """Drafts a block of tokens in one pass of a DFlash head.

    The block is the last committed token, then mask tokens. Its positions see the target's hidden states at all tokens
    before it, and each other. The distribution of a draft therefore does not depend on the drafts before it.

    The cache holds keys and values of the target's hidden states only, and they are written when the target's pass
    returns them. A rejection lowers their number. Nothing has to be read again, also after steps without drafts.

    Attributes:
        model: a `DFlashModel`.
        vocab_size: V of the target, the width of the proposed distributions.
        min_confidence: as in `ModelDrafter`.

    Source: DFlash (block diffusion drafting, arXiv 2602.06036), as in `speculators` 0.9.
    """

    model: Any
    vocab_size: int = dataclasses.field(metadata={"static": True})
    min_confidence: Any = None  # a number or an array; `Any` because JAX rebuilds the tree with other objects

    @property
    def reads_hidden_states(self) -> bool:
        """Always True."""
        return True

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Those of the head."""
        return self.model.head.hidden_layers

    @property
    def max_draft_len(self) -> int:
        """The number of drafts of a block."""
        return self.model.head.max_drafts

    def init(self, tokens: Array, lengths: Array, hidden: Array | None = None) -> DFlashState:
        """Stores the target's hidden states at all but the last token of each row.

        Raises:
            ValueError: if `hidden` is None.
        """
        if hidden is None:
            raise ValueError("hidden=None: expected the target's hidden states, because the head reads them")
        num_rows, capacity = tokens.shape
        positions = jnp.arange(capacity)
        positions = jnp.where(positions < lengths[:, None] - 1, positions, capacity)
        return self.observe(self.start(num_rows, capacity), hidden, positions)

    def start(self, num_rows: int, capacity: int) -> DFlashState:
        """Returns an empty cache."""
        return DFlashState(self.model.init_cache(num_rows, capacity), jnp.zeros(num_rows, jnp.int32))

    def read(self, state: DFlashState, tokens: Array, positions: Array, hidden: Array) -> DFlashState:
        """Stores the hidden states of a chunk of the prompts."""
        return self.observe(state, hidden, positions)

    def observe(self, state: DFlashState, hidden: Array, positions: Array) -> DFlashState:
        """Stores the hidden states of a target pass."""
        cache = self.model.store(hidden, positions, state.cache)
        num_seen = jnp.where(positions < cache.capacity, positions + 1, 0).max(axis=1).astype(jnp.int32)
        return DFlashState(cache, jnp.where(num_seen > 0, num_seen, state.num_known))

    def propose(
        self, state: DFlashState, context: DraftContext, draft_len: int, *, is_sampled: bool
    ) -> tuple[Proposal, DFlashState]:
        """Drafts up to `draft_len` tokens per row in one pass.

        The bucket of the largest possible draft length is accepted too, and its remaining positions are not drafted.

        Raises:
            ValueError: during tracing, if a block has fewer than `draft_len` drafts.
        """
        head = self.model.head
        if draft_len > draft_len_bucket(min(head.max_drafts, DRAFT_LEN_BUCKETS[-1])):
            raise ValueError(
                f"draft_len={draft_len}: expected at most {head.max_drafts}, the drafts of a block of "
                f"block_size={head.block_size}"
            )
        last = context.lengths - 1
        anchors = tokens_at(context, last[:, None])[:, 0]
        hidden = self.model.hidden_states(anchors, last, state.cache, state.num_known)
        of_drafts = hidden[:, head.block_size - head.max_drafts :][:, :draft_len]
        of_drafts = jnp.pad(of_drafts, ((0, 0), (0, draft_len - of_drafts.shape[1]), (0, 0)))
        context = context._replace(num_wanted=jnp.minimum(context.num_wanted, head.max_drafts))
        return choose_drafts(self, of_drafts, context, is_sampled=is_sampled), state

    def commit(self, state: DFlashState, lengths: Array) -> DFlashState:
        """Drops the hidden states at rejected drafts."""
        return state._replace(num_known=jnp.minimum(state.num_known, lengths - 1))


def init_dflash_params(config: ModelConfig, head: DFlashConfig, key: Key[Array, ""]) -> Params:
    """Returns random parameters, without their logical axes."""
    hidden = jnp.zeros((1, 1, len(head.hidden_layers) * head.target_width), config.dtype)
    cache = kv.allocate(config.cache_shapes, 1, 8, jnp.dtype(config.dtype))
    arguments = hidden, jnp.zeros((1, 1), jnp.int32), cache
    return nn.meta.unbox(_network(config, head).init(key, *arguments)["params"])


def dflash_param_shapes(config: ModelConfig, head: DFlashConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of every parameter, by its path."""
    key = jax.eval_shape(jax.random.key, 0)
    shapes = jax.eval_shape(functools.partial(init_dflash_params, config, head), key)
    return flatten_dict(shapes, sep="/")  # type: ignore[return-value]


@functools.cache
def _network(config: ModelConfig, head: DFlashConfig) -> DFlashNetwork:
    return DFlashNetwork(config, head)
