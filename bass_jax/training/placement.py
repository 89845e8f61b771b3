"""Where a training's arrays lie: on one device, or split over a mesh."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bass_jax.models.model_config import ModelConfig
from bass_jax.models.sharding import param_shardings
from bass_jax.training.batches import Batch
from bass_jax.training.distill_config import TrainingConfig
from bass_jax.typing import Params


class Placement:
    """Splits batches over the mesh axis ``data``, and parameters over ``tp``.

    What is split how follows from where the arguments of a step lie; with one device nothing is placed at all.
    """

    def __init__(self, options: TrainingConfig, draft: ModelConfig):
        """Takes the first devices.

        Args:
            options: how many devices.
            draft: whose parameters are placed.

        Raises:
            ValueError: if there are fewer devices, or a tensor does not divide over them.
        """
        shape = (options.data_shards, options.param_shards)
        count = shape[0] * shape[1]
        if count > len(jax.devices()):
            raise ValueError(
                f"data_shards={shape[0]}, param_shards={shape[1]}: expected at most {len(jax.devices())} devices in all"
            )
        self._mesh = Mesh(np.array(jax.devices()[:count]).reshape(shape), ("data", "tp")) if count > 1 else None
        self._shardings = None if self._mesh is None else param_shardings(draft, self._mesh)

    def place_params(self, params: Params) -> Params:
        """Splits heads, mlp and vocabulary."""
        if self._shardings is None:
            return params
        return {name: jax.device_put(leaf, self._shardings[name]) for name, leaf in params.items()}

    def replicate(self, array: jax.Array) -> jax.Array:
        """Puts the whole of `array` on every device."""
        return array if self._mesh is None else jax.device_put(array, NamedSharding(self._mesh, PartitionSpec()))

    def place_batch(self, batch: Batch) -> Batch:
        """Splits rows and response tokens."""
        return batch if self._mesh is None else jax.device_put(batch, NamedSharding(self._mesh, PartitionSpec("data")))
