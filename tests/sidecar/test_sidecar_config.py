"""watch.toml is read whole or refused with the line and the key of the mistake."""

import pytest

from legroom.actions.docker_platform import ComposeService, DockerContainer
from legroom.actions.kubernetes_platform import Workload
from legroom.actions.platform import FlagChange
from legroom.actions.run_platform import RunChild
from legroom.actions.server_drain import CommandDrain, GuardDrain, PlatformDrain, ReadinessFileDrain
from legroom.actions.supervisord_platform import SupervisordProgram
from legroom.actions.systemd_platform import SystemdUnit
from legroom.errors import LegroomError
from legroom.live.metrics.endpoint import is_loopback_host
from legroom.sidecar.action_policy import ActionLimits
from legroom.sidecar.watch_config import read_config, simple_config, with_more_actions

WHOLE = """
interval_s = 2.5
act = ["notify", "restart"]
journal = "state/journal.db"
port = 9999
token_env = "WATCH_TOKEN"

[limits]
per_hour = 1

[thresholds]
pool_full_ratio = 0.9
stuck_hold = { samples = 5, seconds = 20 }

[groups.llama]
act = ["notify"]
[groups.llama.limits]
per_day = 3

[[servers]]
url = "http://me:pa55word@a:8000"
group = "llama"
platform = "systemd"
unit = "vllm@0"
drain = { by = "guard", token = "g" }

[servers.answers.preemption_thrash]
"--max-num-seqs" = "32"

[[servers]]
url = "https://b:8000/v1"
platform = "kubernetes"
workload = "vllm"
namespace = "ml"

[[notify]]
url_file = "hook"
format = "slack"
"""


def read(tmp_path, text):
    path = tmp_path / "watch.toml"
    path.write_text(text)
    return read_config(path)


def test_a_whole_file_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("WATCH_TOKEN", "t0ken")
    (tmp_path / "hook").write_text("https://hooks.slack.com/services/s3cret\n")
    config = read(tmp_path, WHOLE)
    first, second = config.servers
    assert (first.name, first.group, first.platform) == ("http://a:8000", "llama", SystemdUnit("vllm@0"))
    assert isinstance(first.drain_method, GuardDrain)
    assert first.answers == {"preemption_thrash": FlagChange({"--max-num-seqs": "32"})}
    assert (second.name, second.platform) == ("https://b:8000", Workload("vllm", "ml"))
    assert isinstance(second.drain_method, PlatformDrain)
    assert config.group("llama").act == {"notify"}
    assert config.group("llama").limits == ActionLimits(per_hour=1, per_day=3)
    assert config.group("default").act == {"notify", "restart"}
    assert config.thresholds.pool_full_ratio == 0.9
    assert config.thresholds.stuck_hold.samples == 5
    assert (config.token, config.webhooks[0].format) == ("t0ken", "slack")
    assert config.journal == tmp_path / "state" / "journal.db"


def test_printing_a_configuration_shows_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("WATCH_TOKEN", "t0ken")
    (tmp_path / "hook").write_text("https://hooks.slack.com/services/s3cret\n")
    shown = repr(read(tmp_path, WHOLE))
    for secret in ("t0ken", "s3cret", "pa55word", "token='g'"):
        assert secret not in shown


SERVER = '[[servers]]\nurl = "http://a"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("act = [\n", "line 1"),
        ("", "servers: there is no server"),
        ("interval_s = 0\n" + SERVER, "line 1: interval_s: must be from 0.05"),
        ('interval_s = "5"\n' + SERVER, "line 1: interval_s: must be a number, not text"),
        ("intervall = 5\n" + SERVER, "line 1: intervall: is not a setting here"),
        ('act = ["reboot"]\n' + SERVER, "line 1: act: must be among"),
        (SERVER + SERVER, "line 4: servers.2.url: http://a is there twice"),
        (SERVER + 'platform = "systemd"\n', "line 1: servers.1.unit: is missing"),
        (SERVER + 'platform = "sysd"\n', "line 3: servers.1.platform: must be one of"),
        (SERVER + "port = 3\n", "line 3: servers.1.port: is not a setting here"),
        ('[[servers]]\n\nurl = "ftp://a"\n', "line 3: servers.1.url:"),
        (SERVER + 'token_env = "NOT_SET_ANYWHERE"\n', "line 3: servers.1.token_env: the environment variable"),
        (SERVER + 'drain = { by = "guard" }\n', "line 3: servers.1.drain.token: is missing"),
        (SERVER + 'drain = { by = "file", paht = "x" }\n', "line 3: servers.1.drain.path: is missing"),
        (SERVER + 'drain = { by = "platform", paht = "x" }\n', "line 3: servers.1.drain.paht: is not a setting"),
        (SERVER + "\n[limits]\nper_hour = -1\n", "line 5: limits.per_hour: must be from 0"),
        (SERVER + "\n[thresholds]\npool_full = 1\n", "line 5: thresholds.pool_full: is not a setting here"),
        (SERVER + "\n[groups.other]\n", "line 4: groups.other: no server is in this group"),
        (SERVER + '\n[[notify]]\nformat = "slack"\n', "line 4: notify.1.url: is missing"),
        (SERVER + '\n[[notify]]\nurl = "slack"\n', "line 5: notify.1.url: must begin with http"),
        (SERVER + '\n[[notify]]\nurl = "http://[::1"\n', "line 5: notify.1.url: must begin with http"),
        (SERVER + '\n[[notify]]\nurl = "http://a:99999/x"\n', "line 5: notify.1.url: must begin with http"),
        (
            SERVER + '\n[servers.answers.sadness]\n"--seed" = "1"\n',
            "line 4: servers.1.answers.sadness: is not something",
        ),
        (
            SERVER + '\n[servers.answers.crash_loop]\nseed = "1"\n',
            "line 5: servers.1.answers.crash_loop.seed: must be a flag",
        ),
        (SERVER + 'plan = "no.json"\n', "line 3: servers.1.plan:"),
        ("port = 70000\n" + SERVER, "line 1: port: must be from 0 to 65535"),
        ("port = true\n" + SERVER, "line 1: port: must be a whole number"),
        (SERVER + 'ca_file = "no.pem"\n', "line 3: servers.1.ca_file:"),
        ('[prometheus]\nurl = "ftp://p"\n', "line 2: prometheus.url:"),
        ('[prometheus]\nurl = "http://p"\nmatchers = "job"\n', "line 3: prometheus.matchers:"),
        ('[prometheus]\nurl = "http://p"\nca_file = "no.pem"\n', "line 3: prometheus.ca_file:"),
    ],
)
def test_a_mistake_is_named_with_its_line_and_key(tmp_path, text, said, monkeypatch):
    monkeypatch.delenv("LEGROOM_GUARD_TOKEN", raising=False)
    with pytest.raises(LegroomError) as error_text:
        read(tmp_path, text)
    assert said in error_text.value.message
    assert error_text.value.message.startswith("watch.toml, line ")


@pytest.mark.parametrize("line", ["token = 271828", "token = 27.1828", "token_env = 271828", "token = [271828]"])
def test_a_secret_that_is_no_text_is_not_shown(tmp_path, line):
    with pytest.raises(LegroomError) as error_text:
        read(tmp_path, f"{line}\n{SERVER}")
    assert "must be text" in error_text.value.message
    assert "1828" not in error_text.value.message + error_text.value.hint


def test_a_mistake_near_a_known_word_is_told(tmp_path):
    with pytest.raises(LegroomError) as error_text:
        read(tmp_path, "intervall_s = 5\n" + SERVER)
    assert error_text.value.hint == "did you mean interval_s?"


def test_a_secret_in_the_wrong_place_is_not_repeated(tmp_path):
    with pytest.raises(LegroomError) as error_text:
        read(tmp_path, 'port = "hunter22"\n' + SERVER)
    assert "hunter22" not in error_text.value.message


def test_a_file_that_cannot_be_read_is_said(tmp_path):
    with pytest.raises(LegroomError, match="cannot be read"):
        read_config(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ('platform = "docker"\ncontainer = "c"', DockerContainer),
        ('platform = "compose"\nfile = "compose.yaml"\nservice = "s"', ComposeService),
        ('platform = "supervisord"\nprogram = "p"', SupervisordProgram),
        ('platform = "run"', RunChild),
    ],
)
def test_every_platform_has_a_name(tmp_path, lines, kind):
    assert isinstance(read(tmp_path, SERVER + lines + "\n").servers[0].platform, kind)


@pytest.mark.parametrize(
    ("drain", "kind"),
    [
        ('{ by = "file", path = "x", seen_after_s = 1 }', ReadinessFileDrain),
        ('{ by = "command", close_command = "a", open_command = "b" }', CommandDrain),
        ('{ by = "platform" }', PlatformDrain),
    ],
)
def test_every_door_has_a_name(tmp_path, drain, kind):
    assert isinstance(read(tmp_path, SERVER + f"drain = {drain}\n").servers[0].drain_method, kind)


def test_a_guard_is_the_door_where_there_is_a_token_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LEGROOM_GUARD_TOKEN", "g")
    assert read(tmp_path, SERVER).servers[0].drain_method == GuardDrain("http://a", "g")
    unchecked = read(tmp_path, SERVER + "verify_tls = false\n").servers[0].drain_method
    assert unchecked == GuardDrain("http://a", "g", verify_tls=False)


def test_a_configuration_without_a_file_tells_only_unless_told(tmp_path):
    assert simple_config(["a:8000", "a:8000"]).act == {"notify"}
    assert with_more_actions(simple_config(["a:8000"]), ["restart"]).group("default").act == {"notify", "restart"}
    with pytest.raises(LegroomError, match="no action reboot"):
        simple_config(["a:8000"], ["reboot"])


def test_only_this_machine_is_loopback():
    assert [is_loopback_host(host) for host in ("127.0.0.1", "127.8.8.8", "localhost", "::1")] == [True] * 4
    assert [is_loopback_host(host) for host in ("0.0.0.0", "::", "10.0.0.1", "")] == [False] * 4
