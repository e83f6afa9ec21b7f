"""Implementations that turned out not to compile on this machine, by what they were to run."""

from __future__ import annotations

import warnings
from dataclasses import replace

from accelpatch.device import Device
from accelpatch.kernels.spec import Described, Spec

MOST = 4096  # specs; the table is then cleared: a program with ever new shapes must not fill the memory

#: (implementation, arch, Spec as text) -> why it cannot be compiled there
_found: dict[tuple[str, str, str], str] = {}


def reason(name: str, spec: Spec, device: Device) -> str | None:
    """Why the implementation `name` could not be compiled when it was to run a spec; None where it has not failed."""
    return _found.get(_key(name, spec, device)) if _found else None


def remember(name: str, spec: Spec, device: Device, reason: str) -> None:
    """From now on the implementation `name` has this reason against a spec; says so."""
    if len(_found) >= MOST:
        _found.clear()
    _found[_key(name, spec, device)] = reason
    warnings.warn(f"{spec.op}: another implementation runs in place of {name!r}: {reason}", stacklevel=3)


def _key(name: str, spec: Spec, device: Device) -> tuple[str, str, str]:
    options = {key: value.facts if isinstance(value, Described) else value for key, value in spec.options.items()}
    return name, device.arch, repr(replace(spec, options=options))
