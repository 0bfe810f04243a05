"""TorchServe's side of an export: Transformers' handler of chat completions behind /predictions/NAME.

This file is copied into the model archive as it stands. Its worker needs `trimtab[serve]`, nothing else.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import torch
from fastapi import HTTPException
from transformers.cli.serving.utils import GenerationState
from transformers.integrations.accelerate import _get_device_map

from trimtab.runtime.placing.folder import model_class, read_config
from trimtab.runtime.placing.load import load_placed
from trimtab.serve.application import Chat, PlacedModel, load_processor


class ChatHandler:
    """One worker, one model over all devices of its map; the requests of a batch one after the other."""

    def initialize(self, context: Any) -> None:
        """Read setup_config.json next to this file, and load the model as it says."""
        archive = Path(context.system_properties["model_dir"])
        setup = json.loads((archive / "setup_config.json").read_text(encoding="utf-8"))
        folder = Path(setup["model_path"])
        places = setup["device_map"]
        dtype = None if setup["torch_dtype"] is None else getattr(torch, setup["torch_dtype"])
        if isinstance(places, str):
            places = _map_by_rule(folder, setup, dtype)
        offload = archive / setup["offload_folder"] if setup["offload_folder"] else None
        model = load_placed(folder, places, runs_on=setup["runs_on"], dtype=dtype, offload_folder=offload)
        self._handler = Chat(
            model_manager=PlacedModel(context.model_name, model, load_processor(folder)),
            generation_state=GenerationState(),
            max_new_tokens=int(setup["max_length"]),
        )

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[str]:
        """Return a JSON text for each request of the batch."""
        bodies = [row.get("body", row.get("data")) for row in data]
        return [asyncio.run(self._answer(i, body, context)) for i, body in enumerate(bodies)]

    async def _answer(self, i: int, body: Any, context: Any) -> str:
        context.set_response_content_type(i, "application/json")
        try:
            if not isinstance(body, dict) or body.get("stream"):
                raise HTTPException(400, "the body must be one JSON object without stream: answers come whole here")
            answer = await self._handler.handle_request(body, uuid.uuid4().hex)
        except HTTPException as error:
            context.set_response_status(code=error.status_code, phrase="refused", idx=i)
            return json.dumps({"detail": error.detail})
        return bytes(answer.body).decode()


def _map_by_rule(folder: Path, setup: dict[str, Any], dtype: torch.dtype | None) -> dict[str, int | str]:
    """Return Transformers' own map by the rule `device_map` (a private function, 5.23) under `max_memory`."""
    config = read_config(folder)
    with torch.device("meta"):
        model = model_class(folder, config)(config).to(dtype or config.dtype)
    model.tie_weights()
    memory = {int(k) if k.isdigit() else k: v for k, v in (setup["max_memory"] or {}).items()} or None
    return dict(_get_device_map(model, setup["device_map"], memory, None))
