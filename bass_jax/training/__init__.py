"""Distillation: trains a draft for a target on the target's own answers.

Imports every package except `bass_jax.experiments` and `bass_jax.cli`. Start with `distill.py`, which runs the stages,
then read `write_corpus.py` and `trainer.py`.
"""

from bass_jax.training.agreement import Agreement, accepted_runs, measure_agreement
from bass_jax.training.build_datastore import build_datastore, distill_datastore
from bass_jax.training.distill import Distilled, distill, generate_corpus
from bass_jax.training.distill_config import DistillConfig, load_distill_config
from bass_jax.training.prompts import GeneratedPromptSource, Prompt, PromptSource, prompt_source
from bass_jax.training.replay_speculation import Speculation, speculate_on
from bass_jax.training.trainer import train
from bass_jax.training.write_corpus import load_target, write_corpus

__all__ = [
    "Agreement",
    "DistillConfig",
    "Distilled",
    "GeneratedPromptSource",
    "Prompt",
    "PromptSource",
    "Speculation",
    "accepted_runs",
    "build_datastore",
    "distill",
    "distill_datastore",
    "generate_corpus",
    "load_distill_config",
    "load_target",
    "measure_agreement",
    "prompt_source",
    "speculate_on",
    "train",
    "write_corpus",
]
