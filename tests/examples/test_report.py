"""The demo's report: the demo as a user starts it but for its model, `hilore report`, and a browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_hilore.cli.main import main
from ds_hilore.report.reading import read_run
from tests.integration.word_model import save_word_model
from tests.launch import jobs
from tests.ranks import ROOT
from tests.report.browser import chromium, opened

UPDATES = 7


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the logs of its two ranks."""
    folder = tmp_path_factory.mktemp("demo")
    save_word_model(folder / "model")
    env = jobs.environment(PYTHONPATH=str(ROOT))
    command = ["deepspeed", "--num_gpus", "2", "--master_port", env["MASTER_PORT"], "examples/grpo_arithmetic.py"]
    short = ["--updates", str(UPDATES), "--turns", "0", "--max_new_tokens", "8", "--model", f"{folder}/model"]
    where = ["--deepspeed_config", "configs/zero2_exact.json", "--report", f"{folder}/runs"]
    output = jobs.run([*command, *short, *where], env)
    assert f"hilore report {folder}/runs" in output
    return folder / "runs"


def test_its_figures(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(demo), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["world"], found["ranks"], found["updates"], found["error_limit"]) == (2, 2, UPDATES, 0.0)
    assert found["seconds"] > 0 and found["budget_bytes"] > 0
    run = read_run(demo)
    budgets = [log.column("budget_bytes")[-1] for log in run.ranks]
    assert budgets[0] != budgets[1], "ranks have different budgets"
    assert all(log.run.units == "3 LlamaDecoderLayer" for log in run.ranks)


@pytest.mark.skipif(chromium() is None, reason="there is no Chromium here: apt-get install chromium")
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)], ids=["desktop", "phone"])
def test_its_page_in_a_browser(demo: Path, tmp_path: Path, width: int, height: int) -> None:
    assert main(["report", str(demo), "--out", str(tmp_path / "demo.html")]) == 0
    pictures = sorted(path.stem for path in (tmp_path / "demo-pictures").iterdir())
    with opened(tmp_path / "profile") as browser:
        seen = browser.visit(tmp_path / "demo.html", width, height)
    assert seen.complaints == []
    assert seen.requests == [(tmp_path / "demo.html").as_uri()]
    assert seen.content_width == seen.width
    assert len(seen.pictures) == len(pictures) and {"memory", "units", "ranks"} <= set(pictures)
