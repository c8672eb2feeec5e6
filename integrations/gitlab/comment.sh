#!/usr/bin/env bash
# Writes the plan of the changed deployment files into one note of the merge request.
# Needs curl, python3, LEGROOM_TOKEN and GitLab's own CI_* variables; LEGROOM_FAIL=false never fails the job.
# Exit codes: those of plan-changes.sh.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
script=$here/plan-changes.sh
[ -x "$script" ] || script=$here/../plan-changes.sh
report=$(mktemp)
trap 'rm -f "$report"' EXIT

code=0
"$script" "$CI_MERGE_REQUEST_DIFF_BASE_SHA" "$CI_COMMIT_SHA" >"$report" || code=$?
if [ "$code" -gt 1 ]; then # plan-changes.sh has said why
  [ "${LEGROOM_FAIL:-true}" = true ] || exit 0
  exit "$code"
fi
cat "$report"

comment() {
  local listed known notes=$CI_API_V4_URL/projects/$CI_PROJECT_ID/merge_requests/$CI_MERGE_REQUEST_IID/notes
  local ask=(curl --silent --show-error --fail --max-time 60 --header "PRIVATE-TOKEN: $LEGROOM_TOKEN")
  # Its own note is among the first: it comes with the first push.
  listed=$("${ask[@]}" "$notes?per_page=100&sort=asc&order_by=created_at") || return
  known=$(python3 -c '
import json, sys
try:
    notes = [note["id"] for note in json.load(sys.stdin) if (note["body"] or "").startswith("<!-- legroom plan -->")]
except (AttributeError, KeyError, TypeError, ValueError):
    sys.exit("the answer is no list of notes")
print(notes[0] if notes else "")' <<<"$listed") || return
  if [ -n "$known" ]; then
    # What the note said of an earlier push may no longer be so.
    grep -q '^<!-- legroom plan -->' "$report" || sed -i '1s/^/<!-- legroom plan -->\n/' "$report"
    "${ask[@]}" --request PUT --data-urlencode "body@$report" "$notes/$known" >/dev/null
  elif grep -q '^<!-- legroom plan -->' "$report"; then
    "${ask[@]}" --request POST --data-urlencode "body@$report" "$notes" >/dev/null
  fi
}

if [ -n "${LEGROOM_TOKEN:-}" ]; then
  why=$(comment 2>&1) || echo "The note was not written ($why); the plan stands above." >&2
fi
[ "${LEGROOM_FAIL:-true}" = true ] || exit 0
exit "$code"
