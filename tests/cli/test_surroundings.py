"""`hilore doctor` on packages, the accelerator, the device and stored profiles."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ds_hilore.cli import surroundings
from ds_hilore.cli.findings import Severity
from ds_hilore.cli.main import main
from ds_hilore.cli.surroundings import (
    MAIN_MEMORY,
    Held,
    check_backend,
    check_device,
    check_packages,
    check_profiles,
    device_now,
)
from ds_hilore.core import deps
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.types import Shape, UnitId
from ds_hilore.profiling.layout import Fingerprint
from ds_hilore.profiling.measure import Measurements, UnitFootprint
from ds_hilore.profiling.store import ProfileStore

GB = 10**9


@pytest.mark.parametrize(
    ("package", "version", "what"), [("peft", None, "peft is not installed"), ("deepspeed", "0.18.2", "is older")]
)
def test_missing_and_old_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], package: str, version: str | None, what: str
) -> None:
    assert check_packages() == []
    real = deps.installed_version
    monkeypatch.setattr(deps, "installed_version", lambda name: version if name == package else real(name))
    (finding,) = check_packages()
    assert what in finding.what and finding.where == package and finding.remedy.startswith("pip install -U")
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert found[0]["where"] == package
    assert ("nothing else is looked at" in found[-1]["what"]) == (version is None)


@pytest.mark.parametrize(
    ("environment", "has_cuda", "where", "severity"),
    [
        ({"DS_ACCELERATOR": "cuda"}, False, "DS_ACCELERATOR", Severity.WRONG),
        ({"DS_ACCELERATOR": "cpu"}, True, "DS_ACCELERATOR", Severity.NOTE),
        ({"ACCELERATE_USE_FSDP": "true"}, True, "ACCELERATE_USE_FSDP", Severity.WRONG),
    ],
)
def test_wrong_backends(environment: dict[str, str], has_cuda: bool, where: str, severity: Severity) -> None:
    (finding,) = check_backend(environment, has_cuda)
    assert finding.where == where and finding.severity is severity and finding.remedy.startswith("unset it")


def test_right_backends() -> None:
    assert check_backend({}, has_cuda=True) == check_backend({"DS_ACCELERATOR": "cpu"}, has_cuda=False) == []


@pytest.mark.parametrize(
    ("budget", "others", "severity"),
    [
        ("70GB", 0, None),
        ("70GB", 20, Severity.WRONG),
        (0.9, 20, Severity.WRONG),
        (0.5, 20, Severity.NOTE),
        ("1.1x", 20, Severity.NOTE),
        ("1.1x", 1, None),
        ("free", 20, None),
    ],
)
def test_a_sampler_that_holds_the_device(budget: str | float, others: int, severity: Severity | None) -> None:
    found = check_device(HiLoReConfig(memory_budget=budget), Held("H100", 80 * GB, others * GB))
    assert [finding.severity for finding in found] == ([] if severity is None else [severity])
    for finding in found:
        assert "20.00 GB" in finding.what and str(60 * GB) in finding.remedy and '"free"' in finding.remedy


def test_main_memory_is_shared_with_everything() -> None:
    assert check_device(HiLoReConfig(memory_budget="1.1x"), Held(MAIN_MEMORY, 80 * GB, 40 * GB)) == []
    held = device_now()
    assert held is not None and 0 < held.others_bytes < held.total_bytes
    assert (held.name == MAIN_MEMORY) == (not torch.cuda.is_available())


def test_the_command_says_that_the_device_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(surroundings, "device_now", lambda: Held("H100", 80 * GB, 30 * GB))
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"hilore": {"memory_budget": "60GB"}}))
    assert main(["doctor", "--config", str(file)]) == 1
    assert "others hold 30.00 GB" in capsys.readouterr().out


FINGERPRINT = Fingerprint(
    model="m",
    trained="t",
    dtypes="float32",
    attention="sdpa",
    loss_path="any",
    state="exact",
    zero_stage=2,
    world_size=1,
    device="cpu",
    torch=torch.__version__,
    deepspeed=deps.installed_version("deepspeed") or "",
    transformers=deps.installed_version("transformers") or "",
    ds_hilore=deps.installed_version("ds_hilore") or "",
)


def stored(folder: Path, fingerprint: Fingerprint) -> Path:
    measurements = Measurements()
    measurements.note_forward([UnitFootprint(UnitId("layers.0"), "Layer", Shape(1, 8), 64, 512)])
    store = ProfileStore(str(folder), fingerprint)
    assert store.save(measurements) is None and store.path is not None
    return store.path


def test_stale_profiles(tmp_path: Path) -> None:
    config, ds = HiLoReConfig(profile={"path": str(tmp_path)}), {"zero_optimization": {"stage": 2}}
    assert check_profiles(config, ds) == check_profiles(HiLoReConfig(), ds) == []
    stored(tmp_path, FINGERPRINT)
    assert check_profiles(config, ds) == []
    old = stored(tmp_path, replace(FINGERPRINT, model="other", torch="2.9.0", deepspeed="0.18.3"))
    (finding,) = check_profiles(config, ds)
    assert finding.where == str(old) and finding.severity is Severity.NOTE
    assert f"torch 2.9.0 then, {torch.__version__} now, deepspeed 0.18.3 then" in finding.what
    old.write_text("{}")
    (finding,) = check_profiles(config, ds)
    assert "cannot be used" in finding.what and "hilore profile" in finding.remedy
    old.unlink()
    (finding,) = check_profiles(config, {"zero_optimization": {"stage": 3}})
    assert "of ZeRO-2, and the JSON says ZeRO-3" in finding.what
