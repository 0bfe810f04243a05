"""How devices are divided among the kinds of parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.errors import TrimtabError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """How the devices are divided: data, pipeline, tensor and context parallel degrees, and those of experts.

    Use it where a function asks for `dims`. dp x pp x tp x cp is the number of devices. Experts divide the dp x cp x tp
    devices of a pipeline stage once more, among ep x etp of them; the others hold copies, as Megatron-Core's parallel
    folding has it. Neighbours are first those of tp (of etp for experts), then cp (ep), then dp.

    >>> ParallelDims(dp=4, pp=8)
    ParallelDims(dp=4, pp=8, tp=1, cp=1, ep=1, etp=None)
    >>> dims = ParallelDims(dp=4, tp=2, ep=4, etp=1)
    >>> dims.replicas, dims.expert_replicas
    (4, 2)
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1  # devices that share the tokens of a pack
    ep: int = 1  # devices that share the experts of a layer
    etp: int | None = None  # devices that share one expert; None: as many as tp

    def __post_init__(self) -> None:
        for axis in ("dp", "pp", "tp", "cp", "ep", "etp"):
            degree = getattr(self, axis)
            if degree is not None and degree < 1:
                raise TrimtabError(f"{axis} {degree} is not a degree of parallelism: give 1 or more")
        ranks = self.dp * self.cp * self.tp
        if ranks % (self.ep * self.expert_tp):
            raise TrimtabError(
                f"ep {self.ep} x etp {self.expert_tp} was asked for, and a pipeline stage has dp x cp x tp = {ranks} "
                "devices: give expert degrees whose product divides them"
            )

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def is_folded(self) -> bool:
        """Return whether experts are divided otherwise than the dense layers."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def replicas(self) -> int:
        """Devices that hold the same dense weights, and share their gradients and optimizer state."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """The same of experts' weights."""
        return self.dp * self.cp * self.tp // (self.ep * self.expert_tp)
