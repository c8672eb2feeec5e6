"""A chart's template is read with the values beside it."""

from pathlib import Path

import pytest

from legroom.deployments.helm_chart import render_chart_template
from legroom.deployments.source_text import Text
from legroom.lint.linter import LintOptions, lint_files

VALUES = """\
image: {repository: vllm/vllm-openai, tag: ""}
model: org/m
port: 8000
tokens: 4096
prefix: true
args:
  - --swap-space
  - "4"
env:
  - name: HF_HOME
    value: /cache
backends:
  - {name: a, gpus: 1}
  - {name: b}
"""
HELPERS = '{{- define "x.image" -}}{{ .repository }}:{{ .tag | default "v0.20.0" }}{{- end -}}\n'


def chart(folder: Path, template: str, values: str = VALUES) -> Path:
    (folder / "templates").mkdir(parents=True)
    (folder / "values.yaml").write_text(values)
    (folder / "Chart.yaml").write_text("name: x\nappVersion: v0.11.0\n")
    (folder / "templates" / "_helpers.tpl").write_text(HELPERS)
    path = folder / "templates" / "deployment.yaml"
    path.write_text(template)
    return path


def rendered(folder: Path, template: str) -> str:
    path = chart(folder, template)
    result = render_chart_template(Text(str(path), template))
    assert result is not None
    return result.text


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("a: {{ .Values.model }}", "a: org/m"),
        ("a: {{ .Values.port | quote }}", 'a: "8000"'),
        ("a: {{ .Values.image.tag | default .Chart.AppVersion }}", "a: v0.11.0"),
        ("a: {{ .Values.none | default 3 }}", "a: 3"),
        ('a: {{ include "x.image" .Values.image }}', "a: vllm/vllm-openai:v0.20.0"),
        ("a:\n{{- toYaml .Values.args | nindent 2 }}", 'a:\n  - --swap-space\n  - "4"'),
        ("{{- if .Values.prefix }}a: 1{{ else }}a: 2{{ end }}", "a: 1"),
        ("{{ if not .Values.prefix }}a{{ else if gt (int .Values.port) 1 }}b{{ else }}c{{ end }}", "b"),
        ("{{ if and .Values.prefix (eq .Values.model `org/m`) }}a{{ end }}", "a"),
        ("{{ with .Values.image }}{{ .repository }} {{ $.Values.port }}{{ end }}", "vllm/vllm-openai 8000"),
        ("{{ range .Values.backends }}{{ .name }}{{ .gpus | default 2 }} {{ end }}", "a1 b2 "),
        ("{{ range $i, $e := .Values.env }}{{ $i }}{{ $e.name }}{{ end }}", "0HF_HOME"),
        ("{{ $m := .Values.model }}{{ printf `%s-%s` $m `x` }}", "org/m-x"),
        ("a: {{ (.Values.gone).tag | default `y` }}{{/* why */}}", "a: y"),
        ("a: {{ .Release.Name }}", "a: $_template_"),
        ('a: {{ include "other" . }}', "a: $_template_"),
    ],
)
def test_values_conditions_loops_and_named_templates_are_rendered_and_the_unknown_stays_open(
    template, expected, tmp_path
):
    assert rendered(tmp_path, template) == expected


TEMPLATE = """\
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "gone.name" . }}
spec:
  selector: {matchLabels: {app: llm}}
  template:
    spec:
      containers:
        - name: vllm
          image: {{ include "x.image" .Values.image | quote }}
          args:
            - --model
            - {{ .Values.model }}
            {{- toYaml .Values.args | nindent 12 }}
          resources:
            limits:
              nvidia.com/gpu: 1
"""


def test_a_finding_points_at_the_line_of_the_values(tmp_path):
    chart(tmp_path, TEMPLATE)
    report = lint_files([str(tmp_path)], LintOptions())
    errors = [finding for finding in report.findings if finding.severity == "error"]
    places = [(finding.rule, Path(finding.place.path).name, finding.place.line) for finding in errors]
    assert places == [("flag-removed", "values.yaml", 7)]
    assert not report.unread


def test_lines_that_are_not_known_leave_the_server_unjudged_and_are_said(tmp_path):
    chart(tmp_path, TEMPLATE.replace("toYaml .Values.args", 'include "gone.args" .'))
    report = lint_files([str(tmp_path)], LintOptions())
    assert not [finding for finding in report.findings if finding.severity != "note"]
    assert len(report.unread) == 1


def test_a_flag_that_only_other_values_give_is_noted(tmp_path):
    more = "            {{- if .Values.gone }}\n            - --swap-space\n            {{- end }}\n"
    chart(tmp_path, TEMPLATE.replace("            {{- toYaml .Values.args | nindent 12 }}\n", more))
    found = lint_files([str(tmp_path / "templates")], LintOptions()).findings
    assert [(each.severity, each.place.line) for each in found if each.rule == "flag-removed"] == [("note", 16)]


@pytest.mark.parametrize(
    "template",
    ["a: {{ end }}", "{{ if }}", "{{ include }}", "{{ gt `a` 1 }}", "{{ ( }}", "{{ define x }}{{ end }}", "{{" * 999],
)
def test_a_template_that_is_not_understood_is_no_failure(template, tmp_path):
    path = chart(tmp_path, template)
    (tmp_path / "templates" / "_more.tpl").write_text(template)
    assert not lint_files([str(path)], LintOptions()).findings
