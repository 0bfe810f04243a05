"""Tests of limited.py: what strangers' files do to the process that reads them ends there."""

import errno
import os
import socket
import subprocess
import sys
import time

import pytest
from sample_sets import CHATML, talk, write_jsonl, write_tokenizer
from size_cases import size

from refusals import refused
from trimtab.errors import ConfigError, SampleError
from trimtab.limited import ChildEndedError, LimitedChild, limited_child

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limits of a process")


@pytest.fixture
def child():
    child = LimitedChild()
    yield child
    child.close()


def test_a_child_answers_and_raises_what_is_ours(child):
    assert child.ask("limited_cases:echo", "ä") == "ä".encode()
    with pytest.raises(SampleError) as caught:
        child.ask("limited_cases:refuse")
    assert str(caught.value) == "data.jsonl:3 is wrong"
    with pytest.raises(FileNotFoundError) as missing:
        child.ask("limited_cases:miss", "absent.bin")
    assert missing.value.filename == "absent.bin"
    with pytest.raises(ModuleNotFoundError) as module:
        child.ask("trimtab_absent:anything")
    assert module.value.name == "trimtab_absent"
    assert child.ask("limited_cases:echo", "still there") == b"still there"


@pytest.mark.parametrize(
    ("function", "place", "word"),
    [("turn", "record 7", ()), ("crash", "record 8", "SIGBUS"), ("fill", "record 9", "GiB")],
)
def test_a_child_that_ends_names_the_place(child, function, place, word):
    with refused(ChildEndedError, word) as caught:
        child.ask(f"limited_cases:{function}")
    assert caught.value.place == place
    assert not child.is_alive()


def test_no_child_reaches_the_network_but_one_for_addresses(child):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with refused(SampleError):
            child.ask("limited_cases:connect", port)
        allowed = LimitedChild(network=True)
        assert allowed.ask("limited_cases:connect", port) == b""
        allowed.close()


def _has_namespaces():
    code = "from trimtab.limited import leave_network; raise SystemExit(not leave_network())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not _has_namespaces(), reason="this kernel gives nobody a network namespace")
def test_c_code_finds_an_empty_network(child):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert int(child.ask("limited_cases:connect_in_c", port)) == errno.ENETUNREACH


def test_a_child_ends_with_its_parent(tmp_path):
    code = (
        "from trimtab.limited import LimitedChild\nchild = LimitedChild()\nprint(child._process.pid, flush=True)\n"
        "child.ask('limited_cases:turn')"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdout is not None
    number = int(parent.stdout.readline())
    time.sleep(0.1)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(100):
        try:
            os.kill(number, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("the child lives on")


def test_a_child_waits_for_the_next_block():
    with limited_child() as first:
        pass
    with limited_child() as second:
        assert second is first


# -- a stranger's chat template ---------------------------------------------------------------------------------------


def sized(folder, template, *texts):
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder / "model", template=template)
    write_jsonl(folder / "data.jsonl", [{"id": text, "conversations": talk(text)} for text in texts])
    return size(folder, "data.jsonl", on_bad="skip")


GROWING = "{% set ns = namespace(s='xx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}"
TURNING = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("attack", "kind"),
    [
        *((x, "template") for x in ("{{ '{:>100000000000}'.format(1) }}", "{{ '%100000000000d' % 1 }}", GROWING)),
        pytest.param(TURNING, "reader", marks=pytest.mark.integration),
    ],
)
def test_a_template_that_makes_too_much_or_does_not_end_costs_its_sample(tmp_path, attack, kind):
    guarded = "{% if messages[0].content == 'attack' %}" + attack + "{% endif %}" + CHATML
    result = sized(tmp_path, guarded, "before", "attack", "after")
    assert result.table.ids == ("before", "after")
    assert [(bad.line, bad.id, bad.kind) for bad in result.bad] == [(2, "attack", kind)]


@pytest.mark.integration
def test_a_template_that_never_ends_is_refused(tmp_path):
    with refused(ConfigError):
        sized(tmp_path, TURNING + CHATML, "before")
