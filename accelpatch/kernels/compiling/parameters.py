"""The parameters of a kernel: their sizes and kinds, as its file has them, its source declares them and the user does.

A number gets the C type of its parameter. The compiled file has the sizes, AMD's also which are pointers, PTX which are
floats; the declaration in the source has the rest, and where there is none the annotations of the Python function.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from accelpatch.errors import ArgumentError

POINTER, INTEGER, FLOAT, VALUE, UNKNOWN = "pointer", "integer", "float", "struct", ""
POINTER_BYTES = 8


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel. kind: of the above, UNKNOWN where nothing says it. size: in bytes; 0 where it is not
    known. dtype: of a tensor's elements, or of a number; "" for any. signed: of an integer; None: not known."""

    kind: str = UNKNOWN
    size: int = 0
    dtype: str = ""
    signed: bool | None = None


#: C type, without qualifiers -> kind, size and whether it is signed
C_TYPES: Mapping[str, tuple[str, int, bool]] = {
    "float": (FLOAT, 4, True), "double": (FLOAT, 8, True),
    "bool": (INTEGER, 1, False), "char": (INTEGER, 1, True), "signed char": (INTEGER, 1, True),
    "unsigned char": (INTEGER, 1, False), "short": (INTEGER, 2, True), "unsigned short": (INTEGER, 2, False),
    "int": (INTEGER, 4, True), "unsigned": (INTEGER, 4, False), "unsigned int": (INTEGER, 4, False),
    "long": (INTEGER, 8, True), "unsigned long": (INTEGER, 8, False), "long long": (INTEGER, 8, True),
    "long int": (INTEGER, 8, True), "unsigned long long": (INTEGER, 8, False), "size_t": (INTEGER, 8, False),
    "ptrdiff_t": (INTEGER, 8, True), "ssize_t": (INTEGER, 8, True), "uint": (INTEGER, 4, False),
    **{f"{'' if signed else 'u'}int{8 * size}_t": (INTEGER, size, signed)
       for size in (1, 2, 4, 8) for signed in (True, False)},
}  # fmt: skip
#: annotation -> kind and size; those of DTYPES are of a tensor's elements or of a number
PYTHON = {"int": (INTEGER, 0), "float": (FLOAT, 0), "bool": (INTEGER, 0), "Tensor": (POINTER, POINTER_BYTES)}
ALIASES = {"half": "float16", "double": "float64", "long": "int64", "short": "int16"}
DTYPES: Mapping[str, tuple[str, int]] = {
    **{f"{'' if signed else 'u'}int{8 * size}": (INTEGER, size) for size in (1, 2, 4, 8) for signed in (True, False)},
    "bool": (INTEGER, 1), "float16": (FLOAT, 2), "bfloat16": (FLOAT, 2), "float32": (FLOAT, 4), "float64": (FLOAT, 8),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), (FLOAT, 1)),
}  # fmt: skip
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_QUALIFIER = re.compile(r"\b(const|volatile|restrict|__restrict__|__restrict|std::)\b|\bstd::")


def declared(text: str, name: str) -> list[Parameter] | None:
    """The parameters of the function `name` as a C++ source declares them; None where it cannot be found in it.

    Types that are not in C_TYPES (a template's, a typedef) are UNKNOWN.
    """
    plain = _COMMENT.sub(" ", text)
    for found in re.finditer(rf"\bvoid\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?{re.escape(name)}\s*\(", plain):
        depth, parts, start = 1, [], found.end()
        for place in range(start, len(plain)):
            mark = plain[place]
            depth += (mark in "(<[{") - (mark in ")>]}")
            if depth == 0 or (mark == "," and depth == 1):
                parts.append(plain[start:place])
                start = place + 1
            if depth == 0:
                break
        if len(parts) == 1 and parts[0].strip() in ("", "void"):
            return []
        return [_of_declaration(part) for part in parts]
    return None


def _of_declaration(text: str) -> Parameter:
    """`const float* x`, `int n` ... as a Parameter."""
    words = _QUALIFIER.sub(" ", text.partition("=")[0])
    if "*" in words or "[" in words:
        return Parameter(POINTER, POINTER_BYTES)
    names = words.split()
    for these in (names[:-1], names):
        if found := C_TYPES.get(" ".join(these)):
            return Parameter(found[0], found[1], signed=found[2])
    return Parameter()


def annotated(annotation: object, where: str) -> Parameter:
    """A Parameter from the annotation of a Python function: a torch dtype or its name (of a tensor's elements, or of a
    number), "Tensor", `int` or `float`. Raises ArgumentError for anything else."""
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    name = text.strip("'\" ").removeprefix("torch.")
    name = ALIASES.get(name, name)
    if name in PYTHON:
        kind, size = PYTHON[name]
        return Parameter(kind, size)
    if name in DTYPES:
        return Parameter(dtype=name)
    raise ArgumentError(
        f"{where} is annotated with {text}: give a torch dtype, such as torch.float16, or its name (of a tensor's "
        "elements, or of a number), Tensor, int or float"
    )


def joined(compiled: Parameter, source: Parameter, user: Parameter, where: str) -> Parameter:
    """One parameter of all that is known of it. Raises ArgumentError where the user says otherwise than the file."""
    known = source if source.kind and compiled.size in (0, source.size) else compiled
    if known.kind == UNKNOWN:
        made = _by_annotation(known, user)
    else:
        of_number = user.dtype and known.kind != POINTER
        kind, size = DTYPES[user.dtype] if of_number else (user.kind, 0)
        made = None if kind not in (UNKNOWN, known.kind) or size not in (0, known.size) else known
    if made is None:
        raise ArgumentError(f"{where} is annotated as {user.dtype or user.kind}, and in the file it is {say(known)}")
    return replace(made, dtype=user.dtype)


def _by_annotation(known: Parameter, user: Parameter) -> Parameter | None:
    """A parameter of which the file says its size at most; None where that does not fit the annotation."""
    if not user.dtype:
        fits = user.kind != POINTER or known.size in (0, POINTER_BYTES)
        return replace(known, kind=user.kind) if fits else None
    kind, size = DTYPES[user.dtype]
    if known.size in (0, POINTER_BYTES):  # the elements of a tensor, or a number of 8 bytes
        return known if size == POINTER_BYTES or not known.size else replace(known, kind=POINTER)
    return replace(known, kind=kind) if size == known.size else None


def say(parameter: Parameter) -> str:
    """A parameter in words."""
    if parameter.kind == POINTER:
        return "a pointer"
    size = f" of {parameter.size} bytes" if parameter.size else ""
    return f"{'an' if parameter.kind == INTEGER else 'a'} {parameter.kind or 'value'}{size}"
