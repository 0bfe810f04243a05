"""Image rules: (width, height) -> ViT patches and LLM tokens, one frozen dataclass per published preprocessing rule.

`describe.image_rule` finds the rule of a model. Rules follow Transformers 5.23, float operation by float operation,
because one ulp decides ties; where a rule has remote code only, its docstring says so.
"""
