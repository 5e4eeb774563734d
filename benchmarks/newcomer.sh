#!/usr/bin/env bash
# The README's way from a clean clone to the first plot, timed: `benchmarks/newcomer.sh [FOLDER]`.
# Everything is made in FOLDER (default: a temporary one), the virtual environment too; pip's own settings are honoured.
set -euo pipefail
repository="$(cd "$(dirname "$0")/.." && pwd)"
folder="${1:-$(mktemp -d)}"
begin=$SECONDS
git clone --quiet "$repository" "$folder/hf_emopt"
cd "$folder/hf_emopt"
make .venv/.installed-examples
echo "installed after $((SECONDS - begin)) s"
make demo
test -s demo-out/curves.png
echo "demo-out/curves.png after $((SECONDS - begin)) s on $(nproc) cores"
