"""Writes checkpoints of ours: Orbax arrays, ``config.json``, tokenizer and manifest."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

import numpy as np

from bass_jax.checkpoint import config_file
from bass_jax.checkpoint import manifest as manifest_file
from bass_jax.checkpoint.assemble import Progress
from bass_jax.checkpoint.load import load_model, load_tokenizer, open_source, read_model, resolve
from bass_jax.checkpoint.manifest import Manifest, sha256
from bass_jax.checkpoint.tokenizer import Tokenizer, has_tokenizer_files
from bass_jax.checkpoint.trees import flatten
from bass_jax.models import Model
from bass_jax.models.families import FAMILIES


def save_model(
    directory: str | PathLike[str],
    model: Model,
    *,
    tokenizer: Tokenizer | None = None,
    source: str | None = None,
    license: str | None = None,
    source_sha256: str | None = None,
    shares_embedding: bool = False,
) -> None:
    """Writes a checkpoint, beside its place and renamed into it: there is never a part of one.

    Args:
        directory: replaced if it is a checkpoint already.
        model: stored in its own dtype.
        tokenizer: stored with the model; of a draft that shares its target's embedding, only the fingerprint.
        source: where the weights came from.
        license: of the weights.
        source_sha256: hash of the file that the weights came from.
        shares_embedding: leave the array ``embedding`` out: it is the target's.

    Raises:
        ValueError: if `directory` exists and is not a checkpoint.
    """
    from bass_jax.checkpoint.orbax import write_arrays

    params = dict(model.params)
    if shares_embedding:
        del params["embedding"]
    tree = {"params": params}
    if model.output_ids is not None:
        tree["output_ids"] = model.output_ids
    with replaced(Path(directory)) as partial:
        write_arrays(partial, tree)
        config_file.write_config(partial, model.config)
        if tokenizer is not None and not shares_embedding:
            tokenizer.save(partial)
        Manifest(
            source=source,
            license=license,
            source_sha256=source_sha256,
            shares_embedding=shares_embedding,
            tokenizer_fingerprint=None if tokenizer is None else tokenizer.fingerprint,
        ).write(partial)


def save_hugging_face(directory: str | PathLike[str], model: Model, *, tokenizer: Tokenizer | None = None) -> None:
    """Writes ``config.json``, ``model.safetensors`` and the tokenizer as Hugging Face libraries read them.

    Args:
        directory: must not exist, or be empty.
        model: in its own dtype; bit-equal when read back.
        tokenizer: stored with the model.

    Raises:
        ValueError: if the model is one that only we have (a projected embedding or a trimmed head).
    """
    from safetensors.numpy import save_file

    config = model.config
    is_projected = config.embedding_width is not None and not config.has_output_projection
    if is_projected or config.output_vocab_size is not None:
        raise ValueError(f"{directory}: Hugging Face has no projected embeddings and no trimmed heads")
    family = FAMILIES[config.family]
    params, tensors = flatten(model.params), {}
    for path, rule in family.rules(config).items():
        parts = rule.split(np.asarray(params[path]))
        tensors |= {name: np.ascontiguousarray(part) for name, part in zip(rule.sources, parts, strict=True)}
    with replaced(Path(directory)) as partial:
        text = json.dumps(family.write_config(config) | {"dtype": config.dtype}, indent=2)
        (partial / "config.json").write_text(text + "\n")
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        if tokenizer is not None:
            tokenizer.save(partial)


def convert(
    source: str | PathLike[str],
    destination: str | PathLike[str],
    *,
    dtype: str | None = None,
    license: str | None = None,
    source_name: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Turns any checkpoint that `load_model` takes into one of ours, with its tokenizer if it has one.

    Args:
        source: see `load_model`.
        destination: directory to write.
        dtype: to store; default the source's.
        license: of the weights, for the manifest.
        source_name: of the source, for the manifest; default `source` itself.
        progress: told after every tensor.

    Raises:
        ValueError: as `load_model` and `save_model`; nothing is left at `destination` then.
    """
    path = resolve(source)
    check_replaceable(Path(destination))
    model, tokenizer = _load_both(path, dtype, progress)
    save_model(
        destination, model, tokenizer=tokenizer, source=source_name or str(source), license=license,
        source_sha256=sha256(path) if path.is_file() else None,
    )  # fmt: skip


def _load_both(path: Path, dtype: str | None, progress: Progress | None) -> tuple[Model, Tokenizer | None]:
    if path.is_dir() or has_tokenizer_files(path.parent):
        model = load_model(path, dtype=dtype, progress=progress)
        return model, load_tokenizer(path) if path.is_file() or has_tokenizer_files(path) else None
    from bass_jax.checkpoint.gguf_tokenizer import read_gguf_tokenizer

    source = open_source(path)  # Once: reading a GGUF file's metadata takes seconds.
    model = read_model(source, dtype=dtype, progress=progress)
    has_tokenizer = source.field("tokenizer.ggml.model") is not None
    return model, read_gguf_tokenizer(source) if has_tokenizer else None


def check_replaceable(directory: Path) -> None:
    """Refuses to overwrite what is not a checkpoint.

    Raises:
        ValueError: if `directory` exists, is not empty and has no manifest.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not directory.is_dir() or not (directory / manifest_file.NAME).is_file():
        raise ValueError(f"{directory}: exists and is not a checkpoint; not overwritten")


@contextmanager
def replaced(directory: Path) -> Iterator[Path]:
    """Gives an empty directory beside `directory` and moves it there if the block succeeds."""
    check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    old = directory.with_name(f".{directory.name}.old-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        if directory.exists():
            directory.rename(old)
        partial.rename(directory)
    finally:
        if old.exists() and not directory.exists():
            old.rename(directory)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
