"""The frozen, validated, hashable configuration of a model."""

import dataclasses
import math
import typing
from typing import Literal

from bass_jax.runtime.checks import check_choice, check_integer, check_number


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the context a model was first trained on.

    Attributes:
        kind: ``"linear"`` divides every frequency by `factor`; ``"llama3"`` divides the low
            frequencies, keeps the high ones and interpolates between (Llama 3.1's rule); ``"yarn"`` does so
            over the lanes instead, and scales the rotated queries and keys (Peng et al., arXiv 2309.00071).
        factor: the division, above 1.
        low_freq_factor: llama3: wavelengths above ``original_context / low_freq_factor`` are divided.
        high_freq_factor: llama3: wavelengths below ``original_context / high_freq_factor`` are kept.
        original_context: llama3, yarn: context of the first training, in tokens.
        beta_fast: yarn: lanes that turn more often than this in `original_context` are kept.
        beta_slow: yarn: lanes that turn less often than this are divided.
        attention_factor: yarn: factor on rotated queries and keys; None means ``0.1 log(factor) + 1``.
        is_truncated: yarn: the first and last lane between are rounded outwards to whole lanes.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    is_truncated: bool = True

    def __post_init__(self):
        if self.kind not in ("linear", "llama3", "yarn"):
            raise ValueError(f"rope_scaling.kind={self.kind!r}: expected 'linear', 'llama3' or 'yarn'")
        if self.factor < 1:
            raise ValueError(f"rope_scaling.factor={self.factor}: expected at least 1")
        for name in ("original_context", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"rope_scaling.{name}={getattr(self, name)}: expected a positive number")
        if self.kind == "llama3" and self.low_freq_factor == self.high_freq_factor:
            raise ValueError(f"rope_scaling.high_freq_factor={self.high_freq_factor}: expected another low_freq_factor")
        if self.kind == "yarn" and self.attention_factor is None:
            object.__setattr__(self, "attention_factor", 0.1 * math.log(self.factor) + 1.0)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and arithmetic of one decoder.

    Attributes:
        family: name of the weight layout it was read from; ``"llama"`` for our own.
        vocab_size: V, rows of the logits (or of the input embedding, with `output_vocab_size`).
        width: D.
        num_layers: L.
        num_heads: N.
        num_kv_heads: K; divides N.
        head_dim: H; even.
        mlp_width: F.
        context: the longest sequence, in tokens.
        rope_base: base of the rotary frequencies.
        rope_scaling: see `RopeScaling`.
        norm_eps: epsilon of the norms.
        is_tied: the head is the input embedding's transpose.
        has_attention_bias: biases on the query, key and value projections.
        has_out_bias: a bias on the attention's output projection; None means as `has_attention_bias`.
        has_mlp_bias: biases on the mlp's projections.
        embedding_width: E; the input embedding has this width and is projected to D by a learned matrix.
            None means D without a projection. A draft uses it to share its target's embedding.
        output_vocab_size: O; the head scores only this many tokens, named by `Model.output_ids`.
            None means all V. A draft uses it because its head costs more than its body.
        hidden_width: a draft reads its target's final hidden state at the token before, of this width, beside the
            embedding, and predicts the next one. None means that it reads tokens alone.
        norm: ``"rms"``, or ``"layer"`` with a mean and biases.
        norm_offset: added to the learned scale of RMS norms (Gemma's 1).
        block: ``"pre_norm"``; ``"post_norm"`` normalizes each sum (OPT 350M); ``"sandwich"`` normalizes before
            and after each part (Gemma 2 and 3); ``"parallel"`` adds attention and mlp of one input (GPT-NeoX, CodeGen).
        has_parallel_mlp_norm: in a parallel block, the mlp has a norm of its own.
        has_final_norm: a norm after the last layer.
        has_qk_norm: RMS norms over the heads of queries and keys (Qwen3, Gemma 3).
        is_gated: the mlp multiplies by a gate.
        activation: ``"silu"``, ``"relu"``, ``"gelu"`` or ``"gelu_tanh"``.
        positions: ``"rotary"`` or ``"learned"``.
        position_offset: rows of the learned positions before that of position 0 (OPT's 2).
        rotary_dim: lanes of a head that are rotated, the first ones; None means all.
        attention_scale: factor on the scores; None means ``head_dim ** -0.5``.
        window: positions that a query sees, itself included, in the layers that have a window.
        windowed_layers: for each layer whether it has the window; None means all, when there is a `window`.
        window_rope_base: `rope_base` of the layers with a window, without scaling; None means the same.
        embedding_scale: factor on the input embedding.
        has_output_projection: a matrix from D to E before the head (OPT 350M).
        has_head_bias: a bias on the logits.
        logit_softcap: c, where logits are ``c tanh(x / c)``.
        attention_softcap: c, where the scaled scores of attention are ``c tanh(x / c)``, before masking.
        dtype: of the parameters, activations and cache, as far as they are not INT8: ``"float32"`` or
            ``"bfloat16"``.
        quantize: ``"int8"`` stores the matrices of the layers and of the head as INT8 with a scale per output channel,
            cast where the products read them; ``"int8_activations"`` also rounds the layers' inputs of products to
            INT8, with a scale per token, and sums in whole numbers. None stores all in `dtype`.
        cache_dtype: ``"int8"`` keeps keys and values as INT8 with a scale per token and head; None means `dtype`.
        attention: how attention runs: ``"ragged"``, ``"pad"`` or ``"split"``, the forms of
            `kernels_pallas.ops.ragged_attention` on a GPU (elsewhere all three are ``"xla"``), ``"xla"``, or
            ``"cudnn"``, which transposes the cache in every pass and is ``"ragged"`` where cuDNN cannot.
        product_dtype: what products of activations with weights round their float32 inputs to, and so does the gradient
            by the activations, not that by a weight: ``"bfloat16"``, or None for not at all. Sums and all else stay
            float32, and an INT8 weight's inputs are left alone. Set by what trains a model.
        tensor_axis: mesh axis that the key-value heads are split over; set by what places a model on a mesh.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    context: int
    family: str = "llama"
    rope_base: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    is_tied: bool = True
    has_attention_bias: bool = False
    has_mlp_bias: bool = False
    embedding_width: int | None = None
    output_vocab_size: int | None = None
    hidden_width: int | None = None
    has_out_bias: bool | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    block: Literal["pre_norm", "post_norm", "sandwich", "parallel"] = "pre_norm"
    has_parallel_mlp_norm: bool = False
    has_final_norm: bool = True
    has_qk_norm: bool = False
    is_gated: bool = True
    activation: Literal["silu", "relu", "gelu", "gelu_tanh"] = "silu"
    positions: Literal["rotary", "learned"] = "rotary"
    position_offset: int = 0
    rotary_dim: int | None = None
    attention_scale: float | None = None
    window: int | None = None
    windowed_layers: tuple[bool, ...] | None = None
    window_rope_base: float | None = None
    embedding_scale: float | None = None
    has_output_projection: bool = False
    has_head_bias: bool = False
    logit_softcap: float | None = None
    attention_softcap: float | None = None
    dtype: str = "float32"
    quantize: str | None = None
    cache_dtype: str | None = None
    attention: str = "ragged"
    product_dtype: str | None = None
    tensor_axis: str | None = None

    def __post_init__(self):
        positive = (
            "vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "head_dim", "mlp_width", "context"
        )  # fmt: skip
        for name in (*positive, "embedding_width", "output_vocab_size", "hidden_width", "rotary_dim", "window"):
            value = getattr(self, name)
            if value is None and name not in positive:
                continue
            check_integer(name, value, 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads}: expected a divisor of num_heads={self.num_heads}")
        if self.has_out_bias is None:
            object.__setattr__(self, "has_out_bias", self.has_attention_bias)
        self._check_variants()
        if check_number("rope_base", self.rope_base) <= 1:
            raise ValueError(f"rope_base={self.rope_base}: expected a number above 1")
        check_choice("dtype", self.dtype, ("float32", "bfloat16"))
        check_choice("quantize", self.quantize, (None, "int8", "int8_activations"))
        check_choice("cache_dtype", self.cache_dtype, (None, "int8"))
        check_choice("product_dtype", self.product_dtype, (None, "bfloat16"))
        check_choice("attention", self.attention, ("ragged", "pad", "split", "xla", "cudnn"))
        is_projected = self.embedding_width is not None and not self.has_output_projection
        if self.is_tied and (is_projected or self.output_vocab_size is not None):
            raise ValueError("is_tied=True: a projected embedding or a trimmed head has its own head")
        for name in ("logit_softcap", "attention_softcap"):
            value = getattr(self, name)
            if value is not None and not check_number(name, value) > 0:
                raise ValueError(f"{name}={value!r}: expected a positive number")
        if self.output_vocab_size is not None and self.output_vocab_size > self.vocab_size:
            raise ValueError(
                f"output_vocab_size={self.output_vocab_size}: expected at most vocab_size={self.vocab_size}"
            )

    def _check_variants(self):
        for name in ("norm", "block", "activation", "positions"):
            check_choice(name, getattr(self, name), typing.get_args(type(self).__annotations__[name]))
        lanes = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if self.positions == "rotary" and (lanes % 2 or lanes > self.head_dim):
            name = "head_dim" if self.rotary_dim is None else "rotary_dim"
            raise ValueError(f"{name}={lanes}: expected an even number, for rotary positions, at most head_dim")
        if self.windowed_layers is not None and len(self.windowed_layers) != self.num_layers:
            raise ValueError(f"windowed_layers: expected {self.num_layers} values, got {len(self.windowed_layers)}")
        if self.windowed_layers is not None and any(self.windowed_layers) and self.window is None:
            raise ValueError("windowed_layers: expected a window")
        if self.has_output_projection and self.embedding_width is None:
            raise ValueError("has_output_projection=True: expected an embedding_width")

    def window_of(self, layer: int) -> int | None:
        """Positions that a query of `layer` sees; None for all."""
        return self.window if self.windowed_layers is None or self.windowed_layers[layer] else None

    @property
    def rounds_to(self) -> str | None:
        """What the layers' products round their inputs to: ``"int8"``, `product_dtype`, or None."""
        return "int8" if self.quantize == "int8_activations" else self.product_dtype

    @property
    def queries_per_kv_head(self) -> int:
        """R, query heads that read one key-value head."""
        return self.num_heads // self.num_kv_heads
