#!/usr/bin/env bash
# Build the documentation site in English and Chinese into site/ (or another folder); open site/index.html
#   bash scripts/docs.sh                         install requirements-docs.txt once, then build offline
#   bash scripts/docs.sh site --serve            also serve it on http://127.0.0.1:8000
#   DOCS_PYTHON=python3 bash scripts/docs.sh     use a Python that already has mkdocs-material
set -euo pipefail
CDPATH='' cd "$(dirname "${BASH_SOURCE[0]}")/.."
site=${1:-site}

python=${DOCS_PYTHON:-.venv-docs/bin/python}
if [ -z "${DOCS_PYTHON:-}" ] && ! cmp -s requirements-docs.txt .venv-docs/.installed; then
    echo "docs.sh: installing requirements-docs.txt into .venv-docs (once)"
    "${PYTHON:-python3}" -m venv .venv-docs
    .venv-docs/bin/python -m pip install --disable-pip-version-check --no-input -q -r requirements-docs.txt
    cp requirements-docs.txt .venv-docs/.installed
fi
staged=$(mktemp -d)
trap 'rm -rf "$staged"' EXIT
"$python" -m docs.site.pages "$staged" "$site"
for language in en zh; do # English first: its build clears the folder that will contain the Chinese pages
    if ! "$python" -m mkdocs build --strict --quiet --config-file "$staged/$language.yml" 2>"$staged/errors"; then
        cat "$staged/errors" >&2
        exit 1
    fi
done
# The site must work offline: no page may load fonts, scripts or styles from another host.
if grep -rlE '<(script|link|img|iframe)[^>]+(src|href)="?(https?:)?//' "$site" --include='*.html'; then
    echo "docs.sh: these pages load files from another host" >&2
    exit 1
fi
echo "docs.sh: $(find "$site" -name '*.html' | wc -l) pages in $site; open $site/index.html (its search needs" \
    "bash scripts/docs.sh $site --serve)"
if [ "${2:-}" = --serve ]; then exec "$python" -m http.server --bind 127.0.0.1 --directory "$site" 8000; fi
