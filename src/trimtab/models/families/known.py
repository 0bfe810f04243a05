"""The families of which something is declared: describe, size, pack, train, place and export ask here."""

from __future__ import annotations

from trimtab.models.families import gemma3, glm4v, hunyuan_vl, internvl, llava, mllama, paligemma, qwen_vl
from trimtab.models.families.family import Family

FAMILIES: dict[str, Family] = {
    model_type: family
    for module in (internvl, qwen_vl, llava, gemma3, glm4v, mllama, hunyuan_vl, paligemma)
    for model_type, family in module.FAMILIES.items()
}
"""What is declared of each `model_type`; put yours in before the first use, as docs/models.md shows."""

MARKUPS = {name: family.markup for name, family in FAMILIES.items() if family.markup is not None}
"""How the processors of Transformers 5.23 write an image (`replace_image_token` of each)."""

_ASKED = Family()


def family_of(model_type: object) -> Family:
    """What is declared of it; nothing, where all is asked."""
    return FAMILIES.get(model_type, _ASKED) if isinstance(model_type, str) else _ASKED
