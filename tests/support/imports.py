"""Who may import whom: the table that tests/test_layout.py holds the package to."""

from __future__ import annotations

# Package of ours -> (packages of ours that it may import, third parties besides torch). The design's table.
# A file belongs to the row of its first folder or its own name.
IMPORTS: dict[str, tuple[str, str]] = {
    "errors": ("", ""),
    "device": ("", ""),
    "cache": ("errors", ""),  # where finished work of models and kernels lies; added to the design's table
    "report": ("errors", ""),
    "registration": ("hf", ""),  # what transformers gets from `import accelpatch`; added to the design's table
    "progress": ("errors", "tqdm transformers"),  # bars of Python and of the command line; added to the design's table
    "recipe": ("errors", "yaml"),
    "own_code": ("", ""),  # whether the code that fast paths stand for would still run; added to the design's table
    "kernels": ("device errors cache", "triton"),  # cache: built device sources are published there
    "quant": ("kernels device errors", ""),
    "modules": ("kernels quant own_code errors", "transformers"),
    # cache: converted checkpoints are published there
    "models": ("errors cache own_code", "transformers huggingface_hub gguf safetensors"),
    "patching": ("recipe device report progress own_code errors", "lm_eval"),  # lm_eval: scores, an optional package
    "replacers": ("patching recipe modules quant kernels models.family device own_code errors", ""),
    "fusion": (
        "patching modules quant kernels models.family models.encoders models.encoder_decoders models.multimodal device "
        "own_code errors",
        "transformers",
    ),
    # models.family: whose logits are scaled, which a loss over chunks must know
    "runtime": ("kernels modules fusion models.family models.multimodal report device own_code errors", "transformers"),
    "checkpoints": (
        "replacers patching modules quant models recipe report device errors",
        "transformers safetensors gguf",  # gguf: writes the files that are exported
    ),
    "bench": ("kernels runtime report device errors", "matplotlib"),  # matplotlib: plots, an optional package
    # pymoo: the genetic search, an optional package
    "tuning": ("kernels bench runtime report device cache errors", "yaml pymoo triton"),
    # modules.replacement: the mark of hooks that change nothing, so that a patched model goes on with its fast paths
    "profiling": (
        "kernels bench runtime modules.replacement report device cache errors",
        "matplotlib",
    ),
    "doctor": ("device cache errors", ""),  # advice on the environment, faults; added to the design's table
    "parallel": ("kernels models.family models.sharding patching device report errors", "accelerate"),
    "calibration": ("errors recipe quant models patching replacers checkpoints", ""),
    "jit": ("cache device errors", "numpy"),
    "pipeline": (  # the stages that api puts in order
        "errors device report progress recipe kernels quant modules models patching replacers fusion runtime "
        "checkpoints parallel calibration",
        "",
    ),
    "in_memory": (  # models in memory
        "errors device progress recipe quant models patching replacers parallel checkpoints calibration pipeline",
        "",
    ),
    "from_files": (
        "errors kernels device progress recipe quant models patching replacers.mixed_bits checkpoints report pipeline "
        "in_memory",
        "",
    ),
    "adapters": ("errors progress models patching checkpoints in_memory from_files", "peft"),
    "training": (
        "errors progress recipe from_files",
        "transformers trl peft datasets accelerate matplotlib yaml tqdm jinja2",
    ),
    "trials": (  # figures of recipes, and the search among them
        "errors device progress bench recipe models patching checkpoints runtime tuning in_memory from_files",
        "",
    ),
    # server and load tool; the packages of the extra `serve`, and jinja2: what a chat template raises
    "serving": (
        "checkpoints models quant kernels report device cache errors",
        "transformers tokenizers fastapi starlette uvicorn pydantic openai prometheus_client jinja2 matplotlib vllm",
    ),
    "api": (
        "adapters trials training errors models patching kernels checkpoints replacers runtime tuning in_memory "
        "from_files",
        "",
    ),
    "hf": ("api checkpoints", ""),  # what a program imports to have transformers load saved patched models
    "cli": (
        # cache: lists and clears it; checkpoints: inspect, and where results go
        "api bench kernels.compiling models.catalog models.precheck checkpoints.inspection checkpoints.target tuning "
        "doctor profiling recipe report device errors cache progress training.configuration training.folder "
        "training.prepare parallel.launch serving",
        "typer rich jinja2",  # jinja2: what a chat template raises
    ),
    "__init__": (  # the public names, resolved when first asked for
        "api hf jit registration errors patching.replacer kernels.compiling kernels.implementation",
        "",
    ),
    "__main__": ("cli", ""),
}

# (file, what it imports): reason. Each is looser than its row.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("accelpatch/replacers/__init__.py", "accelpatch.fusion.layer_replacer.FusedLayerReplacer"): "a row of a table",
}
