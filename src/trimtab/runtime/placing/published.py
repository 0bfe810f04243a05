"""`split_model` under its published signature."""

from __future__ import annotations

from trimtab.placement import published as rule


def split_model(
    num_layers: int,
    vit_alpha: float = 0.5,
    *,
    world_size: int | None = None,
    variant: rule.Variant = "repository",
) -> dict[str, int]:
    """InternVL's published device map, key for key, for code that expects it; `trimtab map` plans better ones.

    Use it where code expects InternVL's own function of that name.

    `world_size` None: the GPUs that torch sees. `variant`: model cards leave `rotary_emb` out, the repository has it.
    Raises `PartitionError` where the rule is not defined, as without a GPU.

    >>> len(split_model(48, world_size=4, variant="model card"))
    56
    """
    if world_size is None:
        import torch

        world_size = torch.cuda.device_count()
    return rule.split_model(num_layers, vit_alpha, world_size=world_size, variant=variant)
