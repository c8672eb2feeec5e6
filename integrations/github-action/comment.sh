#!/usr/bin/env bash
# Writes the plan of the changed deployment files into one comment of the pull request, and into the job's summary.
# Needs curl, python3, BASE_SHA, HEAD_SHA, PR_NUMBER, GH_TOKEN and GitHub's own GITHUB_* variables; LEGROOM_FAIL=false
# never fails the check. Exit codes: those of plan-changes.sh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
report=$(mktemp)
trap 'rm -f "$report"' EXIT

code=0
"$here/../plan-changes.sh" "$BASE_SHA" "$HEAD_SHA" >"$report" || code=$?
if [ "$code" -gt 1 ]; then # plan-changes.sh has said why
  [ "${LEGROOM_FAIL:-true}" = true ] || exit 0
  exit "$code"
fi
cat "$report" >>"${GITHUB_STEP_SUMMARY:-/dev/null}"

issues=${GITHUB_API_URL:-https://api.github.com}/repos/$GITHUB_REPOSITORY/issues
ask=(curl --silent --show-error --fail --header "Authorization: Bearer ${GH_TOKEN:-}" --header "Accept: application/vnd.github+json")

own_comment() { # The id of the comment of an earlier push; empty without one.
  local page=1 listed
  while listed=$("${ask[@]}" "$issues/$PR_NUMBER/comments?per_page=100&page=$page"); do
    python3 -c '
import json, sys
try:
    comments = json.load(sys.stdin)
    own = [comment["id"] for comment in comments if (comment["body"] or "").startswith("<!-- legroom plan -->")]
except (AttributeError, KeyError, TypeError, ValueError):
    sys.exit("the answer is no list of comments")
print(own[0] if own else "")
sys.exit(0 if own or len(comments) < 100 else 9)' <<<"$listed" && return
    [ "$?" = 9 ] || return 1
    page=$((page + 1))
  done
  return 1
}

send() { # METHOD URL. GitHub takes 65,536 characters; a cut may fall inside one.
  python3 -c '
import json, sys
print(json.dumps({"body": sys.stdin.buffer.read()[:60000].decode("utf-8", "ignore")}))' <"$report" |
    "${ask[@]}" --request "$1" --data-binary @- "$2" >/dev/null
}

comment() {
  local known
  known=$(own_comment) || return
  known=${known//[!0-9]/}
  if [ -n "$known" ]; then
    # What the comment said of an earlier push may no longer be so.
    grep -q '^<!-- legroom plan -->' "$report" || sed -i '1s/^/<!-- legroom plan -->\n/' "$report"
    send PATCH "$issues/comments/$known"
  elif grep -q '^<!-- legroom plan -->' "$report"; then
    send POST "$issues/$PR_NUMBER/comments"
  fi
}

comment || echo "::warning::the comment was not written: the API did not take it, or the token may only read, as that of a fork. The job's summary has the plan."
[ "${LEGROOM_FAIL:-true}" = true ] || exit 0
exit "$code"
