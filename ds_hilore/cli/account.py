"""The ledger's account as a table for people."""

from __future__ import annotations

from rich.table import Table

from ds_hilore.core.types import Place
from ds_hilore.memory.ledger import Account, Moment

#: Accounts with more bytes than this are shown in GB.
_SHOWN_IN_MEGABYTES = 10**10


def account_table(account: Account, title: str = "memory of this rank") -> Table:
    """A row per line of the account, a column per moment, and the sums, in MB or GB as the title says; what is unknown
    stands below."""
    unit, name = (1e6, "MB") if account.peak()[1] <= _SHOWN_IN_MEGABYTES else (1e9, "GB")

    def cells(counts: list[int]) -> list[str]:
        return [f"{count / unit:,.{1 if unit == 1e6 else 2}f}" if count else "" for count in counts]

    missing = "; ".join(f"not counted: {name}" for name in account.unknown)
    table = Table(title=f"{title}, {name}", caption=missing or None)
    table.add_column("what", no_wrap=True)
    table.add_column("where")
    for moment in Moment:
        table.add_column(moment.value, justify="right")
    for line in account.lines():
        table.add_row(line.item.value, line.place.value, *cells([line.bytes[moment] for moment in Moment]))
    table.add_section()
    for place in Place:
        sums = [account.at(moment, place) for moment in Moment]
        if any(sums) and not (account.device_is_host and place is Place.HOST):
            total = "all of it (device and host are one)" if account.device_is_host else "sum"
            table.add_row(total, place.value, *cells(sums), style="bold")
    return table


def gigabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 10**8 else f"{count / 1e6:.1f} MB"
