"""Functions that misbehave, for the limited child of test_limited."""

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

from trimtab.errors import SampleError
from trimtab.limited import at


def echo(text):
    return text.encode()


def refuse():
    raise SampleError("data.jsonl:3 is wrong")


def miss(name):
    return Path(name).read_bytes()


def turn():
    at("record 7", cpu_s=1)
    while True:
        pass


def crash():
    at("record 8")
    os.kill(os.getpid(), signal.SIGBUS)


def fill():
    at("record 9")
    return b"x" * 2**40


def connect(port):
    socket.create_connection(("127.0.0.1", port), 5).close()
    return b""


def connect_in_c(port):
    """As a C library connects: no Python function is asked. The answer is errno, 0 where it is connected."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.socket(2, 1, 0)
    address = (2).to_bytes(2, "little") + port.to_bytes(2, "big") + bytes([127, 0, 0, 1]) + bytes(8)
    return str(0 if libc.connect(fd, address, 16) == 0 else ctypes.get_errno()).encode()


def surroundings(*_):
    offline = [os.environ["HF_HUB_OFFLINE"], os.environ["TRANSFORMERS_OFFLINE"]]
    here = Path.cwd()
    found = {"home": os.environ["HF_HOME"], "folder": str(here), "path": sys.path, "files": os.listdir(here)}
    return json.dumps({**found, "offline": offline}).encode()
