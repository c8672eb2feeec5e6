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

comments=repos/$GITHUB_REPOSITORY/issues/$PR_NUMBER/comments

comment() {
  local known
  known=$(gh api --paginate "$comments" --jq '.[] | select(.body | startswith("<!-- legroom plan -->")) | .id') || return
  known=${known%%$'\n'*}
  if [ -n "$known" ]; then
    # What the comment said of an earlier push may no longer be so.
    grep -q '^<!-- legroom plan -->' "$report" || sed -i '1s/^/<!-- legroom plan -->\n/' "$report"
    gh api --method PATCH "repos/$GITHUB_REPOSITORY/issues/comments/$known" -F "body=@$report" >/dev/null
  elif grep -q '^<!-- legroom plan -->' "$report"; then
    gh api --method POST "$comments" -F "body=@$report" >/dev/null
  fi
}

# GitHub takes 65,536 characters.
head -c 60000 "$report" >"$report.cut" && mv "$report.cut" "$report"
comment || echo "::warning::the comment was not written: the token of a pull request from a fork may only read. The job's summary has the plan."
[ "${LEGROOM_FAIL:-true}" = true ] || exit 0
exit "$code"
