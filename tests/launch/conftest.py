"""Programs without a GPU: their launches are written down."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from dsv4.launch import prepared, program
from tests.launch.fake_driver import Driver, bindings


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    driver = Driver()
    names = ("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID")
    fake = SimpleNamespace(**{name: getattr(bindings, name) for name in names})
    fake.cuLaunchKernelEx = driver.launch
    prepared._attributes.cache_clear()
    for module in (program, prepared):
        monkeypatch.setattr(module, "driver", lambda: fake)
    monkeypatch.setattr(prepared, "loaded", lambda kernel, _: kernel)
    monkeypatch.setattr(prepared, "allow_shared_memory", lambda *_: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100, raising=False)
    yield driver
    prepared._attributes.cache_clear()
