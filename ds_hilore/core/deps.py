"""What is installed, and whether it is new enough. The one file that knows; nothing is checked at import."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version

from ds_hilore.core.errors import DependencyMissing

PACKAGE = "ds_hilore"


@dataclass(frozen=True)
class Floor:
    """Oldest supported version of a package (None: any), and why older ones are refused."""

    package: str
    version: str | None = None
    why: str = ""

    @property
    def requirement(self) -> str:
        return f"{self.package}>={self.version}" if self.version else self.package


PYTHON_FLOOR = "3.10"

#: What must be there. setup.py's install_requires says the same (a test compares them).
REQUIRED: tuple[Floor, ...] = (
    Floor("torch", "2.9", "older ones are not tested, and recipes read saved tensors in their raw form"),
    Floor("deepspeed", "0.18.3", "0.17.6 to 0.18.2 compute wrong ZeRO-2 gradients"),
    Floor("transformers", "5.23", "older ones checkpoint a layer's __call__, so module hooks fire again in the replay"),
    Floor("peft", "0.19", "older ones are not tested with transformers 5"),
    Floor("pulp"),
    Floor("highspy"),
    Floor("pydantic", "2", "the configuration block is a pydantic 2 model"),
    Floor("rich"),
    Floor("numpy"),
    Floor("packaging"),
)

#: Module name -> (extra of ours that brings it, what it is for).
OPTIONAL = {
    "triton": ("triton", "GPU kernels of the codecs and of the loss"),
    "mpi4py": ("mpi", "start by mpirun"),
    "trl": ("trl", "TRL's GRPO trainer"),
    "megatron": ("megatron", "Megatron-Core models"),
    "gguf": ("demo", "the demo's model"),
    "reasoning_gym": ("demo", "the demo's tasks"),
    "matplotlib": ("report", "pictures of `hilore report`"),
}


@functools.cache
def installed_version(package: str) -> str | None:
    """Version of an installed distribution, None if there is none of that name."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def has(module: str) -> bool:
    """Whether `module` (a top-level name) can be imported. Does not import it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # blocked, or a module without a spec
        return False


def require(module: str, extra: str | None = None) -> None:
    """Checks that `module` is there before it is imported.

    Args:
        module: top-level module name.
        extra: extra of this package that brings it; by default the one of `OPTIONAL`.

    Raises:
        DependencyMissing: names the module and the pip command.
    """
    if has(module):
        return
    known_extra, purpose = OPTIONAL.get(module, (None, ""))
    extra = extra or known_extra
    target = f"'{PACKAGE}[{extra}]'" if extra else module
    needed_for = f" (needed for {purpose})" if purpose else ""
    raise DependencyMissing(f"{module} is not installed{needed_for}: pip install {target}")


def is_at_least(version: str, floor: str) -> bool:
    """Compares release numbers only: vendors' builds such as 2.9.0a0+nv25.10 count as 2.9.0."""
    return Version(version).release >= Version(floor).release


def problem_with(floor: Floor) -> str | None:
    """One line on what is wrong with the installed version, with the pip command. None if nothing is."""
    version = installed_version(floor.package)
    command = f"pip install -U '{floor.requirement}'"
    if version is None:
        return f"{floor.package} is not installed: {command}"
    if floor.version is not None and not is_at_least(version, floor.version):
        return f"{floor.package} {version} is older than {floor.version} ({floor.why}): {command}"
    return None


def problem_with_python() -> str | None:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if is_at_least(version, PYTHON_FLOOR):
        return None
    return f"Python {version} is older than {PYTHON_FLOOR}: use a newer interpreter"


def check_versions(floors: Iterable[Floor] = REQUIRED) -> None:
    """Refuses what is missing or older than what this package is proven on. Called at start, never at import.

    Raises:
        DependencyMissing: one line per package: version found, oldest supported, why, pip command.
    """
    problems = [problem_with_python(), *(problem_with(floor) for floor in floors)]
    found = [problem for problem in problems if problem is not None]
    if found:
        raise DependencyMissing("ds_hilore cannot run here:\n" + "\n".join(f"  {line}" for line in found))
