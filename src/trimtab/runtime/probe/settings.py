"""What `trimtab probe` is asked; read without torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from trimtab.errors import TrimtabError, join_problems
from trimtab.options import PLAN, TIMEOUT, Option, ReadingOptions, TorchDevice, option_problems
from trimtab.plan.options import parse_share
from trimtab.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """What is probed, and within which memory; checks itself."""

    plan: Annotated[Path, PLAN]
    model: Annotated[
        Path, Option("Folder as for `trimtab train`; without weights, random ones are used.", argument=True)
    ]
    memory_bytes: Annotated[
        int | None,
        Option(
            "Memory of one device, as in 80GiB; default: the plan's.", flag="--budget", read=parse_bytes, common=True
        ),
    ] = None
    risk: Annotated[
        float | None,
        Option(
            "Accepted chance that the choice needs more than it, as in 5%; default: the plan's.",
            read=parse_share,
            common=True,
        ),
    ] = None
    num_steps: Annotated[int, Option("Training steps of each run of the choice.", flag="--steps", least=2)] = 2
    device: Annotated[TorchDevice | None, Option("Default: cuda where there is one.", common=True)] = None
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    seed: Annotated[int, Option("Seed of random weights.")] = 0
    timeout_s: Annotated[int, TIMEOUT] = 1800

    def __post_init__(self) -> None:
        problems = option_problems(self)
        if problems:
            raise TrimtabError(join_problems(problems))
