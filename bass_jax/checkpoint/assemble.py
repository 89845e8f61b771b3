"""Builds parameters from the tensors of a checkpoint, one tensor at a time."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from bass_jax.checkpoint.quantize_on_load import Builders, quantizing, stored_dtype
from bass_jax.models import param_shapes
from bass_jax.models.families import FAMILIES, Rule, tensor_layout
from bass_jax.models.model_config import ModelConfig
from bass_jax.typing import Params

_HEADS = frozenset(("lm_head.weight", "embed_out.weight"))
"""Names under which a checkpoint may store a copy of a tied head."""

Progress = Callable[[int, int], None]
"""Called with the number of tensors done and the number of all tensors."""


@runtime_checkable
class TensorSource(Protocol):
    """A checkpoint whose tensors have Hugging Face's names."""

    path: Any
    config: dict[str, Any]
    """The Hugging Face configuration."""
    dtype: str
    """The dtype of our parameters that holds every tensor without loss, or float32 if none does."""

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor; it may be a view of memory that `release` frees."""
        ...

    def read_bytes(self, name: str) -> np.ndarray:
        """Returns a tensor of bytes, for a rule whose tensors are packed."""
        ...

    def release(self, names: Iterable[str]) -> None:
        """Frees the memory that was used to read `names`."""
        ...

    def num_elements(self) -> int:
        """Returns the number of elements of all tensors."""
        ...


def place_arrays(
    builders: Builders, shardings: Mapping[str, Any] | None = None, progress: Progress | None = None
) -> Params:
    """Builds arrays one at a time and places each on its devices.

    Args:
        builders: a function per path of our arrays that returns the array.
        shardings: shardings by path; the default device by default.
        progress: called after every array.
    """
    params = {}
    for done, (path, build) in enumerate(builders.items()):
        params[path] = jax.device_put(build(), None if shardings is None else shardings[path])
        if progress is not None:
            progress(done + 1, len(builders))
    return unflatten_dict(params, sep="/")


def plan(source: TensorSource, config: ModelConfig) -> Builders:
    """Checks the names and sizes of a checkpoint's tensors, and returns a function per parameter that builds it.

    No tensor is read, except for a copy of a tied head. The functions return arrays in row-major order that own their
    memory, in the dtype of `config` or quantized.

    Raises:
        ValueError: naming file and tensor, if a tensor is missing or unexpected. The functions raise it for a tensor of
            another shape.
    """
    _check_size(source, config)
    family = FAMILIES[config.family]
    rules = family.rules(config)
    copies = _HEADS if config.is_tied else frozenset()
    stored, rules = match_tensors(source, rules, family.canonical_in(config), copies)
    for copy in stored.keys() & copies:
        _check_copy(source, stored[copy], stored[rules["embedding"].sources[0]])
    unquantized = param_shapes(dataclasses.replace(config, quantize=None))
    shapes = {
        path: jax.ShapeDtypeStruct(leaf.shape, stored_dtype(config, path, leaf.dtype))
        for path, leaf in unquantized.items()
    }
    return quantizing(builders_of(source, stored, rules, shapes), config)


def match_tensors(
    source: TensorSource,
    rules: Mapping[str, Rule],
    canonical: Callable[[str], str | None],
    optional: Collection[str] = (),
) -> tuple[dict[str, str], dict[str, Rule]]:
    """Returns the stored name of every tensor by its canonical name, and the rules in the form that the file has.

    Args:
        source: the checkpoint.
        rules: how our tensors are made.
        canonical: see `bass_jax.models.families.Family`.
        optional: tensors that no rule reads and that may be there.

    Raises:
        ValueError: naming file and tensor, if a tensor is missing or unexpected.
    """
    stored: dict[str, str] = {}
    for name in source.names():
        if (known := canonical(name)) in stored:
            raise ValueError(f"{source.path}: tensors {name!r} and {stored[known]!r} are one")
        if known is not None:
            stored[known] = name
    rules = {path: rule.form_in(stored.keys()) for path, rule in rules.items()}
    wanted = {name for rule in rules.values() for name in rule.sources}
    if missing := sorted(wanted - stored.keys()):
        raise ValueError(f"{source.path}: missing tensor {missing[0]!r} ({len(missing)} missing)")
    if extra := sorted(stored.keys() - wanted - set(optional)):
        raise ValueError(f"{source.path}: unexpected tensor {extra[0]!r} ({len(extra)} unexpected)")
    return stored, rules


def builders_of(
    source: TensorSource, stored: dict[str, str], rules: Mapping[str, Rule], shapes: Mapping[str, Any]
) -> Builders:
    """Returns a function per path of `shapes` that builds the array.

    Args:
        source: the checkpoint.
        stored: from `match_tensors`.
        rules: how our tensors are made.
        shapes: the shape and dtype of each, by path.
    """
    return {
        path: functools.partial(_build, source, stored, path, rules[path], leaf.shape, leaf.dtype)
        for path, leaf in shapes.items()
    }


def _check_copy(source: TensorSource, head: str, embedding: str) -> None:
    """Checks that the head equals the embedding, because the configuration ties them."""
    is_equal = np.array_equal(source.read(head), source.read(embedding))
    source.release((head, embedding))
    if not is_equal:
        raise ValueError(
            f"{source.path}: tensors {head!r} and {embedding!r} differ: expected equal ones, because the "
            "configuration ties them (tie_word_embeddings)"
        )


def _check_size(source: TensorSource, config: ModelConfig) -> None:
    """Checks that the tensors have about as many elements as the configuration, before anything is allocated."""
    E = config.embedding_width or config.width
    wanted = config.vocab_size * E
    for layer in config.layers:
        wanted += layer.mixer.num_weights(config.width) + config.width * 2 * layer.mlp.total_width
    if wanted > 2 * source.num_elements():
        raise ValueError(
            f"{source.path}: the configuration asks for at least {wanted} parameters, "
            f"the tensors have {source.num_elements()}"
        )


def _build(
    source: TensorSource, stored: dict[str, str], path: str, rule: Rule, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """Builds one array."""
    tensors = [(source.read_bytes if rule.is_packed else source.read)(stored[name]) for name in rule.sources]
    # Cast before building, so that each tensor is read once and the temporaries have the size of the result.
    parts = tensors if rule.is_packed else [tensor.astype(dtype, copy=False) for tensor in tensors]
    try:
        array = rule.build(*parts).astype(dtype, copy=False)
    except (IndexError, ValueError):
        array = None
    if array is None or array.shape != shape:
        found = ", ".join(f"{name!r} {list(t.shape)}" for name, t in zip(rule.sources, tensors, strict=True))
        raise ValueError(f"{source.path}: misshapen tensor {found}: does not make {path!r} {list(shape)}")
    is_view = any(np.may_share_memory(array, tensor) for tensor in tensors)
    built = tensor_layout.contiguous(array) if is_view or not array.flags.c_contiguous else array
    source.release(stored[name] for name in rule.sources)
    return built
