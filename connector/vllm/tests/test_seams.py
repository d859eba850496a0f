"""The table of what is used of vLLM: it matches the installed one, and every difference is refused by name."""

import ast
import copy
import importlib.util
import pathlib
import shutil
import subprocess
import sys

import pytest

import harness
from baton_vllm import seams

VERSIONS = seams.known_versions()
NAMES = [name for names in seams.ALL_FUNCTIONS.values() for name in names]


def table(version="0.32"):
    return copy.deepcopy(VERSIONS[version])


def test_the_table_has_every_function_of_both_versions():
    assert set(VERSIONS) == {"0.32", "0.33"}
    for version, functions in VERSIONS.items():
        assert sorted(functions) == sorted(NAMES), version
        assert all(function and function["hash"] for function in functions.values())


@pytest.mark.skipif(harness.REASON is not None, reason=str(harness.REASON))
def test_the_installed_vllm_is_the_tested_one():
    from vllm.version import __version__

    seams.check(__version__, allow_untested=False)
    seams.check(__version__, allow_untested=False, functions=seams.PUSH_FUNCTIONS)


def test_each_connector_is_refused_by_its_own_functions(unpacked):
    push, pull = (unpacked / (seams.NIXL + f"{kind}_worker.py") for kind in ("push", "pull"))
    sources = {file: file.read_text() for file in (push, pull)}
    push.write_text(sources[push].replace("def _xfer_blocks_for_req(", "def _write_blocks_for_req("))
    seams.check("0.32.0", False)
    with pytest.raises(seams.SeamsMoved, match=r"NixlPushConnectorWorker\._xfer_blocks_for_req is gone\."):
        seams.check("0.32.0", True, seams.PUSH_FUNCTIONS)
    push.write_text(sources[push])
    pull.write_text("")
    seams.check("0.32.0", False, seams.PUSH_FUNCTIONS)


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.7", "0.32.1rc1", "0.32.0+cpu", "0.33.0.post1"])
def test_all_patches_of_a_tested_version_are_admitted_if_nothing_moved(version):
    assert seams.compare(version, table(seams.minor(version)), False) == []


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.0.0", "0.3", "dev"])
def test_an_unknown_version_is_refused_by_name(version):
    assert seams.compare(version, table(), False) == [f"version {version} is not one of 0.32, 0.33"]
    assert seams.compare(version, table("0.33"), True) == [], "compared with the newest"


@pytest.mark.parametrize("name", NAMES)
def test_each_difference_is_refused_by_name(name):
    changed, renamed, missing = table(), table(), table()
    changed[name]["hash"] = "0" * 16
    assert seams.compare("0.32.0", changed, False) == [f"{name} has changed"]
    assert seams.compare("0.32.0", changed, True) == [], "a changed function is admitted on request"
    renamed[name]["parameters"] = ["self", "other"]
    missing[name] = None
    for allowed in (False, True):
        assert seams.compare("0.32.0", renamed, allowed) == [f"{name} has other parameters: self, other"]
        assert seams.compare("0.32.0", missing, allowed) == [f"{name} is gone"]


def test_all_differences_are_named():
    found = table()
    found[NAMES[0]], found[NAMES[1]]["hash"] = None, "0" * 16
    assert len(seams.compare("0.32.0", found, False)) == 2


# Sources

SOURCE = '''
class Owner:
    """Text."""

    def used(self, a, *, b=None, c=()):
        """What it does."""
        # A comment.
        for x in a:
            if x is None and b != "text":
                return [y async for y in c] if False else f"{x!r:>{b}}"
        return {**c, "k": -1}, lambda z: z

    async def waits(self): ...

    def silent(self):
        """Only this."""
'''


def digest(source, name="Owner.used"):
    found = seams.read_function(ast.parse(source), name)
    return found and found["hash"]


@pytest.mark.parametrize("old, new", [
    ('"""What it does."""', '"""What it did."""'),
    ('        """What it does."""\n', ""),
    ("# A comment.", "# Another one."),
    ("        # A comment.\n", "\n\n"),
    ("for x in a:", "for x in (a):"),
    ('"text"', "'text'"),
])
def test_the_hash_is_independent_of_docstrings_comments_and_layout(old, new):
    assert old in SOURCE
    assert digest(SOURCE.replace(old, new)) == digest(SOURCE)


@pytest.mark.parametrize("old, new", [
    ("is None and", "is None or"),
    ("is None", "is not None"),
    ('"text"', '"test"'),
    ("-1", "1"),
    ("-1", "-1.0"),
    ("b=None", "b=False"),
    ("b=None", "b"),
    ("c=()", "c=[]"),
    ("def used(self, a, *", "def used(self, a=0, *"),
    ("return {**c", "yield {**c"),
    ("lambda z: z", "lambda z: a"),
    ("x!r", "x!s"),
])
def test_the_hash_goes_by_the_rest(old, new):
    assert old in SOURCE
    assert digest(SOURCE.replace(old, new, 1)) not in (digest(SOURCE), None)


def test_functions_are_found_by_class_and_name():
    assert digest(SOURCE, "Owner.waits") and digest(SOURCE, "Owner.silent")
    for name in ("Owner.other", "Other.used", "used", "Owner"):
        assert digest(SOURCE, name) is None
    assert digest(SOURCE.replace("used", "renamed")) is None


def test_parameters():
    found = seams.read_function(ast.parse(SOURCE), "Owner.used")
    assert found["parameters"] == ["self", "a", "b", "c"]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_the_hash_is_the_same_in_every_version_of_python(python, tmp_path):
    candidates = [shutil.which(f"python{python}"), *pathlib.Path.home().glob(f".pyenv/versions/{python}.*/bin/python")]
    works = (str(c) for c in candidates if c and subprocess.run([c, "-c", ""], capture_output=True).returncode == 0)
    found = next(works, None)
    if found is None:
        pytest.skip(f"no Python {python}")
    (tmp_path / "source.py").write_text(SOURCE)
    tree = "ast.parse(open(sys.argv[1]).read())"
    script = f"import ast,sys,seams; print(seams.read_function({tree}, 'Owner.used')['hash'])"
    package = pathlib.Path(seams.__file__).parent
    done = subprocess.run(
        [found, "-c", script, tmp_path / "source.py"],
        cwd=package,
        env={"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == digest(SOURCE), done.stderr


@pytest.fixture
def unpacked(tmp_path, monkeypatch):
    """A folder with the files of the installed vLLM that the table names, which `check` finds."""
    if harness.REASON:
        pytest.skip(harness.REASON)
    root = pathlib.Path(importlib.util.find_spec("vllm").origin).parents[1]
    for file in seams.ALL_FUNCTIONS:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / file, tmp_path / file)
    spec = type("Spec", (), {"origin": str(tmp_path / "vllm/__init__.py")})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    return tmp_path


def test_check_refuses_what_differs(unpacked):
    seams.check("0.32.0", False)
    file = unpacked / (seams.NIXL + "pull_worker.py")
    source = file.read_text()
    file.write_text(source.replace("def _get_new_notifs(self)", "def _new_notifs(self)"))
    with pytest.raises(seams.SeamsMoved, match=r"\(0\.32\.0\): NixlPullConnectorWorker\._get_new_notifs is gone\."):
        seams.check("0.32.0", True)
    file.write_text(source.replace("notified_req_ids.add(req_id)", "notified_req_ids.discard(req_id)"))
    with pytest.raises(seams.SeamsMoved, match="_get_new_notifs has changed"):
        seams.check("0.32.0", False)
    seams.check("0.32.0", True)
    file.unlink()
    with pytest.raises(seams.SeamsMoved, match="_read_blocks is gone"):
        seams.check("0.32.0", True)


def test_the_module_prints_the_table(unpacked):
    if not (version := pathlib.Path(unpacked / "vllm/_version.py")).exists():
        version.write_text("__version__ = version = '0.32.0'\n")
    package = pathlib.Path(seams.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "baton_vllm.seams", unpacked],
        env={"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout.replace("null", "None"))["0.32"] == VERSIONS["0.32"]
