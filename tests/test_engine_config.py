"""``EngineConfig``: what is refused, and what is kept of numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError


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
            ("prefill_chunk", 0),
            ("prefill_chunk", 1.5),
            ("max_context", -1),
        ),
        *((name, np.array(["fp8", "bf16"])) for name in ("kv_dtype", "draft", "draft_tokens")),
    ],
)
def test_engine_config_names_the_wrong_field(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"EngineConfig.{field}: found"):
        EngineConfig(**{field: value})


@pytest.mark.parametrize("field", ["gpus", "prefill_chunk", "max_context", "draft_tokens"])
def test_integers_of_numpy_are_kept_as_integers_of_python(field: str) -> None:
    """JSON, which records have them in, knows no others."""
    found: Any = np.int64(4)
    expected: Any = 4
    kept = EngineConfig(**{field: found})
    assert kept == EngineConfig(**{field: expected})
    assert type(vars(kept)[field]) is int


@pytest.mark.parametrize("field", ["draft_weights", "packed_cache"])
def test_a_folder_that_is_a_path_is_told_to_be_a_string(field: str) -> None:
    path: Any = Path("folder")
    with pytest.raises(UserError, match="found PosixPath.*, expected a string: the path of a"):
        EngineConfig(**{field: path})
