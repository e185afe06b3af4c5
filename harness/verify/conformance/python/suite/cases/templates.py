"""Building templates. Built templates stay on the server, under unique names."""

import os
import tempfile
import time
import traceback
import uuid

from e2b import AsyncTemplate, BuildException, Template, wait_for_file, wait_for_url

from . import TEMPLATE, Cases, raises, same, sandbox

CASES = Cases()
case = CASES

SIZE = {"cpu_count": 2, "memory_mb": 512}


def unique() -> str:
    return f"conformance-{uuid.uuid4().hex[:12]}"


def build(template, name: str, **options) -> list[str]:
    """Builds a template and returns the messages of its log."""
    log: list[str] = []
    Template.build(template, name, on_build_logs=lambda entry: log.append(entry.message), **SIZE, **options)
    return log


@case
def template_build():
    name = unique()
    with tempfile.TemporaryDirectory() as context:
        os.makedirs(os.path.join(context, "src/below"))
        for path, text in (("src/a.txt", "a"), ("src/b.txt", "b"), ("src/below/c", "c"), ("tool.sh", "#!/bin/sh\necho tool\n")):
            with open(os.path.join(context, path), "w") as file:
                file.write(text)
        os.symlink("a.txt", os.path.join(context, "src/link"))
        os.symlink("missing", os.path.join(context, "src/dangling"))
        template = (
            Template(file_context_path=context)
            .from_template(TEMPLATE)
            .set_envs({"WORD": "built", "PLACE": "$HOME/place"})
            .set_workdir("/srv/app")
            .copy("src", "src")
            .copy("src/*.txt", "texts/")
            .copy("tool.sh", "/usr/local/bin/tool", user="root", mode=0o755)
            .run_cmd(["echo $WORD > word", "echo $PLACE > place"])
            .run_cmd("id -un > /root/who", user="root")
            .make_symlink("word", "alias")
        )
        log = build(template, name)
    assert any("Template is ready" in line or "ready" in line.lower() for line in log), log
    with sandbox(template=name) as s:
        same(s.files.read("/srv/app/word"), "built\n")
        same(s.files.read("/srv/app/place"), "/root/place\n")
        same(s.commands.run("readlink src/dangling").stdout, "missing\n")
        same(s.commands.run("cat src/link src/below/c texts/b.txt alias").stdout, "acbbuilt\n")
        same(s.commands.run("tool; pwd; stat -c %U word").stdout, "tool\n/srv/app\nuser\n")
        same(s.commands.run("cat /root/who", user="root").stdout, "root\n")
        same(s.commands.run("echo ${WORD-none}").stdout, "none\n")


@case
async def template_build_async():
    name = unique()
    template = AsyncTemplate().from_template(TEMPLATE).run_cmd("echo async > it")
    await AsyncTemplate.build(template, name, **SIZE)
    with sandbox(template=name) as s:
        same(s.files.read("/home/user/it"), "async\n")


@case
def template_from_image():
    name = unique()
    log = build(Template().from_image("e2bdev/base").run_cmd(f"echo {name} > it"), name)
    assert any("FROM e2bdev/base" in line for line in log), log
    with sandbox(template=name) as s:
        same(s.files.read("/home/user/it"), f"{name}\n")


DOCKERFILE = """
# The steps are those of one suite: the last word of the first variable is different in each.
FROM e2bdev/base
ARG GREETING=hello
ENV WORD=$GREETING-NAME \\
    PORT=8124
WORKDIR /srv/app
COPY a.txt src texts/
COPY --chown=user:user a.txt .
RUN echo $WORD > word && \\
    id -un > who
USER user
RUN id -un > /tmp/who
CMD ["python3", "-m", "http.server", "8124"]
"""


@case
def template_from_dockerfile():
    name = unique()
    with tempfile.TemporaryDirectory() as context:
        os.mkdir(os.path.join(context, "src"))
        for path in ("a.txt", "src/b.txt"):
            with open(os.path.join(context, path), "w") as file:
                file.write(path)
        build(Template(file_context_path=context).from_dockerfile(DOCKERFILE.replace("NAME", name)), name)
    with sandbox(template=name) as s:
        same(s.commands.run("pwd; cat word who /tmp/who").stdout, f"/srv/app\nhello-{name}\nroot\nuser\n")
        same(s.commands.run("cat texts/a.txt texts/b.txt").stdout, "a.txtsrc/b.txt")
        same(s.commands.run("stat -c %U a.txt texts/a.txt word").stdout, "user\nroot\nroot\n")
        same(s.commands.run("curl -s localhost:8124/word").stdout, f"hello-{name}\n")


@case
def template_from_registry():
    image, locked = os.environ["CONFORMANCE_IMAGE"], os.environ["CONFORMANCE_LOCKED_IMAGE"]
    text = "hello from a registry\n"
    for template in (Template().from_image(image), Template().from_image(locked, username="user", password="secret")):
        name = unique()
        build(template.run_cmd(f"(cat /greeting; echo $WORD; echo {name}) > it"), name)
        with sandbox(template=name) as s:
            same(s.commands.run("cat it; id -un; echo ${WORD-none}").stdout, f"{text}{text}{name}\nuser\nnone\n")
    for refused in (Template().from_image(locked), Template().from_image(locked, username="user", password="wrong")):
        error = raises(BuildException, build, refused, unique())
        assert "denies access" in str(error) and "wrong" not in str(error), error


@case
def template_start_command():
    name = unique()
    template = (
        Template()
        .from_template(TEMPLATE)
        .run_cmd("echo served > index.html")
        .set_start_cmd("python3 -m http.server 8123", wait_for_url("http://localhost:8123/"))
    )
    build(template, name)
    for _ in range(2):
        with sandbox(template=name) as s:
            same(s.commands.run("curl -s localhost:8123/index.html").stdout, "served\n")


@case
def template_cache():
    name = unique()

    def template(last: str):
        # With a unique step, because suites of other SDKs run at the same time and share the cache.
        drawn = f"cat /proc/sys/kernel/random/uuid > drawn  # {name}"
        return Template().from_template(TEMPLATE).run_cmd(drawn).run_cmd(last)

    def drawn() -> str:
        with sandbox(template=name) as s:
            return s.files.read("/home/user/drawn")

    build(template("echo 1 > last"), name)
    first = drawn()
    log = build(template("echo 2 > last"), name)
    assert any("CACHED" in line for line in log), log
    same(drawn(), first)
    build(template("echo 2 > last"), name, skip_cache=True)
    assert drawn() != first


@case
def template_failures():
    template = Template().from_template(TEMPLATE).run_cmd("echo before")
    template = template.run_cmd("exit 7")  # the failing step
    error = raises(BuildException, build, template, unique())
    assert "failed to run command 'exit 7': exit status 7" in str(error), error
    frames = traceback.extract_tb(error.__traceback__)
    assert any("the failing step" in (frame.line or "") for frame in frames), frames
    unknown = Template().from_template(TEMPLATE).run_cmd("true", user="root123")
    error = raises(BuildException, build, unknown, unique())
    text = "failed to run command 'true': command failed: unauthenticated: invalid username: 'root123'"
    assert text in str(error), error
    started = Template().from_template(TEMPLATE).set_start_cmd("exit 3", wait_for_file("/never"))
    error = raises(BuildException, build, started, unique())
    assert "start command failed" in str(error), error
    raises(BuildException, build, Template().from_template(f"no-{unique()}"), unique())


@case
def template_in_background_and_tags():
    name = unique()
    template = Template().from_template(TEMPLATE).run_cmd("sleep 1; echo built > it")
    info = Template.build_in_background(template, f"{name}:v1", **SIZE)
    deadline = time.monotonic() + 100
    while True:
        status = Template.get_build_status(info)
        state = getattr(status.status, "value", status.status)
        if state not in ("waiting", "building"):
            break
        assert time.monotonic() < deadline, status
        time.sleep(0.2)
    same(state, "ready")
    Template.assign_tags(f"{name}:v1", ["stable", "next"])
    same({tag.tag for tag in Template.get_tags(name)}, {"v1", "stable", "next"})
    Template.remove_tags(name, "next")
    same({tag.tag for tag in Template.get_tags(name)}, {"v1", "stable"})
    with sandbox(template=f"{name}:stable") as s:
        same(s.files.read("/home/user/it"), "built\n")
    assert not Template.exists(unique())
