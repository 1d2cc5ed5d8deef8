"""Signs of reward hacking, from a real conversation at the proxy to a step's record."""

from pathlib import Path

from tests.proxy.rig import Rig, rig, schema, tool, user

from pilotage.algorithms import BatchRules, build_batch
from pilotage.algorithms.hack_gauges import HackSign
from pilotage.loops import read_rollout, write_rollout
from pilotage.loops.metrics import StepTimes, step_metrics
from pilotage.types import Outcome, Reward, Rollout, SessionRecord

TOOLS = [schema("terminal", command={"type": "string"})]
LOOK = ("terminal", '{"command": "git log -3; cat /tests/gold.json"}')
HONEST = ("terminal", '{"command": "cat tests/test_a.py"}')


async def converse(proxy: Rig, *outputs: str) -> SessionRecord:
    """Ask, answer each call with an output, and close the session."""
    messages = [user("fix it")]
    for output in (*outputs, ""):
        reply = await proxy.ask(messages, tools=TOOLS)
        messages.append(reply)
        if reply.get("tool_calls"):
            messages.append(tool(reply["tool_calls"][0], output))
    return await proxy.close()


def rollout(name: str, record: SessionRecord) -> Rollout:
    return Rollout(
        id=name,
        group_id="g",
        task_id="t",
        attempt=0,
        outcome=Outcome.COMPLETED,
        reward=Reward(value=float(name == "cheat"), key="reward", source="reward.json"),
        trajectory=record.trajectory,
        counters=record.counters,
    )


async def test_signs_are_counted_once_a_turn_and_reported_as_rollouts_a_step(tmp_path: Path) -> None:
    records: dict[str, SessionRecord] = {}
    for name, call in (("cheat", LOOK), ("honest", HONEST)):
        async with rig() as proxy:
            replies = [
                proxy.renderer.reply("", call),
                proxy.renderer.reply("", call),
                proxy.renderer.reply("done"),
            ]
            proxy.sampler.script = iter(replies)
            records[name] = await converse(
                proxy, "/tests/gold.json" if name == "cheat" else "def test(): ...", "ok"
            )
    # Two turns of `cheat` look; the first output shows a path of the verifier.
    hacks = {name: n for name, n in records["cheat"].counters.items() if name.startswith("hack_")}
    assert hacks == {"hack_git_history": 2, "hack_verifier_read": 2, "hack_answer_shown": 1}
    assert not [name for name in records["honest"].counters if name.startswith("hack_")]

    rollouts: list[Rollout] = []
    for name, record in records.items():
        write_rollout(tmp_path / name, rollout(name, record))
        rollouts.append(read_rollout(tmp_path / name))
    times = StepTimes(rollouts_s=0, train_s=0, publish_s=0)
    batch = build_batch(rollouts, BatchRules())
    metrics = step_metrics(rollouts, batch, update=None, times=times, trainer_version=0)
    shown = {HackSign.GIT_HISTORY, HackSign.VERIFIER_READ, HackSign.ANSWER_SHOWN}
    assert {name: metrics[name] for name in metrics if name.startswith("hack/")} == {
        f"hack/{sign}": int(sign in shown) for sign in HackSign
    }
    assert not [name for name in metrics if name.startswith("proxy/hack")]
