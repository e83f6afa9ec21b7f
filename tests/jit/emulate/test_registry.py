"""The emulator's instructions are those of each arch, by the names that the assembler knows."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from accelpatch.jit import emulate
from accelpatch.jit.emulate.families import FAMILIES
from accelpatch.jit.emulate.registry import BUILDERS, ONLY_ON
from tests.support.amdgcn import needs_clang

UNKNOWN = r"<stdin>:(\d+):\d+: error: (?:invalid instruction|instruction not supported on this GPU)"


@needs_clang
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_every_name_is_one_of_the_assemblers(arch: str) -> None:
    """A name without operands is an error too, but another one."""
    names = [name for name in BUILDERS if arch in ONLY_ON.get(name, (arch,))]
    command = ["llvm-mc-19", "-triple=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-filetype=null"]
    said = subprocess.run(command, input="\n".join([*names, "v_no_such"]), text=True, capture_output=True, check=False)
    assert [[*names, "v_no_such"][int(line) - 1] for line in re.findall(UNKNOWN, said.stderr)] == ["v_no_such"]


def test_every_file_that_registers_is_a_family() -> None:
    folder = Path(emulate.__file__).parent
    registers = re.compile(r"^(?: {0,16}add\(|vector\(|scalar\(|@instruction)", re.M)
    found = {path.stem for path in folder.glob("*.py") if registers.search(path.read_text())}
    assert found - {"vector", "scalar", "registry"} == {family.__name__.rpartition(".")[2] for family in FAMILIES}
    assert len(BUILDERS) > 900
