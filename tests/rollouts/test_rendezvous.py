"""Who a driver lets in that waits for workers of other hosts, and what may pass between the two."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from pilotage.rollouts.frames import Done, Frame, Frames, Ready, Run, decode, encode
from pilotage.rollouts.rendezvous import Guest, Rendezvous, meet
from pilotage.rollouts.report import AgentFacts, StopReason, TrialFault, TrialPhase, TrialReport
from pilotage.rollouts.trial import AgentChoice, Deadlines, EnvironmentChoice, TrialSpec
from pilotage.rollouts.worker import send_report
from pilotage.types import Reward, SessionAccess

WAIT_S = 0.2


@contextlib.asynccontextmanager
async def driver() -> AsyncGenerator[Rendezvous]:
    rendezvous = Rendezvous("127.0.0.1")
    await rendezvous.open()
    try:
        yield rendezvous
    finally:
        await rendezvous.close()


async def came(guest: Guest) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.shield(guest.frames), WAIT_S)
    return guest.frames.done()


async def received(frames: Frames) -> list[Frame]:
    return [frame async for frame in frames]


async def test_a_worker_that_was_invited_comes_once() -> None:
    async with driver() as rendezvous:
        guest = rendezvous.invite()
        worker = await meet(guest.invitation)
        ours = await guest.frames

        await worker.send(Ready())
        worker.end()
        assert await received(ours) == [Ready()]
        with pytest.raises(ConnectionError, match="the driver does not expect this worker"):
            await meet(guest.invitation)
        ours.close()
        worker.close()


@pytest.mark.parametrize("changes", [{"key": "00" * 32}, {"number": 7}])
async def test_a_wrong_key_or_number_is_refused_and_the_invited_worker_still_comes(
    changes: dict[str, object],
) -> None:
    async with driver() as rendezvous:
        guest = rendezvous.invite()
        with pytest.raises(ConnectionError, match="the driver does not expect this worker"):
            await meet(replace(guest.invitation, **changes))  # pyright: ignore[reportArgumentType]
        assert not await came(guest)

        worker = await meet(guest.invitation)
        assert await came(guest)
        guest.frames.result().close()
        worker.close()


async def test_an_invitation_that_was_withdrawn_is_worth_nothing() -> None:
    async with driver() as rendezvous:
        guest = rendezvous.invite()
        rendezvous.withdraw(guest)
        with pytest.raises(ConnectionError):
            await meet(guest.invitation)


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(72), b"\x80\x04pickle" * 100])
async def test_a_stranger_is_sent_away_and_hurts_nobody(noise: bytes) -> None:
    async with driver() as rendezvous:
        guest = rendezvous.invite()
        reader, writer = await asyncio.open_connection("127.0.0.1", guest.invitation.port)
        writer.write(noise)
        writer.write_eof()
        with contextlib.suppress(ConnectionResetError):
            assert len(await reader.read()) == 32  # the nonce, and nothing more
        writer.close()

        assert not await came(guest)
        worker = await meet(guest.invitation)
        assert await came(guest)
        guest.frames.result().close()
        worker.close()


async def test_a_worker_follows_nobody_who_has_not_its_key() -> None:
    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(32) + bytes(32))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(impostor, "127.0.0.1", 0)
    async with driver() as rendezvous:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionError, match="who answered is not the driver"):
            await meet(replace(rendezvous.invite().invitation, port=port))
    server.close()


async def test_a_host_that_falls_silent_is_noticed_by_the_kernel() -> None:
    async with driver() as rendezvous:
        guest = rendezvous.invite()
        worker = await meet(guest.invitation)
        for frames in (worker, await guest.frames):
            connection: socket.socket = frames._writer.get_extra_info("socket")
            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            found = [connection.getsockopt(socket.IPPROTO_TCP, option) for option in options]
            assert found == [10, 5, 3, 25_000]
            frames.close()


SPEC = TrialSpec(
    name="toy-1",
    task_path=Path("/tasks/toy"),
    trials_directory=Path("/runs/trials"),
    access=SessionAccess(base_url="http://10.0.0.1:8000/v1", api_key="secret", model="policy"),
    agent=AgentChoice(options={"tools": ["terminal"], "depth": {"a": [1, 2.5, None]}}, skills=(Path("s"),)),
    environment=EnvironmentChoice(options={"unsandboxed": True}),
    deadlines=Deadlines(agent_s=None, trial_s=float("inf")),
    max_turns=3,
    reward_key="reward",
)
REPORT = TrialReport(
    fault=TrialFault(phase=TrialPhase.AGENT, kind="OSError", message="lone \ud800 surrogate"),
    reward=Reward(value=0.1, key="reward", source="verifier/reward.json", components={"f1": 1 / 3}),
    agent=AgentFacts(stop_reason=StopReason.FINISHED, turns=2, hand_ins=("{}",)),
    timings_s={"total": 1.5},
)


@pytest.mark.parametrize(
    "frame", [Ready(), Run(number=1, spec=SPEC, is_limited=True), Done(number=2, report=REPORT)]
)
def test_a_message_arrives_as_it_was_sent(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


@pytest.mark.parametrize("data", [b"", b"{}", b"\x80\x04pickle", b'["Exit", {}]', b'["Done", {"number": 1}]'])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"no message of ours|Expecting value|codec|Field required"):
        decode(data)


def test_a_report_with_facts_of_other_types_is_refused_where_it_is_written() -> None:
    odd = AgentFacts(stop_reason=StopReason.FINISHED, turns="two")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="turns"):
        encode(Done(number=1, report=TrialReport(agent=odd)))


async def test_a_report_that_cannot_be_written_is_a_fault_of_its_trial_alone() -> None:
    odd = AgentFacts(stop_reason=StopReason.FINISHED, turns="two")  # pyright: ignore[reportArgumentType]
    async with driver() as rendezvous:
        guest = rendezvous.invite()
        worker = await meet(guest.invitation)
        await send_report(worker, 1, TrialReport(agent=odd))
        await send_report(worker, 2, REPORT)
        worker.end()
        first, second = await received(await guest.frames)
        assert isinstance(first, Done)
        assert first.report.fault is not None
        assert (first.number, first.report.fault.kind) == (1, "ReportError")
        assert second == Done(number=2, report=REPORT)
        worker.close()
