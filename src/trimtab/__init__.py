"""Balanced training and inference of vision-language models: measure, decide, apply.

The names stand in the stub next to this file; each is loaded when it is first used. More are in `trimtab.models`,
`trimtab.torch`, `trimtab.vision`, `trimtab.placement`, `trimtab.testing` and `trimtab.errors`.
"""

from trimtab.public import lazy_names

__version__ = "0.1.0"
__getattr__, __dir__ = lazy_names(__name__, __file__)
