"""A strict YAML reader whose values carry line and column, for error messages.

It reads mappings, lists and scalars of the YAML 1.2 core schema (``1e-2`` is a number, ``off`` is text). Tags, anchors,
aliases, duplicate keys, deep nesting and large files are refused before they can cost time or memory: recipes need
none of them, and attacks on YAML readers use them.
"""

from __future__ import annotations

import difflib
import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from accelpatch.errors import RecipeError

MAX_BYTES = 64 * 1024  # the largest bundled recipe has 1 KB; PyYAML reads some 100 KB a second
MAX_DEPTH = 12  # a recipe's own schema needs 5; options may nest

_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_WORDS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:nan|inf)", re.IGNORECASE)
_KINDS = {type(None): "nothing", bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_KINDS |= {list: "a list", dict: "a mapping"}


def suggest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: "did you mean" the closest known word, or a list of all known words."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(words) or 'none'}"


def shown(value: Any) -> str:
    """``repr`` of a value, cut to 60 characters for error messages."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class Node:
    """A YAML value with its place. ``value`` is None, bool, int, float, str, list[Node] or dict[str, Node].

    The accessors raise RecipeError with that place for a value of another type or range; ``what`` names the value.
    """

    value: Any
    source: str
    line: int
    column: int
    keys: Mapping[str, Node] = field(default_factory=dict)  # of a mapping: key -> Node with the key's place

    def error(self, message: str) -> RecipeError:
        return RecipeError(message, source=self.source, line=self.line, column=self.column)

    @property
    def place(self) -> str:
        return f"{self.source}:{self.line}:{self.column}"

    def expect(self, what: str, *kinds: type) -> Any:
        """The value, whose type must be exactly one of ``kinds`` (bool does not count as int)."""
        if type(self.value) in kinds:
            return self.value
        scalar = isinstance(self.value, bool | int | float | str)
        found = f"{shown(self.value)} ({_KINDS[type(self.value)]})" if scalar else _KINDS[type(self.value)]
        raise self.error(f"{what} must be {' or '.join(_KINDS[kind] for kind in kinds)}, not {found}")

    def mapping(self, what: str, known: Collection[str] | None = None) -> dict[str, Node]:
        """The fields of a mapping; where ``known`` is given, any other key is an error."""
        fields: dict[str, Node] = self.expect(what, dict)
        for key in fields:
            if known is not None and key not in known:
                raise self.keys[key].error(f"unknown key {shown(key)} in {what}; {suggest(key, known)}")
        return fields

    def text(self, what: str) -> str:
        value: str = self.expect(what, str)
        return value

    def integer(self, what: str, least: int) -> int:
        value: int = self.expect(what, int)
        if value < least:
            raise self.error(f"{what} must be at least {least}, not {value}")
        return value

    def number(self, what: str, least: float) -> float:
        value = self.expect(what, float, int)
        if value < least:
            raise self.error(f"{what} must be at least {least:g}, not {value}")
        return float(value)

    def choice(self, what: str, known: Collection[str]) -> str:
        value = self.text(what)
        if value not in known:
            raise self.error(f"unknown {what} {shown(value)}; {suggest(value, known)}")
        return value

    def words(self, what: str) -> tuple[Node, ...]:
        """The items of a text or of a list of texts that is not empty."""
        items = self.value if isinstance(self.expect(what, str, list), list) else [self]
        if not items:
            raise self.error(f"{what} must not be an empty list; leave the key out to match any")
        for item in items:
            item.text(what)
        return tuple(items)

    def plain(self) -> Any:
        """The value as plain Python data, without places."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value


class _Composer(yaml.SafeLoader):
    """A PyYAML loader that refuses aliases, anchors, tags and deep nesting before it builds or recurses into them."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event, message = self.peek_event(), None
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            message = (
                "anchors (&name) and aliases (*name) are not allowed; write the value out, and quote "
                "a pattern that begins with a star"
            )
        elif event.tag is not None:
            message = f"tags are not allowed in a recipe ({shown(event.tag)}); write a plain value"
        elif self.depth >= MAX_DEPTH:
            message = f"nested deeper than {MAX_DEPTH} levels"
        if message is not None:
            raise yaml.composer.ComposerError(None, None, message, event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read(data: str | bytes, source: str) -> Node:
    """Parse the single YAML document in ``data``; ``source`` names it in errors.

    Raises RecipeError for data that are not UTF-8, too large, too deep, not YAML or empty, for duplicate keys, tags,
    aliases, a second document, numbers that are not finite, and control characters.
    """
    if len(data) > MAX_BYTES:
        raise RecipeError(f"a recipe has at most {MAX_BYTES // 1024} KB; this is another kind of file?", source=source)
    text = data if isinstance(data, str) else _decode(data, source)
    try:
        composer = _Composer(text)
        root = composer.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise _at((mark.line, mark.column) if mark else (0, 0), message, source) from None
    except yaml.reader.ReaderError as error:
        message = f"the character {shown(chr(error.character))} is not allowed"
        raise _at(_place(text[: error.position]), message, source) from None
    except (ValueError, OverflowError):  # PyYAML calls chr() on "\UFFFFFFFF" and int() on a long %YAML version
        mark = composer.get_mark()
        raise _at((mark.line, mark.column), "an escape or a version is out of range", source) from None
    if root is None:
        raise RecipeError("the file is empty; a recipe is a mapping with the key 'rules'", source=source)
    return _located(root, source)


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        message = f"byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise _at(_place(data[: error.start].decode()), message, source) from None


def _place(before: str) -> tuple[int, int]:
    """Line and column behind a text, from 0."""
    return before.count("\n"), len(before) - (before.rfind("\n") + 1)


def _at(place: tuple[int, int], message: str, source: str) -> RecipeError:
    return RecipeError(message, source=source, line=place[0] + 1, column=place[1] + 1)


def _located(node: yaml.Node, source: str) -> Node:
    bare = Node(None, source, node.start_mark.line + 1, node.start_mark.column + 1)
    if isinstance(node, yaml.ScalarNode):
        return replace(bare, value=_scalar(node.value, bare, plain=node.style is None))
    if isinstance(node, yaml.SequenceNode):
        return replace(bare, value=[_located(item, source) for item in node.value])
    fields: dict[str, Node] = {}
    keys: dict[str, Node] = {}
    for key_node, value_node in node.value:
        key = _located(key_node, source)
        word = key.text("a key")
        if word in keys:
            raise key.error(f"duplicate key {shown(word)}; it stands first in line {keys[word].line}")
        keys[word], fields[word] = key, _located(value_node, source)
    return replace(bare, value=fields, keys=keys)


def resolve(text: str) -> bool | int | float | str | None:
    """The value of an unquoted scalar by YAML 1.2's core schema, with decimal numbers only.

    Raises ValueError for a number that is not finite or has more than 40 digits.
    """
    if text in _WORDS:
        return _WORDS[text]
    if _NOT_FINITE.fullmatch(text):
        raise ValueError("a number must be finite")
    if not _NUMBER.fullmatch(text):
        return text
    if len(text) > 40:
        raise ValueError("a number has at most 40 characters")
    value = int(text) if _INTEGER.fullmatch(text) else float(text)
    if not math.isfinite(value):
        raise ValueError("a number must be finite")
    return value


def _scalar(text: str, where: Node, *, plain: bool) -> Any:
    # Escapes such as "\x1b" could drive the terminal that prints a description; lone surrogates cannot be printed.
    for character in text:
        if character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cs"):
            raise where.error(f"the character {shown(character)} is not allowed")
    try:
        return resolve(text) if plain else text
    except ValueError as error:
        raise where.error(f"{error}, not {shown(text)}") from None
