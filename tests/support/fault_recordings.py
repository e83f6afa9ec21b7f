"""Logs of memory faults, made by the documented formats; none was recorded on AMD's hardware.

AMD: user guide and source of rocm-debug-agent (github.com/ROCm/rocr_debug_agent: README, src/debug_agent.cpp,
src/code_object.cpp; ROCm/rocm-systems, projects/rocr-debug-agent). ROCM_6 has the wavefront's line without the entry of
the kernel, ROCM_7 with it. NVIDIA: the manual of Compute Sanitizer, in the forms of CUDA 12 and of cuda-memcheck.
"""

from __future__ import annotations

ROCM_6 = """\
Memory access fault by GPU node-4 (Agent handle: 0x2b1c40) on address 0x7f10a0f6000. Reason: Page not present or supervisor privilege.
Queue error (HSA_STATUS_ERROR_MEMORY_FAULT: Agent attempted to access an inaccessible address.)

--------------------------------------------------------
wave_1: pc=0x7f4c1000d0e8 (stopped, reason: MEMORY_VIOLATION)

system registers:
            m0: 00000000        status: 00012461       trapsts: 30000100          mode: 000003c0
          exec: ffffffffffffffff           vcc: 0000000000000000

general registers:
            s0: 00c00000            s1: 80000010            s2: 10000000            s3: 00ea4fac
            v0: [0] 00000000 [1] 00000001 [2] 00000002 [3] 00000003

Local memory content (64 bytes):
    0x0000: 22222222 11111111 00000000 00000000 00000000 00000000 00000000 00000000

Disassembly for function scale(float*, float const*, int):
    code object: file:////opt/demo/scale#offset=14309&size=31336
    loaded at: [0x7f4c1000c000-0x7f4c1000e070]

/opt/demo/scale.hip:
6           int i = blockIdx.x * blockDim.x + threadIdx.x;
    0x7f4c1000d0d8 <+216>:    v_add_co_u32_e32 v2, vcc, s0, v2
7           y[i + n] = x[i];
    0x7f4c1000d0e0 <+224>:    global_store_dword v[2:3], v1, off
 => 0x7f4c1000d0e8 <+232>:    s_waitcnt vmcnt(0)
    ...
8       }
    0x7f4c1000d0ec <+236>:    s_endpgm

End of disassembly.

--------------------------------------------------------
wave_2: pc=0x7f4c1000d0e8 (stopped, reason: MEMORY_VIOLATION)

system registers:
            m0: 00000000        status: 00012461       trapsts: 30000100          mode: 000003c0

Disassembly for function scale(float*, float const*, int):
    code object: file:////opt/demo/scale#offset=14309&size=31336
    loaded at: [0x7f4c1000c000-0x7f4c1000e070]
 => 0x7f4c1000d0e8 <+232>:    s_waitcnt vmcnt(0)
    ...

End of disassembly.

--------------------------------------------------------
wave_3: pc=0x7f4c1000d0c0 (running)
"""  # noqa: E501

ROCM_7 = """\
Queue error (HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION: The agent attempted to access memory beyond the largest legal address.)

--------------------------------------------------------
wave_7: pc=0x7ff734dc1000 (kernel_code_entry=0x7ff736b80000 <void other<4>(float*, (anonymous namespace)::Box)>, kernargs=0x7ff700001000) (stopped, reason: DEBUG_TRAP)

--------------------------------------------------------
wave_9: pc=0x7ff734dcbf3c (kernel_code_entry=0x7ff736b8c040 <out_of_bounds>, kernargs=0x7ff700000000) (stopped, reason: MEMORY_VIOLATION|ADDRESS_ERROR)

system registers:
            m0: 00000000

Global memory (kernarg segment, 24 bytes):
    0x7ff700000000: 00000000 00007ff6 00000400 00000000 00000000 00000000

Disassembly for function out_of_bounds:
    code object: memory://415882#offset=0x7ff736b8c040&size=17250
    loaded at: [0x7ff734000000-0x7ff736b0a4e8]
 => 0x7ff734dcbf3c <+7484>:    s_waitcnt vmcnt(0) lgkmcnt(0)
    0x7ff734dcbf40 <+7488>:    s_endpgm
    ...

End of disassembly.
:0:rocdevice.cpp            :2991: 23172359403904 us:  Callback: Queue 0x7f41cc300000 aborting with error : HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION: The agent attempted to access memory beyond the largest legal address. code: 0x29
Fatal Python error: Aborted

Current thread 0x00007f10b57cf740 (most recent call first):
  File "/opt/venv/lib/python3.12/site-packages/torch/cuda/__init__.py", line 1083 in synchronize
  File "/opt/demo/train.py", line 41 in step
  File "/opt/demo/train.py", line 60 in <module>
"""  # noqa: E501

SANITIZER = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at scale(float *, const float *, int)+0xd0 in /opt/demo/scale.cu:7
=========     by thread (31,0,0) in block (2,0,0)
=========     Access at 0x7f241b0001e0 is out of bounds
=========     and is 33 bytes after the nearest allocation at 0x7f241b000000 of size 448 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: libcuda.so.1 [0x222dc8] in libcuda.so.1
=========         Host Frame: main in /opt/demo/scale.cu:25 [0x8a81] in scale
=========
========= Invalid __global__ write of size 4 bytes
=========     at scale(float *, const float *, int)+0xd0 in /opt/demo/scale.cu:7
=========     by thread (30,0,0) in block (2,0,0)
=========     Access at 0x7f241b0001dc is out of bounds
=========
========= Program hit cudaErrorLaunchFailure (error 719) due to "unspecified launch failure" on CUDA API call to cudaFree.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: main in /opt/demo/scale.cu:29 [0x8a03] in scale
=========
========= ERROR SUMMARY: 3 errors
"""  # noqa: E501

OLD_SANITIZER = """\
========= COMPUTE-SANITIZER
========= Invalid __shared__ read of size 8
=========     at 0x000003c8 in /opt/demo/sum.cu:17:void ns::sum<(int)4, float>(T2 *, int)
=========     by thread (0,1,0) in block (0,0,8)
=========     Address 0x00000404 is out of bounds
=========     Device Frame:/opt/demo/sum.cu:17:sum (sum : 0x3c8)
=========
========= Misaligned Shared or Local Address
=========     at 0x00003b10 in ampere_fp16_gemm
=========     by thread (31,0,0) in block (25,0,8)
"""

TRACEBACK = """\
loading
Traceback (most recent call last):
  File "/opt/demo/no_such.py", line 3, in <module>
    raise ValueError("of the program itself")
ValueError: of the program itself
Traceback (most recent call last):
  File "{script}", line 12, in <module>
    main()
  File "{script}", line 9, in main
    out_of_bounds[(1,)](x, 1 << 40, BLOCK=128)
  File "/opt/venv/lib/python3.12/site-packages/triton/runtime/jit.py", line 347, in <lambda>
    return lambda *args, **kwargs: self.run(grid=grid, warmup=False, *args, **kwargs)
RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered
"""
SCRIPT = """\
import torch
import out_of_bounds_kernel

out_of_bounds = out_of_bounds_kernel.out_of_bounds


def main():
    x = torch.zeros(128, device="cuda")
    out_of_bounds[(1,)](x, 1 << 40, BLOCK=128)


main()
"""
