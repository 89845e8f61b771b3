"""Loads a model or a tokenizer from any checkpoint: ours, Hugging Face's, a GGUF file, a Hub id."""

import dataclasses
import re
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bass_jax.checkpoint import config_json
from bass_jax.checkpoint import manifest as manifest_file
from bass_jax.checkpoint.assemble import Progress, assemble, place
from bass_jax.checkpoint.manifest import WEIGHTS, Manifest, read_manifest
from bass_jax.checkpoint.quantize_on_load import quantizing, stored_dtype, widening
from bass_jax.checkpoint.safetensors import tensor_builders
from bass_jax.checkpoint.tokenizer import Tokenizer, has_tokenizer_files, read_tokenizer
from bass_jax.models import Model, abstract_params
from bass_jax.models.families import FAMILIES
from bass_jax.models.families.base import check_common
from bass_jax.models.model_config import ModelConfig
from bass_jax.models.sharding import param_shardings, placed_config
from bass_jax.models.weights import Weight
from bass_jax.runtime.files import one_line, read_json
from bass_jax.runtime.trees import flatten
from bass_jax.typing import Array

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
_HUB_PICKLES = ["pytorch_model*.bin"]
"""Fetched where there are no safetensors."""


def load_model(
    path: str | PathLike[str],
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    cache_dtype: str | None = None,
    mesh: Mesh | None = None,
    rules: dict[str, str] | None = None,
    embedding: Array | Weight | None = None,
    progress: Progress | None = None,
) -> Model:
    """Loads a model, tensor by tensor, each cast and straight to where it belongs.

    Args:
        path: a checkpoint directory of ours, a Hugging Face directory (``config.json`` and safetensors or
            ``pytorch_model.bin``, one file or an index with its shards), a ``.gguf`` file, or a Hub id such as
            ``"owner/name"``.
        dtype: ``"float32"`` or ``"bfloat16"``; default what is stored, or float32 if that is neither.
        quantize: ``"int8"`` or ``"int8_activations"``, as in `ModelConfig`: matrices are quantized as they are read;
            default as stored.
        cache_dtype: ``"int8"`` for a cache of INT8, as in `ModelConfig`.
        mesh: devices to shard the parameters over; default the default device.
        rules: logical axis → mesh axis; see `bass_jax.models.sharding`.
        embedding: ``[E, V]``, the target's, INT8 or not; for a draft that was stored without it.
        progress: called after every tensor.

    Raises:
        ValueError: naming file and tensor, if anything is missing, extra, misshapen, damaged or unknown.
    """
    path = resolve(path)
    if path.is_dir() and (path / manifest_file.NAME).exists():
        return _load_ours(path, dtype, quantize, cache_dtype, mesh, rules, embedding, progress)
    if embedding is not None:
        raise ValueError(f"{path}: embedding: only a checkpoint of ours can do without its own")
    return read_model(
        open_source(path), dtype=dtype, quantize=quantize, cache_dtype=cache_dtype, mesh=mesh, rules=rules,
        progress=progress,
    )  # fmt: skip


def read_model(
    source: Any,
    *,
    dtype: str | None = None,
    quantize: str | None = None,
    cache_dtype: str | None = None,
    mesh: Mesh | None = None,
    rules: dict[str, str] | None = None,
    progress: Progress | None = None,
) -> Model:
    """`load_model` from an open checkpoint of another format; see `open_source`."""
    config = read_model_config(source)
    config = dataclasses.replace(config, dtype=dtype or config.dtype, quantize=quantize, cache_dtype=cache_dtype)
    shardings = None if mesh is None else param_shardings(config, mesh, rules)
    return Model(assemble(source, config, shardings, progress), placed_config(config, mesh, rules))


def load_tokenizer(path: str | PathLike[str], manifest: Manifest | None = None) -> Tokenizer:
    """Loads the tokenizer of any checkpoint that `load_model` takes.

    Args:
        path: see `load_model`.
        manifest: of a checkpoint of ours, which is believed; see `bass_jax.checkpoint.tokenizer.read_tokenizer`.

    Raises:
        ValueError: naming the file, if there is none or it cannot be read.
    """
    path = resolve(path)
    directory = path if path.is_dir() else path.parent
    if path.is_dir() or has_tokenizer_files(directory):
        return read_tokenizer(directory, manifest)
    from bass_jax.checkpoint.gguf_tokenizer import read_gguf_tokenizer

    return read_gguf_tokenizer(open_source(path))


def has_tokenizer(path: Path) -> bool:
    """Whether there is something that `load_tokenizer` would read."""
    if has_tokenizer_files(path if path.is_dir() else path.parent):
        return True
    return path.is_file() and open_source(path).field("tokenizer.ggml.model") is not None


def resolve(path: str | PathLike[str]) -> Path:
    """Returns a local path, having fetched a Hub id.

    Raises:
        ValueError: if there is nothing at `path` and it cannot be fetched.
    """
    local = Path(path)
    if local.exists():
        return local
    if not _HUB_ID.fullmatch(str(path)):
        raise ValueError(f"{path}: no such file or directory")
    import huggingface_hub

    try:
        directory = Path(huggingface_hub.snapshot_download(str(path), allow_patterns=_HUB_FILES))
        if not any(directory.glob("*.safetensors")):
            huggingface_hub.snapshot_download(str(path), allow_patterns=_HUB_PICKLES)
        return directory
    except Exception as error:  # Network, authentication and naming errors of many kinds.
        raise ValueError(
            f"{path}: no such file or directory, and not to be had as a Hub id: {one_line(error)}"
        ) from None


def open_source(path: Path) -> Any:
    """Opens a checkpoint of another format; see `bass_jax.checkpoint.assemble.TensorSource`.

    Raises:
        ValueError: if it is none that is known, or unreadable.
    """
    if path.is_dir():
        from bass_jax.checkpoint.huggingface import HuggingFaceDirectory

        return HuggingFaceDirectory(path)
    if path.suffix == ".gguf":
        from bass_jax.checkpoint.gguf import GgufFile

        return GgufFile(path)
    raise ValueError(f"{path}: expected a directory or a .gguf file")


def read_model_config(source: Any) -> ModelConfig:
    """Makes the configuration of a checkpoint of another format.

    Raises:
        ValueError: naming the file, if its family is unknown or asks for what is not supported.
    """
    kind = source.config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"{source.path}: model_type={kind!r}: expected one of {sorted(FAMILIES)}")
    try:
        check_common(source.config)
        config = FAMILIES[kind].read_config(source.config)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"missing key {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{source.path}: {reason}") from None
    return dataclasses.replace(config, dtype=source.dtype)


def read_ours(path: Path) -> tuple[Manifest, ModelConfig]:
    """Reads what a checkpoint of ours says of itself, after checking every file's hash.

    Raises:
        ValueError: naming the file, if one is damaged or this is another kind of directory.
    """
    if "target" in read_json(path / manifest_file.NAME):
        raise ValueError(f"{path}: a pair of models, not one; load it with load_pair")
    manifest = read_manifest(path)
    manifest.verify(path)
    return manifest, config_json.read_config(path)


def _as_asked(stored: ModelConfig, dtype: str | None, quantize: str | None, cache_dtype: str | None) -> ModelConfig:
    return dataclasses.replace(
        stored, dtype=dtype or stored.dtype, quantize=quantize or stored.quantize, cache_dtype=cache_dtype
    )


def _load_ours(path, dtype, quantize, cache_dtype, mesh, rules, embedding, progress) -> Model:
    manifest, stored = read_ours(path)
    config = _as_asked(stored, dtype, quantize, cache_dtype)
    is_asked = stored.quantize is None and config.quantize is not None
    if is_asked and manifest.shares_embedding and config.is_tied:
        raise ValueError(f"{path}: quantize={quantize!r}: its head is its target's embedding; quantize the target")
    # A packed checkpoint holds the INT8 weights already; they are widened unless INT8 was asked for.
    is_new, is_widened = is_asked and not manifest.is_packed, manifest.is_packed and not is_asked
    layout = dataclasses.replace(config, quantize="int8" if is_widened else None if is_new else config.quantize)
    expected = {name: boxed.value for name, boxed in flatten(abstract_params(layout)).items()}
    if is_new:
        expected = {
            name: jax.ShapeDtypeStruct(leaf.shape, stored_dtype(config, name)) for name, leaf in expected.items()
        }
    if manifest.shares_embedding:
        wanted = expected.pop("embedding")
        expected.pop("embedding_scale", None)
        if embedding is None:
            raise ValueError(f"{path}: stored without its embedding, which is its target's; load it as a pair")
        own = embedding if isinstance(embedding, Weight) else Weight(embedding, None)
        if own.values.shape != wanted.shape or (own.scale is None and own.values.dtype != wanted.dtype):
            raise ValueError(
                f"{path}: embedding: expected {wanted.dtype} {list(wanted.shape)}, "
                f"the target's is {own.values.dtype} {list(own.values.shape)}"
            )
    elif embedding is not None:
        raise ValueError(f"{path}: embedding: this checkpoint has its own")
    if config.output_vocab_size is not None:
        expected["output_ids"] = jax.ShapeDtypeStruct((config.output_vocab_size,), jnp.dtype(jnp.int32))
    builders = tensor_builders(path / WEIGHTS, expected)
    if is_new:
        builders = quantizing(builders, config)
    elif is_widened:
        builders = widening(builders, jnp.dtype(config.dtype))
    shardings = None
    if mesh is not None:
        replicated = NamedSharding(mesh, PartitionSpec())
        shardings = flatten(param_shardings(config, mesh, rules)) | {"output_ids": replicated}
    params = place(builders, shardings, progress)
    output_ids = params.pop("output_ids", None)
    if manifest.shares_embedding:
        params["embedding"] = own.values
        if own.scale is not None:
            params["embedding_scale"] = own.scale
    return Model(params, placed_config(config, mesh, rules), output_ids)
