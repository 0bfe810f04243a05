"""TorchServe's side of an export: Transformers' handler of chat completions behind /predictions/NAME.

This file is copied into the model archive as it stands. Its worker needs `trimtab[serve]`, nothing else.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

from fastapi import HTTPException

from trimtab.runtime.placing.load import load_placed, move_inputs
from trimtab.serve.application import PlacedGeneration, PlacedModel, chat_handler
from trimtab.serve.body import parse_json
from trimtab.serve.chat import ChatProcessor
from trimtab.serve.config_check import check_config
from trimtab.serve.limits import ServeLimits
from trimtab.serve.load import load_model, load_processor
from trimtab.serve.problems import RequestError
from trimtab.serve.worker import ModelThread, to_hooked_device


class ChatHandler:
    """One worker, one model over all devices of its map; the requests of one batch together, without streams."""

    def initialize(self, context: Any) -> None:
        """Reads setup_config.json beside this file and loads the model as it says."""
        archive = Path(context.system_properties["model_dir"])
        setup = json.loads((archive / "setup_config.json").read_text(encoding="utf-8"))
        folder = archive / setup["model_path"]  # an absolute path stays what it is
        offload = archive / setup["offload_folder"] if setup["offload_folder"] else None
        placed = setup["device_map"] != "auto"
        check_config(folder)

        def load() -> Any:
            if placed:
                return load_placed(folder, setup["device_map"], offload_folder=offload)
            # JSON has no numbers as keys, and Accelerate knows a GPU by its number alone
            memory = {int(k) if k.isdigit() else k: v for k, v in (setup["max_memory"] or {}).items()} or None
            return load_model(folder, "auto", offload_folder=offload, max_memory=memory)

        limits = ServeLimits(max_new_tokens=setup["max_new_tokens"])
        chat = ChatProcessor(load_processor(folder), limits, name=context.model_name)
        model = PlacedModel(context.model_name, load, chat)
        thread = ModelThread(model.model, move_inputs if placed else to_hooked_device, limits)
        thread.try_batches(*chat.examples())
        thread.start()
        self._limits, self._handler = limits, chat_handler(model, PlacedGeneration(thread, limits))

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[str]:
        """A JSON text for each request of the batch."""
        return asyncio.run(self._handle([row.get("body", row.get("data")) for row in data], context))

    async def _handle(self, bodies: list[Any], context: Any) -> list[str]:
        return list(await asyncio.gather(*(self._answer(i, body, context) for i, body in enumerate(bodies))))

    async def _answer(self, i: int, body: Any, context: Any) -> str:
        content = bytes(body) if isinstance(body, bytes | bytearray) else json.dumps(body).encode()
        context.set_response_content_type(i, "application/json")
        try:
            request = parse_json(content, self._limits)
            if not isinstance(request, dict):
                raise RequestError(400, "the body must be one JSON object")
            if request.get("stream"):
                raise RequestError(400, "a stream was asked for and answers come whole here: leave stream out")
            answer = await self._handler.handle_request(request, uuid.uuid4().hex)
            return bytes(answer.body).decode()
        except (RequestError, HTTPException) as error:
            if isinstance(error, HTTPException):
                error = RequestError(error.status_code, str(error.detail))
            context.set_response_status(code=error.status, phrase="refused", idx=i)
            return json.dumps(error.body)
