//! Messages of `filesystem.Filesystem` in proto3 JSON, and the response to `POST /files`. For every field, an
//! absent key and `null` mean the default value. Unknown keys are ignored, because newer clients send them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    Empty, Timestamp,
    proto_json::{int64, null_is_default},
};

/// Request of `Stat`, `MakeDir` and `Remove`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathRequest {
    /// A relative path starts in the user's home directory, `~` is that directory, and an empty path is the sandbox's
    /// default working directory.
    #[serde(default, deserialize_with = "null_is_default")]
    pub path: String,
}

/// Request of `Move`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveRequest {
    /// Path of the entry to move.
    #[serde(default, deserialize_with = "null_is_default")]
    pub source: String,
    /// New path of the entry.
    #[serde(default, deserialize_with = "null_is_default")]
    pub destination: String,
}

/// Response to `Stat`, `MakeDir` and `Move`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryResponse {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

/// Metadata of a file, a directory or a symbolic link.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryInfo {
    /// Last component of the path.
    #[serde(default, deserialize_with = "null_is_default")]
    pub name: String,
    /// For a symbolic link, the type of its target.
    #[serde(rename = "type", default, deserialize_with = "null_is_default")]
    pub kind: FileType,
    /// Absolute path as requested, without resolving symbolic links.
    #[serde(default, deserialize_with = "null_is_default")]
    pub path: String,
    /// Size in bytes; for a symbolic link, the length of the path that it contains.
    #[serde(default, with = "int64")]
    pub size: i64,
    /// Permission bits; for a symbolic link, the permission bits of its target.
    #[serde(default, deserialize_with = "null_is_default")]
    pub mode: u32,
    /// Type and permission bits in letters, as Go's `FileMode` formats them: `-rw-r--r--`.
    #[serde(default, deserialize_with = "null_is_default")]
    pub permissions: String,
    /// Name of the owner, or its uid if it has no name.
    #[serde(default, deserialize_with = "null_is_default")]
    pub owner: String,
    /// Name of the group, or its gid if it has no name.
    #[serde(default, deserialize_with = "null_is_default")]
    pub group: String,
    /// Last modification of the content. `None`: before 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modified_time: Option<Timestamp>,
    /// For a symbolic link: the fully resolved path of its target, or the link's own path if the target does not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    /// Metadata from `X-Metadata-` headers, stored as extended attributes `user.e2b.*`.
    #[serde(default, deserialize_with = "null_is_default")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// The type of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileType {
    /// A device, a socket, a FIFO, or a symbolic link whose target does not exist.
    #[default]
    #[serde(rename = "FILE_TYPE_UNSPECIFIED")]
    Unspecified,
    #[serde(rename = "FILE_TYPE_FILE")]
    File,
    #[serde(rename = "FILE_TYPE_DIRECTORY")]
    Directory,
    /// A symbolic link, from servers that do not report the type of its target.
    #[serde(rename = "FILE_TYPE_SYMLINK")]
    Symlink,
}

/// Request of `ListDir`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListDirRequest {
    /// Path of the directory.
    #[serde(default, deserialize_with = "null_is_default")]
    pub path: String,
    /// How many levels to list; 0 means 1.
    #[serde(default, deserialize_with = "null_is_default")]
    pub depth: u32,
}

/// Response to `ListDir`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListDirResponse {
    /// In depth-first order: each directory precedes its entries. Names are sorted by their bytes.
    #[serde(default, deserialize_with = "null_is_default")]
    pub entries: Vec<EntryInfo>,
}

/// Request of `WatchDir` and `CreateWatcher`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WatchDirRequest {
    /// Path of the directory.
    #[serde(default, deserialize_with = "null_is_default")]
    pub path: String,
    /// Whether subdirectories are watched too.
    #[serde(default, deserialize_with = "null_is_default")]
    pub recursive: bool,
    /// Whether each event contains the metadata of the entry at its path.
    #[serde(default, deserialize_with = "null_is_default")]
    pub include_entry: bool,
    /// Whether the directory may be on a network file system, where events are unreliable.
    #[serde(default, deserialize_with = "null_is_default")]
    pub allow_network_mounts: bool,
}

/// One message of a `WatchDir` stream. Exactly one field is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchDirResponse {
    /// Watching has started. Always the first message.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start: Option<Empty>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filesystem: Option<FilesystemEvent>,
    /// Sent when no event has occurred for a while.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<Empty>,
}

/// A change below a watched directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FilesystemEvent {
    /// Path relative to the watched directory; `.` is the directory itself.
    #[serde(default, deserialize_with = "null_is_default")]
    pub name: String,
    #[serde(rename = "type", default, deserialize_with = "null_is_default")]
    pub kind: EventType,
    /// The entry at the path, if it was requested and the entry was not removed or moved away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

/// The type of a change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum EventType {
    /// A type that this version does not define.
    #[default]
    #[serde(rename = "EVENT_TYPE_UNSPECIFIED")]
    Unspecified,
    /// The entry was created, or moved here.
    #[serde(rename = "EVENT_TYPE_CREATE")]
    Create,
    #[serde(rename = "EVENT_TYPE_WRITE")]
    Write,
    /// The entry was deleted.
    #[serde(rename = "EVENT_TYPE_REMOVE")]
    Remove,
    /// The entry was moved away.
    #[serde(rename = "EVENT_TYPE_RENAME")]
    Rename,
    /// Owner, permissions, times or attributes changed.
    #[serde(rename = "EVENT_TYPE_CHMOD")]
    Chmod,
}

/// Response to `CreateWatcher`, and request of `GetWatcherEvents` and `RemoveWatcher`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CreateWatcherResponse {
    #[serde(default, deserialize_with = "null_is_default")]
    pub watcher_id: String,
}

/// Request of `GetWatcherEvents` and `RemoveWatcher`.
pub type WatcherRequest = CreateWatcherResponse;

/// Response to `GetWatcherEvents`: the changes since the previous call.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetWatcherEventsResponse {
    /// In order of occurrence.
    #[serde(default, deserialize_with = "null_is_default")]
    pub events: Vec<FilesystemEvent>,
}

/// One file that `POST /files` wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteInfo {
    /// Absolute path.
    pub path: String,
    /// Last component of the path.
    pub name: String,
    /// Always `file`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Same as [`EntryInfo::metadata`].
    #[serde(default, deserialize_with = "null_is_default")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_the_sdks_are_parsed() {
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
    fn answers_have_the_field_names_of_proto3_json() {
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
        // Other servers omit default values, and may write the size as a number.
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
