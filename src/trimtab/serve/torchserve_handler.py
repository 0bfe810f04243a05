"""TorchServe's side of an export: the chat endpoint's request and answer behind /predictions/NAME.

This file is copied into the model archive as it stands. Its worker needs `trimtab[data,torch]`, nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trimtab.serve.answers import AnswerHead, Done
from trimtab.serve.chat import parse_chat
from trimtab.serve.limits import ServeLimits
from trimtab.serve.load import load_model, load_processor
from trimtab.serve.model import ChatModel
from trimtab.serve.problems import RequestError
from trimtab.serve.text import TextPieces


class ChatHandler:
    """One worker, one model over all devices of its map; requests one at a time, without streams."""

    def initialize(self, context: Any) -> None:
        """Reads setup_config.json beside this file and loads the model as it says."""
        archive = Path(context.system_properties["model_dir"])
        setup = json.loads((archive / "setup_config.json").read_text(encoding="utf-8"))
        folder = archive / setup["model_path"]  # an absolute path stays what it is
        self._limits = ServeLimits(max_new_tokens=setup["max_new_tokens"])
        model = load_model(
            folder,
            setup["device_map"],
            offload_folder=archive / setup["offload_folder"] if setup["offload_folder"] else None,
            # JSON has no numbers as keys, and Accelerate knows a GPU by its number alone
            max_memory={int(k) if k.isdigit() else k: v for k, v in (setup["max_memory"] or {}).items()} or None,
        )
        self._model = ChatModel(model, load_processor(folder), name=context.model_name)

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[str]:
        """A JSON text for each request of the batch."""
        answers: list[str] = []
        for i, row in enumerate(data):
            body = row.get("body", row.get("data"))
            content = body if isinstance(body, bytes | bytearray) else json.dumps(body).encode()
            try:
                answers.append(json.dumps(self._answer(bytes(content))))
            except RequestError as error:
                context.set_response_status(code=error.status, phrase="refused", idx=i)
                answers.append(json.dumps(error.body))
            context.set_response_content_type(i, "application/json")
        return answers

    def _answer(self, body: bytes) -> dict[str, Any]:
        model = self._model
        request = parse_chat(body, model=model.name, limits=self._limits, markers=model.markers)
        if request.stream:
            raise RequestError(400, "a stream was asked for and answers come whole here: leave stream out")
        prompt = model.prepare(request)
        pieces = TextPieces(lambda ids: str(model.tokenizer.decode(ids, skip_special_tokens=True)), request.stop)
        texts: list[str] = []

        def on_token(token: int) -> bool:
            texts.append(pieces.push(token))
            return not pieces.stopped

        ended = model.generate(prompt, request, on_token)
        num_tokens = len(texts)
        texts.append(pieces.finish())
        return AnswerHead(model.name).whole(
            "".join(texts), _done(ended or pieces.stopped, prompt.num_tokens, num_tokens)
        )


def _done(stopped: bool, prompt_tokens: int, new_tokens: int) -> Done:
    return Done(finish_reason="stop" if stopped else "length", prompt_tokens=prompt_tokens, new_tokens=new_tokens)
