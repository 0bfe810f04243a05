"""Needs torch and Transformers: a model of one's own is described as the library's are."""

import json

import pytest
import transformers
from real_parameters import assert_same_parameters, build, layer
from widget_model import Widget, WidgetConfig

from refusals import refused
from trimtab.errors import ConfigError
from trimtab.models.asking import model
from trimtab.models.asking.model import describe_fields, describe_model
from trimtab.models.describe import describe
from trimtab.models.description import description_bytes


@pytest.fixture(scope="module", autouse=True)
def widget():
    transformers.AutoConfig.register("trimtab_widget", WidgetConfig)
    transformers.AutoModelForImageTextToText.register(WidgetConfig, Widget)


def test_a_model_type_registered_here_is_described_without_a_line_in_trimtab(tmp_path, in_process):
    WidgetConfig(num_hidden_layers=5).save_pretrained(tmp_path)
    spec = describe(tmp_path)
    assert_same_parameters(spec, build(WidgetConfig(num_hidden_layers=5)))
    assert [x.name for x in spec.layers] == [
        "vision_tower.patch",
        *(f"vision_tower.blocks.{i}" for i in range(2)),
        "projector",
        "scale",
        "language_model.embed_tokens",
        *(f"language_model.layers.{i}" for i in range(5)),
        "language_model.norm",
        "lm_head",
    ]
    assert [x.name for x in spec.layers].index("scale") in spec.forbidden_cuts
    assert "scale is a bare parameter" in spec.forbidden_cut_reason
    block, projector = layer(spec, "language_model.layers.0"), layer(spec, "projector")
    assert (block.attention.num_heads, block.attention.causal, block.mlp.intermediate_size) == (4, True, 96)
    assert block.measured is None
    assert not layer(spec, "blocks.0").attention.causal
    assert (projector.tower, projector.rows_per_input) == ("projector", 0.25)
    assert description_bytes(describe_model(build(WidgetConfig(num_hidden_layers=5)))) == description_bytes(
        describe_fields(json.loads((tmp_path / "config.json").read_text()))
    )


def test_a_model_with_weights_is_not_used_up():
    with refused(ConfigError, "torch.device"):
        describe_model(Widget(WidgetConfig()))


def test_layers_come_in_module_order_and_say_so_where_nothing_can_be_run(monkeypatch):
    monkeypatch.setattr(model, "text_calls", lambda module, size: iter(()))
    monkeypatch.setattr(model, "image_calls", lambda module, units, encode: iter(()))
    spec = describe_model(build(WidgetConfig()))
    assert any("no forward pass could be made" in note for note in spec.notes)
    assert any("No image could be passed" in note for note in spec.notes)
    names = [x.name for x in spec.layers]
    assert names.index("language_model.norm") < names.index("language_model.layers.0")
    assert layer(spec, "layers.0").measured is None  # every weight is explained
