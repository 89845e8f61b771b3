"""Times batched speculation in plain torch with random weights and forced acceptance, as a baseline.

    .venv-peers/bin/python benchmarks/peers/torch_speculation.py --target 7.8b --draft 310m --batches 1,8 --device cuda

It uses static caches, scaled_dot_product_attention over the padded batch with a mask per row, one compiled forward pass
per model (`--compile`, on a GPU with CUDA graphs) and a host loop that reads one small array per step. The numbers of
accepted drafts are sampled with `--acceptance`, as `bass-jax bench --acceptance` assumes them, so the tokens have no
meaning. A draft length of 0 is regular decoding with the same code. The last line is the table as JSON.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F  # noqa: N812

SHAPES = {  # layers, width, query heads, key-value heads, head, mlp
    "7.8b": (38, 4096, 32, 32, 128, 16384),
    "310m": (4, 2048, 16, 16, 128, 8192),
    "1b": (16, 2048, 32, 8, 64, 8192),
    "135m": (30, 576, 9, 3, 64, 1536),
    "tiny": (2, 64, 4, 2, 16, 128),
}


class Decoder(torch.nn.Module):
    """A pre-norm decoder with rotary positions and an MLP without a gate."""

    def __init__(self, shape, vocab, batch, capacity, dtype, device):
        super().__init__()
        self.layers, self.width, self.heads, self.kv, self.size, mlp = shape

        def weight(*sizes):
            return torch.nn.Parameter(0.02 * torch.randn(*sizes, dtype=dtype, device=device), requires_grad=False)

        self.embedding = weight(vocab, self.width)
        rows = (self.heads + 2 * self.kv) * self.size
        self.qkv = torch.nn.ParameterList(weight(rows, self.width) for _ in range(self.layers))
        self.out = torch.nn.ParameterList(weight(self.width, self.heads * self.size) for _ in range(self.layers))
        self.up = torch.nn.ParameterList(weight(mlp, self.width) for _ in range(self.layers))
        self.down = torch.nn.ParameterList(weight(self.width, mlp) for _ in range(self.layers))
        cache = (self.layers, 2, batch, self.kv, capacity, self.size)
        self.register_buffer("cache", torch.zeros(cache, dtype=dtype, device=device))
        turns = 1e4 ** (-torch.arange(0, self.size, 2, device=device) / self.size)
        self.register_buffer("angles", torch.arange(capacity, device=device)[:, None] * turns)

    def forward(self, tokens, positions):
        """Returns logits ``[B, T, V]`` and writes the caches at `positions`."""
        x = self.embedding[tokens]
        batch, width = tokens.shape
        angles = self.angles[positions][:, None]
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        slots = torch.arange(self.cache.shape[4], device=x.device)
        mask = (slots <= positions[..., None])[:, None]
        rows = torch.arange(batch, device=x.device)[:, None]

        def turn(y):
            first, second = y.chunk(2, dim=-1)
            return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)

        for layer in range(self.layers):
            y = (
                F.linear(F.rms_norm(x, (self.width,)), self.qkv[layer])
                .view(batch, width, -1, self.size)
                .transpose(1, 2)
            )
            q, k, v = y.split([self.heads, self.kv, self.kv], dim=1)
            keys, values = self.cache[layer]
            keys[rows, :, positions] = turn(k).transpose(1, 2)
            values[rows, :, positions] = v.transpose(1, 2)
            y = F.scaled_dot_product_attention(turn(q), keys, values, attn_mask=mask, enable_gqa=self.kv != self.heads)
            x = x + F.linear(y.transpose(1, 2).reshape(batch, width, -1), self.out[layer])
            x = x + F.linear(F.gelu(F.linear(F.rms_norm(x, (self.width,)), self.up[layer])), self.down[layer])
        return F.linear(F.rms_norm(x, (self.width,)), self.embedding)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="7.8b", choices=sorted(SHAPES))
    parser.add_argument("--draft", default="310m", choices=sorted(SHAPES))
    parser.add_argument("--vocab", type=int, default=51200)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--draft-lens", default="0,4")
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--context", type=int, default=216)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    cells = []
    for batch in map(int, options.batches.split(",")):
        for draft_len in map(int, options.draft_lens.split(",")):
            cells.append({"batch": batch, "draft_len": draft_len, **measure(options, batch, draft_len)})
            print(cells[-1], flush=True)
    print(json.dumps({"torch": torch.__version__, **vars(options), "is_synthetic": True, "cells": cells}))


@torch.inference_mode()
def measure(options, batch, draft_len) -> dict:
    torch.manual_seed(0)
    capacity = options.context + (options.steps + 4) * (draft_len + 1)
    dtype = getattr(torch, options.dtype)
    names = (options.target, options.draft) if draft_len else (options.target,)
    models = [Decoder(SHAPES[name], options.vocab, batch, capacity, dtype, options.device) for name in names]
    passes = [
        torch.compile(model, mode="reduce-overhead", fullgraph=True) if options.compile else model for model in models
    ]
    lengths = torch.full((batch,), options.context, device=options.device)
    last = torch.zeros((batch, 1), dtype=torch.long, device=options.device)
    slots = torch.arange(draft_len + 1, device=options.device)
    seconds, emitted = [], 0
    for step in range(options.steps + 3):
        synchronize(options.device)
        start = time.perf_counter()
        drafts = [last]
        for index in range(draft_len):
            logits = passes[1](drafts[-1], (lengths - 1 + index)[:, None])
            drafts.append(logits[:, -1:].argmax(dim=-1).clone())
        logits = passes[0](torch.cat(drafts, dim=1), (lengths - 1)[:, None] + slots)
        is_accepted = torch.rand((batch, draft_len), device=options.device) < options.acceptance
        counts = is_accepted.long().cumprod(dim=1).sum(dim=1)
        last = logits.argmax(dim=-1).gather(1, counts[:, None]).clone()
        lengths = lengths + counts + 1
        num = int((counts + 1).sum().cpu())  # the transfer to the host
        if step >= 3:  # the first steps compile
            seconds.append(time.perf_counter() - start)
            emitted += num
    return {"step_ms": round(1e3 * statistics.median(seconds), 3), "tokens_per_s": round(emitted / sum(seconds), 1)}


def synchronize(device) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
