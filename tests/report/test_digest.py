"""Updates in bins and ranks in rows: nothing is lost, nothing is counted twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds_hilore.report.digest import Digest, highest, lowest, mean, runs_of
from ds_hilore.report.reading import read_run
from tests.report.logs import GB, Story


def digest_of(folder: Path, story: Story, bins: int) -> Digest:
    return Digest(read_run(story.write(folder)), bins)


@pytest.mark.parametrize("bins", [1, 3, 7, 20, 100])
def test_every_update_is_in_one_bin(tmp_path: Path, bins: int) -> None:
    story = Story(world=3, updates=20)
    digest = digest_of(tmp_path, story, bins)
    count = min(bins, 20)
    assert len(digest.edges) == count + 1 and len(digest.centres) == count
    places = digest.bin_of(np.arange(20))
    assert places.min() == 0 and places.max() == count - 1
    assert np.ptp(np.bincount(places)) <= 1, "bins are equally full"
    for row, log in enumerate(digest.ranks):
        saved = digest.total("saved_seconds")[row]
        assert saved.sum() == pytest.approx(sum(0.1 * story.letters(log.rank, k).count("H") for k in range(5, 20)))
        assert np.nansum(digest.total("seconds")[row]) == pytest.approx(19 * 2.0)
    assert digest.by_unit.sum() == digest.by_rank.sum() == 3 * 20 * 2 * 6
    assert digest.settled.sum() == 3 * 15 * 2 * 6, "updates that followed plans"


def test_one_update_in_each_bin_is_as_it_was_logged(tmp_path: Path) -> None:
    story = Story(world=2, updates=10, units=4)
    digest = digest_of(tmp_path, story, 200)
    assert np.isnan(digest.mean("budget_bytes")[:, :2]).all()
    assert (digest.mean("budget_bytes")[:, 2:] == 12 * GB).all()
    for rank in (0, 1):
        for update in range(10):
            letters = story.letters(rank, update)
            assert digest.by_rank[rank, update].tolist() == [2.0 * letters.count(kind) for kind in "HLR"]
    both = [[2.0 * sum(story.letters(rank, 7)[unit] == kind for rank in (0, 1)) for kind in "HLR"] for unit in range(4)]
    assert digest.by_unit[:, 7].tolist() == both


def test_ranks_that_are_at_different_updates(tmp_path: Path) -> None:
    Story(world=2, updates=12).write(tmp_path, ranks=[0])
    Story(world=2, updates=4).write(tmp_path, ranks=[1])
    digest = Digest(read_run(tmp_path))
    peaks = digest.highest("peak_bytes")
    assert peaks.shape == (2, 12) and np.isnan(peaks[1, 4:]).all()
    assert highest(peaks).tolist() == [10 * GB + 1] * 4 + [10 * GB] * 8
    assert lowest(peaks).tolist() == [10 * GB] * 12
    assert mean(peaks).tolist() == [10 * GB + 0.5] * 4 + [10 * GB] * 8


def test_stretches_of_stages() -> None:
    assert runs_of(["a", "a", "b", "a"]) == [(0, 2, "a"), (2, 3, "b"), (3, 4, "a")]
    assert runs_of([]) == []
