"""Reads the layer for multi-token prediction that some checkpoints of targets hold, as a draft head."""

import dataclasses
from os import PathLike

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bass_jax.checkpoint.assemble import builders_of, match_tensors, place_arrays
from bass_jax.checkpoint.huggingface import HuggingFaceDirectory
from bass_jax.checkpoint.load import open_source, resolve
from bass_jax.checkpoint.speculators import head_param_shapes, target_arrays
from bass_jax.drafters.eagle.eagle3 import Eagle3Model
from bass_jax.drafters.eagle.mtp import MTPConfig
from bass_jax.models import Model
from bass_jax.models.families import FAMILIES, Rule, tensor_names


def load_native_mtp(path: str | PathLike[str], target: Model, *, mesh: Mesh | None = None) -> Eagle3Model:
    """Loads the layer for multi-token prediction of the target's own checkpoint, in the target's dtype.

    Args:
        path: the Hugging Face directory or Hub id that the target was read from.
        target: its embedding, final norm and head are shared.
        mesh: devices that each hold the whole layer.

    Raises:
        ValueError: if the checkpoint has no such layer, or a tensor is missing or misshapen.
    """
    path = resolve(path)
    family, source = FAMILIES[target.config.family], open_source(path)
    if family.mtp_names is None or not isinstance(source, HuggingFaceDirectory):
        able = sorted(name for name, one in FAMILIES.items() if one.mtp_names is not None)
        raise ValueError(f"drafter='mtp': {path}: expected a Hugging Face directory of one of the families {able}")
    names = family.mtp_names(target.config)
    if names["fc"] not in set(source.names()):
        raise ValueError(f"drafter='mtp': {path} has no tensor {names['fc']!r}: expected a layer for it")
    layer = next(layer for layer in reversed(target.config.layers) if not layer.is_recurrent)
    config = dataclasses.replace(
        target.config,
        layers=(layer,),
        is_tied=False,
        hidden_width=target.config.width,
        quantize=None,
        cache_dtype=None,
        tensor_axis=None,
        expert_axes=(None, None),
    )
    head = MTPConfig((target.config.num_layers,), target.config.width, norm_hidden=True)
    shared = {"embedding": "embedding", "head": "head", "target_norm": "final_norm"}
    rules = _rules(family.rules(config), names)
    shapes = head_param_shapes(config, head)
    for name in shared:
        rules.pop(name, None)
        del shapes[name]
    wanted = {source for rule in rules.values() for one in (rule, rule.alternative) if one for source in one.sources}
    stored, rules = match_tensors(source, rules, lambda name: name if name in wanted else None)
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    params = place_arrays(
        builders_of(source, stored, rules, shapes), None if mesh is None else dict.fromkeys(shapes, whole)
    )
    params |= target_arrays(shared, target)
    return Eagle3Model(params, config, head)


def _rules(rules: dict[str, Rule], names: dict[str, str]) -> dict[str, Rule]:
    """Returns the rules of a family's only layer under the stored names, and those of the other tensors."""

    def rename(name: str) -> str:
        return name.replace("model.layers.0.", f"{names['layer']}.", 1)

    others = {ours: tensor_names.same(names[ours]) for ours in ("fc", "token_norm", "hidden_norm", "final_norm")}
    return {path: rule.renamed(rename) for path, rule in rules.items()} | others
