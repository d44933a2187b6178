"""The "hilore" block: defaults, parsing, and every way to write it wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest

from ds_hilore.core.config import BudgetKind, HiLoReConfig, MemoryBudget, Mode, PlannerConfig, RankBudgets, grpo
from ds_hilore.core.errors import ConfigError
from ds_hilore.core.host_rules import check_against_ds_json
from ds_hilore.core.types import Solver

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.json"))


def parse(block: Any) -> HiLoReConfig:
    config = HiLoReConfig.from_ds_json({"train_batch_size": 2, "hilore": block})
    assert config is not None
    return config


def test_defaults_are_what_works_now() -> None:
    config = parse({})
    assert config == HiLoReConfig()
    assert config.memory_budget == MemoryBudget(BudgetKind.CHECKPOINT_MULTIPLE, 1.1)
    assert (config.mode, config.max_gradient_error, config.units) == (Mode.UPDATE_AWARE, 0.0, "auto")
    assert config.codecs == ("bf16", "int8") and not config.compresses
    assert config.planner == PlannerConfig(solver=Solver.HIGHS, time_limit_s=10, relative_gap=0.01)


@pytest.mark.parametrize("ds", [{}, {"hilore": {"enabled": False}}, {"hilore": {"enabled": False, "no_such_key": 1}}])
def test_no_block_or_a_disabled_one_is_none(ds: dict[str, Any]) -> None:
    assert HiLoReConfig.from_ds_json(ds) is None


def test_a_full_block_is_read() -> None:
    config = parse(
        {
            "enabled": True,
            "memory_budget": ["1.0x", "2GiB"],
            "host_budget": 0,
            "max_gradient_error": 0,
            "units": ["LlamaDecoderLayer", "model.layers.*"],
            "mode": "exact",
            "codecs": [],
            "planner": {"solver": "cbc", "time_limit_s": 3, "relative_gap": 0},
            "prune_zero_exposure": True,
            "profile": {"path": "profiles", "calibration_microbatches": 0, "audit_interval": 0},
            "selfcheck": {"updates": 3},
            "report": {"path": "runs/first"},
        }
    )
    assert isinstance(config.memory_budget, RankBudgets)
    assert config.memory_budget.for_rank(1, 2).value == 2 << 30
    assert config.units == ("LlamaDecoderLayer", "model.layers.*")
    assert config.selfcheck.updates == 3 and config.profile.path == "profiles" and config.report.path == "runs/first"
    assert config.mode is Mode.EXACT and config.planner.solver is Solver.CBC


def test_the_fingerprint_is_json_and_reads_back_as_the_same_settings() -> None:
    config = parse({"memory_budget": ["1.25x", 0.5], "planner": {"solver": "greedy"}})
    written = json.loads(json.dumps(config.fingerprint()))
    assert parse(written) == config


@pytest.mark.parametrize(
    ("block", "compresses"),
    [
        ({}, False),
        ({"max_gradient_error": 0.01}, True),
        ({"max_gradient_error": 0.01, "mode": "static_risk"}, True),
        ({"max_gradient_error": 0.01, "mode": "exact"}, False),
        ({"max_gradient_error": 0.01, "mode": "paper"}, True),
        ({"mode": "paper"}, False),
        ({"max_gradient_error": 0.01, "codecs": []}, False),
        ({"max_gradient_error": 0.01, "profile": {"calibration_microbatches": 0}}, False),
    ],
)
def test_what_it_takes_to_compress(block: dict[str, Any], compresses: bool) -> None:
    assert parse(block).compresses is compresses


def test_the_paper_has_its_own_codec_and_floor() -> None:
    config = parse({"mode": "paper"})
    assert config.codecs == ("fp8_e4m3:unscaled",)
    assert (config.paper.least_tensor_bytes, config.paper.dtypes) == (32 << 20, ("bfloat16",))
    assert parse(config.fingerprint()) == config


def test_the_block_is_frozen() -> None:
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        parse({}).mode = Mode.EXACT


def test_the_recipe_is_a_whole_config() -> None:
    assert grpo("2GiB") == HiLoReConfig(memory_budget="2GiB")


def test_every_field_says_what_it_means() -> None:
    blocks = [HiLoReConfig, *pydantic.BaseModel.__subclasses__()]
    for block in [block for block in blocks if block.__module__ == HiLoReConfig.__module__]:
        assert all(field.description for field in block.model_fields.values())


#: (block, words that the message must hold: key, value, what is allowed)
WRONG: list[tuple[Any, tuple[str, ...]]] = [
    (True, ("hilore: True", "object")),
    ([], ("hilore: []", "object")),
    ({"memory_budgt": "1.1x"}, ("hilore.memory_budgt", 'did you mean "memory_budget"', "planner")),
    ({"something": 1}, ("hilore.something", "unknown key", "memory_budget")),
    ({"enabled": "false"}, ("hilore.enabled = 'false'", "boolean")),
    ({"enabled": 0}, ("hilore.enabled = 0", "boolean")),
    ({"memory_budget": "atuo"}, ("hilore.memory_budget = 'atuo'", '"auto"', '"free"', "1.10x")),
    ({"memory_budget": "0.9x"}, ("hilore.memory_budget = '0.9x'", "1.0x")),
    ({"memory_budget": "36 gigs"}, ("hilore.memory_budget = '36 gigs'", "GiB")),
    ({"memory_budget": 1.2}, ("hilore.memory_budget = 1.2", '"1.2x"')),
    ({"memory_budget": 0}, ("hilore.memory_budget = 0", "1 MiB")),
    ({"memory_budget": None}, ("hilore.memory_budget = None", "share of the device")),
    ({"memory_budget": []}, ("hilore.memory_budget = []", "empty")),
    ({"memory_budget": ["1.1x", "x"]}, ("hilore.memory_budget = ['1.1x', 'x']", "entry 1")),
    ({"host_budget": "64 gigs"}, ("hilore.host_budget = '64 gigs'", '"64GB"', "0 for none")),
    ({"host_budget": "1.5x"}, ("hilore.host_budget = '1.5x'", "per node")),
    ({"host_budget": 0.5}, ("hilore.host_budget = 0.5", "per node")),
    ({"host_budget": -1}, ("hilore.host_budget = -1", "per node")),
    ({"host_budget": False}, ("hilore.host_budget = False", "per node")),
    ({"host_budget": ["1GB"]}, ("hilore.host_budget = ['1GB']", "per node")),
    ({"max_gradient_error": -1}, ("hilore.max_gradient_error = -1", "greater than or equal to 0")),
    ({"max_gradient_error": "0.01"}, ("hilore.max_gradient_error = '0.01'", "number")),
    ({"units": "LlamaDecoderLayer"}, ("hilore.units = 'LlamaDecoderLayer'", '["LlamaDecoderLayer"]')),
    ({"units": []}, ("hilore.units = []", '"auto"')),
    ({"units": ["A", ""]}, ("hilore.units = ['A', '']", "not empty")),
    ({"units": ["A", "A"]}, ("hilore.units = ['A', 'A']", "twice")),
    ({"mode": "fast"}, ("hilore.mode = 'fast'", "update_aware", "exact")),
    ({"mode": "paper", "codecs": ["int8"]}, ("hilore.codecs = ['int8']", "fp8_e4m3:unscaled", "leave the key out")),
    ({"paper": {"least_tensor_bytes": -1}}, ("hilore.paper.least_tensor_bytes = -1", "greater than or equal to 0")),
    ({"paper": {"dtypes": ["int8"]}}, ("hilore.paper.dtypes", "bfloat16")),
    ({"paper": {"dtypes": []}}, ("hilore.paper.dtypes = []", "at least one")),
    ({"codecs": ["int8", "int8"]}, ("hilore.codecs = ['int8', 'int8']", "twice")),
    ({"codecs": "int8"}, ("hilore.codecs = 'int8'", "list")),
    ({"planner": "highs"}, ("hilore.planner = 'highs'", "time_limit_s")),
    ({"planner": {"solver": "gurobi"}}, ("hilore.planner.solver = 'gurobi'", '"highs", "cbc", "greedy"')),
    ({"planner": {"solver": "brute_force"}}, ("hilore.planner.solver = 'brute_force'", "greedy")),
    ({"planner": {"time_limit": 3}}, ("hilore.planner.time_limit", 'did you mean "time_limit_s"')),
    ({"planner": {"time_limit_s": 0}}, ("hilore.planner.time_limit_s = 0", "greater than 0")),
    ({"planner": {"time_limit_s": "10"}}, ("hilore.planner.time_limit_s = '10'", "number")),
    ({"planner": {"time_limit_s": True}}, ("hilore.planner.time_limit_s = True", "number")),
    ({"planner": {"relative_gap": 1}}, ("hilore.planner.relative_gap = 1", "less than 1")),
    ({"planner": {"relative_gap": float("nan")}}, ("hilore.planner.relative_gap = nan", "finite")),
    ({"prune_zero_exposure": 1}, ("hilore.prune_zero_exposure = 1", "boolean")),
    ({"profile": {"path": " "}}, ("hilore.profile.path = ' '", '"auto"', "null")),
    ({"profile": {"path": "a\0b"}}, ("hilore.profile.path = 'a\\x00b'", "folder")),
    ({"profile": {"path": 7}}, ("hilore.profile.path = 7", "string")),
    ({"profile": {"audit_interval": -1}}, ("hilore.profile.audit_interval = -1", "greater than or equal to 0")),
    ({"profile": {"calibration_microbatches": 65}}, ("hilore.profile.calibration_microbatches = 65", "64")),
    ({"selfcheck": {"updates": -1}}, ("hilore.selfcheck.updates = -1", "greater than or equal to 0")),
    ({"report": {"path": ""}}, ("hilore.report.path = ''", "folder", "null")),
    ({"report": {"path": "a\0b"}}, ("hilore.report.path = 'a\\x00b'", "folder")),
    ({"report": {"path": ["runs"]}}, ("hilore.report.path = ['runs']", "string")),
]


@pytest.mark.parametrize(("block", "words"), WRONG, ids=[str(block) for block, _ in WRONG])
def test_a_wrong_block_is_refused_with_key_value_and_what_is_allowed(block: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(block)
    for word in words:
        assert word in str(caught.value)
    assert str(caught.value).count("\n") == 0, "one fault, one line"


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"mode": "fast", "planner": {"solver": "gurobi", "relative_gap": 2}, "typo": 1})
    lines = str(caught.value).splitlines()
    assert [line.split()[0].rstrip(":") for line in lines] == [
        "hilore.mode",
        "hilore.planner.solver",
        "hilore.planner.relative_gap",
        "hilore.typo",
    ]


def test_objects_made_in_code_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"hilore\.mode = 'fast'"):
        HiLoReConfig(mode="fast")
    with pytest.raises(ConfigError, match=r"hilore\.planner\.time_limit_s = -1"):
        PlannerConfig(time_limit_s=-1)


@pytest.mark.parametrize("key", ["HiLoRe", "hi_lore", "hilores", "hilor"])
def test_a_misspelt_block_is_not_passed_over(key: str) -> None:
    with pytest.raises(ConfigError, match=f'"{key}".*did you mean "hilore"'):
        HiLoReConfig.from_ds_json({key: {}})


@pytest.mark.parametrize("key", ["zero_optimization", "comment", "hilbert_curve_order", "wall_clock_breakdown"])
def test_other_keys_are_not_taken_for_the_block(key: str) -> None:
    assert HiLoReConfig.from_ds_json({key: {}}) is None


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_shipped_configs_are_accepted(path: Path) -> None:
    ds = json.loads(path.read_text(encoding="utf-8"))
    config = HiLoReConfig.from_ds_json(ds)
    assert config is not None
    assert check_against_ds_json(config, ds) == []
    assert '"auto"' not in json.dumps(ds["hilore"]), 'accelerate refuses an "auto" it does not know'


def test_there_are_shipped_configs() -> None:
    assert {"zero0_exact", "zero1_exact", "zero2_exact", "zero3_exact", "zero3_offload", "zero2_bf16"} <= {
        path.stem for path in CONFIGS
    }


def test_the_demo_gives_its_two_ranks_different_budgets() -> None:
    ds = json.loads(next(path for path in CONFIGS if path.stem == "zero2_exact").read_text(encoding="utf-8"))
    budgets = parse(ds["hilore"]).memory_budget
    assert budgets.for_rank(0, 2) != budgets.for_rank(1, 2)
