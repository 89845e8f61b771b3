"""Self-speculation: the first layers of the target draft for it, in the target's own cache."""

import dataclasses
from typing import Any

import jax

from bass_jax.drafters.draft_model import ModelDrafter, ModelDrafterState
from bass_jax.models.decoder import ForwardOutput
from bass_jax.models.flax_model import Model, require_model
from bass_jax.models.kv_cache import KVCache, PagedCache
from bass_jax.models.mlp import MLP
from bass_jax.models.model_config import DenseMLP, ModelConfig
from bass_jax.models.norm import Normed, apply_norm, rms_norm
from bass_jax.models.protocol import TargetModel, require_rollback
from bass_jax.runtime.checks import check_integer
from bass_jax.typing import Array, Float, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EarlyExitModel:
    """The first layers of a target, a trained adapter, and the target's final norm and head.

    The adapter is a gated MLP with a norm before it, added to the output of the last layer: ``x + mlp(norm(x))``. It
    has no attention and therefore no cache.

    Attributes:
        params: the trained parameters ``adapter_norm [D]`` and ``adapter``, those of the MLP, and the ``embedding``,
            which is the target's.
        config: of the first layers.
        target_params: the target's other parameters, of these layers, the final norm and the head.
        output_ids: None, because the head scores the whole vocabulary; or the target's.
    """

    params: Params
    config: ModelConfig = dataclasses.field(metadata={"static": True})
    target_params: Params
    output_ids: Any = None  # an array or None; `Any` because JAX rebuilds the tree with other objects

    @property
    def vocab_size(self) -> int:
        """V, the number of tokens."""
        return self.config.vocab_size

    def init_cache(self, batch: int, capacity: int) -> KVCache:
        """Returns an empty cache of the layers, for a pass without the target's cache."""
        return self._layers.init_cache(batch, capacity)

    def forward(
        self, tokens: Array, positions: Array, cache: KVCache | PagedCache, *, hidden_layers: tuple[int, ...] = ()
    ) -> ForwardOutput:
        """Runs one pass; see `bass_jax.models.Model.forward`."""
        output = self.hidden_states(tokens, positions, cache, hidden_layers=hidden_layers)
        return output._replace(logits=self.logits(output.hidden))

    def hidden_states(
        self,
        tokens: Array,
        positions: Array,
        cache: KVCache | PagedCache | None,
        hidden: None = None,
        *,
        hidden_layers: tuple[int, ...] = (),
    ) -> ForwardOutput:
        """Runs the layers, the adapter and the final norm; see `bass_jax.models.Model.hidden_states`."""
        if hidden is not None or hidden_layers:
            raise ValueError(f"hidden_layers={hidden_layers}: expected (), because an adapter reads and returns none")
        config, adapter = self.config, self.params["adapter"]
        output = self._layers.hidden_states(tokens, positions, cache, hidden_layers=(config.num_layers,))
        x = output.hidden
        normed = rms_norm(x, self.params["adapter_norm"], config.layers[-1].norm.eps)
        mlp = MLP(dataclasses.replace(config, quantize=None), DenseMLP(adapter["gate_up"].shape[1]), parent=None)  # type: ignore
        x = x + mlp.apply({"params": adapter}, Normed(normed, None))
        if config.final_norm is not None:
            learned = self.target_params["final_norm"], self.target_params.get("final_norm_bias")
            x = apply_norm(config.final_norm, x, learned)
        return output._replace(hidden=x)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T O"]:
        """Computes the logits with the target's head, float32."""
        return self._layers.logits(hidden)

    @property
    def _layers(self) -> Model:
        params = self.target_params | {"embedding": self.params["embedding"]}
        return Model(params, self.config, self.output_ids)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EarlyExitDrafter(ModelDrafter):
    """Drafts with the first layers of the target, in the target's cache of these layers.

    Between two steps the target's cache holds the keys and values of all committed tokens but the last, so there is
    nothing to read or to keep. The drafter writes only at positions that the target writes in the same step before it
    reads them, so that it changes neither the target's tokens nor what a cache holds after the step. Its state is None
    between steps, and the borrowed cache within one.

    Attributes:
        model: the first layers, of which `first_layers` makes a model; with an adapter an `EarlyExitModel`.
        vocab_size: V of the target.
        min_confidence: as in `ModelDrafter`.

    Source: Elhoushi et al. 2024 (LayerSkip, arXiv 2404.16710), self-speculative decoding with a shared cache; Liu et
    al. 2024 (Kangaroo, arXiv 2404.18911), a trained adapter between the early layers and the head.
    """

    def init(self, tokens: Array, lengths: Array) -> None:
        """Returns None: the target reads the prompts."""
        del tokens, lengths

    def start(self, num_rows: int, capacity: int) -> None:
        """Returns None: the target reads the prompts."""
        del num_rows, capacity

    def read(self, state: None, tokens: Array, positions: Array) -> None:
        """Returns None: the target reads the prompts."""
        del state, tokens, positions

    def borrow(self, state: None, cache: KVCache | PagedCache, lengths: Array) -> ModelDrafterState:
        """Returns a state with the first layers of the target's cache.

        Raises:
            ValueError: if the cache is of another model than the one whose layers these are.
        """
        del state
        num = self._num_layers
        if not isinstance(cache, KVCache | PagedCache) or len(cache.keys) < num:
            raise ValueError(f"drafter: it runs the first {num} layers of another target than the pair's")
        own = cache._replace(keys=cache.keys[:num], values=cache.values[:num])
        return ModelDrafterState(own, lengths - 1)

    def give_back(self, state: ModelDrafterState, cache: KVCache | PagedCache) -> tuple[None, KVCache | PagedCache]:
        """Returns None and the target's cache with the borrowed layers."""
        num = self._num_layers
        keys, values = state.cache.keys + cache.keys[num:], state.cache.values + cache.values[num:]
        return None, cache._replace(keys=keys, values=values)

    @property
    def _num_layers(self) -> int:
        model: Any = self.model
        return model.config.num_layers

    def commit(self, state: Any, lengths: Array) -> Any:
        """Returns the state; only a borrowed cache, in a test or a measurement, has a length to lower."""
        return None if state is None else super().commit(state, lengths)


def early_exit_drafter(target: TargetModel, num_layers: int | None = None) -> EarlyExitDrafter:
    """Returns a drafter of the target's own first layers, followed by its final norm and its head.

    The parameters are the target's arrays and the cache is the target's, so the drafter needs no memory for them.

    Few models predict the next token well from an early layer. Those that were trained with an early-exit loss do, such
    as LayerSkip's. For others `bass-jax distill` trains an adapter (``draft.kind: early_exit``).

    Args:
        target: a `bass_jax.models.Model`.
        num_layers: number of layers, 1 to L. By default a quarter of the target's, and at least one.

    Raises:
        ValueError: if the target is another model, has fewer layers, or has recurrent ones.
    """
    model = first_layers(target, num_layers)
    return EarlyExitDrafter(model, model.vocab_size)


def first_layers(target: TargetModel, num_layers: int | None = None) -> Model:
    """Returns the model of the target's first layers, its final norm and its head; arguments as `early_exit_drafter`.

    Raises:
        ValueError: if the target is another model, has fewer layers, or has recurrent ones.
    """
    model = require_model(target, "drafter='early_exit'")
    require_rollback("target", model)
    most = model.config.num_layers
    num_layers = max(1, most // 4) if num_layers is None else check_integer("num_layers", num_layers, 1, most)
    dropped = {f"layer_{index}" for index in range(num_layers, most)}
    params = {name: value for name, value in model.params.items() if name not in dropped}
    config = dataclasses.replace(model.config, layers=model.config.layers[:num_layers])
    return Model(params, config, model.output_ids)


def early_exit_model(target: TargetModel, num_layers: int | None, adapter: Params) -> EarlyExitModel:
    """Returns the target's first layers with an adapter; the other arguments are those of `early_exit_drafter`.

    Args:
        target: of the pair.
        num_layers: number of layers.
        adapter: ``adapter_norm [D]``, and ``adapter`` with ``gate_up [2, F, D]`` and ``down [D, F]``.

    Raises:
        ValueError: as `first_layers`.
    """
    model = first_layers(target, num_layers)
    target_params = dict(model.params)
    embedding = target_params.pop("embedding")
    return EarlyExitModel(adapter | {"embedding": embedding}, model.config, target_params, model.output_ids)
