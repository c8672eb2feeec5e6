"""`legroom export gate`: manifests that Kubernetes takes, and certificates that the gate can use."""

import base64
import datetime
import ssl
import subprocess

import pytest
import yaml
from cluster_schemas import check

from legroom.cli.main import main
from legroom.errors import LegroomError

pytest.importorskip("cryptography")


def exported(tmp_path, *words):
    assert main(["export", "gate", *words, "-o", f"{tmp_path}/out/"]) == 0
    texts = [(tmp_path / "out" / name).read_text() for name in ("gate.yaml", "webhook.yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text)]


def kind(documents, name):
    return next(document for document in documents if document["kind"] == name)


VARIANTS = [
    [],
    ["--mode", "enforce", "--certificates", "self"],
    ["--opt-in", "--default-gpu", "l4", "--namespace", "platform", "--replicas", "3"],
]


@pytest.mark.parametrize("words", VARIANTS, ids=["plain", "self-made", "opt-in"])
def test_every_manifest_is_valid_by_the_schema_of_kubernetes(tmp_path, words):
    for document in exported(tmp_path, *words):
        if not document["apiVersion"].startswith("cert-manager.io/"):
            check(document)


def test_the_webhook_fails_open_and_leaves_the_system_alone(tmp_path):
    for hook in kind(exported(tmp_path), "ValidatingWebhookConfiguration")["webhooks"]:
        assert (hook["failurePolicy"], hook["sideEffects"], hook["admissionReviewVersions"]) == (
            "Ignore",
            "None",
            ["v1"],
        )
        assert hook["timeoutSeconds"] <= 10
        names = hook["namespaceSelector"]["matchExpressions"][0]
        assert (names["operator"], {"kube-system", "legroom"} <= set(names["values"])) == ("NotIn", True)


def test_every_kind_that_the_gate_reads_is_asked_about(tmp_path):
    hook = kind(exported(tmp_path), "ValidatingWebhookConfiguration")["webhooks"][0]
    resources = {name for rule in hook["rules"] for name in rule["resources"]}
    assert resources >= {
        "pods",
        "deployments",
        "statefulsets",
        "leaderworkersets",
        "inferenceservices",
        "llminferenceservices",
        "models",
    }


def test_a_namespace_chooses_its_mode_by_a_label(tmp_path):
    usual, other = kind(exported(tmp_path, "--mode", "enforce"), "ValidatingWebhookConfiguration")["webhooks"]
    assert usual["clientConfig"]["service"]["path"] == "/validate/enforce"
    assert usual["namespaceSelector"]["matchExpressions"][1]["values"] == ["off", "warn"]
    assert other["clientConfig"]["service"]["path"] == "/validate/warn"
    assert other["namespaceSelector"]["matchExpressions"][1] == {
        "key": "legroom/gate",
        "operator": "In",
        "values": ["warn"],
    }


def test_the_pod_has_no_rights_it_does_not_need(tmp_path):
    pod = kind(exported(tmp_path), "Deployment")["spec"]["template"]["spec"]
    container = pod["containers"][0]["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert (container["readOnlyRootFilesystem"], container["allowPrivilegeEscalation"]) == (True, False)
    assert container["capabilities"] == {"drop": ["ALL"]}


def test_two_replicas_and_one_may_leave(tmp_path):
    documents = exported(tmp_path)
    assert kind(documents, "Deployment")["spec"]["replicas"] == 2
    assert kind(documents, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1
    assert kind(documents, "NetworkPolicy")["spec"]["egress"] == []


def test_the_arguments_are_those_of_the_gate(tmp_path, capsys):
    from legroom.cli import gate
    from legroom.cli.main import command_parser

    words = kind(exported(tmp_path, "--default-gpu", "l4"), "Deployment")["spec"]["template"]["spec"]["containers"][0][
        "args"
    ]
    args = command_parser("gate", gate).parse_args(words[1:])
    assert (args.port, args.mode, args.default_gpu) == (9443, "warn", "l4")


def test_with_cert_manager_the_authority_is_injected(tmp_path):
    documents = exported(tmp_path)
    webhook = kind(documents, "ValidatingWebhookConfiguration")
    assert webhook["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": "legroom/legroom-gate"}
    names = kind(documents, "Certificate")["spec"]["dnsNames"]
    assert "legroom-gate.legroom.svc" in names


def test_a_self_made_certificate_is_trusted_by_its_own_bundle(tmp_path):
    documents = exported(tmp_path, "--certificates", "self")
    secret = {name: base64.b64decode(text) for name, text in kind(documents, "Secret")["data"].items()}
    hook = kind(documents, "ValidatingWebhookConfiguration")["webhooks"][0]
    (tmp_path / "ca.crt").write_bytes(base64.b64decode(hook["clientConfig"]["caBundle"]))
    for name, data in secret.items():
        (tmp_path / name).write_bytes(data)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    words = ["openssl", "verify", "-x509_strict", "-verify_hostname", "legroom-gate.legroom.svc", "-CAfile"]
    words += [str(tmp_path / "ca.crt"), str(tmp_path / "tls.crt")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_kept_authority_signs_the_next_certificate_too(tmp_path):
    def bundle_and_certificate():
        documents = exported(tmp_path, "--certificates", "self", "--ca-file", str(tmp_path / "ca.pem"), "--force")
        hook = kind(documents, "ValidatingWebhookConfiguration")["webhooks"][0]
        return hook["clientConfig"]["caBundle"], kind(documents, "Secret")["data"]["tls.crt"]

    first, second = bundle_and_certificate(), bundle_and_certificate()
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert (tmp_path / "ca.pem").stat().st_mode & 0o077 == 0


def test_a_certificate_lasts_a_year_and_the_authority_ten():
    from cryptography import x509

    from legroom.exports.gate_certificates import new_authority, new_certificate

    authority = new_authority()
    pair = new_certificate(authority, ["a.b.svc"])
    left = [
        x509.load_pem_x509_certificate(pem).not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        for pem in (pair.certificate, authority.certificate)
    ]
    assert [round(each.days / 365) for each in left] == [1, 10]


def test_a_file_that_is_no_authority_is_refused(tmp_path):
    from legroom.exports.gate_certificates import stored_authority

    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(LegroomError, match="a certificate"):
        stored_authority(str(tmp_path / "ca.pem"))


@pytest.mark.parametrize(
    "words", [["--namespace", "No Name"], ["--replicas", "0"], ["--default-gpu", "no-card"], ["--ca-file", "x"]]
)
def test_a_wrong_option_is_said(capsys, words):
    assert main(["export", "gate", *words]) == 2
    assert "error:" in capsys.readouterr().err
