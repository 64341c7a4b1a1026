# SPDX-License-Identifier: Apache-2.0
# Counts a test run. Input: CTest's JUnit file first, which names the entries and what became of
# each; then the GoogleTest reports, one folder an entry. `folder` is where they lie, with a slash
# at the end. A case that several ranks report counts once, at its worst. Prints a line for each
# failed test, one for each reason to skip of an entry, then `totals PASSED FAILED SKIPPED`. Runs on
# mawk and gawk.

function unescape(text) {
  gsub(/&#x0A;|&#10;/, ": ", text)
  gsub(/&lt;/, "<", text); gsub(/&gt;/, ">", text)
  gsub(/&quot;/, "\"", text); gsub(/&apos;/, "\047", text); gsub(/&amp;/, "\\&", text)
  return text
}
# Value of an attribute of this line, or nothing.
function attribute(name,   at, rest) {
  at = index($0, " " name "=\"")
  if (at == 0) return ""
  rest = substr($0, at + length(name) + 3)
  return unescape(substr(rest, 1, index(rest, "\"") - 1))
}
# One skipped case of an entry, or the entry itself.
function skip(entry, why,   line) {
  sub(/^[^ ]*:[0-9]+: /, "", why)  # where GoogleTest says GTEST_SKIP stands
  line = entry ": " why
  if (!(line in skips)) skip_lines[++skip_count] = line
  ++skips[line]
  ++skipped
}
FILENAME == folder "ctest.xml" {
  if (/<testcase /) {
    entry = attribute("name")
    entries[++count] = entry
    outcome[entry] = attribute("status")
  } else if (/<skipped /) {
    note[entry] = attribute("message")
  } else if (/^(\t*<system-out>)?skipped: /) {
    line = $0
    sub(/^.*skipped: /, "", line)
    sub(/<\/system-out>.*/, "", line)
    reason[entry] = unescape(line)
  }
  next
}
FNR == 1 {
  entry = substr(FILENAME, length(folder) + 1)
  entry = substr(entry, 1, index(entry, "/") - 1)
  reported[entry] = 1
}
/<testcase / {
  name = entry ": " attribute("classname") "." attribute("name")
  ran = attribute("status") == "run"
  if (ran && !(name in worst)) {
    cases[++case_count] = name
    case_entry[name] = entry
    worst[name] = 0
  }
}
/<skipped/ && ran && worst[name] < 1 {
  worst[name] = 1
  why[name] = attribute("message")
}
/<failure/ && ran {
  worst[name] = 2
  case_failed[entry] = 1
}
END {
  for (i = 1; i <= case_count; ++i) {
    name = cases[i]
    if (worst[name] == 2) {
      ++failed
      print "failed: " name
    } else if (worst[name] == 1) {
      skip(case_entry[name], why[name])
    } else {
      ++passed
    }
  }
  for (i = 1; i <= count; ++i) {
    entry = entries[i]
    if (outcome[entry] == "fail" && !case_failed[entry]) {
      # A crash or a time limit leaves no report, and a launcher may fail after its ranks.
      ++failed
      print "failed: " entry
    } else if (reported[entry]) {
      continue
    } else if (outcome[entry] == "run") {
      ++passed
    } else if (outcome[entry] == "disabled" || note[entry] ~ /^SKIP_/) {
      skip(entry, reason[entry] != "" ? reason[entry] : "disabled")
    } else if (outcome[entry] == "notrun") {
      ++failed
      print "failed: " entry ": did not run: " note[entry]
    }
  }
  for (i = 1; i <= skip_count; ++i) print "skipped: " skips[skip_lines[i]] " in " skip_lines[i]
  print "totals", passed + 0, failed + 0, skipped + 0
}
