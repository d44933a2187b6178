"""What `hilore doctor --script` sees in a training script. The script is parsed, never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ds_hilore.cli.findings import Finding, Severity
from ds_hilore.core import deps
from ds_hilore.core.budget import BudgetKind, MemoryBudget
from ds_hilore.core.config import HiLoReConfig
from ds_hilore.core.errors import UsageError
from ds_hilore.core.host_rules import zero_stage

_HONOURED = ("ds_hilore.install", "ds_hilore.initialize")
_INITIALIZE = "deepspeed.initialize"
#: Calls that shard or replicate the model in DeepSpeed's place.
_OTHER_BACKENDS = ("FullyShardedDataParallel", "fully_shard", "DistributedDataParallel")
_START = "start it with `deepspeed --module ds_hilore {name}`, or call ds_hilore.install() as its first line"


@dataclass(frozen=True)
class Call:
    """A call of the script. `name`: dotted, as imports spell it out; `scope`: the function that it stands in, or ""."""

    name: str
    node: ast.Call
    scope: str

    @property
    def line(self) -> int:
        return self.node.lineno

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    def keyword(self, name: str) -> Any:
        """The constant that a keyword has; None where there is none, or it is computed."""
        for keyword in self.node.keywords:
            if keyword.arg == name and isinstance(keyword.value, ast.Constant):
                return keyword.value.value
        return None


class Script:
    """A parsed script.

    Raises:
        UsageError: it cannot be read, or is no Python.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise UsageError(f"--script {path}: {error.strerror}; name the file that is started") from None
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"--script {path} is no Python that this interpreter reads: {error}") from None

    @cached_property
    def imports(self) -> dict[str, tuple[str, int]]:
        """What a name in the script stands for, and the line that says so."""
        found: dict[str, tuple[str, int]] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name if alias.asname else alias.name.partition(".")[0]
                    found[alias.asname or root] = root, node.lineno
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}", node.lineno
        return found

    @cached_property
    def calls(self) -> list[Call]:
        """In order of lines."""
        return sorted(self._calls(self._tree, ""), key=lambda call: call.line)

    def _calls(self, node: ast.AST, scope: str) -> Iterator[Call]:
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else scope
            if isinstance(child, ast.Call):
                yield Call(self._name(child.func), child, scope)
            yield from self._calls(child, inner)

    def _name(self, node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self._name(node.value)}.{node.attr}"
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, (node.id, 0))[0]
        return ""

    @cached_property
    def models(self) -> set[str]:
        """Names of the script for models and engines: what goes into an engine or a trainer, and what comes out."""
        found: set[str] = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                name = self._name(node.value.func)
                if name.endswith(".from_pretrained") or name in (_INITIALIZE, _HONOURED[1]):
                    target = node.targets[0]
                    first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
                    found |= {first.id} if isinstance(first, ast.Name) else set()
        for call in self.makers:
            given = [*call.node.args[:1], *(each.value for each in call.node.keywords if each.arg == "model")]
            found |= {each.id for each in given if isinstance(each, ast.Name)}
        return found

    @cached_property
    def makers(self) -> list[Call]:
        """Calls that make an engine, or a trainer that makes one."""
        return [call for call in self.calls if call.name == _INITIALIZE or call.last.endswith("Trainer")]

    @cached_property
    def guarded(self) -> set[int]:
        """Lines of `try` and `if` blocks, whose imports may fail or never run."""
        blocks = (node for node in ast.walk(self._tree) if isinstance(node, ast.Try | ast.If))
        return {line for block in blocks for line in range(block.lineno, (block.end_lineno or block.lineno) + 1)}

    def named(self, *names: str) -> list[Call]:
        return [call for call in self.calls if call.name in names]


def check_script(path: Path, ds: Mapping[str, Any], config: HiLoReConfig | None, json_name: str = "") -> list[Finding]:
    """Faults of a script that is to run with this JSON.

    Args:
        config: the block; None where it is not there or cannot be read.
        json_name: of the JSON's file; "" where it is not known.

    Raises:
        UsageError: it cannot be read.
    """
    script = Script(path)
    found = [*_honours(script, ds), *_early_import(script), *_late_install(script)]
    found += [*_backends(script), *_checkpointing(script), *_compiled(script), *_no_sync(script, ds)]
    found += [*_sampler(script, config), *_other_json(script, json_name), *_missing(script)]
    return found


def _at(script: Script, line: int) -> str:
    return f"{script.path}:{line}"


def _honours(script: Script, ds: Mapping[str, Any]) -> Iterator[Finding]:
    if script.named(*_HONOURED):
        return
    begun = any(name.partition(".")[0] == "ds_hilore" for name, _ in script.imports.values())
    what = "nothing in this script makes DeepSpeed honour the block"
    if zero_stage(ds) == 3:
        what += ", and under ZeRO-3 an engine made so cannot be given plans later: its units are no leaf modules"
    severity = Severity.WRONG if begun else Severity.NOTE  # it may be started through our module
    yield Finding(what, str(script.path), _START.format(name=script.path.name), severity)


def _early_import(script: Script) -> Iterator[Finding]:
    installs = script.named("ds_hilore.install")
    for name, line in script.imports.values():
        if name == _INITIALIZE and installs and line < installs[0].line:
            what = "`from deepspeed import initialize` binds DeepSpeed's own function before ds_hilore.install()"
            yield Finding(what, _at(script, line), "move ds_hilore.install() above it, or call deepspeed.initialize")


def _late_install(script: Script) -> Iterator[Finding]:
    for install in script.named("ds_hilore.install")[:1]:
        before = [made for made in script.makers if made.line < install.line and made.scope == install.scope]
        if before:
            what = f"ds_hilore.install() comes after {before[0].name} in line {before[0].line}"
            yield Finding(what, _at(script, install.line), "call it before the engine or trainer is made")


def _backends(script: Script) -> Iterator[Finding]:
    remedy = 'train with DeepSpeed: TrainingArguments(deepspeed="ds.json"), or ds_hilore.initialize'
    for call in script.calls:
        if call.last in _OTHER_BACKENDS:
            yield Finding(
                f"{call.last} takes DeepSpeed's place: nobody reads the block", _at(script, call.line), remedy
            )
        elif call.keyword("fsdp"):
            what = f"fsdp={call.keyword('fsdp')!r}: FSDP takes DeepSpeed's place, and nobody reads the block"
            yield Finding(what, _at(script, call.line), remedy)


def _checkpointing(script: Script) -> Iterator[Finding]:
    for call in script.calls:
        off = "gradient_checkpointing_disable()" if call.last == "gradient_checkpointing_disable" else ""
        off = "gradient_checkpointing=False" if call.keyword("gradient_checkpointing") is False else off
        if off:
            what = f"{off} is without effect: every decoder layer is a unit, and the plan says which are stored"
            remedy = 'leave it out; "memory_budget": 1.0 stores as much as the device holds'
            yield Finding(what, _at(script, call.line), remedy, Severity.NOTE)
    loaded = [call for call in script.calls if call.last == "from_pretrained" and "Model" in call.name]
    own_loop = script.named(_INITIALIZE, _HONOURED[1]) and any(call.last == "backward" for call in script.calls)
    if loaded and own_loop and not any(call.last == "train" for call in script.calls):
        what = "checkpointing is off: from_pretrained leaves the model in eval mode, in which no layer is a unit"
        yield Finding(what, _at(script, loaded[0].line), "call engine.train() before the first update")


def _compiled(script: Script) -> Iterator[Finding]:
    for call in script.calls:
        first = call.node.args[0] if call.node.args else None
        around = call.name == "torch.compile" and isinstance(first, ast.Name) and first.id in script.models
        by_method = call.last == "compile" and call.name.rpartition(".")[0] in script.models
        if around or by_method or call.keyword("torch_compile") is True:
            what = "torch.compile around the model is refused: it hides the layers from the saved-tensor hooks"
            yield Finding(what, _at(script, call.line), "compile modules inside a decoder layer instead")


def _no_sync(script: Script, ds: Mapping[str, Any]) -> Iterator[Finding]:
    for call in script.calls:
        if call.last == "no_sync" and zero_stage(ds) >= 2:
            what = f"no_sync is refused under ZeRO-{zero_stage(ds)}"
            yield Finding(what, _at(script, call.line), "set gradient_accumulation_steps instead, or use ZeRO-1")


def _sampler(script: Script, config: HiLoReConfig | None) -> Iterator[Finding]:
    budget = None if config is None else config.memory_budget
    if isinstance(budget, MemoryBudget) and budget.kind is BudgetKind.AUTO:
        return
    for call in script.calls:
        colocated = call.keyword("use_vllm") is True and call.keyword("vllm_mode") in (
            None,
            "colocate",
        )  # TRL's default
        if colocated or call.name in ("vllm.LLM", "sglang.Engine"):
            what = "a colocated sampler holds part of the device, which memory_budget does not know of"
            remedy = 'write "memory_budget": "free", which measures what others leave; or let the sampler sleep'
            yield Finding(what, _at(script, call.line), remedy, Severity.NOTE)


def _other_json(script: Script, json_name: str) -> Iterator[Finding]:
    for call in script.calls:
        for key in ("deepspeed", "deepspeed_config", "config", "config_params"):
            value = call.keyword(key)
            if json_name and isinstance(value, str) and value.endswith(".json") and Path(value).name != json_name:
                if key.startswith("config") and call.name not in (_INITIALIZE, _HONOURED[1]):
                    continue
                what = f"the script reads {value}, and {json_name} is looked at here"
                yield Finding(what, _at(script, call.line), "name the same file", Severity.NOTE)


def _missing(script: Script) -> Iterator[Finding]:
    told = set()
    for name, line in script.imports.values():
        root = name.partition(".")[0]
        beside = script.path.parent / root
        local = beside.exists() or beside.with_suffix(".py").exists()
        if root in told or local or line in script.guarded or deps.has(root):
            continue
        told.add(root)
        extra = deps.OPTIONAL.get(root, ("",))[0]
        command = f"pip install '{deps.PACKAGE}[{extra}]'" if extra else f"pip install {root}"
        yield Finding(f"{root} is not installed", _at(script, line), command)
