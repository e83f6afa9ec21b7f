"""What the emulator refuses: each error names the instruction, its Python line, and what to do."""

from __future__ import annotations

import re

import numpy as np
import pytest

from accelpatch.jit.emulate import EmulationError, run
from tests.support.amdgcn import kernel

POINTERS = "s_load_dwordx2 s[4:5], s[0:1], 0x0 // k.py:1\n s_waitcnt lgkmcnt(0)\n v_lshlrev_b32 v1, 2, v0\n"


def launch(
    code: str,
    arguments: str = "8",
    *given: object,
    threads: int = 64,
    lds: int = 0,
    arch: str = "gfx942",
    **options: int,
) -> np.ndarray:
    out = np.zeros(64, np.int32)
    kinds = [("global_buffer", out), *(("int", one) for one in given)]
    run(kernel(code, arguments, arch, lds), "k", [1], [threads], kinds, arch=arch, **options)
    return out


def refused(words: str, code: str, **options: int) -> None:
    with pytest.raises(EmulationError, match=re.escape(words)):
        launch(code, **options)


LOAD = POINTERS + "global_load_dword v2, v1, s[4:5] // k.py:7\n"
WAITS = {
    "vector": (
        LOAD + "v_add_u32 v3, v2, v2 // k.py:8",
        "k.py:8: v_add_u32 v3, v2, v2: it reads v2, which 'global_load",
    ),
    "names-the-load": (LOAD + "v_mov_b32 v3, v2", "(k.py:7) is still loading: put an s_waitcnt for vmcnt between"),
    "overwrite": (LOAD + "v_mov_b32 v2, 0", "it writes v2"),
    "scalar": ("s_load_dword s4, s[0:1], 0x0\n s_add_u32 s5, s4, 1", "it reads s4"),
    "scalar-loads-have-no-order": (
        "s_load_dword s4, s[0:1], 0x0\n s_load_dword s5, s[0:1], 0x4\n s_waitcnt lgkmcnt(1)\n s_mov_b32 s6, s4",
        "it reads s4",
    ),
    "second-of-two": (
        LOAD + "global_load_dword v3, v1, s[4:5]\n s_waitcnt vmcnt(1)\n v_mov_b32 v4, v2\n v_mov_b32 v4, v3",
        "it reads v3",
    ),
    "flat-stands-in-both": (
        POINTERS
        + "v_mov_b32 v2, s4\n v_mov_b32 v3, s5\n flat_load_dword v4, v[2:3]\n s_waitcnt vmcnt(0)\n v_mov_b32 v5, v4",
        "put an s_waitcnt for lgkmcnt",
    ),
    "lds": (
        "v_lshlrev_b32 v1, 2, v0\n ds_write_b32 v1, v0\n ds_read_b32 v2, v1\n s_waitcnt lgkmcnt(1)\n v_mov_b32 v3, v2",
        "it reads v2",
    ),
    "lds-behind-a-scalar-load": (
        "v_lshlrev_b32 v1, 2, v0\n ds_write_b32 v1, v0\n s_waitcnt lgkmcnt(0)\n s_load_dword s4, s[0:1], 0x0\n"
        "ds_read_b32 v2, v1\n s_waitcnt lgkmcnt(1)\n v_mov_b32 v3, v2",
        "it reads v2",
    ),
    "stores-too": (LOAD + "global_store_dword v1, v2, s[4:5]", "it reads v2"),
    "permute": ("v_mov_b32 v1, 0\n ds_bpermute_b32 v2, v1, v0\n v_mov_b32 v3, v2", "it reads v2"),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_read_before_its_wait(name: str) -> None:
    code, words = WAITS[name]
    refused(words, code, lds=256)


def test_waits_that_are_enough() -> None:
    """A wait that leaves one access under way is enough for the one before it; LDS answers in order too."""
    launch(LOAD + "global_load_dword v3, v1, s[4:5]\n s_waitcnt vmcnt(1)\n v_mov_b32 v4, v2\n s_waitcnt vmcnt(0)", "8")
    code = "v_lshlrev_b32 v1, 2, v0\n ds_write_b32 v1, v0\n ds_read_b32 v2, v1\n ds_read_b32 v3, v1\n"
    launch(code + "s_waitcnt lgkmcnt(1)\n v_mov_b32 v4, v2\n s_waitcnt lgkmcnt(0)", lds=256)


EXCHANGE = """v_lshlrev_b32 v1, 2, v0
ds_write_b32 v1, v0 // k.py:3
{between}
v_xor_b32 v2, 0x100, v1
{access} // k.py:9
s_waitcnt lgkmcnt(0)"""


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "between, access, places",
    [
        ("s_waitcnt lgkmcnt(0)", "ds_read_b32 v3, v2", {"k.py:3", "k.py:9"}),
        ("s_barrier", "ds_read_b32 v3, v2", {"k.py:3", "k.py:9"}),
        ("s_waitcnt lgkmcnt(0)", "ds_write_b32 v2, v0", {"k.py:3", "k.py:9"}),
        (
            "s_waitcnt lgkmcnt(0)\n s_barrier\n ds_read_b32 v4, v1 // k.py:5",
            "ds_write_b32 v2, v0",
            {"k.py:5", "k.py:9"},
        ),
    ],
    ids=["no-barrier", "no-wait", "both-write", "write-after-read"],
)
def test_races(between: str, access: str, places: set[str], seed: int) -> None:
    code = EXCHANGE.format(between=between, access=access)
    with pytest.raises(EmulationError, match=r"race on LDS: lane \d+ of wave \d (reads|writes) byte \d+") as caught:
        launch(code, threads=128, lds=512, seed=seed, strict=False)
    assert set(re.findall(r"k\.py:\d", str(caught.value))) == places


@pytest.mark.parametrize("seed", range(4))
def test_no_race(seed: int) -> None:
    """With a wait and a barrier, on other bytes of a word, of one wave alone, and of atomic operations."""
    code = EXCHANGE.format(between="s_waitcnt lgkmcnt(0)\n s_barrier", access="ds_read_b32 v3, v2")
    launch(code, threads=128, lds=512, seed=seed)
    launch("ds_write_b8 v0, v0\n s_waitcnt lgkmcnt(0)", threads=128, lds=128, seed=seed)
    launch("v_xor_b32 v1, 3, v0\n v_lshlrev_b32 v2, 2, v0\n v_lshlrev_b32 v1, 2, v1\n ds_write_b32 v2, v0\n"
           "ds_read_b32 v3, v1\n s_waitcnt lgkmcnt(0)", lds=256, seed=seed)  # fmt: skip
    launch("v_mov_b32 v1, 0\n ds_add_u32 v1, v0\n s_waitcnt lgkmcnt(0)", threads=128, lds=4, seed=seed, strict=False)


def test_a_loop_that_never_ends() -> None:
    refused("a loop that never ends, or pass a larger steps=", ".Lx:\n s_nop 0 // k.py:3\n s_branch .Lx", steps=1000)
    refused("k.py:3", ".Lx:\n s_nop 0 // k.py:3\n s_branch .Lx // k.py:3", steps=1000)


BOUNDS = {
    "load": (POINTERS + "v_add_u32 v1, 4, v1\n global_load_dword v2, v1, s[4:5] // k.py:5",
             "k.py:5: global_load_dword v2, v1, s[4:5]: lane 63 of wave 0, workgroup (0, 0, 0): the address"),
    "store": (POINTERS + "global_store_dword v1, v0, s[4:5] offset:-4", "lane 0 of wave 0"),
    "how-far": (POINTERS + "global_store_dword v1, v0, s[4:5] offset:4",
                "+256 bytes from the start of argument 0, which has 256 bytes"),
    "wide": (POINTERS + "global_load_dwordx4 v[2:5], v1, s[4:5]", "lane 61"),
    "scalar": (POINTERS + "s_load_dword s6, s[4:5], 0x100", "out of bounds"),
    "arguments-are-read-only": ("v_mov_b32 v1, 0\n global_store_dword v1, v0, s[0:1]", "which is read-only"),
    "atomic": (POINTERS + "global_atomic_add v1, v0, s[4:5] offset:4", "lane 63"),
    "lds": ("v_lshlrev_b32 v1, 3, v0\n ds_write_b32 v1, v0",
            "lane 32 of wave 0, workgroup (0, 0, 0): the LDS address 0x100"),
    "buffer-of-more-than-there-is": (
        POINTERS + "s_mov_b32 s6, 0x200\n s_mov_b32 s7, 0x20000\n v_add_u32 v1, v1, v1\n"
        "buffer_load_dword v2, v1, s[4:7], 0 offen", "lane 32"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_out_of_bounds(name: str) -> None:
    code, words = BOUNDS[name]
    refused(words, code, lds=256)


def test_a_buffer_has_zeros_behind_its_end() -> None:
    out = launch(
        POINTERS
        + "v_add_u32 v2, 7, v0\n global_store_dword v1, v2, s[4:5]\n s_mov_b32 s6, 128\n s_mov_b32 s7, 0x20000\n"
        "s_waitcnt vmcnt(0)\n buffer_load_dword v3, v1, s[4:7], 0 offen\n v_mov_b32 v4, 1\n s_waitcnt vmcnt(0)\n"
        "global_store_dword v1, v3, s[4:5]\n buffer_store_dword v4, v1, s[4:7], 0 offen offset:124\n s_waitcnt vmcnt(0)"
    )
    assert out.tolist() == [*range(7, 38), 1, *[0] * 32]


UNWRITTEN = {
    "vector": ("v_add_u32 v1, v0, v9", "wave 0 reads v9 in lane 0, which nothing has written"),
    "scalar": ("s_add_u32 s9, s8, 1", "wave 0 reads s8"),
    "some-lanes": ("s_mov_b64 exec, 15\n v_mov_b32 v1, 0\n s_mov_b64 exec, -1\n v_mov_b32 v2, v1", "v1 in lane 4"),
    "matrix": ("v_mov_b32 v1, 0\n s_nop 1\n v_mfma_f32_32x32x2_f32 v[8:23], v1, v2, 0", "reads v2 in lane 0"),
    "lane": ("v_readlane_b32 s4, v5, 3", "reads lane 3 of"),
    "lds": ("v_lshlrev_b32 v1, 2, v0\n ds_read_b32 v2, v1", "it reads LDS at byte 0, which nothing has written"),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_what_nothing_has_written(name: str) -> None:
    code, words = UNWRITTEN[name]
    refused(words, code, lds=256)
    launch(f"{code}\n s_waitcnt lgkmcnt(0)", lds=256, strict=False)


MISALIGNED = {
    "global": (POINTERS + "global_load_dword v2, v0, s[4:5]", "lane 1 of wave 0: the address"),
    "lds": ("ds_read_b32 v1, v0", "the address 0x1 is misaligned: it must be a multiple of 4 bytes"),
    "atomic": (POINTERS + "global_atomic_add_x2 v1, v[2:3], s[4:5]", "must be a multiple of 8 bytes"),
    "scalar": (POINTERS + "s_load_dword s6, s[4:5], 0x2", "misaligned"),
}


@pytest.mark.parametrize("name", MISALIGNED)
def test_misaligned(name: str) -> None:
    code, words = MISALIGNED[name]
    refused(words, code, lds=256, strict=False)
    if name in ("global", "lds"):
        launch(f"{code}\n s_waitcnt lgkmcnt(0)", lds=256, strict=False, misaligned=True)


UNKNOWN = {
    "instruction": ("v_add_u33 v1, v0, v0", "does not know the instruction v_add_u33 (it knows v_add_u32"),
    "arch": ("v_mfma_f32_16x16x32_bf16 v[0:3], v[4:7], v[8:11], 0", "gfx942 does not have it; gfx950 do"),
    "modifier": ("v_add_f32 v1, v0, v0 quick", "does not know its modifier quick"),
    "width": ("global_load_dwordx2 v1, v0, s[0:1]", "v1 has 1 registers, and must have 2"),
    "operands": ("v_add_u32 v1, v0", "needs more"),
    "more-operands": ("v_mov_b32 v1, v0, v2", "it takes 2 operands, and has 3"),
    "register": ("v_mov_b32 v256, v0", "v256 is no register"),
    "label": ("s_branch .Lnowhere", "there is no label .Lnowhere"),
    "literal": ("v_mov_b32 v1, 0x123456789", "does not fit in 32 bits"),
    "trap": ("s_trap 2", "stops itself with trap 2"),
    "counter": ("s_waitcnt vmcnt(64)", "vmcnt counts to 63"),
    "mode": ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0", "rounds to nearest even"),
    "scalar-for-vector": ("s_add_u32 s4, v0, 1", "v0 is a vector register"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_it_does_not_know(name: str) -> None:
    code, words = UNKNOWN[name]
    refused(words, code, strict=False)


END = ".end_amdhsa_kernel"


def test_launches_that_cannot_be() -> None:
    good = kernel("s_nop 0", "8")
    out = np.zeros(4, np.int32)
    cases: list[tuple[str, dict[str, object]]] = [
        ("the kernel takes 1 arguments, and 0 were passed", {"arguments": []}),
        ("must be a tensor, an array or an address", {"arguments": [("global_buffer", "x")]}),
        ("no kernel q; it has k", {"name": "q"}),
        ("a block of 2000 threads is more than the kernel's 1024", {"block": [2000]}),
        ("grid must be one to three positive sizes", {"grid": [0]}),
        ("are more than the 65536", {"shared": 70000}),
        ("it was to be run as gfx90a", {"arch": "gfx90a"}),
        ("the emulator knows gfx90a, gfx942, gfx950", {"arch": "gfx1100"}),
        ("float_denorm_mode_32 must be 3", {"assembly": good.replace(END, f".amdhsa_float_denorm_mode_32 0\n{END}")}),
        ("s_endpgm is missing", {"assembly": good.replace("s_endpgm", "")}),
    ]  # fmt: skip
    usual = {"assembly": good, "name": "k", "grid": [1], "block": [64], "arch": "gfx942"}
    for words, change in cases:
        given = {**usual, "arguments": [("global_buffer", out)], **change}
        with pytest.raises(EmulationError, match=re.escape(words)):
            run(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind, value", [("int", 1 << 40), ("int", 1.5), ("float", "x"), ("long", 1)])
def test_numbers_that_do_not_fit(kind: str, value: object) -> None:
    with pytest.raises(EmulationError, match="argument 0"):
        run(kernel("s_nop 0", "4"), "k", [1], [64], [(kind, value)], arch="gfx942")
