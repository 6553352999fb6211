"""The tokenizer's control tokens, and how text that merely quotes them is made harmless.

The chat markers of DeepSeek-V4 are ordinary strings that the tokenizer turns into single control
tokens wherever they stand, also inside what a user typed or a tool returned (model.md#tokenizer).
`neutralize` puts one U+200B (zero width space) before the last character of every such literal. The
text then looks the same but no longer tokenises to a control token; text without such a literal
comes back unchanged.

The space stands before the *last* character so that a literal that begins in an already encoded
context and ends in new text is broken inside the new text.
"""

import re

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
DSML = "｜DSML｜"
TOOL_RESULT_OPEN = "<tool_result>"
TOOL_RESULT_CLOSE = "</tool_result>"

TASK_TOKENS = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}

# What the encoder writes as control tokens; a tool result is marked by ordinary text.
WRITTEN_TOKENS = (
    BOS,
    EOS,
    USER,
    ASSISTANT,
    LATEST_REMINDER,
    THINK_OPEN,
    THINK_CLOSE,
    DSML,
    *TASK_TOKENS.values(),
)

ZERO_WIDTH_SPACE = "\u200b"

# The words between "<｜" and "｜>", in the order of their ids.
_BAR_WORDS = (
    "begin▁of▁sentence end▁of▁sentence ▁pad▁ fim▁hole fim▁begin fim▁end User Assistant "
    "tool▁calls▁begin tool▁calls▁end tool▁call▁begin tool▁call▁end tool▁outputs▁begin "
    "tool▁outputs▁end tool▁output▁begin tool▁output▁end tool▁sep begin▁of▁repo▁name "
    "end▁of▁repo▁name begin▁of▁file▁name end▁of▁file▁name begin▁of▁file end▁of▁file "
    "place▁holder▁for▁copy place▁holder▁for▁pointer▁replace begin▁sys end▁sys latest_reminder "
    "action query authority domain task political entity title safety answer search "
    "search▁begin search▁end extracted_url read_url end_of_query rl_image_pad rl_image_start "
    "image2 table /td td /tr tr /polygon polygon /point point /box box /ref ref image"
)
_OTHER_LITERALS = ("<|EOT|>", THINK_OPEN, THINK_CLOSE, DSML, "<dsml:", "</dsml:", "<｜/table>｜")
_NUMBERED = (r"<｜place▁holder▁no▁[0-9]+｜>", r"<\|place_holder_mm_span_[0-9]+\|>")

_LITERAL_PATTERN = "|".join(
    [
        r"<｜(?:" + "|".join(map(re.escape, _BAR_WORDS.split())) + r")｜>",
        *map(re.escape, _OTHER_LITERALS),
        *_NUMBERED,
    ]
)
# A look-ahead, so that literals that overlap ("｜DSML｜DSML｜") are all found.
_CONTROL_TOKEN = re.compile(rf"(?=[<｜])(?=({_LITERAL_PATTERN}))")
_TOOL_RESULT_CLOSE = re.compile(f"(?=({re.escape(TOOL_RESULT_CLOSE)}))")


def neutralize(text: str) -> str:
    """`text` with U+200B before the last character of every control-token literal; other text is
    returned as it is.
    """
    return _break_literals(_CONTROL_TOKEN, text)


def neutralize_tool_result(text: str) -> str:
    """As `neutralize`, and also for `</tool_result>`, with which a tool could end its result and go
    on as user.
    """
    return _break_literals(_TOOL_RESULT_CLOSE, neutralize(text))


def _break_literals(pattern: re.Pattern[str], text: str) -> str:
    cuts = sorted({match.end(1) - 1 for match in pattern.finditer(text)})
    if not cuts:
        return text
    starts = [0, *cuts]
    ends = [*cuts, len(text)]
    return ZERO_WIDTH_SPACE.join(text[start:end] for start, end in zip(starts, ends, strict=True))
