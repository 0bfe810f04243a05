"""Image rules: (width, height) -> ViT patches and LLM tokens, one frozen dataclass per published preprocessing rule.

Start at `image_rule`, which reads a model's own files. Rules follow Transformers 5.23, float operation by float
operation, because one ulp decides ties; where a rule has remote code only, its docstring says so.
"""

from trimtab.models.images.apply import CountColumns, count_many, rule_in_sample, with_limits
from trimtab.models.images.asked import AskedImages, ask_images, clip_rule
from trimtab.models.images.build import UnsettledRule, image_rule, image_rule_or_reason
from trimtab.models.images.fit import image_rule_by_processor
from trimtab.models.images.native import GlmSmartResize, SmartResize
from trimtab.models.images.tiles import AnyRes, DynamicTiling, FixedImage, PaddedTiles, PanAndScan

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
    "image_rule",
    "image_rule_by_processor",
    "image_rule_or_reason",
    "rule_in_sample",
    "with_limits",
]
