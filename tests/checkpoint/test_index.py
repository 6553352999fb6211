"""Opening folders: damaged shards, indexes that lie, and nothing outside the folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dsv4.checkpoint import open_checkpoint, tiny_config, write_synthetic
from dsv4.checkpoint.shard import map_tensor, read_header
from dsv4.errors import UserError
from tests.checkpoint.folders import load, read_tensors

INDEX = "model.safetensors.index.json"


def write_shard(path: Path, header: dict | bytes, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "U8", shape: list | None = None) -> dict:
    return {
        "dtype": dtype,
        "shape": [end - begin] if shape is None else shape,
        "data_offsets": [begin, end],
    }


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    write_synthetic(
        folder,
        tiny_config(num_hidden_layers=2, compress_ratios=[0, 4]),
        "native",
        3,
        shard_bytes=300_000,
    )
    return folder


def edit_index(folder: Path, **changes: str) -> None:
    path = folder / INDEX
    index = json.loads(path.read_text())
    index["weight_map"].update(changes)
    path.write_text(json.dumps(index))


def test_every_dtype_is_mapped_with_the_bytes_of_the_file(tmp_path: Path) -> None:
    dtypes = [
        torch.float8_e4m3fn,
        torch.float8_e8m0fnu,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    ]
    dtypes += [torch.float32, torch.bfloat16, torch.float16]
    raw = torch.arange(256, dtype=torch.uint8)
    save_file(
        {str(dtype): raw.view(dtype).view(2, -1).clone() for dtype in dtypes},
        tmp_path / "x.safetensors",
    )
    stored = read_header(tmp_path / "x.safetensors")
    for dtype in dtypes:
        tensor = map_tensor(stored[str(dtype)])
        assert tensor.dtype == dtype
        assert torch.equal(tensor.view(torch.uint8).flatten(), raw)


@pytest.mark.filterwarnings("error")
def test_reading_gives_no_warning_and_writing_to_the_tensor_leaves_the_file_alone(
    sharded: Path,
) -> None:
    checkpoint = open_checkpoint(sharded)
    before = checkpoint.read("norm.weight").clone()
    checkpoint.read("norm.weight").zero_()
    assert torch.equal(checkpoint.read("norm.weight"), before)


def test_unaligned_and_empty_tensors_can_be_read(tmp_path: Path) -> None:
    data = b"x" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    header = {
        "a": entry(0, 1, shape=[1] * 8),
        "b": entry(1, 9, "F32", [2]),
        "c": entry(1, 1, "F32", [0, 3]),
    }
    stored = read_header(write_shard(tmp_path / "x.safetensors", header, data))
    unaligned = map_tensor(stored["b"])
    assert unaligned.tolist() == [1.5, -2.0]
    assert unaligned.data_ptr() % 4 == 0
    assert map_tensor(stored["c"]).shape == (0, 3)


def test_unknown_name_is_a_clean_error(sharded: Path) -> None:
    with pytest.raises(UserError, match="no such tensor"):
        open_checkpoint(sharded).read("nothing.weight")


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(0, 4)}, b"123", r"truncated: found \d+ bytes, expected \d+"),
        ({"a": entry(0, 4)}, b"12345", "bytes after the last tensor"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"123456", "overlaps the tensor before it"),
        ({"a": entry(0, 4), "b": entry(5, 6)}, b"123456", "leaves a gap"),
        ({"a": entry(0, 4, "F32", [2])}, b"1234", r"expected 8 bytes for F32 \[2\]"),
        ({"a": entry(4, 0, shape=[4])}, b"1234", "expected 4 bytes"),
        ({"a": entry(0, 4, "F4")}, b"1234", "dtype: found 'F4'"),
        ({"a": entry(0, 4, shape=[-4])}, b"1234", r"found \[-4\], .*, each an integer from 0"),
        ({"a": entry(0, 4, shape=[2**63])}, b"1234", "8 sizes, each an integer from 0 to 1099511"),
        ({"a": entry(0, 4, shape=[2.0, 2])}, b"1234", "shape: found"),
        ({"a": entry(0, 4, shape=[True, 4])}, b"1234", "shape: found"),
        ({"a": entry(0, 4, shape=[1] * 8 + [4])}, b"1234", "expected up to 8 sizes"),
        (
            {"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, True]}},
            b"1234",
            "data_offsets: found",
        ),
        ({"a": [1]}, b"", "dtype: found None"),
        (b'{"a": 1, "a": 2}', b"", "'a' occurs twice"),
        (b"[]", b"", "expected an object"),
        (b"{", b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not UTF-8"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "not valid JSON"),
    ],
)
def test_damaged_shard_is_one_clean_line(
    tmp_path: Path, header: dict | bytes, data: bytes, message: str
) -> None:
    path = write_shard(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(UserError, match=message) as caught:
        read_header(path)
    assert "bad.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_in_place_of_a_shard_is_a_clean_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a regular file"):
        read_header(tmp_path)


def test_folder_without_config_or_weights(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="found 0 .safetensors files"):
        open_checkpoint(tmp_path)


def test_several_files_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(UserError, match="safetensors files and no model.safetensors.index.json"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "target",
    [
        *(
            "/etc/passwd",
            "../x.safetensors",
            "sub/x.safetensors",
            "..",
            "",
            ".x.safetensors",
            "a\\b.safetensors",
        ),
        *("x\0.safetensors", "\ud800.safetensors", "x.bin", "C:x.safetensors"),
        *("x.safetensors.bin", "x" * 202 + ".safetensors"),
    ],
)
def test_index_cannot_name_anything_but_files_of_the_folder(sharded: Path, target: str) -> None:
    edit_index(sharded, **{"norm.weight": target})
    with pytest.raises(UserError, match="expected the name of a .safetensors file in this folder"):
        open_checkpoint(sharded)


def test_index_cannot_leave_the_folder_through_a_link(sharded: Path, tmp_path: Path) -> None:
    save_file({"norm.weight": torch.zeros(128)}, tmp_path / "outside.safetensors")
    (sharded / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    edit_index(sharded, **{"norm.weight": "link.safetensors"})
    with pytest.raises(UserError, match="outside the folder"):
        open_checkpoint(sharded)


def test_link_loop_is_a_clean_error(sharded: Path) -> None:
    (sharded / "loop.safetensors").symlink_to(sharded / "loop.safetensors")
    edit_index(sharded, **{"norm.weight": "loop.safetensors"})
    with pytest.raises(UserError):
        load(sharded)


def test_hugging_face_cache_links_to_blobs_are_followed(sharded: Path, tmp_path: Path) -> None:
    blobs = tmp_path / "models--a--b/blobs"
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sharded.iterdir()):
        file.rename(blobs / f"{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert len(load(snapshot)) > 50


@pytest.mark.parametrize("outside", ["other--model/blobs/0", "models--a--b/refs/0", "elsewhere"])
def test_links_of_a_hugging_face_cache_lead_nowhere_but_to_its_own_blobs(
    sharded: Path, tmp_path: Path, outside: str
) -> None:
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    (tmp_path / "models--a--b/blobs").mkdir(parents=True)
    snapshot.parent.mkdir()
    sharded.rename(snapshot)
    target = tmp_path / outside
    target.parent.mkdir(parents=True, exist_ok=True)
    shard = next(snapshot.glob("*.safetensors"))
    shard.rename(target)
    shard.symlink_to(target)
    with pytest.raises(UserError, match=f"{shard.name}.*outside the folder"):
        open_checkpoint(snapshot)


def test_the_parent_of_a_folder_that_is_no_snapshot_has_no_blobs(
    sharded: Path, tmp_path: Path
) -> None:
    home = tmp_path / "models" / "flash"
    home.parent.mkdir()
    sharded.rename(home)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    shard = next(home.glob("*.safetensors"))
    shard.rename(blobs / "0")
    shard.symlink_to(blobs / "0")
    with pytest.raises(UserError, match="outside the folder"):
        open_checkpoint(home)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", {"a": 1}, {"a": None}])
def test_index_that_is_not_one_is_refused(sharded: Path, weight_map: object) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match="weight_map"):
        open_checkpoint(sharded)


def test_repeated_name_in_the_index_is_refused(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    with pytest.raises(UserError, match="'a' occurs twice"):
        open_checkpoint(sharded)


def test_index_and_shards_must_agree_both_ways(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    file = index["weight_map"].pop("norm.weight")
    moved = index["weight_map"]["embed.weight"]
    index["weight_map"] |= {"ghost.weight": file, "embed.weight": file}
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError) as caught:
        load(sharded)
    message = str(caught.value)
    both = f"embed.weight ({file}), ghost.weight ({file})"
    assert f"2 named by the index but absent from their shard: {both}" in message
    assert f"1 in a shard but not in the index: norm.weight ({file})" in message
    other = f"embed.weight ({moved}, in the index {file})"
    assert f"1 in another shard than the index says: {other}" in message


def test_truncated_shards_missing_shards_and_wrong_tensors_are_reported_together(
    sharded: Path,
) -> None:
    first, second, third, *_ = sorted(sharded.glob("model-*.safetensors"))
    size = first.stat().st_size
    first.write_bytes(first.read_bytes()[:-100])
    second.unlink()
    lost = read_tensors_of(third)
    name = next(iter(lost))
    del lost[name]
    save_file(lost, third)
    with pytest.raises(UserError) as caught:
        load(sharded)
    message = str(caught.value)
    assert f"{first.name}: truncated: found {size - 100} bytes, expected {size}" in message
    assert f"{second.name}: cannot be read (No such file or directory)" in message
    assert message.endswith(f"1 missing: {name}"), (
        "the tensors of unreadable shards are not listed as well"
    )
    assert f"1 named by the index but absent from their shard: {name} ({third.name})" in message
    assert "\n" not in message


def read_tensors_of(file: Path) -> dict[str, torch.Tensor]:
    folder = file.parent / "one"
    folder.mkdir()
    (folder / file.name).write_bytes(file.read_bytes())
    return read_tensors(folder)
