"""Files that flags name reach the container; what cannot be brought there is said or refused."""

import json

import pytest
import yaml
from cluster_schemas import check
from planned import planned

from legroom.errors import LegroomError
from legroom.exports.deploy import compose, docker, helm_values, kubernetes, script, systemd
from legroom.exports.deploy.exported_server import is_model_folder, planned_server
from legroom.exports.deploy.named_paths import named_paths
from legroom.exports.export_request import ExportRequest
from legroom.planning.plan_document import plan_from_json

ELSEWHERE = [docker, compose, kubernetes, helm_values, systemd]


def asked(*flags, model=None, **options):
    document = dict(planned("8b-h100").to_json())
    words = list(document["command"])
    document["command"] = [*words[:2], model or words[2], *words[3:], *map(str, flags)]
    return ExportRequest(planned("8b-h100").release, plan_from_json(document), options)


def text(module, request):
    return module.files(request)[-1].text


def pod(request):
    documents = list(yaml.safe_load_all(text(kubernetes, request)))
    return next(document for document in documents if document["kind"] == "Deployment")["spec"]["template"]["spec"]


@pytest.fixture
def files(tmp_path):
    """A template, a key, an adapter and a draft, in a folder whose name no shell takes as it is."""
    folder = tmp_path / "my files $é"
    for name in ("adapter", "draft"):
        (folder / name).mkdir(parents=True)
    (folder / "chat template.jinja").write_text("{{ messages }}")
    (folder / "key.pem").write_text("key")
    return folder


def flags_for(files):
    draft = json.dumps({"model": f"{files}/draft", "num_speculative_tokens": 2})
    return (
        "--chat-template",
        f"{files}/chat template.jinja",
        "--ssl-keyfile",
        f"{files}/key.pem",
        "--enable-lora",
        "--lora-modules",
        f"a={files}/adapter",
        "--speculative-config",
        draft,
    )


def test_files_that_flags_name_are_mounted_read_only_by_the_same_path(files):
    wanted = [f"{files}/{name}" for name in ("chat template.jinja", "key.pem", "adapter", "draft")]
    (service,) = yaml.safe_load(text(compose, asked(*flags_for(files))))["services"].values()
    mounted = [volume.replace("$$", "$") for volume in service["volumes"]]
    for path in wanted:
        assert f"{path}:{path}:ro" in mounted
        assert f"--volume '{path}:{path}:ro'" in text(docker, asked(*flags_for(files)))
    assert "no volume here" not in text(docker, asked(*flags_for(files)))


def test_a_pod_reads_small_files_from_a_configmap_keys_from_a_secret_and_folders_from_the_node(files):
    made = asked(*flags_for(files), namespace="models")
    spec = pod(made)
    mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    template, key = mounts[f"{files}/chat template.jinja"], mounts[f"{files}/key.pem"]
    assert (template["subPath"], template["readOnly"]) == ("chat-template.jinja", True)
    assert volumes[template["name"]]["configMap"] == {"name": "vllm-llama-3-1-8b-files"}
    assert volumes[key["name"]]["secret"] == {"secretName": "vllm-llama-3-1-8b-certificates"}
    adapter = volumes[mounts[f"{files}/adapter"]["name"]]["hostPath"]
    assert adapter == {"path": f"{files}/adapter", "type": "Directory"}
    manifest = text(kubernetes, made).replace("\n#", "")
    assert "kubectl create configmap vllm-llama-3-1-8b-files --namespace models --from-file=" in manifest
    assert "kubectl create secret generic vllm-llama-3-1-8b-certificates --namespace models --from-file=" in manifest
    assert "kubectl create secret generic vllm-llama-3-1-8b --namespace models --from-literal=" in manifest


def test_manifests_with_files_are_valid_by_the_schema_of_kubernetes(files):
    for document in yaml.safe_load_all(text(kubernetes, asked(*flags_for(files)))):
        check(document)


def test_the_chart_gets_them_as_extra_volumes(files):
    made = asked("--chat-template", f"{files}/chat template.jinja")
    model = yaml.safe_load(text(helm_values, made))["servingEngineSpec"]["modelSpec"][0]
    assert [mount["mountPath"] for mount in model["extraVolumeMounts"]] == [f"{files}/chat template.jinja"]
    assert model["extraVolumes"] == [{"name": "files", "configMap": {"name": f"{model['name']}-files"}}]


def test_a_folder_for_downloads_can_be_written(tmp_path):
    folder = f"{tmp_path}/weights"
    made = asked("--download-dir", folder)
    assert f"--volume {folder}:{folder}\n" in text(docker, made)
    spec = pod(made)
    assert {"path": folder, "type": "DirectoryOrCreate"} in [volume.get("hostPath") for volume in spec["volumes"]]
    assert any(not mount.get("readOnly", False) for mount in spec["containers"][0]["volumeMounts"])


@pytest.mark.parametrize("flags", [("--allowed-local-media-path", "/"), ("--chat-template", "/tmp")])
def test_a_folder_of_the_image_is_not_hidden(flags):
    assert named_paths(planned_server(asked(*flags).plan)) == ()
    assert "no volume here" in text(docker, asked(*flags))


def test_what_is_no_path_is_not_mounted(tmp_path):
    assert named_paths(planned_server(asked("--served-model-name", tmp_path, "--root-path", tmp_path).plan)) == ()


def test_a_file_in_a_mounted_folder_needs_no_volume_of_its_own(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m/t.jinja").write_text("x")
    inside = asked("--chat-template", f"{tmp_path}/m/t.jinja", model=f"{tmp_path}/m")
    assert named_paths(planned_server(inside.plan)) == ()
    both = asked("--tokenizer", f"{tmp_path}/m", "--chat-template", f"{tmp_path}/m/t.jinja")
    assert [named.path for named in named_paths(planned_server(both.plan))] == [f"{tmp_path}/m"]


@pytest.mark.parametrize("module", ELSEWHERE)
@pytest.mark.parametrize(
    "flags",
    [
        ("--chat-template", "t.jinja"),
        ("--chat-template", "./not-here.jinja"),
        ("--lora-modules", "a=loras/a"),
        ("--speculative-config", '{"model": "loras/a", "num_speculative_tokens": 2}'),
    ],
)
def test_a_path_from_here_is_refused_where_the_server_starts_elsewhere(module, flags, tmp_path, monkeypatch):
    (tmp_path / "loras/a").mkdir(parents=True)
    (tmp_path / "t.jinja").write_text("x")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LegroomError, match="starts elsewhere") as refused:
        module.files(asked(*flags))
    assert str(tmp_path) in refused.value.hint
    assert text(script, asked(*flags))


def test_a_template_of_the_image_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "examples/tool_chat_template_hermes.jinja" in text(
        docker, asked("--chat-template", "examples/tool_chat_template_hermes.jinja")
    )


@pytest.mark.parametrize("module", ELSEWHERE)
def test_a_folder_of_this_name_is_the_model_as_vllm_takes_it(module, tmp_path, monkeypatch):
    (tmp_path / "models/llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LegroomError, match="starts elsewhere"):
        module.files(asked(model="models/llama"))
    assert "HF_TOKEN" not in text(script, asked(model="models/llama"))


def test_without_such_a_folder_it_is_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "HF_TOKEN" in text(docker, asked(model="models/llama"))


def cached(folder):
    document = {**planned("8b-h100").to_json(), "env": {"HF_HOME": str(folder), "VLLM_LOGGING_LEVEL": "INFO"}}
    return ExportRequest(planned("8b-h100").release, plan_from_json(document), {})


@pytest.mark.parametrize("module", [docker, compose, kubernetes, helm_values])
def test_a_cache_of_the_host_is_none_of_the_container(module, tmp_path):
    written = text(module, cached("/nowhere/hf"))
    assert "/nowhere" not in written
    assert "HF_HOME: given, but left out" in written.replace("\n# ", " ")
    assert "VLLM_LOGGING_LEVEL" in written


def test_downloads_that_the_host_has_are_mounted(tmp_path):
    assert f"--volume {tmp_path}:/root/.cache/huggingface\n" in text(docker, cached(tmp_path))
    made = yaml.safe_load(text(compose, cached(tmp_path)))
    (service,) = made["services"].values()
    assert f"{tmp_path}:/root/.cache/huggingface" in service["volumes"]
    assert "huggingface" not in made["volumes"]


def test_a_unit_keeps_the_cache_that_was_given(tmp_path):
    assert f"Environment=HF_HOME={tmp_path}" in text(systemd, cached(tmp_path)).splitlines()


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_name_that_no_folder_can_have_is_of_the_hub(name):
    assert not is_model_folder(name)
