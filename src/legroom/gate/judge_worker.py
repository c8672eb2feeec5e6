"""One worker process of the gate: an object at a time from standard input, its judgement on standard output.

What an object makes a worker do can take long or grow large; the process is what bounds both.
`python -m legroom.gate.judge_worker`
"""

from __future__ import annotations

import json
import resource
from contextlib import suppress
from typing import BinaryIO

from legroom.gate.judgement import Judgement, judge
from legroom.web.worker import Frame, answer_frames

_MOST_MEMORY_BYTES = 1 << 30
_OK, _BUG = 200, 500


def main() -> None:
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY_BYTES, _MOST_MEMORY_BYTES))
    answer_frames(_answered)


def _answered(frame: Frame, source: BinaryIO) -> tuple[int, bytes]:
    try:
        request = json.loads(frame.body.partition(b"\n")[2])
        answer = judge(request["object"], request["default_gpu"], advice=request["advice"], hub=request["hub"])
        return _OK, json.dumps(answer.to_json()).encode()
    except MemoryError:
        return _OK, json.dumps(Judgement("not_understood", ("Not understood: it is too large.",)).to_json()).encode()
    except Exception:
        import traceback  # noqa: PLC0415

        traceback.print_exc()
        return _BUG, b"{}"


if __name__ == "__main__":
    main()
