"""An MCP server with one tool, spoken to over the standard streams: `python counting_server.py`."""

from fastmcp import FastMCP

server = FastMCP("counting")


@server.tool
def count_letters(word: str) -> str:
    """Count the letters of a word."""
    return f"{word}_has_{len(word)}_letters"


if __name__ == "__main__":
    server.run(show_banner=False)
