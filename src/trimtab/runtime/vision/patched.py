"""Vision data parallel in verl and ROLL by one setting each, for both import this module in their workers.

verl (0.9): `actor_rollout_ref.model.external_lib=trimtab.runtime.vision.patched`; `VERL_USE_EXTERNAL_MODULES` does the
same for all of verl's processes. ROLL: `worker_cls: trimtab.runtime.vision.patched.RLVRActorWorker`; the names are
ROLL's own workers (`WORKERS`), unchanged. From then on towers of Qwen2-VL, 2.5 and 3 share their images over the
Ulysses group; without one nothing changes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trimtab.runtime.vision.recipe import apply_vision_dp_patch

WORKERS: Mapping[str, str] = MappingProxyType(
    {
        "RLVRActorWorker": "roll.pipeline.rlvr.actor_worker.ActorWorker",
        "RLVRActorPGWorker": "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker",
        "AgenticActorWorker": "roll.pipeline.agentic.agentic_actor_worker.ActorWorker",
        "DPOActorWorker": "roll.pipeline.dpo.actor_worker.ActorWorker",
        "ReferenceWorker": "roll.pipeline.base_worker.ActorWorker",
        "SFTWorker": "roll.pipeline.sft.sft_worker.SFTWorker",
        "StudentWorker": "roll.pipeline.distill.distill_worker.StudentWorker",
    }
)
"""As `worker_cls` names them, with this module before -> ROLL's worker that is meant (its main branch, August 2026)."""

apply_vision_dp_patch()


def __getattr__(name: str) -> Any:
    if name not in WORKERS:
        raise AttributeError(f"{__name__} has no {name}: choose one of {', '.join(WORKERS)}")
    module, _, kind = WORKERS[name].rpartition(".")
    # a class of this module, so that Ray, which pickles classes by their place, imports it in each process
    made = type(name, (getattr(importlib.import_module(module), kind),), {"__module__": __name__})
    globals()[name] = made
    return made
