"""A model folder's processor files -> Transformers' own processor, around a tokenizer that knows every token."""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trimtab.errors import UnknownModelError, quote
from trimtab.models.asking.model import library_reads

NUM_BYTES = 256  # ids below it are text


class _Word(str):
    """A token as text, and as the library's own class of tokens."""

    __slots__ = ()

    @property
    def content(self) -> str:
        return str(self)


class _Words(dict[str, int]):
    """A vocabulary that takes every word in."""

    def __init__(self, tokenizer: Any, words: Mapping[str, int]) -> None:
        super().__init__(words)
        self._tokenizer = tokenizer

    def __missing__(self, word: str) -> int:
        return int(self._tokenizer.convert_tokens_to_ids(word))


class AnyTokenizer(transformers.PreTrainedTokenizerFast):  # type: ignore[misc]
    """Bytes as words, and one special token for each that a processor names: of the text only images are counted."""

    def __init__(self, named: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Take `named`: tokens by name, as tokenizer_config.json gives them."""
        self._named = {k: str(v.get("content")) if isinstance(v, Mapping) else str(v) for k, v in named.items() if v}
        self.makes_up = True  # a token for each name that is asked for, and not only for those that are given
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(alphabet)}, merges=[]))
        words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        words.decoder = decoders.ByteLevel()
        super().__init__(
            tokenizer_object=words,
            **{f"{x}_token": f"<{x}>" for x in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")},
        )

    def __getattr__(self, key: str) -> Any:
        try:
            return super().__getattr__(key)
        except AttributeError:
            if key.startswith("__") or not key.endswith(("_token", "_token_id")):
                raise
        name = key.removesuffix("_id")
        if not self.makes_up and name not in self._named:
            raise AttributeError(name)
        token = self._named.get(name, f"<{name.removesuffix('_token')}>")
        number = self.convert_tokens_to_ids(token)
        return number if key.endswith("_id") else _Word(token)

    def get_vocab(self) -> dict[str, int]:
        return _Words(self, super().get_vocab())

    @property
    def vocab(self) -> dict[str, int]:
        return self.get_vocab()

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Convert as before, and add a token that is not there: real tokenizers have them."""
        asked = [tokens] if isinstance(tokens, str) else [str(x) for x in tokens or ()]
        vocabulary = self.get_vocab()
        self.add_tokens([AddedToken(x, special=True, normalized=False) for x in asked if x not in vocabulary])
        return super().convert_tokens_to_ids(tokens)


def load_processor(model_type: str, files: Mapping[str, Mapping[str, Any]]) -> Any:
    """The processor of `files` (name -> content).

    Raises `UnknownModelError` where the library has no such processor, `ConfigError` where it refuses the files.
    """
    kind = processor_class(model_type, files)
    with (
        library_reads(f"makes no {kind.__name__} of these files", "correct or add what it asks for"),
        tempfile.TemporaryDirectory(prefix="trimtab-processor-") as folder,
    ):
        for name, content in {**files, "config.json": {"model_type": model_type}}.items():
            (Path(folder) / name).write_text(json.dumps(_without_code(content)), encoding="utf-8")
        parts = [_part(name, folder, files) for name in kind.get_attributes()]
        processor = _made(kind, parts, kind.get_processor_dict(folder, local_files_only=True)[0])
    tokenizer = processor.tokenizer
    for name, value in list(vars(processor).items()):
        if name.endswith("token") and (isinstance(value, str) or hasattr(value, "content")):
            number = tokenizer.convert_tokens_to_ids(str(value))
            own = getattr(processor, f"{name}_id", None)
            # of its own text, and not its first byte, which it was before the tokenizer had the token
            if own is not None and (own == getattr(tokenizer, f"{name}_id", None) or own < NUM_BYTES):
                setattr(processor, f"{name}_id", number)
    return processor


def _made(kind: Any, parts: list[Any], written: dict[str, Any]) -> Any:
    """The processor, with its own tokens where its tokenizer names none, as most do; else with made-up ones."""
    tokenizers = [part for part in parts if isinstance(part, AnyTokenizer)]
    for makes_up in (False, True):
        for tokenizer in tokenizers:
            tokenizer.makes_up = makes_up
        try:
            return kind.from_args_and_dict(list(parts), dict(written))
        except Exception:
            if makes_up:
                raise
        finally:
            for tokenizer in tokenizers:
                tokenizer.makes_up = True
    raise AssertionError


def processor_class(model_type: str, files: Mapping[str, Mapping[str, Any]]) -> Any:
    """The processor that the files name, else the one that the library pairs with the model."""
    for content in files.values():
        name = content.get("processor_class")
        if isinstance(name, str) and inspect.isclass(found := getattr(transformers, name, None)):
            return found
    mapping = transformers.models.auto.processing_auto.PROCESSOR_MAPPING
    known = model_type in transformers.CONFIG_MAPPING  # a lazy mapping, which has no `get`
    kind = transformers.CONFIG_MAPPING[model_type] if known else None
    if kind not in mapping:
        raise UnknownModelError(f"Transformers has no processor of {quote(model_type)}: give an image rule of your own")
    return mapping[kind]


def _part(name: str, folder: str, files: Mapping[str, Mapping[str, Any]]) -> Any:
    from transformers.processing_utils import _get_modality_for_attribute  # since Transformers 5

    modality = _get_modality_for_attribute(name)
    if modality == "tokenizer":
        return AnyTokenizer({k: v for k, v in files.get("tokenizer_config.json", {}).items() if k.endswith("_token")})
    auto = {
        "image_processor": transformers.AutoImageProcessor,
        "video_processor": transformers.AutoVideoProcessor,
        "feature_extractor": transformers.AutoFeatureExtractor,
    }.get(modality)
    if auto is None:
        auto = transformers.AutoProcessor
    return auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _without_code(value: Any) -> Any:
    """Keep fields that name neither code nor a font: times that Ernie draws on frames change no size."""
    if isinstance(value, Mapping):
        kept = {key: _without_code(x) for key, x in value.items() if key not in ("auto_map", "font_path")}
        return {**kept, "draw_on_frames": False} if "draw_on_frames" in kept else kept
    return value
