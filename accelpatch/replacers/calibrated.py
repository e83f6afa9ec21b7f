"""The part of a weight-only format that rounds by the second moments of a weight's inputs, where a rule asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from accelpatch.errors import PlanError
from accelpatch.patching.replacer import Choice, Replacer
from accelpatch.quant import gptq

HESSIAN = "hessian"
ROUNDING = ("nearest", "gptq")
HOW = "how"  # in the detail of a Choice: those of the options below that a rule gives
#: options of replacers
CALIBRATED: Mapping[str, tuple[type, ...]] = {
    "rounding": (str,), "act_order": (bool,), "scale_search": (bool,), "damping": (float,)
}  # fmt: skip


class CalibratedReplacer(Replacer):
    """Base of the formats whose grid `quant.gptq` rounds to."""

    def check_options(self, options: Mapping[str, Any]) -> None:
        super().check_options(options)
        if (how := options.get("rounding", ROUNDING[0])) not in ROUNDING:
            raise PlanError(f"{self.name}: option rounding is {how!r}, and it is one of {', '.join(ROUNDING)}")
        if how == ROUNDING[0] and {"act_order", "damping"} & options.keys():
            raise PlanError(f"{self.name}: act_order and damping are options of rounding: gptq")
        if not 0 < (damping := options.get("damping", 1.0)) < float("inf"):
            raise PlanError(f"{self.name}: option damping is {damping:g}, and it is above 0 (usually 0.01)")

    def grid(self, detail: Mapping[str, Any]) -> gptq.Grid:
        """The values that a group of weights can take. detail: of a Choice."""
        raise NotImplementedError

    def observer(self, choice: Choice) -> str | None:
        return HESSIAN if HOW in choice.detail else None

    def rounded(self, weight: Tensor, detail: Mapping[str, Any], group_size: int, hessian: Tensor) -> Any:
        """A float weight [N, K] in the format, rounded for inputs with these second moments [K, K]."""
        how = dict(detail.get(HOW, {}))
        search = how.pop("scale_search", False)
        if how.pop("rounding", ROUNDING[0]) == ROUNDING[0]:
            return gptq.nearest(weight, hessian, self.grid(detail), group_size, search)
        return gptq.Gptq(search=search, **how).rounded(weight, hessian, self.grid(detail), group_size)


def how_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the detail of a Choice says of the options of calibrated rounding: nothing where a rule asks for none."""
    given = {name: options[name] for name in CALIBRATED if name in options}
    return {HOW: given} if given.get("rounding", ROUNDING[0]) != ROUNDING[0] or given.get("scale_search") else {}
