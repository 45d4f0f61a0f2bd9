#!/bin/sh
# Everything Gemini shows of a script, on model.py: findings, changes, the round trip, the pictures.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
bin=${BIN:-$(dirname "$(command -v gemini)")}
out=${OUT:-.gemini/dump_ast}
mkdir -p "$out"

say() { printf '\n── %s\n' "$*"; }

say "gemini inspect model.py"
"$bin/gemini" inspect "$here/model.py"

say "gemini dump model.py --diff"
"$bin/gemini" dump "$here/model.py" --diff

say "gemini dump model.py -o $out/dump"
"$bin/gemini" dump "$here/model.py" -o "$out/dump"

say "the round trip: python on the dump, gemini_python on the script"
"$bin/python" "$out/dump/model.py" > "$out/dump.txt"
cat "$out/dump.txt"
"$bin/gemini_python" "$here/model.py" > "$out/launcher.txt"
cmp "$out/dump.txt" "$out/launcher.txt"
echo "both print the same"

say "gemini ast model.py, before and after the passes"
for form in svg png dot; do
    "$bin/gemini" ast "$here/model.py" -o "$out/before.$form"
    "$bin/gemini" ast "$here/model.py" --after -o "$out/after.$form"
done

say "all of it is in $out"
ls "$out"

say "gemini_python model.py, in two workers"
"$bin/gemini_python" --mode pipeline --pipeline-degree 2 --accum-degree 4 "$here/model.py" > "$out/workers.txt"
cat "$out/workers.txt"
last() { sed -n '$s/.*loss //p' "$1"; }
awk -v two="$(last "$out/workers.txt")" -v one="$(last "$out/dump.txt")" 'BEGIN {
    apart = two - one
    printf "last loss: %s in workers, %s on one device, difference %.1g\n", two, one, apart < 0 ? -apart : apart
}'
