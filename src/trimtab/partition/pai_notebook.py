"""The functions of Pai-Megatron-Patch's notebook on uneven pipelines, by their own names and calls.

Use it where a script has these calls already: change the import. `trimtab uneven` and `trimtab plan` do more. Names and
order of arguments are those of `uneven_pp_utils.py`, TFLOPs and bytes its own; what its rule cannot divide is refused.
"""

from __future__ import annotations

from trimtab.partition.published import UnevenModel, flops_split, layer_bytes, layer_flops
from trimtab.units import TERA

_GB = 1e9


def vit_encoder_tflops_calculator(
    W: int, H: int, P: int, in_channels: int, L: int, hidden_size: int, intermediate_size: int | None = None
) -> tuple[float, int]:
    """Return TFLOPs of the vision tower, forward and backward, and the patches of an image.

    >>> vit_encoder_tflops_calculator(224, 224, 14, 3, 28, 1280)[1]
    256
    """
    N, ffn = -(-W // P) * -(-H // P), intermediate_size or 4 * hidden_size
    layers = L * layer_flops(N, hidden_size, ffn)
    return 3 * (2 * N * hidden_size * in_channels * P**2 + layers) / TERA, N


def adaptor_tflops_calculator(s: int, hidden_size_vit: int, hidden_size_llm: int) -> float:
    """Return TFLOPs of the projector."""
    return 3 * 2 * s * hidden_size_vit * hidden_size_llm / TERA


def llm_encoder_tflops_calculator(
    hidden_size: int, L: int, seq_len: int, intermediate_size: int | None = None
) -> tuple[float, float]:
    """Return TFLOPs of the decoder, and of one of its layers."""
    one = 3 * layer_flops(seq_len, hidden_size, intermediate_size or 4 * hidden_size) / TERA
    return L * one, one


def uneven_pp_parameters_generator(
    image_w: int,
    image_h: int,
    image_in_channels: int,
    patch_size: int,
    vit_num_layers: int,
    vit_hidden_size: int,
    vit_intermediate_size: int,
    decoder_seq_len: int,
    llm_num_layers: int,
    llm_hidden_size: int,
    llm_intermediate_size: int,
    pp_size: int,
) -> tuple[int, int]:
    """Return the decoder's layers of the first and the last stage.

    >>> uneven_pp_parameters_generator(224, 224, 3, 14, 28, 4096, 4 * 4096, 1024, 28, 3584, 18944, 2)
    (10, 18)
    """
    # the notebook's arguments in our names
    model = UnevenModel(
        vision_tokens=-(-image_w // patch_size) * -(-image_h // patch_size),
        patch_values=image_in_channels * patch_size**2,
        vision_layers=vit_num_layers,
        vision_hidden=vit_hidden_size,
        vision_ffn=vit_intermediate_size,
        llm_layers=llm_num_layers,
        llm_hidden=llm_hidden_size,
        llm_ffn=llm_intermediate_size,
        decoder_tokens=decoder_seq_len,
    )
    counts = flops_split(model, pp=pp_size).counts
    return counts[0], counts[-1]


def memory_per_transformer_layer_calculator_with_tp(
    hidden_size: int, intermediate_size: int, bs: int, seq_len: int, tp: int = 1
) -> float:
    """Return bytes of one layer: weights, gradients, optimizer and what one micro-batch keeps."""
    return layer_bytes(bs * seq_len, hidden_size, intermediate_size, tp=tp)


def memory_vit_encoder_calculator(
    image_w: int,
    image_h: int,
    image_in_channels: int,
    patch_size: int,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    bs: int,
    tp: int = 1,
) -> float:
    """Return bytes of the vision tower; as there, the patch embedding's own bytes count once a sample."""
    N = -(-image_w // patch_size) * -(-image_h // patch_size)
    embedding = (
        16 * patch_size**2 * image_in_channels * hidden_size * bs + 2 * image_w * image_h * image_in_channels * bs
    )
    return embedding + num_layers * layer_bytes(bs * N, hidden_size, intermediate_size, tp=tp)


def memory_first_pp_rank_calculator(
    image_w: int,
    image_h: int,
    image_in_channels: int,
    patch_size: int,
    vit_num_layers: int,
    vit_hidden_size: int,
    vit_intermediate_size: int,
    decoder_seq_len: int,
    llm_num_layers: int,  # noqa: ARG001  # as the notebook calls it
    llm_hidden_size: int,
    llm_intermediate_size: int,
    num_layers_first_pp_stage: int,
    bs: int,
    tp: int = 1,
) -> float:
    """Print GB of tower, decoder layers and both on the first stage; return bytes of its decoder layers, as there."""
    # as printed there: the tower counts in what is printed, and not in what is returned
    tower = memory_vit_encoder_calculator(
        *(image_w, image_h, image_in_channels, patch_size, vit_num_layers, vit_hidden_size, vit_intermediate_size, bs),
        tp,
    )
    decoder = num_layers_first_pp_stage * layer_bytes(
        bs * decoder_seq_len, llm_hidden_size, llm_intermediate_size, tp=tp
    )
    print(f"total_memory_vit_encoder:{tower / _GB:.3f} GB")
    print(f"memory_llm_decoder_on_first_pp_rank:{decoder / _GB:.3f} GB")
    print(f"memory on first pp rank:{(tower + decoder) / _GB:.3f} GB")
    return decoder
