"""``accelpatch tune hipblaslt``: hipBLASLt's GEMM tuning workflow, from the log of a program to a measured library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from accelpatch.errors import AccelpatchError

from . import console
from . import tune_hipblaslt_output as output
from .options import JsonOption

if TYPE_CHECKING:
    from accelpatch.tuning.hipblaslt.work import Work

WHOLE = "all"
OUT = Path("hipblaslt-tuning")


class Stages(TyperGroup):
    """`tune hipblaslt LOG` is `tune hipblaslt all LOG`: a first word that is no stage is the log for all stages."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [WHOLE, *args]
        return super().parse_args(ctx, args)


commands = typer.Typer(
    cls=Stages, no_args_is_help=True,
    help="Tune the GEMMs of a log for hipBLASLt: `tune hipblaslt LOG` runs all stages, or each alone.",
)  # fmt: skip
LogArgument = Annotated[
    Path, typer.Argument(metavar="LOG", help="Log of hipBLASLt or rocBLAS, or TunableOp's list of GEMMs.")
]
WorkArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The folder that `configs` wrote.")]
OutOption = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for all files of the tuning.")]
ArchOption = Annotated[
    str | None, typer.Option("--arch", metavar="ARCH", help="Arch to tune for; default: this GPU's, or gfx942.")
]
ThresholdOption = Annotated[
    float,
    typer.Option("--threshold", min=0, max=100, metavar="PERCENT", help="Leave out GEMMs with less of all flops."),
]
Platform = Literal["auto", "hipblaslt", "triton", "simulated"]
OnOption = Annotated[
    Platform, typer.Option("--on", help="What runs the GEMMs; auto: --hipblaslt, a GPU's Triton, or simulated.")
]
HipblasltOption = Annotated[
    Path | None,
    typer.Option("--hipblaslt", exists=True, file_okay=False, metavar="DIR", help="A built checkout of hipBLASLt."),
]
DevicesOption = Annotated[str, typer.Option("--devices", metavar="N,N,...", help="GPUs to search on.")]
TrialsOption = Annotated[
    int, typer.Option("--trials", min=2, help="Kernel configurations that are measured for each GEMM.")
]
SecondsOption = Annotated[float, typer.Option("--seconds", min=1, help="Time limit of the search for one GEMM.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the search.")]
ErrorOption = Annotated[
    float, typer.Option("--max-error", min=0, help="Largest relative error of a result that counts as right.")
]
UpliftOption = Annotated[
    float, typer.Option("--min-uplift", min=1, help="Least speedup over the reference for a kernel to be kept.")
]
Engine = Literal["genetic", "runtime", "geko", "quicktune"]
EngineOption = Annotated[
    Engine, typer.Option("--engine", help="genetic: this search; the others print what AMD's own tuning needs.")
]


@commands.callback()
def hipblaslt() -> None:
    """Tune the GEMMs of a log for hipBLASLt: `tune hipblaslt LOG` runs all stages, or each alone."""


def _work(folder: Path) -> Work:
    from accelpatch.tuning.hipblaslt.work import Work

    return Work(folder)


def _device_list(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 4 for part in found):
        raise typer.BadParameter(f"{text!r} is no list of numbers of GPUs, such as 0,1", param_hint="--devices")
    return found


def _platform(on: Platform, hipblaslt: Path | None) -> str:
    """The platform that runs the GEMMs, with `auto` resolved for this machine."""
    if on != "auto":
        return on
    if hipblaslt is not None:
        return "hipblaslt"
    import importlib.util

    import torch

    return "triton" if torch.cuda.is_available() and importlib.util.find_spec("triton") else "simulated"


def _arch(arch: str | None, platform: str) -> str:
    """The arch to tune for. Raises AccelpatchError for one that the platform cannot tune for."""
    from accelpatch import device as devices
    from accelpatch.tuning.hipblaslt import configuration

    if arch is None and platform != "simulated":
        import torch

        if torch.cuda.is_available():
            arch = devices.probe("cuda:0").arch
    if platform == "triton":
        return arch or "cuda"
    if arch is None and platform == "hipblaslt":
        raise AccelpatchError("no GPU is seen here, so give --arch, such as gfx942")
    found = arch or devices.CDNA3
    configuration.target_of(found)
    return found


def _hipblaslt(path: Path | None) -> str:
    return "" if path is None else str(path.absolute())


@commands.command("configs")
def configs(
    log: LogArgument,
    out: OutOption = OUT,
    arch: ArchOption = None,
    threshold: ThresholdOption = 1.0,
    on: OnOption = "auto",
    hipblaslt: HipblasltOption = None,
    json: JsonOption = False,
) -> None:
    """Read LOG, and write a tuning configuration for each GEMM that is worth it."""
    from accelpatch.tuning.hipblaslt import stages

    platform = _platform(on, hipblaslt)
    found = stages.configs(_work(out), log, arch=_arch(arch, platform), platform=platform, threshold=threshold)
    document = output.configured(found, out, platform)
    if json:
        console.print_json(document)


@commands.command("optimize")
def optimize(
    work: WorkArgument = OUT,
    devices: DevicesOption = "0",
    trials: TrialsOption = 128,
    seconds: SecondsOption = 3600.0,
    seed: SeedOption = 0,
    only: Annotated[str | None, typer.Option("--only", metavar="NAME", help="Search for this GEMM alone.")] = None,
    hipblaslt: HipblasltOption = None,
) -> None:
    """Search for the fastest kernel of each configuration in DIR, on one device or several."""
    from accelpatch.tuning.hipblaslt import stages

    with console.progress_bars() as progress:
        made = stages.optimize(
            _work(work), devices=_device_list(devices), trials=trials, seconds=seconds, seed=seed, only=only,
            hipblaslt=_hipblaslt(hipblaslt), progress=progress,
        )  # fmt: skip
    output.optimized(made, work)


@commands.command("merge")
def merge(work: WorkArgument = OUT, hipblaslt: HipblasltOption = None) -> None:
    """Put the kernels that were found into one library a problem type, and build it."""
    from accelpatch.tuning.hipblaslt import stages

    output.merged(stages.merge(_work(work), hipblaslt=_hipblaslt(hipblaslt)), work)


@commands.command("benchmark")
def benchmark(work: WorkArgument = OUT, devices: DevicesOption = "0", hipblaslt: HipblasltOption = None) -> None:
    """Run each GEMM by the reference and by the tuned library, and check its results. The first device is used."""
    from accelpatch.tuning.hipblaslt import stages

    found = stages.benchmark(_work(work), hipblaslt=_hipblaslt(hipblaslt), device=_device_list(devices)[0])
    console.note(f"benchmark: {len(found)} GEMMs with both libraries")


@commands.command("postprocess")
def postprocess(
    work: WorkArgument = OUT,
    max_error: ErrorOption = 0.03,
    min_uplift: UpliftOption = 1.03,
    hipblaslt: HipblasltOption = None,
    json: JsonOption = False,
) -> None:
    """Leave out what is wrong or not better, and write tables and the final library."""
    from accelpatch.tuning.hipblaslt import stages

    found = stages.postprocess(_work(work), error=max_error, uplift=min_uplift)
    output.finish(found, work, _hipblaslt(hipblaslt), json)


@commands.command(WHOLE)
def whole(
    log: LogArgument,
    out: OutOption = OUT,
    arch: ArchOption = None,
    threshold: ThresholdOption = 1.0,
    on: OnOption = "auto",
    engine: EngineOption = "genetic",
    hipblaslt: HipblasltOption = None,
    devices: DevicesOption = "0",
    trials: TrialsOption = 128,
    seconds: SecondsOption = 3600.0,
    seed: SeedOption = 0,
    max_error: ErrorOption = 0.03,
    min_uplift: UpliftOption = 1.03,
    json: JsonOption = False,
) -> None:
    """Run all stages on LOG, one after the other; the word may be left out. A command that was killed goes on."""
    from accelpatch.tuning.hipblaslt import stages

    chosen = _device_list(devices)
    if engine != "genetic":
        output.other_engine(engine, log, _hipblaslt(hipblaslt), chosen, arch, json)
        return
    platform, root, work = _platform(on, hipblaslt), _hipblaslt(hipblaslt), _work(out)
    found = stages.configs(work, log, arch=_arch(arch, platform), platform=platform, threshold=threshold)
    output.configured(found, out, platform)
    if not work.done("optimize"):
        with console.progress_bars() as progress:
            made = stages.optimize(
                work, devices=chosen, trials=trials, seconds=seconds, seed=seed, hipblaslt=root, progress=progress
            )
        output.optimized(made, out)
    if not work.done("merge"):
        output.merged(stages.merge(work, hipblaslt=root), out)
    if not work.done("benchmark"):
        stages.benchmark(work, hipblaslt=root, device=chosen[0])
    output.finish(stages.postprocess(work, error=max_error, uplift=min_uplift), out, root, json)
