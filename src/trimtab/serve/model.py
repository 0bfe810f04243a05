"""One loaded model behind the endpoint: from a chat request to the model's inputs, and from them to tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import BaseStreamer

from trimtab.errors import ConfigError
from trimtab.serve.chat import ChatRequest, marker_pattern
from trimtab.serve.pictures import Picture, decode_picture
from trimtab.serve.problems import RequestError

# what stands for an image where a tokenizer does not call it special
_PLACE_TOKENS = ("image_token", "video_token", "boi_token", "eoi_token", "start_image_token", "end_image_token")
_PROBE = "trimtab asks whether this text arrives"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request as the model takes it."""

    inputs: dict[str, Tensor]
    num_tokens: int


class ChatModel:
    """A model with its processor. Not for several threads: families keep state of the running request on the module.

    `move_inputs` puts a request's tensors where a placed model wants them; without it all go to the model's device.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        name: str,
        max_prompt_tokens: int | None = None,
        move_inputs: Callable[[Any, dict[str, Tensor]], dict[str, Tensor]] | None = None,
    ) -> None:
        self.name = name
        self._move_inputs = _move_inputs if move_inputs is None else move_inputs
        self.tokenizer = processor.tokenizer
        self._model, self._processor = model, processor
        self._max_prompt_tokens = max_prompt_tokens
        self._positions: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        added = self.tokenizer.added_tokens_decoder.values()
        places = (getattr(processor, name, None) for name in _PLACE_TOKENS)
        special = {*self.tokenizer.all_special_tokens, *(str(x) for x in added if x.special)}
        self.markers = tuple(sorted(special | {x for x in places if isinstance(x, str)}))
        self._marked = marker_pattern(self.markers)
        self._ends = _end_tokens(model.generation_config)
        self._check_template()

    def prepare(self, request: ChatRequest) -> Prompt:
        """Decodes, templates and tokenises; `RequestError` where the model cannot take the request."""
        conversation = [
            {"role": turn.role, "content": [_template_part(part) for part in turn.parts]} for turn in request.turns
        ]
        self._check_markers(request)
        try:
            inputs = self._processor.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )
        except (ValueError, TemplateError) as error:  # what templates and image processors raise at bad input
            raise _refused(error) from None
        num_tokens = int(inputs["input_ids"].shape[1])
        self._check_length(num_tokens, request.max_new_tokens)
        return Prompt(inputs=dict(inputs), num_tokens=num_tokens)

    def generate(self, prompt: Prompt, request: ChatRequest, on_token: Callable[[int], bool]) -> bool:
        """Calls `on_token` with every new token, the last one included, until it returns False.

        Tokens are those of the model's own `generate` for this request alone. Returns whether the model itself came
        to an end, rather than to `max_new_tokens` or to the caller's False.
        """
        watcher = _Watcher(on_token)
        cast = {name: x.to(self._model.dtype) if x.is_floating_point() else x for name, x in prompt.inputs.items()}
        inputs = self._move_inputs(self._model, cast)
        with _seeded(request.seed):
            self._model.generate(
                **inputs,
                generation_config=self._settings(request),
                streamer=watcher,
                stopping_criteria=StoppingCriteriaList([watcher]),
            )
        return watcher.last in self._ends

    def _settings(self, request: ChatRequest) -> Any:
        settings = copy.deepcopy(self._model.generation_config)
        settings.max_new_tokens, settings.max_length, settings.min_length = request.max_new_tokens, None, 0
        settings.num_beams = settings.num_return_sequences = 1
        if request.temperature is not None:
            settings.do_sample = request.temperature > 0
            settings.temperature = request.temperature
        if request.top_p is not None:
            settings.top_p = request.top_p
        if not settings.do_sample:
            settings.temperature = settings.top_p = settings.top_k = None  # unused; Transformers warns if they are set
        return settings

    def _check_length(self, num_tokens: int, max_new_tokens: int) -> None:
        if self._max_prompt_tokens is not None and num_tokens > self._max_prompt_tokens:
            raise RequestError(
                400,
                f"the conversation has {num_tokens} tokens and this server takes {self._max_prompt_tokens}: send less "
                "text or smaller images",
                param="messages",
                code="context_length_exceeded",
            )
        if self._positions is not None and num_tokens + max_new_tokens > self._positions:
            raise RequestError(
                400,
                f"the conversation has {num_tokens} tokens and may be answered with {max_new_tokens}, and the model "
                f"has {self._positions} positions: send less, or ask for fewer with max_tokens",
                param="messages",
                code="context_length_exceeded",
            )

    def _check_markers(self, request: ChatRequest) -> None:
        """Refuses special tokens that texts make only together, or with the template's help: those of the whole
        conversation must be those of its template alone."""
        counts = []
        for empty in (False, True):
            conversation = [
                {
                    "role": turn.role,
                    "content": [
                        {"type": "text", "text": "x" if empty else part} if isinstance(part, str) else {"type": "image"}
                        for part in turn.parts
                    ],
                }
                for turn in request.turns
            ]
            counts.append(len(self._marked.findall(self._write(conversation))))
        if counts[0] != counts[1]:
            raise RequestError(
                400,
                "texts of the conversation make a special token together, which this model reads as a command and not "
                "as text: leave it out",
                param="messages",
            )

    def _write(self, conversation: list[dict[str, Any]]) -> str:
        """The conversation as the template writes it."""
        try:
            return str(self._processor.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False))
        except (ValueError, TemplateError) as error:
            raise _refused(error) from None

    def _check_template(self) -> None:
        """Whether the folder's chat template can write a message given as parts."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        except (ValueError, TypeError, TemplateError) as error:
            raise ConfigError(
                f"the chat template of {self.name} cannot be used: {error}; put a chat_template.jinja beside the model"
            ) from None
        if not self.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]:  # Transformers makes empty ones
            raise ConfigError(
                f"the tokenizer of {self.name} knows no words: put tokenizer.json and tokenizer_config.json beside the "
                "model"
            )
        if _PROBE not in text or "'type'" in text:
            raise ConfigError(
                f"the chat template of {self.name} does not write messages whose content is a list of parts: put one "
                "that does into chat_template.jinja beside the model"
            )


def _move_inputs(model: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """To where Accelerate's hook, if Transformers placed the model, wants inputs and brings results back to."""
    hooked = getattr(getattr(model, "_hf_hook", None), "execution_device", None)
    return {name: x.to(model.device if hooked is None else hooked) for name, x in inputs.items()}


class _Watcher(BaseStreamer, StoppingCriteria):  # type: ignore[misc]
    """Hears every token of one `generate` and tells it when to stop."""

    def __init__(self, on_token: Callable[[int], bool]) -> None:
        self._on_token = on_token
        self._prompt_seen, self._go_on = False, True
        self.last: int | None = None

    def put(self, value: Tensor) -> None:
        if not self._prompt_seen:  # `generate` puts the prompt first
            self._prompt_seen = True
            return
        self.last = int(value.reshape(-1)[-1])
        self._go_on = self._on_token(self.last) and self._go_on

    def end(self) -> None:
        pass

    def __call__(self, input_ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), not self._go_on, dtype=torch.bool, device=input_ids.device)


def _refused(error: Exception) -> RequestError:
    reason = " ".join(str(error).split())[:300]
    return RequestError(400, f"the model's processor refuses this conversation: {reason}")


def _template_part(part: str | Picture) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image", "image": decode_picture(part)}


@contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    """Sampling that repeats, and leaves later requests as unforeseeable as they were."""
    if seed is None:
        yield
        return
    device = torch.accelerator.current_accelerator()
    kind = "cuda" if device is None else device.type
    with torch.random.fork_rng(range(torch.accelerator.device_count()), device_type=kind):
        torch.manual_seed(seed)
        yield


def _end_tokens(generation_config: Any) -> frozenset[int]:
    ends = generation_config.eos_token_id
    return frozenset(ends if isinstance(ends, list) else [] if ends is None else [ends])
