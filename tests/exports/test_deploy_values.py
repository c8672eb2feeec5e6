"""What a container's file says reaches the server as it was said: dollars, folders, middlewares, the end of it."""

import pytest
import yaml
from planned import planned, request

from legroom import plan
from legroom.errors import LegroomError
from legroom.exports.deploy import compose, docker, helm_values, kubernetes, llm_d_values
from legroom.exports.deploy.exported_server import host_needs_of, planned_server, server_options
from legroom.exports.deploy.script import script_text
from legroom.exports.deploy.serve_command import parse_command
from legroom.exports.export_request import ExportRequest
from legroom.facts.releases import release
from legroom.memory.host_needs import API_SERVER_BYTES, WORKER_BYTES
from legroom.planning.plan_document import PlanDocument, plan_from_json
from legroom.units import GIB


def asked(*flags, model=None, env=None, **options):
    document = dict(planned("8b-h100").to_json())
    command = [*document["command"], *flags]
    command[2] = model or command[2]
    made = plan_from_json({**document, "command": command, "env": env or {}})
    return ExportRequest(made.release, made, options)


def text(module, which=None, **options):
    return module.files(request(which, **options) if isinstance(which, str) else which)[-1].text


def pod(made):
    documents = list(yaml.safe_load_all(text(kubernetes, made)))
    return next(document for document in documents if document["kind"] == "Deployment")["spec"]["template"]["spec"]


def as_kubernetes_expands(value):
    """Two dollars are one, `$(NAME)` is a variable, any other dollar is itself."""
    out, i = "", 0
    while i < len(value):
        pair = value[i : i + 2]
        assert pair != "$(", "a variable would be put in here"
        out, i = out + value[i], i + (2 if pair == "$$" else 1)
    return out


@pytest.mark.parametrize("value", ["$$", "a$$b", "$(HOME)", "$$(HOME)", "$x", "end$", "$$$"])
def test_dollars_reach_the_process_as_they_were_given(value):
    made = asked("--served-model-name", value, env={"VLLM_X": value})
    container = pod(made)["containers"][0]
    given = container["args"][container["args"].index("--served-model-name") + 1]
    assert as_kubernetes_expands(given) == value
    assert as_kubernetes_expands(container["env"][0]["value"]) == value
    model = yaml.safe_load(text(helm_values, made))["servingEngineSpec"]["modelSpec"][0]
    extra = model["vllmConfig"]["extraArgs"]
    assert as_kubernetes_expands(extra[extra.index("--served-model-name") + 1]) == value
    assert as_kubernetes_expands(model["env"][0]["value"]) == value


def test_a_cluster_and_both_charts_ask_for_the_same_volume():
    claim = next(each for each in yaml.safe_load_all(text(kubernetes, asked())) if "Claim" in each["kind"])
    model = yaml.safe_load(text(helm_values, asked()))["servingEngineSpec"]["modelSpec"][0]
    sizes = {model["pvcStorage"], yaml.safe_load(text(llm_d_values, asked()))["modelArtifacts"]["size"]}
    assert sizes == {claim["spec"]["resources"]["requests"]["storage"]}


@pytest.mark.parametrize("model", ["./my models/llama", "~/llama", "/models/a:b"])
@pytest.mark.parametrize("module", [docker, compose, kubernetes, helm_values])
def test_a_model_that_cannot_be_mounted_is_refused(module, model):
    with pytest.raises(LegroomError):
        module.files(asked(model=model))


def test_the_chart_mounts_a_model_of_the_node():
    model = yaml.safe_load(text(helm_values, asked(model="/models/llama")))["servingEngineSpec"]["modelSpec"][0]
    assert model["modelURL"] == "/models/llama"
    assert model["extraVolumes"] == [{"name": "model", "hostPath": {"path": "/models/llama"}}]
    assert model["extraVolumeMounts"][0]["mountPath"] == "/models/llama"
    assert "pvcStorage" not in model


def test_a_dollar_in_a_mounted_folder_is_kept_by_compose():
    (service,) = yaml.safe_load(text(compose, asked(model="/models/$x")))["services"].values()
    assert service["volumes"][0] == "/models/$$x:/models/$$x:ro"


@pytest.mark.parametrize("namespace", ["Foo Bar", "", "-a", "a" * 64])
def test_what_is_no_namespace_is_refused(namespace):
    with pytest.raises(LegroomError, match="--namespace"):
        text(kubernetes, "8b-h100", namespace=namespace)


def test_routers_are_waited_for_before_the_guard_turns_requests_away():
    hook = pod(request("8b-h100", with_guard=True))["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert hook.startswith("sleep 10; curl")


@pytest.mark.parametrize("module", [docker, compose, kubernetes])
def test_a_guard_that_the_command_has_already_is_in_the_image_and_has_its_token(module):
    """vLLM would end with "No module named 'legroom'"."""
    files = module.files(asked("--middleware", "legroom.guard.Guard"))
    assert files[0].path == "Dockerfile"
    assert "vllm-legroom:v0.32.0" in files[1].text
    assert "LEGROOM_GUARD_TOKEN" in files[1].text


@pytest.mark.parametrize("module", [docker, compose, kubernetes])
def test_workers_that_tell_their_memory_have_legroom_in_the_image(module):
    files = module.files(asked(env={"LEGROOM_WORKER_MEMORY": "1"}))
    assert files[0].path == "Dockerfile"
    assert "LEGROOM_WORKER_MEMORY" in files[1].text
    with pytest.raises(LegroomError, match="place for legroom"):
        helm_values.files(asked(env={"LEGROOM_WORKER_MEMORY": "1"}))


def test_a_guard_that_is_there_already_is_not_added_again():
    flags = ("--middleware", "legroom.guard.Guard", "--middleware", "my.auth.Middleware")
    made = asked(*flags, with_guard=True)
    written = script_text(planned_server(made.plan, server_options(made.options)))
    assert written.count("--middleware legroom.guard.Guard") == 1
    lines = [line.strip() for line in written.splitlines()]
    assert lines[lines.index("--middleware my.auth.Middleware") - 1] == "# A layer around every request, as given."
    assert lines[lines.index("--middleware legroom.guard.Guard") - 1].startswith("# The guard:")


@pytest.mark.parametrize("module", [docker, compose])
def test_a_drain_is_claimed_only_where_the_release_has_one(module):
    def said(which, **options):
        return " ".join(text(module, which, **options).replace("#", " ").split())

    for options in ({}, {"with_guard": True}):
        assert "SIGTERM" in said("0.10.2", **options)
        assert "waits for the drain" not in said("0.10.2", **options)
    assert "drain (60 s)" in said("8b-h100")


@pytest.mark.parametrize("module", [docker, compose, kubernetes, helm_values])
def test_files_that_flags_name_are_said_to_need_a_volume(module):
    flags = ("--chat-template", "/etc/t.jinja", "--lora-modules", "a=/models/x", '{"name": "b", "path": "/models/y"}')
    written = " ".join(text(module, asked(*flags, "--root-path", "/api")).replace("#", " ").split())
    assert "/etc/t.jinja, /models/x, /models/y" in written


@pytest.mark.parametrize("flags", [(), ("--tokenizer", "/models/m/tok"), ("--chat-template", "{{ '/a' }}")])
def test_what_needs_no_volume_of_its_own_is_not_mentioned(flags):
    assert "no volume here" not in text(docker, asked(*flags, model="/models/m")).replace("\n# ", " ")


@pytest.mark.parametrize(
    ("version", "flags", "fronts"), [("0.32.0", (), 4), ("0.14.0", (), 1), ("0.32.0", ("--api-server-count", "2"), 2)]
)
def test_every_copy_has_an_engine_and_from_0_15_an_api_server(version, flags, fronts):
    words = parse_command(["vllm", "serve", "m", *flags], release(version))
    document = PlanDocument(vllm=version, args={"data_parallel_size": 4})
    needs = host_needs_of(words, 4, 4, 0, document, {})
    assert needs.shares[0].bytes == fronts * API_SERVER_BYTES + 4 * WORKER_BYTES
    assert needs.cpus == fronts + 4 + 4


@pytest.mark.parametrize(
    ("version", "modalities", "flags", "env", "gib"),
    [
        ("0.32.0", ["image"], (), {}, 4),
        ("0.10.1", ["image"], (), {}, 4),
        ("0.9.2", ["image"], (), {}, 4),
        ("0.8.1", ["image"], (), {}, 8),
        ("0.7.3", ["image"], (), {}, 0),
        ("0.32.0", [], (), {}, 0),
        ("0.32.0", ["image"], ("--mm-processor-cache-gb", "0"), {}, 0),
        ("0.32.0", ["image"], ("--mm-processor-cache-gb", "10"), {}, 10),
        ("0.32.0", ["image"], ("--language-model-only",), {}, 0),
        ("0.9.2", ["image"], ("--disable-mm-preprocessor-cache",), {}, 0),
        ("0.9.2", ["image"], (), {"VLLM_MM_INPUT_CACHE_GIB": "1"}, 1),
    ],
)
def test_the_media_cache_of_the_release_is_counted_for_every_process(version, modalities, flags, env, gib):
    words = parse_command(["vllm", "serve", "m", *flags], release(version))
    document = PlanDocument(vllm=version, args={}, modalities=tuple(modalities))
    counted = [share.bytes for share in host_needs_of(words, 1, 1, 0, document, env).shares if "media" in share.what]
    assert counted == ([2 * gib * GIB] if gib else [])


def test_a_media_cache_in_shared_memory_is_counted_once():
    words = parse_command(["vllm", "serve", "m", "--mm-processor-cache-type", "shm"], release("0.32.0"))
    document = PlanDocument(vllm="0.32.0", args={}, modalities=("image",))
    needs = host_needs_of(words, 1, 1, 0, document, {})
    assert needs.shm_bytes == 5 * GIB
    assert not any("media" in share.what for share in needs.shares)


def test_a_model_that_takes_media_has_its_cache_in_the_memory_of_the_pod():
    made = plan("qwen2.5-vl-7b", "h100", max_model_len=8192)
    request_ = ExportRequest(release("0.32.0"), plan_from_json(made.json()), {})
    assert "media cache (4 x 2 processes) 8.0" in " ".join(text(kubernetes, request_).replace("#", "").split())


@pytest.mark.parametrize("whole_experts", [True, False])
def test_experts_that_are_spread_over_copies_are_all_read(whole_experts):
    """Without expert parallelism each copy has a slice of every expert."""
    sizes = {"data_parallel_size": 2, "enable_expert_parallel": whole_experts}
    spread = plan("qwen3-30b-a3b", "h100", **sizes, max_model_len=8192)
    whole = plan("qwen3-30b-a3b", "h100", max_model_len=8192)
    read = [planned_server(plan_from_json(made.json())).host.checkpoint_bytes for made in (spread, whole)]
    assert read[0] >= read[1]


def test_copies_of_a_model_without_experts_read_the_same_files():
    twice = plan("llama-3.1-8b", "h100", data_parallel_size=2, max_model_len=8192)
    once = plan("llama-3.1-8b", "h100", max_model_len=8192)
    sizes = [planned_server(plan_from_json(made.json())).host.checkpoint_bytes for made in (twice, once)]
    assert sizes[0] == sizes[1]


def test_the_checkpoint_is_as_large_as_its_files_where_they_were_read():
    document = plan_from_json({**planned("8b-h100").to_json(), "checkpoint_bytes": 123 * GIB})
    assert planned_server(document).host.checkpoint_bytes == 123 * GIB


@pytest.mark.parametrize(
    ("flags", "gpus", "engines"),
    [
        ((), 4, 2),
        (("--data-parallel-size-local", "1"), 2, 2),
        (("--data-parallel-size-local", "0"), 0, 2),
        (("--data-parallel-rank", "0"), 2, 1),
        (("--data-parallel-external-lb",), 2, 1),
        (("--nnodes", "2"), 2, 2),
    ],
)
def test_a_server_over_several_machines_has_the_cards_of_its_own(flags, gpus, engines):
    document = dict(planned("8b-dp2").to_json())
    made = plan_from_json({**document, "command": [*document["command"], *flags]})
    assert (planned_server(made).gpus, made.engines) == (gpus, engines)


def on_another_card(name, **env):
    document = dict(planned("8b-h100").to_json())
    made = plan_from_json({**document, "gpu": {**document["gpu"], "name": name}, "env": env})
    return ExportRequest(made.release, made, {"image": "other/vllm:1"})


@pytest.mark.parametrize(
    ("name", "files", "pick"),
    [
        ("AMD Instinct MI300X", ["/dev/kfd", "/dev/dri"], "HIP_VISIBLE_DEVICES"),
        ("Intel Arc Pro B60", ["/dev/dri"], "ZE_AFFINITY_MASK"),
    ],
)
def test_cards_that_docker_cannot_hand_out_are_picked_by_their_variable(name, files, pick):
    made = on_another_card(name, **{pick: "2,3"})
    line = text(docker, made)
    (service,) = yaml.safe_load(text(compose, made))["services"].values()
    assert "--gpus" not in line and "deploy" not in service
    assert all(f"--device {file} " in line for file in files)
    assert service["devices"] == [f"{file}:{file}" for file in files]
    assert f"{pick}=2,3" in line and service["environment"][pick] == "2,3"
    names = [variable["name"] for variable in pod(made)["containers"][0]["env"]]
    assert pick not in names


@pytest.mark.parametrize(
    "flags",
    [
        ("--kv-transfer-config", '{"kv_connector_extra_config": {"api_key": "YOUR_SECRET"}}'),
        ("--otlp-traces-endpoint", "http://***@collector:4317"),
    ],
)
@pytest.mark.parametrize("module", [docker, compose, kubernetes, helm_values])
def test_a_secret_that_a_flag_held_is_said_to_be_left_out(module, flags):
    assert f"{flags[0]}: the secret in it is left out" in text(module, asked(*flags)).replace("\n# ", " ")


@pytest.mark.parametrize(
    ("image", "repository", "tag"),
    [
        ("vllm/x:1", "vllm/x", "1"),
        ("hub.example:5000/vllm", "hub.example:5000/vllm", "latest"),
        ("hub.example:5000/vllm:2", "hub.example:5000/vllm", "2"),
        ("vllm", "vllm", "latest"),
    ],
)
def test_the_chart_is_given_repository_and_tag_apart(image, repository, tag):
    model = yaml.safe_load(text(helm_values, asked(image=image)))["servingEngineSpec"]["modelSpec"][0]
    assert (model["repository"], model["tag"]) == (repository, tag)


def test_a_name_that_no_service_of_kubernetes_may_have_is_refused():
    with pytest.raises(LegroomError, match="'0chat'"):
        text(kubernetes, asked(name="0chat"))


@pytest.mark.parametrize("length", ["1048576", "32k", "auto", "-1"])
def test_a_length_that_helm_would_write_as_another_is_a_text(length):
    values = yaml.safe_load(text(helm_values, asked("--max-model-len", length)))
    config = values["servingEngineSpec"]["modelSpec"][0]["vllmConfig"]
    assert "maxModelLen" not in config
    assert " ".join(config["extraArgs"]).replace("=", " ").startswith(f"--max-model-len {length}")


def test_the_chart_says_how_to_make_its_secret():
    assert "kubectl create secret generic vllm-llama-3-1-8b --from-literal=hf-token=..." in text(helm_values, asked())


def test_the_weights_of_a_server_that_can_sleep_have_room_on_the_host():
    awake, sleepy = (planned_server(asked(*flags).plan) for flags in ((), ("--enable-sleep-mode",)))
    assert sleepy.host.held_bytes - awake.host.held_bytes == awake.plan.layout.weights_bytes


def test_more_cards_than_a_machine_has_are_remarked():
    document = dict(planned("0.20.0-tp8").to_json())
    more = plan_from_json({**document, "args": {**document["args"], "pipeline_parallel_size": 2}})
    assert any("16 cards" in remark for remark in planned_server(more).remarks)
    assert not any("cards" in remark for remark in planned_server(planned("0.20.0-tp8")).remarks)
