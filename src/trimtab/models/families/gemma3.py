"""Gemma 3: SigLIP, average pooling with one matrix, a language model that alternates windows and full attention."""

from __future__ import annotations

import math

from trimtab.models.families.architecture import Architecture, check_projector, linear, named_layer, norm
from trimtab.models.families.family import Family, PackFormat
from trimtab.models.families.fields import Fields, is_square
from trimtab.models.families.text import read_text, read_tied, text_layers, text_type, tied_pair
from trimtab.models.families.vit import mark_unread, read_clip
from trimtab.models.images.settings import Settings
from trimtab.models.images.tiles import FixedImage, PanAndScan
from trimtab.models.quote import quote
from trimtab.specs import ImageMarkup, ImageRule


def describe_gemma3(config: Fields) -> Architecture:
    vision, language = config.section("vision_config"), config.section("text_config")
    vision.word("model_type", choices=("siglip_vision_model",))
    tower = read_clip(vision, "model.vision_tower", kind="siglip_vision_model")
    text = read_text(language, text_type(language, ("gemma3_text",)))
    language.check(
        not language.flag("use_bidirectional_attention", absent=False),
        f"{language.name('use_bidirectional_attention')} is true, but gemma3 generates text with a causal mask: "
        "set it to false",
    )
    tokens = config.size("mm_tokens_per_image", "preprocess.mm_tokens_per_image")
    _check_pooling(config, tower.grid, tokens)
    H = text.hidden_size
    check_projector(config, (tower.hidden_size, H))
    layers = list(mark_unread(tower, tower.num_blocks, reads_norm=True))
    layers.append(
        named_layer(
            "model.multi_modal_projector",
            "projector",
            "projector",
            linear(tower.hidden_size, H, bias=False) + norm(tower.hidden_size, text.norm),
            hidden_size=tower.hidden_size,
            output_size=H,
            rows=tokens / tower.num_patches,
            norm=text.norm,
        )
    )
    tied = read_tied(config, language, either=False, absent=True)  # all sizes of Gemma 3 tie, and silence means so
    layers += text_layers(text, "model.language_model", "lm_head", tied=tied)
    notes = []
    if tower.layers[-1].name.endswith(".head"):
        notes.append("vision_use_head is true: the pooling head is computed, but nothing reads it.")
    notes.append("Image tokens see the whole of their own image; attention is counted as causal throughout.")
    return Architecture(
        layers=tuple(layers), vocab_size=text.vocab_size, tied=tied_pair(layers, tied=tied), notes=tuple(notes)
    )


def _check_pooling(config: Fields, grid: tuple[int, int], tokens: int) -> None:
    side = math.isqrt(tokens)
    config.check(
        is_square(tokens) and grid[0] == grid[1] and grid[0] % side == 0,
        f"mm_tokens_per_image {tokens} is not the square of a divisor of the {grid[0]} x {grid[1]} patches that "
        "vision_config.image_size and vision_config.patch_size give: correct one of them",
    )


def _crops(s: Settings) -> ImageRule:
    """Gemma 3, with pan and scan only where `do_pan_and_scan` is true.

    It is a switch of each call (published files hold null, Gemma3Processor passes false), so absent means off; a
    file that sets it asks for the crops, and must then give their three figures.
    """
    s.require_resize()
    tile = s.agreed_int(("vision", "image_size"), ("file", "size"), ("preprocess", "image_size"))
    patch = s.first_int(("vision", "patch_size"))
    tokens = s.agreed_int(
        ("config", "mm_tokens_per_image"), ("file", "image_seq_length"), ("preprocess", "mm_tokens_per_image")
    )
    rows = s.grid(tile, patch) ** 2
    crops = s.value("file", "do_pan_and_scan")
    if crops is None:
        crops = s.value("preprocess", "pan_and_scan.default")
    if crops is not None and not isinstance(crops, bool):
        s.problem("reads `do_pan_and_scan`", f"{quote(crops)} is not true or false", "correct it in that file")
    if crops is not True:
        s.check()
        return FixedImage(rows=rows, tokens=tokens, name="gemma3")
    least = s.first_int(("file", "pan_and_scan_min_crop_size"), ("preprocess", "pan_and_scan.min_crop_size"))
    most = s.first_tiles(("file", "pan_and_scan_max_num_crops"), ("preprocess", "pan_and_scan.max_num_crops"))
    ratio = s.first_number(
        ("file", "pan_and_scan_min_ratio_to_activate"), ("preprocess", "pan_and_scan.min_ratio_to_activate")
    )
    s.check()
    return PanAndScan(
        rows_per_crop=rows, tokens_per_crop=tokens, min_crop_size=least, max_num_crops=most, min_ratio=ratio
    )


_MARKUP = ImageMarkup(
    placeholder="<start_of_image>",
    soft="<image_soft_token>",
    before="\n\n<start_of_image>",
    after="<end_of_image>\n\n",
    crops=("Here is the original image ", " and here are some crops to help you see better "),
)
_PACK = PackFormat(joined=("pixel_values",), sees="images", counts="tiles", smallest="tile")

FAMILIES = {
    "gemma3": Family(describe=describe_gemma3, image_rule=_crops, markup=_MARKUP, pack=_PACK),
    "shieldgemma2": Family(pack=_PACK),
}
