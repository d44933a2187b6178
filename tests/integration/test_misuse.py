"""Wrong configs and misuses, each with a typed error that names the fault; on a real engine of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest
import torch

import ds_hilore
from ds_hilore.core.errors import HiLoReError
from tests.engines import config
from tests.integration.misuses import CASES, small_engine
from tests.integration.updates import hilore_engine
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


def in_eval_mode() -> dict[str, int]:
    """How often forwards with gradients warn that no unit runs, and the units that ran, by mode and kind of units."""
    import logging

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("ds_hilore")
    log.addHandler(handler)
    found = {}
    for name, block, training in (("eval", {}, False), ("train", {}, True), ("named", {"units": ["LlamaMLP"]}, False)):
        made = hilore_engine(llama(layers=2), config(0), **block)
        made.train(training)
        for seed in range(2):
            made.backward(plain_loss(made, *batch(seed)))
        found[name] = sum("engine.train()" in line for line in lines)
        found[f"{name} units"] = len(made.hilore.microbatch.treated)
        lines.clear()
    log.removeHandler(handler)
    return found


def test_a_model_in_eval_mode_is_named_once(one_rank: RankPool) -> None:
    """`from_pretrained` leaves it so, and transformers does not checkpoint then: no plan has an effect."""
    (found,) = one_rank.run(f"{HERE}:in_eval_mode")
    assert (found["eval"], found["train"], found["named"]) == (1, 0, 0)
    assert (found["eval units"], found["train units"], found["named units"]) == (0, 2, 2)
