"""AC-1 to AC-4 of runtime/actor.py, without processes."""

from __future__ import annotations

import asyncio
import threading

import pytest

from runtime import Actor, ActorMesh, Shape, context, current_rank, current_size, endpoint, on_main_thread
from runtime.actor import RESERVED, endpoints_of
from runtime.interface import Interface
from tests.runtime.actors import Gates, Greeter
from tests.runtime.stream_actors import Teller


def test_an_actor_is_an_ordinary_object_without_a_process():
    greeter = Greeter("hello")
    assert greeter.hello("bob") == "hello bob from 0 of 1"
    assert (context().proc_name, context().rank, context().size, context().cancelled) == ("controller", 0, 1, False)
    assert (current_rank(), current_size()) == (0, 1)


async def test_async_endpoints_and_tasks_work_without_a_process():
    gates = Gates()
    waiter = asyncio.create_task(gates.wait())
    await gates.background(fail=False)
    await gates.open()
    assert await waiter == 1
    await gates.tasks.close()


async def test_on_main_thread_without_a_worker_runs_at_once():
    assert await on_main_thread(lambda x: (x, threading.current_thread() is threading.main_thread()), 3) == (3, True)


def test_endpoints_of_mixins_are_endpoints():
    class Mixin:
        @endpoint
        def from_mixin(self) -> int:
            return 1

    class Both(Mixin, Greeter):
        @endpoint
        def own(self) -> int:
            return 2

    assert {"from_mixin", "own", "hello"} <= set(endpoints_of(Both))


def test_an_endpoint_overridden_as_an_endpoint_is_fine():
    class Louder(Greeter):
        @endpoint
        def hello(self, name: str) -> str:
            return name.upper()

    assert Louder().hello("x") == "X"


def test_hiding_an_endpoint_by_a_plain_method_is_refused():
    with pytest.raises(
        TypeError, match=r"hello hides the endpoint of Greeter but is none itself. Put @endpoint above it"
    ):

        class Quiet(Greeter):
            def hello(self, name: str) -> str:
                return ""


@pytest.mark.parametrize("name", ["slice", "stop", "_hidden"])
def test_names_that_the_mesh_needs_are_refused(name):
    def method(self): ...

    with pytest.raises(TypeError, match="Give the endpoint another name"):
        type("Clash", (Actor,), {name: endpoint(method)})


def test_every_public_name_of_a_mesh_is_refused_as_the_name_of_an_endpoint():
    mesh = ActorMesh("m", Shape({}), [], Interface.of(Greeter), None)  # type: ignore[arg-type]
    taken = {name for name in (*dir(ActorMesh), *vars(mesh)) if not name.startswith("_")}
    assert taken <= RESERVED


async def test_generator_endpoints_are_ordinary_generators_without_a_process():
    teller = Teller()
    assert [number async for number in teller.count(3)] == [0, 1, 2]
    with pytest.raises(TypeError, match="concurrency=2 needs 'async def'"):

        @endpoint(concurrency=2)
        def values(self):
            yield 1


def test_concurrency_needs_async():
    with pytest.raises(TypeError, match="concurrency=4 needs 'async def'"):

        @endpoint(concurrency=4)
        def work(self): ...

    with pytest.raises(TypeError, match="concurrency=1 needs 'async def'"):

        @endpoint(concurrency=1)
        def one(self): ...

    with pytest.raises(TypeError, match="concurrency of at least 1, got 0"):

        @endpoint(concurrency=0)
        async def nothing(self): ...


def test_static_methods_are_refused():
    with pytest.raises(TypeError, match="got a staticmethod"):

        class Static(Actor):
            @endpoint
            @staticmethod
            def work(): ...


def test_missing_self_is_refused():
    with pytest.raises(TypeError, match="expected self"):

        class NoSelf(Actor):
            @endpoint
            def work(): ...  # type: ignore[misc]
