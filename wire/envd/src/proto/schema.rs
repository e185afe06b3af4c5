//! Field numbers of `process.proto`, `filesystem.proto` and `google/protobuf/timestamp.proto`.

use super::{Field, Kind, Label, Message, Method};

impl Field {
    const fn new(number: u32, name: &'static str, kind: Kind) -> Self {
        Self {
            number,
            name,
            kind,
            label: Label::Implicit,
        }
    }

    const fn labelled(self, label: Label) -> Self {
        Self { label, ..self }
    }

    const fn optional(self) -> Self {
        self.labelled(Label::Optional)
    }

    const fn one_of(self) -> Self {
        self.labelled(Label::OneOf)
    }

    const fn repeated(self) -> Self {
        self.labelled(Label::Repeated)
    }
}

const fn boolean(number: u32, name: &'static str) -> Field {
    Field::new(number, name, Kind::Bool)
}

const fn uint32(number: u32, name: &'static str) -> Field {
    Field::new(number, name, Kind::Uint32)
}

const fn text(number: u32, name: &'static str) -> Field {
    Field::new(number, name, Kind::Text)
}

const fn bytes(number: u32, name: &'static str) -> Field {
    Field::new(number, name, Kind::Bytes)
}

/// Message fields have presence, with or without the keyword `optional`.
const fn message(number: u32, name: &'static str, message: &'static Message) -> Field {
    Field::new(number, name, Kind::Message(message)).optional()
}

const fn of(fields: &'static [Field]) -> Message {
    Message { fields }
}

static EMPTY: Message = of(&[]);

static PTY_SIZE: Message = of(&[uint32(1, "cols"), uint32(2, "rows")]);
static PTY: Message = of(&[message(1, "size", &PTY_SIZE)]);
static CONFIG: Message = of(&[
    text(1, "cmd"),
    text(2, "args").repeated(),
    Field::new(3, "envs", Kind::TextMap),
    text(4, "cwd").optional(),
]);
static SELECTOR: Message = of(&[uint32(1, "pid").one_of(), text(2, "tag").one_of()]);
static SELECTED: Message = of(&[message(1, "process", &SELECTOR)]);
static INPUT: Message = of(&[bytes(1, "stdin").one_of(), bytes(2, "pty").one_of()]);

static START: Message = of(&[
    message(1, "process", &CONFIG),
    message(2, "pty", &PTY),
    text(3, "tag").optional(),
    boolean(4, "stdin").optional(),
]);
static EVENT_START: Message = of(&[uint32(1, "pid")]);
static EVENT_DATA: Message = of(&[
    bytes(1, "stdout").one_of(),
    bytes(2, "stderr").one_of(),
    bytes(3, "pty").one_of(),
]);
static EVENT_END: Message = of(&[
    Field::new(1, "exitCode", Kind::Sint32),
    boolean(2, "exited"),
    text(3, "status"),
    text(4, "error").optional(),
]);
static PROCESS_EVENT: Message = of(&[
    message(1, "start", &EVENT_START).one_of(),
    message(2, "data", &EVENT_DATA).one_of(),
    message(3, "end", &EVENT_END).one_of(),
    message(4, "keepalive", &EMPTY).one_of(),
]);
static EVENT: Message = of(&[message(1, "event", &PROCESS_EVENT)]);
static PROCESS_INFO: Message = of(&[
    message(1, "config", &CONFIG),
    uint32(2, "pid"),
    text(3, "tag").optional(),
]);
static PROCESSES: Message = of(&[message(1, "processes", &PROCESS_INFO).repeated()]);
static UPDATE: Message = of(&[message(1, "process", &SELECTOR), message(2, "pty", &PTY)]);
static SEND_INPUT: Message = of(&[
    message(1, "process", &SELECTOR),
    message(2, "input", &INPUT),
]);
static STREAM_DATA: Message = of(&[message(2, "input", &INPUT)]);
static STREAM_INPUT: Message = of(&[
    message(1, "start", &SELECTED).one_of(),
    message(2, "data", &STREAM_DATA).one_of(),
    message(3, "keepalive", &EMPTY).one_of(),
]);
static SEND_SIGNAL: Message = of(&[
    message(1, "process", &SELECTOR),
    Field::new(
        2,
        "signal",
        Kind::Enum(&[
            (0, "SIGNAL_UNSPECIFIED"),
            (9, "SIGNAL_SIGKILL"),
            (15, "SIGNAL_SIGTERM"),
        ]),
    ),
]);

static PATH: Message = of(&[text(1, "path")]);
static ENTRY: Message = of(&[
    text(1, "name"),
    Field::new(
        2,
        "type",
        Kind::Enum(&[
            (0, "FILE_TYPE_UNSPECIFIED"),
            (1, "FILE_TYPE_FILE"),
            (2, "FILE_TYPE_DIRECTORY"),
            (3, "FILE_TYPE_SYMLINK"),
        ]),
    ),
    text(3, "path"),
    Field::new(4, "size", Kind::Int64),
    uint32(5, "mode"),
    text(6, "permissions"),
    text(7, "owner"),
    text(8, "group"),
    Field::new(9, "modifiedTime", Kind::Timestamp).optional(),
    text(10, "symlinkTarget").optional(),
    Field::new(11, "metadata", Kind::TextMap),
]);
static FOUND: Message = of(&[message(1, "entry", &ENTRY)]);
static MOVE: Message = of(&[text(1, "source"), text(2, "destination")]);
static LIST_DIR: Message = of(&[text(1, "path"), uint32(2, "depth")]);
static ENTRIES: Message = of(&[message(1, "entries", &ENTRY).repeated()]);
static WATCH: Message = of(&[
    text(1, "path"),
    boolean(2, "recursive"),
    boolean(3, "includeEntry"),
    boolean(4, "allowNetworkMounts"),
]);
static FILE_EVENT: Message = of(&[
    text(1, "name"),
    Field::new(
        2,
        "type",
        Kind::Enum(&[
            (0, "EVENT_TYPE_UNSPECIFIED"),
            (1, "EVENT_TYPE_CREATE"),
            (2, "EVENT_TYPE_WRITE"),
            (3, "EVENT_TYPE_REMOVE"),
            (4, "EVENT_TYPE_RENAME"),
            (5, "EVENT_TYPE_CHMOD"),
        ]),
    ),
    message(3, "entry", &ENTRY),
]);
static WATCHED: Message = of(&[
    message(1, "start", &EMPTY).one_of(),
    message(2, "filesystem", &FILE_EVENT).one_of(),
    message(3, "keepalive", &EMPTY).one_of(),
]);
static WATCHER: Message = of(&[text(1, "watcherId")]);
static FILE_EVENTS: Message = of(&[message(1, "events", &FILE_EVENT).repeated()]);

const fn rpc(path: &'static str, request: &'static Message, response: &'static Message) -> Method {
    Method {
        path,
        request,
        response,
    }
}

static METHODS: [Method; 17] = [
    rpc("/process.Process/List", &EMPTY, &PROCESSES),
    rpc("/process.Process/Connect", &SELECTED, &EVENT),
    rpc("/process.Process/Start", &START, &EVENT),
    rpc("/process.Process/Update", &UPDATE, &EMPTY),
    rpc("/process.Process/StreamInput", &STREAM_INPUT, &EMPTY),
    rpc("/process.Process/SendInput", &SEND_INPUT, &EMPTY),
    rpc("/process.Process/SendSignal", &SEND_SIGNAL, &EMPTY),
    rpc("/process.Process/CloseStdin", &SELECTED, &EMPTY),
    rpc("/filesystem.Filesystem/Stat", &PATH, &FOUND),
    rpc("/filesystem.Filesystem/MakeDir", &PATH, &FOUND),
    rpc("/filesystem.Filesystem/Move", &MOVE, &FOUND),
    rpc("/filesystem.Filesystem/ListDir", &LIST_DIR, &ENTRIES),
    rpc("/filesystem.Filesystem/Remove", &PATH, &EMPTY),
    rpc("/filesystem.Filesystem/WatchDir", &WATCH, &WATCHED),
    rpc("/filesystem.Filesystem/CreateWatcher", &WATCH, &WATCHER),
    rpc(
        "/filesystem.Filesystem/GetWatcherEvents",
        &WATCHER,
        &FILE_EVENTS,
    ),
    rpc("/filesystem.Filesystem/RemoveWatcher", &WATCHER, &EMPTY),
];

/// Looks up an RPC by its path.
#[must_use]
pub fn method(path: &str) -> Option<&'static Method> {
    METHODS.iter().find(|method| method.path == path)
}
