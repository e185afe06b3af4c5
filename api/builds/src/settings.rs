//! Settings made by steps that later steps, the start command and the template's sandboxes use.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The user at the start of a build, and of sandboxes whose template sets none.
pub(super) const DEFAULT_USER: &str = "user";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Settings {
    /// A name from the guest's /etc/passwd.
    pub(super) user: String,
    /// An absolute path. `None`: the user's home.
    pub(super) workdir: Option<String>,
    /// For later steps and the start command.
    pub(super) env: BTreeMap<String, String>,
    /// Whether sandboxes also get `env`. E2B's do not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) is_env_exported: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            user: DEFAULT_USER.to_owned(),
            workdir: None,
            env: BTreeMap::new(),
            is_env_exported: false,
        }
    }
}
