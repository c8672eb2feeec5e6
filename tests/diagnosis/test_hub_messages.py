"""Which of the Hub's messages is which: no such name there, not reachable, or a folder that is not here."""

from __future__ import annotations

import pytest

import legroom

HEAD = "(APIServer pid=1) INFO 11-17 06:53:54 [api_utils.py:347]  version 0.32.0\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        # vLLM 0.32.0 with HF_HUB_OFFLINE=1 and an empty cache.
        (
            "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder for the "
            "specified revision on the local disk and outgoing traffic has been disabled.",
            "hub_unreachable",
        ),
        # vLLM 0.32.0 with the folder /models/llama, which is not there.
        (
            "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or "
            "'namespace/repo_name': '/models/llama'. Use `repo_type` argument if needed.",
            "model_path_wrong",
        ),
        ("OSError: /models/llama is not a local folder and is not a valid model identifier", "model_path_wrong"),
        ("OSError: owner/name is not a local folder and is not a valid model identifier", "hub_not_found"),
        (
            "huggingface_hub.errors.RemoteEntryNotFoundError: Entry Not Found for url: https://huggingface.co/a",
            "hub_not_found",
        ),
        ("huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1-6)", "hub_not_found"),
    ],
)
def test_a_message_of_the_hub_is_read_as_what_it_says(text: str, found: str) -> None:
    diagnosis = legroom.diagnose(f"{HEAD}{text}\n")
    assert [item.id for item in diagnosis.findings[0].evidence] == [found]
