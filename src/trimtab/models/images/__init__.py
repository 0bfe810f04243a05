"""Image rules: (width, height) -> ViT patches and LLM tokens, one frozen dataclass per published preprocessing rule.

`models.image_rules` finds the rule of a model. Rules follow Transformers 5.23, float operation by float
operation, because one ulp decides ties; where a rule has remote code only, its docstring says so.
"""

from trimtab.models.images.apply import CountColumns, count_many, rule_in_sample, with_limits
from trimtab.models.images.asked import AskedImages, ask_images, clip_rule
from trimtab.models.images.native import GlmSmartResize, SmartResize
from trimtab.models.images.tiles import AnyRes, DynamicTiling, FixedImage, PaddedTiles, PanAndScan
from trimtab.models.images.unsettled import UnsettledRule

__all__ = [
    "AnyRes",
    "AskedImages",
    "CountColumns",
    "DynamicTiling",
    "FixedImage",
    "GlmSmartResize",
    "PaddedTiles",
    "PanAndScan",
    "SmartResize",
    "UnsettledRule",
    "ask_images",
    "clip_rule",
    "count_many",
    "rule_in_sample",
    "with_limits",
]
