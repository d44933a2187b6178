"""Codecs by name, and which twin works."""

from __future__ import annotations

import importlib
import inspect
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_hilore.codecs.base import Implementation
from ds_hilore.codecs.bf16.codec import Bf16
from ds_hilore.codecs.fp8_e4m3.codec import Fp8E4M3, UnscaledFp8E4M3
from ds_hilore.codecs.int8.codec import Int8
from ds_hilore.codecs.registry import codec_named, codec_names
from ds_hilore.core import deps
from ds_hilore.core.errors import DependencyMissing, UsageError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "kind", "group"),
    [("int8", Int8, 32), ("int8:64", Int8, 64), ("int8:token", Int8, None), ("fp8_e4m3", Fp8E4M3, 32)],
)
def test_names(name: str, kind: type, group: int | None) -> None:
    codec = codec_named(name)
    assert (type(codec), codec.name, codec.group) == (kind, name, group)


def test_codecs_without_groups() -> None:
    assert isinstance(codec_named("bf16"), Bf16)
    assert isinstance(codec_named("fp8_e4m3:unscaled"), UnscaledFp8E4M3)


@pytest.mark.parametrize("name", ["int9", "", "int8:33", "INT8", "bf16:32"])
def test_unknown_names_list_the_known(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        codec_named(name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in codec_names())


def test_triton_by_name_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deps, "has", lambda module: module != "triton")
    with pytest.raises(DependencyMissing, match=r"ds_hilore\[triton\]"):
        codec_named("int8", Implementation.TRITON)


@pytest.mark.parametrize("name", codec_names())
@pytest.mark.parametrize(
    ("device", "wanted", "installed", "expected"),
    [
        ("cpu", Implementation.AUTO, True, "reference"),
        ("cuda", Implementation.AUTO, True, "kernel"),
        ("cuda", Implementation.AUTO, False, "reference"),
        ("cuda", Implementation.TORCH, True, "reference"),
        ("cpu", Implementation.TRITON, True, "kernel"),
    ],
)
def test_choice_of_twin(
    name: str, device: str, wanted: Implementation, installed: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Rows:
        """What the choice looks at, on a device that need not be there."""

        def __init__(self, rows: int, length: int) -> None:
            self.device, self.shape = torch.device(device), (rows, length)

        def numel(self) -> int:
            return self.shape[0] * self.shape[1]

    monkeypatch.setattr(deps, "has", lambda module: installed)
    codec = codec_named(name, wanted)
    monkeypatch.setattr(codec, "_kernel", lambda: "kernel")
    monkeypatch.setattr(codec, "_reference", lambda: "reference")
    assert codec._twin(Rows(4, 64)) == expected
    assert codec._twin(Rows(4, 0)) == "reference"
    too_wide = name.endswith(":token") and wanted is Implementation.AUTO
    assert codec._twin(Rows(4, 20000)) == ("reference" if too_wide else expected)


def test_falling_back_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Rows:
        device, shape = torch.device("cuda"), (4, 63)

        def numel(self) -> int:
            return 252

    monkeypatch.setattr(deps, "has", lambda module: False)
    codec = Int8("int8:said once", 32)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            codec._twin(Rows())  # type: ignore[arg-type]
    assert [record.message for record in caplog.records] == [
        "codec int8:said once: torch in place of a kernel, as triton is not installed"
    ]


@pytest.mark.parametrize("folder", ["bf16", "int8", "fp8_e4m3"])
def test_twins_have_the_same_signatures(folder: str) -> None:
    pytest.importorskip("triton")
    reference, kernel = (
        importlib.import_module(f"ds_hilore.codecs.{folder}.{part}") for part in ("reference", "kernel")
    )
    for function in ("encode", "decode"):
        assert inspect.signature(getattr(reference, function)) == inspect.signature(getattr(kernel, function))


def test_triton_is_not_needed_on_the_cpu() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from ds_hilore.codecs.registry import codec_named, codec_names\n"
        "for name in codec_names():\n"
        "    codec = codec_named(name); codec.decode(codec.encode(torch.ones(3, 64)))\n"
        "print(len(codec_names()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(len(codec_names())), done.stderr
