"""Data and models to try things on, and checks that a set-up is exact."""

# Small data and models
from trimtab.demo import draw_dataset as draw_dataset
from trimtab.demo import write_model as write_demo_model

# Checks
from trimtab.runtime.data.packing import verify_packing as verify_packing
from trimtab.runtime.pipeline.build import verify_pipeline as verify_pipeline
from trimtab.runtime.vision.apply import verify_vision_dp as verify_vision_dp
