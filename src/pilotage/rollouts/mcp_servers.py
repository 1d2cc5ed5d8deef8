"""MCP servers whose tools the OpenHands agent gets beside its own."""

from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator


class McpServer(BaseModel):
    """One server: a program that speaks over its standard streams, or an address."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str | None = None
    """Program, started for each rollout where the trial runs, outside of any sandbox."""
    args: tuple[str, ...] = ()
    """Of the program."""
    url: str | None = None
    """Of a server that runs already."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.command is None) == (self.url is None) or (self.url is not None and self.args):
            raise ValueError("an MCP server has a command, with args, or else a url")
        return self
