//! The network part of a scenario: what lies around the sandboxes, and what they exchange with it.

use std::time::Duration;

use model::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// More round trips, swaps, connections or bytes than this are a typing mistake.
const MAX_COUNT: u32 = 1_000_000;
const MAX_REPEAT: u32 = 1000;
const MAX_BYTES: u64 = 64 << 30;

/// An uplink of the run's own, and the options that every sandbox is created with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkSpec {
    /// Addresses, CIDR blocks and names that are allowed, as E2B's `allowOut`.
    pub allow_out: Vec<String>,
    /// As E2B's `denyOut`.
    pub deny_out: Vec<String>,
}

impl NetworkSpec {
    /// The option `network` of a create, and the body of an update.
    #[must_use]
    pub fn options(&self) -> Value {
        json!({ "allowOut": self.allow_out, "denyOut": self.deny_out })
    }

    /// The same without anything allowed.
    #[must_use]
    pub fn closed_options() -> Value {
        json!({ "denyOut": ["0.0.0.0/0"] })
    }
}

/// What a sandbox and a peer outside do with each other. The peer holds the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExchangeSpec {
    /// Requests of the peer and the sandbox's answers, one after the other over one connection.
    Echo {
        /// Round trips of a connection.
        count: u32,
        /// Connections, one after the other.
        repeat: u32,
    },
    /// The sandbox sends so many bytes over one connection.
    Send {
        /// Bytes.
        bytes: u64,
        /// Connections, one after the other.
        repeat: u32,
    },
    /// The peer sends so many bytes over one connection.
    Receive {
        /// Bytes.
        bytes: u64,
        /// Connections, one after the other.
        repeat: u32,
    },
    /// The sandbox tries a destination that its policy denies.
    Denied,
    /// The policy is replaced by one that allows nothing, and back, while the sandbox sends without a pause.
    Churn {
        /// Replacements.
        count: u32,
        /// Between the beginnings of two.
        every: Duration,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NetworkConfig {
    kind: NetworkKind,
    allow_out: Vec<String>,
    deny_out: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum NetworkKind {
    None,
    Isolated,
}

impl NetworkConfig {
    pub(super) fn check(self) -> Option<NetworkSpec> {
        match self.kind {
            NetworkKind::None => None,
            NetworkKind::Isolated => Some(NetworkSpec {
                allow_out: self.allow_out,
                deny_out: self.deny_out,
            }),
        }
    }
}

/// The keys of a turn that make it an exchange.
#[derive(Clone, Default, Deserialize)]
pub(super) struct ExchangeConfig {
    pub(super) exchange: String,
    pub(super) count: Option<u32>,
    pub(super) repeat: Option<u32>,
    pub(super) amount: String,
    pub(super) every: String,
}

impl ExchangeConfig {
    /// `None` if the turn is none; the error is a sentence for the user.
    pub(super) fn check(&self, of: &str) -> Result<Option<ExchangeSpec>, String> {
        let meaningful: &[&str] = match self.exchange.as_str() {
            "" | "denied" => &[],
            "echo" => &["count"],
            "send" | "receive" => &["amount"],
            "churn" => &["count", "every"],
            other => {
                return Err(format!(
                    "{of}: exchange is {other:?}: echo, send, receive, denied or churn"
                ));
            }
        };
        let given = [
            ("count", self.count.is_some()),
            ("amount", !self.amount.is_empty()),
            ("every", !self.every.is_empty()),
        ];
        let repeat = match self.repeat.unwrap_or(1) {
            repeat @ 1..=MAX_REPEAT => repeat,
            repeat => return Err(format!("{of}: repeat is {repeat}, from 1 to {MAX_REPEAT}")),
        };
        if self.repeat.is_some() && !matches!(self.exchange.as_str(), "echo" | "send" | "receive") {
            return Err(format!("{of}: repeat is for echo, send and receive"));
        }
        for (key, is_given) in given {
            if is_given != meaningful.contains(&key) {
                let needs = if is_given {
                    "has no meaning"
                } else {
                    "is needed"
                };
                return Err(format!(
                    "{of}: {key} {needs} for exchange {:?}",
                    self.exchange
                ));
            }
        }
        Ok(match self.exchange.as_str() {
            "echo" => Some(ExchangeSpec::Echo {
                repeat,
                count: self.count(of)?,
            }),
            "send" => Some(ExchangeSpec::Send {
                repeat,
                bytes: self.bytes(of)?,
            }),
            "receive" => Some(ExchangeSpec::Receive {
                repeat,
                bytes: self.bytes(of)?,
            }),
            "denied" => Some(ExchangeSpec::Denied),
            "churn" => Some(ExchangeSpec::Churn {
                count: self.count(of)?,
                every: super::config::positive(&format!("{of}: every"), &self.every)?,
            }),
            _ => None,
        })
    }

    fn count(&self, of: &str) -> Result<u32, String> {
        match self.count.unwrap_or_default() {
            count @ 1..=MAX_COUNT => Ok(count),
            count => Err(format!("{of}: count is {count}, from 1 to {MAX_COUNT}")),
        }
    }

    fn bytes(&self, of: &str) -> Result<u64, String> {
        let amount: Bytes = self
            .amount
            .parse()
            .map_err(|e| format!("{of}: amount: {e}"))?;
        match amount.0 {
            bytes @ 1..=MAX_BYTES => Ok(bytes),
            _ => Err(format!(
                "{of}: amount is {amount}, at least 1B and at most 64GiB"
            )),
        }
    }
}
