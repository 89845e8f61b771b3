"""Draft heads that read the target's hidden states.

Start with `drafter.py`, which drafts with a head on the target's final hidden state (EAGLE), then `eagle3.py`.
"""

from bass_jax.drafters.eagle.drafter import EagleDrafter, EagleState, network_drafter
from bass_jax.drafters.eagle.eagle3 import Eagle3Config, Eagle3Drafter, Eagle3Model

__all__ = ["Eagle3Config", "Eagle3Drafter", "Eagle3Model", "EagleDrafter", "EagleState", "network_drafter"]
