"""Rollouts of the RL trainer Tunix with speculative decoding. Needs google-tunix."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tunix.generate.tokenizer_adapter import TokenizerAdapter  # pyright: ignore[reportMissingImports]
from tunix.rl import common, utils  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]

from bass_jax.config import SpecConfig
from bass_jax.decoding.metrics import Metrics
from bass_jax.decoding.pair import Pair
from bass_jax.drafters import Drafter, find_drafter
from bass_jax.engine.generate import generate
from bass_jax.models.adapters import from_tunix
from bass_jax.models.adapters.flax_nnx import split_module
from bass_jax.policies import Policy
from bass_jax.sampling import SamplingParams


@dataclasses.dataclass
class SpeculativeRolloutOutput(base_rollout.RolloutOutput):
    """The output of `SpeculativeRollout.generate`: Tunix's own fields, and the following.

    Attributes:
        sampled_logprobs: per row ``[num]`` float32, the log-probabilities under the distribution that was sampled from,
            after top-k and top-p; None without ``rollout_config.return_logprobs``.
        metrics: acceptance, and tokens per pass of the target.
    """

    sampled_logprobs: list[np.ndarray] | None = None
    metrics: Metrics | None = None


class SpeculativeRollout(base_rollout.BaseRollout):
    """A rollout worker that decodes with speculation. The tokens follow the policy's distribution exactly.

    Give it to a cluster as ``ClusterConfig(rollout_engine=SpeculativeRollout, ...)``, or with further arguments as
    ``functools.partial(SpeculativeRollout, drafter=...)``.

    Consecutive equal prompts are the samples of one prompt, which is read once.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Any = None,
        rollout_config: Any = None,
        *,
        drafter: Drafter | str = "ngram",
        draft_len: int | None = None,
        policy: Policy | str | None = None,
        max_batch: int = 64,
    ):
        """Copies the policy's parameters; compiles nothing.

        The copy lets Tunix see that trainer and worker do not share parameters, so that it calls `update_params` after
        each step.

        Args:
            rollout_actor: a Tunix model, as `bass_jax.models.adapters.from_tunix` takes it.
            tokenizer: as Tunix's sampler takes it.
            mesh: the model's, which Tunix has placed on it already; not used.
            rollout_config: of the cluster; not used, because `generate` receives one.
            drafter: a drafter, or its name; see `bass_jax.drafters.find_drafter`.
            draft_len: drafts per step; None lets `policy` choose.
            policy: chooses draft lengths; default ``"auto"``.
            max_batch: rows that are decoded together.

        Raises:
            ValueError: as `bass_jax.models.adapters.from_tunix` and `bass_jax.drafters.find_drafter`.
        """
        del mesh, rollout_config
        target = from_tunix(rollout_actor)
        target = dataclasses.replace(target, params=jax.tree.map(jnp.copy, target.params))
        drafter = find_drafter(drafter, target) if isinstance(drafter, str) else drafter
        self._structure, _ = split_module(rollout_actor)
        self._tokenizer = tokenizer if isinstance(tokenizer, TokenizerAdapter) else TokenizerAdapter(tokenizer)
        self._draft_len, self._policy, self._max_batch = draft_len, policy, max_batch
        self._num_calls = 0
        self.pair = Pair(target, drafter)

    def generate(self, prompts: list[str], rollout_config: Any, **kwargs: Any) -> SpeculativeRolloutOutput:
        """Samples one completion per prompt.

        Args:
            prompts: texts. Those with more than ``max_prompt_length`` tokens keep their last ones.
            rollout_config: a Tunix ``RolloutConfig``. Its temperature, top-p, top-k, seed, limits and end tokens are
                used. ``top_p=None`` is greedy, as in Tunix. Without a seed, each call uses other random numbers.
            kwargs: not used.

        Returns:
            Tokens without the end token, as Tunix's sampler returns them. ``logprobs`` are those of the softmax of the
            logits divided by the temperature, before top-k and top-p; at temperature 0 those of the logits.
        """
        del kwargs
        config, length = rollout_config, rollout_config.max_prompt_length
        ids = [self._encode(prompt)[-length:] for prompt in prompts]
        stops = list(config.eos_tokens or [self.eos_id()])
        groups, num_samples = _groups(ids)
        output = generate(
            self.pair,
            groups,
            SpecConfig(self._draft_len, num_logprobs=0 if config.return_logprobs else None),
            sampling=_sampling(config),
            max_new_tokens=config.max_tokens_to_generate,
            num_samples=num_samples,
            key=self._key(config.seed),
            stop_tokens=stops,
            policy=self._policy,
            max_batch=self._max_batch,
        )
        lengths = [len(row) - int(len(row) > 0 and row[-1] in stops) for row in output.tokens]
        tokens = [np.asarray(row[:num]) for row, num in zip(output.tokens, lengths, strict=True)]
        padded = np.full((len(ids), length), self.pad_id(), np.int32)
        for row, prompt in zip(padded, ids, strict=True):
            row[length - len(prompt) :] = prompt
        logprobs = sampled = None
        if output.token_logprobs is not None:
            warped = [np.asarray(row.warped_logprobs) for row in output.token_logprobs]
            sampled = [row[:num] for row, num in zip(warped, lengths, strict=True)]
            logprobs = self._logprobs(config, padded, tokens, output.logprobs, sampled)
        texts = [self._tokenizer.decode(row.tolist()) for row in tokens]
        return SpeculativeRolloutOutput(texts, [], tokens, padded, logprobs, sampled, output.metrics)

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> jax.Array:
        """Returns the log-probabilities of completions at temperature 1, ``[B, T]``, as ``VanillaRollout`` does.

        Args:
            prompt_tokens: ``[B, P]``, padded on the left.
            completion_tokens: ``[B, T]``, padded on the right.
        """
        return self._score(prompt_tokens, completion_tokens, 1.0)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replaces the parameters by copies of `params`, in the dtype and placement of the old ones.

        The next calls compile nothing. No caches outlive a call, so none hold keys of old parameters.

        Args:
            params: a state with all parameters, or with some of them, such as those of LoRA.
            filter_types: not needed, because the paths of `params` say which parameters they are.

        Raises:
            ValueError: if the model has no parameter of such a path or shape.
        """
        del filter_types
        new, _ = utils.to_flat_dict(params)
        old, structure = utils.to_flat_dict(self.pair.target.params)  # pyright: ignore[reportAttributeAccessIssue]
        for path, leaf in new.items():
            if path not in old or old[path].shape != leaf.shape:
                raise ValueError(f"params: {'/'.join(map(str, path))}: expected a parameter of the model, of its shape")
        placed = {path: _copy_like(leaf, old[path]) for path, leaf in new.items()}
        merged = jax.tree.unflatten(structure, [placed.get(path, leaf) for path, leaf in old.items()])
        target: Any = self.pair.target
        self.pair = dataclasses.replace(self.pair, target=dataclasses.replace(target, params=merged))

    def pad_id(self) -> int:
        """Returns the id of the padding token."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Returns the id of the end token."""
        return self._tokenizer.eos_id()

    def model(self) -> Any:
        """Returns the policy's module with the current parameters."""
        target: Any = self.pair.target
        return self._structure.merge(target.params)

    def _encode(self, prompt: str) -> list[int]:
        """Returns the token ids of a prompt after one start token, as Tunix's sampler does."""
        start = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        return [int(token) for token in self._tokenizer.dedup_bos_ids(start + list(self._tokenizer.encode(prompt)))]

    def _key(self, seed: Any) -> jax.Array:
        if seed is None:
            self._num_calls += 1
            return jax.random.fold_in(jax.random.key(0), self._num_calls)
        if isinstance(seed, int):
            return jax.random.key(seed)
        return seed if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(seed)

    def _logprobs(
        self, config: Any, prompts: np.ndarray, tokens: list[np.ndarray], raw: Sequence[Any], sampled: list[np.ndarray]
    ) -> list[np.ndarray]:
        """Returns the log-probabilities at the temperature, before top-k and top-p."""
        temperature = 1.0 if config.top_p is None else config.temperature or 1.0
        if temperature == 1.0:
            return [np.asarray(row)[: len(own)] for row, own in zip(raw, tokens, strict=True)]
        if not (config.top_k or 0) > 0 and (config.top_p or 1.0) >= 1.0:
            return sampled
        completions = np.full((len(tokens), config.max_tokens_to_generate), self.pad_id(), np.int32)
        for row, own in zip(completions, tokens, strict=True):
            row[: len(own)] = own
        scores = np.asarray(self._score(prompts, completions, temperature))
        return [row[: len(own)] for row, own in zip(scores, tokens, strict=True)]

    def _score(self, prompt_tokens: Any, completion_tokens: Any, temperature: float) -> jax.Array:
        target: Any = self.pair.target
        return common.compute_per_token_logps(
            self._structure.graphdef,
            target.params,
            prompt_tokens=jnp.asarray(prompt_tokens),
            completion_tokens=jnp.asarray(completion_tokens),
            pad_id=self.pad_id(),
            eos_id=self.eos_id(),
            stop_gradient=True,
            return_logits=False,
            temperature=temperature,
        )


def _copy_like(leaf: Any, old: jax.Array) -> jax.Array:
    """Returns a copy of `leaf` in the dtype and placement of `old`."""
    copied = jnp.array(leaf, old.dtype, copy=True)
    return copied if copied.sharding == old.sharding else jax.device_put(copied, old.sharding)


def _groups(prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Returns the prompts and the number of samples of each, if equal prompts stand together in groups of one size."""
    first = [index for index, prompt in enumerate(prompts) if index == 0 or prompt != prompts[index - 1]]
    sizes = {end - start for start, end in zip(first, [*first[1:], len(prompts)], strict=True)}
    return ([prompts[index] for index in first], sizes.pop()) if len(sizes) == 1 else (prompts, 1)


def _sampling(config: Any) -> SamplingParams:
    if config.top_p is None:  # Tunix's sampler is greedy then.
        return SamplingParams()
    return SamplingParams(config.temperature, max(0, config.top_k or 0), config.top_p)
