#!/usr/bin/env bash
# Renews the generated parts of docs/ and builds the pages into build/docs/index.html. Arguments go to mkdocs build.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
prepare_venv docs

"$PYTHON" -m docs.generate
exec "$PYTHON" -m mkdocs build --strict "$@"
