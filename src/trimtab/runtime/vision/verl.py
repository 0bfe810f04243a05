"""Vision data parallel in verl by one setting: `actor_rollout_ref.model.external_lib=trimtab.runtime.vision.verl`.

verl imports that module in every worker that makes a model (0.9; `VERL_USE_EXTERNAL_MODULES` does the same for all of
verl's processes). From then on towers of Qwen2-VL, 2.5 and 3 share their images over the Ulysses group; without one
nothing changes.
"""

from trimtab.runtime.vision.recipe import apply_vision_dp_patch

apply_vision_dp_patch()
