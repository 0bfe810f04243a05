"""placement/ (engines): a trace on serving engines, against figures by hand, and what no order of steps exceeds."""

import random
from dataclasses import replace

import pytest

from refusals import refused
from trimtab import describe, find_device
from trimtab.adapters.servers import serving_commands
from trimtab.errors import PartitionError, SampleError
from trimtab.placement.engines import (
    MAX_RUNNING,
    MAX_STEP_TOKENS,
    EnginePrice,
    Job,
    Layout,
    Request,
    bound,
    encode_seconds,
    layouts,
    offer_layouts,
    read_trace,
    served,
    simulate,
)
from trimtab.placement.machine import Workload
from trimtab.units import GIB

PRICE = EnginePrice(
    once_s=0.0,
    row_s=0.001,
    pair_s=0.0,
    head_s=0.0,
    weights_s=0.01,
    experts_s=0.0,
    missed=1.0,
    context_s=0.0,
    sequence_s=0.0,
    encode_once_s=0.5,
    send_s=0.0,
    context_bytes=1.0,
    sequence_bytes=0.0,
    cache_bytes=1e6,
)
ONE = Layout(encoders=0, engines=1, tp=1, images_whole=False)


def job(arrival_s=0.0, tokens=100, output=1, images=(), image_tokens=0):
    return Job(arrival_s=arrival_s, tokens=tokens, output=output, image_s=images, image_tokens=image_tokens)


def test_one_request_takes_its_prompt_and_then_a_step_a_token():
    first, last = simulate([job(1.0, tokens=100, output=5)], PRICE, ONE)
    assert first.tolist() == pytest.approx([1.0 + 0.1])  # 100 rows
    assert last.tolist() == pytest.approx([1.1 + 4 * 0.01])  # the weights, four times


def test_a_prompt_longer_than_a_step_comes_in_pieces_whose_attention_adds_up():
    price = replace(PRICE, pair_s=1e-9, once_s=0.25)
    tokens = MAX_STEP_TOKENS + 1000
    first, _ = simulate([job(tokens=tokens)], price, ONE)
    assert first[0] == pytest.approx(2 * 0.25 + 0.001 * tokens + 1e-9 * tokens**2)


def test_vllm_gives_running_requests_a_token_next_to_a_prompt_and_sglang_after_it():
    jobs = [job(0.0, tokens=100, output=2), job(0.05, tokens=200, output=1)]
    first, last = simulate(jobs, PRICE, ONE)
    assert first.tolist() == pytest.approx([0.1, 0.1 + 0.201])  # the second prompt and one token
    assert last.tolist() == pytest.approx([0.301, 0.301])
    first, last = simulate(jobs, PRICE, ONE, mixed=False)
    assert first.tolist() == pytest.approx([0.1, 0.3])
    assert last.tolist() == pytest.approx([0.31, 0.3])


def test_images_stop_the_engine_and_encoders_do_not():
    jobs = [job(0.0, tokens=100, output=100), job(0.05, tokens=100, images=(1.0, 1.0), image_tokens=50)]
    first, _ = simulate(jobs, PRICE, ONE)
    assert first[1] == pytest.approx(0.1 + 0.5 + 2.0 + 0.101)
    ahead = Layout(encoders=2, engines=1, tp=1, images_whole=False)
    first, last = simulate(jobs, replace(PRICE, send_s=0.001), ahead)
    assert first[1] == pytest.approx(0.05 + 0.5 + 1.0 + 50 * 0.001 + 0.1)  # one image on each encoder, then sent
    assert last[0] == pytest.approx(0.1 + 99 * 0.01)


def test_whole_images_go_to_the_device_with_the_least():
    assert encode_seconds([3.0, 1.0, 2.0], PRICE, replace(ONE, tp=2, images_whole=True)) == pytest.approx(0.5 + 3.0)
    assert encode_seconds([3.0, 1.0, 2.0], PRICE, ONE) == pytest.approx(0.5 + 6.0)
    assert encode_seconds([], PRICE, ONE) == 0.0


def test_no_request_is_admitted_whose_context_does_not_fit():
    jobs = [job(tokens=60, output=40), job(tokens=60, output=40)]
    first, last = simulate(jobs, replace(PRICE, cache_bytes=199.0), ONE)
    assert first[1] > last[0]
    first, last = simulate(jobs, replace(PRICE, cache_bytes=200.0), ONE)
    assert first[1] < last[0]


def test_no_more_requests_run_together_than_the_engine_is_told():
    jobs = [job(tokens=1, output=50)] * (MAX_RUNNING + 1)
    first, last = simulate(jobs, PRICE, ONE)
    assert first[-1] > last[0]


@pytest.mark.parametrize("seed", range(40))
def test_no_simulation_is_better_than_its_bound(seed):
    draw = random.Random(seed)
    price = EnginePrice(
        **{name: draw.choice([0.0, 1.0]) * draw.random() * scale for name, scale in SCALES.items()},
        missed=draw.random(),
        context_bytes=1.0,
        sequence_bytes=draw.choice([0.0, 100.0]),
        cache_bytes=draw.choice([15_000.0, 1e9]),
    )
    layout = Layout(
        encoders=draw.choice([0, 0, 1, 3]), engines=draw.randint(1, 4), tp=2, images_whole=draw.random() < 0.5
    )
    layout = replace(layout, images_whole=layout.images_whole and not layout.encoders)
    rate = draw.choice([0.1, 1.0, 1e6])
    jobs = []
    for _ in range(draw.randint(1, 250)):
        arrival_s = draw.expovariate(1.0) / rate + (jobs[-1].arrival_s if jobs else 0.0)
        images = tuple(draw.random() for _ in range(draw.choice([0, 1, 5])))
        jobs.append(job(arrival_s, draw.randint(1, 12_000), draw.randint(1, 60), images, 100 * len(images)))
    most = bound(jobs, price, layout)
    for mixed in (True, False):
        found = served(jobs, *simulate(jobs, price, layout, mixed=mixed))
        assert found.requests_per_s <= most.requests_per_s * (1 + 1e-9)
        assert found.first_token_s >= most.first_token_s * (1 - 1e-9)


SCALES = {
    "once_s": 0.01,
    "row_s": 1e-4,
    "pair_s": 1e-8,
    "head_s": 1e-3,
    "weights_s": 0.01,
    "experts_s": 0.02,
    "context_s": 1e-7,
    "sequence_s": 1e-5,
    "encode_once_s": 0.01,
    "send_s": 1e-6,
}


def test_the_bound_of_one_request_is_what_it_takes():
    one = job(tokens=10_000, output=30, images=(0.25,))
    found = served([one], *simulate([one], PRICE, ONE))
    most = bound([one], PRICE, ONE)
    assert found.first_token_s == pytest.approx(most.first_token_s)
    assert found.requests_per_s == pytest.approx(most.requests_per_s)


# -- choice -----------------------------------------------------------------------------------------------------------


MODEL, H100 = describe("Qwen2.5-VL-7B"), find_device("H100-80GB")


def offers_of(requests, num_devices=4, engine="vllm", free=80 * GIB):
    return offer_layouts(MODEL, H100, num_devices, requests, engine=engine, workload=Workload(), free_bytes=free)


def test_every_layout_uses_all_devices_and_text_needs_no_encoder():
    text = [Request(arrival_s=0.0, prompt_tokens=100, output_tokens=10)]
    images = [replace(text[0], images=((448, 448),))]
    found = list(layouts(MODEL, 8, images))
    assert all(x.encoders + x.engines * x.tp == 8 for x in found)
    assert {x.encoders for x in found} == set(range(8))
    assert {x.encoders for x in layouts(MODEL, 8, text)} == {0}
    assert not any(x.images_whole for x in layouts(MODEL, 8, text))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_is_taken_has_most_requests_or_the_soonest_first_token_of_those(engine):
    draw = random.Random(3)
    images = [((448, 640),) * draw.choice([0, 1, 4]) for _ in range(60)]
    requests = [
        Request(arrival_s=0.2 * i, prompt_tokens=draw.randint(20, 900), output_tokens=40, images=images[i])
        for i in range(60)
    ]
    offers, most = offers_of(requests, engine=engine)
    best, *others = offers
    for other in others:
        assert other.served.requests_per_s <= best.served.requests_per_s * 1.021
        alike = other.served.requests_per_s * 1.02 >= best.served.requests_per_s
        assert not alike or other.served.first_token_s * 1.041 >= best.served.first_token_s
    assert best.served.requests_per_s <= most.requests_per_s * (1 + 1e-9)
    assert best.served.first_token_s >= most.first_token_s * (1 - 1e-9)


def test_a_request_longer_than_the_cache_is_refused():
    long = [Request(arrival_s=0.0, prompt_tokens=10**7, output_tokens=1)]
    with refused(PartitionError, "Qwen2.5-VL-7B", "H100-80GB"):
        offers_of(long)


def test_commands_name_what_was_simulated():
    whole = Layout(encoders=0, engines=2, tp=4, images_whole=True)
    (vllm,) = serving_commands("m", "vllm", whole)
    for words in ("--tensor-parallel-size 4", "--mm-encoder-tp-mode data", "--data-parallel-size 2"):
        assert words in vllm
    assert str(MAX_STEP_TOKENS) in vllm
    (sglang,) = serving_commands("m", "sglang", whole)
    assert all(words in sglang for words in ("--tp-size 4", "--mm-enable-dp-encoder", "--dp-size 2"))
    ahead = Layout(encoders=2, engines=3, tp=2, images_whole=False)
    for engine, producer in (("vllm", "ec_producer"), ("sglang", "--encoder-only")):
        *started, router = serving_commands("m", engine, ahead)
        assert [producer in x for x in started] == [True] * 2 + [False] * 3
        gpus = [x.partition(" ")[0].partition("=")[2] for x in started]
        assert ",".join(gpus) == "0,1,2,3,4,5,6,7"
        assert all("data" not in x for x in started)
        assert router.count("127.0.0.1") in (3, 5)


def test_a_trace_is_read_in_order_of_arrival(tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text(
        '{"arrival_s": 2, "prompt_tokens": 5, "output_tokens": 1}\n'
        '{"arrival_s": 1.5, "prompt_tokens": 6, "output_tokens": 2, "images": [[100, 200]]}\n'
    )
    first, second = read_trace(path)
    assert (first.arrival_s, first.images) == (1.5, ((100, 200),))
    assert second.prompt_tokens == 5


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "",
        '{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 1}',
        '{"arrival_s": 1e999, "prompt_tokens": 5, "output_tokens": 1}',
        '{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}',
        '{"arrival_s": 0, "prompt_tokens": 5}',
        '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "images": [[1]]}',
        '{"arrival_s": 0, "prompt_tokens": 5, "output_tokens": 1, "other": 1}',
    ],
)
def test_a_line_that_is_no_request_is_named(line, tmp_path):
    path = tmp_path / "requests.jsonl"
    path.write_text(line + "\n" if line else "")
    with refused(SampleError, "requests.jsonl"):
        read_trace(path)
