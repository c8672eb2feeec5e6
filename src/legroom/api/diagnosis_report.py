"""`legroom.diagnose`."""

from pathlib import Path
from typing import Any

from legroom.diagnosis.diagnosis_json import readings_json
from legroom.diagnosis.finding import Finding
from legroom.diagnosis.fixes.failed_run import Hints
from legroom.diagnosis.log_diagnosis import LogReading, read_log
from legroom.drawing.terminal import PLAIN, Style
from legroom.errors import LegroomError
from legroom.facts.diagnosis_texts import Language
from legroom.records import dataclass
from legroom.render.diagnosis_text import readings_text
from legroom.vllm_logs.log_sources import names_a_file, pieces_of_file


@dataclass(frozen=True)
class DiagnosisReport:
    """The result of `legroom.diagnose`, as text or JSON."""

    reading: LogReading

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The causes found in the last run with any evidence, the likeliest first; empty where none is found."""
        return self.reading.runs[0].findings if self.reading.runs else ()

    def text(self, style: Style | None = None, language: Language = "en") -> str:
        """The text of `legroom diagnose`."""
        return readings_text([self.reading], style or PLAIN, language)

    def json(self) -> dict[str, Any]:
        """The document that `legroom diagnose --json` prints."""
        return readings_json([self.reading])

    def __str__(self) -> str:
        return self.text()


def diagnose(
    log: str | Path,
    *,
    command: str | None = None,
    model: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    vllm: str | None = None,
) -> DiagnosisReport:
    """Diagnoses a failed server; `log` is the path of its log or the text itself.

    A string is a path where such a file exists, else the text of a log. The other arguments complete what the log does
    not show.
    """
    hints = Hints(command, model, gpu, gpus, vllm)
    if not isinstance(log, str) or names_a_file(log):
        return DiagnosisReport(read_log(pieces_of_file(str(log)), str(log), hints))
    reading = read_log([log.encode("utf-8", "replace")], "the log", hints)
    is_log = "\n" in log or (" " in log.strip() and reading.runs and reading.runs[0].verdict != "not understood")
    if not is_log:
        reason = "the log is empty"
        if log.strip():
            reason = f"there is no file {log[:200]!r}, and it is not a line of a vLLM log"
        raise LegroomError(reason, "give the path of a vLLM log, or the text that the server printed")
    return DiagnosisReport(reading)
