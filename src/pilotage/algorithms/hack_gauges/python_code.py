"""What a Python script opens, writes, runs and asks, read from its syntax tree without running it."""

import ast
import warnings
from dataclasses import dataclass, field

_READ_METHODS = frozenset({"read_text", "read_bytes", "iterdir", "glob", "rglob", "walk"})
_WRITE_METHODS = frozenset({"write_text", "write_bytes", "unlink", "rename", "replace", "rmdir"})
_READ_CALLS = frozenset({"os.listdir", "os.walk", "os.scandir", "glob.glob", "runpy.run_path", "json.load"})
_WRITE_CALLS = frozenset(
    {"os.remove", "os.unlink", "os.rename", "os.replace", "shutil.rmtree", "shutil.move", "os.truncate"}
)
_COPY_CALLS = frozenset({"shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree"})
_SHELL_CALLS = frozenset(
    {"os.system", "os.popen", "subprocess.run", "subprocess.call", "subprocess.Popen"}
    | {"subprocess.check_output", "subprocess.check_call", "subprocess.getoutput"}
)
_NETWORK_CALLS = frozenset(
    {
        f"{library}.{verb}"
        for library in ("requests", "httpx")
        for verb in ("get", "post", "put", "head", "request")
    }
    | {"urlopen", "request.urlopen", "urllib.request.urlopen", "urllib.request.urlretrieve", "urlretrieve"}
    | {"socket.create_connection", "socket.getaddrinfo", "socket.gethostbyname"}
    | {"http.client.HTTPSConnection", "http.client.HTTPConnection", "aiohttp.ClientSession"}
)


@dataclass(slots=True)
class Script:
    """What a script does, as far as constants tell."""

    read: list[str] = field(default_factory=list[str])
    written: list[str] = field(default_factory=list[str])
    shell: list[str] = field(default_factory=list[str])
    """Command lines that it runs."""
    hosts: list[str] = field(default_factory=list[str])
    """First argument of each call that reaches another machine; empty where it is no constant."""


def read_script(code: str) -> Script:
    """Return what `code` does; nothing where it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
        return _of_tree(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Script()


def _of_tree(tree: ast.Module) -> Script:
    script = Script()
    constants: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if text := _text(value, constants):
                constants[name] = text
            case _:
                pass
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _add_call(script, node, constants)
    return script


def _text(node: ast.expr, constants: dict[str, str]) -> str:
    """Return the constant text or path that an expression is; empty where it is none."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return constants.get(name, "")
        case ast.Call(func=ast.Name(id="Path") | ast.Attribute(attr="Path" | "join"), args=[_, *_] as parts):
            return "/".join(_text(part, constants) for part in parts)
        case ast.BinOp(left=left, op=ast.Div() | ast.Add() as op, right=right):
            separator = "/" if isinstance(op, ast.Div) else ""
            return f"{_text(left, constants)}{separator}{_text(right, constants)}"
        case _:
            return ""


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value)}.{attr}"
        case _:
            return ""


def _add_call(script: Script, call: ast.Call, constants: dict[str, str]) -> None:
    name = _dotted(call.func)
    first = _text(call.args[0], constants) if call.args else ""
    if name in ("open", "io.open"):
        _add_open(script, first, call.args[1:2], call.keywords)
    elif name in _READ_CALLS:
        script.read.append(first)
    elif name in _WRITE_CALLS:
        script.written.append(first)
    elif name in _COPY_CALLS:
        script.read.append(first)
        script.written += [_text(argument, constants) for argument in call.args[1:2]]
    elif name in _SHELL_CALLS and call.args:
        script.shell.append(_command_line(call.args[0], constants))
    elif name in _NETWORK_CALLS or (name.endswith(".connect") and call.args and _is_address(call.args[0])):
        script.hosts.append(_host(call, constants))
    elif isinstance(call.func, ast.Attribute):
        _add_method(script, call, _text(call.func.value, constants))


def _add_method(script: Script, call: ast.Call, path: str) -> None:
    assert isinstance(call.func, ast.Attribute)
    if call.func.attr in _READ_METHODS:
        script.read.append(path)
    elif call.func.attr in _WRITE_METHODS:
        script.written.append(path)
    elif call.func.attr == "open":
        _add_open(script, path, call.args[:1], call.keywords)


def _add_open(script: Script, path: str, mode: list[ast.expr], keywords: list[ast.keyword]) -> None:
    given = [*mode, *(keyword.value for keyword in keywords if keyword.arg == "mode")]
    is_write = any(isinstance(m, ast.Constant) and set(str(m.value)) & set("wax+") for m in given)
    (script.written if is_write else script.read).append(path)


def _command_line(node: ast.expr, constants: dict[str, str]) -> str:
    if isinstance(node, ast.List | ast.Tuple):
        return " ".join(_quoted(_text(part, constants)) for part in node.elts)
    return _text(node, constants)


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def _is_address(node: ast.expr) -> bool:
    return isinstance(node, ast.Tuple) and len(node.elts) == 2


def _host(call: ast.Call, constants: dict[str, str]) -> str:
    for argument in call.args[:2]:
        node = argument.elts[0] if isinstance(argument, ast.Tuple) and argument.elts else argument
        if (text := _text(node, constants)) and text.upper() not in ("GET", "POST", "PUT", "HEAD"):
            return text
    return ""
