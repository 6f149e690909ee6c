"""Instruments, and a file for each command of bench.py."""
