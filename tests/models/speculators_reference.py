"""Writes random draft heads and their logits with `speculators`. Runs in the peers environment.

    python speculators_reference.py cases.json directory

``cases.json`` lists cases: ``{"name", "model", "config", "layer_config", "num_tokens", "num_steps", "seed"}``. Writes:

* ``directory/name/``: the checkpoint of a random head.
* ``directory/name.npz``: ``tokens [T + 1]``, ``hidden [T + 1, E]``, the target's hidden states, and ``logits``; of
  EAGLE-3 ``[steps, T, O]``: in step s, entry p - 1 is of the token at position p + s + 1, where the head has read its
  own outputs at the last s positions.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.model import SpeculatorModel
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

MODELS = {
    "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel),
    "peagle": (PEagleSpeculatorConfig, PEagleDraftModel),
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
}


def make(case) -> SpeculatorModel:
    """Returns a head whose parameters are all random."""
    config_class, model_class = MODELS[case["model"]]
    layer_config = AutoConfig.for_model(**case["layer_config"])
    layer_config._attn_implementation = "eager"
    about = SpeculatorsConfig(
        algorithm=case["model"],
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )
    model = model_class(config_class(transformer_layer_config=layer_config, speculators_config=about, **case["config"]))
    generator = torch.Generator().manual_seed(case["seed"])
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name == "mask_hidden":
            parameter.data = noise
        elif parameter.ndim > 1:
            parameter.data = noise * parameter.shape[-1] ** -0.5 * (2.0 if "embed" in name else 1.0)
        elif name.endswith("bias"):
            parameter.data = 0.2 * noise
        else:
            parameter.data = 1.0 + 0.2 * noise
    if model.use_draft_vocab:
        chosen = torch.randperm(model.verifier_vocab_size, generator=generator)[: model.draft_vocab_size].sort()[0]
        t2d = torch.zeros(model.verifier_vocab_size, dtype=torch.bool)
        t2d[chosen] = True
        model.load_vocab_mappings(t2d, chosen - torch.arange(len(chosen)))
    return model.eval()


@torch.no_grad()
def main(cases, directory):
    for case in json.loads(Path(cases).read_text()):
        model = make(case)
        model.save_pretrained(directory / case["name"])
        generator = torch.Generator().manual_seed(case["seed"] + 1)
        num_tokens = case["num_tokens"]
        width = case["layer_config"]["hidden_size"]
        tokens = torch.randint(model.verifier_vocab_size, (num_tokens + 1,), generator=generator)
        hidden = torch.randn(num_tokens + 1, case["num_hidden"] * width, generator=generator)
        logits = logits_of(model, lambda: RUN[case["model"]](model, case, tokens, hidden))
        np.savez(directory / f"{case['name']}.npz", tokens=tokens, hidden=hidden, logits=logits)


def logits_of(model, run):
    """Returns what the head computes during `run`; the forward passes of training do not return it."""
    found = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0].float().numpy()))
    run()
    return np.stack(found)


def run_eagle3(model, case, tokens, hidden):
    """Reads token p with the hidden state of position p - 1."""
    num_tokens = len(tokens) - 1
    documents = torch.zeros(1, num_tokens, dtype=torch.long)
    model(hidden[None, :-1], tokens[None, 1:], documents, ttt_steps=case["num_steps"])


RUN = {"eagle3": run_eagle3}


if __name__ == "__main__":
    torch.set_num_threads(1)  # The models are small, and waiting threads would slow other processes down.
    main(sys.argv[1], Path(sys.argv[2]))
