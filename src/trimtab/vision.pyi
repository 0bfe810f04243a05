"""Images shared among ranks: vision data parallel, and the work of a batch for verl and ROLL."""

# Sharing images
from trimtab.plan.options import VisionChoice as VisionChoice
from trimtab.runtime.vision.apply import vision_dp as vision_dp
from trimtab.runtime.vision.apply import vision_dp_from_plan as vision_dp_from_plan
from trimtab.runtime.vision.apply import vision_heartbeat as vision_heartbeat
from trimtab.runtime.vision.apply import encode_pooled as encode_pooled
from trimtab.runtime.vision.exchange import zigzag_rows as zigzag_rows
from trimtab.runtime.vision.apply import VisionDataParallelCallback as VisionDataParallelCallback
from trimtab.balance.images import share_images as share_images
from trimtab.balance.images import tower_seconds as tower_seconds
from trimtab.balance.images import tower_bytes as tower_bytes

# The work of a batch, for verl and ROLL
from trimtab.adapters.verl import vlm_workload as vlm_workload
from trimtab.adapters.verl import count_grids as count_grids
from trimtab.adapters.verl import stand_in_for as stand_in_for
