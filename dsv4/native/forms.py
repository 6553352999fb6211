"""The native forms that there are, by the activations that they multiply."""

from collections.abc import Mapping

from dsv4.engine_config import ActivationMode
from dsv4.native.form import NativeForm

NATIVE_FORMS: Mapping[ActivationMode, NativeForm] = {}
