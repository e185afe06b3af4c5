//! The body of `POST /init`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Timestamp, proto_json::null_is_default};

/// What a sandbox is told about itself, once after boot and once after each restore. Every field may be
/// absent; what is absent stays as it was. Keys of E2B's body that mean nothing here are ignored.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitRequest {
    /// Host name: 1 to 63 letters, digits and inner hyphens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// 32 lower-case hex digits. A machine id that differs from the last one also gives the guest a new
    /// boot id: it is another machine now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,
    /// Random bytes in hex, 1 to 512 of them, credited to the kernel's pool in full.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy: Option<String>,
    /// Wall-clock time at the moment of sending.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<Timestamp>,
    /// Environment of every process started from now on; replaces the former set unless empty.
    #[serde(default, deserialize_with = "null_is_default")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env_vars: BTreeMap<String, String>,
    /// What `X-Access-Token` must say from now on; an empty text opens the door again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_token: Option<String>,
    /// Whether the guest has a network: its card is set up with what every guest has, or taken down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<bool>,
    /// Who runs processes when the caller names nobody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_user: Option<String>,
    /// Where processes run when the caller says nothing; empty means the user's home.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_workdir: Option<String>,
}

impl std::fmt::Debug for InitRequest {
    /// Without the secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InitRequest")
            .field("hostname", &self.hostname)
            .field("machine_id", &self.machine_id)
            .field("timestamp", &self.timestamp)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_body_changes_nothing_and_e2b_keys_are_taken() {
        let empty: InitRequest = serde_json::from_str("{}").unwrap();
        assert_eq!(empty, InitRequest::default());
        assert_eq!(serde_json::to_string(&empty).unwrap(), "{}");
        let e2b = r#"{"envVars":null,"accessToken":"t","timestamp":"2024-03-01T00:00:00Z",
                      "defaultUser":"root","hyperloopIP":"1.2.3.4","lifecycleID":"x"}"#;
        let e2b: InitRequest = serde_json::from_str(e2b).unwrap();
        let all = r#"{"hostname":null,"envVars":{"A":"b"},"accessToken":null,"timestamp":null,
                      "defaultUser":null,"defaultWorkdir":null,"caBundle":"PEM",
                      "volumeMounts":[{"nfs_target":"x:/y","path":"/z"}],"hyperloopIP":null}"#;
        let all: InitRequest = serde_json::from_str(all).unwrap();
        let expected = InitRequest {
            env_vars: [("A".to_owned(), "b".to_owned())].into(),
            ..InitRequest::default()
        };
        assert_eq!(all, expected);
        assert_eq!(e2b.access_token.as_deref(), Some("t"));
        assert_eq!(e2b.timestamp.unwrap().unix_ns(), 1_709_251_200_000_000_000);
    }
}
