"""MTP heads (multi-token prediction): one decoder layer on the target's last hidden state and the next token."""

import dataclasses

import jax.numpy as jnp

from bass_jax.drafters.eagle.eagle3 import Eagle3Config, Eagle3Network
from bass_jax.models.decoder import Layer
from bass_jax.models.mesh import replicate_on_mesh
from bass_jax.models.model_config import ModelConfig
from bass_jax.models.norm import apply_norm, declare_norm
from bass_jax.models.parameters import declare
from bass_jax.models.weights import declare_weight, product
from bass_jax.typing import Array, Float


@dataclasses.dataclass(frozen=True)
class MTPConfig(Eagle3Config):
    """What an MTP head has besides its layer.

    `Eagle3Model` and `Eagle3Drafter` run it, because it reads the same inputs at the same positions as an EAGLE-3 head.
    It has none of the optional norms of one.

    Attributes:
        hidden_layers: ``(L,)``: the output of the target's last layer, before the final norm.
        target_width: D of the target, which is also that of the head.
        norm_output: True, because a draft reads the head's output after the final norm.
        norm_hidden: whether the hidden states go through the target's final norm first. This is so in the layers that
            targets are published with, and not in heads of the `speculators` format.
    """

    norm_output: bool = True
    norm_hidden: bool = False

    def network(self, config: ModelConfig) -> "MTPNetwork":
        """Returns the network of a head whose layer has this configuration."""
        return MTPNetwork(config, self)


class MTPNetwork(Eagle3Network):
    """The network of an MTP head.

    The layer reads a projection of two normalized vectors: the token's embedding, and the target's hidden state at the
    token before. At its own drafts the head reads its last output, after the final norm, in place of the hidden state.
    The embedding and the output head are the target's.

    Source: Gloeckle et al. 2024 (arXiv 2404.19737) and DeepSeek-V3 (arXiv 2412.19437), section 2.2.
    """

    head: MTPConfig

    def setup(self):
        """Declares the tensors outside the layer, and the layer."""
        config, D = self.config, self.config.width
        self.embedding = declare_weight(self, "embedding", (config.vocab_size, D), ("vocab", "embed"))
        self.token_norm = declare_norm(self, "token_norm", self._norm, D)
        self.hidden_norm = declare_norm(self, "hidden_norm", self._norm, D)
        self.fc = declare(self, "fc", (D, 2 * D), ("embed", None))
        if self.head.norm_hidden:
            self.target_norm = declare_norm(self, "target_norm", self._norm, D)
        self.layers = [Layer(config, config.layers[0], name="layer_0")]
        self.final_norm = declare_norm(self, "final_norm", self._norm, D)
        self.output_head = declare_weight(self, "head", (config.vocab_size, D), ("vocab", "embed"))

    def project(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the hidden states, after the target's final norm if the head reads them so."""
        return apply_norm(self._norm, hidden, self.target_norm) if self.head.norm_hidden else hidden

    def first_inputs(self, embedded: Float[Array, "B T D"], hidden: Float[Array, "B T D"]) -> tuple[Array, ...]:
        """Returns what the layer reads: the projection of the embeddings and the hidden states."""
        normed = apply_norm(self._norm, embedded, self.token_norm), apply_norm(self._norm, hidden, self.hidden_norm)
        return (product(jnp.concatenate(normed, axis=-1), self.fc),)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Computes the logits of `ForwardOutput.hidden`, float32; on a mesh every device gets all of them."""
        return replicate_on_mesh(super().logits(hidden))
