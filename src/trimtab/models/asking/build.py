"""Fields of a config.json -> Transformers' own configuration and model, without weights, network or a folder's code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

from trimtab.errors import ConfigError, UnknownModelError, quote
from trimtab.models.ask import UNASKED

_DEPTH = re.compile(r"layers$|depth|^n_layer")
MAX_LAYERS = 4096  # of a tower
MAX_PARAMS = 10**14  # the largest published models have 10**12


def complete(fields: Mapping[str, object]) -> Any:
    """The configuration that Transformers makes of `fields`, with its class defaults where they are silent."""
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        cure = (
            "its own code is never run: build it in Python and give it to trimtab.models.describe_model"
            if "auto_map" in fields
            else "correct `model_type`, or update Transformers"
        )
        raise UnknownModelError(
            f"model_type {quote(model_type)} cannot be described: Transformers {transformers.__version__} has no such "
            f"model: {cure}"
        )
    known = {key: value for key, value in _without_code(fields).items() if key != "model_type"}
    return configured(fields, lambda: transformers.AutoConfig.for_model(model_type, **known))


def configured(fields: Mapping[str, object], make: Callable[[], Any]) -> Any:
    """Return what `make` makes of `fields`, refused in one sentence where they are deep or the library raises."""
    _check_depth(fields, "")
    try:
        return make()
    except ConfigError:
        raise
    except Exception as error:  # the library checks types and values with exceptions of every class
        raise ConfigError(
            f"Transformers {transformers.__version__} makes no configuration of this config.json of "
            f"{fields.get('model_type')} ({one_line(error)}): correct that field"
        ) from None


def build(config: Any, *, dtype: torch.dtype = torch.bfloat16, attention: str | None = None) -> Any:
    """The image-text model of a configuration on the meta device, in evaluation mode.

    attention: as Transformers names it; eager where the model has no code for it.
    """
    autos = [getattr(transformers, x, None) for x in ("AutoModelForImageTextToText", "AutoModelForMultimodalLM")]
    kinds = type(config).__mro__[:2]  # a published format is a kind of Transformers' own
    known = [x._model_mapping[kind] for x in autos if x is not None for kind in kinds if kind in x._model_mapping]
    if not known:
        raise UnknownModelError(
            f"model_type {quote(config.model_type)} cannot be described: Transformers {transformers.__version__} has "
            "no model of it that reads images and writes text: give the configuration of one"
        )
    try:
        with torch.device("meta"):
            return _from_config(known[0], config, dtype, attention).eval()
    except Exception as error:  # the model's own code fails as it likes on sizes that it cannot build
        raise ConfigError(
            f"Transformers {transformers.__version__} builds no model of this config.json of {config.model_type} "
            f"({one_line(error)}): correct or add what it asks for"
        ) from None


def _from_config(kind: Any, config: Any, dtype: torch.dtype, attention: str | None) -> Any:
    try:
        return kind._from_config(config, dtype=dtype, attn_implementation=attention)
    except (ValueError, ImportError) as error:
        if attention is None or "attention implementation" not in str(error):
            raise
        return kind._from_config(config, dtype=dtype, attn_implementation="eager")


def check_size(module: Any) -> None:
    """Refuses what no machine holds: sizes in a hostile or mistyped file."""
    total = sum(parameter.numel() for parameter in module.parameters())
    if total > MAX_PARAMS:
        raise ConfigError(
            f"the configuration makes a model of {total:.1e} parameters, and none has more than {MAX_PARAMS:.0e}: "
            "correct its sizes"
        )


def _check_depth(section: Mapping[str, Any], path: str) -> None:
    """Lists of blocks are made one by one, so that a mistyped depth would take hours."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            _check_depth(value, f"{path}{key}.")
        elif _DEPTH.search(str(key)) and isinstance(value, int) and value > MAX_LAYERS:
            raise ConfigError(f"{path}{key} is {value}: a tower has at most {MAX_LAYERS} layers: correct it")


def _without_code(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_code(x) for key, x in value.items() if not UNASKED.fullmatch(str(key))}
    return value


def one_line(error: Exception) -> str:
    """What a library said, for a sentence of ours."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
