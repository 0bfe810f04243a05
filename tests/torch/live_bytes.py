"""Bytes that are live while a model runs on the CPU, counted storage by storage. Needs torch."""

import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Live bytes of storages made since it was entered, and the most of them in each named module.

    What a kernel takes inside itself is not seen; views count once; weights, made before, not at all.
    """

    def __init__(self, model: torch.nn.Module | None = None, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peaks: dict[str, int] = defaultdict(int)
        self.peak = 0
        self.where: list[str] = []
        self._seen: set[int] = set()
        self._handles = []
        for name in names:
            try:
                module = model.get_submodule(name)
            except AttributeError:
                continue
            self._handles.append(module.register_forward_pre_hook(lambda *_, name=name: self.where.append(name)))
            self._handles.append(module.register_forward_hook(lambda *_: self.where.pop() and None))

    def hold(self, *tensors: torch.Tensor) -> None:
        """Count tensors that were made before."""
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in known:
                self._add(x)
        return out

    def _add(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.live += size
        weakref.finalize(storage, self._drop, key, size)
        self.peak = max(self.peak, self.live)
        where = self.where[-1] if self.where else ""
        self.peaks[where] = max(self.peaks[where], self.live)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size

    def __exit__(self, *error):
        for handle in self._handles:
            handle.remove()
        return super().__exit__(*error)
