"""Requests of all kinds at once, many of which are left or malformed: nothing hangs."""

import pytest

from tests.serve.running import Running
from tests.serve.storm import storm

pytestmark = pytest.mark.slow


def test_no_request_hangs_and_the_server_answers_afterwards(
    demo: Running, caplog: pytest.LogCaptureFixture
) -> None:
    found = storm(demo.url, 60)
    assert found.total() == 60
    assert {"left", "200", "400"} <= found.keys() <= {"left", "200", "400", "503"}
    demo.wait_until(0)
    assert demo.service.fault is None
    assert caplog.text == ""
    assert demo.post("/completions", prompt="a", max_tokens=1).status_code == 200
