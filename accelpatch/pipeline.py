"""The stages of a patch in their order: compile, calibrate, capture, build and verify, swap, fuse, verify the whole."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import nn

from accelpatch import calibration
from accelpatch import device as devices
from accelpatch.fusion.verified import check_layers
from accelpatch.fusion.verified_cross import cross_layers, cross_runs, one_memory
from accelpatch.fusion.verified_encoders import encoder_layers, encoder_runs
from accelpatch.fusion.verified_laid_out import check_laid_out, lay_out
from accelpatch.kernels import added, measured, who_runs
from accelpatch.kernels.check.while_running import checked
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.ops.linear import float_linear
from accelpatch.models.checkpoint import sha256
from accelpatch.models.encoder_decoders import is_cross_layer
from accelpatch.models.encoders import layer_roles
from accelpatch.models.family import roles_of
from accelpatch.models.inputs import sample_inputs
from accelpatch.models.smoothing import smoothing_groups
from accelpatch.modules.attention_settings import configs_with_own_masks, unnamed
from accelpatch.parallel.device_map import placement_of
from accelpatch.patching import apply, formula
from accelpatch.patching.host_copies import HostCopies, rounded_weights
from accelpatch.patching.layers import layer_records, record_layers
from accelpatch.patching.placement import Placement, device_of, is_offloaded
from accelpatch.patching.plan import Plan, make_plan
from accelpatch.patching.request import Request
from accelpatch.patching.stages import NOT_VERIFIED, Captured, capture, stage_report, verified_build, whole_model
from accelpatch.patching.threads import for_idle_cores
from accelpatch.patching.verify import SiteErrors
from accelpatch.progress import Stopwatch
from accelpatch.recipe import quality
from accelpatch.recipe import recipe as recipes
from accelpatch.recipe.recipe import Recipe
from accelpatch.replacers import registry
from accelpatch.replacers.stored import stored_of
from accelpatch.report import Report
from accelpatch.runtime import compiled as compiled_parts
from accelpatch.runtime import tuned_gemms
from accelpatch.runtime.generation.patched_model import new_runtime, patched_classes
from accelpatch.runtime.generation.weight_methods import SAVE

SOURCES = (".py", ".hip", ".h", ".cpp", ".inc", ".cu")


def plan_of(model: nn.Module, recipe: recipes.Recipe, device: devices.Device | None, slower: bool = False) -> Plan:
    """The plan for a model. device: default: the one that it is on. slower: see `make_plan`."""
    devices.forget_compilers()
    if recipe.runtime.compile != compiled_parts.OFF:
        compiled_parts.options_of(recipe.runtime, captured=False)  # raises for an option that torch does not have
    placement = placement_of(model)
    roles = {**layer_roles(model, is_cross_layer), **roles_of(getattr(model, "config", None))}
    facts = device or devices.probe(str(placement.device or device_of(model)))
    made = make_plan(model, recipe, facts, roles, registry(), smoothing_groups(model), stored_of, placement, slower)
    return replace(made, explain_kernels=who_runs.table, notes=(*made.notes, *_not_taken(made), *_compiles(made)))


def _compiles(planned: Plan) -> list[str]:
    """The note about torch.compile, where the recipe asks for it."""
    settings = planned.recipe.runtime
    if settings.compile == compiled_parts.OFF:
        return []
    reason = compiled_parts.why_not(settings, planned.device)
    said = (
        f"has no effect: {reason}" if reason else "takes the layers that are not fused, or a model without fused ones"
    )
    return [f"compile: {settings.compile} {said}"]


def _not_taken(planned: Plan) -> Iterator[str]:
    """Notes about implementations of linear layers that a user added and no site takes."""
    taken = {entry.choice.kernel for entry in planned.replaced if entry.choice is not None}
    for name in added.of(float_linear.OP):
        if name not in taken:
            yield f"no site takes {name}: give a rule of the recipe `replace: gemv` and `options: {{kernel: {name}}}`"


def compiled(planned: Plan, watch: Stopwatch) -> Plan:
    """The plan, once the kernel libraries that it needs are built: before anything of the model is touched."""
    native_library.say_where_missing(planned.device)
    if (planned.device.index is not None or planned.device.kind == "cpu") and planned.libraries:
        libraries.prepare(planned.libraries, planned.device, f"recipe {planned.recipe.name}")
        if planned.device.kind != "cpu":  # whose one library is there after the first use
            watch("compile", 1, 1)
    return planned


@cache
def code_digest() -> str:
    """SHA-256 over accelpatch's own sources, once a process."""
    home = Path(__file__).parent
    files = sorted(file for file in home.rglob("*") if file.suffix in SOURCES and file.is_file())
    return hashlib.sha256("".join(f"{file.relative_to(home)} {sha256(file)}\n" for file in files).encode()).hexdigest()


def computed_by(model: Any, planned: Plan, recipe: Recipe) -> str:
    """SHA-256 over what computes a patched model: the kernel libraries, the device and its tuning, the code of
    accelpatch and of a plugin, torch, transformers, the recipe, the dtype and the attention. Two runs of one digest
    differ in nothing that verification looks at, if the weights are the same."""
    device = planned.device
    homes = {type(entry.replacer).__module__ for entry in planned.replaced}
    files = {getattr(sys.modules.get(home), "__file__", None) for home in homes if not home.startswith("accelpatch.")}
    plugins = {Path(file) for file in files if file} | _added_files(planned)
    names = planned.libraries or (("cpu",) if device.kind == "cpu" else ())
    facts = {
        "libraries": {name: libraries.fingerprint(name, device) for name in names},
        "device": [device.arch, device.name],
        "tuned": [str(one) for one in measured.known(device)],
        "packages": {name: version(name) for name in ("torch", "transformers")},
        "code": [code_digest(), *(sha256(file) for file in sorted(plugins))],
        "recipe": recipes.dump(recipe),
        "dtype": str(getattr(model, "dtype", "")),
        "attention": unnamed(copy.deepcopy(model.config))._attn_implementation,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _added_files(planned: Plan) -> set[Path]:
    """The files of the implementations of a user's that a plan takes."""
    taken = {
        (entry.choice.spec.op, entry.choice.kernel) for entry in planned.replaced if entry.choice and entry.choice.spec
    }
    return {file for op, name in taken if name in added.of(op) for file in added.of(op)[name].files()}


def fuse(model: nn.Module, request: Request, runtime: Any, captured: Captured, report: Report) -> None:
    """Lay the fused layers out and verify them; those over their bound run their modules."""
    errors: dict[int, SiteErrors] = {}
    failed: dict[int, str] = {}
    fuse_encoders(model, request, captured, report)
    fuse_cross(model, request, captured, report)
    every = layer_records(report, encoder_layers(model).keys() | cross_layers(model).keys())
    calls = {place: captured.calls.get(record.path, []) for place, record in every.items()}
    with apply.naming("the fused layers", "their weights were laid out and verified"):
        fused = runtime.prepare(model)
        if elsewhere := _unfused_elsewhere(request, fused, every):
            runtime.unfuse(elsewhere)
            fused = runtime.prepare(model)
        if every and not isinstance(fused, str) and captured.missing is None:
            errors, failed = check_layers(
                model, fused, calls, captured, request.planned.recipe.verify.metric,
                lambda done, total: request.watch("verify fused", done, total), request.extent,
            )  # fmt: skip
    unfused = dict.fromkeys(every, fused.removeprefix("layer 0: ")) if isinstance(fused, str) else fused.unfused
    record_layers(every, request.planned.recipe, errors, failed, unfused)
    runtime.unfuse(failed)
    captured.calls.clear()


def _unfused_elsewhere(request: Request, fused: Any, every: Mapping[int, Any]) -> dict[int, str]:
    """Layers that other ranks of a job cannot fuse, and this one can: place -> why."""
    here = dict.fromkeys(every, fused) if isinstance(fused, str) else dict(fused.unfused)
    agreed = request.placement.agreed_all(here)
    return {} if isinstance(fused, str) else {place: why for place, why in agreed.items() if place not in here}


def fuse_encoders(model: nn.Module, request: Request, captured: Captured, report: Report) -> None:
    """The same for layers of encoders, which are no part of steps."""
    _fuse_apart("the fused layers of the encoder", encoder_layers(model), encoder_runs, request, captured, report)


def fuse_cross(model: nn.Module, request: Request, captured: Captured, report: Report) -> None:
    """The same for decoder layers of an encoder-decoder, which steps run by the model's own forward."""
    layers = cross_layers(model)
    one_memory(layers)
    _fuse_apart("the fused layers of the decoder", layers, cross_runs, request, captured, report)


def _fuse_apart(name: str, layers: Any, runs_of: Any, request: Request, captured: Captured, report: Report) -> None:
    """Lay out and verify layers that are fused each for itself. name: of all of them. runs_of: of `check_laid_out`."""
    errors, failed = dict[str, SiteErrors](), dict[str, str]()
    records = {record.path: record for record in report.sites if record.path in layers}
    if not records:
        return
    recipe = request.planned.recipe
    with apply.naming(name, "their weights were laid out and verified"):
        planned = {path: bool(record.fused) for path, record in records.items()}
        unfused = {path: record.by_modules or "" for path, record in records.items() if not record.fused}
        unfused |= lay_out(layers, planned)
        if captured.missing is None:
            errors, failed = check_laid_out(
                layers, runs_of, captured.calls, recipe.verify.metric, request.extent,
                lambda done, total: request.watch("verify fused", done, total),
            )  # fmt: skip
    record_layers(records, recipe, errors, failed, unfused)


def gemms_of(planned: Plan) -> tuned_gemms.TunedGemms | None:
    """The tuned GEMMs that a recipe names, checked against this machine; None for a CPU, which has none."""
    file = planned.recipe.runtime.tunableop
    return None if file is None or planned.device.kind == "cpu" else tuned_gemms.check(file, planned.device)


def compile_parts(model: Any, handle: apply.Handle, runtime: Any, report: Report) -> None:
    """Have torch compile what no fused layer takes, as the recipe says; all of it until the model is unpatched."""
    settings, device = handle.plan.recipe.runtime, handle.plan.device
    if settings.compile == compiled_parts.OFF:
        return
    fused = {record.path for record in report.sites if record.fused}
    if compiled_parts.why_not(settings, device) is not None:
        return  # the plan says so
    captured = compiled_parts.captures(model, settings, device)
    if fused:
        calls = list(compiled_parts.calls_of(model, fused, settings, captured, runtime.paths))
        for part, call in calls:
            handle.set(part, compiled_parts.CALL, call)
        said = f"{len(calls)} layers that are not fused" if calls else "nothing, for every layer is fused"
        report.notes.append(f"compile: {settings.compile} compiles {said}")
        return
    runtime.compiled = compiled_parts.whole(model, settings, captured, runtime.paths)
    report.notes.append(f"compile: {settings.compile} compiles the model's forward: no layer is fused")
    if not captured and compiled_parts.takes_static_cache(model):
        runtime.static_cache = True
        report.notes.append("generate() takes a static cache, so that its step is compiled once")


@contextmanager
def writing(model: nn.Module) -> Iterator[None]:
    """Context manager in which a model on a CPU generates with int8 weights: it writes its own text in less time."""
    if device_of(model).type != "cpu" or any(is_offloaded(module) for module in model.modules()):
        yield
        return
    planned = plan_of(model, recipes.load("int8"), devices.probe("cpu"))
    carry_out(model, Request(planned, keep_original="cpu", placement=placement_of(model)))
    try:
        yield
    finally:
        vars(model)[apply.HANDLE].unpatch()


def agreed_plan(planned: Plan, placement: Placement) -> Plan:
    """The plan without what another rank of a tensor-parallel job cannot replace, so that the ranks go in step."""
    stay = {entry.site.path: entry.reason or "kept" for entry in planned.entries if entry.replacer is None}
    said = {path: f"{why} (on another rank)" for path, why in placement.agreed_all(stay).items() if path not in stay}
    groups = tuple(group for group in planned.groups if group.source not in said)
    entries = tuple(one.kept(said[one.site.path]) if one.site.path in said else one for one in planned.entries)
    return replace(planned, entries=entries, groups=groups)


def carry_out(model: Any, request: Request) -> None:
    """Patch `model` as planned."""
    _carry_out(model, replace(request, planned=agreed_plan(request.planned, request.placement)))


def _carry_out(model: Any, request: Request) -> None:
    notes: list[str] = []
    planned, extent = request.planned, request.extent
    request.placement.check_room(planned)
    gemms = gemms_of(planned)
    formula.check_unpacking(planned.entries)
    stats = calibration.of_request(model, request, writing, notes)
    copying = HostCopies(rounded_weights(planned) if request.keep_original == "cpu" else [])
    with for_idle_cores(planned.device.kind), copying as copies:
        with formula.by_formula(model, formula.stored_sites(planned) if extent.verifies else []) as said:
            notes += said
            captured = capture(model, request, sample_inputs) if extent.verifies else NOT_VERIFIED
            built, planned = verified_build(request, captured, checked, stats)
        request = replace(request, planned=planned)
        formula.check_unpacking(planned.entries)
        runtime = new_runtime(planned.device.kind, planned.recipe.runtime, request.placement.before_generate)
        report = stage_report(planned, built, runtime.paths)
        report.notes += notes
        attributes = [*patched_classes(model, runtime), (model, SAVE, request.save)]
        made = [item.built for item in built]
        handle = apply.commit(model, planned, made, request.keep_original, attributes, report)
        try:
            for owner, settings in configs_with_own_masks(model):
                handle.configure(owner, settings)
            runtime.code.look()
            fuse(model, request, runtime, captured, report)
            compile_parts(model, handle, runtime, report)
            if gemms is not None:
                handle.set(model, tuned_gemms.TUNED, tuned_gemms.Applied(gemms, str(planned.recipe.runtime.tunableop)))
            report.verification = whole_model(model, captured, report, request)
            report.quality = quality.of_loaded(planned.recipe, planned.device.kind) if request.loaded else None
            apply.release_originals(handle, made, copies, request.watch, request.placement)
        except BaseException:
            handle.revert()
            raise
    report.seconds.update(request.watch.seconds)
    if nothing := report.why_nothing():
        warnings.warn(f"{nothing}. The model is as fast as it was", stacklevel=4)
