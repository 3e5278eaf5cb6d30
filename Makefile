.PHONY: check test bench

check:  ## style, types and the rules of the house
	bash scripts/setup.sh dev
	.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy
	.venv/bin/python -m pytest tests/unit/test_layering.py

test:  ## everything
	bash scripts/test.sh

bench:  ## ratios against peers, on this machine
	bash scripts/setup.sh dev
	.venv/bin/python benchmarks/run.py --precision fp32
	.venv/bin/python benchmarks/run.py --precision bf16
	.venv/bin/python benchmarks/run.py --model t5 --layers 6 --hidden 512 --heads 8 --vocab 32128 --batch 4
	.venv/bin/python benchmarks/parallel.py --kind dp
	.venv/bin/python benchmarks/parallel.py --kind tp
	.venv/bin/python benchmarks/pipeline_layers.py
	.venv/bin/python benchmarks/cost.py
	.venv/bin/python benchmarks/data.py
	.venv/bin/python benchmarks/checkpoint.py
