"""The compressor, once per form of its op."""

import pytest

from dsv4.ops.compressor import compress as torch_compress
from tests.ops import forms
from tests.ops.compressor.cases import Compress


@pytest.fixture
def compress(backend: str) -> Compress:
    return forms.part(backend, torch_compress, forms.compress)
