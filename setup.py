"""`pip install .` reads pyproject.toml; this file is for tools that still call `python setup.py`."""

from setuptools import setup

setup()
