"""Writes checkpoints and their logits with torch and transformers. Runs in the peers environment.

    python transformers_reference.py cases.json directory

``cases.json`` lists cases: ``{"name", "config": {"model_type", …}, "prompts": [[ids], …], "num_new": [n, …], "seed"}``
for a random model, or with the path of a model, ``"gguf"`` or ``"directory"``, instead of ``"config"``. Writes:

* ``directory/name/``: the checkpoint of a random model.
* ``directory/name.npz``: for prompt ``i``, ``greedy_i``, its greedy continuation of ``n`` tokens, and ``logits_i``
  ``[..., V]`` of every position of both, computed without padding and without a cache.
* ``directory/name.bin/`` and ``directory/name.bins/`` if the case has ``"pickled"``: the same weights pickled by torch,
  as one file and as shards.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText


def randomize(model, seed):
    """Draws all parameters, because `transformers` initializes norms to 1 and biases to 0, which would hide errors."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data = noise * parameter.shape[-1] ** -0.5 * (2.0 if "embed" in name else 1.0)
        elif name.endswith("bias"):
            parameter.data = 0.2 * noise
        else:
            parameter.data = parameter.data + 0.2 * noise
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = 0.2 * torch.randn(buffer.shape, generator=generator)


@torch.no_grad()
def reference(model, prompts, num_new):
    """Returns the greedy continuations, and the logits of all positions of the prompts and continuations."""
    results = {}
    for i, (prompt, count) in enumerate(zip(prompts, num_new, strict=True)):
        past, tokens, step = None, [], torch.tensor([prompt])
        for _ in range(count):
            output = model(step, past_key_values=past, use_cache=True)
            past, step = output.past_key_values, output.logits[:, -1:].argmax(-1)
            tokens.append(int(step))
        results[f"greedy_{i}"] = np.asarray(tokens, np.int32)
        results[f"logits_{i}"] = model(torch.tensor([[*prompt, *tokens]])).logits[0].float().numpy()
    return results


def pickle_weights(model, directory):
    """Writes the weights as old releases did: as one ``pytorch_model.bin``, and as shards with an index."""
    tensors = model.state_dict()
    names = list(tensors)
    for suffix, parts in (("bin", [names]), ("bins", [names[::2], names[1::2]])):
        place = directory.with_name(f"{directory.name}.{suffix}")
        place.mkdir()
        model.config.save_pretrained(place)
        table = {}
        for i, part in enumerate(parts):
            file = "pytorch_model.bin" if len(parts) == 1 else f"pytorch_model-{i + 1:05}-of-{len(parts):05}.bin"
            torch.save({name: tensors[name] for name in part}, place / file)
            table |= dict.fromkeys(part, file)
        if len(parts) > 1:
            index = {"metadata": {}, "weight_map": table}
            (place / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def main(cases, directory):
    for case in json.loads(Path(cases).read_text()):
        if "gguf" in case:
            path = Path(case["gguf"])
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
            )
        elif "directory" in case:
            model = AutoModelForCausalLM.from_pretrained(
                case["directory"], dtype=torch.float32, attn_implementation="eager"
            )
        else:
            config = AutoConfig.for_model(**case["config"])
            # The causal class of Qwen3.5 leaves out the vision tower.
            has_tower = config.model_type in ("qwen3_5", "qwen3_5_moe")
            kind = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
            # For what `randomize` keeps: the decay of recurrent layers. With `seed`, one error is 1.04e-4 by rounding.
            torch.manual_seed(case["seed"] + 1)
            model = kind.from_config(config, attn_implementation="eager").float()
            randomize(model, case["seed"])
            model.tie_weights()
            model.save_pretrained(directory / case["name"], max_shard_size=case.get("max_shard_size", "1GB"))
            if case.get("pickled"):
                pickle_weights(model, directory / case["name"])
        if "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ()):
            # Normalized keys may be small: logits in float32 differ by up to 2e-4 from these.
            model.double().set_experts_implementation("eager")  # The other implementations have no float64.
        model.eval()
        results = reference(model, case["prompts"], case["num_new"])
        np.savez(directory / f"{case['name']}.npz", **results)


if __name__ == "__main__":
    torch.set_num_threads(1)  # The models are small, and waiting threads would slow other processes down.
    main(sys.argv[1], Path(sys.argv[2]))
