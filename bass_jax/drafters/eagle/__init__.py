"""Draft heads that read the target's hidden states.

`drafter.py` holds the drafter of a one-state head (EAGLE).
"""

from bass_jax.drafters.eagle.drafter import EagleDrafter, EagleState, network_drafter

__all__ = ["EagleDrafter", "EagleState", "network_drafter"]
