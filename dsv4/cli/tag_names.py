"""Names that the tags of a tool call can hold (model.md#rendering)."""

import json

from dsv4.errors import UserError, shorten


def check_tag_names(calls: object, where: str) -> None:
    """Raises ``UserError`` for a tool, or a call of one, whose name or parameter would end in the
    middle of the tag that the encoder writes. What else is wrong with them the encoder finds.
    """
    for index, call in enumerate(calls if isinstance(calls, list) else []):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            continue
        parameters = _parameters(function.get("arguments"))
        names = [("name", function.get("name")), *(("arguments", name) for name in parameters)]
        for field, name in names:
            if isinstance(name, str) and '"' in name:
                found = f'found {shorten(name)}, expected a name without "'
                raise UserError(f"{where}[{index}].function.{field}: {found}")


def _parameters(arguments: object) -> list[object]:
    """Their names, none in what is no JSON object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return []
    return list(arguments) if isinstance(arguments, dict) else []
