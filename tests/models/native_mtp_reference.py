"""Writes targets with a layer for multi-token prediction, and its logits. Runs in the peers environment.

    python native_mtp_reference.py cases.json directory

``cases.json`` lists ``{"name", "config", "seed", "tokens"}``. Writes for each case the checkpoint ``directory/name/``,
and ``directory/name.npz`` with ``logits [n - 1, V]`` by `transformers`, of the layer that reads token i + 1 and the
target's hidden state at token i, after the final norm.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer
from transformers_reference import randomize


def stored_name(name, config):
    """Returns the name that files have for a tensor of `MtpLayer`."""
    name = name.removeprefix("mtp_block.")
    if config.model_type == "deepseek_v3":
        return f"model.layers.{config.num_hidden_layers}." + name.replace("post_norm", "shared_head.norm")
    others = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
    part = name.split(".")[0]
    return f"mtp.{name.replace(part, others[part], 1)}" if part in others else f"mtp.layers.0.{name}"


@torch.no_grad()
def run(case, directory):
    """Writes the files of one case."""
    config = AutoConfig.for_model(**case["config"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    randomize(model, case["seed"])
    model.eval().save_pretrained(directory / case["name"])
    types = getattr(config, "layer_types", None)
    index = max(i for i, kind in enumerate(types) if kind == "full_attention") if types else 0
    layer = MtpLayer(model.config, type(model.model.layers[index]), type(model.model.norm), index).float().eval()
    randomize(layer, case["seed"] + 1)
    path = directory / case["name"] / "model.safetensors"
    own = {stored_name(name, config): tensor.contiguous() for name, tensor in layer.state_dict().items()}
    save_file(load_file(path) | own, path, metadata={"format": "pt"})
    tokens = torch.tensor([case["tokens"]])
    hidden, num = model.model(tokens).last_hidden_state, tokens.shape[1] - 1
    positions = torch.arange(num)[None]
    mask = torch.full((num, num), torch.finfo(torch.float32).min).triu(1)[None, None]
    embedded = model.get_input_embeddings()(tokens[:, 1:])
    angles = model.model.rotary_emb(embedded, positions)
    output = layer(embedded, hidden[:, :-1], angles, mask, positions, None)
    np.savez(directory / f"{case['name']}.npz", logits=model.lm_head(output)[0].numpy())


if __name__ == "__main__":
    torch.set_num_threads(1)  # The models are small, and waiting threads would slow other processes down.
    for one in json.loads(Path(sys.argv[1]).read_text()):
        run(one, Path(sys.argv[2]))
