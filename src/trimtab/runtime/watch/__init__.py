"""Whom the ranks of a group wait for, where and since when: said while they wait.

A collective tells nobody who is missing. So a thread of every rank writes once a second into the store of torch's
processes that the rank is there, and at which place of the program (`places`). A rank that is stopped or has ended no
longer does; one that is late is at another place. The first and the last rank read what all have written (`others`),
and a second thread of theirs, which never waits for the store, names whom an old wait is for (`watch`).
"""

from trimtab.runtime.watch.others import Late, listed
from trimtab.runtime.watch.places import Place
from trimtab.runtime.watch.watch import PATIENCE_S, Watch, open_watch, say

__all__ = ["PATIENCE_S", "Late", "Place", "Watch", "listed", "open_watch", "say"]
