.PHONY: check test bench docs

check:  ## style, types and the rules of the house
	bash scripts/setup.sh dev
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
	.venv/bin/python -m pytest tests/unit/test_layering.py

test:  ## everything
	bash scripts/test.sh

bench:  ## ratios against peers, on this machine; SECTIONS="dp tp" for some of them
	bash scripts/setup.sh dev
	.venv/bin/python benchmarks/suite.py --sections $(SECTIONS)

docs:  ## all pages as a site in both languages: site/index.html
	bash scripts/docs.sh
