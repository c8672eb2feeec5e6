#!/usr/bin/env bash
# Writes the plan of the changed deployment files into one comment of the pull request, and into the job's summary.
# Needs gh, BASE_SHA, HEAD_SHA, PR_NUMBER, GITHUB_REPOSITORY and GH_TOKEN; LEGROOM_FAIL=false never fails the check.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
report=$(mktemp)
trap 'rm -f "$report"' EXIT

code=0
"$here/../plan-changes.sh" "$BASE_SHA" "$HEAD_SHA" >"$report" || code=$?
[ "$code" -le 1 ] || exit "$code"
cat "$report" >>"${GITHUB_STEP_SUMMARY:-/dev/null}"

if grep -q '^<!-- legroom plan -->' "$report"; then
  comments=repos/$GITHUB_REPOSITORY/issues/$PR_NUMBER/comments
  # GitHub takes 65,536 characters.
  head -c 60000 "$report" >"$report.cut" && mv "$report.cut" "$report"
  known=$(gh api --paginate "$comments" --jq '.[] | select(.body | startswith("<!-- legroom plan -->")) | .id' | head -n 1)
  if [ -n "$known" ]; then
    gh api --method PATCH "repos/$GITHUB_REPOSITORY/issues/comments/$known" -F "body=@$report" >/dev/null
  else
    gh api --method POST "$comments" -F "body=@$report" >/dev/null
  fi
fi
[ "${LEGROOM_FAIL:-true}" = true ] || exit 0
exit "$code"
