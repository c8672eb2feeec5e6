# Sourced by the scripts beside it: goes to the repository root, finds a Python, makes .venv and installs legroom there.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

find_python() {
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 python; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
      command -v "$candidate"
      return 0
    fi
  done
  echo "legroom needs Python 3.11 or newer and found none; install it, or name it: PYTHON=/path/to/python3.11 $0" >&2
  return 2
}

make_venv() {
  [ -x .venv/bin/python ] && return 0
  local python
  python=$(find_python) || exit 2
  "$python" -m venv .venv || {
    echo "could not create .venv (on Debian and Ubuntu: apt install python3-venv)" >&2
    exit 3
  }
}

# install_into_venv EXTRA: EXTRA is "" or "[dev]". Skipped while pyproject.toml is as it was at the last install.
install_into_venv() {
  local stamp=.venv/.installed-${1:-base}
  if [ -f "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ] && .venv/bin/python -c 'import legroom' 2>/dev/null; then
    return 0
  fi
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".$1" && touch "$stamp"
}

# An editable install leaves no bytecode, and where PYTHONDONTWRITEBYTECODE is set none would ever be kept.
compile_bytecode() {
  .venv/bin/python -m compileall -q src/legroom
}

make_venv
