"""A trace of requests on serving engines: how many encode only, by how many devices an engine is shared, and a bound.

An engine runs steps, one after the other. A step gives each running request its next token and fills the rest of
`MAX_STEP_TOKENS` with pieces of prompts, first come, first served; SGLang runs prompts alone, first. Images are encoded
in the step that begins their prompt, or before it on encoder instances, one image a call. A request is admitted when
its whole context fits the cache.

A step takes max(products, weights read once) + attention + cache read + images, by the formulas of training. Not
counted: scaling of images, the server, prefix caches, preemption, speculation.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trimtab.costs.formula.flops import find_tp_problems, num_expert_params
from trimtab.costs.profile import profile_model
from trimtab.errors import PartitionError, SampleError, join_problems
from trimtab.files import read_small
from trimtab.placement.bytes import inference_table, kv_bytes_per_token, weight_bytes
from trimtab.placement.machine import Workload, batch_of
from trimtab.specs import NUM_WORK_TERMS, WORK_TERMS, DeviceSpec, FloatArray, ImageCounts, ModelSpec, ParallelDims
from trimtab.typed_json import parse_json, read_typed

Engine = Literal["vllm", "sglang"]

MAX_STEP_TOKENS = 8192  # of a step, and requests that run together: flags that the printed commands give
MAX_RUNNING = 256
MEMORY_SHARE = 0.9  # of a device's free memory that an engine fills: vLLM's default, given to SGLang as well
_LATE_SHARE = 0.01  # of the requests that may wait longer than what is printed of the first token
_MUST_GAIN = 1.02  # in requests a second, or in seconds of the first token, to take more encoder instances
_MOST_SIMULATED = 24  # layouts, the best by their bounds
_LARGEST = 10**8  # seconds, tokens, pixels of a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One line of a trace."""

    arrival_s: float
    prompt_tokens: int  # of text; images come on top
    output_tokens: int
    images: tuple[tuple[int, int], ...] = ()  # height and width in pixels


def read_trace(path: Path) -> list[Request]:
    """Return the requests of a JSON Lines file in order of arrival; `SampleError` names lines that are wrong."""
    found, problems = list[Request](), list[str]()
    for number, line in enumerate(read_small(path).splitlines(), 1):
        own = list[str]()
        try:
            request = read_typed(Request, parse_json(line), "", own, read_number=_read_number)
        except ValueError as error:
            own = [str(error)]
        problems += [f"{path}:{number}: {problem}" for problem in own]
        found += [] if own else [request]
    if problems or not found:
        raise SampleError(join_problems(problems[:3] or [f"{path} holds no request: give one JSON object a line"]))
    return sorted(found, key=lambda request: request.arrival_s)


def _read_number(place: str, kind: Any, value: Any, problems: list[str]) -> Any:
    least = 0 if kind is float else 1
    if not least <= value <= _LARGEST:
        problems.append(f"{place}: {str(value)[:20]} is not within {least} and {_LARGEST}")
    return kind(value) if -_LARGEST <= value <= _LARGEST else least


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the devices do."""

    encoders: int  # instances that encode images and nothing else, a device each
    engines: int  # of the whole model, requests shared among them
    tp: int  # devices of an engine
    images_whole: bool  # each image on one of the tp devices, the tower whole on each

    def __str__(self) -> str:
        mode = ", images whole" if self.images_whole else ""
        ahead = f"{self.encoders} encoder{'s'[: self.encoders > 1]} + " if self.encoders else ""
        return f"{ahead}{self.engines} engine{'s'[: self.engines > 1]} of tp {self.tp}{mode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePrice:
    """Seconds and bytes of an engine."""

    once_s: float  # of a step, whatever it holds
    row_s: float  # of a token that goes through the decoder
    pair_s: float  # of a squared length of a prompt
    head_s: float  # of a token that is sampled
    weights_s: float  # of reading all weights but those of experts: no step is shorter
    experts_s: float  # of reading those of all experts
    missed: float  # share of the experts that one row does not visit
    context_s: float  # of reading what the cache holds of a token
    sequence_s: float  # of reading what it holds of a sequence, whatever its length
    encode_once_s: float  # of a call of the tower
    send_s: float  # of the features of an image token, between devices
    context_bytes: float
    sequence_bytes: float
    cache_bytes: float  # room for them

    def held_bytes(self, job: Job) -> float:
        return self.sequence_bytes + self.context_bytes * (job.tokens + job.output)

    def read_s(self, rows: int) -> float:
        """Return the seconds of reading the weights that so many rows visit, their experts drawn evenly."""
        return self.weights_s + self.experts_s * (1.0 - self.missed**rows)

    def prefill_s(self, tokens: int) -> float:
        """Return the least seconds of a prompt alone, its first token included."""
        steps = -(-tokens // MAX_STEP_TOKENS)
        products = steps * self.once_s + tokens * self.row_s + self.head_s
        return max(products, steps * self.read_s(1)) + self.pair_s * tokens**2

    def decode_s(self, tokens: int, output: int) -> float:
        """Return the least seconds of all other tokens of an answer, one a step."""
        steps = output - 1
        step_s = max(self.once_s + self.row_s + self.head_s, self.read_s(1))
        return steps * (step_s + self.sequence_s) + self.context_s * self.contexts(tokens, output)

    def contexts(self, tokens: int, output: int) -> float:
        """Return the tokens that all steps after the first read of the cache."""
        return (output - 1) * tokens + output * (output - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request as an engine sees it."""

    arrival_s: float
    tokens: int  # of the prompt, images included
    output: int
    image_s: tuple[float, ...]  # of each image on one encoder, or whole on one device of an engine, or shared by all
    image_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a trace gets: simulated, or what no order of steps exceeds."""

    requests_per_s: float
    first_token_s: float  # of 99 % of the requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a layout gives; `bound`: at most."""

    layout: Layout
    bound: Served
    served: Served


# -- simulation -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True, eq=False)
class _Engine:
    """One engine between two steps."""

    jobs: Sequence[Job]
    price: EnginePrice
    layout: Layout
    waiting: deque[int] = field(default_factory=deque)  # jobs; the first may be under way
    done_tokens: int = 0  # of the first that waits
    running: list[tuple[int, int]] = field(default_factory=list)  # heap of (last decode step, job)
    decoded: int = 0  # decode steps so far
    contexts: int = 0  # tokens in the cache of those that run
    held_bytes: float = 0.0
    free_s: float = 0.0  # when its step ends
    is_busy: bool = False

    @property
    def num_jobs(self) -> int:
        return len(self.waiting) + len(self.running)

    def step(self, *, mixed: bool) -> tuple[list[int], list[int]]:
        """Run one step from `free_s` on; return the jobs that have their first token, and those that end."""
        price = self.price
        # 1. pieces of prompts, next to those that run or before them
        room = MAX_STEP_TOKENS - (len(self.running) if mixed else 0)
        taken, prompt_s, whole, images = 0, 0.0, list[int](), list[float]()
        while self.waiting and taken < room:
            job, before = self.jobs[self.waiting[0]], self.done_tokens
            if before == 0:
                full = len(self.running) + len(whole) >= MAX_RUNNING
                if full or self.held_bytes + price.held_bytes(job) > price.cache_bytes:
                    break
                self.held_bytes += price.held_bytes(job)
                images += () if self.layout.encoders else job.image_s
            self.done_tokens = min(job.tokens, before + room - taken)
            taken += self.done_tokens - before
            prompt_s += price.pair_s * (self.done_tokens**2 - before**2)
            if self.done_tokens == job.tokens:
                whole.append(self.waiting.popleft())
                self.done_tokens = 0
        # 2. the next token of all that run
        runs = len(self.running) if mixed or not taken else 0
        products_s = price.once_s + price.row_s * (taken + runs) + price.head_s * (len(whole) + runs)
        read_s = price.context_s * self.contexts + price.sequence_s * runs if runs else 0.0
        encode_s = encode_seconds(images, price, self.layout)
        self.free_s += encode_s + max(products_s, price.read_s(taken + runs)) + prompt_s + read_s
        self.decoded += runs > 0
        self.contexts += runs
        # 3. answers that begin, and those that end
        for number in whole:
            self.contexts += self.jobs[number].tokens + 1
            heapq.heappush(self.running, (self.decoded + self.jobs[number].output - 1, number))
        ended = []
        while self.running and self.running[0][0] <= self.decoded:
            ended.append(heapq.heappop(self.running)[1])
            job = self.jobs[ended[-1]]
            self.contexts -= job.tokens + job.output
            self.held_bytes -= price.held_bytes(job)
        return whole, ended


def simulate(
    jobs: Sequence[Job], price: EnginePrice, layout: Layout, *, mixed: bool = True
) -> tuple[FloatArray, FloatArray]:
    """Return the seconds at which each job has its first and its last token; `mixed`: prompts next to answers."""
    first, last, arrived = np.zeros(len(jobs)), np.zeros(len(jobs)), 0
    ready = _encode_ahead(jobs, price, layout)
    order = sorted(range(len(jobs)), key=lambda job: (ready[job], job))
    engines = [_Engine(jobs=jobs, price=price, layout=layout) for _ in range(layout.engines)]
    ends = list[tuple[float, int]]()  # heap: when the step of each busy engine ends
    while arrived < len(order) or ends:
        # 1. an arrival comes next: it goes to the engine with the fewest
        if arrived < len(order) and (not ends or ready[order[arrived]] <= ends[0][0]):
            job, arrived = order[arrived], arrived + 1
            number = min(range(len(engines)), key=lambda i: engines[i].num_jobs)
            engines[number].waiting.append(job)
            if not engines[number].is_busy:
                engines[number].is_busy, engines[number].free_s = True, ready[job]
                heapq.heappush(ends, (ready[job], number))
            continue
        # 2. or an engine that is free, and has work
        number = heapq.heappop(ends)[1]
        engine = engines[number]
        engine.is_busy = engine.num_jobs > 0
        if engine.is_busy:
            begun, ended = engine.step(mixed=mixed)
            first[begun], last[ended] = engine.free_s, engine.free_s
            heapq.heappush(ends, (engine.free_s, number))
    return first, last


def _encode_ahead(jobs: Sequence[Job], price: EnginePrice, layout: Layout) -> list[float]:
    """Return when each job may begin: at once, or when encoders have its images, the first that is free each."""
    ready = [job.arrival_s for job in jobs]
    free = [0.0] * layout.encoders
    for i in sorted(range(len(jobs)), key=lambda i: (jobs[i].arrival_s, i)) if layout.encoders else ():
        for seconds in jobs[i].image_s:
            end_s = max(free[0], jobs[i].arrival_s) + price.encode_once_s + seconds
            heapq.heapreplace(free, end_s)
            ready[i] = max(ready[i], end_s)
        ready[i] += price.send_s * jobs[i].image_tokens
    return ready


def encode_seconds(images: Sequence[float], price: EnginePrice, layout: Layout) -> float:
    """Return the seconds of one call inside an engine; whole images go longest first to the device with the least."""
    if not images:
        return 0.0
    if not layout.images_whole:
        return price.encode_once_s + sum(images)
    loads = [0.0] * layout.tp
    for seconds in sorted(images, reverse=True):
        heapq.heapreplace(loads, loads[0] + seconds)
    return price.encode_once_s + max(loads)


def served(jobs: Sequence[Job], first: FloatArray, last: FloatArray) -> Served:
    """Return what users see of a simulation."""
    arrivals = np.array([job.arrival_s for job in jobs])
    late = np.sort(first - arrivals)
    return Served(
        requests_per_s=len(jobs) / float(last.max() - arrivals.min()),
        first_token_s=float(late[len(jobs) - 1 - int(_LATE_SHARE * len(jobs))]),
    )


# -- bound ------------------------------------------------------------------------------------------------------------


def bound(jobs: Sequence[Job], price: EnginePrice, layout: Layout) -> Served:
    """Return what no order of steps on this layout exceeds.

    Work is what the products, the cache and the images of a job take in the fullest of steps. All work of jobs that
    arrive from t on is done after t, so the last of them ends no sooner than t + work / engines; nor does one job end
    before its own steps do. Of a group that arrives within [s, e] all first tokens come after s + work / engines, so
    one of them waits until then since e. At most 1 % of the trace may be late: where there are more groups than late
    jobs, so many groups are left out; else so many jobs of each.
    """
    jobs = sorted(jobs, key=lambda job: job.arrival_s)
    arrivals = np.array([job.arrival_s for job in jobs])
    inside = not layout.encoders
    # 1. each job alone
    share = layout.tp if layout.images_whole else 1
    images = np.array([sum(job.image_s) / share for job in jobs])
    longest = np.array([max(job.image_s, default=0.0) for job in jobs])
    calls = np.array([price.encode_once_s if job.image_s else 0.0 for job in jobs])
    tokens = np.array([float(job.tokens) for job in jobs])
    alone = np.array([price.prefill_s(job.tokens) for job in jobs]) + calls
    if inside:
        alone += np.maximum(images, longest) if layout.images_whole else images
    else:
        sent = np.array([price.send_s * job.image_tokens for job in jobs])
        alone += np.maximum(longest, images / layout.encoders) + sent
    after = np.array([price.decode_s(job.tokens, job.output) for job in jobs])
    # 2. work on all engines, and on all encoders
    prompt = price.row_s * tokens + price.pair_s * tokens**2 + price.head_s + (images if inside else 0.0)
    outputs = np.array([float(job.output - 1) for job in jobs])
    read = np.array([price.contexts(job.tokens, job.output) for job in jobs])
    answer = outputs * (price.row_s + price.head_s + price.sequence_s) + price.context_s * read
    encoded = images + calls if not inside else np.zeros(len(jobs))
    prompt_s, per_encoder = prompt / layout.engines, encoded / max(1, layout.encoders)
    per_engine = prompt_s + answer / layout.engines
    # 3. the last token of all
    remaining = [np.cumsum(work[::-1])[::-1] for work in (per_engine, per_encoder)]
    end_s = max(float((arrivals + x).max()) for x in (alone + after, *remaining))
    # 4. the first token of 99 %
    num, late = len(jobs), int(_LATE_SHARE * len(jobs))
    first_s = float(np.sort(alone)[num - 1 - late])
    for size in (2**power for power in range(1, num.bit_length() + 1)):
        starts, found = range(0, num, size), list[float]()
        spare = late if len(starts) <= late else 0
        for a in starts:
            b = min(a + size, num)
            works = (np.sort(work[a:b])[: max(0, b - a - spare)] for work in (prompt_s, per_encoder))
            found.append(float(arrivals[a] - arrivals[b - 1]) + max(float(work.sum()) for work in works))
        first_s = max(first_s, sorted(found)[-1 if spare else -1 - late])
    return Served(requests_per_s=num / (end_s - float(arrivals[0])), first_token_s=first_s)


# -- choice -----------------------------------------------------------------------------------------------------------


def offer_layouts(
    model: ModelSpec,
    device: DeviceSpec,
    num_devices: int,
    requests: Sequence[Request],
    *,
    engine: Engine,
    workload: Workload,
    free_bytes: int,
) -> tuple[list[Offer], Served]:
    """Decide what equal devices do to serve a trace; return the best layout, others, and what no layout exceeds.

    The best has, of those within 2 % of the most requests a second, the soonest first token; the fewest encoders where
    that is within 2 % as well. Layouts are simulated in the order of their bounds, at most 24.
    """
    # 1. layouts that fit, with their bounds
    bounded, counted = list[tuple[Served, Layout, EnginePrice, list[Job]]](), count_images(model, requests)
    for layout in layouts(model, num_devices, requests):
        price, tower = price_engine(model, device, layout, workload, free_bytes)
        jobs = [make_job(request, counted, tower) for request in requests]
        if max(map(price.held_bytes, jobs)) <= price.cache_bytes:
            bounded.append((bound(jobs, price, layout), layout, price, jobs))
    if not bounded:
        raise PartitionError(
            f"{model.name} with the longest request of the trace does not fit {num_devices} x {device.name}: give more "
            "GPUs, larger ones, or --quant"
        )
    # 2. those that may be the best
    bounded.sort(key=lambda x: (-x[0].requests_per_s, x[0].first_token_s))
    offers = list[Offer]()
    for most, layout, price, jobs in bounded:
        if len(offers) == _MOST_SIMULATED or (offers and _loses(most, offers[0].served)):
            continue
        found = served(jobs, *simulate(jobs, price, layout, mixed=engine == "vllm"))
        offers = _best_first([*offers, Offer(layout=layout, bound=most, served=found)])
    bounds = [x[0] for x in bounded]
    return offers, Served(
        requests_per_s=max(x.requests_per_s for x in bounds), first_token_s=min(x.first_token_s for x in bounds)
    )


def _loses(most: Served, best: Served) -> bool:
    """Return whether what is at most `most` cannot be taken instead of `best`."""
    slower = most.requests_per_s * _MUST_GAIN < best.requests_per_s
    alike = most.requests_per_s < best.requests_per_s * _MUST_GAIN
    return slower or (alike and most.first_token_s >= best.first_token_s)


def _best_first(offers: Sequence[Offer]) -> list[Offer]:
    most = max(x.served.requests_per_s for x in offers)
    fast = [x for x in offers if x.served.requests_per_s * _MUST_GAIN >= most]
    soonest = min(x.served.first_token_s for x in fast)
    near = [x for x in fast if x.served.first_token_s <= soonest * _MUST_GAIN]
    best = min(near, key=lambda x: (x.layout.encoders, x.layout.tp, x.served.first_token_s))
    return [best, *sorted((x for x in offers if x is not best), key=lambda x: -x.served.requests_per_s)]


def layouts(model: ModelSpec, num_devices: int, requests: Sequence[Request]) -> Iterator[Layout]:
    """Yield every layout that uses all devices."""
    has_images = any(x.images for x in requests)
    for tp in (1, 2, 4, 8, 16):
        if any(find_tp_problems(x, tp) for x in model.layers):
            continue
        for encoders in range(num_devices if has_images else 1):
            if (engines := (num_devices - encoders) // tp) and engines * tp + encoders == num_devices:
                modes = (False, True) if has_images and tp > 1 and not encoders else (False,)
                yield from (Layout(encoders=encoders, engines=engines, tp=tp, images_whole=x) for x in modes)


def price_engine(
    model: ModelSpec, device: DeviceSpec, layout: Layout, workload: Workload, free_bytes: int
) -> tuple[EnginePrice, FloatArray]:
    """Return an engine's seconds and bytes, and (len(WORK_TERMS),) seconds of tower and projector."""

    def forward(tp: int, *, language: bool, head: bool = False) -> FloatArray:
        layers = profile_model(model, device, dims=ParallelDims(tp=tp), **_KERNELS).layers
        kept = [x.forward_s for x in layers if (x.tower == "language", x.kind == "head") == (language, head)]
        return np.asarray(np.array(kept, np.float64).reshape(-1, NUM_WORK_TERMS).sum(axis=0), np.float64)

    # 1. seconds; a window leaves every token so many others
    tower = forward(1 if layout.encoders or layout.images_whole else layout.tp, language=False)
    decoder, head = (forward(layout.tp, language=True, head=x) for x in (False, True))
    window, per_s = 2.0 * (model.token_window or 0), device.memory_bytes_per_s * _MEMORY_REACHED
    # 2. bytes of a device: weights, cache of a token and of a sequence, what lives while a step runs
    w, text = workload.item_bytes, [x for x in model.layers if x.tower == "language"]
    weights = sum(weight_bytes(x, workload) for x in text) / layout.tp
    looked_up = sum(weight_bytes(x, workload) for x in text if x.kind == "embed") / layout.tp
    other = sum(weight_bytes(x, workload) for x in model.layers if x.tower != "language")
    cached = held = experts = 0.0
    missed = 1.0
    for layer in text:
        m, params = layer.mlp, num_expert_params(layer)
        if m is not None and m.num_experts:
            experts += weight_bytes(layer, workload) * params / layer.num_params / layout.tp
            missed = 1.0 - (m.experts_per_token or 1) / m.num_experts
        a, copies = layer.attention, layout.tp
        per_token = kv_bytes_per_token(layer, w) / (1 if a is None else min(copies, a.num_kv_heads))
        cached += 0.0 if a is not None and a.window else per_token
        held += (a.window or 0) * per_token if a is not None else 0.0
        held += 0.0 if layer.cache is None else layer.cache.bytes_per_sequence / copies
    rows = batch_of(Workload(seq_len=MAX_STEP_TOKENS, max_new_tokens=1), [])
    live = int(inference_table(model, workload, rows).prefill[list(model.indices("language", "block"))].max())
    return EnginePrice(
        once_s=decoder[0] + head[0],
        row_s=decoder[_TOKENS] + window * decoder[_WINDOWED],
        pair_s=decoder[_TOKENS_SQ],
        head_s=head[_TOKENS],
        weights_s=(weights - looked_up - experts) / per_s,
        experts_s=experts / per_s,
        missed=missed,
        context_s=cached / per_s,
        sequence_s=held / per_s,
        encode_once_s=tower[0],
        send_s=text[0].hidden_size * w / device.link_bytes_per_s,
        context_bytes=cached,
        sequence_bytes=held,
        cache_bytes=MEMORY_SHARE * free_bytes - weights - other / (1 if layout.images_whole else layout.tp) - live,
    ), tower


_TOKENS, _TOKENS_SQ, _WINDOWED = (WORK_TERMS.index(x) for x in ("tokens", "tokens_sq", "tokens_windowed"))
# of engines: graphs, which no host launches, and no sequence parallelism
_KERNELS: dict[str, Any] = {"host": "common", "sequence_parallel": False, "vision_sequence_parallel": False}
_MEMORY_REACHED = 0.8  # of the datasheet's bytes/s, as in training


def count_images(model: ModelSpec, requests: Sequence[Request]) -> dict[tuple[int, int], ImageCounts]:
    """Count each size of image once, by the model's own rule."""
    sizes = {size for request in requests for size in request.images}
    return {(height, width): model.image_rule.count(width, height) for height, width in sizes}


def make_job(request: Request, counted: dict[tuple[int, int], ImageCounts], tower: FloatArray) -> Job:
    """Price the images of a request on one encoder, or on the devices that share each of them."""
    images = [counted[size] for size in request.images]
    tokens = sum(x.tokens for x in images)
    return Job(
        arrival_s=request.arrival_s,
        tokens=request.prompt_tokens + tokens,
        output=request.output_tokens,
        image_s=tuple(float(np.dot(tower[1:4], (x.patches, x.patches_sq, x.patches_windowed))) for x in images),
        image_tokens=tokens,
    )
