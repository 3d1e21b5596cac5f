"""LO-1 to LO-5 of runtime/logs.py: what real processes print (R11)."""

from __future__ import annotations

import logging
import os

import pytest

from runtime import Actor, endpoint, this_host


class Talker(Actor):
    @endpoint
    def talk(self, lines: int) -> None:
        for number in range(lines):
            print(f"number {number}", flush=True)
            logging.getLogger("lib").warning("careful %d", number)

    @endpoint
    def log(self) -> None:
        for level in ("debug", "info", "warning", "error", "critical"):
            getattr(logging.getLogger("my.lib"), level)("at %s", level)

    @endpoint
    def own_format(self) -> None:
        logging.basicConfig(format="mine: %(message)s", level="INFO")
        logging.getLogger("x").info("hello")


async def test_kind_16_each_line_comes_once_with_its_rank_and_severity_and_never_merged():
    lines: list[str] = []
    async with this_host(preload=[], sink=lines.append) as host:
        talkers = await (await host.spawn_procs(2, name="trainer")).spawn("talker", Talker)
        await talkers.talk.call(2000)
    for rank in (0, 1):
        prefix = f"[trainer {rank}] "
        own = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
        assert [line for line in own if line.startswith("number")] == [f"number {n}" for n in range(2000)]
        assert [line for line in own if "careful" in line] == [f"WARNING lib: careful {n}" for n in range(2000)]
    assert len(lines) == 8000


async def test_kind_17_quiet_by_default_and_as_talkative_as_asked_for_each_role_lo5():
    lines: list[str] = []
    async with this_host(preload=[], sink=lines.append, log={"rollout": "INFO", "reward": "error"}) as host:
        for name in ("trainer", "rollout", "reward.3"):
            talkers = await (await host.spawn_procs(1, name=name)).spawn("talker", Talker)
            await talkers.log.call_one()
    assert [line.partition(" my.lib")[0] for line in lines] == [
        "[trainer 0] WARNING", "[trainer 0] ERROR", "[trainer 0] CRITICAL",
        "[rollout 0] INFO", "[rollout 0] WARNING", "[rollout 0] ERROR", "[rollout 0] CRITICAL",
        "[reward.3 0] ERROR", "[reward.3 0] CRITICAL",
    ]  # fmt: skip


async def test_code_that_sets_up_logging_itself_is_left_alone_lo5():
    lines: list[str] = []
    async with this_host(preload=[], sink=lines.append) as host:
        talkers = await (await host.spawn_procs(1, name="trainer")).spawn("talker", Talker)
        await talkers.own_format.call_one()
    assert lines == ["[trainer 0] mine: hello"]


def test_an_unknown_level_is_refused_with_its_role():
    with pytest.raises(ValueError, match="log level of 'trainer': expected debug, info, warning, error, critical, got"):
        this_host(log={"trainer": "loud"})


async def test_lines_below_64_kib_are_whole_and_longer_ones_are_broken_not_cut_lo2(tmp_path):
    lines: list[str] = []
    async with this_host(preload=[], sink=lines.append, log_dir=tmp_path) as host:
        procs = await host.spawn_procs(1, name="trainer")
        await procs.run(os.write, 1, b"a" * 65_535 + b"\n")
        await procs.run(os.write, 1, b"b" * 150_000 + b"\n")
    assert lines[0] == "[trainer 0] " + "a" * 65_535
    assert "".join(line.removeprefix("[trainer 0] ") for line in lines[1:]) == "b" * 150_000
    assert all(len(line) <= 65_536 + len("[trainer 0] ") for line in lines)
    assert (tmp_path / "trainer-0.log").stat().st_size > 215_000
