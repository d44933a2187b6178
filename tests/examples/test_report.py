"""The demo's report: the demo on two ranks but for its model, `hilore report`, and a browser."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from pathlib import Path

import pytest

from ds_hilore.cli.main import main
from ds_hilore.report.reading import read_run
from tests.integration.word_model import save_word_model
from tests.ranks import ROOT, run_ranks
from tests.report.browser import chromium, opened

HERE = "tests.examples.test_report"
UPDATES = 7


def run_demo(folder: str) -> str:
    """What rank 0 prints last. The demo leaves the job, so nothing can run in it afterwards."""
    example = importlib.import_module("grpo_arithmetic")
    short = ["--updates", str(UPDATES), "--turns", "0", "--max_new_tokens", "8", "--model", f"{folder}/model"]
    where = ["--deepspeed_config", str(ROOT / "configs/zero2_exact.json"), "--report", f"{folder}/runs"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        example.main([*short, *where])
    return printed.getvalue()[-400:]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the logs of its two ranks."""
    folder = tmp_path_factory.mktemp("demo")
    save_word_model(folder / "model")
    first, _ = run_ranks(f"{HERE}:run_demo", folder=str(folder))
    assert f"hilore report {folder}/runs" in first
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


@pytest.fixture(scope="module")
def page(demo: Path) -> Path:
    assert main(["report", str(demo), "--out", str(demo / "demo.html")]) == 0
    return demo / "demo.html"


@pytest.mark.skipif(chromium() is None, reason="there is no Chromium here: apt-get install chromium")
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)], ids=["desktop", "phone"])
def test_its_page_in_a_browser(page: Path, tmp_path: Path, width: int, height: int) -> None:
    pictures = sorted(path.stem for path in (page.parent / "demo-pictures").iterdir())
    with opened(tmp_path / "profile") as browser:
        seen = browser.visit(page, width, height)
    assert seen.complaints == []
    assert seen.requests == [page.as_uri()]
    assert seen.content_width == seen.width
    assert len(seen.pictures) == len(pictures) and {"memory", "units", "ranks"} <= set(pictures)
