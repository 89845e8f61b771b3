"""Speculative rollouts in Tunix: the tokens, log-probabilities and weight updates of Tunix's own rollout worker."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bass_jax.models import tensor_parallel_mesh
from bass_jax.runtime.jit_cache import JIT_CACHE
from tests.models import own_models

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tunix") is None, reason="needs google-tunix, the extra 'tunix'"),
    pytest.mark.filterwarnings("ignore"),  # Tunix uses names that JAX and Flax will remove.
]
VOCAB, LIMIT, PROMPT = 23, 10, 16
TEXTS = ["abcabc", "abcabc", "hello", "hello"]


class Letters:
    """A tokenizer with a token per letter; 0 pads, 1 starts and 2 ends."""

    def encode(self, text):
        return [3 + ord(letter) % (VOCAB - 3) for letter in text]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 1

    def eos_id(self):
        return 2

    def pad_id(self):
        return 0


def config(**changes):
    from tunix.rl.rollout.base_rollout import RolloutConfig

    fields = {"max_tokens_to_generate": LIMIT, "max_prompt_length": PROMPT, "top_p": None, "return_logprobs": True}
    return RolloutConfig(**(fields | changes))


def speculative(module, **options):
    from bass_jax.integrations.tunix import SpeculativeRollout

    return SpeculativeRollout(rollout_actor=module, tokenizer=Letters(), mesh=None, draft_len=3, **options)


def vanilla(module):
    from tunix.rl.rollout.base_rollout import CacheConfig
    from tunix.rl.rollout.vanilla_rollout import VanillaRollout

    sizes = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 8}
    return VanillaRollout(module, Letters(), CacheConfig(cache_size=64, **sizes))


def completions(rows):
    padded = np.zeros((len(rows), LIMIT), np.int32)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return padded


def test_greedy_rollouts_are_those_of_tunix():
    module = own_models.tunix_module(VOCAB, 1, 2.0)
    found, expected = speculative(module).generate(TEXTS, config()), vanilla(module).generate(TEXTS, config())
    for one, other in zip(found.tokens, expected.tokens, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    np.testing.assert_array_equal(found.left_padded_prompt_tokens, expected.left_padded_prompt_tokens)
    assert found.text == expected.text


@pytest.mark.parametrize("changes", [{}, {"top_k": 4}])
def test_sampled_rollouts_report_both_log_probabilities(changes):
    """At a temperature, before top-k, and of the distribution that was sampled from."""
    module = own_models.tunix_module(VOCAB, 1, 2.0)
    rollout = speculative(module)
    output = rollout.generate(TEXTS, config(temperature=0.7, top_p=1.0, seed=jax.random.PRNGKey(3), **changes))
    assert output.tokens[0].tolist() != output.tokens[1].tolist()
    scores = rollout._score(output.left_padded_prompt_tokens, completions(output.tokens), 0.7)
    for tokens, logprobs, sampled, expected in zip(
        output.tokens, output.logprobs, output.sampled_logprobs, np.asarray(scores), strict=True
    ):
        np.testing.assert_allclose(logprobs, expected[: len(tokens)], atol=1e-4)
        assert (sampled >= logprobs - 1e-4).all()
        assert changes == {} or (sampled > logprobs + 1e-3).any()


def test_new_parameters_need_no_compilation_and_score_as_tunix_does():
    from flax import nnx
    from tunix.rl.utils import is_sharing_weights

    module, new = own_models.tunix_module(VOCAB, 1, 2.0), own_models.tunix_module(VOCAB, 5, 2.0)
    rollout = speculative(module)
    assert not is_sharing_weights(module, rollout.model())  # else Tunix updates no parameters
    before = rollout.generate(TEXTS, config())
    num_compiled = JIT_CACHE.num_compiled
    rollout.update_params(nnx.state(new, nnx.Param))
    output = rollout.generate(TEXTS, config())
    assert JIT_CACHE.num_compiled == num_compiled
    assert any(one.tolist() != other.tolist() for one, other in zip(before.tokens, output.tokens, strict=True))
    prompts, answers = jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions(output.tokens))
    expected = vanilla(new).get_per_token_logps(prompts, answers)
    np.testing.assert_allclose(rollout.get_per_token_logps(prompts, answers), expected, atol=1e-5)
    for row, logprobs in zip(np.asarray(expected), output.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, row[: len(logprobs)], atol=1e-4)
    assert jax.tree.all(
        jax.tree.map(lambda one, other: (one == other).all(), nnx.state(rollout.model()), nnx.state(new))
    )


def test_a_part_of_the_parameters_and_an_unknown_one():
    from flax import nnx

    module, new = own_models.tunix_module(VOCAB, 1, 2.0), own_models.tunix_module(VOCAB, 5, 2.0)
    rollout = speculative(module)
    rollout.update_params({"lm_head": nnx.to_pure_dict(nnx.state(new))["lm_head"]})
    changed = nnx.to_pure_dict(nnx.state(rollout.model()))
    np.testing.assert_array_equal(changed["lm_head"]["w"], nnx.to_pure_dict(nnx.state(new))["lm_head"]["w"])
    np.testing.assert_array_equal(changed["final_norm"]["w"], nnx.to_pure_dict(nnx.state(module))["final_norm"]["w"])
    with pytest.raises(ValueError, match="params: lora/w: expected a parameter of the model"):
        rollout.update_params({"lora": {"w": jnp.zeros(3)}})


def test_long_prompts_keep_their_last_tokens_and_several_tokens_end_a_row():
    module = own_models.tunix_module(VOCAB, 1, 2.0)
    rollout = speculative(module)
    free = rollout.generate(["abcabcabcabcabcabcabc"], config(max_prompt_length=4))
    assert free.left_padded_prompt_tokens.tolist() == [Letters().encode("cabc")[-4:]]
    end = int(free.tokens[0][3])
    output = rollout.generate(["abcabcabcabcabcabcabc"], config(max_prompt_length=4, eos_tokens=[2, end]))
    first = free.tokens[0].tolist().index(end)
    assert output.tokens[0].tolist() == free.tokens[0].tolist()[:first]


def test_rollouts_of_a_model_on_a_mesh_are_those_of_one_device():
    """The last axis of every matrix is split over two devices, and new parameters keep their placement."""
    from flax import nnx

    mesh = tensor_parallel_mesh(2)
    module, new = own_models.tunix_module(VOCAB, 1, 2.0), own_models.tunix_module(VOCAB, 5, 2.0)
    expected = [speculative(one).generate(TEXTS, config()) for one in (module, new)]

    def place(leaf):
        is_split = leaf.ndim > 1 and leaf.shape[-1] % 2 == 0
        return jax.device_put(
            leaf, NamedSharding(mesh, PartitionSpec(*[None] * (leaf.ndim - 1), "tp" if is_split else None))
        )

    nnx.update(module, jax.tree.map(place, nnx.state(module)))
    rollout = speculative(module)
    found = [rollout.generate(TEXTS, config())]
    num_compiled = JIT_CACHE.num_compiled
    rollout.update_params(nnx.state(new, nnx.Param))
    found.append(rollout.generate(TEXTS, config()))
    assert JIT_CACHE.num_compiled == num_compiled
    assert any(len(leaf.sharding.device_set) == 2 for leaf in jax.tree.leaves(nnx.state(rollout.model())))
    for one, other in zip(found, expected, strict=True):
        for tokens, right in zip(one.tokens, other.tokens, strict=True):
            np.testing.assert_array_equal(tokens, right)
        for logprobs, right in zip(one.logprobs, other.logprobs, strict=True):
            np.testing.assert_allclose(logprobs, right, atol=1e-4)
