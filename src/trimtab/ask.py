"""Questions to Transformers, put to a child process: what it says of a configuration, remembered by digest and version.

The child has no network, no weights, no code of a model's folder, 8 GiB and one minute; this module has no torch.
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from trimtab.errors import ConfigError, UnknownModelError, quote
from trimtab.files import write_atomically
from trimtab.limited import ChildEndedError, LimitedChild

Question = Literal["describe", "images", "clips", "own code"]
MAX_CPU_S = 60  # largest published models take under 10
MAX_MEMORY_BYTES = 8 * 2**30  # torch and Transformers take 0.6 GiB
MAX_ANSWER_BYTES = 2**23
ANSWER = "trimtab.models.asking:answer"
ANSWERS = 6  # raise it when answers to the same question change: remembered ones are then asked again

UNASKED = re.compile(
    r"auto_map|trust_remote_code|\w*attn_implementation\w*|\w*experts_implementation\w*|quantization_config"
    r"|(torch_)?dtype|_?name_or_path|use_kernels|kernel_config|transformers_version|_commit_hash|device_map"
    r"|use_pretrained_backbone"
)
"""Fields, at any depth, that name code, files or number formats: they change no layer, and are left out."""

INSTALL = "install Transformers and torch (pip install 'trimtab[torch]'), which are asked for it without weights"


def is_installed() -> bool:
    """Return whether Transformers and torch are there to be asked; nothing is imported."""
    return _versions() is not None


def ask(config: Mapping[str, object], question: Question) -> Mapping[str, Any]:
    """The child's answer: counts of images, or a description file with the completed configuration under `config`.

    Use `describe`, which asks by itself where it must. Answers lie in `cache_dir`; deleting it costs seconds.
    Raises `ConfigError` in one sentence where Transformers is missing, refuses, or does not end in time.
    """
    versions = _versions()
    if versions is None:
        raise UnknownModelError(f"model_type {quote(config.get('model_type'))} is not known without help: {INSTALL}")
    text = json.dumps([ANSWERS, question, versions, config], sort_keys=True, default=dict)
    path = cache_dir() / f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}.json"
    known = _remembered(path)
    if known is not None:
        return known
    answer = _answer_of(_run_child(question, config), config)
    with contextlib.suppress(OSError):  # a home that cannot be written to: the answer holds all the same
        write_atomically(path, json.dumps(answer, sort_keys=True), sync=False)
    return answer


def ask_own_code(folder: Path, config: Mapping[str, object]) -> Mapping[str, Any]:
    """The description of a model whose code lies in its folder, which the child runs; the answer is not remembered.

    The user asks for it by name (`--run-its-code`). The child has no network; it has the user's rights on files.
    """
    if not isinstance(config.get("auto_map"), Mapping):
        raise ConfigError(f"{folder} has no code of its own (auto_map in config.json): leave --run-its-code out")
    if not is_installed():
        raise UnknownModelError(f"the code of {folder} needs Transformers and torch: {INSTALL}")
    return _answer_of(_run_child("own code", {"folder": str(folder.resolve())}), config)


def cache_dir() -> Path:
    """Return where answers are kept: $TRIMTAB_CACHE, or `trimtab` in the user's cache folder. Safe to delete."""
    given = os.environ.get("TRIMTAB_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trimtab" / "asked"


def _versions() -> list[str] | None:
    own: str = sys.modules["trimtab"].__version__  # a clone on the path has no metadata
    try:
        return [own, metadata.version("torch"), metadata.version("transformers")]
    except metadata.PackageNotFoundError:
        return None


def _remembered(path: Path) -> Mapping[str, Any] | None:
    """Return what was answered before; None where nothing, or nothing readable, lies there."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_ANSWER_BYTES + 1)
        answer = json.loads(content) if len(content) <= MAX_ANSWER_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _run_child(question: Question, config: Mapping[str, object]) -> bytes:
    """Return what a child answers; its folder is empty, and what it imports comes only from the installation."""
    with tempfile.TemporaryDirectory(prefix="trimtab-asked-") as folder:
        environment = {
            **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"), "1"),
            "HF_HOME": folder,
            "HF_MODULES_CACHE": folder,
            "CUDA_VISIBLE_DEVICES": "",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        child = LimitedChild(memory_bytes=MAX_MEMORY_BYTES, apart=Path(folder), environment=environment)
        try:
            return child.ask(ANSWER, question, json.loads(json.dumps(config, default=dict)), MAX_CPU_S)
        except ChildEndedError:
            raise ConfigError(
                f"Transformers was asked to build this configuration, and did not end within {MAX_CPU_S} s of CPU time "
                f"and {MAX_MEMORY_BYTES // 2**30} GiB: correct its sizes, or describe a model that you built yourself "
                "(docs/models.md)"
            ) from None
        except (RuntimeError, ImportError, OSError):
            return b""
        finally:
            child.close()


def _answer_of(content: bytes, config: Mapping[str, object]) -> Mapping[str, Any]:
    try:
        answer = json.loads(content[: MAX_ANSWER_BYTES + 1])
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise ConfigError(
            f"Transformers gave no answer on model_type {quote(config.get('model_type'))}: try `import torch, "
            "transformers`"
        )
    return answer
