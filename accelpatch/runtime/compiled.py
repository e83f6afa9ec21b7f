"""torch.compile for the parts of a patched model that no fused layer takes (recipe: `runtime: compile`).

Where no layer is fused the model's forward is compiled as a whole, else each layer that is not fused, with the patched
modules inside; captured steps and calls capture the compiled code. Whatever cannot be compiled runs as it did, and
`paths` says why.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticCache

from accelpatch import own_code
from accelpatch.device import Device
from accelpatch.errors import PlanError
from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.graphs.calls import copied

OFF = "off"
CUDAGRAPHS = "triton.cudagraphs"  # inductor's option by which it captures graphs of its own
#: options of torch.compile that older releases lack: of code that many parts run, each part has variants of its own
_OWN_CODE: dict[str, Any] = {
    name: value
    for name, value in {"isolate_recompiles": True, "recompile_limit": 64}.items()
    if name in inspect.signature(torch.compile).parameters
}
CALL = "_compiled_call_impl"  # torch's attribute of a module: what its __call__ runs
SETTINGS = "generation_config"
BREAK = re.compile(r"\s*(?:Explanation|Hint|Developer debug context|For more details|from user code)", re.DOTALL)


def why_not(settings: Any, device: Device) -> str | None:
    """Why nothing can be compiled on a device; None where it can. settings: a recipe's Runtime."""
    if settings.compile == OFF:
        return "the recipe says compile: off"
    if device.kind == "cpu":
        return _without_compiler()
    if device.index is None:
        return None  # a machine that is not here
    from torch.utils._triton import has_triton

    return None if has_triton() else "torch.compile makes Triton kernels for a GPU: install triton"


def _without_compiler() -> str | None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        cpp_builder.get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError, OSError):
        return "torch.compile needs a C++ compiler for a CPU, and none is here: install g++, or name one by CXX"
    return None


def options_of(settings: Any, captured: bool) -> dict[str, Any]:
    """The options of torch.compile for a recipe's Runtime. captured: whether accelpatch's own graphs hold the parts, so
    that inductor makes none. Raises PlanError for a key that inductor does not have."""
    import torch._inductor as inductor

    known = inductor.config.get_config_copy()
    for name in settings.inductor:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            raise PlanError(
                f"runtime.inductor: torch {torch.__version__} has no option {name!r}"
                + (f"; did you mean {close[0]!r}?" if close else "; torch._inductor.config lists them")
            )
    made = {} if settings.compile == "default" else dict(inductor.list_mode_options(settings.compile))
    made |= {CUDAGRAPHS: False} if captured and made.get(CUDAGRAPHS) else {}
    made |= dict(settings.inductor)
    try:
        torch.compile(options_of, options=made or None)  # which compiles nothing yet, and looks at the options
    except RuntimeError as error:
        raise PlanError(f"runtime.inductor: torch refuses it ({_line(str(error))}): correct the value") from None
    return made


def captures(model: nn.Module, settings: Any, device: Device) -> bool:
    """Whether accelpatch's own graphs hold what is compiled: not on a CPU, nor of a class of a program's own."""
    asked = device.kind != "cpu" and settings.graph == "auto" and settings.cache == "auto"
    return asked and own_code.why_not_in(model.modules()) is None


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(path, module) of the layers in the model's lists of layers, without lists inside them."""
    lists = [path for path, one in model.named_modules() if isinstance(one, nn.ModuleList) and len(one)]
    outer = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    return [(f"{path}.{name}", one) for path in outer for name, one in model.get_submodule(path).named_children()]


class Compiled:
    """A compiled call of a part. paths: counts the graphs' breaks by their reasons, and what could not be compiled.

    path: of the part. call: what is compiled. It runs uncompiled within other compiled code, where a gradient is
    wanted, with hooks or a forward of the part's own, and for prompts that fill a cache, whose lengths differ.
    """

    def __init__(self, path: str, part: nn.Module, call: Any, options: Mapping[str, Any], paths: Counter[str]):
        self._kind = "a layer" if path else "the model"
        self._path, self._part, self._paths, self._call = path or "the model", part, paths, call
        self._graphs = bool(options.get(CUDAGRAPHS))  # those of inductor, whose outputs its next call overwrites
        self._compiled: Any = torch.compile(call, options=dict(options) or None, **_OWN_CODE)

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the part is not compiled: the code is the original's."""

    def __reduce__(self) -> Any:
        return type(None), ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self._compiled is None or self._differs(args, kwargs):
            return self._call(*args, **kwargs)
        known = _breaks()
        try:
            if self._graphs:
                torch.compiler.cudagraph_mark_step_begin()
            made = self._compiled(*args, **kwargs)
            made = copied(made) if self._graphs else made
        except torch._dynamo.exc.TorchDynamoException as error:
            self._compiled = None
            reason = getattr(error, "inner_exception", None) or error
            self._paths[f"not compiled: {self._path}: {_line(str(reason))}"] += 1
            return self._call(*args, **kwargs)
        self._paths[f"compiled: {self._kind}"] += 1
        for reason, count in (_breaks() - known).items():
            self._paths[f"graph break: {_line(reason)}"] += count
        return made

    def _differs(self, args: Any, kwargs: Any) -> bool:
        part = self._part
        if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
            return True
        if torch.is_grad_enabled() and any(one.requires_grad for one in part.parameters()):
            return True
        caches = [one for one in (*args, *kwargs.values()) if isinstance(one, Cache)]
        if self._graphs and not self._keeps_addresses(caches, kwargs):
            return True
        if part.training or not caches:
            return part.training
        return any(isinstance(one, Tensor) and not _one_token(one) for one in (*args[:1], *_inputs(kwargs)))

    def _keeps_addresses(self, caches: list[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether no output of a call goes on living in a cache, where the next replay would overwrite it."""
        if caches:
            return all(isinstance(one, StaticCache) for one in caches)
        return kwargs.get("use_cache") is False or not hasattr(self._part, "generate")


def _inputs(kwargs: Mapping[str, Any]) -> list[Any]:
    return [kwargs.get(name) for name in ("input_ids", "inputs_embeds", "hidden_states")]


def _one_token(inputs: Tensor) -> bool:
    """Whether ids[B, L] or hidden states[B, L, K] are one token of each row."""
    return inputs.dim() < 2 or inputs.shape[1] == 1


def _breaks() -> Counter[str]:
    return Counter(torch._dynamo.utils.counters["graph_break"])


def _line(text: str) -> str:
    """The first line of a message of torch's that says something."""
    lines = [line.strip() for line in BREAK.split(text.strip())[0].splitlines() if line.strip()]
    return (lines or ["no reason given"])[0][:160]


def calls_of(
    model: nn.Module, fused: Collection[str], settings: Any, captured: bool, paths: Counter[str]
) -> Iterator[tuple[nn.Module, Compiled]]:
    """(layer, what its `CALL` becomes) for each layer that is not in `fused`, nor compiled by the user."""
    options = options_of(settings, captured)
    for path, part in layers_of(model):
        if path not in fused and getattr(part, CALL, None) is None:
            yield part, Compiled(path, part, part._call_impl, options, paths)


def whole(model: Any, settings: Any, captured: bool, paths: Counter[str]) -> Compiled:
    """The compiled forward of a model of which no layer is fused. model: patched, so that it knows its own class."""
    forward = functools.partial(model.unpatched_class.forward, model)
    return Compiled("", model, forward, options_of(settings, captured), paths)


def takes_static_cache(model: nn.Module) -> bool:
    """Whether a model generates over a cache whose size stays the same, so that a step is compiled once."""
    takes = getattr(model, "_can_compile_fullgraph", False) or getattr(model, "_supports_static_cache", False)
    return bool(takes) and getattr(model, SETTINGS, None) is not None


def with_static_cache(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a generate() call, with a static cache where the caller chose none."""
    settings = given.get(SETTINGS) or getattr(model, SETTINGS)
    chosen = [given.get(CACHE), given.get("cache_implementation"), getattr(settings, "cache_implementation", None)]
    if any(one is not None for one in chosen) or given.get("use_cache", settings.use_cache) is False:
        return dict(given)
    return {**given, "cache_implementation": "static", "disable_compile": True}  # it is compiled here
