"""Batched speculative decoding for JAX: pure, jitted, exact, replaceable in every part."""

from bass_jax import costmodel, drafters, policies
from bass_jax.config import ModelConfig, SpecConfig
from bass_jax.fidelity import measure_fidelity
from bass_jax.generate import Generation, compile_ahead, generate, generate_on_device, stream
from bass_jax.metrics import Summary, per_token_latency, summarize
from bass_jax.models import Model, init_model, quantize_model
from bass_jax.models.mesh import start_distributed, tensor_parallel_mesh
from bass_jax.pair import Pair, load_pair, random_pair
from bass_jax.prefill import prefill
from bass_jax.replay import make_replay
from bass_jax.sampling import AcceptanceRule, Law, Sampling, Verdict, register_rule
from bass_jax.serving import Engine, EngineConfig
from bass_jax.simulator import simulate
from bass_jax.startup import configure_gpu, use_compilation_cache
from bass_jax.state import FinishReason, SpecState, StepInfo, output_tokens
from bass_jax.step import decode_step, speculate_step
from bass_jax.traces import TraceWriter, read_trace
from bass_jax.utilisation import measure_utilisation
from bass_jax.verify import LawReport, verify_lossless

__version__ = "0.1.0"

__all__ = [
    "AcceptanceRule",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Generation",
    "Law",
    "LawReport",
    "Model",
    "ModelConfig",
    "Pair",
    "Sampling",
    "SpecConfig",
    "SpecState",
    "StepInfo",
    "Summary",
    "TraceWriter",
    "Verdict",
    "compile_ahead",
    "configure_gpu",
    "costmodel",
    "decode_step",
    "drafters",
    "generate",
    "generate_on_device",
    "init_model",
    "load_pair",
    "make_replay",
    "measure_fidelity",
    "measure_utilisation",
    "output_tokens",
    "per_token_latency",
    "policies",
    "prefill",
    "quantize_model",
    "random_pair",
    "read_trace",
    "register_rule",
    "simulate",
    "speculate_step",
    "start_distributed",
    "stream",
    "summarize",
    "tensor_parallel_mesh",
    "use_compilation_cache",
    "verify_lossless",
]
