"""A user's kernel file: what it is compiled with, the headers that it includes, and whether any of it has changed."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from accelpatch.errors import KernelError

#: `#include "x"` and `<x>`; `.include "x"` and `.incbin "x"` of assembly. One that a macro names is not seen.
_INCLUDE = re.compile(r'^\s*(?:#\s*include\s*|\.inc(?:lude|bin)\s+)(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
BINARY = (".co", ".cubin")
MOST_HEADERS = 1000

Stamp = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class SourceFile:
    """defines: name -> value, "" for none, as -D. include: folders for headers. options: further ones of the compiler,
    after ours."""

    path: Path
    defines: tuple[tuple[str, str], ...] = ()
    include: tuple[Path, ...] = ()
    options: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """Defines, include folders and options, as compilers take them."""
        values = [f"-D{name}={value}" if value else f"-D{name}" for name, value in self.defines]
        return [*values, *(f"-I{folder}" for folder in self.include), *self.options]

    def text(self) -> str:
        """The file's text; "" of one that is compiled. Raises KernelError where it cannot be read."""
        if self.path.suffix in BINARY:
            return ""
        try:
            return self.path.read_text(errors="replace")
        except OSError as error:
            raise KernelError(
                f"the kernel file {self.path} cannot be read ({error.strerror}): correct its path"
            ) from None

    def files(self) -> list[Path]:
        """The file, the headers that it includes, and those that they include, as far as they are found in the folder
        of the file that includes them or in the include folders; the system's and the compiler's own are left out."""
        self.text()
        found, waiting = [self.path], [self.path]
        while waiting and len(found) < MOST_HEADERS:
            file = waiting.pop()
            text = "" if file.suffix in BINARY else file.read_text(errors="replace")
            for quoted, bracketed in _INCLUDE.findall(text):
                places = [*([file.parent] if quoted else []), *self.include]
                header = next((p for place in places if (p := place / (quoted or bracketed)).is_file()), None)
                if header is not None and header not in found:
                    found.append(header)
                    waiting.append(header)
        return found

    def stamp(self) -> Stamp:
        """Name, time of change and size of each of `files`: cheap to compare with `unchanged`."""
        return tuple((str(file), (facts := os.stat(file)).st_mtime_ns, facts.st_size) for file in self.files())

    def digest(self) -> str:
        """SHA-256 over the contents of `files`, and what they are compiled with."""
        total = hashlib.sha256(repr((self.path.suffix, self.defines, self.options)).encode())
        for file in self.files():
            content = file.read_bytes()
            total.update(f"\n{file.name} {len(content)}\n".encode() + content)
        return total.hexdigest()


def unchanged(stamp: Stamp) -> bool:
    """Whether all files of a stamp are as they were."""
    try:
        return all(
            (facts := os.stat(file)).st_mtime_ns == changed and facts.st_size == size for file, changed, size in stamp
        )
    except OSError:
        return False
