"""Leading a method of a host's class, or a function of its module, through one of ours, and back."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ds_hilore.core.deps import installed_version
from ds_hilore.core.errors import UnsupportedError

_ORIGINAL = "_hilore_original"


@dataclass(frozen=True)
class MethodPatch:
    """One method of a class, or function of a module, that others own. Users are counted: the last one to leave puts
    the original back.

    Args:
        owner: the class, which defines the method itself, or the module.
        name: of the method or function.
        leads: names of its first parameters as we know them, `self` included.
        around: called as `around(original, self, *args, **kwargs)` in place of the method.
        package: distribution the class comes from, named where its signature is another.
    """

    owner: type | ModuleType
    name: str
    leads: Sequence[str]
    around: Callable[..., Any]
    package: str

    def apply(self) -> None:
        """Patches, or counts one more user of the patch.

        Raises:
            UnsupportedError: the method is not there, or its first parameters are not those we know.
        """
        current = self.owner.__dict__.get(self.name)
        if hasattr(current, _ORIGINAL):
            current._hilore_users += 1  # type: ignore[union-attr]
            return
        self._check(current)
        assert current is not None
        around = self.around

        @functools.wraps(current)
        def led(*args: Any, **kwargs: Any) -> Any:
            return around(current, *args, **kwargs)

        setattr(led, _ORIGINAL, current)
        led._hilore_users = 1  # type: ignore[attr-defined]
        setattr(self.owner, self.name, led)

    def undo(self) -> None:
        """Counts one user less."""
        current = self.owner.__dict__.get(self.name)
        original = getattr(current, _ORIGINAL, None)
        if original is None:
            return
        current._hilore_users -= 1  # type: ignore[union-attr]
        if current._hilore_users == 0:  # type: ignore[union-attr]
            setattr(self.owner, self.name, original)

    def _check(self, current: Any) -> None:
        owner = self.owner
        home = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
        where = f"{home}.{self.name}"
        version = f"{self.package} {installed_version(self.package)}"
        if not callable(current):
            raise UnsupportedError(f"{where} is not there in {version}: {_WAY_OUT.format(package=self.package)}")
        found = list(inspect.signature(current).parameters)
        if found[: len(self.leads)] != list(self.leads):
            raise UnsupportedError(
                f"{where} of {version} takes ({', '.join(found)}), ds_hilore knows ({', '.join(self.leads)}, ...): "
                f"{_WAY_OUT.format(package=self.package)}"
            )


_WAY_OUT = "install a version of {package} that ds_hilore knows (setup.py), or remove the hilore block"


@contextmanager
def applied(patches: Sequence[MethodPatch]) -> Iterator[None]:
    """All of the patches inside, or none."""
    done: list[MethodPatch] = []
    try:
        for patch in patches:
            patch.apply()
            done.append(patch)
        yield
    finally:
        for patch in reversed(done):
            patch.undo()
