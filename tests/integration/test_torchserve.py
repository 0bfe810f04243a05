"""A real TorchServe 0.12 serves an export and answers with the plain model's tokens. Needs torchserve and Java 17.

pip install torchserve==0.12.0 torch-model-archiver==0.12.0
"""

# ruff: noqa: E402 - what may be absent is asked for first, so that the file is skipped with a reason

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch", reason="runs tiny models")
pytest.importorskip("transformers", reason="holds the models that are served")
pytest.importorskip("PIL", reason="pillow is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")
SCRIPTS = Path(sys.executable).parent
if not (SCRIPTS / "torchserve").is_file():
    pytest.skip("pip install torchserve==0.12.0 torch-model-archiver==0.12.0", allow_module_level=True)
if shutil.which("java") is None:
    pytest.skip("TorchServe runs on Java 17, which is not installed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))

from tiny_chat import picture, question, save_chat_model

from trimtab.adapters.servers import Recipe, export_torchserve
from trimtab.runtime.placing.load import load_placed
from trimtab.serve.application import load_processor

WHAT = "what is in the picture?"


@dataclass(frozen=True)
class Server:
    port: int
    token: str
    folder: Path

    def send(self, path: str, body: Any = None, *, token: str | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", path, content, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def ask(self, body: Any) -> tuple[int, Any]:
        return self.send("/predictions/tiny", body, token=self.token)


def free_ports() -> int:
    """The first of three free ports in a row."""
    for port in range(18080, 60000, 3):
        with ExitStack() as taken, suppress(OSError):
            for i in range(3):
                taken.enter_context(socket.create_server(("127.0.0.1", port + i)))
            return port
    raise AssertionError("no three free ports")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("torchserve") / "tiny", "llava")  # its answers are taken as they are


MAPS: dict[str, dict[str, Any]] = {
    "the head on disk": {
        "device_map": {"model": "cpu", "lm_head": "disk"},
        "runs_on": {"lm_head": "cpu"},
        "offload_folder": "offload",
    },
    "auto": {"max_memory": {"cpu": "1GiB"}},
    "balanced_low_0": {"device_map": "balanced_low_0", "max_memory": {"cpu": "1GiB"}, "torch_dtype": "float32"},
}


@pytest.fixture(scope="module", params=list(MAPS))
def server(request, model_dir, tmp_path_factory):
    port, home = free_ports(), tmp_path_factory.mktemp("server")
    recipe = Recipe(model_name="tiny", model_path=str(model_dir), max_length=30, **MAPS[request.param])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}")
        archive = export_torchserve(recipe, home / "store")
    settings = archive.with_name("config.properties")
    addresses = zip(("inference", "management", "metrics"), range(port, port + 3), strict=True)
    settings.write_text(
        settings.read_text() + "".join(f"{name}_address=http://127.0.0.1:{number}\n" for name, number in addresses)
    )
    command = f"torchserve --start --ncs --foreground --model-store {archive.parent} --models tiny=tiny.mar"
    command += f" --ts-config {settings}"
    environment = {
        **os.environ,
        "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
        "TEMP": str(home),
        "LOG_LOCATION": str(home / "logs"),
        "METRICS_LOCATION": str(home / "logs"),
        "OMP_NUM_THREADS": "1",
    }
    with (home / "output").open("w") as output:
        process = subprocess.Popen(
            command.split(), cwd=home, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield wait_until_ready(process, port, home)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], port: int, home: Path) -> Server:
    """The token lies in a file as soon as the server is up; the worker has loaded the model when it first answers."""
    keys, end, last = home / "key_file.json", time.monotonic() + 300, "nothing"
    while time.monotonic() < end:
        assert process.poll() is None, (home / "output").read_text()[-4000:]
        time.sleep(1)
        try:
            token = json.loads(keys.read_text())["inference"]["key"]
        except (FileNotFoundError, json.JSONDecodeError):  # not there yet, or not yet written to its end
            continue
        found = Server(port, token, home)
        try:
            status, last = found.ask(question("hello", max_tokens=1, temperature=0))
        except OSError:
            continue
        if status == 200:
            return found
    raise AssertionError(f"not ready: {last}\n{(home / 'output').read_text()[-4000:]}")


def test_tokens_are_those_of_the_plain_model(server: Server, model_dir: Path) -> None:
    model, processor = load_placed(model_dir, {"": "cpu"}), load_processor(model_dir)
    for images in ([], [picture(1)], [picture(2), picture(3, 90, 70)]):
        shown = [{"type": "image", "image": image} for image in images]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": [*shown, {"type": "text", "text": WHAT}]}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        expected = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        status, answer = server.ask(question(WHAT, *images, max_tokens=20, temperature=0))
        assert status == 200, answer
        text = processor.tokenizer.decode(expected, skip_special_tokens=True)
        # Transformers' handlers drop blanks at both ends of an answer
        assert answer["choices"][0]["message"]["content"].strip() == text.strip()
        assert answer["usage"]["completion_tokens"] == len(expected)


def test_without_the_token_nobody_is_served(server: Server) -> None:
    for token in (None, "wrong"):
        status, answer = server.send("/predictions/tiny", question("hello"), token=token)
        assert status == 400
        assert answer["type"] == "InvalidKeyException"
