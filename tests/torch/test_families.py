"""Every declared family is asked for every capability: it has a value, or one sentence says why not and what to do.

Needs torch and Transformers.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from shrunk_models import shrink
from tiny_models import ODD_CONFIGS, as_saved, describe_here, make_config, preprocessor_of

from trimtab import ModelSpec, ParallelDims, TrimtabError, place, profile_model
from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.settings import CostSettings
from trimtab.costs.measured.timed_model import KindModel
from trimtab.models.asking.model import describe_fields
from trimtab.models.describe import describe, image_rule, read_config
from trimtab.models.families import FAMILIES, family_of
from trimtab.placement.machine import Workload, machine_of
from trimtab.runtime.data.collate import filler_sample
from trimtab.runtime.data.formats import pack_format
from trimtab.runtime.vision.inputs import find_family
from trimtab.units import GIB


@dataclass(frozen=True)
class Given:
    """A small configuration of one family, its fields, and its processor's settings."""

    config: Any
    fields: dict
    settings: dict | None

    @functools.cached_property
    def spec(self) -> ModelSpec:
        if self.config.model_type == "internvl_chat":
            return describe(self.fields)
        return describe_here(self.config, preprocessor=self.settings)


@functools.cache
def given(family: str) -> Given:
    if family == "internvl_chat":
        return Given(SimpleNamespace(model_type=family), dict(read_config("InternVL-Chat-V1-5")), None)
    if family in ODD_CONFIGS or any(case[0] == family for case in ODD_CONFIGS.values()):
        case = next(name for name, case in ODD_CONFIGS.items() if case[0] == family)
        config = make_config(case)
        return Given(config, as_saved(config), preprocessor_of(family, ODD_CONFIGS[case][1]))
    config = shrink(family, {})
    return Given(config, as_saved(config), preprocessor_of(family, as_saved(config)["vision_config"]))


def run_batches(x: Given) -> object:
    settings = CostSettings(dims=ParallelDims(), attention="sdpa", dtype="fp32")
    spec = x.spec
    chosen = [i for i, layer in enumerate(spec.layers) if layer.kind != "block" or layer.name.endswith(".0")]
    return KindModel(x.fields, spec, settings, chosen).batches


CAPABILITIES: dict[str, Callable[[Given], object]] = {
    "layers": lambda x: x.spec,
    "layers asked": lambda x: describe_fields(x.fields),
    "images counted without torch": lambda x: image_rule(x.fields, x.settings).count(640, 480),
    "work": lambda x: profile_model(x.spec, DEVICES["H200"]),
    "batches for tracing and timing": run_batches,
    "placement": lambda x: place(x.spec, machine_of([80 * GIB]), Workload()),
    "packs": lambda x: pack_format(x.config),
    "filler image": lambda x: filler_sample(x.config, with_image=True),
    "images apart": lambda x: find_family(x.config),
}
REFUSED: dict[tuple[str, str], str] = {
    **{(x, "images counted without torch"): "no image rule" for x in ("shieldgemma2", "hunyuan_vl", "paligemma")},
    ("mllama", "images apart"): "its class has no get_image_features",
    ("mllama", "work"): "trimtab map",
    **{(x, "filler image"): "vision_in_every_pack" for x in ("mllama", "hunyuan_vl", "paligemma")},
    ("internvl_chat", "batches for tracing and timing"): "model_type",
    ("internvl_chat", "packs"): "register it",
    ("internvl_chat", "filler image"): "register it",
    ("internvl_chat", "images apart"): "register it",
}
"""What a family does not have, and words of the reason that is given; everything else has a value."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_a_value_for_a_capability_or_a_sentence(family: str) -> None:
    for capability, ask in CAPABILITIES.items():
        reason = REFUSED.get((family, capability))
        if reason is None:
            assert ask(given(family)) is not None, capability
            continue
        with pytest.raises(TrimtabError) as refused:
            ask(given(family))
        assert reason in str(refused.value), capability
        assert "\n" not in str(refused.value)
        assert any(x in str(refused.value) for x in (": ", "? Give")), "what to try stands behind the reason"


def test_what_is_asked_of_a_model_type_that_nobody_declared() -> None:
    assert family_of("smolvlm") == family_of(None) == type(family_of("smolvlm"))()
