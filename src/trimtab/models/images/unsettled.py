"""Stands in the place of an image rule that is not known."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.errors import ConfigError
from trimtab.specs import ImageCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsettledRule:
    """The rule of a model whose files do not settle it, until an image has to be counted."""

    reason: str  # the message of the ConfigError that is raised then
    name: str = "unsettled"

    def count(self, width: int, height: int) -> ImageCounts:  # noqa: ARG002 - the protocol's arguments
        raise ConfigError(self.reason)
