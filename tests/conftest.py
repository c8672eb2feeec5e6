"""Settings for every test."""

import gc
import os
import signal
import ssl
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import settings

# A busy machine must not fail a property: examples are not timed. bin/test fixes the seed, and nothing is remembered
# between runs, so that a run can be repeated; `bin/test --search` tries more examples with seeds of its own.
settings.register_profile("legroom", deadline=None, database=None, max_examples=25)
settings.register_profile("long", deadline=None, database=None, max_examples=200)
settings.load_profile("legroom")

# Collecting makes two million objects that stay to the end; the garbage collector need not visit them again and again.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    gc.set_threshold(700, 10, 100)  # what is read and computed once stays, too: it is visited a tenth as often


# Collecting writes to every object that it visits: each fork would copy all that its pytest process holds.
os.register_at_fork(after_in_child=gc.freeze)


# PyYAML's parser in C reads what its parser in Python reads in an eighth of the time.
if yaml.__with_libyaml__:
    yaml.safe_load = partial(yaml.load, Loader=yaml.CSafeLoader)
    yaml.safe_load_all = partial(yaml.load_all, Loader=yaml.CSafeLoader)


# What bin/setup-tools brought, where the system has no such program of its own.
os.environ["PATH"] = os.pathsep.join(
    [os.environ.get("PATH", os.defpath), str(Path(__file__).parents[1] / ".tools/usr/bin")]
)

# A shell starts background jobs with Ctrl-C ignored, nohup with SIGHUP; programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def _sweeps_in_this_process() -> Iterator[None]:
    """Unless a test says how many processes: a pool forgets with each call what this process keeps for the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        yield


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """A self-signed certificate of localhost."""
    folder = tmp_path_factory.mktemp("tls")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost",
        "-keyout",
        "key.pem",
        "-out",
        "cert.pem",
    ]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here to make a certificate with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return folder / "cert.pem", context
