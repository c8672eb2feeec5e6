"""What a real format writes on stdout and stderr."""

import pytest
import yaml

from legroom.cli.main import main

SERVER = ("llama-3.1-8b", "--gpu", "h100", "--with-guard", "--with-sidecar")


@pytest.mark.parametrize("words", [("kubernetes", *SERVER), ("kubernetes", *SERVER, "--scaler", "hpa"), ("gate",)])
def test_a_stream_of_manifests_can_be_piped_into_kubectl(words, capsys):
    assert main(["export", *words]) == 0
    out = capsys.readouterr().out
    assert "\n# FROM " in out
    documents = [document for document in yaml.safe_load_all(out) if document is not None]
    assert len(documents) > 2
    assert all(document["kind"] for document in documents)


@pytest.mark.parametrize("name", ["helm-values", "docker"])
def test_more_gpus_than_a_machine_has_are_said(name, capsys):
    assert main(["export", name, "llama-3.1-405b", "--gpu", "h100", "-tp", "16", "--max-model-len", "16384"]) == 0
    assert "16 GPUs" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_refused_with_the_flags_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "kubernetes", "llama-3.1-8b", "--gpu", "rtx4090"]) == 2
    assert "change its flags to --max-model-len " in capsys.readouterr().err
