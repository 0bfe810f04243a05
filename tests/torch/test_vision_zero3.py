"""Shared images under DeepSpeed ZeRO-3, on a CPU. Needs torch, Transformers 5, and deepspeed without its kernels.

DS_BUILD_OPS=0 pip install --no-build-isolation 'deepspeed==0.19.8'
"""

from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]

pytest.importorskip("transformers", minversion="5", reason="holds the models")


def test_two_ranks_under_zero3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed: DS_BUILD_OPS=0 pip install deepspeed==0.19.8")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    import vision_zero3
    from gloo_ranks import on_ranks

    on_ranks(vision_zero3.run_zero3, tmp_path)
