"""A model placed on GPUs for inference: machines, workloads, placements, and models loaded by them."""

# Placing and loading
from trimtab.placement.machine import parse_machine as parse_machine
from trimtab.placement.machine import Workload as Workload
from trimtab.placement.placed import Placement as Placement
from trimtab.plan.file.placement import load_placement as load_placement
from trimtab.runtime.placing.load import load_placed as load_placed
from trimtab.runtime.placing.load import move_inputs as move_inputs
from trimtab.runtime.placing.load import split_model as split_model
