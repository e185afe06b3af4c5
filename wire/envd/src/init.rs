//! The body of `POST /init`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Timestamp, proto_json::null_is_default};

/// The identity and configuration of a sandbox, sent once after boot and once after each restore. An absent field
/// leaves the current value unchanged. Keys of E2B's body that this agent does not use are ignored.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InitRequest {
    /// 1 to 63 letters, digits and inner hyphens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hostname: Option<String>,
    /// 32 lower-case hex digits. If it differs from the previous machine id, the guest also gets a new boot id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,
    /// 1 to 512 random bytes in hex. The kernel credits all of them to its entropy pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy: Option<String>,
    /// Wall-clock time at which the request is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<Timestamp>,
    /// Environment variables of all processes started from now on. They replace the previous variables, unless the map
    /// is empty.
    #[serde(default, deserialize_with = "null_is_default")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env_vars: BTreeMap<String, String>,
    /// The `X-Access-Token` that requests must carry from now on. An empty string turns the check off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access_token: Option<String>,
    /// Whether the guest has a network. `true` configures the network interface, `false` takes it down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<bool>,
    /// User of processes whose request names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_user: Option<String>,
    /// Working directory of processes whose request names none. Empty: the user's home directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_workdir: Option<String>,
    /// A PEM certificate authority that programs in the guest must trust, in addition to the system's. An empty
    /// string removes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_bundle: Option<String>,
}

impl std::fmt::Debug for InitRequest {
    /// Omits the secrets.
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
    fn an_empty_body_is_valid_and_e2b_keys_are_accepted() {
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
            ca_bundle: Some("PEM".to_owned()),
            ..InitRequest::default()
        };
        assert_eq!(all, expected);
        assert_eq!(e2b.access_token.as_deref(), Some("t"));
        assert_eq!(e2b.timestamp.unwrap().unix_ns(), 1_709_251_200_000_000_000);
    }
}
