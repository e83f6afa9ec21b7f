"""Compares every kernel that this machine can run with its reference, on all cases of its file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from accelpatch.device import probe
from accelpatch.errors import CompileError, KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.check import attention_check, parity
from accelpatch.kernels.spec import Case

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SEED = 0


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
    for op, (_, names) in dispatch.TABLE.items():
        for name in names:
            for case in dispatch.kernel(op).cases():
                for dtype in DTYPES:
                    yield _record(op, name, case, dtype, device)
    for name in attention_check.IMPLEMENTATIONS:
        for id_, step in attention_check.STEPS.items():
            for dtype in DTYPES:
                yield _attention(name, id_, step, dtype, device)


def _record(op: str, name: str, case: Case, dtype: torch.dtype, device: torch.device) -> SelftestRecord:
    kernel = dispatch.kernel(op)
    label = f"{case.id}-{str(dtype).removeprefix('torch.')}"
    try:
        args = case.make(torch.Generator().manual_seed(SEED), dtype, device)
    except KernelError as error:  # a weight in a CPU's own layout, where there is no library that makes it
        return SelftestRecord(op, name, label, 0.0, 0.0, None, str(error))
    reason = dispatch.why_not(op, name, kernel.spec(*args), probe(device))
    if reason is not None:
        return SelftestRecord(op, name, label, 0.0, 0.0, None, reason)
    try:
        with torch.inference_mode(), dispatch.forced(name):
            found = parity.run_and_check(op, args, kernel.op)
    except CompileError as error:
        return SelftestRecord(op, name, label, 0.0, 0.0, None, str(error))
    except (KernelError, RuntimeError) as error:
        # a self-test reports what does not work: one kernel that fails to start must not hide the others
        return SelftestRecord(op, name, label, float("inf"), 0.0, False, f"{type(error).__name__}: {error}")
    worst = max(found, key=lambda comparison: (not comparison.ok, comparison.error - comparison.bound))
    return SelftestRecord(op, name, label, worst.error, worst.bound, worst.ok, worst.reason)


def _attention(
    name: str, id_: str, step: attention_check.Step, dtype: torch.dtype, device: torch.device
) -> SelftestRecord:
    op, label = attention_check.OP, f"{id_}-{str(dtype).removeprefix('torch.')}"
    args, shape = attention_check.made(step, dtype, device, SEED)
    if reason := attention_check.why_not(name, shape, dtype, probe(device)):
        return SelftestRecord(op, name, label, 0.0, 0.0, None, reason)
    try:
        with torch.inference_mode():
            found, bound = attention_check.deviation(name, args, shape)
    except CompileError as error:
        return SelftestRecord(op, name, label, 0.0, 0.0, None, str(error))
    except (KernelError, RuntimeError) as error:
        return SelftestRecord(op, name, label, float("inf"), 0.0, False, f"{type(error).__name__}: {error}")
    return SelftestRecord(op, name, label, found, bound, found <= bound, "")
