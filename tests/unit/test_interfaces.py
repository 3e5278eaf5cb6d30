"""The interface for gloo: that of the route to MASTER_ADDR, in runs of several hosts whose user has set none."""

import os

import pytest

from tds import interfaces

HERE = {"127.0.0.1": "lo", "127.0.1.1": "lo", "10.0.0.5": "eth0", "fd00::5": "eth1"}


def chosen(monkeypatch: pytest.MonkeyPatch, towards: dict[str, str], **env: str) -> str | None:
    """Return the chosen interface on a host that reaches the keys of `towards` from the addresses in its values."""
    for name in ("GLOO_SOCKET_IFNAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(interfaces, "own_address", towards.get)
    monkeypatch.setattr(interfaces, "_own_addresses", lambda: iter(HERE.items()))
    interfaces.choose_interface()
    found = os.environ.get("GLOO_SOCKET_IFNAME")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    return found


def test_interface_of_the_route_to_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    two = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1"}
    assert chosen(monkeypatch, {"node1": "10.0.0.5"}, **two) == "eth0"
    assert chosen(monkeypatch, {"node1": "fd00::5"}, **two) == "eth1"
    assert chosen(monkeypatch, {"node1": "10.0.0.5"}, **two, GLOO_SOCKET_IFNAME="lo") == "lo"
    assert chosen(monkeypatch, {}, **two) is None
    debian = {"node1": "127.0.1.1", "192.0.2.1": "10.0.0.5"}  # this is node1; the other address finds the default route
    assert chosen(monkeypatch, debian, **two) == "eth0"
    assert chosen(monkeypatch, {"node1": "127.0.1.1"}, **two) is None


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WORLD_SIZE": "1", "MASTER_ADDR": "node1"},
        {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node1"},
        {"WORLD_SIZE": "4", "LOCAL_SIZE": "4", "MASTER_ADDR": "node1"},
        {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
        {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "::1"},
    ],
)
def test_runs_on_one_machine_choose_nothing(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    assert chosen(monkeypatch, {"node1": "10.0.0.5"}, **env) is None


def test_an_interface_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("eth99", "lo,eth99"):
        monkeypatch.setenv(interfaces.INTERFACE_VARIABLE, name)
        with pytest.raises(ValueError, match=f"{name}: .* lo"):
            interfaces.choose_interface()
    monkeypatch.setenv(interfaces.INTERFACE_VARIABLE, "lo")
    interfaces.choose_interface()
