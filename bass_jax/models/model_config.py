"""The configuration of a model: a few fields, and a `LayerConfig` per layer."""

import dataclasses
import math
import typing
from typing import Literal

from bass_jax.runtime.checks import check_choice, check_integer, check_kind, check_number


def _check_optional_integers(config: object, *names: str) -> None:
    for name in names:
        if (value := getattr(config, name)) is not None:
            check_integer(name, value, 1)


def _check_choices(config: object, *names: str) -> None:
    for name in names:
        check_choice(name, getattr(config, name), typing.get_args(type(config).__annotations__[name]))


def _check_softcap(name: str, value: float | None) -> None:
    if value is not None and not check_number(name, value) > 0:
        raise ValueError(f"{name}={value!r}: expected a positive number")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies for contexts longer than that of the first training.

    Attributes:
        kind: ``"linear"`` divides every frequency by `factor`. ``"llama3"`` divides the low frequencies, keeps the high
            ones and interpolates in between (Llama 3.1). ``"yarn"`` interpolates over lanes instead of wavelengths, and
            scales the rotated queries and keys (Peng et al., arXiv 2309.00071). ``"longrope"`` divides each frequency
            by its own factor: `long_factors` in a model whose `ModelConfig.context` exceeds `original_context`,
            otherwise `short_factors` (Ding et al., arXiv 2402.13753). The choice does not depend on the tokens, so rows
            do not depend on each other.
        factor: at least 1.
        low_freq_factor: llama3: wavelengths above ``original_context / low_freq_factor`` are divided.
        high_freq_factor: llama3: wavelengths below ``original_context / high_freq_factor`` are kept.
        original_context: llama3, yarn, longrope: context of the first training, in tokens.
        beta_fast: yarn: lanes with more rotations than this in `original_context` are kept.
        beta_slow: yarn: lanes with fewer rotations than this are divided.
        attention_factor: yarn, longrope: factor on the rotated queries and keys; None means ``0.1 log(factor) + 1``
            for yarn, and ``sqrt(1 + log(factor) / log(original_context))`` for longrope.
        is_truncated: yarn: round the first interpolated lane down and the last one up to integers.
        short_factors: longrope: a factor per rotated pair of lanes.
        long_factors: longrope: likewise.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    is_truncated: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def __post_init__(self):
        if self.kind not in ("linear", "llama3", "yarn", "longrope"):
            raise ValueError(f"rope_scaling.kind={self.kind!r}: expected 'linear', 'llama3', 'yarn' or 'longrope'")
        if self.factor < 1:
            raise ValueError(f"rope_scaling.factor={self.factor}: expected at least 1")
        for name in ("original_context", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"rope_scaling.{name}={getattr(self, name)}: expected a positive number")
        if self.kind == "yarn" and self.attention_factor is None:
            object.__setattr__(self, "attention_factor", 0.1 * math.log(self.factor) + 1.0)
        if self.kind == "longrope":
            for name in ("short_factors", "long_factors"):
                if not all(check_number(f"rope_scaling.{name}", factor) > 0 for factor in getattr(self, name)):
                    raise ValueError(f"rope_scaling.{name}={getattr(self, name)}: expected positive numbers")
            if self.attention_factor is None:
                if self.factor > 1 and self.original_context <= 1:
                    raise ValueError(f"rope_scaling.original_context={self.original_context}: expected more than 1")
                share = math.log(self.factor) / math.log(self.original_context) if self.factor > 1 else 0.0
                object.__setattr__(self, "attention_factor", math.sqrt(1 + share))


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary positions of a layer.

    Attributes:
        base: base of the frequencies.
        rotary_dim: number of leading lanes of a head that are rotated; None means all.
        scaling: see `RopeScaling`.
    """

    base: float = 10000.0
    rotary_dim: int | None = None
    scaling: RopeScaling | None = None

    def __post_init__(self):
        if check_number("rope_base", self.base) <= 1:
            raise ValueError(f"rope_base={self.base}: expected a number above 1")
        _check_optional_integers(self, "rotary_dim")


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """A norm over the width of the residual stream or over a head.

    Attributes:
        kind: ``"rms"``, or ``"layer"``, which subtracts the mean.
        eps: added to the variance.
        offset: added to the learned scale of an RMS norm (1 in Gemma).
        has_bias: whether a layer norm has biases.
    """

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    offset: float = 0.0
    has_bias: bool = True

    def __post_init__(self):
        _check_choices(self, "kind")


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Projections of latent attention, whose cache holds compressed keys and values (DeepSeek-V2, arXiv 2405.04434).

    Attributes:
        key_dim: number of lanes of each head's query and key without rotary positions.
        value_dim: number of lanes of each head's value.
        query_rank: width that the queries are compressed to; None if they are not compressed.
        norm: of the compressed queries, and of the compressed keys and values.
        is_interleaved: whether checkpoints store rotated pairs as neighboring lanes. Here they are two halves.
    """

    key_dim: int
    value_dim: int
    query_rank: int | None = None
    norm: NormConfig = NormConfig(eps=1e-6)
    is_interleaved: bool = True

    def __post_init__(self):
        for name in ("key_dim", "value_dim"):
            check_integer(name, getattr(self, name), 1)
        _check_optional_integers(self, "query_rank")


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Grouped-query attention, or latent attention.

    Latent attention has one key-value head, which holds a rotated key of ``rope.rotary_dim`` lanes and then the vector
    that all keys and values are compressed to. The cache holds no values, because they are lanes of the keys.

    Attributes:
        num_heads: N.
        num_kv_heads: K; divides N.
        head_dim: H.
        rope: rotary positions; None for none.
        window: number of positions that a query sees, itself included; None for all.
        chunk: c: a query at position p sees positions from ``p // c * c`` on (Llama 4); None for all.
        has_bias: whether the query, key and value projections have biases, in latent attention the compressing ones.
        has_out_bias: whether the output projection has a bias; None means the same as `has_bias`.
        qk_norm: norm of the queries and keys; None for none.
        qk_norm_span: what `qk_norm` normalizes before the rotation: ``"head"`` each head with scales shared by all
            heads (Qwen3, Gemma 3), ``"each_head"`` each head with scales of its own (Cohere), ``"all_heads"`` all heads
            at once (OLMo). ``"rotated_head"`` normalizes each head after the rotation, without scales (Llama 4).
        scale: factor on the scores; None means ``head_dim ** -0.5``.
        softcap: c: a scaled score x becomes ``c tanh(x / c)`` before masking; None for no cap.
        has_sinks: whether each head has a learned score that takes a share of the attention and adds nothing (gpt-oss).
        has_output_gate: whether each head's result is multiplied by the sigmoid of another projection (Qwen3-Next).
        temperature_scale: a: queries at position p are multiplied by ``1 + a log(1 + floor((p + 1) / t))`` with t the
            `temperature_step` (Nakanishi, arXiv 2501.19399); None for no factor.
        temperature_step: see `temperature_scale`.
        latent: projections of latent attention; None for grouped-query attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None = RopeConfig()
    window: int | None = None
    chunk: int | None = None
    has_bias: bool = False
    has_out_bias: bool | None = None
    qk_norm: NormConfig | None = None
    qk_norm_span: Literal["head", "each_head", "all_heads", "rotated_head"] = "head"
    scale: float | None = None
    softcap: float | None = None
    has_sinks: bool = False
    has_output_gate: bool = False
    temperature_scale: float | None = None
    temperature_step: int = 8192
    latent: LatentConfig | None = None

    def __post_init__(self):
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            check_integer(name, getattr(self, name), 1)
        _check_optional_integers(self, "window", "chunk")
        check_integer("temperature_step", self.temperature_step, 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads}: expected a divisor of num_heads={self.num_heads}")
        if self.has_out_bias is None:
            object.__setattr__(self, "has_out_bias", self.has_bias)
        if self.rope is not None:
            name = "head_dim" if self.rope.rotary_dim is None else "rotary_dim"
            lanes = self.rope.rotary_dim or self.head_dim
            if lanes % 2 or lanes > self.head_dim:
                raise ValueError(f"{name}={lanes}: expected an even number, for rotary positions, at most head_dim")
            if (scaling := self.rope.scaling) is not None and scaling.kind == "longrope":
                for name, factors in (("short_factors", scaling.short_factors), ("long_factors", scaling.long_factors)):
                    if len(factors) != lanes // 2:
                        raise ValueError(f"rope_scaling.{name}: expected {lanes // 2} numbers, not {len(factors)}")
        _check_choices(self, "qk_norm_span")
        if self.qk_norm is not None and self.qk_norm.kind == "layer" and self.qk_norm.has_bias:
            raise ValueError("qk_norm.has_bias=True: expected a norm without biases")
        _check_softcap("attention_softcap", self.softcap)
        if self.latent is not None:
            check_kind("latent", self.latent, LatentConfig)
            if self.num_kv_heads != 1:
                raise ValueError(f"num_kv_heads={self.num_kv_heads}: expected 1 for latent attention")
            if self.rope is None or self.rope.rotary_dim is None or self.rope.rotary_dim >= self.head_dim:
                raise ValueError(f"rope={self.rope}: expected a rotary_dim below head_dim for latent attention")
            if self.scale is None:
                raise ValueError("scale=None: expected a number for latent attention")
            for name in ("qk_norm", "temperature_scale"):
                if (value := getattr(self, name)) is not None:
                    raise ValueError(f"{name}={value}: expected None for latent attention")
            for name in ("has_sinks", "has_output_gate"):
                if getattr(self, name):
                    raise ValueError(f"{name}=True: expected False for latent attention")

    @property
    def queries_per_kv_head(self) -> int:
        """R, the number of query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """K, and the numbers of lanes of a head's key and value in the cache."""
        return self.num_kv_heads, self.head_dim, self.head_dim if self.latent is None else 0

    def num_weights(self, width: int) -> int:
        """Returns the number of elements of the projections, without biases, for a residual stream of `width`."""
        N, H = self.num_heads, self.head_dim
        if self.latent is None:
            return width * (2 * (N + self.num_kv_heads) + self.has_output_gate * N) * H
        assert self.rope is not None and self.rope.rotary_dim is not None
        latent, rotated = self.latent, self.rope.rotary_dim
        rank, key = latent.query_rank, rotated + latent.key_dim
        queries = width * N * key if rank is None else rank * (width + N * key)
        up = N * (latent.key_dim + latent.value_dim) * (H - rotated)
        return queries + width * H + up + width * N * latent.value_dim


@dataclasses.dataclass(frozen=True)
class GatedDeltaConfig:
    """A recurrent layer with the gated delta rule; see `bass_jax.models.gated_delta`.

    Attributes:
        num_key_heads: K, the number of query heads and of key heads.
        num_value_heads: a multiple of K. Each has a state, and consecutive ones share a query head and a key head.
        key_dim: A, the number of lanes of a query and of a key.
        value_dim: V, the number of lanes of a value.
        kernel_size: W, the number of tokens that the convolution in front of the rule reads.
        activation: after the convolution.
        norm: of each head's result, whose gate is the SiLU of a projection of the input.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int = 4
    activation: Literal["silu", "relu", "gelu", "gelu_tanh"] = "silu"
    norm: NormConfig = NormConfig(eps=1e-6)

    def __post_init__(self):
        for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim", "kernel_size"):
            check_integer(name, getattr(self, name), 1)
        if self.num_value_heads % self.num_key_heads:
            found = f"num_value_heads={self.num_value_heads}"
            raise ValueError(f"{found}: expected a multiple of num_key_heads={self.num_key_heads}")
        _check_choices(self, "activation")

    @property
    def values_per_key(self) -> int:
        """R, the number of value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def num_lanes(self) -> int:
        """C, the lanes of the convolution per key head: a query, a key, and R values."""
        return 2 * self.key_dim + self.values_per_key * self.value_dim

    def num_weights(self, width: int) -> int:
        """Returns the number of elements of the projections for a residual stream of `width`."""
        values = self.num_value_heads * self.value_dim
        return width * (2 * self.num_key_heads * self.key_dim + 3 * values + 2 * self.num_value_heads)


@dataclasses.dataclass(frozen=True)
class DenseMLP:
    """An MLP that every token passes through.

    Attributes:
        width: F.
        activation: ``"silu"``, ``"relu"``, ``"gelu"`` or ``"gelu_tanh"``.
        is_gated: whether the activations are multiplied by a second projection.
        has_bias: whether the projections have biases.
    """

    width: int
    activation: Literal["silu", "relu", "gelu", "gelu_tanh"] = "silu"
    is_gated: bool = True
    has_bias: bool = False

    def __post_init__(self):
        check_integer("mlp_width", self.width, 1)
        _check_choices(self, "activation")

    @property
    def total_width(self) -> int:
        """Number of hidden units whose weights are stored."""
        return self.width


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts: gated MLPs, of which a router chooses a few for each token.

    A softmax over the chosen experts only is the same as ``"softmax"`` with `is_normalized`.

    Attributes:
        num_experts: E.
        num_active: number of experts of a token.
        width: F of each expert.
        activation: of the experts.
        score: how an expert's score is made of its logit: ``"softmax"`` over all experts, or ``"sigmoid"``.
        is_normalized: whether the scores of the chosen experts are divided by their sum. The scores are the factors on
            the experts' outputs.
        scales_input: whether the factors are on the experts' inputs instead (Llama 4).
        scale: another factor on the scores.
        has_choice_bias: whether a learned bias per expert is added to the scores for the choice of experts, but not to
            the factors (DeepSeek-V3).
        num_groups: number of groups of equally many experts.
        num_active_groups: experts are chosen from the so many groups with the largest scores.
        num_group_scores: the score of a group is the sum of its so many largest ones: 2 in DeepSeek-V3, 1 in V2.
        shared: an MLP that every token passes through, added to the experts; None for none.
        has_shared_gate: whether the output of `shared` is multiplied by the sigmoid of a projection of the input.
        has_bias: whether the router and the experts have biases.
        gate_limit: the gate g and the other projection u are limited to at most this, u also to at least its negative,
            and become ``g sigmoid(gate_slope g) (u + 1)`` in place of ``activation(g) u`` (gpt-oss); None for no limit.
        gate_slope: see `gate_limit`.
    """

    num_experts: int
    num_active: int
    width: int
    activation: Literal["silu", "relu", "gelu", "gelu_tanh"] = "silu"
    score: Literal["softmax", "sigmoid"] = "softmax"
    is_normalized: bool = True
    scales_input: bool = False
    scale: float = 1.0
    has_choice_bias: bool = False
    num_groups: int = 1
    num_active_groups: int = 1
    num_group_scores: int = 2
    shared: DenseMLP | None = None
    has_shared_gate: bool = False
    has_bias: bool = False
    gate_limit: float | None = None
    gate_slope: float = 1.702

    def __post_init__(self):
        for name in ("num_experts", "width", "num_groups", "num_group_scores"):
            check_integer(name, getattr(self, name), 1)
        check_integer("num_active_groups", self.num_active_groups, 1, self.num_groups)
        _check_choices(self, "activation", "score")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups}: expected a divisor of num_experts={self.num_experts}")
        in_group = self.num_experts // self.num_groups
        if self.num_groups > 1 and in_group < self.num_group_scores:
            raise ValueError(
                f"num_groups={self.num_groups}: expected at least {self.num_group_scores} experts per group"
            )
        check_integer("num_active", self.num_active, 1, in_group * self.num_active_groups)
        if self.shared is not None:
            check_kind("shared", self.shared, DenseMLP)
        elif self.has_shared_gate:
            raise ValueError("has_shared_gate=True: expected a shared MLP")

    @property
    def total_width(self) -> int:
        """Number of hidden units whose weights are stored, those of the shared MLP included."""
        return self.num_experts * self.width + (0 if self.shared is None else self.shared.width)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """A mixer of tokens and an MLP around the residual stream.

    Attributes:
        mixer: attention, or a recurrent layer. The norms and positions of attention below are those of any mixer.
        mlp: the MLP, or a mixture of experts.
        norm: the kind of all norms of the layer.
        block: position of the norms. ``"pre_norm"`` normalizes the inputs of attention and MLP. ``"post_norm"``
            normalizes each sum with the residual stream (OPT 350M). ``"sandwich"`` normalizes inputs and outputs (Gemma
            2 and 3). ``"output_norm"`` normalizes the outputs only (OLMo 2). ``"parallel"`` adds attention and MLP of
            one normalized input (GPT-NeoX, CodeGen).
        has_parallel_mlp_norm: whether the MLP of a parallel block has its own norm.
        residual_scale: factor on what attention and MLP add to the residual stream.
    """

    mixer: AttentionConfig | GatedDeltaConfig
    mlp: DenseMLP | MoEConfig
    norm: NormConfig = NormConfig()
    block: Literal["pre_norm", "post_norm", "sandwich", "output_norm", "parallel"] = "pre_norm"
    has_parallel_mlp_norm: bool = False
    residual_scale: float = 1.0

    def __post_init__(self):
        check_kind("mixer", self.mixer, GatedDeltaConfig if self.is_recurrent else AttentionConfig)
        check_kind("mlp", self.mlp, MoEConfig if isinstance(self.mlp, MoEConfig) else DenseMLP)
        check_kind("norm", self.norm, NormConfig)
        _check_choices(self, "block")

    @property
    def is_recurrent(self) -> bool:
        """Whether the mixer is a recurrent layer."""
        return isinstance(self.mixer, GatedDeltaConfig)

    @property
    def attention(self) -> AttentionConfig:
        """The mixer of a layer with attention.

        Raises:
            ValueError: if the layer is recurrent.
        """
        if not isinstance(self.mixer, AttentionConfig):
            raise ValueError(f"mixer={self.mixer!r}: expected an AttentionConfig")
        return self.mixer


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape and the arithmetic of a decoder. Equal layers are given as ``layers=(layer,) * num_layers``.

    Attributes:
        vocab_size: V, the number of tokens of the input embedding, and of the logits without `output_vocab_size`.
        width: D.
        context: largest sequence length, in tokens.
        layers: the L layers in order. They are not part of the hash, because JAX hashes the configuration in every call
            of a compiled function that takes a model.
        final_norm: the norm after the last layer; None for none.
        family: name of the weight layout that the model was read from; ``"llama"`` for our own.
        is_tied: whether the head is the transpose of the input embedding.
        has_learned_positions: whether a learned vector per position is added to the embedding.
        position_offset: number of rows of the learned positions before that of position 0 (2 in OPT).
        embedding_width: E, the width of the input embedding, which a learned matrix projects to D; None means D without
            a projection. A draft uses it to share its target's embedding.
        embedding_scale: factor on the input embedding.
        has_output_projection: whether a matrix projects from D to E before the head (OPT 350M).
        output_vocab_size: O, the number of tokens that the head scores, listed in `Model.output_ids`; None means V. A
            draft uses it because its head costs more than its layers.
        has_head_bias: whether the logits have a bias.
        logit_scale: factor on the logits.
        logit_softcap: c: logits become ``c tanh(x / c)``; None for no cap.
        hidden_width: width of the target's hidden states that an EAGLE draft reads with the tokens (see
            `bass_jax.drafters.eagle`); None for a model that reads tokens only.
        dtype: of the parameters, activations and cache, except for those in INT8: ``"float32"`` or ``"bfloat16"``.
        quantize: ``"int8"`` stores the matrices of the layers and the head in INT8 with a scale per output channel, and
            casts them inside the products. ``"int8_activations"`` also rounds the inputs of the layers' products to
            INT8, except those of experts, with a scale per token, and sums in integers. None stores everything in
            `dtype`.
        cache_dtype: ``"int8"`` stores keys and values in INT8 with a scale per token and head; None means `dtype`.
        attention_implementation: ``"ragged"``, ``"pad"`` or ``"split"``, the forms of
            `kernels_pallas.ops.ragged_attention` on a GPU (elsewhere all three are ``"xla"``), or ``"xla"``.
        product_dtype: ``"bfloat16"`` rounds the float32 inputs of products of activations with weights, and of their
            gradient by the activations. Gradients by weights, sums and everything else stay float32, and inputs of INT8
            weights and of experts are not rounded. None does not round. Training sets it.
        tensor_axis: mesh axis that the key-value heads are partitioned over; set when a model is placed on a mesh.
        expert_axes: mesh axes that the experts and the width of each expert are partitioned over; likewise.
    """

    vocab_size: int
    width: int
    context: int
    layers: tuple[LayerConfig, ...] = dataclasses.field(hash=False)
    final_norm: NormConfig | None = NormConfig()
    family: str = "llama"
    is_tied: bool = True
    has_learned_positions: bool = False
    position_offset: int = 0
    embedding_width: int | None = None
    embedding_scale: float | None = None
    has_output_projection: bool = False
    output_vocab_size: int | None = None
    has_head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    hidden_width: int | None = None
    dtype: str = "float32"
    quantize: str | None = None
    cache_dtype: str | None = None
    attention_implementation: str = "ragged"
    product_dtype: str | None = None
    tensor_axis: str | None = None
    expert_axes: tuple[str | None, str | None] = (None, None)

    def __post_init__(self):
        for name in ("vocab_size", "width", "context"):
            check_integer(name, getattr(self, name), 1)
        _check_optional_integers(self, "embedding_width", "output_vocab_size", "hidden_width")
        check_kind("layers", self.layers, tuple)
        check_integer("num_layers", len(self.layers), 1)
        for layer in self.layers:
            check_kind("layers", layer, LayerConfig)
        if not self.attentions:
            raise ValueError("layers: expected a layer with attention")
        check_choice("dtype", self.dtype, ("float32", "bfloat16"))
        check_choice("quantize", self.quantize, (None, "int8", "int8_activations"))
        check_choice("cache_dtype", self.cache_dtype, (None, "int8"))
        check_choice("product_dtype", self.product_dtype, (None, "bfloat16"))
        implementations = ("ragged", "pad", "split", "xla")
        check_choice("attention_implementation", self.attention_implementation, implementations)
        if self.has_output_projection and self.embedding_width is None:
            raise ValueError("has_output_projection=True: expected an embedding_width")
        is_projected = self.embedding_width is not None and not self.has_output_projection
        if self.is_tied and (is_projected or self.output_vocab_size is not None):
            raise ValueError("is_tied=True: expected False with a projected embedding or a reduced vocabulary")
        _check_softcap("logit_softcap", self.logit_softcap)
        if self.output_vocab_size is not None and self.output_vocab_size > self.vocab_size:
            raise ValueError(
                f"output_vocab_size={self.output_vocab_size}: expected at most vocab_size={self.vocab_size}"
            )

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The attention of each layer that has one."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionConfig))

    @property
    def recurrences(self) -> tuple[GatedDeltaConfig, ...]:
        """The mixer of each recurrent layer."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaConfig))

    @property
    def cache_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """`AttentionConfig.cache_shape` of each layer with attention."""
        return tuple(attention.cache_shape for attention in self.attentions)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def rounds_to(self) -> str | None:
        """The type that the layers' products round their inputs to: ``"int8"``, `product_dtype`, or None."""
        return "int8" if self.quantize == "int8_activations" else self.product_dtype
