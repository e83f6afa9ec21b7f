"""Which part of a dimension each rank of a tensor-parallel job has; plain arithmetic, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from accelpatch.errors import PatchError
from accelpatch.models.sharding import UNITS


def parts(total: int, unit: int, world: int) -> list[range]:
    """`total` in `world` neighbouring parts of whole units, the first ones a unit longer where it must be.

    86 groups of 128 on four ranks are 22, 22, 21 and 21 groups.
    """
    each, more = divmod(total // unit, world)
    found, start = [], 0
    for rank in range(world):
        stop = start + unit * (each + (rank < more))
        found.append(range(start, stop))
        start = stop
    return found


def unit_of(total: int, world: int, groups: Iterable[int] = ()) -> int:
    """The largest unit of which `total` is a multiple and every rank gets one: a recipe's group size before others."""
    wanted = [*groups, *UNITS]
    return next((unit for unit in wanted if total % unit == 0 and total // unit >= world), 1)


@dataclass(frozen=True)
class Heads:
    """A rank's query heads, and the key and value heads that they attend to."""

    query: range
    kv: range


def heads_of(heads: int, kv_heads: int, world: int) -> list[Heads]:
    """Each rank's heads. Key heads stay with all of their query heads where there are enough of them; else several
    ranks have a copy of one, each with some of its query heads. Raises PatchError for a world size that fits neither.
    """
    group = heads // kv_heads
    if kv_heads >= world:
        return [Heads(range(kv.start * group, kv.stop * group), kv) for kv in parts(kv_heads, 1, world)]
    each, odd = divmod(world, kv_heads)
    if odd or group < each:
        raise PatchError(
            f"{heads} query heads with {kv_heads} key and value heads cannot be split among {world} ranks: take up to "
            f"{kv_heads} ranks, or {' or '.join(map(str, _possible(heads, kv_heads)))}"
        )
    return [
        Heads(range(kv * group + part.start, kv * group + part.stop), range(kv, kv + 1))
        for kv in range(kv_heads)
        for part in parts(group, 1, each)
    ]


def _possible(heads: int, kv_heads: int) -> list[int]:
    """Numbers of ranks above `kv_heads` among which the heads can be split."""
    return [kv_heads * copies for copies in range(2, heads // kv_heads + 1)][:3] or [kv_heads]


def check_world(total: int, what: str, world: int) -> None:
    """Raise PatchError where a dimension has fewer elements than there are ranks."""
    if total < world:
        raise PatchError(f"{total} {what} cannot be split among {world} ranks: start at most {total}")
