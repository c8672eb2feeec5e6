"""Every file says that legroom wrote it, so that writing it again needs no force and replacing another's does."""

import importlib

import pytest
from planned import request

from legroom.cli.export import FORMATS
from legroom.cli.main import main

OPTIONS = {"with_guard": True, "with_sidecar": True, "language": "zh"}


@pytest.mark.parametrize("module", FORMATS.values())
def test_every_file_is_known_again(module):
    exporter = importlib.import_module(module)
    options = {} if exporter.NAME in {"helm-values", "kserve", "llm-d-values"} else OPTIONS
    for file in exporter.files(request("8b-h100", **options)):
        assert "Written by legroom" in file.text or '"uid": "legroom-' in file.text, file.path


def test_an_export_may_be_written_again(tmp_path):
    for speed in ("200MB/s", "1GB/s"):
        words = ["llama-3.1-8b", "--gpu", "h100", "--disk-speed", speed, "-o", str(tmp_path / "start.sh")]
        assert main(["export", "script", *words]) == 0
