"""Computes warped distributions with the processors of `transformers`; run in the peers environment.

    python transformers_warping.py cases.npz settings.json warped.npz

``cases.npz`` has ``logits`` ``[settings, n, V]`` and ``tokens`` ``[settings, n, C]``, of which the first
``prompt_length`` are the prompt. Writes ``probs``, the distributions that generation would sample from.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import generation


def processors(setting, prompt_length, stop_tokens):
    """Returns the processors in the order in which `generate` applies them."""
    made = []
    if "logit_bias" in setting:
        bias = {(int(token),): value for token, value in setting["logit_bias"].items()}
        made.append(generation.SequenceBiasLogitsProcessor(bias))
    if "repetition_penalty" in setting:
        made.append(generation.RepetitionPenaltyLogitsProcessor(setting["repetition_penalty"]))
    if "min_new_tokens" in setting:
        made.append(
            generation.MinNewTokensLengthLogitsProcessor(prompt_length, setting["min_new_tokens"], stop_tokens, "cpu")
        )
    if "banned_tokens" in setting:
        made.append(generation.SuppressTokensLogitsProcessor(setting["banned_tokens"], device="cpu"))
    for name, warper in [
        ("temperature", generation.TemperatureLogitsWarper),
        ("top_k", generation.TopKLogitsWarper),
        ("top_p", generation.TopPLogitsWarper),
        ("min_p", generation.MinPLogitsWarper),
    ]:
        if name in setting:
            made.append(warper(setting[name]))
    return generation.LogitsProcessorList(made)


def main(cases, settings, output):
    data = np.load(cases)
    options = json.loads(Path(settings).read_text())
    probs = []
    for setting, logits, tokens in zip(options["settings"], data["logits"], data["tokens"]):
        warp = processors(setting, options["prompt_length"], options["stop_tokens"])
        probs.append(torch.softmax(warp(torch.tensor(tokens, dtype=torch.long), torch.tensor(logits)), dim=-1).numpy())
    np.savez(output, probs=np.stack(probs))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
