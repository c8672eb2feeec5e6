"""An answer other than 200: its status, and what the body says, as vLLM and the guard write it."""

from __future__ import annotations

import json
import re

from legroom.records import dataclass

_LONGEST = 300
_UNSUPPORTED = re.compile(r"does not support \w+ API")
_GUARD_CODES = frozenset({"prompt_too_long", "output_too_long"})


@dataclass(frozen=True)
class ServerRefusal:
    """Why a request was not served."""

    status: int
    message: str
    code: str = ""
    """The name that the body gives the error; vLLM repeats the status there, which is not kept."""

    @classmethod
    def read(cls, status: int, body: str) -> ServerRefusal:
        """From a response's body, whatever it is."""
        try:
            document = json.loads(body)
            error = document.get("error", document)
        except (ValueError, AttributeError):
            return cls(status, body)
        if not isinstance(error, dict):
            return cls(status, str(error))
        code = error.get("code")
        return cls(
            status, str(error.get("message", body)), code if isinstance(code, str) and not code.isdecimal() else ""
        )

    @property
    def is_unserved(self) -> bool:
        """Whether this kind of request is not served at all.

        vLLM has no such route for a pooling model (404), or says that the model does not support it (501; 400 in older
        releases).
        """
        return self.status in (404, 501) or _UNSUPPORTED.search(self.message) is not None

    @property
    def is_by_guard(self) -> bool:
        """Whether it is the guard's policy that refuses: the server was never asked."""
        return self.code in _GUARD_CODES

    def __str__(self) -> str:
        text = f"{self.message} ({self.code})" if self.code else self.message
        return f"{self.status}: {' '.join(text.split())[:_LONGEST]}"
