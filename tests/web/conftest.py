"""Servers as the tests of the API start them."""
import importlib.util
import pathlib

spec = importlib.util.spec_from_file_location("server_conftest", pathlib.Path(__file__).resolve().parents[1] / "server/conftest.py")
server_conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(server_conftest)
Server, wait_until, start = server_conftest.Server, server_conftest.wait_until, server_conftest.start
