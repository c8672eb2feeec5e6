"""The exception for errors that the user can fix, and the exit codes."""

OK = 0
ANSWER_IS_NO = 1
BAD_INPUT = 2
UNREACHABLE = 3
INTERRUPTED = 130
"""As a shell reports SIGINT."""


class LegroomError(Exception):
    """An error in the input or a missing resource. Commands print `message` and `hint` and exit with `exit_code`; any
    other exception is a bug."""

    def __init__(self, message: str, hint: str = "", exit_code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
