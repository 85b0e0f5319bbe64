"""Makes docs/configuration.md out of the models in slideformer_ray/config.py, so that the two cannot differ.

    python docs/make_configuration.py            # print the page
    python docs/make_configuration.py --write    # put it into docs/configuration.md

`tests/test_docs.py` fails while the committed page is another one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from slideformer_ray.config import RunConfig, Section

PAGE = Path(__file__).resolve().parent / "configuration.md"

# Units of numbers, by the words that a field's name ends with; the first that fits counts.
_UNITS = (
    ("gib", "GiB"),
    ("minutes", "minutes"),
    ("keep", "checkpoints"),
    ("timeout_s", "s"),
    ("seq_len", "tokens"),
    ("pad_to_multiple", "tokens"),
    ("rows", "rows"),
    ("rows_per_step", "rows"),
    ("steps", "optimizer steps"),
    ("every", "optimizer steps"),
    ("epochs", "passes over the rows"),
    ("num_optimizer_actors", "actors"),
    ("threads_per_optimizer_actor", "threads"),
    ("units", "units"),
    ("slots", "slots"),
    ("kept_attention", "layers"),
    ("kept_gate_up", "layers"),
)

_INTRODUCTION = """\
<!-- Made by docs/make_configuration.py from slideformer_ray/config.py; edit those. -->
# Configuration

A run is described by one YAML file, whose sections and fields are listed here with their defaults. On the command line
`slideformer-ray train CONFIG.yaml optimizer.learning_rate=2e-5` overrides single fields; in Python it is
`RunConfig.load(path, overrides)`, or `RunConfig.from_dict(values)` without a file. A wrong key, type or range, and a
pair of settings that cannot go together, is one line that names the field; by then nothing has been loaded.

The smallest file:

```yaml
run_dir: runs/first
model:
  path: models/Qwen2.5-3B
data:
  train: [rows.jsonl]
training:
  steps: 100
```

- Relative paths in a file are relative to the file; paths given as overrides, to the working directory.
- A field that may be `null` is off or left to the plan then; its meaning says which. `slideformer-ray plan CONFIG.yaml`
  prints every count that it chose.
- A setting that does nothing on some path says so in **bold**.
"""


def page() -> str:
    schema = RunConfig.model_json_schema()
    parts = [_INTRODUCTION]
    top_level = {name: field for name, field in schema["properties"].items() if "$ref" not in field}
    parts.append("## Top level\n\n" + _table(top_level, schema))
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        if not (isinstance(section, type) and issubclass(section, Section)):
            continue
        described = schema["$defs"][section.__name__]
        purpose = " ".join(described.get("description", "").split())
        heading = f"## `{name}`\n\n" + (f"{purpose}\n\n" if purpose else "")
        parts.append(heading + _table(described["properties"], described))
    return "\n".join(parts)


def _table(fields: dict[str, Any], owner: dict[str, Any]) -> str:
    rows = ["| field | type | unit | default | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, field in fields.items():
        default = "required" if name in owner.get("required", ()) else f"`{_yaml(field['default'])}`"
        cells = (f"`{name}`", _type(field), unit_of(name, field), default, _meaning(field))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _meaning(field: dict[str, Any]) -> str:
    """The field's description, with the sentence that says when it has no effect set apart."""
    return re.sub(r"(No effect[^.]*\.)", r"**\1**", field.get("description", ""))


def unit_of(name: str, field: dict[str, Any]) -> str:
    """What a number counts or measures; empty for plain numbers (rates, coefficients, the seed) and for other types."""
    if not {"integer", "number"} & {kind.get("type") for kind in _alternatives(field)}:
        return ""
    return next((unit for ending, unit in _UNITS if name == ending or name.endswith(f"_{ending}")), "")


def _alternatives(field: dict[str, Any]) -> list[dict[str, Any]]:
    return field.get("anyOf", [field])


def _type(field: dict[str, Any]) -> str:
    return " or ".join(_one_type(kind) for kind in _alternatives(field))


def _one_type(kind: dict[str, Any]) -> str:
    if "enum" in kind:
        return ", ".join(f"`{value}`" for value in kind["enum"])
    if kind["type"] == "null":
        return "`null`"
    if kind["type"] == "boolean":
        return "`true`, `false`"
    if kind["type"] == "array":
        if "prefixItems" in kind:
            return "list: " + "; ".join(map(_one_type, kind["prefixItems"]))
        at_least = f", at least {kind['minItems']}" if kind.get("minItems") else ""
        return f"list: {_one_type(kind['items'])}{at_least}"
    if kind["type"] == "string":
        return "path" if kind.get("format") == "path" else "text"
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = [f"{sign} {kind[key]:g}" for key, sign in signs.items() if key in kind]
    return " ".join([kind["type"], ", ".join(bounds)]).rstrip()


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").rstrip()


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    print(page())
