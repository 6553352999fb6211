"""The arguments of one tool call, from its parameters to valid JSON (model.md#parsing)."""

from collections.abc import Callable, Mapping

from .strict_parser import is_json, quote

# Names under which models wrap all arguments of a call in one parameter.
_WRAPPERS = ("arguments", "input")


def declared_parameters(tools: list[dict[str, object]]) -> dict[str, Mapping[str, object]]:
    """Tool name → its declared properties, of function schemas in the JSON-schema form; unclear
    schemas are empty.
    """
    result = {}
    for function in tools:
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        result[str(function["name"])] = properties if isinstance(properties, Mapping) else {}
    return result


class ToolCallBuilder:
    """Collects the parameters of one call. `add` and `close` return the JSON text that is certain
    by then.
    """

    def __init__(
        self, properties: Mapping[str, object], note_repair: Callable[[str], None]
    ) -> None:
        self._properties = properties
        self._note_repair = note_repair
        self._values: dict[str, str] = {}
        # The first parameter, while it may be a wrapper.
        self._wrapped: tuple[str, str] | None = None
        self._loose_text: list[str] = []
        self._json = ""

    def add(self, name: str, value: str, string_attribute: str | None) -> str:
        """Takes a parameter as written; `string_attribute` says whether its value is text ("true")
        or JSON.
        """
        if name in self._values:
            self._note_repair("duplicate_parameter")
            return ""
        before = self._unwrapped_so_far()
        self._values[name] = self._as_json(name, value, string_attribute)
        if len(self._values) == 1 and name in _WRAPPERS and name not in self._properties:
            self._wrapped = (name, value)
            return before
        return before + self._append(name)

    def add_loose_text(self, text: str) -> None:
        """Takes the text between the parameters, which should be line breaks only."""
        self._loose_text.append(text)

    def close(self) -> tuple[str, str]:
        """The rest of the JSON text, and all of it: a valid JSON object."""
        loose_text = "".join(self._loose_text).strip()
        wrapped = self._wrapped[1].strip() if self._wrapped else ""
        if _is_json_object(wrapped):
            self._note_repair("wrapped_arguments")
            return wrapped, wrapped
        if not self._values and _is_json_object(loose_text):
            self._note_repair("json_instead_of_parameters")
            return loose_text, loose_text
        if loose_text:
            self._note_repair("text_in_tool_call")
        end = "}" if self._values else "{}"
        rest = self._unwrapped_so_far() + end
        return rest, self._json + end

    def _unwrapped_so_far(self) -> str:
        if self._wrapped is None:
            return ""
        name = self._wrapped[0]
        self._wrapped = None
        return self._append(name)

    def _append(self, name: str) -> str:
        text = ("{" if not self._json else ", ") + f"{quote(name)}: {self._values[name]}"
        self._json += text
        return text

    def _as_json(self, name: str, value: str, string_attribute: str | None) -> str:
        is_string = {"true": True, "false": False}.get((string_attribute or "").lower())
        if is_string is None:
            self._note_repair("missing_string_attribute")
            schema = self._properties.get(name)
            declared_string = isinstance(schema, Mapping) and schema.get("type") == "string"
            is_string = declared_string or not is_json(value)
        elif not is_string and not is_json(value):
            self._note_repair("value_is_not_json")
            is_string = True
        return quote(value) if is_string else value


def _is_json_object(text: str) -> bool:
    return text.startswith("{") and is_json(text)
