"""The prompts that the drafts in ``checkpoints/quickstart`` were trained on.

`mixture.py` is the `bass_jax.training.PromptSource` that the configurations in ``configs/distill`` name. It mixes the
sources of `sources.py` and leaves out prompts that overlap the evaluation prompts. See ``README.md``.
"""
