"""Model families: how to read their Hugging Face configurations, and how their tensors are stored.

Imported by `bass_jax.checkpoint`. Start with `llama.py`; `template.py` is the file to copy for a family of your own.
"""

from bass_jax.models.families import (
    codegen,
    cohere,
    deepseek,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    llama4,
    mistral,
    mixtral,
    olmo,
    opt,
    phi3,
    qwen,
    qwen_hybrid,
    qwen_moe,
    smollm3,
    starcoder2,
)
from bass_jax.models.families.base import Family, Rule

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        llama.FAMILY,
        mistral.MISTRAL,
        mistral.MINISTRAL,
        qwen.QWEN2,
        qwen.QWEN3,
        gemma.GEMMA,
        gemma.GEMMA2,
        gemma.GEMMA3,
        gemma.GEMMA3_TEXT_PART,
        opt.FAMILY,
        codegen.FAMILY,
        gpt2.GPT2,
        gpt2.BIGCODE,
        gpt_neox.FAMILY,
        qwen_moe.QWEN2_MOE,
        qwen_moe.QWEN3_MOE,
        qwen_hybrid.QWEN3_NEXT,
        qwen_hybrid.QWEN3_5,
        qwen_hybrid.QWEN3_5_MOE,
        qwen_hybrid.QWEN3_5_PART,
        qwen_hybrid.QWEN3_5_MOE_PART,
        mixtral.FAMILY,
        olmo.OLMOE,
        olmo.OLMO2,
        olmo.OLMO3,
        phi3.FAMILY,
        smollm3.FAMILY,
        granite.FAMILY,
        glm.GLM,
        glm.GLM4,
        starcoder2.FAMILY,
        cohere.COHERE,
        cohere.COHERE2,
        falcon.FAMILY,
        gpt_oss.FAMILY,
        deepseek.V2,
        deepseek.V3,
        llama4.TEXT,
        llama4.TEXT_PART,
    )
}
"""The families by the ``model_type`` of a Hugging Face configuration."""


def register_family(family: Family) -> None:
    """Registers a family, so that its checkpoints can be loaded; see ``template.py``.

    Raises:
        ValueError: if there is another family of that name.
    """
    if FAMILIES.get(family.name, family) != family:
        raise ValueError(f"family.name={family.name!r}: there is a family of that name already")
    FAMILIES[family.name] = family


__all__ = ["FAMILIES", "Family", "Rule", "register_family"]
