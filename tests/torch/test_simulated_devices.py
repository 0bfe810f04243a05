"""The simulated devices behave as GPUs where it matters: they raise on mixed devices, and count copies. Needs torch."""

import pytest
import torch
from simulated_devices import counted, simulated

from refusals import refused


@pytest.fixture(autouse=True)
def devices():
    with simulated():
        yield


@pytest.mark.parametrize(
    "operation",
    [
        lambda a, b: a + b,
        lambda a, b: a @ b.T,
        lambda a, b: torch.cat([a, b]),
        lambda a, b: torch.nn.functional.embedding(b.long(), a),
        lambda a, b: a.masked_fill_(b > 0, 0.0),
        lambda a, b: torch.nn.functional.layer_norm(a, (4,), b[0]),
        lambda a, b: torch.nn.functional.scaled_dot_product_attention(a, b, b),
        lambda a, b: a.index_put_((torch.tensor([0]),), b[0]),
    ],
)
@pytest.mark.parametrize("other", ["cpu", "sim:1"])
def test_operands_of_two_devices_are_refused(operation, other):
    first, second = torch.ones(3, 4, device="sim:0"), torch.ones(3, 4).to(other)
    operation(first, second.to("sim:0"))
    with refused(RuntimeError):
        operation(first, second)


def test_host_scalars_and_host_indices_go_with_any_device():
    table = torch.arange(6.0, device="sim:0").view(2, 3)
    assert (table * torch.tensor(2.0)).sum().item() == 30
    assert table[:, [0, 2]].tolist() == [[0, 2], [3, 5]]
    assert table[torch.tensor([1])].device == table.device
    with refused(RuntimeError):
        table[torch.tensor([1], device="sim:1")]


def test_copies_are_counted_by_link():
    with counted() as traffic:
        there = torch.zeros(10).to(0)
        there.to("sim:3")
        there.to(0)  # already there
        torch.zeros(10, device="sim:3").copy_(there)
        there.sum().cpu()
    assert traffic.links == {("cpu", "sim:0"): 40, ("sim:0", "sim:3"): 80, ("sim:0", "cpu"): 4}
    assert (traffic.total, traffic.host_to_device) == (124, 40)
