#!/usr/bin/env bash
# The plan of every deployment file that changed since BASE, as Markdown on standard output.
# Usage: plan-changes.sh BASE [HEAD]
# LEGROOM_GPU      the GPU of files that name none (h100, l4, 24GiB)
# LEGROOM_PATHS    git pathspecs to look at, separated by blanks (default: all)
# Exit codes: 0 every server starts, 1 one does not, 2 the call is wrong or a commit is not there. A file that cannot be
# read is said in the text.
set -euo pipefail

[ $# -ge 1 ] || { echo "usage: plan-changes.sh BASE [HEAD]" >&2; exit 2; }
base=$1
head=${2:-HEAD}
for commit in "$base" "$head"; do
  git rev-parse --verify --quiet --end-of-options "$commit^{commit}" >/dev/null ||
    { echo "error: '$commit' is no commit here: fetch it, or more of the history (fetch-depth: 0, GIT_DEPTH: 0)" >&2; exit 2; }
done
from=$(git merge-base "$base" "$head") || { echo "error: there is no common commit of $base and $head: fetch more of the history" >&2; exit 2; }
gpu=()
[ -z "${LEGROOM_GPU:-}" ] || gpu=(--gpu "$LEGROOM_GPU")
read -r -a paths <<<"${LEGROOM_PATHS:-}"

found=0
broken=0
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT

planned() { # OLD NEW FILE
  local section code=0
  section=$(legroom plan --diff "$1" "$2" --markdown ${gpu[@]+"${gpu[@]}"} 2>"$errors") || code=$?
  if [ "$code" -gt 1 ]; then
    # Most files of a repository start no server, and some cannot be read: neither is worth a failed check.
    section=$(printf '### %s\n\nNot understood: %s' "$3" "$(sed -n 's/^error: //p' "$errors" | head -n 1)")
  elif [ "$code" = 1 ]; then
    broken=1
  fi
  case $section in *"Neither version starts a vLLM server."*) return ;; esac
  [ "$found" = 1 ] || printf '<!-- legroom plan -->\n## GPU memory of the changed deployments\n\n'
  found=1
  printf '%s\n\n' "$section"
}

while IFS= read -r -d '' status && IFS= read -r -d '' old; do
  new=$old
  case $status in R* | C*) IFS= read -r -d '' new ;; esac
  case $new in
    *.yaml | *.yml | *.json | *.sh | *.bash | *.service | *.py | *.env | *Dockerfile* | *.dockerfile) ;;
    *) continue ;;
  esac
  case $status in
    A*) before=/dev/null ;;
    *) before=$from:$old ;;
  esac
  case $status in
    D*) after=/dev/null ;;
    *) after=$head:$new ;;
  esac
  # A file without the word starts no vLLM, whichever version of it.
  { [ "$before" = /dev/null ] || git show "$before"; [ "$after" = /dev/null ] || git show "$after"; } 2>/dev/null |
    grep -iaE 'vllm|InferenceService|kubeai' >/dev/null || continue
  planned "$before" "$after" "$new"
done < <(git diff --name-status -z --diff-filter=ACDMR "$from" "$head" -- ${paths[@]+"${paths[@]}"})

[ "$found" = 1 ] || echo "No changed file starts a vLLM server."
exit "$broken"
