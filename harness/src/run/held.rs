//! Held clones: read their ledgers, repeat the command in them, kill them.

use std::{sync::mpsc::Sender, thread};

use crate::{
    clock,
    event::{CloneLedger, RunEvent},
    exchange::{FirstCommand, Network},
    memory,
    scenario::{ExchangeSpec, ExecSpec, TurnSpec},
    target::{CloneId, Sandbox},
};

/// Threads that run commands in held clones or kill them.
const THREADS: usize = 4;
/// Threads that wait for the timeouts of denied connections.
const WAITING_THREADS: usize = 64;

/// A clone that answered its first command.
pub(super) struct HeldClone {
    pub(super) id: CloneId,
    pub(super) sandbox: Box<dyn Sandbox>,
}

/// Reads the memory of each clone.
pub(super) fn ledgers(clones: &[HeldClone], guest: Option<memory::FileId>) -> Vec<CloneLedger> {
    clones
        .iter()
        .filter_map(|clone| {
            let pid = clone.sandbox.pid()?;
            let guest = guest.or_else(|| memory::template_memory(pid));
            let mut ledger = memory::clone_ledger(pid, guest);
            ledger.round = clone.id.round;
            ledger.arrival = clone.id.arrival;
            Some(ledger)
        })
        .collect()
}

/// Repeats the command in each clone, with a few clones at a time.
pub(super) fn exec_again(
    clones: &mut [HeldClone],
    command: &ExecSpec,
    network: Option<&Network>,
    events: &Sender<RunEvent>,
) {
    thread::scope(|scope| {
        for part in clones.chunks_mut(part_size(clones.len())) {
            let events = events.clone();
            scope.spawn(move || {
                for clone in part {
                    let began = clock::monotonic_ns();
                    let answer = FirstCommand::prepare(command, network)
                        .and_then(|first| first.run(clone.sandbox.as_mut()));
                    let took = clock::monotonic_ns() - began;
                    // The receiver outlives the run.
                    let _ = events.send(RunEvent::AfterHold {
                        round: clone.id.round,
                        arrival: clone.id.arrival,
                        took_ns: answer.is_ok().then_some(took),
                        failure: answer.err(),
                    });
                }
            });
        }
    });
}

/// Repeats the denied exchange in all clones, with many clones at a time, because each waits for a timeout. A clone that
/// gets through or cannot try is recorded as a failure.
pub(super) fn deny_again(
    clones: &mut [HeldClone],
    turns: &[TurnSpec],
    network: &Network,
    events: &Sender<RunEvent>,
) {
    let denied = |turn: &&TurnSpec| turn.exchange == Some(ExchangeSpec::Denied);
    let Some(turn) = turns.iter().find(denied) else {
        return;
    };
    thread::scope(|scope| {
        for part in clones.chunks_mut(clones.len().div_ceil(WAITING_THREADS).max(1)) {
            let events = events.clone();
            scope.spawn(move || {
                for clone in part {
                    let sandbox = clone.sandbox.as_mut();
                    let tried = network.exchange(sandbox, ExchangeSpec::Denied, &turn.exec);
                    if let Err(failure) = tried {
                        // The receiver outlives the run.
                        let _ = events.send(RunEvent::AfterHold {
                            round: clone.id.round,
                            arrival: clone.id.arrival,
                            took_ns: None,
                            failure: Some(failure),
                        });
                    }
                }
            });
        }
    });
}

/// Kills all clones. The next sweep removes the directory of a clone that cannot be killed.
pub(super) fn kill_all(mut clones: Vec<HeldClone>) {
    let size = part_size(clones.len());
    thread::scope(|scope| {
        while !clones.is_empty() {
            let part = clones.split_off(clones.len().saturating_sub(size));
            scope.spawn(move || {
                for clone in part {
                    if let Err(failure) = clone.sandbox.kill() {
                        eprintln!(
                            "cube-bench: cannot kill a clone: {}; run `cube-bench sweep`",
                            failure.message
                        );
                    }
                }
            });
        }
    });
}

fn part_size(n: usize) -> usize {
    n.div_ceil(THREADS).max(1)
}
