"""What two families of readers disagreed on over 1,340 public files: each kind of difference, in our own words."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.cli.main import main
from legroom.deployments.deployment import Deployment, deployment_from_command, deployment_from_file
from legroom.deployments.file_reader import read_file
from legroom.deployments.subjects import StartedServer
from legroom.deployments.systemd_unit import seconds_of_span
from legroom.errors import LegroomError
from legroom.facts.releases import latest
from legroom.lint.linted_parts import LintedPart, linted_parts


def linted_servers(path: str, text: str) -> list[StartedServer]:
    parts = [part for part in linted_parts(path, text, latest()) if isinstance(part, LintedPart)]
    return [
        subject for part in parts for subject in part.subjects if isinstance(subject, StartedServer) and subject.words
    ]


def words_of(server: StartedServer) -> str:
    return " ".join(word.text for word in server.words)


def servers(text: str, path: str = "start.sh") -> list[str]:
    """Every server of a text, as lint sees it; plan's reader must see the same."""
    linted = [words_of(server) for server in linted_servers(path, text)]
    assert linted == [words_of(server) for part in read_file(path, text, latest()) for server in part.servers]
    return linted


def planned(tmp_path: Path, text: str, name: str = "start.sh") -> Deployment:
    (tmp_path / name).write_text(text)
    return deployment_from_file(tmp_path / name)


# What plan --file refused and lint understood


SCRIPT = """\
#!/bin/bash
ARGS=(--max-model-len 8192 --tensor-parallel-size 2)
serve() { vllm serve org/model "$@"; }
serve "${ARGS[@]}" --port 8001
"""


def test_arrays_and_functions_of_a_script_are_understood(tmp_path):
    assert servers(SCRIPT) == ["vllm serve org/model --max-model-len 8192 --tensor-parallel-size 2 --port 8001"]
    args = planned(tmp_path, SCRIPT).args
    assert (args.model, args.max_model_len, args.tensor_parallel_size) == ("org/model", 8192, 2)


DOCKERFILE = """\
FROM vllm/vllm-openai:v0.11.0
ENV VLLM_LOGGING_LEVEL=INFO MODEL=org/model
%s
"""


@pytest.mark.parametrize(
    "start",
    [
        'CMD ["--model", "org/model", "--max-model-len", "8192"]',
        'ENTRYPOINT ["vllm", "serve"]\nCMD ["org/model", "--max-model-len=8192"]',
        "CMD vllm serve $MODEL --max-model-len 8192",
        'CMD ["sh", "-c", "exec vllm serve $MODEL --max-model-len 8192"]',
    ],
)
def test_a_dockerfile_is_read(tmp_path, start):
    read = planned(tmp_path, DOCKERFILE % start, "Dockerfile")
    assert (read.args.model, read.args.max_model_len, read.release.version) == ("org/model", 8192, "0.11.0")
    assert read.read_as == "a Dockerfile"


def test_a_supervisord_file_is_read(tmp_path):
    text = """\
[program:llm]
command=/opt/venv/bin/vllm serve org/model
    --max-model-len 8192
environment=VLLM_USE_V1="1",CUDA_VISIBLE_DEVICES="0,1"
"""
    read = planned(tmp_path, text, "supervisor.conf")
    assert (read.args.model, read.args.max_model_len, read.gpu_count) == ("org/model", 8192, 2)


def test_a_markdown_document_is_read_block_by_block(tmp_path):
    text = """\
Set `MODEL` first.

```bash
export VLLM_USE_V1=0
```

Then start it:

```console
$ vllm serve org/model --max-model-len 8192
```
"""
    read = planned(tmp_path, text, "README.md")
    assert (read.args.model, read.args.max_model_len) == ("org/model", 8192)
    assert read.args.env == {}  # another block is another shell


def test_the_first_server_of_a_document_is_the_one_that_stands_first(tmp_path):
    text = "Run:\n\n    vllm serve org/first --port 1\n\n```bash\nvllm serve org/second --port 2\n```\n"
    read = planned(tmp_path, text, "README.md")
    assert read.args.model == "org/first"
    assert any("2 servers" in note and "line 3" in note for note in read.notes)


def test_a_program_that_starts_a_server_is_read(tmp_path):
    text = (
        'import subprocess\nMODEL = "org/model"\ncmd = ["vllm", "serve", MODEL]\ncmd += ["--max-model-len", "8192"]\n'
    )
    assert planned(tmp_path, text, "start.py").args.max_model_len == 8192


def test_a_file_of_another_tool_is_read_with_its_own_variables(tmp_path):
    text = "envs:\n  MODEL: org/model\nrun: |\n  vllm serve $MODEL --max-model-len 8192\n"
    assert planned(tmp_path, text, "task.yaml").args.model == "org/model"
    assert servers(text, "task.yaml") == ["vllm serve org/model --max-model-len 8192"]


def test_a_document_inside_of_yaml_is_read_block_by_block():
    text = (
        "guide: |\n  Start it:\n\n  ```bash\n  vllm serve org/a --port 1\n  ```\n\n"
        "  ```bash\n  vllm serve org/b\n  ```\n"
    )
    assert servers(text, "recipe.yaml") == ["vllm serve org/a --port 1", "vllm serve org/b"]


def test_the_release_that_a_file_installs_is_the_servers():
    assert deployment_of_one("setup: pip install vllm==0.10.2\nrun: vllm serve org/model --port 1\n") == "0.10.2"


def deployment_of_one(text: str) -> str:
    (server,) = linted_servers("task.yaml", text)
    return server.named_release or ""


# What lint did not see and plan --file understood


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--model_id=org/model", ["vllm serve --model=org/model"]),
        ("--model_id=org/model, --task=text_generation", ["vllm serve --model=org/model"]),
        ("--model_id=org/model, --backend=huggingface", []),
        ("--model_name=name, --http_port, 8081", ["vllm serve --served-model-name=name --model=org/stored"]),
    ],
)
def test_kserves_names_are_read_as_vllms(argument, expected):
    text = (
        "apiVersion: serving.kserve.io/v1beta1\nkind: InferenceService\nspec:\n  predictor:\n    model:\n"
        f"      modelFormat: {{name: huggingface}}\n      storageUri: hf://org/stored\n      args: [{argument}]\n"
    )
    assert servers(text, "isvc.yaml") == expected


def test_variables_of_a_container_reach_the_script_it_runs():
    text = """\
apiVersion: v1
kind: Pod
spec:
  containers:
  - image: vllm/vllm-openai:v0.11.0
    env: [{name: MODEL, value: org/model}, {name: LEN, value: "8192"}]
    command: [sh, -c]
    args: ["vllm serve $MODEL --max-model-len ${LEN}"]
"""
    assert servers(text, "pod.yaml") == ["vllm serve org/model --max-model-len 8192"]


def test_a_group_of_pods_has_the_gpus_of_all_of_them():
    text = """\
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
spec:
  leaderWorkerTemplate:
    size: 2
    leaderTemplate: {spec: {containers: [{image: a, command: [vllm, serve, org/m, -tp, "16"], resources: %s}]}}
"""
    (server,) = linted_servers("lws.yaml", text % "{limits: {nvidia.com/gpu: 8}}")
    assert server.gpu_count == 16


def test_a_container_under_a_name_of_its_operators_own_is_read():
    text = """\
apiVersion: example.com/v1
kind: Graph
spec:
  services:
    worker: {podSpec: {mainContainer: {image: a/b, command: [vllm, serve], args: [org/model, --max-num-seqs, "8"]}}}
"""
    assert servers(text, "graph.yaml") == ["vllm serve org/model --max-num-seqs 8"]


def test_an_image_of_any_name_is_known_by_flags_that_only_vllm_has(tmp_path):
    line = "docker run --gpus 1 registry.example/llm:3 --model org/model --max-model-len 8192"
    assert servers(line) == ["vllm serve --model org/model --max-model-len 8192"]
    assert servers("docker run registry.example/llm:3 --model org/model") == []
    assert servers("docker run registry.example/llm-sim:3 --model org/model --max-model-len 8192") == []


def test_a_snippet_without_imports_means_vllms_engine():
    assert servers("llm = LLM('org/model', max_model_len=8192)", "a.py") == [
        "vllm serve org/model --max-model-len 8192"
    ]
    assert servers("from other import LLM\nllm = LLM('org/model', max_model_len=8192)", "a.py") == []
    assert servers("class LLM: ...\nllm = LLM('org/model', max_model_len=8192)", "a.py") == []


def test_constants_and_dictionaries_of_a_program_are_its_arguments():
    text = "from vllm import LLM\nKNOWN = {'max_model_len': 8192}\nllm = LLM(model=NAME, **KNOWN)\n"
    assert servers(text, "a.py") == ["vllm serve --model=$value --max-model-len 8192"]


def test_an_engine_whose_arguments_are_left_out_has_no_model():
    assert servers("from vllm import LLM\nllm = LLM(...)\n", "a.py") == ["vllm serve"]


@pytest.mark.parametrize("mark", ["`", "^"])
def test_lines_of_windows_shells_are_continued(mark):
    assert servers(f"vllm serve org/model {mark}\n  --max-model-len 8192\n") == [
        "vllm serve org/model --max-model-len 8192"
    ]


def test_variables_before_a_command_behind_env_are_the_servers():
    assert deployment_from_command("sudo env CUDA_VISIBLE_DEVICES=0,1 vllm serve m").gpu_count == 2


# What both read wrongly


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vllm serve m --port 8000 > x.log", "vllm serve m --port 8000"),
        ("vllm serve m --port 8000 >> x.log 2>&1 &", "vllm serve m --port 8000"),
        ("vllm serve m --port 8000 2> x.log", "vllm serve m --port 8000"),
        ("vllm serve m 2>x.log --port 8000", "vllm serve m --port 8000"),
        ("vllm serve m --port 8000 &> x.log", "vllm serve m --port 8000"),
        ("vllm serve m &> x.log --port 8000", "vllm serve m --port 8000"),
        ("vllm serve m --port 8000 < /dev/null", "vllm serve m --port 8000"),
    ],
)
def test_only_a_digit_that_touches_a_redirection_is_a_file_descriptor(line, expected):
    assert servers(line) == [expected]


def test_a_variable_between_single_quotes_is_a_variable_and_inside_of_them_is_none():
    text = """X=1\nvllm serve m --kv-transfer-config '{"a": "'"$X"'", "b": "$X"}'\n"""
    assert servers(text) == ['vllm serve m --kv-transfer-config {"a": "1", "b": "$X"}']


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("docker run -itp 8000:8000 vllm/vllm-openai org/m", "vllm serve org/m"),
        ("docker run -p8000:8000 -v/a:/b vllm/vllm-openai org/m", "vllm serve org/m"),
        ("docker run -d --rm -eVLLM_USE_V1=1 vllm/vllm-openai serve org/m", "vllm serve org/m"),
        ("docker run vllm/vllm-openai vllm serve m", "vllm serve m"),
        ("python3 -u -m vllm.entrypoints.openai.api_server --model m", None),
    ],
)
def test_options_before_a_server_are_not_taken_for_it(line, expected):
    assert servers(line) == [expected or line]


def test_a_container_sees_only_the_variables_it_is_given():
    text = "export VLLM_USE_V1=1 VLLM_LOGGING_LEVEL=INFO\ndocker run -e VLLM_USE_V1 vllm/vllm-openai org/m\n"
    assert deployment_from_command(text).args.env == {"VLLM_USE_V1": "1"}


@pytest.mark.parametrize(
    "text",
    [
        "# vllm serve org/old --port 1\necho done\n",
        "echo 'run vllm serve org/model now'\n",
        "docker run -it vllm/vllm-openai:latest bash\n",
        "docker run --rm vllm/vllm-openai:latest nvidia-smi\n",
    ],
)
def test_what_is_only_written_about_a_server_starts_none(tmp_path, text):
    assert servers(text) == []
    with pytest.raises(LegroomError, match=r"no vLLM server in start\.sh"):
        planned(tmp_path, text)


@pytest.mark.parametrize(
    "image", ["registry.example/ai-dynamo/vllm-runtime:1", "vllm/vllm-router:1", "example/vllm-simulator"]
)
def test_an_image_that_only_has_vllm_in_its_name_starts_no_server(image):
    text = f"apiVersion: v1\nkind: Pod\nspec: {{containers: [{{image: {image}}}]}}\n"
    assert servers(text, "pod.yaml") == []


def test_a_template_is_refused_only_where_it_is_one(tmp_path):
    quoted = 'apiVersion: v1\nkind: Pod\nspec: {containers: [{image: a, command: [vllm, serve, "{{ .model }}"]}]}\n'
    with pytest.raises(LegroomError, match="is a template"):
        planned(tmp_path, quoted, "pod.yaml")
    beside = quoted.replace("{{ .model }}", "org/model") + 'metadata: {name: "{{ .name }}"}\n'
    assert planned(tmp_path, beside, "pod.yaml").args.model == "org/model"


def test_a_quote_that_is_never_closed_is_said_only_where_it_matters(tmp_path):
    assert planned(tmp_path, "vllm serve m --port 1\necho 'never closed\n").args.model == "m"
    with pytest.raises(LegroomError, match="never closed"):
        planned(tmp_path, "vllm serve m --served-model-name 'x --port 1\n")


def test_numbers_in_a_config_file_stay_numbers():
    text = "model: m\nmax-model-len: 8192\ncompilation-config: {level: 0, use_inductor: false, name: '1'}\n"
    (config,) = servers(text, "config.yaml")
    assert config.endswith('--compilation-config {"level": 0, "use_inductor": false, "name": "1"}')


# The words themselves


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ue000"), min_size=1), max_size=6))
def test_quoted_words_are_read_as_they_were(words):
    words = [word for word in words if word not in ("...", "…")]
    line = shlex.join(["vllm", "serve", "m", *words])
    (server,) = linted_servers("start.sh", line)
    assert [word.text for word in server.words[3:]] == words


def test_every_word_knows_its_place():
    text = "MODEL=org/m\nvllm serve $MODEL \\\n  --max-model-len 8192 \\\n  --port 1\n"
    (server,) = linted_servers("start.sh", text)
    assert [(word.text, server.place_of(word).line, server.place_of(word).column) for word in server.words[2:]] == [
        ("org/m", 2, 12),
        ("--max-model-len", 3, 3),
        ("8192", 3, 19),
        ("--port", 4, 3),
        ("1", 4, 10),
    ]


def test_plan_reads_a_file_of_every_kind(tmp_path, capsys):
    files = {
        "start.sh": SCRIPT.replace("org/model", "llama-3.1-8b"),
        "Dockerfile": 'FROM vllm/vllm-openai\nCMD ["llama-3.1-8b", "-tp", "2", "--max-model-len", "8192"]\n',
        "llm.conf": "[program:llm]\ncommand=vllm serve llama-3.1-8b -tp 2 --max-model-len 8192\n",
        "README.md": "```\nvllm serve llama-3.1-8b -tp 2 --max-model-len 8192\n```\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert main(["plan", "--file", str(tmp_path / name), "--gpu", "h100", "--json"]) == 0
        assert '"max_model_len": 8192' in capsys.readouterr().out


@pytest.mark.parametrize("module", ["yaml", "legroom.deployments.file_reader", "legroom.deployments.python_reader"])
def test_a_plain_command_line_needs_no_reader_of_files(module):
    words = ["plan", "--gpu", "h100", "--", "vllm", "serve", "llama-3.1-8b"]
    code = f"import sys; from legroom.cli.main import main; main({words!r}); sys.exit({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_a_tmpfs_with_options_at_dev_shm_is_seen():
    text = "docker run --gpus all --tmpfs /dev/shm:rw,size=8g vllm/vllm-openai:v0.10.0 --model org/model\n"
    assert [server.shm for server in linted_servers("start.sh", text)] == ["mounted"]


def test_an_empty_variable_takes_the_default_behind_a_colon_only():
    text = "N=\nvllm serve org/model --port ${N:-8001} --seed=${N-7}\n"
    assert servers(text) == ["vllm serve org/model --port 8001 --seed="]


def test_a_folder_above_that_may_not_be_listed_hides_nothing_else(tmp_path, monkeypatch):
    listed = Path.iterdir

    def refused(folder: Path):
        if folder == tmp_path:
            raise PermissionError
        return listed(folder)

    (tmp_path / "app").mkdir()
    monkeypatch.setattr(Path, "iterdir", refused)
    assert planned(tmp_path / "app", "vllm serve org/model\n").args.model == "org/model"


def test_a_length_in_digits_of_another_script_ends_in_no_traceback():
    assert deployment_from_command("vllm serve org/model --max-model-len ²k").args.max_model_len is None


def test_a_time_in_units_that_are_not_read_is_no_number_of_seconds():
    assert seconds_of_span("2w") is None
    assert seconds_of_span("5min 20s") == 320
