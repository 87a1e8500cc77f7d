"""Learned optimisers in folders and on a stand-in of the Hugging Face Hub on loopback."""

import base64
import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import metamd
from metamd import LearnedOptimiser
from metamd.files import hub
from metamd.files.text import install
from tests.learned_files import learned, same


def test_a_folder_is_written_and_read(tmp_path):
    made = learned(horizon=7, family={"name": "sensors"})
    made.save_pretrained(tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert same(LearnedOptimiser.from_pretrained(folder), made)
    assert same(LearnedOptimiser.from_pretrained(str(folder / hub.FILE)), made), "a path is read as load reads it"
    assert metamd.load(folder / hub.FILE).fingerprint() == made.fingerprint()
    said = (folder / hub.CARD).read_text()
    assert "# A learned optimiser for sensors" in said
    assert "steps=7)" in said
    (folder / hub.CARD).write_text("mine")
    made.save_pretrained(folder)
    assert (folder / hub.CARD).read_text() == "mine"


def test_a_shipped_name_is_read_and_wrong_places_are_sentences(tmp_path):
    assert LearnedOptimiser.from_pretrained("quadratic").fingerprint() == metamd.load("quadratic").fingerprint()
    with pytest.raises(FileNotFoundError, match=r"holds no metamd.safetensors. learned.save_pretrained\(folder\) writes it"):
        LearnedOptimiser.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        LearnedOptimiser.from_pretrained(tmp_path / "a" / "b")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        ValueError, match=r"which is not installed. In a clone of the repository, run: pip install '.\[hub\]'"
    ):
        LearnedOptimiser.from_pretrained("somebody/something")
    assert install("plot").endswith("pip install '.[plot]'")


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as one small file needs: repositories, commits of small files, and their download."""

    files: dict[str, bytes]

    def log_message(self, *args):
        pass

    def answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        sent = self.rfile.read(int(self.headers["Content-Length"] or 0))
        where = f"http://127.0.0.1:{self.server.server_port}"
        if self.path == "/api/repos/create":
            self.answer(200, json.dumps({"url": f"{where}/mine/sensors", "name": "mine/sensors"}).encode())
        elif self.path == "/api/validate-yaml":
            self.answer(200, json.dumps({"errors": [], "warnings": []}).encode())
        elif "/preupload/" in self.path:
            asked = json.loads(sent)["files"]
            found = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
            self.answer(200, json.dumps({"files": found}).encode())
        elif "/commit/" in self.path:
            for line in sent.splitlines():
                said = json.loads(line)
                if said["key"] == "file":
                    self.files[said["value"]["path"]] = base64.b64decode(said["value"]["content"])
            oid = "1" * 40
            self.answer(200, json.dumps({"commitUrl": f"{where}/mine/sensors/commit/{oid}", "commitOid": oid}).encode())
        else:
            self.answer(404)

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        if not self.path.startswith("/mine/sensors/resolve/main/") or name not in self.files:
            self.answer(404, X_Error_Code="EntryNotFound" if self.path.startswith("/mine/sensors/") else "RepoNotFound")
            return
        body = self.files[name]
        self.answer(200, body, ETag=f'"{hashlib.sha1(body).hexdigest()}"', X_Repo_Commit="1" * 40)

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def server(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub", reason="the Hub's own package is an extra")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    handler = type("Small", (Hub,), {"files": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{found.server_port}")
        yield handler
        found.shutdown()


def test_what_is_pushed_to_the_hub_is_had_from_it(server, tmp_path):
    made = learned(horizon=7)
    assert made.push_to_hub("mine/sensors", token="secret").endswith("1" * 40)
    assert set(server.files) == {hub.FILE, hub.CARD}
    assert b'from_pretrained("mine/sensors")' in server.files[hub.CARD]
    found = LearnedOptimiser.from_pretrained("mine/sensors", cache_dir=tmp_path, token="secret")
    assert same(found, made)
    server.files.clear()
    kept = LearnedOptimiser.from_pretrained("mine/sensors", cache_dir=tmp_path, local_files_only=True)
    assert same(kept, made), "a download is kept"


@pytest.mark.parametrize("name", ["mine/sensors", "other/thing", "mine/a b"])
def test_what_the_hub_does_not_have_is_a_sentence(name, server, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"there is no folder '.*', and no metamd.safetensors of that name could be had"
    ):
        LearnedOptimiser.from_pretrained(name, cache_dir=tmp_path)


def test_a_hostile_download_is_refused_as_any_file(server, tmp_path):
    server.files[hub.FILE] = b"\x80pickle"
    with pytest.raises(ValueError, match="cannot be loaded"):
        LearnedOptimiser.from_pretrained("mine/sensors", cache_dir=tmp_path)
