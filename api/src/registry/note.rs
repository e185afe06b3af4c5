//! E2B's settings of a sandbox, stored as text in the sandbox's record.
//!
//! The pool stores the text and returns it with the sandbox, also after a restart. The format number is checked before
//! the settings are decoded.

use std::{
    collections::BTreeMap,
    time::{SystemTime, UNIX_EPOCH},
};

use pool::{Init, Lifetime, MAX_NOTE, OnTimeout, PauseMode, UnixMs};
use rest::NetworkConfig;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The format that is written. Format 1 can still be read; it also contains the sandbox's lifetime, see
/// [`lifetime_of_note`].
const FORMAT: u32 = 2;

/// E2B's settings of a sandbox.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// When the sandbox was created.
    pub started_at: UnixMs,
    pub metadata: BTreeMap<String, String>,
    /// Environment of every process in the sandbox.
    pub env_vars: BTreeMap<String, String>,
    /// Required in `X-Access-Token`. `None`: the agent requires no token.
    pub envd_token: Option<String>,
    /// Required in `e2b-traffic-access-token`. `None`: the ports are public.
    pub traffic_token: Option<String>,
    pub allow_internet_access: Option<bool>,
    pub network: Option<NetworkConfig>,
    /// The MCP settings of the create request. The server stores them but does not use them.
    pub mcp: Option<Value>,
    /// Seconds after creation during which requests extend the deadline. `None`: they do not extend it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_activity_s: Option<u32>,
}

#[derive(Serialize)]
struct Written<'a> {
    format: u32,
    note: &'a Note,
}

#[derive(Deserialize)]
struct Header {
    format: u32,
}

#[derive(Deserialize)]
struct Read {
    note: Note,
}

/// The lifetime in a note of format 1.
#[derive(Deserialize)]
struct OldLifetime {
    end_at: UnixMs,
    timeout_s: u32,
    /// `None`: the sandbox ends at its deadline.
    at_deadline: Option<PauseMode>,
    auto_resume: bool,
}

/// Reads a sandbox's lifetime from its note; `None` if the text is not a note of format 1.
#[must_use]
pub fn lifetime_of_note(text: &str) -> Option<Lifetime> {
    #[derive(Deserialize)]
    struct Old {
        format: u32,
        note: OldLifetime,
    }
    let Old { format, note } = serde_json::from_str(text).ok()?;
    (format == 1).then_some(Lifetime {
        end_at: note.end_at,
        timeout_s: note.timeout_s,
        on_timeout: note.at_deadline.map_or(OnTimeout::End, OnTimeout::Pause),
        auto_resume: note.auto_resume,
    })
}

/// The current wall-clock time.
#[must_use]
pub fn now() -> UnixMs {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let ms = since.unwrap_or_default().as_millis();
    u64::try_from(ms).unwrap_or(u64::MAX)
}

/// A note that cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum NoteError {
    /// The note has this many bytes.
    #[error(
        "metadata, envVars, network and mcp take {0} bytes in all; at most {MAX_NOTE} are kept"
    )]
    TooLong(usize),
    /// Probably written by a newer server.
    #[error("the note has format {0}; this server reads formats up to {FORMAT}")]
    Format(u32),
    #[error("the note is not the JSON of a sandbox's settings")]
    Malformed(#[source] serde_json::Error),
}

impl Note {
    /// # Errors
    /// Returns [`NoteError::TooLong`] for more than [`MAX_NOTE`] bytes.
    pub fn to_text(&self) -> Result<String, NoteError> {
        let written = Written {
            format: FORMAT,
            note: self,
        };
        let text = serde_json::to_string(&written).map_err(NoteError::Malformed)?;
        if text.len() > MAX_NOTE {
            return Err(NoteError::TooLong(text.len()));
        }
        Ok(text)
    }

    /// # Errors
    /// Returns [`NoteError::Format`] or [`NoteError::Malformed`].
    pub fn from_text(text: &str) -> Result<Self, NoteError> {
        let header: Header = serde_json::from_str(text).map_err(NoteError::Malformed)?;
        if !(1..=FORMAT).contains(&header.format) {
            return Err(NoteError::Format(header.format));
        }
        let read: Read = serde_json::from_str(text).map_err(NoteError::Malformed)?;
        Ok(read.note)
    }

    /// The settings that the agent gets at the start and after each resume.
    #[must_use]
    pub fn init(&self) -> Init {
        Init {
            env_vars: self.env_vars.clone(),
            access_token: self.envd_token.clone(),
        }
    }

    /// The `Host` header that servers in the sandbox receive instead of the usual one, if set.
    #[must_use]
    pub fn mask_request_host(&self) -> Option<&str> {
        self.network.as_ref()?.mask_request_host.as_deref()
    }

    /// The ports whose servers in the sandbox speak TLS.
    #[must_use]
    pub fn https_ports(&self) -> &[u16] {
        let network = self.network.as_ref();
        let ports = network.and_then(|network| network.https_ports.as_deref());
        ports.unwrap_or_default()
    }
}

impl std::fmt::Debug for Note {
    /// Omits the tokens and the environment.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Note")
            .field("started_at", &self.started_at)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn note(started_at: UnixMs) -> Note {
        Note {
            started_at,
            metadata: BTreeMap::new(),
            env_vars: BTreeMap::new(),
            envd_token: Some("token".into()),
            traffic_token: None,
            allow_internet_access: None,
            network: None,
            mcp: None,
            on_activity_s: None,
        }
    }

    #[test]
    fn a_note_reads_back_and_newer_formats_are_refused() {
        let mut full = note(5);
        full.metadata.insert("k".into(), "v".into());
        full.network = Some(NetworkConfig {
            mask_request_host: Some("h".into()),
            ..NetworkConfig::default()
        });
        let text = full.to_text().unwrap();
        assert_eq!(Note::from_text(&text).unwrap(), full);
        assert_eq!(lifetime_of_note(&text), None);
        let newer = text.replace("\"format\":2", "\"format\":3");
        assert!(matches!(Note::from_text(&newer), Err(NoteError::Format(3))));
        assert!(matches!(
            Note::from_text("{}"),
            Err(NoteError::Malformed(_))
        ));
        full.metadata.insert("x".into(), "y".repeat(MAX_NOTE));
        assert!(matches!(full.to_text(), Err(NoteError::TooLong(_))));
    }

    /// As servers wrote it before lifetimes were stored in the pool's record.
    const OF_FORMAT_1: &str = r#"{"format":1,"note":{"started_at":5,"end_at":7005,"timeout_s":7,
        "at_deadline":"memory","auto_resume":true,"metadata":{},"env_vars":{},"envd_token":"token",
        "traffic_token":null,"allow_internet_access":null,"network":null,"mcp":null}}"#;

    #[test]
    fn a_note_of_format_1_keeps_its_settings_and_its_lifetime() {
        assert_eq!(Note::from_text(OF_FORMAT_1).unwrap(), note(5));
        let lifetime = Lifetime {
            end_at: 7005,
            timeout_s: 7,
            on_timeout: OnTimeout::Pause(PauseMode::Memory),
            auto_resume: true,
        };
        assert_eq!(lifetime_of_note(OF_FORMAT_1), Some(lifetime));
        let ending = OF_FORMAT_1.replace("\"memory\"", "null");
        let on_timeout = lifetime_of_note(&ending).map(|l| l.on_timeout);
        assert_eq!(on_timeout, Some(OnTimeout::End));
        assert_eq!(lifetime_of_note("nonsense"), None);
    }
}
