"""A real Prometheus for tests: started on a free port, asked over its HTTP API, waited for without polls.

Waiting works as in production: a rule that holds makes Prometheus post an alert, here to a listener of the test's own.
`until(expression)` adds such a rule and waits for the post.
"""

import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
BOARDS = ROOT / "dashboards"
ALERTS = BOARDS / "alerts.yml"

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="prometheus is not installed (Debian package `prometheus`)",
)


class Alerts:
    """Takes the alerts that Prometheus posts."""

    def __init__(self) -> None:
        self._firing: dict[str, list[dict[str, str]]] = {}
        self._changed = threading.Condition()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer._take(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def _take(self, alerts: list[dict[str, Any]]) -> None:
        with self._changed:
            for alert in alerts:
                self._firing.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
            self._changed.notify_all()

    def wait(self, name: str, timeout_s: float) -> dict[str, str] | None:
        """The labels with which an alert first fired; None if it has not within the time."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._firing, timeout_s)
            return next(iter(self._firing.get(name, [])), None)

    def forget(self, name: str) -> None:
        with self._changed:
            self._firing.pop(name, None)

    @property
    def names(self) -> set[str]:
        with self._changed:
            return set(self._firing)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Prometheus:
    """A server of the test's own in `directory`, scraping what `endpoints` announces."""

    def __init__(self, directory: Path, endpoints: Path, rules: list[Path]) -> None:
        self.directory = directory
        self.alerts = Alerts()
        self._conditions: dict[str, str] = {}
        self._own_rules = directory / "conditions.yml"
        self._write_rules()
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "500ms"},
            "rule_files": [*map(str, rules), str(self._own_rules)],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [self.alerts.address]}]}]},
            "scrape_configs": [
                {
                    "job_name": "step-engine",
                    "file_sd_configs": [{"files": [f"{endpoints}/*.json"], "refresh_interval": "500ms"}],
                }
            ],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._process, self.url = self._start()

    def _start(self) -> tuple[subprocess.Popen[str], str]:
        command = [
            "prometheus",
            f"--config.file={self.directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self.directory / 'data'}",
            "--web.listen-address=127.0.0.1:0",
            "--web.enable-lifecycle",
            "--enable-feature=exemplar-storage",
            "--rules.alert.resend-delay=1s",
            "--query.lookback-delta=5s",
        ]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=self.directory)
        assert process.stderr is not None
        lines, url = [], ""
        for line in process.stderr:
            lines.append(line)
            found = re.search(r'msg="Listening on" address=(\S+)', line)
            url = f"http://{found[1]}" if found else url
            if "Server is ready to receive web requests" in line:
                break
        assert url, "".join(lines)
        # What it says further on must not fill the pipe.
        log = (self.directory / "prometheus.log").open("w")
        threading.Thread(target=shutil.copyfileobj, args=(process.stderr, log), daemon=True).start()
        return process, url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query. Raises: AssertionError with what Prometheus has against it."""
        asked = urllib.parse.urlencode({"query": expression}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query", asked, timeout=30) as answer:
                data = json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}\n{error.read().decode()}") from None
        return [data] if data["resultType"] in ("scalar", "string") else list(data["result"])

    def value(self, expression: str) -> float:
        """The one sample of an instant query, waited for where a scrape was missed on a busy machine."""
        samples = self.query(expression)
        if not samples:
            self.until(expression)
            samples = self.query(expression)
        (sample,) = samples
        return float(sample["value"][1])

    def until(self, expression: str, timeout_s: float = 60.0) -> None:
        """Wait until a query has a sample. Raises: AssertionError after the time."""
        name = f"Condition{len(self._conditions)}"
        self._conditions[name] = expression
        self._write_rules()
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/-/reload", method="POST"), timeout=30).close()
        fired = self.alerts.wait(name, timeout_s)
        assert fired is not None, f"not within {timeout_s:g} s: {expression}"

    def rules(self) -> dict[str, dict[str, Any]]:
        """Every alert rule as Prometheus sees it, by name."""
        with urllib.request.urlopen(f"{self.url}/api/v1/rules", timeout=30) as answer:
            groups = json.loads(answer.read())["data"]["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.alerts.close()

    def _write_rules(self) -> None:
        rules = [{"alert": name, "expr": expression} for name, expression in self._conditions.items()]
        self._own_rules.write_text(yaml.safe_dump({"groups": [{"name": "conditions", "rules": rules}]}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def hurried(path: Path, changes: dict[str, str]) -> Path:
    """The alert rules with windows of seconds, for a run of a minute. `changes`: thresholds, old text → new."""
    text = ALERTS.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    text = re.sub(r"\[\d+[mh]\]", "[6s]", text)
    text = re.sub(r"for: \d+m", "for: 1s", text)
    path.write_text(text, encoding="utf-8")
    return path
