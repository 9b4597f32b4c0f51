def test_an_unset_variable_chooses_no_default(oscar, tmp_path):
    out = tmp_path / "out"
    calibrate = ["calibrate", "--tokens", 64, "--out"]
    for args in ([*calibrate, out, "--data", ""], [*calibrate, out, "--dump", ""], [*calibrate, ""],
                 ["rotation", "fit", "--dump", out, "--out", ""], ["rotation", "convert", out, ""],
                 ["zoo", "convert", tmp_path, ""]):
        run = oscar(*args, ok=False)
        assert run.returncode == 2 and "is empty" in run.stderr, args
    assert not out.exists()


def test_ends_with_a_verdict(oscar, tmp_path):
    said = oscar("calibrate", "--tokens", 2000, "--out", tmp_path / "out").stdout
    verdict = said.strip().splitlines()[-2:]
    assert "than the Hadamard: " in verdict[0] and verdict[1].startswith("Relative error with oscar+")
    assert verdict[0].partition(":")[0] in (tmp_path / "out/calibration.html").read_text()
    short = oscar("calibrate", "--tokens", 60, "--out", tmp_path / "short").stdout
    assert short.strip().splitlines()[-1].startswith("No verdict: ")
