"""The parts of the training comparison that need no training: the planted codec, cosines, curves, reports."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks.parity_plot import draw, running_mean
from benchmarks.parity_run import PLANTED_ERROR, Report, amplified_errors, cosine, report_of
from benchmarks.training_parity import PRESETS, Runs, known_exact, replace, write
from ds_hilore.codecs.base import Codec
from ds_hilore.codecs.registry import codec_named

REPORT = Report(
    rewards=[0.1, 0.4, 0.3],
    scores={0: 11.0, 2: 15.5, 3: 14.25},
    cosines={2: 0.9999, 3: 0.99995},
    compressed=0.25,
    seconds=12.0,
    update_seconds=[3.0, 3.1, 2.9],
)


@pytest.mark.parametrize("name", ["int8", "bf16"])
def test_a_planted_codec_is_so_many_times_as_far_off_and_says_nothing(name: str) -> None:
    codec, original = codec_named(name), Codec.decode
    value = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    payload = codec.encode(value)
    honest = (codec.decode(payload) - value).norm()
    with amplified_errors(PLANTED_ERROR):
        assert torch.equal(codec.encode(value).squares, payload.squares)
        planted = (codec.decode(payload) - value).norm()
    assert float(planted / honest) == pytest.approx(PLANTED_ERROR, rel=0.05)
    assert Codec.decode is original
    assert torch.equal(codec.decode(payload), original(codec, payload))


def test_cosines_are_of_whole_gradients() -> None:
    one = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    other = [torch.tensor([0.0, 5.0]), torch.tensor([[5.0]])]
    assert cosine(one, one) == pytest.approx(1.0)
    assert cosine(one, [-each for each in one]) == pytest.approx(-1.0)
    assert cosine(one, other) == pytest.approx(20 / (5 * 50**0.5))
    assert cosine(one, [torch.zeros_like(each) for each in one]) != cosine(one, one)


def test_reports_survive_json_and_give_a_pair() -> None:
    assert report_of(json.loads(json.dumps(dataclasses.asdict(REPORT)))) == REPORT
    exact = dataclasses.replace(REPORT, scores={0: 11.0, 2: 15.0, 3: 15.0}, cosines={}, compressed=0.0)
    pair = Runs(exact, REPORT).pair(seed=7)
    assert (pair.seed, pair.difference, pair.cosines, pair.compressed) == (7, -0.75, (0.9999, 0.99995), 0.25)


def test_running_means_look_back_only() -> None:
    assert running_mean([1.0, 3.0, 5.0, 1.0], window=2) == [1.0, 2.0, 4.0, 3.0]


def test_curves_are_drawn(tmp_path: Path) -> None:
    draw({0: (REPORT, REPORT), 1: (REPORT, REPORT)}, "title", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_exact_runs_are_taken_over_only_from_the_same_settings(tmp_path: Path) -> None:
    from benchmarks.parity import judge

    spec, found = PRESETS["short"], {0: Runs(REPORT, REPORT)}
    write(tmp_path, "parity_short", spec, found, judge([found[0].pair(0)]), seconds=1.0)
    assert known_exact(tmp_path / "parity_short.json", replace(spec, plant="sign")) == {0: REPORT}
    with pytest.raises(SystemExit, match="updates"):
        known_exact(tmp_path / "parity_short.json", replace(spec, updates=spec.updates + 1))
