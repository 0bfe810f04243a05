"""Transformers' own serving application over one model that `load_placed` loaded, on loopback.

The folder's processor is read without torchvision; nothing is fetched, and no code of the folder runs.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from transformers import AutoImageProcessor, AutoTokenizer, GotOcr2ImageProcessorPil, InternVLProcessor
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState, Modality
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from trimtab.address import fetch
from trimtab.errors import ConfigError, ImageError, SampleError, TrimtabError, quote
from trimtab.models.asking.internvl_chat import IMAGE_ROW, InternVLChatConfig, tile_size
from trimtab.models.asking.model import library_reads
from trimtab.runtime.placing.folder import read_config
from trimtab.runtime.placing.load import move_inputs
from trimtab.samples.media import image_size

HOST = "127.0.0.1"
_ROUTES = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/health"}
_LENGTHS = ("max_completion_tokens", "max_new_tokens", "max_output_tokens", "max_tokens")
_CLOSED = ("chat_template_kwargs", "generation_config")  # they could set what is checked here


class _Spread:
    """The loaded model, with inputs moved to the device of its head: its first parameter may lie on disk."""

    device = "cpu"  # inputs wait there

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, *, tokenizer: Any, **inputs: Any) -> Any:
        """Generate with the tokenizer, which searches for stops; Transformers' manager hands over the processor."""
        words = getattr(tokenizer, "tokenizer", tokenizer)
        return self._model.generate(**move_inputs(self._model, inputs), tokenizer=words)


class PlacedModel:
    """Hand out one loaded model: what Transformers' handlers ask of their `ModelManager` (5.23), and no loading."""

    def __init__(self, name: str, model: Any, processor: Any) -> None:
        self.force_model, self._model, self._processor = name, _Spread(model), processor

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self._model, self._processor

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """Return the name as it is: a placed model has no revision."""
        return model_id

    @staticmethod
    def get_model_modality(*_: Any, **__: Any) -> Modality:
        return Modality.VLM

    def get_gen_models(self) -> list[dict[str, Any]]:
        return [{"id": self.force_model, "object": "model", "created": 0, "owned_by": "trimtab"}]

    def shutdown(self) -> None:
        """Keep the model: the process ends with the server."""


class _Checked:
    """Check a request before Transformers' handler reads it, and keep its answer within the longest one."""

    def __init__(self, *, max_new_tokens: int, allow_remote: bool = False, **named: Any) -> None:
        # special tokens that a client writes into a text stay text
        named["chat_template_kwargs"] = {"sanitize_control_tokens": True}
        super().__init__(**named)
        self._max_new_tokens, self._allow_remote = max_new_tokens, allow_remote

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        check_body(body, max_new_tokens=self._max_new_tokens, allow_remote=self._allow_remote)
        await asyncio.to_thread(carry_images, body)
        whole = {"stream": False} | body  # OpenAI streams only on request
        return await super().handle_request(whole, request_id)  # type: ignore[misc]

    def _build_generation_config(self, body: dict[str, Any], *given: Any, **named: Any) -> Any:
        settings = super()._build_generation_config(body, *given, **named)  # type: ignore[misc]
        settings.max_new_tokens = min(settings.max_new_tokens, self._max_new_tokens)
        return settings


class Chat(_Checked, ChatCompletionHandler):  # type: ignore[misc]
    """OpenAI's chats; also for those who have an HTTP server of their own."""


class _Completion(_Checked, CompletionHandler):  # type: ignore[misc]
    """Prompts without a template."""


class _Response(_Checked, ResponseHandler):  # type: ignore[misc]
    """OpenAI's newer API of chats."""


def check_body(body: dict[str, Any], *, max_new_tokens: int, allow_remote: bool) -> None:
    """Refuse a request (`HTTPException` 400) that is too long, or whose images would have to be fetched or opened.

    Images are `data:` URLs, with `allow_remote` also addresses; a file is never opened. Parts of a message that are
    neither text nor image are refused, because this server's processor reads no others.
    """
    for name in _CLOSED:
        if body.get(name) is not None:
            raise HTTPException(400, f"{name} is not taken by this server: leave it out")
    for name in _LENGTHS:
        length = body.get(name)
        if length is not None and not (type(length) is int and 1 <= length <= max_new_tokens):
            raise HTTPException(400, f"{name} must be between 1 and {max_new_tokens}")
    prefixes = ("data:image/", "http://", "https://") if allow_remote else ("data:image/",)
    for part in _parts([body.get("messages"), body.get("input")]):
        if other := {"audio_url", "input_audio", "video_url"} & part.keys():
            raise HTTPException(400, f"{other.pop()} is not taken by this server: send texts and images")
        address = _image_url(part) if "image_url" in part else prefixes[0]
        if not isinstance(address, str) or not address.startswith(prefixes):
            raise HTTPException(400, f"an image must come as a URL that begins with {' or '.join(prefixes)}")


def carry_images(body: dict[str, Any]) -> None:
    """Put the images of a checked request that lie behind addresses into it; `HTTPException` 400 where one does not
    come within the limits of `fetch`, or is no image. Transformers would wait for any answer, of any size.
    """
    for part in _parts([body.get("messages"), body.get("input")]):
        address = _image_url(part)
        if not isinstance(address, str) or address.startswith("data:"):
            continue
        try:
            content = fetch(address)
            image_size(content)
        except (SampleError, ImageError) as error:
            raise HTTPException(400, f"the image at {address[:80]} is not taken: {error}") from None
        url = "data:image/any;base64," + base64.b64encode(content).decode("ascii")
        part["image_url"] = {**part["image_url"], "url": url} if isinstance(part["image_url"], dict) else url


def _image_url(part: dict[str, Any]) -> Any:
    """Return what a part of a message says of its image's place; None for other parts."""
    given = part.get("image_url")
    return given.get("url") if isinstance(given, dict) else given


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a request, however deep."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield value
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def build_application(
    name: str, model: Any, processor: Any, *, max_new_tokens: int, allow_remote: bool = False
) -> FastAPI:
    """Return Transformers' application without the routes that load models, for clients that name this machine as
    localhost: a web page that points its own name here is refused."""
    placed, state = PlacedModel(name, model, processor), GenerationState()
    named = {
        "model_manager": placed,
        "generation_state": state,
        "max_new_tokens": max_new_tokens,
        "allow_remote": allow_remote,
    }
    app = build_server(
        placed,
        Chat(**named),
        completion_handler=_Completion(**named),
        response_handler=_Response(**named),
        transcription_handler=None,
        systemone_handler=None,
        generation_state=state,
    )
    app.router.routes[:] = [route for route in app.router.routes if route.path in _ROUTES]
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return app


def open_port(port: int) -> socket.socket:
    """Return a listening socket on loopback; `port` 0 takes a free one."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise TrimtabError(f"port {port} is not free ({error.strerror}): name another with --port, or 0") from None


def run_application(app: FastAPI, opened: socket.socket, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; accepted requests are answered first. `on_ready` gets the URL."""
    with opened:
        on_ready(f"http://{HOST}:{opened.getsockname()[1]}")
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[opened])


# -- the processor ----------------------------------------------------------------------------------------------------
# A folder of InternVL as first published holds a tokenizer and nothing else of Transformers'. Fields of `config.json`
# say how its images are cut; code of its own, which never runs, writes its conversations. Transformers' classes get
# those fields here, and the conversation template that the makers of the `-hf` folders wrote
# (transformers/models/internvl/convert_internvl_weights_to_hf.py at 015d3b2): no default system message.

# after <|im_end|>, by the name that config.json gives its conversations (OpenGVLab/InternVL, conversation.py)
_BEHIND_TURN = {"internvl2_5": "\\n", "Hermes-2": "", "internlm2-chat": ""}
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<IMG_CONTEXT>\\n' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>BEHIND' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def load_processor(path: Path) -> Any:
    """The folder's processor without its video part: tokenizer, chat template, and Pillow's image backend.

    Made of its parts, because Transformers' `AutoProcessor` asks for torchvision as soon as a processor could take
    videos (5.23).
    """
    config = read_config(path)
    cure = "name a folder with tokenizer.json, tokenizer_config.json and preprocessor_config.json in its own format"
    with library_reads(f"reads no processor in {path}", cure):
        if isinstance(config, InternVLChatConfig):
            kind, parts = InternVLProcessor, _published_parts(path, config)
        else:
            kind = PROCESSOR_MAPPING.get(type(config), None)
            if kind is None or "image_processor" not in kind.get_attributes():
                raise ValueError("it has none of images and text for this model")
            parts = _read_parts(path, kind)
        processor = _without_video(kind)(**parts)
    if processor.chat_template is None:  # some folders keep it with the tokenizer
        processor.chat_template = parts["tokenizer"].chat_template
    return processor


def _read_parts(path: Path, kind: type[Any]) -> dict[str, Any]:
    local = {"trust_remote_code": False, "local_files_only": True}
    settings, _ = kind.get_processor_dict(path, **local)
    attributes, accepted = kind.get_attributes(), inspect.signature(kind.__init__).parameters
    read = {
        "tokenizer": AutoTokenizer.from_pretrained(path, **local),
        "image_processor": AutoImageProcessor.from_pretrained(path, backend="pil", **local),
    }
    return {
        **{name: read.get(name) for name in attributes},
        **{name: value for name, value in settings.items() if name in accepted and name not in attributes},
    }


def _without_video(kind: type[Any]) -> type[Any]:
    """Make a processor class that takes None for its video processor (public method; Transformers 5.23)."""

    def check(self: Any, name: str, argument: object) -> Any:
        return None if argument is None else kind.check_argument_for_proper_class(self, name, argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})


def _published_parts(folder: Path, config: InternVLChatConfig) -> dict[str, Any]:
    """Return the arguments of Transformers' `InternVLProcessor`, without its video part.

    `ConfigError` where the folder cuts images or writes turns in ways that Transformers' classes do not.
    """
    fields = config.published
    template, dynamic = fields.get("template"), bool(fields.get("dynamic_image_size"))
    if template not in _BEHIND_TURN:
        raise ConfigError(
            f"{folder} has template {quote(template)} of its own code: serve its -hf folder (known are "
            f"{', '.join(_BEHIND_TURN)})"
        )
    if dynamic and not fields.get("use_thumbnail"):
        raise ConfigError(f"{folder} has tiles without thumbnail: load it in Python, with pixels of your own")
    size = tile_size(fields)
    tokens = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": IMAGE_ROW}
    tokenizer = AutoTokenizer.from_pretrained(
        folder, config=config, trust_remote_code=False, local_files_only=True, extra_special_tokens=tokens
    )
    tokenizer.video_token = "<video>"  # noqa: S105 - the processor asks for a name; videos are not taken
    image_processor = GotOcr2ImageProcessorPil(
        size={"height": size, "width": size},
        min_patches=fields.get("min_dynamic_patch", 1),
        max_patches=fields.get("max_dynamic_patch", 6) if dynamic else 1,
        image_mean=IMAGENET_DEFAULT_MEAN,
        image_std=IMAGENET_DEFAULT_STD,
    )
    return {
        "tokenizer": tokenizer,
        "image_processor": image_processor,
        "image_seq_length": config.image_seq_length,
        "chat_template": _TEMPLATE.replace("BEHIND", _BEHIND_TURN[template]),
    }
