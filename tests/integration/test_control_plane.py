"""The control planes between real processes: values, disagreement, late and dead ranks, large payloads.

Every case of two ranks runs on gloo, and on MPI where there is mpirun (tests/mpi.py); what only MPI has is in
test_mpi.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ds_hilore.core.errors import RankMismatch, UsageError
from ds_hilore.core.fabric import ControlPlane, share_of_node, sum_over_ranks
from ds_hilore.integration import messages
from ds_hilore.integration.control_plane import GlooControlPlane, SingleRankPlane, control_plane
from ds_hilore.integration.mpi_plane import MpiControlPlane, MpiUse, mpi_use
from tests.mpi import MpiRankPool, why_no_mpi
from tests.ranks import ROOT, RankPool

HERE = "tests.integration.test_control_plane"


@pytest.fixture(scope="module", params=["gloo", "mpi"])
def job(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Two ranks whose planes are of one kind."""
    if request.param == "mpi" and (missing := why_no_mpi()):
        pytest.skip(missing)
    with RankPool(world=2) if request.param == "gloo" else MpiRankPool(world=2) as pool:
        yield pool


def made(time_limit_s: float) -> GlooControlPlane | MpiControlPlane:
    """The kind of plane that this job is about."""
    if mpi_use(dist.get_rank(), dist.get_world_size()) is MpiUse.POSSIBLE:
        return MpiControlPlane(time_limit_s)
    return GlooControlPlane(time_limit_s)


def refusal(function: Any, *args: Any) -> str:
    with pytest.raises(RankMismatch) as caught:
        function(*args)
    return str(caught.value)


# ------------------------------------------------------------------------------------------ one rank


def test_single_rank_without_a_job() -> None:
    plane: ControlPlane = control_plane()
    assert isinstance(plane, SingleRankPlane)
    assert (plane.rank, plane.world_size) == (0, 1)
    assert plane.exchange("start", {"shape": (2, 3)}) == [{"shape": [2, 3]}]  # as JSON has it, on one rank too
    plane.agree("start", {"units": 30})
    plane.close()


def test_payload_that_is_no_json_is_refused_on_a_single_rank_too() -> None:
    with pytest.raises(UsageError, match="'start' cannot be written as JSON"):
        SingleRankPlane().exchange("start", object())


def test_parts_of_a_node_add_up_to_its_budget() -> None:
    for node, node_bytes in [((0,), 7), ((2, 3, 5), 11), ((0, 1, 2, 3), 64 << 30), ((4, 5), 0)]:
        parts = [share_of_node(node_bytes, node, rank) for rank in node]
        assert sum(parts) == node_bytes and max(parts) - min(parts) <= 1
    assert SingleRankPlane().node_ranks() == (0,)
    assert sum_over_ranks(SingleRankPlane(), "price", [1, 2.5]) == [1.0, 2.5]
    for wrong in [(-1, (0, 1), 0), (10, (0, 1), 2)]:
        with pytest.raises(UsageError, match="no share of"):
            share_of_node(*wrong)


@pytest.mark.parametrize("size", [0, 1, messages.INLINE_BYTES, messages.INLINE_BYTES + 1])
def test_first_message_has_one_size_and_carries_what_fits(size: int) -> None:
    body = b"x" * size
    encoded = messages.Message(7, "units", body).encode()
    received = messages.Received.decode(encoded)
    assert len(encoded) == messages.MESSAGE_BYTES
    assert (received.sequence, received.question, received.body_bytes) == (7, "units", size)
    assert received.inline == (body if size <= messages.INLINE_BYTES else b"")


def test_differences_name_key_values_and_ranks() -> None:
    answers = [{"a": 1, "b": 1.0}, {"a": 2, "b": 1.0}, {"a": 1, "b": 1.0, "c": None}, {"a": 1, "b": float("nan")}]
    assert messages.differences(answers) == [
        "a: 1 on ranks 0, 2, 3; 2 on rank 1",
        "b: 1.0 on ranks 0, 1, 2; NaN on rank 3",
        "c: no such key on ranks 0, 1, 3; null on rank 2",
    ]
    assert messages.differences([{"x": float("nan")}] * 2) == []


def test_long_lists_of_ranks_are_cut() -> None:
    assert messages.ranks_text(range(12)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more"


# ------------------------------------------------------------------------------------------ two ranks, all well


def counted_gathers(plane: GlooControlPlane | MpiControlPlane) -> list[int]:
    """Sizes of the collectives that the plane issues from now on."""
    sizes: list[int] = []
    gather = plane._gather

    def counting(content: bytes, size: int) -> list[bytes]:
        sizes.append(size)
        return gather(content, size)

    plane._gather = counting  # type: ignore[method-assign]
    return sizes


def body_exchange() -> dict[str, Any]:
    plane = made(20)
    rank = plane.rank
    sizes = counted_gathers(plane)
    answers = {
        "small": plane.exchange("small", {"rank": rank, "text": "ü"}),
        "one large": [len(text) for text in plane.exchange("one large", "x" * (3_000_000 if rank else 10))],
        "edge": [len(text) for text in plane.exchange("edge", "y" * (messages.INLINE_BYTES - 2))],
    }
    plane.agree("start", {"units": 30, "budget": [1.5, "36GB"]})
    plane.close()
    return {"answers": answers, "sizes": sizes, "after": refusal(plane.exchange, "late", 1)}


def test_exchange_gives_every_payload_in_rank_order_with_one_collective_where_it_fits(job: RankPool) -> None:
    first, second = job.run(f"{HERE}:body_exchange")
    assert first["answers"] == second["answers"]
    assert first["answers"]["small"] == [{"rank": 0, "text": "ü"}, {"rank": 1, "text": "ü"}]
    assert first["answers"]["one large"] == [10, 3_000_000]
    assert first["answers"]["edge"] == [messages.INLINE_BYTES - 2] * 2
    message = messages.MESSAGE_BYTES
    assert first["sizes"] == [message, message, 3_000_002, message, message]
    assert "closed" in first["after"]


def body_disagree() -> dict[str, Any]:
    plane = made(20)
    said = refusal(plane.agree, "start", {"units": 30 - 2 * plane.rank, "model": "llama"})
    after = plane.exchange("still in step", plane.rank)
    plane.close()
    return {"said": said, "after": after}


def test_disagreement_is_told_on_every_rank_and_leaves_the_plane_usable(job: RankPool) -> None:
    for answer in job.run(f"{HERE}:body_disagree"):
        assert "ranks disagree on start" in answer["said"]
        assert "units: 30 on rank 0; 28 on rank 1" in answer["said"]
        assert "model" not in answer["said"].split("\n")[1]
        assert answer["after"] == [0, 1]


def body_other_questions() -> dict[str, Any]:
    plane = made(20)
    said = refusal(plane.exchange, ("update", "start")[plane.rank], 0)
    again = plane.exchange("update", 0)
    plane.close()
    return {"said": said, "again": again}


def test_ranks_at_different_questions_both_hear_both_names(job: RankPool) -> None:
    for answer in job.run(f"{HERE}:body_other_questions"):
        assert "'update' (exchange 1) on rank 0; 'start' (exchange 1) on rank 1" in answer["said"]
        assert answer["again"] == [0, 0]


def body_restart(question: str) -> dict[str, Any]:
    """The first rank's update starts again while the second asks `question`; then the second's alone, and then both."""
    plane = made(20)
    if plane.rank == 0:
        plane.update_restarts()
        found = {"told": "", "after": plane.exchange("microbatch", 0)}
    else:
        found = {"told": refusal(plane.exchange, question, 5), "after": plane.exchange("microbatch", 1)}
    plane.update_restarts()
    found["both"] = plane.exchange("announced", plane.rank)
    if plane.rank == 1:
        plane.update_restarts()
        found["apart"] = refusal(plane.exchange, "microbatch", 0)
    else:
        found["told"] = refusal(plane.exchange, "announced", 0)
        found["apart"] = refusal(plane.exchange, "announced", 0)
    plane.close()
    return found


@pytest.mark.parametrize("question", ["price", "microbatch"])
def test_an_update_that_starts_again_on_one_rank_is_told_to_the_others(job: RankPool, question: str) -> None:
    """Wherever they are; what the first rank asked is answered once they have come. Two that start again and then ask
    different things are out of step."""
    first, second = job.run(f"{HERE}:body_restart", question=question)
    assert f"no answer to {question!r}: the update starts again on rank 0" in second["told"]
    for found in (first, second):
        assert found["after"] == found["both"] == [0, 1]
        assert "ranks are at different questions" in found["apart"]
    assert "the update starts again on rank 1" in first["told"]


def body_bad_arguments() -> list[str]:
    plane = made(20)
    said = []
    for call in (
        lambda: plane.exchange("set", {1, 2}),
        lambda: plane.exchange("q" * 65, 0),
        lambda: plane.agree("list", [1]),
        lambda: made(0),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        said.append(str(caught.value))
    assert plane.exchange("unharmed", 1) == [1, 1]
    plane.close()
    return said


def test_misuse_is_refused_before_anything_is_sent(job: RankPool) -> None:
    said, _ = job.run(f"{HERE}:body_bad_arguments")
    expected = ("'set'", "longer than 64 bytes", "agree('list')", "time_limit_s = 0")
    for words, message in zip(expected, said, strict=True):
        assert words in message


def body_plane_of_job() -> str:
    plane = control_plane(time_limit_s=20)
    plane.agree("start", {"units": 30})
    plane.close()
    return f"{type(plane).__name__}, own group: {dist.is_initialized()}"


def test_a_job_of_several_ranks_gets_a_plane_of_its_own(job: RankPool) -> None:
    kind = "MpiControlPlane" if isinstance(job, MpiRankPool) else "GlooControlPlane"
    assert job.run(f"{HERE}:body_plane_of_job") == [f"{kind}, own group: True"] * 2


def body_sums() -> dict[str, Any]:
    plane = made(20)
    values = [[0.1, 1e300, 3.0], [0.2, -1e300, 4.0]][plane.rank]
    found = {
        "sums": sum_over_ranks(plane, "price", values),
        "node": plane.node_ranks(),
        "again": plane.node_ranks(),
        "share": share_of_node(101, plane.node_ranks(), plane.rank),
        "lengths": refusal(sum_over_ranks, plane, "price", [1.0] * (plane.rank + 1)),
        "after": plane.exchange("still in step", plane.rank),
    }
    plane.close()
    return found


def test_sums_and_shares_of_the_node(job: RankPool) -> None:
    answers = job.run(f"{HERE}:body_sums")
    for answer in answers:
        assert answer["sums"] == [0.1 + 0.2, 0.0, 7.0]
        assert answer["node"] == answer["again"] == (0, 1)
        assert "'price': ranks gave [1, 2] values" in answer["lengths"]
        assert answer["after"] == [0, 1]
    assert [answer["share"] for answer in answers] == [51, 50]


# ------------------------------------------------------------------------------------------ late and dead ranks


def body_late(late_rank: int, limit_s: float, late_s: float) -> dict[str, Any]:
    plane = made(limit_s)
    plane.exchange("warm", 0)
    if plane.rank == late_rank:
        time.sleep(late_s)
    said = refusal(plane.exchange, "update", 0)
    sizes = counted_gathers(plane)
    again = refusal(plane.exchange, "next", 0)
    plane.close()
    return {"said": said, "again": again, "gathers_after": len(sizes)}


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_late_rank_is_given_up_and_named_and_both_ranks_fail(job: RankPool, late_rank: int) -> None:
    answers = job.run(f"{HERE}:body_late", late_rank=late_rank, limit_s=2.0, late_s=6.0, timeout=60)
    waiting, late = answers[1 - late_rank], answers[late_rank]
    assert "'update' (exchange 2)" in waiting["said"] and f"no sign of rank {late_rank};" in waiting["said"]
    assert "time limit 2 s" in waiting["said"]
    assert "'update' (exchange 2)" in late["said"]  # the late one does not go on alone
    for answer in answers:
        assert "failed before" in answer["again"]
        assert answer["gathers_after"] == 0  # raised at once, without waiting for anyone


def body_dead(folder: str) -> None:
    plane = GlooControlPlane(time_limit_s=5.0)
    plane.exchange("warm", 0)
    if plane.rank == 1:
        os._exit(3)
    message = refusal(plane.exchange, "update", 0)
    (Path(folder) / "said.txt").write_text(message, encoding="utf-8")


def test_a_dead_rank_ends_in_an_error_on_the_other_and_not_in_a_hang(tmp_path: Path) -> None:
    # Plain processes: the harness would end rank 0 as soon as rank 1 is gone.
    job = [start_rank(rank, f"{HERE}:body_dead", str(tmp_path), tmp_path / "store") for rank in range(2)]
    codes = [process.wait(timeout=120) for process in job]
    assert codes == [0, 3]
    said = (tmp_path / "said.txt").read_text(encoding="utf-8")
    assert "'update' (exchange 2)" in said and "no sign of rank 1;" in said


def start_rank(rank: int, target: str, folder: str, store: Path) -> subprocess.Popen[bytes]:
    """A rank with a file as its store, which outlives every rank."""
    name, function = target.split(":")
    code = (
        "import importlib, torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{store}', rank={rank}, world_size=2)\n"
        f"importlib.import_module({name!r}).{function}({folder!r})\n"
    )
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=env)


def body_never_made(limit_s: float) -> str:
    if dist.get_rank() == 1:
        time.sleep(3 * limit_s)
        return "made none"
    return refusal(made, limit_s)


def test_a_plane_that_one_rank_does_not_make_is_given_up(job: RankPool) -> None:
    said, _ = job.run(f"{HERE}:body_never_made", limit_s=2.0, timeout=60)
    job.close()  # one rank made a plane that the other has not: they are not in step any more
    assert "making the control plane" in said and "time limit 2 s" in said
