"""A model placed on GPUs for inference: machines, workloads, placements, and models loaded by them.

The names stand in the stub next to this file; each is loaded when it is first used.
"""

from trimtab.public import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
