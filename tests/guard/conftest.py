"""What every test of the guard may use."""

import asyncio
import inspect

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test that is a coroutine gets an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**given))
    return True


@pytest.fixture
def policy(tmp_path):
    def write(text):
        path = tmp_path / "policy.toml"
        path.write_text(text)
        return str(path)

    return write
