"""A kernel file as a function, on a stand-in of a GPU's driver: what is launched, what is refused, what is cheap."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.errors import ArgumentError, KernelError
from accelpatch.kernels.compiling import file_kernel
from accelpatch.kernels.compiling.arguments import Arguments
from accelpatch.kernels.compiling.parameters import Parameter
from tests.support.fake_driver import STREAM, FakeDriver, machine

PTX = """
.version 7.8
.target sm_80
.address_size 64
.visible .entry test_kernel(
	.param .u64 a, .param .u64 b, .param .u64 c,
	.param .u32 d, .param .f32 e
) { ret; }
.visible .entry _Z5otherPfx(.param .u64 a, .param .u64 b) { ret; }
.visible .entry half(.param .b16 a, .param .align 4 .b8 b[8]) { ret; }
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    with machine("sm_90", monkeypatch) as found:
        found.number("count").value = 5
        yield found


@pytest.fixture
def kernel(tmp_path: Path) -> Any:
    (tmp_path / "file.ptx").write_text(PTX)

    @accelpatch.module(tmp_path / "file.ptx")
    def test_kernel(q: torch.float16, k: torch.float16, v, n: int, sm: float): ...

    return test_kernel


Q, V = torch.zeros(8, 8, dtype=torch.float16), torch.zeros(64)


def test_grid_block_and_arguments_arrive(gpu: FakeDriver, kernel: Any) -> None:
    kernel([3, 2], [32, 4, 2], Q, Q[1:], V, -7, 0.5, shared=100)
    assert list(gpu.last.sizes) == [3, 2, 1, 32, 4, 2, 100]
    assert gpu.last.stream == STREAM
    assert [gpu.value(at) for at in range(3)] == [Q.data_ptr(), Q[1:].data_ptr(), V.data_ptr()]
    assert gpu.value(3, ctypes.c_int) == -7
    assert gpu.value(4, ctypes.c_float) == 0.5
    kernel(1, 64, Q.data_ptr(), None, 0, 2**32 - 1, 3, stream=12)
    assert list(gpu.last.sizes) == [1, 1, 1, 64, 1, 1, 0]
    assert gpu.last.stream == 12
    assert [gpu.value(at) for at in range(3)] == [Q.data_ptr(), 0, 0]
    assert gpu.value(3, ctypes.c_uint) == 2**32 - 1
    assert gpu.value(4, ctypes.c_float) == 3.0
    assert gpu.number("loads").value == 1
    assert kernel.__name__ == "test_kernel"


def test_unusual_arguments_arrive(gpu: FakeDriver, kernel: Any) -> None:
    """A parameter, a bool, a number that is beyond float32; the memory of the call before is all written again."""
    kernel([1], [1], Q, Q, V, -1, 0.5)
    kernel([1], [1], torch.nn.Parameter(Q), Q, V, True, 1e300)
    assert [gpu.value(at) for at in range(4)] == [Q.data_ptr(), Q.data_ptr(), V.data_ptr(), 1]
    assert gpu.value(4, ctypes.c_float) == float("inf")
    kernel([1], [1], Q, Q, V, 2**31 - 1, float("nan"))
    assert gpu.value(3) == 2**31 - 1
    assert gpu.value(4, ctypes.c_float) != gpu.value(4, ctypes.c_float)


def test_sizes_that_a_list_has_later_are_the_launchs(gpu: FakeDriver, kernel: Any) -> None:
    grid = [3]
    kernel(grid, [64], Q, Q, V, 1, 1.0)
    grid[0] = 5
    kernel(grid, (64,), Q, Q, V, 1, 1.0, stream=7)
    assert (list(gpu.last.sizes[:4]), gpu.last.stream) == ([5, 1, 1, 64], 7)
    for wrong in ([], torch.tensor([5, 1]), torch.tensor([5, 1]).numpy()):
        with pytest.raises(ArgumentError, match="grid"):
            kernel(wrong, [64], Q, Q, V, 1, 1.0)


def test_several_kernels_of_a_file_are_loaded_once(gpu: FakeDriver, kernel: Any, tmp_path: Path) -> None:
    @accelpatch.module(tmp_path / "file.ptx")
    def other(x, n): ...

    gpu.number("count").value = 2
    other([1], [1], V, -(2**63))
    gpu.number("count").value = 5
    kernel([1], [1], Q, Q, V, 1, 1.0)
    assert gpu.number("loads").value == 1
    assert kernel.kernels("sm_90") == ("test_kernel", "_Z5otherPfx", "half")


def test_numbers_of_two_bytes_are_annotated(gpu: FakeDriver, kernel: Any, tmp_path: Path) -> None:
    (tmp_path / "two.ptx").write_text(PTX.replace(", .param .align 4 .b8 b[8]", ", .param .b16 b"))

    @accelpatch.module(tmp_path / "two.ptx")
    def half(a: torch.float16, b: torch.bfloat16): ...

    gpu.number("count").value = 2
    half([1], [1], 1.5, -2.0)
    assert gpu.value(0, ctypes.c_uint16) == 0x3E00
    assert gpu.value(1, ctypes.c_uint16) == 0xC000


GOOD: dict[str, Any] = {
    "grid": [1],
    "block": [32],
    "q": Q,
    "k": Q,
    "v": V,
    "n": 1,
    "sm": 1.0,
    "shared": 0,
    "stream": None,
}
PLACES = ("grid", "block", "q", "k", "v", "n", "sm")
BAD = {
    "grid of 0": ({"grid": [0]}, "grid is 0 in x, and it is from 1 to 2147483647"),
    "grid too large": ({"grid": [1, 65536]}, "grid is 65536 in y, and it is from 1 to 65535"),
    "grid of floats": ({"grid": [1.5]}, "one to three ints"),
    "grid of four": ({"grid": [1, 1, 1, 1]}, "one to three ints"),
    "block too large": ({"block": [1024, 2]}, "2048 threads is more than the 1024"),
    "block beyond an axis": ({"block": [1, 1, 65]}, "block is 65 in z, and it is from 1 to 64"),
    "too much shared": ({"shared": 1 << 20}, "more than the 232448 that a block can have on sm_90"),
    "negative shared": ({"shared": -1}, "shared is -1"),
    "stream": ({"stream": "0"}, "give a torch.cuda.Stream"),
    "dtype": ({"q": V}, r"q is torch.float32, and it is annotated as torch.float16: convert it"),
    "strides": ({"q": Q.t()}, r"q is not contiguous \(its strides are \(1, 8\)\)"),
    "sparse": ({"v": V.to_sparse()}, "v lies on cpu|not contiguous"),
    "tensor for a number": ({"n": V}, "n is a tensor, and the kernel's is an integer of 4 bytes"),
    "float for an int": ({"n": 1.0}, "n is 1.0, and the kernel's is an integer of 4 bytes: give an int"),
    "int too large": ({"n": 2**32}, "n is 4294967296, which does not fit an integer of 4 bytes"),
    "text": ({"sm": "1"}, "sm is a str, and the kernel's is a float of 4 bytes"),
    "None for a float": ({"sm": None}, "sm is None"),
    "float for a pointer": ({"q": 1.0}, "q is 1.0, and the kernel's is a pointer: give a tensor, its data_ptr"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_and_not_launched(gpu: FakeDriver, kernel: Any, case: str) -> None:
    changed, message = BAD[case]
    given = GOOD | changed
    with pytest.raises(ArgumentError, match=message):
        kernel(
            *(given[name] for name in ("grid", "block", "q", "k", "v", "n", "sm")),
            shared=given["shared"],
            stream=given["stream"],
        )
    assert gpu.number("launches").value == 0
    kernel([1], [32], Q, Q, V, 1, 1.0)
    assert gpu.number("launches").value == 1


def test_a_tensor_on_another_device_is_refused() -> None:
    arguments = Arguments(["x"], [Parameter("pointer", 8)], 0, "NVIDIA H200")
    with pytest.raises(ArgumentError, match="x lies on cpu, and the kernel runs on NVIDIA H200: move it"):
        arguments.write([V])


def test_too_few_and_too_many_arguments(gpu: FakeDriver, kernel: Any) -> None:
    for values in ([Q, Q, V, 1], [Q, Q, V, 1, 1.0, 2]):
        with pytest.raises(
            ArgumentError, match=rf"takes 5 arguments after grid and block \(q, k, v, n, sm\), not {len(values)}"
        ):
            kernel([1], [1], *values)


def test_a_kernel_that_the_file_does_not_have(gpu: FakeDriver, kernel: Any, tmp_path: Path) -> None:
    @accelpatch.module(tmp_path / "file.ptx")
    def missing(x): ...

    with pytest.raises(KernelError, match="has no kernel missing; it has: test_kernel, _Z5otherPfx, half"):
        missing([1], [1], V)


def test_other_parameters_than_the_file_has(gpu: FakeDriver, kernel: Any, tmp_path: Path) -> None:
    @accelpatch.module(tmp_path / "file.ptx", name="test_kernel")
    def fewer(x, y): ...

    with pytest.raises(ArgumentError, match=r"test_kernel has 5 parameters in .*file.ptx, and here 2 \(x, y\)"):
        fewer([1], [1], V, V)

    @accelpatch.module(tmp_path / "file.ptx", name="test_kernel")
    def wrong(q, k, v, n: float, sm): ...

    with pytest.raises(ArgumentError, match="n is annotated as float, and in the file it is an integer of 4 bytes"):
        wrong([1], [1], V, V, V, 1, 1.0)


def test_what_the_decorator_refuses(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"no kernel file: its name ends in one of \.hip, \.cu, \.s"):
        accelpatch.module("kernel.txt")(lambda x: None)
    with pytest.raises(ArgumentError, match="x is annotated with complex: give a torch dtype"):

        @accelpatch.module("kernel.hip")
        def kernel(x: complex) -> None: ...

    with pytest.raises(ArgumentError, match="a kernel's parameters each have a name and a place"):
        accelpatch.module("kernel.hip")(lambda *x: None)


def test_a_file_that_is_not_there(gpu: FakeDriver, tmp_path: Path) -> None:
    @accelpatch.module(tmp_path / "none.hip")
    def kernel(x): ...

    with pytest.raises(KernelError, match=r"none\.hip cannot be read \(No such file"):
        kernel([1], [1], V)


def test_ptx_that_the_driver_does_not_take(gpu: FakeDriver, kernel: Any, tmp_path: Path) -> None:
    (tmp_path / "file.ptx").write_text(PTX + "BROKEN")
    with pytest.raises(
        KernelError, match=r"(?s)file\.ptx for NVIDIA H200 was not loaded:\nptxas .*line 7; error.*refused"
    ):
        kernel([1], [1], Q, Q, V, 1, 1.0)
    (tmp_path / "file.ptx").write_text(PTX)
    kernel([1], [1], Q, Q, V, 1, 1.0)


def test_a_launch_that_the_driver_refuses(gpu: FakeDriver, kernel: Any) -> None:
    gpu.number("status").value = 719
    with pytest.raises(KernelError, match=r"test_kernel was not launched with grid \[1\].*refused \(error 719\)"):
        kernel([1], [1], Q, Q, V, 1, 1.0)


def test_more_shared_memory_than_without_asking(gpu: FakeDriver, kernel: Any) -> None:
    kernel([1], [1], Q, Q, V, 1, 1.0, shared=100 << 10)
    assert gpu.number("most_shared").value == 100 << 10


def test_a_file_that_has_changed_is_loaded_again(
    gpu: FakeDriver, kernel: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel([1], [1], Q, Q, V, 1, 1.0)
    (tmp_path / "file.ptx").write_text(PTX + "// edited")
    kernel([1], [1], Q, Q, V, 1, 1.0)
    assert gpu.number("loads").value == 1, "it is looked at twice a second"
    monkeypatch.setattr(file_kernel, "CHECK_EVERY", 0.0)
    kernel([1], [1], Q, Q, V, 1, 1.0)
    kernel([1], [1], Q, Q, V, 1, 1.0)
    assert gpu.number("loads").value == 2


def test_each_thread_has_its_own_arguments(gpu: FakeDriver, kernel: Any) -> None:
    kernel([1], [1], Q, Q, V, 1, 1.0)
    runs = kernel._on[-1].runs
    mine = runs._local.arguments.memory
    thread = threading.Thread(target=kernel, args=([1], [1], Q, Q, V, 5, 1.0))
    thread.start()
    thread.join()
    assert gpu.value(3) == 5
    assert mine[3] == 1


def test_a_launch_costs_the_host_little(gpu: FakeDriver, kernel: Any) -> None:
    """Counted in calls, since a time depends on the machine. These 24 take about 3 us."""
    call = lambda: kernel([3], [64], Q, Q, V, 64, 0.5)  # noqa: E731
    call()
    calls: list[str] = []
    sys.setprofile(lambda frame, event, of: calls.append(str(of or frame.f_code)) if event.endswith("call") else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert 10 < len(calls) <= 24, calls


def test_on_a_machine_with_no_gpu(kernel: Any) -> None:
    with pytest.raises(
        KernelError, match=r"runs on a GPU, and its tensors lie on the CPU: move them, or write it as \.cpp"
    ):
        kernel([1], [1], Q, Q, V, 1, 1.0)
    if not torch.cuda.is_available():
        with pytest.raises(KernelError, match="there is no GPU here: name an arch"):
            kernel.compile()
