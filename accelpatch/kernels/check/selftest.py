"""Compares every kernel that this machine can run with its reference, on all cases of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from accelpatch.device import probe
from accelpatch.errors import CompileError, KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.check import attention_check, parity
from accelpatch.kernels.spec import Case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = 0
Judged = tuple[float, float, bool | None, str]  # the last four of a record


@dataclass(frozen=True)
class SelftestRecord:
    """One case of one implementation. error, bound: of the worst element. reason: why it failed or did not run.

    ok: None where the implementation cannot run this case here.
    """

    op: str
    implementation: str
    case: str
    error: float
    bound: float
    ok: bool | None
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def run(device: torch.device | str = "cpu") -> list[SelftestRecord]:
    """Check all implementations of all operations on `device`, in float32, bfloat16 and float16."""
    return list(records(torch.device(device)))


def records(device: torch.device) -> Iterator[SelftestRecord]:
    """The records of `run`, one by one."""
    for op in dispatch.TABLE:
        for name in dispatch.implementations_of(op):
            for case in dispatch.kernel(op).cases():
                for dtype in DTYPES:
                    yield _record(op, name, case.id, dtype, partial(_of_case, op, name, case, dtype, device))
    for name in attention_check.IMPLEMENTATIONS:
        for id_, step in attention_check.STEPS.items():
            for dtype in DTYPES:
                yield _record(attention_check.OP, name, id_, dtype, partial(_of_step, name, step, dtype, device))


def _record(op: str, name: str, case: str, dtype: torch.dtype, judged: Callable[[], Judged]) -> SelftestRecord:
    try:
        figures = judged()
    except CompileError as error:
        figures = 0.0, 0.0, None, str(error)
    except (KernelError, RuntimeError) as error:
        # a self-test reports what does not work: one kernel that fails to start must not hide the others
        figures = float("inf"), 0.0, False, f"{type(error).__name__}: {error}"
    return SelftestRecord(op, name, f"{case}-{str(dtype).removeprefix('torch.')}", *figures)


def _of_case(op: str, name: str, case: Case, dtype: torch.dtype, device: torch.device) -> Judged:
    kernel = dispatch.kernel(op)
    try:
        args = case.make(torch.Generator().manual_seed(SEED), dtype, device)
    except KernelError as error:  # a weight in a CPU's own layout, where there is no library that makes it
        return 0.0, 0.0, None, str(error)
    if (reason := dispatch.why_not(op, name, kernel.spec(*args), probe(device))) is not None:
        return 0.0, 0.0, None, reason
    with torch.inference_mode(), dispatch.forced(name):
        found = parity.run_and_check(op, args, kernel.op)
    worst = max(found, key=lambda comparison: (not comparison.ok, comparison.error - comparison.bound))
    return worst.error, worst.bound, worst.ok, worst.reason


def _of_step(name: str, step: attention_check.Step, dtype: torch.dtype, device: torch.device) -> Judged:
    args, shape = attention_check.made(step, dtype, device, SEED)
    if reason := attention_check.why_not(name, shape, dtype, probe(device)):
        return 0.0, 0.0, None, reason
    with torch.inference_mode():
        found, bound = attention_check.deviation(name, args, shape)
    return found, bound, found <= bound, ""
