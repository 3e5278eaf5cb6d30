#!/usr/bin/env bash
# Build the documentation site, English with Chinese beside it, into site/ (or the folder that is named): open site/index.html
#   bash scripts/docs.sh                         once asks the package index for what requirements-docs.txt pins, then nothing any more
#   bash scripts/docs.sh site --serve            and show it on http://127.0.0.1:8000
#   DOCS_PYTHON=python3 bash scripts/docs.sh     with a Python that has mkdocs-material already: without network
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
site=${1:-site}

python=${DOCS_PYTHON:-.venv-docs/bin/python}
if [ -z "${DOCS_PYTHON:-}" ] && ! cmp -s requirements-docs.txt .venv-docs/.installed; then
    echo "docs.sh: installing what requirements-docs.txt lists into .venv-docs (once)"
    "${PYTHON:-python3}" -m venv .venv-docs
    .venv-docs/bin/python -m pip install --disable-pip-version-check --no-input -q -r requirements-docs.txt
    cp requirements-docs.txt .venv-docs/.installed
fi
staged=$(mktemp -d)
trap 'rm -rf "$staged"' EXIT
"$python" -m docs.site.pages "$staged" "$site"
for language in en zh; do # the Chinese pages lie in a folder of the English ones, which are built anew first
    if ! "$python" -m mkdocs build --strict --quiet --config-file "$staged/$language.yml" 2>"$staged/said"; then
        cat "$staged/said" >&2
        exit 1
    fi
done
# Fonts, scripts and styles are of the site itself.
if grep -rlE '<(script|link|img|iframe)[^>]+(src|href)="?(https?:)?//' "$site" --include='*.html'; then
    echo "docs.sh: these pages fetch something from another host" >&2
    exit 1
fi
echo "docs.sh: $(find "$site" -name '*.html' | wc -l) pages in $site; open $site/index.html, or to search in it: bash scripts/docs.sh $site --serve"
if [ "${2:-}" = --serve ]; then exec "$python" -m http.server --bind 127.0.0.1 --directory "$site" 8000; fi
