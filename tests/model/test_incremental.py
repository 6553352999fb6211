"""transformers' own cache as a second oracle: it decodes token by token, and so do we."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.model.oracle import load_saved, random_oracle, relative_error
from tests.model.tiny import random_ids, raw_config

if TYPE_CHECKING:
    from transformers.models.deepseek_v4 import DeepseekV4ForCausalLM


@torch.inference_mode()
def oracle_steps(
    model: "DeepseekV4ForCausalLM", token_ids: list[int], prefill: int
) -> torch.Tensor:
    """Logits of the prefill's last token and of every decoded one, with transformers' cache."""
    output = model(torch.tensor([token_ids[:prefill]]), use_cache=True)
    rows = [output.logits[0, -1]]
    for token in token_ids[prefill:]:
        output = model(
            torch.tensor([[token]]), past_key_values=output.past_key_values, use_cache=True
        )
        rows.append(output.logits[0, -1])
    return torch.stack(rows)


@pytest.mark.slow
def test_decoding_matches_transformers_decoding_with_its_cache(tmp_path: Path) -> None:
    oracle = random_oracle(raw_config((0, 4, 128), 1))
    engine = load_saved(oracle, tmp_path)
    for prefill in (3, 118):
        token_ids = random_ids(prefill + 14)
        engine.reset()
        found = [engine.prefill(token_ids[:prefill])]
        found += [engine.decode([token])[0] for token in token_ids[prefill:]]
        assert relative_error(torch.stack(found), oracle_steps(oracle, token_ids, prefill)) <= 5e-5
