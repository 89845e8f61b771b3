"""Builds parameters from a checkpoint's tensors, one tensor at a time."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from bass_jax.checkpoint.quantize_on_load import quantizing, stored_dtype
from bass_jax.models import abstract_params
from bass_jax.models.families import FAMILIES, Rule, tensor_layout
from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.trees import flatten, unflatten
from bass_jax.typing import Params

_HEADS = {"lm_head.weight", "embed_out.weight"}
"""What a tied head is stored under, where a checkpoint repeats it."""

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""


@runtime_checkable
class TensorSource(Protocol):
    """A checkpoint under Hugging Face's tensor names."""

    path: Any
    config: dict[str, Any]

    def names(self) -> Iterable[str]:
        """All tensor names."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor; it may be a view of memory that `release` lets go of."""
        ...

    def release(self, names: Iterable[str]) -> None:
        """Lets go of what reading `names` took."""
        ...

    def num_elements(self) -> int:
        """Elements of all tensors."""
        ...


def assemble(
    source: TensorSource,
    config: ModelConfig,
    shardings: Params = None,
    progress: Progress | None = None,
) -> Params:
    """Reads every tensor of `config`'s family from `source` into our layout.

    Args:
        source: the checkpoint.
        config: of the model; its `dtype` is what the parameters are cast to, but for those that it quantizes.
        shardings: a sharding per parameter; default the default device.
        progress: told after every tensor.

    Raises:
        ValueError: naming file and tensor, if one is missing, extra or misshapen.
    """
    return place(plan(source, config), None if shardings is None else flatten(shardings), progress)


def place(
    builders: Mapping[str, Callable[[], np.ndarray]],
    shardings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Params:
    """Builds arrays one at a time and puts each on its devices.

    Args:
        builders: our path of every array → a function that makes it.
        shardings: by path; default the default device.
        progress: called after every array.
    """
    params = {}
    for done, (path, build) in enumerate(builders.items()):
        params[path] = jax.device_put(build(), None if shardings is None else shardings[path])
        if progress is not None:
            progress(done + 1, len(builders))
    return unflatten(params)


def plan(source: TensorSource, config: ModelConfig) -> dict[str, Callable[[], np.ndarray]]:
    """Checks names and sizes, and says how each parameter of ours is made; reads no tensor but a tied head.

    Returns:
        Our path of every parameter → a function that makes it, in row-major order and in memory of its own.

    Raises:
        ValueError: naming file and tensor, if one is missing or extra. The functions raise it if one is misshapen.
    """
    _check_size(source, config)
    family = FAMILIES[config.family]
    rules = family.rules(config)
    stored: dict[str, str] = {}
    for name in source.names():
        if (known := family.canonical(name)) in stored:
            raise ValueError(f"{source.path}: tensors {name!r} and {stored[known]!r} are one")
        if known is not None:
            stored[known] = name
    wanted = {name for rule in rules.values() for name in rule.sources}
    if missing := sorted(wanted - stored.keys()):
        raise ValueError(f"{source.path}: missing tensor {missing[0]!r} ({len(missing)} missing)")
    copies = stored.keys() & _HEADS if config.is_tied else set()
    if extra := sorted(stored.keys() - wanted - copies):
        raise ValueError(f"{source.path}: unexpected tensor {extra[0]!r} ({len(extra)} unexpected)")
    for copy in copies:
        _check_copy(source, stored[copy], stored[rules["embedding"].sources[0]])
    whole = abstract_params(dataclasses.replace(config, quantize=None))
    builders: dict[str, Callable[[], np.ndarray]] = {
        path: functools.partial(
            _build, source, stored, path, rules[path], boxed.value.shape, stored_dtype(config, path)
        )
        for path, boxed in flatten(whole).items()
    }
    return quantizing(builders, config)


def _check_copy(source: TensorSource, head: str, embedding: str) -> None:
    """Refuses a head of its own in a checkpoint whose configuration ties it to the embedding."""
    is_equal = np.array_equal(source.read(head), source.read(embedding))
    source.release((head, embedding))
    if not is_equal:
        raise ValueError(
            f"{source.path}: tensors {head!r} and {embedding!r} differ: expected equal ones, because the "
            "configuration ties them (tie_word_embeddings)"
        )


def _check_size(source: TensorSource, config: ModelConfig) -> None:
    """Refuses a configuration far off the tensors before anything of its size is made."""
    E = config.embedding_width or config.width
    wanted = config.vocab_size * E
    for layer in config.layers:
        N, K, H = layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_dim
        wanted += config.width * (2 * (N + K) * H + 2 * layer.mlp.width)
    if wanted > 2 * source.num_elements():
        raise ValueError(
            f"{source.path}: the configuration asks for at least {wanted} parameters, "
            f"the tensors have {source.num_elements()}"
        )


def _build(
    source: TensorSource, stored: dict[str, str], path: str, rule: Rule, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    """Makes one array of ours, in memory of its own and in row-major order."""
    tensors = [source.read(stored[name]) for name in rule.sources]
    # Cast first: a tensor that is cast as it is read is read once, and what is built has its size at most.
    parts = [tensor.astype(dtype, copy=False) for tensor in tensors]
    try:
        array = rule.build(*parts)
    except (IndexError, ValueError):
        array = None
    if array is None or array.shape != shape:
        found = ", ".join(f"{name!r} {list(t.shape)}" for name, t in zip(rule.sources, tensors, strict=True))
        raise ValueError(f"{source.path}: misshapen tensor {found}: does not make {path!r} {list(shape)}")
    is_view = any(np.may_share_memory(array, tensor) for tensor in tensors)
    made = tensor_layout.contiguous(array) if is_view or not array.flags.c_contiguous else array
    source.release(stored[name] for name in rule.sources)
    return made
