def test_an_unset_variable_chooses_no_default(oscar, tmp_path):
    out = tmp_path / "out"
    calibrate = ["calibrate", "--tokens", 64, "--out"]
    for args in ([*calibrate, out, "--data", ""], [*calibrate, out, "--dump", ""], [*calibrate, ""],
                 ["rotation", "fit", "--dump", out, "--out", ""], ["rotation", "convert", out, ""],
                 ["zoo", "convert", tmp_path, ""]):
        run = oscar(*args, ok=False)
        assert run.returncode == 2 and "is empty" in run.stderr, args
    assert not out.exists()
