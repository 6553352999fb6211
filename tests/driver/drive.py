"""The type of the ``drive`` fixture."""

from collections.abc import Callable

from tests.driver.conftest import Result

Drive = Callable[..., Result]
