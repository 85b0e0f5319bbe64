"""What a user can set: one pydantic model a section, gathered in `RunConfig`.

A wrong key, type or range is one line that names the field; pairs that cannot go together are refused here, before
anything is loaded. Imports neither torch nor ray, so that programs that only inspect a config start at once. Tested by
tests/test_config.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

GIB = 1 << 30

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# Absolute, because actors have working directories of their own.
UserPath = Annotated[Path, AfterValidator(lambda path: path.expanduser().absolute())]
# `train: rows.jsonl` means the list with that one entry.
ListOrOne = BeforeValidator(lambda value: (value,) if isinstance(value, str | Path) else value)


class ConfigError(ValueError):
    """The user's configuration is wrong. The message is complete: what, where, the value found, what is needed."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelSection(Section):
    path: UserPath = Field(description="Hugging Face model directory: config.json, *.safetensors, tokenizer files.")
    random_init: bool = Field(
        False,
        description="Draw the weights at random from config.json's initializer_range instead of loading them. "
        "`path` may then be a directory without weights. For benchmarks.",
    )
    frozen: Annotated[tuple[str, ...], ListOrOne] = Field(
        (),
        description="Shell patterns (`*`, `?`) of parameter names that are neither updated nor decayed, such as "
        "`model.embed_tokens.*`.",
    )


class DataSection(Section):
    train: Annotated[tuple[UserPath, ...], ListOrOne] = Field(
        min_length=1, description="JSONL files of {'messages': [...]} or {'text': ...} rows."
    )
    eval: Annotated[tuple[UserPath, ...], ListOrOne] = Field(
        (), description="Held-out rows, same layout. Empty: `eval_rows` of the training rows are held out."
    )
    eval_rows: NonNegativeInt = Field(
        0,
        description="Rows held out of `train` (the last ones of a seeded permutation). No effect when `eval` is given.",
    )
    seq_len: PositiveInt = Field(
        1024, description="Longest row, tokens. Longer rows are truncated on the right, and counted."
    )
    pad_to_multiple: PositiveInt = Field(
        64,
        description="A micro-batch is padded to its longest row, rounded up to this, so that compiled layers see few "
        "lengths.",
    )


class OptimizerSection(Section):
    learning_rate: NonNegativeFloat = Field(1e-5, description="Peak learning rate. 0 changes no bit of the model.")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.999), description="Decay rates of AdamW's two moments.")
    eps: PositiveFloat = Field(1e-8, description="Added to the root of AdamW's second moment.")
    weight_decay: NonNegativeFloat = Field(
        0.0, description="Decoupled (AdamW). Never applied to 1-D parameters and biases."
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="Shape after warm-up; linear and cosine would reach 0 at the step after the last."
    )
    warmup_steps: NonNegativeInt = Field(0, description="Optimizer steps from 0 to the peak rate.")
    max_grad_norm: PositiveFloat | None = Field(
        1.0,
        description="Exact clipping by the global norm of what the optimizer consumes. Gradients are then held in host "
        "memory until the norm is known (+2 bytes a parameter). null: no clipping.",
    )
    max_skipped_steps: PositiveInt = Field(
        3,
        description="Consecutive steps with a non-finite gradient norm that are skipped before the run stops. "
        "No effect without max_grad_norm: the first non-finite gradient then stops the run.",
    )


class TrainingSection(Section):
    steps: PositiveInt | None = Field(
        None, description="Optimizer steps. Exactly one of `steps` and `epochs` is given."
    )
    epochs: PositiveFloat | None = Field(None, description="Passes over the training rows.")
    rows_per_step: PositiveInt = Field(16, description="Rows of one optimizer step (the global batch).")
    micro_batch_rows: PositiveInt | None = Field(
        None,
        description="Rows that one GPU call sees; bounds GPU memory. Default: rows_per_step. Need not divide it.",
    )
    precision: Literal["bf16", "fp32"] = Field(
        "bf16", description="Compute and gradient dtype. Masters are fp32 in both."
    )
    seed: NonNegativeInt = Field(0, description="Of the rows' order and of random weights.")
    deterministic: bool = Field(
        False,
        description="PyTorch's deterministic algorithms on the GPU, so that two runs give the same bits there, "
        "whichever path attention takes; Hopper's does in any case. No effect on the CPU device.",
    )
    overlap: bool = Field(
        True, description="false: every operation waits for the one before. Same bits, slower; for checking."
    )
    eval_every: NonNegativeInt = Field(
        0,
        description="Steps between held-out evaluations; 0: only before the first and after the last step. No effect "
        "without held-out rows.",
    )

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"give exactly one of steps and epochs (found steps={self.steps}, epochs={self.epochs})")
        if self.micro_batch_rows is not None and self.micro_batch_rows > self.rows_per_step:
            raise ValueError(
                f"micro_batch_rows ({self.micro_batch_rows}) is larger than rows_per_step ({self.rows_per_step}); "
                "lower it to at most that"
            )
        return self


class BudgetSection(Section):
    """What the run may take of each tier. Everything else (unit sizes, slots, stores) is derived from the model."""

    gpu_gib: PositiveFloat | None = Field(
        None, description="GPU memory, GiB. Default: what is free at the start. No effect on the CPU device."
    )
    ram_gib: PositiveFloat | None = Field(
        None, description="Host memory of all processes, GiB. Default: what RAM and the cgroup have left."
    )


class PlacementSection(Section):
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="auto: the GPU when there is one. cpu runs the same code path."
    )
    num_optimizer_actors: PositiveInt | None = Field(
        None, description="Each owns slice k of every layer. Default: 2 when there are 8 cores or more, else 1."
    )
    threads_per_optimizer_actor: PositiveInt | None = Field(
        None, description="Default: (physical cores - 2) / actors, at least 1."
    )
    param_units: Annotated[int, Field(ge=2)] = Field(
        3, description="GPU cache units for parameters, each as large as the largest decoder layer."
    )
    gradient_units: Annotated[int, Field(ge=1)] = Field(2, description="GPU cache units for gradients.")
    gradient_slots: PositiveInt | None = Field(
        None,
        description="Pinned host slots for gradients. Default: as many as RAM and /dev/shm allow, at most one a layer, "
        "which max_grad_norm requires.",
    )
    activation_slots: Annotated[int, Field(ge=3)] | None = Field(
        None,
        description="Micro-batch activations that stay on the GPU; the rest travel to pinned host memory and back. "
        "Default: as many as the GPU budget allows.",
    )
    kept_attention: NonNegativeInt | None = Field(
        None,
        description="Decoder layers, counted from the last, whose forward keeps attention's results on the GPU for the "
        "backward, which else computes them again. Default: as many as the GPU budget allows once all activations have "
        "a slot; none on the CPU device, in fp32 and with `training.deterministic`.",
    )
    kept_gate_up: NonNegativeInt | None = Field(
        None,
        description="The same of the MLP's gate and up projections, which take more memory for the time they save. "
        "Default: as many as the GPU budget allows after `kept_attention`.",
    )
    address: str | None = Field(
        None, description="A running Ray cluster to join (`auto` inside a job). Default: a private local node."
    )
    include_dashboard: bool = Field(
        False, description="Start the Ray Dashboard on the private node. No effect when `address` is given."
    )
    layers: Literal["auto", "recomputed", "compiled", "plain"] = Field(
        "auto",
        description="How a decoder layer runs. recomputed: written out by hand, with a backward that recomputes only "
        "what it needs; compiled: transformers' layer through torch.compile, which compiles for each micro-batch "
        "shape; plain: transformers' layer. auto: recomputed for the families that are written out.",
    )


_RESUME_WORDS = ("auto", "none")


def _resume_value(value: object) -> object:
    if value in _RESUME_WORDS:
        return value
    if isinstance(value, str | Path):
        return Path(value).expanduser().absolute()
    raise ValueError(f"give auto, none or a checkpoint directory (found {value!r})")


class CheckpointSection(Section):
    save_every: NonNegativeInt = Field(
        0,
        description="Steps between training checkpoints; 0: none after so many steps. With it or save_every_minutes, a "
        "run that is stopped by SIGTERM or Ctrl-C saves, too.",
    )
    save_every_minutes: PositiveFloat | None = Field(
        None, description="Minutes between training checkpoints, counted from the last one. null: no clock."
    )
    keep: PositiveInt | None = Field(
        2,
        description="Newest checkpoints that stay; older ones go once a new one is complete, so the disk holds one "
        "more for a moment. null: all.",
    )
    async_save: bool = Field(
        False,
        description="Train on while a checkpoint is written. A layer is written before its next update may start, so "
        "updates wait for a disk that is slower than a step, and no state is held twice. Same bits.",
    )
    on_save_error: Literal["continue", "stop"] = Field(
        "continue",
        description="When a checkpoint cannot be written (disk full, directory gone): go on without it, or end the "
        "run. The complete ones stay in both.",
    )
    resume: Annotated[Literal["auto", "none"] | Path, BeforeValidator(_resume_value)] = Field(
        "none",
        description="auto: continue from the newest complete checkpoint in run_dir, or start when there is none. none: "
        "start, and refuse a run_dir that holds checkpoints. Or a directory (RUN/checkpoints/step-N).",
    )
    shard_gib: PositiveFloat = Field(
        1.0, description="Largest safetensors file of the model, GiB. Costs no memory: files are written in pieces."
    )
    save_final: bool = Field(True, description="Write the final Hugging Face model directory to RUN/model.")

    @property
    def enabled(self) -> bool:
        return self.save_every > 0 or self.save_every_minutes is not None


class ObserveSection(Section):
    """Who is told of each step, beside RUN/metrics.jsonl and the terminal."""

    ray_metrics: bool = Field(
        True, description="Report to Ray's metrics, for Prometheus and the Dashboard. No effect without Ray."
    )
    lanes_every: NonNegativeInt = Field(
        25,
        description="Steps between two in a row whose lanes are timed, for GB/s, hiding factor and exposed seconds; "
        "0: never, else at least 3.",
    )
    tensorboard: bool = Field(
        False, description="Write event files to RUN/tensorboard, for `tensorboard --logdir RUN`. Needs tensorboard."
    )
    wandb_project: str | None = Field(
        None, description="Project of Weights & Biases to log to. Needs wandb; WANDB_MODE=offline keeps it local."
    )

    @field_validator("lanes_every")
    @classmethod
    def _two_of_several(cls, value: int) -> int:
        if value in (1, 2):
            raise ValueError(f"two steps in a row are timed: give 0 or at least 3 (found {value})")
        return value


class DebugSection(Section):
    poison_freed_slots: bool = Field(
        False, description="Fill freed slots with NaN, so that a read of a stale slot shows."
    )
    wait_timeout_s: PositiveFloat = Field(
        600.0,
        description="Longest that any operation waits for another. First steps compile: keep it above a minute on a "
        "GPU.",
    )
    ray_output: bool = Field(
        False, description="Show what Ray and the actors print. It is in Ray's log files in any case."
    )


class RunConfig(Section):
    """One run. Build it from YAML with `load`, or from Python with keyword arguments."""

    run_dir: UserPath = Field(description="Where metrics.jsonl, summary.json, checkpoints/ and model/ are written.")
    model: ModelSection
    data: DataSection
    optimizer: OptimizerSection = OptimizerSection()
    training: TrainingSection
    budget: BudgetSection = BudgetSection()
    placement: PlacementSection = PlacementSection()
    checkpoint: CheckpointSection = CheckpointSection()
    observe: ObserveSection = ObserveSection()
    debug: DebugSection = DebugSection()

    @property
    def micro_batch_rows(self) -> int:
        return self.training.micro_batch_rows or self.training.rows_per_step

    @property
    def num_micro_batches(self) -> int:
        return -(-self.training.rows_per_step // self.micro_batch_rows)

    def settings_without_effect(self) -> list[str]:
        """One line for each setting that was given and that this run will not look at."""
        found = []

        def given(section: str, key: str) -> bool:
            return key in getattr(self, section).model_fields_set

        if given("training", "eval_every") and not (self.data.eval or self.data.eval_rows):
            found.append("training.eval_every: there are no held-out rows (data.eval, data.eval_rows)")
        if given("optimizer", "max_skipped_steps") and self.optimizer.max_grad_norm is None:
            found.append("optimizer.max_skipped_steps: max_grad_norm is null")
        if given("budget", "gpu_gib") and self.placement.device == "cpu":
            found.append("budget.gpu_gib: placement.device is cpu")
        if given("training", "deterministic") and self.placement.device == "cpu":
            found.append("training.deterministic: placement.device is cpu")
        if given("placement", "include_dashboard") and self.placement.address is not None:
            found.append("placement.include_dashboard: placement.address is given")
        return [f"{line}; it has no effect" for line in found]

    def changed(self, overrides: Sequence[str]) -> RunConfig:
        """The config with `section.key=value` overrides. Raises ConfigError."""
        values = self.model_dump(exclude_unset=True)
        for item in overrides:
            _apply_override(values, item)
        return self.from_dict(values, overrides=overrides)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "config", overrides: Sequence[str] = ()) -> RunConfig:
        """Raises ConfigError with one line a mistake; a wrong key names the nearest right one.

        where, overrides: what the values came from, for the message: one of the overrides, or else `where`.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            lines = [f"{_origin(e, overrides) or where}: {_one_line(e, cls)}" for e in error.errors()]
            raise ConfigError("\n".join(lines)) from None

    @classmethod
    def load(cls, path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
        """Read YAML and apply `section.key=value` overrides.

        Relative paths in the file are relative to the file, in overrides to the working directory. Raises ConfigError.
        """
        path = Path(path)
        try:
            values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not valid YAML: {_problem(error)}") from None
        if not isinstance(values, dict):
            found = "an empty file" if values is None else type(values).__name__
            raise ConfigError(f"{path}: expected a mapping of sections, found {found}")
        # A section whose settings are all commented out reads as null.
        values = {key: {} if value is None and key in _SECTIONS else value for key, value in values.items()}
        _anchor_paths(values, path.resolve().parent)
        for item in overrides:
            _apply_override(values, item)
        return cls.from_dict(values, where=str(path), overrides=overrides)


_SECTIONS = {name for name in RunConfig.model_fields if name != "run_dir"}
# Fields that hold paths: a config file works from any directory, and a path that looks like a number stays a path.
_PATH_FIELDS = (("run_dir",), ("model", "path"), ("data", "train"), ("data", "eval"), ("checkpoint", "resume"))
# In an override their value is what stands there: to YAML `*.bias` would be an alias, and 2024 a number.
_TEXT_FIELDS = (*_PATH_FIELDS, ("model", "frozen"))


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice: the second would silently replace the first, a whole section even."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _anchor_paths(values: dict[str, Any], base: Path) -> None:
    for *sections, key in _PATH_FIELDS:
        owner: Any = values
        for section in sections:
            owner = owner.get(section) if isinstance(owner, dict) else None
        if isinstance(owner, dict) and key in owner and owner[key] not in _RESUME_WORDS:
            owner[key] = _anchored(owner[key], base)


def _anchored(found: Any, base: Path) -> Any:
    """Paths relative to `base`, in a list too. What is no path is left for the validation to name."""
    if isinstance(found, list):
        return [_anchored(part, base) for part in found]
    return str(base / Path(found).expanduser()) if isinstance(found, str) else found


def _apply_override(values: dict[str, Any], item: str) -> None:
    name, sep, text = item.partition("=")
    if not sep or not name:
        raise ConfigError(f"override {item!r}: expected section.key=value, such as optimizer.learning_rate=2e-5")
    *sections, key = name.split(".")
    owner = values
    for section in sections:
        owner = owner.setdefault(section, {})
        if not isinstance(owner, dict):
            raise ConfigError(f"override {item!r}: {section} is not a section")
    if (*sections, key) in _TEXT_FIELDS and not text.lstrip().startswith(_YAML_MARKS) and text not in _YAML_NULLS:
        owner[key] = text
    else:
        owner[key] = yaml_value(text, where=f"override {item!r}")


# What makes a text field's override YAML after all: a list, a quoted string, or nothing.
_YAML_MARKS, _YAML_NULLS = ("[", "'", '"'), ("", "~", "null")


def yaml_value(text: str, where: str) -> Any:
    """YAML's reading of one value, except that 1e-5 is a number (YAML 1.1 wants 1.0e-5). Raises ConfigError."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not a YAML value: {_problem(error)}") from None
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _problem(error: Exception) -> str:
    """What a parser says, with the line, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        alias = "; put a value that begins with * in quotes" if "alias" in f"{error.context} {error.problem}" else ""
        return f"line {error.problem_mark.line + 1}: {error.problem}{alias}"
    return " ".join(str(error).split())


def _origin(error: Any, overrides: Sequence[str]) -> str | None:
    """The last override that set the field that a mistake is in, or that made the section that is one; or None."""
    loc = ".".join(str(part) for part in error["loc"]) + "."
    for override in reversed(overrides):
        name = override.partition("=")[0] + "."
        if loc.startswith(name) or (error["type"] == "extra_forbidden" and name.startswith(loc)):
            return f"override {override!r}"
    return None


def _one_line(error: Any, model: type[BaseModel]) -> str:
    loc = [str(part) for part in error["loc"]]
    name = ".".join(loc)
    if error["type"] == "extra_forbidden":
        owner: Any = model
        for part in loc[:-1]:
            owner = owner.model_fields[part].annotation if part in getattr(owner, "model_fields", {}) else None
        known = list(getattr(owner, "model_fields", {}))
        near = difflib.get_close_matches(loc[-1], known, n=1) or _elsewhere(loc[-1])
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return f"{name}: unknown key; {hint}"
    if error["type"] == "missing":
        return f"{name}: missing, and it has no default"
    message = _WORDS.get(error["type"], error["msg"]).removeprefix("Value error, ")
    if not loc:  # a pair of sections
        return message
    found = "" if error["type"] == "value_error" else f" (found {error['input']!r})"
    return f"{name}: {message[0].lower() + message[1:]}{found}"


# Where pydantic speaks of Python's types.
_WORDS = {
    "tuple_type": "expected a value, or a list of them",
    "model_type": "expected a section with keys of its own",
    "too_short": "give at least one",
}


def _elsewhere(key: str) -> list[str]:
    """Settings of that very name, with their sections."""
    sections = ((name, field.annotation) for name, field in RunConfig.model_fields.items())
    return [f"{name}.{key}" for name, section in sections if key in getattr(section, "model_fields", {})]
