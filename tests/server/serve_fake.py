"""Run a server over the made-up engine: serve_fake.py FOLDER [--step S] [--load S] [flags]."""

import argparse
import asyncio
import sys

from fake_engine import FakeEngine

from anabranch.core.config import EngineConfig
from anabranch.server.options import ServeOptions
from anabranch.server.run import listen, serve
from anabranch.server.service import Service
from anabranch.text.template import ChatTemplate
from anabranch.text.tokenizer import Tokenizer


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--step", type=float, default=0.0)
    parser.add_argument("--load", type=float, default=0.0)
    parser.add_argument("--api-key")
    parser.add_argument("--cors")
    parser.add_argument("--max-body", type=int, default=1 << 20)
    parser.add_argument("--drain", type=float, default=5.0)
    parser.add_argument("--max-running", type=int, default=512)
    parser.add_argument("--max-waiting", type=int, default=1024)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--chat-template")
    args = parser.parse_args()
    options = ServeOptions(
        port=0, api_key=args.api_key, cors=args.cors, max_body=args.max_body, drain=args.drain
    ).check()
    config = EngineConfig(max_running=args.max_running, max_waiting=args.max_waiting)
    tokenizer = Tokenizer.load(args.folder)

    async def connect(config: EngineConfig) -> FakeEngine:
        await asyncio.sleep(args.load)
        return FakeEngine(tokenizer, args.step, args.max_model_len)

    sock = listen(options)
    print("listening", f"http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
    template = ChatTemplate.of(tokenizer, args.chat_template)
    service = Service(config, options, ("tiny", "alias"), connect, lambda: (tokenizer, template))
    try:
        return serve(service, sock, lambda url: print("ready", url, flush=True))
    except RuntimeError as error:
        print(error, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
