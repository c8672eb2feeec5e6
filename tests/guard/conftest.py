"""What every test of the guard may use."""

import pytest


@pytest.fixture
def policy(tmp_path):
    def write(text):
        path = tmp_path / "policy.toml"
        path.write_text(text)
        return str(path)

    return write
