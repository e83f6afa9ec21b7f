"""``accelpatch cache``: list and delete the converted models and compiled kernels in the cache folder."""

from __future__ import annotations

from typing import Annotated

import typer

from . import console
from .options import JsonOption

commands = typer.Typer(help="List or delete cached models and compiled kernels.", no_args_is_help=True)


@commands.command("list")
def list_entries(json: JsonOption = False) -> None:
    """List the cached models and compiled kernels with their sizes."""
    from accelpatch import cache
    from accelpatch.report import human, table

    entries = cache.listing()
    if json:
        found = [{"kind": e.kind, "key": e.key, "bytes": e.bytes, "path": str(e.path)} for e in entries]
        console.print_json({"root": str(cache.root()), "entries": found})
        return
    if entries:
        print(table([("kind", "key", "bytes"), *((e.kind, e.key, human(e.bytes)) for e in entries)]))
    print(f"{len(entries)} entries, {human(sum(e.bytes for e in entries))} in {cache.root()}")


@commands.command("clear")
def clear(
    kind: Annotated[
        str | None, typer.Argument(metavar="[KIND]", help="Only entries of this kind (see `cache list`).")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Delete all cache entries, or those of one kind."""
    from accelpatch import cache
    from accelpatch.errors import CacheError
    from accelpatch.report import human

    kinds = sorted({entry.kind for entry in cache.listing()})
    if kind is not None and kind not in kinds:
        raise CacheError(f"the cache has no entries of kind {kind!r}; it has: {', '.join(kinds) or 'none at all'}")
    freed = cache.clear(kind)
    if json:
        console.print_json({"freed_bytes": freed})
    else:
        print(f"freed {human(freed)}")
