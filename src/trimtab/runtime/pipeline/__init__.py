"""Stages of a vision-language model on torch.distributed.pipelining, cut as a plan says: see `build_pipeline`."""

from trimtab.runtime.layout import PipelineLayout, read_layout
from trimtab.runtime.pipeline.build import PipelineCheck, build_pipeline, layers_of, verify_pipeline
from trimtab.runtime.pipeline.pipeline import Pipeline, StepResult

__all__ = [
    "Pipeline",
    "PipelineCheck",
    "PipelineLayout",
    "StepResult",
    "build_pipeline",
    "layers_of",
    "read_layout",
    "verify_pipeline",
]
