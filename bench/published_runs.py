"""Published runs predicted, beside their published figures. Run: python bench/published_runs.py

1. Kernels: products on A100 and H100, to which the curve of efficiency is fitted (published_curves.py).
2. 86 training runs of text models on 8 to 64 A100 and H100, two sizes of eight fitted (published_dense.py).
3. Training logs of Qwen2-VL-7B with uneven pipeline stages on H20 (published_h20.py).
4. OmniBal's Tables 4, 7, 9, 15 and 16 (published_omnibal.py).
The published figures are in bench/data.
"""

from __future__ import annotations

from published_curves import print_curves
from published_dense import print_dense
from published_h20 import print_h20
from published_omnibal import print_omnibal

if __name__ == "__main__":
    print_curves()
    print_dense()
    print_h20()
    print_omnibal()
