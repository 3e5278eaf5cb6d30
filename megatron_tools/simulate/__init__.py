"""Simulation of pipeline schedules, and short profiled runs that measure the costs it needs."""
