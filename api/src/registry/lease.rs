//! A new sandbox: its options, its note with new tokens, and the request to the pool.

use std::collections::BTreeMap;

use netisolation::Policy;
use pool::{CreateSpec, Lifetime, OnTimeout, Priority};
use rest::NetworkConfig;
use serde_json::Value;

use super::{
    RegistryError,
    note::{Note, now},
};

/// The validated options of a new sandbox. The registry adds times and tokens.
#[derive(Clone, Debug)]
pub struct NewLease {
    /// Id, name, `name:tag` or snapshot id.
    pub template: String,
    pub timeout_s: u32,
    pub on_timeout: OnTimeout,
    /// Whether traffic resumes the sandbox if it is paused with its memory.
    pub auto_resume: bool,
    /// The token that the agent requires.
    pub envd_token: Token,
    /// The token required by all ports except the agent's.
    pub traffic_token: Token,
    pub metadata: BTreeMap<String, String>,
    /// Environment variables of every process in the sandbox.
    pub env_vars: BTreeMap<String, String>,
    pub allow_internet_access: Option<bool>,
    pub network: Option<NetworkConfig>,
    /// The policy that follows from `allow_internet_access` and `network`.
    pub policy: Policy,
    /// Stored, but not used by the server.
    pub mcp: Option<Value>,
    /// See [`Note::on_activity_s`].
    pub on_activity_s: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// A random token is generated and required.
    Drawn,
    /// No token is required.
    None,
}

pub(super) fn spec(
    note: &Note,
    template: String,
    lifetime: Lifetime,
    policy: Policy,
) -> Result<CreateSpec, RegistryError> {
    Ok(CreateSpec {
        template,
        init: note.init(),
        note: note.to_text()?,
        lifetime,
        policy,
        priority: Priority::Normal,
    })
}

/// The settings of `source`, with a new token in place of each of its tokens.
pub(super) fn fork_note(source: &Note) -> Result<Note, RegistryError> {
    let renewed = |token: &Option<String>| match token {
        Some(_) => Token::Drawn,
        None => Token::None,
    };
    Ok(Note {
        started_at: now(),
        envd_token: token(renewed(&source.envd_token))?,
        traffic_token: token(renewed(&source.traffic_token))?,
        ..source.clone()
    })
}

/// 256 random bits in hex.
pub(super) fn token(wanted: Token) -> Result<Option<String>, RegistryError> {
    match wanted {
        Token::None => Ok(None),
        Token::Drawn => Ok(Some(crate::auth::random_hex::<32>()?)),
    }
}
