"""What must hold between the figures of one layer, so that the cost formulas can be asked about it."""

from __future__ import annotations

from trimtab.specs import NUM_WORK_TERMS, AttentionSpec, LayerSpec, MlpSpec


def attention_weights(a: AttentionSpec, hidden_size: int) -> int:
    """Weights of q, k, v and the output over rows of one width."""
    rows = a.num_heads * a.head_dim + a.num_kv_heads * (a.head_dim + a.value_head_dim)
    return hidden_size * (rows + a.num_heads * a.value_head_dim)


def mlp_weights(m: MlpSpec, hidden_size: int) -> int:
    """Weights that each row meets: of experts those that run, and their router."""
    matrices = 3 if m.gated else 2
    if m.num_experts is None:
        return matrices * hidden_size * m.intermediate_size
    active = (m.experts_per_token or 1) * m.intermediate_size + m.shared_intermediate_size
    return hidden_size * (matrices * active + m.num_experts)


def find_layer_problems(layer: LayerSpec) -> list[str]:
    """Sentences on one layer that came from outside; none for what families and asked models make."""
    problems = []
    measured, m = layer.measured, layer.mlp
    if not layer.name or len(layer.name) > 400:
        problems.append("layers: a name has 1 to 400 characters")
    if measured is not None and {len(measured.forward_flops), len(measured.kept_bytes)} not in ({0}, {NUM_WORK_TERMS}):
        problems.append(f"{layer.name}: measured work has {NUM_WORK_TERMS} coefficients, or none")
    if m is not None and (m.experts_per_token or 1) > (m.num_experts or 1):
        problems.append(f"{layer.name}: experts_per_token is more than num_experts")
    if layer.kind in ("head", "projector") and not layer.num_matmul_params and measured is None:
        problems.append(f"{layer.name}: a {layer.kind} multiplies its rows, so num_matmul_params is above 0")
    explained = 0 if layer.attention is None else attention_weights(layer.attention, layer.hidden_size)
    explained += 0 if m is None else mlp_weights(m, layer.hidden_size)
    if layer.kind == "block" and measured is None and explained > 1.001 * layer.num_matmul_params:
        problems.append(
            f"{layer.name}: its attention and mlp need {explained} weights, and num_matmul_params is "
            f"{layer.num_matmul_params}"
        )
    return problems
