# Count query words by Python definition. Variables: query (words), pattern (a line that holds one).
# Prints: distinct words, all matches, first line, path, class, function; tab-separated, '-' for none.

function count(text, mark,   at, n) {
  n = 0
  while ((at = index(text, mark)) > 0) { n++; text = substr(text, at + 3) }
  return n
}

function pop(indent) {
  while (depth > 0 && at[depth] >= indent) depth--
}

function push(text) {
  depth++
  at[depth] = indent
  kind[depth] = (text ~ /^[ \t]*class/) ? "class" : "def"
  sub(/^[ \t]*(async[ \t]+)?(class|def)[ \t]+/, "", text)
  match(text, /^[A-Za-z0-9_]+/)
  title[depth] = substr(text, 1, RLENGTH)
}

# A string that a line opens and does not close hides what follows until the same mark comes again.
function open_string(text,   double, single) {
  double = index(text, "\"\"\"")
  single = index(text, "'''")
  quote = (double && (!single || double < single)) ? "\"\"\"" : "'''"
  if (count(text, quote) % 2 == 0) quote = ""
}

BEGIN {
  n = split(query, words, " ")
  for (i = 1; i <= n; i++) wanted[words[i]] = 1
}

FNR == 1 {
  depth = 0
  quote = ""
  path = FILENAME
  sub(/^\.\//, "", path)
}

quote == "" {
  indent = match($0, /[^ \t]/)
  # Comments and closing brackets may stand further left than the definition they belong to.
  if (indent && depth && indent <= at[depth] && !index("#)]}", substr($0, indent, 1))) pop(indent)
  if ($0 ~ /^[ \t]*(async[ \t]+)?(class|def)[ \t]/) push($0)
}

/"""|'''/ {
  if (quote == "") open_string($0)
  else if (count($0, quote) % 2) quote = ""
}

$0 ~ pattern {
  class = "-"
  func_ = "-"
  # What is nested deeper belongs to the outermost class and function, as in the gold places of a task.
  if (depth && kind[1] == "def") func_ = title[1]
  else if (depth) {
    class = title[1]
    if (depth > 1 && kind[2] == "def") func_ = title[2]
  }
  key = path "\t" class "\t" func_
  n = split($0, parts, /[^A-Za-z0-9_]+/)
  for (i = 1; i <= n; i++) if (parts[i] in wanted) {
    total[key]++
    if (!((key, parts[i]) in seen)) { seen[key, parts[i]] = 1; distinct[key]++ }
    if (!(key in line)) line[key] = FNR
  }
}

END {
  for (key in total) print distinct[key] "\t" total[key] "\t" line[key] "\t" key
}
