"""Stands for Ctrl+C while a job is checked: whoever imports this gets a SIGINT."""

import signal

signal.raise_signal(signal.SIGINT)
