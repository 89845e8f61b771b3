"""GRPO with Tunix on a toy task, with and without speculative rollouts.

    python examples/rl_rollouts.py --steps 100 --plot rl_rollouts.png

The task: continue a text with its last letter. The policy is a small random Tunix Qwen 3, which runs on a CPU. The
methods are Tunix's own rollouts, a frozen draft model (the policy of the start), and the same draft model, trained
a few steps on each round's rollouts, so that it follows the policy. Needs google-tunix; see
docs/how_to/tunix_rollouts.md.
"""

import argparse
import dataclasses
import functools
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from tunix.models.qwen3.model import ModelConfig, Qwen3
from tunix.rl import common, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

from bass_jax.drafters import ModelDrafter
from bass_jax.integrations.tunix import SpeculativeRollout
from bass_jax.models.adapters import from_tunix

LETTERS = "abcdefgh"
PAD, START, END = 0, 1, 2
VOCAB = 3 + len(LETTERS)
PROMPT = 8
METHODS = ("tunix", "frozen", "adapted")


class Letters:
    """A tokenizer with one token per letter."""

    def encode(self, text: str) -> list[int]:
        """Returns token ids."""
        return [3 + LETTERS.index(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        """Returns the letters of `ids`."""
        return "".join(LETTERS[token - 3] for token in ids if token >= 3)

    def bos_id(self) -> int:
        """Returns the start token."""
        return START

    def eos_id(self) -> int:
        """Returns the end token."""
        return END

    def pad_id(self) -> int:
        """Returns the padding token."""
        return PAD


class Measured:
    """Adds the time and the tokens of each round, and the tokens per pass, to a list."""

    def __init__(self, *arguments: Any, rounds: list[dict[str, float]], **options: Any):
        super().__init__(*arguments, **options)
        self.rounds = rounds

    def generate(self, prompts: list[str], rollout_config: Any, **options: Any) -> Any:
        """Generates and measures."""
        start = time.perf_counter()
        output = super().generate(prompts, rollout_config, **options)  # type: ignore[misc]
        seconds, metrics = time.perf_counter() - start, getattr(output, "metrics", None)
        num_tokens = sum(len(row) for row in output.tokens)
        per_pass = 1.0 if metrics is None else metrics.tokens_per_pass
        self.rounds.append({"seconds": seconds, "tokens": num_tokens, "per_pass": per_pass})
        return output


class TunixRollout(Measured, VanillaRollout):
    """Tunix's own worker, with the arguments of a rollout engine."""

    def __init__(self, rollout_actor: Any, tokenizer: Any, mesh: Any, rollout_config: Any, **options: Any):
        from tunix.rl.rollout.base_rollout import CacheConfig

        config = rollout_actor.config
        cache = CacheConfig(64, config.num_layers, config.num_kv_heads, config.head_dim)
        # A copy of the arrays, because Tunix sends no new parameters to a worker that shares them with the trainer.
        structure, state = nnx.split(rollout_actor)
        super().__init__(nnx.merge(structure, jax.tree.map(jnp.copy, state)), tokenizer, cache, **options)


class FrozenRollout(Measured, SpeculativeRollout):
    """Speculative rollouts whose draft model stays as it is."""


class AdaptedRollout(FrozenRollout):
    """Speculative rollouts whose draft model is trained on each round's completions."""

    def __init__(self, *arguments: Any, draft: Any, num_updates: int = 4, **options: Any):
        super().__init__(*arguments, drafter=ModelDrafter(from_tunix(draft), VOCAB), **options)
        self._draft_graph, self._num_updates = nnx.split(draft)[0], num_updates
        self._optimizer = optax.adam(3e-3)
        self._optimizer_state = self._optimizer.init(self.pair.drafter.model.params)  # type: ignore[attr-defined]

    def generate(self, prompts: list[str], rollout_config: Any, **options: Any) -> Any:
        """Generates, and trains the draft model on the completions; the training is not part of the measured time."""
        output = super().generate(prompts, rollout_config, **options)
        answers = np.full((len(output.tokens), rollout_config.max_tokens_to_generate), PAD, np.int32)
        for row, tokens in zip(answers, output.tokens, strict=True):
            row[: len(tokens)] = tokens
        drafter: Any = self.pair.drafter
        params, state = drafter.model.params, self._optimizer_state
        for _ in range(self._num_updates):
            params, state = self._update(params, state, output.left_padded_prompt_tokens, answers)
        self._optimizer_state = state
        model = dataclasses.replace(drafter.model, params=params)
        self.pair = self.pair.with_drafter(dataclasses.replace(drafter, model=model))
        return output

    @functools.partial(jax.jit, static_argnums=0)
    def _update(self, params: Any, state: Any, prompts: jax.Array, answers: jax.Array) -> tuple[Any, Any]:
        """Takes a step on the cross entropy of the completions."""

        def loss(params):
            logps = common.compute_per_token_logps(
                self._draft_graph, params, prompts, answers, PAD, END, stop_gradient=False
            )
            return -jnp.where(answers != PAD, logps, 0).sum() / jnp.maximum((answers != PAD).sum(), 1)

        updates, state = self._optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state


def policy(num_layers: int) -> Any:
    """Returns a small random model."""
    sizes = {"embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    config = ModelConfig(num_layers=num_layers, vocab_size=VOCAB, rope_theta=10_000, norm_eps=1e-6, **sizes)
    return Qwen3(config, rngs=nnx.Rngs(0))


def reward(prompts: list[str], completions: list[str], **options: Any) -> list[float]:
    """Returns the share of letters that repeat the prompt's last letter."""
    del options
    shares = [np.mean([letter == prompt[-1] for letter in text] or [0.0]) for prompt, text in zip(prompts, completions)]
    return [float(share) for share in shares]


def run(method: str, num_steps: int, *, num_layers: int = 2, limit: int = 8, batch: int = 16) -> dict[str, list[float]]:
    """Trains for `num_steps`; returns the mean reward, tokens/s and tokens per pass of each round."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    rounds: list[dict[str, float]] = []
    rewards: list[float] = []
    engines: dict[str, Any] = {
        "tunix": functools.partial(TunixRollout, rounds=rounds),
        "frozen": functools.partial(
            FrozenRollout, rounds=rounds, draft_len=4, drafter=ModelDrafter(from_tunix(policy(num_layers)), VOCAB)
        ),
        "adapted": functools.partial(AdaptedRollout, rounds=rounds, draft_len=4, draft=policy(num_layers)),
    }

    def measured_reward(prompts, completions, **options):
        found = reward(prompts, completions, **options)
        rewards.append(float(np.mean(found)))
        return found

    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine=engines[method],
        training_config=rl_cluster.RLTrainingConfig(
            actor_optimizer=optax.adam(1e-3), eval_every_n_steps=num_steps + 1, max_steps=num_steps
        ),
        rollout_config=RolloutConfig(max_tokens_to_generate=limit, max_prompt_length=PROMPT, temperature=1.0),
    )
    cluster = rl_cluster.RLCluster(
        actor=policy(num_layers), reference=policy(num_layers), tokenizer=Letters(), cluster_config=config
    )
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=8, beta=0.0), reward_fns=measured_reward)
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list(LETTERS), PROMPT - 2)) for _ in range(num_steps * batch)]
    learner.train([{"prompts": np.array(texts[i : i + batch])} for i in range(0, len(texts), batch)])
    per_second = [one["tokens"] / one["seconds"] for one in rounds]
    return {"reward": rewards, "tokens_per_second": per_second, "per_pass": [one["per_pass"] for one in rounds]}


def main() -> None:
    """Prints a line per method, and draws the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    results = {method: run(method, options.steps) for method in METHODS}
    for method, result in results.items():
        late = {name: np.mean(values[len(values) // 2 :]) for name, values in result.items()}
        print(
            f"{method}: reward {late['reward']:.2f}, {late['tokens_per_second']:.0f} tokens/s, "
            f"{late['per_pass']:.2f} tokens per pass (mean of the second half)"
        )
    if options.plot is not None:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(1, 2, figsize=(9, 3.5))
        for axis, name, title in zip(axes, ("reward", "per_pass"), ("mean reward", "tokens per pass"), strict=True):
            for method, result in results.items():
                axis.plot(result[name], label=method)
            axis.set(xlabel="step", title=title)
        axes[0].legend()
        figure.savefig(options.plot, bbox_inches="tight")


if __name__ == "__main__":
    main()
