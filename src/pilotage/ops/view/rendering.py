"""Templates of the page. Whatever a model, a task or a file name wrote is escaped; only our own style
sheet is not."""

import hashlib
import time
from collections.abc import Mapping
from importlib import resources

import jinja2
from markupsafe import Markup

from pilotage.ops.view.charts import number

_PACKAGE = "pilotage.ops.view"
STATIC_FILES = {"view.css": "text/css", "view.js": "text/javascript", "icon.svg": "image/svg+xml"}


def static_text(name: str) -> str:
    """Return one of the files that every page needs."""
    return resources.files(_PACKAGE).joinpath("static", name).read_text(encoding="utf-8")


def static_version() -> str:
    """Return a word that changes when those files change."""
    texts = "".join(static_text(name) for name in STATIC_FILES)
    return hashlib.sha256(texts.encode()).hexdigest()[:12]


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    if value < 100:
        return f"{value:.1f} s" if value >= 0.1 else f"{1000 * value:.0f} ms"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s"


def _when(at: float | None) -> str:
    if at is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3g}" if value else "0"


class Templates:
    """Renders pages, as served or as one self-contained file."""

    def __init__(self) -> None:
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader(_PACKAGE),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {"number": number, "seconds": _seconds, "when": _when, "signed": _signed}
        environment.filters["inline"] = Markup
        self._environment = environment
        self._version = static_version()

    def page(self, template: str, context: Mapping[str, object]) -> str:
        """Return a page that takes its style and its script from this server."""
        return self._render(template, context, {"export": None, "version": self._version})

    def export(self, template: str, context: Mapping[str, object]) -> str:
        """Return a page that holds everything it needs, and may load nothing."""
        files = {"css": static_text("view.css")}
        return self._render(template, context, {"export": files, "version": self._version})

    def _render(self, template: str, context: Mapping[str, object], more: Mapping[str, object]) -> str:
        return self._environment.get_template(template).render({**context, **more})
