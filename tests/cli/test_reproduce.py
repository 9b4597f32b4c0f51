"""oscar reproduce on the demo model with data that the tests make."""
import csv
import json

import pytest


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    (folder / "gsm8k").mkdir(parents=True)
    with open(folder / "gsm8k/test.jsonl", "w") as file:
        for i in range(3):
            file.write(json.dumps({"question": f"What is {i} and {i}?", "answer": f"#### {2 * i}"}) + "\n")
    with open(folder / "gpqa_diamond.csv", "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"])
        for i in range(12):
            out.writerow([f"Which number follows {i} in the row of whole numbers, counted from one?", i + 1, i + 2, i + 3, i + 4])
    return folder


def test_lists_tables_without_a_model(oscar):
    shown = oscar("reproduce", "--list").stdout
    assert "oscar-reasoning" in shown and "gpqa_diamond.csv" in shown and "cannot be run" in shown
    tables = {table["table"]: table for table in oscar.json("reproduce", "--list", "--json")}
    figures = tables["oscar-reasoning"]["figures"]
    assert {"model": "Qwen3-8B", "row": "OSCAR", "measure": "mean of five tasks, %", "value": 69.42, "spread": None} in figures
    assert tables["oscar-su-ocrbench"]["refused"]


def test_missing_data_is_named_with_what_to_do(oscar, data, tmp_path):
    command = ("reproduce", "oscar-reasoning", "--out", tmp_path / "out")
    run = oscar(*command, "--data", data, ok=False)
    assert "humaneval (HumanEval.jsonl.gz, from github.com/openai/human-eval" in run.stderr
    assert "gpqa (" not in run.stderr and "--partial" in run.stderr
    assert not (tmp_path / "out").exists(), "nothing was run"
    run = oscar(*command, ok=False)
    assert "--data names no folder" in run.stderr and "gpqa (" in run.stderr


def test_longbench_needs_all_of_its_files(oscar, data, tmp_path):
    (data / "longbench").mkdir()
    (data / "longbench/trec_e.jsonl").write_text(json.dumps(
        {"input": "Question: Who? Type:", "context": "Question: Where? Type: Place", "answers": ["Person"], "length": 9, "all_classes": ["Person", "Place"]}) + "\n")
    (data / "longbench/qasper_e.jsonl").write_text(json.dumps(
        {"input": "What is it about?", "context": "A paper about boats.", "answers": ["boats"], "length": 9, "all_classes": None}) + "\n")
    command = ("reproduce", "oscar-su-longbench", "--kv", "bf16", "--data", data, "--max-tokens", 2, "--out", tmp_path / "out")
    run = oscar(*command, ok=False)
    assert "lcc_e.jsonl" in run.stderr and "qasper_e.jsonl" not in run.stderr
    shown = oscar(*command, "--partial").stdout
    assert "qasper_e" in shown and "lcc_e.jsonl" in shown and "RotateKV: not here" in shown


def test_a_table_with_a_calibration_runs_and_resumes(oscar, data, tmp_path):
    out = tmp_path / "out"
    command = ("reproduce", "oscar-gpqa", "--data", data, "--limit", 1, "--max-tokens", 4, "--calibration-tokens", 600, "--out", out,
               "--paper-model", "Qwen3.5-4B")
    shown = oscar(*command).stdout
    assert "75.25" in shown and "80.30" not in shown and "Not the published experiment: --limit 1" in shown
    made = json.loads((out / "reproduction.json").read_text())
    assert [row["kv"] for row in made["rows"]] == ["bf16", "oscar", "oscar+"]
    for row in made["rows"]:
        assert row["measures"][0]["here"] is not None and row["measures"][0]["difference"] is None
    assert "calibrated" in made["rows"][1]["method"]
    settings = json.loads((out / "rotation/settings.json").read_text())
    assert settings["text"].startswith("gpqa=") and settings["v_clip"] == pytest.approx(0.92) and not settings["fitted_clips"]
    assert "<svg" in (out / "reproduction.html").read_text() and (out / "report.html").exists()
    items = (out / "items.jsonl").read_text()
    again = oscar(*command)
    assert "calibrated before" in again.stderr and "were measured before" in again.stderr
    assert (out / "items.jsonl").read_text() == items
    assert json.loads((out / "reproduction.json").read_text()) == made
    # Another budget is another rotation.
    other = [700 if word == 600 else word for word in command]
    assert "calibrated before" not in oscar(*other).stderr
    assert json.loads((out / "rotation/settings.json").read_text())["tokens"] == 700


def test_speeds_are_kept(oscar, tmp_path):
    out = tmp_path / "out"
    command = ("reproduce", "oscar-su-efficiency", "--kv", "oscar-su", "--steps", 1, "--kv-memory", "3GiB", "--out", out)
    oscar(*command)
    made = json.loads((out / "reproduction.json").read_text())
    rows = {row["row"]: row for row in made["rows"]}
    assert rows["BF16"]["missing"] == "left out by --kv"
    step, rate, ratio = (measure["here"] for measure in rows["OScaR"]["measures"])
    assert step > 0 and rate > 0
    # Two KV heads of 128: the norm of a token weighs more than with eight of 128.
    assert 4.5 < ratio < 16 / 3
    speeds = (out / "speed.json").read_text()
    oscar(*command)
    assert (out / "speed.json").read_text() == speeds


def test_what_cannot_be_is_refused_by_name(oscar, data, tmp_path):
    out = ("--out", tmp_path / "out")
    for arguments, why in (
            (("oscar-su-ocrbench",), "pictures"),
            (("nothing",), "there are oscar-reasoning"),
            (("oscar-gpqa", "--kv", "kivi", "--data", data), "oscar-gpqa has bf16, oscar, oscar+"),
            (("oscar-gpqa", "--steps", 3, "--data", data), "--steps"),
            (("oscar-gpqa", "--length", 4096, "--data", data), "--length"),
            (("oscar-gpqa", "--random-weights", "--data", data), "--random-weights"),
            (("oscar-gpqa", "--paper-model", "Qwen3-7B", "--data", data), "the table has figures of"),
            (("oscar-su-efficiency", "--limit", 1), "--limit"),
            (("oscar-su-efficiency", "--rotation", "x"), "--rotation"),
            (("oscar-su-gsm8k", "--repeats", 2, "--data", data), "--repeats")):
        assert why in oscar("reproduce", *arguments, *out, ok=False).stderr, arguments
    assert "--out" in oscar("reproduce", "oscar-gpqa", "--data", data, ok=False).stderr
    assert "--list" in oscar("reproduce", ok=False).stderr
