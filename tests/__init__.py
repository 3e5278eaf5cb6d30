"""Tests of the project; CONTRIBUTING.md describes the folders and how to run them."""
