"""Methods of hosts' classes: led while someone needs it, given back, refused where upstream has changed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from ds_hilore.core.errors import UnsupportedError
from ds_hilore.integration.method_patch import MethodPatch, applied


class Host:
    def run(self, model: str, inputs: str) -> str:
        return f"{model} {inputs}"

    def stop(self) -> str:
        return "stopped"


def louder(original: Any, host: Host, *args: Any, **kwargs: Any) -> str:
    return str(original(host, *args, **kwargs)).upper()


def patch() -> MethodPatch:
    return MethodPatch(Host, "run", ("self", "model", "inputs"), louder, "torch")


def test_last_user_puts_the_original_back() -> None:
    before = Host.__dict__["run"]
    with applied([patch()]):
        with applied([patch()]):
            assert Host().run("a", inputs="b") == "A B"
        assert Host().run("a", "b") == "A B"
        assert Host.run.__name__ == "run"
    assert Host.__dict__["run"] is before
    patch().undo()
    assert Host.__dict__["run"] is before


def test_functions_of_a_module_too() -> None:
    home = ModuleType("home")
    home.say = lambda words: words  # type: ignore[attr-defined]
    before = home.say
    with applied([MethodPatch(home, "say", ("words",), lambda original, words: original(words).upper(), "torch")]):
        assert home.say("a") == "A"
    assert home.say is before
    with pytest.raises(UnsupportedError, match=r"home\.say .*remove the hilore block"):
        MethodPatch(home, "say", ("text",), louder, "torch").apply()


@pytest.mark.parametrize(("leads", "name"), [(("self", "model", "batch"), "run"), (("self",), "walk")])
def test_other_signatures_are_refused_and_nothing_stays(leads: tuple[str, ...], name: str) -> None:
    before = dict(Host.__dict__)
    known = MethodPatch(Host, "stop", ("self",), louder, "torch")
    changed = MethodPatch(Host, name, leads, louder, "torch")
    message = rf"Host\.{name} .*torch \d.*remove the hilore block"
    with pytest.raises(UnsupportedError, match=message), applied([known, changed]):
        pass
    assert dict(Host.__dict__) == before
