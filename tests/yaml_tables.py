"""Tables of plain values that several tests read, in `data/`."""

from pathlib import Path
from typing import Any

import yaml


def read_table(file: str, name: str) -> Any:
    """Read the table `name` of data/`file`.yaml."""
    return yaml.safe_load((Path(__file__).parent / "data" / f"{file}.yaml").read_text(encoding="utf-8"))[name]
