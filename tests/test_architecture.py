"""Holds what DESIGN section 3 promises: which way includes go, who reads the environment, and how long things get.

The C++ side is read as text, so this needs no build. `ratchet.json` lists what is longer than the limits; its entries
may only shrink.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
BINDINGS = ROOT / "bindings"
RATCHET = Path(__file__).resolve().parent / "ratchet.json"

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70

# What each folder may include besides itself.
EVERYTHING = {
    "core",
    "memory",
    "control",
    "wire",
    "fusion_buffer",
    "intra_node",
    "transport",
    "tcp",
    "efa",
    "staging",
    "cuda",
    "server",
    "worker",
    "point_to_point",
    "runtime",
}
MAY_INCLUDE = {
    "core": set(),
    "memory": {"core"},
    "control": {"core"},
    "wire": {"core"},
    "fusion_buffer": {"core"},
    "intra_node": {"core"},
    "transport": {"core", "memory"},
    "tcp": {"core", "memory", "transport"},
    "efa": {"core", "memory", "transport"},
    "staging": {"core"},
    "cuda": {"core"},
    "server": {"core", "wire"},
    "worker": {"core", "wire", "fusion_buffer"},
    "point_to_point": {"core", "wire"},
    "runtime": EVERYTHING,
    "collectives": {"core", "fusion_buffer", "runtime"},
    "elastic": {"core", "control", "runtime"},
}
FRAMEWORK = re.compile(r"(torch|c10|c10d|ATen|caffe2|pybind11|tensorflow|tsl|xla|absl)/|Python\.h$|numpy/")
# Pure engines are told the time and own nothing: no thread, lock, clock, socket or file.
IMPURE_INCLUDE = re.compile(
    r"(thread|mutex|shared_mutex|condition_variable|atomic|future|fstream|iostream|filesystem|"
    r"unistd\.h|fcntl\.h|poll\.h|sys/.*|netinet/.*|pthread\.h)$"
)
IMPURE_CALL = re.compile(r"_clock::now\(|\bclock_gettime\b|\bstd::rand\b|\brandom_device\b|\bgetrandom\b")
# What decides in the control plane, and what it says.
CONTROL_ENGINES = {
    "delta",
    "frame",
    "handshake",
    "heartbeats",
    "lobby",
    "membership",
    "membership_admission",
    "protocol",
}
ELASTIC_ENGINES = {"cutoff", "journal", "lifecycle", "message", "plan", "rendezvous", "rendezvous_admission", "reports"}
# Files that may look at one variable of other software, and which.
OTHER_VARIABLES = {"csrc/efa/library.cc": "FI_PROVIDER_PATH"}
# Changes the list of variables for a library's sake, where setenv() would not do; looks none up.
ENVIRONMENT_WRITER = "csrc/efa/environment.cc"
ENVIRONMENT = re.compile(r"\b(secure_)?getenv\b|\benviron\b")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def cpp_files(*folders: Path) -> list[Path]:
    return sorted(
        path for folder in folders for path in folder.rglob("*") if path.suffix in {".h", ".cc", ".cu", ".cuh"}
    )


def includes(path: Path) -> list[tuple[str, str]]:
    """(opening character, name) of every include of a file."""
    return INCLUDE.findall(path.read_text())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def is_engine(path: Path) -> bool:
    folder = path.relative_to(CSRC).parts[0]
    return (
        folder in {"wire", "worker", "point_to_point", "staging"}
        or (folder in {"server", "intra_node"} and path.name.startswith("engine"))
        or (folder == "control" and path.stem in CONTROL_ENGINES)
        or (folder == "collectives" and path.stem in {"fusion_engine", "message_plan", "rows", "tensor_spec"})
        or (folder == "elastic" and path.stem in ELASTIC_ENGINES)
    )


# --- C++ as text -----------------------------------------------------------------------------------------------------

TOKEN = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | R"(?P<tag>[^()\\\s]*)\(.*?\)(?P=tag)" | "(?:\\.|[^"\\\n])*" |
        (?<![0-9a-zA-Z_])'(?:\\.|[^'\\\n])+' | ^[ \t]*\#(?:\\\n|[^\n])*""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def bare(text: str) -> str:
    """The text without comments, literals and preprocessor lines; line numbers stay."""
    return TOKEN.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


TYPE_HEAD = re.compile(r"^(?:typedef\s+)?(?:class|struct|union|enum)\b")
TEMPLATE = re.compile(
    r"^(?:template\s*<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>\s*|requires\s+[\w:<>,\s]+?(?=\b(?:class|struct)\b))"
)
INIT_LIST = re.compile(r"\)\s*(?:noexcept\s*)?:\s*[^:]")


@dataclass
class Scope:
    kind: str  # "outer" (namespace, type), "function", "other"
    name: str = ""
    line: int = 0
    head: str = ""  # Text of the enclosing statement, where it goes on after this scope.
    head_line: int = 0
    parens: int = 0


def kind_of(head: str, parens: int) -> str:
    """What a brace after this text opens, outside of any function."""
    head = head.strip()
    while (shorter := TEMPLATE.sub("", head)) != head:
        head = shorter
    if parens > 0:
        return "other"
    if re.match(r"(?:inline\s+)?namespace\b|extern\b\s*$", head):
        return "outer"
    plain = re.sub(r"\boperator\s*[^\w\s(]+|\boperator\s*\(\s*\)", "operator_", head)
    before_parens = plain.split("(")[0]
    if TYPE_HEAD.match(plain) and not re.search(r"\w\s*\)\s*(?:const|noexcept|override|final|\s)*$", plain):
        return "outer"
    if "(" not in plain or "=" in before_parens:
        return "other"
    # A member initialised with braces, between the parameters and the body of a constructor.
    if INIT_LIST.search(plain) and re.search(r"[\w>]$", plain):
        return "other"
    return "function"


@dataclass
class FunctionFinder:
    """Finds functions by counting braces; lambdas and local types count as part of the function they are in."""

    scopes: list[Scope] = field(default_factory=lambda: [Scope("outer")])
    found: list[tuple[str, int]] = field(default_factory=list)  # name, lines
    head: str = ""
    head_line: int = 1
    parens: int = 0

    def read(self, text: str) -> list[tuple[str, int]]:
        line = 1
        for piece in re.findall(r"[{}();:]|\s+|[^{}();:\s]+", bare(text)):
            self.take(piece, line)
            line += piece.count("\n")
        return self.found

    def take(self, piece: str, line: int) -> None:
        if piece == "{":
            self.open(line)
        elif piece == "}":
            self.close(line)
        elif piece == ";" and self.parens == 0:
            self.head = ""
        else:
            if not self.head.strip():
                self.head, self.head_line = "", line
            self.head += piece
            if piece == ":" and re.fullmatch(r"\s*(?:public|private|protected)\s*:", self.head):
                self.head = ""
            self.parens += (piece == "(") - (piece == ")")

    def open(self, line: int) -> None:
        inside = self.scopes[-1].kind != "outer"
        kind = "other" if inside else kind_of(self.head, self.parens)
        name = re.split(r"\(", self.head.strip())[0].split()[-1:] if kind == "function" else []
        start = self.head_line if self.head.strip() else line
        self.scopes.append(Scope(kind, "".join(name), start, self.head, self.head_line, self.parens))
        self.head, self.parens = "", 0

    def close(self, line: int) -> None:
        if len(self.scopes) == 1:
            raise AssertionError(f"line {line}: a brace is closed that was not opened")
        scope = self.scopes.pop()
        self.parens = scope.parens
        self.head = scope.head + "{}" if scope.kind == "other" else ""
        self.head_line = scope.head_line
        if scope.kind == "function":
            self.found.append((scope.name, line - scope.line + 1))


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def measured_files() -> list[Path]:
    folders = ["csrc", "bindings", "herring", "benchmarks", "examples", "tests"]
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".h", ".cc", ".cu", ".cuh", ".py"} and "__pycache__" not in path.parts
    ]


def measure() -> tuple[dict[str, int], dict[str, int]]:
    """Files and functions beyond the limits, with their lengths."""
    files: dict[str, int] = {}
    functions: dict[str, int] = {}
    for path in measured_files():
        text = path.read_text()
        if (lines := text.count("\n")) > MAX_FILE_LINES:
            files[name_of(path)] = lines
        found = python_functions(path) if path.suffix == ".py" else FunctionFinder().read(text)
        for name, length in found:
            if length > MAX_FUNCTION_LINES:
                key = f"{name_of(path)}::{name}"
                functions[key] = max(length, functions.get(key, 0))
    return files, functions


def ratchet_problems(what: str, limit: int, found: dict[str, int], allowed: dict[str, int]) -> list[str]:
    problems = []
    for name, length in found.items():
        most = allowed.get(name, limit)
        if length > most:
            problems.append(f"{name} has {length} lines; {what} have at most {most}: split it")
        elif length < most:
            problems.append(f"{name} has shrunk to {length} lines: lower its entry in tests/ratchet.json")
    problems += [
        f"{name} is within {limit} lines: remove it from tests/ratchet.json" for name in allowed if name not in found
    ]
    return problems


# --- The tests -------------------------------------------------------------------------------------------------------


def test_every_folder_of_csrc_has_a_rule() -> None:
    assert {path.name for path in CSRC.iterdir() if path.is_dir()} == set(MAY_INCLUDE)


@pytest.mark.parametrize("folder", sorted(MAY_INCLUDE))
def test_includes_go_one_way(folder: str) -> None:
    allowed = MAY_INCLUDE[folder] | {folder}
    problems = []
    for path in cpp_files(CSRC / folder):
        for mark, name in includes(path):
            target = name.split("/")[0]
            if mark == "<":
                if target in MAY_INCLUDE and (CSRC / name).is_file():  # <memory> is none of ours.
                    problems.append(f"{name_of(path)} includes {name} in angle brackets")
            elif not (CSRC / name).is_file():
                problems.append(f"{name_of(path)} includes {name}, which is not a path below csrc/")
            elif target not in allowed:
                problems.append(f"{name_of(path)} includes {name}; {folder} may include {sorted(allowed)}")
    assert not problems, "\n".join(problems)


def test_the_transport_contract_is_for_endpoints_and_runtime() -> None:
    users = {
        path.relative_to(CSRC).parts[0]
        for path in cpp_files(CSRC)
        if any(name.startswith("transport/") for _, name in includes(path))
    }
    assert users <= {"transport", "tcp", "efa", "runtime"}


def test_only_the_composition_root_names_a_concrete_transport() -> None:
    concrete = [
        f"{name_of(path)} includes {name}"
        for path in cpp_files(CSRC)
        for _, name in includes(path)
        if name.startswith(("efa/", "tcp/")) and path.relative_to(CSRC).parts[0] not in {"efa", "tcp", "runtime"}
    ]
    assert not concrete, "\n".join(concrete)


def test_libfabric_headers_stay_in_efa() -> None:
    problems = [
        f"{name_of(path)} includes {name}"
        for path in cpp_files(CSRC, BINDINGS)
        for _, name in includes(path)
        if name.startswith("rdma/") and CSRC / "efa" not in path.parents
    ]
    assert not problems, "\n".join(problems)


def test_framework_headers_stay_in_bindings() -> None:
    problems = [
        f"{name_of(path)} includes {name}"
        for path in cpp_files(CSRC)
        for _, name in includes(path)
        if FRAMEWORK.match(name)
    ]
    assert not problems, "\n".join(problems)


def test_the_reduction_is_used_by_server_and_runtime_alone() -> None:
    problems = [
        f"{name_of(path)} includes {name}"
        for path in cpp_files(CSRC, BINDINGS)
        for _, name in includes(path)
        if name.startswith("server/reduce") and not {CSRC / "server", CSRC / "runtime"} & set(path.parents)
    ]
    assert not problems, "\n".join(problems)


def test_bindings_reach_the_engines_only_through_the_runtime() -> None:
    open_to_bindings = {
        "core",
        "control",
        "runtime",
        "collectives",
        "elastic",
        "efa",
        "tcp",
        "cuda",
        "intra_node",
        "fusion_buffer",
    }
    problems = [
        f"{name_of(path)} includes {name}"
        for path in cpp_files(BINDINGS)
        for mark, name in includes(path)
        if mark == '"' and not (BINDINGS / name).is_file() and (CSRC / name).is_file()
        if name.split("/")[0] not in open_to_bindings
    ]
    assert not problems, "\n".join(problems)


def test_engines_are_pure() -> None:
    problems = []
    for path in filter(is_engine, cpp_files(CSRC)):
        problems += [
            f"{name_of(path)} includes <{name}>"
            for mark, name in includes(path)
            if mark == "<"
            if IMPURE_INCLUDE.match(name)
        ]
        problems += [f"{name_of(path)} uses {match.group()}" for match in IMPURE_CALL.finditer(bare(path.read_text()))]
    assert not problems, "\n".join(problems)


def test_the_environment_is_read_in_one_file() -> None:
    readers = {name_of(path) for path in cpp_files(CSRC, BINDINGS) if ENVIRONMENT.search(bare(path.read_text()))}
    assert readers - set(OTHER_VARIABLES) == {"csrc/core/config.cc", ENVIRONMENT_WRITER}
    uses = [match.group() for match in ENVIRONMENT.finditer(bare((ROOT / ENVIRONMENT_WRITER).read_text()))]
    assert uses == ["environ"], f"{ENVIRONMENT_WRITER} does more than to put another list there"


def test_nothing_sets_the_environment_under_other_threads() -> None:
    """setenv() may free what another thread's getenv() reads: a crash in the user's code, not in ours."""
    setters = [
        name_of(p) for p in cpp_files(CSRC, BINDINGS) if re.search(r"\b(un)?setenv\(|\bputenv\(", bare(p.read_text()))
    ]
    assert not setters


@pytest.mark.parametrize("name", sorted(OTHER_VARIABLES))
def test_variables_of_other_software_are_not_settings_of_ours(name: str) -> None:
    text = (ROOT / name).read_text()
    assert ENVIRONMENT.search(bare(text)), f"{name} no longer reads the environment: remove it from OTHER_VARIABLES"
    assert f'"{OTHER_VARIABLES[name]}"' in text
    assert len(ENVIRONMENT.findall(bare(text))) == 1, f"{name} reads more than {OTHER_VARIABLES[name]}"
    assert not re.search(r'"HERRING_\w+"', text)


def test_every_header_is_guarded() -> None:
    problems = [
        name_of(path)
        for path in cpp_files(CSRC, BINDINGS)
        if path.suffix == ".h"
        if "#pragma once" not in path.read_text()
    ]
    assert not problems, f"without #pragma once: {problems}"


def test_files_and_functions_stay_short() -> None:
    allowed = json.loads(RATCHET.read_text())
    files, functions = measure()
    problems = ratchet_problems("files", MAX_FILE_LINES, files, allowed["files"])
    problems += ratchet_problems("functions", MAX_FUNCTION_LINES, functions, allowed["functions"])
    assert not problems, "\n".join(problems)


# --- The tests' own tools --------------------------------------------------------------------------------------------

SAMPLE = """
#define OPEN {
namespace a {
template <class T, class U = std::vector<int>>
class B : public C {
 public:
  explicit B(int x) : x_{x}, y_(make([] { return 1; })), z_{{1, 2}} {
    // { not a brace
    use("{", '{', R"({)", 1'000);
  }
  bool operator==(const B&) const = default;
  bool operator()(int) const noexcept {
    return true;
  }
  int value() const { return x_; }

 private:
  int x_ = 0;
  std::array<int, 2> z_{1, 2};
};
constexpr int kTable[] = {
    1,
};
constexpr auto kRows = make<Row>({
    {"a", f(1)},
});
struct D final {
  friend auto operator<=>(D, D) = default;
};
enum class E : unsigned { kOne };
template <class T>
struct F* g(T x)
{
  if (x) {
    struct Local { void f() {} };
  }
  auto later = [&](int i) {
    return i;
  };
  return nullptr;
}
std::string h(std::span<const int> in = {}) {
  return {};
}
}  // namespace a
"""


def test_functions_are_found() -> None:
    assert FunctionFinder().read(SAMPLE) == [("B", 4), ("operator", 3), ("value", 1), ("g", 11), ("h", 3)]


def test_functions_are_found_in_every_file() -> None:
    """A file whose braces do not balance here would hide its functions from the ratchet."""
    for path in cpp_files(CSRC, BINDINGS):
        finder = FunctionFinder()
        finder.read(path.read_text())
        assert len(finder.scopes) == 1, f"{name_of(path)}: the braces do not balance for this test"
        if path.suffix == ".cc":
            assert finder.found or path.read_text().count("{") < 3, f"{name_of(path)}: no function found"


def test_the_ratchet_tells_growth_from_progress() -> None:
    assert ratchet_problems("files", 600, {"a": 601}, {}) == ["a has 601 lines; files have at most 600: split it"]
    assert ratchet_problems("files", 600, {"a": 700}, {"a": 700}) == []
    assert "lower its entry" in ratchet_problems("files", 600, {"a": 650}, {"a": 700})[0]
    assert "remove it" in ratchet_problems("files", 600, {}, {"a": 700})[0]
