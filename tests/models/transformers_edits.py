"""Edits ``config.json`` key by key and writes the logits of transformers. Runs in the peers environment.

    python transformers_edits.py cases.json directory

``cases.json`` lists ``{"name", "config", "seed"}`` as for `transformers_reference`. Writes for each case:

* ``directory/name/``: the checkpoint.
* ``directory/name.json``: the list of edits, each with its description and the whole edited configuration. Edit 0
  changes nothing.
* ``directory/name.npz``: ``edit_i`` ``[n, V]``, the logits over `TEXT` after edit ``i``, for the edits that
  `transformers` loads.
"""

import contextlib
import inspect
import io
import json
import re
import resource
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers_reference import randomize

TEXT = np.random.default_rng(7).integers(0, 131, 70).tolist()
"""Random tokens, longer than every window and every original context of the cases."""

MISSING = "(missing)"

STRINGS = {
    "hidden_act": ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "swish", "quick_gelu", "mish"),
    "model_type": ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "ministral", "olmo2"),
    "rope_type": ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "other"),
    "layer_types": ("full_attention", "sliding_attention", "chunked_attention", "linear_attention"),
}
STRINGS |= dict.fromkeys(("hidden_activation", "activation_function"), STRINGS["hidden_act"])

_LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _per_layer_type(**rope):
    """Returns rotary parameters with a different base per type of layers."""
    return {"full_attention": rope | {"rope_theta": 123.0}, "sliding_attention": rope | {"rope_theta": 45.0}}


ROPES = (
    {"rope_type": "default", "rope_theta": 123.0},
    {"rope_theta": 123.0},
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 3.0},
    {"rope_type": "linear", "factor": 3.0, "rope_theta": 123.0},
    {"rope_type": "linear"},
    {"rope_type": "dynamic", "factor": 3.0},
    {"type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    _LLAMA3 | {"original_max_position_embeddings": 32},
    _LLAMA3,
    {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    | {"original_max_position_embeddings": 32},
    {"rope_type": "default", "rope_theta": 123.0, "partial_rotary_factor": 0.5},
    _per_layer_type(rope_type="default"),
    _per_layer_type(rope_type="linear", factor=2.0),
    {},
)
"""Values of ``rope_parameters`` and ``rope_scaling``."""


KEYS_OF_SHARED_CODE = (
    *("rope_theta", "rope_scaling", "original_max_position_embeddings", "partial_rotary_factor"),
    *("rope_local_base_freq", "sliding_window_pattern", "is_causal", "is_decoder", "quantization_config"),
    "logit_scale",
)


def others(key, value):
    """Returns other values for a key: of the same type as `value`, or of every type if it is None."""
    if key in STRINGS and not isinstance(value, list):
        return STRINGS[key]
    if key == "layer_types":
        kinds, count = STRINGS[key], len(value or ()) or 2
        uniform = [[kind] * count for kind in kinds]
        other = "linear_attention" if "linear_attention" in (value or ()) else "sliding_attention"
        mixed = [[other if i % 2 else "full_attention" for i in range(count)]]
        return [*uniform, *mixed, [*reversed(mixed[0])], mixed[0][:-1]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value, value // 2, 0, 1]
    if isinstance(value, float):
        return [2 * value, 0.5 * value, 0.0, 1.0]
    if isinstance(value, str):
        return ["other"]
    if isinstance(value, (list, tuple)):
        return [[], [*value, *value], [*reversed(value)]]
    if isinstance(value, dict):
        return [{}]
    return [True, False, 2, 6, 0.5, "other"]


def keys_read(config):
    """Returns the keys and defaults of a family: those of its configuration, and those that its source code reads."""
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    found = dict(config.to_dict())
    for module in (inspect.getmodule(model), inspect.getmodule(type(config))):
        text = inspect.getsource(module)
        for name in re.findall(r"config\.([a-z]\w+)|(?:config, |kwargs\.\w+\()\"([a-z]\w+)\"", text):
            found.setdefault(name[0] or name[1], None)
    found = dict.fromkeys(KEYS_OF_SHARED_CODE) | found
    return {name: value for name, value in found.items() if not callable(getattr(config, name, None))}


def edits(content, known):
    """Yields ``(description, configuration)`` of every edit of a file's content."""
    yield "nothing", content
    ropes = ("rope_parameters", "rope_scaling")
    for key in sorted({*content, *known}):
        if key in content:
            yield f"delete {key}", {name: value for name, value in content.items() if name != key}
        old = content.get(key, known.get(key))
        for value in (None, *(ROPES if key in ropes else others(key, old))):
            yield f"{key}: {content.get(key, MISSING)} -> {value}", content | {key: value}
    for key in ropes:
        # Without the other key, as in files of transformers 4 or 5.
        rest = {name: value for name, value in content.items() if name not in ropes}
        for value in ROPES:
            yield f"only {key}: {value}", rest | {key: value}
            for top in ({"rope_theta": 321.0}, {"original_max_position_embeddings": 16}):
                yield f"only {key}: {value} with {top}", rest | {key: value} | top
        for inner, old in (content.get(key) or {}).items():
            nested = content[key]
            yield (
                f"delete {key}.{inner}",
                content | {key: {name: value for name, value in nested.items() if name != inner}},
            )
            for value in (None, *others(inner, old)):
                yield f"{key}.{inner}: {old} -> {value}", content | {key: nested | {inner: value}}


@torch.no_grad()
def logits(directory):
    """Returns the logits over `TEXT`, or None if `transformers` fails or initializes tensors that are missing."""
    try:
        # Warnings about the edited files are discarded.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            model, report = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            if report["missing_keys"]:
                return None
            found = model.eval()(torch.tensor([TEXT]), return_dict=True).logits[0].float().numpy()
    except Exception:
        return None
    return found if np.isfinite(found).all() else None


def main(cases, directory):
    for case in json.loads(Path(cases).read_text()):
        config = AutoConfig.for_model(**case["config"])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
        randomize(model, case["seed"])
        model.tie_weights()
        place = directory / case["name"]
        model.save_pretrained(place)
        file = place / "config.json"
        content = json.loads(file.read_text())
        known = {key: value for key, value in keys_read(config).items() if not key.startswith("_")}
        table, results, seen = [], {}, set()
        for description, edited in edits(content, known):
            text = json.dumps(edited, sort_keys=True)
            if text in seen:
                continue
            seen.add(text)
            file.write_text(text)
            found = logits(place)
            if found is not None:
                results[f"edit_{len(table)}"] = found
            table.append({"description": description, "config": edited})
        file.write_text(json.dumps(content))
        place.with_suffix(".json").write_text(json.dumps(table))
        np.savez(directory / f"{case['name']}.npz", **results)


if __name__ == "__main__":
    # A configuration without its sizes has the defaults of a large model, which must fail instead of being allocated.
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    main(sys.argv[1], Path(sys.argv[2]))
