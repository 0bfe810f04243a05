"""The two decorators of our compiled loops.

A cold command compiles each function once per argument types; most of that is not the loops but what numba makes
around them. So: pass one dtype per argument (`np.int64(4)`, not 4: a literal is a type of its own), write plain loops
instead of array expressions and slices, keep columns in one array of records instead of many arrays, and mark what
only compiled code calls as `inner`, or `inlined` where there is one such call.
"""

from __future__ import annotations

from trimtab.errors import TrimtabError

try:
    from numba import njit
except ValueError as error:  # of its environment variables, such as NUMBA_NUM_THREADS=0
    raise TrimtabError(f"numba does not start ({error}): correct its environment variables, NUMBA_...") from None

compiled = njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True)
"""For functions that Python calls."""

inner = njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)
"""For functions that only compiled functions call: without what would take their arguments from Python objects."""

inlined = njit(cache=True, nogil=True, error_model="numpy", inline="always")
"""For what is written into its callers before they are compiled: short functions, and named parts of a long one."""
