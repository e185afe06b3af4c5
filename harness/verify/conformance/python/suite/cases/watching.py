"""Watching directories for changes."""

import asyncio

from e2b import AsyncSandbox, FilesystemEventType, InvalidArgumentException, NotFoundException

from . import TEMPLATE, Absent, Cases, raises, same, sandbox, until

CASES = Cases()
case = CASES


def events_of(handle, wanted: set) -> list:
    seen = []

    def all_there():
        seen.extend(handle.get_new_events())
        return wanted <= {(e.name, e.type) for e in seen}

    until(f"{wanted}", all_there)
    return seen


@case
def watch_sync():
    with sandbox() as s:
        s.files.make_dir("w")
        handle = s.files.watch_dir("w")
        s.files.write("w/new.txt", "x")
        kinds = FilesystemEventType
        seen = events_of(handle, {("new.txt", kinds.CREATE), ("new.txt", kinds.WRITE)})
        same([e.type for e in seen], [kinds.CREATE, kinds.CHMOD, kinds.WRITE])
        s.files.rename("w/new.txt", "w/newer.txt")
        events_of(handle, {("new.txt", kinds.RENAME), ("newer.txt", kinds.CREATE)})
        s.files.remove("w/newer.txt")
        events_of(handle, {("newer.txt", kinds.REMOVE)})
        handle.stop()
        raises(Exception, handle.get_new_events)


@case
def watch_recursive():
    with sandbox() as s:
        s.files.make_dir("w/a/b")
        handle = s.files.watch_dir("w", recursive=True)
        s.files.write("w/a/b/deep.txt", "x")
        events_of(handle, {("a/b/deep.txt", FilesystemEventType.WRITE)})
        s.files.make_dir("w/later")
        events_of(handle, {("later", FilesystemEventType.CREATE)})
        s.files.write("w/later/in.txt", "x")
        events_of(handle, {("later/in.txt", FilesystemEventType.WRITE)})
        handle.stop()


@case
def watch_not_recursive():
    with sandbox() as s:
        s.files.make_dir("w/a")
        handle = s.files.watch_dir("w")
        s.files.write("w/a/deep.txt", "x")
        s.files.write("w/shallow.txt", "x")
        seen = events_of(handle, {("shallow.txt", FilesystemEventType.WRITE)})
        assert not [e for e in seen if "deep" in e.name], seen
        handle.stop()


@case
def watch_with_entries():
    with sandbox() as s:
        s.files.make_dir("w")
        try:
            handle = s.files.watch_dir("w", include_entry=True)
        except TypeError:
            raise Absent("no include_entry")
        s.files.write("w/f.txt", "12345")
        seen = events_of(handle, {("f.txt", FilesystemEventType.WRITE)})
        entry = seen[-1].entry
        same((entry.name, entry.path, entry.size), ("f.txt", "/home/user/w/f.txt", 5))
        handle.stop()


@case
def watch_errors():
    with sandbox() as s:
        s.files.write("f", "x")
        raises(NotFoundException, s.files.watch_dir, "nowhere")
        raises(InvalidArgumentException, s.files.watch_dir, "f")


@case
async def watch_async():
    s = await AsyncSandbox.create(TEMPLATE, timeout=60)
    try:
        await s.files.make_dir("w")
        seen, there = [], asyncio.Event()

        def on_event(event):
            seen.append((event.name, event.type))
            if event.type == FilesystemEventType.WRITE:
                there.set()

        handle = await s.files.watch_dir("w", on_event=on_event)
        await s.files.write("w/f.txt", "x")
        await asyncio.wait_for(there.wait(), 10)
        assert ("f.txt", FilesystemEventType.CREATE) in seen, seen
        await handle.stop()
    finally:
        await s.kill()
