"""`bench/training_gain.py` on a tiny model: its schemes, and that they do the same work. Needs torch, Transformers.

No time or gain is asserted.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def gain(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import training_gain

    yield training_gain
    for name in ("training_gain", "lengths"):
        sys.modules.pop(name, None)


def test_the_schemes_run_the_same_samples_to_the_same_loss(gain, tmp_path, capsys):
    words = ["--size", "tiny", "--samples", "24", "--repeats", "1", "--dp", "2", "--data", str(tmp_path)]
    rows = gain.compare(gain.parse(words))
    assert [row.scheme for row in rows] == [name for name, _ in gain.SCHEMES]
    assert len({row.real_tokens for row in rows}) == 1
    losses = [row.loss for row in rows]
    assert max(losses) == pytest.approx(min(losses), rel=1e-4)
    for row in rows:
        padded = row.scheme.startswith("padded")
        assert (row.computed_tokens > row.real_tokens) == padded
        assert row.memory_bytes > 0
        assert row.seconds / 2 <= row.dp_seconds <= row.seconds  # two ranks: between all at once and one by one
    gain.show(rows, 2, "cpu")
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"the mixture is not in {tmp_path}: sizes are generated"
    table = [line for line in printed if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert len({line.count("|") for line in table}) == 1


def test_schemes_of_other_losses_are_not_compared(gain, tmp_path, monkeypatch):
    """A collator that loses a label must stop the bench."""

    def forgetful(samples, whole=gain.pad_samples):
        batch = whole(samples)
        batch["labels"][0, 1:] = -100
        return batch

    monkeypatch.setattr(gain, "pad_samples", forgetful)
    with pytest.raises(SystemExit, match="the schemes' losses differ"):
        gain.compare(gain.parse(["--size", "tiny", "--samples", "12", "--repeats", "1", "--data", str(tmp_path)]))
