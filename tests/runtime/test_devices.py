"""DE-1 to DE-4 of runtime/devices.py: GPUs and cores of processes, with drivers made of files, and real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime import NotEnoughGpus, OutOfRange, this_host
from runtime.devices import CorePool, GpuPool, Gpus, find_gpus
from tests.runtime.actors import Greeter


def nvidia(root: Path, count: int) -> Path:
    (root / "dev").mkdir()
    for name in (*(f"nvidia{i}" for i in range(count)), "nvidiactl", "nvidia-uvm"):
        (root / "dev" / name).touch()
    return root


def amd(root: Path, count: int) -> Path:
    """A topology as the kernel driver of AMD shows it: the first node is the CPU."""
    for i in range(count + 1):
        node = root / "sys/class/kfd/kfd/topology/nodes" / str(i)
        node.mkdir(parents=True)
        (node / "properties").write_text(f"cpu_cores_count {0 if i else 8}\nsimd_count {304 if i else 0}\n")
    return root


def test_gpus_are_found_in_what_the_drivers_publish(tmp_path):
    assert find_gpus({}, tmp_path) == Gpus()
    assert find_gpus({}, nvidia(tmp_path, 12)) == Gpus(tuple(str(i) for i in range(12)))


def test_gpus_of_a_container_are_counted_from_0_whatever_their_numbers_in_dev(tmp_path):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia3", "nvidia6", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    assert find_gpus({}, tmp_path) == Gpus(("0", "1"))


def test_gpus_of_amd_are_found_without_its_cpus(tmp_path):
    assert find_gpus({}, amd(tmp_path, 2)) == Gpus(("0", "1"), rocm=True)


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("2,0", ("2", "0")),
        ("", ()),
        ("-1", ()),
        ("1,9,0", ("1",)),
        ("GPU-8f1a, MIG-2b", ("GPU-8f1a", "MIG-2b")),
    ],
)
def test_what_the_controller_can_not_see_is_not_given_away_de3(tmp_path, value, names):
    assert find_gpus({"CUDA_VISIBLE_DEVICES": value}, nvidia(tmp_path, 4)).names == names


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
def test_each_filter_of_rocm_is_heeded_de3(tmp_path, name):
    assert find_gpus({name: "1,0"}, amd(tmp_path, 4)).names == ("1", "0")


def test_own_gpus_come_first_and_peers_stay_visible_de2():
    assert Gpus(("0", "1", "2", "3")).environment([2, 3]) == {"CUDA_VISIBLE_DEVICES": "2,3,0,1"}
    rocm = Gpus(("4", "5"), rocm=True)
    assert rocm.environment([1]) == {"HIP_VISIBLE_DEVICES": "5,4"}
    assert set(rocm.unset) >= {"ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"}
    assert Gpus(("0",)).unset == ()


def test_gpus_are_for_one_process_until_they_are_given_back_de1():
    pool = GpuPool(Gpus(("0", "1", "2", "3")))
    assert pool.take("trainer", 2, 1) == [(0,), (1,)]
    with pytest.raises(
        NotEnoughGpus,
        match=r"spawn_procs\('rollout'\): 3 processes with 1 GPU\(s\) each need 3; of the 4 that this host shows, "
        r"2 are free \(trainer has 2\)",
    ):
        pool.take("rollout", 3, 1)
    assert pool.take("rollout", 1, 2) == [(2, 3)]
    pool.give_back((0, 1))
    assert pool.take("reference", 1, 1) == [(0,)]
    assert pool.share("judge", 2, [[0], [0, 3]]) == [(0,), (0, 3)]
    with pytest.raises(NotEnoughGpus, match="no GPU 4; this host shows 4, counted from 0"):
        pool.share("judge", 1, [[4]])
    with pytest.raises(ValueError, match="expected gpus for 2 processes, one list each, got 1"):
        pool.share("judge", 2, [[0]])


def test_cores_are_shared_evenly_and_never_fewer_than_one_de4():
    pool = CorePool(range(8))
    assert [pool.take(4) for _ in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    pool.give_back((4, 5))
    assert pool.take(4) == (4, 5)
    assert CorePool(range(8)).take(1) == ()
    assert CorePool(range(2)).take(3) == ()
    odd = CorePool([0, 2, 4])
    assert [odd.take(2) for _ in range(3)] == [(0,), (2,), (4,)]


@pytest.mark.parametrize("start", ["auto", "fork"])
async def test_a_process_starts_with_its_gpus_in_place_de2(tmp_path, monkeypatch, start):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    async with this_host(preload=[]) as host:
        host._places.gpus = GpuPool(find_gpus(os.environ, nvidia(tmp_path, 4)))  # a machine with GPUs, made of files
        procs = await host.spawn_procs(2, name="trainer", gpus=1, start=start)
        greeters = await procs.spawn("greeter", Greeter)
        assert (await greeters.variable.call("CUDA_VISIBLE_DEVICES")).values() == ["1,0", "0,1"]
        with pytest.raises(NotEnoughGpus):
            await host.spawn_procs(1, name="more", gpus=1)
        await procs.stop()
        async with await host.spawn_procs(1, name="more", gpus=2):
            pass


async def test_more_processes_than_gpus_is_an_error_before_anything_starts():
    async with this_host(preload=[]) as host:
        with pytest.raises(NotEnoughGpus, match=r"4096 processes with 1 GPU\(s\) each need 4096"):
            await host.spawn_procs(4096, gpus=1)
        assert not list(host.run_directory.glob("*-*"))
        with pytest.raises(ValueError, match="gpus of 0 or more"):
            await host.spawn_procs(1, gpus=-1)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to share")
async def test_processes_are_bound_to_their_share_of_the_cores_when_their_number_is_known():
    cores = os.sched_getaffinity(0)
    async with this_host(preload=[], processes=2) as host:
        procs = await host.spawn_procs(2, name="a")
        bound = [os.sched_getaffinity(pid) for pid in procs.pids]
        assert all(len(own) == len(cores) // 2 for own in bound)
        assert not bound[0] & bound[1]
        assert all(os.sched_getaffinity(int(t)) == bound[0] for t in os.listdir(f"/proc/{procs.pids[0]}/task"))
        free = await host.spawn_procs(1, name="b", pin=False)
        assert os.sched_getaffinity(free.pids[0]) == cores
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(2)
        assert os.sched_getaffinity(procs.pids[0]) == cores


async def test_kind_33_threads_are_cores_by_processes_unless_said():
    cores = len(os.sched_getaffinity(0))
    async with this_host(preload=[], processes=4 * cores) as host:
        greeters = await (await host.spawn_procs(1)).spawn("greeter", Greeter)
        assert await greeters.variable.call_one("OMP_NUM_THREADS") == "1"
    async with this_host(preload=[]) as host:
        greeters = await (await host.spawn_procs(1)).spawn("greeter", Greeter)
        assert await greeters.variable.call_one("OMP_NUM_THREADS") == str(cores)


async def test_kind_35_a_variable_that_libraries_read_at_import_is_there_before_any_import():
    async with this_host(preload=[]) as host:
        procs = await host.spawn_procs(1, env={"CUDA_VISIBLE_DEVICES": "3"})
        with open(f"/proc/{procs.pids[0]}/environ", "rb") as file:  # what it was started with, not what it set later
            assert b"CUDA_VISIBLE_DEVICES=3" in file.read().split(b"\0")


async def test_processes_are_spawned_on_slices_of_the_host():
    async with this_host(preload=[]) as host:
        assert await host.slice(host=0).spawn_procs(1)
        with pytest.raises(OutOfRange):
            host.slice(host=1)
