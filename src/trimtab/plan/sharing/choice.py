"""What a user may ask of vision data parallel."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from trimtab.options import Option, Rule, VisionObjective

GroupChoice = Literal["none", "auto", "tp", "dp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionChoice:
    """Vision data parallel as asked for; None leaves a choice to the planner.

    Use it as `PlanOptions(vision=...)`, to let ranks share the images of a micro-batch.

    >>> VisionChoice(group="auto").rule
    'balanced'
    """

    group: Annotated[
        GroupChoice,
        Option(
            "Ranks that share images, each encoding a part; auto: those that gain most, if any do.", flag="--vision-dp"
        ),
    ] = "none"  # auto: the group whose simulated epoch is shortest, or none
    pooling: Annotated[
        int | None,
        Option(
            "Micro-batches whose images are encoded in one call; default: chosen.", flag="--vision-pooling", least=1
        ),
    ] = None  # None: those of the shortest epoch that fit the memory
    rule: Annotated[Rule, Option("Any image to any rank, or runs of images in order.", flag="--vision-rule")] = (
        "balanced"
    )
    objective: Annotated[
        VisionObjective, Option("What the shares of images are balanced by.", flag="--vision-objective")
    ] = "time"

    def problems(self) -> Iterator[str]:
        """What no plan could follow of values that options take, a sentence each."""
        if self.group == "none" and self != VisionChoice():
            yield "vision data parallel was described without a group to share the images: give --vision-dp too"
