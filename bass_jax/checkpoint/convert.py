"""Converts any checkpoint to one of ours, one tensor at a time."""

import dataclasses
import re
from os import PathLike
from pathlib import Path
from typing import Any

from bass_jax.checkpoint.assemble import Progress, plan
from bass_jax.checkpoint.load import load_model, load_tokenizer, open_source, read_model_config, resolve
from bass_jax.checkpoint.manifest import Manifest, has_manifest
from bass_jax.checkpoint.save import check_replaceable, save_model, write_checkpoint
from bass_jax.checkpoint.tokenizer import Tokenizer, has_tokenizer_files
from bass_jax.models import param_shapes
from bass_jax.runtime.files import sha256

_BLOB = re.compile(r"[0-9a-f]{64}")


def convert(
    source: str | PathLike[str],
    destination: str | PathLike[str],
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    license: str | None = None,
    source_name: str | None = None,
    replace: bool = True,
    progress: Progress | None = None,
) -> None:
    """Converts any checkpoint that `load_model` accepts to one of ours, with its tokenizer if it has one.

    The new checkpoint is written to a temporary directory next to `destination`, read back, compared with the source,
    and renamed. Only one tensor is in memory at a time, unless the source is one of our own checkpoints.

    Args:
        source: see `load_model`.
        destination: the directory to write.
        dtype: of the stored parameters; by default the source's.
        quantize: ``"int8"`` stores matrices as INT8; see `load_model`.
        license: license of the weights, for the manifest.
        source_name: name of the source, for the manifest; `source` by default.
        replace: False keeps a checkpoint that another process wrote to `destination` in the meantime.
        progress: called after every tensor.

    Raises:
        ValueError: as in `load_model` and `save_model`; nothing is then left at or next to `destination`.
    """
    path, directory = resolve(source), Path(destination)
    check_replaceable(directory)
    name = source_name or str(source)
    if has_manifest(path):
        model = load_model(path, dtype=dtype, quantize=quantize, progress=progress)
        tokenizer = load_tokenizer(path) if has_tokenizer_files(path) else None
        save_model(directory, model, tokenizer=tokenizer, source=name, license=license)
        return
    _check_hub_files(path)
    opened = open_source(path)  # once, because reading the metadata of a GGUF file takes seconds
    config = read_model_config(opened)
    config = dataclasses.replace(config, dtype=dtype or config.dtype, quantize=quantize)
    builders, tokenizer = plan(opened, config), _tokenizer_of(path, opened)
    shapes = param_shapes(config)
    manifest = Manifest(
        source=name,
        license=license,
        source_sha256=sha256(path) if path.is_file() else None,
        tokenizer_fingerprint=None if tokenizer is None else tokenizer.fingerprint,
    )
    write_checkpoint(directory, shapes, builders, config, manifest, tokenizer, replace=replace, progress=progress)


def _tokenizer_of(path: Path, source: Any) -> Tokenizer | None:
    if has_tokenizer_files(path if path.is_dir() else path.parent):
        return load_tokenizer(path)
    if path.is_dir() or source.field("tokenizer.ggml.model") is None:
        return None
    from bass_jax.checkpoint.gguf_tokenizer import read_gguf_tokenizer

    return read_gguf_tokenizer(source)


def _check_hub_files(path: Path) -> None:
    """Checks files of the Hub's cache, which are links to files that are named by their hash.

    Raises:
        ValueError: naming a file whose hash differs from its name.
    """
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        blob = file.resolve().name
        if file.is_symlink() and _BLOB.fullmatch(blob) and (found := sha256(file)) != blob:
            raise ValueError(f"{file}: damaged: its sha256 is {found}, the Hub says {blob}")
