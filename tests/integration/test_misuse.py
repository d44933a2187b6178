"""Wrong configs and misuses, each with a typed error that names the fault; on a real engine of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest
import torch

import ds_hilore
from ds_hilore.core.errors import HiLoReError
from tests.integration.misuses import CASES, small_engine
from tests.models import batch, llama, lora, plain_loss
from tests.ranks import RankPool

HERE = "tests.integration.test_misuse"
BY_NAME = {case.__name__: case for case in CASES}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    with RankPool(world=1) as pool:
        yield pool


def provoke(names: list[str]) -> dict[str, tuple[str, str]]:
    """Class and message of each error; whatever is none of ours is shown as it is."""
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        torch.manual_seed(0)
        linear = torch.nn.functional.linear
        try:
            BY_NAME[name]()
            found[name] = ("nothing was raised", "")
        except HiLoReError as error:
            found[name] = (type(error).__name__, str(error))
        except Exception as error:
            found[name] = (f"not ours: {type(error).__name__}", str(error)[:2000])
        finally:
            torch.nn.functional.linear = linear  # ZeRO-3 replaces it for good
    return found


@pytest.fixture(scope="module")
def outcomes(one_rank: RankPool) -> dict[str, tuple[str, str]]:
    """One call for all of them: a rank's start costs more than any case."""
    found: dict[str, tuple[str, str]] = one_rank.run(f"{HERE}:provoke", names=list(BY_NAME))[0]
    return found


@pytest.mark.parametrize("name", BY_NAME)
def test_a_misuse_is_refused_by_name(outcomes: dict[str, tuple[str, str]], name: str) -> None:
    error, words = CASES[BY_NAME[name]]
    assert outcomes[name][0] == error, outcomes[name]
    for word in words:
        assert word in outcomes[name][1]


def seen_by_torch() -> tuple[str, str]:
    """Messages of a second backward over one forward, and of one after weights were loaded."""
    made = small_engine(1)
    loss = plain_loss(made, *batch(1))
    made.backward(loss)
    told = []
    try:
        loss.backward()
    except RuntimeError as error:
        told.append(str(error))
    made = small_engine(1)
    with TemporaryDirectory() as folder:
        made.save_checkpoint(folder, tag="one")
        loss = plain_loss(made, *batch(1))
        made.load_checkpoint(folder, tag="one")
    try:
        made.backward(loss)
    except RuntimeError as error:
        told.append(str(error))
    return told[0], told[1]


def test_what_torch_sees_first_is_torchs_own_error(one_rank: RankPool) -> None:
    """Autograd let go of the graph, or meets the changed head before any unit, and says so first."""
    ((second, loaded),) = one_rank.run(f"{HERE}:seen_by_torch")
    assert "second time" in second
    assert "modified by an inplace operation" in loaded


def after_a_refusal() -> list[bool]:
    """What was refused left nothing behind: the engine goes on, `no_sync` works where DeepSpeed has it."""
    made = small_engine(1, model=lora(llama(layers=2)))
    for refused in (made.compile, lambda: made.hilore.force("R")):
        try:
            refused()
        except HiLoReError:
            continue
        return [False]
    with made.no_sync():
        made.backward(plain_loss(made, *batch(1)))
    made.backward(plain_loss(made, *batch(1)))
    made.step()
    own = "compile" in made.__dict__
    ds_hilore.detach(made)
    return [own, "compile" not in made.__dict__, "no_sync" not in made.__dict__, not made.is_compiled]


def test_refusals_leave_the_engine_as_it_was(one_rank: RankPool) -> None:
    assert one_rank.run(f"{HERE}:after_a_refusal") == [[True] * 4]
