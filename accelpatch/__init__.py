"""accelpatch makes a Hugging Face transformer faster: a recipe says which of its modules to replace, in place.

`plan` shows what would be replaced, `patch` replaces and verifies it, `unpatch` restores the original. From this import
on, from_pretrained of transformers loads what a patched model's save_pretrained wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelpatch import registration

if TYPE_CHECKING:
    from accelpatch import jit
    from accelpatch.api import (
        calibrate,
        choose_bits,
        evaluate,
        evaluate_tasks,
        export,
        finetune,
        load,
        load_plugin,
        merge,
        patch,
        patch_on_first_use,
        patched,
        plan,
        plan_from_config,
        replacer,
        save_statistics,
        selftest,
        unpatch,
    )
    from accelpatch.errors import AccelpatchError
    from accelpatch.hf import AccelpatchConfig
    from accelpatch.kernels.compiling.file_kernel import module
    from accelpatch.kernels.implementation import implementation
    from accelpatch.patching.replacer import Choice, Reason, Replacer

__all__ = [
    "AccelpatchConfig", "AccelpatchError", "Choice", "Reason", "Replacer", "calibrate", "choose_bits", "evaluate",
    "evaluate_tasks", "export", "finetune", "implementation", "jit", "load", "load_plugin", "merge", "module", "patch",
    "patch_on_first_use", "patched",
    "plan", "plan_from_config", "replacer", "save_statistics", "selftest", "unpatch",
]  # fmt: skip
# public name -> module; resolved at first use, so that `import accelpatch` needs no torch
_HOMES = {
    **dict.fromkeys(__all__, "accelpatch.api"),
    **dict.fromkeys(("Choice", "Reason", "Replacer"), "accelpatch.patching.replacer"),
    "AccelpatchError": "accelpatch.errors",
    "implementation": "accelpatch.kernels.implementation",
    "module": "accelpatch.kernels.compiling.file_kernel",
    "AccelpatchConfig": "accelpatch.hf",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "jit":
        return import_module("accelpatch.jit")
    if name not in _HOMES:
        raise AttributeError(f"module 'accelpatch' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


registration.register()
