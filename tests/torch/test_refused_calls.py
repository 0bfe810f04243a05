"""`refusals.yaml` of this folder: calls that end in one sentence with the names of the case. Needs torch."""

from pathlib import Path
from typing import Any

import pytest

from refusals import assert_refused, read_cases, show


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", read_cases(Path(__file__).with_name("refusals.yaml")), ids=show)
def test_a_call_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    assert_refused(case, tmp_path, monkeypatch)
