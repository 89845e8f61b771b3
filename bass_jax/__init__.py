"""Batched speculative decoding for JAX: pure, jitted, exact, replaceable in every part."""

from bass_jax import cost_model, drafters, policies
from bass_jax.acceptance import AcceptanceResult, AcceptanceRule, register_rule
from bass_jax.analysis.quantization_error import measure_quantization_error
from bass_jax.analysis.replay import make_replay
from bass_jax.analysis.simulator import simulate
from bass_jax.analysis.utilization import measure_utilization
from bass_jax.config import SpecConfig
from bass_jax.decoding.device_loop import generate_on_device
from bass_jax.decoding.load_pair import ModelOptions, load_pair, random_pair
from bass_jax.decoding.metrics import Summary, per_token_latency, summarize
from bass_jax.decoding.options import DecodeOptions
from bass_jax.decoding.outputs import Generation
from bass_jax.decoding.pair import Pair
from bass_jax.decoding.prefill import prefill
from bass_jax.decoding.state import FinishReason, SpecState, StepInfo, output_tokens
from bass_jax.decoding.step import decode_step, speculate_step
from bass_jax.decoding.traces import TraceWriter, read_trace
from bass_jax.engine import Engine, EngineConfig
from bass_jax.engine.generate import generate, stream
from bass_jax.models import Model, init_model, quantize_model
from bass_jax.models.mesh import start_distributed, tensor_parallel_mesh
from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.xla_flags import configure_gpu, use_compilation_cache
from bass_jax.sampling import SamplingParams, TokenDistribution
from bass_jax.testing.lossless import LosslessReport, verify_lossless

__version__ = "0.1.0"

__all__ = [
    "AcceptanceResult",
    "AcceptanceRule",
    "DecodeOptions",
    "Engine",
    "EngineConfig",
    "FinishReason",
    "Generation",
    "LosslessReport",
    "Model",
    "ModelConfig",
    "Pair",
    "SamplingParams",
    "SpecConfig",
    "SpecState",
    "StepInfo",
    "Summary",
    "TokenDistribution",
    "TraceWriter",
    "configure_gpu",
    "cost_model",
    "decode_step",
    "drafters",
    "generate",
    "generate_on_device",
    "init_model",
    "load_pair",
    "make_replay",
    "measure_quantization_error",
    "measure_utilization",
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
