"""Reasoning-effort prefixes and the choice of the profile (model.md#reasoning-effort)."""

from pathlib import Path

import pytest

from encoding import detect_profile, encode_messages, fold_reasoning_effort

ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very thorough"
)
BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with"
)
OFFICIAL_ENCODER = """
REASONING_EFFORT_PREFIXES = {
    "low": "",
    "high": "...",
    "max": "...",
}
DEFAULT_REASONING_EFFORT = "low"
"""
EFFORTS = ("low", "high", "max")
PREVIEW_ENCODER = 'REASONING_EFFORT_MAX = "..."\nassert reasoning_effort in ["max", None, "high"]\n'


def prompt(effort: str | None, profile: str, mode: str = "thinking") -> str:
    messages = [{"role": "user", "content": "hi"}]
    text = encode_messages(messages, mode, reasoning_effort=effort, profile=profile)
    assert text.startswith("<｜begin▁of▁sentence｜>")
    return text.removeprefix("<｜begin▁of▁sentence｜>")


@pytest.mark.parametrize(
    ("profile", "effort", "beginning"),
    [
        ("preview", None, "<｜User｜>"),
        ("preview", "high", "<｜User｜>"),
        ("preview", "max", ABSOLUTE),
        ("official", None, "<｜User｜>"),
        ("official", "low", "<｜User｜>"),
        ("official", "high", ABSOLUTE),
        ("official", "max", BEYOND),
    ],
)
def test_prefix_of_each_effort(profile: str, effort: str | None, beginning: str) -> None:
    text = prompt(effort, profile)
    assert text.startswith(beginning)
    if beginning != "<｜User｜>":
        assert text.split("<｜User｜>")[0].endswith(".\n\n")


def test_prefix_stands_before_the_system_text_and_only_in_thinking_mode() -> None:
    messages = [{"role": "system", "content": "Sys"}, {"role": "user", "content": "hi"}]
    text = encode_messages(messages, "thinking", reasoning_effort="max", profile="official")
    assert text.split("<｜User｜>")[0].endswith("remains undiscovered.\n\nSys")
    assert prompt("max", "official", "chat") == "<｜User｜>hi<｜Assistant｜></think>"


def test_prefix_stands_in_front_where_the_context_has_no_text_of_its_own() -> None:
    """A developer message before the last user message is left out."""
    developer = {"role": "developer", "content": "D"}
    messages = [{"role": "user", "content": "hi"}]
    whole = encode_messages([developer, *messages], "thinking", reasoning_effort="max")
    rest = encode_messages(messages, "thinking", context=[developer], reasoning_effort="max")
    assert "Reasoning Effort: " in rest
    assert whole == f"<｜begin▁of▁sentence｜>{rest}"


@pytest.mark.parametrize(
    ("profile", "effort"), [("preview", "low"), ("preview", "MAX"), ("official", "medium")]
)
def test_efforts_that_a_profile_lacks_are_refused_in_both_modes(profile: str, effort: str) -> None:
    for mode in ("chat", "thinking"):
        with pytest.raises(
            ValueError, match=f"reasoning_effort is '{effort}', expected None or one of .*{profile}"
        ):
            prompt(effort, profile, mode)


def test_unknown_profile_is_refused() -> None:
    with pytest.raises(ValueError, match="profile is 'beta', expected one of preview, official"):
        prompt(None, "beta")
    with pytest.raises(ValueError, match="profile is 'beta', expected one of preview, official"):
        fold_reasoning_effort("high", "beta")


def test_api_efforts_fold_to_those_of_the_profile() -> None:
    names = ["minimal", "low", "medium", "high", "xhigh", "max"]
    assert [fold_reasoning_effort(name, "official") for name in names] == [
        "low",
        "low",
        "low",
        "high",
        "high",
        "max",
    ]
    assert [fold_reasoning_effort(name, "preview") for name in names] == ["high"] * 5 + ["max"]
    expected = f"^reasoning_effort is 'huge', expected one of {', '.join(names)}$"
    with pytest.raises(ValueError, match=expected):
        fold_reasoning_effort("huge", "official")


def shipped(folder: Path, encoder: str | None, config: str | None = None) -> Path:
    if encoder is not None:
        (folder / "encoding").mkdir()
        (folder / "encoding" / "encoding_dsv4.py").write_text(encoder, encoding="utf-8")
    if config is not None:
        (folder / "config.json").write_text(config, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("encoder", "config", "profile"),
    [
        (OFFICIAL_ENCODER, "{}", "official"),
        (PREVIEW_ENCODER, "{}", "preview"),
        (PREVIEW_ENCODER, '{"dspark_block_size": 5}', "preview"),
        ('DEFAULT_REASONING_EFFORT = "low"\n', "{}", "preview"),
        (OFFICIAL_ENCODER.replace('= "low"', '= "high"'), "{}", "preview"),
        *((OFFICIAL_ENCODER.replace(f'"{key}":', ""), "{}", "preview") for key in EFFORTS),
        (None, '{"hidden_size": 64, "dspark_block_size": 5}', "official"),
        (None, '{"hidden_size": 64}', "preview"),
        (None, None, "preview"),
    ],
)
def test_profile_of_a_checkpoint(
    tmp_path: Path, encoder: str | None, config: str | None, profile: str
) -> None:
    assert detect_profile(shipped(tmp_path, encoder, config)) == profile


def test_an_encoder_that_is_not_utf8_is_read_nevertheless(tmp_path: Path) -> None:
    folder = shipped(tmp_path, "")
    source = b"# \xff\n" + OFFICIAL_ENCODER.encode()
    (folder / "encoding" / "encoding_dsv4.py").write_bytes(source)
    assert detect_profile(folder) == "official"


@pytest.mark.parametrize("config", ["{", "[]", "[" * 100_000])
def test_a_broken_config_is_named(tmp_path: Path, config: str) -> None:
    with pytest.raises(ValueError, match="config.json: ") as error:
        detect_profile(shipped(tmp_path, None, config))
    assert "\n" not in str(error.value)


def test_an_integer_that_python_does_not_read_is_named(tmp_path: Path) -> None:
    config = '{"a": ' + "9" * 5000 + "}"
    with pytest.raises(
        ValueError, match=r"config.json: not valid JSON .found an integer of 5000 di"
    ):
        detect_profile(shipped(tmp_path, None, config))
