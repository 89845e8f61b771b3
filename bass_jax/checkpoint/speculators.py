"""Reads and writes draft heads of the `speculators` format; reads the older layout of EAGLE-3 too.

A directory holds ``config.json`` and safetensors (or ``pytorch_model.bin``). In the `speculators` format
``speculators_model_type`` names the kind of head, and ``transformer_layer_config`` is a Hugging Face configuration in
which a missing key means the default of `transformers`. The older layout has one flat Llama configuration and calls the
first layer ``midlayer``.
"""

import dataclasses
import json
import warnings
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bass_jax.checkpoint.assemble import builders_of, match_tensors, place_arrays
from bass_jax.checkpoint.huggingface import HuggingFaceDirectory
from bass_jax.checkpoint.load import resolve
from bass_jax.checkpoint.manifest import WEIGHTS, Manifest
from bass_jax.checkpoint.save import replaced
from bass_jax.drafters.eagle.eagle3 import Eagle3Config, Eagle3Model, eagle3_param_shapes
from bass_jax.models import Model
from bass_jax.models.families import FAMILIES, Rule, base, tensor_names, windows
from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.files import read_json

KINDS = ("eagle3", "peagle")
"""Values of ``speculators_model_type`` that can be read."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "qwen3": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
"""Defaults of `transformers` for the keys that a Hugging Face configuration always has."""

_LOSSLESS = {"verifier_accept_k": 1, "accept_tolerance": 0.0}
"""Settings of a proposal method that change which drafts are accepted, with the values that accept exactly."""


@dataclasses.dataclass(frozen=True)
class Speculator:
    """The configuration of a draft head.

    Attributes:
        kind: one of `KINDS`.
        config: of the decoder.
        hidden_layers: the hidden states of the target that it reads; None for the default, which depends on the
            target's number of layers.
        target_width: D of the target.
        flags: the other fields of `Eagle3Config`.
    """

    kind: str
    config: ModelConfig
    hidden_layers: tuple[int, ...] | None
    target_width: int
    flags: dict[str, Any]

    @property
    def num_hidden(self) -> int:
        """The number of hidden states that it reads."""
        return 3 if self.hidden_layers is None else len(self.hidden_layers)

    def head(self, num_layers: int | None = None) -> Eagle3Config:
        """Returns the configuration of the head for a target of `num_layers` layers; None if only shapes matter.

        Raises:
            ValueError: if the default hidden states are not distinct, or a layer is not one of the target's.
        """
        layers = self.hidden_layers
        if layers is None:
            layers = (0, 0, 0) if num_layers is None else (2, num_layers // 2, num_layers - 3)
            if num_layers is not None and (len(set(layers)) < 3 or min(layers) < 0):
                raise ValueError(
                    f"eagle_aux_hidden_state_layer_ids=null: its default [2, L/2, L-3] = {list(layers)} needs three "
                    f"different layers, the target has {num_layers}"
                )
        if num_layers is not None and max(layers) > num_layers:
            raise ValueError(
                f"eagle_aux_hidden_state_layer_ids={list(layers)}: the target has {num_layers} layers; expected at "
                f"most {num_layers}"
            )
        return Eagle3Config(layers, self.target_width, **self.flags)


def is_speculator(path: str | PathLike[str]) -> bool:
    """Returns whether `path`, a directory or a Hub id, holds a draft head, by its ``config.json``.

    Raises:
        ValueError: if nothing exists at `path` and it cannot be downloaded.
    """
    file = resolve(path) / "config.json"
    return file.is_file() and _is_head(read_json(file))


def read_speculator_config(path: Path) -> Speculator:
    """Reads the configuration of a draft head. Reports settings that would change the output, which are ignored.

    Raises:
        ValueError: naming file and key, if a value is missing or not supported.
    """
    source = read_json(path / "config.json")
    try:
        return _read_old(source) if "speculators_model_type" not in source else _read_new(source)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"missing key {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: {reason}") from None


def load_speculator(
    path: str | PathLike[str], target: Model, *, vocab_size: int | None = None, mesh: Mesh | None = None
) -> Eagle3Model:
    """Loads a draft head for a target, in the target's dtype.

    Args:
        path: its directory, or a Hub id.
        target: its embedding array is shared with a head that was stored without one.
        vocab_size: number of tokens of the tokenizer; both vocabularies may be padded beyond it. None if unknown.
        mesh: devices that each hold the whole head.

    Raises:
        ValueError: naming file and key or tensor, if something is missing, unexpected, misshapen or does not match the
            target; a mismatch names both values.
    """
    path = resolve(path)
    found = read_speculator_config(path)
    source = HuggingFaceDirectory(path)
    config = dataclasses.replace(found.config, dtype=target.config.dtype)
    try:
        _check_target(found, target.config, vocab_size)
        head = found.head(target.config.num_layers)
        has_embedding = "embed_tokens.weight" in set(source.names())
        if not has_embedding:
            _check_shared(config, target)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    rules = tensor_rules(config, head)
    shapes = eagle3_param_shapes(config, head)
    if not has_embedding:
        del rules["embedding"], shapes["embedding"]
    stored, rules = match_tensors(source, rules, _canonical, ("d2t", "t2d"))
    output_ids = _read_output_ids(source, config)
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    params = place_arrays(
        builders_of(source, stored, rules, shapes), None if mesh is None else dict.fromkeys(shapes, replicated)
    )
    if not has_embedding:
        names = ("embedding", "embedding_scale")
        params |= {name: target.params[name] for name in names if name in target.params}
    if output_ids is not None:
        output_ids = jax.device_put(jnp.asarray(output_ids, jnp.int32), replicated)
    return Eagle3Model(params, config, head, output_ids)


def save_speculator(
    directory: str | PathLike[str], model: Eagle3Model, target: Model, *, target_name: str, draft_len: int = 4
) -> None:
    """Writes an EAGLE-3 or P-EAGLE head in the `speculators` format, in bfloat16, with its embedding and a manifest.

    Args:
        directory: must not exist, be empty, or have a manifest; it is then replaced.
        model: the head.
        target: the model that it drafts for.
        target_name: path or Hub id of the target, for other programs.
        draft_len: suggested draft length, for other programs.

    Raises:
        ValueError: if the directory holds something else, or the head has INT8 weights.
    """
    from safetensors.numpy import save_file

    path, config, head = Path(directory), model.config, model.head
    if config.quantize is not None:
        raise ValueError(f"{path}: quantize={config.quantize!r}: expected a head without INT8 weights")
    kind = "eagle3" if head.mask_token_id is None else "peagle"
    params, tensors = flatten_dict(model.params, sep="/"), {}
    for name, rule in tensor_rules(config, head).items():
        parts = rule.split(np.asarray(jnp.asarray(params[name], jnp.bfloat16)))
        tensors |= {source: np.ascontiguousarray(part) for source, part in zip(rule.sources, parts, strict=True)}
    num_columns = config.output_vocab_size or config.vocab_size
    if model.output_ids is not None:
        ids = np.asarray(model.output_ids, np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(config.vocab_size), ids)
    layers = FAMILIES[config.family].write_config(dataclasses.replace(config, output_vocab_size=None))
    proposal = {"proposal_type": "greedy", "speculative_tokens": draft_len}
    architectures = FAMILIES[target.config.family].write_config(target.config)["architectures"]
    content = {
        "architectures": ["Eagle3DraftModel" if kind == "eagle3" else "PEagleDraftModel"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal | _LOSSLESS],
            "verifier": {"name_or_path": target_name, "architectures": architectures},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": num_columns,
        "target_hidden_size": head.target_width,
        "eagle_aux_hidden_state_layer_ids": list(head.hidden_layers),
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if head.mask_token_id is not None:
        content["mask_token_id"] = head.mask_token_id
    content |= {name: getattr(head, name) for name in _FLAGS}
    with replaced(path) as partial:
        (partial / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        Manifest().write(partial)


def speculator_shapes(path: Path, found: Speculator) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the stored parameters by path; a shared embedding is not among them."""
    shapes = {name: leaf.shape for name, leaf in eagle3_param_shapes(found.config, found.head()).items()}
    if "embed_tokens.weight" not in set(HuggingFaceDirectory(path).names()):
        del shapes["embedding"]
    return shapes


def mismatch(found: Speculator, target: ModelConfig, vocab_size: int | None) -> str | None:
    """Returns why a head cannot draft for a target, or None if it can."""
    try:
        _check_target(found, target, vocab_size)
        found.head(target.num_layers)
    except ValueError as error:
        return str(error)
    return None


def tensor_rules(config: ModelConfig, head: Eagle3Config) -> dict[str, Rule]:
    """Returns how our tensors are made of the stored ones, by path."""
    # The layers are those of the family, under other names.
    rules = {
        path: dataclasses.replace(rule, sources=tuple(name.removeprefix("model.") for name in rule.sources))
        for path, rule in FAMILIES[config.family].rules(config).items()
    }
    rules["layer_0/hidden_norm"] = tensor_names.same("layers.0.hidden_norm.weight")
    rules["fc"] = tensor_names.same("fc.weight")
    if head.norm_before_fc:
        rules["input_norm"] = tensor_names.same("input_norm.weight")
    if head.fc_norm:
        for index in range(len(head.hidden_layers)):
            rules[f"fc_norm_{index}"] = tensor_names.same(f"fc_norm.{index}.weight")
    if head.mask_token_id is not None:
        rules["mask_hidden"] = Rule(("mask_hidden",), lambda x: x.reshape(-1), lambda x: (x[None, None],))
    return rules


def _is_head(source: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in source or any(
        "Eagle3" in str(name) for name in source.get("architectures") or ()
    )


def _read_new(source: Mapping[str, Any]) -> Speculator:
    kind = source["speculators_model_type"]
    if kind not in KINDS:
        raise ValueError(f"config.json: speculators_model_type={kind!r}: expected one of {list(KINDS)}")
    layer_config = source["transformer_layer_config"]
    if not isinstance(layer_config, Mapping):
        raise ValueError(f"config.json: transformer_layer_config={layer_config!r}: expected a dictionary")
    _report_lossy(source)
    flags = {name: base.read_flag(source, name, False) for name in _FLAGS}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ValueError("config.json: fc_norm=true: expected false with norm_before_fc=true")
    config = _read_decoder(layer_config, base.read_integer(source, "draft_vocab_size", 32000))
    if kind == "peagle":
        flags["mask_token_id"] = base.read_integer(source, "mask_token_id")
        if not 0 <= flags["mask_token_id"] < config.vocab_size:
            raise ValueError(
                f"config.json: mask_token_id={flags['mask_token_id']}: expected a token of the {config.vocab_size}"
            )
    layers = _read_layers(source.get("eagle_aux_hidden_state_layer_ids"))
    width = base.read_integer(source, "target_hidden_size", config.width, is_nullable=True)
    return Speculator(kind, config, layers, width, flags)


def _read_old(source: Mapping[str, Any]) -> Speculator:
    """Reads the configuration of the older layout, whose layer ids are those of layer outputs."""
    own = source.get("eagle_config") or {}
    if not isinstance(own, Mapping):
        raise ValueError(f"config.json: eagle_config={own!r}: expected a dictionary")
    layers = _read_layers(own.get("eagle_aux_hidden_state_layer_ids"))
    flags = {name: base.read_flag({**source, **own}, name, False) for name in _FLAGS}
    config = _read_decoder({"num_hidden_layers": 1, **source}, base.read_integer(source, "draft_vocab_size", 32000))
    width = base.read_integer(source, "target_hidden_size", config.width, is_nullable=True)
    return Speculator("eagle3", config, None if layers is None else tuple(one + 1 for one in layers), width, flags)


_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _read_decoder(source: Mapping[str, Any], draft_vocab_size: int) -> ModelConfig:
    """Reads the configuration of the layers."""
    family = source.get("model_type", "qwen3")
    if family not in _DEFAULTS:
        raise ValueError(f"config.json: model_type={family!r}: expected one of {sorted(_DEFAULTS)}")
    rope = source.get("rope_parameters")
    if isinstance(rope, Mapping) and "sliding_attention" in rope:  # One entry per kind of layer.
        source = {**source, "rope_parameters": rope["sliding_attention"]}
    source = {**_DEFAULTS[family], **source, "tie_word_embeddings": False}
    base.check_common(source)
    config = FAMILIES[family].read_config(source)
    if family == "llama":
        window = windows.read_window(source) if "sliding_window" in source else None
        default = [False] * config.num_layers
        config = windows.change_attention(config, windows.read_windows(source, window, default))
    return dataclasses.replace(
        config,
        output_vocab_size=None if draft_vocab_size == config.vocab_size else draft_vocab_size,
        hidden_width=config.width,
    )


def _read_layers(ids: Any) -> tuple[int, ...] | None:
    if ids is None:
        return None
    is_id = isinstance(ids, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids
    )
    if not is_id or not ids or len(set(ids)) < len(ids):
        raise ValueError(f"config.json: eagle_aux_hidden_state_layer_ids={ids!r}: expected distinct layer ids or null")
    return tuple(ids)


def _report_lossy(source: Mapping[str, Any]) -> None:
    """Reports settings that accept drafts which the target would not have sampled."""
    about = source.get("speculators_config") or {}
    methods = about.get("proposal_methods") if isinstance(about, Mapping) else None
    for method in methods or ():
        for name, exact in _LOSSLESS.items():
            value = method.get(name, exact) if isinstance(method, Mapping) else exact
            if value != exact:
                message = f"{name}={value!r} is ignored, because it changes the output; the acceptance rule decides"
                warnings.warn(message, stacklevel=2)


def _check_target(found: Speculator, target: ModelConfig, vocab_size: int | None) -> None:
    if found.target_width != target.width:
        raise ValueError(f"target_hidden_size={found.target_width}: the target's hidden size is {target.width}")
    own = found.config.vocab_size
    if own != target.vocab_size and (vocab_size is None or min(own, target.vocab_size) < vocab_size):
        raise ValueError(f"vocab_size={own}: the target's vocabulary has {target.vocab_size} tokens")


def _check_shared(config: ModelConfig, target: Model) -> None:
    """Checks that the target's embedding can be that of a head that was stored without one."""
    shape = tuple(target.params["embedding"].shape)
    if shape != (config.vocab_size, config.width):
        raise ValueError(
            f"embed_tokens.weight is missing: expected the target's embedding to be "
            f"{[config.vocab_size, config.width]}, it is {list(shape)}"
        )
    if target.config.embedding_scale is not None:
        raise ValueError(
            f"embed_tokens.weight is missing: the target multiplies its embedding by {target.config.embedding_scale}"
        )


def _read_output_ids(source: HuggingFaceDirectory, config: ModelConfig) -> np.ndarray | None:
    """Returns the target's token of each column of a reduced vocabulary.

    Raises:
        ValueError: naming the tensor, if it is missing, misshapen, or does not list distinct tokens in order.
    """
    size, names = config.output_vocab_size, set(source.names())
    if size is None:
        return None
    if "d2t" not in names:
        raise ValueError(
            f"{source.path}: missing tensor 'd2t': draft_vocab_size={size} differs from vocab_size={config.vocab_size}"
        )
    offsets = source.read_indices("d2t")
    if offsets.shape != (size,):
        raise ValueError(f"{source.path}: tensor 'd2t' has the shape {offsets.shape}; expected {(size,)}")
    ids = np.arange(size) + offsets.astype(np.int64)
    if not (np.diff(ids) > 0).all() or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise ValueError(
            f"{source.path}: tensor 'd2t': expected offsets of distinct tokens below {config.vocab_size}, in order"
        )
    if "t2d" in names and not np.array_equal(np.flatnonzero(source.read_indices("t2d")), ids):
        raise ValueError(f"{source.path}: tensor 't2d': expected true at the tokens of 'd2t', and false elsewhere")
    return ids


def _canonical(name: str) -> str | None:
    """Returns the name in the newer layout; None for tensors of the target that a file may repeat."""
    if name.startswith("verifier_") or name.endswith("rotary_emb.inv_freq"):
        return None
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name
