"""Stages of a vision-language model on torch.distributed.pipelining, cut as a plan says: see `build_pipeline`."""

from trimtab.runtime.pipeline.build import build_pipeline
from trimtab.runtime.pipeline.layout import PipelineLayout, read_layout
from trimtab.runtime.pipeline.pipeline import Pipeline, StepResult

__all__ = ["Pipeline", "PipelineLayout", "StepResult", "build_pipeline", "read_layout"]
