"""Model families: how to read their Hugging Face configurations, and how their tensors are stored.

Imported by `bass_jax.checkpoint`. Start with `llama.py`; `template.py` is the file to copy for a family of your own.
"""

from bass_jax.models.families import codegen, gemma, gpt2, gpt_neox, llama, mistral, opt, qwen
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
        opt.FAMILY,
        codegen.FAMILY,
        gpt2.GPT2,
        gpt2.BIGCODE,
        gpt_neox.FAMILY,
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
