"""The rooms stay rooms, and the tree stays clean of what does not belong in it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_no_room_imports_one_above_it():
    lint_imports = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_planning_and_below_never_print():
    for room in ("facts", "vllm", "memory", "planning", "render", "simulation"):
        for path in (ROOT / "src" / "legroom" / room).rglob("*.py"):
            assert not re.search(r"^\s*print\(", path.read_text("utf-8"), re.MULTILINE), f"{path} prints"


@pytest.mark.parametrize("module", ["torch", "numpy", "yaml", "huggingface_hub", "rich"])
def test_a_plan_of_a_bundled_model_imports_nothing_heavy(module):
    code = (
        "import sys; from legroom.cli.main import main; main(['plan', 'llama-3.1-8b', '--gpu', 'h100']); "
        f"sys.exit({module!r} in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_imports_no_command():
    code = (
        "import sys; from legroom.cli.main import main; main(['--help']); "
        "rooms = ('legroom.memory', 'legroom.planning', 'legroom.facts'); "
        "sys.exit(any(name.startswith(rooms) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_every_test_module_has_a_name_of_its_own():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
