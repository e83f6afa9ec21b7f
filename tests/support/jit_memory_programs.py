"""Random kernels that also use memory, LDS, arrays of registers and accumulators.

Besides the statements of jit_programs there are ("load", register, slot), ("store", slot, expression), ("read",
register, slot) and ("write", slot, expression) of LDS, ("put", element, expression) and ("get", register, element) of
an array, ("add", accumulator, register), ("take", register, accumulator) and ("first", scalar, expression), its value
in the first active lane. A slot has a value for each lane.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from accelpatch.jit.kernel import Kernel, jit
from tests.support.jit_programs import LANES, SCALARS, VECTORS, Machine, Writer, bodies, expressions, signed

SLOTS, ELEMENTS = 3, 5
REGISTERS = st.integers(0, VECTORS - 1)
PLACES = {"load": SLOTS, "store": SLOTS, "read": SLOTS, "write": SLOTS, "put": ELEMENTS, "get": ELEMENTS, "add": 2,
          "take": 2, "first": SCALARS}  # fmt: skip
ROWS = VECTORS + SCALARS + 2 * SLOTS + ELEMENTS + 2


def _statement(name: str, places: int) -> st.SearchStrategy[Any]:
    place = st.integers(0, places - 1)
    if name in ("load", "read", "get", "take"):
        return st.tuples(st.just(name), REGISTERS, place)
    return st.tuples(st.just(name), place, REGISTERS if name == "add" else expressions("vs"))


PROGRAMS = bodies(2, more=[st.one_of([_statement(name, places) for name, places in PLACES.items()])] * 2)


class MemoryMachine(Machine):
    def __init__(self, vectors: list[list[int]]):
        super().__init__(vectors)
        self.memory, self.lds = ([[0] * LANES for _ in range(SLOTS)] for _ in range(2))
        self.array, self.sums = [[0] * LANES for _ in range(ELEMENTS)], [[0] * LANES for _ in range(2)]

    def _into(self, row: list[int], tree: Any, lanes: set[int]) -> set[int]:
        for lane, value in {lane: self.value(tree, lane) for lane in lanes}.items():
            row[lane] = signed(value)
        return lanes

    def _from(self, row: list[int], register: int, lanes: set[int]) -> set[int]:
        for lane in lanes:
            self.v[register][lane] = row[lane]
        return lanes

    def _load(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        return self._from(self.memory[one[2]], one[1], lanes)

    def _store(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        return self._into(self.memory[one[1]], one[2], lanes)

    def _read(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        return self._from(self.lds[one[2]], one[1], lanes)

    def _write(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        return self._into(self.lds[one[1]], one[2], lanes)

    def _put(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        return self._into(self.array[one[1]], one[2], lanes)

    def _get(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        return self._from(self.array[one[2]], one[1], lanes)

    def _add(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        for lane in lanes:
            self.sums[one[1]][lane] = signed(self.sums[one[1]][lane] + self.v[one[2]][lane])
        return lanes

    def _first(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        self.s[one[1]] = signed(self.value(one[2], min(lanes)))
        return lanes

    def _take(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        return self._from(self.sums[one[2]], one[1], lanes)


def expected(program: Any, start: list[list[int]]) -> list[list[int]]:
    """What a kernel leaves in out."""
    machine = MemoryMachine([list(one) for one in start])
    machine.run(program, set(range(LANES)))
    scalars = [[value] * LANES for value in machine.s]
    return [*machine.v, *scalars, *machine.memory, *machine.lds, *machine.array, *machine.sums]


class MemoryWriter(Writer):
    def __init__(self, J: Any, vectors: list[Any], scalars: list[Any], offset: Any, memory: Any, waits: bool):
        super().__init__(J, vectors, scalars)
        self.offset, self.memory, self.waits = offset, memory, waits
        self.array, self.sums = J.gpr(ELEMENTS, "vi32", 0), J.gpr(2, "ai32", 0)
        self.lds = J.alloc_lds(SLOTS * 4 * LANES)
        for at in range(SLOTS):
            J.ds_write_b32(offset, J.gpr("vi32", 0), mod=f"offset:{self.lds + at * 4 * LANES}")

    def wait(self) -> None:
        if self.waits:
            self.J.s_waitcnt(mod="vmcnt(0) lgkmcnt(0)")

    def value(self, tree: Any) -> Any:
        return self.J.gpr("vi32", self.tree(tree))

    def _load(self, one: Any) -> None:
        place = f"offset:{one[2] * 4 * LANES}"
        self.J.global_load_dword(self.files["v"][one[1]], self.offset, self.memory, mod=place)
        self.wait()

    def _store(self, one: Any) -> None:
        self.J.global_store_dword(self.offset, self.value(one[2]), self.memory, mod=f"offset:{one[1] * 4 * LANES}")

    def _read(self, one: Any) -> None:
        place = f"offset:{self.lds + one[2] * 4 * LANES}"
        self.J.ds_read_b32(self.files["v"][one[1]], self.offset, mod=place)
        self.wait()

    def _write(self, one: Any) -> None:
        self.J.ds_write_b32(self.offset, self.value(one[2]), mod=f"offset:{self.lds + one[1] * 4 * LANES}")

    def _put(self, one: Any) -> None:
        self.array[one[1]] = self.tree(one[2])

    def _get(self, one: Any) -> None:
        self.files["v"][one[1]][0] = self.array[one[2]]

    def _add(self, one: Any) -> None:
        self.J.v_add_u32(self.sums[one[1]], self.sums[one[1]], self.files["v"][one[2]])

    def _first(self, one: Any) -> None:
        self.J.v_readfirstlane_b32(self.files["s"][one[1]], self.value(one[2]))

    def _take(self, one: Any) -> None:
        self.files["v"][one[1]][0] = self.sums[one[2]]


def _kernel(J, program, waits, x: "int*", memory: "int*", out: "int*"):
    offset = J.gpr(J.threadIdx.x * 4)
    vectors, scalars = [J.gpr("vi32") for _ in range(VECTORS)], [J.gpr("si32", 0) for _ in range(SCALARS)]
    for at, one in enumerate(vectors):
        J.global_load_dword(one, offset, x, mod=f"offset:{at * 4 * LANES}")
    writer = MemoryWriter(J, vectors, scalars, offset, memory, waits == "checked")
    writer.wait()
    writer.write(program)
    rest = [J.gpr("vi32") for _ in range(2 * SLOTS)]
    for at, one in enumerate(rest):
        place = at % SLOTS * 4 * LANES
        if at < SLOTS:
            J.global_load_dword(one, offset, memory, mod=f"offset:{place}")
        else:
            J.ds_read_b32(one, offset, mod=f"offset:{writer.lds + place}")
    writer.wait()
    elements = [writer.array[at] for at in range(ELEMENTS)] + [writer.sums[at] for at in range(2)]
    base = J.gpr("su64", out)
    for at, one in enumerate((*vectors, *scalars, *rest, *elements)):
        if at == 12:  # the offset of an instruction has 12 bits
            base[0] = base + at * 4 * LANES
        J.global_store_dword(offset, J.gpr("vi32", one), base, mod=f"offset:{at % 12 * 4 * LANES}")


def kernel(waits: str) -> Kernel:
    """waits: as of ``jit()``; where they are the kernel's own, each load is waited for at once."""
    return jit(waits=waits)(_kernel)
