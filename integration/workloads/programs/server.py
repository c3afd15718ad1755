# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Serves a model of the shape of Llama 3 8B over HTTP. Each session has a slot of the KV cache.

	GET /next?session=N&words=K    the next words of a session, and a digest of the last logits
	GET /checksum                  a number over weights and cache: one bit changes it
	GET /health                    ok

What a session answers depends on what it has said before, all of which is in the KV cache, and on
nothing else. "ready" on standard output says that the server listens.
"""

import argparse
import http.server
import json
import threading
import urllib.parse

from workload import checksum, deterministic_torch, say, short, tensor_bytes


class Sessions:
    """The sessions of a model; one word is decoded at a time."""

    def __init__(self, model):
        self.model = model
        self.lock = threading.Lock()
        self.words = [session + 1 for session in range(model.slots)]
        self.places = [0] * model.slots

    def next(self, session, count):
        said = []
        with self.lock:
            for _ in range(count):
                if self.places[session] == self.model.length:
                    raise ValueError("the session is full")
                logits = self.model.step([self.words[session]], session, self.places[session])
                self.places[session] += 1
                self.words[session] = int(logits.argmax(-1).item())
                said.append(self.words[session])
            return {"words": said, "place": self.places[session], "logits": short(tensor_bytes([logits]))}

    def checksum(self):
        with self.lock:
            return {"checksum": checksum(self.model.tensors()), "places": self.places}


class Handler(http.server.BaseHTTPRequestHandler):
    sessions = None

    def do_GET(self):
        url = urllib.parse.urlparse(self.path)
        try:
            query = {name: int(values[0]) for name, values in urllib.parse.parse_qs(url.query).items()}
            if url.path == "/next":
                answer = self.sessions.next(query["session"], query.get("words", 1))
            elif url.path == "/checksum":
                answer = self.sessions.checksum()
            elif url.path == "/health":
                answer = {"ok": True}
            else:
                raise ValueError(f"there is no {url.path}")
        except (KeyError, IndexError, ValueError) as err:
            self.send_error(400, str(err))
            return
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--cache-gib", type=int, default=4)
    parser.add_argument("--slots", type=int, default=8)
    args = parser.parse_args()
    torch = deterministic_torch()
    import llama

    model = llama.Decoder(args.slots, llama.sequence_length(args.cache_gib, args.slots))
    Handler.sessions = Sessions(model)
    Handler.sessions.next(args.slots - 1, 1)  # loads the kernels
    torch.cuda.synchronize()
    say(torch.cuda.memory_allocated() >> 20, "MiB of GPU memory")
    server = http.server.ThreadingHTTPServer((args.address, args.port), Handler)
    server.daemon_threads = True
    print("ready", flush=True)
    server.serve_forever(poll_interval=0.1)


if __name__ == "__main__":
    main()
