"""Who trains of the processes that are started, how they meet, and what they say where they cannot."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megatrain.distributed.join import Places, _within, join, name_way
from megatrain.distributed.meeting import (
    Comer,
    Met,
    backend_of,
    meet,
    problem_of,
    share_cores,
    take_device,
    this_process,
)
from megatrain.distributed.network import VARIABLES, interface_of, name_interface_alone, own_address
from megatrain.errors import ConfigError
from megatrain.hardware import accelerators
from megatrain.hardware.accelerators import VENDORS, check_count
from tests.distributed.processes import exit_codes


@pytest.mark.parametrize(
    ("num_processes", "num_local", "shards", "places"),
    [
        (3, 3, None, (1, 2)),
        (6, 6, 8, (1, 4)),
        (8, 8, 4, (1, 4)),
        (24, 8, None, (2, 8)),
        (24, 8, 8, (1, 8)),
        (12, 3, 64, (4, 2)),
        (7, 7, 1, (1, 1)),
    ],
)
def test_as_many_train_as_share_out_the_runs(
    num_processes: int, num_local: int, shards: int | None, places: tuple[int, int]
) -> None:
    found = Places.of(num_processes, num_local, shards)
    assert (found.num_nodes, found.local_size) == places
    numbers = [found.rank(*divmod(number, num_local)) for number in range(num_processes)]
    assert [number for number in numbers if number is not None] == list(range(found.size))


def test_nodes_with_different_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="a node has 3 of 5 ranks"):
        Places.of(5, 3, None)


def test_ranks_that_are_not_needed_wait_for_the_end_and_say_so(tmp_path: Path) -> None:
    assert exit_codes(tmp_path / "logs", 1, _start, port=free_port()) == [0]
    said = (tmp_path / "logs/errors").read_text()  # torch says there that the store ends with the first rank
    assert said.count("2 of 3 ranks train, a power of two; the others wait for their end\n") == 1
    assert said.count("ranks train") == 1


def _start(ranks: Any, *, port: int) -> None:
    children = [_joining(rank, 3, port) for rank in range(3)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [40, 41, 42]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def _joining(rank: int, size: int, port: int, **environment: str) -> int:
    """Start a rank that joins others on this computer, and return its process.

    It ends with 40 and its rank, with 42 if it was not needed, or with what it could not do.
    """
    process = os.fork()
    if process == 0:
        code = 1
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        numbers |= {"MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in numbers.items()}
        os.environ |= {"MASTER_ADDR": "localhost", **environment}
        try:
            joined = join(os.environ, 30, None, _say)
            assert joined is not None
            with joined:
                assert joined.gather_values(rank) == [0, 1]
            code = 40 + rank
        except SystemExit as error:
            code = 42 + int(str(error))
        except ConfigError as error:
            code = error.exit_code
            _say(f"error: {error}")
        except BaseException as error:
            _say(f"{type(error)} {error}")
        finally:
            os._exit(code)
    return process


def _say(line: str) -> None:
    """Write a line in one call: `print` makes two where Python does not buffer, and other ranks write too."""
    os.write(1, f"{line}\n".encode())


@pytest.mark.parametrize(
    ("rank", "changed", "said"),
    [
        (
            0,
            {"LOCAL_RANK": None, "MASTER_PORT": None},
            "WORLD_SIZE is 2 in the environment, without LOCAL_RANK, MASTER_PORT; start",
        ),
        (
            0,
            {},
            "rank 0 on .* does not meet the others at localhost:.* free on the first one, and",
        ),
        (1, {}, "rank 1 on .* does not meet the others at localhost:.* within 0.5 s \\(parallel.timeout"),
        (
            1,
            {"MASTER_ADDR": "no.invalid"},
            r"at no.invalid:\d+ \(no.invalid has no address here: .*; give",
        ),
        (
            0,
            {"MASTER_PORT": "nine"},
            "at localhost:nine .*'nine'.*; give all nodes the same address and",
        ),
    ],
)
def test_processes_that_cannot_meet_end_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, rank: int, changed: dict[str, Any], said: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        if rank == 0:
            taken.listen()
        names: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        names |= {"MASTER_ADDR": "localhost", "MASTER_PORT": taken.getsockname()[1], **changed}
        for name, value in names.items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(ConfigError, match=said):
            join(os.environ, 0.5, None, print)


@pytest.mark.parametrize(
    ("seen", "taken"),
    [
        (["ab", "ab"], [0, 1]),
        (["abc", "abc"], [0, 1]),
        (["a", "b"], [0, 0]),  # one for each, as srun --gpus-per-task=1 and Ray give them
        (["ab", "cd"], [0, 0]),
        (["ab", "b"], [0, 0]),
        (["a", "a"], "2 ranks want one CUDA device each, and there are 1; use fewer, or train.device=cpu"),
        (["", ""], "2 ranks want one CUDA device each, and there are 0; use fewer, or train.device=cpu"),
        (["ab", "ac"], "local ranks 0 and 1 were given the same CUDA device (a); give each rank one of its"),
        (["a", ""], "local rank 1 was given no CUDA device; give each rank one of its own, or all of them"),
    ],
    ids=str,
)
def test_ranks_get_an_accelerator_each(
    monkeypatch: pytest.MonkeyPatch, seen: list[str], taken: list[int] | str
) -> None:
    here = ""
    monkeypatch.setitem(VENDORS, "cuda", replace(VENDORS["cuda"], identity=lambda index: here[index]))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(here))
    monkeypatch.setattr(accelerators, "accelerator", lambda: "cuda")
    found: list[int] = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", found.append)
    comers = []
    for which in seen:
        here = which
        comers.append(this_process("auto", None))
    said = problem_of(comers, 2)
    if isinstance(taken, str):
        assert said.startswith(f"{comers[0].host}: {taken}")
    else:
        assert said == ""
        assert [take_device(Met(local=comers, local_rank=place)) for place in range(2)] == ["cuda"] * 2
        assert found == taken


def test_more_ranks_than_accelerators_are_refused_before_any_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(VENDORS, "cuda", replace(VENDORS["cuda"], identity=str))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert check_count("cuda", 2) == "cuda"
    assert [check_count(name, 9) for name in ("cpu", "emulated", "checked")] == [None] * 3
    with pytest.raises(ConfigError, match=r"^4 ranks want one CUDA device each, and there are 2; use fewer"):
        check_count("cuda", 4)
    with pytest.raises(ConfigError, match=r"^train.device is cuda:1, but .* use train.device=cuda$"):
        check_count("cuda:1", 2)


def test_backends_are_gloo_and_the_vendor_s() -> None:
    assert [backend_of(kind) for kind in ("cpu", "cuda", "xpu")] == [
        "cpu:gloo",
        "cpu:gloo,cuda:nccl",
        "cpu:gloo,xpu:xccl",
    ]


def test_ranks_that_do_not_reach_each_other_end_in_a_sentence_each(tmp_path: Path) -> None:
    """As on nodes with several networks, where the user has named one that is not there."""
    assert exit_codes(tmp_path / "logs", 1, _reach, port=free_port()) == [0]
    said = (tmp_path / "logs/errors").read_text().splitlines()
    for rank in range(2):
        (sentence,) = [line for line in said if line.startswith(f"error: rank {rank} on ")]
        assert "does not reach the others by interface no-such-one (" in sentence
        assert "; set GLOO_SOCKET_IFNAME on each node to the interface by which nodes reach" in sentence
    assert len(said) == 2


def _reach(ranks: Any, *, port: int) -> None:
    children = [_joining(rank, 2, port, GLOO_SOCKET_IFNAME="no-such-one") for rank in range(2)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [2, 2]


def test_a_process_whose_network_dies_while_it_joins_ends_in_time(tmp_path: Path) -> None:
    assert exit_codes(tmp_path / "logs", 1, _hang) == [ConfigError.exit_code]
    assert "error: nobody answers\n" in (tmp_path / "logs/errors").read_text()


def _hang(ranks: Any) -> None:
    with _within(0.2, "nobody answers"):
        os.write(2, b"a stack of C++")
        threading.Event().wait()


FACTS = {"torch": "2.13.0", "train.device": "cpu"}
COMER = Comer(host="node0", facts=FACTS, address="10.9.0.1", cpus=[0, 1], devices=[])


def met(comers: Sequence[Comer], local_size: int, wait_s: float = 30) -> list[Met | str]:
    """Let processes meet as threads; return what each has of it, or the sentence that it says or not."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=wait_s))

    def one(rank: int) -> Met | str:
        try:
            return meet(store, comers[rank], rank, len(comers), local_size)
        except ConfigError as error:
            return ("told: " if error.is_told else "") + str(error)

    with ThreadPoolExecutor(len(comers)) as threads:
        return list(threads.map(one, range(len(comers))))


def test_processes_that_have_met_know_their_node_and_one_of_another() -> None:
    comers = [replace(COMER, host=f"node{rank // 2}", cpus=[rank]) for rank in range(4)]
    assert met(comers, 2) == [
        Met(local=comers[:2], local_rank=0, far=comers[2]),
        Met(local=comers[:2], local_rank=1, far=comers[2]),
        Met(local=comers[2:], local_rank=0, far=comers[0]),
        Met(local=comers[2:], local_rank=1, far=comers[0]),
    ]
    assert met(comers, 4)[3] == Met(local=comers, local_rank=3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"facts": {"torch": "2.11.0", "train.device": "cpu"}},
            "rank 3 on node1 has torch 2.11.0, and rank 0 on node0 has 2.13.0; ranks need the same",
        ),
        (
            {"facts": {"torch": "2.13.0", "train.device": "cuda"}},
            "rank 3 on node1 has train.device cuda, and rank 0 on node0 has cpu; ranks need the same",
        ),
        ({"problem": "there is none; buy one"}, "rank 3 on node1: there is none; buy one"),
    ],
)
def test_what_is_wrong_with_one_is_said_by_the_first_of_each_node(changes: dict[str, Any], said: str) -> None:
    comers = [replace(COMER, host=f"node{rank // 2}", **(changes if rank == 3 else {})) for rank in range(4)]
    assert met(comers, 2) == [said, f"told: {said}"] * 2


def test_a_process_that_does_not_come_is_named() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(ConfigError, match=r"^of 4 ranks 0, 1, 3 did not come; look at what was said where"):
        meet(store, COMER, 2, 4, 2)


def test_this_process_says_what_decides_how_it_goes_on() -> None:
    mine = this_process("cpu", "10.0.0.7")
    assert (mine.host, mine.address, mine.problem) == (socket.gethostname(), "10.0.0.7", "")
    assert mine.facts["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert set(mine.cpus) == os.sched_getaffinity(0)
    assert "use train.device=cuda" in this_process("cuda:1", None).problem


def test_cores_are_shared_by_those_that_may_use_the_same_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: taken.append(cpus))
    monkeypatch.setattr("megatrain.distributed.meeting.own_part", lambda cpus, *which: {*cpus, *which})
    own = [[100, 101], [100, 101], [102, 103], [100, 101]]
    comers = [replace(COMER, cpus=cpus) for cpus in own]
    for place in range(4):
        share_cores(Met(local=comers, local_rank=place))
    assert taken == [{100, 101, 0, 3}, {100, 101, 1, 3}, {102, 103, 0, 1}, {100, 101, 2, 3}]


def test_the_way_to_a_host_is_found_and_left_to_the_user() -> None:
    assert own_address("localhost", 1) in ("127.0.0.1", "::1")
    assert own_address("no-such-host.invalid", 1) is None
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None
    environment = {"GLOO_SOCKET_IFNAME": "mine"}
    name_way(environment, Met(local=[replace(COMER, address="127.0.0.1")], local_rank=0))
    assert environment == dict(zip(VARIABLES, ("mine", "lo", "=lo"), strict=True))


def test_a_first_node_that_knows_itself_by_its_own_name_alone_takes_the_way_to_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where /etc/hosts says 127.0.1.1: then it is the other node's address that tells."""
    ways = {"10.9.0.2": "10.9.0.1"}
    monkeypatch.setattr("megatrain.distributed.join.own_address", lambda host, port: ways[host])
    named: list[str] = []
    monkeypatch.setattr("megatrain.distributed.join.name_interface", lambda _, address: named.append(address))
    far = replace(COMER, address="10.9.0.2")
    for address in ("127.0.1.1", "10.9.0.7", None):
        name_way({}, Met(local=[replace(COMER, address=address)], local_rank=0, far=far))
    name_way(
        {}, Met(local=[replace(COMER, address="127.0.1.1")], local_rank=0, far=replace(far, address="::1"))
    )
    assert named == ["10.9.0.1", "10.9.0.7", "10.9.0.1"]


@pytest.mark.parametrize(
    ("host", "local", "named"),
    [("127.0.0.1", "2", "127.0.0.1"), ("127.0.0.1", "1", "10.9.0.1"), ("10.9.0.7", "1", "10.9.0.9")],
)
def test_a_script_names_the_interface_before_it_can_ask_anybody(
    monkeypatch: pytest.MonkeyPatch, host: str, local: str, named: str
) -> None:
    ways = {"127.0.0.1": "127.0.0.1", "10.9.0.7": "10.9.0.9", "192.0.2.1": "10.9.0.1"}
    monkeypatch.setattr("megatrain.distributed.network.own_address", lambda host, port: ways[host])
    monkeypatch.setattr("megatrain.distributed.network.interface_of", lambda address: f"of {address}")
    environment = {"MASTER_ADDR": host, "MASTER_PORT": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": local}
    name_interface_alone(environment)
    assert environment["GLOO_SOCKET_IFNAME"] == f"of {named}"
