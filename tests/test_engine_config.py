"""``EngineConfig``: what is refused, and what is kept of numbers."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError
from dsv4.limits import MAX_DRAFTS, MAX_PREFILL_CHUNK


class PathOfBytes(os.PathLike[bytes]):
    def __fspath__(self) -> bytes:
        return b"folder"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("device", "tpu"),
            ("kv_dtype", "fp4"),
            ("index_dtype", "fp4"),
            ("compute_dtype", "float16"),
            ("prefill_activations", "int8"),
        ),
        ("parallel", "x"),
        *(
            ("gpus", 0),
            ("gpus", 9),
            ("gpus", True),
            ("gpus", None),
            ("prefill_chunk", 0),
            ("prefill_chunk", 1.5),
            ("max_context", -1),
        ),
        *(("draft_tokens", count) for count in (0, MAX_DRAFTS + 1, "all")),
        ("require_native", 1),
        *((name, "") for name in ("draft_weights", "packed_cache")),
        *((name, np.array(["fp8", "bf16"])) for name in ("kv_dtype", "draft", "draft_tokens")),
    ],
)
def test_engine_config_names_the_wrong_field(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"EngineConfig.{field}: found"):
        EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parallel": "tensor", "gpus": 3}, "gpus: found 3 with EngineConfig.parallel='tensor', "),
        ({"draft": "off", "draft_tokens": 1}, "draft_tokens: found with EngineConfig.draft='off'"),
        (
            {"draft": "off", "draft_weights": "d"},
            "draft_weights: found with EngineConfig.draft='off'",
        ),
        (
            {"require_native": True, "ops": "torch"},
            "require_native: found with EngineConfig.ops='torch', expected 'auto'",
        ),
        (
            {"ops": "cuda", "compute_dtype": "float32"},
            "ops: found 'cuda' with EngineConfig.compute_dtype='float32', expected bfloat16",
        ),
    ],
)
def test_fields_that_contradict_one_another_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=f"^EngineConfig.{message}"):
        EngineConfig(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"parallel": "tensor", "gpus": 8},
        {"parallel": "pipeline", "gpus": 3},
        {"draft": "off"},
        {"draft_tokens": MAX_DRAFTS, "draft_weights": "d"},
        {"draft_tokens": "auto"},
        {"require_native": True},
        {"ops": "torch", "compute_dtype": "float32"},
        {"ops": "cuda", "compute_dtype": "bfloat16"},
        {"prefill_chunk": MAX_PREFILL_CHUNK, "max_context": 2**31 - 1},
    ],
)
def test_fields_at_their_bounds_and_together_are_kept(fields: dict[str, Any]) -> None:
    config = EngineConfig(**fields)
    assert {name: vars(config)[name] for name in fields} == fields


@pytest.mark.parametrize("field", ["gpus", "prefill_chunk", "max_context", "draft_tokens"])
def test_integers_of_numpy_are_kept_as_integers_of_python(field: str) -> None:
    """JSON, which records have them in, knows no others."""
    found: Any = np.int64(4)
    expected: Any = 4
    kept = EngineConfig(**{field: found})
    assert kept == EngineConfig(**{field: expected})
    assert type(vars(kept)[field]) is int


@pytest.mark.parametrize("field", ["draft_weights", "packed_cache"])
def test_a_folder_is_a_string_or_a_path_and_kept_as_a_string(field: str) -> None:
    """JSON, which records have them in, knows no paths."""
    path: Any = Path("folder")
    name: Any = "folder"
    kept = EngineConfig(**{field: path})
    assert kept == EngineConfig(**{field: name})
    assert type(vars(kept)[field]) is str


@pytest.mark.parametrize("field", ["draft_weights", "packed_cache"])
@pytest.mark.parametrize("found", ["", b"folder", 3, PathOfBytes()])
def test_nothing_else_is_a_folder(field: str, found: Any) -> None:
    expected = f"^EngineConfig.{field}: found .*, expected the path of a folder$"
    with pytest.raises(UserError, match=expected):
        EngineConfig(**{field: found})
