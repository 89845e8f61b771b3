"""Distillation: trains a draft for a target on the target's own outputs.

Imports every package but `bass_jax.experiments` and `bass_jax.cli`. Start with `distill.py`, the stages, then
`trainer.py`.
"""

from bass_jax.training.agreement import Agreement, accepted_runs, measure_agreement
from bass_jax.training.build_datastore import build_datastore, distill_datastore
from bass_jax.training.distill import Distilled, distill, export, new_draft, run_corpus, run_distill
from bass_jax.training.distill_config import DistillConfig, load_config
from bass_jax.training.held_out import evaluate, write_held_out
from bass_jax.training.replay_speculation import Speculation, speculate_on
from bass_jax.training.trainer import train
from bass_jax.training.write_corpus import load_target, open_corpus, write_corpus

__all__ = [
    "Agreement",
    "DistillConfig",
    "Distilled",
    "Speculation",
    "accepted_runs",
    "build_datastore",
    "distill",
    "distill_datastore",
    "evaluate",
    "export",
    "load_config",
    "load_target",
    "measure_agreement",
    "new_draft",
    "open_corpus",
    "run_corpus",
    "run_distill",
    "speculate_on",
    "train",
    "write_corpus",
    "write_held_out",
]
