#!/usr/bin/env python3
# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers a vLLM that waits to be captured, once it runs again.

vLLM with --snapshot-config '{"mode":"startup","control_dir":DIR}' writes DIR/capture-ready.json when its engine is
ready, and waits. This program is a hook of gpuckpt in the same container: after the restore of a copy, or with --donor
after the checkpoint of one that is left running. It writes activation.json, repeats what vLLM asks in challenge.json,
and returns when vLLM has proved its engine. It fails with vLLM's words if vLLM could not. The hook's timeout bounds it.
The files and fields are those of vLLM's vllm/snapshot/file_control.py.
"""

import argparse
import json
import os
import pathlib
import sys
import time
import uuid


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=pathlib.Path, help="vLLM's control_dir")
    parser.add_argument("--host", help="the address that vLLM is to serve; without it all")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--donor", action="store_true", help="this one was checkpointed, not restored")
    args = parser.parse_args()

    def write(name, value):
        new = args.dir / f".{name}"
        new.write_text(json.dumps(value))
        os.replace(new, args.dir / name)

    def read(name, phase=None):
        path, error = args.dir / name, args.dir / "error.json"
        while True:
            if error.exists():
                sys.exit(f"vLLM: {error.read_text()}")
            if path.exists():
                value = json.loads(path.read_text())
                if phase in (None, value.get("phase")):
                    return value
            time.sleep(0.02)

    try:
        if json.loads((args.dir / "status.json").read_text())["phase"] == "validated":
            return  # it was activated before it was checkpointed
    except FileNotFoundError:
        pass
    activation = {
        "version": 1,
        "capture_id": read("capture-ready.json")["capture_id"],
        "activation_id": uuid.uuid4().hex,
        "kind": "donor" if args.donor else "copy",
        "native_complete": True,
        "host": args.host,
        "port": args.port,
    }
    write("activation.json", activation)
    challenge = read("challenge.json")
    if challenge["activation_id"] != activation["activation_id"]:
        sys.exit(f"challenge.json is of another activation: {challenge}")
    write("release.json", challenge)
    read("status.json", phase="validated")


if __name__ == "__main__":
    main()
