"""The SDK is imported by the first of these tests: it takes a second, and other processes have no use for it."""

import sys
from contextlib import redirect_stderr

import pytest


@pytest.fixture(scope="session", autouse=True)
def sdk():
    # It keeps the standard error it finds for the servers it starts, and that of a test has no file descriptor.
    with redirect_stderr(sys.__stderr__):
        import mcp
    return mcp
