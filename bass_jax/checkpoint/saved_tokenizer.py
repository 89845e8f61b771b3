"""The tokenizer of a checkpoint of ours, read without `transformers`, whose import takes a second of CPU time."""

import datetime
import functools
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bass_jax.runtime.files import read_json

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a chat template can name."""

_EXTENDED = re.compile(r"{%[-+]?\s*generation\b")
"""A statement that only `transformers` has."""


class SavedTokenizer:
    """Has the part of a ``transformers.PreTrainedTokenizerFast`` that `bass_jax.checkpoint.Tokenizer` uses.

    The library `tokenizers` reads the file, and `jinja2` renders chats of plain texts. `transformers` is imported for
    what is beyond that: tools, other content than text, and saving.
    """

    def __init__(self, directory: Path):
        """Reads the files that `bass_jax.checkpoint.Tokenizer.save` wrote."""
        from tokenizers import Tokenizer

        self._directory, template = directory, directory / "chat_template.jinja"
        config = read_json(directory / "tokenizer_config.json")
        named = {name: config[name] for name in _NAMED if config.get(name) is not None}
        self._named = {name: token if isinstance(token, str) else token["content"] for name, token in named.items()}
        self.chat_template = template.read_text(encoding="utf-8") if template.exists() else config.get("chat_template")
        self.backend_tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text."""
        return self.backend_tokenizer.token_to_id(self._named["eos_token"]) if "eos_token" in self._named else None

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, tools: Any, **options: Any) -> str:
        """Renders the chat template as `transformers` does; `options` are ``tokenize`` and the generation prompt."""
        is_plain = all(one.keys() == {"role", "content"} and isinstance(one["content"], str) for one in messages)
        if not messages or not is_plain or tools is not None or _EXTENDED.search(self.chat_template or ""):
            return self._whole.apply_chat_template(messages, tools=tools, **options)
        prompt = options["add_generation_prompt"]
        template = _template(self.chat_template or "")
        return template.render(
            **self._named, messages=messages, tools=None, documents=None, add_generation_prompt=prompt
        )

    def save_pretrained(self, directory: str) -> None:
        """Writes the files."""
        self._whole.save_pretrained(directory)

    @functools.cached_property
    def _whole(self) -> Any:
        tokenizers = import_transformers().PreTrainedTokenizerFast
        return tokenizers.from_pretrained(str(self._directory), local_files_only=True)


@functools.lru_cache(maxsize=16)
def _template(text: str) -> Any:
    """Compiles a chat template, with the functions and the settings that `transformers` documents for templates."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def fail(message: str) -> None:
        raise TemplateError(message)

    def now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "extensions": ["jinja2.ext.loopcontrols"]}
    environment = ImmutableSandboxedEnvironment(**options)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals |= {"raise_exception": fail, "strftime_now": now}
    return environment.from_string(text)


def import_transformers() -> Any:
    """Imports `transformers` without its notice that torch is not installed, because torch is not needed here."""
    logging.getLogger("transformers").addFilter(_is_not_about_torch)
    import transformers

    return transformers


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("PyTorch was not found")
