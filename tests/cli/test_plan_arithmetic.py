"""The arithmetic that docs/memory.md shows step by step: its own sums, and `hilore plan` beside it."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from ds_hilore.cli.main import main
from tests.published import PUBLISHED, write_config

DOCUMENT = Path(__file__).parents[2] / "docs" / "memory.md"
SEGMENTS, LENGTH, RANKS = 4, 4096, 8
BEGIN = re.compile(r"<!-- arithmetic of (\S+):\s*(.*?)\s*-->\n(.*?)<!-- end -->", re.DOTALL)


def arithmetic() -> dict[str, tuple[list[str], list[tuple[str, str]], str]]:
    """By model: options of the command, (expression, GB) of each step, and the sum that is shown."""
    found = {}
    for name, options, table in BEGIN.findall(DOCUMENT.read_text(encoding="utf-8")):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        steps = [(expression.strip("`"), shown) for _, expression, shown in rows if expression]
        (total,) = [shown.strip("*") for _, expression, shown in rows if not expression]
        found[name] = (options.split(), steps, total)
    return found


def value(expression: str) -> float:
    """Numbers, N, and + * / of them."""
    allowed = (ast.Expression, ast.BinOp, ast.Add, ast.Mult, ast.Div, ast.Constant, ast.Name, ast.Load)
    tree = ast.parse(expression, mode="eval")
    assert all(isinstance(node, allowed) for node in ast.walk(tree)), expression
    return float(eval(compile(tree, "docs", "eval"), {"__builtins__": {}, "N": SEGMENTS * LENGTH}))


def test_there_is_one_for_each_model() -> None:
    assert set(arithmetic()) == set(PUBLISHED)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_steps_and_sum_are_what_they_say_and_what_the_plan_says(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step to the last digit shown; the sum within 5 % of the plan's peak of checkpointing (10 % are promised)."""
    options, steps, total = arithmetic()[name]
    assert all(f"{value(expression) / 1e9:.2f}" == shown for expression, shown in steps)
    by_hand = sum(value(expression) for expression, _ in steps)
    assert f"{by_hand / 1e9:.2f}" == total
    ds = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "hilore": {"memory_budget": "1.10x"}}
    (tmp_path / "ds.json").write_text(json.dumps(ds))
    command = ["plan", "--config", str(tmp_path / "ds.json"), "--model", str(write_config(name, tmp_path))]
    command += ["--tokens", str(SEGMENTS), str(LENGTH), "--world", str(RANKS), "--json", "--device", "H200", *options]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checkpointing"]["peak_bytes"] == pytest.approx(by_hand, rel=0.05)
    assert found["own"]["outcome"]["peak_bytes"] <= found["own"]["budget_bytes"]
