"""An retrieval datastore on disk: one safetensors file, mapped into memory when it is read."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from bass_jax.checkpoint.tokenizer import Tokenizer
from bass_jax.runtime.files import one_line

FORMAT = "bass_jax retrieval datastore"
VERSION = 1
_DTYPES = {"keys": ("uint32",), "tokens": ("uint16", "int32"), "confidence": ("uint8",)}


def write_datastore(
    path: str | PathLike[str],
    arrays: Mapping[str, np.ndarray],
    *,
    max_ngram: int,
    min_ngram: int,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Writes the arrays of a `bass_jax.drafters.RetrievalDrafter`, at once or not at all.

    Args:
        path: of the file.
        arrays: ``keys``, ``tokens`` and ``confidence``.
        max_ngram: longest context.
        min_ngram: shortest context.
        vocab_size: V of the target.
        tokenizer: the target's; its fingerprint is stored.
        about: what the store was made from, for people.
    """
    from safetensors.numpy import save

    path = Path(path)
    fingerprint = None if tokenizer is None else tokenizer.fingerprint
    metadata = {
        "format": FORMAT, "version": VERSION, "max_ngram": max_ngram, "min_ngram": min_ngram,
        "vocab_size": vocab_size, "tokenizer_fingerprint": fingerprint, "about": dict(about or {}),
    }  # fmt: skip
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(save(dict(arrays), metadata={"datastore": json.dumps(metadata)}))
    partial.replace(path)


def read_datastore(
    path: str | PathLike[str], *, vocab_size: int | None = None, tokenizer: Tokenizer | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads what `write_datastore` wrote.

    Args:
        path: of the file.
        vocab_size: V of the target that it is to draft for; None does not ask.
        tokenizer: of that target; None does not ask.

    Returns:
        ``(arrays, metadata)``.

    Raises:
        ValueError: naming the file, if it is no store, damaged, or of another tokenizer or vocabulary.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = json.loads((file.metadata() or {}).get("datastore", "{}"))
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: not readable as a retrieval datastore: {one_line(error)}") from None
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path}: not a retrieval datastore; bass-jax build-datastore writes one")
    if metadata.get("version") != VERSION:
        raise ValueError(f"{path}: version={metadata.get('version')!r}: this release reads version {VERSION}")
    sizes = {len(array) for array in arrays.values()}
    if arrays.keys() != _DTYPES.keys() or len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"{path}: expected keys, tokens and confidence, of one length and not empty")
    for name, allowed in _DTYPES.items():
        if arrays[name].dtype.name not in allowed:
            raise ValueError(f"{path}: {name} is {arrays[name].dtype.name}: expected {' or '.join(allowed)}")
    if not 1 <= metadata["min_ngram"] <= metadata["max_ngram"]:
        raise ValueError(f"{path}: contexts of {metadata['min_ngram']} to {metadata['max_ngram']} tokens")
    fingerprint = metadata.get("tokenizer_fingerprint")
    if tokenizer is not None and fingerprint not in (None, tokenizer.fingerprint):
        raise ValueError(
            f"{path}: the store's tokenizer ({fingerprint[:8]}) is not the target's "
            f"({tokenizer.fingerprint[:8]}): their token ids mean different text"
        )
    if vocab_size is not None and metadata["vocab_size"] > vocab_size:
        raise ValueError(f"{path}: a store of {metadata['vocab_size']} tokens, the target has {vocab_size}")
    return arrays, metadata
