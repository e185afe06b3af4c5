//! The network of a scenario, and the exchanges of its turns.

use std::time::Duration;

use model::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

// Upper limits. A larger value is treated as a typing mistake.
const MAX_COUNT: u32 = 1_000_000;
const MAX_REPEAT: u32 = 1000;
const MAX_BYTES: u64 = 64 << 30;

/// Network policy with which the run creates every sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkSpec {
    /// Allowed addresses, CIDR blocks and domain names: `allowOut` in E2B's API.
    pub allow_out: Vec<String>,
    /// Denied addresses and CIDR blocks: `denyOut` in E2B's API.
    pub deny_out: Vec<String>,
}

impl NetworkSpec {
    /// The value of `network` in a create request, and the body of a policy update.
    #[must_use]
    pub fn options(&self) -> Value {
        json!({ "allowOut": self.allow_out, "denyOut": self.deny_out })
    }

    /// A policy that allows nothing.
    #[must_use]
    pub fn closed_options() -> Value {
        json!({ "denyOut": ["0.0.0.0/0"] })
    }
}

/// Traffic between a sandbox and a peer outside it. The peer measures the times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExchangeSpec {
    /// The peer sends requests and the sandbox echoes them, one at a time.
    Echo {
        /// Round trips on each connection.
        count: u32,
        /// Connections, opened one after the other.
        repeat: u32,
    },
    /// The sandbox sends `bytes` on each connection.
    Send {
        bytes: u64,
        /// Connections, opened one after the other.
        repeat: u32,
    },
    /// The peer sends `bytes` on each connection.
    Receive {
        bytes: u64,
        /// Connections, opened one after the other.
        repeat: u32,
    },
    /// The sandbox tries to reach a destination that its policy denies.
    Denied,
    /// While the sandbox sends datagrams, policy updates alternate between a policy that allows nothing and the
    /// policy of the scenario.
    Churn {
        /// Number of policy updates.
        count: u32,
        /// Planned interval between the starts of two updates; longer if a response is late.
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

/// Keys of a turn that describe an exchange. An empty `exchange` means that the turn is not an exchange.
#[derive(Clone, Default, Deserialize)]
pub(super) struct ExchangeConfig {
    pub(super) exchange: String,
    pub(super) count: Option<u32>,
    pub(super) repeat: Option<u32>,
    pub(super) amount: String,
    pub(super) every: String,
}

impl ExchangeConfig {
    /// Validates the keys; `of` names the turn in errors. Returns `None` if the turn is not an exchange.
    pub(super) fn check(&self, of: &str) -> Result<Option<ExchangeSpec>, String> {
        let meaningful: &[&str] = match self.exchange.as_str() {
            "" | "denied" => &[],
            "echo" => &["count"],
            "send" | "receive" => &["amount"],
            "churn" => &["count", "every"],
            other => {
                return Err(format!(
                    "{of}: exchange is {other:?}, it must be echo, send, receive, denied or churn"
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
            repeat => {
                return Err(format!(
                    "{of}: repeat is {repeat}, it must lie between 1 and {MAX_REPEAT}"
                ));
            }
        };
        if self.repeat.is_some() && !matches!(self.exchange.as_str(), "echo" | "send" | "receive") {
            return Err(format!(
                "{of}: repeat is only allowed for echo, send and receive"
            ));
        }
        for (key, is_given) in given {
            if is_given != meaningful.contains(&key) {
                let needs = if is_given {
                    "has no meaning"
                } else {
                    "is required"
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
            count => Err(format!(
                "{of}: count is {count}, it must lie between 1 and {MAX_COUNT}"
            )),
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
                "{of}: amount is {amount}, it must lie between 1B and 64GiB"
            )),
        }
    }
}
