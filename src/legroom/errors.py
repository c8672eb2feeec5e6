"""The one exception that means "the user can do something about this"."""

from __future__ import annotations

OK = 0
ANSWER_IS_NO = 1
BAD_INPUT = 2
UNREACHABLE = 3


class LegroomError(Exception):
    """A mistake in the input or a missing resource, told in a sentence, with what to do about it.

    Surfaces print `message` and `hint` and leave with `exit_code`; anything else that escapes is a bug.
    """

    def __init__(self, message: str, hint: str = "", exit_code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
