"""Small profiles for the tests of partition/: layers whose every coefficient is constant per micro-batch."""

from dataclasses import replace

import numpy as np

from trimtab.partition.stages import SplitProblem, split_stages
from trimtab.specs import NUM_WORK_TERMS, DeviceSpec, LayerCost, ParallelDims, Profile, RecomputeTier

ONE = np.eye(NUM_WORK_TERMS)[0]  # one micro-batch, every coefficient constant
DEVICE = DeviceSpec(
    name="test", memory_bytes=10**9, peak_flops=1e12, memory_bytes_per_s=1e12, link_bytes_per_s=1e10, source="made up"
)


TIERS = ("none", "selective", "full")


def constant(value: float) -> tuple[float, ...]:
    return (float(value),) + (0.0,) * (NUM_WORK_TERMS - 1)


def layer(i, forward=1.0, backward=2.0, state=0.0, saved=((0.0, 0.0),), transient=0.0, group=0, sent=0.0, params=1.0):
    """`saved`: (extra seconds, bytes) of the tiers none, selective, full; the middle one may be missing."""
    names = {1: ("none",), 2: ("none", "full"), 3: TIERS}[len(saved)]
    return LayerCost(
        name=f"layers.{i}",
        tower="language",
        kind="block",
        forward_s=constant(forward),
        backward_s=constant(backward),
        output_bytes=constant(sent),
        state_bytes=state,
        num_params=params,
        tiers=tuple(
            RecomputeTier(name=name, extra_backward_s=constant(extra), saved_bytes=constant(size))
            for name, (extra, size) in zip(names, saved, strict=True)
        ),
        transient_bytes=constant(transient),
        group=group,
    )


def profile_of(layers) -> Profile:
    return Profile(
        layers=tuple(layers),
        method="analytic",
        device=DEVICE,
        dims=ParallelDims(),
        dtype="bf16",
        time_error=0.1,
        memory_error=0.05,
    )


def problem_of(profile, num_stages, num_microbatches, work=ONE[None, None], **ask):
    """Time at the mean and memory at the largest of `work` (steps, micro-batches, terms); room for all unless said."""
    limits = {"memory_bytes": 1e18, "num_microbatches": num_microbatches, **ask}
    mean, most = work.mean(axis=(0, 1)), work.max(axis=(0, 1))
    return SplitProblem(profile=profile, num_stages=num_stages, work_mean=mean, work_max=most, **limits)


def equal_work(num_microbatches):
    return np.tile(ONE, (1, num_microbatches, 1))


def random_work(rng, steps, num_microbatches, spread=0.5):
    return rng.uniform(1 - spread, 1 + spread, (steps, num_microbatches, 1)) * ONE


def split(profile, num_stages, *, memory=1e18, microbatches=8, work=ONE, **ask):
    return split_stages(problem_of(profile, num_stages, microbatches, work[None, None], memory_bytes=memory, **ask))


def assess_stages(profile, stages, *, num_chunks=1, **ask):
    """The stages on as many devices as they need."""
    shape = {"num_stages": len(stages) // num_chunks, "num_chunks": num_chunks}
    return SplitProblem(profile=profile, **shape, **ask).assess(stages)


def with_tables(profile, rng):
    """A layer holds tables that those behind it, up to another, are handed: stages that begin there hold them too."""
    first, last = sorted(rng.integers(0, len(profile.layers), 2))
    size, layers = float(rng.integers(1, 30)), list(profile.layers)
    tiers = (replace(t, saved_bytes=constant(t.saved_bytes[0] + size)) for t in layers[first].tiers)
    layers[first] = replace(layers[first], tiers=tuple(tiers))
    layers[first + 1 : last + 1] = [replace(x, entry_bytes=constant(size)) for x in layers[first + 1 : last + 1]]
    return replace(profile, layers=tuple(layers))


def random_profile(rng, num_layers, num_groups, num_tiers=3):
    """Layers of a few groups with whole-number costs; some groups offer no recompute."""
    kinds = []
    for g in range(num_groups):
        forward = int(rng.integers(1, 9))
        saved = np.sort(rng.integers(0, 40, num_tiers))[::-1]
        extra = np.sort(rng.integers(0, 9, num_tiers - 1))
        count = num_tiers if rng.random() < 0.8 else 1
        kinds.append(
            {
                "forward": forward,
                "backward": 2 * forward,
                "state": int(rng.integers(0, 60)),
                "saved": tuple(zip([0, *extra.tolist()], saved.tolist(), strict=True))[:count],
                "transient": int(rng.integers(0, 30)),
                "group": g,
            }
        )
    return profile_of(layer(i, **kinds[int(rng.integers(num_groups))]) for i in range(num_layers))
