"""Where the functions of a C++ or HIP source begin and end, by its braces, as clang-format sets them."""

from __future__ import annotations

import re
from typing import NamedTuple

# What holds no code: comments, strings, characters, and preprocessor lines with those that continue them.
NOISE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])'|^[ \t]*\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE,
)
QUALIFIER = re.compile(r"\b(?:alignas|__align__|__launch_bounds__|__attribute__)\s*\((?:[^()]|\([^()]*\))*\)")
SCOPE = re.compile(r"\b(?:namespace|struct|class|union|enum|extern)\b[^()]*$")
INITIALISER = re.compile(r"(?<=[\w>])\{[^{};]*\}")  # clang-format sets no space before it
NAME = re.compile(r"(operator\W+?|~?\w+)\(")


class Function(NamedTuple):
    """A function's definition; lines: from the first of its declaration, template included, to its closing brace."""

    name: str
    lines: int


def functions(text: str) -> list[Function]:
    """The functions and methods that a source defines; lambdas and local types are part of what holds them.

    Raises ValueError where braces do not match, as in two branches of a preprocessor's condition.
    """
    code = text
    for pattern in (NOISE, INITIALISER):
        code = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), code)
    found: list[Function] = []
    name, begin, around = None, 0, 0  # of the function that is open; braces around it
    start, depth = 0, 0  # of the declaration; braces that are open
    for at in (brace.start() for brace in re.finditer(r"[{};]", code)):
        if code[at] == "{":
            declaration = code[start:at]
            if name is None and (name := _function(declaration)):
                begin, around = start + len(declaration) - len(declaration.lstrip()), depth
            depth += 1
        elif code[at] == "}":
            depth -= 1
            if name is not None and depth == around:
                found.append(Function(name, code.count("\n", begin, at) + 1))
                name = None
        start = at + 1
    if depth or name is not None:
        raise ValueError("braces do not match")
    return found


def _function(declaration: str) -> str | None:
    """The name of the function whose body comes behind a declaration; None where none does."""
    plain = QUALIFIER.sub("", declaration)
    if SCOPE.search(plain) or plain.rstrip().endswith("="):
        return None
    named = NAME.search(plain)
    return named[1] if named else None
