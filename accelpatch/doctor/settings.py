"""The settings of the environment that change how fast or how safely models run: a literal table, as data.

AMD's values are those of AMD's guides; nobody has timed them with accelpatch on an AMD GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelpatch.device import AMPERE_TO_HOPPER, CDNA, CDNA3, CDNA4

#: what an advice is for; `speed` is taken where nothing else is asked for
TOPICS = ("speed", "memory", "determinism", "parallel", "tuning", "affinity", "convolution")
#: value of an advice: "leave it out of the environment"
UNSET = ""
#: value of an advice: the number of physical cores that this process may use
CORES = "{cores}"

_HIP = "ROCm documentation, HIP environment variables"
_GUIDE = "AMD, LLM fine-tuning and inference on Instinct, Miscellaneous"
_FAULTS = "AMD, LLM fine-tuning and inference on Instinct, Debugging Memory Access Faults"
_MI300X = "ROCm documentation, MI300X workload optimization"
_ROCR = "ROCm documentation, ROCR-Runtime environment variables"
_CUDA = "CUDA Programming Guide, CUDA environment variables"
_TORCH = "PyTorch documentation, CUDA environment variables"
_MEMORY = "PyTorch documentation, CUDA semantics, memory management"
_CPU = "PyTorch tutorials, performance tuning guide, CPU"
_HIPBLASLT = "ROCm documentation, hipBLASLt environment variables and offline tuning"
_TUNABLE = "PyTorch documentation, torch.cuda.tunable"
_MIOPEN = "ROCm documentation, MIOpen environment variables"


@dataclass(frozen=True)
class Advice:
    """where: vendors ("amd", "nvidia", "cpu") or archs for which it holds; the first that fits is taken. value: UNSET,
    CORES, or the value. topic: one of TOPICS."""

    where: tuple[str, ...]
    value: str
    why: str
    topic: str = "speed"


@dataclass(frozen=True)
class Setting:
    """One variable. devices: vendors of the devices that it concerns. does: what it changes, and its default. source:
    the document that says so. advice: () where the choice is the user's."""

    name: str
    devices: tuple[str, ...]
    does: str
    source: str
    advice: tuple[Advice, ...] = ()


@dataclass(frozen=True)
class SystemSetting:
    """What belongs to the whole machine: it is shown with the command that sets it, and never set. file: where its
    value stands, "" where a command alone knows. set_by, undone_by: commands of the administrator."""

    name: str
    devices: tuple[str, ...]
    file: str
    does: str
    advised: str
    why: str
    set_by: str
    undone_by: str
    source: str
    topic: str = "speed"


def _debugging(name: str, devices: tuple[str, ...], does: str, source: str) -> Setting:
    why = "it is for debugging, and slows launches, copies or allocations"
    return Setting(name, devices, does, source, (Advice(devices, UNSET, why),))


_GPU, _ALL = ("amd", "nvidia"), ("amd", "nvidia", "cpu")

SETTINGS: tuple[Setting, ...] = (
    # Devices and archs.
    Setting("CUDA_VISIBLE_DEVICES", _GPU, "Which GPUs a program sees, and in which order; default: all.", _CUDA),
    Setting("HIP_VISIBLE_DEVICES", ("amd",), "Which GPUs a HIP program sees; default: all.", _HIP),
    Setting("ROCR_VISIBLE_DEVICES", ("amd",), "Which GPUs the runtime below HIP shows; AMD's advice on Linux.", _HIP),
    Setting(
        "HSA_OVERRIDE_GFX_VERSION", ("amd",), "Makes the GPU report another arch, such as 9.4.2.", _HIP,
        (Advice(("amd",), UNSET, "kernels compiled for another arch than the GPU's can fault or compute wrongly"),),
    ),
    Setting(
        "HSA_XNACK", ("amd",), "Whether a page fault is retried (1), for memory that moves between host and GPU.",
        _ROCR, (Advice(("amd",), UNSET, "code objects for xnack- do not load with it, and retries cost time"),),
    ),
    # Launches and queues.
    Setting(
        "HIP_FORCE_DEV_KERNARG", ("amd",),
        "Puts the arguments of kernels into the memory of the device (1) instead of the host's.", _GUIDE,
        (Advice(CDNA, "1", "a kernel then reads its arguments 2 to 3 us sooner, by AMD's guide"),),
    ),
    Setting(
        "GPU_MAX_HW_QUEUES", ("amd",), "Hardware queues of a process on a GPU; default 4.", _HIP,
        (Advice(("amd",), UNSET, "a captured decode step uses one stream; more queues than streams gain nothing"),),
    ),
    Setting(
        "CUDA_DEVICE_MAX_CONNECTIONS", ("nvidia",),
        "Work queues from the host to the GPU, 1 to 32; default 8.", _CUDA,
        (
            Advice(AMPERE_TO_HOPPER, "1", "kernels start in the order of their launches, which "
                   "overlapping communication and GEMM needs (Megatron-LM); for one GPU leave it out", "parallel"),
            Advice(("nvidia",), UNSET, "with 1, independent streams wait for each other"),
        ),
    ),
    Setting(
        "CUDA_MODULE_LOADING", ("nvidia",), "LAZY loads a kernel when it is first launched; default LAZY.", _CUDA,
        (Advice(("nvidia",), UNSET, "EAGER loads every kernel of every library at the start"),),
    ),
    _debugging("CUDA_LAUNCH_BLOCKING", ("nvidia",), "Each launch waits for its kernel (1); default 0.", _CUDA),
    _debugging("HIP_LAUNCH_BLOCKING", ("amd",), "Each launch waits for its kernel (1); default 0.", _HIP),
    _debugging(
        "AMD_SERIALIZE_KERNEL", ("amd",), "Waits before a kernel (1), after it (2), or both (3); default 0.", _HIP
    ),
    _debugging("AMD_SERIALIZE_COPY", ("amd",), "The same for copies; default 0.", _HIP),
    _debugging("HSA_TOOLS_LIB", ("amd",), "A tool that the runtime loads, such as the debug agent.", _FAULTS),
    _debugging("HSA_ENABLE_DEBUG", ("amd",), "Sets the GPU up for the debug agent (1), of older ROCm.", _FAULTS),
    _debugging("AMD_LOG_LEVEL", ("amd",), "HIP's log, from 0 (none) to 4; default 0.", _HIP),
    # Memory.
    Setting(
        "PYTORCH_ALLOC_CONF", _GPU,
        "Options of torch's allocator of memory, from torch 2.9 on.", _MEMORY,
        (
            Advice(("nvidia",), "expandable_segments:True", "memory that torch has reserved and does not use stays "
                   "usable when lengths change from prompt to prompt", "memory"),
        ),
    ),
    Setting("PYTORCH_CUDA_ALLOC_CONF", _GPU, "The same, by the only name that torch before 2.9 reads.", _MEMORY),
    _debugging("PYTORCH_NO_CUDA_MEMORY_CACHING", _GPU, "Each tensor is allocated by the driver (1).", _TORCH),
    _debugging("PYTORCH_NO_HIP_MEMORY_CACHING", ("amd",), "The same, by the name of ROCm builds.", _FAULTS),
    _debugging(
        "HSA_DISABLE_FRAGMENT_ALLOCATOR", ("amd",), "Small allocations share no larger block (1).", _FAULTS
    ),
    Setting(
        "HSA_NO_SCRATCH_RECLAIM", ("amd",),
        "A queue keeps the scratch memory that a kernel with spilled registers asked for (1); default 0.", _ROCR,
        (Advice(("amd",), UNSET, "few kernels spill, and the memory would stay taken until the process ends"),),
    ),
    # Libraries: GEMM, convolution, tuning.
    Setting(
        "TORCH_BLAS_PREFER_HIPBLASLT", ("amd",), "torch's GEMMs by hipBLASLt (1) or rocBLAS (0).", _MI300X,
        (Advice(CDNA, "1", "AMD's guide advises its GEMMs on Instinct; prompts of layers in floats use them"),),
    ),
    Setting(
        "PYTORCH_TUNABLEOP_ENABLED", _GPU, "torch looks up which GEMM of all libraries is the fastest (1).", _TUNABLE,
        (Advice(("amd",), "1", "a tuned choice needs it, also where nothing more is tuned", "tuning"),),
    ),
    Setting(
        "PYTORCH_TUNABLEOP_TUNING", _GPU, "and times those that it does not know yet (1, the default where enabled).",
        _TUNABLE,
        (Advice(("amd",), "1", "for one run over your shapes; 0 afterwards, or new shapes stall", "tuning"),),
    ),
    Setting("PYTORCH_TUNABLEOP_FILENAME", _GPU, "Its results; default tunableop_results.csv here.", _TUNABLE),
    Setting(
        "HIPBLASLT_TUNING_MODE", ("amd",), "off, cache (use what was tuned) or tune (time new shapes).", _HIPBLASLT,
        (Advice(CDNA, "tune", "for one run over your shapes, with HIPBLASLT_TUNING_CACHE_PATH; cache afterwards",
                "tuning"),),
    ),
    Setting("HIPBLASLT_TUNING_CACHE_PATH", ("amd",), "Where that is kept; not with an override file.", _HIPBLASLT),
    Setting("HIPBLASLT_TUNING_FILE", ("amd",), "Where offline tuning writes what it found.", _HIPBLASLT),
    Setting("HIPBLASLT_TUNING_OVERRIDE_FILE", ("amd",), "Solutions that replace the library's choice.", _HIPBLASLT),
    Setting(
        "TENSILE_SOLUTION_SELECTION_METHOD", ("amd",), "2: hipBLASLt predicts the solution (Origami).", _HIPBLASLT,
        (Advice((CDNA4,), UNSET, "prediction is the only selection of this arch"),),
    ),
    Setting("MIOPEN_FIND_MODE", ("amd",), "How MIOpen chooses a convolution; default DYNAMIC_HYBRID.", _MIOPEN),
    Setting("MIOPEN_USER_DB_PATH", ("amd",), "Where MIOpen keeps what it found; a local disk is best.", _MIOPEN),
    Setting(
        "PYTORCH_MIOPEN_SUGGEST_NHWC", ("amd",), "Convolutions of channels-last tensors stay so (1).", _GUIDE,
        (Advice(("amd",), "1", "with layout_optimization of inductor, by AMD's guide; vision models", "convolution"),),
    ),
    # Results that repeat bit for bit.
    Setting(
        "CUBLAS_WORKSPACE_CONFIG", ("nvidia",), "Sizes of cuBLAS' workspaces.", _TORCH,
        (Advice(("nvidia",), ":4096:8", "torch.use_deterministic_algorithms(True) refuses GEMMs without it",
                "determinism"),),
    ),
    Setting(
        "ROCBLAS_DEFAULT_ATOMICS_MODE", ("amd",), "Whether rocBLAS may add with atomics (1) or not (0).",
        "rocBLAS documentation, environment variables",
        (Advice(("amd",), "0", "the order of atomic additions differs from run to run", "determinism"),),
    ),
    Setting(
        "NVIDIA_TF32_OVERRIDE", ("nvidia",), "0 forbids TF32 in every library; 1 forces nothing.",
        "cuBLAS documentation, environment variables",
        (Advice(("nvidia",), UNSET, "torch.set_float32_matmul_precision says it for one program"),),
    ),
    # Several GPUs.
    Setting(
        "NCCL_MIN_NCHANNELS", _GPU, "Channels of a collective, at least.", _MI300X,
        (Advice((CDNA3,), "112", "for collectives among all eight GPUs of an MI300X host, by AMD's guide",
                "parallel"),),
    ),
    # The host.
    Setting(
        "OMP_NUM_THREADS", _ALL, "Threads of torch's and accelpatch's CPU kernels; default: cores that torch sees.",
        _CPU,
        (Advice(("cpu",), CORES, "one thread a physical core that this process may use; a container's quota is not "
                "seen by torch"),),
    ),
    Setting("MKL_NUM_THREADS", ("cpu",), "The same for Intel's MKL alone; default: OMP_NUM_THREADS.", _CPU),
    Setting(
        "OMP_PROC_BIND", ("cpu",), "Whether threads stay on their cores, and how they spread.", _CPU,
        (Advice(("cpu",), "close", "threads keep their caches; only where nothing else runs, for two such programs "
                "bind to the same cores", "affinity"),),
    ),
    Setting(
        "OMP_PLACES", ("cpu",), "What a thread binds to: threads, cores or sockets.", _CPU,
        (Advice(("cpu",), "cores", "with OMP_PROC_BIND", "affinity"),),
    ),
    Setting(
        "TRITON_INTERPRET", _ALL, "Runs Triton kernels in Python (1), on a CPU too.", "Triton documentation, debugging",
        (Advice(_ALL, UNSET, "it is for tests, and far slower than any kernel"),),
    ),
)  # fmt: skip

SYSTEM: tuple[SystemSetting, ...] = (
    SystemSetting(
        "kernel.numa_balancing", _GPU, "/proc/sys/kernel/numa_balancing",
        "Linux unmaps pages now and then to see who uses them, and moves them.", "0",
        "the GPU's accesses to the host's memory stall meanwhile",
        "sudo sh -c 'echo 0 > /proc/sys/kernel/numa_balancing'",
        "sudo sh -c 'echo 1 > /proc/sys/kernel/numa_balancing'", _GUIDE,
    ),
    SystemSetting(
        "clock limit", ("amd",), "", "The highest clock of the GPU; default 2100 MHz on an MI300X.", "1900 MHz",
        "a lower limit keeps the clock steady when the chip is hot, so that times repeat",
        "rocm-smi --setperfdeterminism 1900", "rocm-smi -r", _GUIDE, "determinism",
    ),
)  # fmt: skip
