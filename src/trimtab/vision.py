"""Images shared among ranks: vision data parallel, and the work of a batch for verl and ROLL.

The names stand in the stub next to this file; each is loaded when it is first used.
"""

from trimtab.public import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
