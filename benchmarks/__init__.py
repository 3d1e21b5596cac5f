"""Side by side with peers. `python -m benchmarks [name...]` runs the benchmarks here and prints their tables.

A benchmark is a module of this package with `TITLE: str` and `run() -> list[benchmarks.table.Row]`. It measures; it
never fails for being slow: a goal that is missed is a row that says so.
"""
