"""``hf-emopt report``: the page of a log, opened in a real browser, and what is said where there is no log."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from hf_emopt.tools.cli import main
from hf_emopt.tools.report import RunLogError, read_log
from hf_emopt.tools.report.page import MOST_COLUMNS, build_page

BROWSER = next((b for b in ("chromium", "chromium-browser", "google-chrome", "chrome") if shutil.which(b)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="no chromium or chrome here; install one to open the page (apt-get install chromium)"
)
MODULES = ("self_attn.q_proj", "mlp.down_proj")
LAYERS = [f"model.layers.{i}.{module}.weight" for i in range(3) for module in MODULES]


def history(steps: int = 8, level: str = "layers") -> list[dict[str, Any]]:
    """A log as ``Trainer`` keeps it: step 3 is skipped, and a refresh fails at step 5."""
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        row: dict[str, Any] = {
            "step": step, "loss": 5.0 / step, "grad_norm": 1.0 + step, "learning_rate": 1e-3 / step,
            "lr/matrix": 1e-3 / step, "lr/aux": 3e-4 / step, "emopt/skipped_steps": int(step >= 3), "emopt/imbalance": 1.0,
            "emopt/exposed_communication_ms": 0.5, "emopt/soap/failures": 2 * int(step >= 5),
        }  # fmt: skip
        for rule in ("soap", "adamw"):
            row |= {f"emopt/{rule}/update_rms": 0.2 + step / 100, f"emopt/{rule}/update_ratio": 1e-3 / step}
        if level == "layers":
            for index, layer in enumerate(LAYERS):
                row[f"emopt/layers/{layer}/weight_rms"] = 0.02 * (index + 1)
                if step != 4:
                    row[f"emopt/layers/{layer}/update_ratio"] = 1e-3 * (index + 1) / step
        rows.append(row)
        if step % 4 == 0:
            rows.append({"step": step, "eval_loss": 5.5 / step})
    return rows


def write_state(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 8, "log_history": rows}), encoding="utf-8")
    return path


def browse(page: Path, *options: str, fragment: str = "") -> subprocess.CompletedProcess[str]:
    """Opens a page without a window; the network has no names."""
    assert BROWSER is not None
    profile = tempfile.mkdtemp(
        prefix="profile", dir=page.parent
    )  # a browser waits for a profile that another one leaves
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=5000", f"--user-data-dir={profile}",
        *options, page.resolve().as_uri() + fragment,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    # The page's own messages, such as a request that its policy forbids or an error of its script.
    assert "CONSOLE" not in done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_state(folder / "my-run", history())
    assert main(["report", str(folder / "my-run"), "--out", str(folder / "out" / "page.html")]) == 0
    return folder / "out" / "page.html"


def canvas(dom: str) -> dict[str, str]:
    (attributes,) = re.findall(r"<canvas([^>]*)>", dom)
    return dict(re.findall(r'data-(\w+)="([^"]*)"', attributes))


@needs_browser
def test_the_page_draws_what_the_log_holds(page: Path) -> None:
    dom = browse(page, "--dump-dom").stdout
    assert 'data-drawn="true"' in dom
    assert 'id="error"' not in dom
    assert "<h1>my-run</h1>" in dom
    assert canvas(dom) == {"cells": str(len(LAYERS) * 7), "quantity": "update_ratio", "layers": str(len(LAYERS))}
    charts = dict(re.findall(r'<figure data-chart="([^"]*)">(.*?)</figure>', dom, flags=re.DOTALL))
    lines = {name: len(re.findall('class="series"', body)) for name, body in charts.items()}
    wanted = {"Loss": 2, "Learning rates": 2, "Gradient norm": 1, "Exposed communication": 1}
    assert lines == {**wanted, "update_rms": 2, "update_ratio": 2, "failures": 1}
    events = [re.sub(r"<[^>]*>", "", item) for item in re.findall(r"<li>(.*?)</li>", dom)]
    assert events == [
        "step 3 1 × step skipped: a gradient was not finite",
        "step 5 2 × refresh of soap failed: it keeps its preconditioner",
    ]
    for layer in LAYERS:
        assert f'title="{layer}"' in dom


@needs_browser
def test_quantity_scale_and_layers_are_chosen_in_the_address(page: Path) -> None:
    dom = browse(page, "--dump-dom", fragment="#quantity=weight_rms&scale=log&filter=q_proj").stdout
    assert canvas(dom) == {"cells": str(3 * 8), "quantity": "weight_rms", "layers": "3"}


@needs_browser
def test_the_heat_map_has_colours(page: Path) -> None:
    picture = page.parent / "page.png"
    browse(page, f"--screenshot={picture}", "--window-size=1200,2400")
    pixels = (255 * imread(picture)[..., :3]).round().astype(int).reshape(-1, 3)
    blue = np.unique(pixels[pixels[:, 2] - pixels[:, 0] > 60], axis=0)
    # Six layers of seven steps each, on a ramp of one hue, beside lines and edges.
    assert len(blue) > 30


@needs_browser
@pytest.mark.parametrize("theme", ["nothing happened", "summary"])
def test_other_logs(theme: str, tmp_path: Path) -> None:
    rows = history(2, "layers" if theme == "nothing happened" else "summary")
    write_state(tmp_path, rows)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    dom = browse(tmp_path / "page.html", "--dump-dom").stdout
    assert "no step was skipped" in dom
    assert ('id="no-layers"' in dom) == (theme == "summary")


def test_the_page_asks_for_nothing(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"https?://[^\s\"']+", text) == ["http://www.w3.org/2000/svg"]  # a name, not an address
    assert "default-src 'none'" in text
    assert not re.search(r"<(link|img|iframe)|src=", text)


def test_names_cannot_end_the_script(tmp_path: Path) -> None:
    rows = history(1)
    rows[0]["emopt/layers/</script><b>/update_rms"] = 1.0
    text = build_page(read_log(write_state(tmp_path, rows)))
    assert text.count("</script>") == 2


def test_long_logs_are_thinned_and_say_so(tmp_path: Path) -> None:
    rows = history(2 * MOST_COLUMNS)
    text = build_page(read_log(write_state(tmp_path, rows)))
    (data,) = re.findall(r'id="data">(.*?)</script>', text, flags=re.DOTALL)
    heat = json.loads(data)["heat"]
    assert heat["stride"] == 2
    assert len(heat["steps"]) == MOST_COLUMNS


def test_layers_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """``Trainer`` writes its file with sorted keys."""
    rows = [{"step": 1, **{f"emopt/layers/layers.{i}.weight/weight_rms": 1.0 for i in range(12)}}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}, sort_keys=True))
    assert list(read_log(tmp_path).layers()) == [f"layers.{i}.weight" for i in range(12)]


def test_where_a_log_is_found(tmp_path: Path) -> None:
    write_state(tmp_path / "checkpoint-10", history(1))
    newest = write_state(tmp_path / "checkpoint-200", history(2))
    assert read_log(tmp_path).source == newest
    own = write_state(tmp_path, history(3))
    assert read_log(tmp_path).source == own
    lines = tmp_path / "lines" / "metrics.jsonl"
    lines.parent.mkdir()
    lines.write_text("\n".join(json.dumps(row) for row in history(3)) + "\n", encoding="utf-8")
    assert read_log(lines.parent).entries == read_log(own).entries
    prefixed = [
        {("_step" if key == "step" else f"train/{key}"): value for key, value in row.items()} for row in history(3)
    ]
    lines.write_text(json.dumps(prefixed), encoding="utf-8")
    assert read_log(lines).entries == read_log(own).entries


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty", None, r"no trainer_state\.json.*trainer\.save_state\(\)"),
        ("trainer_state.json", '{"log_history": []}', "holds no log entries"),
        (
            "trainer_state.json",
            '{"log_history": [{"step": 1, "loss": 2.0}]}',
            r"EmoptCallback\(\"layers\"\).*EMOPT_DIAGNOSTICS",
        ),
        ("config.json", '{"hidden_size": 3}', "is JSON, but no log"),
        ("metrics.jsonl", '{"step": 1}\n{broken\n', "line 2 is no JSON"),
        ("weights.bin", b"\xff\xfe\x00", "is no text"),
    ],
)
def test_what_is_no_log(name: str, content: Any, message: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / name
    if content is None:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(RunLogError, match=message):
        read_log(path)
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 2
    assert capsys.readouterr().err.startswith("hf-emopt: ")
    assert not (tmp_path / "page.html").exists()


def test_a_path_that_is_not_there(capsys: Any, tmp_path: Path) -> None:
    assert main(["report", str(tmp_path / "gone")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
