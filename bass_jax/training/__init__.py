"""Distillation: a draft for a target, from the target's own outputs."""

from bass_jax.training.agreement import Agreement, accepted_runs, measure_agreement
from bass_jax.training.config import DistillConfig, load_config
from bass_jax.training.distill import Distilled, distill, export, new_draft, run_distill
from bass_jax.training.held_out import evaluate, write_held_out
from bass_jax.training.trainer import train
from bass_jax.training.write import load_target, open_corpus, write_corpus

__all__ = [
    "Agreement",
    "DistillConfig",
    "Distilled",
    "accepted_runs",
    "distill",
    "evaluate",
    "export",
    "load_config",
    "load_target",
    "measure_agreement",
    "new_draft",
    "open_corpus",
    "run_distill",
    "train",
    "write_corpus",
    "write_held_out",
]
