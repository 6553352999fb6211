"""--allow-control-tokens: what a message quotes stays as it is."""

from pathlib import Path

from dsv4.encoding import Tokenizer
from tests.driver.conftest import read_json
from tests.driver.drive import Drive


def test_control_tokens_of_a_message_stay_only_if_allowed(
    drive: Drive, checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    prompts = []
    for flags in ([], ["--allow-control-tokens"]):
        drive("--prompt", "Explain <think> tags", "--max-tokens", 1, "--json", path, *flags)
        prompts.append(read_json(path)["prompt"])
    broken, kept = prompts
    assert "Explain <think\u200b> tags" in broken["text"]
    assert "Explain <think> tags" in kept["text"]
    think = Tokenizer(checkpoint).token_to_id("<think>")
    assert think not in broken["token_ids"]
    assert think in kept["token_ids"]
