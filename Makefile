.PHONY: check test bench

check:  ## style, types and the rules of the house
	bash scripts/setup.sh dev
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
	.venv/bin/python -m pytest tests/unit/test_layering.py

test:  ## everything
	bash scripts/test.sh

bench:  ## ratios against peers, on this machine
	bash scripts/setup.sh dev
	.venv/bin/python benchmarks/run.py
	.venv/bin/python benchmarks/data.py
	.venv/bin/python benchmarks/checkpoint.py
