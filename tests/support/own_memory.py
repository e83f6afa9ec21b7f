"""What this process has in memory, as /proc says: of files that are mapped into it, and of no file."""

from __future__ import annotations

from pathlib import Path


def mapped(folder: str) -> int:
    """Bytes of the files of a folder that were read where they are mapped into this process."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if not name[0].isupper():
            inside = folder in line
        elif inside and name == "Rss":
            found += int(value.split()[0]) << 10
    return found


def anonymous() -> int:
    """Bytes of this process that are of no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
