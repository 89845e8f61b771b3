"""Chooses the drafter that runs a network."""

from bass_jax.drafters.draft_model import ModelDrafter
from bass_jax.drafters.eagle.dflash import DFlashDrafter, DFlashModel
from bass_jax.drafters.eagle.drafter import EagleDrafter
from bass_jax.drafters.eagle.eagle3 import Eagle3Drafter, Eagle3Model
from bass_jax.drafters.eagle.p_eagle import PEagleDrafter
from bass_jax.drafters.early_exit import EarlyExitDrafter, EarlyExitModel
from bass_jax.models.flax_model import Model


def network_drafter(
    model: Model | EarlyExitModel | Eagle3Model | DFlashModel, vocab_size: int
) -> ModelDrafter | EagleDrafter | DFlashDrafter:
    """Returns the drafter that runs `model`, which depends on what the model reads.

    Args:
        model: a draft model or a draft head.
        vocab_size: V of the target.
    """
    if isinstance(model, DFlashModel):
        return DFlashDrafter(model, vocab_size)
    if isinstance(model, EarlyExitModel):
        return EarlyExitDrafter(model, vocab_size)
    if isinstance(model, Eagle3Model):
        return (Eagle3Drafter if model.head.mask_token_id is None else PEagleDrafter)(model, vocab_size)
    return (ModelDrafter if model.config.hidden_width is None else EagleDrafter)(model, vocab_size)
