"""What a fine-tuning run is: a YAML document over the defaults below, checked before anything is loaded.

The files in `configurations/` are the bundled ones. Loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from accelpatch.errors import ArgumentError, RecipeError
from accelpatch.recipe.yaml import MAX_BYTES, Node, read, resolve, suggest

BUNDLE = Path(__file__).with_name("configurations")
DEFAULT, WITH_DATA = "puzzles", "lora"
PUZZLES = "puzzles"  # as data.file: the data set that accelpatch makes itself


@dataclass(frozen=True)
class Key:
    """One value of a configuration. kinds: types that it may have; least: the smallest number; words: those allowed."""

    default: Any
    kinds: tuple[type, ...]
    help: str
    least: float = 0
    words: tuple[str, ...] = ()
    most: float = float("inf")

    def check(self, node: Node, name: str) -> Any:
        """The node's value. Raises RecipeError, with its place."""
        value = node.plain()
        if value is None and self.default is None:
            return None
        if list in self.kinds and isinstance(value, list):
            return [item.text(f"an item of {name}") for item in node.words(name)]
        kinds = [kind for kind in self.kinds if kind is not list]
        value = node.expect(name, *(kinds if float not in kinds else [*kinds, int]))
        if isinstance(value, int | float) and not isinstance(value, bool) and not self.least <= value <= self.most:
            bound = f"at least {self.least:g}" if value < self.least else f"at most {self.most:g}"
            raise node.error(f"{name} must be {bound}, not {value}")
        if self.words and value not in self.words:
            raise node.error(f"unknown {name} {value!r}; {suggest(str(value), self.words)}")
        return float(value) if kinds == [float] else value


TEXT, WHOLE, NUMBER, FLAG = (str,), (int,), (float,), (bool,)
TINY = 1e-12
KEYS: dict[str, Key] = {
    "model": Key("smollm2-135m", TEXT, "a catalog name, a folder, a GGUF file or a name of the hub"),
    "recipe": Key("exact", TEXT, "a recipe by which the base model is patched; none: it is not"),
    "method": Key("lora", TEXT, "what is trained, and on what", words=("lora", "full", "dpo")),
    "data.file": Key(PUZZLES, TEXT, "JSON lines; puzzles: a data set that accelpatch makes itself"),
    "data.evaluation": Key(None, TEXT, "JSON lines to evaluate on; null: rows held out of the file"),
    "data.held_out": Key(0.1, NUMBER, "how much of the file is held out, at most 200 rows", most=0.9),
    "data.template": Key(
        "auto", TEXT, "auto: the model's chat template, if any; none: prompts as they are; or a Jinja file"
    ),
    "data.max_length": Key(1024, WHOLE, "tokens of a row", least=8),
    "data.too_long": Key("refuse", TEXT, "what becomes of longer rows", words=("refuse", "cut")),
    "adapter.rank": Key(16, WHOLE, "of LoRA's matrices", least=1),
    "adapter.alpha": Key(32.0, NUMBER, "LoRA's scale is alpha / rank", least=TINY),
    "adapter.dropout": Key(0.0, NUMBER, "of the adapter's input", most=0.99),
    "adapter.targets": Key("all-linear", (str, list), "names of the linear layers that get an adapter"),
    "optimizer.name": Key("adamw_torch", TEXT, "an optimizer of transformers' Trainer"),
    "optimizer.learning_rate": Key(2e-4, NUMBER, "the largest of the schedule", least=TINY),
    "optimizer.weight_decay": Key(0.0, NUMBER, "of the optimizer"),
    "optimizer.max_grad_norm": Key(1.0, NUMBER, "longer gradients are shortened to it"),
    "schedule.kind": Key("cosine", TEXT, "of the learning rate", words=("cosine", "linear", "constant_with_warmup")),
    "schedule.warmup_steps": Key(5, WHOLE, "steps in which the learning rate grows"),
    "schedule.epochs": Key(1.0, NUMBER, "passes over the data", least=TINY),
    "schedule.max_steps": Key(None, WHOLE, "in place of the epochs", least=1),
    "batch.size": Key(16, WHOLE, "rows of a device at a time", least=1),
    "batch.accumulation": Key(1, WHOLE, "such batches in a step", least=1),
    "batch.packing": Key(False, FLAG, "several texts in one row, each attending to itself alone"),
    "precision": Key("auto", TEXT, "of the base model", words=("auto", "float32", "bfloat16", "float16")),
    "gradient_checkpointing": Key(False, FLAG, "compute activations again, for less memory"),
    "evaluation.every": Key(20, WHOLE, "steps from one evaluation loss to the next", least=1),
    "evaluation.answers": Key(100, WHOLE, "held-out prompts answered by generate() before and after"),
    "evaluation.max_new_tokens": Key(32, WHOLE, "of such an answer", least=1),
    "checkpoint.every": Key(20, WHOLE, "steps from one checkpoint to the next", least=1),
    "checkpoint.keep": Key(2, WHOLE, "how many stay", least=1),
    "log_every": Key(1, WHOLE, "steps from one line of the log to the next", least=1),
    "seed": Key(0, WHOLE, "of the adapter's start and the order of rows"),
}
SECTIONS = {name.partition(".")[0] for name in KEYS if "." in name}


@dataclass(frozen=True)
class Configuration:
    """A run's settings. values: dotted name of `KEYS` -> value; all are there."""

    name: str
    description: str
    values: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def with_values(self, changes: Mapping[str, Any]) -> Configuration:
        """Another one with these values. Raises RecipeError for an unknown name or a value that cannot be."""
        checked = _checked(read(yaml.safe_dump(_nested(changes)), "a given value")) if changes else {}
        return Configuration(self.name, self.description, {**self.values, **checked})

    def dump(self) -> str:
        """As YAML, with every value; `load` reads it back."""
        document = {"name": self.name, "description": self.description.strip(), **_nested(self.values)}
        return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100))


def bundled() -> tuple[str, ...]:
    """The names of the configurations that come with accelpatch, sorted, the default first."""
    names = sorted(file.stem for file in BUNDLE.glob("*.yaml"))
    return (DEFAULT, *(name for name in names if name != DEFAULT))


def load(source: str | Path | Mapping[str, Any]) -> Configuration:
    """A bundled configuration by name, a YAML file by path, or a mapping of what such a file holds.

    What it leaves out has its default. Raises RecipeError, with line and column, and ArgumentError for anything else.
    """
    if isinstance(source, Mapping):
        return _configuration(read(yaml.safe_dump(dict(source)), "the configuration that was given"), "given")
    if not isinstance(source, str | Path):
        raise ArgumentError(f"the configuration is {source!r:.80}: give a name, the path of a YAML file, or a dict")
    named = isinstance(source, str) and not ("/" in source or source.endswith((".yaml", ".yml")))
    if named and source not in bundled():
        raise RecipeError(f"no bundled configuration is called {source!r}; {suggest(str(source), bundled())}")
    path = BUNDLE / f"{source}.yaml" if named else Path(source)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError(
            f"cannot be read ({error.strerror}); `accelpatch finetune --list` has the bundled ones", source=str(path)
        ) from None
    return _configuration(read(data, path.name if named else str(path)), path.stem)


def setting(text: str) -> tuple[str, Any]:
    """The name and value of "batch.size=8", as the command line takes it. Raises RecipeError."""
    name, sign, value = text.partition("=")
    if not sign or name not in KEYS:
        known = suggest(name, KEYS) if sign else "write it as batch.size=8"
        raise RecipeError(f"{text!r} sets nothing: {known}", source="--set")
    if value.startswith("[") and value.endswith("]"):
        return name, [item.strip() for item in value[1:-1].split(",")]
    try:
        return name, resolve(value)
    except ValueError as error:
        raise RecipeError(f"{text!r}: {error}", source="--set") from None


def differences(one: Configuration, other: Configuration) -> list[str]:
    """What differs between two, as "batch.size: 8, 16"."""
    return [f"{name}: {one[name]}, {other[name]}" for name in KEYS if one[name] != other[name]]


def _configuration(node: Node, stem: str) -> Configuration:
    fields = node.mapping("a configuration")
    about = {key: fields[key].text(key) for key in ("name", "description") if key in fields}
    values = {name: key.default for name, key in KEYS.items()} | _checked(node)
    return Configuration(about.get("name", stem), about.get("description", ""), values)


def _checked(node: Node) -> dict[str, Any]:
    """Dotted name -> value of a document's own values."""
    tops = [*dict.fromkeys(name.partition(".")[0] for name in KEYS), "name", "description"]
    found: dict[str, Any] = {}
    for top, inner in node.mapping("a configuration", tops).items():
        if top in SECTIONS:
            known = [name.partition(".")[2] for name in KEYS if name.startswith(f"{top}.")]
            for key, value in inner.mapping(top, known).items():
                found[f"{top}.{key}"] = KEYS[f"{top}.{key}"].check(value, f"{top}.{key}")
        elif top in KEYS:
            found[top] = KEYS[top].check(inner, top)
    return found


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        (document.setdefault(section, {}) if section else document)[key] = value
    return document


def names_of(given: Sequence[str]) -> dict[str, Any]:
    """The values of several settings, the last of a name counting."""
    return dict(map(setting, given))
