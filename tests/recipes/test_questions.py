"""Messages that the target writes in the user's place."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bass_jax.checkpoint import Tokenizer
from bass_jax.checkpoint.tokenizer import import_transformers
from bass_jax.training.prompts import build_prompts, question_file
from bass_jax.training.questions import questions_directory, write_questions
from bass_jax.training.recipe import SelfAskedSource
from bass_jax.training.rollout import roll_out
from bass_jax.training.write_corpus import write_corpus
from tests.checkpoint.small import random_model, small_config, small_tokenizer

HEADER = "{% for message in messages %}<pad>user\n{{ message['content'] }}<end>{% endfor %}bot:"
SOURCE = {
    "kind": "self_asked", "name": "asked", "num": 24, "top": 264, "max_new_tokens": 24, "templates": ["Q: {prompt}"]
}  # fmt: skip


def _tokenizer(template: str) -> Tokenizer:
    fast = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=small_tokenizer()._backend, eos_token="<end>", pad_token="<pad>"
    )
    fast.chat_template = template
    return Tokenizer(fast)


@pytest.fixture
def tokenizer():
    return _tokenizer(HEADER)


@pytest.fixture(scope="module")
def model():
    """Of no opinion, but that messages end, and have spaces in them."""
    tokenizer = small_tokenizer()
    model = random_model(small_config(is_tied=False, has_head_bias=True), 0)
    stop, space = tokenizer.stop_ids[0], int(tokenizer.encode("a b")[1])
    bias = np.zeros(model.config.vocab_size, np.float32)
    bias[stop], bias[space] = 2.5, 4.0
    return dataclasses.replace(model, params=model.params | {"head_bias": jnp.asarray(bias)})


@pytest.fixture
def config(make_config):
    prompts = {"sources": [SOURCE], "max_prompt_tokens": 64}
    rollout = {"batch": 8, "max_new_tokens": 4, "top": 4, "num_tokens": 10}
    config = make_config(rollout=rollout)
    return make_config(rollout=rollout, prompts=prompts | {"data_dir": config.prompts.data_dir})


def test_a_chat_begins_where_the_user_may_speak(tokenizer):
    start = tokenizer.encode_question_start()
    assert tokenizer.decode(start, skip_special=False) == "<pad>user\n"
    whole = tokenizer.encode_chat("why?")
    np.testing.assert_array_equal(whole[: len(start)], start)


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m['content'] }}{% endfor %}", "fixed"])
def test_a_template_without_a_header_is_refused(template):
    with pytest.raises(ValueError, match="nothing before the user's message"):
        _tokenizer(template).encode_question_start()


def test_messages_are_whole_distinct_and_the_targets_own(config, model, tokenizer):
    write_questions(config, model, tokenizer)
    path = question_file(questions_directory(config), "asked")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    texts = [row["prompt"] for row in rows]
    assert 2 < len(texts) == len(set(texts)) and all(len(text.split()) >= 3 for text in texts)
    # Those of the first wave, drawn once more by hand.
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), 0), 0)
    drawn = roll_out(
        model, [tokenizer.encode_question_start()] * 8, temperatures=[1.0] * 8, key=key, max_new_tokens=24,
        stop_ids=tokenizer.stop_ids, top=264,
    )  # fmt: skip
    ended = [one.response for one in drawn if one.response[-1] in tokenizer.stop_ids]
    wanted = [text for text in (tokenizer.decode(ids).strip() for ids in ended) if len(text.split()) >= 3]
    assert texts[: len(wanted)] == list(dict.fromkeys(wanted)) and len(ended) < 8
    prompts = build_prompts(config.prompts, config.seed, questions_directory(config)).prompts
    assert {prompt.text for prompt in prompts} == {f"Q: {text}" for text in texts}


def test_an_interrupted_writing_goes_on(config, model, tokenizer):
    write_questions(config, model, tokenizer)
    path = question_file(questions_directory(config), "asked")
    whole = path.read_text()
    path.write_text("".join(line + "\n" for line in whole.splitlines() if json.loads(line)["batch"] == 0))
    assert path.read_text() != whole
    write_questions(config, model, tokenizer)
    assert path.read_text() == whole


def test_a_corpus_answers_them(config, model, tokenizer):
    corpus = write_corpus(config, model, tokenizer)
    asked = build_prompts(config.prompts, config.seed, questions_directory(config)).prompts
    encoded = {tokenizer.encode_chat(prompt.text).tobytes() for prompt in asked}
    answered = [rollout.prompt.tobytes() for rollout, source in corpus.read() if source == "asked"]
    assert answered and set(answered) <= encoded


def test_without_a_directory_they_are_missed(config):
    with pytest.raises(ValueError, match="asked: expected a directory"):
        build_prompts(config.prompts, config.seed)


@pytest.mark.parametrize("name", ["num", "temperature", "top", "max_new_tokens"])
def test_numbers_are_positive(name):
    with pytest.raises(ValueError, match=f"{name}=0: expected a positive number"):
        SelfAskedSource(**{"name": "asked", "num": 1, name: 0})
