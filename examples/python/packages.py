"""Installs a package that is not in any index: uploads its wheel and installs it without network."""

import io
import zipfile

from e2b import Sandbox


def wheel() -> bytes:
    """The wheel that `pip wheel .` builds from a project with one module."""
    info = "greeting-1.0.dist-info"
    files = {
        "greeting.py": "def greet(name):\n    return f'hello, {name}'\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: example\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return out.getvalue()


with Sandbox.create("base", timeout=300) as sandbox:
    sandbox.files.write("wheels/greeting-1.0-py3-none-any.whl", wheel())
    # Installers may exceed the default command timeout of one minute; 0 turns the timeout off.
    sandbox.commands.run("pip install --quiet --no-index --find-links wheels greeting", timeout=0)
    print(sandbox.commands.run("python3 -c 'import greeting; print(greeting.greet(\"sandbox\"))'").stdout, end="")

# Prints:
# hello, sandbox
