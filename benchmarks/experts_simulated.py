r"""Simulates the fastest draft length over the batch for a dense target and one with experts. Nothing is timed.

    python benchmarks/experts_simulated.py

The target with experts is `--target`. The dense one has the same layers and a dense MLP as wide as the experts of one
token together, so both compute the same for one token. The times are rooflines of public figures of the device, in
bfloat16, and the number of experts that a pass reads is the expectation of `bass_jax.cost_model.PassShape.read_bytes`.
Each draft is accepted with the same probability.
"""

import argparse
import dataclasses

import jax.numpy as jnp

from bass_jax.cost_model import DEVICES, RooflineModel, expected_emitted, pass_shape, roofline, step_seconds
from bass_jax.models import PRESETS, DenseMLP, ModelConfig, MoEConfig, preset
from bass_jax.policies.batch_table import fastest_draft_len

LENGTHS = tuple(range(13))
BATCHES = tuple(2**power for power in range(9))


def dense_config(config: ModelConfig) -> ModelConfig:
    """Returns `config` with dense MLPs that have as many active weights per token."""

    def dense(mlp: DenseMLP | MoEConfig) -> DenseMLP:
        if isinstance(mlp, DenseMLP):
            return mlp
        shared = 0 if mlp.shared is None else mlp.shared.width
        return DenseMLP(mlp.num_active * mlp.width + shared, mlp.activation)

    layers = tuple(dataclasses.replace(layer, mlp=dense(layer.mlp)) for layer in config.layers)
    return dataclasses.replace(config, layers=layers)


def speed_up(cost: RooflineModel, rates, batch: int, context: int, draft_len: int) -> float:
    """Returns the tokens per second with `draft_len` drafts divided by those without drafts."""
    lengths = jnp.asarray([0, draft_len])
    plain, drafted = expected_emitted(rates, lengths) / step_seconds(cost, batch, lengths, context)
    return float(drafted / plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="qwen3-30b-a3b", choices=PRESETS)
    parser.add_argument("--draft", default="qwen3-0.6b", choices=PRESETS)
    parser.add_argument("--device", default="h200", choices=DEVICES)
    parser.add_argument("--rate", type=float, default=0.8, help="probability that a draft is accepted")
    parser.add_argument("--context", type=int, default=512)
    options = parser.parse_args()
    config, draft = preset(options.target), pass_shape(preset(options.draft))
    shapes = {"dense": pass_shape(dense_config(config)), "experts": pass_shape(config)}
    rates = jnp.full(max(LENGTHS), options.rate)
    columns = ("batch", "dense: drafts", "speed-up", "experts: drafts", "speed-up", "experts read without, with drafts")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for batch in BATCHES:
        cells = [f"{batch}"]
        for shape in shapes.values():
            cost = roofline(shape, draft, DEVICES[options.device])
            best = fastest_draft_len(cost, rates, batch, options.context, LENGTHS)
            cells += [f"{best}", f"{speed_up(cost, rates, batch, options.context, best):.2f}x"]
        shape = shapes["experts"]
        shares = [(shape.read_bytes(batch * n) - shape.weight_bytes) / shape.expert_bytes for n in (1, best + 1)]
        print("| " + " | ".join([*cells, ", ".join(f"{share:.0%}" for share in shares)]) + " |", flush=True)


if __name__ == "__main__":
    main()
