"""What the emulator raises: one error type that says where in the kernel it happened."""

from __future__ import annotations

from accelpatch.errors import AccelpatchError


class EmulationError(AccelpatchError):
    """A kernel did in the emulator what it must not do on a GPU, or uses what the emulator does not know.

    The message begins with the place: the Python line where the assembly carries one, else the line of the assembly.
    """
