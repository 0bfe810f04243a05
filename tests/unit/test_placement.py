"""Placements: the exact optimum over all maps, complete and sound maps, spill, latency; what to say when none fits."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placement_cases import small_model

from refusals import refused
from trimtab import describe, place
from trimtab.errors import PartitionError
from trimtab.placement.bytes import arrangements, device_bytes, inference_table, modules_of, parts_of, run_bytes
from trimtab.placement.machine import Gpu, Machine, Workload, machine_of
from trimtab.units import GIB, MIB

WORK = Workload(batch=2, seq_len=30, max_new_tokens=5, images=((112, 112),))


def machine(free: list[int], **more) -> Machine:
    """GPUs of a few hundred KiB: no context, for models this small."""
    gpus = tuple(Gpu(index=i, free_bytes=x) for i, x in enumerate(free))
    return Machine(gpus=gpus, context_bytes=1000, **more)


def brute_force(model, target: Machine, workload: Workload) -> float:
    """Least fullest share over all arrangements, all cuts and all orders of devices."""
    table, best = inference_table(model, workload), np.inf
    for option in arrangements(parts_of(model)):
        n = len(option.units)
        for num in range(1, min(n, len(target.gpus)) + 1):
            for cuts in itertools.combinations(range(1, n), num - 1):
                ends = (0, *cuts, n)
                held = [
                    device_bytes(table, [i for u in option.units[s:e] for i in u.layers], (), target.context_bytes)
                    for s, e in itertools.pairwise(ends)
                ]
                for gpus in itertools.permutations(target.gpus, num):
                    pairs = zip(held, gpus, strict=True)
                    best = min(best, max(x.total_bytes / gpu.free_bytes for x, gpu in pairs))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_fullest_device_is_as_empty_as_brute_force_finds(seed):
    rng = np.random.default_rng(seed)
    model = small_model(
        tied=bool(rng.integers(2)),
        num_layers=int(rng.integers(1, 4)),
        depth=int(rng.integers(1, 3)),
        vocab_size=int(rng.choice([50, 203, 5000])),
    )
    workload = Workload(
        batch=int(rng.integers(1, 4)),
        seq_len=int(rng.integers(5, 80)),
        max_new_tokens=4,
        images=((112, 112),) * int(rng.integers(0, 3)),
    )
    target = machine(rng.integers(3 * MIB, 9 * MIB, int(rng.integers(1, 4))).tolist())
    best = brute_force(model, target, workload)
    if best > 1:
        with pytest.raises(PartitionError):
            place(model, target, workload)
        return
    found = place(model, target, workload)
    assert found.fullest == pytest.approx(best, rel=1e-12)
    assert found.fits


@settings(max_examples=40, deadline=None)
@given(
    tied=st.booleans(),
    layers=st.integers(1, 9),
    depth=st.integers(1, 5),
    free=st.lists(st.integers(1 * MIB, 12 * MIB), min_size=1, max_size=5),
    objective=st.sampled_from(["memory", "latency"]),
)
def test_every_module_lies_on_one_device_and_the_bytes_add_up(tied, layers, depth, free, objective):
    model = small_model(tied=tied, num_layers=layers, depth=depth)
    target = machine(free, cpu_bytes=GIB)
    try:
        found = place(model, target, WORK, objective=objective)
    except PartitionError:
        return  # a cache and activations that no machine of this size holds
    expected = [name for i in range(len(model.layers)) for name in modules_of(model, i)]
    assert list(found.device_map) == expected
    assert found.fits
    table = inference_table(model, WORK)
    assert sum(use.weight_bytes for use in found.uses) == table.weights.sum()
    assert sorted(name for use in found.uses for name in use.modules) == sorted(expected)
    if tied:
        owner, borrower = model.tied[0]
        assert found.device_map[owner] == found.device_map[borrower]


def test_unlike_devices_are_taken_in_the_order_that_suits_them():
    """A first stage that fits the second device alone: the maps in order of the machine all fail."""
    model = small_model(depth=1, num_layers=6, vocab_size=5000)
    roomy = machine([40 * MIB])
    total = place(model, roomy, WORK).uses[0].total_bytes
    found = place(model, machine([total // 3, total]), WORK)
    assert found.fullest < 1
    assert {use.device for use in found.uses if use.modules} == {0, 1}


def test_a_device_without_free_memory_is_left_empty():
    found = place(small_model(), machine([0, 8 * MIB]), WORK)
    assert found.uses[0].modules == ()
    assert found.uses[0].fraction == 0


def test_the_vision_tower_may_lie_behind_the_head():
    workload = Workload(batch=4, images=((1024, 1024),) * 2)
    found = place(describe("Qwen2.5-VL-7B"), machine_of([x * GIB for x in (24, 16, 16, 10)]), workload)
    assert found.arrangement == "vision last, head with embedding"
    where = found.device_map
    assert where["model.language_model.embed_tokens"] == where["lm_head"] != where["model.visual.merger"]
    assert where["model.visual.merger"] == where["model.language_model.layers.27"]


# -- latency --------------------------------------------------------------------------------------------------------


def test_latency_takes_the_fewest_devices():
    model = describe("Qwen2.5-VL-7B")
    workload = Workload(images=((1024, 1024),))
    for free, num in ((40, 1), (14, 2), (7, 3)):
        found = place(model, machine_of([free * GIB] * 4), workload, objective="latency")
        assert sum(bool(use.modules) for use in found.uses) == num
        assert found.fits


def test_latency_gives_the_faster_of_two_devices_as_much_as_it_holds():
    slow = Gpu(index=0, free_bytes=12 * GIB, memory_bytes_per_s=1e12)
    fast = Gpu(index=1, free_bytes=12 * GIB, memory_bytes_per_s=3e12)
    found = place(describe("Qwen2.5-VL-7B"), Machine(gpus=(slow, fast)), Workload(), objective="latency")
    shares = {use.device: use.fraction for use in found.uses}
    assert shares[1] > 0.95
    assert shares[0] < shares[1]


# -- spill ----------------------------------------------------------------------------------------------------------


def test_the_embedding_spills_first_and_runs_in_host_memory():
    model = small_model(vocab_size=20000, num_layers=4)
    table = inference_table(model, WORK)
    total = place(model, machine([80 * MIB]), WORK).uses[0].total_bytes
    found = place(model, machine([total - MIB], cpu_bytes=GIB), WORK)
    assert found.run_on_cpu == ("model.language_model.embed_tokens",)
    assert found.device_map["model.language_model.rotary_emb"] == 0
    assert [x.runs_on for x in found.spilled] == ["cpu"]
    rows = 2 * (30 + 16 + 4)
    assert found.moved_bytes == rows * 64 * 2
    assert found.moved_bytes < table.weights.max() / 100


def test_the_tower_spills_before_any_decoder_block():
    model = small_model(vocab_size=300, num_layers=3, depth=6)
    table = inference_table(model, WORK)
    tower = sum(int(table.weights[i]) for i in model.indices("vision"))
    total = place(model, machine([80 * MIB]), WORK).uses[0].total_bytes
    found = place(model, machine([total - tower // 2], cpu_bytes=GIB), WORK)
    spilled = {name for x in found.spilled for name in x.modules}
    assert not any(".layers." in name for name in spilled)
    once = sum(x.weight_bytes for x in found.spilled if x.runs_on != "cpu")
    assert once > 0
    assert found.moved_bytes <= once + 2 * 50 * 64 * 2  # copied once a request


def test_decoder_blocks_move_for_every_new_token_and_the_head_goes_last():
    model = small_model(tied=True, num_layers=6, depth=1)
    table = inference_table(model, WORK)
    total = place(model, machine([80 * MIB]), WORK).uses[0].total_bytes
    tower = sum(int(table.weights[i]) for i in (*model.indices("vision"), *model.indices("projector")))
    block = max(int(table.weights[i]) for i in model.indices("language", "block"))
    found = place(model, machine([total - tower - block], cpu_bytes=GIB), WORK)
    blocks = [x for x in found.spilled if ".layers." in x.modules[0]]
    assert blocks
    assert all(x.moved_bytes == 5 * x.weight_bytes for x in blocks)
    assert found.device_map["lm_head"] == found.device_map["model.language_model.embed_tokens"] == 0


def test_host_memory_is_filled_before_the_disk():
    model = small_model(num_layers=8)
    total = place(model, machine([80 * MIB]), WORK).uses[0].total_bytes
    table = inference_table(model, WORK)
    block = max(int(table.weights[i]) for i in model.indices("language", "block"))
    free = total - int(table.weights.sum()) + 4 * block
    on_cpu = place(model, machine([free], cpu_bytes=GIB), WORK)
    both = place(model, machine([free], cpu_bytes=3 * block, disk=True), WORK)
    disk = place(model, machine([free], disk=True), WORK)
    assert {x.device for x in on_cpu.spilled} == {"cpu"}
    assert {x.device for x in both.spilled} == {"cpu", "disk"}
    assert {x.device for x in disk.spilled} == {"disk"}
    assert not disk.run_on_cpu  # what lies on disk is not computed in host memory
    assert both.fits
    assert max(x.moved_bytes for x in both.spilled if x.device == "cpu") == max(x.moved_bytes for x in both.spilled)


# -- what cannot be placed ------------------------------------------------------------------------------------------


def test_the_message_says_what_is_missing_and_what_would_do():
    model = describe("Qwen2.5-VL-7B")
    workload = Workload(batch=4, images=((1024, 1024),))
    with pytest.raises(PartitionError) as error:
        place(model, machine_of([8 * GIB] * 2), workload)
    text = str(error.value)
    assert "Qwen2.5-VL-7B" in text
    assert "16.0 GiB" in text
    times = float(text.split("enough would be: ")[1].split(" times")[0])
    place(model, machine_of([int(8 * GIB * times)] * 2), workload)
    host = int(text.split("--cpu ")[1].split("GiB")[0])
    assert place(model, machine_of([8 * GIB] * 2, cpu_bytes=host * GIB), workload).fits
    with refused(PartitionError):
        place(model, machine_of([8 * GIB] * 2, cpu_bytes=GIB), workload)


def test_what_streams_needs_room_only_while_it_runs():
    """A tower that is copied in takes its largest layer, and of the cache nothing: the prompts' comes behind it."""
    model = small_model(tied=False, num_layers=3, depth=3, vocab_size=50)
    workload = Workload(batch=2, seq_len=64, max_new_tokens=4000, images=((112, 112),))
    table = inference_table(model, workload)
    everything = range(len(model.layers))
    front = [i for i in everything if not table.cached[i]]
    decoder = [i for i in everything if table.cached[i]]
    held, prompt, full = (int(x.sum()) for x in (table.held, table.kv_prompt, table.kv_full))
    encode = max(int(table.prefill[i] + table.weights[i]) for i in front)
    prefill, decode = (max(int(x[i]) for i in decoder) for x in (table.prefill, table.decode))
    expected = max(held + encode, held + prompt + prefill, full + decode)
    found = device_bytes(table, everything, front, 0)
    assert found.kv_bytes + found.activation_bytes + found.streamed_bytes == expected
    assert found.weight_bytes == sum(int(table.weights[i]) for i in decoder)
    assert full + decode > held + prompt + prefill, "the cache grows past all else, so the tower streams for nothing"
    assert found.streamed_bytes == 0


@pytest.mark.parametrize("seed", range(30))
def test_every_run_of_units_is_counted_as_its_layers_are(seed):
    rng = np.random.default_rng(seed)
    model = small_model(tied=bool(rng.integers(2)), num_layers=3, depth=2, vocab_size=203)
    images = ((112, 112),) * int(rng.integers(3))
    workload = Workload(batch=int(rng.integers(1, 4)), seq_len=int(rng.integers(5, 200)), images=images)
    table = inference_table(model, workload)
    spilled = [i for i in range(len(model.layers)) if rng.random() < 0.4]
    for option in arrangements(parts_of(model)):
        found = run_bytes(table, option.units, 1000, spilled=spilled)
        for s, e in itertools.combinations(range(len(option.units) + 1), 2):
            layers = [i for unit in option.units[s:e] for i in unit.layers]
            assert found[s, e] == device_bytes(table, layers, spilled, 1000).total_bytes
