"""Stand-ins for programs that cannot run in a test: a `systemctl` and a `docker` that keep their state in a file.

They answer in the format of the real ones as far as legroom reads it. They are fakes: no systemd and no Docker runs.
"""

import sys
from pathlib import Path

SYSTEMCTL = """
import json, os, sys
from pathlib import Path
store = Path(os.environ["FAKE_STATE"])
state = json.loads(store.read_text())
words = [word for word in sys.argv[1:] if word != "--no-pager"]
user = "--user" in words
words = [word for word in words if word != "--user"]
state.setdefault("calls", []).append(words)
code = 0
if words[0] == "show":
    known = words[1] == state["unit"]
    shown = {"LoadState": "loaded" if known else "not-found", "ActiveState": state["active"],
             "InvocationID": f"start{state['starts']}", "MainPID": "42", "Job": state.get("job", "")}
    for word in words[2:]:
        name = word.partition("=")[2]
        print(f"{name}={shown[name]}")
elif words[0] == "cat":
    print(f"# /etc/systemd/system/{state['unit']}")
    print(Path(state["file"]).read_text())
    for drop_in in sorted(Path(state["folder"], state["unit"] + ".d").glob("*.conf")):
        print(drop_in.read_text())
elif words[0] == "restart":
    if state.get("broken"):
        print("Job for vllm.service failed. api_key=verysecret", file=sys.stderr)
        code = 1
    else:
        state["starts"] += 1
        state["active"] = "active"
store.write_text(json.dumps(state))
sys.exit(code)
"""

DOCKER = """
import json, os, sys
from pathlib import Path
store = Path(os.environ["FAKE_STATE"])
state = json.loads(store.read_text())
words = sys.argv[1:]
state.setdefault("calls", []).append(words)
code = 0
if words[0] == "inspect":
    if words[-1] not in state["names"]:
        print(f"Error: No such container: {words[-1]}", file=sys.stderr)
        code = 1
    else:
        print(json.dumps({"Running": state["running"], "Pid": 100 + state["starts"], "Paused": False,
                          "StartedAt": f"2026-01-01T00:00:{state['starts']:02}Z", "Restarting": False}))
elif words[0] == "restart":
    state["starts"] += 1
elif words[0] == "compose":
    rest = words[1:]
    files = [rest[at + 1] for at, word in enumerate(rest) if word == "--file"]
    if "config" in rest:
        project = {"services": {"vllm": {"command": state["command"]}, "bare": {}}}
        for name in files[1:]:
            project["services"]["vllm"] |= json.loads(Path(name).read_text())["services"]["vllm"]
        print(json.dumps(project))
    elif "ps" in rest:
        print("\\n".join(state["names"]))
    elif "up" in rest:
        state["starts"] += 1
        if "--scale" in rest:
            state["scaled"] = rest[rest.index("--scale") + 1]
store.write_text(json.dumps(state))
sys.exit(code)
"""


def install(folder: Path, name: str, source: str) -> None:
    """Puts a fake program into a folder that is put on the PATH."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(0o755)
