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
from starlette.exceptions import HTTPException
from transformers.integrations.accelerate import _get_device_map

from trimtab.runtime.placing.folder import model_class, read_config
from trimtab.runtime.placing.load import load_placed
from trimtab.serve.application import Chat, PlacedModel
from trimtab.serve.chat import ChatProcessor
from trimtab.serve.config_check import check_config
from trimtab.serve.limits import ServeLimits
from trimtab.serve.problems import refusal
from trimtab.serve.processor import load_processor
from trimtab.serve.worker import ModelThread


class ChatHandler:
    """One worker, one model over all devices of its map; the requests of one batch together, without streams."""

    def initialize(self, context: Any) -> None:
        """Reads setup_config.json beside this file and loads the model as it says."""
        archive = Path(context.system_properties["model_dir"])
        setup = json.loads((archive / "setup_config.json").read_text(encoding="utf-8"))
        folder = archive / setup["model_path"]  # an absolute path stays what it is
        check_config(folder)
        places = setup["device_map"]
        dtype = None if setup["torch_dtype"] is None else getattr(torch, setup["torch_dtype"])
        if isinstance(places, str):
            places = _map_by_rule(folder, places, setup["max_memory"], dtype)
        offload = archive / setup["offload_folder"] if setup["offload_folder"] else None
        model = load_placed(folder, places, runs_on=setup["runs_on"], dtype=dtype, offload_folder=offload)
        limits = ServeLimits(max_new_tokens=setup["max_new_tokens"])
        chat = ChatProcessor(load_processor(folder), limits, name=context.model_name)
        self._thread = ModelThread(model, limits)
        self._thread.try_batch(chat.examples())
        self._thread.start()
        placed = PlacedModel(context.model_name, model, chat)
        self._handler = Chat(model_manager=placed, generation_state=self._thread)

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[str]:
        """A JSON text for each request of the batch."""
        return asyncio.run(self._handle([row.get("body", row.get("data")) for row in data], context))

    async def _handle(self, bodies: list[Any], context: Any) -> list[str]:
        return list(await asyncio.gather(*(self._answer(i, body, context) for i, body in enumerate(bodies))))

    async def _answer(self, i: int, body: Any, context: Any) -> str:
        request_id = uuid.uuid4().hex
        context.set_response_content_type(i, "application/json")
        self._thread.wanted.add(request_id)
        try:
            if not isinstance(body, dict) or body.get("stream"):
                raise HTTPException(400, "the body must be one JSON object without stream: answers come whole here")
            answer = await self._handler.handle_request(body, request_id)
        except HTTPException as error:
            context.set_response_status(code=error.status_code, phrase="refused", idx=i)
            answer = refusal(error)
        finally:
            self._thread.wanted.discard(request_id)
        return bytes(answer.body).decode()


def _map_by_rule(
    folder: Path, rule: str, max_memory: dict[str, str] | None, dtype: torch.dtype | None
) -> dict[str, int | str]:
    """Transformers' own map by `rule` (a private function, 5.23) under `max_memory`, devices named as JSON has them."""
    config = read_config(folder)
    with torch.device("meta"):
        model = model_class(folder, config)(config).to(dtype or config.dtype)
    model.tie_weights()
    memory = {int(k) if k.isdigit() else k: v for k, v in (max_memory or {}).items()} or None
    return dict(_get_device_map(model, rule, memory, None))
