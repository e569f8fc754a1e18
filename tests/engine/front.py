"""A front process to be killed: starts a tree with fake workers, prints its pids, waits."""

import asyncio
import sys

from made_up import prepared

from anabranch.engine.client import EngineClient


async def main(tp: int) -> None:
    made = prepared(tp=tp)
    client = await EngineClient.start(made.run.config, made, "fake_maker:FakeMaker")
    await client.wait_ready()
    print(*client._pulse.pids(), flush=True)
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
