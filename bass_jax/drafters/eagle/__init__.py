"""Draft heads that read the target's hidden states.

Start with `drafter.py`, which drafts with a head on the target's final hidden state (EAGLE), then `eagle3.py`, its
variants `p_eagle.py` and `mtp.py`, and `dflash.py`.
"""
