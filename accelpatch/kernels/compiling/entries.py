"""What was compiled lies in the user's cache: a file and a manifest of what it was made of, its digest and compiler.

Both are checked before the file is used. One that does not agree is compiled again; a folder that is another user's, or
that others may write to, is an error.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from accelpatch import cache
from accelpatch.errors import LibraryError

KIND = "kernels"
MANIFEST = "manifest.json"


def finished(key: str, file: str, made_of: str, compiler: str, write: Callable[[Path], None]) -> Path:
    """The path of `file` in the cache entry `key`; where there is none that is whole, `write(path)` compiles it.

    made_of: digest of everything that it is made of. compiler: its identity, for the manifest. Raises what `write`
    raises, LibraryError where what it writes does not stay as it was, and CacheError for an entry that is not private.
    """

    def whole(folder: Path) -> None:
        write(folder / file)
        describe(folder, file, made_of, compiler)

    folder = cache.publish(KIND, key, whole)
    advice = "run `accelpatch cache clear kernels`"
    for path in (folder, folder / file):
        if os.path.lexists(path):
            cache.check_private(path, "the compiled kernels in", advice)
    if wrong := disagreement(folder, made_of, file):
        cache.remove(KIND, key)
        folder = cache.publish(KIND, key, whole)
        if disagreement(folder, made_of, file):
            raise LibraryError(f"{folder / file} {wrong}, also when it was built again: {advice}")
    return folder / file


def describe(folder: Path, file: str, made_of: str, compiler: str) -> None:
    """Write the manifest of a compiled file. Nobody else may write to the file, whatever the umask is."""
    (folder / file).chmod((folder / file).stat().st_mode & ~0o022)
    facts = {"made_of": made_of, "sha256": sha256(folder / file), "compiler": compiler}
    (folder / MANIFEST).write_text(json.dumps(facts, indent=1))


def disagreement(folder: Path, made_of: str, file: str) -> str | None:
    """Why a compiled file does not match its manifest or the wanted sources; None where it does."""
    try:
        facts = json.loads((folder / MANIFEST).read_text())
        found = sha256(folder / file)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError:
        return "has a manifest that cannot be read"
    if not isinstance(facts, dict) or facts.get("made_of") != made_of:
        return "was made of other sources"
    return None if facts.get("sha256") == found else "is not what was built (its digest differs)"


def sha256(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def shared_library(path: Path) -> ctypes.CDLL:
    """Load a shared library. Raises OSError where the system does not."""
    return ctypes.CDLL(str(path))
