"""Packed weights on disk: a second start packs nothing and computes the same; what is not whole, or
of other weights, is packed again.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dsv4 import EngineConfig
from dsv4.caches.allocation import COMPUTE_DTYPES
from dsv4.checkpoint import packed_cache as module
from dsv4.checkpoint import tiny_config, write_synthetic
from dsv4.checkpoint.checksum import checksum
from dsv4.checkpoint.identity import checkpoint_identity
from dsv4.checkpoint.packed_cache import MANIFEST, PackedCache
from dsv4.model import build_ranks
from dsv4.opened_checkpoint import OpenedCheckpoint
from dsv4.ops import Packing
from dsv4.ops.native_packing import native_packing
from dsv4.ops.tables import CUDA_PACKING
from dsv4.ops.trees import tensors_in
from dsv4.parallel.placement import Placement
from dsv4.weights.quant import QuantFormat, QuantTensor
from tests.checkpoint.packed_starts import Starts, change_body

CPU = torch.device("cpu")

pytestmark = pytest.mark.slow


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_the_second_start_packs_nothing_and_computes_the_same(
    starts: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    count, expected = starts()
    assert count > 20
    assert starts.entries
    for _ in range(2):
        again, found = starts()
        assert again == 0
        assert torch.equal(found, expected)
    assert warnings(caplog) == []


def test_each_packing_has_its_entry(starts: Starts) -> None:
    results = {mode: starts(prefill_activations=mode) for mode in ("bf16", "fp8", "nvfp4")}
    assert len(starts.entries) == 3
    for mode, (count, expected) in results.items():
        assert count > 0
        again, found = starts(prefill_activations=mode)
        assert again == 0
        assert torch.equal(found, expected)


def test_the_draft_module_is_packed_as_ever(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    raw = tiny_config(num_nextn_predict_layers=1)
    write_synthetic(folder, raw, "nvfp4-experts", 1, mtp="classic")
    starts = Starts(folder, tmp_path / "cache")
    count, expected = starts(draft="mtp")
    again, found = starts(draft="mtp")
    assert 0 < again < count
    assert torch.equal(found, expected)
    # The entry is that of a run without the module.
    assert starts()[0] == 0


@pytest.mark.parametrize("packing", [CUDA_PACKING, native_packing("fp8")], ids=lambda one: one.name)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_gets_its_own_back(tmp_path: Path, packing: Packing, ranks: int) -> None:
    """In the layouts of the CUDA ops, which are made on any device."""
    folder = tmp_path / "model"
    write_synthetic(folder, tiny_config(moe_intermediate_size=256), "nvfp4-experts", 1)
    engine = EngineConfig(device="cpu", ops="torch")
    opened = OpenedCheckpoint.open(folder, engine)
    placement = Placement.tensor(opened.config.num_hidden_layers, [CPU] * ranks)
    opened = replace(opened, placement=placement)
    identity = checkpoint_identity(opened.checkpoint)
    counts: list[int] = []

    def built(pack: Packing) -> list[bytes]:
        cache = PackedCache(tmp_path / "cache", opened.checkpoint, identity, pack.name, ranks)
        with opened.reading(None, None, cache) as weights:
            dtype = COMPUTE_DTYPES["bfloat16"]
            models = build_ranks(opened.config, weights, pack, placement, dtype)
            counts.append(sum(len(rank.packed or {}) for rank in weights))
            assert not any(weights), "weights that the model does not take"
        return [as_bytes(tensor) for model in models for tensor in tensors_in(model)]

    expected = built(packing)

    def refused(*_: object) -> Any:
        raise AssertionError("packed again")

    experts = None if packing.pack_experts is None else refused
    found = built(replace(packing, pack_weight=refused, pack_rows=refused, pack_experts=experts))
    assert found == expected
    assert counts[0] == counts[1] > 10 * ranks
    other = PackedCache(tmp_path / "cache", opened.checkpoint, identity, packing.name, ranks + 1)
    assert other.read(placement.devices_of, None) is None


def test_runs_with_other_numbers_of_ranks_have_their_own_entries(
    starts: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of the torch ops, both on the CPU."""
    starts()
    monkeypatch.setattr("dsv4.opened_checkpoint.engine_devices", lambda *_: (CPU, CPU))
    count, expected = starts(gpus=2, parallel="tensor")
    assert count > 0
    again, found = starts(gpus=2, parallel="tensor")
    assert again == 0
    assert torch.equal(found, expected)
    assert len(starts.entries) == 2


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-5])


def change_manifest(file: Path) -> None:
    file.write_text(file.read_text().replace('"view"', '"dtype"', 1))


def without(key: str) -> Callable[[Path], None]:
    return lambda file: change_body(file, lambda body: body.pop(key))


def short_checksums(file: Path) -> None:
    change_body(file, lambda body: body["checksums"].pop())


def add_tensor(file: Path) -> None:
    save_file({"foreign": torch.zeros(1)}, file.with_name("foreign.safetensors"))


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "bit": ("model.safetensors", lambda file: flip(file, -1000), "damaged: found checksum"),
    "cut": ("model.safetensors", cut, "truncated: found"),
    "header": ("model.safetensors", lambda file: flip(file, 20), "header"),
    "gone": ("model.safetensors", lambda file: file.unlink(), "found no tensor 0"),
    "manifest": (MANIFEST, change_manifest, "damaged: its SHA-256"),
    "no manifest": (MANIFEST, lambda file: file.unlink(), "no such file"),
    "foreign": (MANIFEST, lambda file: file.write_text("foreign"), "not valid JSON"),
    "no ranks": (MANIFEST, without("ranks"), "damaged: expected lists"),
    "no checksums": (MANIFEST, without("checksums"), "damaged: expected lists"),
    "short checksums": (MANIFEST, short_checksums, "damaged: found an unexpected tensor"),
    "foreign tensor": ("model.safetensors", add_tensor, "found an unexpected tensor foreign"),
}


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_one_warning_and_mended(
    starts: Starts,
    caplog: pytest.LogCaptureFixture,
    name: str,
    damage: Callable[[Path], object],
    said: str,
) -> None:
    count, expected = starts()
    (entry,) = starts.entries
    damage(entry / name)
    again, found = starts()
    assert again == count
    assert torch.equal(found, expected)
    (line,) = warnings(caplog)
    assert re.fullmatch(r"packed cache: [^\n]*; packing again", line)
    assert str(entry) in line
    assert said in line
    assert starts()[0] == 0


@pytest.mark.parametrize("place", ["folder", "file", "link", "link to nothing"])
def test_something_foreign_in_the_place_of_an_entry_is_replaced(
    starts: Starts, tmp_path: Path, place: str
) -> None:
    starts()
    (entry,) = starts.entries
    shutil.rmtree(entry)
    foreign = tmp_path / "foreign" if place.startswith("link") else entry
    if foreign != entry:
        entry.symlink_to(foreign)
    if place == "file":
        entry.write_text("x")
    elif place != "link to nothing":
        foreign.mkdir()
        (foreign / "x").write_text("x")
    assert starts()[0] > 0
    assert starts()[0] == 0
    assert entry.is_dir()
    assert not entry.is_symlink()
    assert place != "link" or (foreign / "x").exists(), "what a link leads to is somebody else's"


def test_other_weights_of_the_same_sizes_are_packed(starts: Starts, tmp_path: Path) -> None:
    _, before = starts()
    write_synthetic(tmp_path / "other", tiny_config(), "nvfp4-experts", 2)
    shutil.copyfile(tmp_path / "other/model.safetensors", starts.folder / "model.safetensors")
    count, after = starts()
    assert count > 0
    assert not torch.equal(after, before)
    assert starts()[0] == 0
    assert len(starts.entries) == 1


def test_a_bit_that_no_sample_sees_is_seen(starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file that keeps its size and its time of modification."""
    monkeypatch.setattr("dsv4.opened_checkpoint.checkpoint_identity", lambda _: "the same")
    count, _ = starts()
    file = starts.folder / "model.safetensors"
    status = file.stat()
    flip(file, -1)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert starts()[0] == count
    assert starts()[0] == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [("LAYOUTS", module.LAYOUTS + 1), ("known_classes", dict), ("dsv4.__version__", "other")],
)
def test_other_code_packs_again(
    starts: Starts, monkeypatch: pytest.MonkeyPatch, name: str, value: object
) -> None:
    count, _ = starts()
    monkeypatch.setattr(f"dsv4.checkpoint.packed_cache.{name}", value)
    assert starts()[0] == count
    assert starts()[0] == 0


def test_a_full_disk_is_one_warning(
    starts: Starts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known before, and found out on the way."""
    usage = shutil.disk_usage(starts.folder)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        assert starts()[0] > 0

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dsv4.checkpoint.packed_cache.write_json", full)
        assert starts()[0] > 0
    first, second = warnings(caplog)
    assert re.search(r"not written \(.*found 1e-06 GB free, expected at least \d", first)
    assert "not written ([Errno 28] No space left on device)" in second
    assert starts.entries == []
    assert starts()[0] > 0
    assert starts()[0] == 0


def test_bytes_of_a_packing_change_with_the_number_of_layouts() -> None:
    """When this fails, ``LAYOUTS`` has to be raised, and the checksum here be changed with it."""
    codes = torch.arange(64 * 32, dtype=torch.uint8).view(64, 32)
    packed = sum(
        checksum(tensor.reshape(-1).contiguous().view(torch.uint8))
        for packing in (CUDA_PACKING, native_packing("fp8"), native_packing("nvfp4"))
        for tensor in tensors_in(packing.pack_weight(nvfp4(codes)))
    )
    assert (module.LAYOUTS, packed % 2**64) == (1, 1777292475541612962)


def nvfp4(codes: torch.Tensor) -> QuantTensor:
    scale = torch.arange(64 * 4, dtype=torch.uint8).view(64, 4) % 120
    shape = (64, 64)
    total = torch.tensor(0.5)
    return QuantTensor(codes, scale.view(torch.float8_e4m3fn), total, QuantFormat.NVFP4, shape)
