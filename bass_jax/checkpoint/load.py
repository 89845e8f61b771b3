"""Loads a model or a tokenizer from a checkpoint of ours, a Hugging Face directory, a GGUF file or a Hub id."""

import dataclasses
import re
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bass_jax.checkpoint import manifest as manifest_file
from bass_jax.checkpoint.assemble import Progress, TensorSource, place_arrays, plan
from bass_jax.checkpoint.config_json import read_config_json
from bass_jax.checkpoint.manifest import WEIGHTS, Manifest, has_manifest, read_manifest
from bass_jax.checkpoint.quantize_on_load import dequantizing, quantizing, stored_dtype
from bass_jax.checkpoint.safetensors import tensor_builders
from bass_jax.checkpoint.tokenizer import Tokenizer, has_tokenizer_files, read_tokenizer
from bass_jax.models import Model, param_shapes
from bass_jax.models.families import FAMILIES
from bass_jax.models.families.base import check_common
from bass_jax.models.model_config import ModelConfig
from bass_jax.models.sharding import param_shardings, placed_config
from bass_jax.models.weights import Weight
from bass_jax.runtime.bundled import find_bundled
from bass_jax.runtime.files import one_line, read_json
from bass_jax.runtime.names import expected_one_of
from bass_jax.typing import Array

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
_HUB_PICKLES = ["pytorch_model*.bin"]
"""Downloaded if there are no safetensors."""


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
    """Loads a model; each tensor is read, cast and placed on its devices before the next one.

    Args:
        path: a checkpoint directory of ours, a Hugging Face directory (``config.json`` and safetensors or
            ``pytorch_model.bin``, one file or an index with its shards), a ``.gguf`` file, or a Hub id such as
            ``"owner/name"``.
        dtype: ``"float32"`` or ``"bfloat16"``; by default the stored one, or float32 if it is neither.
        quantize: ``"int8"`` or ``"int8_activations"`` as in `ModelConfig`; matrices are quantized as they are read. By
            default as stored.
        cache_dtype: ``"int8"`` for an INT8 cache, as in `ModelConfig`.
        mesh: devices to shard the parameters over; the default device by default.
        rules: logical axis → mesh axis; see `bass_jax.models.sharding`.
        embedding: the target's ``[V, E]`` embedding, INT8 or not, for a draft that was stored without one.
        progress: called after every tensor.

    Raises:
        ValueError: naming file and tensor, if anything is missing, unexpected, misshapen, damaged or unknown.
    """
    path = resolve(path)
    if has_manifest(path):
        return _load_ours(path, dtype, quantize, cache_dtype, mesh, rules, embedding, progress)
    if embedding is not None:
        raise ValueError(f"{path}: embedding: only a checkpoint of ours can do without its own")
    source = open_source(path)
    config = read_model_config(source)
    config = dataclasses.replace(config, dtype=dtype or config.dtype, quantize=quantize, cache_dtype=cache_dtype)
    shardings = None if mesh is None else flatten_dict(param_shardings(config, mesh, rules), sep="/")
    return Model(place_arrays(plan(source, config), shardings, progress), placed_config(config, mesh, rules))


def load_tokenizer(path: str | PathLike[str], manifest: Manifest | None = None) -> Tokenizer:
    """Loads the tokenizer of any checkpoint that `load_model` accepts.

    Args:
        path: see `load_model`.
        manifest: manifest of a checkpoint of ours; see `bass_jax.checkpoint.tokenizer.read_tokenizer`.

    Raises:
        ValueError: naming the file, if there is no tokenizer or it cannot be read.
    """
    path = resolve(path)
    directory = path if path.is_dir() else path.parent
    if path.is_dir() or has_tokenizer_files(directory):
        return read_tokenizer(directory, manifest)
    from bass_jax.checkpoint.gguf_tokenizer import read_gguf_tokenizer

    return read_gguf_tokenizer(open_source(path))


def has_tokenizer(path: Path) -> bool:
    """Returns whether `load_tokenizer` would find a tokenizer."""
    if has_tokenizer_files(path if path.is_dir() else path.parent):
        return True
    return path.is_file() and open_source(path).field("tokenizer.ggml.model") is not None


def resolve(path: str | PathLike[str]) -> Path:
    """Returns a local path; a Hub id is downloaded.

    Raises:
        ValueError: if nothing exists at `path` and it cannot be downloaded.
    """
    local = find_bundled(path)
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
    except Exception as error:  # errors of the network, of authentication and of names, of many types
        raise ValueError(
            f"{path}: no such file or directory, and cannot be downloaded as a Hub id: {one_line(error)}"
        ) from None


def open_source(path: Path) -> Any:
    """Opens a Hugging Face directory or a GGUF file; see `bass_jax.checkpoint.assemble.TensorSource`.

    Raises:
        ValueError: if it is neither, or unreadable.
    """
    if path.is_dir():
        from bass_jax.checkpoint.huggingface import HuggingFaceDirectory

        return HuggingFaceDirectory(path)
    if path.suffix == ".gguf":
        from bass_jax.checkpoint.gguf import GgufFile

        return GgufFile(path)
    raise ValueError(f"{path}: expected a directory or a .gguf file")


def read_model_config(source: TensorSource) -> ModelConfig:
    """Returns the configuration of a Hugging Face directory or a GGUF file.

    Raises:
        ValueError: naming the file, if its family or a value is not supported.
    """
    kind = source.config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"{source.path}: model_type={kind!r}: {expected_one_of(kind, sorted(FAMILIES))}")
    try:
        check_common(source.config)
        config = FAMILIES[kind].read_config(source.config)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"missing key {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{source.path}: {reason}") from None
    return dataclasses.replace(config, dtype=source.dtype)


def _load_ours(path, dtype, quantize, cache_dtype, mesh, rules, embedding, progress) -> Model:
    if "target" in read_json(path / manifest_file.NAME):
        raise ValueError(f"{path}: a pair of models, not one; load it with load_pair")
    manifest = read_manifest(path)
    with manifest.verifying(path):
        return _load_listed(path, manifest, dtype, quantize, cache_dtype, mesh, rules, embedding, progress)


def _load_listed(path, manifest, dtype, quantize, cache_dtype, mesh, rules, embedding, progress) -> Model:
    stored = read_config_json(path)
    config = dataclasses.replace(
        stored, dtype=dtype or stored.dtype, quantize=quantize or stored.quantize, cache_dtype=cache_dtype
    )
    if manifest.shares_embedding and config.is_tied and stored.quantize is None and config.quantize is not None:
        raise ValueError(f"{path}: quantize={quantize!r}: its head is its target's embedding; quantize the target")
    # The quantization of the file, which for a packed checkpoint is not that of its configuration.
    file_config = dataclasses.replace(config, quantize="int8" if manifest.is_packed else stored.quantize)
    is_quantizing = file_config.quantize is None and config.quantize is not None
    expected = param_shapes(file_config)
    if is_quantizing:
        expected = {
            name: jax.ShapeDtypeStruct(leaf.shape, stored_dtype(config, name, leaf.dtype))
            for name, leaf in expected.items()
        }
    shared = {}
    if manifest.shares_embedding:
        wanted = expected.pop("embedding")
        expected.pop("embedding_scale", None)
        if embedding is None:
            raise ValueError(f"{path}: stored without its embedding, which is its target's; load it as a pair")
        values, scale = embedding if isinstance(embedding, Weight) else (embedding, None)
        if values.shape != wanted.shape or (scale is None and values.dtype != wanted.dtype):
            raise ValueError(
                f"{path}: embedding: expected {wanted.dtype} {list(wanted.shape)}, "
                f"the target's is {values.dtype} {list(values.shape)}"
            )
        shared = {"embedding": values} | ({} if scale is None else {"embedding_scale": scale})
    elif embedding is not None:
        raise ValueError(f"{path}: embedding: this checkpoint has its own")
    if config.output_vocab_size is not None:
        expected["output_ids"] = jax.ShapeDtypeStruct((config.output_vocab_size,), jnp.dtype(jnp.int32))
    builders = tensor_builders(path / WEIGHTS, expected)
    if is_quantizing:
        builders = quantizing(builders, config)
    elif config.quantize is None and file_config.quantize is not None:
        builders = dequantizing(builders, jnp.dtype(config.dtype))
    shardings = None
    if mesh is not None:
        replicated = NamedSharding(mesh, PartitionSpec())
        shardings = flatten_dict(param_shardings(config, mesh, rules), sep="/") | {"output_ids": replicated}
    params = place_arrays(builders, shardings, progress)
    output_ids = params.pop("output_ids", None)
    return Model(params | shared, placed_config(config, mesh, rules), output_ids)
