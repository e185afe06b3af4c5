//! Addresses, policies and probes of the scripts.

use std::{
    net::SocketAddr,
    thread::{self, ScopedJoinHandle},
    time::{Duration, Instant},
};

use netprobe::{Action, Finding, Outcome, Probe};
use serde_json::{Map, Value, json};

use super::outcome::ScriptError;
use crate::isolation::observed::Observed;
use crate::{
    isolation::{
        sandbox::NetworkEvent,
        timing::{ECHO, EVENT_TIMEOUT, PASS_MS},
        world::{Place, Seen},
    },
    sandbox::Sandbox,
};

/// Echo servers outside. Each script allows some of them.
pub(super) const FIRST: &str = "198.51.100.10:5000";
pub(super) const SECOND: &str = "198.51.100.11:5000";
pub(super) const THIRD: &str = "198.51.100.12:5000";
/// A port without an echo server.
pub(super) const SILENT: &str = "198.51.100.10:7001";
/// Time limit of a wait for packets.
pub(super) const TIMEOUT: Duration = Duration::from_secs(30);

/// Options of a create request whose policy allows these addresses and nothing else.
pub(in crate::isolation) fn allowing(addresses: &[&str]) -> Map<String, Value> {
    let mut options = Map::new();
    options.insert("network".to_owned(), only(addresses));
    options
}

/// Network options with the policy of [`allowing`]: the body of an update.
pub(super) fn only(addresses: &[&str]) -> Value {
    json!({ "allowOut": addresses, "denyOut": ["0.0.0.0/0"] })
}

/// Parses an address that is a literal in this program. An invalid one becomes 0.0.0.0:0, where nothing listens.
pub(super) fn address(text: &str) -> SocketAddr {
    text.parse().unwrap_or(SocketAddr::from(([0, 0, 0, 0], 0)))
}

pub(super) fn host_of(text: &str) -> String {
    address(text).ip().to_string()
}

/// Result of a scoped thread. If the thread panicked, the panic continues in this one.
pub(super) fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Makes the sandbox send `payload` to the echo server until `is_received` returns true, but at most 30 times. The
/// listener may not be ready at first.
pub(in crate::isolation) fn send_until(
    is_received: impl Fn() -> bool,
    guest: &Sandbox,
    payload: String,
) {
    let send = [probe(payload, Action::Udp(address(ECHO)), PASS_MS)];
    for _ in 0..30 {
        // If this fails, the listener times out and reports it.
        let _ = guest.probe(&send);
        thread::sleep(Duration::from_millis(50));
        if is_received() {
            return;
        }
    }
}

pub(super) fn probe(name: String, action: Action, within_ms: u64) -> Probe {
    Probe {
        name,
        first: Vec::new(),
        action,
        within_ms,
    }
}

/// A probe that sends numbered datagrams, one every 10 ms.
pub(super) fn numbered(name: &str, to: &str, within_ms: u64) -> Probe {
    let action = Action::Numbered {
        to: address(to),
        every_ms: 10,
    };
    probe(name.to_owned(), action, within_ms)
}

/// Selects captured packets outside that are addressed to this receiver.
pub(super) fn to(text: &'static str) -> impl Fn(&Seen) -> bool {
    let to = address(text);
    move |seen| {
        seen.place == Place::Outside && seen.to == Some(to.ip()) && seen.port == Some(to.port())
    }
}

pub(super) fn summary(findings: &[Finding]) -> String {
    let texts = findings
        .iter()
        .map(|f| format!("{}: {} ({}) ", f.name, f.outcome.name(), f.said));
    texts.collect()
}

/// Waits until the server reports an event that `is_it` accepts. Returns false if none is reported within
/// [`EVENT_TIMEOUT`].
pub(super) fn is_reported(
    guest: &Sandbox,
    is_it: impl Fn(&NetworkEvent) -> bool,
) -> Result<bool, ScriptError> {
    let deadline = Instant::now() + EVENT_TIMEOUT;
    let events = guest.await_events(deadline, |events| events.iter().any(&is_it))?;
    Ok(events.iter().any(is_it))
}

/// Observations of the listening probe `name`, which must not have received any of the payloads that it listens for.
pub(super) fn received_nothing(findings: &[Finding], name: &str) -> Observed {
    let mut observed = Observed::default();
    let listener = findings.iter().find(|finding| finding.name == name);
    let outcome = listener.map(|finding| finding.outcome);
    observed.breach_if(
        outcome == Some(Outcome::Ok),
        "the guest received packets that it must not get",
    );
    observed.doubt_unless(
        outcome.is_some_and(|o| o != Outcome::Failed),
        "the guest could not listen",
    );
    observed.guest = summary(findings);
    observed
}
