"""Places the arrays of a training on one device or on a mesh."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bass_jax.models.model_config import ModelConfig
from bass_jax.models.sharding import param_shardings
from bass_jax.training.batches import TrainingBatch
from bass_jax.training.distill_config import TrainingConfig
from bass_jax.typing import Params


class Placement:
    """Splits batches over the mesh axis ``data`` and parameters over ``tp``; does nothing on one device."""

    def __init__(self, options: TrainingConfig, draft: ModelConfig):
        """Makes a mesh of the first devices.

        Args:
            options: how many devices.
            draft: whose parameters are placed.

        Raises:
            ValueError: if there are fewer devices, or a parameter cannot be split evenly.
        """
        shape = (options.data_shards, options.param_shards)
        count, available = shape[0] * shape[1], len(jax.devices())
        if count > available:
            raise ValueError(
                f"data_shards={shape[0]}, param_shards={shape[1]}: expected at most {available} devices in all"
            )
        self._mesh = Mesh(np.array(jax.devices()[:count]).reshape(shape), ("data", "tp")) if count > 1 else None
        self._shardings = None if self._mesh is None else param_shardings(draft, self._mesh)

    def place_params(self, params: Params) -> Params:
        """Splits attention heads, MLP and vocabulary."""
        if self._shardings is None:
            return params
        return {name: jax.device_put(leaf, self._shardings[name]) for name, leaf in params.items()}

    def replicate(self, array: jax.Array) -> jax.Array:
        """Copies `array` to every device."""
        return self._place(array, PartitionSpec())

    def place_batch(self, batch: TrainingBatch) -> TrainingBatch:
        """Splits rows and response tokens."""
        return self._place(batch, PartitionSpec("data"))

    def _place(self, tree, spec: PartitionSpec):
        return tree if self._mesh is None else jax.device_put(tree, NamedSharding(self._mesh, spec))
