"""The tokenizer: text to token ids and back."""

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bass_jax.checkpoint.detokenizer import IncrementalDecoder, check_ids
from bass_jax.checkpoint.manifest import Manifest
from bass_jax.checkpoint.saved_tokenizer import SavedTokenizer, import_transformers
from bass_jax.runtime.files import one_line, sha256

Message = Mapping[str, Any]
"""One turn of a chat: ``{"role": "system" | "user" | "assistant" | "tool", "content": text}``."""

_PROBE = "Hello, world!  def f(x):\n\treturn x**2 + 1234567890  # naïve café, 東京 🙂\r\n'll IT'S"

_MARK = "<<the message>>"
"""A message that no chat template contains."""

_SPACE = "▁"
"""The character for a space in the tokens of SentencePiece."""

_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
"""A token of SentencePiece for one byte."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
"""A directory with one of these has a tokenizer."""


class Tokenizer:
    """Wraps a fast tokenizer of `transformers`.

    Text that spells an added token, such as ``"<|im_end|>"``, becomes that token, as in `transformers`. A caller who
    serves untrusted text has to remove such text first.

    Two tokenizers are equal, and have the same hash, if their `fingerprint` is the same. A tokenizer can therefore be
    static metadata of a pytree.
    """

    def __init__(self, fast: Any, fingerprint: str | None = None):
        """Wraps a ``transformers.PreTrainedTokenizerFast`` or a `SavedTokenizer`.

        `fingerprint` is computed if it is not given.
        """
        self._fast = fast
        if fingerprint is not None:
            self.__dict__["fingerprint"] = fingerprint
        self._backend = fast.backend_tokenizer
        # A saved tokenizer may truncate or pad. Prompts must not be changed.
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of `text`, ``[n]`` int32, with the special tokens that the model expects."""
        return np.asarray(self._backend.encode(text).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encodes every text, without padding.

        Raises:
            ValueError: if `texts` is one string, not a sequence of them.
        """
        if isinstance(texts, str):
            raise ValueError("texts: expected a sequence of strings, got one string")
        return [np.asarray(encoding.ids, np.int32) for encoding in self._backend.encode_batch(list(texts))]

    def encode_chat(
        self,
        message: str | Message | Sequence[Message],
        *,
        answer_start: str = "",
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> np.ndarray:
        """Encodes a chat up to the start of the assistant's answer.

        Args:
            message: text of the user, or one message, or the whole conversation.
            answer_start: text that the answer begins with.
            tools: functions that the answer can call, as in OpenAI's API.

        Returns:
            ``[n]`` int32.

        Raises:
            ValueError: if the tokenizer has no chat template, or the template refuses the conversation.
        """
        if isinstance(message, str):
            message = [{"role": "user", "content": message}]
        elif isinstance(message, Mapping):
            message = [message]
        return self._encode_rendered(self.render_chat(message, tools) + answer_start)

    def encode_question_start(self) -> np.ndarray:
        """Encodes a chat up to the start of the user's first message, ``[n]`` int32.

        Raises:
            ValueError: as `encode_chat`, and if the template has nothing before the message.
        """
        start, mark, _ = self.render_chat([{"role": "user", "content": _MARK}]).partition(_MARK)
        if not mark or not start:
            raise ValueError("encode_question_start: the chat template has nothing before the user's message")
        return self._encode_rendered(start)

    def _encode_rendered(self, text: str) -> np.ndarray:
        """Encodes the output of a chat template, which contains its special tokens."""
        return np.asarray(self._backend.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_prompt(self, text: str) -> np.ndarray:
        """Encodes a prompt: as a chat if there is a chat template, otherwise as plain text."""
        return self.encode_chat(text) if self.has_chat_template else self.encode(text)

    def render_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """Applies the chat template to a conversation and tools, up to the start of the assistant's answer.

        Raises:
            ValueError: as `encode_chat`.
        """
        from jinja2 import TemplateError

        if self._fast.chat_template is None:
            raise ValueError("encode_chat: this tokenizer has no chat template; use encode")
        try:
            return self._fast.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                tokenize=False,
                add_generation_prompt=True,
            )
        except TemplateError as error:
            raise ValueError(f"encode_chat: the chat template refuses the conversation: {one_line(error)}") from None

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Returns the text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: ``[n]`` token ids. Ids of a padded vocabulary that the tokenizer does not know are skipped.
            skip_special: leave out special tokens such as ``<|im_end|>``.

        Raises:
            ValueError: if an id is negative.
        """
        return self._backend.decode(check_ids(ids), skip_special_tokens=skip_special)

    def incremental_decoder(self, skip_special: bool = True) -> IncrementalDecoder:
        """Returns a decoder for a row whose tokens arrive a few at a time."""
        return IncrementalDecoder(self._backend, skip_special)

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end a text."""
        return () if self._fast.eos_token_id is None else (int(self._fast.eos_token_id),)

    @functools.cached_property
    def start_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that `encode` puts before a text, such as BOS."""
        text = "a"
        ids, plain = self._backend.encode(text).ids, self._backend.encode(text, add_special_tokens=False).ids
        num = next((num for num in range(len(ids)) if ids[num : num + len(plain)] == plain), 0)
        return tuple(ids[:num])

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return "tools" in str(self._fast.chat_template or "")

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be used."""
        return self._fast.chat_template is not None

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.vocabulary.values()) + 1

    @functools.cached_property
    def vocabulary(self) -> dict[str, int]:
        """The id of every token, including added tokens."""
        return self._backend.get_vocab(with_added_tokens=True)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which `decode` leaves out."""
        return frozenset(id for id, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of the single-byte tokens of a byte-level tokenizer; empty for other tokenizers."""
        return frozenset(self.vocabulary[name] for name in self._byte_names if name in self.vocabulary)

    @functools.cached_property
    def _byte_names(self) -> dict[str, int]:
        """The byte that each character of a byte-level vocabulary means; empty for other tokenizers."""
        from tokenizers import decoders, pre_tokenizers

        if not isinstance(self._backend.decoder, decoders.ByteLevel):
            return {}
        names = sorted(pre_tokenizers.ByteLevel.alphabet())
        # A printable byte is its own character. The others have characters from 256 on, in the order of the bytes.
        plain = {name: ord(name) for name in names if ord(name) < 256}
        return plain | dict(zip(names[len(plain) :], sorted(set(range(256)) - set(plain.values())), strict=True))

    @functools.cached_property
    def token_texts(self) -> dict[int, bytes | str]:
        """The bytes of every token; of a special token its name, a string.

        Raises:
            ValueError: if the tokenizer is neither byte-level nor marks spaces like SentencePiece, so that a token
                alone has no text.
        """
        names = self._byte_names
        if not names and not any(_SPACE in token for token in self.vocabulary):
            raise ValueError(f"{self}: expected a byte-level tokenizer, or one that marks spaces with {_SPACE!r}")
        added = self._backend.get_added_tokens_decoder()

        def text_of(token: str, id: int) -> bytes | str:
            if id in added:
                return token if added[id].special else token.encode()
            if names and all(character in names for character in token):
                return bytes(names[character] for character in token)
            if not names and (byte := _BYTE_TOKEN.fullmatch(token)):
                return bytes.fromhex(byte[1])
            return token.replace(_SPACE, " ").encode()

        return {id: text_of(token, id) for token, id in self.vocabulary.items()}

    def encode_part(self, text: bytes) -> list[int]:
        """Encodes a part of a text, which may begin or end inside a word or a character, without special tokens.

        A byte that has no token is left out.
        """
        if self._byte_names:
            by_byte = {byte: name for name, byte in self._byte_names.items()}
            return [token.id for token in self._backend.model.tokenize("".join(by_byte[byte] for byte in text))]
        try:
            return [token.id for token in self._backend.model.tokenize(text.decode().replace(" ", _SPACE))]
        except UnicodeDecodeError:
            names = [f"<0x{byte:02X}>" for byte in text]
            return [self.vocabulary[name] for name in names if name in self.vocabulary]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of the vocabulary, the merges and the ids of a probe text. The chat template is not included."""
        model = json.loads(self._backend.to_str())["model"]
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or ()]
        content = [sorted(self.vocabulary.items()), merges, self._backend.encode(_PROBE).ids]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]

    def to_llguidance(self) -> Any:
        """Returns an ``llguidance.LLTokenizer``, for `bass_jax.sampling.Grammar`.

        Raises:
            ValueError: if no token ends a text.
        """
        import llguidance  # pyright: ignore[reportMissingImports]

        if not self.stop_ids:
            raise ValueError("grammar: the tokenizer has no token that ends a text")
        return llguidance.LLTokenizer(self._backend.to_str(), eos_token=list(self.stop_ids))

    def save(self, directory: Path) -> None:
        """Writes ``tokenizer.json`` and its configuration into `directory`."""
        self._fast.save_pretrained(str(directory))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Tokenizer(vocab_size={self.vocab_size}, fingerprint={self.fingerprint[:8]})"


def has_tokenizer_files(directory: Path) -> bool:
    """Returns whether `directory` has a file that `read_tokenizer` reads."""
    return any((directory / name).is_file() for name in TOKENIZER_FILES)


def read_tokenizer(directory: Path, manifest: Manifest | None = None) -> Tokenizer:
    """Reads the tokenizer files of a checkpoint directory.

    Args:
        directory: with one of `TOKENIZER_FILES`.
        manifest: has the fingerprint if it lists this file; computing it takes 0.25 s.

    Raises:
        ValueError: if there is no tokenizer file, or it cannot be read.
    """
    path = directory / "tokenizer.json"
    if not has_tokenizer_files(directory):
        raise ValueError(f"{directory}: no tokenizer: expected one of {', '.join(TOKENIZER_FILES)}")
    try:
        if manifest is not None and path.is_file() and manifest.files.get(path.name) == sha256(path):
            return Tokenizer(SavedTokenizer(directory), manifest.tokenizer_fingerprint)
        transformers = import_transformers()
        if path.is_file():
            return Tokenizer(
                transformers.PreTrainedTokenizerFast.from_pretrained(str(directory), local_files_only=True)
            )
        return Tokenizer(transformers.AutoTokenizer.from_pretrained(str(directory), local_files_only=True))
    except Exception as error:  # The libraries raise exceptions of many types, also plain Exception.
        raise ValueError(f"{path}: not a readable tokenizer: {one_line(error)}") from None


def fingerprint_mismatch(what: str, fingerprint: str | None, expected: str | None) -> str | None:
    """Returns why a draft or a datastore was made with another tokenizer, or None if it was not.

    Args:
        what: ``"draft"`` or ``"datastore"``, for the message.
        fingerprint: of its tokenizer, if known.
        expected: the fingerprint of the target's tokenizer, if known.
    """
    if fingerprint is None or expected is None or fingerprint == expected:
        return None
    return (
        f"the {what}'s tokenizer ({fingerprint[:8]}) is not the target's ({expected[:8]}): "
        "their token ids mean different text"
    )
