"""Tensors that meet outside of units go to one device, and weights that are away are brought. Needs torch."""

from __future__ import annotations

import pytest
import torch
from simulated_devices import counted, simulated

from trimtab.runtime.placing.meeting import Absent, Copies, Meeting


@pytest.fixture(autouse=True)
def devices():
    with simulated():
        yield


@pytest.fixture
def meeting():
    return Meeting(Copies())


def test_operands_go_where_the_largest_of_them_lies(meeting):
    large, small = torch.ones(6, 4, device="sim:0"), torch.ones(4, device="sim:1")
    with pytest.raises(RuntimeError, match="same device"):
        torch.stack([large, large.to("sim:1")])
    with counted() as traffic:
        total = meeting.around(lambda: small + large)()
    assert (str(total.device), traffic.links) == ("sim:0", {("sim:1", "sim:0"): 16})
    assert meeting.around(torch.cat)([large, large.to("cpu")]).shape == (12, 4)


def test_what_is_written_into_stays_where_it_is(meeting):
    def write():
        text = torch.zeros(2, 3, device="sim:1")
        text[torch.tensor([True, False], device="sim:0")] = torch.ones(1, 3, device="sim:0")
        text.add_(torch.ones(200, 2, 3, device="sim:2").sum(0))
        return text

    found = meeting.around(write)()
    assert str(found.device) == "sim:1"
    assert found.tolist() == [[201.0] * 3, [200.0] * 3]


def test_a_weight_that_is_away_says_where_it_belongs_and_is_brought(meeting):
    weight = torch.randn(3, 4)
    absent = Absent.of(weight, weight, torch.device("sim:1"))
    assert (str(absent.device), absent.shape) == ("sim:1", weight.shape)
    rows = torch.randn(2, 4)
    found = meeting.around(torch.nn.functional.linear)(rows.to("sim:1"), absent)
    assert torch.equal(found.cpu(), torch.nn.functional.linear(rows, weight))


def test_it_pauses_and_is_gone_after_an_error(meeting):
    def fails():
        assert meeting.pause()
        assert not meeting.pause()
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2, device="sim:0") + torch.ones(2, device="sim:1")
        meeting.resume()
        raise ValueError("the model's own")

    with pytest.raises(ValueError, match="the model's own"):
        meeting.around(fails)()
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device="sim:0") + torch.ones(2, device="sim:1")


def test_states_that_layers_share_move_themselves_and_keep_what_is_written(meeting):
    from transformers.cache_utils import KVSharingDict

    shared = KVSharingDict({"full": (torch.ones(2, device="sim:0"),)})
    copies = Copies()
    moved = copies.move({"states": shared}, torch.device("sim:1"))["states"]
    assert moved is shared
    assert str(shared["full"][0].device) == "sim:1"
