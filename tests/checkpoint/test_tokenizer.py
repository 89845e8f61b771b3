"""Tokenizers encode and decode exactly, and incremental decoding gives the same text as `decode`."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bass_jax.checkpoint import Tokenizer, load_tokenizer
from bass_jax.checkpoint.manifest import Manifest
from bass_jax.checkpoint.saved_tokenizer import SavedTokenizer, import_transformers
from bass_jax.checkpoint.tokenizer import read_tokenizer
from bass_jax.runtime.files import sha256
from tests.checkpoint.slow_bpe import SlowBpe
from tests.checkpoint.small import small_tokenizer

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
ALPHABET = list(
    "aAzZeEtT019.,;:!?'\"()[]{}<>|/\\_-+*=#@$%^&~` \n\t\réñüßøçαβжщ東京日本語한국어🙂👩‍👩‍👧é²½Ⅳ٣ﷺ\u00a0\u200b\u3000"
)
WORDS = [
    *("the", " of", "def ", "return", "import numpy as np\n", "don't", "IT'S", "we'll", "e.g.", "http", "“quoted”"),
    *("12345", "3.14", " 7 ", "x²", "Ⅳ", "１２", "naïve café", "東京", "🙂", "…", "—"),
    *("    ", "  ", "\n\n", "\r\n", "\t", "<|im_end|>", "<|im_start|>user\n", "<|im", "|>", "<repo_name>"),
]


def random_texts(count: int) -> list[str]:
    draw = np.random.default_rng(0)
    texts = ["", " ", "\n", "a", "<|im_end|>", "123", "  leading", "trailing  "]
    while len(texts) < count:
        chunks = WORDS if len(texts) % 2 else ALPHABET
        texts.append("".join(draw.choice(chunks, draw.integers(1, 60))))
    return texts


@pytest.fixture(scope="module")
def slow(smollm2_file) -> SlowBpe:
    tokens, merges = (smollm2_file.field(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    return SlowBpe(tokens, merges, num_special=17)


@pytest.mark.slow
def test_encoding_agrees_with_an_independent_bpe(smollm2, slow):
    sources = sorted(Path(__file__).parents[2].glob("bass_jax/*.py"))
    texts = [*random_texts(400), *(path.read_text()[:1500] for path in sources)]
    for text, ids in zip(texts, smollm2.encode_batch(texts), strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == slow.encode(text)
        np.testing.assert_array_equal(ids, smollm2.encode(text))


def test_decoding_restores_the_text(smollm2):
    for text in random_texts(400):
        assert smollm2.decode(smollm2.encode(text), skip_special=False) == text


def test_chats_are_encoded_by_the_chat_template(smollm2):
    expected = (
        f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    )
    np.testing.assert_array_equal(smollm2.encode_chat("Hi there"), smollm2.encode(expected))
    user = {"role": "user", "content": "Hi there"}
    np.testing.assert_array_equal(smollm2.encode_chat(user), smollm2.encode(expected))
    conversation = [
        {"role": "system", "content": "Be brief."},
        user,
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "2+2"},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\nYes?"
        "<|im_end|>\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n"
    )
    np.testing.assert_array_equal(smollm2.encode_chat(conversation), smollm2.encode(expected))


def test_special_tokens_of_smollm2(smollm2):
    assert smollm2.stop_ids == (2,)
    assert smollm2.vocab_size == 49152
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.encode("<|im_end|>").tolist() == [2]
    assert smollm2.decode([2, 1, 28120]) == smollm2.decode([28120])
    assert smollm2.encode("no bos")[0] != 1


def test_a_stored_tokenizer_is_loaded_unchanged(smollm2, tmp_path):
    smollm2.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again == smollm2 and hash(again) == hash(smollm2)
    assert again.stop_ids == smollm2.stop_ids and again.special_ids == smollm2.special_ids
    texts = random_texts(100)
    for a, b in zip(again.encode_batch(texts), smollm2.encode_batch(texts), strict=True):
        np.testing.assert_array_equal(a, b)
        assert again.decode(a, skip_special=False) == smollm2.decode(b, skip_special=False)
    np.testing.assert_array_equal(again.encode_chat("Hi"), smollm2.encode_chat("Hi"))


def test_a_stored_truncation_is_ignored(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert len(load_tokenizer(tmp_path).encode("a long text")) == 11


def test_tokenizers_are_equal_if_their_contents_are(tokenizer, smollm2):
    assert tokenizer == small_tokenizer() and hash(tokenizer) == hash(small_tokenizer())
    other = small_tokenizer(merge="i n")
    assert other != tokenizer and tokenizer != smollm2 and tokenizer != "tokenizer"


def test_the_fingerprint_in_a_manifest_is_used_if_the_file_is_the_listed_one(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    listed = {"tokenizer.json": sha256(tmp_path / "tokenizer.json")}
    assert read_tokenizer(tmp_path, Manifest(files=listed, tokenizer_fingerprint="known")).fingerprint == "known"
    other = Manifest(files={"tokenizer.json": "0" * 64}, tokenizer_fingerprint="of another")
    assert read_tokenizer(tmp_path, other).fingerprint == tokenizer.fingerprint
    assert read_tokenizer(tmp_path, Manifest(files=listed)).fingerprint == tokenizer.fingerprint


def test_invalid_input_is_refused(tokenizer):
    with pytest.raises(ValueError, match="texts: expected a sequence"):
        tokenizer.encode_batch("one string")
    with pytest.raises(ValueError, match="token id -1 is negative"):
        tokenizer.decode([3, -1])
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.encode_chat("hello")
    assert tokenizer.decode([10**6]) == ""


def test_the_error_of_a_chat_template_is_reported(tokenizer):
    fast = import_transformers().PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend, eos_token="<end>")
    fast.chat_template = "{{ raise_exception('only one turn') }}"
    with pytest.raises(ValueError, match="refuses the conversation: only one turn"):
        Tokenizer(fast).encode_chat("hello")


TEMPLATES = [
    "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}",
    """
    {%- set found = namespace(system='') %}
    {%- for m in messages if m['role'] == 'system' %}
        {%- set found.system = m['content'] | trim %}
    {%- endfor %}
    {{- (bos_token or '') + found.system + strftime_now('%Y') }}
    {% for m in messages %}
        {% if m['role'] == 'system' %}{% continue %}{% endif %}
        {{ m | tojson }} {{ loop.index }}
    {% endfor %}
    {% if tools %}{{ tools | tojson(indent=2) }}{% endif %}""",
    "{% if messages|length > 1 %}{{ raise_exception('only one') }}{% endif %}{% generation %}<é>{% endgeneration %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_saved_tokenizer_is_that_of_transformers(tokenizer, tmp_path, template):
    """Chats of texts are rendered here, others by `transformers`; both give what `transformers` gives."""
    tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    saved, whole = Tokenizer(SavedTokenizer(tmp_path)), load_tokenizer(tmp_path)
    assert saved == whole and saved.stop_ids == whole.stop_ids and saved.special_ids == whole.special_ids
    system, user = {"role": "system", "content": " Be <brief>. "}, {"role": "user", "content": "naïve"}
    tools = [{"type": "function", "function": {"name": "add"}}]
    for messages, listed in (([user], None), ([system, user], None), ([user | {"name": None}], None), ([user], tools)):
        texts = []
        for one in (saved, whole):
            try:
                texts.append(one.render_chat(messages, listed))
            except ValueError as error:
                texts.append(str(error))
        assert texts[0] == texts[1], messages


def test_a_saved_tokenizer_renders_chats_without_transformers(tokenizer, tmp_path, monkeypatch):
    tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[0])
    listed = {"tokenizer.json": sha256(tmp_path / "tokenizer.json")}
    monkeypatch.setitem(sys.modules, "transformers", None)
    saved = read_tokenizer(tmp_path, Manifest(files=listed, tokenizer_fingerprint="known"))
    assert saved.render_chat([{"role": "user", "content": "hi"}]) == "hi<end>a:"
    with pytest.raises(ImportError):
        saved.save(tmp_path)


def chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 49151) | st.integers(0, 300) | st.integers(49152, 49300), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=20),
    skip_special=st.booleans(),
)
def test_incremental_decoding_equals_decode_for_any_ids(smollm2, ids, cuts, skip_special):
    decoder = smollm2.incremental_decoder(skip_special)
    texts = [decoder.push(chunk) for chunk in chunks(ids, cuts)]
    assert "".join(texts) + decoder.flush() == smollm2.decode(ids, skip_special)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 100), max_size=30))
def test_incremental_decoding_never_splits_a_character(smollm2, text, cuts):
    # The vocabulary lacks some bytes that only unassigned characters contain.
    text = "".join(character for character in text if smollm2.decode(smollm2.encode(character), False) == character)
    decoder = smollm2.incremental_decoder(skip_special=False)
    texts = [decoder.push(chunk) for chunk in chunks(smollm2.encode(text).tolist(), cuts)]
    assert decoder.flush() == ""
    assert "".join(texts) == text
    assert "\ufffd" in text or not any("\ufffd" in chunk for chunk in texts)


def test_a_character_is_returned_once_its_last_byte_is_pushed(smollm2):
    decoder = smollm2.incremental_decoder()
    ids = smollm2.encode("🙂").tolist()
    assert len(ids) > 1
    assert [decoder.push([id]) for id in ids] == [""] * (len(ids) - 1) + ["🙂"]
    assert decoder.push(smollm2.encode(" yes")) == " yes"


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20), cuts=st.lists(st.integers(0, 60), max_size=10))
def test_incremental_decoding_with_byte_fallback(sentencepiece_like, text, cuts):
    ids = sentencepiece_like.encode(text).tolist()
    decoder = sentencepiece_like.incremental_decoder()
    texts = [decoder.push(chunk) for chunk in chunks(ids, cuts)]
    assert "".join(texts) + decoder.flush() == sentencepiece_like.decode(ids)


def test_invalid_bytes_are_returned_by_flush(sentencepiece_like):
    """The library's `DecodeStream` raises for them, and does not return an unfinished character."""
    ids = sentencepiece_like.encode("ab🙂").tolist()
    for broken in ([*ids, 1 + 0x9B], ids[:-1], [*ids[:-1], *sentencepiece_like.encode("cd").tolist()]):
        decoder = sentencepiece_like.incremental_decoder()
        texts = [decoder.push([id]) for id in broken]
        whole = sentencepiece_like.decode(broken)
        assert "\ufffd" in whole
        assert "".join(texts).startswith("ab")
        assert ("".join(texts) + decoder.flush()).endswith(whole[3:])


@pytest.fixture(scope="module")
def sentencepiece_like() -> Tokenizer:
    """Returns a tokenizer like that of Llama 2: "▁" for spaces, and a token per byte of other characters."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, normalizers
    from tokenizers.models import BPE

    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    backend = Backend(BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(import_transformers().PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
