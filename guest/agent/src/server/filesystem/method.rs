//! Unary RPCs of `filesystem.Filesystem`.

/// A unary RPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    Stat,
    ListDir,
    MakeDir,
    Move,
    Remove,
    CreateWatcher,
    GetWatcherEvents,
    RemoveWatcher,
}

impl Method {
    /// Finds a method by the last part of its path.
    pub(crate) fn find(name: &str) -> Option<Self> {
        Some(match name {
            "Stat" => Self::Stat,
            "ListDir" => Self::ListDir,
            "MakeDir" => Self::MakeDir,
            "Move" => Self::Move,
            "Remove" => Self::Remove,
            "CreateWatcher" => Self::CreateWatcher,
            "GetWatcherEvents" => Self::GetWatcherEvents,
            "RemoveWatcher" => Self::RemoveWatcher,
            _ => return None,
        })
    }
}
