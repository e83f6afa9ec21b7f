"""Kernel files on a GPU: launched, edited as PTX or assembly, captured, on other streams and threads, and timed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.kernels.compiling import compile_file, file_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]
SOURCE = """
#if defined(__HIP__)
#include <hip/hip_runtime.h>
#endif
#include "scale.h"
extern "C" __global__ void test_kernel(const float* q, const float* k, float* v, int n, float sm) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) v[i] = q[i] * k[i] * sm * SCALE;
}
__global__ void reversed(float* x, int n) {
  extern __shared__ float held[];
  held[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = held[n - 1 - threadIdx.x];
}
"""
N = 1000


def test_kernel(q: torch.float32, k: torch.float32, v: torch.float32, n: int, sm: float): ...


test_kernel.__test__ = False


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file.hip").write_text(SOURCE)
    (tmp_path / "scale.h").write_text("#define SCALE 1.0f\n")
    return tmp_path


def kernel(file: Path) -> Any:
    return accelpatch.module(file)(test_kernel)


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k = (torch.randn(N, device="cuda") for _ in range(2))
    return q, k, torch.full((N,), float("nan"), device="cuda")


def test_launched_and_compiled_again_when_a_header_changes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_kernel, "CHECK_EVERY", 0.0)
    made, (q, k, v) = kernel(place / "file.hip"), operands()
    made([-(-N // 256)], [256], q, k, v, N, 0.5)
    assert v.equal(q * k * 0.5)
    made([-(-N // 256)], [256], q.data_ptr(), k.data_ptr(), v.data_ptr(), 10, 2)
    assert v[:10].equal((q * k * 2)[:10])
    assert v[10:].equal((q * k * 0.5)[10:])
    (place / "scale.h").write_text("#define SCALE 4.0f\n")
    made([-(-N // 256)], [256], q, k, v, N, 0.5)
    assert v.equal(q * k * 2)


def test_shared_memory_and_a_mangled_name(place: Path) -> None:
    def reversed(x: torch.float32, n: int): ...

    x = torch.arange(256.0, device="cuda")
    accelpatch.module(place / "file.hip")(reversed)([1], [256], x, 256, shared=1024)
    assert x.equal(torch.arange(256.0, device="cuda").flip(0))


def test_its_text_is_edited_and_loaded(place: Path) -> None:
    vendor = "amd" if torch.version.hip else "nvidia"
    copy = place / f"copy{compile_file.TEXT[vendor]}"
    copy.write_text(kernel(place / "file.hip").source())
    q, k, v = operands()
    kernel(copy)([-(-N // 256)], [256], q, k, v, N, 0.5)
    assert v.equal(q * k * 0.5)
    if vendor == "nvidia":
        copy.write_text(copy.read_text().replace("mul.f32", "no_such_instruction"))
        with pytest.raises(accelpatch.AccelpatchError, match=r"(?s)copy\.ptx .*was not loaded:.*line \d+"):
            kernel(copy)([1], [256], q, k, v, N, 0.5)


def test_captured_on_other_streams_and_from_another_thread(place: Path) -> None:
    made, (q, k, v) = kernel(place / "file.hip"), operands()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    made([4], [256], q, k, v, N, 1.0, stream=stream)
    torch.cuda.current_stream().wait_stream(stream)
    assert v.equal(q * k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made([4], [256], q, k, v, N, 3.0)
    q.add_(1.0)
    graph.replay()
    assert v.equal(q * k * 3.0)
    thread = threading.Thread(target=made, args=([4], [256], q, k, v, N, 5.0))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert v.equal(q * k * 5.0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_the_device_of_its_tensors(place: Path) -> None:
    made = kernel(place / "file.hip")
    for index in (1, 0, 1):
        q, k, v = (one.to(f"cuda:{index}") for one in operands())
        made([4], [256], q, k, v, N, 0.5)
        assert v.equal(q * k * 0.5)
        assert torch.cuda.current_device() == 0


def test_a_launch_takes_at_most_8_us_of_the_host(place: Path) -> None:
    made, (q, k, v) = kernel(place / "file.hip"), operands()
    best = float("inf")
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(200):
            made([4], [256], q, k, v, N, 0.5)
        best = min(best, (time.perf_counter() - began) / 200)
    torch.cuda.synchronize()
    print(f"{best * 1e6:.2f} us a launch")
    assert best < 8e-6
