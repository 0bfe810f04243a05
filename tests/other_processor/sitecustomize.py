"""Another processor, simulated: matrix products that round by their number of rows, and take workspace from torch.

Why: kernels differ between machines. On an AVX-512 machine with AMX, products of 3 and of 4 rows round differently and
bf16 products allocate packed copies; on the machine at hand they may do neither, and a test that counts on that passes.
Use it as `PYTHONPATH=tests/other_processor python -m pytest ...`: Python imports this file by itself, in every process
that a test starts. The same product repeated gives the same bits, as on every real machine.
"""

import sys
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any


def _install(torch: Any) -> None:
    aten = torch.ops.aten
    rounded = (torch.bfloat16, torch.float16)

    def first_part(rows: int, width: int) -> int:
        """Where the sum over `width` is cut in two: a place that depends on the number of rows."""
        return 1 + rows * 7919 % (width - 1) if width > 1 else width

    def in_parts(plain: Any, adding: Any, bias: Any, a: Any, b: Any, beta: Any, alpha: Any) -> Any:
        """beta bias + alpha (a b), the product summed in two parts, in float32 where the dtype is shorter."""
        out = a.new_empty((*a.shape[:-1], b.shape[-1]))
        if not a.is_floating_point():
            return plain(a, b, out=out) if bias is None else adding(bias, a, b, beta=beta, alpha=alpha, out=out)
        wide = [None if x is None else x.float() for x in (bias, a, b)] if a.dtype in rounded else [bias, a, b]
        bias, a, b = wide
        total = out.float() if out.dtype in rounded else out
        cut = first_part(a.shape[-2], a.shape[-1])
        left, right = (a[..., :cut], b[..., :cut, :]), (a[..., cut:], b[..., cut:, :])
        if bias is None:
            plain(*left, out=total)
        else:
            adding(bias, *left, beta=beta, alpha=alpha, out=total)
        if right[0].shape[-1]:
            adding(total, *right, alpha=alpha, out=total)
        return total if total is out else out.copy_(total)

    def product(plain: Any, adding: Any) -> Any:
        return lambda a, b: in_parts(plain, adding, None, a, b, 1, 1)

    def sum_and_product(plain: Any, adding: Any) -> Any:
        return lambda bias, a, b, *, beta=1, alpha=1: in_parts(plain, adding, bias, a, b, beta, alpha)

    kernels = {
        "mm": product(aten.mm.out, aten.addmm.out),
        "bmm": product(aten.bmm.out, aten.baddbmm.out),
        "addmm": sum_and_product(aten.mm.out, aten.addmm.out),
        "baddbmm": sum_and_product(aten.bmm.out, aten.baddbmm.out),
    }
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on replacing a kernel
        for name, kernel in kernels.items():
            library.impl(name, kernel, "CPU")
    torch.other_processor = library  # kernels go back when the library is collected


class _AfterTorch(MetaPathFinder, Loader):
    """Replaces the kernels as soon as torch has been imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec("torch")
        if spec is None or spec.loader is None:
            return spec
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self.loader.exec_module(module)
        _install(module)


sys.meta_path.insert(0, _AfterTorch())
