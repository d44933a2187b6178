"""Kernels compile for devices that are not here, and what the compiler makes of them.

Needs triton, but no GPU: it brings its own assembler. Runs without the interpreter.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'ds_hilore[triton]'")

CODE_POINTER = {"int8": "*i8", "bf16": "*bf16", "fp8_e4m3": "*u8"}
CONSTANTS = {"GROUP": 32, "K": 64, "R": 2}
DENSE = {"stride_column": 1}

#: An argument that is 1 is a constant to triton: everything of a tensor of one value.
ONE_VALUE = {"rows": 1, "length": 1, "groups": 1, "columns": 1, "stride_row": 1, "stride_column": 1}
VALUES_PER_THREAD = 32 * 64 * 2 // 256  # a tile over 8 warps of 32


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton

    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set: kernels are interpreted, not compiled")


def instructions(
    folder: str, name: str, element: str, scaled: bool, capability: int = 90, known: Mapping[str, int] = DENSE
) -> Counter[str]:
    """PTX instructions by name, of a kernel for rows of a multiple of 16 values; `known`: arguments that are 1."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel: Any = getattr(importlib.import_module(f"ds_hilore.codecs.{folder}.kernel"), name)
    constants: dict[str, Any] = {**CONSTANTS, **known}
    pointers = {"values_ptr": element, "out_ptr": element, "codes_ptr": CODE_POINTER[folder], "partials_ptr": "*fp64"}
    pointers["scales_ptr"] = "*bf16" if scaled else "*fp32"
    if folder == "fp8_e4m3":
        constants["SCALED"] = scaled
        if not scaled and name == "_encode":
            constants["scales_ptr"] = None
    pointers |= {"limit": "fp32"}
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    aligned = [name for name in signature if name in pointers or name in ("rows", "length", "stride_row")]
    place = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        signature,
        {place[name]: value for name, value in constants.items()},
        {place[name]: [["tt.divisibility", 16]] for name in aligned if name not in (*constants, "limit")},
    )
    options = {"num_warps": 8, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Counter(re.findall(r"^\s+(?:@\S+\s+)?([a-z][\w.]*)\s", compiled.asm["ptx"], flags=re.MULTILINE))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("element", ["*fp32", "*bf16", "*fp16"])
@pytest.mark.parametrize(
    ("folder", "scaled"), [("int8", True), ("bf16", False), ("fp8_e4m3", True), ("fp8_e4m3", False)]
)
def test_encode(folder: str, scaled: bool, element: str, capability: int) -> None:
    found = instructions(folder, "_encode", element, scaled, capability)
    assert not [name for name in found if name.startswith(("fma", "mad.f", "mad.rn"))]  # same codes as torch
    assert not [name for name in found if ".ftz" in name]  # subnormal values stay
    assert [name for name in found if name.startswith("div.") and ".f32" in name] == ["div.rn.f32"]
    size = 4 if element == "*fp32" else 2
    loads = {name: count for name, count in found.items() if name.startswith("ld.global")}
    # Read once, 16 bytes at a time.
    assert loads == {"ld.global.v4.b32": VALUES_PER_THREAD * size // 16}


@pytest.mark.parametrize("element", ["*fp32", "*bf16"])
@pytest.mark.parametrize(
    ("folder", "scaled"), [("int8", True), ("bf16", False), ("fp8_e4m3", True), ("fp8_e4m3", False)]
)
def test_decode(folder: str, scaled: bool, element: str) -> None:
    found = instructions(folder, "_decode", element, scaled)
    size = 4 if element == "*fp32" else 2
    stores = {name: count for name, count in found.items() if name.startswith("st.global")}
    assert stores == {"st.global.v4.b32": VALUES_PER_THREAD * size // 16}


@pytest.mark.parametrize("known", [{}, ONE_VALUE], ids=["any strides", "one value"])
@pytest.mark.parametrize("name", ["_encode", "_decode"])
@pytest.mark.parametrize(
    ("folder", "scaled"), [("int8", True), ("bf16", False), ("fp8_e4m3", True), ("fp8_e4m3", False)]
)
def test_other_arguments(folder: str, scaled: bool, name: str, known: Mapping[str, int]) -> None:
    assert instructions(folder, name, "*fp32", scaled, known=known)
