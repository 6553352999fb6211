"""A native table, and the choice between it and the portable one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dsv4.errors import UserError
from dsv4.native.verdict_file import package_version, verdict_for
from dsv4.ops.tables import Table


@dataclass(frozen=True)
class NativeForm:
    """A table with native kernels, for the devices that ``runs_on`` says.

    ``checks``: the function ``module:function`` that lists the checks which its kernels have to
    pass (``dsv4.native.check``). ``packages``: what compiles them.
    """

    table: Table
    checks: str
    runs_on: Callable[[torch.device], bool]
    packages: tuple[str, ...] = ()


def native_or_portable(
    form: NativeForm | None, portable: Table, devices: Sequence[torch.device], required: bool
) -> Table:
    """The form's table, with ``portable`` behind it, where its kernels have passed their checks on
    every model of GPU among ``devices``.

    Else ``portable``, which then says why, unless nothing native is made for these devices. Raises
    ``UserError`` instead where native kernels are ``required``.
    """
    if form is None or not all(map(form.runs_on, devices)):
        if required:
            raise UserError(
                f"EngineConfig.require_native: found {_named(devices)}, "
                "expected GPUs that native kernels are made for"
            )
        return portable
    complaint = _complaint(form, devices)
    if complaint is None:
        return replace(form.table, portable=portable)
    if required:
        raise UserError(f"EngineConfig.require_native: {complaint}")
    return replace(portable, refused=complaint)


def _complaint(form: NativeForm, devices: Sequence[torch.device]) -> str | None:
    """Of a package that is missing, or of the first device whose model has not passed."""
    for package in form.packages:
        if package_version(package) is None:
            return f"needs {package}, found none: pip install dsv4[cuda]"
    models: dict[str, torch.device] = {}
    for device in devices:
        models.setdefault(_name(device), device)
    for device in models.values():
        complaint = verdict_for(form.checks, device).complaint
        if complaint is not None:
            return complaint
    return None


def _named(devices: Sequence[torch.device]) -> str:
    return ", ".join(dict.fromkeys(map(_name, devices)))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
