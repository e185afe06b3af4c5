//! Meters the CPU time and the memory of a round.

use super::Runner;
use crate::{clock, event::Spent, plan::Round, target::Target};

/// The cost of the current round.
pub(super) struct Meter<'a> {
    target: &'a dyn Target,
    server: &'a dyn Target,
    /// CPU time of the server before the round.
    server_before: Option<u64>,
    /// CPU time of the subject before the round.
    before: Option<u64>,
    spent: Spent,
}

impl<'a> Meter<'a> {
    /// Begins a round while the pool of the server is full.
    pub(super) fn start(runner: &'a Runner<'_>, round: &Round) -> Self {
        let (server, target) = (runner.target, runner.target_of(round.subject));
        let pool = server.pool();
        Self {
            target,
            server,
            server_before: pool.and_then(|_| server.cpu_ns()),
            before: target.cpu_ns(),
            spent: Spent {
                round: round.index,
                subject: round.subject,
                from_ns: clock::monotonic_ns(),
                until_ns: 0,
                cpu_ns: None,
                server_cpu_ns: None,
                warm: pool.map(|pool| pool.warm),
                stock_after: None,
                memory: pool.and_then(|pool| pool.memory),
            },
        }
    }

    /// Called when all starts of the round have ended; sandboxes with a lifetime may still be alive.
    pub(super) fn starts_ended(&mut self) {
        let before = self.server_before;
        let now = before.and_then(|_| self.server.cpu_ns());
        self.spent.server_cpu_ns = difference(before, now);
        self.spent.stock_after = self.server.pool().map(|pool| pool.warm + pool.filling);
    }

    /// Called when the sandboxes of the round are killed and the pool is full again.
    pub(super) fn end(self) -> Spent {
        Spent {
            until_ns: clock::monotonic_ns(),
            cpu_ns: difference(self.before, self.target.cpu_ns()),
            ..self.spent
        }
    }
}

fn difference(before: Option<u64>, after: Option<u64>) -> Option<u64> {
    after?.checked_sub(before?)
}
