"""User messages that the target generates."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.checkpoint import Tokenizer
from bass_jax.checkpoint.tokenizer import import_transformers
from bass_jax.training.prompts import prompt_source
from bass_jax.training.rollout import roll_out
from bass_jax.training.write_corpus import write_corpus
from recipes.quickstart_draft.sources import SelfAskedSource
from tests.checkpoint.small import random_model, small_config, small_tokenizer

HEADER = "{% for message in messages %}<pad>user\n{{ message['content'] }}<end>{% endfor %}bot:"
ASKED = {
    "kind": "self_asked",
    "name": "asked",
    "num": 24,
    "top": 264,
    "max_new_tokens": 24,
    "templates": ["Q: {prompt}"],
}


def make_tokenizer(template: str) -> Tokenizer:
    fast = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=small_tokenizer()._backend, eos_token="<end>", pad_token="<pad>"
    )
    fast.chat_template = template
    return Tokenizer(fast)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(HEADER)


@pytest.fixture(scope="module")
def model():
    """Random, but its messages end and have spaces in them."""
    tokenizer = small_tokenizer()
    model = random_model(small_config(is_tied=False, has_head_bias=True), 0)
    stop, space = tokenizer.stop_ids[0], int(tokenizer.encode("a b")[1])
    bias = np.zeros(model.config.vocab_size, np.float32)
    bias[stop], bias[space] = 2.5, 4.0
    return dataclasses.replace(model, params=model.params | {"head_bias": jnp.asarray(bias)})


@pytest.fixture
def config(make_config):
    return make_config([ASKED], rollout={"batch": 8, "max_new_tokens": 4, "top": 4, "num_tokens": 10})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "questions" / "asked.jsonl"


def test_the_chat_template_up_to_the_users_message(tokenizer):
    start = tokenizer.encode_question_start()
    assert tokenizer.decode(start, skip_special=False) == "<pad>user\n"
    whole = tokenizer.encode_chat("why?")
    np.testing.assert_array_equal(whole[: len(start)], start)


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m['content'] }}{% endfor %}", "fixed"])
def test_a_template_without_a_header_is_refused(template):
    with pytest.raises(ValueError, match="nothing before the user's message"):
        make_tokenizer(template).encode_question_start()


@pytest.mark.slow
def test_messages_are_complete_and_distinct(config, model, tokenizer, path):
    source = prompt_source(config)
    source.write_prompts(model, tokenizer)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    texts = [row["prompt"] for row in rows]
    assert 2 < len(texts) == len(set(texts)) and all(len(text.split()) >= 3 for text in texts)
    # The first batch, generated here.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 0), 0)
    drawn = roll_out(
        model,
        [tokenizer.encode_question_start()] * 8,
        temperatures=[1.0] * 8,
        key=key,
        max_new_tokens=24,
        stop_ids=tokenizer.stop_ids,
        top=264,
    )
    ended = [one.response for one in drawn if one.response[-1] in tokenizer.stop_ids]
    wanted = [text for text in (tokenizer.decode(ids).strip() for ids in ended) if len(text.split()) >= 3]
    assert texts[: len(wanted)] == list(dict.fromkeys(wanted)) and len(ended) < 8
    assert {prompt.text for prompt in source.prompts()} == {f"Q: {text}" for text in texts}


@pytest.mark.slow
def test_an_interrupted_call_is_continued(config, model, tokenizer, path):
    source = prompt_source(config)
    source.write_prompts(model, tokenizer)
    whole = path.read_text()
    path.write_text("".join(line + "\n" for line in whole.splitlines() if json.loads(line)["batch"] == 0))
    assert path.read_text() != whole
    source.write_prompts(model, tokenizer)
    assert path.read_text() == whole


@pytest.mark.slow
def test_a_corpus_answers_the_messages(config, model, tokenizer):
    source = prompt_source(config)
    corpus = write_corpus(config, source, model, tokenizer)
    encoded = {tokenizer.encode_chat(prompt.text).tobytes() for prompt in source.prompts()}
    answered = [rollout.prompt.tobytes() for rollout, name in corpus.read() if name == "asked"]
    assert answered and set(answered) <= encoded


def test_messages_that_were_not_generated_are_an_error(config):
    with pytest.raises(ValueError, match=r"questions/asked\.jsonl: cannot be read"):
        prompt_source(config).prompts()


@pytest.mark.parametrize("name", ["num", "temperature", "top", "max_new_tokens"])
def test_numbers_are_positive(name):
    with pytest.raises(ValueError, match=f"{name}=0: expected a positive number"):
        SelfAskedSource(**{"name": "asked", "num": 1, name: 0})
