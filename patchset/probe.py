# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Run by the Python that `doctor` looks at, any version from 3.8: says in JSON what it would import from where.

Specs only: no package is imported. The files that hold a version (package_info.py, _version.py) are run alone, since
what the former answers depends on the repository that encloses it.

    PY probe.py '{"packages": {"sglang": "sglang/_version.py"}}'
"""

import sys

if sys.path and sys.path[0] == __file__.rpartition("/")[0]:
    del sys.path[0]  # this file's own directory, before types.py and others there hide the standard library's

import importlib.metadata
import importlib.util
import json
import os
import platform
import runpy


def find(module):
    """Spec of a dotted name through sys.meta_path, no parent imported."""
    places, spec = None, None
    for depth in range(1, module.count(".") + 2):
        name = ".".join(module.split(".")[:depth])
        found = (f.find_spec(name, places) for f in sys.meta_path if hasattr(f, "find_spec"))
        spec = next((s for s in found if s is not None), None)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations or ())
    return spec


def describe(module):
    """Origin and search locations of a module, the error that its search raised, or None."""
    try:
        spec = find(module)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if spec is None:
        return None
    return {"origin": spec.origin, "locations": [os.path.abspath(p) for p in spec.submodule_search_locations or ()]}


def parts(namespace):
    """Every directory on sys.path that holds `namespace`, and the __init__.py that would hide the others."""
    found = []
    for entry in sys.path:
        directory = os.path.join(os.path.abspath(entry or "."), namespace)
        if os.path.isdir(directory):
            found.append({"path": directory, "init": os.path.isfile(os.path.join(directory, "__init__.py"))})
    return found


def version_of(module, version_file):
    """What the package's version file assigns to __version__, from its own directory; None without such a file."""
    found = describe(module) or {}
    if not found.get("origin"):
        return None
    path = os.path.join(os.path.dirname(os.path.abspath(found["origin"])), version_file)
    if not os.path.isfile(path):
        return None
    try:
        return {"path": path, "version": str(runpy.run_path(path).get("__version__"))}
    except BaseException as error:
        return {"path": path, "version": None, "error": f"{type(error).__name__}: {error}"}


def distribution(dist):
    """What one dist-info says."""
    direct = json.loads(dist.read_text("direct_url.json") or "{}")
    wheel = dist.read_text("WHEEL") or ""
    return {
        "name": dist.metadata["Name"],
        "version": dist.version,
        "path": str(getattr(dist, "_path", "")),
        "editable": bool(direct.get("dir_info", {}).get("editable")),
        "url": direct.get("url"),
        "requires": dist.requires or [],
        "tags": [line[5:] for line in wheel.splitlines() if line.startswith("Tag: ")],
    }


def distributions():
    """Every distribution on sys.path, unreadable ones by their path."""
    found = []
    for dist in importlib.metadata.distributions():
        try:
            found.append(distribution(dist))
        except Exception as error:
            found.append({"name": None, "path": str(getattr(dist, "_path", "")), "error": str(error)})
    return found


def markers():
    """The PEP 508 environment."""
    info = sys.implementation.version
    return {
        "implementation_name": sys.implementation.name,
        "implementation_version": f"{info.major}.{info.minor}.{info.micro}",
        "os_name": os.name,
        "platform_machine": platform.machine(),
        "platform_python_implementation": platform.python_implementation(),
        "platform_release": platform.release(),
        "platform_system": platform.system(),
        "platform_version": platform.version(),
        "python_full_version": platform.python_version(),
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "sys_platform": sys.platform,
    }


def main():
    """Print the answer."""
    wanted = json.loads(sys.argv[1])
    answer = {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "libc": list(platform.libc_ver()),
        "markers": markers(),
        "modules": {module: describe(module) for module in wanted["packages"]},
        "versions": {module: version_of(module, file) for module, file in wanted["packages"].items()},
        "namespaces": {name: parts(name) for name in wanted["namespaces"]},
        "distributions": distributions(),
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
