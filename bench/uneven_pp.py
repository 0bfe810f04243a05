"""Uneven pipeline stages by the published FLOPs rule, digit for digit, beside the optimum of the same model.

Run: python bench/uneven_pp.py
"""

from __future__ import annotations

from trimtab.partition.flops_rule import UnevenModel, best_split, flops_split, stage_memory


def model(vision_hidden: int) -> UnevenModel:
    return UnevenModel(
        vision_tokens=16 * 16,  # 224 x 224 in patches of 14 x 14
        patch_values=3 * 14 * 14,
        vision_layers=28,
        vision_hidden=vision_hidden,
        vision_ffn=4 * vision_hidden,
        llm_layers=28,
        llm_hidden=3584,
        llm_ffn=18944,
        decoder_tokens=1024,
    )


def print_row(*cells: object) -> None:
    print(" ".join(f"{cell:>11}" for cell in cells))


def main() -> None:
    print("language layers of 2 stages, vision tower on the first; imbalance = slowest / mean stage, in FLOPs")
    print_row("ViT width", "ViT TFLOP", "layer TFLOP", "rule", "imbalance", "best", "imbalance")
    for hidden in (1280, 4096, 8000):
        case = model(hidden)
        rule, best = flops_split(case, pp=2), best_split(case, pp=2)
        print_row(
            hidden,
            f"{case.vision_flops / 1e12:.4f}",
            f"{case.llm_layer_flops / 1e12:.5f}",
            "/".join(map(str, rule.counts)),
            f"{1 + rule.imbalance:.4f}",
            "/".join(map(str, best.counts)),
            f"{1 + best.imbalance:.4f}",
        )
    print("\nfirst stage's memory by the rule, ViT width 4096, 10 language layers, GB = 10**9 bytes")
    print_row("tp", "fp8", "vision", "language", "stage")
    for tp, fp8 in ((1, False), (2, False), (2, True)):
        stage = stage_memory(model(4096), (10, 18), tp=tp, fp8=fp8)[0]
        parts = (stage.vision_bytes, stage.llm_bytes, stage.vision_bytes + stage.llm_bytes)
        print_row(tp, fp8, *(f"{part / 1e9:.3f}" for part in parts))


if __name__ == "__main__":
    main()
