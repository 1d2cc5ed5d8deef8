# Count query words by Python definition, in the files whose names come in, one a line.
# Variables: query (words), pattern (a line that may hold one), most (results).
# Prints, best first: distinct words, all matches, first line, path, class, function; tab-separated, '-' for none.

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

# More words, then more matches, then path and line.
function is_before(key, other) {
  if (distinct[key] != distinct[other]) return distinct[key] > distinct[other]
  if (total[key] != total[other]) return total[key] > total[other]
  if (path_of[key] != path_of[other]) return path_of[key] < path_of[other]
  return line[key] < line[other]
}

BEGIN {
  n = split(query, words, " ")
  for (i = 1; i <= n; i++) wanted[words[i]] = 1
  while ((getline name < "/dev/stdin") > 0) ARGV[ARGC++] = name
  if (ARGC == 1) exit
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
  # Few lines have either word, and the second look at a line costs six times the first.
  if (/class|def/ && $0 ~ /^[ \t]*(async[ \t]+)?(class|def)[ \t]/) push($0)
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
    if (!(key in line)) { line[key] = FNR; path_of[key] = path "" }
  }
}

END {
  for (rank = 1; rank <= most; rank++) {
    first = ""
    for (key in total) if (first == "" || is_before(key, first)) first = key
    if (first == "") break
    print distinct[first] "\t" total[first] "\t" line[first] "\t" first
    delete total[first]
  }
}
