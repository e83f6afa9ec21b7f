"""What a model loses where some of its layers have fewer bits: the KL of its answers with those alone rounded.

Block by block, each on what the float blocks before it give, so that only what comes behind a layer runs again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from accelpatch.errors import KernelError, PlanError
from accelpatch.patching.blocks import Blocks, block_of, blocks_of
from accelpatch.patching.capture import Call, first_of, watching
from accelpatch.patching.entry import Entry
from accelpatch.patching.placement import is_offloaded
from accelpatch.patching.plan import Plan
from accelpatch.quant.budget import Option, allocate
from accelpatch.quant.smoothing import SiteStatistics
from accelpatch.recipe.mixed import mixed
from accelpatch.recipe.recipe import Recipe, dump
from accelpatch.replacers.calibrated import CalibratedReplacer
from accelpatch.replacers.expert_rounding import floats_of, nearest_experts
from accelpatch.replacers.rounding import Kept, floats_of_linear, written
from accelpatch.replacers.weight_kernels import weight_of
from accelpatch.replacers.weight_only import WeightOnly

OUTSIDE = "outside"
ROWS = 128  # of logits that are compared at once


@dataclass(frozen=True)
class Measured:
    """Layers that read one input, and so have one format. weights: of all of them; options: with their KL in nats."""

    paths: tuple[str, ...]
    weights: int
    options: tuple[Option, ...]


@dataclass(frozen=True)
class Chosen:
    """A choice of bits. bits: a weight, on average. kl: the sum of what each layer loses alone, in nats. layers: each
    with its options, and the name of the one that was chosen."""

    recipe: Recipe
    bits: float
    kl: float
    layers: tuple[tuple[Measured, str], ...]

    def text(self) -> str:
        """The recipe as a file, with what was measured as comments."""
        lines = [f"Chosen: {self.bits:.3f} bits a weight. KL in thousandths of a nat with one line's layers rounded:"]
        for layer, name in self.layers:
            losses = ", ".join(f"{one.name} {1000 * one.loss:.3g}" for one in layer.options)
            lines.append(f"{name}: {' '.join(layer.paths)}: {losses}")
        return "".join(f"# {line}\n" for line in lines) + dump(self.recipe)


def chosen(recipe: Recipe, found: Sequence[Measured], budget: float) -> Chosen:
    """The recipe with the formats that lose least together, at most `budget` bits a weight. Raises KernelError for a
    budget below the smallest formats, and PlanError where there is nothing to choose."""
    weights = sum(one.weights for one in found)
    if not weights:
        raise PlanError(f"{recipe.name} replaces no layer of this model whose bits could be chosen")
    least = sum(min(one.bits for one in layer.options) for layer in found) / weights
    if budget < least:
        raise KernelError(f"a budget of {budget:g} bits is below the {least:.3f} of the smallest formats: give more")
    taken = allocate([layer.options for layer in found], budget * weights)
    names = {path: one.name for layer, one in zip(found, taken, strict=True) for path in layer.paths}
    layers = tuple((layer, one.name) for layer, one in zip(found, taken, strict=True))
    bits, kl = sum(one.bits for one in taken) / weights, sum(one.loss for one in taken)
    return Chosen(mixed(recipe, names, budget), bits, kl, layers)


def measured(
    plans: Mapping[str, Plan],
    model: nn.Module,
    batches: Sequence[Mapping[str, Any]],
    progress: Callable[[int, int], None],
    kept: Kept | None = None,
) -> list[Measured]:
    """The layers of a model with what each format costs. plans: the name of a format -> the plan with it everywhere.

    batches: each the keyword arguments of one call, whose logits are compared. kept: where finished blocks are read
    from and written to. The model is as it was when this returns. Raises PlanError for weights that are offloaded, and
    for a model without logits.
    """
    entries = {name: _entries(plan) for name, plan in plans.items()}
    paths = list(dict.fromkeys(path for one in entries.values() for path in one))
    runner, found = Blocks(model, batches), list[Measured]()
    blocks = {OUTSIDE: [path for path in paths if block_of(path) is None], **blocks_of(paths)}
    reference = _References(runner)
    for done, (block, inside) in enumerate(blocks.items()):
        together = [[path] for path in inside] if block == OUTSIDE else _of_one_input(model, runner, block, inside)
        stored = (kept.finished(f"{block}.bits") if kept is not None else None) or {}
        made: dict[str, dict[str, Tensor]] = {}
        for group in together:
            options = _taken(stored.get(group[0], {}), list(entries)) or _options(entries, group, reference)
            made[group[0]] = _as_tensors(options)
            weights = sum(_count(_any(entries, path)) for path in group)
            found.append(Measured(tuple(group), weights, tuple(options)))
        if kept is not None and not stored:
            kept.keep(f"{block}.bits", made)
        if block != OUTSIDE:
            runner.run(block, True, lambda: None)
        progress(done + 1, len(blocks))
    return found


class _References:
    """The logits of the float model, and how far those of the model as it now is are from them."""

    def __init__(self, runner: Blocks):
        self._runner = runner
        self._logits = [self._of(output) for output in runner.outputs()]

    def kl(self, weights: Sequence[tuple[nn.Parameter, Tensor]]) -> float:
        """Mean KL(float || with these weights) in nats."""
        with written(weights):
            sums = [_kl(due, self._of(got)) for due, got in zip(self._logits, self._runner.outputs(), strict=True)]
        total = float(torch.stack(sums).sum()) / sum(len(one) for one in self._logits)
        if not math.isfinite(total):
            raise PlanError("the model's logits are NaN or infinite: load it in bfloat16 or float32")
        return max(total, 0.0)

    def _of(self, output: Any) -> Tensor:
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise PlanError(
                "bits are chosen by a model's logits, and this one gives none: name a recipe without budget"
            )
        return logits.flatten(0, -2)


def _kl(due: Tensor, got: Tensor) -> Tensor:
    """Sum of KL(due || got) over the rows of two logits [T, V]; small differences keep their digits."""
    total = due.new_zeros((), dtype=torch.float64)
    for p, q in zip(due.split(ROWS), got.split(ROWS), strict=True):
        p, q = p.float(), q.float()
        rows = q.logsumexp(-1) - p.logsumexp(-1) - (p.softmax(-1) * (q - p)).sum(-1)
        total += rows.double().sum()
    return total


def _entries(plan: Plan) -> dict[str, Entry]:
    """path -> the entry of each layer whose format a recipe may choose."""
    found = {
        entry.site.path: entry
        for entry in plan.replaced
        if isinstance(entry.replacer, CalibratedReplacer) and "head" not in entry.site.roles and not entry.as_stored
    }
    if away := next((path for path, one in found.items() if is_offloaded(one.site.original)), None):
        raise PlanError(f"{away} is offloaded, and measuring changes weights: load the model whole")
    return found


def _of_one_input(model: nn.Module, runner: Blocks, block: str, paths: Sequence[str]) -> list[list[str]]:
    """The paths of a block, in groups that read one tensor."""
    inputs: dict[int, Any] = {}  # keeps the inputs alive, so that no other tensor gets the same id
    found: dict[Any, list[str]] = {}

    def see(path: str, call: Call) -> None:
        x = first_of(call)
        inputs[id(x)] = x
        if all(path not in one for one in found.values()):
            found.setdefault(id(x), []).append(path)

    with watching(model, {path: partial(see, path) for path in paths}):
        runner.run(block, False, lambda: None)
    seen = {path for one in found.values() for path in one}
    return [*found.values(), *([path] for path in paths if path not in seen)]


def _options(entries: Mapping[str, Mapping[str, Entry]], group: Sequence[str], reference: _References) -> list[Option]:
    """The formats of layers of one input. The first that they can have is measured; the KL of the others goes with the
    squares of their errors in the weights, as that of any small change does."""
    options = list[Option]()
    measured_kl = measured_error = 0.0
    for name, of_format in entries.items():
        if any(path not in of_format for path in group):
            continue
        bits, floats = _rounded([of_format[path] for path in group])
        error = sum(float((full - parameter.detach()).float().square().sum()) for parameter, full in floats)
        if not options:
            measured_kl, measured_error = reference.kl(floats), error
        options.append(Option(name, bits, measured_kl * error / measured_error if measured_error else 0.0))
    return options


def _rounded(entries: Sequence[Entry]) -> tuple[int, list[tuple[nn.Parameter, Tensor]]]:
    """Bits of layers in a format, and their parameters with the floats that they stand for."""
    bits, floats = 0, list[tuple[nn.Parameter, Tensor]]()
    for entry in entries:
        if isinstance(entry.replacer, WeightOnly):
            made = entry.replacer.quantized(weight_of(entry.site.original), cast(Any, entry.choice).detail)
            tensors = list(made.tensors().values())
            floats.append(floats_of_linear(entry, SiteStatistics(rounded=made)))
        else:
            stored = nearest_experts(entry)
            tensors = list(stored.values())
            floats += floats_of(entry, stored)
        bits += sum(8 * one.numel() * one.element_size() for one in tensors)
    return bits, floats


def _any(entries: Mapping[str, Mapping[str, Entry]], path: str) -> Entry:
    return next(one[path] for one in entries.values() if path in one)


def _count(entry: Entry) -> int:
    """Weights of a layer, its biases apart."""
    return sum(one.numel() for name, one in entry.site.original.named_parameters() if not name.endswith("bias"))


def _as_tensors(options: Sequence[Option]) -> dict[str, Tensor]:
    return {one.name: torch.tensor([one.bits, one.loss], dtype=torch.float64) for one in options}


def _taken(stored: Mapping[str, Tensor], names: Sequence[str]) -> list[Option]:
    found = {name: stored[name].tolist() for name in names if name in stored}
    return [Option(name, round(bits), loss) for name, (bits, loss) in found.items()]
