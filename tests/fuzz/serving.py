"""What strangers send to `trimtab serve`, and where it is told to put a model."""

from __future__ import annotations

import asyncio
import atexit
import base64
import functools
import io
import json
import logging
import random
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image
from tests.fuzz.damage import damaged, reshaped

from trimtab.errors import TrimtabError
from trimtab.serve.device_map import read_device_map

Try = Callable[[int], None]
_NAMES = (
    *("messages", "model", "prompt", "input", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens"),
    *("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed", "stop", "n", "tools"),
    *("tool_choice", "response_format", "logit_bias", "logprobs", "top_logprobs", "instructions", "generation_config"),
    *("content", "role", "type", "text", "image_url", "url", "image", "video", "video_url", "audio", "tool_calls"),
    *("chat_template_kwargs", "reasoning", "previous_response_id", "include", "modalities", "stream_options", "echo"),
)


@functools.cache
def _saved(folder: Path) -> Path:
    sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))
    from tiny_chat import save_chat_model

    return save_chat_model(folder / "tiny")


def bodies(folder: Path) -> Try:
    """Requests through the gate to a real tiny model: an answer, or a refusal in OpenAI's shape that is no 500."""
    from trimtab.runtime.placing.load import load_placed
    from trimtab.serve.application import PlacedModel, build_application
    from trimtab.serve.chat import ChatProcessor
    from trimtab.serve.gate import Gate
    from trimtab.serve.limits import ServeLimits
    from trimtab.serve.processor import load_processor
    from trimtab.serve.worker import ModelThread

    limits = ServeLimits(max_new_tokens=3, max_body_bytes=200_000, max_pixels=40_000, max_request_s=20.0)
    model, failed = load_placed(_saved(folder)), list[str]()
    thread = ModelThread(model, limits)
    chat = ChatProcessor(load_processor(_saved(folder)), limits, name="tiny")
    thread.start()
    atexit.register(thread.shutdown)  # an answer's last token is sent before `generate` returns
    gate = Gate(build_application(PlacedModel("tiny", model, chat), thread), thread, limits)
    loop = asyncio.new_event_loop()
    told = logging.Handler()
    told.emit = lambda record: failed.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trimtab.serve").addHandler(told)
    image = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(image, "PNG")
    url = "data:image/png;base64," + base64.b64encode(image.getvalue()).decode()
    shown: Any = {"type": "image_url", "image_url": {"url": url}}
    parts = [shown, {"type": "text", "text": "?"}]
    talk = [{"role": "system", "content": "Be short."}, {"role": "user", "content": parts}]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    asked: dict[str, Any] = {
        "/v1/chat/completions": {"model": "tiny", "messages": talk, "temperature": 0.5, "stop": ["x"], "tools": [tool]},
        "/v1/completions": {"prompt": "once upon", "max_tokens": 2, "seed": 1},
        "/v1/responses": {
            "instructions": "Be short.",
            "max_output_tokens": 3,
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
        },
    }

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        path = draw.choice(sorted(asked))
        body = asked[path] | {"stream": draw.random() < 0.3}
        content = json.dumps(reshaped(body, draw, _NAMES)).encode()
        if draw.random() < 0.2:
            content = damaged(json.dumps(body).encode(), draw)
        failed.clear()
        status, answer = loop.run_until_complete(_ask(gate, path, content))
        assert not failed, f"{failed} on {content[:3000]!r}"
        assert status in (200, 400, 413, 422), f"{status} {answer[:300]!r} on {content[:3000]!r}"
        if status != 200:
            assert set(json.loads(answer)["error"]) == {"message", "type", "param", "code"}, answer
        assert not thread.wanted, "a place in the queue is held"

    return try_seed


async def _ask(gate: Any, path: str, content: bytes) -> tuple[int, bytes]:
    """Status and body of the answer."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "client": ("127.0.0.1", 1),
        "server": ("x", 1),
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    pieces, sent = [content[:700], content[700:]], list[Any]()

    async def receive() -> Any:
        if not pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        sent.append(message)

    await asyncio.wait_for(gate(scope, receive, send), 30)
    assert sent, "no answer"
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def device_maps(folder: Path) -> Try:
    """Maps of modules to devices: a model that answers as it does unplaced, or a `TrimtabError`."""
    import torch

    from trimtab.runtime.placing.load import load_placed

    saved, tokens = _saved(folder), torch.tensor([[5, 6, 7]])
    alone = load_placed(saved)(input_ids=tokens).logits
    layers = [f"model.language_model.layers.{n}" for n in range(len(load_placed(saved).model.language_model.layers))]
    modules = ["model.visual", "model.language_model.embed_tokens", *layers, "model.language_model.norm", "lm_head"]
    written = {
        "device_map": dict.fromkeys(modules, "cpu") | {layers[0]: "disk"},
        "runs_on": {layers[0]: "cpu"},
        "run_on_cpu": ["lm_head"],
    }
    names = (*modules, "", "model", "model.language_model", "model.language_model.rotary_emb", "x")

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        content = json.dumps(reshaped(written, draw, names)).encode()
        (folder / "map.json").write_bytes(damaged(content, draw) if draw.random() < 0.2 else content)
        with suppress(TrimtabError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = read_device_map(folder / "map.json")
            model = load_placed(saved, read.device_map, runs_on=read.runs_on)
            assert torch.equal(model(input_ids=tokens).logits, alone)

    return try_seed


TARGETS: dict[str, Callable[[Path], Try]] = {"bodies": bodies, "device_maps": device_maps}
