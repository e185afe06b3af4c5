//! Refused traffic of a sandbox, from the datapath or from the egress proxy.

use model::SandboxId;
use netisolation::{NetEvent, Reason};

/// Refused packets or a refused request.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    pub(crate) sandbox: SandboxId,
    pub(crate) count: u64,
    pub(crate) destination: String,
    pub(crate) name: Option<String>,
    pub(crate) reason: String,
}

impl Refusal {
    pub(crate) fn of_packets(event: &NetEvent) -> Self {
        Self {
            sandbox: event.sandbox.clone(),
            count: event.count,
            destination: event.destination.to_string(),
            name: event.name.clone(),
            reason: name_of_reason(event.reason),
        }
    }
}

/// The name of a reason in JSON and in metric labels.
pub(crate) fn name_of_reason(reason: Reason) -> String {
    let name = serde_json::to_value(reason).ok();
    let name = name.as_ref().and_then(serde_json::Value::as_str);
    name.unwrap_or_default().to_owned()
}
