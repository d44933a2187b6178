"""The ledger's account as a table for people."""

from __future__ import annotations

from rich.table import Table

from ds_hilore.core.types import Place
from ds_hilore.memory.ledger import Account, Moment


def account_table(account: Account, title: str = "memory of this rank") -> Table:
    """A row per line of the account, a column per moment, in MB, and the sums; what is unknown stands below."""
    table = Table(title=title, caption="; ".join(f"not counted: {name}" for name in account.unknown) or None)
    table.add_column("what", no_wrap=True)
    table.add_column("where")
    for moment in Moment:
        table.add_column(moment.value, justify="right")
    for line in account.lines():
        table.add_row(line.item.value, line.place.value, *(_megabytes(line.bytes[moment]) for moment in Moment))
    table.add_section()
    for place in Place:
        sums = [account.at(moment, place) for moment in Moment]
        if any(sums) and not (account.device_is_host and place is Place.HOST):
            name = "all of it (device and host are one)" if account.device_is_host else "sum"
            table.add_row(name, place.value, *(_megabytes(count) for count in sums), style="bold")
    return table


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f}" if count else ""
