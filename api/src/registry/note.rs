//! What the server knows of a sandbox beyond what the pool knows, as it is written to the sandbox's record.
//!
//! The pool keeps the text and hands it back after a restart. The version is looked at before the rest.

use std::collections::BTreeMap;

use api_types::rest::NetworkConfig;
use pool::{Init, PauseMode};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::lifecycle::Habits;

/// Version of the text.
const FORMAT: u32 = 1;
/// What the pool takes, in bytes.
pub const MAX_NOTE: usize = 256 * 1024;

/// Wall time in milliseconds since 1970. Deadlines are wall time: clients see them, and they outlive the server.
pub type UnixMs = u64;

/// What the server knows of a sandbox.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// When it was created.
    pub started_at: UnixMs,
    /// When it ends or pauses; of a paused one, when it was paused.
    pub end_at: UnixMs,
    /// The timeout that was asked for last, in seconds; see [`Note::wake_timeout_s`].
    pub timeout_s: u32,
    /// How it pauses at its deadline; absent: it ends.
    pub at_deadline: Option<PauseMode>,
    /// Traffic wakes it.
    pub auto_resume: bool,
    /// The caller's words.
    pub metadata: BTreeMap<String, String>,
    /// Environment of every process in it.
    pub env_vars: BTreeMap<String, String>,
    /// What `X-Access-Token` must say; absent: the agent is open.
    pub envd_token: Option<String>,
    /// What `e2b-traffic-access-token` must say; absent: the ports are public.
    pub traffic_token: Option<String>,
    /// What was asked for.
    pub allow_internet_access: Option<bool>,
    /// What was asked for.
    pub network: Option<NetworkConfig>,
    /// Kept for the client.
    pub mcp: Option<Value>,
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

/// A note that cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum NoteError {
    /// It does not fit.
    #[error(
        "metadata, envVars, network and mcp take {0} bytes in all; at most {MAX_NOTE} are kept"
    )]
    TooLong(usize),
    /// Of a newer server, probably.
    #[error("the record has format {0}, this server reads format {FORMAT}")]
    Format(u32),
    /// Not JSON, or not of this shape.
    #[error("the record does not read as a sandbox's")]
    Malformed(#[source] serde_json::Error),
}

impl Note {
    /// As the pool keeps it.
    ///
    /// # Errors
    /// [`NoteError::TooLong`].
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

    /// As it was kept.
    ///
    /// # Errors
    /// [`NoteError::Format`], [`NoteError::Malformed`].
    pub fn from_text(text: &str) -> Result<Self, NoteError> {
        let header: Header = serde_json::from_str(text).map_err(NoteError::Malformed)?;
        if header.format != FORMAT {
            return Err(NoteError::Format(header.format));
        }
        let read: Read = serde_json::from_str(text).map_err(NoteError::Malformed)?;
        Ok(read.note)
    }

    /// What the agent is told at the start and after each resume.
    #[must_use]
    pub fn init(&self) -> Init {
        Init {
            env_vars: self.env_vars.clone(),
            access_token: self.envd_token.clone(),
        }
    }

    /// What the sandbox does by itself.
    #[must_use]
    pub fn habits(&self) -> Habits {
        Habits {
            at_deadline: self.at_deadline,
            auto_resume: self.auto_resume,
        }
    }

    /// For how long it runs, in seconds, when it is woken by traffic or without a timeout: as was asked for last. A
    /// timeout of 0 is how clients end or pause a sandbox at once; one that got it again would be gone again.
    #[must_use]
    pub fn wake_timeout_s(&self) -> u32 {
        const AFTER_ZERO_S: u32 = 300;
        match self.timeout_s {
            0 => AFTER_ZERO_S,
            asked => asked,
        }
    }

    /// What services in it see as `Host`.
    #[must_use]
    pub fn mask_request_host(&self) -> Option<&str> {
        self.network.as_ref()?.mask_request_host.as_deref()
    }
}

impl std::fmt::Debug for Note {
    /// Without the secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Note")
            .field("started_at", &self.started_at)
            .field("end_at", &self.end_at)
            .field("at_deadline", &self.at_deadline)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn note(started_at: UnixMs, timeout_s: u32) -> Note {
        Note {
            started_at,
            end_at: started_at + u64::from(timeout_s) * 1000,
            timeout_s,
            at_deadline: None,
            auto_resume: false,
            metadata: BTreeMap::new(),
            env_vars: BTreeMap::new(),
            envd_token: Some("token".into()),
            traffic_token: None,
            allow_internet_access: None,
            network: None,
            mcp: None,
        }
    }

    #[test]
    fn notes_read_back_and_others_are_refused() {
        let mut full = note(5, 7);
        full.metadata.insert("k".into(), "v".into());
        full.network = Some(NetworkConfig {
            mask_request_host: Some("h".into()),
            ..NetworkConfig::default()
        });
        let text = full.to_text().unwrap();
        assert_eq!(Note::from_text(&text).unwrap(), full);
        let newer = text.replace("\"format\":1", "\"format\":2");
        assert!(matches!(Note::from_text(&newer), Err(NoteError::Format(2))));
        assert!(matches!(
            Note::from_text("{}"),
            Err(NoteError::Malformed(_))
        ));
        full.metadata.insert("x".into(), "y".repeat(MAX_NOTE));
        assert!(matches!(full.to_text(), Err(NoteError::TooLong(_))));
    }
}
