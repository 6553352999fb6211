"""What makes a folder another checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from dsv4.checkpoint import identity, open_checkpoint, write_synthetic
from dsv4.checkpoint.identity import checkpoint_identity
from tests.model.tiny import raw_config


def trained_on(folder: Path, prefix: str, to: Path) -> Path:
    """A copy in which the tensors whose names begin with ``prefix`` are others."""
    shutil.copytree(folder, to)
    for file in to.glob("*.safetensors"):
        tensors = load_file(file)
        for name in (name for name in tensors if name.startswith(prefix)):
            tensors[name] += 1e-3
        save_file(tensors, file)
    return to


def test_what_is_declared_beside_the_configuration_makes_another_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_synthetic(folder, raw_config((0, 4, 128)), "nvfp4-experts", 0)
    before = checkpoint_identity(open_checkpoint(folder))
    path = folder / "hf_quant_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "producer": {"name": "other"}}))
    assert checkpoint_identity(open_checkpoint(folder)) != before


def test_routed_experts_of_one_layer_make_another_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_synthetic(folder, raw_config((0, 4, 128)), "f32", 0)
    prefixes = [
        *("none", "layers.1.attn_norm."),
        *(f"layers.{layer}.ffn.experts." for layer in range(3)),
    ]
    folders = [trained_on(folder, prefix, tmp_path / prefix) for prefix in prefixes]
    sizes = [sorted((file.name, file.stat().st_size) for file in one.iterdir()) for one in folders]
    assert sizes == [sizes[0]] * len(folders)
    again = trained_on(folder, "none", tmp_path / "again")
    identities = [checkpoint_identity(open_checkpoint(one)) for one in (*folders, again)]
    assert len(set(identities)) == len(folders)
    assert identities[-1] == identities[0]


def test_a_change_of_any_place_is_seen_that_is_as_long_as_the_distance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the beginnings of tensors, and at the end of a file."""
    monkeypatch.setattr(identity, "_SAMPLED_BYTES", 8)
    monkeypatch.setattr(identity, "_WIDEST_GAP", 1000)
    folder = tmp_path / "model"
    write_synthetic(folder, raw_config((0, 4, 128)), "f32", 0)
    checkpoint = open_checkpoint(folder)
    before = checkpoint_identity(checkpoint)
    largest = max(checkpoint.tensors.values(), key=lambda stored: stored.nbytes)
    data = largest.file.read_bytes()
    middle = largest.offset + largest.nbytes // 2
    for start, stop in ((middle, middle + 1000), (len(data) - 1, len(data))):
        other = bytes(byte ^ 1 for byte in data[start:stop])
        largest.file.write_bytes(data[:start] + other + data[stop:])
        assert checkpoint_identity(checkpoint) != before
    largest.file.write_bytes(data)
    assert checkpoint_identity(checkpoint) == before


def test_the_order_of_a_configuration_makes_no_difference(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_synthetic(folder, raw_config((0, 4, 128)), "f32", 0)
    before = checkpoint_identity(open_checkpoint(folder))
    path = folder / "config.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert checkpoint_identity(open_checkpoint(folder)) == before
