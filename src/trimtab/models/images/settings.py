"""Reads one setting from the several files and spellings that hold it, and collects every problem on the way.

A *place* is `(source, path)`: source is "file" (preprocessor_config.json), "preprocess" (that mapping inside
config.json, as model zoos carry it), "config" or "vision" (its vision_config); path is a dotted key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from trimtab.errors import ConfigError, join_problems
from trimtab.models.images.size import MAX_PIXELS, MAX_TILES
from trimtab.models.quote import quote

Place = tuple[str, str]
T = TypeVar("T")

# far beyond every published model, and small enough that sums of squared patches fit 63 bits
MAX_SIZE = MAX_PIXELS  # also of sides and tokens
MAX_PATCH = 4096  # pixels a side of a patch
MAX_MERGE = 64  # patches a side that become one token
MAX_GRID = 4096  # patches a side of a tile
MAX_PINPOINTS = 1024

LABELS = {
    "file": "preprocessor_config.json",
    "preprocess": "preprocess in config.json",
    "config": "config.json",
    "vision": "vision_config in config.json",
}


class LackingFileError(ConfigError):
    """Nothing is wrong but that preprocessor_config.json was not given."""


class Settings:
    """Settings of one model, with the problems met so far: `check` raises them together."""

    def __init__(self, config: Mapping[str, object], preprocessor: Mapping[str, object] | None) -> None:
        self.model_type = str(config.get("model_type"))
        self._has_file = preprocessor is not None
        preprocessor = preprocessor or {}
        nested = preprocessor.get("image_processor")  # Transformers 5 may nest it in processor_config.json
        if isinstance(nested, Mapping):
            preprocessor = {**preprocessor, **nested}
        self._sources: dict[str, Mapping[str, object]] = {
            "file": preprocessor,
            "preprocess": _mapping(config.get("preprocess")),
            "config": config,
            "vision": _mapping(config.get("vision_config")),
        }
        self._lacking: list[str] = []  # what the file that was not given would say
        self._problems: list[str] = []

    def check(self) -> None:
        if self._problems:
            raise ConfigError(join_problems(self._lacking + self._problems))
        if self._lacking:
            raise LackingFileError(join_problems(self._lacking))

    def problem(self, asked: str, true: str, attempt: str) -> None:
        self._problems.append(self._sentence(asked, true, attempt))

    def _sentence(self, asked: str, true: str, attempt: str) -> str:
        return f"the image rule of {self.model_type} {asked}: {true}: {attempt}"

    def value(self, source: str, path: str) -> object | None:
        """The raw value, None where a key on the path is absent or null."""
        value: object = self._sources[source]
        for key in path.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value

    def first_int(self, *places: Place, maximum: int = MAX_SIZE) -> int:
        """The first value given; later places are overridden, as the processor does."""

        def parse(value: object) -> int | None:
            number = _positive_int(value)
            return number if number is None or number <= maximum else None

        return self._first(places, parse, f"a positive whole number up to {maximum}") or 1

    def first_tiles(self, *places: Place) -> int:
        return self.first_int(*places, maximum=MAX_TILES)

    def grid(self, tile: int, patch: int) -> int:
        """Patches a side of a square tile; what could not be read before is not judged."""
        side = tile // patch
        if not 1 <= side <= MAX_GRID and not self._problems and not self._lacking:
            self.problem(
                f"cuts a tile of {tile} pixels into patches of {patch}",
                f"that makes {side} a side, and 1 to {MAX_GRID} can be counted",
                "correct image_size or patch_size",
            )
        return max(side, 1)

    def first_number(self, *places: Place) -> float:
        return self._first(places, _positive_number, f"a positive number up to {MAX_SIZE}") or 1.0

    def first_bool(self, *places: Place) -> bool:
        return self._first(places, _boolean, "true or false") or False

    def first_text(self, *places: Place) -> str:
        return self._first(places, _text, "a text") or ""

    def agreed_int(self, *places: Place, maximum: int = MAX_SIZE) -> int:
        """The value that all places which give it agree on."""
        given = [place for place in places if self.value(*place) is not None]
        result = self.first_int(*places, maximum=maximum)
        self.expect_int(result, f"`{given[0][1]}` of {LABELS[given[0][0]]}" if given else "", *given[1:])
        return result

    def expect_int(self, expected: int, whence: str, *places: Place) -> None:
        """Every place that gives a value must give this one."""
        for source, path in places:
            value = self.value(source, path)
            if value is not None and _positive_int(value) != expected:
                self.problem(
                    f"reads `{path}` = {quote(value)} in {LABELS[source]}",
                    f"{whence} makes it {expected}",
                    "take config.json and preprocessor_config.json of one checkpoint, or correct one of the two",
                )

    def pinpoints(self) -> tuple[tuple[int, int], ...]:
        """image_grid_pinpoints as (height, width) pairs, equal wherever they are given."""
        places = [(source, "image_grid_pinpoints") for source in ("file", "preprocess", "config")]
        given = [place for place in places if self.value(*place) is not None]
        kind = f"a list of at most {MAX_PINPOINTS} [height, width] pairs of positive whole numbers up to {MAX_SIZE}"
        result = self._first(tuple(places), _pairs, kind) or ()
        for source, path in given[1:]:
            if _pairs(self.value(source, path)) != result:
                self.problem(
                    f"reads `{path}` in {LABELS[source]}",
                    f"it differs from that of {LABELS[given[0][0]]}",
                    "take both files of one checkpoint: image features and placeholders would not match",
                )
        return result

    # -- shared by families ------------------------------------------------------------------------------------------

    def require_resize(self) -> None:
        if self.value("file", "do_resize") is False:
            self.problem(
                "reads `do_resize` = false in preprocessor_config.json",
                "images would reach the tower in sizes that no rule describes",
                "set it to true",
            )

    def patch_and_merge(self) -> tuple[int, int]:
        patch = self.agreed_int(("file", "patch_size"), ("vision", "patch_size"), maximum=MAX_PATCH)
        merge = self.agreed_int(("file", "merge_size"), ("vision", "spatial_merge_size"), maximum=MAX_MERGE)
        self.expect_int(patch * merge, "patch_size x merge_size", ("preprocess", "factor"))
        return patch, merge

    def pixel_limits(self) -> tuple[int, int]:
        """min_pixels and max_pixels; at the file's top level they override `size`, as in the processor."""
        low = self.first_int(("file", "min_pixels"), ("file", "size.shortest_edge"), ("preprocess", "min_pixels"))
        high = self.first_int(("file", "max_pixels"), ("file", "size.longest_edge"), ("preprocess", "max_pixels"))
        return low, high

    def _first(self, places: tuple[Place, ...], parse: Callable[[object], T | None], kind: str) -> T | None:
        for source, path in places:
            value = self.value(source, path)
            if value is None:
                continue
            parsed = parse(value)
            if parsed is None:
                self.problem(
                    f"reads `{path}` in {LABELS[source]}", f"{quote(value)} is not {kind}", "correct it in that file"
                )
            return parsed
        self._missing(places)
        return None

    def _missing(self, places: tuple[Place, ...]) -> None:
        asks_file = any(source == "file" for source, _ in places) and not self._has_file
        shown = {source: path for source, path in reversed(places) if source != "preprocess"}  # best spelling of each
        names = " or ".join(f"`{path}` in {LABELS[source]}" for source, path in reversed(shown.items()))
        asked, true = f"needs {names}", "no file given says it, and no default is assumed"
        if asks_file:
            attempt = "pass --preprocessor preprocessor_config.json, or put it beside config.json"
            self._lacking.append(self._sentence(asked, true, attempt))
        else:
            self.problem(asked, true, "add it to that file")


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _positive_int(value: object) -> int | None:
    """A side or a count; squares may be spelled [448, 448], {"height": 448, "width": 448} or {"shortest_edge": 448}."""
    if isinstance(value, Mapping):
        value = [value[key] for key in ("height", "width", "shortest_edge") if value.get(key) is not None]
    if isinstance(value, list | tuple) and value and all(side == value[0] for side in value):
        value = value[0]
    return value if type(value) is int and value > 0 else None


def _positive_number(value: object) -> float | None:
    return value if type(value) in (int, float) and isinstance(value, int | float) and 0 < value <= MAX_SIZE else None


def _boolean(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _pairs(value: object) -> tuple[tuple[int, int], ...] | None:
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MAX_PINPOINTS:
        return None
    pairs = []
    for pair in value:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            return None
        height, width = pair
        if type(height) is not int or type(width) is not int or min(height, width) < 1 or max(height, width) > MAX_SIZE:
            return None
        pairs.append((height, width))
    return tuple(pairs)
