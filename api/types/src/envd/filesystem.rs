//! Messages of `filesystem.Filesystem`, in proto3 JSON, and the answer of `POST /files`. Absent and `null`
//! mean the default value everywhere; unknown keys are ignored, since newer clients send them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    Empty, Timestamp,
    proto_json::{int64, null_is_default},
};

/// `Stat`, `MakeDir` and `Remove`: a path. A relative one starts in the user's home, `~` is that home, and
/// an empty one is the sandbox's default working directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathRequest {
    /// The path.
    #[serde(default, deserialize_with = "null_is_default")]
    pub path: String,
}

/// `Move`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveRequest {
    /// What to move.
    #[serde(default, deserialize_with = "null_is_default")]
    pub source: String,
    /// What it is called afterwards.
    #[serde(default, deserialize_with = "null_is_default")]
    pub destination: String,
}

/// The answer of `Stat`, `MakeDir` and `Move`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryResponse {
    /// What is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

/// What is known of a file, a directory or a link.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryInfo {
    /// Last component of the path.
    #[serde(default, deserialize_with = "null_is_default")]
    pub name: String,
    /// Of a link it is the type of what the link leads to.
    #[serde(rename = "type", default, deserialize_with = "null_is_default")]
    pub kind: FileType,
    /// Absolute path as it was asked for: links are not resolved.
    #[serde(default, deserialize_with = "null_is_default")]
    pub path: String,
    /// Bytes; of a link, those of its text.
    #[serde(default, with = "int64")]
    pub size: i64,
    /// Permission bits; of a link, those of what it leads to.
    #[serde(default, deserialize_with = "null_is_default")]
    pub mode: u32,
    /// Type and permission bits in letters, as Go's `FileMode` writes them: `-rw-r--r--`.
    #[serde(default, deserialize_with = "null_is_default")]
    pub permissions: String,
    /// Name of the owner, its number when it has no name.
    #[serde(default, deserialize_with = "null_is_default")]
    pub owner: String,
    /// Name of the group, its number when it has no name.
    #[serde(default, deserialize_with = "null_is_default")]
    pub group: String,
    /// Last change of the content; absent when it is before 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modified_time: Option<Timestamp>,
    /// Of a link: where it leads, every link on the way resolved. The link's own path when it leads nowhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    /// What was attached to the file with `X-Metadata-` headers, or as attributes `user.e2b.` in the guest.
    #[serde(default, deserialize_with = "null_is_default")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// What kind of thing is at a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileType {
    /// A device, socket, FIFO, or a link that leads nowhere.
    #[default]
    #[serde(rename = "FILE_TYPE_UNSPECIFIED")]
    Unspecified,
    /// A regular file.
    #[serde(rename = "FILE_TYPE_FILE")]
    File,
    /// A directory.
    #[serde(rename = "FILE_TYPE_DIRECTORY")]
    Directory,
    /// A link, from servers that do not report the type of what it leads to.
    #[serde(rename = "FILE_TYPE_SYMLINK")]
    Symlink,
}

/// `ListDir`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListDirRequest {
    /// The directory.
    #[serde(default, deserialize_with = "null_is_default")]
    pub path: String,
    /// How many levels; zero means one.
    #[serde(default, deserialize_with = "null_is_default")]
    pub depth: u32,
}

/// What is in a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListDirResponse {
    /// Each directory before what is in it, names in the order of their bytes.
    #[serde(default, deserialize_with = "null_is_default")]
    pub entries: Vec<EntryInfo>,
}

/// `WatchDir` and `CreateWatcher`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchDirRequest {
    /// The directory.
    #[serde(default, deserialize_with = "null_is_default")]
    pub path: String,
    /// Whether everything below it is watched too.
    #[serde(default, deserialize_with = "null_is_default")]
    pub recursive: bool,
    /// Whether events say what is at their path.
    #[serde(default, deserialize_with = "null_is_default")]
    pub include_entry: bool,
    /// Whether the directory may be on a network file system, where events are unreliable.
    #[serde(default, deserialize_with = "null_is_default")]
    pub allow_network_mounts: bool,
}

/// One message of a `WatchDir` stream; exactly one field is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchDirResponse {
    /// From now on changes are seen. Always first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<Empty>,
    /// Something changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filesystem: Option<FilesystemEvent>,
    /// Nothing happened for a while.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<Empty>,
}

/// A change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemEvent {
    /// Path relative to the watched directory; `.` is that directory.
    #[serde(default, deserialize_with = "null_is_default")]
    pub name: String,
    /// What happened.
    #[serde(rename = "type", default, deserialize_with = "null_is_default")]
    pub kind: EventType,
    /// What is there now, when that was asked for and the thing was not removed or renamed away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

/// What happened to a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventType {
    /// Something newer than this program.
    #[default]
    #[serde(rename = "EVENT_TYPE_UNSPECIFIED")]
    Unspecified,
    /// It was made, or moved here.
    #[serde(rename = "EVENT_TYPE_CREATE")]
    Create,
    /// Its content changed.
    #[serde(rename = "EVENT_TYPE_WRITE")]
    Write,
    /// It was removed.
    #[serde(rename = "EVENT_TYPE_REMOVE")]
    Remove,
    /// It was moved away.
    #[serde(rename = "EVENT_TYPE_RENAME")]
    Rename,
    /// Its owner, permissions, times or attributes changed.
    #[serde(rename = "EVENT_TYPE_CHMOD")]
    Chmod,
}

/// The answer of `CreateWatcher`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreateWatcherResponse {
    /// What the watcher is asked for by.
    #[serde(default, deserialize_with = "null_is_default")]
    pub watcher_id: String,
}

/// `GetWatcherEvents` and `RemoveWatcher`.
pub type WatcherRequest = CreateWatcherResponse;

/// What happened since the last time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetWatcherEventsResponse {
    /// In the order of their happening.
    #[serde(default, deserialize_with = "null_is_default")]
    pub events: Vec<FilesystemEvent>,
}

/// One file that `POST /files` wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteInfo {
    /// Absolute path.
    pub path: String,
    /// Its last component.
    pub name: String,
    /// Always `file`.
    #[serde(rename = "type")]
    pub kind: String,
    /// What is attached to it; see [`EntryInfo::metadata`].
    #[serde(default, deserialize_with = "null_is_default")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_sdks_send_is_read() {
        let list: ListDirRequest = serde_json::from_str(r#"{"path":"/tmp"}"#).unwrap();
        assert_eq!(list.depth, 0);
        let watch =
            r#"{"path":"d","recursive":true,"includeEntry":true,"allowNetworkMounts":null}"#;
        let watch: WatchDirRequest = serde_json::from_str(watch).unwrap();
        assert!(watch.recursive && watch.include_entry && !watch.allow_network_mounts);
        let watcher: WatcherRequest = serde_json::from_str(r#"{"watcherId":"w1"}"#).unwrap();
        assert_eq!(watcher.watcher_id, "w1");
    }

    #[test]
    fn what_is_sent_has_the_names_of_proto3_json() {
        let entry = EntryInfo {
            name: "f".into(),
            kind: FileType::File,
            path: "/f".into(),
            size: 5_000_000_000,
            mode: 0o644,
            permissions: "-rw-r--r--".into(),
            owner: "user".into(),
            group: "user".into(),
            modified_time: Some(Timestamp::from_unix_ns(1)),
            symlink_target: Some("/t".into()),
            metadata: [("k".into(), "v".into())].into(),
        };
        let json = r#"{"name":"f","type":"FILE_TYPE_FILE","path":"/f","size":"5000000000","mode":420,"permissions":"-rw-r--r--","owner":"user","group":"user","modifiedTime":"1970-01-01T00:00:00.000000001Z","symlinkTarget":"/t","metadata":{"k":"v"}}"#;
        assert_eq!(serde_json::to_string(&entry).unwrap(), json);
        assert_eq!(serde_json::from_str::<EntryInfo>(json).unwrap(), entry);
        // Other servers leave defaults out, and may write the size as a number.
        let short: EntryInfo = serde_json::from_str(r#"{"name":"f","size":3}"#).unwrap();
        assert_eq!((short.size, short.symlink_target), (3, None));
        let event = FilesystemEvent {
            name: "a/b".into(),
            kind: EventType::Chmod,
            entry: None,
        };
        assert_eq!(
            serde_json::to_string(&event).unwrap(),
            r#"{"name":"a/b","type":"EVENT_TYPE_CHMOD"}"#
        );
    }
}
