"""Tests of runtime/placing/device_units.py: tensors that meet outside of units go to one device. Needs torch."""

import pytest
import torch
from simulated_devices import counted, simulated

from refusals import refused
from trimtab.runtime.placing.device_units import Meeting


@pytest.fixture(autouse=True)
def devices():
    with simulated():
        yield


def test_operands_go_where_the_largest_of_them_lies():
    large, small = torch.ones(6, 4, device="sim:0"), torch.ones(4, device="sim:1")
    with refused(RuntimeError):
        small + large
    with counted() as traffic:
        total = Meeting().open_in(lambda: small + large)()
    assert (str(total.device), traffic.links) == ("sim:0", {("sim:1", "sim:0"): 16})
    assert Meeting().open_in(torch.cat)([large, large.to("cpu")]).shape == (12, 4)


def test_what_is_written_into_stays_where_it_is():
    def write():
        text = torch.zeros(2, 3, device="sim:1")
        text[torch.tensor([True, False], device="sim:0")] = torch.ones(1, 3, device="sim:0")
        text.add_(torch.full((2, 3), 200.0, dtype=torch.float64, device="sim:2"))  # twice as large
        return text

    found = Meeting().open_in(write)()
    assert (str(found.device), found.tolist()) == ("sim:1", [[201.0] * 3, [200.0] * 3])


def test_it_pauses_in_units_and_is_gone_after_an_error():
    def fails():
        torch.ones(2, device="sim:0") + torch.ones(2, device="sim:1")

    meeting = Meeting()
    meeting.open_in(fails)()
    with refused(RuntimeError):
        meeting.open_in(meeting.paused_in(fails))()
    with refused(RuntimeError):
        fails()
