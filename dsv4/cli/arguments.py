"""The driver's arguments: combinations of flags, and the engine's configuration made of them."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dsv4.cli.chat.flags import check_chat_flags
from dsv4.cli.draft_flags import draft_folder
from dsv4.cli.flags import build_parser
from dsv4.cli.plan_flags import check_plan_flags
from dsv4.cli.prompts.flags import check_prompts_flags
from dsv4.cli.state_flags import check_continuation
from dsv4.command.flags import flag_name, given_flags
from dsv4.command.output_file import check_output, check_replaced_output, refuse_shared_files
from dsv4.engine_config import EngineConfig
from dsv4.errors import UserError

NOT_IN_A_PLAN = frozenset(
    "--temperature --top-k --top-p --min-p --seed --ignore-eos --stop --logprobs --profile "
    "--save-state --load-state --trace --trace-at".split()
)
_OUTPUTS = ("json", "trace", "save_state", "out")
_INPUTS = ("prompt_file", "messages", "tools", "prompts", "token_ids")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses ``argv`` (``None``: the process's own). Raises ``UserError`` for a wrong flag or
    combination.
    """
    parser = build_parser()
    arguments = parser.parse_args(argv)
    check_prompts_flags(arguments)
    refuse_contradictions(arguments)
    check_plan_flags(arguments)
    check_chat_flags(arguments)
    if arguments.logprobs is not None and arguments.json is None and arguments.prompts is None:
        raise UserError("--logprobs: found without --json, expected both")
    if arguments.verbose and arguments.quiet:
        raise UserError("--verbose: found together with --quiet, expected one of them")
    refuse_what_has_no_effect(arguments, given_flags(parser, arguments))
    _refuse_stdin_for_two(arguments)
    refuse_files_in_use(arguments, _files(arguments, _OUTPUTS))
    # A state may be saved where it was loaded from.
    refuse_shared_files(_files(arguments, ("load_state",)), _files(arguments, ("json", "trace")))
    if arguments.json is not None:
        check_output("--json", arguments.json)
    if arguments.save_state is not None:
        check_replaced_output("--save-state", arguments.save_state)
    return arguments


def refuse_contradictions(arguments: argparse.Namespace) -> None:
    """Raises ``UserError`` for flags of the prompt that cannot go together."""
    chat_only = {
        "--messages": arguments.messages is not None,
        "--system": arguments.system is not None,
        "--thinking on": arguments.thinking == "on",
        "--reasoning-effort": arguments.reasoning_effort is not None,
        "--allow-control-tokens": arguments.allow_control_tokens,
        "--tools": arguments.tools is not None,
    }
    without_chat = {"--raw": arguments.raw, "--token-ids": arguments.token_ids is not None}
    for plain, plain_given in without_chat.items():
        for flag, given in chat_only.items():
            if plain_given and given:
                raise UserError(
                    f"{plain}: found together with {flag}, which needs the chat encoding"
                )
    if arguments.reasoning_effort is not None and arguments.thinking == "off":
        raise UserError("--reasoning-effort: found with thinking off, expected --thinking on")
    if arguments.system is not None and arguments.messages is not None:
        raise UserError(
            "--system: found together with --messages, which holds its own system message"
        )
    if arguments.tools is not None and arguments.messages is not None:
        raise UserError("--tools: found together with --messages, which holds its own tools")
    if arguments.load_state is not None:
        check_continuation(arguments)


def refuse_what_has_no_effect(arguments: argparse.Namespace, given: frozenset[str]) -> None:
    """Raises ``UserError`` for a flag that would be ignored beside the others."""
    flags = set(map(flag_name, given))
    ignored = sorted(flags & NOT_IN_A_PLAN)
    if arguments.plan and ignored:
        raise UserError(f"{ignored[0]}: found together with --plan, which answers nothing")
    if arguments.gpus == 1 and "--parallel" in flags:
        raise UserError("--parallel: found with one device, expected --gpus 2 to 8")
    if arguments.profile and arguments.quiet and arguments.json is None:
        raise UserError("--profile: found together with --quiet, expected --json to write it to")


def refuse_files_in_use(
    arguments: argparse.Namespace, written: Sequence[tuple[str, Path | None]]
) -> None:
    """Raises ``UserError`` for a file of ``written``, flags with their files, that the run reads or
    that another of these flags writes.
    """
    folder = draft_folder(arguments)
    flag = "--draft" if arguments.draft_weights is None else "--draft-weights"
    draft = None if folder is None else (flag, folder)
    refuse_shared_files(_files(arguments, _INPUTS), written, Path(arguments.model), draft)


def _refuse_stdin_for_two(arguments: argparse.Namespace) -> None:
    reading = [flag for flag, path in _files(arguments, _INPUTS) if path == Path("-")]
    if len(reading) > 1:
        raise UserError(f"{reading[1]}: found stdin together with {reading[0]}, which reads it")


def _files(arguments: argparse.Namespace, names: Sequence[str]) -> list[tuple[str, Path | None]]:
    files = [(flag_name(name), getattr(arguments, name)) for name in names]
    return [(flag, None if file is None else Path(file)) for flag, file in files]


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """The part of the flags that the engine takes."""
    return EngineConfig(
        device=arguments.device,
        gpus=arguments.gpus,
        parallel=arguments.parallel,
        kv_dtype=arguments.kv_dtype,
        index_dtype=arguments.index_dtype,
        compute_dtype=arguments.compute_dtype,
        max_context=arguments.max_context,
        prefill_chunk=arguments.prefill_chunk,
        ops=arguments.ops,
        cuda_graph=arguments.cuda_graph,
        require_native=arguments.require_native,
        prefill_activations=arguments.prefill_activations,
        draft=arguments.draft,
        draft_tokens=arguments.draft_tokens,
        draft_weights=draft_folder(arguments),
        packed_cache=arguments.packed_cache,
    )
