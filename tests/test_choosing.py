"""docs/choosing.md and docs/first-7b.md stay true: commands, figures, families and what the plan prints.

The model behind the hub's name is a tiny random one on the CPU.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import typer
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import accelpatch
from accelpatch.cli import app
from accelpatch.cli.checks import STATISTICS
from accelpatch.device import KNOWN, Device, probe
from accelpatch.kernels.compiling import libraries
from accelpatch.models import load as loading
from accelpatch.models.catalog import Source
from accelpatch.models.families import FAMILIES
from accelpatch.models.form import Family
from accelpatch.recipe import recipe as recipes
from tests.cli.conftest import byte_tokenizer, save_model

DOCS = Path(__file__).parent.parent / "docs"
CHOOSING, FIRST = (DOCS / name for name in ("choosing.md", "first-7b.md"))
TEXTS = {page.name: page.read_text() for page in (CHOOSING, FIRST)}
HUB_NAME = "meta-llama/Llama-2-7b-hf"
BUNDLED = recipes.bundled()
# Modules of each kind that the page names, in the sizes of its configuration; for these a class has no defaults.
SIZES = {"ministral": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "head_dim": 128}}
DEPTHS = ("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers", "num_layers", "depth")
needs_compiler = pytest.mark.skipif(
    libraries.why_not("cpu", probe("cpu")) is not None, reason="without a C++ compiler a CPU has no native steps"
)


def blocks(name: str, language: str) -> list[str]:
    """The contents of a page's code fences of this language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXTS[name], re.DOTALL | re.MULTILINE)


def section(name: str, heading: str) -> str:
    """A page's text from a heading of the second level to the next."""
    return TEXTS[name].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def lines() -> list[tuple[str, str]]:
    """(page, line) of all that the shell fences have."""
    return [(name, line) for name in TEXTS for block in blocks(name, "sh") for line in block.splitlines()]


def commands() -> list[list[str]]:
    """The arguments of each call of accelpatch, in fences and in the text."""
    quoted = [code for text in TEXTS.values() for code in re.findall(r"`(accelpatch [^`]*)`", text)]
    called = [*(line for _, line in lines() if line.startswith("accelpatch ")), *quoted]
    return [shlex.split(line, comments=True)[1:] for line in called]


@pytest.fixture
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader brings along or has made by an earlier command, and what the pages' recipes are called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("It was the best of times. " * 12)
    save_file({}, tmp_path / "notes.safetensors", {STATISTICS: ""})
    for block in blocks("choosing.md", "yaml"):
        (tmp_path / f"{recipes.parse(block).name}.yaml").write_text(block)


@pytest.mark.usefixtures("_files")
@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_commands_are_accepted(arguments: list[str]) -> None:
    """By name, options, choices and files; recipes by what they hold."""
    group: Any = typer.main.get_command(app)
    command = group.get_command(None, arguments[0])
    assert command is not None
    here = {"MODEL": "smollm2-135m", "X": "int8", "cuda": "cpu"}
    arguments = [here.get(one, one) for one in arguments]
    with command.make_context(arguments[0], arguments[1:]) as context:
        if (recipe := context.params.get("recipe")) is not None:
            recipes.load(recipe)


def test_every_shell_line_is_one_of_known_programs() -> None:
    assert {line.split()[0] for _, line in lines()} <= {"accelpatch", "pip", "python", "git", "cd"}
    fences = sum(text.count("\n```") for text in TEXTS.values())
    known = [block for name in TEXTS for kind in ("sh", "python", "yaml", "text") for block in blocks(name, kind)]
    assert fences == 2 * len(known)


def test_recipes_exist() -> None:
    """Each word in a table's column "take" is a bundled recipe, and each bundled one is somewhere."""
    taken = set(re.findall(r"^\|[^|]*\| `([\w-]+)` \|", section("choosing.md", "Which recipe"), re.MULTILINE))
    assert len(taken) > 6
    assert taken <= set(BUNDLED)
    assert {name for name in BUNDLED if f"`{name}`" in TEXTS["choosing.md"]} == set(BUNDLED)


def numbers(text: str) -> set[str]:
    """Those with a decimal point, outside of fences."""
    return set(re.findall(r"\d+\.\d+", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)))


def test_figures_are_those_of_other_pages() -> None:
    """No number that the pages of measurements do not have; losses may be rounded."""
    rates = numbers((DOCS / "benchmarks.md").read_text())
    losses = numbers((DOCS / "fidelity.md").read_text()) | numbers((DOCS / "quantization.md").read_text())
    known = rates | losses | {str(round(float(loss), digits)) for loss in losses for digits in (3, 4)}
    own = numbers(section("choosing.md", "Which recipe")) | numbers(TEXTS["first-7b.md"])
    assert len(own) > 60
    assert sorted(own - known) == []


def test_the_plan_is_what_it_prints() -> None:
    """Every line of the blocks under a plan, but for the cut columns."""
    for name, arch in (("first-7b.md", "gfx942"), ("first-7b.md", "sm_90")):
        printed = CliRunner().invoke(app, ["plan", "llama2-7b", "--recipe", "int4", "--arch", arch]).stdout.splitlines()
        shown = [block for block in blocks(name, "text") if f"({arch})" in block]
        assert len(shown) == 1
        assert [line for line in shown[0].splitlines() if line not in printed] == []


def test_eval_prints_these_lines(tmp_path: Path) -> None:
    """The figures are those of the real model; the lines are those of any."""
    model = save_model(tmp_path / "tiny", tokenizer=byte_tokenizer())
    printed = CliRunner().invoke(app, ["eval", str(model), "--max-tokens", "64"]).stdout.splitlines()
    for block in blocks("choosing.md", "text"):
        assert [line.split("  ")[0] for line in block.splitlines()] == [line.split("  ")[0] for line in printed]


def test_yaml_blocks_replace_what_they_name(tmp_path: Path) -> None:
    for block in blocks("choosing.md", "yaml"):
        plan = accelpatch.plan_from_config("smollm2-135m", recipes.parse(block))
        kept = {one.path: one.reason for one in plan.report().sites if one.replacer is None}
        assert {"lm_head", "model.layers.0.self_attn.q_proj", "model.layers.29.mlp.down_proj"} <= kept.keys()
        assert {one.replacer for one in plan.report().sites if one.role == "down_proj"} >= {"int8_weight_only", None}


# --- the programs


@pytest.fixture
def _tiny_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hub's 7B is a tiny model; the GPU is the CPU."""
    model = save_model(tmp_path / "hub", tokenizer=byte_tokenizer())
    original = loading.resolve
    monkeypatch.chdir(tmp_path)

    def resolve(name: str) -> Source:
        return original(str(model) if name == HUB_NAME else name)

    for home in ("accelpatch.models.load", "accelpatch.from_files"):
        monkeypatch.setattr(f"{home}.resolve", resolve)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_tiny_hub")
def test_programs_run(capsys: pytest.CaptureFixture[str]) -> None:
    """From the float model to an answer of the saved one, as somebody types it."""
    namespace: dict[str, Any] = {}
    programs = blocks("first-7b.md", "python")
    assert len(programs) >= 2
    for program in programs:
        assert HUB_NAME in program or "llama2-7b-int4" in program
        exec(compile(program.replace('"cuda"', '"cpu"'), "first-7b.md", "exec"), namespace)
        assert namespace["model"].accelpatch.report().replaced > 0
    assert capsys.readouterr().out.count("The capital of France is") == len(programs)


# --- families


def kinds() -> list[str]:
    """The model types that the page names as those of no family."""
    return re.findall(r"`(\w+)`", TEXTS["choosing.md"].partition("By class alone: ")[2].partition(".\n")[0])


def model_of(kind: str, **sizes: Any) -> nn.Module:
    """A model on the meta device with two layers and the other sizes of its configuration's defaults."""
    config = transformers.AutoConfig.for_model(kind, **{**SIZES.get(kind, {}), **sizes})
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        for name in DEPTHS:
            if name in vars(part) if part is not None else False:
                setattr(part, name, 2)
        if getattr(part, "layer_types", None):
            part.layer_types = part.layer_types[:2]
    causal = type(config) in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    factory = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    with torch.device("meta"):
        return factory.from_config(config, dtype=torch.bfloat16)


def steps(family: Family, device: Device) -> str:
    """How the layers of such a model run while a device generates: "" where the plan has all of them fused, else why
    the first is not."""
    model = model_of(family.model_types[0])
    text = str(accelpatch.plan(model if device.kind == "cuda" else model.float(), "int8", device=device))
    line = text.splitlines()[1]
    if line.startswith("2 of 2 layers fused"):
        return ""
    return line.partition(".0: ")[2].partition("; ...")[0] or family.unfused or "the table has no form of its layers"


@needs_compiler
def test_the_table_of_families() -> None:
    """Of the newest transformers, and of text alone: `test_pictures` has what the page says of pictures."""
    rows, why = [], defaultdict(list)
    for family in FAMILIES:
        kind = family.model_types[0]
        on_gpu, on_cpu = (steps(family, device) for device in (KNOWN["sm_90"], probe("cpu")))
        gpu, cpu = "modules, captured" if on_gpu else "fused", "modules" if on_cpu else "native"
        rows.append(f"| `{kind}` | {gpu} | {cpu} | {'yes' if family.sparse else ''} |")
        if on_cpu:
            why[on_cpu].append(f"`{kind}`")
    listed = [f"- {', '.join(found)}: {reason}." for reason, found in why.items()]
    print("\n".join([*rows, "", *listed]))
    text = section("choosing.md", "Which models")
    assert "\n".join(["| --- | --- | --- | --- |", *rows, ""]) in text
    assert "\n".join([*listed, ""]) in text


def test_pictures() -> None:
    """The layers of a text part are replaced, and no step fuses them; those of the tower are layers of an encoder."""
    report = accelpatch.plan(model_of("gemma3"), "int8", device=KNOWN["sm_90"]).report()
    layers = [one for one in report.sites if one.replacer == "fused_layer"]
    text, tower = ([one for one in layers if ("vision" in one.path) is seen] for seen in (False, True))
    assert [one.path.rpartition(".")[2] for one in text] == [one.path.rpartition(".")[2] for one in tower] == ["0", "1"]
    assert not any(one.fused for one in text)
    assert all(one.fused for one in tower)


def encoders() -> list[str]:
    """The model types that the page names as encoders with fused layers."""
    return re.findall(
        r"`([\w-]+)`", TEXTS["choosing.md"].partition("models\nthat see): ")[2].partition(". On a GPU")[0]
    )


@pytest.mark.parametrize("kind", encoders())
def test_encoders_of_the_page(kind: str) -> None:
    model = model_of(kind)
    for recipe, device in (("int8", KNOWN["sm_90"]), ("smoothquant", KNOWN["gfx942"]), ("exact", probe("cpu"))):
        sites = accelpatch.plan(model if device.kind == "cuda" else model.float(), recipe, device=device).report().sites
        layers = [one for one in sites if one.replacer == "fused_layer"]
        assert layers
        assert all(one.fused for one in layers), layers[0].by_modules


@pytest.mark.parametrize("kind", ["deberta", "deberta-v2"])
def test_encoders_whose_layers_stay(kind: str) -> None:
    sites = accelpatch.plan(model_of(kind), "int8", device=KNOWN["sm_90"]).report().sites
    layers = [one for one in sites if one.role == "layer"]
    assert layers
    assert all(one.replacer is None and "relative positions" in str(one.reason) for one in layers)


@pytest.mark.parametrize("kind", kinds())
def test_models_of_no_family(kind: str) -> None:
    """`exact` has nothing for them on a CPU and the linear layers on a GPU; `int8` has linear layers and experts."""
    model = model_of(kind)
    gpu = KNOWN["sm_90"]
    found = {
        recipe: {one.replacer for one in accelpatch.plan(model, recipe, device=gpu).report().sites} - {None}
        for recipe in ("exact", "int8")
    }
    assert found["exact"] == {"gemv"}
    assert {"int8_weight_only"} <= found["int8"] <= {"int8_weight_only", "int8_experts"}
    assert accelpatch.plan(model.float(), "exact", device=probe("cpu")).report().replaced == 0


def anchors(page: Path) -> set[str]:
    """What links within a page may name: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", TEXTS)
def test_links(name: str) -> None:
    """Pages and headings exist; the README names one of the two, and that one the other."""
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", TEXTS[name]):
        page = DOCS / (target or name)
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), (target, anchor)
    assert "(docs/choosing.md)" in (DOCS.parent / "README.md").read_text()
    assert "(first-7b.md)" in TEXTS["choosing.md"]
