# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Does what a vLLM does that waits to be captured, without a model.

The files and fields are those of vLLM's vllm/snapshot/file_control.py. When it is released it answers each packet on
the port that it was given with its activation and whether its memory is as it was.
"""

import argparse
import hashlib
import json
import os
import pathlib
import socket
import stat
import time
import uuid


def commands():
    """The command lines of the container's processes."""
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            pass  # it has ended


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control-dir", type=pathlib.Path, required=True)
    parser.add_argument("--fail", action="store_true", help="do not recover")
    args = parser.parse_args()
    control, capture = args.control_dir, uuid.uuid4().hex
    control.mkdir(mode=0o700)

    def write(name, value):
        new = control / f".{name}"
        new.write_text(json.dumps(value))
        os.replace(new, control / name)

    def read(name):
        path = control / name
        while not path.exists():
            time.sleep(0.05)
        if stat.S_IMODE(control.stat().st_mode) != 0o700 or not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"{path} is open to others, or no file")
        return json.loads(path.read_text())

    weights = os.urandom(8 << 20)
    digest = hashlib.sha256(weights).hexdigest()
    write("capture-ready.json", {"version": 1, "capture_id": capture, "pid": os.getpid(), "oracle": {"digest": digest}})
    activation = read("activation.json")
    if activation["capture_id"] != capture or activation["native_complete"] is not True or activation["version"] != 1:
        raise ValueError(f"not an activation of {capture}: {activation}")
    if set(activation) != {"version", "capture_id", "activation_id", "kind", "native_complete", "host", "port"}:
        raise ValueError(f"other fields: {activation}")
    known = {"capture-ready.json", "activation.json"}
    if others := set(os.listdir(control)) - known:
        raise ValueError(f"left by another activation: {others}")
    challenge = {"version": 1, "capture_id": capture, "activation_id": activation["activation_id"], "nonce": uuid.uuid4().hex}
    write("challenge.json", challenge)
    if read("release.json") != challenge:
        raise ValueError("a release of another challenge")
    about = {"capture_id": capture, "activation_id": activation["activation_id"]}
    write("status.json", about | {"phase": "recovering"})
    if args.fail:
        write("error.json", about | {"phase": "recover", "error_type": "ValueError", "error": "other tokens than before"})
        # vLLM's engine takes its time to end. A hook that is killed with the first process can say nothing.
        while any(b"activate.py" in hook for hook in commands()):
            time.sleep(0.02)
        raise ValueError("other tokens than before")
    write("status.json", about | {"phase": "validated"})

    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind((activation["host"] or "127.0.0.1", activation["port"]))
    while True:
        _, sender = listener.recvfrom(1500)
        same = hashlib.sha256(weights).hexdigest() == digest
        listener.sendto(f"{activation['kind']} {activation['activation_id']} {same}".encode(), sender)


if __name__ == "__main__":
    main()
