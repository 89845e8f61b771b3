"""The tokens that two tokenizers share, and how the others are written."""

import numpy as np
import pytest

import bass_jax as bass
from bass_jax.checkpoint import match_vocabularies, save_hugging_face, save_model
from bass_jax.drafters import other_vocabulary_drafter
from bass_jax.drafters.other_vocabulary import VocabularyMatch
from tests import tiny
from tests.checkpoint import trained_tokenizers
from tests.checkpoint.small import random_model, small_config, small_tokenizer


@pytest.fixture(scope="module")
def tokenizers():
    return trained_tokenizers.byte_level(), trained_tokenizers.sentence_piece()


def text_of(tokenizer, id):
    text = tokenizer.token_texts[id]
    return text.encode() if isinstance(text, str) else text


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["byte-level target", "byte-level draft"])
def test_tokens_are_shared_by_their_bytes_and_others_are_split(tokenizers, order):
    target, draft = (tokenizers[index] for index in order)
    size = target.vocab_size + 5
    match = match_vocabularies(target, draft, size)
    assert match.own_tokens.shape[0] == len(match.num_own) == size and match.own_tokens.shape[1] <= 8
    assert len(set(match.output_ids.tolist())) == len(set(match.own_ids.tolist())) == len(match.output_ids) > 100
    for id, own in zip(match.output_ids, match.own_ids, strict=True):
        assert target.token_texts[id] == draft.token_texts[own]
        assert match.num_own[id] == 1 and match.own_tokens[id, 0] == own
    shared = set(match.output_ids.tolist())
    others = [id for id in target.token_texts if id not in shared]
    assert max(match.num_own[others]) > 2
    for id in others:
        own = match.own_tokens[id, : match.num_own[id]]
        written = b"".join(text_of(draft, one) for one in own)
        assert text_of(target, id).endswith(written)
        assert written == text_of(target, id) or len(own) == 8
    assert str(match).startswith(f"the draft model can propose {len(shared)} of the target's {size} tokens (")


def test_spaces_bytes_and_special_tokens(tokenizers):
    byte_level, sentence_piece = tokenizers
    match = match_vocabularies(byte_level, sentence_piece, byte_level.vocab_size)
    own = dict(zip(match.output_ids.tolist(), match.own_ids.tolist(), strict=True))
    names, own_names = byte_level.vocabulary, sentence_piece.vocabulary
    assert own[names["Ġthe"]] == own_names["▁the"]
    assert own[names["Ċ"]] == own_names["\n"]  # The token of the text comes before the token of its byte.
    assert own[names["Ð"]] == own_names["<0xD0>"]
    assert own[names["</s>"]] == own_names["</s>"]
    start = names["<|im_start|>"]
    assert start not in own and match.num_own[start] > 1
    # Text that spells the name of a special token is not that token.
    assert byte_level.token_texts[names["</s>"]] == "</s>" and b"</s>" not in byte_level.token_texts.values()


def test_a_token_longer_than_the_table_keeps_its_last_tokens(tokenizers):
    target, draft = small_tokenizer(), tokenizers[1]
    target.__dict__["token_texts"] = {0: b"0123456789", 1: b"\xf0\x9f"}
    match = match_vocabularies(target, draft, 2)
    assert b"".join(text_of(draft, one) for one in match.own_tokens[0]) == b"23456789"
    assert b"".join(text_of(draft, one) for one in match.own_tokens[1, :2]) == b"\xf0\x9f"


def test_the_draft_reads_its_own_start_of_a_text(tokenizers):
    target, draft = trained_tokenizers.byte_level(), tokenizers[1]
    assert target.start_ids == () and draft.start_ids == (draft.vocabulary["<s>"],)
    assert match_vocabularies(target, draft, target.vocab_size).start_tokens.tolist() == [*draft.start_ids]
    start = target.vocabulary["<|im_start|>"]
    target.__dict__["start_ids"] = (start,)
    match = match_vocabularies(target, draft, target.vocab_size)
    assert match.own_tokens[start, : match.num_own[start]].tolist() == [*draft.start_ids]
    assert match.start_tokens.tolist() == [] and start not in match.output_ids


def test_vocabularies_without_a_shared_token_are_refused():
    nothing = np.zeros(0, np.int32)
    match = VocabularyMatch(
        np.zeros((tiny.VOCAB, 1), np.int32), np.ones(tiny.VOCAB, np.int32), nothing, nothing, nothing
    )
    with pytest.raises(ValueError, match="can propose no token of the target"):
        other_vocabulary_drafter(tiny.model(1), match)


@pytest.fixture(scope="module")
def directory(tmp_path_factory, tokenizers):
    """Writes a target and a draft with two tokenizers."""
    path = tmp_path_factory.mktemp("two")
    for name, one, layers, seed in (("target", tokenizers[0], 2, 1), ("draft", tokenizers[1], 1, 2)):
        config = small_config(vocab_size=one.vocab_size + 3, num_layers=layers)
        save_hugging_face(path / name, random_model(config, seed), tokenizer=one)
    return path


@pytest.mark.slow
def test_load_pair_with_two_tokenizers(directory, tokenizers):
    with pytest.warns(UserWarning, match=r"the draft has another tokenizer: the draft model can propose \d+ of"):
        pair = bass.load_pair(directory / "target", drafter=str(directory / "draft"))
    assert type(pair.drafter).__name__ == "OtherVocabularyDrafter"
    prompts = ["The dog", "Größe of the tree 🙂 and the", "def over(first):\n    return first and <|im_start|> the"]
    regular = bass.generate(pair, prompts, step="decode", max_new_tokens=(20, 31, 12), raw=True)
    fixed = bass.SpecConfig(3, "greedy")
    run = bass.generate(pair, prompts, fixed, max_new_tokens=(20, 31, 12), raw=True)
    assert [row.tolist() for row in run.tokens] == [row.tolist() for row in regular.tokens]
    assert run.metrics.num_drafted > 40
    shared = match_vocabularies(*tokenizers, pair.target.vocab_size).output_ids
    assert set(pair.drafter.model.output_ids.tolist()) == set(shared.tolist())


def test_a_draft_without_its_tokenizer_is_refused(directory, tmp_path):
    """The manifest names the fingerprint of a tokenizer whose files are missing."""
    save_model(tmp_path / "draft", random_model(small_config(num_layers=1)), tokenizer=small_tokenizer("i n"))
    for file in (tmp_path / "draft").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="draft"):
        bass.load_pair(directory / "target", drafter=tmp_path / "draft")


def test_a_draft_that_reads_hidden_states_needs_the_targets_tokenizer(directory, tmp_path):
    draft = random_model(small_config(num_layers=1, hidden_width=16))
    save_model(tmp_path / "draft", draft, tokenizer=small_tokenizer("i n"))
    with pytest.raises(ValueError, match="hidden_width=16: expected a draft with the target's tokenizer"):
        bass.load_pair(directory / "target", drafter=tmp_path / "draft")


def test_a_vocabulary_smaller_than_its_tokenizer_is_refused(directory, tmp_path):
    draft = random_model(small_config(num_layers=1, vocab_size=200))
    save_model(tmp_path / "draft", draft, tokenizer=small_tokenizer("i n"))
    with pytest.raises(ValueError, match="the draft's vocabulary has 200 tokens, its tokenizer 259"):
        bass.load_pair(directory / "target", drafter=tmp_path / "draft")


def test_a_pair_without_a_tokenizer_is_refused(directory):
    with pytest.raises(ValueError, match="expected a pair with a tokenizer"):
        bass.load_pair("tests.checkpoint.test_other_vocabulary:without_tokenizer", drafter=directory / "draft")


def without_tokenizer():
    return bass.Pair(tiny.model(1), tiny.model_drafter(tiny.model(1)))
