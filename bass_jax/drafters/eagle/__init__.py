"""Draft heads that read the target's hidden states.

Start with `drafter.py`, which drafts with a head on the target's final hidden state (EAGLE), then `eagle3.py` and
`p_eagle.py`.
"""

from bass_jax.drafters.eagle.drafter import EagleDrafter, EagleState
from bass_jax.drafters.eagle.eagle3 import Eagle3Config, Eagle3Drafter, Eagle3Model
from bass_jax.drafters.eagle.p_eagle import PEagleDrafter

__all__ = ["Eagle3Config", "Eagle3Drafter", "Eagle3Model", "EagleDrafter", "EagleState", "PEagleDrafter"]
