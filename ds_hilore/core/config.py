"""The "hilore" block of the DeepSpeed JSON: its fields, its checks, its defaults.

The block is parsed here and nowhere else. Past this border facts travel as small frozen dataclasses that each owner
defines, never as this model. What the block and the rest of the DeepSpeed JSON mean together is checked in
`core/host_rules.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    StrictBool,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from ds_hilore.core.budget import BudgetKind, MemoryBudget, RankBudgets, parse_budget, parse_host_budget
from ds_hilore.core.errors import ConfigError
from ds_hilore.core.types import Solver

__all__ = [
    "BLOCK",
    "BudgetKind",
    "HiLoReConfig",
    "MemoryBudget",
    "Mode",
    "PaperConfig",
    "PlannerConfig",
    "ProfileConfig",
    "RankBudgets",
    "ReportConfig",
    "SelfcheckConfig",
    "grpo",
]

#: Name of the block in the DeepSpeed JSON.
BLOCK = "hilore"


class Mode(Enum):
    """What a plan is made from."""

    UPDATE_AWARE = "update_aware"  # the update's own token coefficients decide, after forward
    EXACT = "exact"  # store and recompute only, whatever max_gradient_error says
    STATIC_RISK = "static_risk"  # the paper's ablation: risk without the update's coefficients
    PAPER = "paper"  # the paper's planner and its one fp8 tensor a layer, and nothing beside: to compare with


#: Codecs where the block names none, and those of the paper.
DEFAULT_CODECS = ("bf16", "int8")
PAPER_CODECS = ("fp8_e4m3:unscaled",)


def _as_json(budget: MemoryBudget | RankBudgets) -> Any:
    return budget.as_json()


Budget = Annotated[MemoryBudget | RankBudgets, PlainValidator(parse_budget), PlainSerializer(_as_json)]
NodeBudget = Annotated[MemoryBudget, PlainValidator(parse_host_budget), PlainSerializer(_as_json)]


class Block(BaseModel):
    """A block of settings: frozen, no unknown keys, no silent conversion of types that change the meaning."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)

    #: Where the block stands in the DeepSpeed JSON, for messages.
    where: ClassVar[str]

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            lines = [_explain(type(self), item) for item in error.errors(include_url=False)]
            raise ConfigError("\n".join(lines)) from None


class PlannerConfig(Block):
    """How plans are solved. Solving never holds up an update: a greedy plan serves until a solved one is ready."""

    where: ClassVar[str] = f"{BLOCK}.planner"

    solver: Solver = Field(
        default=Solver.HIGHS,
        description='"highs" (HiGHS in process; CBC where highspy cannot be loaded), "cbc" (comes with PuLP) or '
        '"greedy" (no integer programme).',
    )
    time_limit_s: float = Field(
        default=10.0, gt=0, le=3600, strict=True, description="Seconds one solve may take, in the background."
    )
    relative_gap: float = Field(
        default=0.01,
        ge=0,
        lt=1,
        strict=True,
        description="A solve may stop when its plan is proven this close to the best.",
    )
    trial_microbatches: int = Field(
        default=6,
        ge=0,
        le=1000,
        strict=True,
        description="Microbatches that run all-R and as planned in turn before plans are followed for good: what does "
        "not pay in the whole update is struck out. 0: the measured gains are believed.",
    )

    @field_validator("solver", mode="before")
    @classmethod
    def _known_solver(cls, value: Any) -> Any:
        known = (Solver.HIGHS, Solver.CBC, Solver.GREEDY)
        if value not in known and value not in [solver.value for solver in known]:
            raise ValueError("allowed: " + ", ".join(f'"{solver.value}"' for solver in known))
        return value


class ProfileConfig(Block):
    """Stored profiles, calibration of gradient error, and audits of it."""

    where: ClassVar[str] = f"{BLOCK}.profile"

    path: str | None = Field(
        default=None,
        strict=True,
        max_length=4096,
        description="Folder for the measured bytes and seconds of the units and for calibration, so that the next run "
        "of the same setting need not measure or fit again; before it compresses it judges what it finds on a few "
        'microbatches: "auto" (ds_hilore/profiles in the user\'s cache), a folder, or '
        "null for none.",
    )
    calibration_microbatches: int = Field(
        default=8,
        ge=0,
        le=64,
        strict=True,
        description="Microbatches after which the gradient error of compressed state is known: each is differentiated "
        "again, exactly and with one unit compressed at a time. Only where max_gradient_error is above 0. "
        "0: plans never compress.",
    )
    audit_interval: int = Field(
        default=200,
        ge=0,
        strict=True,
        description="Updates from one audit to the next: all microbatches of an audited update are differentiated "
        "exactly too, and the measured error corrects what plans risk. 0: none.",
    )

    @field_validator("path")
    @classmethod
    def _is_a_path(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or "\0" in value):
            raise ValueError('allowed: "auto", a folder, or null for none')
        return value


class SelfcheckConfig(Block):
    """Comparison of the first updates that follow plans with the plain model's gradients, in the running job."""

    where: ClassVar[str] = f"{BLOCK}.selfcheck"

    updates: int = Field(
        default=2,
        ge=0,
        le=1000,
        strict=True,
        description="Updates that are checked, from the first that follows a plan: one microbatch of each is "
        "differentiated once more by the plain model. Where gradients differ, all ranks stop before the step, and the "
        "error names rank, unit and parameter. Where a model cannot be run again, the log says so. 0: none.",
    )


class ReportConfig(Block):
    """The log of a run, from which `hilore report` makes a page with pictures."""

    where: ClassVar[str] = f"{BLOCK}.report"

    path: str | None = Field(
        default=None,
        strict=True,
        max_length=4096,
        description="Folder that every rank writes a log of its updates to, for `hilore report FOLDER`: a few hundred "
        "bytes per update and rank. All ranks' should lie in one place. A run goes on where it cannot be written. "
        "null: none.",
    )

    @field_validator("path")
    @classmethod
    def _is_a_folder(cls, value: str | None) -> str | None:
        if value is not None and (not value.strip() or "\0" in value):
            raise ValueError("allowed: a folder, or null for none")
        return value


class PaperConfig(Block):
    """What mode "paper" compresses. Read in that mode only."""

    where: ClassVar[str] = f"{BLOCK}.paper"

    least_tensor_bytes: int = Field(
        default=32 << 20,
        ge=0,
        strict=True,
        description="Bytes of the smallest tensor that is compressed: of each layer's MLP the largest that has a "
        "storage of its own, if it has as many. Small models have none of 32 MiB.",
    )
    dtypes: tuple[Literal["bfloat16", "float16", "float32"], ...] = Field(
        default=("bfloat16",), description="Of such tensors. The paper's are bfloat16."
    )

    @field_validator("dtypes")
    @classmethod
    def _name_dtypes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError('the list is empty; name at least one, as ["bfloat16"]')
        return value


class HiLoReConfig(Block):
    """The whole "hilore" block. Every wrong value ends in a `ConfigError`, however the object is made."""

    where: ClassVar[str] = BLOCK

    enabled: StrictBool = Field(default=True, description="false: DeepSpeed behaves exactly as without this package.")
    memory_budget: Budget = Field(
        default=MemoryBudget(BudgetKind.CHECKPOINT_MULTIPLE, 1.10),
        description="Device memory that an update may use on a rank, everything included: bytes, a share of the "
        'device, a multiple of the peak of recomputing everything, "auto" (what the device has free once there is '
        'optimizer state, beside all that others hold; write "free" for it under Trainer and accelerate, which refuse '
        'an "auto" they do not know), or a list with one entry per rank. More memory: more units are stored and fewer '
        "are replayed.",
    )
    host_budget: NodeBudget = Field(
        default=MemoryBudget(BudgetKind.BYTES, 0),
        description="Host memory that the ranks of a node may use together for offloaded state: bytes, or "
        '"auto" (half of what the node has free at start; write "free" under Trainer and accelerate). Only where not '
        "everything fits on the device: state then goes to pinned host memory and back while the device computes, as "
        "much as the link can hide. 0: none. Without effect on CPU, in pipelines and in mode paper.",
    )
    max_gradient_error: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        strict=True,
        description="Relative error of the whole update's gradient that compression may cause on average. 0: exact "
        "actions only.",
    )
    units: Literal["auto"] | tuple[str, ...] = Field(
        default="auto",
        description='Which modules are recovery units: "auto" (the decoder layers), or a list of class names and '
        'patterns of module paths ("model.layers.*"). Leave the key out for "auto" under Trainer and accelerate: they '
        'refuse an "auto" they do not know.',
    )
    mode: Mode = Field(
        default=Mode.UPDATE_AWARE,
        description='"update_aware": the update\'s own coefficients decide after forward; "static_risk": exposure is '
        'taken to be what it was in calibration; "exact": store and recompute only; "paper": as the paper plans, with '
        "none of our own: no derived state, no kept kernel outputs, no skipped work, no pruning, risks that add up.",
    )
    codecs: tuple[str, ...] = Field(
        default=DEFAULT_CODECS,
        description="Codecs that compression may use, where max_gradient_error is above 0. Mode paper has its own.",
    )
    planner: PlannerConfig = Field(default=PlannerConfig(), description="How plans are solved.")
    prune_zero_exposure: StrictBool = Field(
        default=True,
        description="Replays leave out rows and positions that cannot change the model, in microbatches for which "
        "`begin_update` or `begin_microbatch` announced dead or short rows. Gradients stay exact.",
    )
    profile: ProfileConfig = Field(default=ProfileConfig(), description="Stored profiles and calibration.")
    selfcheck: SelfcheckConfig = Field(
        default=SelfcheckConfig(), description="Comparison with the plain model at start."
    )
    paper: PaperConfig = Field(default=PaperConfig(), description='What mode "paper" compresses.')
    report: ReportConfig = Field(default=ReportConfig(), description="The log of a run.")

    def __init__(self, **values: Any) -> None:  # typed like the JSON: a budget is given as "1.10x", not as parsed
        super().__init__(**values)

    @classmethod
    def from_ds_json(cls, ds: Mapping[str, Any]) -> HiLoReConfig | None:
        """Reads the block from a whole DeepSpeed JSON. None where there is no block or it says `"enabled": false`.

        Raises:
            ConfigError: names every wrong key with its value and what is allowed.
        """
        if BLOCK not in ds:
            _refuse_misspelt_block(ds)
            return None
        block = ds[BLOCK]
        if not isinstance(block, Mapping):
            raise ConfigError(
                f'{BLOCK}: {block!r} is no block; write an object, for example {{"memory_budget": "1.10x"}}'
            )
        if block.get("enabled", True) is False:
            return None
        return cls(**{str(key): value for key, value in block.items()})

    def fingerprint(self) -> dict[str, Any]:
        """The settings as JSON-able values, in a form that is equal on ranks that were given the same settings."""
        return self.model_dump(mode="json")

    @field_validator("codecs")
    @classmethod
    def _name_codecs(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("a codec is listed twice; name each once")
        if info.data.get("mode") is Mode.PAPER:
            if value not in (DEFAULT_CODECS, PAPER_CODECS):
                raise ValueError(f'mode "paper" compresses by {PAPER_CODECS[0]} only; leave the key out')
            return PAPER_CODECS
        return value

    @property
    def compresses(self) -> bool:
        """Whether plans may compress at all: it takes an allowed error, codecs, and a calibration that knows them."""
        allowed = self.max_gradient_error > 0 and self.mode is not Mode.EXACT
        return allowed and bool(self.codecs) and self.profile.calibration_microbatches > 0

    @field_validator("units", mode="before")
    @classmethod
    def _name_units(cls, value: Any) -> Any:
        allowed = '"auto", or a list of class names or patterns of module paths, as ["LlamaDecoderLayer"]'
        if value == "auto":
            return value
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(f"allowed: {allowed}")
        if not all(isinstance(name, str) and name.strip() for name in value):
            raise ValueError(f"every entry must be a name that is not empty; allowed: {allowed}")
        if len(set(value)) != len(value):
            raise ValueError("a name is listed twice; name each class or pattern once")
        return tuple(value)


def grpo(memory_budget: str | int | float | list[Any] = "1.10x") -> HiLoReConfig:
    """Recipe for GRPO with LoRA: exact gradients, plans by HiGHS, within `memory_budget`."""
    return HiLoReConfig(memory_budget=memory_budget, max_gradient_error=0.0, planner=PlannerConfig(solver=Solver.HIGHS))


def _refuse_misspelt_block(ds: Mapping[str, Any]) -> None:
    """DeepSpeed takes unknown top-level keys in silence, so a misspelt block would do nothing and say nothing."""
    for key in ds:
        plain = str(key).lower().replace("-", "").replace("_", "")
        if difflib.get_close_matches(plain, [BLOCK], cutoff=0.8):
            raise ConfigError(f'"{key}": unknown key of the DeepSpeed JSON, did you mean "{BLOCK}"?')


def _explain(block: type[Block], error: ErrorDetails) -> str:
    """One wrong key as one line: path, value, rule. Blocks inside `block` have explained their own keys already."""
    name, *inner = [str(part) for part in error["loc"]]
    key = f"{block.where}.{name}"
    if error["type"] == "extra_forbidden":
        return _unknown_key(block, name)
    if error["type"] == "value_error":
        cause = error["ctx"]["error"]
        return str(cause) if isinstance(cause, ConfigError) else f"{key} = {error['input']!r}: {cause}"
    if error["type"] == "model_type":
        return f"{key} = {error['input']!r}: must be an object, with keys of: {', '.join(_keys(block, name))}"
    rule = error["msg"][:1].lower() + error["msg"][1:].replace("tuple", "list")  # JSON has lists
    where = f" (at {'.'.join(inner)})" if inner else ""
    return f"{key}{where} = {error['input']!r}: {rule}; {block.model_fields[name].description}"


def _unknown_key(block: type[Block], name: str) -> str:
    close = difflib.get_close_matches(name, block.model_fields, n=1)
    hint = f'did you mean "{close[0]}"? ' if close else ""
    return f"{block.where}.{name}: unknown key; {hint}Known here: {', '.join(block.model_fields)}"


def _keys(block: type[Block], name: str) -> list[str]:
    inner = block.model_fields[name].annotation
    return list(inner.model_fields) if isinstance(inner, type) and issubclass(inner, Block) else []
