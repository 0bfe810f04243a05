"""Vision data parallel: each rank of a group encodes its share of the images, gradients stay exact."""

from trimtab.runtime.vision.apply import PooledFeatures, encode_pooled, vision_dp, vision_dp_from_plan, vision_heartbeat
from trimtab.runtime.vision.handle import VisionDataParallel
from trimtab.runtime.vision.inputs import BatchFamily, GridFamily
from trimtab.runtime.vision.verify import check_family, verify_vision_dp

__all__ = [
    "BatchFamily",
    "GridFamily",
    "PooledFeatures",
    "VisionDataParallel",
    "check_family",
    "encode_pooled",
    "verify_vision_dp",
    "vision_dp",
    "vision_dp_from_plan",
    "vision_heartbeat",
]
