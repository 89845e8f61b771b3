"""Self-speculation: the first layers of the target draft for it."""

import dataclasses

from bass_jax.drafters.draft_model import ModelDrafter
from bass_jax.models.flax_model import Model, require_model
from bass_jax.models.protocol import TargetModel, require_rollback
from bass_jax.runtime.checks import check_integer


def early_exit_drafter(target: TargetModel, num_layers: int | None = None) -> ModelDrafter:
    """Returns a drafter of the target's own first layers, followed by its final norm and its head.

    The parameters are the target's arrays, so the drafter needs no memory for weights. It has its own cache of these
    layers, although the target's cache holds the same keys and values of committed tokens, because a drafter is not
    given the target's cache. This costs ``num_layers / L`` of the target's cache, and a pass over each prompt.

    Few models predict the next token well from an early layer. Those that were trained with an early-exit loss do, such
    as LayerSkip's. There is no adapter between the layers and the head.

    Args:
        target: a `bass_jax.models.Model`.
        num_layers: number of layers, 1 to L. By default a quarter of the target's, and at least one.

    Raises:
        ValueError: if the target is another model, has fewer layers, or has recurrent ones.

    Source: Elhoushi et al. 2024 (LayerSkip, arXiv 2404.16710), self-speculative decoding.
    """
    model = require_model(target, "drafter='early_exit'")
    require_rollback("target", model)
    most = model.config.num_layers
    num_layers = max(1, most // 4) if num_layers is None else check_integer("num_layers", num_layers, 1, most)
    dropped = {f"layer_{index}" for index in range(num_layers, most)}
    params = {name: value for name, value in model.params.items() if name not in dropped}
    config = dataclasses.replace(model.config, layers=model.config.layers[:num_layers])
    return ModelDrafter(Model(params, config, model.output_ids), model.vocab_size)
