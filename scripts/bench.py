"""The measurements of docs/benchmarks.md, each a topic: python scripts/bench.py TOPIC [--cases ...] [--json FILE].

A topic's own options and cases: python scripts/bench.py TOPIC --help. Every run says its command, day, commit, device
and versions first. Figures are medians, and compare within one run only.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

TOPICS = {
    "generate": "Time stock generate() before and after a patch, beside its peers.",
    "paths": "Time every way to call a model, patched and not.",
    "lookup": "Time prompt lookup beside the same patched model without it.",
    "drafts": "Time drafts of an assistant model beside the same model without them.",
    "encoder_decoder": "Time encoder-decoders, speech and text, patched and not.",
    "multimodal": "Time the steps of models that see beside those of their language model.",
    "families": "Time every family that is fused, beside Llama.",
    "prompt": "Time the first token of long prompts, with the memory that they take.",
    "recipes": "Time recipes beside each other: prompts, decoding, memory.",
    "opt": "Time OPT in float16 and in int8 from end to end, with memory.",
    "experts": "Time models with experts, and the kernels of experts.",
    "foreign": "Time checkpoints that others quantised beside own int4.",
    "parallel": "Time models that accelerate spreads over devices or offloads.",
    "tensor_parallel": "Time models that are split among GPUs, and their all-reduces.",
    "projection": "Work out tensor parallel on eight GPUs from measured parts.",
    "checkpoint": "Time saving and loading of a patched model.",
    "quantize": "Time the methods of quantisation from files to files.",
    "patch": "Time patch() at each level of verification.",
    "start": "Time patch() to the first token in processes that have just begun.",
    "checks": "Time the checks before each call and each step.",
    "attention": "Time the attention of a decode step beside torch's.",
    "kv_cache": "Time decode attention and steps over KV caches in 8 bits.",
    "flash": "Time the attention of prompts by every implementation.",
    "gemv": "Time the HIP products of 1 to 8 tokens beside their peers.",
    "gemm_search": "Compare the search of `tune hipblaslt` with a sweep of all choices.",
    "adapters": "Time decoding with LoRA adapters beside the same without them.",
    "train": "Time a step of LoRA training beside PEFT unpatched and on bitsandbytes.",
    "compiled": "Time models of no known family with torch.compile and without.",
    "continuous": "Time many requests at once through generate_batch.",
    "serve": "Load a server with many users, beside transformers' own server.",
    "rows": "Time linear layers by their rows, every format beside torch's own.",
    "cpu": "Time this CPU through generate(), beside llama.cpp.",
}

ON_GPUS = ("gemv", "gemm_search", "tensor_parallel")  # which have no --device

#: topic -> its module, where that has another name
MODULES = dict.fromkeys(("prompt", "opt", "families"), "recipes")
MODULES |= dict.fromkeys(("patch", "start", "checkpoint", "checks"), "preparation")
MODULES |= dict.fromkeys(("paths", "encoder_decoder", "multimodal", "compiled"), "calls") | {"kv_cache": "attention"}
MODULES |= dict.fromkeys(("lookup", "drafts"), "speculation")


def topic_of(name: str) -> Any:
    """Text, options and run of a topic, whose module is imported here."""
    module = import_module(f"scripts.benchmarks.{MODULES.get(name, name)}")
    if name in (found := getattr(module, "TOPICS", {})):
        return found[name]
    from scripts.benchmarks.harness import Topic

    return Topic(module.__doc__ or "", module.OPTIONS, module.run)


def arguments(words: list[str]) -> argparse.Namespace:
    """The command line; only the topic that it names is imported."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    topics = parser.add_subparsers(dest="topic", required=True, metavar="TOPIC")
    for name, about in TOPICS.items():
        one = topics.add_parser(name, help=about, formatter_class=raw)
        if words[:1] == [name]:
            topic = topic_of(name)
            one.description = topic.text
            for option in topic.options:
                option.add(one)
            one.add_argument("--json", type=Path, metavar="FILE", help="Write the facts of the run and all figures.")
            one.set_defaults(run=topic.run)
    return parser.parse_args(words)


def needs_gpu(asked: argparse.Namespace) -> bool:
    """Whether a topic is to run on a GPU: by its --device, or since it has none."""
    if getattr(asked, "tiny", False):
        return False
    return asked.topic in ON_GPUS or str(getattr(asked, "device", "cpu")).startswith("cuda")


def elsewhere(asked: argparse.Namespace) -> str:
    """What to do without one."""
    small = ", or --tiny to try it with small sizes" if hasattr(asked, "tiny") else ""
    return f"give --device cpu{small}" if hasattr(asked, "device") else small.removeprefix(", or ") or "it needs one"


def main() -> None:
    """Say where and when, then measure, print, and write what was asked for."""
    asked = arguments(sys.argv[1:])
    from scripts.benchmarks import harness

    if getattr(asked, "tiny", False) and hasattr(asked, "device"):
        asked.device, asked.dtype = "cpu", "float32"
    if needs_gpu(asked) and not harness.torch.cuda.is_available():
        sys.exit(f"bench.py {asked.topic}: torch sees no GPU here; {elsewhere(asked)}")
    run = harness.facts(asked)
    if not getattr(asked, "child", None):
        print(harness.said(run), flush=True)
    asked.facts = run
    found = asked.run(asked)
    if asked.json:
        asked.json.write_text(json.dumps({"run": run, **found}, indent=1) + "\n")
    sys.exit(getattr(asked, "status", 0))


if __name__ == "__main__":
    main()
