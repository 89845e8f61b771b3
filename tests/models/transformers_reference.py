"""Writes checkpoints and their logits with torch and transformers; run in the peers environment.

    python transformers_reference.py cases.json directory

``cases.json`` lists cases: ``{"name", "config": {"model_type", …}, "prompts": [[ids], …], "seed"}`` for a random
model of that configuration, or ``{"name", "gguf": path, "prompts", "num_new"}``. For each,
``directory/name/`` gets the checkpoint (random models) and ``directory/name.npz`` gets, for prompt ``i``,
``logits_i`` ``[n, V]`` of every position, read without padding, and ``greedy_i``, the greedy continuation.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM


def randomize(model, seed):
    """Draws every parameter anew: `transformers` leaves norms at 1 and biases at 0, where a fault hides."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data = noise * parameter.shape[-1] ** -0.5 * (2.0 if "embed" in name else 1.0)
        elif name.endswith("bias"):
            parameter.data = 0.2 * noise
        else:
            parameter.data = parameter.data + 0.2 * noise


@torch.no_grad()
def reference(model, prompts, num_new):
    """Logits of every position of every prompt, and the greedy continuations."""
    results = {}
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        results[f"logits_{i}"] = model(ids).logits[0].float().numpy()
        if num_new:
            past, tokens, step = None, [], ids
            for _ in range(num_new):
                output = model(step, past_key_values=past, use_cache=True)
                past, step = output.past_key_values, output.logits[:, -1:].argmax(-1)
                tokens.append(int(step))
            results[f"greedy_{i}"] = np.asarray(tokens, np.int32)
    return results


def main(cases, directory):
    for case in json.loads(Path(cases).read_text()):
        if "gguf" in case:
            path = Path(case["gguf"])
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
            )
        else:
            config = AutoConfig.for_model(**case["config"])
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
            randomize(model, case["seed"])
            model.tie_weights()
            model.save_pretrained(directory / case["name"], max_shard_size=case.get("max_shard_size", "1GB"))
        model.eval()
        results = reference(model, case["prompts"], case.get("num_new", 0))
        np.savez(directory / f"{case['name']}.npz", **results)


if __name__ == "__main__":
    torch.set_num_threads(1)  # Small models; and threads that wait by spinning starve whatever runs beside.
    main(sys.argv[1], Path(sys.argv[2]))
