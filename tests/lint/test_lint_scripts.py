"""Lint on shell scripts: the words that a shell would make of them, secrets, and processes that are ended."""

import pytest

from legroom.lint.linter import LintOptions, lint_texts


def findings(text, path="start.sh"):
    return [(finding.rule, finding.place.line) for finding in lint_texts([(path, text)], LintOptions()).findings]


# Words


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('BASE=(--port 1 --nope)\nARGS=("${BASE[@]}" --port 2)\nvllm serve org/m "${ARGS[@]}"', 1),
        ('OPTS="--port 1"\nOPTS+=" --nope"\nvllm serve org/m $OPTS', 2),
        ('OPTS="--port 1 --no"\nOPTS+="pe --seed 1"\nvllm serve org/m $OPTS', 1),
        ('CMD="vllm serve org/m --nope"\neval "$CMD"', 2),
        ('su - vllm -c "vllm serve org/m --nope"', 1),
        ('CMD="true\nvllm serve org/m \\\n  --nope"\nbash -c "$CMD"', 4),
        ("ssh gpu1 'vllm serve org/m --nope'", 1),
        ('tmux new-session -d -s v "vllm serve org/m --nope"', 1),
        ("vllm serve org/m ${EXTRA:+--nope}", 1),
        ('vllm serve org/m ${KEY:+--nope "$KEY"} --port 1', 1),
        ('declare -a ARGS=(--port 1\n --nope)\nvllm serve org/m "${ARGS[@]}"', 2),
        ('run() { local -a ARGS=(org/m --nope); vllm serve "${ARGS[@]}"; }', 1),
        ('ARGS=(--model org/m --nope)\nvllm serve org/m "${ARGS[@]:2}"', 1),
        ('ARGS=(--port 1 --nope)\nvllm serve org/m "${ARGS[@]:2:1}"', 1),
        ('more=(\n --nope\n)\nvllm serve org/m ${more[@]+"${more[@]}"}', 2),
    ],
)
def test_a_flag_is_found_however_the_script_puts_it_there(text, line):
    assert findings(text) == [("flag-unknown", line)]


@pytest.mark.parametrize(
    "text",
    [
        "echo vllm serve org/m --nope",
        "vllm serve {your model folder} --port {port} --max-model-len=<your length>",
        "printf '%s\\n' vllm serve org/m --nope",
        'EXTRA=""\nvllm serve org/m ${EXTRA:+--nope}',
        'A=("$A"); vllm serve org/m "${A[@]}"',
        'B=${B:-}\nCMD="vllm serve org/m"\nif [ -n "$B" ]; then\n  CMD="$CMD --attention-backend $B"\nfi\neval "$CMD"',
        "vllm serve org/m ${EXTRA:-} --attention-backend ${B-}",
        'ARGS=(--nope --port 1)\nvllm serve org/m "${ARGS[@]:1}"',
        "usage() { cat <<EOF\n  vllm serve org/m --nope\nEOF\n}",
    ],
)
def test_what_is_only_said_or_left_out_is_no_server_flag(text):
    assert findings(text) == []


# Functions


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('run() {\n  vllm serve "$@" --port 1\n}\nrun org/m --nope', 4),
        ('run()\n{\n  vllm serve "${@:2}"\n}\nrun x org/m --nope', 5),
        ('run() { vllm serve "$1" $2; }\nrun org/m --nope', 1),
        ('a() { b "$1" --nope; }\nb() { vllm serve "$@"; }\na org/m', 1),
        ('run() { if true; then { vllm serve "$@"; }; fi; }\nrun org/m --nope', 2),
        ('run() { true || { exit 1; }; vllm serve "$@"; }\nrun org/m --nope', 2),
        ('run() {\n  local m="$1" p=$2; shift 2\n  vllm serve "$m" --port $p "$@"\n}\nrun org/m 1 --nope', 5),
        ('run() { set -eu; shift; vllm serve "$@"; }\nrun x org/m --nope', 2),
        ("run() { vllm serve org/m --nope; }", 1),
        ("run() { vllm serve org/m --nope; }\nrun\nrun", 1),
        ('run() { run "$@"; run "$@"; vllm serve "$@"; }\nrun org/m --nope', 2),
        ("run() {\n  vllm serve org/m --nope\n# the rest is left out here", 2),
        ("run() (\n  vllm serve org/m --nope\n)\nrun", 2),
    ],
)
def test_a_function_is_read_with_the_arguments_of_each_call(text, line):
    assert findings(text) == [("flag-unknown", line)]


def test_a_value_that_a_call_gives_is_judged_where_the_function_uses_it():
    text = (
        "function run {\n  local length=$2\n  vllm serve $1 --max-model-len $length\n}\nrun org/m 8192\nrun org/m much"
    )
    assert findings(text) == [("flag-value", 3)]


@pytest.mark.parametrize(
    "text",
    [
        'run() { shift; vllm serve org/m --max-model-len "$1"; }\nrun much 8192',
        'run() { if $x; then shift; fi; vllm serve org/m --max-model-len "$1"; }\nrun 8192 much',
        'run() {\n  if $x\n  then\n    shift\n  fi\n  vllm serve org/m --seed "$1"\n}\nrun much 8192',
        'run() { shift; vllm serve org/m --max-model-len "$1"; }\nrun $MAYBE_NOTHING much',
        'run() { set -- 8192; vllm serve org/m --max-model-len "$1"; }\nrun much',
        'run() { shift much; vllm serve org/m --max-model-len "$1"; }\nrun much',
        'run() { vllm serve org/m --max-model-len "$2"; }\nrun $MAYBE_NOTHING much',
        'run() { vllm serve org/m --max-model-len "${1:-8192}"; }\nrun',
        'inner() { vllm serve org/m --max-model-len "$1"; }\nouter() { inner; }\nouter much',
    ],
)
def test_an_argument_whose_place_is_not_known_is_not_judged(text):
    assert findings(text) == []


def test_a_function_sees_the_variables_before_its_call_and_leaves_what_it_exports():
    function = "start() { vllm serve org/m; }\n"
    assert findings(function + "VLLM_USE_V1=1 start") == [("env-unknown", 2)]
    assert findings(function + "VLLM_USE_V1=1 true\nstart") == []
    assert findings("setup() { export VLLM_USE_V1=1; }\nsetup\nvllm serve org/m") == [("env-unknown", 1)]


def test_a_finding_that_is_silenced_in_a_function_counts_once():
    text = "run() { vllm serve org/m --nope; }  # legroom: ignore flag-unknown\nrun\nrun"
    report = lint_texts([("start.sh", text)], LintOptions())
    assert (report.findings, report.ignored) == ((), 1)


# Here-documents


@pytest.mark.parametrize(
    "announced",
    ["bash <<EOF", "sudo bash -s <<'EOF'", "ssh gpu1 <<-EOF", "docker exec -i c sh <<EOF", "cat >run.sh <<EOF"],
)
def test_what_a_script_hands_to_a_shell_is_read_as_a_script(announced):
    assert findings(f"true\n{announced}\nvllm serve org/m \\\n  --nope\nEOF\ntrue") == [("flag-unknown", 4)]


def test_units_and_manifests_that_a_script_writes_are_read_where_they_stand():
    unit = "[Service]\nExecStart=/usr/bin/vllm serve org/m \\\\\n  --nope\nKillMode=process\n"
    pod = "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - image: vllm/vllm-openai:v0.11.0\n    args: [--nope]\n"
    text = f"cat > /etc/systemd/system/v.service <<EOF\n{unit}EOF\ncat <<Y | kubectl apply -f -\n{pod}Y\n"
    assert findings(text) == [("flag-unknown", 4), ("unit-orphans", 5), ("flag-unknown", 13)]


def test_a_here_document_that_is_no_manifest_yet_stops_nothing():
    assert (
        lint_texts([("s.sh", "cat <<E\napiVersion: {{ x }}: y\nE\nvllm serve m --port 1")], LintOptions()).unread == ()
    )


def test_values_that_grow_for_ever_are_read_to_an_end():
    text = 'A=(x y)\nB="x y"\n' + 'A=("${A[@]}" "${A[@]}")\nB="$B $B"\nB+=" $B"\n' * 80
    assert findings(text + "vllm serve org/m --nope") == [("flag-unknown", text.count("\n") + 1)]
    assert findings("vllm serve org/m " + "${A:+" * 5000 + "}" * 5000) == []


# Secrets


@pytest.mark.parametrize(
    "option", ["-e HF_TOKEN=VALUE", "-eHF_TOKEN=VALUE", "--env HF_TOKEN=VALUE", "--env=HF_TOKEN=VALUE"]
)
@pytest.mark.parametrize(("value", "expected"), [("hf_abcdefghijk", ["secret-written"]), ("$HF_TOKEN", [])])
def test_a_secret_is_found_however_a_container_is_given_it(option, value, expected):
    text = f"docker run {option.replace('VALUE', value)} vllm/vllm-openai:v0.32.0 --model org/m"
    assert [rule for rule, _ in findings(text)] == expected


@pytest.mark.parametrize("value", ["mysecretempty1", "hf_yourself12345", "sk-examplesare9", "abcxxxdef"])
def test_a_secret_may_hold_a_word_that_stands_for_one(value):
    assert findings(f"vllm serve org/m --api-key {value}") == [("secret-written", 1)]


@pytest.mark.parametrize(
    "value", ["EMPTY", "your-api-key", "hf_your_token", "YOUR_KEY", "token-abc123", "hf_xxxxxxxx", "changeme", "<key>"]
)
def test_what_plainly_stands_for_a_secret_is_none(value):
    assert ("secret-written", 1) not in findings(f"vllm serve org/m --api-key '{value}'")


# Ending processes


@pytest.mark.parametrize(
    "text",
    [
        "ps aux | grep vllm | awk '{print $2}' | xargs kill -9",
        "ps -ef | grep '[v]llm' | awk '{print $2}' | xargs -r kill",
        "ps aux | awk '/vllm/ {print $2}' | xargs kill",
        "kill -9 $(ps aux | grep vllm | awk '{print $2}')",
    ],
)
def test_ending_what_ps_and_grep_find_is_ending_by_a_pattern(text):
    assert findings(text) == [("kill-by-pattern", 1)]


@pytest.mark.parametrize(
    "text", ["ps aux | grep nginx | awk '{print $2}' | xargs kill -9", "ps -o pid= --ppid 12 | xargs kill"]
)
def test_other_programs_are_nobodys_business(text):
    assert findings(text) == []


def test_a_script_that_a_container_runs_has_the_release_and_the_memory_of_the_container():
    text = """docker run -e PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True --entrypoint bash \\
      vllm/vllm-openai:v0.24.0 -c "vllm serve org/m -tp 2"
    """
    assert findings(text) == [("shm-missing", 1), ("allocator-breaks", 1)]
    assert findings(text.replace("docker run", "docker run --ipc=host").replace("v0.24.0", "v0.30.0")) == [
        ("allocator-clash", 1)
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("docker run --gpus 2 --ipc=host vllm/vllm-openai:v0.20.0 --model org/m -tp 4", ["gpus-too-few"]),
        ("docker run --gpus 2 --ipc=host vllm/vllm-openai:v0.10.2 --model org/m -tp 4", ["gpus-too-few"]),
        ("ray start --head\ndocker run --gpus 2 --ipc=host vllm/vllm-openai:v0.10.2 --model org/m -tp 4", []),
        ("docker run --gpus 2 --ipc=host vllm/vllm-openai:v0.20.0 --model org/m -tp 2", []),
        ("docker run --gpus all --ipc=host vllm/vllm-openai:v0.20.0 --model org/m -tp 4", []),
        ("CUDA_VISIBLE_DEVICES=0,1 vllm serve org/m -tp 2 -pp 2", ["gpus-too-few"]),
        ("CUDA_VISIBLE_DEVICES=0,1 vllm serve org/m -tp 2 -pp 2 --distributed-executor-backend ray", []),
        ("CUDA_VISIBLE_DEVICES=$IDS vllm serve org/m -tp 2", []),
        ("CUDA_VISIBLE_DEVICES=0,1 vllm serve org/m -dp 4", ["gpus-too-few"]),
        ("CUDA_VISIBLE_DEVICES=0,1 vllm serve org/m -tp 2 -dp 4 --data-parallel-size-local 1", []),
        ("CUDA_VISIBLE_DEVICES=0,1 vllm serve org/m -tp 2 -pcp 2", ["gpus-too-few"]),
    ],
)
def test_more_ranks_than_gpus_are_found_unless_the_release_may_find_them_in_a_ray_cluster(text, expected):
    assert [rule for rule, _ in findings(text)] == expected
