"""Builds a tokenizer from the metadata of a GGUF file."""

from typing import Any

from bass_jax.checkpoint.saved_tokenizer import import_transformers
from bass_jax.checkpoint.tokenizer import Tokenizer
from bass_jax.runtime.files import one_line

_CONTROL = 3
_USER_DEFINED = 4


def read_gguf_tokenizer(source: Any) -> Tokenizer:
    """Builds the byte-level BPE tokenizer of a `bass_jax.checkpoint.gguf.GgufFile`.

    It does not use the converter of `transformers`, which does not split digits and therefore tokenizes one text in
    fourteen differently from the model's training.

    Raises:
        ValueError: if the file has no tokenizer, or one of another kind.
    """
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    kind, split = source.field("tokenizer.ggml.model"), source.field("tokenizer.ggml.pre")
    if (kind, split) != ("gpt2", "smollm"):
        raise ValueError(
            f"{source.path}: tokenizer.ggml.model={kind!r}, tokenizer.ggml.pre={split!r}: expected 'gpt2' "
            "with 'smollm'; put the model's tokenizer.json next to the file"
        )
    tokens, merges, types = (_read_list(source, name) for name in ("tokens", "merges", "token_type"))
    try:
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        backend = Backend(BPE({token: id for id, token in enumerate(tokens)}, pairs))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{source.path}: not a readable tokenizer: {one_line(error)}") from None
    if len(types) != len(tokens):
        raise ValueError(f"{source.path}: tokenizer.ggml.token_type: {len(types)} for {len(tokens)} tokens")
    backend.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    backend.decoder = ByteLevelDecoder()
    for token, type in zip(tokens, types, strict=True):
        if type in (_CONTROL, _USER_DEFINED):
            added = AddedToken(token, special=type == _CONTROL, normalized=False)
            (backend.add_special_tokens if type == _CONTROL else backend.add_tokens)([added])

    def named(role: str) -> str | None:
        id = source.field(f"tokenizer.ggml.{role}_token_id")
        if id is not None and not (isinstance(id, int) and 0 <= id < len(tokens)):
            raise ValueError(f"{source.path}: tokenizer.ggml.{role}_token_id={id!r}: no such token")
        return None if id is None else tokens[id]

    fast = import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        clean_up_tokenization_spaces=False,
        model_max_length=source.config["max_position_embeddings"],
    )
    fast.chat_template = source.field("tokenizer.chat_template")
    return Tokenizer(fast)


def _read_list(source: Any, name: str) -> list[Any]:
    value = source.field(f"tokenizer.ggml.{name}")
    if not isinstance(value, list):
        raise ValueError(f"{source.path}: tokenizer.ggml.{name}: expected a list")
    return value
