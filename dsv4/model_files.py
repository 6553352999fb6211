"""The small files of a model's folder: regular files that really lie in it."""

import os
from pathlib import Path

from dsv4.errors import UserError, shorten

_SMALL = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
)


def files_of_model(folder: Path) -> list[Path]:
    """The files that make up a model's folder, which need not be there: small ones and shards."""
    return [*(folder / name for name in _SMALL), *folder.glob("*.safetensors")]


def is_new_shard(folder: Path, path: Path) -> bool:
    """Whether a file that is yet to be made would be taken for weights of the model: without an
    index every ``.safetensors`` file of the folder is.
    """
    place = Path(os.path.realpath(path))
    is_inside = place.parent == Path(os.path.realpath(folder))
    return is_inside and place.suffix == ".safetensors" and not place.exists()


def model_file(folder: str | Path, name: str) -> Path:
    """``folder/name``, which need not exist. Raises ``UserError`` for a link that leads nowhere or
    out of the folder, and for anything but a regular file.
    """
    path = Path(folder) / name
    if path.is_symlink() or path.exists():
        target = resolve_inside(Path(folder), name, "the folder listing")
        if not target.exists():
            raise UserError(f"{path}: found a link to {target}, which does not exist")
        if not target.is_file():
            raise UserError(f"{path}: cannot be read (found something else than a regular file)")
    return path


def resolve_inside(folder: Path, name: str, source: str) -> Path:
    """``folder/name`` when that file really lies in the folder; ``source`` names who asked for it
    in errors.

    Links may lead to another file of the folder or, in a Hugging Face cache
    (``snapshots/REVISION``), to its ``blobs``. Raises ``UserError`` for anything else.
    """
    unresolved = f"{folder}: {shorten(name)} named by {source} cannot be resolved"
    try:
        home = folder.resolve()
        target = (folder / name).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{unresolved} ({error})") from None
    if target.is_symlink():  # From Python 3.13 on a loop is no error there.
        raise UserError(f"{unresolved} (a loop of links)")
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(root) for root in allowed):
        raise UserError(
            f"{folder}: {shorten(name)} named by {source} leads to {target}, outside the folder"
        )
    return target
