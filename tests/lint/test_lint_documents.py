"""Lint on a whole document, as people post them: rules, a dashboard and scripts in one text."""

import pytest

from legroom.facts.releases import release
from legroom.lint.linter import LintOptions, lint_texts

DOCUMENT = """\
Serving notes

The default --gpu-memory-utilization leaves room. Watch the cache, and restart when it is full.

Start it like this:

#!/bin/bash
set -e
export PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,garbage_collection_threshold:0.6"
export VLLM_ATTENTION_BACKEND=FLASHINFER

MODEL=/models/big
TP=2

python -m vllm.entrypoints.openai.api_server \\
    --model $MODEL \\
    --tensor-parallel-size $TP \\
    --gpu-memory-utilization 0.9 \\
    --max-num-seqs 64 \\
    --swap-space 4 \\
    --disable-log-requests \\
    --max-concurrent-batches 4 \\
    --dtype bfloat16 \\
    2>&1 | tee -a /var/log/serve_$(date +%Y%m%d).log

A line of prose about --swap-space follows, and one about vllm_gpu_cache_usage_perc.

Check it:

curl -s http://localhost:8000/metrics | grep -E "(vllm_num|vllm:num)"

If it hangs:

# free everything
pkill -9 -f "vllm.entrypoints"
nvidia-smi --gpu-reset -i 0
python -c "import torch; torch.cuda.empty_cache()"

Read the numbers in Python:

def use(metrics):
    return metrics.get("vllm_gpu_cache_usage_perc", 0), metrics.get("vllm:num_requests_running", 0)

Rules:

```yaml
groups:
- name: serving
  rules:
  - record: vllm:mine
    expr: sum(vllm:num_requests_running)
  - alert: CacheFull
    expr: vllm_gpu_cache_usage_perc > 0.9
    for: 5m
    annotations:
      summary: "use is {{ $value | humanizePercentage }}"
  - alert: Pressure
    expr: vllm:kv_cache_usage_perc > 0.95 and on (instance) vllm:num_requests_waiting > 0
  - alert: Silent
    expr: rate(vllm:request_success_total[5m]) == 0
  - alert: Mine
    expr: vllm:mine > 10
```

A dashboard:

```json
{
  "title": "Serving",
  "panels": [
    {"title": "cache", "targets": [{"expr": "vllm:kv_cache_usage_perc * 100"}]},
    {"title": "speed", "targets": [{"expr": "rate(vllm_generation_tokens_total{a=\\"b\\"}[1m]) / vllm_prompts"}]}
  ]
}
```

That is all.
"""


def linted(text, vllm=None, path="notes.txt", **options):
    return lint_texts([(path, text)], LintOptions(release(vllm) if vllm else None, **options))


def pairs(report):
    return [(finding.place.line, finding.rule) for finding in report.findings]


def line_of(text):
    return next(i for i, line in enumerate(DOCUMENT.splitlines(), 1) if text in line)


def test_every_wrong_name_and_flag_is_found_and_nothing_that_is_right():
    expected = {
        (line_of("expandable_segments"), "allocator-clash"),
        (line_of("expandable_segments"), "allocator-useless"),
        (line_of("VLLM_ATTENTION_BACKEND"), "env-unknown"),
        (line_of("python -m vllm"), "api-open"),
        (line_of("--swap-space 4"), "flag-removed"),
        (line_of("--disable-log-requests"), "flag-removed"),
        (line_of("--max-concurrent-batches"), "flag-unknown"),
        (line_of("grep -E"), "metric-grep"),
        (line_of("pkill"), "kill-by-pattern"),
        (line_of("--gpu-reset"), "gpu-reset"),
        (line_of("empty_cache"), "empty-cache"),
        (line_of("metrics.get"), "metric-unknown"),
        (line_of("expr: vllm_gpu"), "metric-unknown"),
        (line_of("expr: vllm_gpu"), "alert-full-pool"),
        (line_of("== 0"), "alert-no-traffic"),
        (line_of("vllm_prompts"), "metric-unknown"),
        (line_of("vllm_prompts"), "metric-foreign"),
    }
    assert set(pairs(linted(DOCUMENT))) == expected


def test_the_release_decides_what_is_wrong():
    old = linted(DOCUMENT, "0.6.3")
    assert "flag-removed" not in {finding.rule for finding in old.findings}
    assert "env-unknown" not in {finding.rule for finding in old.findings}
    renamed = [finding for finding in old.findings if "vllm:kv_cache_usage_perc" in finding.message]
    assert renamed
    assert all("vllm:gpu_cache_usage_perc" in finding.suggestion for finding in renamed)


def test_columns_point_at_the_name():
    lines = DOCUMENT.splitlines()
    for finding in linted(DOCUMENT).findings:
        if finding.rule in ("metric-unknown", "metric-grep", "flag-removed", "flag-unknown", "metric-foreign"):
            marked = lines[finding.place.line - 1][finding.place.column - 1 :][: finding.length]
            assert marked.startswith(("vllm", "--")), finding
            assert marked.split("{")[0] in finding.message


MARKDOWN = """\
# Notes

1. Alerts:

    ```yaml
    groups:
    - name: a
      rules:
      - alert: A
        expr: |
          vllm:nothing_of_the_kind > 1
          and vllm:num_requests_running > 0
    ```

Start it:

```console
$ vllm serve org/m --such-flag 1
$ docker run --gpus 2 vllm/vllm-openai:v0.10.2 --model org/m --tensor-parallel-size 2 --attention-backend FLASH_ATTN
```

```dockerfile
FROM vllm/vllm-openai:v0.32.0
ENV VLLM_ATTENTION_BACKEND=FLASH_ATTN
CMD ["org/m", "--swap-space", "4"]
```

```ini
[Service]
ExecStart=/opt/vllm/bin/vllm serve org/m --enable-chunked-prefill \\
  --guided-decoding-backend xgrammar
KillMode=process
```

```json
{"other": "data"}
```

```python
print("vllm_config")
```
"""


def test_code_blocks_are_read_each_by_its_kind():
    report = linted(MARKDOWN, path="notes.md")
    assert pairs(report) == [
        (11, "metric-foreign"),
        (18, "flag-unknown"),
        (19, "shm-missing"),
        (19, "flag-not-yet"),
        (24, "env-unknown"),
        (25, "flag-removed"),
        (31, "flag-removed"),
        (32, "unit-orphans"),
    ]
    assert report.unread == ()


@pytest.mark.parametrize(
    "line",
    [
        'vllm serve $MODEL --max-model-len $LEN --port ${PORT:-8000} "$@"',
        "vllm serve org/m --max-model-len <your length> --port <PORT>",
        "vllm serve org/m # --no-such-flag",
        "vllm serve org/m --max-model-len 8192 \\\n  ...",
        "echo 'vllm serve org/m --no-such-flag'",
        "vllm serve org/m --help=page",
        "docker run vllm/vllm-router:v1 vllm-router --no-such-flag",
        "docker run $IMAGE bash -c 'echo vllm'",
        "kubectl exec pod -- nvidia-smi -L",
        "pkill -f port-forward",
        "kill -0 $PID",
    ],
)
def test_what_is_right_or_not_known_is_left_alone(line):
    assert pairs(linted(line, path="start.sh")) == []


def test_a_document_without_any_of_it_is_skipped():
    report = linted("Dear reader,\n\nall is well.\n")
    assert report.findings == ()
    assert len(report.skipped) == 1


def test_a_command_between_lines_of_prose_is_read_with_its_continued_lines():
    report = linted(
        "The quickest way is a smaller length:\n"
        "python -m vllm.entrypoints.openai.api_server \\\n"
        "--model org/m \\\n"
        "--max-num-on-the-fly-batches 4\n"
        "This halves --the-memory of it, and vllm serve itself stays as it was.\n"
        "vllm serve is what to type.\n",
        path="page.txt",
    )
    assert pairs(report) == [(4, "flag-unknown")]


@pytest.mark.parametrize("text", ["```", "words\n~~~bash", "> ```sh"])
def test_a_document_may_end_where_a_code_block_begins(text):
    assert lint_texts([("a.md", text)], LintOptions()).findings == ()
