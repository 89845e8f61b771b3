"""Distillation: a draft for a target, from the target's own outputs."""

from bass_jax.training.agreement import Agreement, accepted_runs, measure_agreement
from bass_jax.training.config import DistillConfig, load_config
from bass_jax.training.distill import Distilled, distill, export, new_draft, run_corpus, run_distill
from bass_jax.training.held_out import evaluate, write_held_out
from bass_jax.training.speculation import Speculation, speculate_on
from bass_jax.training.store import build_store, distill_store
from bass_jax.training.trainer import train
from bass_jax.training.write import load_target, open_corpus, write_corpus

__all__ = [
    "Agreement",
    "DistillConfig",
    "Distilled",
    "Speculation",
    "accepted_runs",
    "build_store",
    "distill",
    "distill_store",
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
