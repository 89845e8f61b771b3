"""Reads and writes draft heads of the `speculators` format; reads another layout of EAGLE-3 and of DFlash too.

A directory holds ``config.json`` and safetensors (or ``pytorch_model.bin``). In the `speculators` format
``speculators_model_type`` names the kind of head, and ``transformer_layer_config`` is a Hugging Face configuration in
which a missing key means the default of `transformers`. The older layout of EAGLE-3 has one flat Llama configuration
and calls the first layer ``midlayer``. The layout of the authors of DFlash has one flat Qwen3 configuration with a
``dflash_config``.
"""

import dataclasses
import json
import warnings
from collections.abc import Mapping, Set
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
from bass_jax.drafters.eagle.dflash import DFlashConfig, DFlashModel, dflash_param_shapes
from bass_jax.drafters.eagle.eagle3 import Eagle3Config, Eagle3Model, eagle3_param_shapes
from bass_jax.drafters.eagle.mtp import MTPConfig
from bass_jax.models import Model
from bass_jax.models.families import FAMILIES, Rule, base, tensor_names, windows
from bass_jax.models.model_config import ModelConfig
from bass_jax.runtime.files import read_json

type HeadConfig = Eagle3Config | DFlashConfig
type HeadModel = Eagle3Model | DFlashModel

_HEADS = {"eagle3": Eagle3Config, "peagle": Eagle3Config, "dflash": DFlashConfig, "mtp": MTPConfig}

KINDS = tuple(_HEADS)
"""Values of ``speculators_model_type`` that can be read."""

_LAYER_IDS = {
    "eagle3": "eagle_aux_hidden_state_layer_ids",
    "peagle": "eagle_aux_hidden_state_layer_ids",
    "dflash": "aux_hidden_state_layer_ids",
}
"""The key of the hidden states that a head reads. An MTP head has none, because it reads the last one."""

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

_HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families of targets with recurrent layers that MTP heads can be made for."""

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
        flags: the other fields of the head's configuration.
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

    def head(self, num_layers: int | None = None) -> HeadConfig:
        """Returns the configuration of the head for a target of `num_layers` layers; None if only shapes matter.

        Raises:
            ValueError: if the default hidden states are not distinct, or a layer is not one of the target's.
        """
        layers, make = self.hidden_layers, _HEADS[self.kind]
        if self.kind == "mtp":  # The output of the last layer, before the final norm.
            return make((num_layers or 0,), self.target_width, **self.flags)
        key = _LAYER_IDS[self.kind]
        if layers is None:
            layers = (0, 0, 0) if num_layers is None else (2, num_layers // 2, num_layers - 3)
            if num_layers is not None and (len(set(layers)) < 3 or min(layers) < 0):
                raise ValueError(
                    f"{key}=null: its default [2, L/2, L-3] = {list(layers)} needs three different layers, the target "
                    f"has {num_layers}"
                )
        if num_layers is not None and max(layers) > num_layers:
            raise ValueError(f"{key}={list(layers)}: the target has {num_layers} layers; expected at most {num_layers}")
        return make(layers, self.target_width, **self.flags)

    @property
    def layer_names(self) -> str:
        """The ids of the hidden states that it reads, for people; L is the target's number of layers."""
        if self.kind == "mtp":
            return "L"
        return "2, L/2, L-3" if self.hidden_layers is None else ", ".join(map(str, self.hidden_layers))


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
        if "dflash_config" in source and "speculators_model_type" not in source:
            source = _from_z_lab(source)
        return _read_old(source) if "speculators_model_type" not in source else _read_new(source)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"missing key {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: {reason}") from None


def load_speculator(
    path: str | PathLike[str], target: Model, *, vocab_size: int | None = None, mesh: Mesh | None = None
) -> HeadModel:
    """Loads a draft head for a target, in the target's dtype.

    Args:
        path: its directory, or a Hub id.
        target: its embedding and head are shared with a draft head that is stored without its own.
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
        shared = _shared(found, set(source.names()))
        _check_shared(config, target, shared)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    rules, shapes = tensor_rules(config, head), head_param_shapes(config, head)
    for name in shared:
        del rules[name], shapes[name]
    stored, rules = match_tensors(source, rules, _canonical, ("d2t", "t2d", *shared.values()))
    output_ids = _read_output_ids(source, config)
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    params = place_arrays(
        builders_of(source, stored, rules, shapes), None if mesh is None else dict.fromkeys(shapes, replicated)
    )
    params |= target_arrays({name: name for name in shared}, target)
    if output_ids is not None:
        output_ids = jax.device_put(jnp.asarray(output_ids, jnp.int32), replicated)
    if isinstance(head, DFlashConfig):
        return DFlashModel(params, config, head, output_ids)
    return Eagle3Model(params, config, head, output_ids)


def target_arrays(names: Mapping[str, str], target: Model) -> dict[str, Any]:
    """Returns arrays of the target under the names of a head's parameters; of INT8 weights the scales too.

    Args:
        names: the target's name of each.
        target: the target; the head of a tied one is its embedding.
    """
    found = {}
    for ours, name in names.items():
        own = _name_in_target(name, target.config)
        found |= {f"{ours}{end}": target.params[own + end] for end in ("", "_scale") if own + end in target.params}
    return found


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
        ValueError: if the directory holds something else, or the head has INT8 weights or is of another kind.
    """
    from safetensors.numpy import save_file

    path, config, head = Path(directory), model.config, model.head
    if type(head) is not Eagle3Config:
        raise ValueError(f"{path}: {type(head).__name__}: expected an EAGLE-3 or a P-EAGLE head")
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
    content |= {name: getattr(head, name) for name in _EAGLE3_FLAGS}
    with replaced(path) as partial:
        (partial / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        Manifest().write(partial)


def speculator_shapes(path: Path, found: Speculator) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the stored parameters by path; those that are the target's are not among them."""
    shared = _shared(found, set(HuggingFaceDirectory(path).names()))
    shapes = head_param_shapes(found.config, found.head())
    return {name: leaf.shape for name, leaf in shapes.items() if name not in shared}


def head_param_shapes(config: ModelConfig, head: HeadConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of every parameter of a head, by its path."""
    return dflash_param_shapes(config, head) if isinstance(head, DFlashConfig) else eagle3_param_shapes(config, head)


def mismatch(found: Speculator, target: ModelConfig, vocab_size: int | None) -> str | None:
    """Returns why a head cannot draft for a target, or None if it can."""
    try:
        _check_target(found, target, vocab_size)
        found.head(target.num_layers)
    except ValueError as error:
        return str(error)
    return None


def tensor_rules(config: ModelConfig, head: HeadConfig) -> dict[str, Rule]:
    """Returns how our tensors are made of the stored ones, by path."""
    # The layers are those of the family, under other names.

    def renamed(name):
        if isinstance(head, MTPConfig):
            name = name.replace("model.layers.", "mtp_layers.")
            name = name.replace("model.norm.", "mtp_layers.0.final_layernorm.")
        return name.removeprefix("model.")

    rules = {path: rule.renamed(renamed) for path, rule in FAMILIES[config.family].rules(config).items()}
    if isinstance(head, MTPConfig):
        names = {"token_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "fc": "input_proj"}
        return rules | {ours: tensor_names.same(f"mtp_layers.0.{theirs}.weight") for ours, theirs in names.items()}
    rules["fc"] = tensor_names.same("fc.weight")
    if isinstance(head, DFlashConfig):
        return rules | {"hidden_norm": tensor_names.same("hidden_norm.weight")}
    rules["layer_0/hidden_norm"] = tensor_names.same("layers.0.hidden_norm.weight")
    if head.norm_before_fc:
        rules["input_norm"] = tensor_names.same("input_norm.weight")
    if head.fc_norm:
        for index in range(len(head.hidden_layers)):
            rules[f"fc_norm_{index}"] = tensor_names.same(f"fc_norm.{index}.weight")
    if head.mask_token_id is not None:
        rules["mask_hidden"] = Rule(("mask_hidden",), lambda x: x.reshape(-1), lambda x: (x[None, None],))
    return rules


def _is_head(source: Mapping[str, Any]) -> bool:
    return (
        "speculators_model_type" in source
        or "dflash_config" in source
        or any("Eagle3" in str(name) for name in source.get("architectures") or ())
    )


def _read_new(source: Mapping[str, Any]) -> Speculator:
    kind = source["speculators_model_type"]
    if kind not in KINDS:
        raise ValueError(f"config.json: speculators_model_type={kind!r}: expected one of {list(KINDS)}")
    layer_config = source["transformer_layer_config"]
    if not isinstance(layer_config, Mapping):
        raise ValueError(f"config.json: transformer_layer_config={layer_config!r}: expected a dictionary")
    _report_lossy(source)
    if kind == "mtp":
        return _read_mtp(source, layer_config)
    vocab_size = base.read_integer(source, "draft_vocab_size", 32000)
    config = _read_decoder(layer_config, vocab_size) if kind != "dflash" else _read_dflash(layer_config, vocab_size)
    flags: dict[str, Any] = {name: base.read_flag(source, name, False) for name in _FLAGS[kind]}
    if flags.get("norm_before_fc") and flags.get("fc_norm"):
        raise ValueError("config.json: fc_norm=true: expected false with norm_before_fc=true")
    if kind in ("peagle", "dflash"):
        flags["mask_token_id"] = base.read_integer(source, "mask_token_id")
        if not 0 <= flags["mask_token_id"] < config.vocab_size:
            raise ValueError(
                f"config.json: mask_token_id={flags['mask_token_id']}: expected a token of the {config.vocab_size}"
            )
    layers = _read_layers(source, _LAYER_IDS[kind])
    width = base.read_integer(source, "target_hidden_size", config.width, is_nullable=True)
    if kind == "dflash":
        flags["block_size"] = base.read_integer(source, "block_size", 8)
        if width != config.width:
            raise ValueError(f"config.json: target_hidden_size={width}: expected hidden_size={config.width}")
    found = Speculator(kind, config, layers, width, flags)
    found.head()  # Checks the flags.
    return found


def _read_mtp(source: Mapping[str, Any], layer_config: Mapping[str, Any]) -> Speculator:
    """Reads the configuration of an MTP head, whose ``transformer_layer_config`` is that of the target."""
    family = layer_config.get("model_type", "qwen2")
    if family != "qwen3" and family not in _HYBRIDS:
        expected = ", ".join(map(repr, ("qwen3", *_HYBRIDS)))
        raise ValueError(f"config.json: model_type={family!r}: expected one of {expected} for an MTP head")
    if (num_heads := base.read_integer(source, "num_nextn_predict_layers", 1)) != 1:
        raise ValueError(f"config.json: num_nextn_predict_layers={num_heads}: expected 1")
    if family in _HYBRIDS:  # The layer is the last one with attention.
        target = FAMILIES[family].read_config({**layer_config, "tie_word_embeddings": False})
        layer = next(layer for layer in reversed(target.layers) if not layer.is_recurrent)
        config = dataclasses.replace(target, layers=(layer,), hidden_width=target.width)
        return Speculator("mtp", config, None, config.width, {})
    types = layer_config.get("layer_types")
    first = {"num_hidden_layers": 1, "layer_types": types[:1] if isinstance(types, list) else types}
    config = _read_decoder({**layer_config, **first}, None)
    if config.layers[0].attention.window is not None:
        raise ValueError("config.json: layer_types: 'sliding_attention': expected 'full_attention' in an MTP head")
    return Speculator("mtp", config, None, config.width, {})


def _read_dflash(layer_config: Mapping[str, Any], draft_vocab_size: int) -> ModelConfig:
    """Reads the configuration of the layers of a DFlash head, which are those of Qwen3 in every family."""
    config = _read_decoder(layer_config, draft_vocab_size)
    window = [layer.attention.window for layer in config.layers]
    config = windows.change_attention(config, window, qk_norm=config.final_norm)
    layers = (dataclasses.replace(layer, mlp=dataclasses.replace(layer.mlp, has_bias=False)) for layer in config.layers)
    return dataclasses.replace(config, layers=tuple(layers))


def _from_z_lab(source: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the `speculators` configuration of a DFlash head in the layout of its authors.

    Its layer ids are those of layer outputs. The output of the last layer is after the final norm there.

    Raises:
        ValueError: naming the key, if the head reads the output of the last layer or has windows.
    """
    own = source["dflash_config"]
    if not isinstance(own, Mapping):
        raise ValueError(f"config.json: dflash_config={own!r}: expected a dictionary")
    layers = _read_layers(own, "target_layer_ids")
    if layers is None:
        raise ValueError("config.json: dflash_config.target_layer_ids=null: expected distinct layer ids")
    if max(layers) + 1 == source.get("num_target_layers"):
        raise ValueError(f"config.json: dflash_config.target_layer_ids={list(layers)}: expected none of the last layer")
    if "sliding_attention" in (source.get("layer_types") or ()):
        raise ValueError("config.json: layer_types: 'sliding_attention': expected 'full_attention' with dflash_config")
    return {
        "speculators_model_type": "dflash",
        "transformer_layer_config": source,
        "draft_vocab_size": source.get("vocab_size", _DEFAULTS["qwen3"]["vocab_size"]),
        "block_size": source.get("block_size", own.get("block_size")),
        "mask_token_id": own.get("mask_token_id"),
        "aux_hidden_state_layer_ids": [one + 1 for one in layers],
    }


def _read_old(source: Mapping[str, Any]) -> Speculator:
    """Reads the configuration of the older layout, whose layer ids are those of layer outputs."""
    own = source.get("eagle_config") or {}
    if not isinstance(own, Mapping):
        raise ValueError(f"config.json: eagle_config={own!r}: expected a dictionary")
    layers = _read_layers(own, _LAYER_IDS["eagle3"])
    flags = {name: base.read_flag({**source, **own}, name, False) for name in _FLAGS["eagle3"]}
    config = _read_decoder({"num_hidden_layers": 1, **source}, base.read_integer(source, "draft_vocab_size", 32000))
    width = base.read_integer(source, "target_hidden_size", config.width, is_nullable=True)
    return Speculator("eagle3", config, None if layers is None else tuple(one + 1 for one in layers), width, flags)


_EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_FLAGS = {
    "eagle3": _EAGLE3_FLAGS,
    "peagle": _EAGLE3_FLAGS,
    "dflash": ("sample_from_anchor", "sliding_window_non_causal"),
}
"""Keys that are true or false, by the kind of the head."""


def _read_decoder(source: Mapping[str, Any], draft_vocab_size: int | None) -> ModelConfig:
    """Reads the configuration of the layers. A draft vocabulary of None is the target's."""
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


def _read_layers(source: Mapping[str, Any], key: str) -> tuple[int, ...] | None:
    ids = source.get(key)
    if ids is None:
        return None
    is_id = isinstance(ids, list) and all(
        isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids
    )
    if not is_id or not ids or len(set(ids)) < len(ids):
        raise ValueError(f"config.json: {key}={ids!r}: expected distinct layer ids or null")
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


def _shared(found: Speculator, names: Set[str]) -> dict[str, str]:
    """Returns the parameters that are the target's, by our name, with the names under which a file may repeat them.

    Args:
        found: the configuration of the head.
        names: of the stored tensors.
    """
    embedding, head = {"embedding": "embed_tokens.weight"}, {"head": "lm_head.weight"}
    if found.kind == "mtp" or (found.kind == "dflash" and found.config.output_vocab_size is None):
        return embedding | head
    return embedding if found.kind == "dflash" or "embed_tokens.weight" not in names else {}


def _name_in_target(name: str, target: ModelConfig) -> str:
    """Returns the target's name of a shared parameter; the head of a tied target is its embedding."""
    return "embedding" if target.is_tied and name == "head" else name


def _check_shared(config: ModelConfig, target: Model, shared: Mapping[str, str]) -> None:
    """Checks that the target's arrays can be those of a draft head that is stored without its own."""
    expected = [config.vocab_size, config.width]
    for name, source in shared.items():
        shape = list(target.params[_name_in_target(name, target.config)].shape)
        if shape != expected:
            what = "embedding" if name == "embedding" else "head"
            raise ValueError(f"{source} is missing: expected the target's {what} to be {expected}, it is {shape}")
    if shared and target.config.embedding_scale is not None:
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
