"""What is wrong with a set of Megatron-LM flags for a vision-language model, before anything is started.

Checked against megatron-core 0.16.1 by tests/integration/test_megatron_core.py; nothing is imported here.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Literal, get_args

from trimtab.adapters.megatron import layout_of
from trimtab.adapters.running import head_problems, padded_heads
from trimtab.errors import PlanError, join_problems
from trimtab.specs import ModelSpec
from trimtab.units import format_count

Launcher = Literal["megatron", "megatron-bridge", "ms-swift", "pai-megatron"]
LAUNCHERS: tuple[Launcher, ...] = get_args(Launcher)
_MOST = 10_000  # letters of a layout that is written out: its repeats come from outside


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check found."""

    fails: bool  # it does not start, or trains something else than was declared; else it runs, at a price
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFlags:
    """The flags that decide which layers a rank builds; named as Megatron-LM's parser stores them."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    num_layers: int | None = None  # None: the model's own
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None  # ms-swift's name of it
    num_layers_per_virtual_pipeline_stage: int | None = None


def flag_values(text: str) -> dict[str, str]:
    """Return the value of each flag of a launch script, "" where it has none; the later value of a flag given twice.

    >>> flag_values("--bf16 --lr=1e-5 --micro-batch-size 1")
    {'bf16': '', 'lr': '1e-5', 'micro_batch_size': '1'}
    """
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise PlanError(f"the flags cannot be read ({error}): close every quote") from None
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            found[name] = value
        elif name and not found[name]:
            found[name] = word
    return found


def parse_megatron_flags(text: str) -> MegatronFlags:
    """Return the flags as they stand in a launch script; the others, which are many, are passed over.

    Underscores may stand for hyphens, `=` for the blank, and a later flag takes the place of an earlier one, as in
    argparse.
    """
    return read_megatron_flags(flag_values(text))


def read_megatron_flags(said: Mapping[str, str]) -> MegatronFlags:
    """Return those that decide the split, of `flag_values`."""
    found: dict[str, int | str | bool] = {}
    for field in fields(MegatronFlags):
        if field.name in said:
            found[field.name] = True if isinstance(field.default, bool) else said[field.name]
    problems: list[str] = []
    for name, value in found.items():
        if isinstance(value, str) and name != "pipeline_model_parallel_layout":
            if re.fullmatch(r"-?\d{1,9}", value):
                found[name] = int(value)
            else:
                flag = name.replace("_", "-")
                problems.append(f"--{flag} {value!r} must be a whole number")
    for name in (
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers"),
        *("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size"),
        "num_layers_per_virtual_pipeline_stage",
    ):
        if isinstance(number := found.get(name, 1), int) and number < 1:
            problems.append(f"--{name.replace('_', '-')} must be at least 1, not {number}")
    if problems:
        raise PlanError(join_problems(problems))
    return MegatronFlags(**found)  # type: ignore[arg-type]


def check_megatron(
    model: ModelSpec, flags: MegatronFlags, *, launcher: Launcher = "megatron", vision_cleared: bool = False
) -> list[Finding]:
    """Return everything wrong with these flags for this model, what keeps it from starting first.

    `vision_cleared`: the launcher is known to clear the language model's split in the vision tower's configuration.
    """
    declared = len(model.indices("language", "block"))
    num_layers = flags.num_layers or declared
    failing = head_problems(model, flags.tensor_model_parallel_size)
    if num_layers != declared:
        failing.append(f"--num-layers must be {declared}, the language blocks of {model.name}, not {num_layers}")
    findings = [*_padded_heads(model, flags.tensor_model_parallel_size)]
    try:
        stages = stage_counts(flags, num_layers)
    except PlanError as error:
        failing += str(error).splitlines()
    else:
        findings += _deepstack_findings(model, stages)
        findings += _tied_findings(model, stages)
    findings += [Finding(fails=True, message=found) for found in failing]
    if not vision_cleared:
        findings += _truncation_findings(model, flags, launcher)
    return sorted(findings, key=lambda finding: not finding.fails)


# -- the split ------------------------------------------------------------------------------------------------------


def stage_counts(flags: MegatronFlags, num_layers: int) -> tuple[int, ...]:
    """Count the decoder blocks of each stage, in the order of a micro-batch; `PlanError` with what is wrong."""
    first, last = flags.decoder_first_pipeline_num_layers, flags.decoder_last_pipeline_num_layers
    counted = flags.account_for_embedding_in_pipeline_split or flags.account_for_loss_in_pipeline_split
    uneven = first is not None or last is not None
    if flags.pipeline_model_parallel_layout is not None:
        others = {
            "--decoder-first-pipeline-num-layers": first is not None,
            "--decoder-last-pipeline-num-layers": last is not None,
            "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split": counted,
        }
        if any(others.values()):
            names = ", ".join(name for name, given in others.items() if given)
            raise PlanError(f"--pipeline-model-parallel-layout excludes {names}: leave one out")
        return _read_layout(flags.pipeline_model_parallel_layout, flags.pipeline_model_parallel_size, num_layers)
    if uneven and counted:
        raise PlanError(
            "a first or last count excludes --account-for-embedding-in-pipeline-split and "
            "--account-for-loss-in-pipeline-split: leave one out"
        )
    return _count_uneven(flags, num_layers) if uneven else _count_even(flags, num_layers)


def _read_layout(layout: str, pp: int, num_layers: int) -> tuple[int, ...]:
    stages = expand_layout(layout)
    if stages is None:
        raise PlanError(f"layout {layout!r} must hold E, t, m, L, repeats such as t*4 or (t|)*4, and |")
    problems = []
    if len(stages) % pp:
        problems.append(f"layout {layout!r} has {len(stages)} stages: make them a multiple of pp {pp}")
    if not stages[0].startswith("E") or "".join(stages).count("E") != 1:
        problems.append(f"layout {layout!r} must have one E, at its start")
    if not stages[-1].endswith("L") or "".join(stages).count("L") != 1:
        problems.append(f"layout {layout!r} must have one L, at its end")
    counts = tuple(stage.count("t") for stage in stages)
    if sum(counts) != num_layers:
        problems.append(f"layout {layout!r} has {sum(counts)} t: make them the model's {num_layers} blocks")
    if problems:
        raise PlanError(join_problems(problems))
    return counts


def expand_layout(layout: str) -> list[str] | None:
    """The letters of each stage, repeats written out; None where Megatron-Core's parser would refuse a character."""
    text = layout.replace(",", "")
    for pattern in (r"\(([^()]*)\)\*(\d{1,6})", r"([EtmL|])\*(\d{1,6})"):
        while (match := re.search(pattern, text)) is not None:
            if len(text) + len(match[1]) * int(match[2]) > _MOST:
                return None
            text = text[: match.start()] + match[1] * int(match[2]) + text[match.end() :]
    return text.split("|") if re.fullmatch(r"[EtmL|]+", text) else None


def _count_uneven(flags: MegatronFlags, num_layers: int) -> tuple[int, ...]:
    pp = flags.pipeline_model_parallel_size
    first, last = flags.decoder_first_pipeline_num_layers, flags.decoder_last_pipeline_num_layers
    if pp == 1:
        raise PlanError(f"Megatron-LM trains {first or last} of {num_layers} layers so at pp 1, silently: leave it out")
    problems = [
        f"--decoder-{where}-pipeline-num-layers must be at least 1, not {count}: or give the layout {example!r}"
        for where, count, example in (("first", first, f"E|t*{num_layers}L"), ("last", last, f"Et*{num_layers}|L"))
        if count is not None and count < 1
    ]
    ends = (first or 0) + (last or 0)
    middles = pp - (first is not None) - (last is not None)
    left = num_layers - ends
    if problems:
        pass
    elif left < 0 or (middles == 0 and left):
        problems.append(f"first and last stage hold {ends} of {num_layers} layers at pp {pp}: make the stages hold all")
    elif middles and (left % middles or left == 0):
        problems.append(
            f"{left} layers do not divide by {middles}: leave a multiple, or {_advise_layout(num_layers, pp)}"
        )
    if problems:
        raise PlanError(join_problems(problems))
    ranks = [left // middles if middles else 0] * pp
    ranks[0] = first if first is not None else ranks[0]
    ranks[-1] = last if last is not None else ranks[-1]
    return _in_chunks(flags, ranks)


def _advise_layout(num_layers: int, pp: int) -> str:
    """Return one of stages as even as whole layers go, where there are few enough."""
    if pp > min(num_layers, _MOST):
        return f"choose a pp of {min(num_layers, _MOST)} or less"
    counts = [num_layers // pp + (stage < num_layers % pp) for stage in range(pp)]
    return f"pass a layout such as {layout_of(counts)!r}"


def _count_even(flags: MegatronFlags, num_layers: int) -> tuple[int, ...]:
    pp = flags.pipeline_model_parallel_size
    embedding, loss = flags.account_for_embedding_in_pipeline_split, flags.account_for_loss_in_pipeline_split
    total = num_layers + embedding + loss
    if total % pp:
        what = f"{num_layers} layers" + (f" and {total - num_layers} that count as one" if total > num_layers else "")
        raise PlanError(f"{what} do not divide by pp {pp}: {_advise_layout(num_layers, pp)}")
    counts = [*_in_chunks(flags, [total // pp] * pp)]
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts)


def _in_chunks(flags: MegatronFlags, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the layers of each rank cut into its virtual stages."""
    chunks = flags.num_virtual_stages_per_pipeline_rank or flags.virtual_pipeline_model_parallel_size or 1
    if flags.num_layers_per_virtual_pipeline_stage and len(ranks) > 1:
        chunks = max(1, ranks[0] // flags.num_layers_per_virtual_pipeline_stage)
    wrong = sorted({count for count in ranks if count % chunks})
    if wrong:
        raise PlanError(f"ranks of {' and '.join(map(str, wrong))} layers do not divide into {chunks} virtual stages")
    return tuple(count // chunks for _ in range(chunks) for count in ranks)


# -- what else does not fit -----------------------------------------------------------------------------------------


def _padded_heads(model: ModelSpec, tp: int) -> Iterator[Finding]:
    for heads, padded in padded_heads(model, tp):
        yield Finding(
            fails=False,
            message=f"tp {tp} does not divide the vision tower's {heads} heads: pad them to {padded}, or use tp 1",
        )


def _deepstack_findings(model: ModelSpec, counts: Sequence[int]) -> Iterator[Finding]:
    """Yield the cuts that the model forbids: its vision features enter language blocks after the first."""
    block = model.indices("language", "block")[0]
    cuts = {block + passed for passed in accumulate(counts[:-1])} & model.forbidden_cuts
    if cuts:
        free = next(c for c in range(max(cuts), len(model.layers) + 1) if c not in model.forbidden_cuts)
        reason = model.forbidden_cut_reason or "the model forbids this cut"
        yield Finding(
            fails=True,
            message=f"stage 0 ends after {min(cuts) - block} language blocks, and {reason}: give it {free - block}",
        )


def _tied_findings(model: ModelSpec, counts: Sequence[int]) -> Iterator[Finding]:
    params = {layer.name: layer.num_params for layer in model.layers}
    for owner, borrower in model.tied if len(counts) > 1 else ():
        yield Finding(
            fails=False,
            message=f"{borrower} shares the weight of {owner} on another stage: both hold "
            f"{format_count(params.get(owner, 0))} parameters and sum their gradients every step",
        )


def built_vision_layers(declared: int, flags: MegatronFlags) -> int:
    """Count layers that Megatron-Core builds of a vision tower whose configuration copies the language model's with
    its pipeline size set to 1 and nothing else of the split cleared.

    With a layout: the t of its first stage. With counts: one stage is first and last at once, and the last one wins.
    """
    if flags.pipeline_model_parallel_layout is not None:
        stages = expand_layout(flags.pipeline_model_parallel_layout)
        return declared if stages is None else stages[0].count("t")
    first, last = flags.decoder_first_pipeline_num_layers, flags.decoder_last_pipeline_num_layers
    if last is not None:
        return last
    return declared if first is None else first


def _truncation_findings(model: ModelSpec, flags: MegatronFlags, launcher: Launcher) -> Iterator[Finding]:
    declared = len(model.indices("vision", "block"))
    built = built_vision_layers(declared, flags)
    if built == declared or declared == 0 or launcher in ("ms-swift", "megatron-bridge"):
        return  # these two build the tower from Hugging Face's class, or clear the split
    what = (
        f"{built} of {declared} vision layers are built, silently, where the split stays in the vision tower's "
        "copy of the configuration"
    )
    remedy = (
        "clear num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage and "
        "pipeline_model_parallel_layout there (`trimtab export megatron` prints the lines), then pass --vision-cleared"
    )
    if launcher == "megatron":
        yield Finding(
            fails=True,
            message=f"{what}: Megatron-LM's examples/multimodal and pretrain_vlm.py clear it under names of an older "
            f"Megatron-Core, so {remedy}",
        )
        return
    only_first = flags.pipeline_model_parallel_layout is None and flags.decoder_last_pipeline_num_layers is None
    if model.family == "qwen2_vl" or not only_first:
        yield Finding(
            fails=True,
            message=f"{what}: Pai-Megatron-Patch's examples/qwen2_vl clears nothing that today's Megatron-Core reads, "
            f"its other examples only the first stage's count, so {remedy}",
        )
