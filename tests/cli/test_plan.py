"""`hilore plan`: what it says, its exit codes, and what it takes to say it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_hilore.cli.main import main
from tests.published import write_config

MOST_BYTES = 2 * 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    write_config("Qwen2.5-3B", found)
    write_config("Qwen3-30B-A3B", found)
    return found


def command(folder: Path, *options: str, model: str = "Qwen2.5-3B", **ds: Any) -> list[str]:
    settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "hilore": {}, **ds}
    (folder / "ds.json").write_text(json.dumps(settings))
    return [
        "plan",
        "--config",
        str(folder / "ds.json"),
        "--model",
        str(folder / model),
        "--tokens",
        "2",
        "2048",
        *options,
    ]


def answer(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_budgets_in_every_form(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budgets = ["1.0x", "2.0x", "20GB", "0.5", "60000000000"]
    assert main(command(folder, "--json", "--device", "A100-80GB", "--budgets", *budgets)) == 0
    found = answer(capsys)
    assert [one["budget"] for one in found["budgets"]] == ["1.0x", "2.0x", "20.00 GB", "0.5", "60.00 GB"]
    limits = [one["budget_bytes"] for one in found["budgets"]]
    assert limits[2:] == [20 * 10**9, 40 * 2**30, 60 * 10**9]
    assert limits[0] == found["all_replayed"]["peak_bytes"] and found["own"]["budget"] == "1.1x"
    for one in (found["own"], *found["budgets"]):
        assert one["fits"] and one["outcome"]["peak_bytes"] <= one["budget_bytes"]
        assert set(one["choice"].values()) <= {"H", "R", "R:attention"} and len(one["choice"]) == 36
    by_bytes = sorted(found["budgets"], key=lambda one: one["budget_bytes"])
    shares = [one["outcome"]["recovered_share"] for one in by_bytes]
    assert shares == sorted(shares) and 0 < shares[0] < shares[-1] <= 1
    assert found["checkpointing"]["seconds"] > found["no_checkpointing"]["seconds"]
    assert any("A100-80GB (named)" in line for line in found["assumptions"])


def test_the_table_says_it_to_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, "--device", "H100")) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("36 Qwen2DecoderLayer", "frozen parameters", "torch checkpointing", "the plan recovers", "TFLOP/s"):
        assert words in printed


def test_one_where_nothing_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, "--json", "--budgets", "40GB", hilore={"memory_budget": "2GB"})) == 1
    own = answer(capsys)["own"]
    assert not own["fits"] and own["missing_bytes"] == own["min_bytes"] - 2 * 10**9 and "outcome" not in own
    assert main(command(folder, hilore={"memory_budget": "2GB"})) == 1
    assert "does not fit" in capsys.readouterr().out


def test_one_where_the_plan_is_larger_than_the_device(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device-gb", "8", "--flops", "50", "--bandwidth", "500"]
    assert main(command(folder, "--json", *options, hilore={"memory_budget": "4x"})) == 1
    own = answer(capsys)["own"]
    assert not own["fits"] and own["outcome"]["peak_bytes"] > 8 * 2**30
    assert main(command(folder, *options, hilore={"memory_budget": "4x"})) == 1
    assert "more than the device has" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "ds", "says"),
    [
        (["--device", "K80"], {}, "known: V100-32GB"),
        (["--budgets", "0.5x"], {}, "--budgets 0.5x"),
        (["--lora-targets", "no_such_layer"], {}, "no_such_layer"),
        (["--world", "0"], {}, "--world 0"),
        (["--flops", "0"], {}, "must be above 0"),
        ([], {"hilore": {"memory_budgt": "1.1x"}}, "did you mean"),
        ([], {"compile": {"deepcompile": True}}, "DeepCompile is refused"),
        (["--model", "/no/such/folder"], {}, "no config.json"),
        (["--config", "/no/such.json"], {}, "name the DeepSpeed JSON"),
    ],
)
def test_two_and_the_reason_for_what_is_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], ds: dict[str, Any], says: str
) -> None:
    assert main(command(folder, *options, **ds)) == 2
    said = capsys.readouterr()
    assert says in said.err and not said.out


def test_others_on_the_device_and_adapted_experts_are_in_the_account(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moe = "Qwen3-30B-A3B"
    assert main(command(folder, "--json", "--device", "B200", "--held-by-others", "10", model=moe)) == 0
    found = answer(capsys)
    (line,) = [line for line in found["account"]["lines"] if line["item"] == "held by others"]
    assert line["backward"] == 10 * 2**30
    assert any("peft merges adapted experts" in sentence for sentence in found["assumptions"])
    assert found["model"]["trainable_parameters"] > 9e8
    options = ["--json", "--device", "B200", "--lora-targets", "q_proj", "v_proj"]
    assert main(command(folder, *options, model=moe)) == 0
    assert not any("merges" in sentence for sentence in answer(capsys)["assumptions"])


def test_a_program_of_less_than_two_gib_that_prints_one_object(folder: Path) -> None:
    """The largest of the published models; nothing but the answer on stdout."""
    code = (
        "import resource, sys; from ds_hilore.cli.main import main; code = main(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr); sys.exit(code)"
    )
    arguments = command(folder, "--json", "--device", "H200", model="Qwen3-30B-A3B")
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["units"] == "48 Qwen3MoeDecoderLayer"
    kibibytes = int(done.stderr.split()[-1])
    assert kibibytes * 1024 < MOST_BYTES
