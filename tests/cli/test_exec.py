"""accelpatch exec: a script runs as python runs it, and its models are patched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Cli, Shell, environment

FACTS = """
import os, sys, json
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "stdin": sys.stdin.read(),
    "main": sys.modules["__main__"].__dict__ is globals(), "spec": __spec__ is None, "cwd": os.getcwd(),
    "future": (lambda: None).__code__.co_flags,
}, sort_keys=True))
"""
GENERATE = """
import sys
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
before = [type(m).__name__ for m in model.modules()]
model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
print(type(model.lm_head).__name__, type(model).__name__, [type(m).__name__ for m in model.modules()] == before)
"""
LIKE_OURS = ["--recipe", "int4", "-m", "--help"]


def _python(*arguments: str, folder: Path, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(), input=text, capture_output=True, text=True, check=False
    )


def _write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("arguments", "words", "as_module"),
    [
        pytest.param(["s.py"], ["s.py"], False, id="none"),
        pytest.param(["s.py", *LIKE_OURS], ["s.py", *LIKE_OURS], False, id="like ours"),
        pytest.param(["-q", "-r", "exact", "s.py", "-q"], ["s.py", "-q"], False, id="ours before"),
        pytest.param(["s.py", "--", "-x", ""], ["s.py", "--", "-x", ""], False, id="a double dash"),
        pytest.param(["--", "s.py", "-m"], ["s.py", "-m"], False, id="a double dash before"),
        pytest.param(["-m", "mod", "--help", "-m", "x"], ["mod", "--help", "-m", "x"], True, id="a module"),
        pytest.param(
            ["-r", "exact", "-q", "-m", "mod", "--", "x"], ["mod", "--", "x"], True, id="ours before a module"
        ),
        pytest.param(["--recipe=exact", "-m", "mod", "--json"], ["mod", "--json"], True, id="joined"),
    ],
)
def test_whose_arguments_are_whose(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], words: list[str], as_module: bool
) -> None:
    seen: list[tuple[list[str], bool]] = []
    monkeypatch.setattr("accelpatch.cli.script.run", lambda words, as_module: seen.append((words, as_module)))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").touch()
    assert cli("exec", *arguments).exit_code == 0
    assert seen == [(words, as_module)]


def test_a_script_sees_what_python_shows_it(shell: Shell, tmp_path: Path) -> None:
    _write(tmp_path, "sub/facts.py", FACTS)
    arguments = [*LIKE_OURS, "--", "-x", "--quiet", "two words"]
    expected = _python("sub/facts.py", *arguments, folder=tmp_path, text="some input")
    found = shell("exec", "--quiet", "--recipe", "exact", "sub/facts.py", *arguments, input="some input")
    assert expected.returncode == 0, expected.stderr
    assert (found.stdout, found.stderr, found.returncode) == (expected.stdout, "", 0)


def test_a_module_sees_what_python_shows_it(shell: Shell, tmp_path: Path) -> None:
    facts = FACTS.replace('"spec": __spec__ is None', '"spec": __spec__.name')
    _write(tmp_path, "package/__init__.py", "")
    _write(tmp_path, "package/facts.py", facts)
    arguments = ["-m", "package.facts", "--recipe", "int4", "-m", "x"]
    expected = _python(*arguments, folder=tmp_path, text="in")
    found = shell("exec", "--quiet", *arguments, input="in")
    assert expected.returncode == 0, expected.stderr
    assert (found.stdout, found.stderr, found.returncode) == (expected.stdout, "", 0)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param("import sys; print('out'); sys.exit(3)", 3, id="status", marks=pytest.mark.nightly),
        pytest.param("def f():\n    raise MemoryError('mine')\nf()", 1, id="exception"),
    ],
)
def test_the_command_ends_as_the_script_does(shell: Shell, tmp_path: Path, body: str, status: int) -> None:
    _write(tmp_path, "script.py", body)
    expected = _python("script.py", folder=tmp_path)
    found = shell("exec", "--quiet", "script.py")
    assert (found.stdout, found.stderr, found.returncode) == (expected.stdout, expected.stderr, expected.returncode)
    assert found.returncode == status


@pytest.mark.smoke
def test_models_are_patched(shell: Shell, tmp_path: Path, model: str) -> None:
    _write(tmp_path, "script.py", GENERATE)
    found = shell("exec", "--recipe", "int8", "script.py", model)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("Int8WeightOnlyLinear")
    assert found.stdout.endswith(" LlamaForCausalLM False\n")
    said = [line for line in found.stderr.splitlines() if line.startswith("accelpatch: ")]
    summary = [line for line in said if not line.startswith("accelpatch: compil")]  # once for a machine
    assert len(summary) == 1
    assert "patched with int8" in summary[0]


def test_a_script_without_a_model_says_so(shell: Shell, tmp_path: Path) -> None:
    """Also one that closes its output."""
    _write(tmp_path, "script.py", "import sys\nprint('hello', flush=True)\nsys.stdout.close()\n")
    found = shell("exec", "script.py")
    assert (found.stdout, found.returncode) == ("hello\n", 0)
    assert found.stderr == "accelpatch: the script used no model that could be patched\n"


def test_a_recipe_that_cannot_be_read_stops_before_the_script(shell: Shell, tmp_path: Path) -> None:
    _write(tmp_path, "script.py", "print('hello')")
    found = shell("exec", "--recipe", "int9", "script.py")
    assert found.returncode == 1
    assert found.stdout == ""
    assert found.stderr.startswith("error: ")


def test_a_recipe_that_does_not_fit_leaves_the_model(shell: Shell, tmp_path: Path, model: str) -> None:
    _write(tmp_path, "script.py", GENERATE)
    rule = "  - match: {class: NoSuchClass}\n    replace: int8_weight_only\n"
    _write(tmp_path, "mine.yaml", f"name: mine\ndescription: fits nothing\nrules:\n{rule}")
    found = shell("exec", "--recipe", "mine.yaml", "script.py", model)
    assert (found.returncode, found.stdout) == (0, "Linear LlamaForCausalLM True\n")
    assert "Traceback" not in found.stderr
    lines = [line for line in found.stderr.splitlines() if line.startswith("accelpatch: ")]
    assert len(lines) == 1
    assert "LlamaForCausalLM left as it is: PlanError" in lines[0]
    assert "matches no module" in lines[0]


WHISPER = """
import torch, transformers as hf
torch.manual_seed(0)
config = hf.WhisperConfig(vocab_size=160, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=16, max_source_positions=20,
    max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
model = hf.WhisperForConditionalGeneration(config).eval()
made = model.generate(torch.randn(1, 16, 40), max_new_tokens=4, do_sample=False, return_dict_in_generate=False)
print(len(made))
"""
SERIES = """
import torch, transformers as hf
model = hf.TimeSeriesTransformerModel(hf.TimeSeriesTransformerConfig(
    prediction_length=4, context_length=8, d_model=64, lags_sequence=[1], num_time_features=1)).eval()
past = {"past_values": torch.randn(1, 9), "past_time_features": torch.randn(1, 9, 1)}
future = {"future_values": torch.randn(1, 4), "future_time_features": torch.randn(1, 4, 1)}
print(tuple(model(**past, **future, past_observed_mask=torch.ones(1, 9)).last_hidden_state.shape))
"""
CONVOLUTIONS = """
import torch, transformers as hf
model = hf.EncodecModel(hf.EncodecConfig(num_filters=8, hidden_size=32, codebook_dim=32, codebook_size=64)).eval()
print(model(torch.randn(1, 1, 640)).audio_values.shape[1])
"""
SAVES = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.tensor([[5, 6, 7]])
model.generate(ids, max_new_tokens=3, do_sample=False)
model.save_pretrained("out")
again = AutoModelForCausalLM.from_pretrained("out").eval()
print(all(torch.equal(v, model.state_dict()[k]) for k, v in again.state_dict().items()), len(model(ids).logits))
"""
RESIZES = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False)
model.model.resize_token_embeddings(600)
print(model.get_input_embeddings().weight.shape[0])
"""
TRAINS = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
ids = torch.tensor([[5, 6, 7, 8]])
model.generate(ids, max_new_tokens=3, do_sample=False)
model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
model.eval()
print(f"{loss.item():.4f}", type(model.lm_head).__name__)
"""
OWN_FORWARD = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
forward = model.forward
model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
print(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False).shape)
"""
PATCHES = """
import sys, torch
import transformers.models.llama.modeling_llama as llama
from transformers import AutoModelForCausalLM
ids, calls = torch.tensor([[5, 6, 7]]), []
norm, mlp = llama.LlamaRMSNorm.forward, llama.LlamaMLP.forward
llama.LlamaRMSNorm.forward = lambda self, x: 0 * norm(self, x)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
print(model(ids).logits.abs().sum().item(), model.generate(ids, max_new_tokens=3, do_sample=False).tolist())
llama.LlamaRMSNorm.forward = norm
llama.LlamaMLP.forward = lambda self, x: calls.append(1) or 0 * mlp(self, x)
model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
print(len(calls))
llama.LlamaMLP.forward = mlp
"""
FIRST_USES = """
import torch, transformers as hf
sizes = dict(vocab_size=160, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96)
ids = torch.tensor([[5, 6, 7]])
encoder = hf.BertModel(hf.BertConfig(**sizes)).eval()
print(encoder.forward(input_ids=ids, return_dict=True).last_hidden_state.shape)
trained = hf.Qwen2ForCausalLM(hf.Qwen2Config(**sizes, num_key_value_heads=4))
trained(ids, labels=ids).loss.backward()
print(trained.eval()(ids).logits.shape)
hf.MistralForCausalLM(hf.MistralConfig(**sizes, num_key_value_heads=4))(ids, labels=ids).loss.backward()
hf.unused = hf.PhiForCausalLM(hf.PhiConfig(**sizes))
vision = hf.CLIPVisionConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96,
    image_size=16, patch_size=8)
both = hf.LlavaForConditionalGeneration(hf.LlavaConfig(
    vision_config=vision, text_config=hf.LlamaConfig(**sizes), image_token_id=159)).eval()
shown = {"input_ids": torch.tensor([[5, 159, 159, 159, 159, 7]]), "pixel_values": torch.ones(1, 3, 16, 16)}
first = both(**shown).logits
print(torch.equal(first, both(**shown).logits))
"""
# Scripts that run without us, and what our summary says of them.
AS_WITHOUT = {
    "whisper": (WHISPER, "WhisperForConditionalGeneration patched"),
    "time-series": (SERIES, "TimeSeriesTransformerModel patched"),
    "convolutions": (CONVOLUTIONS, "EncodecModel left as it is: PlanError"),
    "saves": (SAVES, "unpatched, since the script asked for save_pretrained"),
    "resizes": (RESIZES, "unpatched, since the script asked for resize_token_embeddings"),
    "trains": (TRAINS, "unpatched, since the script asked for "),
    "own-forward": (OWN_FORWARD, "patched with"),
    "patches": (PATCHES, "patched with"),
    "a forward that is called": (FIRST_USES, "BertModel patched"),
    "trained before": (FIRST_USES, "Qwen2ForCausalLM patched"),
    "trained alone": (FIRST_USES, "MistralForCausalLM left as it is so far: it was called in training mode"),
    "never called": (FIRST_USES, "PhiForCausalLM left as it is: no call of it as a whole was seen"),
    "pictures": (FIRST_USES, "LlavaForConditionalGeneration patched"),
}


@pytest.mark.slow
def test_scripts_that_run_without_us_run_with_us(shell: Shell, tmp_path: Path, model: str) -> None:
    """And they print the same; all in one process, which takes seconds to start."""
    texts = list(dict.fromkeys(text for text, _ in AS_WITHOUT.values()))
    _write(tmp_path, "script.py", f"for text in {texts!r}:\n    exec(text, {{}})\n")
    expected = _python("script.py", model, folder=tmp_path)
    assert expected.returncode == 0, expected.stderr
    found = shell("exec", "--recipe", "int8", "script.py", model)
    assert found.returncode == 0, found.stderr
    assert "Traceback" not in found.stderr
    assert found.stdout == expected.stdout
    for case, (_, summary) in AS_WITHOUT.items():
        assert summary in found.stderr, case
    assert not any(f"{name} left" in found.stderr for name in ("Qwen2ForCausalLM", "LlavaForConditionalGeneration"))
    assert "asked for a gradient" not in found.stderr
