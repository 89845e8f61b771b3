"""Writes checkpoints of ours: Orbax arrays, ``config.json``, tokenizer and manifest."""

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from bass_jax.checkpoint import config_json
from bass_jax.checkpoint import manifest as manifest_file
from bass_jax.checkpoint.manifest import Manifest, hash_array
from bass_jax.checkpoint.tokenizer import Tokenizer, read_tokenizer
from bass_jax.models import Model, quantize_model
from bass_jax.models.families import FAMILIES
from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.trees import flatten


def save_model(
    directory: str | PathLike[str],
    model: Model,
    *,
    tokenizer: Tokenizer | None = None,
    source: str | None = None,
    license: str | None = None,
    source_sha256: str | None = None,
    shares_embedding: bool = False,
    is_packed: bool = False,
    verify: bool = False,
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
        is_packed: store matrices in INT8, half of bfloat16, to be widened as they are read: a smaller file, not another
            model to run.
        verify: read everything back, and compare it, before it takes its place.

    Raises:
        ValueError: if `directory` exists and is not a checkpoint, or what was written is not `model`; if a model is to
            be packed that has INT8 weights already.
    """
    params = dict(quantize_model(model).params if is_packed else model.params)
    if shares_embedding:
        del params["embedding"]
        params.pop("embedding_scale", None)
    tree = {"params": params}
    if model.output_ids is not None:
        tree["output_ids"] = model.output_ids
    manifest = Manifest(
        source=source,
        license=license,
        source_sha256=source_sha256,
        shares_embedding=shares_embedding,
        is_packed=is_packed,
        tokenizer_fingerprint=None if tokenizer is None else tokenizer.fingerprint,
    )
    kept = None if shares_embedding else tokenizer
    hashes = {name: hash_array(leaf) for name, leaf in flatten(tree).items()} if verify else None
    write_checkpoint(Path(directory), tree, model.config, manifest, kept, hashes=hashes)


def write_checkpoint(
    directory: Path,
    tree: dict[str, Any],
    config: ModelConfig,
    manifest: Manifest,
    tokenizer: Tokenizer | None,
    *,
    partial: Path | None = None,
    hashes: Mapping[str, str] | None = None,
) -> None:
    """Writes a checkpoint from arrays of jax or NumPy, in `partial` and then moved; see `save_model`.

    Raises:
        ValueError: if `hashes` are given, of every array by its path, and what was written is something else.
    """
    from bass_jax.checkpoint.orbax import write_arrays

    with replaced(directory, partial) as partial:
        write_arrays(partial, tree)
        config_json.write_config(partial, config)
        if tokenizer is not None:
            tokenizer.save(partial)
        manifest.write(partial)
        if hashes is not None:
            _verify(partial, hashes, config, tokenizer)


def _verify(partial: Path, hashes: Mapping[str, str], config: ModelConfig, tokenizer: Tokenizer | None) -> None:
    """Reads back what was written."""
    from bass_jax.checkpoint.orbax import hash_stored

    found = hash_stored(partial)
    for name in sorted(hashes.keys() | found.keys()):
        if hashes.get(name) != found.get(name):
            raise ValueError(f"{partial}: tensor {name!r} was written wrongly: its bytes, read back, are others")
    if config_json.read_config(partial) != config_json.without_run_settings(config):
        raise ValueError(f"{partial}: the configuration was written wrongly: read back, it is another")
    if tokenizer is not None and read_tokenizer(partial) != tokenizer:
        raise ValueError(f"{partial}: the tokenizer was written wrongly: read back, it is another")


def save_hugging_face(directory: str | PathLike[str], model: Model, *, tokenizer: Tokenizer | None = None) -> None:
    """Writes ``config.json``, ``model.safetensors`` and the tokenizer as Hugging Face libraries read them.

    Args:
        directory: must not exist, or be empty.
        model: in its own dtype; bit-equal when read back.
        tokenizer: stored with the model.

    Raises:
        ValueError: if the model is one that only we have (a projected embedding, a trimmed head, INT8 weights).
    """
    from safetensors.numpy import save_file

    config = model.config
    if config.quantize is not None:
        raise ValueError(f"{directory}: quantize={config.quantize!r}: expected a model without INT8 weights")
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
def replaced(directory: Path, partial: Path | None = None) -> Iterator[Path]:
    """Gives an empty directory, by default beside `directory`, and moves it there if the block succeeds."""
    if directory.parent.is_dir():
        _clear_away(directory)
    check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = partial or directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    old = directory.with_name(f".{directory.name}.old-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    with ExitStack() as locks:
        partial.mkdir()
        while not _hold(partial, locks):
            partial.mkdir(exist_ok=True)  # Another process has just cleared it away.
        try:
            yield partial
            if directory.exists():
                _hold(directory, locks)
                directory.rename(old)
            partial.rename(directory)
        finally:
            if old.exists() and not directory.exists():
                old.rename(directory)
            shutil.rmtree(partial, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


def _hold(directory: Path, locks: ExitStack) -> bool:
    """Marks a directory as a living process's, wherever it is moved; returns whether it is still there."""
    try:
        locks.callback(os.close, lock := os.open(directory, os.O_RDONLY))
        with suppress(OSError):  # A file system without locks: nothing is cleared away there.
            fcntl.flock(lock, fcntl.LOCK_SH)
        return os.path.samestat(os.fstat(lock), directory.stat())
    except FileNotFoundError:
        return False


def _clear_away(directory: Path) -> None:
    """Deletes what killed processes left beside `directory`, and puts back what they had moved away from it."""
    left = re.compile(rf"\.{re.escape(directory.name)}\.(partial|old)-\d+")
    for path in list(directory.parent.iterdir()):
        if not (match := left.fullmatch(path.name)):
            continue
        # It may be in use, or gone meanwhile, or a file, or where there are no locks.
        with suppress(OSError), ExitStack() as locks:
            locks.callback(os.close, lock := os.open(path, os.O_RDONLY | os.O_DIRECTORY))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if match[1] == "old" and not directory.exists():
                path.rename(directory)
            else:
                shutil.rmtree(path, ignore_errors=True)
