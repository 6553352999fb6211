"""Damaged and hostile folders: loading gives the weights or one clean ``UserError``, never anything
else.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dsv4.checkpoint import mtp_kind, open_checkpoint, tiny_config, write_synthetic
from dsv4.checkpoint.shard import map_tensor, read_header
from dsv4.errors import UserError
from tests.checkpoint.folders import load

pytestmark = pytest.mark.slow

INDEX = "model.safetensors.index.json"
SMALL = tiny_config(
    num_hidden_layers=2,
    compress_ratios=[0, 4],
    num_hash_layers=1,
    hidden_size=32,
    n_routed_experts=2,
    vocab_size=16,
)
fuzz = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
SIZES = st.sampled_from([-1, 0, 1, 2, 3, 7, 2**31, 2**63, 2**64, 1.5, None, True, "4", [], {}])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "small"
    write_synthetic(folder, SMALL, "nvfp4-experts", 1, mtp="classic", shard_bytes=40_000)
    return folder


@pytest.fixture
def work(small: Path, tmp_path: Path) -> Path:
    """A folder that every example overwrites with the good files before it damages them."""
    return restore(small, tmp_path / "work")


def restore(small: Path, work: Path) -> Path:
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(small, work)
    return work


def loads_or_is_refused(folder: Path) -> None:
    message = ""
    try:
        load(folder, mtp_kind(open_checkpoint(folder)))
    except UserError as error:
        message = str(error)
    assert message.isprintable()
    assert len(message) < 20_000


def shard(folder: Path, number: int) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    return files[number % len(files)]


@fuzz
@given(
    number=st.integers(0, 9), place=st.floats(0, 1), bit=st.integers(0, 7), in_header=st.booleans()
)
def test_flipped_bits(
    small: Path, work: Path, number: int, place: float, bit: int, in_header: bool
) -> None:
    file = shard(restore(small, work), number)
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little") + 8 if in_header else len(content)
    content[min(int(place * length), length - 1)] ^= 1 << bit
    file.write_bytes(content)
    loads_or_is_refused(work)


@fuzz
@given(number=st.integers(0, 9), keep=st.floats(0, 1), tail=st.binary(max_size=16))
def test_truncated_and_extended_shards(
    small: Path, work: Path, number: int, keep: float, tail: bytes
) -> None:
    file = shard(restore(small, work), number)
    content = file.read_bytes()
    changed = content[: int(keep * len(content))] + tail
    # A file of the same length may differ in values alone, which nothing can notice.
    assume(len(changed) != len(content))
    file.write_bytes(changed)
    with pytest.raises(
        UserError, match="truncated|bytes after|not valid JSON|not UTF-8|not a safetensors|header"
    ):
        load(work, "classic")


@fuzz
@given(
    name=st.sampled_from(["config.json", INDEX, "hf_quant_config.json"]),
    text=st.binary(max_size=64),
)
def test_json_files_that_are_not_json(small: Path, work: Path, name: str, text: bytes) -> None:
    (restore(small, work) / name).write_bytes(text)
    loads_or_is_refused(work)


@fuzz
@given(data=st.data())
def test_index_with_hostile_values(small: Path, work: Path, data: st.DataObject) -> None:
    path = restore(small, work) / INDEX
    index = json.loads(path.read_text())
    names = sorted(index["weight_map"])
    files = sorted(index["weight_map"].values())
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        index["weight_map"][name] = data.draw(st.sampled_from(files) | st.text(max_size=20) | SIZES)
    index["weight_map"].update(
        data.draw(st.dictionaries(st.text(max_size=10), st.text(max_size=10), max_size=2))
    )
    path.write_text(json.dumps(index))
    loads_or_is_refused(work)


@fuzz
@given(header=st.dictionaries(st.text(max_size=8), JSON, max_size=4), body=st.binary(max_size=32))
def test_headers_of_arbitrary_json(tmp_path: Path, header: dict[str, Any], body: bytes) -> None:
    check_file(tmp_path / "x.safetensors", header, body)


@fuzz
@given(
    entries=st.lists(
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["U8", "F32", "BF16", "F8_E8M0", "F4", "", 1, None]),
                "shape": st.lists(SIZES, max_size=3) | SIZES,
                "data_offsets": st.lists(SIZES, max_size=3) | SIZES,
            }
        ),
        max_size=4,
    ),
    body=st.binary(max_size=32),
)
def test_headers_with_hostile_entries(
    tmp_path: Path, entries: list[dict[str, Any]], body: bytes
) -> None:
    check_file(
        tmp_path / "x.safetensors",
        {str(number): entry for number, entry in enumerate(entries)},
        body,
    )


def check_file(path: Path, header: dict[str, Any], body: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    stored = {}
    message = ""
    try:
        stored = read_header(path)
    except UserError as error:
        message = str(error)
    assert message.isprintable()
    for tensor in stored.values():
        assert map_tensor(tensor).nbytes == tensor.nbytes


@fuzz
@given(
    key=st.sampled_from(
        [
            *(
                "quant_method",
                "quant_algo",
                "moe_quant_algo",
                "group_size",
                "weight_block_size",
                "quantized_layers",
            ),
            *("ignore", "modules_to_not_convert", "fmt", "config_groups"),
        ]
    ),
    value=JSON,
)
def test_declarations_with_hostile_values(small: Path, work: Path, key: str, value: Any) -> None:
    path = restore(small, work) / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"][key] = value
    path.write_text(json.dumps(config))
    loads_or_is_refused(work)


@fuzz
@given(key=st.sampled_from(["quantization_config", "expert_dtype", *SMALL]), value=JSON | SIZES)
def test_config_with_hostile_values_and_real_weights(
    small: Path, work: Path, key: str, value: Any
) -> None:
    path = restore(small, work) / "config.json"
    config = json.loads(path.read_text())
    config[key] = value
    path.write_text(json.dumps(config))
    loads_or_is_refused(work)
