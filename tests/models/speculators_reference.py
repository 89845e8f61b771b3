"""Writes random draft heads and their logits with `speculators`. Runs in the peers environment.

    python speculators_reference.py cases.json directory

``cases.json`` lists cases: ``{"name", "model", "config", "layer_config", "num_tokens", "num_steps", "seed"}``, and
``"checkpoint"`` for a head that exists. Writes:

* ``directory/name/``: the checkpoint of a random head.
* ``directory/name.npz``: ``tokens [T + 1]``, ``hidden [T + 1, E]``, the target's hidden states, and ``logits``. Slot i
  reads token i + 1 with hidden state i. Of EAGLE-3 ``[steps, T, O]``: entry i of step s is of the token after s + 1
  tokens from slot i on, at the last s of which the head reads its own outputs. Of P-EAGLE ``[1, R, O]``, with
  ``anchors [R]`` and ``depths [R]``: row r is of the last of ``depths[r]`` masks after slot ``anchors[r]``. Of DFlash
  ``[1, A * W, O]``: of the W positions of the blocks that begin with the tokens 0 to A - 1. Of MTP ``[3, T - 3, O]``:
  step s reads token i + 1 + s in slot i, with its own output of step s - 1. With the last two,
  ``embedding [V, D]`` and ``head [V, D]`` of the target, which their checkpoints lack.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.model import SpeculatorModel
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
from speculators.models.peagle import core as peagle_core
from speculators.models.peagle.config import PEagleSpeculatorConfig
from speculators.models.peagle.core import PEagleDraftModel
from speculators.models.peagle.data import generate_cod_sample_indices
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoConfig

MODELS = {
    "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel),
    "peagle": (PEagleSpeculatorConfig, PEagleDraftModel),
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
    "mtp": (MTPSpeculatorConfig, MTPDraftModel),
}


def make(case) -> SpeculatorModel:
    """Returns a head whose parameters are all random, or the one of the case's checkpoint."""
    if "checkpoint" in case:
        loaded = SpeculatorModel.from_pretrained(case["checkpoint"])
        loaded.config.transformer_layer_config._attn_implementation = "eager"
        model = type(loaded)(loaded.config)
        model.load_state_dict(loaded.state_dict())
        return model.float().eval()
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
def run(case, directory):
    """Writes one head and its logits."""
    model = make(case)
    model.save_pretrained(directory / case["name"])
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    tokens = torch.randint(model.verifier_vocab_size, (case["num_tokens"] + 1,), generator=generator)
    width = case["num_hidden"] * case["layer_config"]["hidden_size"]
    hidden = torch.randn(case["num_tokens"] + 1, width, generator=generator)
    found = []
    # The forward passes of training do not return what the head computes.
    model.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output[0].float().numpy()))
    extra = RUN[case["model"]](model, case, tokens, hidden) or {}
    np.savez(directory / f"{case['name']}.npz", tokens=tokens, hidden=hidden, logits=np.stack(found), **extra)


def run_eagle3(model, case, tokens, hidden):
    """Reads token p with the hidden state of position p - 1."""
    num_tokens = len(tokens) - 1
    documents = torch.zeros(1, num_tokens, dtype=torch.long)
    model(hidden[None, :-1], tokens[None, 1:], documents, ttt_steps=case["num_steps"])


def run_peagle(model, case, tokens, hidden):
    """Returns the slot that each row of the logits follows, and the number of masks after it."""
    num_tokens, chosen = len(tokens) - 1, []

    def sample(**options):
        chosen.append(generate_cod_sample_indices(**options))
        return chosen[-1]

    peagle_core.generate_cod_sample_indices = sample
    documents = torch.zeros(1, num_tokens, dtype=torch.long)
    options = {"num_depths": case["num_steps"], "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    options["loss_config"] = resolve_loss_config("kl_div", "eager")
    last = torch.zeros(1, num_tokens, hidden.shape[1] // case["num_hidden"])
    model(hidden[None, :-1], tokens[None, 1:], documents, verifier_last_hidden_states=last, **options)
    anchors, depths = chosen[0]
    return {"anchors": anchors, "depths": depths}


def run_dflash(model, case, tokens, hidden):
    """Runs the block after every token that a block can follow."""
    num_tokens = len(tokens)
    ones, documents = torch.ones(1, num_tokens), torch.zeros(1, num_tokens, dtype=torch.long)
    last = torch.zeros(1, num_tokens, case["layer_config"]["hidden_size"])
    options = {"max_anchors": num_tokens - model.block_size, "loss_config": resolve_loss_config("kl_div", "eager")}
    model(hidden[None], tokens[None], ones, last, documents, **options)
    return of_target(model)


def run_mtp(model, case, tokens, hidden):
    """Reads token i + 1 with hidden state i, then token i + 2 with the output, and so on."""
    model(tokens[None], hidden[None])
    return of_target(model)


def of_target(model):
    """Returns the arrays that the head takes from the target."""
    head = {} if model.use_draft_vocab else {"head": model.lm_head.weight}
    return {name: array.numpy() for name, array in (head | {"embedding": model.embed_tokens.weight}).items()}


RUN = {"eagle3": run_eagle3, "peagle": run_peagle, "dflash": run_dflash, "mtp": run_mtp}


if __name__ == "__main__":
    torch.set_num_threads(1)  # The models are small, and waiting threads would slow other processes down.
    for one in json.loads(Path(sys.argv[1]).read_text()):
        run(one, Path(sys.argv[2]))
