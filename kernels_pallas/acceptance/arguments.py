"""Checks of the arguments of masked acceptance."""

import jax.numpy as jnp

from kernels_pallas.acceptance.types import AcceptanceInputs

IMPLEMENTATIONS = ("mosaic_gpu", "triton", "xla")
_LOGIT_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_acceptance_inputs(inputs: AcceptanceInputs, implementation: str | None) -> None:
    """Checks the arguments of `kernels_pallas.ops.masked_acceptance`.

    Raises:
        ValueError: An argument has another shape, dtype or value than expected.
    """
    draft_tokens, target_logits, draft_probs = inputs.draft_tokens, inputs.target_logits, inputs.draft_probs
    if draft_tokens.ndim != 2:
        raise ValueError(f"draft_tokens has shape {draft_tokens.shape}; expected [B, G]")
    batch, num_slots = draft_tokens.shape
    if target_logits.ndim != 3 or target_logits.shape[:2] != (batch, num_slots + 1):
        raise ValueError(f"target_logits has shape {target_logits.shape}; expected [{batch}, {num_slots + 1}, V]")
    if target_logits.dtype not in _LOGIT_DTYPES:
        raise ValueError(f"target_logits has dtype {target_logits.dtype}; expected float32, bfloat16 or float16")
    expected = (batch, num_slots, target_logits.shape[2])
    if draft_probs is not None:
        if draft_probs.shape != expected:
            raise ValueError(f"draft_probs has shape {draft_probs.shape}; expected {expected}")
        if not jnp.issubdtype(draft_probs.dtype, jnp.floating):
            raise ValueError(f"draft_probs has dtype {draft_probs.dtype}; expected a floating-point type")
    for name in ("accept_keys", "residual_keys"):
        keys = getattr(inputs, name)
        if keys.shape != (batch, 2) or keys.dtype != jnp.uint32:
            raise ValueError(
                f"{name} has shape {keys.shape} and dtype {keys.dtype}; expected uint32 [{batch}, 2], "
                "the key data of threefry keys"
            )
    counts = {"draft_tokens": draft_tokens, "num_drafted": inputs.num_drafted, "top_k": inputs.sampling.top_k}
    for name, values in counts.items():
        if not jnp.issubdtype(values.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {values.dtype}; expected an integer type")
    for name, values in {"num_drafted": inputs.num_drafted, **inputs.sampling._asdict()}.items():
        if values.shape != (batch,):
            raise ValueError(f"{name} has shape {values.shape}; expected [{batch}]")
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation is {implementation!r}; expected one of {IMPLEMENTATIONS} or None")
