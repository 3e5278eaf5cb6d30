"""Tests of what the project promises."""
