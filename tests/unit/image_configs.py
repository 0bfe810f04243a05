"""Configurations and processor files of published models, as far as their image rules read them."""

from trimtab.models.describe import image_rule

INTERNVL_CHAT = {
    "model_type": "internvl_chat",
    "force_image_size": 448,
    "dynamic_image_size": True,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 12,
    "use_thumbnail": True,
    "downsample_ratio": 0.5,
    "vision_config": {"model_type": "intern_vit_6b", "image_size": 448, "patch_size": 14},
}
INTERNVL = {
    "model_type": "internvl",
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
    "vision_config": {"model_type": "internvl_vision", "image_size": [448, 448], "patch_size": [14, 14]},
}
INTERNVL_FILE = {
    "size": {"height": 448, "width": 448},
    "crop_to_patches": False,
    "min_patches": 1,
    "max_patches": 12,
    "do_resize": True,
}
QWEN25 = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "window_size": 112}}
QWEN_FILE = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}
QWEN3 = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
QWEN3_FILE = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16, "merge_size": 2}
CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
LLAVA = {"model_type": "llava", "vision_feature_select_strategy": "default", "vision_config": CLIP}
NEXT = LLAVA | {
    "model_type": "llava_next",
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
}
ONEVISION = {
    "model_type": "llava_onevision",
    "vision_feature_select_strategy": "full",
    "vision_aspect_ratio": "anyres_max_9",
    "image_grid_pinpoints": [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)],
    "vision_config": SIGLIP,
}
GEMMA3 = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14},
}
GEMMA3_CROPS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
    "size": {"height": 896, "width": 896},
}
GLM = {
    "model_type": "glm4v_moe",
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
GLM_FILE = {"size": {"shortest_edge": 12544, "longest_edge": 47040000}, "patch_size": 14, "merge_size": 2}

PUBLISHED = [  # 1920 x 1080: patches and tokens
    (INTERNVL_CHAT, None, 9225, 2304),
    (INTERNVL, INTERNVL_FILE, 9225, 2304),
    (QWEN25, QWEN_FILE, 10764, 2691),
    (QWEN3, QWEN3_FILE, 8160, 2040),
    (LLAVA, None, 577, 576),
    (NEXT, None, 2885, 1948),
    (ONEVISION, None, 11664, 7269),
    (GEMMA3, None, 4096, 256),
    (GEMMA3, GEMMA3_CROPS, 12288, 768),
    (GLM, GLM_FILE, 10764, 2691),
]
RULES = [image_rule(config, file) for config, file, _, _ in PUBLISHED]
