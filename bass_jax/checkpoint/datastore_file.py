"""A retrieval datastore on disk: one safetensors file, mapped into memory when it is read."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from bass_jax.checkpoint.tokenizer import Tokenizer, fingerprint_mismatch
from bass_jax.runtime.files import one_line, write_atomically

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
    """Writes the arrays of a `bass_jax.drafters.RetrievalDrafter` atomically.

    Args:
        path: the file.
        arrays: ``keys``, ``tokens`` and ``confidence``.
        max_ngram: length of the longest context.
        min_ngram: length of the shortest context.
        vocab_size: V of the target.
        tokenizer: the target's; its fingerprint is stored.
        about: a description of what the datastore was built from.
    """
    from safetensors.numpy import save

    path = Path(path)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "max_ngram": max_ngram,
        "min_ngram": min_ngram,
        "vocab_size": vocab_size,
        "tokenizer_fingerprint": None if tokenizer is None else tokenizer.fingerprint,
        "about": dict(about or {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(dict(arrays), metadata={"datastore": json.dumps(metadata)}))


def read_datastore(
    path: str | PathLike[str], *, vocab_size: int | None = None, tokenizer: Tokenizer | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads a file of `write_datastore` and returns ``(arrays, metadata)``.

    Args:
        path: the file.
        vocab_size: V of the target that it will draft for; None for no check.
        tokenizer: tokenizer of that target; None for no check.

    Raises:
        ValueError: naming the file, if it is no datastore, damaged, or of another tokenizer or vocabulary.
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
    expected = None if tokenizer is None else tokenizer.fingerprint
    if reason := fingerprint_mismatch("datastore", metadata.get("tokenizer_fingerprint"), expected):
        raise ValueError(f"{path}: {reason}")
    if vocab_size is not None and metadata["vocab_size"] > vocab_size:
        raise ValueError(f"{path}: a datastore of {metadata['vocab_size']} tokens, the target has {vocab_size}")
    return arrays, metadata
