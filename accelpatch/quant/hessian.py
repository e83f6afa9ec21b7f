"""Second moments of the inputs of linear layers, gathered while texts run through a model: what GPTQ and AWQ need."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from accelpatch.errors import KernelError


@dataclass(eq=False)
class _SecondMoment:
    total: Tensor  # [K, K] float32
    tokens: int = 0


@dataclass(eq=False)
class Hessians:
    """Sums x x^T of each site's inputs, on the device where they are. Sites that read one tensor share one sum."""

    _of: dict[str, _SecondMoment] = field(default_factory=dict)
    _latest: tuple[Tensor, int, _SecondMoment] | None = None

    def see(self, path: str, x: Tensor) -> None:
        """Add the input x[..., K] of a site to its sum."""
        if not x.numel():
            return
        # An inference tensor has no version counter, and may have been written into meanwhile.
        version = -1 if x.is_inference() else x._version
        latest, moment = self._latest, self._of.get(path)
        same = latest is not None and latest[0] is x and version == latest[1] >= 0
        if same and latest is not None and moment in (None, latest[2]):
            self._of[path] = latest[2]
            return
        if moment is None:
            zeros = torch.zeros(x.shape[-1], x.shape[-1], dtype=torch.float32, device=x.device)
            moment = self._of[path] = _SecondMoment(zeros)
        rows = x.detach().reshape(-1, x.shape[-1])
        _add(moment.total, rows)
        moment.tokens += len(rows)
        self._latest = x, version, moment

    def shared(self) -> list[list[str]]:
        """The paths that were seen, in groups that share one input."""
        groups: dict[int, list[str]] = {}
        for path, moment in self._of.items():
            groups.setdefault(id(moment), []).append(path)
        return list(groups.values())

    def tokens(self, path: str) -> int:
        """How many tokens reached a site."""
        return self._of[path].tokens if path in self._of else 0

    def of(self, path: str) -> Tensor | None:
        """The mean of x x^T, [K, K] float32; None for a site that no token reached.

        Raises KernelError, naming the site, for inputs that are not finite.
        """
        moment = self._of.get(path)
        if moment is None:
            return None
        bad = ~moment.total.diagonal().isfinite()
        if bool(bad.any()):
            raise KernelError(
                f"{path}: channel {int(bad.nonzero()[0])} of its input is NaN or infinite while calibrating: "
                "check the model in this dtype, or load it in bfloat16 or float32"
            )
        return moment.total / moment.tokens


def _add(total: Tensor, rows: Tensor) -> None:
    """Add x x^T of rows[tokens, K] to total[K, K] float32. A matrix unit multiplies 16-bit floats exactly."""
    if rows.is_cuda and rows.element_size() == 2 and not torch.version.hip and hasattr(torch.ops.aten.mm, "dtype"):
        total.add_(torch.mm(rows.t(), rows, out_dtype=torch.float32))
    else:
        rows = rows.float()
        total.addmm_(rows.t(), rows)
