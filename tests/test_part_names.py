"""A part is an object, a registered name or ``"module:name"`` with arguments: in calls, YAML and commands."""

import dataclasses
import json

import jax
import pytest

import bass_jax as bass
from bass_jax import checkpoint
from bass_jax.acceptance import TOKEN, find_rule
from bass_jax.cli.main import main
from bass_jax.drafters import NgramDrafter, find_drafter, register_drafter, registry
from bass_jax.drafters.template import RepeatDrafter
from bass_jax.policies import find_policy
from bass_jax.policies.template import OneMore
from tests import tiny
from tests.checkpoint.small import random_model, small_config, small_tokenizer

MINE = '''
import dataclasses
import jax
import jax.numpy as jnp
import bass_jax as bass
from bass_jax.acceptance import TOKEN
from bass_jax.drafters import ModelDrafter, Proposal
from bass_jax.policies.template import OneMore

@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Bigram:
    """Proposes what followed the last token at its previous occurrence."""

    most: int = dataclasses.field(default=32, metadata={"static": True})

    def init(self, tokens, lengths):
        return None

    def propose(self, state, context, draft_len, *, is_sampled):
        def look_up(tokens, length):
            place = jnp.arange(tokens.shape[0])
            is_match = (tokens == tokens[length - 1]) & (place < length - 1)
            start = jnp.max(jnp.where(is_match, place, -1))
            drafts = jnp.take(tokens, start + 1 + jnp.arange(draft_len), mode="clip")
            return drafts, jnp.where(start < 0, 0, length - 1 - start)

        drafts, num_found = jax.vmap(look_up)(context.tokens, context.lengths)
        return Proposal(drafts, jnp.minimum(jnp.minimum(context.num_wanted, num_found), self.most), None), state

    def commit(self, state, lengths):
        return state

def draft_model(target):
    return ModelDrafter(target, target.vocab_size)

def named(name):
    return dataclasses.replace(TOKEN, name=name)

RULE = dataclasses.replace(TOKEN, name="mine")
POLICY = OneMore()
NUMBER = 3
'''


@pytest.fixture
def mine(tmp_path, monkeypatch) -> str:
    """Writes a user's module into a directory that becomes the current one; returns the module's name."""
    name = f"mine_{tmp_path.name}"  # a new name, because a module is imported once
    (tmp_path / f"{name}.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    return name


@pytest.fixture(scope="module")
def target_path(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("target")
    checkpoint.save_model(path, random_model(small_config()), tokenizer=small_tokenizer())
    return str(path)


def test_names_of_drafters(mine):
    target = tiny.model(1)
    assert type(find_drafter(f"{mine}:Bigram", target)).__name__ == "Bigram"
    assert find_drafter(f"{mine}:Bigram(most=2)", target).most == 2
    assert find_drafter(f"./{mine}.py:Bigram(3)", target).most == 3
    assert find_drafter(f"{mine}:draft_model", target).model is target
    assert find_drafter("ngram(max_ngram=4)", target) == NgramDrafter(max_ngram=4)
    for name, message in [
        (f"{mine}:Bigram(size=2)", "got an unexpected keyword argument 'size'"),
        (f"{mine}:Bigram(", "expected arguments as in 'ngram"),
        (f"{mine}:NUMBER", "is int without init and propose and commit: expected an object with"),
        (f"{mine}:Unigram", "has no attribute 'Unigram'"),
    ]:
        with pytest.raises(ValueError, match=message):
            find_drafter(name, target)


def test_a_registered_drafter(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    register_drafter("repeat", RepeatDrafter)
    pair = bass.decoding.random_pair(tiny.config(), "repeat")
    assert isinstance(pair.drafter, RepeatDrafter)
    with pytest.raises(ValueError, match="drafter='repeat': a drafter of this name is registered already"):
        register_drafter("repeat", RepeatDrafter)


def test_names_of_rules_and_policies(mine):
    assert find_rule(TOKEN) is TOKEN
    assert find_rule(f"{mine}:RULE").name == "mine"
    assert find_rule(f"{mine}:named('other')") is find_rule(f"{mine}:named('other')")
    with pytest.raises(ValueError, match="expected an AcceptanceRule, not int"):
        find_rule(f"{mine}:NUMBER")
    assert isinstance(find_policy(f"{mine}:POLICY"), OneMore)
    assert isinstance(find_policy(f"{mine}:OneMore"), OneMore)
    with pytest.raises(ValueError, match="int has no lengths and init and update: expected an object with"):
        find_policy(f"{mine}:NUMBER")


def test_a_rule_can_be_an_object():
    pair = bass.Pair(tiny.model(1), RepeatDrafter())
    rule = dataclasses.replace(TOKEN, name="object")
    sampling = bass.SamplingParams(temperature=1.0)
    outputs = [
        bass.generate(pair, [[1, 2]], bass.SpecConfig(4, one), max_new_tokens=8, sampling=sampling).tokens[0].tolist()
        for one in (rule, "token")
    ]
    assert outputs[0] == outputs[1]


def test_a_pair_by_name(mine, tmp_path):
    lines = ["from tests import tiny", "def pair(seed):", "    return bass.Pair(tiny.model(seed), Bigram())"]
    (tmp_path / f"{mine}_pair.py").write_text("\n".join([MINE, *lines]))
    pair = bass.load_pair(f"{mine}_pair:pair(seed=2)", drafter="ngram")
    assert isinstance(pair.drafter, NgramDrafter)
    assert jax.tree.all(jax.tree.map(lambda one, other: (one == other).all(), pair.target, tiny.model(2)))


@pytest.mark.slow
def test_an_own_drafter_on_the_command_line_and_in_a_configuration(mine, target_path, capsys, tmp_path):
    """From the directory of the user."""
    arguments = ("--pair", target_path, "--draft", f"{mine}:Bigram(most=3)", "--draft-len", "3", "--quiet")
    assert main(["generate", *arguments, "--max-new-tokens", "6", "--json", "one two one two one"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one two one"}\n{"prompt": "the other one"}\n')
    (tmp_path / "config.yaml").write_text(
        f"""
output_dir: {tmp_path}/run
pair:
  path: {target_path}
  draft: {mine}:Bigram
task:
  name: prompts
  data: {tmp_path}/prompts.jsonl
max_new_tokens: 6
methods:
  regular:
    step: decode
    batch: 2
  mine:
    batch: 2
    draft_len: 3
  other:
    batch: 2
    draft_len: 3
    draft: {mine}:Bigram(most=2)
"""
    )
    assert main(["run", "config.yaml"]) == 0
    printed = capsys.readouterr().out
    assert "mine" in printed and "other" in printed
