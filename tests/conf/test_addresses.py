"""Which addresses are opened, and for whom."""

import pytest

from regimen.conf import addresses
from regimen.conf.addresses import address_problem, allow_protocols


@pytest.mark.parametrize("protocol", ["file", "http", "https", "s3", "gs", "az", "abfs", "hf"])
def test_a_place_that_holds_files_is_opened(protocol: str) -> None:
    assert address_problem(f"{protocol}://place/of files") is None


@pytest.mark.parametrize(
    "address",
    [
        "reference::file:///x.json",
        "reference://x.json",
        "zip://a.tar::simplecache::https://host/a.zip",
        "https://host/a::https://host/b",
        "https://file:///etc",
        "generic://file:///x",
        "REFERENCE://x.json",
    ],
)
def test_what_leads_to_another_address_or_runs_what_it_reads_is_opened_for_nobody(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_typed_protocols", set())
    allow_protocols([f"data.root={address}"])
    assert address_problem(address)
    assert address_problem(address, trusted=True)


@pytest.mark.parametrize("address", ["sftp://host/x", "FILE:///x", "git://x", "memory://x"])
def test_another_protocol_is_opened_where_the_command_line_has_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "_typed_protocols", set())
    assert "the command line says it" in (address_problem(address) or "")
    allow_protocols(["seed=1", f"data.root={address}"])
    assert address_problem(address) is None
